"""`meshtune dryrun`: run the training step of a layout on fake tensors, and show what it needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.commands.complete import complete_layout
from meshtune.commands.options import (
    AsJson,
    PlotWidth,
    Settings,
    announce,
    layout_words,
    log,
    pictures_to,
    show,
    split,
)
from meshtune.errors import NothingFits, UserError
from meshtune.units import PYTORCH, counted, working

if TYPE_CHECKING:
    from meshtune.dryrun.simulation import Simulation

TOP = 10  # tensors shown without --top
Documents = Annotated[
    str | None, typer.Option(metavar="TOKENS,…", help="lengths of the packed documents in each sequence")
]
Routed = Annotated[
    str,
    typer.Option(
        metavar="balanced|worst|measured",
        help="how tokens reach ranks with experts; measured: as in the run of output",
    ),
]


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
        list[int] | None, typer.Option(metavar="RANK", help="trace this rank too, besides one of each kind")
    ] = None,
    documents: Documents = None,
    routing: Routed = "balanced",
    top: Annotated[int, typer.Option(min=0, help="largest tensors at the peak to show")] = TOP,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE",
            help="a folder for page, pictures and traces; or pictures as one .png, .svg or .pdf",
        ),
    ] = None,
    width: PlotWidth = None,
    as_json: AsJson = False,
) -> None:
    """Run the real training step of a layout on fake tensors: memory to the byte, kernels, collectives, time,
    for any number of GPUs. Needs no GPU, no weights and no data.
    """
    file, overrides = split(settings)
    announce(file)
    lengths = lengths_of(documents)
    overrides = on_cluster(overrides, gpus, gpu)
    target = pictures_to(plot, width)

    with working(PYTORCH):
        from meshtune import config
        from meshtune.api.dryrun import simulations
        from meshtune.report.dryrun.document import document, joined, panels, write_files

    done = simulations(
        config.load(file, overrides),
        layout_words("--layout", layout),
        ranks=rank or [],
        documents=lengths,
        routing=routing,
        log=log,
    )
    answers = []
    for each in done:
        with working(f"counting the memory, operations and collectives of {each.layout}", log):
            answers.append(document(each, top, drawn=panels(each) if target else ()))
    show(joined(answers), as_json=as_json)
    for simulation, page in zip(done, answers, strict=True):
        if target:
            traces = ", then writing its page and traces" * target.is_folder
            one = target.of(str(simulation.layout)) if len(done) > 1 else target
            work = f"drawing {counted(len(page.panels), 'picture')} of {simulation.layout}{traces}"
            with working(work) as count:
                files = write_files(one, simulation, page, count)
            log(f"{', '.join(file.name for file in files)} in {files[0].parent}")
    check_fits(done)


def check_fits(done: Sequence["Simulation"]) -> None:
    """Raise NothingFits, with what would fit, if none of the simulations does."""
    if not any(simulation.fits for simulation in done):
        raise NothingFits(text for one in done for text in one.instead or (one.verdict,))


def lengths_of(documents: str | None) -> list[int]:
    """The lengths of --documents; [] without it. Raises UserError for a word that isn't a whole number."""
    words = [word.strip() for word in documents.split(",")] if documents else []
    if wrong := [word for word in words if not word.isdecimal()]:
        raise UserError(
            f"--documents {documents}: {', '.join(wrong)} isn't a number of tokens; write "
            "--documents 512,1024."
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
