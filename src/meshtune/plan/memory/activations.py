"""Bytes of activations: what blocks save for their backward, and what the loss and a block's backward add."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.layout import RECOMPUTATIONS
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.accounting import Context
    from meshtune.plan.memory.states import Step
    from meshtune.plan.work import Kept, Work


class BlockBytes(NamedTuple):
    """Bytes of a block's activations on a rank for one micro-batch."""

    everything: Number  # held from forward to backward by a block that recomputes nothing
    saved: Number  # the same, by a block that recomputes as its layout says
    # In addition to `saved`, in such a block's backward, once it ran again: under full all that mode none
    # saves; under linear the same without attention's outputs; under selective what it does not save of that,
    # and two tensors [tokens, hidden] (one is split by sp, the other absent where the MLP runs in tiles), or
    # in a compiled block what it does not save of its MLP
    recomputed: Number


def saved_by_block(
    per_token: Kept,
    work: Work,
    layouts: Columns,
    tokens: Number,
    *,
    element: float = 2,
    regathers_inputs: Number = False,
    context: Context = "gathered",
    selective: Kept | None = None,
    compiled: bool = False,
    flex: bool = False,
    tiled: Number = False,
) -> BlockBytes:
    """Return the activations of an average block under each layout's recomputation mode.

    per_token: bytes per token that it saves if nothing is recomputed. tokens: of the micro-batch on this
    rank (after cp). element: bytes of an element of activations. regathers_inputs: under sp, matmul inputs
    are saved split and gathered again in the backward (`Accounting.regathers`). context, flex: as in
    Accounting. selective: bytes per token that selective recomputation saves; None: all matmul outputs,
    output and statistics of the attention core, and the block's input. compiled: blocks are, which makes the
    output of a core that runs again too. tiled: the MLP runs in tiles.

    Korthikanti et al. 2022 (arXiv:2205.05198), sections 4.2 (tp, sp) and 5 (recomputation).
    """
    sequence_shards, heads = np.where(layouts.sp > 0, layouts.tp, 1.0), work.head_shards(layouts.tp)
    core_outputs = sum(core.count * core.query_heads * core.v_dim for core in work.cores)
    exchanged, regathered = exchanged_keys(per_token, work, layouts, tokens, element=element, context=context)
    core = (per_token.core + per_token.statistics + exchanged) / heads
    # Where each rank has all heads, the last matrix takes a copied shard of the core's output.
    whole_output = np.where(heads < layouts.tp, element * core_outputs, 0.0)

    of_rank = partial(without_core, work=work, layouts=layouts, regathers_inputs=regathers_inputs)
    everything = tokens * (of_rank(per_token) + core + whole_output / layouts.tp)
    block_input = tokens * element * work.hidden / sequence_shards
    of_attention, of_matmuls = kept_outputs(per_token, work, layouts, element=element, flex=flex, tiled=tiled)
    under_selective = tokens * (of_attention + of_matmuls) + block_input
    if selective:
        # A compiled block runs no operation of tp again: it saves what enters attention and MLP, as sp
        # gathered it or copied, and so not what that is made of.
        entered = selective._replace(entering=per_token.entering, outside=element * work.hidden)
        kept = np.where(compiled & (layouts.tp > 1), of_rank(entered), of_rank(selective))
        under_selective = tokens * (kept + (selective.core + selective.statistics) / heads)
    if compiled:
        regathered = regathered + element * core_outputs

    of_core = (per_token.statistics + regathered) / heads + whole_output  # what only its backward needs
    saved_under = {
        "everything": everything,
        "all but statistics": everything - tokens * of_core,
        "outputs": under_selective,
        "attention outputs": (block_input + tokens * of_attention) * work.backward,
        "block input": block_input * work.backward,
    }
    saved = everything
    for name, mode in RECOMPUTATIONS.items():
        saved = np.where(layouts.recomputes(name), saved_under[mode.saves], saved)
    rest = np.maximum(everything - saved, 0.0)  # with adapters, matmul outputs are more than needed
    of_parts = rest + block_input + (1 - tiled) * tokens * element * work.hidden
    if compiled and selective:
        of_parts = tokens * np.maximum(per_token.mlp - selective.mlp, 0.0) / layouts.tp
    again = everything - ~layouts.recomputation("attention") * tokens * of_attention
    if compiled:  # inductor holds the random numbers of a dropout that runs again, in fp32, not its mask
        again = again + 3 * tokens * work.random_inputs(layouts)
    again = np.where(layouts.recomputation("keeps_matmuls"), of_parts, again)
    return BlockBytes(everything, saved, np.where(layouts.recomputation("block"), again, 0.0))


