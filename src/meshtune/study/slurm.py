"""Slurm's queue: job arrays, one for each size, a task for each experiment.

    sweep.sbatch          the batch script of all arrays; a task runs `meshtune sweep … --task NUMBER`
    slurm/<…>.txt         numbers of the experiments of an array, a line a task

Arrays are submitted held, written down, and released once sbatch has taken all. If the sweep is killed in
between, no experiment runs twice: its next start cancels what is held and not written down.
"""

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshtune.errors import UserError, written
from meshtune.launch.slurm import (
    FORGOTTEN,
    PER_NODE,
    SETTINGS,
    long_options,
    option_problems,
    option_words,
    options_of_section,
    remedies_of,
    slurm_output,
    state_of,
    submitted,
)
from meshtune.rundir import write_text_atomically
from meshtune.study.children import Task
from meshtune.study.queue import job_ids, write_task
from meshtune.study.runner import Log
from meshtune.study.store import CRASHED, OUT_OF_MEMORY, TIMED_OUT, Outcome, Row, Store
from meshtune.study.sweep_file import SweepFile

TITLE: str = "Slurm"
LOOK = 5.0  # seconds between looks at the queue and the results
SPARE = 300.0  # seconds of a job beyond the experiment's limit
STATES = {"TIMEOUT": TIMED_OUT, "OUT_OF_MEMORY": OUT_OF_MEMORY}  # Slurm's state -> status; others crashed
AGAIN = ("CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL")  # states after which an experiment waits again
# Options that the sweep sets itself.
OURS = ("array", "chdir", "hold", "output", "parsable", "job-name", "nodes", "ntasks", "ntasks-per-node")
IN_FILE = {words: text.replace("cluster.", "") for words, text in SETTINGS.items()} | {
    "time limit": "limit, or slurm.time", "gres": f"slurm.{PER_NODE} (such as h100:8)",
    "node count": f"slurm.{PER_NODE}, or leave large layouts out by `where`",
    "node configuration": f"slurm.{PER_NODE}, slurm.mem or slurm.cpus-per-task",
}  # words in a refusal -> what in the sweep's file has the value  # fmt: skip
REMEDIES = remedies_of(IN_FILE)
HELD = "JobHeldUser"  # Slurm's reason of a job that was submitted held


def options_of(plan: SweepFile) -> dict[str, Any]:
    """Options of sbatch: those of the base's cluster.slurm, and over them those of the key `slurm`. Raises
    UserError for options that the sweep sets itself, for names that are none, for a number of GPUs that can't
    be read, and for a container.
    """
    section, over, problems = plan.submission.get("slurm", {}), long_options(plan.slurm), list[str]()
    options = options_of_section(section, OURS, "the sweep", problems) | over
    problems += option_problems(over, OURS, "slurm.", "the sweep")
    if image := section.get("container"):
        problems.append(
            f"cluster.slurm.container = {written(image)}: a sweep's tasks run in the Python that submits "
            "them; leave it out, or send single runs by meshtune submit."
        )
    if problems:
        raise UserError(problems)
    return options


def script_of(folder: Path, sweep: str) -> str:
    """Text of the batch script. sweep: name of the sweep."""
    command = [sys.executable, "-m", "meshtune", "sweep", str(folder / "sweep.yaml"), "--out", str(folder)]
    return f"""#!/bin/bash
# Task of a job array of the sweep {sweep}, which `meshtune sweep --to slurm` submits.
# $1: file with the numbers of the array's experiments, a line a task.
number=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$1")
exec {shlex.join(command)} --task "$number"
"""


