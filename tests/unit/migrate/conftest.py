"""Fixture that migrates a tree of keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtune.migrate.convert import Migrated, migrate


@pytest.fixture
def migrated(tmp_path: Path) -> Callable[..., Migrated]:
    """Function(tree, gpus=…, overrides=…, **more keys) that migrates them as a YAML file."""

    def of(tree: dict[str, Any], gpus: int = 1, overrides: tuple[str, ...] = (), **more: Any) -> Migrated:
        file = tmp_path / "theirs.yaml"
        file.write_text(yaml.safe_dump({**tree, **more}))
        return migrate(file, gpus=gpus, overrides=overrides)

    return of
