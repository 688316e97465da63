"""Every layout that a search considers, as columns.

    sizes of tp, cp, pp ─> shards and ZeRO stage ─> cp method, sp, schedule ─> micro-batch, recomputation

Each arrow crosses the layouts with options that depend on one of their columns (`crossed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.errors import UserError
from meshtune.layout import (
    AXES,
    BEYOND,
    CP_METHODS,
    MODEL_AXES,
    RECOMPUTATIONS,
    RECOMPUTE,
    SCHEDULES,
    V_SCHEDULES,
    VIRTUAL_SCHEDULES,
    Layout,
)
from meshtune.placement.columns import ENCODINGS, Columns, Number, rows
from meshtune.placement.experts import searched_sizes
from meshtune.plan.cluster import Cluster
from meshtune.units import counted

if TYPE_CHECKING:
    from meshtune.placement.rules import Traits
    from meshtune.plan.programs import Tool
    from meshtune.plan.workload import Workload

NEAREST = 2  # other global batches, below and above one that the data ranks don't divide
EVERY_HYBRID = 128  # GPUs, up to which all hybrids of replicas and shards are considered
EVERY_DEGREE = 1024  # GPUs, up to which uneven degrees of tp and cp are considered besides even ones
EVERY_MICRO_BATCH = 32  # micro-batch sizes of a data rank, up to which all are considered, not powers of two

Option = Mapping[str, Any]  # values for some fields of Layout, by name
Given = Mapping[str, Any]  # the fields of Layout that are fixed, with their values


def candidates(workload: Workload, cluster: Cluster, fixed: Given) -> Columns:
    """All ways to use the cluster's ranks that can make the global batch. Raises UserError if there is none.

    Their columns of micro-batch size (1), accumulation (more steps than any schedule asks for) and
    recomputation (none) are placeholders, which `with_micro_batches` replaces.

    Hybrids of replicas and shards: beyond EVERY_HYBRID GPUs only those with shards over all data ranks, over
    those inside a node, or, without a pipeline, over doublings of these. Only over context ranks: ZeRO-3, and
    with one data rank on at most EVERY_HYBRID GPUs the other stages. Uneven degrees of tp and cp: up to
    EVERY_DEGREE GPUs, and where no others make the batch.
    """
    outer = _outer(workload, cluster, fixed)
    if not outer:
        raise UserError(_no_batch(workload, cluster, fixed))
    steps = workload.global_batch_size * cluster.gpus  # more than any schedule asks for
    inner = {
        "micro_batch_size": 1, "gradient_accumulation_steps": steps, "recompute": "none",
        "recompute_blocks": None,
    }  # fmt: skip
    return Columns(**crossed(outer, outer["pp"], lambda _: [inner]))


def micro_batches(workload: Workload, data_ranks: int, fixed: Given) -> list[Option]:
    """Micro-batch size, accumulation steps and recomputation that make a data rank's part of the batch.

    Empty if `data_ranks` does not divide the global batch, or fixed sizes do not make that part. Modes that
    the search does not offer, and recomputation of some blocks, are there only if fixed.
    If the part has more than EVERY_MICRO_BATCH sizes, only powers of two.
    """
    sequences, rest = divmod(workload.global_batch_size, data_ranks)
    if rest:
        return []
    micro, accumulation = fixed.get("micro_batch_size"), fixed.get("gradient_accumulation_steps")
    regather = fixed.get("sp_regather", False)
    some, documents = fixed.get("recompute_blocks"), workload.document_tokens or workload.seq_len
    sizes = [
        size
        for size in divisors(sequences)
        if micro in (None, size)
        and accumulation in (None, sequences // size)
        and max(size, sequences // size) < BEYOND
    ]
    if len(sizes) > EVERY_MICRO_BATCH:
        sizes = [size for size in sizes if size.bit_count() == 1] or sizes[:EVERY_MICRO_BATCH]
    modes = [
        name
        for name, mode in RECOMPUTATIONS.items()
        if documents >= mode.searched_from and not (regather and mode.block) and (mode.block or some is None)
    ]
    return [
        {
            "micro_batch_size": size, "gradient_accumulation_steps": sequences // size, "recompute": mode,
            "recompute_blocks": some,
        }
        for size in sizes
        for mode in _allowed(fixed, "recompute", modes)
    ]  # fmt: skip


def nearest_sizes(size: int, cluster: Cluster, fixed: Mapping[str, Any]) -> list[int]:
    """Global batch sizes nearest to `size`, in sequences, that more data ranks can share; smaller ones first.

    At most NEAREST below and NEAREST above, between half and twice `size`: multiples of numbers of data ranks
    that leave at most a node to the other axes or, where these have no such multiple, of the largest number
    that has one. fixed: as in `search`. Empty if all data ranks can share `size`.
    """
    ranks = cluster.gpus // math.prod(fixed.get(axis, 1) for axis in MODEL_AXES)
    near: set[int] = set()
    for model_ranks in divisors(ranks) if ranks else ():
        data_ranks = ranks // model_ranks
        if data_ranks <= math.gcd(size, ranks) or (near and model_ranks > cluster.node):
            break
        below = size // data_ranks * data_ranks
        near |= {other for other in (below, below + data_ranks) if size / 2 < other < 2 * size}
    return [
        *sorted(other for other in near if other < size)[-NEAREST:],
        *sorted(other for other in near if other > size)[:NEAREST],
    ]


def with_micro_batches(layouts: Columns, options: Mapping[int, Sequence[Option]]) -> Columns:
    """Each layout with each of the micro-batches of its number of data ranks; fewer data ranks first.

    options: `micro_batches` by number of data ranks.
    """
    order = np.argsort(layouts.data_ranks, kind="stable")
    columns = {name: column[order] for name, column in vars(layouts).items()}
    return Columns(**crossed(columns, layouts.data_ranks[order], options.__getitem__))


def with_regathering(layouts: Columns) -> Columns:
    """Layouts that sp_regather would change, with it: the same matmuls, less memory, more time."""
    changed = rows(layouts, (layouts.sp > layouts.sp_regather) & ~layouts.recomputation("block"))
    return changed.replace(sp_regather=changed.sp)


def uneven_degrees(workload: Workload, cluster: Cluster, layouts: Columns, fixed: Given) -> Number:
    """True where a tp or cp that is not fixed is uneven (`is_uneven`)."""
    free = [getattr(layouts, axis) for axis in ("tp", "cp") if axis not in fixed]
    return np.any([np.zeros(len(layouts.tp), bool), *(is_uneven(n, workload, cluster) for n in free)], axis=0)


def is_uneven(size: Number, workload: Workload, cluster: Cluster) -> Number:
    """True for a degree of tp or cp that divides neither a node's GPUs nor the heads.

    Whole nodes that split the sequence into equal parts are even too, such as cp16 on nodes of 8.
    """
    whole_nodes = (size % cluster.node == 0) & (workload.seq_len % size == 0)
    return (cluster.node % size != 0) & (workload.traits.heads % size != 0) & ~whole_nodes


def crossed(
    columns: Mapping[str, Number], by: Number, options: Callable[[int], Sequence[Option]]
) -> dict[str, Number]:
    """Each row with each of its options, one after the other; an option's fields become columns.

    They replace columns of the same name. A row without an option is dropped. by: a whole number for each
    row, for which `options` returns the row's options.
    """
    keys, key_of_row = np.unique(by, return_inverse=True)
    options_of_key = [options(int(key)) for key in keys]
    counts = np.array([len(several) for several in options_of_key], dtype=int)
    firsts = np.cumsum(counts) - counts  # of each key in the list of all options
    rows = np.repeat(np.arange(len(by)), counts[key_of_row])
    within = np.arange(len(rows)) - np.repeat(
        np.cumsum(counts[key_of_row]) - counts[key_of_row], counts[key_of_row]
    )
    chosen = firsts[key_of_row[rows]] + within
    every = columns_of([option for several in options_of_key for option in several])
    return {name: column[rows] for name, column in columns.items()} | {
        name: column[chosen] for name, column in every.items()
    }


def columns_of(options: Sequence[Option]) -> dict[str, Number]:
    """The fields of some options as columns."""
    return {
        name: np.array([ENCODINGS[name].number(option[name]) for option in options], dtype=float)
        for name in (options[0] if options else ())
    }


# what belongs together #


def _outer(workload: Workload, cluster: Cluster, fixed: Given) -> dict[str, Number]:
    """All columns but those of micro-batch, accumulation and recomputation; empty where no layout makes the
    global batch with the fields that are fixed.
    """
    blocks = int(workload.work.blocks)
    data_ranks = {ranks for ranks in divisors(cluster.gpus) if micro_batches(workload, ranks, fixed)}
    columns: dict[str, Number] = {}
    for even in (True, False) if cluster.gpus > EVERY_DEGREE else (False,):
        degrees = _degrees(workload, cluster, fixed, even=even)
        columns = columns or columns_of(
            [
                {**sharding, **sizes}
                for sizes in _sizes(MODEL_AXES, cluster.gpus, degrees)
                for sharding in _shardings(sizes, cluster, data_ranks, fixed)
            ]
        )
    if not columns:
        return {}
    columns = crossed(columns, columns["cp"], lambda cp: _methods(cp, fixed))
    split = workload.tool.sequence_parallel
    columns = crossed(columns, columns["tp"], lambda tp: _sequence_parallel(tp, split, fixed))
    if not len(columns["pp"]):
        return {}
    columns = crossed(columns, columns["pp"], lambda pp: _schedules(pp, blocks, workload.tool, fixed))
    return _expert_parallel(columns, workload.traits, fixed) if len(columns["pp"]) else {}


def _allowed(fixed: Given, name: str, values: Sequence[Any]) -> Sequence[Any]:
    """The value that the field `name` is fixed to, as a list, or else `values`."""
    return [fixed[name]] if name in fixed else values


def _degrees(workload: Workload, cluster: Cluster, fixed: Given, *, even: bool) -> dict[str, Sequence[int]]:
    """Sizes of each of MODEL_AXES to consider: divisors of the GPUs, unless fixed.

    pp is at most the number of blocks. even: whether uneven tp and cp are left out.
    """
    every = divisors(cluster.gpus)
    sizes = [n for n in every if not (even and is_uneven(n, workload, cluster))]
    sizes_of = {"tp": sizes, "cp": sizes, "pp": [n for n in every if n <= workload.work.blocks]}
    return {axis: _allowed(fixed, axis, sizes_of[axis]) for axis in MODEL_AXES}


def _sizes(axes: Sequence[str], gpus: int, degrees: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Yield sizes of these axes, of their `degrees`, whose product divides the GPUs."""
    if not axes:
        yield {}
        return
    axis, *others = axes
    for size in degrees[axis]:
        if gpus % size == 0:
            for rest in _sizes(others, gpus // size, degrees):
                yield {axis: size, **rest}


def _shardings(
    sizes: Mapping[str, int], cluster: Cluster, data_ranks: Collection[int], fixed: Given
) -> list[Option]:
    """Replicas, shards and ZeRO stages of the data ranks that `sizes` leave of the cluster.

    sizes: of MODEL_AXES. data_ranks: numbers of data ranks that make the global batch; with another number
    the result is empty.
    """
    data = cluster.gpus // math.prod(sizes.values())
    if data not in data_ranks:
        return []
    neighbours = math.prod(size for axis, size in sizes.items() if axis != "pp")
    local = math.gcd(data, max(1, cluster.node // neighbours))
    doubled = (local * 2**n for n in range(1, 12 if sizes["pp"] == 1 else 1))
    replicas = fixed.get("dp_replicate", data)
    every_stage = (1, 2, 3) if data == 1 and cluster.gpus <= EVERY_HYBRID else (3,)
    over_context = every_stage if sizes["cp"] > 1 else ()  # ZeRO shards over context ranks too
    few = sorted({1, local, data, max(1, data // replicas), *(n for n in doubled if data % n == 0)})
    return [
        {"dp_replicate": data // shards, "dp_shard": shards, "zero": zero}
        for shards in _allowed(fixed, "dp_shard", divisors(data) if cluster.gpus <= EVERY_HYBRID else few)
        if data % shards == 0
        for zero in _allowed(fixed, "zero", (1, 2, 3) if shards > 1 else (0, *over_context))
        if (zero > 0 if shards > 1 else zero == 0 or sizes["cp"] > 1)
        and data // shards == fixed.get("dp_replicate", data // shards)
    ]


def _methods(cp: int, fixed: Given) -> list[Option]:
    methods = _allowed(fixed, "cp_method", CP_METHODS) if cp > 1 else (Layout.cp_method,)
    return [{"cp_method": method} for method in methods]


def _sequence_parallel(tp: int, split: bool, fixed: Given) -> list[Option]:
    """Options for sp: on if tp > 1, unless fixed. With sp the same bytes are sent and fewer stored.

    Without sp_regather, unless it is fixed: `with_regathering` adds it where it is needed. split: sp exists;
    False: it is off, unless fixed.
    """
    regather = fixed.get("sp_regather", False)
    values = _allowed(fixed, "sp", (split,)) if tp > 1 else (False,)
    return [{"sp": sp, "sp_regather": regather} for sp in values if sp or not regather]


def _expert_parallel(columns: dict[str, Number], traits: Traits, fixed: Given) -> dict[str, Number]:
    """Each row with the sizes of ep, of those that divide the experts, that it can have."""
    tried = [{"ep": size} for size in _allowed(fixed, "ep", searched_sizes(traits))]
    every = crossed(columns, columns["pp"], lambda _: tried)
    others = {name: np.ones(len(every["ep"])) for name in ENCODINGS.keys() - every.keys()}
    fits = Columns(**every, **others).splits_experts
    return {name: column[fits] for name, column in every.items()} if np.any(fits) else {}


def _schedules(pp: int, blocks: int, tool: Tool, fixed: Given) -> list[Option]:
    """Schedules with their stages per rank (`virtual_stages`): 2 under V schedules.

    VIRTUAL_SCHEDULES take the tool's numbers of stages up to blocks // pp, interleaved1f1b and loopedbfs from
    2 on, even if the blocks are too few; all others 1. A fixed virtual_stages replaces these, and leaves out
    schedules that can't have it. Without a pipeline: 1f1b with 1.
    """
    if pp == 1:
        return [{"schedule": Layout.schedule, "virtual_stages": 1}]
    options: list[Option] = []
    for schedule in _allowed(fixed, "schedule", SCHEDULES):
        if schedule in V_SCHEDULES:
            stages: Sequence[int] = [2]
        else:
            least = 2 if schedule in ("interleaved1f1b", "loopedbfs") else 1  # else it is 1f1b, or gpipe
            several = schedule in VIRTUAL_SCHEDULES
            most = max(least, blocks // pp) if several else 1
            tried = [count for count in tool.virtual_stages if least <= count <= most]
            stages = [count for count in _allowed(fixed, "virtual_stages", tried) if count == 1 or several]
        options += [{"schedule": schedule, "virtual_stages": n} for n in stages]
    return options


@lru_cache(maxsize=1024)
def divisors(number: int) -> list[int]:
    """Divisors in ascending order, in the time of a loop to the square root of the largest prime in them."""
    every, prime = [1], 2
    while number > 1:
        if prime * prime > number:
            prime = number
        powers = [1]
        while number % prime == 0:
            number //= prime
            powers.append(powers[-1] * prime)
        every = [divisor * power for power in powers for divisor in every]
        prime += 1
    return sorted(every)


def _no_batch(workload: Workload, cluster: Cluster, fixed: Given) -> str:
    """A sentence on why there is no candidate, with the nearest global batch that has one, if any does."""
    size, gpus = workload.global_batch_size, cluster.gpus
    if size >= BEYOND * gpus:
        return (
            f"A global batch of {counted(size, 'sequence')} is more than {BEYOND:,} for each of "
            f"{counted(gpus, 'GPU')}; set a smaller train.global_batch_size."
        )
    usual = {field.name: field.default for field in fields(Layout)}
    settings = ", ".join(f"{name} {value}" for name, value in fixed.items() if value != usual[name])
    layouts = f"No layout of {gpus} GPU{'s' * (gpus > 1)}" + f" with {settings}" * bool(settings)
    fixed_sizes = [fixed.get(name) for name in ("micro_batch_size", "gradient_accumulation_steps")]
    unit = math.prod(fixed_size or 1 for fixed_size in fixed_sizes)
    grains = [ranks * unit for ranks in divisors(gpus)]
    near = {grain * (1 if all(fixed_sizes) else max(1, round(size / grain))) for grain in grains} - {size}
    for other in sorted(near, key=lambda batch: (abs(batch - size), batch)):
        if _outer(workload.of_batch(other), cluster, fixed):
            return (
                f"{layouts} makes a global batch of {counted(size, 'sequence')}; try "
                f"train.global_batch_size={other}, or another number of GPUs."
            )
    of_stage = math.prod(fixed.get(axis, 1) for axis in AXES if axis != "pp")
    least = fixed.get("pp", 1) * math.lcm(of_stage, fixed.get("ep", 1))  # ep is taken out of a stage's ranks
    if all(axis in fixed for axis in AXES):
        return (
            f"The layout is for {counted(least, 'GPU')}, but there are {gpus}: set cluster.gpus={least}, or "
            "leave an axis of the layout auto."
        )
    if gpus % least:
        return (
            f"The fixed axes of the layout take a multiple of {counted(least, 'GPU')}, but there are {gpus}: "
            "change cluster.gpus, or leave more of the layout auto."
        )
    return f"{layouts} exists, whatever the global batch: leave more of the layout auto."


# Recomputation of the fewest blocks that fit #

# A search predicts recomputation of all blocks or of none. Of the layouts that recompute all and fit, the
# most promising ones are predicted again with fewer blocks: by bisection, all at once.


MOST = 256  # layouts to bisect
SLOWEST = 1.5  # times the quickest step: no recomputation makes one longer than that (4 + 2 all-reduces to 4)

Predicted = Callable[[Columns], Number]


def with_fewest_blocks(
    fitting: Columns, seconds: Number, peaks: Number, blocks: Number, room: float, *,
    total: Predicted, peak: Predicted, gain: float,
) -> Columns:  # fmt: skip
    """Layouts of `fitting` that recompute every block, with the fewest recomputed blocks that fit.

    Only `promising` ones; none that fits only with every block recomputed, or with none of them, or that is
    not quicker by `gain`, a share of a step's time, than with every one.

    seconds, peaks: of their steps, in bytes. blocks: of the model. room: bytes that fit. total, peak: predict
    them.
    """
    places = promising(fitting, seconds, peaks, room, total, peak)
    layouts = rows(fitting, places)
    most = np.ceil(blocks / (layouts.pp * layouts.virtual_stages)) - 1

    def fits(number: Number) -> Number:
        return peak(layouts.replace(recompute_blocks=number)) <= room

    some = (most > 0) & fits(most)  # a stage of one block recomputes it or not
    layouts, most, seconds = rows(layouts, some), most[some], seconds[places][some]
    fewer = layouts.replace(recompute_blocks=fewest(most, fits))
    return rows(fewer, total(fewer) < seconds * math.exp(-gain))


def promising(
    fitting: Columns, seconds: Number, peaks: Number, room: float, total: Predicted, peak: Predicted
) -> Number:
    """Places of layouts that recompute every block and do not fit without recomputation: those that would be
    quickest with the fewest blocks that fit, MOST at most, and the quickest of each kind (`kind_of`), so that
    kinds are compared as fairly.

    Time and memory are taken for linear between no recomputation and that of every block. The arguments are
    those of `with_fewest_blocks`.
    """
    every = np.flatnonzero(fitting.recomputation("block") & np.isinf(fitting.recompute_blocks))
    near = every[seconds[every] <= SLOWEST * seconds.min(initial=np.inf)]
    without = rows(fitting, near).replace(recompute=np.full(len(near), RECOMPUTE.index("none")))
    largest, quickest = peak(without), total(without)
    share = np.clip((largest - room) / np.maximum(largest - peaks[near], 1.0), 0.0, 1.0)
    order = np.argsort(quickest + share * (seconds[near] - quickest), kind="stable")
    order = order[largest[order] > room]
    _, firsts = np.unique(kind_of(rows(fitting, near[order])), return_index=True)
    return near[np.union1d(order[:MOST], order[firsts])]


def kind_of(layouts: Columns) -> Number:
    """A number for each mode, ZeRO stage, degree of tp, and whether there are replicas, cp and pp."""
    number = layouts.tp
    for several in (layouts.dp_replicate, layouts.cp, layouts.pp):
        number = 2 * number + (several > 1)
    return (number * len(RECOMPUTE) + layouts.recompute) * 4 + layouts.zero


def fewest(most: Number, fits: Predicted) -> Number:
    """The least number above 0 that fits, for each element; `most` fits and 0 does not.

    fits: numbers, one for each element -> mask. A number above one that fits is taken to fit.
    """
    too_few, enough = 0 * most, most
    while np.any(enough - too_few > 1):
        middle = np.ceil((too_few + enough) / 2)
        fitting = fits(middle)
        too_few, enough = np.where(fitting, too_few, middle), np.where(fitting, middle, enough)
    return enough
