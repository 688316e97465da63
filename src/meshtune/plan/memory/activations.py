"""Bytes of activations: what blocks save for their backward, and what the loss and a block's backward add."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.recomputation import RECOMPUTATIONS
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.accounting import Accounting, Context
    from meshtune.plan.work import Kept, Work


class BlockBytes(NamedTuple):
    """Bytes of a block's activations on a rank for one micro-batch."""

    everything: Number  # held from forward to backward by a block that recomputes nothing
    saved: Number  # the same, by a block that recomputes as its layout says
    recomputed: Number  # what such a block's backward has at once, beside `saved`, once it ran again


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
) -> BlockBytes:
    """Return the activations of an average block under each layout's recomputation mode.

    `recomputed` is all that mode none saves under full; under selective what is missing of it and two tensors
    [tokens, hidden], split by sp; else 0.

    per_token: bytes per token that it saves if nothing is recomputed. tokens: of the micro-batch on this
    rank (after cp). element: bytes of an element of activations. regathers_inputs: under sp, matmul inputs
    are saved split and gathered again in the backward (`Accounting.regathers`). context: as in Accounting.
    selective: bytes per token that selective recomputation saves; None: all matmul outputs, output and
    statistics of the attention core, and the block's input.

    Korthikanti et al. 2022 (arXiv:2205.05198), sections 4.2 (tp, sp) and 5 (recomputation).
    """
    sequence_shards = np.where(layouts.sp > 0, layouts.tp, 1.0)
    core_outputs = sum(core.count * core.query_heads * core.v_dim for core in work.cores)
    # under cp: what the other ranks sent; with ulysses the output as it was received and as it is sent
    gathered = np.where(layouts.cp > 1, from_other_ranks(per_token, work, layouts, tokens, context), 0.0)
    exchanged = np.where(layouts.ulysses > 0, element * core_outputs, gathered)
    regathered = np.where(layouts.ulysses > 0, 0.0, gathered)  # when the core runs again
    heads = work.head_shards(layouts.tp)
    core = (per_token.core + per_token.statistics) / heads
    core = core + np.where(layouts.cp > 1, exchanged / heads, 0.0)
    # Where each rank has all heads, the last matrix takes a copied shard of the core's output.
    whole_output = np.where(heads < layouts.tp, element * core_outputs, 0.0)

    def of_tokens(parts: Kept, core: Number) -> Number:
        entering = parts.entering / np.where(regathers_inputs, sequence_shards, 1.0)
        inside = parts.attention / heads + parts.mlp / layouts.tp
        return tokens * (parts.outside / sequence_shards + entering + parts.whole + inside + core)

    everything = of_tokens(per_token, core + whole_output / layouts.tp)
    block_input = tokens * element * work.hidden / sequence_shards
    if selective is None:
        kept = matmul_outputs(per_token, work, layouts, element=element, flex=context == "copied")
        under_selective = tokens * kept + block_input
    else:
        under_selective = of_tokens(selective, (selective.core + selective.statistics) / heads)

    of_core = (per_token.statistics + regathered) / heads + whole_output  # what only its backward needs
    saved_under = {
        "everything": everything,
        "all but statistics": everything - tokens * of_core,
        "outputs": under_selective,
        "block input": block_input * work.backward,
    }
    saved = everything
    for name, mode in RECOMPUTATIONS.items():
        saved = np.where(layouts.recomputes(name), saved_under[mode.saves], saved)
    rest = np.maximum(everything - saved, 0.0)  # with adapters, matmul outputs are more than needed
    recomputed = np.where(layouts.recomputation("matmuls"), everything, 0.0)
    recomputed = np.where(layouts.recomputation("by_operation"), rest + 2 * block_input, recomputed)
    return BlockBytes(everything, saved, recomputed)


def matmul_outputs(per_token: Kept, work: Work, layouts: Columns, *, element: float, flex: bool) -> Number:
    """Bytes per token on a rank of a block's matmul outputs, output and statistics of its attention core.

    flex: True if flex attention, as on CUDA, runs cores that no flash kernel knows: nothing is saved.
    """
    cut = sum(matrix.count * matrix.rows for matrix in work.matrices if matrix.cut == "rows")
    uncut = sum(matrix.count * matrix.rows for matrix in work.matrices if matrix.cut != "rows")
    outputs, saved = (
        sum(core.count * core.query_heads * core.v_dim for core in work.cores if core.flash or not only_flash)
        for only_flash in (False, flex)
    )
    statistics = per_token.statistics * saved / np.maximum(outputs, 1.0)
    heads = work.head_shards(layouts.tp)
    matmuls = cut / layouts.tp + saved / heads + uncut  # uncut ones before sp splits them
    return element * matmuls + statistics / heads


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


