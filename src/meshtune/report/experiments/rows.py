"""A sweep's experiments as values, from which its pictures and its table are made.

An experiment has figures that were measured, simulated and predicted. `shown` are those that the sweep is
about: the measured ones or, where nothing was run, the dry run's and the planner's.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from meshtune import units
from meshtune.layout import Layout
from meshtune.report.draw.words import model_title
from meshtune.report.experiments.database import SweepRows

DONE = "done"
MODEL, GPUS, SEED, SEQ_LEN = "model.name", "cluster.gpus", "train.seed", "data.seq_len"
BATCH = ("train.global_batch_size", "train.global_batch_tokens")
MOST_LABELS = 24  # rows of a heat map
SOURCES = ("predicted", "simulated", "measured")


@dataclass(frozen=True)
class Figures:
    """Speed and memory of an experiment; None: not known."""

    speed: float | None = None  # tokens/s/GPU
    mfu: float | None = None  # 0 to 1
    step_seconds: float | None = None
    peak_bytes: float | None = None

    @property
    def peak_gib(self) -> float | None:
        return self.peak_bytes and self.peak_bytes / units.GIB


@dataclass(frozen=True)
class Experiment:
    """One experiment, or the median of several that differ only in their seed."""

    number: int
    status: str
    reason: str
    layout: str  # "" where it was not resolved
    model: str
    gpus: int | None
    parameters: float | None
    seq_len: int | None
    global_batch: int | None  # sequences
    settings: Mapping[str, Any]  # that the sweep changes: dotted key -> value
    measured: Figures = Figures()
    simulated: Figures = Figures()
    predicted: Figures = Figures()
    shown: Figures = Figures()
    spread: float | None = None  # distance of the quartiles of its steps, of the median
    seconds: float | None = None  # that it took
    loss: float | None = None
    eval_loss: float | None = None
    noise_scale: float | None = None  # of the gradient
    # source (SOURCES) -> "time" or "memory" -> part -> seconds or bytes
    parts: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    repeats: int = 1  # experiments that this one is the median of

    @property
    def tokens_parameters_per_second(self) -> float | None:
        """tokens/s/GPU × parameters: speed that models of several sizes can be compared by."""
        if self.shown.speed is None or self.parameters is None:
            return None
        return self.shown.speed * self.parameters

    @property
    def micro_batch(self) -> int | None:
        """Sequences of a micro-batch; None where the layout was not resolved."""
        return Layout.parse(self.layout).micro_batch_size if self.layout else None


@dataclass(frozen=True)
class Sweep:
    """A sweep as its page shows it."""

    source: SweepRows
    experiments: tuple[Experiment, ...]
    may_read: Callable[[Path], bool] = lambda _: True  # False for files of runs that the page leaves out

    @property
    def name(self) -> str:
        return str(self.source.facts.get("name") or self.source.folder.name)

    @property
    def simulated(self) -> str:
        """The tier that stands for a measurement, "planner" or "dryrun"; "" where experiments ran."""
        return str(self.source.facts.get("simulated") or "")

    @cached_property
    def done(self) -> list[Experiment]:
        """Experiments with a result, each the median over its seeds."""
        return medians(one for one in self.experiments if one.status == DONE)

    @cached_property
    def varied(self) -> list[str]:
        """Settings that have several values among the experiments, the sweep's axes first."""
        settings = (key for one in self.experiments for key in one.settings)
        keys = dict.fromkeys([*self.source.facts.get("axes", ()), *settings])
        return [key for key in keys if len({str(one.settings.get(key)) for one in self.experiments}) > 1]

    @property
    def speed_unit(self) -> str:
        """Unit of the speed of one device, such as tokens/s/GPU."""
        processor = not self.simulated and self.source.facts.get("gpus") == 0
        most = max((one.gpus or 1 for one in self.experiments), default=1)
        return units.speed_unit(most, "cpu" if processor else "cuda")

    @property
    def device(self) -> str:
        """A device, in titles and axes."""
        return "rank" if self.speed_unit.endswith("rank") else "GPU"

    @cached_property
    def label(self) -> Callable[[Experiment], str]:
        """Function that names the workload of an experiment: its model, and the settings besides it that the
        sweep changes and that are not questions of speed (layout, GPUs, seed). Of more than MOST_LABELS
        workloads the names are only those of the models.
        """
        whole = self.naming(())
        return whole if len(set(map(whole, self.experiments))) <= MOST_LABELS else self._model_name

    def naming(self, leave_out: Collection[str]) -> Callable[[Experiment], str]:
        """As `label`, without the settings in `leave_out` and however many names there are; "" where neither
        the model nor another setting varies.
        """
        left_out = {MODEL, GPUS, SEED, *leave_out}
        keys = [key for key in self.varied if key not in left_out and not key.startswith("layout")]
        several = len({one.model for one in self.experiments}) > 1

        def name(one: Experiment) -> str:
            words = [f"{key.rpartition('.')[2]} {one.settings[key]}" for key in keys if key in one.settings]
            model = [self._model_name(one)] if several or not (words or leave_out) else []
            return " · ".join([*model, *words])

        return name

    @cached_property
    def _model_name(self) -> Callable[[Experiment], str]:
        """Function that names the model of an experiment, without its folders where that is clear."""
        short = Counter(model_title(model) for model in {one.model for one in self.experiments})
        return lambda one: model_title(one.model) if short[model_title(one.model)] == 1 else one.model

    def labels(self, experiments: Iterable[Experiment]) -> list[str]:
        """The workloads of some experiments, the smallest model first, then in the order of the sweep."""
        first = {self.label(one): (one.parameters or 0, one.number) for one in reversed([*experiments])}
        return sorted(first, key=lambda name: first[name])


