"""Trackers that other programs show: TensorBoard, Weights & Biases, MLflow, Trackio, a file for Prometheus,
and what runs the job, Kubeflow's trainer or Slurm. Each takes rows (trackers.py).

A run folder is one tracked run, however often it continues: the id is in logs/ before the tracked run is
made, so a kill at any moment loses neither.
"""

import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from meshtune.errors import UserError, reason_of
from meshtune.launch.slurm import COMMENT, slurm_output
from meshtune.rundir import EXPECTED, Row, RunDir, write_text_atomically
from meshtune.train.console import Course, TimeLeft, left_parts

PARAMETERS_AT_ONCE = 100  # MLflow's REST interface takes no more
LONGEST_PARAMETER = 6000  # characters; MLflow refuses longer ones
RUN_TAG = "meshtune.run"  # MLflow's tag that holds the id: its own run ids are the server's choice


@dataclass(frozen=True)
class Labels:
    """How trackers file a run."""

    # W&B's and Trackio's project, MLflow's experiment; None: of the environment, or meshtune.
    project: str | None = None
    name: str | None = None  # None: the run folder's
    tags: tuple[str, ...] = ()  # for MLflow key=value, or a key whose value is true
    group: str | None = None  # W&B's and Trackio's group, MLflow's tag "group"
    textfile_directory: Path | None = None  # of Prometheus' file; None: logs/ of the run folder


class TensorBoardTracker:
    """Writes scalars train/loss, eval/loss … to event files.

    start_step: the step resumed from, 0 for a new run; TensorBoard then hides what was written for later
    steps.
    """

    def __init__(self, folder: Path, *, start_step: int = 0) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)

    def log(self, row: Row) -> None:
        for name, value in scalars(row).items():
            self.writer.add_scalar(name, value, row["step"])

    def close(self, *, failed: bool = False) -> None:
        self.writer.close()


class WandbTracker:
    """Logs to Weights & Biases: the settings and the run row as config, train and eval rows as history.

    settings: the resolved config as plain values.
    """

    def __init__(self, run: RunDir, labels: Labels, settings: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        # Its folder is named by the second: a start in the last one's second would write over its rows.
        while any(run.logs.glob(f"wandb/*run-{datetime.now():%Y%m%d_%H%M%S}-*")):
            time.sleep(0.05)
        self.run = wandb.init(
            project=labels.project or os.environ.get("WANDB_PROJECT", "meshtune"),
            name=labels.name or os.environ.get("WANDB_NAME", run.path.name),
            tags=list(labels.tags) or None,  # None: of the environment
            group=labels.group,
            dir=str(run.logs),
            id=kept_id(run.logs / "wandb.id"),
            resume="allow",
        )
        # Resuming repeats the steps since the checkpoint; W&B's own step counter would refuse them.
        self.run.define_metric("*", step_metric="step")
        self._add_config(settings)

    def log(self, row: Row) -> None:
        if row["kind"] == "run":
            self._add_config({"run": row})
        elif values := scalars(row):
            self.run.log({"step": row["step"], **values})

    def close(self, *, failed: bool = False) -> None:
        self.run.finish(exit_code=int(failed))

    def _add_config(self, values: Mapping[str, Any]) -> None:
        """Add values to the config; a run that continues may have others than before."""
        self.run.config.update(dict(values), allow_val_change=True)


class MlflowTracker:
    """Logs to MLflow, at MLFLOW_TRACKING_URI: the settings and the run row as parameters, train and eval rows
    as metrics.

    settings: the resolved config as plain values. A parameter can't change: where a run continues with
    another value, a tag of the parameter's name has it.
    """

    def __init__(self, run: RunDir, labels: Labels, settings: Mapping[str, Any]) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        if "MLFLOW_LOGGING_LEVEL" not in os.environ:  # tables and experiments that it makes aren't news
            logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.mlflow = mlflow
        key = kept_id(run.logs / "mlflow.id")
        found = mlflow.search_runs(
            search_all_experiments=True, filter_string=f"tags.`{RUN_TAG}` = '{key}'", output_format="list"
        )
        self.parameters: dict[str, str] = {}  # logged, by name
        if found:
            self.parameters |= found[0].data.params
            mlflow.start_run(run_id=found[0].info.run_id)
        else:
            mlflow.set_experiment(labels.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "meshtune"))
            mlflow.start_run(run_name=labels.name or run.path.name, tags={RUN_TAG: key})
        if tags := mlflow_tags(labels):
            mlflow.set_tags(tags)
        self._add_parameters(settings)

    def log(self, row: Row) -> None:
        if row["kind"] == "run":
            self._add_parameters({"run": row})
        elif values := scalars(row):
            self.mlflow.log_metrics(values, step=row["step"])

    def close(self, *, failed: bool = False) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")

    def _add_parameters(self, values: Mapping[str, Any]) -> None:
        texts = {name: str(value)[:LONGEST_PARAMETER] for name, value in flat(values).items()}
        new = sorted(texts.items() - self.parameters.items())
        changed = {name: text for name, text in new if name in self.parameters}
        added = [(name, text) for name, text in new if name not in self.parameters]
        for start in range(0, len(added), PARAMETERS_AT_ONCE):
            self.mlflow.log_params(dict(added[start : start + PARAMETERS_AT_ONCE]))
        if changed:
            self.mlflow.set_tags(changed)
        self.parameters |= dict(added)


