"""Train: start the ranks, or be one of them; train; draw the report."""

import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.api.settings import Settings, tree_of
from meshtune.config import Config, load
from meshtune.data.files import check_there
from meshtune.data.rows import Rows, store_rows
from meshtune.errors import RankFailed, UserError, expanded, memory_explained
from meshtune.filesystem import paths_named
from meshtune.launch import allocator
from meshtune.layout import Layout
from meshtune.model.hub import check_name
from meshtune.notebook import Notebook
from meshtune.report.run.summary import Summary, summarise
from meshtune.rundir import Row, RunDir
from meshtune.sections import DataConfig
from meshtune.streams import guarded
from meshtune.train.callbacks import Callback, Hooks
from meshtune.units import PYTORCH, counted, notice, on_first_rank, on_screen, working
from meshtune.yaml_tree import merge

if TYPE_CHECKING:
    from meshtune.api.choose import Choice
    from meshtune.launch import Rank
    from meshtune.train.loop import Run
    from meshtune.train.loss import LossFunction

Show = Callable[[RunDir], None]  # called with the run folder on the main rank at the end, also after an error


@dataclass(frozen=True, repr=False)
class Result(Notebook):
    """A run: finished, or as far as its folder has it."""

    folder: Path  # of the run: config.yaml, metrics.jsonl, checkpoints/, report.html …
    model: Path  # a Hugging Face folder: the model, or the adapter of method=lora
    summary: Summary  # headline numbers: losses, speed, status

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Result":
        """The run in a folder. Raises UserError where there is none."""
        run = RunDir(expanded(str(folder)))
        if not run.holds_run:
            raise UserError(f"{run.path} is not a run folder: config.yaml and metrics.jsonl are missing.")
        return cls(run.path, run.model, summarise(run))

    @property
    def summary_line(self) -> str:
        loss = self.summary.last_loss
        return (
            f"{self.folder}: {self.summary.status}, {counted(self.summary.steps, 'step')}"
            f"{'' if loss is None else f', training loss {loss:.4f}'}"
        )

    @property
    def rows(self) -> list[Row]:
        """The rows of metrics.jsonl, each with its "kind": run, train, eval or end."""
        return RunDir(self.folder).rows()


def train(
    config: Settings,
    overrides: Sequence[str] = (),
    *,
    train_data: Rows | None = None,
    eval_data: Rows | None = None,
    loss: "LossFunction | None" = None,
    callbacks: Sequence[Callback] = (),
    layout: Layout | str | None = None,
    nproc: int | None = None,
) -> Result:
    """Train as `meshtune train` does, and return the finished run. A run folder that holds an unfinished run
    of these settings and rows continues.

    config: a Config, a mapping of its sections, or a YAML file. overrides: section.key=value each.
    train_data, eval_data: rows in a form that data.format knows, a list of dicts or a datasets.Dataset;
    instead of data.train and data.eval. loss: instead of the cross entropy, see train/loss.py.
    callbacks: called on the main rank. layout: instead of config's. nproc: ranks to start here; None: those
    of the layout, or as there are GPUs.

    Raises UserError (every problem, as sentences), NothingFits, NonFinite, Interrupted, and RankFailed for a
    bug on one of several ranks. A process that torchrun or srun started is one rank: all call this alike.
    """
    tree = with_rows(tree_of(config, overrides), train_data, eval_data)
    tree = tree if layout is None else merge(tree, {"layout": str(layout)})
    settings = load(defaults=tree, remedy="give eval_data=[…], ")
    hooks = Hooks(loss, tuple(callbacks))
    check_call(settings, hooks)
    with guarded(), paths_named(settings):
        run = train_here(settings, nproc, keep_quiet, hooks)
    return Result.read(run.path)


def check_call(config: Config, hooks: Hooks) -> None:
    """Raise UserError for a call that can't work, or has a part that would be without effect."""
    problems = []
    if not config.data.train:
        problems.append(
            "No data is named; give train_data=[…], or add data: {train: rows.jsonl} to the config."
        )
    if hooks.loss and config.train.label_smoothing:
        problems.append(
            f"train.label_smoothing={config.train.label_smoothing:g} belongs to the cross entropy, which "
            "`loss` replaces; smooth inside `loss`, and leave it out."
        )
    if bad := [callback for callback in hooks.callbacks if not isinstance(callback, Callback)]:
        problems.append(f"callbacks: {type(bad[0]).__name__} does not derive from meshtune.Callback.")
    if threading.current_thread() is not threading.main_thread():
        problems.append("train must be called from the main thread: it handles SIGTERM and Ctrl-C.")
    if problems:
        raise UserError(problems)


