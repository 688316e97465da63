"""`meshtune sweep`: many experiments from one file, with their results in one database."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from meshtune.commands.command import Command
from meshtune.commands.options import AsJson, announce, folder_of, log, show, split
from meshtune.errors import UserError
from meshtune.units import PYTORCH, working

SWEEP = Annotated[
    list[str],
    typer.Argument(
        metavar="SWEEP.yaml [KEY=VALUE]...", help="a sweep file; section.key=value changes its base"
    ),
]


class SimulateAlone(Command):
    """A command whose --simulate may stand without a value, which then is planner."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        tiers = ("planner", "dryrun")
        for place, word in enumerate(args):
            if word == "--simulate" and args[place + 1 : place + 2] not in ([tier] for tier in tiers):
                args = [*args[:place], f"--simulate={tiers[0]}", *args[place + 1 :]]
        return super().parse_args(ctx, args)


def sweep(
    settings: SWEEP,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder of the results; default: runs/<name of the file>"),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="run experiments too that the plan says do not fit")
    ] = False,
    simulate: Annotated[
        str | None, typer.Option(metavar="[planner|dryrun]", help="predict or dry-run them, running none")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="experiments at once; default: 1 on a processor, all that fit on GPUs"),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="[slurm|ray]", help="submit the experiments to a cluster's queue, and collect"),
    ] = None,
    retry: Annotated[
        str | None,
        typer.Option(metavar="STATUS,…", help="run again those that ended so, such as crashed,'timed out'"),
    ] = None,
    task: Annotated[
        int | None, typer.Option(hidden=True, help="run this experiment of a cluster's queue")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run many experiments from one file: a base config, axes of settings and layouts, conditions. Results
    go to one SQLite database; stopped or killed, the same command continues where it was.
    """
    file, overrides = split(settings)
    if file is None:
        raise UserError("Name a sweep file, such as meshtune sweep sweep.yaml (docs/sweep.md).")
    announce(file)
    folder = folder_of("--out", out)
    with working(PYTORCH):
        from meshtune.api import sweep as api
        from meshtune.report.study import swept

    if task is not None:
        api.run_task(file, folder, task)
        return
    words = [word.strip() for word in (retry or "").split(",") if word.strip()]
    # Only the planner's tier starts no processes, which a thread that draws a line would disturb.
    with working("predicting experiments") if simulate == "planner" else nullcontext() as count:
        done = api.sweep(
            file, overrides, out=folder, everything=everything, simulate=simulate, jobs=jobs, to=to,
            retry=words, log=log, count=count,
        )  # fmt: skip
    show(swept(done.as_dict()), as_json=as_json)
