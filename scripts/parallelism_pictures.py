"""The pictures of docs/parallelism.md: who holds what, what is said when, and the timelines of pipelines.

    python scripts/parallelism_pictures.py [FOLDER]

Who holds what is asked of `partition.share`, timelines of the schedules that run. Nothing is drawn by hand.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from transformers import LlamaConfig

from meshtune.layout import Layout
from meshtune.model.census import Census
from meshtune.model.partition import Message, Share, piece, share
from meshtune.model.trace import census
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


# who holds what #

PARTS = ("embedding", *(f"block {n}" for n in range(BLOCKS)), "head")


def holdings(model: Census, layout: Layout, title: str) -> str:
    """All ranks of a layout side by side, and what they say to each other in a step."""
    shares = [share(model, layout, rank, seq_len=256) for rank in range(layout.world)]
    lines = [f"{m.count} × {m.op} ({m.axis}) of {m.what}: {when(layout, m)}" for m in shares[0].messages]
    columns = min(A_ROW, len(shares))
    height = 44 + len(PARTS) * (ROW + 2) + 14 + layout.data_ranks * 8
    rows = -(-len(shares) // columns)
    drawn = []
    for row in range(rows):
        y = TOP + row * height
        drawn.append(shift(GAP, y, labels(layout)))
        for column, each in enumerate(shares[row * columns : (row + 1) * columns]):
            drawn.append(shift(GUTTER + column * (PANEL + GAP), y, panel(layout, each)))
    bottom = TOP + rows * height
    lines = ["Rank 0, in a step of 4 micro-batches:", *lines]
    drawn += [text(GAP, bottom + FOOT * (n + 1), line, size=11) for n, line in enumerate(lines)]
    width = max(GUTTER + columns * (PANEL + GAP), 600)
    return picture(width, bottom + FOOT * (len(lines) + 1), f"{title} ({layout})", drawn)


def when(layout: Layout, message: Message) -> str:
    """When in a step messages of this kind are sent: what parallel/'s modules say."""
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
    """What the rows of each panel are."""
    top = 30 + len(PARTS) * (ROW + 2)
    parts = [text(0, 30 + row * (ROW + 2) + 10, name, size=10) for row, name in enumerate(PARTS)]
    return "".join([*parts, text(0, top + 12, "tokens", size=10)])


def panel(layout: Layout, rank: Share) -> str:
    """One rank: parameters, gradients, optimizer state, part by part; and the tokens it works on."""
    here = (rank.embedding, *(any(n in blocks for blocks in rank.blocks) for n in range(BLOCKS)), rank.head)
    place = ", ".join(f"{axis} {index}" for axis, index in rank.place.items() if getattr(layout, axis) > 1)
    drawn = [text(0, 10, f"rank {rank.rank}: {place}", size=10, weight=600)]
    for column, kind in enumerate(("parameters", "gradients", "optimizer")):
        x = column * (CELL + SLIT)
        drawn.append(text(x, 24, kind, size=8.5))
        for row, (name, mine) in enumerate(zip(PARTS, here, strict=True)):
            y = 30 + row * (ROW + 2)
            drawn.append(box(x, y, CELL, ROW, PALE))
            if mine:
                drawn.append(box(*inside(x, y, held(layout, rank, kind)), COLOURS[kind], f"{name}: {kind}"))
    return "".join([*drawn, *tokens(layout, rank, 30 + len(PARTS) * (ROW + 2) + 5)])


Span = tuple[float, float]


def held(layout: Layout, rank: Share, kind: str) -> tuple[Span, Span]:
    """The share of each part's columns and rows that this rank keeps: tp cuts across, ZeRO down."""
    across = fraction(layout.tp, rank.place["tp"])
    sharded = layout.zero >= {"parameters": 3, "gradients": 2, "optimizer": 1}[kind]
    shards = layout.dp_shard * layout.cp
    down = fraction(shards, rank.place["dp_shard"] * layout.cp + rank.place["cp"]) if sharded else (0.0, 1.0)
    return across, down


def tokens(layout: Layout, rank: Share, y: float) -> Iterator[str]:
    """Which of a micro-batch's sequences, and which of their tokens, this rank works on."""
    own = rank.place["dp_replicate"] * layout.dp_shard + rank.place["dp_shard"]
    for row in range(layout.data_ranks):
        yield box(0, y + row * 8, WIDE, 6, PALE)
    for start, stop in zigzag(layout.cp, rank.place["cp"]):
        yield box(start * WIDE, y + own * 8, (stop - start) * WIDE, 6, COLOURS["tokens"], "tokens")


def zigzag(cp: int, index: int) -> list[Span]:
    """A context rank's tokens: of 2·cp pieces one from the front, and one from the back."""
    if cp == 1:
        return [(0.0, 1.0)]
    return [fraction(2 * cp, index), fraction(2 * cp, 2 * cp - 1 - index)]


def fraction(parts: int, index: int) -> Span:
    start, stop = piece(parts, parts, index)
    return start / parts, stop / parts


def inside(x: float, y: float, spans: tuple[Span, Span]) -> tuple[float, float, float, float]:
    """The rectangle of a cell that `spans` (across, down) name."""
    (left, right), (top, bottom) = spans
    return x + left * CELL, y + top * ROW, (right - left) * CELL, (bottom - top) * ROW


# SVG #


def picture(width: float, height: float, title: str, drawn: Sequence[str]) -> str:
    """A whole SVG file, on paper of its own: pages may be light or dark."""
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


def box(x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> str:
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}">{inner}</rect>'


def text(x: float, y: float, words: str, *, size: float, weight: int = 400, fill: str = INK) -> str:
    style = f'font-size="{size:g}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def shift(x: float, y: float, drawn: str) -> str:
    return f'<g transform="translate({x:g} {y:g})">{drawn}</g>'


if __name__ == "__main__":
    main(*sys.argv[1:])
