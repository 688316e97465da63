"""Train: start the ranks, or be one of them; train; draw the report."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshtune.errors import UserError, memory_explained
from meshtune.rundir import RunDir

if TYPE_CHECKING:
    from meshtune.config import Config
    from meshtune.launch import Rank
    from meshtune.train.choose import Choice
    from meshtune.train.loop import Run

Show = Callable[[RunDir], None]  # called with the run folder on the main rank at the end, also after an error


def train_here(config: "Config", nproc: int | None, show: Show) -> None:
    """Train on the ranks that the settings ask for: they are started here, or this process is one of those
    that torchrun or srun started.

    nproc: as `ranks_of` takes it. show: must be picklable. Raises as `launch.run`.
    """
    from meshtune import launch

    # Before ranks are forked: they share what is imported. And what can't run is refused.
    from meshtune.train import build, choose, loop  # noqa: F401

    ranks, device = ranks_of(config, nproc)
    choice = None if launch.joined() else choose.choose(config, ranks)
    launch.run(train_rank, config, choice, show, ranks=ranks, device=device)


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


def train_rank(rank: "Rank", config: "Config", choice: "Choice | None", show: Show) -> None:
    """Train on one rank; at the end, also after an error, the main rank shows the run.

    choice: the layout and attention; None: the ranks choose them together.
    """
    from meshtune.train import build

    if finished := completed(config):
        if rank.main:
            show(finished)
        return
    try:
        with memory_explained():
            run = build.build(config, choice, claimed=lambda folder: rank.keep_log(folder.logs))
            train_watched(rank, run, show)
    except UserError as error:
        rank.log_cause(error)
        raise


def train_watched(rank: "Rank", run: "Run", show: Show) -> None:
    """Train; if a rank hangs, the watch names step and axis. At the end the main rank shows the run."""
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
            show(run.folder)


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
