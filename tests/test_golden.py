"""Golden files: a changed text fails with the diff, and rewriting drops what no test says any more."""

from collections.abc import Callable
from pathlib import Path

import golden
import pytest

TEST = "tests/unit/plan/test_a.py::test_it"


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Function(*texts) that makes `TEST` the running test and `texts` its golden entries."""

    def write(*texts: str) -> None:
        monkeypatch.setattr(golden, "FOLDER", tmp_path)
        monkeypatch.setattr(golden, "REWRITE", False)
        monkeypatch.setattr(golden, "_said", {})
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{TEST} (call)")
        golden.write(tmp_path / "plan.txt", {TEST: [*texts], f"{TEST}[x]": ["another test's"]})

    return write


def test_a_text_is_compared_with_the_tests_next_entry(entries: Callable[..., None]) -> None:
    entries("One.\n\nTwo.", "Three.")
    golden.says(["One.", "", "Two."])
    with pytest.raises(pytest.fail.Exception, match=r"make golden[\s\S]*-Three\.\n\+Tree\."):
        golden.says("Tree.")
    with pytest.raises(pytest.fail.Exception, match=r"\+Three\."):
        golden.says("Three.")


def test_a_refusal_has_its_type_and_its_words(entries: Callable[..., None]) -> None:
    entries("No.")
    with golden.refuses(ValueError) as info:
        raise ValueError("No.")
    assert info.value.args == ("No.",)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), golden.refuses(ValueError):
        pass


def test_folders_of_tests_and_versions_are_replaced(tmp_path: Path) -> None:
    repository = Path(__file__).parents[1]
    text = f"version 0.1.0, torch 2.13.0+cpu, '{tmp_path}/a.yaml', {repository}/README.md, version 2"
    assert (
        golden.plain(text)
        == "version <version>, torch <version>, '<tmp>/a.yaml', <repo>/README.md, version 2"
    )


def test_rewriting_drops_what_no_test_says_any_more() -> None:
    here, other, gone = "tests/test_golden.py", "tests/test_house.py", "tests/test_gone.py"
    old = {f"{file}::test_{name}": ["old"] for file in (here, other, gone) for name in ("a", "b[1]", "b[2]")}
    new = {f"{here}::test_a": ["new"], f"{here}::test_b[3]": ["new"]}
    others = {test: texts for test, texts in old.items() if test.startswith(other)}
    assert golden.merged(old, new, {here}, unsure=set()) == others | new
    kept = golden.merged(old, new, {here}, unsure={f"{here}::test_b"})
    assert kept == others | {
        f"{here}::test_{name}": [text] for name, text in (("a", "new"), ("b[1]", "old"), ("b[2]", "old"))
    }


def test_tests_that_use_golden_files_are_found(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text(
        "def helper(): says('x')\ndef test_a(): helper()\ndef test_b(): pass\ndef test_c():\n"
        "    with refuses(ValueError): pass\n"
    )
    assert golden.users(file) == ["test_a", "test_c"]
    assert golden.area("tests/unit/plan/test_a.py::test_it[x/y]") == "plan"
    assert golden.area("tests/acceptance/test_a.py::test_it") == "acceptance"
    assert golden.area("tests/test_a.py::test_it") == "house"
