"""`meshtune report`: draw a run's report again, or compare runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from meshtune.commands.options import AsJson, show, show_json
from meshtune.errors import UserError, expanded
from meshtune.nearest import path_meant
from meshtune.rundir import RunDir


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders; several are compared")],
    out: Annotated[
        Path | None,
        typer.Option(help="the page of a comparison; default: comparison.html beside the first run"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's report.html again, or compare several runs on one page."""
    paths = [expanded(run) for run in runs]
    check_runs(paths)
    if len(paths) > 1:
        beside = paths[0].resolve().parent / "comparison.html"
        write_comparison(paths, expanded(out) if out else beside, as_json=as_json)
        return
    if out:
        raise UserError("--out names the page of a comparison; name two runs or more, or leave it out.")
    from meshtune.report.run.report import write_report

    page_file = write_report(RunDir(paths[0]))
    show_json({"report": str(page_file)}) if as_json else print(page_file)


def check_runs(paths: Sequence[Path]) -> None:
    """Raise UserError with a sentence for each folder that holds no run."""
    folders = map(RunDir, paths)
    if problems := [
        f"{folder.path} holds no run: neither config.yaml nor metrics.jsonl is there"
        f"{path_meant(str(folder.path), lambda path: holds_run(RunDir(path))) or '.'}"
        for folder in folders
        if not holds_run(folder)
    ]:
        raise UserError(problems)


def holds_run(folder: RunDir) -> bool:
    return folder.config_file.exists() or folder.metrics_file.exists()


def write_comparison(paths: Sequence[Path], file: Path, *, as_json: bool) -> None:
    """Write the page that compares the runs, and print the same figures with its path."""
    from meshtune.report.compare import page
    from meshtune.report.compare.runs import compare

    comparison = compare(paths)
    page.write_comparison(comparison, file)
    show(
        {"report": str(file), **comparison.as_dict()},
        page.comparison_tables(comparison),
        as_json=as_json,
    )
    if not as_json:
        print(file)
