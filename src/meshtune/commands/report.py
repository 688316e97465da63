"""`meshtune report`: a page of a run, of several runs side by side, of a sweep, or of plan documents."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.commands.options import AsJson, PlotWidth, pictures_to, runs_there, show, show_json
from meshtune.errors import UserError, expanded, path_meant
from meshtune.report.experiments.database import database_of
from meshtune.rundir import RunDir, write_text_atomically
from meshtune.units import few, working

if TYPE_CHECKING:
    from meshtune.report.draw.document import Document

RUN, SWEEP, PLAN = "run folder", "sweep", "plan"


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...|SWEEP.db|PLAN...",
            help="run folders (several are compared), a sweep's database or folder, or plan documents",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="the page; default: report.html in the folder, or next to the first of several"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            "--png",
            metavar="DIR|FILE",
            help="pictures too: a folder for a file of each in all formats, or one .png, .svg or .pdf",
        ),
    ] = None,
    width: PlotWidth = None,
    by: Annotated[
        str | None, typer.Option(metavar="AXIS", help="a sweep's axis with a small chart for each value")
    ] = None,
    color: Annotated[
        str | None, typer.Option(metavar="AXIS", help="a sweep's axis that gives colours")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a page: of a run, of several runs compared, of a sweep, or of plans."""
    with working(f"reading {few([*map(str, paths)])} and drawing the page") as count:
        pictures_at = pictures_to(plot, width)
        document, default = page_of([expanded(path) for path in paths], by, color)
        file = expanded(out) if out else default
        write_text_atomically(file, document.html())
        pictures = pictures_at.write(document, count) if pictures_at and document.panels else []
    if as_json:
        written = {"report": str(file), **({"pictures": list(map(str, pictures))} if plot else {})}
        show_json(written | {**document.facts})
        return
    if document.kind in ("comparison", "sweep"):
        show(document, as_json=False)
    for path in (file, *pictures):
        print(path)


def page_of(
    paths: Sequence[Path], by: str | None = None, color: str | None = None
) -> tuple["Document", Path]:
    """The document of what the paths name, and its file where none is asked for. by, color: axes of a sweep.

    Raises UserError for paths that are nothing of all this, for several kinds at once and for several sweeps.
    """
    kinds = [kind_of(path) for path in paths]
    if problems := [nothing_there(path) for path, kind in zip(paths, kinds, strict=True) if kind is None]:
        raise UserError(problems)
    if len(set(kinds)) > 1:
        named = ", ".join(f"{path} (a {kind})" for path, kind in zip(paths, kinds, strict=True))
        raise UserError(f"A page is of run folders, of one sweep or of plans, not of several kinds: {named}.")
    if kinds[0] == SWEEP:
        if len(paths) > 1:
            raise UserError(f"A page shows one sweep; {len(paths)} are named: draw one page of each.")
        return of_sweep(paths[0], by, color)
    if by or color:
        raise UserError(f"--by and --color name axes of a sweep, and {paths[0]} is a {kinds[0]}.")
    if kinds[0] == PLAN:
        return of_plans(paths)
    return of_run(RunDir(paths[0])) if len(paths) == 1 else of_runs(paths)


def kind_of(path: Path) -> str | None:
    """RUN, SWEEP or PLAN by the content of a path; None for anything else."""
    if RunDir(path).holds_run:
        return RUN
    if database_of(path):
        return SWEEP
    from meshtune.report.plan.documents import read_plan

    return PLAN if path.is_file() and read_plan(path) else None


def nothing_there(path: Path) -> str:
    """A sentence on a path that is none of RUN, SWEEP and PLAN."""
    if path.is_file():
        return (
            f"{path} is neither a sweep's database nor a plan that meshtune plan --json or a run has written."
        )
    meant = path_meant(str(path), lambda near: RunDir(near).holds_run or database_of(near) is not None)
    files = "config.yaml, metrics.jsonl and sweep.db"
    there = runs_there(path)
    return f"{path} holds no run and no sweep: none of {files} is there{meant or '.'} {there}".rstrip()


def of_run(run: RunDir) -> tuple["Document", Path]:
    from meshtune.report.run.report import run_page

    return run_page(run), run.report_file


def of_runs(paths: Sequence[Path]) -> tuple["Document", Path]:
    from meshtune.report.compare import compare, comparison_page

    return comparison_page(compare(paths)), paths[0].resolve().parent / "comparison.html"


def of_sweep(path: Path, by: str | None, color: str | None) -> tuple["Document", Path]:
    from meshtune.report.experiments.page import sweep_page

    database = database_of(path)
    assert database is not None
    return sweep_page(database, by=by, color=color), database.resolve().parent / "report.html"


def of_plans(paths: Sequence[Path]) -> tuple["Document", Path]:
    from meshtune.report.plan.documents import of_files, read_plan

    plans = [plan for plan in map(read_plan, paths) if plan]
    return of_files(plans), paths[0].resolve().with_suffix(".html")
