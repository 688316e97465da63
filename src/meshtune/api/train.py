"""Train: start the ranks, or be one of them; train; draw the report."""

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from meshtune.errors import UserError, expanded, memory_explained
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

    if not launch.joined():  # before anything is loaded; of joined ranks the main one decides
        config, finished = settled(config)
        if finished:
            return show(RunDir(config.output))
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

    if choice is None:
        config, finished = settled_together(config)
        if finished:
            return show(RunDir(config.output)) if rank.main else None
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


def settled(config: "Config") -> tuple["Config", bool]:
    """(The settings with the folder that the run writes as `output`, True if only its report was missing,
    which is drawn now).

    A line on stderr says what becomes of a run that is there. Raises UserError as output.decide.
    """
    from rich.console import Console
    from rich.text import Text

    from meshtune.train import output

    tell = partial(Console(stderr=True).print, soft_wrap=True)
    named = RunDir(expanded(config.output).absolute())
    if named.replaced.exists():
        from meshtune.train.folder import put_back

        if put_back(named):
            tell(Text(f"{named.path} is the earlier run again: the one that was to replace it did no step."))
    decision = output.decide(config)
    if decision.line:
        tell(Text(decision.line, style="bold"))
    if decision.start == "report":
        from meshtune.report.run import report
        from meshtune.train.folder import Claim

        with Claim(decision.run):  # clears what the killed process left
            report.try_report(decision.run)
    return config.model_copy(update={"output": str(decision.run.path)}), decision.start == "report"


def settled_together(config: "Config") -> tuple["Config", bool]:
    """Do `settled` on the main rank, for all ranks; every rank calls it. Raises as `settled`."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return settled(config)
    result: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            result = [settled(config)]
        except UserError as error:
            result = [error]
    dist.broadcast_object_list(result)
    if isinstance(result[0], UserError):
        raise result[0]
    return result[0]
