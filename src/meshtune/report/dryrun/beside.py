"""The planner's prediction next to the dry run, from documents of `dryrun --json`.

side_by_side   one layout: memory by category, time by part
layouts_table  several: peak and step time, a row each
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshtune.plan.memory.timeline import CATEGORIES, CATEGORY_NAMES
from meshtune.plan.seconds.step import PARTS
from meshtune.report.draw.document import Document, Notes
from meshtune.report.draw.table import Table
from meshtune.units import duration, human

Facts = Mapping[str, Any]  # of one layout
DIFFERENCE = "off by: the prediction, from the simulation"
LEAST_OFF = 0.01  # share of the peak
OVERHEAD = "overhead: memory that the allocator holds unused, CUDA and NCCL"


def fullest(document: Facts) -> dict[str, Any]:
    """The traced rank that needs most in a later step."""
    return next(rank for rank in document["ranks"] if rank["rank"] == document["fullest_rank"])


def simulated_memory(document: Facts) -> dict[str, int]:
    """Bytes by category at the fullest rank's peak in a later step; overhead is the rest of what it needs."""
    rank = fullest(document)
    overhead = document["need_bytes"] - rank["peak_bytes"]
    return rank["steps"][1]["by_category"] | {"overhead": overhead}


def side_by_side(document: Facts) -> Table:
    """Memory by category of the fullest simulated rank and time by part of one layout, which the planner has
    predicted.
    """
    return Table.of_rows(
        f"Predicted and simulated, {document['layout']}",
        ("", "predicted", "simulated", "off by"),
        tuple(_rows(document)),
        ("",),
        (*_events(document), DIFFERENCE, OVERHEAD),
        totals=1,
    )


def peak_event(rank: Facts) -> str:
    """Phase, module and operation of the peak of a traced rank's later steps."""
    event, _ = max(rank["steps"][1]["timeline"], key=lambda entry: sum(entry[1].values()))
    return event


def peaks(rank: int, predicted: str, simulated: str) -> str:
    """Sentence on the rank and the events of the peaks that are compared."""
    return (
        f"Memory of rank {rank:,}, which holds most when simulated. Its peak is predicted in the "
        f"{predicted}, and simulated in the {simulated}."
    )


def _events(document: Facts) -> Iterator[str]:
    """Yield sentences on the rank and the events of the peaks that are compared."""
    rank, whole = fullest(document), document["predicted"]["memory"]
    predicted = rank["predicted"]
    yield peaks(rank["rank"], predicted["event"], peak_event(rank))
    yield from _most_off(predicted, simulated_memory(document))
    if whole["peak"] > predicted["peak"]:
        yield f"The planner predicts most, {human(whole['peak'])}, on another pipeline rank."


def _most_off(predicted: Facts, held: Mapping[str, float]) -> Iterator[str]:
    """Yield a sentence on the predicted tensors of the category that differs by the most bytes."""
    off = {name: abs(predicted[name] - held.get(name, 0)) for name in CATEGORIES if name != "overhead"}
    category = max(off, key=lambda name: off[name])
    tensors = [tensor for tensor in predicted.get("tensors", ()) if tensor["category"] == category]
    if off[category] > LEAST_OFF * predicted["peak"] and tensors:
        parts = ", ".join(f"{tensor['name']} ({human(tensor['bytes'])})" for tensor in tensors)
        yield f"The largest difference is in {CATEGORY_NAMES[category]}. The planner counts: {parts}."


def _rows(document: Facts) -> Iterator[tuple[str, str, str, str]]:
    memory, held = fullest(document)["predicted"], simulated_memory(document)
    for name in CATEGORIES:
        if (sizes := (memory[name], held.get(name, 0))) != (0, 0):
            yield _row(CATEGORY_NAMES[name], *sizes, human)
    yield _row("memory", memory["peak"], document["need_bytes"], human)
    if "offloaded" in (rank := fullest(document)):
        yield _row("host memory", memory.get("host", 0), rank["offloaded"]["host_bytes"], human)
    if (time := document["time"]) is None:
        return
    parts = document["predicted"]["time"]
    for name in PARTS:
        if (pair := (parts[name], time["parts"][name])) != (0, 0):
            yield _row(name, *pair, duration)
    yield _row("step", parts["total"], time["seconds"], duration)


def _row(
    name: str, predicted: float, simulated: float, written: Callable[[float], str]
) -> tuple[str, str, str, str]:
    return name, written(predicted), written(simulated), difference(predicted, simulated, written)


def layouts_table(documents: Sequence[Facts]) -> Table:
    """Peak and step time of several layouts, in their order."""
    timed = all(document["time"] for document in documents)
    heads = ("layout", "memory\npredicted", "\nsimulated", "\noff by")
    if timed:
        heads += ("step\npredicted", "\nsimulated", "\noff by")
    rows = []
    for document in documents:
        sizes = document["predicted"]["memory"]["peak"], document["need_bytes"]
        row = [document["layout"], *map(human, sizes), difference(*sizes, human)]
        if timed:
            pair = document["predicted"]["time"]["total"], document["time"]["seconds"]
            row += [*map(duration, pair), difference(*pair, duration)]
        rows.append((*row, "yes" if document["fits"] else "no"))
    title = "Predicted and simulated"
    return Table.of_rows(title, (*heads, "fits"), tuple(rows), ("layout",), (DIFFERENCE,))


def difference(predicted: float, simulated: float, written: Callable[[float], str]) -> str:
    """Relative difference of the prediction, "+12.5%"; where nothing is simulated, the prediction as text."""
    if simulated:
        return f"{predicted / simulated - 1:+.1%}"
    return f"+{written(predicted)}" if predicted else ""


# Several layouts #


def verified(documents: Sequence[Facts]) -> Document:
    """The answer of `plan --verify`: a row for each simulated layout, each by category and part, and where
    the simulation does not confirm the plan's order.
    """
    tables = [layouts_table(documents), *map(side_by_side, documents)]
    return Document("", [Notes([""]), *tables, Notes([*conclusions(documents)], style="")])


def conclusions(documents: Sequence[Facts]) -> Iterator[str]:
    """Yield sentences where the simulation does not confirm the plan's order."""
    best, fitting = documents[0], [document for document in documents if document["fits"]]
    if not fitting:
        yield "None of these layouts fits when simulated; verify more of them, or plan with --memory-budget."
        return
    if not best["fits"]:
        yield (
            f"{best['layout']} does not fit when simulated; the best one that does is {fitting[0]['layout']}."
        )
    if all(document["time"] for document in fitting):
        quickest = min(fitting, key=lambda document: document["time"]["seconds"])
        if quickest is not fitting[0]:
            less = 1 - quickest["time"]["seconds"] / fitting[0]["time"]["seconds"]
            yield (
                f"Simulated, {quickest['layout']} is the fastest that fits, {less:.1%} less time than "
                f"{fitting[0]['layout']}."
            )
