"""Activations of a rank: saved by blocks for their backward, held for the loss and by a block's backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from meshtune.plan.accounting import Accounting
from meshtune.plan.work import Columns, Kept, Number, Work


def saved(
    kept: Kept,
    work: Work,
    c: Columns,
    tokens: Number,
    *,
    element: float = 2,
    regathers: bool = False,
    selected: Kept | None = None,
) -> tuple[Number, Number]:
    """(kept, at work): bytes that a micro-batch of `tokens` on a rank keeps in an average block until its
    backward, and what that backward has at once when it has computed the rest again.

    regathers: what enters cut matrices is gathered again under sp, so that its split is what is kept.
    selected: what selective recomputation keeps; None: all products and the core's output.
    """
    sequence = np.where(c.sp > 0, c.tp, 1.0)
    core = (kept.core + kept.statistics) / c.tp
    outputs = sum(k.count * k.query_heads * k.v_dim for k in work.cores)
    gathered = np.where(c.ulysses > 0, element * outputs, (c.cp - 1) * kept.keys) / c.tp
    core = core + np.where(
        c.cp > 1, gathered, 0.0
    )  # keys and values of all; or the output as it came and as it left

    def split(k: Kept, core: Number) -> Number:
        entering = k.entering / (sequence if regathers else 1.0)
        return tokens * (k.outside / sequence + entering + k.inside / c.tp + core)

    whole = split(kept, core)
    boundary = tokens * element * work.hidden / sequence
    cut = sum(m.count * m.rows for m in work.matrices if m.cut == "rows") + outputs
    uncut = sum(m.count * m.rows for m in work.matrices if m.cut != "rows")
    products = tokens * (element * (cut / c.tp + uncut / sequence) + kept.statistics / c.tp) + boundary
    if selected is not None:
        products = split(selected, (selected.core + selected.statistics) / c.tp)
    found = np.where(c.recomputes("attention"), whole - tokens * kept.statistics / c.tp, whole)
    found = np.where(c.recomputes("selective"), products, found)
    found = np.where(c.recomputes("full"), boundary, found)
    rest = np.maximum(whole - products, 0.0)  # with adapters all products are more than what is needed
    again = np.where(c.recomputes("selective"), rest, np.where(c.recomputes("full"), whole, 0.0))
    return found, again


def compiled(kept: Kept) -> Kept:
    """What torch.compile's partitioner leaves of it: a norm's fp32 copies and the MLP's activation are
    computed again. Measured on a Llama: 12h + 4·h_kv + 6f + 4a + 8 of 20h + 4·h_kv + 8f + 4a + 8.
    """
    return kept._replace(outside=kept.outside / 3, inside=kept.inside * 3 / 4)


class Sizes(NamedTuple):
    """Of a micro-batch on a rank. tokens: of its part of the sequences; sequence: into how many sp splits
    them; hidden: bytes of all their hidden states; head: elements of the head's gradient.
    """

    tokens: Number
    sequence: Number
    hidden: Number
    head: Number

    @classmethod
    def of(cls, work: Work, c: Columns, a: Accounting, seq_len: Number) -> Sizes:
        tokens = c.micro_batch_size * seq_len / c.cp
        head = work.vocabulary * work.hidden / c.tp * work.head_trainable
        return cls(tokens, np.where(c.sp > 0, c.tp, 1.0), a.element * work.hidden * tokens, head)


class Loss(NamedTuple):
    """What the rank with the head holds for it, in bytes.

    at: in the loss. kept: for each other micro-batch in flight. norm, normed: of the last norm's forward and
    backward. waiting: the head's gradients while the blocks' backward runs; left: and with what else the loss
    has not let go of in the head's own.
    """

    at: Number
    kept: Number
    norm: Number
    normed: Number
    waiting: Number
    left: Number


def loss_held(work: Work, c: Columns, a: Accounting, z: Sizes) -> Loss:
    """Logits, a copy of their hidden states and those states' gradient, the head's gradient (train/loss.py:
    a chunk at a time, gradients in the forward); the last norm's input in fp32, what it made of it and its
    output, which sp gathers.
    """
    p = a.precision
    rows = np.ceil(z.tokens / np.maximum(np.ceil(z.tokens / a.chunk), 1.0))
    logits = rows * work.vocabulary / c.tp
    at, kept = logits * (a.logit + np.where(c.tp > 1, a.logit_split, 0.0)), 0.0
    if math.isfinite(a.chunk):  # at the logarithms of a chunk, or at the gradients of logits, states and head
        copy, summed = rows * a.element * work.hidden, np.where(rows < z.tokens, 4.0 * z.head, 0.0)
        gradients = 3 * a.element * logits + copy + z.head * p.gradient
        at = np.maximum(at, gradients) + copy + z.hidden + summed
        kept = z.hidden + z.head * p.gradient  # each loss has made its gradients already
    wide = work.hidden * z.tokens / z.sequence * max(4, a.element)
    sharded, several = a.gathers_shards(c), c.gradient_accumulation_steps > 1
    alone = ~(several | (a.gradient_replicas(c) > 1))
    waiting = np.where(sharded | alone, z.head * p.gradient, 0.0)  # until it is added up
    left = np.where(sharded | alone | a.tables, z.head * p.gradient, 0.0) + logits * a.logit_left
    if a.shards_masters:  # and a sum that no micro-batch has made before
        first_sum = np.where(sharded | alone | several, 0.0, z.head * p.accumulated)
        waiting, left = waiting + first_sum, left + first_sum
    return Loss(
        at=at,
        kept=kept + wide + z.hidden / z.sequence,
        norm=wide + z.hidden / z.sequence + z.hidden,
        normed=wide * (6 if a.element < 4 else 7),  # tensors that its backward has at once
        waiting=waiting,
        left=left,
    )


def block_backward(work: Work, c: Columns, a: Accounting, z: Sizes) -> Number:
    """At work in a block's backward: the gradient of what it gave, and two features as wide as the MLP is
    inside; what selective recomputation ran last.
    """
    inner = np.max([np.broadcast_to(m.cols, np.shape(z.tokens)) for m in work.matrices], axis=0)
    own = z.hidden / z.sequence
    again = np.where(c.recomputes("selective"), 2 * own, 0.0)
    return own + 2 * a.element * z.tokens * inner / c.tp + again
