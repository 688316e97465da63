"""Which layouts can't run, and why: the refusals of placement/rules.py over columns of layouts at once.

One sentence for each rule instead of one for each layout; they refuse the same layouts (tested equal).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.placement.rules import ROUNDS, ZERO_BUBBLE, Traits


class Problem(NamedTuple):
    reason: str
    where: Number  # bool for each layout


def problems(
    traits: Traits, c: Columns, *, attention: str = "meshtune", packing: bool = True, compile: bool = False
) -> Iterator[Problem]:
    """Every rule that some layout may break; the arguments are those of support.refusals."""
    tensor, pipeline = c.tp > 1, c.pp > 1
    if attention == "meshtune":
        if not traits.attention:
            yield Problem(f"{traits.name} computes its attention inside the model", c.tp > 0)
    else:
        own = f"the attention {attention} of {traits.name}"
        if packing:
            yield Problem(f"{own} can't keep packed documents apart (data.packing=false)", c.tp > 0)
        yield Problem(f"{own} can't be recomputed by itself", c.recomputation("attention_alone"))
        yield Problem(f"{own} sees the tokens of its own rank only, so no cp", c.cp > 1)
        if traits.attention:
            yield Problem(f"{own} takes all heads and tokens to be here, so no tp", tensor)
    if traits.tensor:
        yield Problem(traits.tensor, tensor)
    else:
        yield from _tensor(traits, c)
    heads = np.floor(traits.heads / c.tp) if traits.heads_cut else traits.heads
    ulysses = (c.cp > 1) & (c.ulysses > 0) & (heads % c.cp != 0)
    yield Problem(f"ulysses does not divide the {traits.heads} attention heads (that tp leaves)", ulysses)
    if traits.pipeline:
        yield Problem(traits.pipeline, pipeline)
    else:
        yield from _pipeline(traits, c)
    if compile:
        yield Problem("compiled blocks run alone or data-parallel only", tensor | pipeline | (c.cp > 1))


def _tensor(traits: Traits, c: Columns) -> Iterator[Problem]:
    tensor = c.tp > 1
    if traits.heads_cut:
        uneven = traits.heads % c.tp != 0
        yield Problem(f"tp does not divide the {traits.heads} attention heads", tensor & uneven)
        neither = (traits.kv_heads % c.tp != 0) & (c.tp % traits.kv_heads != 0)
        keys = f"tp neither divides the {traits.kv_heads} key-value heads nor is a multiple of them"
        yield Problem(keys, tensor & ~uneven & neither)
    for size, name in traits.cuts:
        yield Problem(f"tp does not divide the {size} {name}", tensor & (size % c.tp != 0))
    empty = np.ceil(traits.vocabulary / c.tp) * (c.tp - 1) >= traits.vocabulary
    yield Problem(f"tp leaves a rank without any of {traits.vocabulary} words", tensor & empty)


def _pipeline(traits: Traits, c: Columns) -> Iterator[Problem]:
    pipeline, m = c.pp > 1, c.gradient_accumulation_steps
    stages = c.pp * c.virtual_stages
    yield Problem(f"more stages than the {traits.blocks} blocks", pipeline & (stages > traits.blocks))
    few = (c.runs("1f1b") & (m < c.pp)) | (c.runs("dualpipev") & (m < stages))
    yield Problem("fewer micro-batches than the schedule needs", few)
    rounds = m % np.maximum(1, np.floor(m / c.pp)) != 0
    yield Problem("micro-batches do not go round in equal groups", c.runs(*ROUNDS) & rounds)
    late = c.runs(*ZERO_BUBBLE)
    yield Problem("zero-bubble schedules with ZeRO-2 or -3", late & (c.zero >= 2))
    yield Problem(
        "zero-bubble schedules with selective recomputation", late & c.recomputation("by_operation")
    )
