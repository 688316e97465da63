"""`meshtune train`: train, show the run."""

from functools import partial
from typing import Annotated

import typer

from meshtune.commands.options import AsJson, Settings, announce, show_json, split
from meshtune.rundir import RunDir


def train(
    settings: Settings = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="ranks to start here; default: as many as the layout has, or as there are GPUs"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model: full or LoRA, from data files to a Hugging Face folder and a report. Starts its own
    ranks, or is one of those that torchrun or srun started.
    """
    file, overrides = split(settings)
    announce(file)
    from meshtune import config
    from meshtune.api.train import train_here

    train_here(config.load(file, overrides), nproc, partial(show_run, as_json=as_json))


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
