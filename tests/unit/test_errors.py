"""Errors that others raise become ours, and their causes can be read."""

import importlib
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from golden import refuses

from meshtune import cli, config, errors
from meshtune.api import build
from meshtune.api import train as command
from meshtune.errors import NothingFits, UserError, memory_explained
from meshtune.launch import Rank
from meshtune.rundir import RunDir
from meshtune.train.callbacks import Hooks


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 274877906944 bytes."),
    ],
)
def test_an_allocation_that_fails_is_a_sentence(error: Exception) -> None:
    with refuses(NothingFits), memory_explained():
        raise error


def test_other_errors_are_bugs_of_ours() -> None:
    with pytest.raises(RuntimeError, match="shape"), memory_explained():
        raise RuntimeError("shape")


def test_the_start_page_lists_every_exit_code() -> None:
    codes = {each.exit_code for each in vars(errors).values() if hasattr(each, "exit_code")}
    text = Path(__file__).parents[2].joinpath("docs", "start.md").read_text("utf-8")
    listed = re.findall(r"(?<=[:,] )\d+|(?<=,\n)\d+", text.partition("Exit codes")[2].partition("`")[0])
    assert {*map(int, listed)} == codes | {0, errors.INTERRUPTED}


def test_an_import_that_fails_after_ctrl_c_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(**_: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        importlib.import_module("no_such_module")

    monkeypatch.setattr(cli, "app", app)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    signal.signal(signal.SIGINT, handler)
    assert ended.value.code == errors.INTERRUPTED


def test_the_traceback_behind_a_sentence_is_in_the_runs_log(
    settings: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, claimed: Callable[[RunDir], None], **options: object) -> None:
        claimed(RunDir(tmp_path / "run").create())
        try:
            {}["axes https://host/rows.jsonl?key=SECRET"]
        except KeyError as error:
            raise UserError("The checkpoint has no axes.") from error

    monkeypatch.setattr(build, "build", fails)
    with refuses(UserError):
        command.train_rank(Rank(), config.load(None, settings()), None, lambda run: None, Hooks())
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "KeyError: 'axes https://host/rows.jsonl?…'" in log and "The checkpoint has no axes." in log
