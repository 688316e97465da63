"""Callbacks: four moments on the main rank, and a stop at the same step on all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from golden import refuses

from meshtune import Callback, Training, config, train
from meshtune.api.train import check_spawned
from meshtune.errors import RankFailed, UserError
from meshtune.rundir import Row
from meshtune.train.callbacks import Hooks


class Notes(Callback):
    """Writes a line for each moment to a file: a rank's process has its own memory."""

    def __init__(self, file: Path, *, stop_at: int = 0, moment: str = "step") -> None:
        self.file, self.stop_at, self.moment = file, stop_at, moment

    def note(self, moment: str, training: Training, row: Row) -> None:
        with self.file.open("a") as file:
            file.write(f"{moment} {training.step}/{training.steps} {row.get('status', '')}\n")
        if moment == self.moment and training.step == self.stop_at:
            training.stop("it is enough")

    def on_start(self, training: Training, row: Row) -> None:
        assert row["kind"] == "run" and training.folder.exists()
        self.note("start", training, row)

    def on_step(self, training: Training, row: Row) -> None:
        assert row["loss"] > 0
        self.note("step", training, row)

    def on_eval(self, training: Training, row: Row) -> None:
        self.note("eval", training, row)

    def on_end(self, training: Training, row: Row) -> None:
        assert (training.folder / "model" / "config.json").exists()
        self.note("end", training, row)


class Broken(Callback):
    def on_step(self, training: Training, row: Row) -> None:
        if row["step"] == 2:
            raise ZeroDivisionError("a bug of the callback")


@pytest.mark.ci
def test_a_callback_sees_four_moments_and_can_stop(
    settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    notes = Notes(tmp_path / "notes", stop_at=2)
    result = train(config.load(None, settings("train.max_steps=9", "eval.every=1")), callbacks=[notes])
    lines = (tmp_path / "notes").read_text().splitlines()
    assert lines == ["start 0/9 ", "step 1/9 ", "eval 1/9 ", "step 2/9 ", "eval 2/9 ", "end 2/9 finished"]
    assert result.summary.steps == 2 and (result.folder / "checkpoints" / "step-2").exists()


@pytest.mark.parametrize("moment", cases(["step", "eval"], ci=1))
def test_all_ranks_stop_at_the_same_step(
    moment: str, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = settings("train.max_steps=9", "eval.every=2", "layout=zero3x2-mb1", "train.global_batch_size=4")
    notes = Notes(tmp_path / "notes", stop_at=2, moment=moment)
    result = train(config.load(None, words), callbacks=[notes])
    assert (tmp_path / "notes").read_text().splitlines()[-2:] == ["eval 2/9 ", "end 2/9 finished"]
    assert result.summary.steps == 2 and result.summary.status == "finished"


@pytest.mark.all
def test_an_error_of_a_callback_ends_the_run(settings: Callable[..., list[str]], tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug of the callback"):
        train(config.load(None, settings()), callbacks=[Broken()])
    words = settings("layout=dp2-mb1", "train.global_batch_size=4", f"output={tmp_path / 'two'}")
    words.append("checkpoint.every=1")
    with pytest.raises(RankFailed, match=r"(?s)a bug of the callback.*the same command resumes"):
        train(config.load(None, words), callbacks=[Broken()])


def test_what_is_no_callback_is_refused_with_all_else(settings: Callable[..., list[str]]) -> None:
    calls: list[Any] = [print]
    with refuses(UserError):
        train(
            config.load(None, settings("train.label_smoothing=0.1")),
            loss=lambda logits, labels: (logits.sum(), 1),
            callbacks=calls,
        )


def test_what_spawned_ranks_can_not_import_is_refused() -> None:
    check_spawned(Hooks(None, (Broken(),)))
    with refuses(UserError):
        check_spawned(Hooks(lambda logits, labels: (logits.sum(), 1)))
