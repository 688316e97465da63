"""A probe's constants as a table: what each rank reaches with 1, 2, 4 … ranks at work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshtune.report.draw.table import Table
from meshtune.units import counted

BUSY = 0.25  # processes at work for each core, from which a machine is not idle
Document = Mapping[str, Any]  # the tables of the cluster file


def summary(document: Document) -> Table:
    """One row a constant, one column a number of ranks."""
    kind = document["kind"]
    alone = {name: value for name, value in kind["efficiency"].items() if not name.startswith("link")}
    tables = {1: alone} | {one["ranks"]: one for one in kind.get("shared", ())}

    def share(name: str, peak: float, unit: str) -> list[str]:
        """Cells of a share of a peak."""
        return [f"{table[name] * peak:,.3g} {unit}" if name in table else "" for table in tables.values()]

    def seconds(name: str) -> list[str]:
        """Cells of some microseconds."""
        return [f"{table[name] * 1e6:,.3g} µs" if name in table else "" for table in tables.values()]

    rows = {
        "large matmuls, fp32": share("matmul", 1000 * kind["fp32"], "GFLOP/s"),
        "large matmuls, bf16": share("matmul", 1000 * kind["matmul_max"], "GFLOP/s"),
        "memory": share("memory", kind["bandwidth"], "GB/s"),
        "collectives, past each rank": share("link_share", kind["link"], "GB/s"),
        "a step of a ring": seconds("link_latency"),
        "a small operation": seconds("launch"),
    }
    heads = ("each of", *(counted(ranks, "rank") for ranks in tables))
    lines = tuple((name, *cells) for name, cells in rows.items())
    return Table.of_rows(f"{document['measured']['device']}", heads, lines, ("each of",), ())


def sentences(document: Document) -> Iterator[str]:
    """Yield sentences on a busy machine, on doubtful figures, and on constants that are another kind's."""
    measured = document["measured"]
    if measured["load_before"] > BUSY * measured["cores"]:
        yield (
            f"{measured['load_before']:g} other processes ran on {counted(measured['cores'], 'core')} in the "
            "minute before: the figures are of what they left."
        )
    for name, meaning in (
        ("marked", f"differ by more than {measured['marked_above']:.0%} (they are used)"),
        ("refused", f"differ by more than {measured['refused_above']:.0%} and are left out"),
    ):
        if found := measured[name]:
            shown = "; ".join(found[:3]) + "; …" * (len(found) > 3)
            yield f"Repeats of {counted(len(found), 'figure')} {meaning}: {shown}"
    if measured["not_measured"]:
        yield f"Not measured: {', '.join(measured['not_measured'])}; a plan takes another kind's."
