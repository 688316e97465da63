"""`meshtune train`: start the ranks, train, show the run."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.commands.options import AsJson, Settings, show_json, split
from meshtune.errors import UserError, memory_explained
from meshtune.rundir import RunDir

if TYPE_CHECKING:
    from meshtune.config import Config
    from meshtune.launch import Rank
    from meshtune.train.choose import Choice
    from meshtune.train.loop import Run


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
    from meshtune import config, launch

    resolved = config.load(file, overrides)
    # Before ranks are forked: they share what is imported. And what can't run is refused.
    from meshtune.train import build, choose, loop  # noqa: F401

    ranks, device = ranks_of(resolved, nproc)
    choice = None if launch.joined() else choose.choose(resolved, ranks)
    launch.run(train_rank, resolved, choice, as_json, ranks=ranks, device=device)


def ranks_of(config: "Config", nproc: int | None) -> tuple[int, str]:
    """(Number of ranks, "cpu" or "cuda").

    The number is that of torchrun or srun if one of them started this process, else the layout's; if the
    layout leaves it open, nproc, else the number of GPUs, else 1. nproc: --nproc; None: not given. Raises
    UserError if nproc is given under torchrun or srun, or differs from the layout's number, or if the layout
    needs more GPUs than there are.
    """
    import torch

    from meshtune import launch

    wanted = config.train.device
    device = "cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu"
    if place := launch.place_of(os.environ):
        if nproc:
            raise UserError(
                f"--nproc {nproc} starts ranks here, but this is already rank {place.rank} of {place.world}; "
                "leave --nproc out, and let torchrun or srun start all ranks."
            )
        return place.world, device
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    world = config.partial_layout.world
    if world is None:
        return nproc or gpus or 1, device
    if nproc and nproc != world:
        raise UserError(
            f"--nproc {nproc}, but layout {config.layout} is for {world} ranks; leave --nproc out, or change "
            "the layout."
        )
    if gpus and world > gpus:
        raise UserError(
            f"Layout {config.layout} needs {world} GPUs, but torch sees {gpus}; change the layout, start it "
            "on several machines by torchrun or srun, or use train.device=cpu."
        )
    return world, device


def train_rank(rank: "Rank", config: "Config", choice: "Choice | None", as_json: bool) -> None:
    """Train on one rank; at the end, also after an error, the main rank prints the run.

    choice: the layout and attention; None: the ranks choose them together. as_json: as `show_run` takes it.
    """
    from meshtune.train import build

    if finished := completed(config):
        if rank.main:
            show_run(finished, as_json=as_json)
        return
    try:
        with memory_explained():
            run = build.build(config, choice, claimed=lambda folder: rank.keep_log(folder.logs))
            train_watched(rank, run, as_json=as_json)
    except UserError as error:
        rank.log_cause(error)
        raise


def train_watched(rank: "Rank", run: "Run", *, as_json: bool) -> None:
    """Train; if a rank hangs, the watch names step and axis. At the end the main rank prints the run."""
    from meshtune.train import loop

    world = run.world
    axes = {str(axis.group.group_name): axis.name for axis in world.axes if axis.group is not None}
    axes |= {
        group.group_name: "all ranks"
        for group in (world.host_group, world.checkpoint_group)
        if group is not None
    }
    rank.set_hang_facts(lambda: f"step {run.progress.step}", axes, spins=world.device.type == "cuda")
    try:
        loop.train(run)
    finally:
        if rank.main:
            show_run(run.folder, as_json=as_json)


def completed(config: "Config") -> RunDir | None:
    """The finished run of these settings whose missing report was drawn now; None if there is none.

    Every rank calls it; the main rank draws. A run is trained again only if its report can't be drawn.
    """
    import torch.distributed as dist

    from meshtune.report.run import report
    from meshtune.train import folder

    several = dist.is_initialized()
    result: list[RunDir | None] = [None]
    main = not several or dist.get_rank() == 0
    if main and (run := folder.without_report(config)):
        with folder.Claim(run, {}):  # clears what the killed process left
            result = [run if not report.try_report(run) else None]
    if several:
        dist.broadcast_object_list(result)
    return result[0]


def show_run(run: RunDir, *, as_json: bool) -> None:
    """Write the run's report.html and print its headline numbers on stdout, also when it was stopped.

    as_json: print them as one JSON document. A report that can't be written is only a line on stderr.
    """
    from rich.console import Console

    from meshtune.report.run import report, summary, tables

    if reason := report.try_report(run):  # the model is on the disk; the report can be drawn later
        print(f"meshtune: {reason}", file=sys.stderr)
    if as_json:
        show_json(summary.summarise(run).as_dict())
    else:
        console = Console()
        console.print(tables.run_summary(run))
        if run.samples():
            console.print(tables.samples_table(run))
