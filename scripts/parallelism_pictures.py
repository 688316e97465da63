"""The pictures of docs/parallelism.md: shards of each rank, collectives of a step, timelines of pipelines.

    python scripts/parallelism_pictures.py [FOLDER]

Shards come from `placement.share`, timelines from the schedules that run. Nothing is drawn by hand.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from xml.sax.saxutils import escape

from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.pipelining.stage import PipelineStage
from transformers import LlamaConfig

from meshtune.layout import SCHEDULES, VIRTUAL_SCHEDULES, Layout
from meshtune.model.trace import census
from meshtune.placement.census import Census
from meshtune.placement.collectives import Collective
from meshtune.placement.share import Share, share
from meshtune.placement.split import piece
from meshtune.rundir import write_text_atomically

PICTURES = {  # name: (layout, title)
    "data-parallel": ("dp2-mb1-ga4", "Data parallel: a replica on every rank"),
    "zero1": ("zero1x2-mb1-ga4", "ZeRO-1: optimizer state in shards"),
    "zero2": ("zero2x2-mb1-ga4", "ZeRO-2: gradients and optimizer state in shards"),
    "zero3": ("zero3x2-mb1-ga4", "ZeRO-3, or FSDP: everything in shards"),
    "hybrid": ("dp2-zero3x2-mb1-ga4", "Hybrid: two replicas, each in two shards"),
    "tensor": ("tp2-mb1-ga4", "Tensor parallel: a piece of every matrix"),
    "pipeline": ("pp2-1f1b-mb1-ga4", "Pipeline parallel: some of the blocks"),
    "interleaved": ("pp2-interleaved1f1b-v2-mb1-ga4", "Virtual stages: every other block"),
    "context": ("zero3x2-cp2-mb1-ga4", "Context parallel: a piece of every sequence (here with ZeRO-3)"),
    "3d": ("dp2-tp2-pp2-1f1b-mb1-ga4", "3D: data, tensor and pipeline parallel"),
}
INK, PALE, PAPER = "#3b4046", "#e4e6ea", "#ffffff"
COLOURS = {"parameters": "#0072b2", "gradients": "#d55e00", "optimizer": "#009e73", "tokens": "#7a6fb0"}
BLOCKS = 4
CELL, ROW, GAP, SLIT = 46, 13, 16, 5  # a part of the model: width, height; between ranks, between columns
WIDE = 3 * CELL + 2 * SLIT
PANEL, GUTTER = WIDE + GAP, 84  # one rank; the names on the left
TOP, FOOT, A_ROW = 34, 15, 4  # title, a line of text, ranks in a row


def main(folder: str = "docs/images") -> None:
    toy = census(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=BLOCKS,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip
    for name, (text, title) in PICTURES.items():
        file = Path(folder, f"parallelism-{name}.svg")
        write_text_atomically(file, holdings(toy, Layout.parse(text), title))
        print(file)
    file = Path(folder, "parallelism-schedules.svg")
    write_text_atomically(file, timelines(pp=4, micro_batches=8))
    print(file)


# shards of each rank #

PARTS = ("embedding", *(f"block {n}" for n in range(BLOCKS)), "head")


def holdings(model: Census, layout: Layout, title: str) -> str:
    """SVG of all ranks of a layout side by side, and under them rank 0's collectives in a step.

    title: the layout is added to it.
    """
    shares = [share(model, layout, rank, seq_len=256) for rank in range(layout.world)]
    lines = [f"{m.count} × {m.op} ({m.axis}) of {m.what}: {when(layout, m)}" for m in shares[0].collectives]
    columns = min(A_ROW, len(shares))
    height = 44 + len(PARTS) * (ROW + 2) + 14 + layout.data_ranks * 8
    rows = -(-len(shares) // columns)
    drawn = []
    for row in range(rows):
        y = TOP + row * height
        drawn.append(shift(GAP, y, labels(layout)))
        for column, rank in enumerate(shares[row * columns : (row + 1) * columns]):
            drawn.append(shift(GUTTER + column * (PANEL + GAP), y, panel(layout, rank)))
    bottom = TOP + rows * height
    lines = ["Rank 0, in a step of 4 micro-batches:", *lines]
    drawn += [text(GAP, bottom + FOOT * (n + 1), line, size=11) for n, line in enumerate(lines)]
    width = max(GUTTER + columns * (PANEL + GAP), 600)
    return picture(width, bottom + FOOT * (len(lines) + 1), f"{title} ({layout})", drawn)


def when(layout: Layout, message: Collective) -> str:
    """Phrase for the places in a step where collectives like `message` run, as documented in parallel/."""
    match message.what:
        case "parameters" if layout.zero == 3:
            return "before each block's forward, and again before its backward"
        case "parameters":
            return "before each block's first forward of the step"
        case "gradients" if layout.zero >= 2 and message.op == "reduce_scatter":
            return "after each block's backward"
        case "gradients":
            return "after each block's last backward of the step"
        case "keys and values" | "heads":
            return "around each attention, forward and backward"
        case _ if message.axis == "pp":
            return "after each micro-batch's forward to the next stage, after its backward to the one before"
        case _:
            return "in each block, forward and backward"


def labels(layout: Layout) -> str:
    """Names of the rows of each panel."""
    top = 30 + len(PARTS) * (ROW + 2)
    parts = [text(0, 30 + row * (ROW + 2) + 10, name, size=10) for row, name in enumerate(PARTS)]
    return "".join([*parts, text(0, top + 12, "tokens", size=10)])


def panel(layout: Layout, rank: Share) -> str:
    """SVG of one rank: its parameters, gradients and optimizer state by part of PARTS, and its tokens."""
    here = (rank.embedding, *(any(n in blocks for blocks in rank.blocks) for n in range(BLOCKS)), rank.head)
    place = ", ".join(f"{axis} {index}" for axis, index in rank.place.items() if getattr(layout, axis) > 1)
    drawn = [text(0, 10, f"rank {rank.rank}: {place}", size=10, weight=600)]
    for column, kind in enumerate(("parameters", "gradients", "optimizer")):
        x = column * (CELL + SLIT)
        drawn.append(text(x, 24, kind, size=8.5))
        for row, (name, has_part) in enumerate(zip(PARTS, here, strict=True)):
            y = 30 + row * (ROW + 2)
            drawn.append(box(x, y, CELL, ROW, PALE))
            if has_part:
                drawn.append(box(*inside(x, y, shard(layout, rank, kind)), COLOURS[kind], f"{name}: {kind}"))
    return "".join([*drawn, *tokens(layout, rank, 30 + len(PARTS) * (ROW + 2) + 5)])


Span = tuple[float, float]  # start and end, as shares (0 to 1) of a width or height


def shard(layout: Layout, rank: Share, kind: str) -> tuple[Span, Span]:
    """(Span of the width, span of the height) of a part's cell that this rank stores.

    Tensor parallelism cuts the width, ZeRO the height. kind: parameters, gradients or optimizer.
    """
    across = fraction(layout.tp, rank.place["tp"])
    sharded = layout.zero >= {"parameters": 3, "gradients": 2, "optimizer": 1}[kind]
    shards = layout.dp_shard * layout.cp
    down = fraction(shards, rank.place["dp_shard"] * layout.cp + rank.place["cp"]) if sharded else (0.0, 1.0)
    return across, down


def tokens(layout: Layout, rank: Share, y: float) -> Iterator[str]:
    """Boxes of the sequences that all data ranks train on at once, and in colour this rank's tokens.

    y: upper edge of the first one, in px.
    """
    sequence = rank.place["dp_replicate"] * layout.dp_shard + rank.place["dp_shard"]
    for row in range(layout.data_ranks):
        yield box(0, y + row * 8, WIDE, 6, PALE)
    for start, stop in zigzag(layout.cp, rank.place["cp"]):
        yield box(start * WIDE, y + sequence * 8, (stop - start) * WIDE, 6, COLOURS["tokens"], "tokens")


def zigzag(cp: int, index: int) -> list[Span]:
    """A context rank's tokens, as spans of the sequence: of 2·cp pieces number `index` from both ends."""
    if cp == 1:
        return [(0.0, 1.0)]
    return [fraction(2 * cp, index), fraction(2 * cp, 2 * cp - 1 - index)]


