"""Run a sweep's experiments in the queue of a cluster, and collect their results.

    tasks/<number>.json    a task, which a job reads: `meshtune sweep … --task NUMBER`
    results/<number>.json  how an experiment ended, written atomically by its task

slurm.py and ray.py are the queues. All nodes see the folder. Only the sweep writes the database.
"""

import json
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from meshtune.errors import Interrupted, UserError
from meshtune.launch.place import nodes_of_job
from meshtune.rundir import write_settings, write_text_atomically
from meshtune.study.children import MARK, TO_STOP, Child, Task
from meshtune.study.runner import POLL, Log, Progress, Signals, stop
from meshtune.study.store import REFUSED, RUNNING, WAITING, Outcome, Row, Store
from meshtune.study.sweep_file import SweepFile
from meshtune.units import counted, duration

PATIENCE = 600.0  # seconds of looks that all fail (the controller restarts) after which the sweep ends
SAVING = int(TO_STOP["train"]) + 10  # seconds in which tasks of Ray have ended after a stop
MISSED = 3  # looks without the task and without its result, after which it has ended
COLLECTS = "the same command collects their results"


class Queue(Protocol):
    """A module for one kind of cluster. Functions raise UserError where that refuses or doesn't answer."""

    TITLE: str  # of the cluster
    LOOK: float  # seconds between looks at the queue and the results

    def options_of(self, plan: SweepFile) -> dict[str, Any]:
        """Options of the jobs. Raises UserError for those that jobs don't have or the sweep sets itself."""
        ...

    def recover(self, store: Store, folder: Path, log: Log) -> None:
        """Settle the jobs of an earlier call that was killed while it submitted them."""
        ...

    def submit(
        self, store: Store, tasks: Mapping[int, Task], folder: Path, plan: SweepFile, jobs: int
    ) -> list[str]:
        """Submit tasks, and write their jobs down; returns these. jobs: tasks at once, 0: all."""
        ...

    def alive(self, tasks: Collection[str]) -> set[str]:
        """Those of the tasks, by `Row.job`, that wait or run."""
        ...

    def ended_without(self, row: Row, folder: Path) -> Outcome | None:
        """The outcome of a task that ended without a result; None: it is to be tried again."""
        ...

    def end_of(self, jobs: Collection[str]) -> str:
        """Commands that end jobs."""
        ...


def task_file(folder: Path, number: int) -> Path:
    return folder / "tasks" / f"{number}.json"


def listing_of(folder: Path, job: str) -> Path:
    """File with the numbers of the experiments of a job of Ray, which ends once the file is removed."""
    return folder / "ray" / f"{job}.txt"


def write_task(task: Task, folder: Path) -> None:
    """Write a task for the job that runs it."""
    write_settings(task_file(folder, task.number), task.as_json())


