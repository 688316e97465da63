"""Sweep: many experiments from one file, run, predicted or simulated; the results in one database."""

import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from meshtune.addresses import written_out
from meshtune.api.plan import Log, silent, workloads
from meshtune.api.settings import plain
from meshtune.config import Config, load
from meshtune.errors import Table, UserError, did_you_mean, expanded, nearest
from meshtune.notebook import Notebook
from meshtune.plan.cluster import Cluster, cluster_for, cluster_here, gpus_here
from meshtune.plan.search import search
from meshtune.plan.workload import Uncounted, Workload
from meshtune.report.experiments.database import DATABASE
from meshtune.rundir import RunDir, write_settings
from meshtune.study import ray, slurm
from meshtune.study.children import DRYRUN, Task, kill_marked
from meshtune.study.judge import Here, Judged, judge
from meshtune.study.outcomes import train_outcome
from meshtune.study.queue import Queue, collect, follow, read_task, run_in_job
from meshtune.study.runner import Devices, Progress, machine_facts, run_all
from meshtune.study.store import DOES_NOT_FIT, DONE, FINISHED, REFUSED, RUNNING, WAITING, Outcome, Store
from meshtune.study.sweep_file import Experiment, SweepFile, read_sweep
from meshtune.units import counted, on_screen, working

QUEUES: Mapping[str, Queue] = Table("--to", {"slurm": slurm, "ray": ray})
ONE_RUN = ("sky", "kubeflow", "dstack")  # engines that `meshtune submit` sends single runs to
PLANNER = "planner"
TIERS = (PLANNER, DRYRUN)  # values of --simulate
AGAIN = (*FINISHED, RUNNING)  # statuses that --retry takes
BEST = 5  # experiments that a sweep's end names
RANKED = {  # run or tier -> figures by which experiments are ranked, of the database
    "bench": ("tokens_per_second_per_gpu DESC",),
    "train": ("eval_loss", "loss"),
    PLANNER: ("predicted_tokens_per_second_per_gpu DESC", "predicted_peak_bytes"),
    DRYRUN: ("simulated_step_seconds", "simulated_peak_bytes"),
}


@dataclass(frozen=True, repr=False)
class Swept(Notebook):
    """A sweep that has ended, or was stopped."""

    database: Path  # SQLite: the view `results` has a row an experiment
    counts: Mapping[str, int]  # experiments by status
    simulated: str | None  # planner or dryrun: nothing was measured; None: measured
    axes: tuple[str, ...]  # dotted settings that experiments change
    reasons: Mapping[str, str] = field(default_factory=dict)  # status -> the most frequent reason
    best: Sequence[Mapping[str, Any]] = ()  # rows of `results`, the best first by the figure `ranked_by`
    ranked_by: str = ""
    on_processor: bool = False  # measured without a GPU: speeds are a rank's

    @property
    def summary_line(self) -> str:
        counts = ", ".join(f"{number:,} {status}" for status, number in self.counts.items())
        return f"{self.database}: {counts}{f', simulated ({self.simulated})' if self.simulated else ''}"

    @property
    def total(self) -> int:
        """Number of experiments."""
        return sum(self.counts.values())

    def as_dict(self) -> dict[str, Any]:
        """The document of `sweep --json`."""
        return asdict(self) | {"database": str(self.database), "experiments": self.total}


