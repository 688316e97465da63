"""Run a sweep's experiments as Slurm job arrays: one array for each size, a task for each experiment.

    sweep.sbatch          the batch script of all arrays; a task runs `meshtune sweep … --task NUMBER`
    slurm/<number>.json   a task, which the job reads
    slurm/<…>.txt         numbers of the experiments of an array, a line a task
    results/<number>.json how an experiment ended, written atomically by its task

Only the sweep writes the database. An array is submitted held, written down, then released: killed in
between, no experiment runs twice, and the next start cancels what is held and not written down.
"""

import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshtune.errors import Interrupted, UserError
from meshtune.launch.place import nodes_of_job
from meshtune.launch.slurm import (
    FORGOTTEN,
    PER_NODE,
    long_options,
    option_problems,
    option_words,
    slurm_output,
    state_of,
)
from meshtune.rundir import write_settings, write_text_atomically
from meshtune.study.children import Child, Task
from meshtune.study.runner import POLL, Log, Progress, Signals, stop
from meshtune.study.store import (
    CRASHED,
    OUT_OF_MEMORY,
    REFUSED,
    RUNNING,
    TIMED_OUT,
    WAITING,
    Outcome,
    Row,
    Store,
)
from meshtune.units import counted, duration

LOOK = 5.0  # seconds between looks at Slurm's queue and the results
PATIENCE = 600.0  # seconds of looks that all fail (the controller restarts) after which the sweep ends
MISSED = 3  # looks without the task and without its result, after which it has ended
SPARE = 300.0  # seconds of a job beyond the experiment's limit
STATES = {"TIMEOUT": TIMED_OUT, "OUT_OF_MEMORY": OUT_OF_MEMORY}  # Slurm's state -> status; others crashed
AGAIN = ("CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL")  # states after which an experiment waits again
# Options that the sweep sets itself.
OURS = ("array", "chdir", "hold", "output", "parsable", "job-name", "nodes", "ntasks", "ntasks-per-node")
COLLECTS = "the same command collects their results"
HELD = "JobHeldUser"  # Slurm's reason of a job that was submitted held


def check_sbatch(options: Mapping[str, Any]) -> None:
    """Raise UserError for options of sbatch that the sweep sets itself, for names that are none, and for a
    number of GPUs that can't be read.
    """
    problems = [*option_problems(long_options(options), OURS, "slurm.", "the sweep")]
    if problems:
        raise UserError(problems)


def script_of(folder: Path, sweep: str) -> str:
    """Text of the batch script. sweep: name of the sweep."""
    command = [sys.executable, "-m", "meshtune", "sweep", str(folder / "sweep.yaml"), "--out", str(folder)]
    return f"""#!/bin/bash
# Task of a job array of the sweep {sweep}, which `meshtune sweep --slurm` submits.
# $1: file with the numbers of the array's experiments, a line a task.
number=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$1")
exec {shlex.join(command)} --task "$number"
"""


def submit(
    store: Store, tasks: Mapping[int, Task], folder: Path, *, name: str, options: Mapping[str, Any], jobs: int
) -> list[str]:
    """Submit tasks as arrays, one for each number of ranks; returns their ids. jobs: tasks of an array that
    run at once, 0: Slurm's number.
    """
    script = script_file(folder)
    write_text_atomically(script, script_of(folder, name))
    most, ids = largest_array(), []
    for world in sorted({task.world for task in tasks.values()}):
        several = [task for task in tasks.values() if task.world == world]
        for start in range(0, len(several), most):
            part = several[start : start + most]
            ids.append(_submitted(store, part, script, name=name, options=options, jobs=jobs))
    return ids


def _submitted(
    store: Store, tasks: Sequence[Task], script: Path, *, name: str, options: Mapping[str, Any], jobs: int
) -> str:
    """Submit one array, write its id down, release it; returns the id."""
    folder = script.parent
    for task in tasks:
        write_settings(task_file(folder, task.number), task.as_json())
    listing = folder / "slurm" / f"{tasks[0].number}-{time.time_ns()}.txt"
    write_text_atomically(listing, "".join(f"{task.number}\n" for task in tasks))
    array = f"0-{len(tasks) - 1}" + (f"%{jobs}" if jobs else "")
    words = [
        "sbatch", "--parsable", "--hold", f"--array={array}", f"--job-name={name}", f"--chdir={os.getcwd()}",
        f"--output={folder / 'slurm' / '%A_%a.out'}", *resources(tasks[0], options), str(script),
        str(listing),
    ]  # fmt: skip
    job = slurm_output(*words).split(";")[0].strip()
    store.start([task.number for task in tasks], job)
    slurm_output("scontrol", "release", job)
    return job


def script_file(folder: Path) -> Path:
    return folder / "sweep.sbatch"


def cancel_unknown(store: Store, folder: Path, log: Log) -> None:
    """Cancel this sweep's held arrays that the database does not know: it was killed between two lines of
    `_submitted`.
    """
    held = ["squeue", "--me", "--noheader", "--states=PENDING", "--format=%F|%r|%o"]
    try:
        listing = [line.strip().split("|", 2) for line in slurm_output(*held).splitlines()]
        script = str(script_file(folder))
        unknown = {
            job for job, why, command in listing if why == HELD and f"{command} ".startswith(f"{script} ")
        }
        for job in sorted(unknown.difference(job_ids(store))):
            slurm_output("scancel", job)
            log(f"Cancelled the held array {job}, which a killed sweep had left.")
    except UserError as error:
        log(f"Held arrays that a killed sweep may have left were not all cancelled: {error}")


