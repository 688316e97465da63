"""`meshtune bench`: time layouts on this machine, next to what was predicted and simulated."""

from pathlib import Path
from typing import Annotated

import typer

from meshtune.commands.complete import complete_layout
from meshtune.commands.options import AsJson, Settings, announce, folder_of, layout_words, log, show, split
from meshtune.errors import NothingFits, UserError
from meshtune.units import PYTORCH, working


def bench(
    settings: Settings = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYOUT,…|auto:N",
            help="instead of the config's; auto:N: the planner's N best",
            autocompletion=complete_layout,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps to time, after those that warm up")] = 10,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="for one layout")] = 1800,
    find_micro_batch: Annotated[
        bool, typer.Option(help="instead: the largest micro-batch of each layout that runs")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="write traces for Perfetto and memory_viz into this folder"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="write a run folder of each layout into this one, for calibrate"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time training steps of layouts on this machine: tokens/s/GPU, MFU, step time by part, memory by
    category, each predicted, simulated and measured. Without data the sequences are random tokens.
    """
    file, overrides = split(settings)
    announce(file)
    words, folder = layout_words("--layouts", layouts), folder_of("--profile", profile)
    runs = folder_of("--out", out)
    from meshtune.config import load

    config = load(file, overrides)
    with working(PYTORCH):
        from meshtune.api import bench as api
        from meshtune.api import dryrun  # noqa: F401 - loads PyTorch, before processes are forked
        from meshtune.report import study

    if find_micro_batch:
        if folder or runs:
            raise UserError("--profile and --out are of timed layouts; leave them or --find-micro-batch out.")
        sizes = api.find_micro_batch(config, layouts=words, limit=limit, log=log)
        show(study.micro_batches(sizes), as_json=as_json)
        return
    done = api.bench(config, layouts=words, steps=steps, limit=limit, profile=folder, out=runs, log=log)
    show(study.benched(done), as_json=as_json)
    if not any(one["measured"] for one in done):
        raise NothingFits(f"{one['layout']}: {one['failed']}" for one in done)
