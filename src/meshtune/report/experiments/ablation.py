"""A sweep by its axes: speed and memory by one axis and coloured by another, and what each value of an axis
changes with everything else equal.

Axes are the settings that the sweep changes and, where whole layouts are among them, the fields of the
layouts that differ. Data ranks and accumulation follow from the GPUs, the global batch and the other fields.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from meshtune.errors import UserError, did_you_mean, nearest
from meshtune.layout import BELONGS, DATA_AXES, Layout
from meshtune.report.draw.kinds import Dot, Mark, Multiples, Panel, Stacks
from meshtune.report.draw.table import Table
from meshtune.report.experiments.axes import MOST_LINES, about, axis, loss_axis, most_frequent
from meshtune.report.experiments.rows import BATCH, GPUS, MODEL, SEED, Experiment, Sweep
from meshtune.units import counted, number

FIELDS = (
    "zero", "tp", "sp", "cp", "cp_method", "ep", "pp", "schedule", "virtual_stages", "micro_batch_size",
    "recompute",
)  # fmt: skip
GLOBAL_BATCH, LAYOUT = "global_batch", "layout"
layout_of = cache(Layout.parse)


class SweptAxis(NamedTuple):
    """A setting, or field of layouts, that experiments differ in."""

    key: str  # dotted setting, such as layout.tp

    @property
    def name(self) -> str:
        """Its name in pictures: "tp" of "layout.tp", "model" of "model.name"."""
        words = [word for word in self.key.split(".") if word != "name"]
        return words[-1].replace("_", " ").replace("gpus", "GPUs")

    def of(self, one: Experiment) -> Hashable:
        """Its value in an experiment: a number, a text, or None where the base has it."""
        if self.key in (GPUS, GLOBAL_BATCH):
            return one.gpus if self.key == GPUS else one.global_batch
        field = self.key.removeprefix("layout.")
        if field == self.key or not one.layout:
            value = one.settings.get(self.key)
            return value if isinstance(value, Hashable) else str(value)
        return getattr(layout_of(one.layout), "recomputation" if field == "recompute" else field)


Roles = tuple[SweptAxis | None, SweptAxis | None, SweptAxis | None]  # of `Ablation.roles`


class Gain(NamedTuple):
    """Medians over pairs of experiments that differ only in one axis."""

    axis: str  # dotted setting
    before: str  # value of the axis
    after: str
    speed: float | None  # with `after`, as a multiple of the speed with `before`
    memory: float | None
    pairs: int
    once: bool  # one pair, each measured once: the ratios may be noise


@dataclass(frozen=True)
class Ablation:
    """The axes of a sweep. Raises UserError for a `by` or `color` that isn't among them."""

    sweep: Sweep
    by: str | None = None  # axis of the small charts; None: the first that is not along them
    color: str | None = None  # axis of the colours; None: the next one

    def __post_init__(self) -> None:
        _ = self.roles

    @cached_property
    def done(self) -> list[Experiment]:
        return [one for one in self.sweep.done if one.shown.speed or one.shown.peak_bytes]

    @cached_property
    def axes(self) -> list[SweptAxis]:
        """Axes that have several values among the experiments with a result."""
        keys = [key for key in self.sweep.varied if key not in (SEED, LAYOUT)]
        keys += [*(f"layout.{field}" for field in FIELDS), GPUS]
        keys += [] if {*keys} & {*BATCH} else [GLOBAL_BATCH]
        return [one for one in map(SweptAxis, dict.fromkeys(keys)) if len(self.values(one)) > 1]

    @cached_property
    def independent(self) -> list[SweptAxis]:
        """The axes without those that have one value for each value of another one."""

        def follows(one: SweptAxis, other: SweptAxis) -> bool:
            return len({(other.of(each), one.of(each)) for each in self.done}) == len(self.values(other))

        def depends(place: int) -> bool:
            one, others = self.axes[place], enumerate(self.axes)
            return any(
                follows(one, other) and (number < place or not follows(other, one))
                for number, other in others
                if number != place
            )

        return [one for place, one in enumerate(self.axes) if not depends(place)]

    def values(self, one: SweptAxis) -> list[Any]:
        """The values of an axis: numbers by size, others in the order of the sweep."""
        known = set(map(one.of, self.done))
        values: list[Any] = [v for v in dict.fromkeys(map(one.of, self.sweep.experiments)) if v in known]
        return sorted(values) if all(isinstance(value, int | float) for value in values) else values

    @cached_property
    def roles(self) -> Roles:
        """(The axis along the charts, that of the small charts, that of the colours); None: there is none.

        By default the axis with most values is along the charts; the others follow in the sweep's order.
        """
        by = self._named("--by", self.by) if self.by else None
        color = self._named("--color", self.color) if self.color else None
        free = [one for one in self.independent if one not in (by, color)]
        along = max(free, key=lambda one: len(self.values(one)), default=color or by)
        few = [one for one in free if one != along and len(self.values(one)) <= MOST_LINES]
        if by is None and few and (color or len(few) > 1):
            by = few.pop(0)
        return along, by, color or next(iter(few), None)

    def _named(self, option: str, word: str) -> SweptAxis:
        """The axis of a dotted setting or its last word, such as tp. Raises UserError for other words."""
        found = [one for one in self.axes if word.lower() in (one.key, one.name, one.key.rpartition(".")[2])]
        if len(found) == 1:
            return found[0]
        names = [one.key for one in found or self.axes]
        near = did_you_mean(nearest(word, names, lambda key: key.rpartition(".")[2]))
        raise UserError(
            f"{option} {word}: the axes of this sweep are {', '.join(names)}{near}"
            if names
            else f"{option} {word}: no axis of this sweep has several values with a result."
        )

    @cached_property
    def loss_roles(self) -> Roles:
        """The roles in a picture of the held-out loss: along the charts is the axis, other than the global
        batch (which batch.py draws) and, if possible, the model, whose values differ most in it.
        """
        along, by, color = self.roles
        left_out = (self.by and by, self.color and color)
        free = [
            one for one in self.independent if one not in left_out and one.key not in (GLOBAL_BATCH, *BATCH)
        ]
        chosen = max(free, key=lambda one: (one.key != MODEL, self._loss_range(one)), default=None)
        return chosen, along if by == chosen else by, along if color == chosen else color

    def _loss_range(self, one: SweptAxis) -> float:
        """Distance of the highest from the lowest median loss of the values of an axis."""
        known = [(one.of(each), each.eval_loss) for each in self.done if each.eval_loss]
        medians = [median(loss for at, loss in known if at == value) for value, _ in known]
        return max(medians, default=0.0) - min(medians, default=0.0)

    # Pictures #

    def panels(self) -> Iterator[Panel]:
        """Yield speed and memory by the axes, then the gains, as far as there are numbers."""
        unit = self.sweep.speed_unit
        yield from self._by_axes("speed", "Speed", unit, "fastest", lambda one: one.shown.speed or 0)
        yield from self._by_axes(
            "memory", "Peak memory", "GiB", "lowest", lambda one: -(one.shown.peak_gib or 0)
        )
        yield from self._by_axes(
            "loss", "Held-out loss", "loss per label token", "lowest", lambda one: -(one.eval_loss or 0)
        )
        gains = [one for one in self.gains if not one.once]
        ratios = {"speed": [one.speed for one in gains], "memory": [one.memory for one in gains]}
        if parts := {
            part: tuple(ratio or 0.0 for ratio in some) for part, some in ratios.items() if any(some)
        }:
            yield Stacks(
                "gains", "What each axis changes with everything else equal",
                "multiple of the value before, the median over pairs", tuple(map(_change, gains)), parts,
                tuple(counted(one.pairs, "pair") for one in gains), Mark(1.0, "no change"),
                stacked=False, item="change",
            )  # fmt: skip

    def _by_axes(
        self, key: str, title: str, unit: str, best: str, rank: Callable[[Experiment], float]
    ) -> Iterator[Multiples]:
        """Yield the picture of a figure, its size of `rank`: the highest of each place is on the line, the
        highest of all is named as the `best`.
        """
        along, by, color = roles = self.loss_roles if (is_loss := key == "loss") else self.roles
        places: dict[tuple[str, ...], list[Experiment]] = {}
        for one in self.done:
            if rank(one):
                places.setdefault(tuple(text(a.of(one)) if a else "" for a in roles), []).append(one)
        if along is None or not places:
            return
        first = max((one for some in places.values() for one in some), key=rank)
        figure = f"{abs(rank(first)):.4f}" if is_loss else number(abs(rank(first)))
        names, notes = [], [f"; {best}: {figure}, {self.sweep.label(first)}, {about(first)}"]
        for rank_of, role in enumerate(roles):
            known = [text(value) for value in self.values(role)] if role else [""]
            every = [
                name
                for name in known
                for place, some in places.items()
                for _ in some
                if name == place[rank_of]
            ]
            drawn, note = most_frequent(every, f"values of {role.name if role else ''}")
            names.append(list(dict.fromkeys(every)) if role is along else drawn)
            notes.append("" if role is along else note)
        heads = {head: f"{by.name} {head}" if by else "" for head in names[1]}
        dots = tuple(
            Dot(heads[head], x, abs(rank(one)), group, about(one), one is max(some, key=rank))
            for x, head, group in product(*names)
            for some in [places.get((x, head, group), [])]
            for one in some
        )
        named = " and ".join(dict.fromkeys(one.name for one in (along, by) if one))
        yield Multiples(
            f"by_axis_{key}", f"{title} by {named}{f', coloured by {color.name}' if color else ''}",
            f"{unit}; lines: the {best} of each, dots: all experiments{''.join(notes)}",
            tuple(heads.values()), tuple(names[0]), tuple(names[2]), dots,
            (loss_axis if is_loss else axis)(unit, [dot.y for dot in dots]),
            along.name, color.name if color else "",
        )  # fmt: skip

    # Pairs that differ only in one axis #

    @cached_property
    def gains(self) -> list[Gain]:
        """For each value of an axis the ratios to the first value that there are pairs with; of more than
        MOST_LINES values, for some of them. Whole layouts are an axis where a field has no pairs.
        """
        gains = []
        for one in [*self.independent, SweptAxis(LAYOUT)]:
            if one.key == LAYOUT and not (LAYOUT in self.sweep.varied and self._unpaired(gains)):
                continue
            values = self.values(one) if one.key != MODEL else []
            values = values[:: -(-len(values) // MOST_LINES) or 1]
            for place, after in enumerate(values):
                tried = ((before, self._pairs(one, before, after)) for before in values[:place])
                if known := next((pair for pair in tried if pair[1]), None):
                    before, pairs = known
                    speed, memory = (_ratio(pairs, field) for field in ("speed", "peak_bytes"))
                    repeats = max(each.repeats for pair in pairs for each in pair)
                    once = len(pairs) == repeats == 1 and not self.sweep.simulated
                    gains.append(Gain(one.key, text(before), text(after), speed, memory, len(pairs), once))
        return gains

    def _unpaired(self, gains: Sequence[Gain]) -> list[str]:
        """Names of the independent axes without gains, but for the model, whose values aren't compared."""
        paired = {MODEL, *(gain.axis for gain in gains)}
        return [one.name for one in self.independent if one.key not in paired]

    def _pairs(self, one: SweptAxis, before: Any, after: Any) -> list[tuple[Experiment, Experiment]]:
        """Experiments with the two values of an axis, and everything else equal: also the global batch or,
        where layouts make it, the accumulation.
        """
        others = [other for other in self.independent if other.key not in (one.key, GLOBAL_BATCH)]
        if one.key == LAYOUT:  # its fields and GPUs may differ, other settings not
            others = [other for other in self.axes if other.key in self.sweep.varied]
        groups: dict[Any, tuple[list[Experiment], list[Experiment]]] = {}
        for each in self.done:
            if (value := one.of(each)) in (before, after):
                group = groups.setdefault(tuple(other.of(each) for other in others), ([], []))
                group[value == after].append(each)
        free = one.key in (GLOBAL_BATCH, *BATCH, GPUS)
        pairs = [pair for group in groups.values() for pair in product(*group)]
        return [pair for pair in pairs if (free or _alike(*pair)) and self._planned_alike(one, *pair)]

    def _planned_alike(self, one: SweptAxis, first: Experiment, second: Experiment) -> bool:
        """True if the layouts agree in the fields that the planner may have chosen for each: those that the
        sweep does not change, without what follows from the axis.
        """
        if one.key == LAYOUT or not (first.layout and second.layout):
            return True
        (before, after), name = map(layout_of, (first.layout, second.layout)), one.key.removeprefix("layout.")
        follow = {name, *BELONGS.get(name, ()), "gradient_accumulation_steps"}
        if name == "zero" or before.data_ranks != after.data_ranks:
            follow |= {*DATA_AXES}
        return all(
            getattr(before, row.name) == getattr(after, row.name)
            for row in fields(Layout)
            if row.name not in follow and f"layout.{row.name}" not in self.sweep.varied
        )

    def table(self) -> Table:
        """The gains, a row each."""
        rows = [
            (
                _change(one),
                *(f"× {ratio:.2f}" if ratio else "" for ratio in one[3:5]),
                "one pair" if one.once else f"{one.pairs:,}",
            )
            for one in self.gains
        ]
        notes = ["Medians over pairs of experiments that differ only in this axis."]
        if any(one.once for one in self.gains):
            notes.append(
                "One pair, measured once, can be noise: repeat it with several values of train.seed."
            )
        if follow := [one.name for one in self.axes if one not in self.independent]:
            notes.append(f"Without rows, because another axis fixes the value: {', '.join(follow)}.")
        if unpaired := self._unpaired(self.gains):
            notes.append(
                f"Without rows, because no two experiments differ only in it: {', '.join(unpaired)}."
            )
        heads = ("change", "speed", "peak memory", "pairs")
        return Table.of_rows("With everything else equal", heads, rows, ("change",), tuple(notes))


def text(value: Any) -> str:
    """A value of an axis in pictures; "–" where an experiment leaves it to the base."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return "–" if value is None else str(value)


def _change(one: Gain) -> str:
    return f"{SweptAxis(one.axis).name} {one.before} → {one.after}"


def _alike(first: Experiment, second: Experiment) -> bool:
    """True for the same global batch, or the same accumulation to it."""
    accumulated = {layout_of(one.layout).gradient_accumulation_steps for one in (first, second)}
    return first.global_batch == second.global_batch or len(accumulated) == 1


def _ratio(pairs: Sequence[tuple[Experiment, Experiment]], field: str) -> float | None:
    """Median of the second's figure over the first's; None where no pair has both."""
    figures = [[getattr(one.shown, field) for one in pair] for pair in pairs]
    ratios = [after / before for before, after in figures if before and after]
    return median(ratios) if ratios else None