def fraction(parts: int, index: int) -> Span:
    """Span of part `index` of equal `parts`."""
    start, stop = piece(parts, parts, index)
    return start / parts, stop / parts


def inside(x: float, y: float, spans: tuple[Span, Span]) -> tuple[float, float, float, float]:
    """x, y, width and height in px of the part of a cell that `spans` (across, down) cover.

    x, y: upper left corner of the cell.
    """
    (left, right), (top, bottom) = spans
    return x + left * CELL, y + top * ROW, (right - left) * CELL, (bottom - top) * ROW


# timelines of pipelines #

TORCH_NAMES = {
    "interleaved1f1b": "Interleaved1F1B", "loopedbfs": "LoopedBFS", "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
KINDS = {  # of an action: colour, units of time (a whole backward is twice a forward)
    "F": ("#0072b2", 1),
    "B": ("#d55e00", 2),
    "I": ("#e69f00", 1),  # a backward's half that the stage before waits for
    "W": ("#009e73", 1),  # its other half, the gradients of weights
}
UNIT, LANE = 13, 14  # of time, of a rank


class Slot(NamedTuple):
    """One action of a rank; times in units of a stage's forward."""

    start: float
    stop: float
    kind: str  # a key of KINDS
    stage: int
    micro_batch: int


def timeline(layout: Layout) -> list[list[Slot]]:
    """Actions of each pipeline rank in torch's order, each as early as its inputs allow.

    Sending takes no time, and every stage takes equally long.
    """
    last, orders = layout.stages - 1, actions(layout)
    ends: dict[tuple[str, int, int], float] = {}
    slots: list[list[Slot]] = [[] for _ in orders]
    while any(orders):
        left = sum(map(len, orders))
        for rank, order in enumerate(orders):
            if not order:
                continue
            kind, stage, number = order[0]
            needs = needed(kind, stage, number, last)
            if all(any(action in ends for action in ways) for ways in needs):
                ready = [min(ends[action] for action in ways if action in ends) for ways in needs]
                start = max([*ready, slots[rank][-1].stop if slots[rank] else 0.0])
                slots[rank].append(Slot(start, start + KINDS[kind][1], kind, stage, number))
                ends[kind, stage, number] = slots[rank][-1].stop
                del order[0]
        assert sum(map(len, orders)) < left, f"{layout.schedule} waits for itself"
    return slots


def needed(kind: str, stage: int, number: int, last: int) -> list[list[tuple[str, int, int]]]:
    """(kind, stage, micro-batch) of the actions that must have ended before this one: one of each inner list.

    kind, stage, number: this action's, with the number of its micro-batch. last: number of the last stage.
    """
    match kind:
        case "F":
            return [[("F", stage - 1, number)]] if stage else []
        case "W":
            return [[("I", stage, number)]]
        case _:
            after = [[("B", stage + 1, number), ("I", stage + 1, number)]] if stage < last else []
            return [[("F", stage, number)], *after]


def actions(layout: Layout) -> list[list[tuple[str, int, int]]]:
    """(kind, stage, micro-batch) of each rank's actions in order; torch's, except for gpipe and 1f1b."""
    pp, steps = layout.pp, layout.gradient_accumulation_steps
    if layout.schedule in ("gpipe", "1f1b"):
        return [
            one_stage(rank, steps if layout.schedule == "gpipe" else pp - rank, steps) for rank in range(pp)
        ]
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, pp, None, layout.stages
    schedule_class: Any = get_schedule_class(TORCH_NAMES[layout.schedule])
    schedule = schedule_class([stage] * (stage.num_stages // pp), steps)
    orders = []
    for rank in range(pp):
        order = (action for action in schedule.pipeline_order[rank] if action is not None)
        flat = (one for action in order for one in action.sub_actions or (action,))
        orders.append(
            [(LETTERS[one.computation_type.name], one.stage_index, one.microbatch_index) for one in flat]
        )
    return orders


def one_stage(rank: int, ahead: int, steps: int) -> list[tuple[str, int, int]]:
    """Actions of a rank with one stage: `ahead` forwards, then a backward and a forward in turn.

    steps: micro-batches of a step; at most as many forwards run ahead.
    """
    order = [("F", rank, number) for number in range(min(ahead, steps))]
    for number in range(steps):
        order.append(("B", rank, number))
        if number + ahead < steps:
            order.append(("F", rank, number + ahead))
    return order


def timelines(pp: int, micro_batches: int) -> str:
    """SVG of the actions of `pp` ranks over time, under every schedule; grey is a bubble."""
    drawn, y = [], TOP + 4
    longest = 0.0
    for schedule in SCHEDULES:
        virtual = 2 if schedule in VIRTUAL_SCHEDULES else 1
        layout = Layout(
            pp=pp, schedule=schedule, virtual_stages=virtual, gradient_accumulation_steps=micro_batches
        )
        ranks = timeline(layout)
        share_of = layout.stages // pp  # stages a rank: each is so much smaller
        end = max(slot.stop for rank in ranks for slot in rank) / share_of
        busy = sum(slot.stop - slot.start for rank in ranks for slot in rank) / share_of
        title = f"{schedule}{f', v{virtual}' if virtual > 1 else ''}: {1 - busy / end / pp:.0%} bubble"
        drawn.append(text(GAP, y + 9, title, size=11, weight=600))
        drawn.append(box(GAP, y + 14, end * UNIT, pp * LANE, PALE))
        drawn += [shift(GAP, y + 14, "".join(lane(n, slots, share_of, pp))) for n, slots in enumerate(ranks)]
        y += pp * LANE + 34
        longest = max(longest, end)
    for n, (kind, words) in enumerate(LEGEND.items()):
        drawn.append(box(GAP + n * 150, y, 10, 10, KINDS[kind][0]))
        drawn.append(text(GAP + n * 150 + 14, y + 9, words, size=10))
    title = f"Pipeline schedules: {pp} ranks, {micro_batches} micro-batches, time to the right"
    return picture(max(2 * GAP + longest * UNIT, 640), y + 24, title, drawn)


LEGEND = {"F": "forward", "B": "backward", "I": "backward of activations", "W": "gradients of weights"}


def lane(number: int, slots: Sequence[Slot], share_of: int, pp: int) -> Iterator[str]:
    """Boxes of one rank's actions, each with its micro-batch; stages after the first `pp` are paler.

    number: the rank. share_of: stages per rank; times are divided by it, because each stage is so much
    smaller.
    """
    for slot in slots:
        x, wide = slot.start / share_of * UNIT, (slot.stop - slot.start) / share_of * UNIT
        colour, _ = KINDS[slot.kind]
        tip = f"rank {number}, stage {slot.stage}: {LEGEND[slot.kind]} of micro-batch {slot.micro_batch}"
        pale = 1.0 if slot.stage < pp else 0.65
        yield box(x + 0.4, number * LANE + 1, wide - 0.8, LANE - 2, colour, tip, opacity=pale)
        if wide > 6:
            yield text(x + 2, number * LANE + 10, str(slot.micro_batch), size=7, fill=PAPER)


# SVG #


def picture(width: float, height: float, title: str, drawn: Sequence[str]) -> str:
    """Text of an SVG file with a white background, because pages may be light or dark.

    width, height: px. drawn: SVG elements, from bottom to top.
    """
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    parts = [
        f'{head} role="img" font-family="system-ui, -apple-system, Segoe UI, sans-serif">',
        f"<title>{escape(title)}</title>",
        box(0, 0, width, height, PAPER),
        text(GAP, 20, title, size=13, weight=600),
        *drawn,
        "</svg>\n",
    ]
    return "\n".join(parts)


def box(
    x: float, y: float, width: float, height: float, fill: str, tip: str = "", *, opacity: float = 1
) -> str:
    """SVG rectangle; x, y: upper left corner, in px. tip: text under the pointer; "": none."""
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    style = f'fill="{fill}"' + (f' fill-opacity="{opacity:g}"' if opacity < 1 else "")
    return f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" {style}>{inner}</rect>'


def text(x: float, y: float, words: str, *, size: float, weight: int = 400, fill: str = INK) -> str:
    """SVG text that begins at x, on the baseline y (px); `words` are escaped."""
    style = f'font-size="{size:g}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def shift(x: float, y: float, drawn: str) -> str:
    """SVG group that moves the elements `drawn` by x and y px."""
    return f'<g transform="translate({x:g} {y:g})">{drawn}</g>'


if __name__ == "__main__":
    main(*sys.argv[1:])