def task_file(folder: Path, number: int) -> Path:
    return folder / "slurm" / f"{number}.json"


def read_task(folder: Path, number: int) -> Task:
    """The task of an experiment as it was submitted. Raises UserError if there is none."""
    file = task_file(folder, number)
    try:
        return Task.from_json(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{file} can't be read ({error.strerror}): submit it by sweep --slurm.") from None


def resources(task: Task, options: Mapping[str, Any]) -> list[str]:
    """Options of sbatch for an experiment: its time, its machines, a task and a GPU for each rank; `options`
    override these.
    """
    given = long_options(options)
    kind, colon, number = str(given.pop(PER_NODE, task.world)).rpartition(":")
    # All machines have the same number of ranks.
    per_node = next(n for n in range(min(task.world, int(number)), 0, -1) if task.world % n == 0)
    minutes = math.ceil((task.limit + SPARE) / 60)
    # A task for each rank: else Slurm may give all ranks of a machine one core.
    words: dict[str, Any] = {"nodes": task.world // per_node, "ntasks-per-node": per_node, "time": minutes}
    if not task.on_processor:
        words[PER_NODE] = f"{kind}{colon}{per_node}"
    return option_words({**words, **given})


def largest_array() -> int:
    """Number of tasks that Slurm takes in one array."""
    with suppress(UserError):
        if found := re.search(r"MaxArraySize\s*=\s*(\d+)", slurm_output("scontrol", "show", "config")):
            return max(1, int(found[1]) - 1)
    return 1000


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


def alive(jobs: Sequence[str]) -> set[str]:
    """Ids of the tasks of arrays that wait or run, as 12_3, whoever submitted them."""
    if not jobs:
        return set()
    try:
        return set(
            slurm_output("squeue", "--noheader", "--array", "--format=%i", "--jobs", ",".join(jobs)).split()
        )
    except UserError as error:
        if FORGOTTEN in str(error):  # Slurm has forgotten one: ask for each
            return set() if len(jobs) == 1 else {task for job in jobs for task in alive([job])}
        raise


def ended_without(row: Row) -> Outcome | None:
    """The outcome of a task that ended without a result, by its state; None: it is to be tried again.

    Raises UserError if Slurm does not answer.
    """
    state = state_of(str(row.job))
    if state in AGAIN:
        return None
    ended = f"Slurm's task {row.job} ended in state {state} without a result"
    if not state:
        ended = f"Slurm has forgotten its task {row.job}, which left no result"
    reason = f"{ended}; see slurm/{row.job}.out. `--retry crashed` runs it again."
    return Outcome(STATES.get(state, CRASHED), reason)


def follow(store: Store, folder: Path, progress: Progress, log: Log) -> None:
    """Collect results until no task is left. Raises Interrupted at Ctrl-C, and UserError once Slurm has not
    answered for PATIENCE; the jobs continue.
    """
    missed: dict[int, int] = {}
    for job in job_ids(store):  # held, if the sweep was killed before it released them
        with suppress(UserError):
            slurm_output("scontrol", "release", job)
    answered, said = time.monotonic(), False
    with Signals() as signals:
        while rows := {row.number: row for row in store.rows(RUNNING) if row.job}:
            try:
                _look(store, folder, rows, missed, progress, log)
                answered, said = time.monotonic(), False
            except UserError as error:
                if time.monotonic() - answered > PATIENCE:
                    raise UserError(f"{error}. The jobs continue; {COLLECTS}.") from None
                if not said:
                    log(f"{error}. The jobs continue, and Slurm is asked again for {duration(PATIENCE)}.")
                said = True
            if rows and signals.sleep(LOOK):
                break
    if left := job_ids(store):
        ends = f"`scancel {' '.join(left)}` ends them"
        raise Interrupted(f"Stopped collecting; the jobs continue. {COLLECTS.capitalize()}, and {ends}.")


def _look(
    store: Store, folder: Path, rows: dict[int, Row], missed: dict[int, int], progress: Progress, log: Log
) -> None:
    """Collect the results that are there, and settle the tasks that have left none. Raises UserError if Slurm
    does not answer.

    rows: of the tasks that Slurm has. missed: number -> looks in a row that did not find the task.
    """
    try:
        tasks = alive(job_ids(store))
    finally:  # results are files, and need no answer
        for number, outcome in collect(store, folder).items():
            if row := rows.pop(number, None):
                progress.ended(row, outcome, [], dict.fromkeys(rows.values(), 0.0))
    for number, row in rows.items():
        missed[number] = 0 if row.job in tasks else missed.get(number, 0) + 1
        if missed[number] < MISSED:
            continue
        if outcome := ended_without(row):
            store.finish({number: outcome})
            progress.ended(row, outcome, [], {})
        else:
            log(f"Slurm's task {row.job} was cancelled; experiment {number} waits again.")
            store.wait_again([number])


def job_ids(store: Store) -> list[str]:
    """Ids of the arrays that the database has tasks of."""
    jobs = (row.job.partition("_")[0] for row in store.rows(RUNNING) if row.job)
    return list(dict.fromkeys(jobs))


# in a task #


def run_in_job(task: Task, folder: Path) -> Outcome:
    """Run an experiment inside a task, and write its result. SIGTERM and Ctrl-C end it without a result."""
    job = f"slurm-{os.environ.get('SLURM_JOB_ID', os.getpid())}"
    nodes = nodes_of_job(os.environ)
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
