"""A plan as a page or a picture: `meshtune plan --plot FILE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from meshtune.errors import UserError
from meshtune.plan.explanation import Explanation
from meshtune.plan.search import Choice, Plan
from meshtune.report.draw import vega
from meshtune.report.draw.kinds import HeatMap, Panel, Stacks
from meshtune.report.draw.page import page, text
from meshtune.report.draw.picture import SUFFIXES, known_suffix
from meshtune.report.draw.picture import write as write_picture
from meshtune.report.plan.panels import SizeAndGpus, memory_and_time, panels
from meshtune.rundir import write_text_atomically
from meshtune.units import counted

FOOTER = "Predicted by meshtune; nothing here was measured."


def write(
    file: Path,
    plan: Plan,
    *,
    sizes: Mapping[int, Plan] | None = None,
    batches: Mapping[SizeAndGpus, Choice | None] | None = None,
) -> Path:
    """Write the plan as .html, .png or .svg and return `file`, which is replaced if it exists.

    sizes: number of GPUs -> plan; None: no comparison of sizes. batches: (global batch size, GPUs) -> best
    layout, or None where nothing fits; None: no map of batches. Raises UserError for another suffix, where no
    layout was found, and without Altair.
    """
    suffix = check(file)
    drawn = panels(plan, sizes, batches)
    if not drawn:
        raise UserError(
            "No layout was found, so there is nothing to draw; `meshtune plan` says what would fit."
        )
    if suffix == ".html":
        write_text_atomically(file, plan_page(plan, drawn))
    else:
        write_picture(file, rows(drawn), title=f"{plan.workload.model} · {subject(plan)}")
    return file


def write_explained(file: Path, explanations: Sequence[Explanation]) -> Path:
    """Write what fills memory and a step's time of these layouts as .html, .png or .svg, and return `file`.

    explanations: at least one. Raises as `write`.
    """
    choices = [one.choice for one in explanations]
    drawn = memory_and_time(choices)
    name = explanations[0].workload.model
    subtitle = f"{counted(len(choices), 'layout')} on {choices[0].cluster.gpu.name}"
    if check(file) == ".html":
        text_of_page = page(
            name=name, kind="plan", subtitle=text(subtitle), panels=drawn, before="", after="", footer=FOOTER
        )
        write_text_atomically(file, text_of_page)
    else:
        write_picture(file, rows(drawn), title=f"{name} · {subtitle}")
    return file


def check(file: Path) -> str:
    """Suffix in lower case of a file that `write` can write. UserError for another one, or without Altair."""
    suffix = known_suffix(file, (".html", *SUFFIXES))
    vega.require()
    return suffix


def rows(drawn: Sequence[Panel]) -> list[list[Panel]]:
    """Panels of a picture by row: stacks side by side, then the scatter charts, then the map of batches."""
    stacks: list[Panel] = [panel for panel in drawn if isinstance(panel, Stacks)]
    maps: list[Panel] = [panel for panel in drawn if isinstance(panel, HeatMap)]
    scatters = [panel for panel in drawn if panel not in stacks and panel not in maps]
    return [row for row in (stacks, scatters, maps) if row]


def plan_page(plan: Plan, drawn: Sequence[Panel]) -> str:
    """The plan as the HTML text of a page. drawn: its panels."""
    return page(
        name=plan.workload.model,
        kind="plan",
        subtitle=text(subject(plan)),
        panels=drawn,
        before="",
        after=left_out(plan),
        footer=FOOTER,
    )


def subject(plan: Plan) -> str:
    """Cluster, batch, precision and number of layouts in one line."""
    workload, cluster = plan.workload, plan.cluster
    return (
        f"{cluster.gpus:,} × {cluster.gpu.name} · global batch {workload.global_batch_size:,} × "
        f"{workload.seq_len:,} tokens · {workload.precision} · "
        f"{counted(plan.considered, 'layout')} considered, {len(plan):,} fit"
    )


def left_out(plan: Plan) -> str:
    """Table of the reasons that layouts were left out for, with counts and examples, as HTML."""
    if not plan.rejected:
        return ""
    body = "".join(
        f"<tr><td>{group.count:,}</td><td>{text(group.reason)}</td>"
        f"<td><code>{text(group.example)}</code></td></tr>"
        for group in sorted(plan.rejected, key=lambda group: -group.count)
    )
    return (
        "<section><h2>Layouts left out</h2><div class='wide'><table class='facts left-out'><thead>"
        "<tr><th>layouts</th><th>why</th><th>one of them</th></tr></thead>"
        f"<tbody>{body}</tbody></table></div></section>"
    )
