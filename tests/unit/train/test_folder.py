"""Which folder a run takes, what it resumes from, and that no start deletes what could still be used."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import refuses, says

from meshtune import config
from meshtune.api import output
from meshtune.errors import UserError
from meshtune.rundir import RunDir
from meshtune.train.checkpoint import Checkpoints

Settings = Callable[..., list[str]]


@pytest.fixture
def unfinished(settings: Settings, tmp_path: Path) -> RunDir:
    """A run of 9 steps, killed in step 8, with checkpoints of steps 3 and 6."""
    run = RunDir(tmp_path / "run")
    output.begin(run, wanted(settings), "layout: mb1-ga4\n", None).__exit__()
    for step in range(1, 8):
        run.append({"kind": "train", "step": step, "loss": 1.0})
    saver = Checkpoints(run.checkpoints, asynchronous=False)
    for step in (3, 6):
        saver.save(step, {"weight": torch.ones(3)}, {"data": None})
    return run


def wanted(settings: Settings, *more: str) -> config.Config:
    return config.load(None, settings("train.max_steps=9", *more))


def choose(settings: Settings, *more: str) -> tuple[Path, int | None, list[str]]:
    """(folder, step to resume from, sentences) of the same command."""
    told: list[str] = []
    decision, step = output.choose_folder(wanted(settings, *more), 9, told.append)
    return decision.run.path, step, told


def files(run: RunDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.path.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("names", [(".lock",), (".lock", ".config.yaml.77.tmp")])
def test_a_run_killed_before_its_settings_were_written_is_begun_again(
    names: tuple[str, ...], settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / "run" / name).touch()
    assert choose(settings) == (tmp_path / "run", None, [])
    (tmp_path / "run" / "notes.txt").touch()
    with refuses(UserError):
        choose(settings)


@pytest.mark.parametrize("damage", ["manifest", "bits"])
def test_without_a_whole_checkpoint_an_unfinished_run_is_refused_and_kept(
    damage: str, unfinished: RunDir, settings: Settings
) -> None:
    for step in (3, 6):
        place = unfinished.checkpoints / f"step-{step}"
        if damage == "manifest":
            (place / "manifest.json").rename(place / "manifest.away")
        else:
            (place / "__0_0.distcp").write_bytes(b"\0" * (place / "__0_0.distcp").stat().st_size)
    before = files(unfinished)
    with pytest.raises(UserError) as raised:
        choose(settings)
    first, *rest = raised.value.problems
    says(first)
    assert any("step-6" in sentence for sentence in rest)
    assert files(unfinished) == before
    anew = choose(settings, "checkpoint.resume=never", "output_exists=new")
    assert anew[0] == unfinished.path.with_name("run-2")


def test_a_checkpoint_that_can_not_be_read_is_not_taken_for_damaged(
    unfinished: RunDir, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.open

    def failing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.parent.name == "step-6" and path.suffix == ".distcp":
            raise OSError(5, "Input/output error")
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    with refuses(UserError):
        choose(settings)


@pytest.mark.parametrize("content", [None, b"\xff\x00 no row at all"])
def test_rows_that_are_gone_are_said(content: bytes | None, unfinished: RunDir, settings: Settings) -> None:
    if content is None:
        unfinished.metrics_file.unlink()
    else:
        unfinished.metrics_file.write_bytes(content)
    path, step, told = choose(settings)
    assert (path, step) == (unfinished.path, 6)
    (sentence,) = told
    says(sentence)


def test_beginning_again_at_step_1_is_said(unfinished: RunDir, settings: Settings) -> None:
    for step in (3, 6):
        (unfinished.checkpoints / f"step-{step}").rename(unfinished.checkpoints / f".tmp-gone-{step}")
    path, step, (sentence,) = choose(settings)
    assert (path, step) == (unfinished.path, None)
    says(sentence)


def test_a_finished_run_without_checkpoints_is_not_made_longer(
    unfinished: RunDir, settings: Settings
) -> None:
    unfinished.append({"kind": "end", "step": 7, "status": "finished"})
    for path in unfinished.checkpoints.iterdir():
        path.rename(unfinished.path / f"{path.name}-away")
    with refuses(UserError):
        choose(settings)
    other = choose(settings, "train.learning_rate=2e-3", "output_exists=new")
    assert other[0] == unfinished.path.with_name("run-2")


def test_a_checkpoint_in_a_folder_of_another_step_is_no_good_one(
    unfinished: RunDir, settings: Settings
) -> None:
    (unfinished.checkpoints / "step-6").rename(unfinished.checkpoints / "step-9")
    _, step, told = choose(settings)
    assert step == 3
    says(told)


def test_a_manifest_that_is_a_pipe_is_not_opened(unfinished: RunDir, settings: Settings) -> None:
    manifest = unfinished.checkpoints / "step-6" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    _, step, (sentence,) = choose(settings)
    assert step == 3
    says(sentence)


def test_a_row_whose_step_is_text_keeps_no_run_from_going_on(unfinished: RunDir, settings: Settings) -> None:
    before = choose(settings)
    unfinished.append({"kind": "train", "step": "x"})
    assert choose(settings) == before


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_lock_that_is_no_file_is_named(
    make: Callable[[Path], None], unfinished: RunDir, settings: Settings
) -> None:
    (unfinished.path / ".lock").unlink()
    make(unfinished.path / ".lock")
    with refuses(UserError):
        output.begin(unfinished, wanted(settings), "", 6)


def test_leftovers_of_killed_processes_go_and_logs_are_those_of_one_start(
    unfinished: RunDir, settings: Settings
) -> None:
    (unfinished.path / ".model.writing-77").mkdir()
    (unfinished.path / ".model.writing-77" / "model.safetensors").touch()
    (unfinished.path / ".report.html.77.tmp").touch()
    (unfinished.path / ".samples.jsonl.77.tmp").touch()
    (unfinished.path / ".model.old-77").mkdir()
    unfinished.report_file.touch()
    for start in ("first", "second"):
        log = unfinished.logs / "rank-1.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text(f"{start} start")
        output.begin(unfinished, wanted(settings), "", 6).__exit__()
        assert not log.exists()
        assert (unfinished.logs / "before" / "rank-1.log").read_text() == f"{start} start"
    names = {path.name for path in unfinished.path.iterdir()}
    assert names == {  # and no report of the start before: a run is finished with its own
        ".lock", "config.yaml", "plan.yaml", "metrics.jsonl", "checkpoints", "logs", "model",
    }, "a model that was being replaced has its name back"  # fmt: skip
