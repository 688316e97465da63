"""Fixture that migrates a tree of keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtune.tools.migrate import Migrated, migrate


@pytest.fixture
def migrated(tmp_path: Path) -> Callable[..., Migrated]:
    """Function(tree, gpus=…, launcher=…, overrides=…, **more keys) that migrates trees as YAML files."""

    def of(
        tree: dict[str, Any],
        gpus: int | None = None,
        launcher: dict[str, Any] | None = None,
        overrides: tuple[str, ...] = (),
        **more: Any,
    ) -> Migrated:
        file, beside = tmp_path / "theirs.yaml", tmp_path / "launcher.yaml"
        file.write_text(yaml.safe_dump({**tree, **more}))
        beside.write_text(yaml.safe_dump(launcher))
        return migrate(file, gpus=gpus, launcher=beside if launcher else None, overrides=overrides)

    return of
