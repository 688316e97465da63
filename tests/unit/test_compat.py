"""The table of what meshtune uses of torch's and transformers' insides, against the installed versions."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshtune
from meshtune import compat
from meshtune.compat import INSIDES, Inside, missing, pairs

SOURCE = Path(meshtune.__file__).parent
LIBRARIES = ("torch", "transformers")


@pytest.mark.parametrize("inside", INSIDES, ids=lambda inside: inside.path)
def test_the_installed_version_has_each_inside(inside: Inside) -> None:
    assert missing(inside) == ""


def test_a_name_or_a_parameter_that_is_gone_is_said() -> None:
    assert "tree_gone" in missing(Inside("torch.utils._pytree:tree_gone"))
    assert "renamed" in missing(Inside("torch.utils._pytree:tree_leaves", "tree renamed"))
    assert "no_such" in missing(Inside("torch.no_such:name"))


def private_imports(file: Path) -> Iterator[str]:
    """Yield "module:name" of each import that has a private part, of torch and transformers."""
    for node in ast.walk(ast.parse(file.read_text())):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and module.split(".")[0] in LIBRARIES:
            for alias in node.names:
                if any(part.startswith("_") for part in (*module.split("."), alias.name)):
                    yield f"{module}:{alias.name}"


def test_every_private_import_is_in_the_table() -> None:
    known = {inside.path for inside in INSIDES}
    used = {path: file.name for file in SOURCE.rglob("*.py") for path in private_imports(file)}
    assert {path: file for path, file in used.items() if path not in known} == {}


def test_the_pairs_are_in_order() -> None:
    tested = list(pairs().values())
    for name in LIBRARIES:
        versions = [tuple(map(int, pair[name].split("."))) for pair in tested]
        assert versions == sorted(versions)


def test_the_pages_name_the_tested_versions() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        assert compat.tested_versions() in (SOURCE.parents[1] / page).read_text(), page
