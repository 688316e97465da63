"""Seconds outside the blocks for one micro-batch: embedding, last norm, head, loss, and their collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshtune.placement.states import LOSS_CHUNK_TOKENS, loss_chunk_tokens
from meshtune.plan.seconds.collectives import ring_collectives, tree_all_reduce
from meshtune.plan.seconds.gpu import ALIGNED, gradient_accumulation, matmul, shard_copies
from meshtune.plan.seconds.groups import ranks_in_node
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.machine import Machine
    from meshtune.plan.work import Work

# train/loss.py
FP32 = 4  # bytes in which it sums the head's gradient over chunks, and a split vocabulary's sums over ranks
SELECTED = 5  # tensors of labelled hidden states that its forward moves: rows selected 2, gradients written 3
SELECTED_ONLY = 2  # those of a forward without gradients
# Share of the logits' traffic that such a forward has: of the eager loss's 28 bytes 6 to fp32 and 8 of
# log_softmax (stacks.toml); assumed of other losses
LOG_PROBABILITIES = 0.5


@dataclass(frozen=True)
class Ends:
    """Seconds outside the blocks for one micro-batch: on one rank, or on a pipeline's two ends."""

    embedding: Number  # computing on the first stage, in the backward: making and adding up its gradient
    loss: Number  # computing on the last stage, in the forward: last norm, logits and loss
    inputs: Number  # computing on the last stage, in the backward: gradients of hidden states
    weights: Number  # the same: gradients of weights
    exchange: (
        Number  # collectives of tp on hidden states, in each pass of the first stage and of the last one
    )
    sums: Number  # collectives of tp on the loss, in each forward of the head on the last stage
    scoring: Number  # computing on the last stage in a forward without gradients: norm, log-probabilities
    head_forwards: float = 1.0  # as in Work

    @property
    def compute(self) -> Number:
        return self.embedding + self.loss + self.inputs + self.weights

    @property
    def total(self) -> Number:
        return self.compute + self.tensor

    @property
    def tensor(self) -> Number:
        """Seconds of collectives of tp."""
        return 4 * self.exchange + self.head_forwards * self.sums

    @property
    def first_backward(self) -> Number:
        """Seconds in a backward of the first stage; in its forward there is `exchange`."""
        return self.embedding + self.exchange

    @property
    def last_forward(self) -> Number:
        return self.loss + self.exchange + self.head_forwards * self.sums

    @property
    def last_backward(self) -> Number:
        return self.inputs + self.weights + self.exchange

    @property
    def last(self) -> Number:
        """Seconds on the last stage."""
        return self.last_forward + self.last_backward


def end_seconds(work: Work, layouts: Columns, machine: Machine, seq_len: Number) -> Ends:
    """Seconds outside the blocks for one micro-batch.

    Other tools' loss has all logits at once, and a third of its time in each pass. This engine's computes
    chunk by chunk, and makes both gradients in the forward (train/loss.py). A loss of whole documents needs
    the log-probabilities of all their tokens before that: once more the forward of the head.
    """
    tokens, element = layouts.rank_tokens(seq_len), machine.element
    labels = tokens * work.labelled
    if not np.any(machine.counted):  # arrays are of published rows of other tools
        pass_seconds = (
            head_matmuls(work, layouts, machine, labels) + logit_traffic(work, layouts, machine, labels)
        ) / 3
        return Ends(0.0, pass_seconds, pass_seconds, pass_seconds, 0.0, 0.0, pass_seconds)
    per_byte = 1 / (machine.bandwidth * machine.memory)
    whole = loss_chunk_tokens(machine.loss_memory, work.vocabulary, element)
    chunk = np.where(layouts.tp > 1, LOSS_CHUNK_TOKENS, whole)  # where tp splits it, the loss is not compiled
    chunks = np.maximum(np.ceil(labels / chunk), 1.0)
    of_head = work.vocabulary * work.hidden / layouts.tp * work.head_trainable
    cast = np.where((chunks > 1) & (element < FP32), 2 * (element + FP32), 0.0)
    sums = (chunks - 1) * (element + 2 * np.maximum(FP32, element)) + cast
    hidden = element * tokens * work.hidden * per_byte
    norm = machine.elementwise_norm * hidden / np.where(layouts.sp > 0, layouts.tp, 1.0)

    first = sum(w.elements for w in work.first_weights)
    trained_first = sum(w.elements * w.trainable for w in work.first_weights)
    # A tied head's gradient is added to the embedding's; a last stage of its own has a copy of the weight.
    own = np.where(layouts.pp > 1, 1.0, 1 - work.tied)
    last, trained_last = (own * work.vocabulary * work.hidden * share for share in (1.0, work.head_trainable))
    gather_first, scatter_first = shard_copies(machine, first, trained_first, layouts, again=False)
    gather_last, scatter_last = shard_copies(machine, last, trained_last, layouts, again=False)
    added = (1 - own) * 3 * element * of_head
    rows, fastest = _head_rows(work, layouts), machine.core_matmul_max
    log_probabilities = (
        chunks * matmul(machine, labels / chunks, rows, work.hidden, fastest=fastest)
        + LOG_PROBABILITIES * logit_traffic(work, layouts, machine, labels)
        + SELECTED_ONLY * work.labelled * hidden
    )
    return Ends(
        embedding=(element * trained_first / layouts.tp + added) * per_byte
        + gradient_accumulation(machine, trained_first / layouts.tp, layouts)
        + gather_first
        + scatter_first,
        loss=chunks * head_matmuls(work, layouts, machine, labels / chunks)
        + logit_traffic(work, layouts, machine, labels)
        + of_head * sums * per_byte
        + norm
        + (SELECTED * work.labelled + 1) * hidden  # 1: the gradient, made of zeros
        + gather_last
        + (work.head_forwards - 1) * log_probabilities,
        inputs=machine.hidden_backward * norm + 2 * hidden,
        weights=2 * element * of_head * per_byte
        + gradient_accumulation(machine, trained_last / layouts.tp, layouts)
        + scatter_last,
        exchange=hidden_exchange(work, layouts, machine, seq_len),
        sums=chunks * loss_sums(layouts, machine, labels / chunks),
        scoring=log_probabilities + norm + np.where(layouts.zero == 3, gather_last, 0.0),
        head_forwards=work.head_forwards,
    )


