"""What a run says of itself: rows, and where they go.

    numbers of a step ──> train_row / eval_row ──> Metrics ──┬─> metrics.jsonl of the run folder
                                                             ├─> the terminal: a bar, or plain lines
                                                             └─> TensorBoard, W&B, MLflow

A row is built by one pure function from plain numbers; a tracker is anything with `log(row)` and `close()`.
Only rank 0 writes: on the other ranks a `Metrics` has no trackers and every call is free. Nothing here
needs torch but TensorBoard's writer, and each tracker's library is imported only when `log.to` names it.
"""

import importlib.util
import math
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from meshtune.errors import UserError
from meshtune.rundir import Row, RunDir, write_text_atomically
from meshtune.units import count, duration, human

TRACKERS = {  # name in `log.to` -> (module it needs, how to get it)
    "console": ("rich", "pip install rich"),
    "jsonl": ("json", ""),
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "wandb": ("wandb", "pip install wandb"),
    "mlflow": ("mlflow", "pip install mlflow"),
}


# Rows #


def train_row(
    *,
    step: int,
    loss: float,
    grad_norm: float | None,
    learning_rate: float,
    tokens: int,
    label_tokens: int,
    step_seconds: float,
    data_seconds: float,
    world: int = 1,
    flops: float | None = None,
    flops_6n: float | None = None,
    peak_flops_per_second: float | None = None,
    peak_memory_bytes: int | None = None,
    skipped: bool = False,
) -> Row:
    """The row of one update.

    `tokens` (real ones, no padding), `label_tokens`, `flops` and `flops_6n` are of the global batch;
    `step_seconds` is the wall time of the whole step, the `data_seconds` it waited for data included. Per
    GPU are `tokens_per_second_per_gpu`, `tflops_per_second`, `mfu` and `peak_flops_per_second` (of one
    device; None when unknown, as on any CPU; then `mfu` is null). `skipped` marks a step that was not
    applied because loss or gradients were not finite.

        mfu    = flops    / (step_seconds · world · peak_flops_per_second)
        mfu_6n = flops_6n / (step_seconds · world · peak_flops_per_second)

    `flops` counts what had to be computed (Σ matmuls + causal attention by document lengths, no
    recomputation, no weight gradients of frozen weights), so a share above 1 is impossible and means that a
    count or the peak is wrong: `mfu` is then null. `flops_6n` is the common 6N + 12·L·h·s (PaLM, Chowdhery
    et al. 2022, appendix B), which counts attention twice and frozen weights too; it is written as it comes
    out.
    """
    row: Row = {
        "kind": "train",
        "step": step,
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "tokens": tokens,
        "label_tokens": label_tokens,
        "step_seconds": step_seconds,
        "data_seconds": data_seconds,
        "tokens_per_second_per_gpu": tokens / step_seconds / world,
        "tflops_per_second": None if flops is None else flops / step_seconds / world / 1e12,
        "mfu": possible(share_of_peak(flops, step_seconds, world, peak_flops_per_second)),
        "mfu_6n": share_of_peak(flops_6n, step_seconds, world, peak_flops_per_second),
        "peak_memory_bytes": peak_memory_bytes,
    }
    return {**row, "skipped": True} if skipped else row


def eval_row(
    *,
    step: int,
    loss: float,
    label_tokens: int,
    tokens: int | None = None,
    seconds: float | None = None,
    exact_match: float | None = None,
    prompts: int | None = None,
) -> Row:
    """The row of one evaluation after `step` updates (0: before the first).

    `loss` is the sum of token losses over all held-out label tokens divided by their number, `perplexity`
    its exponential; `exact_match` the share (0 to 1) of the `prompts` that were answered word for word,
    when there were any.
    """
    row: Row = {
        "kind": "eval",
        "step": step,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,  # exp overflows a float at 709.8
        "label_tokens": label_tokens,
    }
    extra = {"tokens": tokens, "seconds": seconds, "exact_match": exact_match, "prompts": prompts}
    return {**row, **{key: value for key, value in extra.items() if value is not None}}


