"""W&B offline and MLflow's file store, with their own libraries: labels, settings, rows, one tracked run."""

import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshtune import config
from meshtune.api import build
from meshtune.errors import Interrupted
from meshtune.train import loop

pytestmark = pytest.mark.ci
LABELS = ("log.project=shapes", "log.name=first", "log.tags=[baseline,lr=high]", "log.group=sizes")
Settings = Callable[..., list[str]]


def interrupted_and_resumed(words: list[str]) -> Path:
    """Train two of four steps, then the others with another eval.max_new_tokens; returns the run folder."""
    run = build.build(config.load(None, words))
    save = loop.save

    def stop(run: loop.Run) -> None:
        save(run)
        run.stop.requested = "SIGTERM" if run.progress.step == 2 else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save", stop)
        with pytest.raises(Interrupted):
            loop.train(run)
    run = build.build(config.load(None, [*words, "eval.max_new_tokens=9"]))
    loop.train(run)
    return run.folder.path


def records(file: Path) -> Iterator[Any]:
    """Yield the whole records of a .wandb file: LevelDB's log format after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    content, place, block, parts = file.read_bytes(), 7, 32768, b""
    while place < len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        if place + 7 + size > len(content):  # still being written
            return
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def written(file: Path) -> list[Any]:
    """Wait for a .wandb file's last record, of the run's end, and return all: W&B's process writes what it
    still has after `finish` has returned.
    """
    found: list[Any] = []
    for _ in range(600):
        found = list(records(file))
        if any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end after a minute: {len(found)} records")


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb is not installed")
def test_wandb_has_one_run_with_labels_settings_and_rows(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = interrupted_and_resumed(
        settings("log.to=[wandb]", "checkpoint.every=2", "eval.samples=1", *LABELS)
    )
    files = sorted(folder.glob("logs/wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2, "one for each start; `wandb sync` joins them by their id"
    assert {file.stem for file in files} == {f"run-{(folder / 'logs/wandb.id').read_text()}"}
    steps, values = [], {}
    for file in files:
        each = written(file)
        (start, *_) = (record.run for record in each if record.HasField("run"))
        assert (start.project, start.display_name, start.run_group) == ("shapes", "first", "sizes")
        assert list(start.tags) == ["baseline", "lr=high"]
        for record in each:
            for item in record.config.update:
                values[item.key or tuple(item.nested_key)] = json.loads(item.value_json)
            row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            steps += [int(row["step"])] if "train/loss" in row else []
    assert steps == [1, 2, 3, 4]
    assert "seed" in str(values) and "layout" in str(values["run"]), "settings, and the run row's facts"


@pytest.mark.skipif(not importlib.util.find_spec("mlflow"), reason="mlflow is not installed")
def test_mlflow_has_one_run_with_labels_settings_and_rows(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    import mlflow  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path / 'mlruns'}")
    interrupted_and_resumed(settings("log.to=[mlflow]", "checkpoint.every=2", "eval.samples=1", *LABELS))
    assert "INFO" not in capfd.readouterr().err
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'shapes'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    assert run.data.params["train.seed"] == "42" and run.data.params["run.layout"].startswith("mb")
    assert run.data.tags["baseline"] == "true" and run.data.tags["lr"] == "high"
    assert run.data.tags["group"] == "sizes"
    assert run.data.params["eval.max_new_tokens"] == "64" and run.data.tags["eval.max_new_tokens"] == "9"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4]