def output_gradients(work: Work, layouts: Columns, tokens: Number, *, element: float) -> Number:
    """Bytes of the gradients of what an average block's matmuls and norms return, for one micro-batch.

    A zero-bubble schedule holds them from the backward of a stage's input to that of its weights: those of
    norms where they are multiplied with the weight. tokens, element: as in `saved_by_block`.
    """
    sequence_shards = np.where(layouts.sp > 0, layouts.tp, 1.0)
    cut = sum(matrix.count * matrix.rows for matrix in work.matrices if matrix.cut == "rows")
    uncut = sum(matrix.count * matrix.rows for matrix in work.matrices if matrix.cut != "rows")
    norms = work.norms * norm_gradient(work, element)
    return tokens * (element * (cut / layouts.tp + uncut / sequence_shards) + norms / sequence_shards)


def norm_gradient(work: Work, element: float) -> Number:
    """Bytes per token of the gradient that a norm's weight is multiplied with: as wide as the normalised
    states, which the last norm keeps beside its input in fp32. Frozen norms keep none.

    element: as in `saved_by_block`.
    """
    kept = ends.norm - work.hidden * max(4, element) if (ends := work.ends.get(int(element))) else -1.0
    return kept if kept >= 0 else element * work.hidden  # a fused kernel keeps its input as it is


def compiled(per_token: Kept) -> Kept:
    """Bytes per token that a block saves under torch.compile, from those that it saves eagerly.

    The partitioner recomputes a norm's fp32 copies and the MLP's activation function. Measured on a Llama:
    12h + 4·h_kv + 6f + 4a + 8 of 20h + 4·h_kv + 8f + 4a + 8.
    """
    return per_token._replace(
        outside=per_token.outside / 3, attention=per_token.attention * 3 / 4, mlp=per_token.mlp * 3 / 4
    )


class MicroBatchSizes(NamedTuple):
    """Tokens and bytes of one micro-batch on a rank."""

    tokens: Number  # after cp
    sequence_shards: Number  # parts that sp splits the sequence into; 1 without sp
    hidden_bytes: Number  # bytes of the hidden states of all these tokens, not split by sp
    head_gradient: Number  # elements of the head's gradient on a tp rank, 0 where the head is frozen

    @classmethod
    def of(cls, work: Work, layouts: Columns, accounting: Accounting, seq_len: Number) -> MicroBatchSizes:
        """Return the sizes for micro-batches of whole sequences of `seq_len` tokens."""
        tokens = layouts.rank_tokens(seq_len)
        head = work.vocabulary * work.hidden / layouts.tp * work.head_trainable
        sequence_shards = np.where(layouts.sp > 0, layouts.tp, 1.0)
        return cls(tokens, sequence_shards, accounting.element * work.hidden * tokens, head)


class LossBytes(NamedTuple):
    """Bytes that the rank with the head holds for the last norm, the logits and the loss."""

    logits: Number  # at most, with their gradients and copies in the loss
    activations: Number  # beside them: the last norm's, hidden states and their gradient
    gradients: Number  # beside them: the head's gradient and its sum over chunks
    per_extra_micro_batch: Number  # activations of each micro-batch in flight but the one in the loss
    gradients_per_extra: Number  # the same of the head's gradient
    norm_backward: Number  # activations of the last norm, in its backward
    hidden_gradient: Number  # that the backward of the last norm returns
    logits_in_backward: Number  # not freed yet in the head's backward
    gradients_in_backward: Number  # of the head, in its backward
    gradients_pending: Number  # of the head that no sum has taken yet, in the blocks' backward
    hole: Number  # where a chunk's logits were in fp32, too small for the head's gradient behind them


def loss_bytes(work: Work, layouts: Columns, accounting: Accounting, sizes: MicroBatchSizes) -> LossBytes:
    """Bytes for the last norm, the logits and the loss on the rank with the head.

    With a finite `loss_chunk` the loss makes its gradients in the forward, a chunk of tokens at a time
    (train/loss.py): logits, a copy of their hidden states and its gradient, the head's gradient. sp gathers
    the last norm's output.

    sizes: of one micro-batch. Every layout is counted as if its rank had the head.
    """
    precision, element = accounting.precision, accounting.element
    head_gradient = sizes.head_gradient * precision.gradient
    labels = sizes.tokens * work.labelled
    chunk_tokens = np.ceil(labels / np.maximum(np.ceil(labels / accounting.loss_chunk), 1.0))
    one_copy = chunk_tokens * work.vocabulary / (1.0 if accounting.gathers_logits else layouts.tp)
    kept, changes = (ends.logit, ends.changes) if (ends := work.ends.get(int(element))) else (0.0, False)
    logits = one_copy * (accounting.logit + np.where(layouts.tp > 1, accounting.logit_split, 0.0) + kept)
    hidden, gradients, in_flight, gradients_in_flight, hole = 0.0, 0.0, 0.0, 0.0, 0.0
    if math.isfinite(accounting.loss_chunk):
        copy = chunk_tokens * element * work.hidden
        # The logits, their gradient and, where the head changes its matrix's output, the gradient of that,
        # in the backward of what it does to logits and in that of the matrix, which makes its gradient.
        copies = 3 if changes else 2
        in_head = (copies * element + 2 * kept) * one_copy
        in_matmul = copies * element * one_copy
        logits = np.maximum(logits, in_head)
        ends = in_matmul + copy + head_gradient > logits
        logits = np.where(ends, in_matmul, logits)
        hidden = copy + sizes.hidden_bytes + np.where(ends, copy, 0.0)
        head_sum = np.where(chunk_tokens < labels, 4.0 * sizes.head_gradient, 0.0)  # fp32, over chunks
        gradients = head_sum + np.where(ends, head_gradient, 0.0)
        in_flight, gradients_in_flight = sizes.hidden_bytes, head_gradient  # made in the forward
        wide = 2 * 4.0 * one_copy * (element < 4)  # the logits cast, and their softmax
        hole = np.where(ends & (head_sum > 0) & (head_gradient >= wide), wide, 0.0)

    norm, norm_backward = last_norm_bytes(work, accounting, sizes)
    sharded, accumulates = accounting.gathers_shards(layouts), layouts.gradient_accumulation_steps > 1
    unsummed = ~(accumulates | (accounting.gradient_replicas(layouts) > 1))
    pending = np.where(sharded | unsummed, head_gradient, 0.0)
    in_backward = np.where(sharded | unsummed | accounting.whole_vocabulary_gradients, head_gradient, 0.0)
    if accounting.shards_masters:  # replicas that do not accumulate have no sum before this backward
        first_sum = np.where(
            sharded | unsummed | accumulates, 0.0, sizes.head_gradient * precision.accumulated
        )
        pending, in_backward = pending + first_sum, in_backward + first_sum
    return LossBytes(
        logits=logits,
        activations=hidden + norm + sizes.hidden_bytes,
        gradients=gradients,
        per_extra_micro_batch=in_flight + norm,
        gradients_per_extra=gradients_in_flight,
        norm_backward=norm_backward,
        hidden_gradient=sizes.hidden_bytes / sizes.sequence_shards,
        logits_in_backward=one_copy * accounting.logit_head_backward,
        gradients_in_backward=in_backward,
        gradients_pending=pending,
        hole=hole,
    )


