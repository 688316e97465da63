"""The setting that removes or shrinks a tensor, from its category, module and operation.

The first rule that applies answers; where a layout has a setting already, the next one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshtune.layout import ATTENTION_KERNELS, MATMULS, RECOMPUTATIONS, Layout
from meshtune.meter.trace import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    RECOMPUTATION,
    TEMPORARY,
    WEIGHTS,
    RankTrace,
)
from meshtune.report.dryrun.living import Alike, Peak, alike, is_received, made_by
from meshtune.units import counted

Advice = Iterator[str]


def largest(trace: RankTrace, layout: Layout) -> list[dict[str, Any]]:
    """Groups of tensors that are alike at the peak of later steps, most bytes first, each with the setting
    that removes or shrinks it; bytes are those of the whole group.
    """
    peak = Peak.of(trace.steps[-1])
    return [
        {
            "bytes": tensors.bytes,
            "count": tensors.count,
            "tensor": tensors.name,
            "made_by": made_by(tensors),
            "shape": list(tensors.shape),
            "dtype": tensors.dtype,
            "category": tensors.category,
            "setting": remedy(tensors, layout, peak.vocabulary),
        }
        for tensors in alike(peak.storages)
    ]


def remedy(tensors: Alike, layout: Layout, vocabulary: int = 0) -> str:
    """The setting that removes or shrinks these tensors, with its effect; or why there is none.

    vocabulary: columns of the logits on this rank; 0: it has none.
    """
    # The loss sums the head's gradient over its chunks in the forward, in fp32 whatever reduce_dtype says.
    of_the_loss = (tensors.category, tensors.phase) == (GRADIENTS, FORWARD)
    if vocabulary and of_the_loss and tensors.shape[:1] == (vocabulary,):
        return f"{_more_tensor(layout)}: a part of the head's gradient"
    return next(RULES[tensors.category](tensors, layout))


def _sharded(layout: Layout, stage: int) -> Advice:
    """Yield the ZeRO stage that shards a state, unless the layout has it or has no ranks to shard over."""
    if layout.zero < stage and layout.parameter_ranks > 1:
        yield f"zero{stage}: each of {counted(layout.parameter_ranks, 'rank')} keeps its share"


def _weights(tensors: Alike, layout: Layout) -> Advice:
    yield from _sharded(layout, 3)
    yield "zero3 on more ranks, tp or pp" if layout.zero == 3 else "tp or pp; with more GPUs zero3"


def _gathered(tensors: Alike, layout: Layout) -> Advice:
    if layout.zero < 3:
        yield "zero3: gathered block by block"
    yield f"{_more_tensor(layout)}: a rank gathers only its part"


def _gradients(tensors: Alike, layout: Layout) -> Advice:
    yield from _sharded(layout, 2)
    if tensors.dtype == "float32":
        yield "train.reduce_dtype=bf16: sums of half the size, less exact"
    yield "tp or pp; lora: frozen weights have no gradients"


def _optimizer(tensors: Alike, layout: Layout) -> Advice:
    yield from _sharded(layout, 1)
    yield "train.optimizer=lion; more ranks; lora"


def _logits(tensors: Alike, layout: Layout) -> Advice:
    yield f"{_more_tensor(layout)}: a part of the vocabulary; already a chunk of tokens at a time"


def _communication(tensors: Alike, layout: Layout) -> Advice:
    if is_received(tensors):
        yield f"{_fewer_tokens(layout)}: it is a stage's input"
    if layout.zero or layout.data_ranks > 1:
        yield f"{_more_tensor(layout)}: smaller collectives"
    yield "none: it lasts as long as the collective"


def _temporary(tensors: Alike, layout: Layout) -> Advice:
    yield "none: the update frees it"


def _activations(tensors: Alike, layout: Layout) -> Advice:
    if not tensors.blocks:
        yield f"{_fewer_tokens(layout)}: it grows with the tokens of a micro-batch"
    if tensors.phase == RECOMPUTATION:
        yield f"{_fewer_tokens(layout)}: one block's, run again in its backward"
    if tensors.phase == BACKWARD:
        yield f"{_fewer_tokens(layout)}: a gradient that the backward is at"
    if tensors.made_by.startswith("all_gather over tp") and layout.sp and not layout.sp_regather:
        yield "regather: gathered again in the backward"
    yield from _recomputed(tensors, layout)
    if layout.schedule == "gpipe" and layout.pp > 1:
        yield "1f1b: at most pp micro-batches in flight"
    yield f"{_fewer_tokens(layout)}: a block's input"


def _recomputed(tensors: Alike, layout: Layout) -> Advice:
    """Yield the recomputation mode that does not save what a block's forward made."""
    mode = RECOMPUTATIONS[layout.recompute]
    kept = tensors.made_by in mode.keeps
    if mode.matmuls and layout.recompute_blocks is None and not kept:
        return
    if layout.recompute_blocks is not None and not kept:
        yield f"{layout.recompute} in more blocks than {layout.recompute_blocks}"
    if tensors.made_by in MATMULS | ATTENTION_KERNELS:
        yield "full: the backward runs the block again"
    if not mode.keeps:
        yield "selective or full: made again in the backward"
    yield f"{_fewer_tokens(layout)}: of the block that runs"


def _fewer_tokens(layout: Layout) -> str:
    """Settings that leave a rank fewer tokens of a micro-batch."""
    if layout.micro_batch_size > 1:
        return f"mb{layout.micro_batch_size // 2}"
    return "sp or cp" if layout.tp > 1 and not layout.sp else "cp, or tp with sp" if layout.tp == 1 else "cp"


def _more_tensor(layout: Layout) -> str:
    return f"tp{2 * layout.tp}"


RULES: dict[str, Callable[[Alike, Layout], Advice]] = {
    WEIGHTS: _weights,
    GATHERED: _gathered,
    GRADIENTS: _gradients,
    OPTIMIZER: _optimizer,
    ACTIVATIONS: _activations,
    LOGITS: _logits,
    COMMUNICATION: _communication,
    TEMPORARY: _temporary,
}