def without_core(parts: Kept, work: Work, layouts: Columns, regathers_inputs: Number) -> Number:
    """Bytes per token on a rank of what a block saves, but for its attention core. regathers_inputs: as in
    `saved_by_block`.
    """
    sequence_shards = np.where(layouts.sp > 0, layouts.tp, 1.0)
    entering = parts.entering / np.where(regathers_inputs, sequence_shards, 1.0)
    inside = parts.attention / work.head_shards(layouts.tp) + parts.mlp / layouts.tp
    return parts.outside / sequence_shards + entering + parts.whole + inside


def exchanged_keys(
    per_token: Kept, work: Work, layouts: Columns, tokens: Number, *, element: float, context: Context
) -> tuple[Number, Number]:
    """Bytes per token, before tp, that a block's attention saves for context parallelism, and the part that
    comes again when the core runs again. Arguments as in `saved_by_block`.

    Under cp what the other ranks sent; with ulysses the output as it was received and as it is sent.
    """
    outputs = element * sum(core.count * core.query_heads * core.v_dim for core in work.cores)
    gathered = np.where(layouts.cp > 1, from_other_ranks(per_token, work, layouts, tokens, context), 0.0)
    ulysses = (layouts.cp > 1) & (layouts.ulysses > 0)
    return np.where(ulysses, outputs, gathered), np.where(ulysses, 0.0, gathered)


def kept_outputs(
    per_token: Kept, work: Work, layouts: Columns, *, element: float, flex: bool, tiled: Number
) -> tuple[Number, Number]:
    """Bytes per token on a rank of (output and statistics of a block's attention cores, its matmul outputs).

    flex: as in Accounting; nothing is saved of the cores that it runs. tiled: the MLP runs in tiles.
    """
    sizes = [
        (matrix.cut in ("rows", "tokens"), matrix.count * matrix.rows * (1 - tiled * matrix.mlp))
        for matrix in work.matrices
    ]
    cut, uncut = (sum(size for by_rows, size in sizes if by_rows == rows) for rows in (True, False))
    outputs, saved = (
        sum(core.count * core.query_heads * core.v_dim for core in work.cores if core.flash or not only_flash)
        for only_flash in (False, flex)
    )
    statistics = per_token.statistics * saved / np.maximum(outputs, 1.0)
    heads = work.head_shards(layouts.tp)
    matmuls = cut / layouts.tp + uncut  # uncut ones before sp splits them
    return (element * saved + statistics) / heads, element * matmuls


def from_other_ranks(
    per_token: Kept, work: Work, layouts: Columns, tokens: Number, context: Context
) -> Number:
    """Bytes per token, before tp, that a block's attention saves for context parallelism by all-gather.

    gathered: the keys and values of all ranks. copied (attention/cuda.py): of each of a rank's two parts of a
    sequence the keys that it sees, on the rank that has most, and the output in the order of the kernel;
    scores with a softcap or sinks need the flex kernel, which copies nothing. sent on: nothing.
    Arguments as in `saved_by_block`; one document a sequence.
    """
    if context == "sent on":
        return 0.0
    keys = sum(core.count * core.keys for core in work.cores)
    if context == "gathered" or not keys:
        return (layouts.cp - 1) * per_token.keys
    part, added = tokens / layouts.micro_batch_size / 2, 0.0
    for core in work.cores:
        window = part + core.window - 1
        seen = np.minimum(layouts.cp * part, window) + np.minimum((layouts.cp + 1) * part, window)
        copied = core.keys * (seen / (2 * part) - 1) + core.query_heads * core.v_dim
        added = added + core.count * np.where(core.flash, copied, core.keys * (layouts.cp - 1))
    return added * per_token.keys / keys


def output_gradients(step: Step) -> Number:
    """Bytes of the gradients of what an average block's matmuls and norms return, for one micro-batch.

    A zero-bubble schedule holds them from the backward of a stage's input to that of its weights: those of
    norms where they are multiplied with the weight.
    """
    work, element, shards = step.work, step.accounting.element, step.sequence_shards
    cut = sum(matrix.count * matrix.rows for matrix in work.matrices if matrix.cut in ("rows", "tokens"))
    uncut = sum(matrix.count * matrix.rows for matrix in work.matrices) - cut
    norms = work.norms * norm_gradient(work, element) / shards
    return step.tokens * (element * (cut / step.layouts.tp + uncut / shards) + norms)


def norm_gradient(work: Work, element: float) -> Number:
    """Bytes per token of the gradient that a norm's weight is multiplied with: as wide as the normalised
    states, which the last norm keeps next to its input in fp32. Frozen norms keep none.

    element: as in `saved_by_block`.
    """
    kept = ends.norm - work.hidden * max(4, element) if (ends := work.ends.get(int(element))) else -1.0
    return kept if kept >= 0 else element * work.hidden  # a fused kernel keeps its input as it is