def sweep(
    file: Mapping[str, Any] | str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    out: str | os.PathLike[str] | None = None,
    everything: bool = False,
    simulate: str | bool | None = None,
    jobs: int | None = None,
    to: str | None = None,
    retry: Sequence[str] = (),
    log: Log | None = None,
    count: Log | None = None,
) -> Swept:
    """Run the experiments of a sweep file that have no result yet, each in a process of its own.

    file: a YAML file, or the mapping that it holds (docs/sweep.md). overrides: section.key=value each, laid
    over its base. out: folder of the results; None: runs/<name of the file>. everything: run those too that
    the planner says do not fit. simulate: "planner" (or True) or "dryrun" instead of running them. jobs:
    experiments at once; None: one on a processor, all that fit on GPUs. to: "slurm" or "ray": submit them to
    that cluster's queue, and collect. retry: statuses whose experiments are run again. log: as of `plan`.
    count: called with the number of those predicted; None: a terminal shows it, `log` gets one line. Running
    out of memory, a crash, a refusal and a time-out are results. Raises UserError for a bad file, and for a
    folder that another sweep writes; Interrupted at Ctrl-C.
    """
    simulate, log = PLANNER if simulate is True else simulate or None, log or on_screen
    check_options(simulate, retry, to=to, everything=everything, jobs=jobs)
    source = plain(file) if isinstance(file, Mapping) else expanded(str(file))
    plan = read_sweep(source, overrides)
    queue = QUEUES[to] if to else None
    if queue:
        queue.options_of(plan)
        unused = [f"cluster.{name}" for name in plan.submission if name != to]
        if unused := unused + ["slurm"] * bool(plan.slurm and to != "slurm"):
            log(f"Not used by a sweep on {queue.TITLE}: {', '.join(unused)}.")
        text = yaml.safe_dump(plain([dict(plan.submission), dict(plan.slurm)]))
        if problems := [*written_out(text, "sweep.yaml")]:
            raise UserError(problems)
    if fields := plan.replaced_fields:
        log(f"The axis layout replaces the base's layout ({fields}): write its fields in each layout.")
    folder = expanded(str(out)) if out else Path("runs") / plan.name
    here = place_of(simulate, elsewhere=bool(to))
    with Store(folder / DATABASE, log) as store:
        prepared = prepare(store, plan, folder, here, simulate, elsewhere=bool(to), log=log)
        if queue:  # first: what has a result is not submitted again, and a retry gets no result of before
            collect(store, folder)
        again = store.rows(*retry, keys=prepared) if retry else []
        if everything:  # but for those that were run, and had no room: that is their result
            again += [row for row in store.rows(DOES_NOT_FIT, keys=prepared) if row.seconds is None]
        store.wait_again(row.number for row in again)
        in_jobs = [row for row in store.rows(RUNNING) if row.job]
        check_jobs([str(row.job) for row in in_jobs], to, folder)
        tasks = pending(store, plan, prepared, here, simulate, everything=everything, log=log, count=count)
        done = len(prepared) - len(tasks) - len(in_jobs)
        gpus = () if simulate or queue else gpus_for(tasks)
        devices = Devices(gpus, jobs or len(gpus) or 1)
        processor = simulate is None and store.description()["gpus"] == 0
        progress = Progress(store, len(prepared), done, devices, log, per="rank" if processor else "GPU")
        if queue:
            whole = folder.resolve()
            queue.recover(store, whole, log)
            if tasks:
                ids = queue.submit(store, tasks, whole, plan, jobs or 0)
                log(f"Submitted {counted(len(tasks), 'experiment')} to {queue.TITLE}: {', '.join(ids)}")
            follow(store, queue, whole, progress, log)
        elif tasks:
            sweep_id = store.description()["id"]
            run_all(store, tasks, folder, devices, sweep=sweep_id, progress=progress, log=log)
        return swept(store, folder, plan, prepared, simulate)


def check_jobs(jobs: Sequence[str], to: str | None, folder: Path) -> None:
    """Raise UserError if experiments are in another queue than `to`. jobs: as `Row.job`."""
    for name, queue in QUEUES.items():
        there = [job for job in jobs if job.startswith(ray.NAME) == (name == "ray")]
        if there and name != to:
            raise UserError(
                f"{queue.TITLE}'s jobs have {counted(len(there), 'experiment')} of {folder}; collect them "
                f"with --to {name}, or cancel the jobs and add --retry running."
            )


def check_options(
    simulate: str | None,
    retry: Sequence[str],
    *,
    to: str | None,
    everything: bool = False,
    jobs: int | None = None,
) -> None:
    """Raise UserError for values that the options can't have, and for options that would have no effect."""
    problems = []
    if simulate is not None and simulate not in TIERS:
        near = did_you_mean(nearest(simulate, TIERS))
        problems.append(f"--simulate {simulate}: write {' or '.join(TIERS)}{near}")
    for word in retry:
        if word not in AGAIN:
            near = did_you_mean(nearest(word, AGAIN))
            problems.append(f"--retry {word}: write one of {', '.join(AGAIN)}{near}")
    if to and simulate:
        problems.append(f"--to {to} runs experiments on a cluster, --simulate runs none; leave one out.")
    if to in ONE_RUN:
        problems.append(
            f"--to {to}: a sweep needs a queue on machines that share a folder, {' or '.join(QUEUES)}; "
            f"`meshtune submit --to {to}` sends single runs."
        )
    if simulate == PLANNER:
        unused = [option for option, given in (("--all", everything), ("--jobs", jobs is not None)) if given]
        problems += [
            f"{option} is for experiments that run, and the planner runs none; leave it out, or take "
            "--simulate=dryrun."
            for option in unused
        ]
    if problems:
        raise UserError(problems)


