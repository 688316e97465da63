"""Short names of models and layouts, for headings, cells and labels; sentences that several pages have."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import PurePath

from meshtune.layout import RECOMPUTE, SCHEDULES, Layout

MFU = (
    "MFU counts the model's own arithmetic (forward and backward of what is trained, attention by documents, "
    "no recomputation, no padding) over the device's dense peak; it is not known on processors (docs/mfu.md)."
)

REWARDS = (
    "A reward is beta times an answer's log-probability over that by the reference (dpo, kto), or beta times "
    "its mean over the answer's tokens (orpo, simpo), or the model's score (reward). The accuracy, the share "
    "of pairs whose chosen answer has the higher reward, means nothing before the first update with a "
    "reference: rewards are 0 then."
)


def model_title(name: str) -> str:
    """A model's name without its folders or organization: "Llama-3.1-8B" of "meta-llama/Llama-3.1-8B"."""
    parts = [part for part in PurePath(name).parts if part != "config.json"]
    return parts[-1] if parts else name


def short(layout: Layout | str) -> tuple[str, ...]:
    """(its axes, its micro-batch and recomputation): `short(…) == ("zero3x4 tp2 pp2", "mb2 full8")`."""
    words = str(layout).split("-")
    inner = [word for word in words if re.fullmatch(rf"mb\d+|({'|'.join(RECOMPUTE)})\d*", word)]
    left_out = [word for word in words if re.fullmatch(r"sp|regather|v\d+|ga\d+", word) or word in SCHEDULES]
    axes = [word for word in words if word not in (*inner, *left_out)]
    return (*([" ".join(axes)] if axes else []), " ".join(inner))


LINE = 18  # characters of a line of a row's name in a narrow chart


def name_lines(name: str) -> list[str]:
    """A row's name in lines of at most LINE characters, each of its parts in lines of its own."""
    return [line for part in name.split(" · ") for line in textwrap.wrap(part, LINE)]


def longest_line(names: Sequence[str], *, narrow: bool) -> int:
    """Characters of the longest line of rows' names."""
    return max(len(line) for name in names for line in (name_lines(name) if narrow else [name]))