def last_norm_bytes(step: Step) -> tuple[Number, Number]:
    """Bytes that the last norm keeps, and the most in its backward: as traced, else those of Llama's, which
    keeps its input in fp32 and the normalised states.
    """
    hidden, element = step.hidden, step.accounting.element
    if step.accounting.fused_norms:
        # in the head's backward: the norm's input and output and their gradient, under sp gathered too
        return 2 * hidden, 3 * hidden + np.where(step.sequence_shards > 1, 2 * step.whole_hidden, 0.0)
    if ends := step.work.ends.get(int(element)):
        tokens = step.tokens / step.sequence_shards
        return tokens * ends.norm, tokens * ends.norm_backward
    wide = hidden * max(4 / element, 1.0)
    return wide + hidden, 6 * wide


def kept_for_head(step: Step) -> tuple[Number, Number]:
    """Bytes of (activations, the head's gradient) of each micro-batch between its loss and its backward.

    With a finite `loss_chunk` the loss makes its gradients in the forward.
    """
    norm, _ = last_norm_bytes(step)
    if not math.isfinite(step.accounting.loss_chunk):
        return norm, 0.0
    return step.whole_hidden + norm, step.head * step.accounting.precision.gradient


def block_backward(step: Step) -> Number:
    """Bytes of temporaries of one block's backward on a rank for one micro-batch, without what it saved and
    recomputed, and the gradient of its output.

    Two tensors [tokens, widest matmul input], split by tp, or [tokens, output of the attention core] where
    each rank has all heads; where sp gathers the gradient of the MLP's output, that and one of them; with
    regather the gathered input [tokens, hidden].
    """
    work, layouts, accounting = step.work, step.layouts, step.accounting
    widths = [matrix.cols / layouts.tp * (1 - step.tiled * matrix.mlp) for matrix in work.matrices]
    widths += [core.query_heads * core.v_dim / work.head_shards(layouts.tp) for core in work.cores]
    widest = np.max(np.broadcast_arrays(step.tokens, *widths)[1:], axis=0)
    gathered = np.where(accounting.regathers(layouts), step.whole_hidden, 0.0)
    one = accounting.element * step.tokens * widest
    inside = one + np.where(step.sequence_shards > 1, np.maximum(step.whole_hidden, one), one)
    if not accounting.fused_norms:
        wide = step.hidden * max(4 / accounting.element, 1.0)  # in fp32
        inside = np.maximum(inside, work.last_norm * wide)
    return inside + gathered


def exchanged_rows(step: Step) -> Number:
    """Bytes of the rows that a rank has received of a block's exchange, next to those that it sent, on the
    rank that gets most; 0 where a rank has all experts. Assumed: one such tensor in each pass.
    """
    work, layouts = step.work, step.layouts
    rows = step.accounting.element * step.tokens / step.sequence_shards * work.routed * work.hidden
    return np.where(layouts.ep > 1, rows * work.most_rows(layouts), 0.0)


def attention_made_later(step: Step) -> Number:
    """Bytes that are not allocated yet while an MLP runs backward under linear: a compiled block
    makes queries, keys and values again, and what they are made of, when the backward of attention needs
    them. 0 of others.
    """
    work, layouts, element = step.work, step.layouts, step.accounting.element
    traced = step.traced_block
    if not (traced and traced.fused):
        return 0.0
    outputs = element * sum(core.count * core.query_heads * core.v_dim for core in work.cores)
    inside = (traced.kept.attention + traced.kept.core - outputs) / work.head_shards(layouts.tp)
    entering = element * work.hidden / np.where(step.accounting.regathers(layouts), step.sequence_shards, 1.0)
    later = layouts.recomputation("matmuls") & ~layouts.recomputation("attention")
    return np.where(later, step.tokens * (inside + entering), 0.0)


def recomputation_start(step: Step) -> Number:
    """Bytes that a block's selective recomputation has when it has come to the queries, without what was
    saved and the gradient of the block's output. With adapters, whose outputs are saved though no backward
    needs them, a rank never has more.

    That gradient as sp gathers it and as adapters scale it; the first norm's input in fp32 and its output,
    and as sp gathers it; the norm of queries, in fp32, whose inputs have been freed where adapters added
    them up. Queries without a norm: their rotary embedding.
    """
    work, element = step.work, step.accounting.element
    wide, adapted = max(4, element), any(matrix.adapter for matrix in work.matrices)
    gathered = np.where(step.sequence_shards > 1, step.whole_hidden, 0.0)
    first_norm = step.hidden * (wide / element + 1)
    queries = sum(core.count * core.query_heads * core.qk_dim for core in work.cores)
    of_query = np.where(work.normed_heads > 0, 2 * (wide + element), 3 * element) - element * adapted
    of_queries = step.tokens * queries * of_query / work.head_shards(step.layouts.tp)
    return gathered + adapted * step.whole_hidden + first_norm + gathered + of_queries
