"""Documents of bench, calibrate, probe and sweep, and tables of plan compare, from their `--json` values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshtune.meter.causes import Cause
from meshtune.plan.calibration import CONSTANTS, FACTOR, NOTABLE
from meshtune.plan.memory.timeline import CATEGORY_NAMES
from meshtune.plan.phrases import predicted_with
from meshtune.report.draw.document import Document, Notes, Section
from meshtune.report.draw.table import Table
from meshtune.report.dryrun.beside import difference, peaks
from meshtune.units import counted, duration, human, speed_unit

Facts = Mapping[str, Any]  # of one layout, run, calibration, cluster file or sweep

# Measured parts next to predicted ones #

MEMORY_NAMES = CATEGORY_NAMES | {"peak": "memory"}
PART_NAMES = {
    "communication": "exposed communication",
    "bubble": "pipeline's bubble",
    "waiting": "waiting for the slowest rank",
    "loading": "waiting for data",
}
OFF_SUFFIX = " off"  # of a column: its difference from "measured"


def part_tables(
    facts: Facts, heads: Mapping[str, str], titles: Sequence[str], notes: Sequence[Sequence[str]]
) -> Iterator[Table]:
    """Yield tables of the time by part and of the memory by category.

    heads: entries of `facts`, and those with OFF_SUFFIX, with the heads of their columns. titles, notes: of
    both tables.
    """
    sources = {name: facts[name] or {} for name in heads if not name.endswith(OFF_SUFFIX)}
    step = {name: source.get("step_seconds") for name, source in sources.items()}
    time = [*_parts(sources, "parts", PART_NAMES), ("step", step)]
    memory = sorted(_parts(sources, "memory", MEMORY_NAMES), key=lambda part: part[0] == "memory")
    for title, parts, written, note in zip(titles, (time, memory), (duration, human), notes, strict=True):
        rows = [(name, *_cells(values, heads, written)) for name, values in parts]
        yield Table.of_rows(title, ("", *heads.values()), rows, ("",), note, totals=1)


def _parts(
    sources: Mapping[str, Facts], key: str, names: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Yield (name, its value by source) of each part under `key` that a source has above 0."""
    parts = {source: facts.get(key) for source, facts in sources.items()}
    for part in dict.fromkeys(part for values in parts.values() for part in values or ()):
        values = {source: None if found is None else found.get(part, 0.0) for source, found in parts.items()}
        if any(values.values()):
            yield names.get(part, part), values


def _cells(
    values: Mapping[str, float | None], heads: Iterable[str], written: Callable[[float], str]
) -> Iterator[str]:
    measured = values["measured"]
    for column in heads:
        value = values[column.removesuffix(OFF_SUFFIX)]
        if value is None:
            yield ""
        elif column in values:
            yield written(value)
        else:
            yield "" if measured is None else difference(value, measured, written)


# Bench: layouts predicted, simulated and measured #

BENCHED = {
    "predicted": "predicted", "simulated": "simulated", "measured": "measured",
    "predicted off": "predicted\noff by", "simulated off": "simulated\noff by",
}  # fmt: skip
OFF = "off by: from what was measured, as a share of it"


def benched(layouts: Sequence[Facts]) -> Document:
    """Layouts by speed, the parts of each, and why each is slow."""
    devices = {one["measured"]["device_type"] for one in layouts if one["measured"]}
    unit = speed_unit(max(one["world"] for one in layouts), next(iter(devices), "cuda"))
    slow = [
        Section(f"why {one['layout']} is slow", [Cause(**cause).sentence for cause in causes], numbered=True)
        for one in layouts
        if (causes := one["causes"])
    ]
    parts = (table for one in layouts for table in side_by_side(one))
    return Document("bench", (layouts_table(layouts, unit), *parts, *slow), {"layouts": layouts})