def check_spawned(hooks: Hooks) -> None:
    """Raise UserError if ranks that are spawned can't import the hooks."""
    try:
        pickle.dumps(hooks)
        notebook = not hasattr(sys.modules["__main__"], "__file__")
        parts = [hooks.loss, *map(type, hooks.callbacks)]
        if notebook and any(getattr(part, "__module__", "") == "__main__" for part in parts):
            raise TypeError("it is defined in a notebook")
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"Ranks on several GPUs import `loss` and `callbacks`, which can't be: {error}. Define them at "
            "the top of a module, or train on one rank (nproc=1)."
        ) from error


def with_rows(tree: dict[str, Any], train_data: Rows | None, eval_data: Rows | None) -> dict[str, Any]:
    """The settings with in-memory rows as files of the data cache. Raises UserError as `store_rows`, and if
    the settings name data of the same purpose.

    tree: of sections, not validated yet.
    """
    given = {"train": train_data, "eval": eval_data}
    given = {name: rows for name, rows in given.items() if rows is not None}
    data = tree.get("data")
    data = data if isinstance(data, dict) else {}
    if twice := [name for name in given if data.get(name)]:
        raise UserError(
            f"{name}_data and data.{name} of the config both name rows; keep one." for name in twice
        )
    cache = data.get("cache") or DataConfig().cache
    files = {name: str(store_rows(rows, f"{name}_data", cache)) for name, rows in given.items()}
    return merge(tree, {"data": files}) if files else tree


def keep_quiet(run: RunDir) -> None:
    """Show nothing of the run: Python's caller has the Result."""


def train_here(config: Config, nproc: int | None, show: Show, hooks: Hooks = Hooks()) -> RunDir:  # noqa: B008
    """Train on the ranks that the settings ask for, and return the run: they are started here, or this
    process is one of those that torchrun or srun started.

    nproc: as `ranks_of` takes it. show: must be picklable. Raises as `launch.run`, and if ranks are spawned
    that can't import the hooks.
    """
    from meshtune import launch

    check_name(config.model.name, config.model.revision)
    check_there(config.data)
    # Before ranks are forked, which a thread that draws would disturb: they share what is imported.
    # The callers printed a line, which is enough without a terminal.
    with working(PYTORCH, lambda _: None) if on_first_rank() else nullcontext():
        from meshtune.api import build, choose  # noqa: F401
        from meshtune.train import loop  # noqa: F401
    if not launch.joined():  # before anything is loaded; of joined ranks the main one decides
        config, finished = settled(config)
        if finished:
            return shown(RunDir(config.output), show)
    ranks, device = ranks_of(config, nproc)
    if device == "cuda":  # before `choose` asks for the GPUs, which may initialise CUDA
        set_allocator()
    if ranks > 1 and launch.spawns(device) and not launch.place_of(os.environ):
        check_spawned(hooks)
    choice = None
    if not launch.joined():
        with working("reading the rows and choosing the layout", on_screen):
            choice = choose.choose(config, ranks)
    try:
        return launch.run(train_rank, config, choice, show, hooks, ranks=ranks, device=device)
    except RankFailed as failed:
        if not any(RunDir(config.output).checkpoints.glob("step-*")):
            raise
        raise RankFailed(f"{failed}\nA checkpoint is saved; the same command resumes from it.") from failed


def set_allocator() -> None:
    """Have this process and the ranks that it starts allocate on GPUs in expandable segments, unless the user
    has set the allocator; the main rank prints what in such a setting is in conflict.
    """
    allocator.expand_segments(os.environ)
    for sentence in allocator.conflicts(os.environ) if on_first_rank() else ():
        notice(f"meshtune: {sentence}")