def share_of_peak(
    flops: float | None, seconds: float, world: int, peak_flops_per_second: float | None
) -> float | None:
    """FLOPs of a step as a share of what `world` devices could have done; None when a number is unknown."""
    if flops is None or peak_flops_per_second is None:
        return None
    return flops / (seconds * world * peak_flops_per_second)


def possible(share: float | None) -> float | None:
    """A utilisation as it may be published: None when it is above 1, which no device can reach."""
    return share if share is not None and share <= 1 else None


# Where rows go #


class Tracker(Protocol):
    """Anything that takes rows."""

    def log(self, row: Row) -> None:
        """Take one row of any kind; a tracker passes over the kinds it has no use for."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Flush and let go; called once, also when the run failed."""
        ...


class Metrics:
    """The rows of one run and the trackers they go to.

    with Metrics.open(run, ["console", "jsonl"], rank=rank, total_steps=500, world=world) as metrics:
        metrics.start(model="…", method="full", …)
        metrics.train(step=1, loss=2.5, …)         # train_row's numbers, less world and peak
        metrics.evaluate(step=1, loss=2.4, …)      # eval_row's numbers
        metrics.say("Saved a checkpoint.")         # a line that does not break the progress bar
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        *,
        every: int = 1,
        total_steps: int | None = None,
        world: int = 1,
        peak_flops_per_second: float | None = None,
        console: Console | None = None,
    ) -> None:
        self.trackers: tuple[Tracker, ...] = tuple(trackers)
        self.every = every
        self.total_steps = total_steps
        self.world = world
        self.peak_flops_per_second = peak_flops_per_second
        self.console = console
        self._warned = False

    @classmethod
    def open(
        cls,
        run: RunDir,
        to: Iterable[str],
        *,
        rank: int = 0,
        every: int = 1,
        total_steps: int,
        start_step: int = 0,
        world: int = 1,
        peak_flops_per_second: float | None = None,
        settings: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> "Metrics":
        """A `Metrics` with the trackers that `log.to` names; on ranks other than 0 with none.

        `start_step` is the step resumed from, `settings` the resolved config as plain values (trackers show
        it). UserError when a tracker is unknown or its library is missing.
        """
        if rank != 0:
            return cls((), every=every, total_steps=total_steps, world=world)
        names = list(dict.fromkeys(to))
        if problems := tracker_problems(names):
            raise UserError(problems)
        console = console or Console(stderr=True)
        start = {
            "console": lambda: ConsoleTracker(
                console, total_steps=total_steps, start_step=start_step, world=world
            ),
            "jsonl": lambda: JsonlTracker(run),
            "tensorboard": lambda: TensorBoardTracker(run.logs / "tensorboard", start_step=start_step),
            "wandb": lambda: WandbTracker(run, settings or {}),
            "mlflow": lambda: MlflowTracker(run, settings or {}),
        }
        metrics = cls(
            (),
            every=every,
            total_steps=total_steps,
            world=world,
            peak_flops_per_second=peak_flops_per_second,
            console=console,
        )
        for name in names:
            try:
                metrics.trackers += (start[name](),)
            except Exception as error:  # no network, no login, a full disk: whatever a tracker stumbles over
                metrics.close(failed=True)
                raise UserError(
                    f"log.to: {name} could not start ({error}); leave it out to go on."
                ) from error
        return metrics

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(failed=kind is not None)

    def due(self, step: int) -> bool:
        """Whether this step's row is wanted: every `every` steps, the first and the last.

        In between, a loop may spare itself the numbers, and the wait for the device.
        """
        return step % self.every == 0 or step == 1 or step == self.total_steps

    def start(self, **facts: Any) -> None:
        """Say what is about to run: a row of kind "run" (model, method, layout, device, versions …)."""
        self._log({"kind": "run", **facts})

    def train(self, **numbers: Any) -> None:
        """One update's row, when due or skipped; the numbers are `train_row`'s, less `world` and the peak."""
        if self.trackers and (numbers.get("skipped") or self.due(numbers["step"])):
            row = train_row(**numbers, world=self.world, peak_flops_per_second=self.peak_flops_per_second)
            self._doubt(row)
            self._log(row)

    def evaluate(self, **numbers: Any) -> None:
        """One evaluation's row; see `eval_row` for the numbers."""
        self._log(eval_row(**numbers))

    def end(self, **facts: Any) -> None:
        """Say how it ended: a row of kind "end" (step, seconds, what it was stopped by …)."""
        self._log({"kind": "end", **facts})

    def say(self, text: str) -> None:
        """A line for the person at the terminal, above the progress bar; nothing on ranks other than 0."""
        if self.console is not None:
            self.console.print(escape(text), soft_wrap=True, highlight=False)

    def close(self, *, failed: bool = False) -> None:
        """Close every tracker, and say it when one can't be; safe to call twice."""
        trackers, self.trackers = self.trackers, ()
        for tracker in trackers:
            try:
                tracker.close(failed=failed)
            except Exception as error:  # the others must still flush
                self.say(f"{type(tracker).__name__} could not be closed: {error}")

    def _log(self, row: Row) -> None:
        for tracker in self.trackers:
            try:
                tracker.log(row)
            except Exception as error:
                if isinstance(
                    tracker, JsonlTracker
                ):  # without its rows a run is lost; without a dashboard it is not
                    raise
                self.trackers = tuple(other for other in self.trackers if other is not tracker)
                self.say(f"{type(tracker).__name__} failed and gets no more rows: {error}")

    def _doubt(self, row: Row) -> None:
        """Say once that an impossible MFU was not written, with the numbers that made it."""
        reached, peak = row["tflops_per_second"], self.peak_flops_per_second
        if row["mfu"] is None and reached is not None and peak is not None and not self._warned:
            self._warned = True
            self.say(
                f"Step {row['step']} seems to reach {reached:.1f} of the device's {peak / 1e12:.1f} TFLOP/s, "
                f"which can't be: mfu is null wherever that is so. Is the peak right for this precision?"
            )


