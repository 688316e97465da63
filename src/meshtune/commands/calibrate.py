"""`meshtune calibrate`: fit the planner's constants to measured runs, and write a cluster file."""

from pathlib import Path
from typing import Annotated

import typer

from meshtune.commands.options import AsJson, announce, log, show
from meshtune.units import counted


def calibrate(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="run folders of train and bench --out, or folders of them"),
    ],
    cluster: Annotated[
        Path | None,
        typer.Option(help="the machine's file, by meshtune probe; default: the runs', else their GPU's kind"),
    ] = None,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("calibrated.toml"),
    hold_out: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="judge by these, which are not fitted; default: by quarters of all"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the planner's few constants to measured runs; show the error before and after on runs left out."""
    announce(counted(len(runs), "folder"))
    from meshtune.api.calibrate import calibrate as run
    from meshtune.report.study import calibrated

    facts = run(runs, cluster=cluster, out=out, hold_out=hold_out or (), log=log)
    show(calibrated(facts), as_json=as_json)
    log(f"{out} is written; plan with it by cluster={out}.")
