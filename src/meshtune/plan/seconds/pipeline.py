"""A pipeline's sends between stages and its bubble."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshtune.placement.columns import Columns, Number
from meshtune.plan.machine import Machine
from meshtune.plan.seconds.block import Block
from meshtune.plan.seconds.collectives import gathered, ranks_in_node
from meshtune.plan.seconds.gpu import rank_tokens
from meshtune.plan.work import Work

LINK_OF_ONE = 0.5  # of the link's speed that one message to one neighbour reaches; assumed


@dataclass(frozen=True)
class Pipeline:
    """sends: of one micro-batch, at one stage. bubble: of a step."""

    sends: Number
    bubble: Number


def pipeline_of(work: Work, c: Columns, m: Machine, seq_len: Number, block: Block, head: Number) -> Pipeline:
    """All stages wait for the first micro-batches and the last ones, and for the slowest stage, which may be
    the one with the head.
    """
    fullest = _fullest_stage(work.blocks, c.pp, head / block.total, m.balanced)
    hidden_bytes = m.element * rank_tokens(c, seq_len) * work.hidden
    cut = np.where((c.sp > 0) | (m.send_split > 0), c.tp, 1.0)
    send = _sent(hidden_bytes / cut, c.tp * c.cp * c.data_ranks, m)
    send = send + np.where(c.sp > 0, 0.0, gathered(m, hidden_bytes, cut, ranks_in_node(cut, 1.0, m)))
    sends = 2 * send * c.virtual_stages * (c.pp > 1)
    blocks = work.blocks / c.pp
    stage = block.total * blocks + sends + m.host_micro_batch
    slowest = block.total * fullest + sends + m.host_micro_batch
    fill = _fill(c, stage, block.forward * blocks, block.passes.weights * blocks)
    uneven = np.where(c.pp > 1, c.gradient_accumulation_steps * (slowest - stage), 0.0)
    return Pipeline(sends, fill + uneven)


def _fullest_stage(blocks: Number, pp: Number, head_blocks: Number, balanced: Number) -> Number:
    """The cost of the slowest stage, in blocks. head_blocks: what the head costs, in blocks."""
    equal = np.ceil(blocks / pp - 1e-9) + np.where(pp > 1, head_blocks, 0.0)
    at_last = np.maximum(1.0, np.round((blocks + head_blocks) / pp - head_blocks))
    others = np.ceil((blocks - at_last) / np.maximum(pp - 1, 1.0) - 1e-9)
    even = np.where(pp > 1, np.maximum(at_last + head_blocks, others), blocks)
    return np.where(balanced > 0, even, equal)


def _sent(size: Number, inside: Number, m: Machine) -> Number:
    """Hidden states to the next stage: over the network once a stage fills a node or more."""
    across = m.network * m.network_share / m.node * m.send_share
    return np.where(inside >= m.node, size / across, size / (m.link * LINK_OF_ONE)) + m.network_latency


def _fill(c: Columns, stage: Number, forward: Number, weights: Number) -> Number:
    """Time in which a rank waits for the first micro-batches, and for the last ones.

    With F, B and W a rank's forward, backward of activations and backward of weights:
    (pp - 1)·(F + B + W) for GPipe and 1F1B, a v-th of it interleaved (Narayanan et al. 2021, section 2.2);
    (pp - 1)·(F + B - W) for ZB-H1 and (pp - 1)·(F + B - 2W) over half stages for ZBV (Qi et al. 2024,
    arXiv:2401.10241); (pp - 1)·(F + 2B - W) over half stages for DualPipeV (DeepSeek-AI 2024,
    arXiv:2412.19437, table 2, with no overlap inside a pair). Never less than half a forward: the three are
    not as equal as that. With fewer micro-batches than ranks a rank's next stage waits for the first of them
    to come round: pp - m stages more for each stage but the first.
    """
    chunk = stage / c.virtual_stages
    saved = np.where(c.runs("zb"), 2 * weights, np.where(c.runs("zbv"), 3 * weights, 0.0))
    saved = np.where(c.runs("dualpipev"), 3 * weights + forward - stage, saved) / c.virtual_stages
    each = np.where(c.runs("gpipe", "1f1b"), stage, chunk)
    floor = np.where(c.runs("zb", "zbv", "dualpipev"), forward / c.virtual_stages * 0.5, 0.0)
    short = np.maximum(c.pp - c.gradient_accumulation_steps, 0.0) * (c.virtual_stages - 1) * chunk
    return np.where(c.pp > 1, (c.pp - 1) * np.maximum(each - saved, floor) + short, 0.0)
