"""Bench: timed steps of layouts on this machine, next to the planner's prediction and the dry run."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.api.plan import Log, silent
from meshtune.api.settings import Settings, config_of
from meshtune.api.train import ranks_of, set_allocator
from meshtune.config import Config
from meshtune.errors import NothingFits, UserError
from meshtune.layout import AUTO, Layout
from meshtune.plan.changes import empty_plan_error
from meshtune.plan.cluster import Cluster, cluster_here, gpus_here, unused_here
from meshtune.plan.search import explained, search
from meshtune.rundir import RunDir, write_settings
from meshtune.study.beside import Tried, largest
from meshtune.units import counted, duration, human, on_screen, working

if TYPE_CHECKING:
    from meshtune.api.dryrun import Subject
    from meshtune.dryrun.world import Job
    from meshtune.study.bench import Trial

STEPS = 10  # that are timed
LIMIT = 1800.0  # seconds for one layout
PREFIX = "auto:"  # of --layouts: the planner's best ones

Document = dict[str, Any]  # of one layout


def bench(
    config: Settings,
    overrides: Sequence[str] = (),
    *,
    layouts: Sequence[str] = (),
    steps: int = STEPS,
    limit: float = LIMIT,
    profile: Path | None = None,
    out: Path | None = None,
    log: Log = silent,
) -> list[Document]:
    """Time training steps of each layout on this machine's devices, next to what is predicted and simulated.

    config: a Config, a mapping of its sections, or a YAML file; without data.train sequences are random
    tokens. overrides: section.key=value each. layouts: ["auto:N"] for the planner's N best; (): the config's,
    or the planner's best. steps: to be timed, after those that warm up. limit: seconds for one layout.
    profile: folder for traces of each layout, in one of its name. out: folder that gets a run folder of each
    layout, with its settings and rows, for `calibrate`; it must not hold one of that name. Each layout runs
    in processes of its own: running out of memory, a crash and a time-out are results, with their reason.
    Raises UserError for bad settings and layouts, before anything runs.
    """
    from meshtune.study.beside import why_slow

    with bench_of(config_of(config, overrides), layouts, log) as here:
        done = []
        check_new([out / str(layout) for layout in here.layouts] if out else [])
        for number, layout in enumerate(here.layouts, 1):
            log(f"bench {number} of {len(here.layouts)}: {layout} …")
            done.append(here.predictions(layout, steps, log))
            rank = done[-1]["simulated"]["rank"]
            done[-1] |= here.run(layout, steps, limit, profile and profile / str(layout), rank)
            done[-1]["causes"] = why_slow(done[-1]) if done[-1]["measured"] else []
            if out and done[-1]["measured"]:
                record(RunDir(out / str(layout)), here.subject.config_of(layout), done[-1])
        return done


def find_micro_batch(
    config: Settings,
    overrides: Sequence[str] = (),
    *,
    layouts: Sequence[str] = (),
    limit: float = LIMIT,
    log: Log = silent,
) -> list[Document]:
    """Find the largest micro-batch of each layout that runs on this machine's devices, next to the planner's.

    Sizes are doubled from the layout's own until one does not run, then bisected; each runs in processes of
    its own. One that fills more than cluster.memory_budget_gib counts as too large, too. The arguments are
    those of `bench`. Raises as that, and for processors without a memory budget.
    """
    settings = config_of(config, overrides)
    with bench_of(settings, layouts, log) as here:
        budget = here.cluster.memory_budget
        if here.device != "cuda" and budget is None:
            raise UserError(
                "--find-micro-batch grows until memory runs out, which on a processor takes the machine's; "
                "set cluster.memory_budget_gib to the most that a rank may fill."
            )

        def tried(layout: Layout, size: int) -> Tried:
            log(f"micro-batches of {size} …")
            document = here.run(replace(layout, micro_batch_size=size), 1, limit)
            if document["failed"]:
                return Tried(size, False, None, document["failed"])
            peak = document["measured"]["peak_memory_bytes"]
            over = budget is not None and peak > budget
            return Tried(size, not over, peak, f"It fills more than {human(budget or 0)}." if over else None)

        workload = here.subject.workload
        if workload and settings.data.train:
            from meshtune.api.resolve import inputs_of

            train = inputs_of(settings).prepared.train
            workload = workload.of_labels(train.label_share, train.width)

        def planned(layout: Layout, size: int) -> Tried:
            assert workload is not None
            larger = replace(layout, micro_batch_size=size)
            cluster = here.cluster.of_size(layout.world)
            choice = explained(workload.of_batch(larger.global_batch_size), cluster, larger)
            return Tried(size, choice.fits, round(float(choice.memory.peak)))

        done = []
        for layout in here.layouts:
            found, sizes = largest(partial(tried, layout), layout.micro_batch_size)
            plan = largest(partial(planned, layout))[0] if workload else None
            done.append(
                {"layout": str(layout), "micro_batch": found, "planned": plan, "tried": [*map(asdict, sizes)]}
            )
        return done


@dataclass(frozen=True)
class Bench:
    """Layouts to bench on this machine."""

    subject: "Subject"
    cluster: Cluster
    device: str  # torch's kind
    layouts: Sequence[Layout]

    def run(
        self, layout: Layout, steps: int, limit: float, profile: Path | None = None,
        compared: int | None = None,
    ) -> Document:  # fmt: skip
        """Run a layout in processes of its own (`run`), with the global batch that it makes.

        compared: rank whose memory is given; None: the fullest.
        """
        from meshtune.api.dryrun import documents_of
        from meshtune.api.resolve import inputs_of, model_spec, optimizer_spec, run_settings
        from meshtune.study.bench import Trial

        config = self.subject.config_of(layout)
        compiled = self.subject.compiles(layout, self.device, simulated=False)
        spec = model_spec(config, self.subject.attention, self.device, compile=compiled)
        spec = replace(spec, memory=self.cluster.memory * (self.device == "cuda"))
        if config.model.init == "random" or not self.subject.has_weights:
            spec = replace(spec, source=self.subject.source, overrides={}, init="random")
        trial = Trial(
            layout=layout,
            spec=spec,
            optimizer=optimizer_spec(config),
            device=self.device,
            seq_len=config.data.seq_len,
            max_grad_norm=config.train.max_grad_norm,
            inputs=partial(inputs_of, config) if config.data.train else None,
            documents=documents_of(config, ()),
            settings=run_settings(config),
            steps=steps,
            profile=profile,
            compared=compared,
        )
        return run(trial, self.device, limit)

    def predictions(self, layout: Layout, steps: int, log: Log) -> Document:
        """The document of a layout before it has run: what is predicted and what the dry run simulates.

        steps: to be timed.
        """
        from meshtune.study.beside import predicted, simulated

        cluster = self.cluster.of_size(layout.world)
        simulation = self.subject.simulate(self.job(layout, steps), cluster, log)
        both = {"predicted": predicted(simulation), "simulated": simulated(simulation)}
        return {"layout": str(layout), "world": layout.world, **both}

    def job(self, layout: Layout, steps: int) -> "Job":
        """The steps to simulate: with data, of the last watched step's batch, whose memory is compared.

        steps: to be timed, whose tokens speeds count.
        """
        from meshtune.api.dryrun import documents_of
        from meshtune.api.resolve import inputs_of
        from meshtune.meter.phases import WATCHED_STEPS
        from meshtune.study.bench import WARM_UP

        config = self.subject.config
        if not config.data.train:
            return self.subject.job(layout, documents_of(config, ()))
        timed = range(WARM_UP + 1, WARM_UP + 1 + steps)
        return self.subject.job_of_data(layout, inputs_of(config), number=WATCHED_STEPS, timed=timed)


def check_new(folders: Sequence[Path]) -> None:
    """Raise UserError for folders that exist."""
    if taken := [str(folder) for folder in folders if folder.exists()]:
        raise UserError(
            f"{', '.join(taken)}: such a folder exists; name another one with --out, or remove it."
        )


def record(folder: RunDir, config: Config, document: Document) -> None:
    """Write a measured layout as a run folder: its settings, and its rows as `train` writes them."""
    folder.create()
    write_settings(folder.config_file, config.to_yaml())
    measured, predicted = document["measured"], document["predicted"] or {}
    names = ("step_seconds", "time", "parts", "memory")
    run = measured["run_row"] | {
        "predicted": {name: predicted[name] for name in names if predicted.get(name)}
    }
    lists = (measured[f"{kind}_rows"] for kind in ("memory", "time", "experts"))
    for row in (run, *chain.from_iterable(lists), measured["end_row"]):
        folder.append(row)


@contextmanager
def bench_of(settings: Config, layouts: Sequence[str], log: Log) -> Iterator[Bench]:
    """Read what the settings name, and check every layout; the arguments and errors are those of `bench`."""
    from meshtune import launch
    from meshtune.api.dryrun import subject_of

    if launch.joined():
        raise UserError(
            "bench starts its ranks itself, on one machine; on several, or under torchrun or srun, run "
            "`meshtune train`, whose metrics.jsonl has each step's time by part."
        )
    auto = settings.model_copy(update={"layout": AUTO})
    ranks, device = ranks_of(auto, settings.partial_layout.world or settings.cluster_config.gpus)
    gpus = gpus_here() if device == "cuda" else []
    notes = unused_here(settings, ranks, gpus)
    settings, cluster = on_this_machine(settings, ranks, gpus)
    with subject_of(settings, log, device) as subject:
        for note in (*notes, *subject.notes):
            log(note)
        chosen = [*layouts_of(subject, layouts, cluster)]
        check(subject, chosen, settings, device)
        if device == "cuda":
            set_allocator()
        yield Bench(subject, cluster, device, chosen)


def on_this_machine(config: Config, ranks: int, gpus: Sequence[tuple[str, float]]) -> tuple[Config, Cluster]:
    """(The settings for this machine's devices, its devices as a cluster of `ranks` of them).

    gpus: as `cluster_here` takes them.
    """
    cluster = cluster_here(config, ranks, gpus)
    if cluster.gpu.processor:
        cpu = config.cluster_config.model_copy(update={"gpu": cluster.gpu.name, "gpus": ranks})
        config = config.model_copy(update={"cluster": cpu})
    return config, cluster


def layouts_of(subject: "Subject", words: Sequence[str], cluster: Cluster) -> Iterator[Layout]:
    """Yield the layouts that `words` name: each a layout, or auto:N for the planner's N best."""
    for word in words or [subject.config.layout if subject.config.partial_layout.given else f"{PREFIX}1"]:
        text = str(word)
        if not text.startswith(PREFIX):
            yield subject.layout(text)
            continue
        number = text.removeprefix(PREFIX)
        if not number.isdecimal() or not int(number):
            raise UserError(f"--layouts {text}: write auto:3 for the planner's three best.")
        if subject.workload is None:
            raise UserError(f"--layouts {text}: the planner can't count this model; name layouts.")
        found = search(subject.workload, cluster, fixed=subject.config.partial_layout.given)
        if not len(found):
            raise empty_plan_error(found, subject.lighter)
        yield from (choice.layout for choice in found.best(int(number)))


def check(subject: "Subject", layouts: Sequence[Layout], config: Config, device: str) -> None:
    """Raise UserError, with every reason, for layouts that can't run here."""
    problems = []
    for layout in layouts:
        problems += [f"{layout}: {reason}" for reason in subject.refusals(layout)]
        try:
            ranks_of(config.model_copy(update={"layout": str(layout)}), None)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)