def tracker_problems(names: Iterable[str]) -> list[str]:
    """What keeps the named trackers from running, one sentence each with the remedy; imports nothing."""
    problems = []
    for name in names:
        if name not in TRACKERS:
            problems.append(f"log.to: there is no tracker {name!r}; there are {', '.join(TRACKERS)}.")
        elif not installed(TRACKERS[name][0]):
            problems.append(f"log.to: {name} is not installed; {TRACKERS[name][1]}, or leave it out.")
    return problems


def installed(module: str) -> bool:
    """Whether a top-level module can be imported, found out without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # already imported, and without a spec
        return True


class JsonlTracker:
    """Every row, whole, into the run folder's metrics.jsonl."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def log(self, row: Row) -> None:
        self.run.append(row)

    def close(self, *, failed: bool = False) -> None:
        """Nothing to do: each row is in the file when `log` returns."""


class ConsoleTracker:
    """A progress bar on a terminal, else plain lines; an evaluation always gets a line.

    Plain lines (a log file, a pipe) come at most one a second, later on one per hundredth of the time gone,
    up to a minute; the first and the last step are always among them.
    """

    def __init__(self, console: Console, *, total_steps: int, start_step: int = 0, world: int = 1) -> None:
        self.console = console
        self.total_steps = total_steps
        self.start_step = start_step
        self.speed_unit = "tokens/s" if world == 1 else "tokens/s/GPU"
        # Bar and clock start with the first row: what comes before prints freely, and compiling in the
        # first step is no guide to the time left.
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._began: float | None = None
        self._first_step = start_step
        self._last_line = -math.inf

    def log(self, row: Row) -> None:
        match row["kind"]:
            case "train":
                self._train(row)
            case "eval":
                self._line(eval_line(row))

    def close(self, *, failed: bool = False) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _train(self, row: Row) -> None:
        now, step = time.monotonic(), row["step"]
        if self._began is None:
            self._began, self._first_step = now, step
        pace = (now - self._began) / max(1, step - self._first_step)
        left = pace * (self.total_steps - step) if step > self._first_step else None
        pause = min(60.0, max(1.0, 0.01 * (now - self._began)))
        if self.console.is_interactive:
            self._progress = self._progress or self._bar()
            self._progress.update(self._task, completed=step, numbers=train_line(row, left, self.speed_unit))
        elif now - self._last_line >= pause or step == self.total_steps:
            self._last_line = now
            self._line(f"step {step}/{self.total_steps}  {train_line(row, left, self.speed_unit)}")

    def _bar(self) -> Progress:
        columns = (
            TextColumn("[bold]train"),
            BarColumn(bar_width=24, complete_style="blue", finished_style="blue"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=5)
        self._task = progress.add_task("train", total=self.total_steps, completed=self.start_step, numbers="")
        progress.start()
        return progress

    def _line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


def train_line(row: Row, seconds_left: float | None, speed_unit: str = "tokens/s") -> str:
    """A train row as the terminal shows it: loss, speed, utilisation if known, time left if known."""
    parts = [f"loss {row['loss']:.4f}", f"{count(row['tokens_per_second_per_gpu'])} {speed_unit}"]
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    if row["peak_memory_bytes"] is not None:
        parts.append(human(row["peak_memory_bytes"]))
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return " · ".join(parts)


def eval_line(row: Row) -> str:
    """An eval row as the terminal shows it."""
    parts = [f"eval at step {row['step']}: loss {row['loss']:.4f}", f"perplexity {row['perplexity']:.4g}"]
    if "exact_match" in row:
        parts.append(f"exact match {row['exact_match']:.1%}")
    return " · ".join(parts)


class TensorBoardTracker:
    """Scalars train/loss, eval/loss … in event files; `start_step` hides what was written beyond it."""

    def __init__(self, folder: Path, *, start_step: int = 0) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)

    def log(self, row: Row) -> None:
        for name, value in scalars(row).items():
            self.writer.add_scalar(name, value, row["step"])

    def close(self, *, failed: bool = False) -> None:
        self.writer.close()


