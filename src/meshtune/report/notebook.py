"""Values of Python's functions (meshtune/notebook.py) as a Document and as rows.

Each kind of value imports its own reports, so that a plan does not load those of runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshtune.errors import UserError, expanded
from meshtune.notebook import Notebook
from meshtune.report.draw import part as drawn
from meshtune.report.draw.document import Document, Pictures
from meshtune.report.draw.picture import target
from meshtune.rundir import RunDir
from meshtune.units import counted, on_screen, working

if TYPE_CHECKING:  # it takes a second, before progress is shown
    from meshtune.plan.changes import Count

SHOWN, IN_TABLE = 5, 100  # best layouts of a plan on its page and in its table
Row = Mapping[str, Any]


def part_of(value: Notebook) -> str:
    """A part of the value's page, as HTML."""
    return drawn.part(document(value))


def picture(value: Notebook, path: str | os.PathLike[str] | None, width: str | None = None) -> drawn.Picture:
    """All pictures of the value; the arguments and errors are those of `Notebook.plot`."""
    file = None if path is None else expanded(str(path))
    place = file and target(file, width)
    with working("drawing the pictures", on_screen) as count:
        page = document(value, count)
        if not page.panels:
            raise UserError(f"{page.name}: there is nothing to draw yet.")
        count(f"drawing {counted(len(page.panels), 'picture')}")
        if place:
            place.write(page, count)
    return drawn.Picture(page)


def document(value: Any, count: Count | None = None) -> Document:
    """The value's page. count: gets the number of each search for a plan's other batches and cluster sizes;
    None: without them.
    """
    match type(value).__name__:
        case "Answer":
            from meshtune.report.plan import documents, panels

            best, searched = value.best(SHOWN), (value.by_size, value.batches(count)) if count else ()
            return documents.answer(value, SHOWN, drawn=panels.panels(value, best, *searched))
        case "Choice":
            return _choice(value)
        case "Simulation":
            from meshtune.report.dryrun.document import document, panels

            return document(value, drawn=panels(value))
        case "Swept":
            from meshtune.report.experiments.page import sweep_page

            return sweep_page(value.database)
        case _:
            from meshtune.report.run.report import run_page

            return run_page(RunDir(value.folder))


def rows(value: Any) -> Iterator[Row]:
    """Rows of the value's table: layouts, events of a memory timeline, experiments or steps."""
    match type(value).__name__:
        case "Answer":
            yield from value.as_dict(IN_TABLE)["layouts"]
        case "Choice":
            yield value.as_dict()
        case "Simulation":
            from meshtune.report.dryrun.facts import facts_of

            seconds = [time.seconds for time in value.times] or [None, None]
            for rank in facts_of(value)["ranks"]:
                for step, step_seconds in zip(rank["steps"], seconds, strict=True):
                    place = {"rank": rank["rank"], "step": step["step"], "step_seconds": step_seconds}
                    yield from ({**place, "event": event, **sizes} for event, sizes in step["timeline"])
        case "Swept":
            from meshtune.report.experiments.database import results

            yield from results(value.database)
        case _:
            yield from (row for row in value.rows if row.get("kind") == "train")


def _choice(choice: Any) -> Document:
    """One layout: its figures, memory by category and time by part."""
    from meshtune.report.plan import panels, tables

    subtitle = drawn.text(f"on {choice.cluster.title}, predicted")
    figures, pictures = tables.layouts_table([choice]), panels.memory_and_time([choice])
    return Document(str(choice.layout), [figures, Pictures(panels.predicted(pictures))], subtitle=subtitle)