def place_of(simulate: str | None, *, elsewhere: bool) -> Here:
    """The devices that experiments are planned for: those of the settings, or of this machine.

    elsewhere: they run in a cluster's queue.
    """
    seen = [] if simulate else gpus_here()

    def of_settings(config: Config, world: int | None) -> Cluster:
        cluster = cluster_for(config)
        asked = config.cluster_config.gpus
        if world is not None and asked not in (None, world):
            raise UserError(
                f"The layout has {counted(world, 'rank')}, but cluster.gpus is {asked}; change one of them."
            )
        return cluster if world is None else cluster.of_size(world)

    def of_machine(config: Config, world: int | None) -> Cluster:
        gpus = [] if config.train.device == "cpu" else seen
        if gpus and world and world > len(gpus):
            raise UserError(
                f"The layout has {counted(world, 'rank')}, but this machine has {counted(len(gpus), 'GPU')}; "
                "run it on several machines by --to slurm, or leave it out by a condition in `where`."
            )
        return cluster_here(config, world or len(gpus) or 1, gpus)

    def cluster(config: Config, world: int | None) -> Cluster:
        settled = simulate or (elsewhere and config.train.device != "cpu")
        return (of_settings if settled else of_machine)(config, world)

    return Here(cluster, workload_of)


def workload_of(config: Config) -> Workload:
    with workloads(config) as (workload, _):
        return workload


def best_layouts(here: Here, tree: Mapping[str, Any], number: int) -> list[str]:
    """The planner's best layouts; [] if none fits, or `judge` would refuse the config. Raises Uncounted."""
    try:
        config = load(defaults=tree)
        world, given = config.partial_layout.world, config.partial_layout.given
        plan = search(here.workload(config), here.cluster(config, world), fixed=given)
    except Uncounted:  # `judge` would take data parallelism
        raise
    except UserError:
        return []
    return [str(choice.layout) for choice in plan.best(number)]


def prepare(
    store: Store,
    plan: SweepFile,
    folder: Path,
    here: Here,
    simulate: str | None,
    *,
    elsewhere: bool,
    log: Log,
) -> dict[str, Experiment]:
    """Make the database hold the experiments of the file, and settle what a killed sweep has left; returns
    the experiments by key.
    """
    before = store.description()
    if "id" in before and before["simulated"] != simulate:
        kinds = {None: "measured", PLANNER: "predicted", DRYRUN: "dry-run"}
        raise UserError(
            f"{folder} holds {kinds[before['simulated']]} results, and these would be {kinds[simulate]}; "
            "name another folder with --out."
        )
    experiments = {one.key: one for one in plan.experiments(partial(best_layouts, here))}
    sweep_id = before.get("id") or uuid.uuid4().hex
    if killed := kill_marked(sweep_id):
        log(f"Ended what a killed sweep had left: {killed} processes.")
    settle(store, folder)
    new, unlisted = store.add([*experiments.values()], plan.axes)
    store.describe(facts_of(plan, simulate, sweep_id, before, elsewhere=elsewhere))
    text = yaml.safe_dump(plain(plan.document), sort_keys=False, allow_unicode=True)
    write_settings(folder / "sweep.yaml", text)
    counts = store.counts(experiments)
    done = sum(number for status, number in counts.items() if status in FINISHED)
    log(f"{counted(len(experiments), 'experiment')} ({new:,} new, {done:,} with a result) in {store.file}")
    if unlisted:
        log(f"{counted(unlisted, 'result')} that the file doesn't list any more stay in the database.")
    return experiments


def facts_of(
    plan: SweepFile, simulate: str | None, sweep_id: str, before: Mapping[str, Any], *, elsewhere: bool
) -> dict[str, Any]:
    """Rows of the table `sweep`; those of the machine are of the first start. elsewhere: nodes of a
    cluster run the experiments.
    """
    facts: dict[str, Any] = {
        "id": sweep_id, "name": plan.name, "file": plain(plan.document), "axes": plan.axes, "run": plan.run,
        "simulated": simulate,
    }  # fmt: skip
    if "started" not in before:
        on_processor = (plan.base.get("train") or {}).get("device") == "cpu"
        facts |= machine_facts(simulate, on_processor=on_processor, elsewhere=elsewhere)
    return facts


