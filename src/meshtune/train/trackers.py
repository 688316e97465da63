"""The rows of a run and the trackers that take them.

    numbers of a step ──> train_row / eval_row ──> Metrics ──┬─> metrics.jsonl of the run folder
                          (meter/rows.py)                    ├─> the terminal: a bar, or plain lines
                                                             ├─> TensorBoard, W&B, … (dashboards.py)
                                                             ├─> a file for Prometheus (prometheus.py)
                                                             └─> callbacks of a Python program

A tracker is anything with `log(row)` and `close()`. Only rank 0 writes: on the other ranks a `Metrics` has no
trackers and every call returns at once. Nothing here needs torch but TensorBoard's writer, and each tracker's
library is imported only when `log.to` names it.
"""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape

from meshtune.addresses import public
from meshtune.errors import UserError
from meshtune.meter.rows import eval_row, train_row
from meshtune.rundir import Row, RunDir
from meshtune.train.callbacks import Callbacks
from meshtune.train.console import ConsoleTracker, Course
from meshtune.train.dashboards import (
    Labels,
    MlflowTracker,
    PrometheusTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandbTracker,
    outside,
)
from meshtune.units import at_words, printable, speed_unit

TRACKERS = {  # name in `log.to` -> (module it needs, how to get it)
    "console": ("rich", "pip install rich"),
    "jsonl": ("json", ""),
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "wandb": ("wandb", "pip install wandb"),
    "mlflow": ("mlflow", "pip install mlflow-skinny"),
    "trackio": ("trackio", "pip install 'trackio>=0.43'"),
    "prometheus": ("json", ""),
}


class Tracker(Protocol):
    """Anything that takes rows."""

    def log(self, row: Row) -> None:
        """Take one row of any kind; kinds that the tracker does not show are ignored."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Flush and release files and connections; called once. failed: True if an error ended the run."""
        ...


