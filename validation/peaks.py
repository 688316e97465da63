"""Peak memory of published rows, as the planner predicts it and as it was published (memory.toml)."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter

import numpy as np
from measured import HERE, Row, column, columns_of, gpu_of, origin_of, origins, stack_of, work_of

from meshtune.plan.accounting import Accounting, stack_accounting
from meshtune.plan.hardware import catalogue
from meshtune.plan.memory.timeline import peak
from meshtune.units import GIB

# to the published figures: stack, field and in which precision; others follow from what the software does
FITTED = (
    ("megatron-deepspeed", "reserved", "fp16"),
    ("megatron-deepspeed", "communicator", "fp16"),
    ("composer", "reserved", "bf16"),
    ("torchtitan", "reserved", "bf16"),
    ("torchtitan-compiled", "selected.outside", "bf16"),
    ("torchtitan-2025", "logit", "bf16"),
    ("nanotron", "saved.queries", "bf16"),
    ("nanotron", "saved.output", "bf16"),
    ("nanotron-2025", "logit", "bf16"),
)
UNSEEN = {  # what a figure doesn't count
    "device": {},
    "reserved": {"context": 0.0, "communicator": 0.0},
    "allocated": {"context": 0.0, "communicator": 0.0, "reserved": 0.0},
}


@dataclass(frozen=True)
class Figure:
    counts: str = "device"
    stack: str = ""
    apart: str = ""


def figure_of(row: Row) -> Figure:
    fitting = [prefix for prefix in _figures() if row["id"].startswith(prefix)]
    return _figures()[max(fitting, key=len)] if fitting else Figure()


@cache
def _figures() -> dict[str, Figure]:
    tables = tomllib.loads((HERE / "memory.toml").read_text(encoding="utf-8"))
    return {prefix: Figure(**table) for prefix, table in tables.items()}


def accounting_of(row: Row) -> Accounting:
    origin = origin_of(row, origins())
    assert origin is not None
    return stack_accounting(figure_of(row).stack or stack_of(row, origin), row["precision"])


def peaks(rows: Sequence[Row], *, whole: bool = False) -> np.ndarray:
    """In GiB, of what each row's figure counts; whole: of all that is on the GPU. For rows that `why_not` has
    nothing against.
    """
    alike: dict[tuple[Accounting, str], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        alike[accounting_of(row), figure_of(row).counts].append(place)
    found = np.zeros(len(rows))
    among = origins()
    for (how, counts), places in alike.items():
        own = [rows[place] for place in places]
        seen = how if whole else replace(how, **UNSEEN[counts])
        found[places] = peak(work_of(own), columns_of(own, among), seen, column(own, "seq_len")).peak / GIB
    return found


def fitted() -> dict[str, float]:
    """The values of FITTED."""
    return {
        f"{stack}.{field}": float(attrgetter(field)(stack_accounting(stack, precision)))
        for stack, field, precision in FITTED
    }


def published(rows: Sequence[Row]) -> np.ndarray:
    """In GiB; NaN where there is none."""
    return column(rows, "peak_mem_gib")


def capacities(rows: Sequence[Row]) -> np.ndarray:
    """Of each row's GPU, in GiB."""
    found = []
    for row in rows:
        origin = origin_of(row, origins())
        assert origin is not None
        found.append(catalogue()[gpu_of(row, origin)].memory / GIB)
    return np.array(found)


def ran_out(rows: Sequence[Row]) -> np.ndarray:
    """Whether it is published that the run did not fit."""
    return np.array([bool(re.search(r"\bOOM\b", row["notes"])) for row in rows], dtype=bool)
