"""Seconds of a pipeline: sends between stages, and the bubble."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from meshtune.layout import ALL_AHEAD, V_SCHEDULES, ZERO_BUBBLE
from meshtune.plan.seconds.collectives import ring_collectives
from meshtune.plan.seconds.gpu import host_seconds
from meshtune.plan.seconds.groups import ranks_in_node
from meshtune.units import Number

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns
    from meshtune.plan.machine import Machine
    from meshtune.plan.seconds.block import Blocks
    from meshtune.plan.seconds.ends import Ends
    from meshtune.plan.work import Work

SEND_SHARE_OF_LINK = 0.5  # of the link's bandwidth, for one send to one neighbour; assumed


@dataclass(frozen=True)
class Pipeline:
    """Seconds that a pipeline costs a rank, all 0 without one; and the host's."""

    host: Number  # of one micro-batch: what the host's work adds to the rank's computation
    host_step: Number  # of a step: what it adds once
    sends: Number  # of one micro-batch through the rank's stages, forward and backward
    bubble: Number  # of a step: waiting for the first and last micro-batches
    behind: Number  # of one micro-batch: the slowest rank's, with the head, beyond a mean one's blocks


def pipeline_seconds(
    work: Work, layouts: Columns, machine: Machine, seq_len: Number, *, blocks: Blocks, ends: Ends
) -> Pipeline:
    """Seconds of sends and bubble. All ranks wait for the slowest one, which may be the one with the head."""
    on_rank = work.blocks / layouts.pp
    block = blocks.mean(on_rank)
    hidden_bytes = machine.element * layouts.rank_tokens(seq_len) * work.hidden
    parts = np.where((layouts.sp > 0) | (machine.send_split > 0), layouts.tp, 1.0)
    send = send_seconds(hidden_bytes / parts, layouts.world / layouts.pp, machine)
    gather = ring_collectives(machine, hidden_bytes, parts, ranks_in_node(parts, 1.0, machine))
    send = send + np.where(layouts.sp > 0, 0.0, gather)
    sends = 2 * send * layouts.virtual_stages * (layouts.pp > 1)
    stage = blocks.total(on_rank)
    host, host_step = host_seconds(stage, machine)
    stage = stage + sends + host
    slowest = _slowest_rank(work.blocks, layouts, blocks, ends, machine.balanced)
    slowest = slowest + sends + host
    bubble = _bubble(layouts, stage, block.forward * on_rank, block.compute.weights * on_rank)
    return Pipeline(host, host_step, sends, bubble, np.where(layouts.pp > 1, slowest - stage, 0.0))


def _slowest_rank(count: Number, layouts: Columns, blocks: Blocks, ends: Ends, balanced: Number) -> Number:
    """Seconds of the slowest pipeline rank's blocks and ends for one micro-batch.

    Where all forwards come before all backwards: of the slowest in the forward and the slowest in the
    backward.

    count: blocks of the model. ends: they count only with a pipeline. balanced: as in Machine.
    """
    forwards, backwards = [], []
    for on, has_first, has_last in _blocks_of_ranks(count, layouts, blocks, ends, balanced):
        forward = blocks.forward(on)
        forwards.append(forward + has_first * ends.exchange + has_last * ends.last_forward)
        backward = blocks.total(on) - forward + has_last * ends.last_backward
        backwards.append(backward + has_first * ends.first_backward)
    together = reduce(np.maximum, map(operator.add, forwards, backwards))
    apart = reduce(np.maximum, forwards) + reduce(np.maximum, backwards)
    slowest = np.where(layouts.runs(*ALL_AHEAD), apart, together)
    return np.where(layouts.pp > 1, slowest, blocks.total(count))


def slowest_forward(
    work: Work, layouts: Columns, machine: Machine, *, blocks: Blocks, ends: Ends, forward: Number
) -> Number:
    """Seconds of the slowest pipeline rank's blocks and ends in a forward without gradients of one
    micro-batch; without a pipeline of its blocks only.

    blocks, ends: by which the pipeline is cut. forward: seconds of a block.
    """
    ranks = [
        on * forward + (has_first + has_last) * ends.exchange + has_last * (ends.scoring + ends.sums)
        for on, has_first, has_last in _blocks_of_ranks(work.blocks, layouts, blocks, ends, machine.balanced)
    ]
    return np.where(layouts.pp > 1, reduce(np.maximum, ranks), work.blocks * forward)


