"""Tables of what bench, plan compare, calibrate, probe and sweep return, from their `--json` documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshtune.plan.calibration import CONSTANTS, FACTOR, NOTABLE
from meshtune.plan.memory.timeline import CATEGORY_NAMES
from meshtune.report.draw.table import Table
from meshtune.report.dryrun.beside import difference, peaks
from meshtune.units import counted, duration, human

Document = Mapping[str, Any]  # of one layout, run, calibration or cluster file

# Bench: a layout predicted, simulated and measured #

COLUMNS = ("predicted", "simulated", "measured")
MEMORY_NAMES = CATEGORY_NAMES | {"peak": "memory"}
OFF = "off by: from what was measured, as a share of it"
PART_NAMES = {
    "communication": "exposed communication",
    "bubble": "pipeline's bubble",
    "waiting": "waiting for the slowest rank",
    "loading": "waiting for data",
}


def layouts_table(documents: Sequence[Document], speed_unit: str) -> Table:
    """One row a layout, the fastest first; those that failed last, with the reason."""
    ran = [one for one in documents if one["measured"]]
    ran.sort(key=lambda one: -one["measured"]["tokens_per_second_per_gpu"])
    mfu = any(one["measured"]["mfu"] is not None for one in ran)
    heads = ["layout", speed_unit, "step", "spread", *(["MFU"] if mfu else []), "memory"]
    rows = []
    for one in ran:
        found = one["measured"]
        share = [f"{found['mfu']:.1%}" if found["mfu"] is not None else ""] if mfu else []
        rows.append((
            one["layout"], f"{found['tokens_per_second_per_gpu']:,.0f}", duration(found["step_seconds"]),
            f"{found['spread']:.1%}", *share, human(found["memory"].get("peak", 0)) or "",
        ))  # fmt: skip
    steps = {one["measured"]["steps"] for one in ran}
    notes = (
        [f"Medians of {max(steps)} steps; spread: distance of their quartiles, of the median."]
        if steps
        else []
    )
    notes += [f"{one['layout']}: {one['failed']}" for one in documents if one["failed"]]
    return Table.of_rows("Measured", tuple(heads), tuple(rows), ("layout",), tuple(notes))


def side_by_side(document: Document) -> list[Table]:
    """Time by part and memory by category of one layout, as they are predicted, simulated and measured."""
    notes = (OFF,)
    if document["predicted"] and document["simulated"]:
        simulated = document["simulated"]
        notes = (peaks(simulated["rank"], document["predicted"]["event"], simulated["event"]), OFF)
    title, heads = str(document["layout"]), ("", *COLUMNS, "predicted\noff by", "simulated\noff by")
    step = [(document[name] or {}).get("step_seconds") for name in COLUMNS]
    time = [_row(*part, duration) for part in part_values(document, "parts", COLUMNS, PART_NAMES)]
    time.append(_row("step", step, duration))
    memory = [_row(*part, human) for part in part_values(document, "memory", COLUMNS, MEMORY_NAMES)]
    memory.sort(key=lambda row: row[0] == "memory")  # the sum comes last
    return [
        Table.of_rows(f"{title}, time", heads, tuple(time), ("",), totals=1),
        Table.of_rows(
            f"{title}, memory of tensors on its fullest rank", heads, tuple(memory), ("",), notes, totals=1
        ),
    ]


def part_values(
    document: Document, key: str, columns: Sequence[str], names: Mapping[str, str]
) -> Iterator[tuple[str, list[float | None]]]:
    """Yield (name, its value in each column) of each part under `key` that a column has above 0."""
    sources = [(document[column] or {}).get(key) for column in columns]
    for name in dict.fromkeys(name for source in sources for name in source or ()):
        values = [None if source is None else source.get(name, 0.0) for source in sources]
        if any(values):
            yield names.get(name, name), values


def _row(name: str, values: Sequence[float | None], written: Callable[[float], str]) -> tuple[str, ...]:
    *others, measured = values
    off = ("" if one is None or measured is None else difference(one, measured, written) for one in others)
    return (name, *("" if one is None else written(one) for one in values), *off)


def micro_batches_table(document: Mapping[str, Any]) -> Table:
    """The micro-batch sizes of one layout that were tried, in their order, and the largest that runs."""
    rows = tuple(
        (f"{one['size']:,}", "yes" if one["runs"] else "no", human(one["peak"]) if one["peak"] else "",
         one["reason"] or "")
        for one in document["tried"]
    )  # fmt: skip
    found, planned = document["micro_batch"], document["planned"]
    verdict = f"The largest that runs: {found:,}." if found else "None runs."
    if planned is not None:
        verdict += f" The planner says {planned:,}."
    heads = ("micro-batch", "runs", "memory", "why not")
    return Table.of_rows(str(document["layout"]), heads, rows, ("runs", "why not"), (verdict,))


# Plan compare: a finished run next to its predictions #

COMPARED = ("measured", "at_start", "today")
COMPARED_HEADS = ("", "measured", "predicted\nat start", "\noff by", "planned\ntoday", "\noff by")


def compared_tables(document: Document) -> Iterator[Table]:
    """Yield the compared_tables of one run: time, memory, and the constants that are off."""
    name, layout = document["run"], document["layout"]
    steps = [(document[column] or {}).get("step_seconds") for column in COMPARED]
    notes = (f"Medians of {counted(document['steps'], 'step')}.", *document["missing"].values())
    time = [_compared_row(*part, duration) for part in part_values(document, "parts", COMPARED, PART_NAMES)]
    time.append(_compared_row("step", steps, duration))
    yield Table.of_rows(f"{name} ({layout}), time", COMPARED_HEADS, time, ("",), notes, totals=1)
    memory = [_compared_row(*part, human) for part in part_values(document, "memory", COMPARED, MEMORY_NAMES)]
    memory.sort(key=lambda row: row[0] == "memory")  # the sum comes last
    title = f"{name}, memory of tensors on its fullest rank"
    counted_not = () if document["measured"]["memory"] else ("It was not counted in this run.",)
    yield Table.of_rows(title, COMPARED_HEADS, memory, ("",), counted_not, totals=1)
    if document["off"] is not None:
        yield _factors(document)


def _factors(document: Document) -> Table:
    """One row for each group of parts that is off and each constant that explains it; then the remedy."""
    rows = [
        (words, _off(group), one["constant"], f"{one['factor']:.3g}", CONSTANTS[one["constant"]])
        for group in document["off"]
        for number, one in enumerate(group["explanations"])
        for words in [_named(group) if not number else "or"]
    ]
    notes = [
        f"{_named(group)}: off by {_off(group)}; no constant makes them agree by a factor up to {FACTOR:g}."
        for group in document["off"]
        if not group["explanations"]
    ]
    if not document["off"]:
        notes = [f"No part is off by {NOTABLE:.0%} of the step: no constant has to change."]
    if document["causes"]:
        notes.append(f"The run names another cause: {', '.join(document['causes'])}. Remove it first.")
    if rows:
        file = document["cluster"] or "my-cluster.toml"
        probe = "" if document["cluster"] else f"meshtune probe --out {file}, then "
        notes.append(
            f"To fit the constants: {probe}meshtune calibrate {document['run']} … --cluster {file}, with "
            "three runs or more."
        )
    heads = ("parts", "off by", "constant", "factor", "what it is")
    return Table.of_rows(f"{document['run']}, constants with which the parts of today's plan agree", heads,
                   tuple(rows), ("parts", "constant", "what it is"), tuple(notes))  # fmt: skip


def _named(group: Document) -> str:
    parts: list[str] = group["parts"]
    return ", ".join(PART_NAMES.get(part, part) for part in parts)


def _off(group: Document) -> str:
    return difference(group["predicted"], group["measured"], duration)


def _compared_row(name: str, values: list[float | None], written: Callable[[float], str]) -> tuple[str, ...]:
    measured, *others = ["" if value is None else written(value) for value in values]
    cells = [name, measured]
    for value, text in zip(values[1:], others, strict=True):
        off = "" if value is None or values[0] is None else difference(value, values[0], written)
        cells += [text, off]
    return tuple(cells)


# Calibrate: constants before and after, and the errors on runs that were left out of the fit #


def calibration_tables(document: Document) -> Iterator[Table]:
    """Yield the tables of a calibration."""
    fitted = tuple(
        (name, f"{one['before']:.4g}", f"{one['after']:.4g}", f"{one['factor']:.2f}", f"{len(one['runs'])}",
         CONSTANTS[name] + (", at its bound" if one["at_bound"] else ""))
        for name, one in document["fitted"].items()
    )  # fmt: skip
    left = tuple(f"{name} stays: {why}." for name, why in document["left"].items())
    heads = ("constant", "before", "after", "factor", "runs", "what it is")
    fitted_to = counted(len(document["runs"]), "run")
    yield Table.of_rows(f"Constants fitted to {fitted_to}", heads, fitted, ("constant", "what it is"), left)
    rows = tuple(
        (name, f"{score['after']['runs']}", *_score_cells(score["before"]), *_score_cells(score["after"]))
        for name, score in document["held_out"].items()
    )
    scores = ("mean", "median", "Spearman")
    heads = (
        "runs left out",
        "number",
        *(f"{name} {when}" for when in ("before", "after") for name in scores),
    )
    yield Table.of_rows("Error of the predicted step on runs that were left out of the fit", heads, rows,
                  ("runs left out",))  # fmt: skip


def _score_cells(score: Document) -> tuple[str, str, str]:
    order = score["spearman"]
    return f"{score['mean']:.1%}", f"{score['median']:.1%}", "" if order is None else f"{order:.2f}"


# Probe: what each rank reaches with 1, 2, 4 … ranks at work #

BUSY = 0.25  # processes at work for each core, from which a machine is not idle


def probe_table(document: Document) -> Table:
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


def probe_sentences(document: Document) -> Iterator[str]:
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


# Sweep: experiments by status, and the best of them #

MOST_OF_REASON = 160  # characters of a reason
UNITS = {  # figure -> how it is written
    "tokens_per_second_per_gpu": ("tokens/s/GPU", "{:,.0f}".format),
    "predicted_tokens_per_second_per_gpu": ("predicted tokens/s/GPU", "{:,.0f}".format),
    "mfu": ("MFU", "{:.1%}".format),
    "predicted_mfu": ("predicted MFU", "{:.1%}".format),
    "step_seconds": ("step", duration),
    "simulated_step_seconds": ("simulated step", duration),
    "peak_memory_bytes": ("memory", human),
    "predicted_peak_bytes": ("predicted memory", human),
    "simulated_peak_bytes": ("simulated memory", human),
    "loss": ("loss", "{:.4f}".format),
    "eval_loss": ("evaluation loss", "{:.4f}".format),
}


def counts_table(counts: Mapping[str, int], reasons: Mapping[str, str], simulated: str | None) -> Table:
    """Number of experiments by status, with the most frequent reason of each."""
    rows = tuple(
        (status, f"{number:,}", _short(reasons.get(status, ""))) for status, number in counts.items()
    )
    note = (f"All figures are simulated ({simulated}); nothing was measured.",) if simulated else ()
    heads = ("status", "experiments", "most frequent reason")
    return Table.of_rows("Sweep", heads, rows, ("status", "most frequent reason"), note)


def best_table(
    best: Sequence[Mapping[str, Any]], axes: Sequence[str], ranked_by: str, *, on_processor: bool = False
) -> Table:
    """The best experiments by one figure: their number, layout, axes and the figures that they have."""

    def head(name: str) -> str:
        return UNITS[name][0].replace("/GPU", "/rank") if on_processor else UNITS[name][0]

    figures = [ranked_by, *(name for name in UNITS if name != ranked_by)]
    shown = [name for name in figures if any(row.get(name) is not None for row in best)]
    varied = [axis for axis in axes if axis != "layout" and len({str(row.get(axis)) for row in best}) > 1]
    heads = ("number", "layout", *varied, *map(head, shown))
    rows = tuple(
        (
            str(row["number"]),
            str(row["layout"] or ""),
            *(str(row[axis]) for axis in varied),
            *("" if row[name] is None else UNITS[name][1](row[name]) for name in shown),
        )
        for row in best
    )
    return Table.of_rows(f"Best by {head(ranked_by)}", heads, rows, ("layout", *varied))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_OF_REASON else f"{line[: MOST_OF_REASON - 1]}…"
