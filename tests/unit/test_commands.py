"""Help of each command, and answers to commands, options and words of other tools."""

import os
from pathlib import Path

import pytest
import typer
from golden import refuses

from meshtune.cli import app
from meshtune.commands.command import EXAMPLES
from meshtune.commands.plan import SUBCOMMANDS
from meshtune.commands.submit import SUBCOMMANDS as OF_JOBS
from meshtune.errors import UserError
from meshtune.tools.table import toml

COMMANDS = typer.main.get_command(app)


@pytest.mark.ci
def test_each_command_has_an_example_that_it_can_read() -> None:
    names = {*COMMANDS.commands, *(f"plan {name}" for name in SUBCOMMANDS)}  # pyright: ignore
    names |= {f"submit {name}" for name in OF_JOBS}
    assert {*EXAMPLES} == names
    for name, example in EXAMPLES.items():
        words = example.replace("'Why is the sky blue?'", "why").split()[1:]
        assert words[: len(name.split())] == name.split()
        COMMANDS.commands[words[0]].make_context(words[0], words[1:])  # pyright: ignore


@pytest.mark.ci
def test_help_has_groups_whole_lines_and_flags_without_a_type(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        with pytest.raises(SystemExit):
            COMMANDS.main([*words, "--help"])
        return capsys.readouterr().out

    text = shown()
    assert (
        all(f" {panel} " in text for panel in ("Plan", "Train", "Measure", "Look")) and "<bool>" not in text
    )
    text = shown("train")
    assert "Starts its own" in text and "meshtune train run.yaml" in text and "docs/settings.md" in text
    assert "<bool>" not in text and "Example: meshtune plan explain" in shown("plan", "explain")


@pytest.mark.ci
@pytest.mark.parametrize(
    "words",
    [
        "train --learning-rate 1e-4",
        "sweep sweep.yaml --slurm",
        "train --lr=3",
        "train --config run.yaml",
        "plan llama-3.1-8b",
        "train rows.jsonl",
        "plan model.name=qwen3-8b layout=fsdp8",
        "report runs",
        "eval runs/nothing",
        "config --method dora",
        "dpo run.yaml",
        "finetune run.yaml",
        "export runs/newer --merge",
        "plan max rtx-4090",
        "merge runs/newer",
        "export runs/newer to --format gguf",
        "train model.name=a load_in_4bit=true",
        "train model.name=a train.device=mps method=dora",
    ],
)
def test_a_likely_spelling_is_answered_with_what_to_type(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("newer", "older")):
        run = Path("runs", name)
        run.mkdir(parents=True)
        for file in ("config.yaml", "metrics.jsonl"):
            (run / file).write_text("")
        os.utime(run, (1000 - age, 1000 - age))
    with refuses(UserError):
        COMMANDS.main(words.split(), standalone_mode=False)


def test_the_page_has_a_section_with_the_sentences_of_each_row() -> None:
    page = (Path(__file__).parents[2] / "docs" / "unsupported.md").read_text("utf-8")
    sections = {text.split("\n")[0].lower(): text for text in page.split("\n## ")[1:]}
    rows = toml("unsupported")
    assert [*sections] == [*rows]
    for name, row in rows.items():
        text = sections[name]
        assert row["why"][1:] in text and row["write"] in text and row["more"] in text
        assert all(
            f"{word}`" in text
            for kind in ("commands", "options", "keys")
            for word in row.get(kind, "").split()
        )
