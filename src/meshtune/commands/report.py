"""`meshtune report`: draw a run's report again."""

from pathlib import Path
from typing import Annotated

import typer

from meshtune.commands.options import AsJson, show_json
from meshtune.errors import UserError, expanded
from meshtune.rundir import RunDir


def report(run: Annotated[Path, typer.Argument(help="a run folder")], as_json: AsJson = False) -> None:
    """Write the run's report.html again from what the run folder holds."""
    folder = RunDir(expanded(run))
    if not folder.config_file.exists() and not folder.metrics_file.exists():
        raise UserError(f"{run} holds no run: neither config.yaml nor metrics.jsonl is there.")
    from meshtune.report.run.report import write_report

    page_file = write_report(folder)
    show_json({"report": str(page_file)}) if as_json else print(page_file)
