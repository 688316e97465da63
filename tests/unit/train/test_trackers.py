import io
import json
import logging
import math
import re
import subprocess
import sys
import types

import pytest
from golden import refuses, says
from rich.console import Console

from meshtune.errors import UserError
from meshtune.rundir import RunDir
from meshtune.train.callbacks import Callback, Callbacks, Training
from meshtune.train.console import Course
from meshtune.train.dashboards import Labels
from meshtune.train.trackers import Metrics

NUMBERS = {
    "loss": 2.5,
    "grad_norm": 1.25,
    "learning_rate": 1e-4,
    "tokens": 1000,
    "label_tokens": 400,
    "step_seconds": 0.5,
    "data_seconds": 0.01,
}


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "run").create()


def console(*, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), width=110, force_terminal=terminal, force_interactive=terminal, color_system=None
    )


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


class Recorder:
    """Stands for wandb, mlflow and what they return: it records each call and answers any other with
    itself.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []
        self.config = self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        started = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return started if name == "start_run" else self

        return call

    def named(self, name: str) -> list[tuple[tuple, dict]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def test_an_impossible_mfu_is_said_once_with_its_numbers():
    out = console()
    metrics = Metrics([kept := Kept()], console=out, peak_flops_per_second=10e12)
    for step in (1, 2):
        metrics.train(step=step, **NUMBERS, flops=6e12)
    assert [row["mfu"] for row in kept.rows] == [None, None]
    assert text(out).count("can't be") == 1
    says(text(out))


# Where rows go #


class Kept:
    """A tracker that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.closed: list[bool] = []

    def log(self, row):
        self.rows.append(row)

    def close(self, *, failed=False):
        self.closed.append(failed)


class Broken(Kept):
    def log(self, row):
        raise ConnectionError("server is away")


@pytest.mark.parametrize("to", [["jsonl"], ["console"], []])
def test_rows_are_in_the_file_as_soon_as_logged_whatever_log_to_names(to, run):
    with Metrics.open(run, to, course=Course(2), console=console()) as metrics:
        metrics.start(model="m", method="full")
        metrics.train(step=1, **NUMBERS)
        assert [row["kind"] for row in run.rows()] == ["run", "train"]


def test_ranks_other_than_0_write_nothing(run, capsys):
    with Metrics.open(run, ["console", "jsonl", "tensorboard"], rank=1, course=Course(1)) as metrics:
        metrics.start(model="m")
        metrics.train(step=1, **NUMBERS)
        metrics.log_line("hello")
    assert list(run.path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_every_3_keeps_the_first_the_last_each_third_and_skipped_steps():
    kept = Kept()
    metrics = Metrics([kept], every=3, total_steps=10)
    for step in range(1, 11):
        metrics.train(step=step, **NUMBERS, skipped=step == 5)
    assert [row["step"] for row in kept.rows] == [1, 3, 5, 6, 9, 10]
    assert [row["step"] for row in kept.rows if row.get("skipped")] == [5]


def test_callbacks_get_each_step_whatever_log_every_is(tmp_path):
    seen = []

    class Steps(Callback):
        def on_step(self, training, row):
            seen.append(row["step"])

    kept, steps = Kept(), Steps()
    metrics = Metrics([kept, Callbacks([steps], Training(tmp_path, 7))], every=5, total_steps=7)
    for step in range(1, 8):
        metrics.train(step=step, **NUMBERS)
    assert [row["step"] for row in kept.rows] == [1, 5, 7] and seen == [*range(1, 8)]


def test_a_tracker_that_fails_is_dropped_and_the_run_goes_on():
    kept, out = Kept(), console()
    metrics = Metrics([Broken(), kept], console=out)
    for step in (1, 2):
        metrics.train(step=step, **NUMBERS)
    assert [row["step"] for row in kept.rows] == [1, 2]
    assert text(out) == "log.to: broken failed and gets no more rows: server is away\n"


def test_trackers_learn_that_a_run_failed():
    kept = Kept()
    with pytest.raises(KeyError), Metrics([kept]):
        raise KeyError
    assert kept.closed == [True]


def test_every_unknown_or_missing_tracker_is_named_at_once_with_the_remedy(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # nothing is installed
    with refuses(UserError) as raised:
        Metrics.open(run, ["wandb", "comet", "mlflow"], course=Course(1))
    assert len(raised.value.problems) == 3


def test_a_tracker_that_cannot_start_is_a_user_error_and_closes_the_others(run, monkeypatch):
    wandb = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))  # has no set_experiment
    with refuses(UserError):
        Metrics.open(run, ["wandb", "mlflow"], course=Course(1), console=console())
    assert wandb.named("finish") == [((), {"exit_code": 1})]


