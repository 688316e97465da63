"""`meshtune dryrun`: run the training step of a layout on fake tensors, and show what it needs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.commands.complete import complete_layout
from meshtune.commands.options import (
    AsJson,
    Settings,
    announce,
    folder_of,
    layout_words,
    log,
    show_json,
    split,
)
from meshtune.errors import NothingFits, UserError
from meshtune.units import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshtune.dryrun.simulation import Simulation
    from meshtune.meter.trace import RankTrace
    from meshtune.report.dryrun.page import DryRun

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
    lengths = lengths_of(documents)
    overrides = on_cluster(overrides, gpus, gpu)
    plot = folder_of("--plot", plot)
    from rich.console import Console

    from meshtune import config
    from meshtune.api.dryrun import simulations
    from meshtune.dryrun.results import page_of

    done = simulations(
        config.load(file, overrides),
        layout_words("--layout", layout),
        ranks=rank or [],
        documents=lengths,
        log=log,
    )
    pages = [page_of(simulation, top=top) for simulation in done] if plot or not as_json else []
    if as_json:
        facts = [simulation.as_dict(top) for simulation in done]
        show_json(facts[0] if len(facts) == 1 else {"layouts": facts})
    else:
        Console().print(answer(done, pages))
    if plot:
        write_plots(done, pages, plot)
    check_fits(done)


def write_plots(done: Sequence["Simulation"], pages: Sequence["DryRun"], folder: Path) -> None:
    """Write pictures and traces of each layout into `folder`; of several into one of its own below it.

    pages: the tables and pictures of each.
    """
    from meshtune.dryrun.results import write_files

    for simulation, page in zip(done, pages, strict=True):
        into = folder / str(simulation.layout) if len(done) > 1 else folder
        log(f"drawing {simulation.layout} …")
        files = write_files(into, simulation, page)
        log(f"{', '.join(file.name for file in files)} in {into}")


def check_fits(done: Sequence["Simulation"]) -> None:
    """Raise NothingFits, with what would fit, if none of the simulations does."""
    if not any(simulation.fits for simulation in done):
        raise NothingFits(text for one in done for text in one.instead or (one.verdict,))


def lengths_of(documents: str | None) -> list[int]:
    """The lengths of --documents; [] without it. Raises UserError for a word that isn't a whole number."""
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


def answer(done: Sequence["Simulation"], pages: Sequence["DryRun"]) -> "RenderableType":
    """Print-ready: of each layout whether it fits and how long a step takes, then tables.

    pages: the tables of each.
    """
    from rich.console import Group
    from rich.text import Text

    from meshtune.report.dryrun.beside import layouts_table

    parts: list[RenderableType] = []
    for simulation, page in zip(done, pages, strict=True):
        style = "bold" if simulation.fits else "bold red"
        parts += [Text(simulation.verdict, style=style), *(Text(line) for line in headlines(simulation))]
        parts += [Text(), *tables(page, simulation.fullest)]
    if len(done) > 1 and all(simulation.predicted for simulation in done):
        parts.append(layouts_table([simulation.as_dict() for simulation in done]))
    return Group(*parts)


def headlines(simulation: "Simulation") -> Iterator[str]:
    """Yield sentences that stand below the verdict: the step's time, what was traced, notes."""
    if time := simulation.time():
        yield (
            f"A step takes {duration(time['seconds'])}: {time['tokens_per_second_per_gpu']:,.0f} "
            f"{simulation.cluster.speed_unit}. These are the planner's seconds of each operation, laid on "
            "streams as the trace has them."
        )
    trace = simulation.traces[0]
    if trace.micro_batches < trace.of:
        yield (
            f"{trace.micro_batches} of {trace.of} micro-batches were traced; the others count as number "
            f"{trace.steady}."
        )
    for rank, text in simulation.stands_for.items():
        if len(simulation.stands_for) > 1:
            yield f"Rank {rank:,} stands for {text}."
    yield from simulation.notes


def tables(page: "DryRun", fullest: "RankTrace") -> "Iterator[RenderableType]":
    """Yield the tables of one layout: the peak of every traced rank, all else of the fullest one."""
    from meshtune.report.dryrun.page import rank_listings
    from meshtune.report.dryrun.tables import peak_table, substitutes_table

    pairs = (page.traces[first : first + 2] for first in range(0, len(page.traces), 2))  # of 80 columns
    peaks = [peak_table(pair, page.reserved) for pair in pairs]
    substitutes = substitutes_table(page.traces)
    yield from (*peaks, *page.others, *rank_listings(page, fullest), *[substitutes] * bool(substitutes.rows))
