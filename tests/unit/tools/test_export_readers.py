"""`make test-exports`: what it counts, and when it is skipped or fails."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshtune.tools.export import EXPORTERS

SCRIPT = Path(__file__).parents[3] / "scripts" / "export_readers.py"


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("export_readers", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "export_readers", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["export_readers.py"])
    return module


def test_every_exporter_has_an_environment(readers: ModuleType) -> None:
    assert readers.ENVIRONMENTS.keys() == EXPORTERS.keys() | {"sky", "dstack"}


def test_layouts_are_counted_and_skipped_tests_found(readers: ModuleType) -> None:
    report = """<testsuites><testsuite>
        <testcase name="test_the_tool_reads_back_the_layout[megatron-mb1-ga1]"/>
        <testcase name="test_the_tool_reads_back_the_layout[megatron-dp2-mb1-ga4]"/>
        <testcase name="test_the_tool_reads_back_the_layout[megatron-x]"><skipped message="no"/></testcase>
        <testcase name="test_another[megatron]"/>
    </testsuite></testsuites>"""
    assert readers.counted(report) == (2, 1)


def test_pins_are_the_tools_own(readers: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tool-1.0.dist-info"
    folder.mkdir()
    lines = ["transformers<=5.6.0", "torch>=2.4", "huggingface-hub<2", 'peft>1; extra == "more"']
    required = "".join(f"Requires-Dist: {line}\n" for line in lines)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n{required}")
    assert [*readers.pinned(tmp_path, "tool")] == ["transformers<=5.6.0", "huggingface-hub<2"]


@pytest.mark.parametrize(
    ("lacking", "ci", "fails"),
    [
        (["megatron"], True, False),
        (["megatron", "axolotl"], False, False),
        (["megatron", "axolotl"], True, True),
    ],
)
def test_at_most_one_tool_may_be_missing_in_ci(
    lacking: list[str], ci: bool, fails: bool, readers: ModuleType, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("CI", "true") if ci else monkeypatch.delenv("CI", raising=False)
    (tmp_path / "lib" / "python3" / "site-packages").mkdir(parents=True)

    def made(tool: str) -> Path:
        if tool in lacking:
            raise readers.NotInstalled("no network")
        return tmp_path / "bin" / "python"

    monkeypatch.setattr(readers, "made", made)
    monkeypatch.setattr(readers, "read_back", lambda tool, python: 8)
    monkeypatch.setattr(
        readers, "distribution", lambda site, release: importlib.metadata.distribution("numpy")
    )
    if fails:
        with pytest.raises(SystemExit, match="1"):
            readers.main()
    else:
        readers.main()
    said = capsys.readouterr().out
    assert "megatron can't be installed: no network" in said and said.count("reads back 8 files") == 8 - len(
        lacking
    )
    assert ("skipped; with CI=true this fails." in said) == (len(lacking) > 1 and not ci)
