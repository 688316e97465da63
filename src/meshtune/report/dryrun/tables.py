"""Tables of a dry run: what is in memory at the peak, collectives, workspaces, reads by the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshtune.dryrun.workspaces import Row as Workspace
from meshtune.layout import Layout
from meshtune.meter.trace import CATEGORIES, OPTIMIZER, RankTrace
from meshtune.report.draw.table import Column, Table
from meshtune.report.dryrun.living import Peak, by_module
from meshtune.report.dryrun.panels import STEPS, rank_title, shown
from meshtune.report.dryrun.remedies import largest
from meshtune.units import counted, human


def peak_table(
    traces: Sequence[RankTrace], reserved: Mapping[str, Mapping[int, Sequence[int]]] | None = None
) -> Table:
    """Bytes at the peak by category, of the first step and of later ones, for each rank.

    reserved: title -> rank -> bytes that an allocator holds at most in each step: a row for each title.
    """
    reserved = reserved or {}
    several = len(traces) > 1  # then there is no room for shares
    peaks = {(trace.rank, at): Peak.of(step) for trace in traces for at, step in enumerate(trace.steps)}
    parts = {place: peak.parts() for place, peak in peaks.items()}
    names = [name for name in CATEGORIES if any(sizes[name] for sizes in parts.values())]
    columns = [Column("category", (*map(shown, names), "peak", *reserved), words=True)]
    titles = {trace.rank: rank_title(trace) for trace in traces}
    for (rank, at), peak in peaks.items():
        sizes = [parts[rank, at][name] for name in names]
        below = [peak.bytes, *(by_rank[rank][at] for by_rank in reserved.values())]
        head = titles[rank].replace(" (", "\n(") + f"\n{STEPS[at]}" if several else STEPS[at]
        columns.append(Column(head, [*map(size, [*sizes, *below])]))
        if not several:
            shares = [share(bytes, peak.bytes) for bytes in sizes]
            columns.append(Column("%", [*shares, *[""] * len(below)]))
    title = "Memory at the peak" + ("" if several else f", {titles[traces[0].rank]}")
    notes = tuple(note for trace in traces for note in peak_notes(trace))
    return Table(title, tuple(columns), notes, totals=1 + len(reserved))


def peak_notes(trace: RankTrace) -> list[str]:
    """Sentences on the event of each peak, and on the difference between the first step and later ones."""
    first, later = (Peak.of(step) for step in trace.steps)
    title = rank_title(trace)
    notes = [
        f"{title}, {name}: the peak is {peak.event()}."
        for name, peak in zip(STEPS, (first, later), strict=True)
    ]
    if trace.reference:
        before = Peak.of(trace.reference)
        parts = ", ".join(f"{shown(name)} {human(size)}" for name, size in before.parts().items() if size)
        notes.append(f"{title}, the reference's pass before the first step: {human(before.bytes)} ({parts}).")
    if first.bytes != later.bytes:
        grown = later.parts()[OPTIMIZER] - first.parts()[OPTIMIZER]
        needs = f"{human(abs(later.bytes - first.bytes))} {'less' if first.bytes < later.bytes else 'more'}"
        why = f": {human(grown)} of optimizer state do not exist yet" if grown > 0 else ""
        notes.append(f"{title}: the first step needs {needs} than later ones{why}.")
    return notes


def module_table(trace: RankTrace) -> Table:
    """Bytes at the peak of later steps by module and category; the blocks are one row, their mean another."""
    peak = Peak.of(trace.steps[-1])
    rows: dict[str, Mapping[str, float]] = {}
    for row in by_module(peak.storages):
        rows[f"{row.name}, sum" if row.blocks > 1 else row.name] = row.parts
        if row.blocks > 1:
            rows[f"{row.name}, mean"] = {name: bytes / row.blocks for name, bytes in row.parts.items()}
    rows["peak"] = peak.parts()
    names = [name for name in CATEGORIES if rows["peak"][name]]
    return Table.of_rows(
        f"By module, {rank_title(trace)}, later steps",
        ("module", "in all", *(shown(name).replace(" ", "\n") for name in names)),
        [
            (name, human(sum(parts.values())), *(size(parts[category]) for category in names))
            for name, parts in rows.items()
        ],
        ("module",),
        totals=1,
    )


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
    """Lines that wait for a number from the GPU, or in a pass copy numbers to it: how often in a step."""
    rows = []
    for what in ("read", "copy"):
        counts = [step.host_reads if what == "read" else step.host_copies for step in trace.steps]
        lines = sorted(counts[0] | counts[1], key=lambda line: -counts[1][line])
        rows += [(line, what, *(f"{count[line]:,}" for count in counts)) for line in lines]
    title = f"Reads from the GPU, and copies to it, by the host, {rank_title(trace)}"
    return Table.of_rows(title, ("line", "what", *STEPS), tuple(rows), ("line", "what"))


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