def settle(store: Store, folder: Path) -> None:
    """Set what a killed sweep was running to waiting, but for a training run that had finished; experiments
    in a cluster's queue are left to it.
    """
    for row in store.rows(RUNNING):
        if row.job:
            continue
        outcome = None
        with suppress(UserError):  # its rows are damaged: it is for the experiment to report it
            outcome = finished_outcome(RunDir(folder / "runs" / str(row.number)), str(row.started))
        if outcome:
            store.finish({row.number: outcome})
        else:
            store.wait_again([row.number])


def finished_outcome(run: RunDir, since: str) -> Outcome | None:
    """The outcome of a training run that began at `since` or later and has finished; None of others: one that
    began before is an earlier attempt's.
    """
    if not run.metrics_file.exists():
        return None
    from meshtune.report.run.summary import facts_of, summarise

    rows = run.rows()
    try:
        began = datetime.fromisoformat(str(facts_of(run, rows).get("started")))
        if began < datetime.fromisoformat(since):
            return None
    except (ValueError, TypeError):  # no date, or one without a zone: it is not known to be this attempt's
        return None
    summary = summarise(run, rows)
    if summary.status != "finished":
        return None
    return train_outcome(summary.as_dict(), run, summary.seconds or 0.0)


def pending(
    store: Store,
    plan: SweepFile,
    experiments: Mapping[str, Experiment],
    here: Here,
    simulate: str | None,
    *,
    everything: bool,
    log: Log,
    count: Log | None,
) -> dict[int, Task]:
    """Judge the waiting experiments; write those that can't run as results, and, for the tier planner, the
    predictions of the others; return the tasks of those that are to run, by number.
    """
    waiting = store.rows(WAITING, keys=experiments)
    predicting = f"predicting {counted(len(waiting), 'experiment')}"
    on_terminal = count is None and waiting and log is on_screen
    if waiting and count is None and not on_terminal:
        log(f"{predicting} …")
    with working(predicting, log) if on_terminal else nullcontext(count or silent) as count:
        verdicts = judge([experiments[row.key] for row in waiting], plan.run, here, count)
    outcomes, known, tasks = {}, {}, {}
    for row, verdict in zip(waiting, verdicts, strict=True):
        known[row.number] = verdict.figures
        if verdict.status == WAITING and simulate == PLANNER:
            outcomes[row.number] = of_planner(verdict)
        elif verdict.status == WAITING or (everything and verdict.status == DOES_NOT_FIT and verdict.choice):
            run = DRYRUN if simulate else plan.run
            tree = experiments[row.key].tree
            tasks[row.number] = Task(row.number, run, tree, verdict.layout, plan.steps, plan.limit)
        else:
            document = verdict.choice and verdict.choice.as_dict()
            outcomes[row.number] = Outcome(verdict.status, verdict.reason, document=document)
    store.judged(known)
    store.finish(outcomes)
    skipped = [outcome.status for outcome in outcomes.values() if outcome.status != DONE]
    for status in dict.fromkeys(skipped):
        log(f"{counted(skipped.count(status), 'experiment')} not run: {status}")
    return tasks


def of_planner(verdict: Judged) -> Outcome:
    """The result of an experiment in the tier planner."""
    if verdict.choice is None:
        reason = "The planner can't count this model; use --simulate=dryrun, or run it."
        return Outcome(REFUSED, reason)
    return Outcome(DONE, document=verdict.choice.as_dict())


def run_task(file: str, folder: Path | None, number: int) -> None:
    """Run one experiment inside a task of a queue, and write its result. file: sweep.yaml of the results'
    folder.
    """
    at = (folder or Path(file).parent).absolute()
    run_in_job(read_task(at, number), at)


def gpus_for(tasks: Mapping[int, Task]) -> tuple[str, ...]:
    """Ids of this machine's GPUs for CUDA_VISIBLE_DEVICES; none where all tasks are for the processor."""
    if all(task.on_processor for task in tasks.values()):
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = len(gpus_here())
    ids = visible.split(",") if visible is not None else [str(index) for index in range(number)]
    return tuple(word.strip() for word in ids[:number])


def swept(
    store: Store, folder: Path, plan: SweepFile, keys: Mapping[str, Experiment], simulate: str | None
) -> Swept:
    """The state of the sweep, with its best experiments by the first of RANKED that there are any of."""
    best: Sequence[Mapping[str, Any]] = ()
    ranked = ""
    for order in RANKED[plan.run if simulate is None else simulate]:
        if best := store.best(order, BEST):
            ranked = order.split()[0]
            break
    processor = simulate is None and store.description()["gpus"] == 0
    return Swept(
        store.file, store.counts(keys), simulate, plan.axes, store.reasons(), best, ranked, processor
    )
