"""A plan as a page or a picture: `meshtune plan --plot FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshtune.report.draw import vega
from meshtune.report.draw.kinds import Panel, Scatter, Stacks
from meshtune.report.draw.picture import SUFFIXES, known_suffix
from meshtune.report.draw.picture import write as write_picture
from meshtune.report.draw.words import model_title
from meshtune.report.plan.page import Asked, explained_page, plan_page, subject
from meshtune.report.plan.panels import memory_and_time, over_time, panels, predicted
from meshtune.rundir import write_text_atomically
from meshtune.units import counted

if TYPE_CHECKING:
    from meshtune.plan.answer import Answer
    from meshtune.plan.explanation import Explanation

PLAIN = Asked()


def write(
    file: Path, answer: Answer, most: int = 10, *, compare_sizes: bool = False, asked: Asked = PLAIN
) -> Path:
    """Write the answer as .html, .png or .svg and return `file`, which is replaced if it exists.

    most: layouts that are shown. compare_sizes: draw the best layout of each number of GPUs too. asked: for
    the page. Raises UserError for another suffix, and without Altair.
    """
    suffix = check(file)
    choices = answer.best(most)
    batches = answer.batches()
    drawn = panels(answer, choices, answer.by_size if compare_sizes else None, batches)
    if suffix == ".html":
        write_text_atomically(file, plan_page(answer, choices, drawn, asked))
    else:
        title = f"{model_title(answer.workload.model)} · {subject(answer)}"
        write_picture(file, rows(drawn), title=title)
    return file


def write_explained(file: Path, explanations: Sequence[Explanation]) -> Path:
    """Write what fills memory and a step's time of these layouts as .html, .png or .svg, and return `file`.

    explanations: at least one. Raises as `write`.
    """
    choices = [one.choice for one in explanations]
    drawn = predicted(memory_and_time(choices) + over_time(explanations[0].workload, choices[0]))
    name = model_title(explanations[0].workload.model)
    subtitle = f"{counted(len(choices), 'layout')} on {choices[0].cluster.title}"
    if check(file) == ".html":
        write_text_atomically(file, explained_page(name, subtitle, explanations, drawn))
    else:
        write_picture(file, rows(drawn), title=f"{name} · {subtitle}")
    return file


def check(file: Path) -> str:
    """Suffix in lower case of a file that `write` can write. UserError for another one, or without Altair."""
    suffix = known_suffix(file, (".html", *SUFFIXES))
    vega.require()
    return suffix


def rows(drawn: Sequence[Panel]) -> list[list[Panel]]:
    """Panels of a picture by row: stacks side by side, scatter charts side by side, the others alone."""
    stacks: list[Panel] = [panel for panel in drawn if isinstance(panel, Stacks)]
    scatters: list[Panel] = [panel for panel in drawn if isinstance(panel, Scatter)]
    others: list[list[Panel]] = [[panel] for panel in drawn if not isinstance(panel, Stacks | Scatter)]
    return [row for row in (stacks, *others, scatters) if row]