def last_norm_bytes(work: Work, accounting: Accounting, sizes: MicroBatchSizes) -> tuple[Number, Number]:
    """Bytes that the last norm keeps, and the most in its backward: as traced, else those of Llama's, which
    keeps its input in fp32 and the normalised states.
    """
    output, element = sizes.hidden_bytes / sizes.sequence_shards, accounting.element
    if accounting.fused_norms:
        # in the head's backward: the norm's input and output and their gradient, under sp gathered too
        return 2 * output, 3 * output + np.where(sizes.sequence_shards > 1, 2 * sizes.hidden_bytes, 0.0)
    if ends := work.ends.get(int(element)):
        tokens = sizes.tokens / sizes.sequence_shards
        return tokens * ends.norm, tokens * ends.norm_backward
    wide = output * max(4 / element, 1.0)
    return wide + output, 6 * wide


def block_backward(work: Work, layouts: Columns, accounting: Accounting, sizes: MicroBatchSizes) -> Number:
    """Bytes of temporaries of one block's backward on a rank for one micro-batch, beside what it saved and
    recomputed, and the gradient of its output.

    Two tensors [tokens, widest matmul input], split by
    tp, or [tokens, output of the attention core] where each rank has all heads; with regather the gathered
    input [tokens, hidden].
    """
    heads = work.head_shards(layouts.tp)
    widths = [matrix.cols / layouts.tp for matrix in work.matrices]
    widths += [core.query_heads * core.v_dim / heads for core in work.cores]
    widest = np.max(np.broadcast_arrays(sizes.tokens, *widths)[1:], axis=0)
    gathered = np.where(accounting.regathers(layouts), sizes.hidden_bytes, 0.0)
    inside = 2 * accounting.element * sizes.tokens * widest
    if not accounting.fused_norms:
        wide = sizes.hidden_bytes / sizes.sequence_shards * max(4 / accounting.element, 1.0)  # in fp32
        inside = np.maximum(inside, work.last_norm * wide)
    return inside + gathered


def recomputation_start(
    work: Work, layouts: Columns, accounting: Accounting, sizes: MicroBatchSizes
) -> Number:
    """Bytes that a block's selective recomputation has when it has come to the queries, beside what was saved
    and the gradient of the block's output. With adapters, of which outputs are saved that no backward needs,
    a rank never has more.

    That gradient as sp gathers it and as adapters scale it; the first norm's input in fp32 and its output,
    and as sp gathers it; the norm of queries, in fp32, of which the inputs have been freed where adapters
    added them up. Queries without a norm: their rotary embedding.
    """
    element, wide, tokens = accounting.element, max(4, accounting.element), sizes.tokens
    adapted = any(matrix.adapter for matrix in work.matrices)
    gathered = np.where(sizes.sequence_shards > 1, sizes.hidden_bytes, 0.0)
    first_norm = sizes.hidden_bytes / sizes.sequence_shards * (wide / element + 1)
    queries = sum(core.count * core.query_heads * core.qk_dim for core in work.cores)
    of_query = np.where(work.normed_heads > 0, 2 * (wide + element), 3 * element) - element * adapted
    of_queries = tokens * queries * of_query / work.head_shards(layouts.tp)
    return gathered + adapted * sizes.hidden_bytes + first_norm + gathered + of_queries
