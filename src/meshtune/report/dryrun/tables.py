"""Tables of a dry run: what is in memory at the peak, collectives, workspaces, reads by the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshtune.dryrun.workspaces import Row as Workspace
from meshtune.layout import Layout
from meshtune.meter.trace import CATEGORIES, OPTIMIZER, RankTrace
from meshtune.report.draw.table import Table
from meshtune.report.dryrun.living import Peak, Row, by_module
from meshtune.report.dryrun.panels import rank_title, shown
from meshtune.report.dryrun.remedies import largest
from meshtune.units import counted, human

STEPS = ("first step", "later steps")


def peak_table(
    traces: Sequence[RankTrace], reserved: Mapping[str, Mapping[int, Sequence[int]]] | None = None
) -> Table:
    """Bytes at the peak by category, of the first step and of later ones, for each rank.

    reserved: title -> rank -> bytes that an allocator holds at most in each step: a row for each title.
    """
    peaks = [Peak.of(step) for trace in traces for step in trace.steps]
    several = len(traces) > 1  # then there is no room for shares
    titles = [rank_title(trace).replace(" (", "\n(") for trace in traces]
    heads = [f"{title}\n{name}" if several else name for title in titles for name in STEPS]

    def line(name: str, sizes: Iterable[int], shares: Iterable[str]) -> tuple[str, ...]:
        pairs = zip(map(size, sizes), shares, strict=True)
        return (name, *(cell for pair in pairs for cell in (pair[:1] if several else pair)))

    parts = [peak.parts() for peak in peaks]
    rows = [
        line(
            shown(name),
            [part[name] for part in parts],
            [share(part[name], peak.bytes) for part, peak in zip(parts, peaks, strict=True)],
        )
        for name in CATEGORIES
        if any(part[name] for part in parts)
    ]
    blank = [""] * len(peaks)
    rows.append(line("peak", [peak.bytes for peak in peaks], blank))
    for title, held in (reserved or {}).items():
        rows.append(line(title, [bytes for trace in traces for bytes in held[trace.rank]], blank))
    return Table.of_rows(
        "Memory at the peak" if several else f"Memory at the peak, {rank_title(traces[0])}",
        ("category", *(cell for head in heads for cell in ((head,) if several else (head, "%")))),
        tuple(rows),
        ("category",),
        tuple(note for trace in traces for note in peak_notes(trace)),
        totals=1 + len(reserved or {}),
    )


def peak_notes(trace: RankTrace) -> list[str]:
    """Sentences on the event of each peak, and on the difference between the first step and later ones."""
    first, later = (Peak.of(step) for step in trace.steps)
    title = rank_title(trace)
    notes = [
        f"{title}, {name}: the peak is {peak.event()}."
        for name, peak in zip(STEPS, (first, later), strict=True)
    ]
    if first.bytes != later.bytes:
        grown = later.parts()[OPTIMIZER] - first.parts()[OPTIMIZER]
        needs = f"{human(abs(later.bytes - first.bytes))} {'less' if first.bytes < later.bytes else 'more'}"
        why = f": {human(grown)} of optimizer state do not exist yet" if grown > 0 else ""
        notes.append(f"{title}: the first step needs {needs} than later ones{why}.")
    return notes


def module_table(trace: RankTrace) -> Table:
    """Bytes at the peak of later steps by module and category; the blocks are one row, their mean another."""
    peak = Peak.of(trace.steps[-1])
    every = by_module(peak.storages)
    names = [name for name in CATEGORIES if any(row.parts[name] for row in every)]

    def line(name: str, parts: Mapping[str, float]) -> tuple[str, ...]:
        return (name, human(sum(parts.values())), *(size(parts[category]) for category in names))

    rows = []
    for row in every:
        rows.append(line(f"{row.name}, sum" if row.blocks > 1 else row.name, row.parts))
        if row.blocks > 1:
            rows.append(line(f"{row.name}, mean", mean(row)))
    rows.append(line("peak", peak.parts()))
    return Table.of_rows(
        f"By module, {rank_title(trace)}, later steps",
        ("module", "in all", *(shown(name).replace(" ", "\n") for name in names)),
        tuple(rows),
        ("module",),
        totals=1,
    )


def mean(row: Row) -> dict[str, float]:
    """Bytes by category of a mean block."""
    return {name: bytes / row.blocks for name, bytes in row.parts.items()}


def largest_table(trace: RankTrace, layout: Layout, top: int) -> Table:
    """The largest tensors at the peak of later steps, each with the setting that removes or shrinks it.

    Those that differ only in the number of the block are one row.
    """
    every = largest(trace, layout)
    rest = sum(group["bytes"] for group in every[top:])
    rows = tuple(
        (
            human(group["bytes"]),
            f"{group['count']} × {human(group['bytes'] / group['count'])}" if group["count"] > 1 else "",
            group["tensor"],
            group["made_by"],
            f"{'×'.join(map(str, group['shape']))} {group['dtype']}".strip(),
            shown(group["category"]),
            group["setting"],
        )
        for group in every[:top]
    )
    others = f"{counted(len(every) - top, 'other group')} of tensors: {human(rest)}."
    return Table.of_rows(
        f"The largest tensors at the peak, {rank_title(trace)}, later steps",
        ("bytes", "count", "tensor", "made by", "shape", "category", "setting that shrinks it"),
        rows,
        ("tensor", "made by", "shape", "category", "setting that shrinks it"),
        (others,) if rest else (),
    )


def collectives_table(trace: RankTrace) -> Table:
    """Number and bytes of the collectives of a later step, by operation and axis.

    Micro-batches that were not traced are counted as the steady one.
    """
    rows = tuple(
        (
            kind.op,
            kind.axis,
            f"{kind.ranks:,}",
            f"{kind.count:,}",
            human(kind.bytes),
            human(kind.bytes / kind.count),
        )
        for kind in sorted(trace.collective_kinds(trace.steps[-1]), key=lambda kind: -kind.bytes)
    )
    untraced = trace.of - trace.micro_batches
    note = f"{untraced:,} of its {trace.of:,} micro-batches were not traced: they count as the steady one."
    return Table.of_rows(
        f"Collectives of a step, {rank_title(trace)}",
        ("collective", "axis", "ranks", "count", "bytes", "mean"),
        rows,
        ("collective", "axis"),
        (note,) if untraced else (),
    )


def workspaces_table(trace: RankTrace, rows: Iterable[Workspace]) -> Table:
    """Memory that kernels take for themselves."""
    return Table.of_rows(
        f"Workspaces of kernels, {rank_title(trace)}",
        ("workspace", "operations", "bytes", "source"),
        tuple((row.name, f"{row.operations:,}", human(row.bytes), row.source) for row in rows),
        ("workspace", "source"),
    )


def host_reads_table(trace: RankTrace) -> Table:
    """Lines that wait for a number from the GPU, with how often in a step."""
    first, later = (step.host_reads for step in trace.steps)
    lines = sorted(first | later, key=lambda line: -later[line])
    return Table.of_rows(
        f"Reads from the GPU by the host, {rank_title(trace)}",
        ("line", *STEPS),
        tuple((line, f"{first[line]:,}", f"{later[line]:,}") for line in lines),
        ("line",),
    )


def substitutes_table(traces: Sequence[RankTrace]) -> Table:
    """Operations that ran as a stand-in, since torch has no implementation of them on fake tensors."""
    names = sorted({name for trace in traces for name in trace.substitutes})
    return Table.of_rows(
        "Operations run by a stand-in", ("operation",), tuple((name,) for name in names), ("operation",)
    )


def size(bytes: float) -> str:
    """Bytes for a cell; "" for 0."""
    return human(bytes) if bytes else ""


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if part else ""
