"""Peak memory of published rows, as the planner predicts it and as it was published (memory.toml)."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import attrgetter

import numpy as np
from measured import (
    HERE,
    Machines,
    Row,
    column,
    columns_of,
    constants_of,
    gpu_of,
    origin_of,
    origins,
    stack_of,
    work_of,
)

from meshtune.plan.accounting import Accounting, stack_accounting
from meshtune.plan.hardware import catalogue
from meshtune.plan.memory.stages import Stages
from meshtune.plan.memory.timeline import peak
from meshtune.plan.seconds.block import held_seconds
from meshtune.plan.seconds.gpu import block_compute
from meshtune.units import GIB

# constants fitted to published figures: stack, field of Accounting, precision; the others follow from code
FITTED = (
    ("megatron-deepspeed", "reserved", "fp16"),
    ("megatron-deepspeed", "communicator", "fp16"),
    ("composer", "reserved", "bf16"),
    ("torchtitan", "reserved", "bf16"),
    ("torchtitan-compiled", "selected.outside", "bf16"),
    ("torchtitan-2025", "logit", "bf16"),
    ("nanotron", "saved.queries", "bf16"),
    ("nanotron", "saved.output", "bf16"),
    ("nanotron-async", "logit", "bf16"),
    ("nanotron-async", "workspace", "bf16"),
)
UNSEEN = {  # fields of Accounting that a published figure doesn't count, by what it counts
    "device": {},
    "reserved": {"context": 0.0, "communicator": 0.0},
    "allocated": {"context": 0.0, "communicator": 0.0, "reserved": 0.0, "own_streams": 0.0},
}


@dataclass(frozen=True)
class Figure:
    """How to read the published peaks of a source (memory.toml)."""

    counts: str = "device"  # a key of UNSEEN
    first: bool = False  # it is the first pipeline rank's, else the fullest one's
    deferred: bool = False  # see `still_held`
    stack: str = ""  # whose accounting is taken; "": the row's own
    apart: str = ""  # see `why_apart`


def figure_of(row: Row) -> Figure:
    fitting = [prefix for prefix in _figures() if row["id"].startswith(prefix)]
    return _figures()[max(fitting, key=len)] if fitting else Figure()


def why_apart(row: Row) -> str:
    """The reason why the error of a row's peak is not counted with the others; "": it is."""
    return figure_of(row).apart or ("layout partly assumed" if row.get("assumed") else "")


@cache
def _figures() -> dict[str, Figure]:
    tables = tomllib.loads((HERE / "memory.toml").read_text(encoding="utf-8"))
    return {prefix: Figure(**table) for prefix, table in tables.items()}


def accounting_of(row: Row) -> Accounting:
    origin = origin_of(row, origins())
    assert origin is not None
    return stack_accounting(figure_of(row).stack or stack_of(row, origin), row["precision"])


def peaks(
    rows: Sequence[Row], *, whole: bool = False, accounting: Callable[[Row], Accounting] = accounting_of
) -> np.ndarray:
    """Predicted peaks in GiB, one per row; rows must be such that `why_not` returns None for.

    whole: False: as the row's published figure counts them, which may leave out the allocator's reserve or
    the CUDA context; True: all that is on the GPU. accounting: returns that of a row's software.
    """
    alike: dict[tuple[Accounting, Figure], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        alike[accounting(row), figure_of(row)].append(place)
    found = np.zeros(len(rows))
    for (how, figure), places in alike.items():
        own = [rows[place] for place in places]
        seen = how if whole else replace(how, **UNSEEN[figure.counts])
        found[places] = _peaks(own, seen, first=figure.first and not whole)
        if figure.deferred and not whole:
            kept = _peaks(own, replace(seen, regathers_inputs=False), first=figure.first)
            share = np.where(kept > capacities(own), 0.0, still_held(own))
            found[places] += share * (kept - found[places])
    return found


def _peaks(rows: Sequence[Row], accounting: Accounting, *, first: bool) -> np.ndarray:
    work, columns = work_of(rows), columns_of(rows, origins())
    stages = Stages.cut(work, columns, accounting.stage_cut)
    if first:
        ends = {field.name: getattr(stages, field.name) for field in fields(Stages)}
        stages = Stages(**{name: np.broadcast_to(each, stages.rank.shape)[:1] for name, each in ends.items()})
    return peak(work, columns, accounting, column(rows, "seq_len"), stages).peak / GIB


def still_held(rows: Sequence[Row]) -> np.ndarray:
    """Share of the micro-batches in flight whose gathered inputs are still there when they are not needed.

    What a collective's stream has used is freed once that stream has passed it, so by a host that runs ahead
    of the GPU only when the step is over: 1. A host that tp's ranks hold up (`held_seconds`) is ahead in the
    micro-batches that fill a pipeline, but for two. Where memory is short the allocator waits: nothing stays.
    """
    among = origins()
    columns, seq_len = columns_of(rows, among), column(rows, "seq_len")
    machine = Machines.of(rows, among, constants_of(among)).with_constants(constants_of(among))
    compute = block_compute(work_of(rows), columns, machine, seq_len, seq_len)
    in_flight = np.minimum(columns.pp, columns.gradient_accumulation_steps)
    waits = 2 * held_seconds(columns, machine) > compute.forward + compute.backward
    return np.where(waits, np.maximum(in_flight - 2, 0) / in_flight, 1.0)


def recomputation_that_fits(row: Row) -> str:
    """ "none" where a row fits its GPU without recomputation by its stack's accounting, else "selective".

    row: one that `why_not` returns None for but for its recomputation, which is not read.
    """
    tried = [row | {"recompute": "none"}]
    return "none" if peaks(tried, whole=True) <= capacities(tried) else "selective"


def fitted() -> dict[str, float]:
    """Values of the constants in FITTED, by name."""
    return {
        f"{stack}.{field}": float(attrgetter(field)(stack_accounting(stack, precision)))
        for stack, field, precision in FITTED
    }


def published(rows: Sequence[Row]) -> np.ndarray:
    """Published peaks in GiB; NaN where there is none."""
    return column(rows, "peak_mem_gib")


def capacities(rows: Sequence[Row]) -> np.ndarray:
    """Memory of each row's GPU in GiB."""
    found = []
    for row in rows:
        origin = origin_of(row, origins())
        assert origin is not None
        found.append(catalogue()[gpu_of(row, origin)].memory / GIB)
    return np.array(found)


def ran_out(rows: Sequence[Row]) -> np.ndarray:
    """True for rows whose notes say that the run was out of memory."""
    return np.array([bool(re.search(r"\bOOM\b", row["notes"])) for row in rows], dtype=bool)