def head_matmuls(work: Work, layouts: Columns, machine: Machine, tokens: Number) -> Number:
    """Seconds of the head's matmuls for `tokens` tokens: logits and both gradients.

    Where other matmuls are in 8 bits, the head's are in 16.
    """
    rows, fastest = _head_rows(work, layouts), machine.core_matmul_max
    logits = matmul(machine, tokens, rows, work.hidden, fastest=fastest)
    inputs = matmul(machine, tokens, work.hidden, rows, fastest=fastest)
    lying = (rows, work.hidden)
    weights = matmul(machine, rows, work.hidden, tokens, contiguous=lying, fastest=fastest)
    return logits + inputs + work.head_trainable * weights


def hidden_exchange(work: Work, layouts: Columns, machine: Machine, seq_len: Number) -> Number:
    """Seconds of one of tp's collectives on hidden states outside the blocks.

    With sp the embedding's forward ends with a reduce-scatter and the head's starts with an all-gather, the
    backward has the other of each. Without, the embedding's forward and the head's backward have an
    all-reduce: a half in each pass.
    """
    hidden_bytes = machine.element * layouts.rank_tokens(seq_len) * work.hidden
    in_node = ranks_in_node(layouts.tp, 1.0, machine)
    ring = ring_collectives(machine, hidden_bytes, layouts.tp, in_node)
    half = tree_all_reduce(machine, hidden_bytes, layouts.tp, in_node) / 2
    return np.where(layouts.sp > 0, ring, half)


def loss_sums(layouts: Columns, machine: Machine, tokens: Number) -> Number:
    """Seconds of tp's all-reduces in the loss of `tokens` tokens: each one's largest logit, then two sums."""
    in_node = ranks_in_node(layouts.tp, 1.0, machine)
    return sum(tree_all_reduce(machine, FP32 * n * tokens, layouts.tp, in_node) for n in (1, 2))


def logit_traffic(work: Work, layouts: Columns, machine: Machine, tokens: Number) -> Number:
    """Seconds of the passes over the logits of `tokens` tokens; of a split vocabulary there are more."""
    moved = machine.logit_bytes + np.where(layouts.tp > 1, machine.split_logit_bytes, 0.0)
    logits = tokens * _head_rows(work, layouts)
    return logits * moved / (machine.bandwidth * machine.memory)


def _head_rows(work: Work, layouts: Columns) -> Number:
    """Rows of a rank's part of the head; a vocabulary that tp does not divide is padded."""
    rows = work.vocabulary / layouts.tp
    return np.where(rows % 1 > 0, np.ceil(rows / ALIGNED) * ALIGNED, rows)
