"""What a rank holds at each event of a step, in closed forms, and the most of all of them.

    states (weights, gradients, optimizer)   by precision and ZeRO stage            states.py
    saved activations                        by block, recompute, tp, sp, cp        activations.py, stages.py
    the loss, messages, what software adds   by what the stack does                 `Accounting`
                                             ──> `peak`: the most of all moments and pipeline ranks

What a stack keeps is data (`Accounting`, stacks.toml), not branches. Bytes throughout; floats or arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshtune.plan.accounting import Accounting
from meshtune.plan.memory.activations import Sizes, block_backward, loss_held, saved
from meshtune.plan.memory.stages import Stages, in_flight
from meshtune.plan.memory.states import OnRank, States, held_states, on_ranks
from meshtune.plan.work import Columns, Number, Work

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "overhead")
MOMENTS = ("loss", "backward of the head", "backward of a block", "end of backward", "update")
BUCKET = 64 * 2**20  # elements that the optimizer turns into fp32 at a time (train/optim.py)


@dataclass(frozen=True)
class Memory:
    """The fullest rank at the fullest moment of a step, by category, in bytes."""

    weights: Number
    gradients: Number
    optimizer: Number
    activations: Number
    logits: Number
    communication: Number
    overhead: Number
    moment: Number  # index in MOMENTS
    rank: Number  # index in RANKS

    @property
    def peak(self) -> Number:
        return sum(getattr(self, name) for name in CATEGORIES)


class Messages(NamedTuple):
    """What data parallelism holds beside the states, in bytes.

    root, gathered: whole parameters outside the blocks, and of one block, under ZeRO-3. left: the last
    message of the micro-batch before, which ZeRO-2 and -3 have until they send the next one. made, ended: a
    block's gradients and their message, at its fullest moment and when its backward is over.
    """

    root: Number
    gathered: Number
    left: Number
    made: Number
    ended: Number


def messages(c: Columns, a: Accounting, on: OnRank) -> Messages:
    """FSDP2's buffers as they were counted (torch.distributed.fsdp); between replicas a message is made of a
    block's sums when its backward is over (parallel/replicas.py).
    """
    p, sharded, several = a.precision, a.gathers_shards(c), c.gradient_accumulation_steps > 1
    third = sharded & (c.zero == 3)
    late = (c.zero == 1) & (c.pp > 1)  # torch's stages send ZeRO-1's after all passes
    made = np.where(sharded, on.block.trained * (p.gradient + np.where(late, 0.0, a.message)), 0.0)
    joined = np.where(a.gradient_replicas(c) > 1, on.block.trained * a.message, 0.0)
    return Messages(
        root=np.where(third, on.outside.whole * p.weight, 0.0),
        gathered=np.where(third, on.block.whole * p.weight, 0.0),
        left=np.where(sharded & (c.zero >= 2) & several, on.outside.trained * a.message, 0.0),
        made=made + (0.0 if a.shards_masters else joined),
        ended=made + joined,
    )


def held_before(c: Columns, a: Accounting, state: States, one: Number, held: Number) -> Number:
    """Gradients that a backward finds: of the micro-batches before. Where all are in flight at once, the
    first ones come when one of them, and with it `one` of what is kept, is through.
    """
    p, several = a.precision, c.gradient_accumulation_steps > 1
    if p.beside:
        added = state.gradients * p.accumulated / (p.accumulated + p.beside * p.gradient)
        return added if a.cleared else np.where(several, state.gradients, added)
    together = (c.pp > 1) & (held >= c.gradient_accumulation_steps)
    return np.where(together, np.maximum(state.gradients - one, 0.0), np.where(several, state.gradients, 0.0))


def updating(c: Columns, a: Accounting, on: OnRank) -> Number:
    """What the update makes of gradients that are not as wide as what is trained, a bucket at a time
    (train/optim.py); sums are.
    """
    p = a.precision
    wider = np.minimum(on.all.trained, BUCKET) * np.maximum(p.trained - p.gradient, 0.0)
    summed = a.gathers_shards(c) | (c.gradient_accumulation_steps > 1) | (a.gradient_replicas(c) > 1)
    return np.where(summed, 0.0, wider)


def moments(
    work: Work, c: Columns, a: Accounting, seq_len: Number, stages: Stages, *, first_step: bool = False
) -> dict[str, dict[str, Number]]:
    """What each pipeline rank holds at each of MOMENTS, by category but overhead; [RANKS, layouts] each.

    first_step: before there is optimizer state but masters, up to the update.
    """
    s, p, z = stages, a.precision, Sizes.of(work, c, a, seq_len)
    on = on_ranks(work, c, s)
    state, loss, sent = held_states(a, on.all, c), loss_held(work, c, a, z), messages(c, a, on)
    kept_in, again = saved(
        work.kept.get(int(a.element)) or a.saved.of(work, seq_len), work, c, z.tokens, element=a.element,
        regathers=a.regathers, selected=None if a.selected is None else a.selected.of(work, seq_len),
    )  # fmt: skip
    again = again + block_backward(work, c, a, z)

    # micro-batches in flight: what blocks keep, what was sent and received, what their losses have made
    held = in_flight(c, s.place)
    travelling = np.where(c.pp > 1, z.hidden / z.sequence, 0.0)
    received = travelling * np.minimum(c.gradient_accumulation_steps, a.buffers)
    received = received * (2 * c.virtual_stages - s.first - s.last)  # from the stage before and the one after
    kept = held * (s.blocks * kept_in + a.outputs * travelling * (c.virtual_stages - s.last))
    kept = kept + s.last * (held - 1) * loss.kept
    one = kept / np.maximum(held, 1.0)

    none, flat = np.zeros_like(kept), on.all.trained * a.flat
    sharded = a.gathers_shards(c)
    masters = np.where(sharded, 0.0, state.optimizer * p.master / (p.master + p.moments))
    optimizer = state.optimizer + np.where(c.zero > 0, on.all.trained_shard, on.all.trained) * a.flat_shard
    last_sums = np.where(sharded, on.all.trained_shard * p.trained, state.gradients)
    # the embedding's gradient ends a micro-batch's backward, with all others still in flight
    embedding = s.first * a.tables * on.first.trained * p.gradient
    steady = {
        "weights": state.weights + state.gathered,
        "gradients": held_before(c, a, state, one, held) + flat,
        "optimizer": masters if first_step else optimizer,
        "activations": kept, "logits": none, "communication": sent.root + received,
    }  # fmt: skip
    return {
        "loss": steady | {
            "activations": kept + s.last * loss.norm, "logits": s.last * loss.at,
            "communication": steady["communication"] + sent.gathered + sent.left,
        },
        "backward of the head": steady | {
            "activations": kept + s.last * loss.normed, "logits": s.last * loss.left,
            "communication": steady["communication"] + sent.gathered + sent.left,
        },
        "backward of a block": steady | {
            "activations": kept + again, "logits": s.last * loss.waiting,
            "communication": steady["communication"] + a.ahead * sent.gathered + sent.made,
        },
        "end of backward": steady | {
            "gradients": state.gradients + flat,
            "activations": np.maximum(kept_in + again, a.tables * (kept - one + embedding)),
            "communication": steady["communication"] + sent.gathered + sent.ended,
        },
        "update": steady | {
            "weights": state.weights, "gradients": last_sums + flat, "optimizer": optimizer,
            "activations": none, "communication": received + updating(c, a, on),
        },
    }  # fmt: skip


def peak(
    work: Work,
    c: Columns,
    a: Accounting,
    seq_len: Number,
    stages: Stages | None = None,
    *,
    first_step: bool = False,
) -> Memory:
    """The most that any rank holds at any moment of a step.

    stages: of each pipeline rank; None: as the stack deals the blocks out. first_step: the first step instead
    of all later ones.
    """
    found = moments(work, c, a, seq_len, stages or Stages.dealt(work, c, a.dealt), first_step=first_step)
    groups = sum((each > 1) * 1.0 for each in (c.data_ranks * c.cp, c.cp, c.tp, c.pp))
    groups = groups + (groups > 1)
    shape = np.shape(found["loss"]["activations"])
    held: dict[str, Number] = {}
    most = np.full(shape[1:], -np.inf)
    for index, name in enumerate(MOMENTS):
        parts = {category: np.broadcast_to(found[name][category], shape) for category in CATEGORIES[:-1]}
        transient = parts["activations"] + parts["logits"] + parts["communication"]
        parts["overhead"] = a.reserved * transient + a.context + a.communicator * groups
        total = sum(parts.values())
        rank = np.argmax(total, 0)
        own = {category: _picked(each, rank) for category, each in parts.items()}
        own |= {"moment": np.full(shape[1:], index), "rank": rank}
        higher = _picked(total, rank) > most
        held = {key: np.where(higher, each, held.get(key, 0)) for key, each in own.items()}
        most = np.where(higher, _picked(total, rank), most)
    return Memory(**held)


def _picked(each: Number, rank: Number) -> Number:
    """Of [RANKS, layouts], the rank named for each layout."""
    return np.take_along_axis(each, rank[None], 0)[0]
