"""`meshtune dryrun`: run the training step of a layout on fake tensors, and show what it needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.commands.complete import complete_layout
from meshtune.commands.options import AsJson, Settings, announce, show, split
from meshtune.errors import NothingFits, UserError
from meshtune.units import human, notice

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshtune.dryrun.simulation import Simulation

TOP = 10  # tensors shown without --top


def dryrun(
    settings: Settings = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="instead of cluster.gpus: any number, none is needed")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="instead of cluster.gpu: h100-sxm, or cpu for the path of CPUs"),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYOUT,…",
            help="instead of the config's; without either, the planner's choice",
            autocompletion=complete_layout,
        ),
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(metavar="RANK", help="trace this rank too, beside one of each kind")
    ] = None,
    documents: Annotated[
        str | None,
        typer.Option(metavar="TOKENS,…", help="lengths of the packed documents in each sequence"),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="largest tensors at the peak to show")] = TOP,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write pictures and traces into this folder")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the real training step of a layout on fake tensors: memory to the byte, kernels, collectives, time,
    for any number of GPUs. Needs no GPU, no weights and no data.
    """
    file, overrides = split(settings)
    announce(file)
    layouts = [word.strip() for text in layout or () for word in text.split(",") if word.strip()]
    lengths = lengths_of(documents)
    overrides = on_cluster(overrides, gpus, gpu)
    if plot and len(layouts) > 1:
        raise UserError(f"--plot {plot} draws one layout, but {len(layouts)} are named; name one.")
    from meshtune import config
    from meshtune.api.dryrun import simulations

    done = simulations(
        config.load(file, overrides), layouts, ranks=rank or [], documents=lengths, log=progress
    )
    facts = [simulation.as_dict() for simulation in done]
    show(
        facts[0] if len(facts) == 1 else {"layouts": facts},
        answer(done, top=top),
        as_json=as_json,
    )
    check_fits(done)


def check_fits(done: Sequence["Simulation"]) -> None:
    """Raise NothingFits, with what would fit, if none of the simulations does."""
    if not any(simulation.fits for simulation in done):
        raise NothingFits(text for one in done for text in one.instead or (one.verdict,))


def lengths_of(documents: str | None) -> list[int]:
    """The lengths of --documents; [] without it. Raises UserError for a word that is no whole number."""
    words = [word.strip() for word in documents.split(",")] if documents else []
    if wrong := [word for word in words if not word.isdecimal()]:
        raise UserError(
            f"--documents {documents}: {', '.join(wrong)} is no number of tokens; write --documents 512,1024."
        )
    return [int(word) for word in words]


def on_cluster(overrides: Sequence[str], gpus: int | None, gpu: str | None) -> list[str]:
    """The overrides with those of --gpus and --gpu; None: not given. Raises UserError for a setting that
    both give.
    """
    given = {"cluster.gpus": gpus, "cluster.gpu": gpu}
    given = {name: value for name, value in given.items() if value is not None}
    if twice := [word for word in overrides if word.partition("=")[0] in given]:
        raise UserError(
            f"{word} and --{word.partition('=')[0][8:]} both name it; keep one." for word in twice
        )
    return [*overrides, *(f"{name}={value}" for name, value in given.items())]


def progress(line: str) -> None:
    """Print a line of the dry run on stderr."""
    notice(f"meshtune: {line}")


def answer(done: Sequence["Simulation"], *, top: int = TOP) -> "RenderableType":
    """The verdict of each layout, then what its ranks hold at the peak. top: largest tensors to show."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for simulation in done:
        style = "bold" if simulation.fits else "bold red"
        parts += [Text(simulation.verdict, style=style), peaks(simulation)]
        parts += [Text(note) for note in simulation.notes]
    return Group(*parts)


def peaks(simulation: "Simulation") -> "RenderableType":
    """A table of the bytes at the peak by category: of each rank's first step, and of a later one."""
    from rich.table import Table

    table = Table("at the peak", box=None)
    columns = [(trace, step) for trace in simulation.traces for step in trace.steps]
    for trace, step in columns:
        table.add_column(
            f"rank {trace.rank:,}\n{'first step' if step.step == 1 else 'later'}", justify="right"
        )
    compositions = [step.composition() for _, step in columns]
    categories = dict.fromkeys(name for sizes in compositions for name, size in sizes.items() if size)
    for name in categories:
        table.add_row(name.replace("_", " "), *(human(sizes.get(name, 0)) for sizes in compositions))
    table.add_row("in all", *(human(step.peak()[0]) for _, step in columns), style="bold")
    return table