def run(trial: "Trial", device: str, limit: float) -> Document:
    """Run a layout in processes of its own: {"measured": of `Measured.as_dict`, "failed": None}, or None and
    the reason.
    """
    ours, theirs = Pipe(duplex=False)
    context: Any = get_context("spawn" if device == "cuda" else "fork")
    child = context.Process(target=run_apart, args=(theirs, trial, device))
    child.start()
    theirs.close()
    try:
        with working(f"loading the model and timing {counted(trial.steps, 'step')}", on_screen):
            ended = ours.poll(limit)  # the live line is a thread: it begins after the fork
        if not ended:
            return {"measured": None, "failed": f"It did not end within {duration(limit)}."}
        measured, failed = ours.recv()
        return {"measured": measured, "failed": failed}
    except EOFError:
        child.join()
        killed = "was killed, as the system does where memory runs out" if child.exitcode == -9 else "ended"
        return {"measured": None, "failed": f"Its process {killed} (exit code {child.exitcode})."}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its ranks too
        child.join()


def run_apart(pipe: Connection, trial: "Trial", device: str) -> None:
    """Main function of a layout's process: start its ranks and send (what was measured, why it failed)."""
    from meshtune import launch
    from meshtune.study.bench import bench_rank

    os.setsid()
    try:
        found = launch.run(bench_rank, trial, ranks=trial.layout.world, device=device)
        pipe.send((found.as_dict(), None))
    except NothingFits as error:
        pipe.send((None, f"Out of memory. {' '.join(error.problems)}"))
    except Exception as error:
        pipe.send((None, str(error) or type(error).__name__))