class TrackioTracker:
    """Logs to Trackio: the settings, the tags and the run row as config, train and eval rows as metrics.

    settings: the resolved config as plain values. Trackio finds a run only by its name, so the name ends
    with eight random digits that no other run folder has. Rows go to Trackio's own folder, or where its
    environment variables say.
    """

    def __init__(self, run: RunDir, labels: Labels, settings: Mapping[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self.trackio = trackio
        name = f"{labels.name or run.path.name}-{uuid.uuid4().hex[:8]}"
        with redirect_stdout(io.StringIO()):  # it prints, and stdout is the command's result
            self.run = trackio.init(
                project=labels.project or "meshtune",
                name=write_once(run.logs / "trackio.name", name),
                group=labels.group,
                config={**settings, "tags": list(labels.tags)},
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, row: Row) -> None:
        if row["kind"] == "run":
            self.run.config["run"] = dict(row)  # sent with the first metrics, which come behind it
        elif values := scalars(row):
            self.run.log(values, step=row["step"])

    def close(self, *, failed: bool = False) -> None:
        with redirect_stdout(io.StringIO()):
            self.trackio.finish()  # the run's own finish() would be called once more, and print, at exit


def write_once(file: Path, text: str) -> str:
    """The text in a file, which is written first if it is missing."""
    if not file.exists():
        write_text_atomically(file, text)
    return file.read_text()


def kept_id(file: Path) -> str:
    """The id in a file; a random one is written if it is missing."""
    return write_once(file, uuid.uuid4().hex)


def mlflow_tags(labels: Labels) -> dict[str, str]:
    """The labels as MLflow's tags: {"lr": "high"} of lr=high, {"baseline": "true"} of baseline."""
    parts = (tag.partition("=") for tag in labels.tags)
    tags = {key: value if equals else "true" for key, equals, value in parts}
    return tags | ({"group": labels.group} if labels.group else {})


def scalars(row: Row) -> dict[str, float]:
    """The finite numbers of a train or eval row by tag: {"train/loss": …}; empty for other kinds."""
    if row["kind"] not in ("train", "eval"):
        return {}
    return {
        f"{row['kind']}/{name}": value
        for name, value in row.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name != "step"
        and math.isfinite(value)
    }


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings with dotted names: {"train.seed": 42, …}; lists stay as they are.

    prefix: put before every name, with its dot.
    """
    leaves: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return leaves


# Prometheus #

#     node_exporter --collector.textfile.directory=DIR       log: {to: [prometheus], textfile_directory: DIR}
#
# The file has the text format of the exposition (HELP, TYPE, samples) and is replaced whole, by a rename. It
# stays when the run has ended, with `meshtune_running` 0.


SECONDS_BETWEEN_WRITES = 1.0  # of train rows; exporters read every 15 s or so


class Metric(NamedTuple):
    """One metric of the file; all are gauges."""

    name: str  # with its unit at the end
    kind: str  # of the rows that it comes from
    value: Callable[[Row], float | None]  # of a row; None: no sample
    help: str


def field(name: str, factor: float = 1.0) -> Callable[[Row], float | None]:
    """Return a function: row -> the number in its column `name` times `factor`, None where it has none."""

    def value(row: Row) -> float | None:
        number = row.get(name)
        return None if number is None else number * factor

    return value


METRICS = (
    Metric("step", "train", field("step"), "Optimizer updates done."),
    Metric("total_steps", "run", field("total_steps"), "Optimizer updates of the whole run."),
    Metric("epoch", "train", field("epoch"), "Passes through the training data."),
    Metric(
        "loss", "train", field("loss"),
        "Mean loss of the last step, before its update: per label token, or per pair or judged answer.",
    ),
    Metric("gradient_norm", "train", field("grad_norm"), "L2 norm of the gradients before clipping."),
    Metric(
        "gradient_noise_scale_sequences", "train", field("gradient_noise_scale"),
        "Gradient noise scale of the measured steps.",
    ),
    Metric("learning_rate", "train", field("learning_rate"), "Learning rate of the last step."),
    Metric("step_seconds", "train", field("step_seconds"), "Wall time of the last step."),
    Metric("data_seconds", "train", field("data_seconds"), "Time that the last step waited for data."),
    Metric("step_tokens", "train", field("tokens"), "Tokens of the last step without padding, all GPUs."),
    Metric(
        "tokens_per_second", "train", lambda row: row["tokens"] / row["step_seconds"],
        "Tokens per second of the last step, all GPUs.",
    ),
    Metric(
        "tokens_per_second_per_gpu", "train", field("tokens_per_second_per_gpu"),
        "Tokens per second of the last step, one GPU.",
    ),
    Metric(
        "flops_per_second_per_gpu", "train", field("tflops_per_second", 1e12),
        "Floating-point operations per second that the model needs, one GPU.",
    ),
    Metric("mfu_ratio", "train", field("mfu"), "Model FLOPs utilisation, 0 to 1."),
    Metric(
        "peak_memory_bytes", "train", field("peak_memory_bytes"),
        "Most bytes of tensors at once on the fullest rank, in the last step.",
    ),
    Metric(
        "peak_resident_bytes", "train", field("peak_resident_bytes"),
        "Most resident host memory of the largest process so far.",
    ),
    Metric("eval_step", "eval", field("step"), "Optimizer updates before the last evaluation."),
    Metric("eval_loss", "eval", field("loss"), "Mean loss of the held-out rows, per the same."),
    Metric("eval_exact_match_ratio", "eval", field("exact_match"), "Prompts answered word for word, 0 to 1."),
)  # fmt: skip
FACTS = {  # label -> column of the run row
    "model": "model", "method": "method", "layout": "layout", "precision": "precision", "device": "device",
    "version": "meshtune",
}  # fmt: skip


class PrometheusTracker:
    """Writes the newest row of each kind to one `.prom` file.

    directory: of the file, which is then named after the run folder; None: it is logs/meshtune.prom of the
    run folder. Raises UserError if the directory is missing.
    """

    def __init__(self, run: RunDir, directory: Path | None = None) -> None:
        if directory is not None and not directory.is_dir():
            raise UserError(f"log.textfile_directory = {directory} is not a folder")
        path = run.path.absolute()
        self.labels = {"run": path.name, "output": str(path)}
        digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()  # of two folders of one name
        self.file = directory / f"meshtune-{path.name}-{digest}.prom" if directory else promfile(run)
        self.rows: dict[str, Row] = {}  # the newest of each kind
        self.written = 0.0  # by the clock
        self._write(running=True)

    def log(self, row: Row) -> None:
        self.rows[row["kind"]] = row
        if row["kind"] == "eval" or time.monotonic() - self.written >= SECONDS_BETWEEN_WRITES:
            self._write(running=True)

    def close(self, *, failed: bool = False) -> None:
        self._write(running=False)

    def _write(self, *, running: bool) -> None:
        write_text_atomically(self.file, exposition(self.rows, self.labels, running=running))
        self.written = time.monotonic()


def promfile(run: RunDir) -> Path:
    """The file of a run without a textfile directory."""
    return run.logs / "meshtune.prom"


def exposition(rows: Mapping[str, Row], labels: Mapping[str, str], *, running: bool) -> str:
    """The file's text. rows: kind -> its newest row. labels: of every sample."""
    lines = gauge("running", "1 while the run is training, 0 once it has ended.", float(running), labels)
    if (run := rows.get("run")) is not None:
        facts = {label: run[name] for label, name in FACTS.items() if run.get(name) is not None}
        lines += gauge("run_info", "Facts of the run, as labels.", 1.0, {**labels, **facts})
    for name, kind, value, text in METRICS:
        if kind in rows and (number := value(rows[kind])) is not None:
            lines += gauge(name, text, number, labels)
    return "".join(f"{line}\n" for line in lines)


def gauge(name: str, text: str, value: float, labels: Mapping[str, Any]) -> list[str]:
    """Lines of one metric with one sample."""
    pairs = ",".join(f'{key}="{escaped(str(content))}"' for key, content in labels.items())
    name = f"meshtune_{name}"
    return [f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name}{{{pairs}}} {number(value)}"]


def escaped(text: str) -> str:
    """A label's value as the format writes it; undecodable bytes of a path become question marks."""
    text = text.encode("utf-8", "replace").decode()
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number(value: float) -> str:
    """A sample's value as the format writes it: NaN, +Inf and -Inf are Go's."""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text := repr(float(value)), text)


# What runs the job #


KUBEFLOW = "KUBEFLOW_TRAINER_SERVER"  # begins the variables that Kubeflow's controller sets


class Progress(NamedTuple):
    """How far a run is."""

    step: int
    left: float | None  # seconds; None: not known yet
    metrics: Mapping[str, float]  # by the names of transformers' integrations
    done: bool = False


class ProgressTracker:
    """Reports progress from a thread: no step waits for an answer, and no failure ends the run.

    say: prints a line on the first failure.
    """

    spacing = 5.0  # seconds between two reports, at least; the last one does not wait
    patience = 5.0  # seconds that the end of the run waits for the last report

    def __init__(self, course: Course, say: Callable[[str], None]) -> None:
        self.course, self.say, self.left = course, say, TimeLeft(course)
        self.now = Progress(course.start, None, {})
        self._news, self._end, self._failed = Event(), Event(), Event()
        self._thread = Thread(target=self._report, daemon=True)

    def send(self, now: Progress) -> None:
        """Report once; may block and raise."""
        raise NotImplementedError

    def log(self, row: Row) -> None:
        match row["kind"]:
            case "run":
                self._thread.start()
            case "train":
                names = ("loss", "grad_norm", "learning_rate")
                new = {name: row[name] for name in names if row[name] is not None}
                new |= {} if row.get("epoch") is None else {"current_epoch": round(row["epoch"], 2)}
                left = self.left.train(row["step"], row["tokens"], time.monotonic())
                self.now = Progress(row["step"], left, {**self.now.metrics, **new})
            case "eval":
                self.left.evaluated(row.get("seconds", 0.0))
                self.now = self.now._replace(metrics={**self.now.metrics, "eval_loss": row["loss"]})
            case "save":
                self.left.saved(row["seconds"])
            case _:
                return
        self._news.set()

    def close(self, *, failed: bool = False) -> None:
        if self._thread.ident is None:
            return
        if not failed:
            self.now = self.now._replace(left=0.0, done=True)
        self._end.set()
        self._news.set()
        self._thread.join(self.patience)
        if self._thread.is_alive():
            self._fail(f"no answer in {self.patience:g} s.")

    def _report(self) -> None:
        last = False
        while not last:
            self._news.wait()
            self._news.clear()
            last = self._end.is_set()
            try:
                self.send(sent := self.now)
            except Exception as error:
                self._fail(reason_of(error))
            if sent.step > self.course.start:  # the first step is reported when it is done
                self._end.wait(self.spacing)

    def _fail(self, reason: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            self.say(f"Progress could not be reported outside the run: {reason} The run continues.")


class KubeflowTracker(ProgressTracker):
    """Posts the status of Kubeflow's TrainJob, as transformers' integration does.

    The token is read for each post: Kubernetes replaces it every hour.
    """

    def send(self, now: Progress) -> None:
        total = self.course.steps
        metrics = {**now.metrics, "current_step": now.step, "total_steps": total}
        status: dict[str, Any] = {
            "lastUpdatedTime": datetime.now(UTC).isoformat(),
            "progressPercentage": 100 if now.done else min(99, 100 * now.step // max(1, total)),
            "metrics": [{"name": name, "value": str(value)} for name, value in metrics.items()],
        }
        if now.left is not None:
            status["estimatedRemainingSeconds"] = int(now.left)
        token = Path(os.environ[f"{KUBEFLOW}_TOKEN"]).read_text("utf-8").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        body = json.dumps({"trainerStatus": status}).encode()
        request = Request(os.environ[f"{KUBEFLOW}_URL"], body, headers, method="POST")
        authority = os.environ.get(f"{KUBEFLOW}_CA_CERT")
        context = ssl.create_default_context(cafile=authority) if authority else None
        urlopen(request, timeout=5, context=context).close()


class SlurmTracker(ProgressTracker):
    """Writes progress into the comment of Slurm's job (`squeue -O comment`), unless it has another."""

    spacing = 60.0  # Slurm's controller serves the whole site
    free: bool | None = None  # the comment is ours to write; None: not looked at yet

    def send(self, now: Progress) -> None:
        job = os.environ["SLURM_JOB_ID"]
        if self.free is None:
            found = re.search(r"^ *Comment=(.+)$", slurm_output("scontrol", "show", "job", job), re.MULTILINE)
            self.free = found is None or found[1].startswith(COMMENT)
        if self.free:
            parts = [f"{COMMENT}at {datetime.now():%H:%M:%S} step {now.step} of {self.course.steps}"]
            parts += left_parts(None if now.done else now.left)
            parts += [f"loss {now.metrics['loss']:.4f}"] if "loss" in now.metrics else []
            text = ", ".join(parts)
            slurm_output("scontrol", "update", f"JobId={job}", f"Comment={text}")


def outside(course: Course, say: Callable[[str], None]) -> Iterator[ProgressTracker]:
    """Yield the trackers of what runs this job: Kubeflow's trainer, or Slurm after `meshtune submit`."""
    disabled = os.environ.get("DISABLE_KUBEFLOW_INTEGRATION", "").upper() == "TRUE"
    if f"{KUBEFLOW}_URL" in os.environ and not disabled:
        yield KubeflowTracker(course, say)
    if {"SLURM_JOB_ID", EXPECTED} <= os.environ.keys() and shutil.which("scontrol"):
        yield SlurmTracker(course, say)
