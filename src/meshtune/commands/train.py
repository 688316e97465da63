"""`meshtune train`: train, show the run."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.commands.options import AsJson, Settings, announce, log, show, show_json, split
from meshtune.filesystem import paths_named
from meshtune.rundir import RunDir
from meshtune.units import LOADING, PYTORCH, on_first_rank, working

if TYPE_CHECKING:
    from meshtune.config import Config


def train(
    settings: Settings = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="ranks to start here; default: the ranks of the layout, or one for each GPU"
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="check settings, model and data, simulate the first steps of what would run here, and stop",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model: full or LoRA, from data files to a Hugging Face folder and a report. Starts its own
    ranks, or is one of those that torchrun or srun started.
    """
    file, overrides = split(settings)
    announce(file)
    from meshtune import config

    settings_of_run = config.load(file, overrides)
    if on_first_rank():
        log(f"{LOADING['train']} …")
    if dry_run:
        show_dry_run(settings_of_run, nproc, as_json=as_json)
        return
    from meshtune.api.train import train_here
    from meshtune.launch.signals import interrupted_by_signals

    handled = interrupted_by_signals(enabled=settings_of_run.checkpoint.save_on_signal)
    with handled, paths_named(settings_of_run):
        train_here(settings_of_run, nproc, partial(show_run, as_json=as_json))


def show_dry_run(config: "Config", nproc: int | None, *, as_json: bool) -> None:
    """Print what `train` would start here, and what its first steps need. Raises as `check_fits`."""
    with working(PYTORCH, lambda _: None):
        from meshtune.api.dry_train import dry_train
    from meshtune.commands.dryrun import check_fits

    dry = dry_train(config, nproc, log=log)
    show(dry.document(), as_json=as_json)
    check_fits([dry.simulation])


def show_run(run: RunDir, *, as_json: bool) -> None:
    """Print a run's headline numbers on stdout, also when it was stopped. as_json: as one JSON document."""
    from rich.console import Console

    from meshtune.report.run import summary, tables

    if as_json:
        show_json(summary.summarise(run).as_dict())
    else:
        console = Console()
        console.print(tables.run_summary(run))
        for line in tables.places(run):
            console.print(line, soft_wrap=True)
        if run.samples():
            console.print()
            console.print(tables.samples_table(run))