class WandbTracker:
    """A Weights & Biases run, gone on with when the run folder is; WANDB_PROJECT names the project."""

    def __init__(self, run: RunDir, settings: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        known = run.logs / "wandb.id"
        if not known.exists():
            write_text_atomically(known, uuid.uuid4().hex)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "meshtune"),
            name=run.path.name,
            dir=str(run.logs),
            config=dict(settings),
            id=known.read_text(),
            resume="allow",
        )
        # Resuming repeats the steps since the checkpoint, which W&B's own ever-growing step would refuse.
        self.run.define_metric("*", step_metric="step")

    def log(self, row: Row) -> None:
        if values := scalars(row):
            self.run.log({"step": row["step"], **values})

    def close(self, *, failed: bool = False) -> None:
        self.run.finish(exit_code=int(failed))


class MlflowTracker:
    """An MLflow run, gone on with when the run folder is; MLFLOW_TRACKING_URI says where, as ever."""

    def __init__(self, run: RunDir, settings: Mapping[str, Any]) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self.mlflow = mlflow
        known = run.logs / "mlflow.id"
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "meshtune"))
        if known.exists():  # its parameters were logged then, and MLflow refuses to change one
            mlflow.start_run(run_id=known.read_text())
            return
        started = mlflow.start_run(run_name=run.path.name)
        write_text_atomically(known, started.info.run_id)
        params = sorted(flat(settings).items())
        for start in range(0, len(params), 100):  # the REST interface takes 100 at a time
            mlflow.log_params(dict(params[start : start + 100]))

    def log(self, row: Row) -> None:
        if values := scalars(row):
            self.mlflow.log_metrics(values, step=row["step"])

    def close(self, *, failed: bool = False) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


def scalars(row: Row) -> dict[str, float]:
    """The finite numbers of a train or eval row as trackers want them: {"train/loss": …}; else none."""
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
    """A settings tree as one level: {"train.seed": 42, …}; lists stay as they are."""
    leaves: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return leaves
