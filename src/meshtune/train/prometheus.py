"""Writes a run's newest numbers for Prometheus, in a file that its node exporter's textfile collector reads.

    node_exporter --collector.textfile.directory=DIR       log: {to: [prometheus], textfile_directory: DIR}

The file has the text format of the exposition (HELP, TYPE, samples) and is replaced whole, by a rename. It
stays when the run has ended, with `meshtune_running` 0.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshtune.errors import UserError
from meshtune.rundir import Row, RunDir, write_text_atomically

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
    Metric("loss", "train", field("loss"), "Mean loss per label token of the last step, before its update."),
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
    Metric("eval_loss", "eval", field("loss"), "Mean loss per label token of the held-out rows."),
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
            raise UserError(f"log.textfile_directory = {directory} is no folder")
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
