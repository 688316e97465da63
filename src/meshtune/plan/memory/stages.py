"""Pipeline stages: blocks of the first, a middle and the last rank, and their micro-batches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshtune.layout import V_SCHEDULES
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.work import Work


RANKS = ("first", "middle", "last")  # pipeline ranks that a peak can be on


@dataclass(frozen=True)
class Stages:
    """Blocks and ends of the first, a middle and the last pipeline rank: arrays [RANKS, layouts].

    Where all layouts are without a pipeline, the first axis may have one entry.
    """

    blocks: Number  # on the rank, in all its stages
    has_embedding: Number  # 1 or 0
    has_head: Number  # 1 or 0
    rank: Number  # its index in the pipeline
    interleaved: Number = 1.0  # `interleaved_share` of the rank's stages
    interleaved_at_loss: Number = 1.0  # the same in a forward of its last stage

    def recomputing(self, layouts: Columns) -> Number:
        """Blocks of each rank that recompute, by layouts.recompute_blocks of each of its stages.

        Exact unless a rank has several stages, one of them with fewer blocks than that.
        """
        return np.minimum(layouts.recompute_blocks * layouts.virtual_stages, self.blocks)

    @classmethod
    def even(cls, blocks: Number, layouts: Columns) -> Stages:
        """Stages of as equal sizes as can be: each rank counts as one of the largest, ceil(blocks / pp)."""
        largest = np.ceil(blocks / layouts.pp - 1e-9)
        rank = np.stack([0 * layouts.pp, np.minimum(1.0, layouts.pp - 1), layouts.pp - 1])
        v_shaped = layouts.runs(*V_SCHEDULES)
        return cls(
            blocks=np.broadcast_to(largest, rank.shape),
            has_embedding=(rank == 0) * 1.0,
            has_head=np.where(v_shaped, rank == 0, rank == layouts.pp - 1) * 1.0,
            rank=rank,
            interleaved=np.ones(rank.shape),
            interleaved_at_loss=np.ones(rank.shape),
        )

    @classmethod
    def cut(cls, work: Work, layouts: Columns, by: str) -> Stages:
        """Stages as a stack cuts them (`Accounting.stage_cut`).

        by: "blocks": evenly; "slots": embedding and head take the place of a block each; "matmuls": each
        rank takes blocks until it has passed its part of all matmul elements, the head's included. One rank
        has all blocks.
        """
        even, blocks = cls.even(work.blocks, layouts), work.blocks + 0 * layouts.pp
        if by == "blocks":
            return even
        if by == "slots":
            slots = np.ceil((blocks + 2) / layouts.pp - 1e-9)
            on_rank = slots - even.has_embedding - even.has_head
        else:
            assert by == "matmuls", by
            head_blocks = work.vocabulary * work.hidden / work.block_parameters
            part = (blocks + head_blocks) / layouts.pp
            on_first = np.minimum(np.floor(part + 1e-9) + 1, blocks)
            before_last = np.minimum(np.floor(part * (layouts.pp - 1) + 1e-9) + 1, blocks)
            on_rank = np.where(even.has_embedding > 0, on_first, np.ceil(part))
            on_rank = np.where(even.has_head > 0, blocks - before_last, on_rank)
        on_rank = np.where(layouts.pp > 1, on_rank, blocks)
        return replace(even, blocks=on_rank)


def in_flight(layouts: Columns, rank: Number = 0.0) -> Number:
    """Micro-batches whose activations pipeline rank `rank` (0: the first) holds at most.

    A micro-batch that is in only one of a rank's v stages counts as 1/v. Never more than a step has; 1
    without a pipeline.

    GPipe, looped BFS: all.
    1F1B: the ranks from this one on (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503).
    Interleaved 1F1B: its warm-up of (v - 1)·p + 2·(p - 1 - i) stages and one more, so that the first rank
    has p·(1 + (p - 1)/(p·v)) (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3).
    ZB-H1, ZBV: one for each rank, as gradients of weights come later (Qi et al. 2024, arXiv:2401.10241).
    DualPipeV: half of a rank's stages more than ZBV, as torch's schedule has them (DualPipe cut in half by
    Sea AI Lab, 2025; DualPipe: DeepSeek-AI 2024, arXiv:2412.19437).
    """
    micro_batches, virtual = layouts.gradient_accumulation_steps, layouts.virtual_stages
    ranks_from_here = layouts.pp - rank
    warm_up = (virtual - 1) * layouts.pp + 2 * (ranks_from_here - 1) + 1
    most = np.where(layouts.runs("interleaved1f1b"), warm_up / virtual, ranks_from_here)
    most = np.where(layouts.runs("zb", "zbv"), layouts.pp, most)
    most = np.where(layouts.runs("dualpipev"), layouts.pp + 0.5, most)
    most = np.where(layouts.runs("gpipe", "loopedbfs"), micro_batches, np.minimum(most, micro_batches))
    return np.where(layouts.pp > 1, most, 1.0)


def interleaved_share(sizes: Sequence[int], pp: int, rank: int, *, of_last: bool) -> float:
    """Blocks that interleaved 1F1B has in flight on a rank at most, as a share of those of equal stages.

    sizes: blocks of the rank's stages. of_last: at most in forwards of the last of them. Forwards take turns
    of pp micro-batches from the first stage on, backwards from the last one on, behind them by what
    `in_flight` says.
    """
    virtual = len(sizes)
    warm_up = (virtual - 1) * pp + 2 * (pp - rank - 1) + 1
    most, held = 0, [0] * virtual
    for forward in range(warm_up + 2 * virtual * pp):
        stage = forward // pp % virtual
        held[stage] += 1
        if forward >= warm_up:
            held[virtual - 1 - (forward - warm_up) // pp % virtual] -= 1
        if forward + 1 >= warm_up and (not of_last or stage == virtual - 1):
            most = max(most, sum(count * size for count, size in zip(held, sizes, strict=True)))
    return most * virtual / (warm_up * sum(sizes))


def fullest(layouts: Columns, rank: Number, saved: Number, waiting: Number) -> tuple[Number, Number]:
    """Micro-batches in flight on pipeline rank `rank`, and those of them that wait for their gradients of
    weights when another backward of inputs begins, where both together take most; counted as by `in_flight`.

    Interleaved ZB-H1: one stage more waits on each rank. ZBV: none waits while most are in flight; at the end
    a stage less is in flight for each rank behind, itself included, and two more wait on each rank. Others:
    none waits. saved, waiting: bytes of a micro-batch in all stages of the rank, and of its gradients that
    wait.
    """
    micro_batches, fewer = in_flight(layouts, rank), (layouts.pp - rank) / 2
    at_end = layouts.runs("zbv") & (rank * waiting > fewer * saved)
    stages = np.where(layouts.runs("zb"), rank / layouts.virtual_stages, np.where(at_end, rank, 0.0))
    return micro_batches - at_end * fewer, np.minimum(stages, layouts.gradient_accumulation_steps)


def in_flight_in_head(layouts: Columns, micro_batches: Number) -> Number:
    """Micro-batches in flight behind the last block, but one, on the rank with the head.

    micro_batches: in flight on it. Its backward follows at once under interleaved 1F1B and V schedules.
    """
    return np.where(layouts.runs("interleaved1f1b", *V_SCHEDULES), 0.0, micro_batches - 1)


def kept_input_gradients(layouts: Columns, stages: Stages) -> Number:
    """Gradients of received hidden states that a rank still holds when the update begins.

    torch leaves them on the receive buffers where a backward is split in two, until the next step. DualPipeV
    splits few. A V schedule's last rank hands hidden states to itself: nothing is received there.
    """
    own = (layouts.runs("zbv") & (stages.rank == layouts.pp - 1)) * 1.0
    received = layouts.virtual_stages - stages.has_embedding - own
    split = np.where(layouts.runs("zb", "zbv"), layouts.gradient_accumulation_steps * received, 0.0)
    inner = 2 * layouts.pp - 1 - stages.rank
    ends = np.where(stages.rank == 0, layouts.pp - 1, np.ceil(layouts.pp / 2))
    of_dualpipev = np.where((stages.rank > 0) & (stages.rank < layouts.pp - 1), inner, ends)
    return np.where(layouts.runs("dualpipev"), of_dualpipev, split)