def layouts_table(documents: Sequence[Facts], speed_unit: str) -> Table:
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
            f"{found['spread']:.1%}", *share, human(found["peak_memory_bytes"] or 0),
        ))  # fmt: skip
    steps = {one["measured"]["steps"] for one in ran}
    notes = (
        [
            f"Medians of {max(steps)} steps; spread: distance of their quartiles, of the median. Memory: the "
            "highest peak of any rank and step. By category below, it is measured in the step that is "
            "simulated, and predicted for the longest sequence."
        ]
        if steps
        else []
    )
    notes += [f"{one['layout']}: {one['failed']}" for one in documents if one["failed"]]
    notes += [
        f"{one['layout']}: the rank with most tokens for its experts has {uneven:.2f} times the mean "
        "(experts.imbalance in plans)."
        for one in ran
        if (uneven := one["measured"].get("imbalance", 1)) > 1
    ]
    return Table.of_rows("Measured", tuple(heads), tuple(rows), ("layout",), tuple(notes))


def side_by_side(facts: Facts) -> Iterator[Table]:
    """Yield time by part and memory by category of one layout: predicted, simulated and measured."""
    notes = [OFF]
    if (predicted := facts["predicted"]) and (simulated := facts["simulated"]):
        notes.insert(0, peaks(simulated["rank"], predicted["event"], simulated["event"]))
    name = facts["layout"]
    titles = (f"{name}, time", f"{name}, memory of tensors on its fullest rank")
    return part_tables(facts, BENCHED, titles, ((), notes))


def micro_batches(layouts: Sequence[Facts]) -> Document:
    """The micro-batch sizes of each layout that were tried, in their order, and the largest that runs."""
    return Document("micro-batches", [_micro_batches(one) for one in layouts], {"layouts": layouts})


def _micro_batches(facts: Facts) -> Table:
    rows = (
        (f"{one['size']:,}", "yes" if one["runs"] else "no", human(one["peak"]) if one["peak"] else "",
         one["reason"] or "")
        for one in facts["tried"]
    )  # fmt: skip
    largest, planned = facts["micro_batch"], facts["planned"]
    verdict = f"The largest that runs: {largest:,}." if largest else "None runs."
    if planned is not None:
        verdict += f" The planner says {planned:,}."
    heads = ("micro-batch", "runs", "memory", "why not")
    return Table.of_rows(str(facts["layout"]), heads, rows, ("runs", "why not"), (verdict,))


# Plan compare: a finished run next to its predictions #

COMPARED = {
    "measured": "measured", "at_start": "predicted\nat start", "at_start off": "\noff by",
    "today": "planned\ntoday", "today off": "\noff by",
}  # fmt: skip


def compared_tables(facts: Facts) -> Iterator[Table]:
    """Yield the tables of one run: time, memory, and the constants that are off."""
    name = facts["run"]
    titles = (f"{name} ({facts['layout']}), time", f"{name}, memory of tensors on its fullest rank")
    steps = f"Step: the median of {counted(facts['steps'], 'step')}; parts: means, scaled to add up to it."
    counted_in = "the fullest of the watched steps" if facts["measured"]["memory"] else "no step of this run"
    yield from part_tables(
        facts, COMPARED, titles, ((steps, *facts["missing"].values()), (f"Counted in {counted_in}.",))
    )
    if facts["off"] is not None:
        yield _factors(facts)


def _factors(document: Facts) -> Table:
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


def _named(group: Facts) -> str:
    parts: list[str] = group["parts"]
    return ", ".join(PART_NAMES.get(part, part) for part in parts)


def _off(group: Facts) -> str:
    return difference(group["predicted"], group["measured"], duration)


# Calibrate: constants before and after, and the errors on runs that were left out of the fit #


def calibrated(facts: Facts) -> Document:
    """Constants before and after, those that stay and why, and the errors."""
    rows = (
        (name, f"{one['before']:.4g}", f"{one['after']:.4g}", f"{one['factor']:.2f}", f"{len(one['runs'])}",
         CONSTANTS[name] + (", at its bound" if one["at_bound"] else ""))
        for name, one in facts["fitted"].items()
    )  # fmt: skip
    heads = ("constant", "before", "after", "factor", "runs", "what it is")
    title = f"Constants fitted to {counted(len(facts['runs']), 'run')}"
    left = [f"{name} stays: {why}." for name, why in facts["left"].items()]
    fitted = Table.of_rows(title, heads, rows, ("constant", "what it is"), left)
    rows = (
        (name, f"{score['after']['runs']}", *_score_cells(score["before"]), *_score_cells(score["after"]))
        for name, score in facts["held_out"].items()
    )
    scores = [f"{name} {when}" for when in ("before", "after") for name in ("mean", "median", "Spearman")]
    title = "Error of the predicted step on runs that were left out of the fit"
    errors = Table.of_rows(title, ("runs left out", "number", *scores), rows, ("runs left out",))
    return Document("calibrate", (fitted, errors), facts)


