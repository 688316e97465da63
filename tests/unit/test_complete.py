"""Completion in a shell, and --version: at once, without torch."""

import subprocess
import sys

import pytest

from meshtune import __version__
from meshtune.cli import app
from meshtune.commands.complete import beginnings, layouts
from meshtune.layout import TOKENS, Layout


@pytest.fixture
def complete(monkeypatch, capsys):
    """Complete the last of a command's words as bash cuts them: also at each =."""

    def completed(*words: str) -> list[str]:
        monkeypatch.setenv("_MESHTUNE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("meshtune", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit):
            app(prog_name="meshtune")
        return capsys.readouterr().out.split()

    return completed


def test_a_setting_is_completed_with_its_equals_sign(complete):
    assert complete("train", "train.weight_d") == ["train.weight_decay=", "train.weight_decay=0.0"]
    assert {"train.max_steps=", "train.seed="} < set(complete("train", "config.yaml", "train."))
    assert complete("generate", "runs/a", "data.chat_t")[0] == "data.chat_template="


def test_values_are_completed_behind_the_equals_sign(complete):
    assert complete("train", "method", "=") == ["full", "lora", "qlora"]
    assert complete("train", "method", "=", "l") == ["lora"]
    assert complete("train", "data.packing", "=", "") == ["true", "false"]
    assert complete("train", "method=l") == ["method=lora"]  # a shell that does not cut words
    assert complete("train", "data.train", "=", "tr") == []  # the shell's file names


def test_sections_follow_a_config_and_files_come_first(complete):
    assert complete("train", "") == []
    assert {"train.", "data.", "layout"} < set(complete("train", "config.yaml", ""))


def test_sub_commands_of_plan_are_completed_and_their_words(complete):
    assert complete("plan", "exp")[:2] == ["explain", "export"]
    assert {"max", "model.name="} < set(complete("plan", "m"))
    assert complete("plan", "explain", "dp2-zero3") == ["dp2-zero3x"]
    assert "cluster.gpus=" in complete("plan", "explain", "dp2", "cluster.gpus")
    assert "explain" not in complete("plan", "examples/plan.yaml", "e")


def test_layouts_are_completed_token_by_token(complete):
    assert {"auto", "dp", "zero3x", "tp"} < set(complete("plan", "layout", "="))
    assert complete("plan", "layout", "=", "dp2-zero") == ["dp2-zero1x", "dp2-zero2x", "dp2-zero3x"]
    after = complete("plan", "layout=dp2")
    assert {"layout=dp2-tp", "layout=dp2-full"} < set(after)
    assert "layout=dp2-dp" not in after


def test_each_beginning_of_a_token_makes_a_token():
    every = [word for token in TOKENS for word in beginnings(token.pattern)]
    assert sorted(every) == sorted(layouts("")[1:])
    for word in every:
        sized = "dp", "zero1x", "zero2x", "zero3x", "cp", "ulysses", "tp", "ep", "pp", "v", "mb", "ga"
        size = "2" * (word in sized)
        needed = {"sp": "tp2-", "regather": "tp2-sp-", "ep": "dp2-", "v": "pp2-zb-"}
        needed = needed.get(word, "pp2-" if not size else "")
        Layout.parse(f"{needed}{word}{size}")


def test_the_version_and_completion_import_no_torch():
    code = (
        "import sys, os\n"
        "from meshtune.cli import app\n"
        "for words in (['--version'], []):\n"
        "    sys.argv = ['meshtune', *words]\n"
        "    try: app(prog_name='meshtune')\n"
        "    except SystemExit as end: assert not end.code, end\n"
        "    os.environ |= {'_MESHTUNE_COMPLETE': 'complete_bash', 'COMP_WORDS': 'meshtune train method=',\n"
        "                   'COMP_CWORD': '2'}\n"
        "assert not {'torch', 'transformers', 'datasets'} & sys.modules.keys()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        f"meshtune {__version__}",
        "method=full",
        "method=lora",
        "method=qlora",
    ]


def test_layouts_of_a_dry_run_are_completed_one_after_the_other(complete):
    assert {"auto", "dp", "zero3x", "tp"} < set(complete("dryrun", "--layout", ""))
    assert complete("dryrun", "--layout", "zero3x8-mb1,dp2-zero") == [
        "zero3x8-mb1,dp2-zero1x", "zero3x8-mb1,dp2-zero2x", "zero3x8-mb1,dp2-zero3x"
    ]  # fmt: skip
