"""Rules on layouts that several tools can't run, or would run as another layout, which is planned itself.

A tool's own rules are in its module. The planner refuses by them before it ranks, an export before it writes.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshtune.layout import AXES
from meshtune.placement.columns import Columns, Number
from meshtune.placement.rules import Rule

# The export to every tool writes these or refuses them itself. Anything else is refused for all, so that none
# can leave out what it doesn't know.
EXPORTED_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPORTED_RECOMPUTATIONS = ("none", "attention", "selective", "full")


def unknown_fields(tool: str) -> Iterator[Rule]:
    """Rules on axes and recomputation modes that no export writes."""
    for axis in AXES:
        if axis not in EXPORTED_AXES:
            yield Rule(
                f"{axis} can't be exported",
                lambda layouts, axis=axis: getattr(layouts, axis) > 1,
                lambda layout, axis=axis: (
                    f"{axis}={getattr(layout, axis)} can't be exported to {tool}; choose a layout without "
                    f"{axis}."
                ),
            )

    def recomputes_otherwise(layouts: Columns) -> Number:
        return ~np.any([layouts.recomputes(name) for name in EXPORTED_RECOMPUTATIONS], axis=0)

    *others, last = EXPORTED_RECOMPUTATIONS
    yield Rule(
        "recomputation that runs in meshtune alone",
        recomputes_otherwise,
        lambda layout: (
            f"recompute={layout.recompute} runs in meshtune alone; use {', '.join(others)} or {last}."
        ),
    )


def zero1(tool: str) -> Rule:
    """ZeRO-1, which FSDP doesn't have."""
    return Rule(
        f"{tool}'s FSDP has no ZeRO-1",
        lambda layouts: layouts.zero == 1,
        lambda layout: (
            f"{tool}'s FSDP has no ZeRO-1; write zero2x{layout.dp_shard}, which needs less memory and "
            "reduces gradients once per micro-batch, or use deepspeed."
        ),
    )


def sequence_parallelism(tool: str) -> Rule:
    """Sequence parallelism of the tensor-parallel ranks, which the tp of transformers and DeepSpeed lacks."""
    return Rule(
        f"{tool} splits no sequences over tensor-parallel ranks",
        lambda layouts: layouts.sp > 0,
        lambda layout: (
            f"{tool} splits no sequences over tensor-parallel ranks; write tp{layout.tp} without sp"
            f"{' and regather' if layout.sp_regather else ''}."
        ),
    )


def attention_alone(tool: str) -> Rule:
    """Recomputation of the attention core alone."""
    return Rule(
        f"{tool} has no recomputation of the attention core alone",
        lambda layouts: layouts.recomputes("attention"),
        lambda layout: (
            f"{tool} has no recomputation of the attention core alone; fused kernels never keep the scores, "
            f"so write {replace(layout, recompute='none')}."
        ),
    )


def selective(tool: str, why: str) -> Rule:
    """Selective recomputation. why: a clause on what the tool has instead."""
    return Rule(
        f"{tool} {why}, so no selective recomputation",
        lambda layouts: layouts.recomputes("selective"),
        lambda layout: f"{tool} {why}; write full or none instead of selective.",
    )


def some_blocks(tool: str) -> Rule:
    """Recomputation in the first blocks of each stage alone."""
    return Rule(
        f"{tool} recomputes in every block or in none",
        lambda layouts: np.isfinite(layouts.recompute_blocks),
        lambda layout: (
            f"{tool} recomputes in every block or in none; write {replace(layout, recompute_blocks=None)}."
        ),
    )


def parts_of_blocks(tool: str) -> Iterator[Rule]:
    """Recomputation of anything but whole blocks."""
    yield attention_alone(tool)
    yield some_blocks(tool)
    yield selective(tool, "recomputes whole blocks or nothing")