def _score_cells(score: Facts) -> tuple[str, str, str]:
    order = score["spearman"]
    return f"{score['mean']:.1%}", f"{score['median']:.1%}", "" if order is None else f"{order:.2f}"


# Probe: what each rank reaches with 1, 2, 4 … ranks at work #

BUSY = 0.25  # processes at work for each core, from which a machine is not idle


def probed(facts: Facts) -> Document:
    """One row a constant, one column a number of ranks; then doubts."""
    kind, measured = facts["kind"], facts["measured"]
    alone = {name: value for name, value in kind["efficiency"].items() if not name.startswith("link")}
    tables = {1: alone} | {one["ranks"]: one for one in kind.get("shared", ())}
    constants = {  # row -> (constant, its unit's size, unit)
        "large matmuls, fp32": ("matmul", 1000 * kind["fp32"], "GFLOP/s"),
        "large matmuls, bf16": ("matmul", 1000 * kind["matmul_max"], "GFLOP/s"),
        "memory": ("memory", kind["bandwidth"], "GB/s"),
        "collectives, past each rank": ("link_share", kind["link"], "GB/s"),
        "a step of a ring": ("link_latency", 1e6, "µs"),
        "a small operation": ("launch", 1e6, "µs"),
    }
    rows = (
        (row, *(f"{table[name] * size:,.3g} {unit}" if name in table else "" for table in tables.values()))
        for row, (name, size, unit) in constants.items()
    )
    heads = ("each of", *(counted(ranks, "rank") for ranks in tables))
    table = Table.of_rows(str(measured["device"]), heads, rows, ("each of",))
    return Document("probe", (table, Notes([*_doubts(measured)], style="")), facts)


def _doubts(measured: Facts) -> Iterator[str]:
    """Yield sentences on a busy machine, on doubtful figures, and on constants that are another kind's."""
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


def swept(facts: Facts) -> Document:
    """The experiments by status, and the best of them."""
    parts = [_counts(facts), *([_best(facts)] if facts["best"] else [])]
    return Document("sweep", (*parts, Notes([f"Results: {facts['database']} (view `results`)"], "")), facts)


def _counts(facts: Facts) -> Table:
    """Number of experiments by status, with the most frequent reason of each."""
    reasons, simulated = facts["reasons"], facts["simulated"]
    rows = (
        (status, f"{number:,}", _short(reasons.get(status, ""))) for status, number in facts["counts"].items()
    )
    note = [f"All figures are simulated ({simulated}); nothing was measured."] if simulated else []
    heads = ("status", "experiments", "most frequent reason")
    return Table.of_rows("Sweep", heads, rows, ("status", "most frequent reason"), note)


def _best(facts: Facts) -> Table:
    """The best experiments by one figure: their number, layout, axes and the figures that they have."""
    best, ranked_by = facts["best"], facts["ranked_by"]

    def head(name: str) -> str:
        return UNITS[name][0].replace("/GPU", "/rank") if facts["on_processor"] else UNITS[name][0]

    figures = [ranked_by, *(name for name in UNITS if name != ranked_by)]
    known = [name for name in figures if any(row.get(name) is not None for row in best)]
    others = (axis for axis in facts["axes"] if axis.partition(".")[0] != "layout")  # it has all its fields
    axes = [axis for axis in others if len({str(row.get(axis)) for row in best}) > 1]
    rows = (
        (str(row["number"]), str(row["layout"] or ""), *(str(row[axis]) for axis in axes),
         *("" if row[name] is None else UNITS[name][1](row[name]) for name in known))
        for row in best
    )  # fmt: skip
    heads = ("number", "layout", *axes, *map(head, known))
    # Without data; a bench has the share of its batch.
    judged = facts["simulated"] or "loss" in known
    notes = [f"{predicted_with(None)}."] if judged and "predicted_peak_bytes" in known else []
    return Table.of_rows(f"Best by {head(ranked_by)}", heads, rows, ("layout", *axes), notes)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_OF_REASON else f"{line[: MOST_OF_REASON - 1]}…"