def sweep_of(source: SweepRows) -> Sweep:
    """Convert a database's rows."""
    tier = str(source.facts.get("simulated") or "")
    return Sweep(source, tuple(_experiment(row, tier) for row in source.rows))


def _experiment(row: Mapping[str, Any], tier: str) -> Experiment:
    """Convert a row. tier: as `Sweep.simulated`."""
    settings = row["settings"] or {}
    measured, simulated, predicted = (
        Figures(
            *(row.get(kind + name) for name in ("tokens_per_second_per_gpu", "mfu", "step_seconds", peak))
        )
        for kind, peak in (
            ("", "peak_memory_bytes"),
            ("simulated_", "peak_bytes"),
            ("predicted_", "peak_bytes"),
        )
    )
    gpus, batch = row["gpus"] or row["world"] or settings.get(GPUS), row["global_batch_size"]
    seq_len = row["seq_len"] or settings.get(SEQ_LEN)
    shown = {"": measured, "planner": predicted}.get(tier, simulated)
    if shown is simulated and (step := simulated.step_seconds) and batch and seq_len and gpus:
        shown = replace(simulated, speed=batch * seq_len / step / gpus)
    return Experiment(
        number=row["number"], status=row["status"], reason=row["reason"] or "", layout=row["layout"] or "",
        model=str(row["model"] or settings.get(MODEL) or ""), gpus=gpus, parameters=row["parameters"],
        seq_len=seq_len, global_batch=batch, settings=settings, shown=shown, spread=row["spread"],
        measured=measured, simulated=simulated, predicted=predicted,
        seconds=row["seconds"], loss=row["loss"], eval_loss=row["eval_loss"],
        noise_scale=row["gradient_noise_scale"], parts=parts_of(row["document"]),
    )  # fmt: skip


def parts_of(document: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds by part of a step and bytes by category, as {source: {"time": …, "memory": …}}.

    document: of `bench --json` for one layout, or a layout of `plan --json`; {} for any other.
    """
    if not isinstance(document, Mapping):
        return {}
    sources = {name: document[name] for name in SOURCES if isinstance(document.get(name), Mapping)}
    if not sources and "memory" in document and "time" in document:
        sources = {"predicted": {"parts": document["time"], "memory": document["memory"]}}
    result = {}
    for name, source in sources.items():
        kinds = {"time": _positive(source.get("parts")), "memory": _positive(source.get("memory"))}
        if known := {kind: parts for kind, parts in kinds.items() if parts}:
            result[name] = known
    return result


def _positive(parts: Any) -> dict[str, float]:
    """The parts above zero, without their sums and limits."""
    pairs = parts.items() if isinstance(parts, Mapping) else ()
    sums = ("total", "peak", "capacity")
    return {
        name: float(value)
        for name, value in pairs
        if name not in sums and isinstance(value, int | float) and value > 0
    }


def medians(experiments: Iterable[Experiment]) -> list[Experiment]:
    """One experiment for all that differ only in their seed, with the medians of their figures."""
    groups: dict[str, list[Experiment]] = {}
    for one in experiments:
        others = {key: value for key, value in one.settings.items() if key != SEED}
        groups.setdefault(str(sorted(others.items())), []).append(one)
    return [group[0] if len(group) == 1 else _median(group) for group in groups.values()]


def _median(group: Sequence[Experiment]) -> Experiment:
    def middle(several: Sequence[Any], name: str) -> float | None:
        known = [value for one in several if (value := getattr(one, name)) is not None]
        return median(known) if known else None

    def figures(which: str) -> Figures:
        several = [getattr(one, which) for one in group]
        return Figures(*(middle(several, name) for name in Figures.__annotations__))

    names = ("spread", "loss", "eval_loss", "noise_scale", "seconds")
    return replace(
        group[0],
        **{which: figures(which) for which in (*SOURCES, "shown")},
        **{name: middle(group, name) for name in names},
        repeats=len(group),
    )


def best(experiments: Iterable[Experiment], key: Callable[[Experiment], Any]) -> dict[Any, Experiment]:
    """The fastest experiment of each key, in the order in which keys come; those without a speed are left
    out.
    """
    fastest: dict[Any, Experiment] = {}
    for one in experiments:
        if one.shown.speed is None:
            continue
        there = fastest.get(key(one))
        if there is None or one.shown.speed > (there.shown.speed or 0):
            fastest[key(one)] = one
    return fastest
