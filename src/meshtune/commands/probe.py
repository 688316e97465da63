"""`meshtune probe`: measure this machine, and write a cluster file for plans."""

from pathlib import Path
from typing import Annotated

import typer

from meshtune.commands.options import AsJson, announce, log, show
from meshtune.units import PYTORCH, working


def probe(
    out: Annotated[Path, typer.Option(help="file to write")] = Path("my-cluster.toml"),
    nproc: Annotated[
        int | None, typer.Option(min=1, help="ranks at most; default: the number of GPUs, or 8 on CPU")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's matmuls, attention, memory, collectives and launches, for `cluster=FILE`."""
    announce("this machine")
    with working(PYTORCH):
        from meshtune.api.probe import probe as run
        from meshtune.report.study import probed

    show(probed(run(out, nproc=nproc, log=log)), as_json=as_json)
    log(f"{out} is written; plan with it by cluster={out}.")