class Metrics:
    """Makes the rows of one run and hands them to its trackers.

    with Metrics.open(run, ["console", "jsonl"], rank=rank, course=Course(500), world=world) as metrics:
        metrics.start(model="…", method="full", …)
        metrics.train(step=1, loss=2.5, …)         # train_row's numbers, less world and peak
        metrics.evaluate(step=1, loss=2.4, …)      # eval_row's numbers
        metrics.log_line("Saved a checkpoint.")    # a line that does not break the progress bar

    every: steps between two train rows; total_steps: the last of them always has a row, None: unknown; world:
    number of ranks; peak_flops_per_second: of one device in the run's precision, None: unknown; console: None
    prints nothing. A tracker that raises is dropped with a message; errors of VITAL ones are passed on.
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
        course: Course,
        world: int = 1,
        device: str = "cuda",
        memory: bool = False,
        peak_flops_per_second: float | None = None,
        settings: Mapping[str, Any] | None = None,
        labels: Labels = Labels(),  # noqa: B008 - a frozen value
        more: Sequence[Tracker] = (),
        console: Console | None = None,
    ) -> "Metrics":
        """Start the trackers named in `to` (names of TRACKERS), on rank 0; on other ranks none. metrics.jsonl
        is written whatever `to` says: the result of the run is read from it.

        `course`: the steps to come; `device`: torch's type, cuda or cpu; `memory`: print the memory of the
        first steps; `settings`: the resolved config as plain values, which some trackers show under `labels`;
        `more`: trackers besides the named ones; `console` is None for stderr. The rest is as in the class.
        Raises UserError when a tracker is unknown, its library is missing, or it can't start.
        """
        if rank != 0:
            return cls((), every=every, total_steps=course.steps, world=world)
        names = list(dict.fromkeys(to))
        if problems := tracker_problems(names):
            raise UserError(problems)
        console, shown = console or Console(stderr=True), public(settings or {})
        start = {
            "console": lambda: ConsoleTracker(
                console, course=course, speed_unit=speed_unit(world, device), memory=memory
            ),
            "jsonl": lambda: JsonlTracker(run),
            "tensorboard": lambda: TensorBoardTracker(run.logs / "tensorboard", start_step=course.start),
            "wandb": lambda: WandbTracker(run, labels, shown),
            "mlflow": lambda: MlflowTracker(run, labels, shown),
            "trackio": lambda: TrackioTracker(run, labels, shown),
            "prometheus": lambda: PrometheusTracker(run, labels.textfile_directory),
        }
        metrics = cls(
            (),
            every=every,
            total_steps=course.steps,
            world=world,
            peak_flops_per_second=peak_flops_per_second,
            console=console,
        )
        for name in dict.fromkeys(["jsonl", *names]):
            try:
                metrics.trackers += (start[name](),)
            except Exception as error:  # no network, no login, a full disk
                metrics.close(failed=True)
                raise UserError(
                    f"log.to: {name} could not start ({error}); leave it out to continue."
                ) from error
        metrics.trackers += (*outside(course, metrics.log_line), *more)
        return metrics

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(failed=kind is not None)

    def due(self, step: int) -> bool:
        """Whether this step has a row: every `every` steps, the first and the last."""
        return step % self.every == 0 or step == 1 or step == self.total_steps

    def start(self, **facts: Any) -> None:
        """Log a row of kind "run" before the first step: model, method, layout, device, versions …"""
        self.log({"kind": "run", **public(facts)})

    def train(self, **numbers: Any) -> None:
        """Log one update's row, if due, skipped or with the gradient noise; callbacks get each. `numbers` are
        train_row's, less `world` and the peak.
        """
        shown = bool(numbers.get("skipped") or numbers.get("noise")) or self.due(numbers["step"])
        takers = [tracker for tracker in self.trackers if shown or isinstance(tracker, Callbacks)]
        if takers:
            row = train_row(**numbers, world=self.world, peak_flops_per_second=self.peak_flops_per_second)
            self._warn_of_impossible(row)
            self.log(row, takers)

    def measured(self, step: int, due: Sequence[Row], others: Sequence[Row]) -> None:
        """Log a step's rows of times and experts if it is due, and always those of memory and device."""
        for row in [*(due if self.due(step) else []), *others]:
            self.log(row)

    def evaluate(self, **numbers: Any) -> None:
        """Log one evaluation's row; `numbers` are eval_row's."""
        self.log(eval_row(**numbers))

    def evaluating(self, **numbers: Any) -> None:
        """Show how far an evaluation is, where a tracker shows progress: step, done, total, their unit."""
        self._progress({"kind": "evaluating", **numbers})

    def training(self) -> None:
        """Show that the first step begins, where a tracker shows progress."""
        self._progress({"kind": "training"})

    def writing(self, what: str) -> None:
        """Show what is written now, where a tracker shows progress."""
        self._progress({"kind": "writing", "what": what})

    def _progress(self, row: Row) -> None:
        self.log(row, [tracker for tracker in self.trackers if getattr(tracker, "shows_progress", False)])

    def end(self, **facts: Any) -> None:
        """Log a row of kind "end": the step, and whether the run finished or what stopped it."""
        self.log({"kind": "end", **public(facts)})

    def log_line(self, text: str) -> None:
        """Print a line on the terminal, above the progress bar; nothing on ranks other than 0."""
        if self.console is not None:
            width = self.console.width if self.console.is_terminal else None
            self.console.print(
                escape(at_words(printable(public(text)), width)), soft_wrap=True, highlight=False
            )

    def close(self, *, failed: bool = False) -> None:
        """Close every tracker, and print which can't be closed; safe to call twice."""
        trackers, self.trackers = self.trackers, ()
        for tracker in trackers:
            try:
                tracker.close(failed=failed)
            except Exception as error:  # the others must still flush
                self.log_line(f"log.to: {name_of(tracker)} could not be closed: {error}")

    def log(self, row: Row, takers: Iterable[Tracker] | None = None) -> None:
        """Hand a row to every tracker, or only to `takers` of them."""
        for tracker in self.trackers if takers is None else takers:
            try:
                tracker.log(row)
            except Exception as error:
                if isinstance(tracker, VITAL):
                    raise
                self.trackers = tuple(other for other in self.trackers if other is not tracker)
                self.log_line(f"log.to: {name_of(tracker)} failed and gets no more rows: {error}")

    def _warn_of_impossible(self, row: Row) -> None:
        """Print once that an MFU above 1 was not written, with the numbers that made it."""
        reached, peak = row["tflops_per_second"], self.peak_flops_per_second
        if row["mfu"] is None and reached is not None and peak is not None and not self._warned:
            self._warned = True
            self.log_line(
                f"Step {row['step']} seems to reach {reached:.1f} of the device's {peak / 1e12:.1f} TFLOP/s, "
                f"which can't be: mfu is null wherever that is so. Is the peak right for this precision?"
            )


def name_of(tracker: Tracker) -> str:
    """The word of `log.to` that a tracker belongs to."""
    return type(tracker).__name__.removesuffix("Tracker").lower()


def tracker_problems(names: Iterable[str]) -> list[str]:
    """One sentence, with the remedy, for each named tracker that can't run; imports no tracker."""
    problems = []
    for name in names:
        if name not in TRACKERS:
            problems.append(f"log.to: there is no tracker {name}; there are {', '.join(TRACKERS)}.")
        elif not installed(TRACKERS[name][0]):
            problems.append(f"log.to: {name} is not installed; {TRACKERS[name][1]}, or leave it out.")
    return problems


def installed(module: str) -> bool:
    """Whether a top-level module can be imported; does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # already imported, and without a spec
        return True


class JsonlTracker:
    """Appends every row to the run folder's metrics.jsonl."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def log(self, row: Row) -> None:
        self.run.append(row)

    def close(self, *, failed: bool = False) -> None:
        """Nothing to do: each row is in the file when `log` returns."""


VITAL = (JsonlTracker, Callbacks)  # without its rows a run is lost; a callback's error is the user's