def test_tensorboard_gets_the_scalars_of_rows(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Metrics.open(run, ["tensorboard"], course=Course(2), console=console()) as metrics:
        metrics.start(model="m")
        metrics.train(step=1, **NUMBERS)
        metrics.evaluate(step=1, loss=2.0, label_tokens=10)
        metrics.train(step=2, **NUMBERS | {"loss": math.nan})
    events = accumulator.EventAccumulator(str(run.logs / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.5)]
    assert [event.step for event in events.Scalars("train/tokens_per_second_per_gpu")] == [1, 2]
    assert "eval/perplexity" in events.Tags()["scalars"]


LABELS = Labels(project="p", name="n", tags=("baseline", "lr=high"), group="g")


def test_wandb_gets_settings_and_rows_and_a_resumed_run_goes_on(run, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    wandb = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for start, labels in ((0, Labels()), (1, LABELS)):
        settings = {"train": {"seed": 1}}
        options = {"settings": settings, "labels": labels}
        with Metrics.open(run, ["wandb"], course=Course(2, start), **options) as metrics:
            assert (run.logs / "wandb.id").exists(), "written before W&B hears of it"
            metrics.start(model="m")
            metrics.train(step=start + 1, **NUMBERS)
    first, second = (kwargs for _, kwargs in wandb.named("init"))
    assert first["id"] == second["id"]
    assert (first["project"], first["name"], first["tags"], first["group"]) == ("meshtune", "run", None, None)
    assert (second["project"], second["name"], second["group"]) == ("p", "n", "g")
    assert second["tags"] == ["baseline", "lr=high"]
    values = [args[0] for args, kwargs in wandb.named("update") if kwargs == {"allow_val_change": True}]
    assert values == [{"train": {"seed": 1}}, {"run": {"kind": "run", "model": "m"}}] * 2
    assert [args[0]["step"] for args, _ in wandb.named("log")] == [1, 2]
    assert wandb.named("log")[0][0][0]["train/loss"] == 2.5


class Experiments(Recorder):
    """Stands for mlflow: finds the runs that were started, by their tag."""

    def search_runs(self, *, search_all_experiments, filter_string, output_format):
        assert search_all_experiments and output_format == "list"
        keys = [kwargs["tags"]["meshtune.run"] for _, kwargs in self.named("start_run") if "tags" in kwargs]
        params = {name: str(value) for args, _ in self.named("log_params") for name, value in args[0].items()}
        found = types.SimpleNamespace(
            info=types.SimpleNamespace(run_id="abc"), data=types.SimpleNamespace(params=params)
        )
        return [found for key in keys if filter_string == f"tags.`meshtune.run` = '{key}'"]


def test_mlflow_gets_settings_and_rows_and_a_resumed_run_goes_on(run, monkeypatch):
    mlflow = Experiments()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    settings = {"train": {"seed": 1, "max_steps": 2, "adam_betas": [0.9, 0.999]}}
    settings |= {f"k{i}": i for i in range(120)}
    for start in (0, 1):
        options = {"settings": settings, "labels": LABELS}
        with Metrics.open(run, ["mlflow"], course=Course(2, start), **options) as metrics:
            metrics.train(step=start + 1, **NUMBERS)
        settings["train"]["max_steps"] = 9
    params = [args[0] for args, _ in mlflow.named("log_params")]
    assert [len(part) for part in params] == [100, 23]  # at most 100 a request, and once only
    assert {name: value for part in params for name, value in part.items()}["train.seed"] == "1"
    key = (run.logs / "mlflow.id").read_text()
    starts = [kwargs for _, kwargs in mlflow.named("start_run")]
    assert starts == [{"run_name": "n", "tags": {"meshtune.run": key}}, {"run_id": "abc"}]
    assert mlflow.named("set_experiment") == [(("p",), {})], "not again: the run may be of another one"
    tags = [args[0] for args, _ in mlflow.named("set_tags")]
    labels = {"baseline": "true", "lr": "high", "group": "g"}
    assert tags == [labels, labels, {"train.max_steps": "9"}], "a parameter can't change"
    assert [kwargs["step"] for _, kwargs in mlflow.named("log_metrics")] == [1, 2]


def test_mlflow_has_each_fact_of_the_run_row_as_a_parameter(run, monkeypatch):
    mlflow = Experiments()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for start in (1, 2):
        with Metrics.open(run, ["mlflow"], course=Course(1)) as metrics:
            metrics.start(id="1a2b", start=start, predicted={"memory": {"peak": 2.5}})
    (params,) = (args[0] for args, _ in mlflow.named("log_params"))
    assert params == {
        "run.kind": "run",
        "run.id": "1a2b",
        "run.start": "1",
        "run.predicted.memory.peak": "2.5",
    }
    assert [args[0] for args, _ in mlflow.named("set_tags")] == [{"run.start": "2"}]


@pytest.mark.parametrize(("wanted", "level"), [(None, logging.WARNING), ("INFO", logging.INFO)])
def test_mlflow_is_quiet_unless_its_level_is_set(wanted, level, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", Experiments())
    monkeypatch.delenv("MLFLOW_LOGGING_LEVEL", raising=False)
    if wanted:
        monkeypatch.setenv("MLFLOW_LOGGING_LEVEL", wanted)
    logger = logging.getLogger("mlflow")
    before = logger.level
    try:
        logger.setLevel(logging.INFO)  # as its import does
        with Metrics.open(run, ["mlflow"], course=Course(1)):
            assert logger.level == level
    finally:
        logger.setLevel(before)


def test_trackio_gets_settings_and_rows_and_a_resumed_run_goes_on(run, monkeypatch):
    trackio = Recorder()
    trackio.config = {}  # of the run that init returns
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for start, labels in ((0, Labels()), (1, LABELS)):
        options = {"settings": {"train": {"seed": 1}}, "labels": labels}
        with Metrics.open(run, ["trackio"], course=Course(2, start), **options) as metrics:
            name = (run.logs / "trackio.name").read_text()
            metrics.start(model="m")
            metrics.train(step=start + 1, **NUMBERS)
    first, second = (kwargs for _, kwargs in trackio.named("init"))
    assert first["name"] == second["name"] == name and name.startswith("run-"), "its only key"
    assert first["resume"] == second["resume"] == "allow"
    assert (first["project"], first["group"]) == ("meshtune", None)
    assert (second["project"], second["group"]) == ("p", "g")
    assert second["config"] == {"train": {"seed": 1}, "tags": ["baseline", "lr=high"]}
    assert trackio.config == {"run": {"kind": "run", "model": "m"}}
    assert [kwargs["step"] for _, kwargs in trackio.named("log")] == [1, 2]
    assert len(trackio.named("finish")) == 2


@pytest.mark.needs("trackio")
def test_trackio_itself_has_one_run_with_settings_and_rows(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    for start in (0, 1):
        options = {"settings": {"train": {"seed": start}}, "labels": LABELS}
        with Metrics.open(run, ["trackio"], course=Course(2, start), **options) as metrics:
            metrics.start(model="m")
            metrics.train(step=start + 1, **NUMBERS)
            metrics.evaluate(step=start + 1, loss=2.0, label_tokens=10)
    assert capsys.readouterr().out == ""
    from trackio import Api, context_vars  # pyright: ignore[reportMissingImports]
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    assert context_vars.current_run.get() is None, "a run that is left would be finished, and print, at exit"
    (tracked,) = Api().runs("p")
    assert tracked.name == (run.logs / "trackio.name").read_text()
    assert tracked.config["train"] == {"seed": 1} and tracked.config["run"]["model"] == "m"
    assert tracked.config["tags"] == ["baseline", "lr=high"] and tracked.config["_Group"] == "g"
    rows = SQLiteStorage.get_logs("p", tracked.name)
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [(1, 2.5), (2, 2.5)]
    assert [row["step"] for row in rows if "eval/loss" in row] == [1, 2]


# Prometheus #

NAME, LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["n\\])*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} (\S+)")
FACTS = {"model": 'a "small"\nmodel \\', "method": "full", "layout": "mb1-ga1", "total_steps": 9}


def exposition(text: str) -> dict[str, tuple[dict[str, str], float]]:
    """Metric -> (labels, value), by the grammar of Prometheus' text format 0.0.4: HELP, TYPE, samples."""
    assert text.endswith("\n")
    values, lines = {}, text.splitlines()
    for about, kind, sample in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        matched = SAMPLE.fullmatch(sample)
        assert matched, sample
        name, labels, value = matched.groups()
        assert about.startswith(f"# HELP {name} ") and kind == f"# TYPE {name} gauge"
        assert name not in values, "a metric's lines are together"
        pairs = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))
        values[name] = {key: re.sub(r"\\.", unescaped, each) for key, each in pairs.items()}, float(value)
    return values


def unescaped(found: re.Match[str]) -> str:
    return {r"\n": "\n", r"\"": '"', r"\\": "\\"}[found[0]]


def written_for_prometheus(run: RunDir) -> str:
    with Metrics.open(run, ["prometheus"], course=Course(9), console=console()) as metrics:
        metrics.start(**FACTS)
        metrics.train(step=1, **NUMBERS | {"loss": math.nan})
        metrics.evaluate(step=1, loss=2.0, label_tokens=10)
        (file,) = run.logs.iterdir()
        assert file.name == "meshtune.prom"
        return file.read_text()


def test_prometheus_reads_the_newest_numbers_with_their_units_and_the_run(run):
    values = exposition(written_for_prometheus(run))
    labels = {"run": "run", "output": str(run.path)}
    assert values["meshtune_tokens_per_second"] == (labels, 2000)
    assert values["meshtune_step_seconds"] == (labels, 0.5)
    assert values["meshtune_eval_loss"] == (labels, 2.0) and values["meshtune_step"] == (labels, 1)
    assert math.isnan(values["meshtune_loss"][1]) and values["meshtune_total_steps"][1] == 9
    facts = {name: FACTS[name] for name in ("model", "method", "layout")}
    assert values["meshtune_run_info"] == (labels | facts, 1)
    assert values["meshtune_running"][1] == 1 and "meshtune_mfu_ratio" not in values
    assert exposition((run.logs / "meshtune.prom").read_text())["meshtune_running"] == (labels, 0)


@pytest.mark.needs("prometheus_client")
def test_prometheus_own_parser_reads_the_same(run):
    from prometheus_client.parser import (  # pyright: ignore[reportMissingImports]
        text_string_to_metric_families,
    )

    text = written_for_prometheus(run)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    parsed = {sample.name: (sample.labels, sample.value) for sample in samples}
    assert repr(parsed) == repr(exposition(text)), "as text, since NaN is not equal to itself"


def test_prometheus_has_a_file_for_each_run_folder_in_a_directory_that_must_be_there(tmp_path):
    collected = tmp_path / "collected"
    options = {"course": Course(1), "console": console(), "labels": Labels(textfile_directory=collected)}
    with refuses(UserError):
        Metrics.open(RunDir(tmp_path / "a" / "run").create(), ["prometheus"], **options)
    collected.mkdir()
    for _ in range(2):  # a run that goes on has the same file
        for name in ("a", "b"):
            Metrics.open(RunDir(tmp_path / name / "run").create(), ["prometheus"], **options).close()
    files = sorted(collected.iterdir())
    assert len(files) == 2 and all(file.suffix == ".prom" for file in files)
    outputs = {exposition(file.read_text())["meshtune_running"][0]["output"] for file in files}
    assert outputs == {str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")}


def test_metrics_import_neither_torch_nor_any_tracker(tmp_path):
    code = "import sys, json, meshtune.train.trackers; print(json.dumps(list(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"torch", "tensorboard", "wandb", "mlflow", "trackio"} & set(loaded)
