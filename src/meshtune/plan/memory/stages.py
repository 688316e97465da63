"""Pipeline stages: blocks of the first, a middle and the last rank, and their micro-batches in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshtune.plan.work import Columns, Number, Work

RANKS = ("first", "middle", "last")  # pipeline ranks that a peak can be on


@dataclass(frozen=True)
class Stages:
    """What the first, a middle and the last pipeline rank have: arrays [RANKS, layouts].

    blocks: on the rank. first, last: 1 on the rank with the embedding, with the head. place: its index.
    """

    blocks: Number
    first: Number
    last: Number
    place: Number

    @classmethod
    def even(cls, blocks: Number, c: Columns) -> Stages:
        """Equal stages, the larger ones first."""
        most = np.ceil(blocks / c.pp - 1e-9)
        place = np.stack([0 * c.pp, np.minimum(1.0, c.pp - 1), c.pp - 1])
        v_shaped = c.runs("zbv", "dualpipev")
        return cls(
            blocks=np.broadcast_to(most, place.shape),
            first=(place == 0) * 1.0,
            last=np.where(v_shaped, place == 0, place == c.pp - 1) * 1.0,
            place=place,
        )

    @classmethod
    def dealt(cls, work: Work, c: Columns, by: str) -> Stages:
        """As a stack deals the blocks out: by "blocks" evenly; by "slots", which embedding and head take too;
        by "products", the head's counted, each rank taking blocks until it has passed its part.
        """
        even, n = cls.even(work.blocks, c), work.blocks + 0 * c.pp
        if by == "blocks":
            return even
        first, last = even.first, even.last
        if by == "slots":
            slots = np.ceil((n + 2) / c.pp - 1e-9)
            blocks = np.where(c.pp > 1, slots - first - last, n)
        else:
            head = work.vocabulary * work.hidden / work.block_parameters
            part = (n + head) / c.pp
            least = np.minimum(np.floor(part + 1e-9) + 1, n)
            before = np.minimum(np.floor(part * (c.pp - 1) + 1e-9) + 1, n)
            blocks = np.where(last > 0, n - before, np.where(first > 0, least, np.ceil(part)))
            blocks = np.where(c.pp > 1, blocks, n)
        return cls(blocks, first, last, even.place)


def in_flight(c: Columns, place: Number = 0.0) -> Number:
    """Micro-batches whose activations pipeline rank `place` holds at most, in whole stages of this rank.

    GPipe and looped BFS: all of them; 1F1B: as many as there are ranks from it on; interleaved: the warm-up
    of (v - 1)·p + 2·(p - 1 - i) stages and one more, on the first rank 1 + (p - 1)/(p·v) times p
    (Korthikanti et al. 2022, section 4.2.3); zero-bubble schedules, whose backward of weights comes later: as
    many as there are ranks; DualPipeV half a stage more.
    """
    m, v = c.gradient_accumulation_steps, c.virtual_stages
    behind = c.pp - place
    held = np.where(c.runs("interleaved1f1b"), ((v - 1) * c.pp + 2 * (behind - 1) + 1) / v, behind)
    held = np.where(c.runs("zb", "zbv"), c.pp, np.where(c.runs("dualpipev"), c.pp + 0.5, held))
    held = np.where(c.runs("gpipe", "loopedbfs"), m, np.minimum(held, m))
    return np.where(c.pp > 1, held, 1.0)
