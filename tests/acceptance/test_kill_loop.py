"""A dozen kills of `make kill-loop`, each window at least once; and what its comparison notices."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kill_loop import draw
from kills import CASES, VICTIMS, WINDOWS, Chain, Kill, Straight, differences, leftovers, straight_run

from meshtune.rundir import RunDir
from meshtune.train import loop

DOZEN = {
    "one rank": ("one rank", "fork", ["all/data/0", "all/before config.yaml/0",
                                      "all/checkpoint/0.6", "all/export/0.5", "all/report/0"]),
    "two ranks": ("zero1x2", "fork", ["launcher/start-up/0.8", "rank/export/0.1"]),
    "experts": ("experts zero3x2-ep2", "fork", ["launcher/checkpoint/0.5"]),
    "host states": ("host states zero3x2", "fork", ["all/training/0.4"]),
    "4 bits": ("QLoRA zero3x2", "fork", ["rank/training/0.3"]),
    "a stopped rank": ("LoRA zero3x2", "fork", ["rank stopped/before the group/0"]),
    "torchrun": ("zero1x2", "torchrun", ["launcher/training/0.2"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def straight(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Straight]:
    """Function(case) -> its run that nobody killed."""
    runs: dict[str, Straight] = {}

    def of(case: str) -> Straight:
        if case not in runs:
            runs[case] = straight_run(case, tiny, tmp_path_factory.mktemp("straight"))
        return runs[case]

    return of


@pytest.mark.all
@pytest.mark.parametrize(("case", "how", "kills"), DOZEN.values(), ids=DOZEN)
def test_a_dozen_kills_are_survived_bit_for_bit(
    case: str, how: str, kills: list[str], straight: Any, tiny: Path, tmp_path: Path
) -> None:
    missing = [Kill(*kill.split("/")[:2], float(kill.split("/")[2])) for kill in kills]
    for attempt in range(5):  # on a busy machine a window of milliseconds may pass unseen
        folder = tmp_path / str(attempt)
        folder.mkdir()
        chain = Chain(case, tuple(missing), how).run(straight(case), tiny, folder)
        assert not chain.problems
        missing = [kill for kill in missing if kill not in chain.done]
        if not missing:
            return
    pytest.fail(f"windows that were not seen: {missing}")


def test_the_dozen_has_every_window_and_victim_and_seeds_draw_them_too() -> None:
    dozen = [kill.split("/") for _, _, kills in DOZEN.values() for kill in kills]
    assert len(dozen) == 12
    chains = [draw(number, 0) for number in range(60)]
    drawn = [(kill.victim, kill.window) for chain in chains for kill in chain.kills]
    for pairs in ([(victim, window) for victim, window, _ in dozen], drawn):
        assert {window for _, window in pairs} == set(WINDOWS)
        assert {victim for victim, _ in pairs} == set(VICTIMS)
    assert {chain.case for chain in chains} == set(CASES)
    assert {chain.how for chain in chains} == {"fork", "command", "torchrun"}
    assert chains == [draw(number, 0) for number in range(60)]
    assert chains != [draw(number, 1) for number in range(60)]


def lose_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    append = RunDir.append
    monkeypatch.setattr(
        RunDir, "append", lambda run, row: None if row.get("step") == 20 else append(run, row)
    )


def keep_rows_after_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunDir, "drop_after", lambda run, step: None)


def forget_the_place_in_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = loop.restore

    def forgetting(run: Any, step: int) -> None:
        restore(run, step)
        run.progress.data = {**run.progress.data, "position": 0}

    monkeypatch.setattr("meshtune.api.build.restore", forgetting)


@pytest.mark.all
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lose_a_row, "train rows are of steps"),
        (keep_rows_after_the_checkpoint, "train rows are of steps"),
        (forget_the_place_in_the_data, "have other numbers"),
    ],
)
def test_a_broken_version_does_not_survive_a_kill(
    broken: Any, said: str, straight: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = straight("one rank")
    broken(monkeypatch)  # in the forks too
    chain = Chain("one rank", (Kill("all", "training", 0.4),)).run(whole, tiny, tmp_path)
    assert chain.done
    assert any(said in problem for problem in chain.problems), chain.problems


def write_run(folder: Path) -> RunDir:
    """A run folder as far as the comparison reads it."""
    run = RunDir(folder / "run")
    for step in (1, 2):
        run.append({"kind": "train", "step": step, "loss": 1 / 3, "step_seconds": 0.5})
    run.append({"kind": "eval", "step": 2, "loss": 0.25, "seconds": 0.1})
    run.append({"kind": "end", "step": 2, "status": "finished"})
    run.append_sample({"step": 2, "row": 0, "prompt": "Is it?", "answer": "yes"})
    for file, content in (("model/model.safetensors", b"12345678"), ("report.html", b"<html>")):
        (run.path / file).parent.mkdir(exist_ok=True)
        (run.path / file).write_bytes(content)
    for name in ("cache", "tmp"):
        (folder / name).mkdir()
    return run


def edit(file: str, before: str, after: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        text = (run / file).read_text()
        assert before in text
        (run / file).write_text(text.replace(before, after))

    return change


ROW = '{"kind": "train", "step": 2, "loss": 0.3333333333333333, "step_seconds": 0.5}\n'


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (edit("metrics.jsonl", ROW, ""), "train rows are of steps [1]"),
        (edit("metrics.jsonl", ROW, 2 * ROW), "train rows are of steps [1, 2, 2]"),
        (edit("metrics.jsonl", ROW, ROW.replace("33,", "34,")), "train rows of steps [2] have other numbers"),
        (edit("metrics.jsonl", "0.25", "0.26"), "eval rows of steps [2] have other numbers"),
        (edit("metrics.jsonl", "finished", "stopped"), "it ended otherwise"),
        (edit("samples.jsonl", "yes", "no"), "samples.jsonl has other answers"),
        (edit("model/model.safetensors", "5", "6"), "model/model.safetensors has other bytes"),
        (lambda run: shutil.rmtree(run / "model"), "model/ has ['model.safetensors'] too many or too few"),
        (lambda run: (run / "checkpoints" / "step-9").mkdir(parents=True), "checkpoints/ has ['step-9']"),
        (lambda run: (run / "report.html").unlink(), "it has no report.html"),
        (lambda run: (run / "checkpoints" / ".tmp-step-9").mkdir(parents=True), "/.tmp-step-9 is left"),
        (lambda run: (run / ".model.writing-7").mkdir(), "run/.model.writing-7 is left"),
        (lambda run: (run.parent / "cache" / ".x").touch(), "cache/.x is left"),
        (lambda run: (run.parent / "tmp" / "meshtune-x").mkdir(), "tmp/meshtune-x is left"),
    ],
)
def test_the_comparison_sees(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        run = write_run(tmp_path / name)
    whole = RunDir(tmp_path / "whole" / "run")
    assert not differences(whole, run) + leftovers(tmp_path / "killed")
    damage(run.path)
    problems = differences(whole, run) + leftovers(tmp_path / "killed")
    assert any(said in problem for problem in problems), problems