def submit(store: Store, tasks: Mapping[int, Task], folder: Path, plan: SweepFile, jobs: int) -> list[str]:
    """Submit tasks as arrays, one for each number of ranks; where one is refused, cancel the others. jobs:
    tasks of an array at once.
    """
    script, options = script_file(folder), options_of(plan)
    write_text_atomically(script, script_of(folder, plan.name))
    most, ids = largest_array(), list[str]()
    try:
        for world in sorted({task.world for task in tasks.values()}):
            several = [task for task in tasks.values() if task.world == world]
            for start in range(0, len(several), most):
                part = several[start : start + most]
                ids.append(_held(store, part, script, name=plan.name, options=options, jobs=jobs))
        for job in reversed(ids):  # the most ranks first: some requests are only refused here
            slurm_output("scontrol", "release", job, remedies=REMEDIES)
    except UserError:
        with suppress(UserError):  # what can't be cancelled stays written down, and is released by `recover`
            if ids:
                slurm_output("scancel", *ids)
            store.wait_again(tasks)
        raise
    return ids


def _held(
    store: Store, tasks: Sequence[Task], script: Path, *, name: str, options: Mapping[str, Any], jobs: int
) -> str:
    """Submit one array held, and write its id down; returns the id."""
    folder = script.parent
    for task in tasks:
        write_task(task, folder)
    listing = folder / "slurm" / f"{tasks[0].number}-{time.time_ns()}.txt"
    write_text_atomically(listing, "".join(f"{task.number}\n" for task in tasks))
    array = f"0-{len(tasks) - 1}" + (f"%{jobs}" if jobs else "")
    words = [
        "--hold", f"--array={array}", f"--job-name={name}", f"--chdir={os.getcwd()}",
        f"--output={folder / 'slurm' / '%A_%a.out'}", *resources(tasks[0], options), str(script),
        str(listing),
    ]  # fmt: skip
    job = submitted(*words, remedies=REMEDIES)
    store.start([task.number for task in tasks], job)
    return job


def script_file(folder: Path) -> Path:
    return folder / "sweep.sbatch"


def recover(store: Store, folder: Path, log: Log) -> None:
    """Release this sweep's held arrays that the database knows, and cancel those that it does not: it was
    killed between two lines of `_held`.
    """
    held = ["squeue", "--me", "--noheader", "--states=PENDING", "--format=%F|%r|%o"]
    known = job_ids(store)
    for job in known:
        with suppress(UserError):
            slurm_output("scontrol", "release", job)
    try:
        listing = [line.strip().split("|", 2) for line in slurm_output(*held).splitlines()]
        script = str(script_file(folder))
        unknown = {
            job for job, why, command in listing if why == HELD and f"{command} ".startswith(f"{script} ")
        }
        for job in sorted(unknown.difference(known)):
            slurm_output("scancel", job)
            log(f"Cancelled the held array {job}, which a killed sweep had left.")
    except UserError as error:
        log(f"Held arrays that a killed sweep may have left were not all cancelled: {error}")


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
    return option_words(words, given)


def largest_array() -> int:
    """Number of tasks that Slurm takes in one array."""
    with suppress(UserError):
        if found := re.search(r"MaxArraySize\s*=\s*(\d+)", slurm_output("scontrol", "show", "config")):
            return max(1, int(found[1]) - 1)
    return 1000


def alive(tasks: Collection[str]) -> set[str]:
    """Ids of all tasks of these tasks' arrays that wait or run, as 12_3."""
    return _tasks_of(list(dict.fromkeys(task.partition("_")[0] for task in tasks)))


def _tasks_of(jobs: Sequence[str]) -> set[str]:
    try:
        return set(
            slurm_output("squeue", "--noheader", "--array", "--format=%i", "--jobs", ",".join(jobs)).split()
        )
    except UserError as error:
        if FORGOTTEN in str(error):  # Slurm has forgotten one: ask for each
            return set() if len(jobs) == 1 else {task for job in jobs for task in _tasks_of([job])}
        raise


def ended_without(row: Row, folder: Path) -> Outcome | None:
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


def end_of(jobs: Collection[str]) -> str:
    """Command that ends jobs."""
    return f"`scancel {' '.join(jobs)}`"
