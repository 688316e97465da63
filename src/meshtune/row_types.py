"""Types of the rows of metrics.jsonl and samples.jsonl, by kind: what readers may rely on.

A row that does not fit its type is left out where rows are read (rundir.py), and counted; readers need no
checks of their own. Columns that are not listed here are only shown as text.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
PARTS = (  # of a step in time (meter/parts.py)
    "forward", "backward", "recomputation", "communication", "bubble", "waiting", "optimizer", "loading",
    "rest",
)  # fmt: skip


class Type(NamedTuple):
    """Type of a column."""

    fits: Callable[[Any], bool]
    fault: str  # clause on a value that does not fit, behind "its NAME"
    required: bool = False
    nullable: bool = True  # null is as good as a missing column


def is_number(value: Any) -> bool:
    """True for finite numbers, and for true and false."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _is_number_or_null(value: Any) -> bool:
    return value is None or is_number(value)


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a list of what fits."""
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _by_name(fits: Callable[[Any], bool], *names: str) -> Callable[[Any], bool]:
    """Whether a value is a mapping of what fits, with at least these names."""
    return lambda value: isinstance(value, dict) and all(map(fits, value.values())) and {*names} <= {*value}


def _is_prediction(value: Any) -> bool:
    """Whether a value is the `predicted` of a run's row: bytes and seconds by part."""
    if not isinstance(value, dict):
        return False
    numbers, seconds = _by_name(_is_number_or_null), value.get("step_seconds")
    memory, time, parts = (value.get(name) or {} for name in ("memory", "time", "parts"))
    if isinstance(memory, dict):
        memory = {
            name: size for name, size in memory.items() if name != "event"
        }  # where the peak is, in words
    timed = is_number(seconds) if time else _is_number_or_null(seconds)
    return timed and numbers(memory) and numbers(time) and numbers(parts)


NUMBER = Type(is_number, "is not a number")
STEP = Type(_is_step, "is not a whole number", required=True, nullable=False)
COUNT = Type(lambda value: _is_step(value) and value > 0, "is not a number of 1 or more", nullable=False)
TEXT = Type(_is_text, "is not text")
NUMBERS = Type(_are(is_number), "is not a list of numbers")
BY_NAME = Type(_by_name(is_number), "has no numbers")
ANSWER = Type(lambda value: isinstance(value, str) or is_number(value), "is neither text nor a number")

SAMPLE = {  # of samples.jsonl
    "step": STEP._replace(required=False, nullable=True),
    "prompt": TEXT._replace(required=True, nullable=False),
    "answer": TEXT._replace(required=True, nullable=False),
    "question": TEXT,
    "expected": ANSWER,
}
COLUMNS: Mapping[str, Mapping[str, Type]] = {
    "run": {
        "world": COUNT, "nodes": COUNT, "total_steps": NUMBER, "global_batch_size": NUMBER, "seq_len": NUMBER,
        "layout": TEXT._replace(nullable=False), "device_type": TEXT._replace(nullable=False), "host": TEXT,
        "predicted": Type(_is_prediction, "has no numbers by part"),
    },
    "train": {"step": STEP},  # all other columns are numbers, too
    "eval": {"step": STEP},
    "time": {
        "step": STEP,
        "seconds": NUMBER._replace(required=True, nullable=False),
        "parts": Type(_by_name(is_number, *PARTS), "do not have the parts of a step", True, False),
        "busy": NUMBERS._replace(nullable=False), "loading": NUMBERS._replace(nullable=False),
        "exposed": BY_NAME._replace(nullable=False),
        "traffic": Type(
            _by_name(lambda pair: _are(is_number)(pair) and len(pair) == 2), "has no pairs of numbers",
            nullable=False,
        ),
        **dict.fromkeys(
            ("backlog", "launching", "host_seconds", "recompilations", "head_start", "allocator_retries"),
            NUMBER,
        ),
        "padding": NUMBER._replace(nullable=False),
    },
    "memory": {
        "step": STEP,
        "phases": Type(_by_name(_by_name(is_number, "peak")), "have no sizes", True, False),
    },
    "cause": {
        "cause": TEXT._replace(required=True, nullable=False),
        "share": NUMBER._replace(required=True, nullable=False),
        "evidence": TEXT._replace(required=True, nullable=False),
        "remedy": TEXT._replace(required=True, nullable=False),
    },
    "save": {"step": STEP, "seconds": NUMBER._replace(required=True, nullable=False)},
    "device": {
        "gpu": TEXT, **dict.fromkeys(("clock", "full_clock"), NUMBER._replace(required=True, nullable=False)),
        "limits": Type(_are(_is_text), "are no list of texts", True, False),
    },
    "end": {
        "step": STEP, "status": TEXT._replace(nullable=False), "tokens": NUMBER, "seconds": NUMBER,
    },
}  # fmt: skip
OTHERS = {"step": STEP._replace(required=False, nullable=True)}  # of a kind that is not known here
ALL_NUMBERS = ("train", "eval")


def fault_of(row: Any) -> str | None:
    """Clause on what no run writes in a row of metrics.jsonl; None for a row that fits."""
    if not isinstance(row, dict):
        return "it is not a JSON object"
    kind = row.get("kind", "")
    if not isinstance(kind, str):
        return "its kind is not text"
    return next(_faults(row, COLUMNS.get(kind, OTHERS)), None) or _other_than_numbers(row, kind)


def fault_of_sample(row: Any) -> str | None:
    """Clause on what no run writes in a row of samples.jsonl; None for a row that fits."""
    return next(_faults(row, SAMPLE), None) if isinstance(row, dict) else "it is not a JSON object"


def _faults(row: Row, columns: Mapping[str, Type]) -> Iterator[str]:
    for name, column in columns.items():
        if name not in row:
            if column.required:
                yield f"it has no {name}"
        elif not (row[name] is None and column.nullable) and not column.fits(row[name]):
            yield f"its {name} {column.fault}"


def _other_than_numbers(row: Row, kind: str) -> str | None:
    if kind not in ALL_NUMBERS:
        return None
    values = [*row.values()]
    values.remove(kind)
    if _are_numbers(values):
        return None
    names = sorted(row.keys() - {"kind"})
    faults = (f"its {name} {NUMBER.fault}" for name in names if not _is_number_or_null(row[name]))
    return next(faults, None)


def _are_numbers(values: Sequence[Any]) -> bool:
    """True only where every value is None or a number (`is_number`), which is seen for a whole row at once;
    False where the sum of them is beyond the largest float, too.
    """
    try:
        return {*map(type, values)} <= _NUMBERS and math.isfinite(math.fsum(filter(None, values)))
    except (OverflowError, ValueError):
        return False


_NUMBERS = {int, float, bool, type(None)}