def read_task(folder: Path, number: int) -> Task:
    """The task of an experiment as it was submitted. Raises UserError if there is none."""
    file = task_file(folder, number)
    try:
        return Task.from_json(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{file} can't be read ({error.strerror}): submit it by sweep --to.") from None


# collecting #


def collect(store: Store, folder: Path) -> dict[int, Outcome]:
    """Write the results that tasks have left into the database, and remove their files; returns them."""
    outcomes: dict[int, Outcome] = {}
    open_rows = {row.number for row in store.rows(WAITING, RUNNING)}
    files = [*(folder / "results").glob("[0-9]*.json")]  # more may come meanwhile
    for file in files:
        with suppress(OSError, ValueError, TypeError, KeyError):
            result = json.loads(file.read_text("utf-8"))
            if result["number"] in open_rows:
                outcomes[result["number"]] = Outcome(**result["outcome"])
    store.finish(outcomes)
    for file in files:
        file.unlink(missing_ok=True)
    return outcomes


def follow(store: Store, queue: Queue, folder: Path, progress: Progress, log: Log) -> None:
    """Collect results until no task is left. Raises Interrupted at Ctrl-C, and UserError once the queue has
    not answered for PATIENCE; the jobs continue.
    """
    missed: dict[int, int] = {}
    answered, said = time.monotonic(), False
    with Signals() as signals:
        while rows := {row.number: row for row in store.rows(RUNNING) if row.job}:
            try:
                _look(store, queue, folder, rows, missed, progress=progress, log=log)
                answered, said = time.monotonic(), False
            except UserError as error:
                if time.monotonic() - answered > PATIENCE:
                    raise UserError(f"{error}. The jobs continue; {COLLECTS}.") from None
                if not said:
                    again = f"{queue.TITLE} is asked again for {duration(PATIENCE)}"
                    log(f"{error}. The jobs continue, and {again}.")
                said = True
            if rows and signals.sleep(queue.LOOK):
                break
    if left := job_ids(store):
        ends = f"{queue.end_of(left)} ends them"
        raise Interrupted(f"Stopped collecting; the jobs continue. {COLLECTS.capitalize()}, and {ends}.")


def _look(
    store: Store,
    queue: Queue,
    folder: Path,
    rows: dict[int, Row],
    missed: dict[int, int],
    *,
    progress: Progress,
    log: Log,
) -> None:
    """Collect the results that are there, and settle the tasks that have left none. Raises UserError if the
    queue does not answer.

    rows: of the tasks in the queue. missed: number -> looks in a row that did not find the task.
    """
    try:
        tasks = queue.alive([str(row.job) for row in rows.values()])
    finally:  # results are files, and need no answer
        for number, outcome in collect(store, folder).items():
            if row := rows.pop(number, None):
                progress.ended(row, outcome, [], dict.fromkeys(rows.values(), 0.0))
    for number, row in rows.items():
        missed[number] = 0 if row.job in tasks else missed.get(number, 0) + 1
        if missed[number] < MISSED:
            continue
        if outcome := queue.ended_without(row, folder):
            store.finish({number: outcome})
            progress.ended(row, outcome, [], {})
        else:
            log(f"{queue.TITLE}'s task {row.job} was cancelled; experiment {number} waits again.")
            store.wait_again([number])


def job_ids(store: Store) -> list[str]:
    """Ids of the jobs that the database has tasks of."""
    return list(dict.fromkeys(row.job.rpartition("_")[0] for row in store.rows(RUNNING) if row.job))


# in a task #


def run_in_job(task: Task, folder: Path) -> Outcome:
    """Run an experiment inside a task, and write its result. SIGTERM and Ctrl-C end it without a result."""
    of_ray = os.environ.get(MARK, "").rpartition("/")[0]  # a task of Ray is on one machine, Slurm's or not
    job = of_ray or f"slurm-{os.environ.get('SLURM_JOB_ID', os.getpid())}"
    nodes = 1 if of_ray else nodes_of_job(os.environ)
    if nodes > 1 and task.run != "train":
        outcome = Outcome(
            REFUSED,
            f"{task.run} starts its ranks on one machine, and {counted(task.world, 'rank')} would need "
            f"{nodes}; sweep with run: train.",
        )
        return written(task, folder, outcome)
    prefix, environment = list[str](), dict(os.environ)
    if nodes > 1:
        prefix = ["srun", f"--nodes={nodes}", f"--ntasks-per-node={task.world // nodes}"]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):  # which srun does not take over
            prefix.append(f"--cpus-per-task={cores}")
    else:  # without Slurm's variables the command starts its ranks itself
        of_slurm = ("SLURM_", "PMI")
        environment = {name: text for name, text in os.environ.items() if not name.startswith(of_slurm)}
    child = Child(task, folder, job, environment, prefix)
    with Signals() as signals:
        while (outcome := child.outcome()) is None:
            if signals.sleep(POLL):
                if outcome := stop([child], signals)[child]:
                    break
                raise Interrupted("Stopped; the experiment waits again.")
    return written(task, folder, outcome)


def written(task: Task, folder: Path, outcome: Outcome) -> Outcome:
    """Write the result of a task for `collect`."""
    result = {"number": task.number, "outcome": asdict(outcome)}
    write_text_atomically(folder / "results" / f"{task.number}.json", json.dumps(result, default=str))
    return outcome