def _blocks_of_ranks(
    count: Number, layouts: Columns, blocks: Blocks, ends: Ends, balanced: Number
) -> tuple[tuple[Number, Number, Number], ...]:
    """(Blocks, whether it has the first stage, whether the last one) of the first, a middle and the last
    pipeline rank. Arguments: as of `_slowest_rank`.
    """
    pp, per_rank = layouts.pp, layouts.virtual_stages
    # One rank has the first stage and the last one where stages turn back at the last rank.
    turned = layouts.runs(*V_SCHEDULES)
    once = ends.last - (ends.head_forwards - 1) * ends.scoring  # as census_stages counts the head
    head_blocks = once / blocks.mean(count / pp).total
    on_last = np.maximum(1.0, np.round((count + head_blocks) / (pp * per_rank) - head_blocks))
    on_other = (count - on_last) / np.maximum(pp * per_rank - 1, 1.0)  # stage
    beside_last = (per_rank - 1) * np.where(turned, np.floor(on_other + 1e-9), on_other)
    cut_by_cost = (
        np.floor(per_rank * on_other + 1e-9),
        np.ceil(per_rank * on_other - 1e-9),
        on_last + beside_last,
    )
    equal = np.ceil(count / pp - 1e-9)
    first, middle, last = (np.where(balanced > 0, on, equal) for on in cut_by_cost)
    return (
        (first, np.where(turned, 0.0, 1.0), 0.0),
        (middle, 0.0, 0.0),
        (last, np.where(turned, 1.0, 0.0), 1.0),
    )


def send_seconds(size: Number, stage_gpus: Number, machine: Machine) -> Number:
    """Seconds to send `size` bytes to the next stage: over the network once a stage fills a node or more.

    stage_gpus: GPUs that have the same stages.
    """
    across = machine.network * machine.network_share / machine.node * machine.send_share
    inside = machine.link * SEND_SHARE_OF_LINK
    return np.where(stage_gpus >= machine.node, size / across, size / inside) + machine.network_latency


def _bubble(layouts: Columns, stage: Number, forward: Number, weights: Number) -> Number:
    """Seconds in which a rank waits for the first micro-batches and for the last ones.

    stage, forward, weights: seconds of a rank's stages for one micro-batch: all, their forward, their
    gradients of weights. With F = forward, W = weights, B = the gradients of activations:

        GPipe, 1F1B   (pp - 1)·(F + B + W)                      Narayanan et al. 2021, arXiv:2104.04473,
                                                                section 2.2
        interleaved   a v-th of it                              the same
        ZB-H1         (pp - 1)·(F + B - W)                      Qi et al. 2024, arXiv:2401.10241
        ZB-V          (pp - 1)·(F + B - 2W), over half stages   the same, section 6
        DualPipeV     (pp - 1)·(F + 2B - W), over half stages   Sea AI Lab's cut-in-half (2025) of DualPipe
                                                                (DeepSeek-AI 2024, arXiv:2412.19437, table 2),
                                                                with no overlap inside a pair

    Zero-bubble schedules wait at least half a stage's forward, as F, B and W are never quite equal; ZB-V a
    whole one, as torch's actions do where they are (test_plan_schedules.py). With fewer micro-batches than
    ranks, each further stage of a rank waits pp - m stages for the first one to return.
    """
    chunk = stage / layouts.virtual_stages
    saved = np.where(layouts.runs("zb"), 2 * weights, np.where(layouts.runs("zbv"), 3 * weights, 0.0))
    saved = np.where(layouts.runs("dualpipev"), 3 * weights + forward - stage, saved)
    saved = saved / layouts.virtual_stages
    per_rank = np.where(layouts.runs("gpipe", "1f1b"), stage, chunk)
    at_least = forward / layouts.virtual_stages * np.where(layouts.runs("zbv"), 1.0, 0.5)
    at_least = np.where(layouts.runs(*ZERO_BUBBLE), at_least, 0.0)
    missing = np.maximum(layouts.pp - layouts.gradient_accumulation_steps, 0.0)
    returning = missing * (layouts.virtual_stages - 1) * chunk
    bubble = (layouts.pp - 1) * np.maximum(per_rank - saved, at_least) + returning
    return np.where(layouts.pp > 1, bubble, 0.0)
