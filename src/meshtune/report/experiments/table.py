"""The table of all experiments: columns of numbers and words as JSON, which table.js draws, filters and
sorts; it sets chosen rows side by side.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from meshtune.plan.memory.timeline import CATEGORIES
from meshtune.report.draw.page import data_element
from meshtune.report.experiments.rows import GPUS, MODEL, SOURCES, Experiment, Figures, Sweep
from meshtune.units import GIB

SCRIPT = Path(__file__).with_name("table.js")
DIGITS = 5  # of a number in the page
Get = Callable[[Experiment], Any]


def table(sweep: Sweep) -> str:
    """The section with the table and its data, as HTML, for SCRIPT."""
    data = {"columns": columns(sweep), "parts": parts(sweep), "simulated": sweep.simulated}
    names = [column["name"] for column in data["columns"]]
    data["sorted"] = next((n for n, name in enumerate(names) if name.endswith(sweep.speed_unit)), 0)
    return (
        "<section id='experiments'><h2>All experiments</h2><div class='filters'></div>"
        "<p class='note' aria-live='polite'></p><div class='wide tall'><table class='facts numbers listing'>"
        "<thead></thead><tbody></tbody></table></div></section><section id='chosen' hidden></section>"
        + data_element("data-of-experiments", data)
    )


def columns(sweep: Sweep) -> list[dict[str, Any]]:
    """Columns that any experiment has a value for: {"name", "form", "filter", values}.

    form: "text", "number", "share", "seconds" or "GiB". filter: True if a choice of its values is offered.
    values: "values", or for few different words "words" and for each row its place among them, "at".
    """
    axes = [key for key in sweep.varied if key not in (MODEL, GPUS, "layout")]
    kinds = [kind for kind in reversed(SOURCES) if _known(sweep, kind)]
    shown: list[tuple[str, str, bool, Get]] = [
        ("experiment", "number", False, lambda one: one.number),
        ("status", "text", True, lambda one: one.status),
        ("model", "text", True, lambda one: one.model),
        (f"{sweep.device}s", "number", True, lambda one: one.gpus),
        ("layout", "text", False, lambda one: one.layout),
        *_figures(sweep, kinds[:1]),
        ("training loss", "number", False, lambda one: one.loss),
        ("held-out loss", "number", False, lambda one: one.eval_loss),
        ("reason", "text", False, lambda one: one.reason),
        *(_axis(sweep, key) for key in axes),
        *_figures(sweep, kinds[1:]),
        ("spread of steps", "share", False, lambda one: one.spread),
        ("global batch, sequences", "number", False, lambda one: one.global_batch),
        ("gradient noise scale", "number", False, lambda one: one.noise_scale),
        ("took", "seconds", False, lambda one: one.seconds),
    ]
    made = [_column(name, form, offered, get, sweep.experiments) for name, form, offered, get in shown]
    return [column for column in made if column is not None]


def _axis(sweep: Sweep, key: str) -> tuple[str, str, bool, Get]:
    """Column of a setting. Fractions are numbers, to be sorted by size; as words 0.25 comes behind 0.3."""
    known = [value for one in sweep.experiments if (value := one.settings.get(key)) is not None]
    fractions = any(isinstance(value, float) for value in known)
    if fractions and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        return key, "number", True, lambda one: one.settings.get(key)
    return key, "text", True, lambda one: _word(one.settings.get(key))


def _figures(sweep: Sweep, kinds: Sequence[str]) -> Iterator[tuple[str, str, bool, Get]]:
    """Yield columns of speed and memory. kinds: of SOURCES."""
    forms = (
        (sweep.speed_unit, "number", "speed"), ("MFU", "share", "mfu"), ("step", "seconds", "step_seconds"),
        ("peak memory", "GiB", "peak_gib"),
    )  # fmt: skip
    for kind in kinds:
        for name, form, field in forms:
            yield name if kind == "measured" else f"{kind} {name}", form, False, attrgetter(f"{kind}.{field}")


def _known(sweep: Sweep, kind: str) -> bool:
    return any(getattr(one, kind) != Figures() for one in sweep.experiments)


def _column(
    name: str, form: str, offered: bool, get: Get, experiments: Sequence[Experiment]
) -> dict[str, Any] | None:
    values = [_short(get(one)) for one in experiments]
    if all(value in (None, "") for value in values):
        return None
    column: dict[str, Any] = {"name": name, "form": form, "filter": offered}
    words = list(dict.fromkeys(values))
    if form == "text" and len(words) < len(values) / 2:
        places = {word: place for place, word in enumerate(words)}
        return column | {"words": words, "at": [places[value] for value in values]}
    return column | {"values": values}


def _word(value: Any) -> str:
    """A setting as text; "" where the experiment leaves it."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def parts(sweep: Sweep) -> dict[str, Any]:
    """Seconds by part and GiB by category of each experiment, by source, as far as they are known:
    {"sources", "time" and "memory": {"names", "rows": [[values by name] or null by source] or null}}.
    """
    result: dict[str, Any] = {"sources": SOURCES}
    for kind, per in (("time", 1.0), ("memory", float(GIB))):
        found = {
            part
            for one in sweep.experiments
            for source in one.parts.values()
            for part in source.get(kind, ())
        }
        names = [name for name in CATEGORIES if name in found] if kind == "memory" else sorted(found)
        rows = [_parts_of(one, kind, names, per) for one in sweep.experiments]
        result[kind] = {"names": [name.replace("_", " ") for name in names], "rows": rows}
    return result


def _parts_of(one: Experiment, kind: str, names: Sequence[str], per: float) -> list[Any] | None:
    rows = [
        None if source is None else [float(f"{source.get(name, 0) / per:.4g}") for name in names]
        for source in (one.parts.get(name, {}).get(kind) for name in SOURCES)
    ]
    return rows if any(rows) else None