def ranks_of(config: Config, nproc: int | None) -> tuple[int, str]:
    """(Number of ranks, "cpu" or "cuda").

    The number is that of torchrun or srun if one of them started this process, else the layout's; if the
    layout leaves it open, nproc, else the number of GPUs, else 1. Of several machines it is the number of
    all, and nproc that of each. nproc: --nproc; None: not given. Raises UserError if nproc is given under
    torchrun or srun, or differs from the layout's number, or if the layout needs more GPUs than there are or
    leaves some without a rank on several machines.
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
    if machine := launch.machine_of(os.environ):
        return machine.world(world, nproc, gpus, config.layout), device
    if world is None:
        return nproc or gpus or 1, device
    if nproc and nproc != world:
        raise UserError(
            f"--nproc {nproc}, but layout {config.layout} is for {counted(world, 'rank')}; leave --nproc "
            "out, or change the layout."
        )
    if gpus and world > gpus:
        raise UserError(
            f"Layout {config.layout} needs {world} GPUs, but torch sees {gpus}; change the layout, start it "
            "on several machines by torchrun or srun, or use train.device=cpu."
        )
    return world, device


def train_rank(rank: "Rank", config: Config, choice: "Choice | None", show: Show, hooks: Hooks) -> RunDir:
    """Train on one rank, and return the run; at the end, also after an error, the main rank draws its report
    and shows it.

    choice: the layout and attention; None: the ranks choose them together.
    """
    from meshtune.api import build
    from meshtune.attention import flash

    if choice is None:
        config, finished = settled_together(config)
        if finished:
            return shown(RunDir(config.output), show, main=rank.main)
    try:
        with memory_explained(), flash.built_in():
            run = build.build(config, choice, claimed=lambda folder: rank.keep_log(folder.logs), hooks=hooks)
            train_watched(rank, run, show)
        return run.folder
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
            draw(run.folder)
            show(run.folder)
    world.broadcast_object(None)  # no rank returns the run before rank 0 has written its last row


def shown(run: RunDir, show: Show, *, main: bool = True) -> RunDir:
    """Show the run on the main rank; return it."""
    if main:
        show(run)
    return run


def draw(run: RunDir) -> None:
    """Write report.html; where that is not possible, print why on stderr: the model is on the disk."""
    with working("drawing the report", on_screen):
        from meshtune.report.run import report

        reason = report.try_report(run)
    if reason:
        notice(f"meshtune: {reason}")


def settled(config: Config) -> tuple[Config, bool]:
    """(The settings with the folder that the run writes, as `output`, and the day that its chat template
    writes; True if only its report was missing, which is drawn now).

    A line on stderr says what becomes of a run that is there. Raises UserError as output.decide.
    """
    from rich.console import Console
    from rich.text import Text

    from meshtune.api import output
    from meshtune.train.folder import Claim, put_back

    tell = partial(Console(stderr=True).print, soft_wrap=True)
    named = RunDir(expanded(config.output).absolute())
    if named.replaced.exists() and put_back(named):
        tell(Text(f"{named.path} is the earlier run again: the one that was to replace it did no step."))
    decision = output.decide(config)
    if decision.line:
        tell(Text(decision.line, style="bold"))
        if decision.start != "report":
            on_screen("loading the model and the data …")
    if decision.start == "report":
        with Claim(decision.run):  # clears what the killed process left
            draw(decision.run)
    config = output.with_template_date(config, decision)
    return config.model_copy(update={"output": str(decision.run.path)}), decision.start == "report"


def settled_together(config: Config) -> tuple[Config, bool]:
    """Do `settled` on the main rank, for all ranks; every rank calls it. Raises as `settled`, and if a rank
    was given other settings or rows than the main one, or does not see its folder.
    """
    import torch.distributed as dist

    from meshtune.api import output
    from meshtune.api.choose import from_first_rank

    if not dist.is_initialized():
        return settled(config)
    trees: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(trees, config.model_dump(mode="json"))
    for rank, tree in enumerate(trees):
        if differing := list(output.differences(tree, trees[0])):
            raise UserError([f"Rank {rank} was started with other settings than rank 0:", *differing])
    config, finished = from_first_rank(lambda: settled(config))
    if not finished:
        output.check_seen(Path(config.output))
    return config, finished
