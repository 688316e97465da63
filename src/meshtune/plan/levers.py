"""Single changes to one layout, each predicted: which would gain most time or memory.

layout ──> another micro-batch, recomputation of all or some blocks, schedule, degree of tp, cp, pp or ZeRO;
           accumulation and data ranks follow, so that the global batch and the number of GPUs stay
settings ──> train.compile, twice the network, twice the global batch, in the same layout
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any, NamedTuple

from meshtune.errors import UserError
from meshtune.layout import MODEL_AXES, RECOMPUTE, SCHEDULES, VIRTUAL_SCHEDULES, Layout
from meshtune.placement.columns import Columns, at
from meshtune.plan.cluster import Cluster
from meshtune.plan.hardware import GIGA
from meshtune.plan.search import Choice, choice_of, peak, times
from meshtune.plan.seconds.step import TIE
from meshtune.plan.workload import Workload
from meshtune.units import human

LEAST_FREED = 0.05  # of the peak: a change that frees less is no lever
FACTORS = (2, 4, 8)  # of the micro-batch size, up and down
VIRTUAL_STAGES = (2, 4, 8)


class Change(NamedTuple):
    """One change, not yet predicted."""

    kind: str  # changes of one kind are alternatives to each other
    change: str  # "recomputation none instead of full"
    setting: str  # how to ask for it: "layout=zero3x8-mb1-ga8"
    workload: Workload
    cluster: Cluster
    layout: Layout


class Lever(NamedTuple):
    """A predicted change."""

    change: str  # as in Change
    setting: str
    choice: Choice
    speed: float  # tokens per second and GPU over those of the unchanged layout, less 1
    freed: float  # bytes of the peak that are no longer needed; below 0: more are needed

    def sentence(self) -> str:
        """The change, how to ask for it, and what it gains and costs."""
        tokens = "as many tokens per second"
        if abs(self.speed) >= TIE:
            tokens = f"{abs(self.speed):.1%} {'more' if self.speed > 0 else 'fewer'} tokens per second"
        needed, before = human(self.choice.memory.peak), human(self.choice.memory.peak + self.freed)
        memory = f"{needed} instead of {before}" if needed != before else f"{needed} as before"
        fits = "" if self.choice.fits else ", which does not fit"
        gain = f"{tokens}, {memory}" if self.choice.cluster.timed else memory
        return f"{self.change} ({self.setting}): {gain}{fits}."

    def as_dict(self) -> dict[str, Any]:
        """The lever in the JSON document; shares and bytes."""
        return {
            "change": self.change,
            "setting": self.setting,
            "speed": self.speed if self.choice.cluster.timed else None,
            "freed": self.freed,
            "fits": self.choice.fits,
        }


def levers(workload: Workload, choice: Choice, most: int = 3) -> list[Lever]:
    """The changes that gain most, at most `most`, each of another kind.

    Of a layout that fits: the fastest that fit, then, if fewer than `most` gain TIE, those that free most.
    Of one that does not: the fastest that then fit, then those that free most. Where predicted times mean
    nothing: those that free most alone. workload: with the layout's global batch.
    """
    kinds: dict[str, list[Lever]] = defaultdict(list)
    for kind, lever in _predicted(list(changes(workload, choice)), choice):
        kinds[kind].append(lever)
    least_speed = TIE if choice.fits else -1.0
    faster = {
        kind: max(fitting, key=lambda lever: lever.speed)
        for kind, some in kinds.items()
        if choice.cluster.timed
        and (fitting := [one for one in some if one.choice.fits and one.speed >= least_speed])
    }
    least_freed = LEAST_FREED * choice.memory.peak
    lighter = {
        kind: max(freeing, key=lambda lever: lever.freed)
        for kind, some in kinds.items()
        if kind not in faster and (freeing := [one for one in some if one.freed >= least_freed])
    }
    return [
        *sorted(faster.values(), key=lambda lever: -lever.speed),
        *sorted(lighter.values(), key=lambda lever: -lever.freed),
    ][:most]


def _predicted(every: Sequence[Change], choice: Choice) -> Iterator[tuple[str, Lever]]:
    """(kind, lever) of each change, those with the same settings predicted at once."""
    for _, alike in groupby(every, key=lambda one: (id(one.workload), id(one.cluster))):
        some = list(alike)
        workload, cluster = some[0].workload, some[0].cluster
        columns = Columns.of([one.layout for one in some])
        seconds, memory = times(workload, cluster, columns), peak(workload, cluster, columns)
        for place, one in enumerate(some):
            other = choice_of(workload, cluster, one.layout, at(seconds, place), at(memory, place))
            speed = other.tokens_per_second_per_gpu / choice.tokens_per_second_per_gpu - 1
            yield (
                one.kind,
                Lever(one.change, one.setting, other, speed, choice.memory.peak - other.memory.peak),
            )


def changes(workload: Workload, choice: Choice) -> Iterator[Change]:
    """Every single change that the model can be trained under, to the layout, then to the settings."""
    layout, cluster = choice.layout, choice.cluster
    for kind, change, other in neighbours(layout, int(workload.work.blocks)):
        if not workload.refusals(other):
            yield Change(kind, change, f"layout={other}", workload, cluster, other)
    if not workload.compile and not (compiled := workload.compiled()).refusals(layout):
        yield Change("compile", "compiled blocks", "train.compile=true", compiled, cluster, layout)
    if cluster.nodes > 1:
        twice = replace(cluster, network=2 * cluster.network)
        setting = f"cluster.network={twice.network / GIGA:g}"
        yield Change("network", "twice the network", setting, workload, twice, layout)
    larger = workload.of_batch(2 * workload.global_batch_size)
    more = replace(layout, gradient_accumulation_steps=2 * layout.gradient_accumulation_steps)
    setting = f"train.global_batch_size={larger.global_batch_size} layout={more}"
    yield Change("batch", "twice the global batch", setting, larger, cluster, more)


def neighbours(layout: Layout, blocks: int) -> Iterator[tuple[str, str, Layout]]:
    """(kind, change, layout) for layouts with the same GPUs and global batch that differ in one thing.

    blocks: of the model.
    """
    for kind, change, fields in _fields(layout, blocks):
        try:
            other = replace(layout, **fields)
        except UserError:  # such as regather under full recomputation
            continue
        if other != layout:
            yield kind, change, other


def _fields(layout: Layout, blocks: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(kind, change, fields of the layout that it sets) of each neighbour, contradictory ones among them."""
    size, steps = layout.micro_batch_size, layout.gradient_accumulation_steps
    sizes = [(size * n, steps // n) for n in FACTORS if steps % n == 0]
    sizes += [(size // n, steps * n) for n in FACTORS if size % n == 0]
    for micro, rest in sizes:
        fields = {"micro_batch_size": micro, "gradient_accumulation_steps": rest}
        yield "micro-batch", f"micro-batch {micro} instead of {size}", fields
    for mode, some in product(RECOMPUTE, (None, *range(1, math.ceil(blocks / layout.stages)))):
        change = f"recomputation {mode}{some or ''} instead of {layout.recomputation}"
        yield "recomputation", change, {"recompute": mode, "recompute_blocks": some}
    for schedule in SCHEDULES if layout.pp > 1 else ():
        for virtual in VIRTUAL_STAGES if schedule in VIRTUAL_SCHEDULES else (1,):
            stages = f" with {virtual} stages a rank" if virtual > 1 else ""
            fields = {"schedule": schedule, "virtual_stages": virtual}
            yield "schedule", f"schedule {schedule}{stages} instead of {layout.schedule}", fields
    for axis in MODEL_AXES:
        degree = getattr(layout, axis)
        for other in (2 * degree, degree // 2 if degree % 2 == 0 else 0):
            if other and (data := _other_data_ranks(layout, degree, other)):
                fields = data | _axis(layout, axis, other)
                if fields.get("dp_shard", layout.dp_shard) * fields.get("cp", layout.cp) == 1:
                    fields["zero"] = 0
                yield axis, f"{axis} {other} instead of {degree}", fields
    ranks = layout.data_ranks
    now = _sharded(layout.zero, layout.shard_ranks)
    for zero in (0, 1, 2, 3) if layout.parameter_ranks > 1 else ():
        shards = ranks if zero else 1
        fields = {"zero": zero, "dp_shard": shards, "dp_replicate": ranks // shards}
        yield "ZeRO", f"{_sharded(zero, shards * layout.cp)} instead of {now}", fields
    for shards in (2 * layout.dp_shard, layout.dp_shard // 2) if layout.zero else ():
        if shards * layout.cp > 1 and shards and ranks % shards == 0:
            fields = {"dp_shard": shards, "dp_replicate": ranks // shards}
            yield "ZeRO", f"{shards * layout.cp} shards instead of {layout.shard_ranks}", fields


def _other_data_ranks(layout: Layout, degree: int, other: int) -> dict[str, Any]:
    """Fields that keep GPUs and global batch where an axis goes from `degree` to `other`.

    Accumulation changes, else the micro-batch; {} if neither can.
    """
    fields: dict[str, Any] = {}
    axis = "dp_shard" if layout.zero else "dp_replicate"
    ranks = getattr(layout, axis) * degree
    if ranks % other:
        return {}
    fields[axis] = ranks // other
    for name in ("gradient_accumulation_steps", "micro_batch_size"):
        sequences = getattr(layout, name) * other
        if sequences % degree == 0:
            return fields | {name: sequences // degree}
    return {}


def _axis(layout: Layout, axis: str, degree: int) -> dict[str, Any]:
    """The axis's degree, and the fields that belong to it."""
    if axis == "tp":
        return {"tp": degree, "sp": degree > 1, "sp_regather": layout.sp_regather and degree > 1}
    if degree > 1:
        return {axis: degree}
    belongs = {"cp": {"cp_method": "allgather"}, "pp": {"schedule": "1f1b", "virtual_stages": 1}}
    return {axis: 1} | belongs[axis]


def _sharded(zero: int, shards: int) -> str:
    return f"ZeRO-{zero} in {shards} shards" if zero else "no ZeRO"
