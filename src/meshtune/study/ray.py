"""Ray's queue: a job of Ray for each call, whose driver (ray_driver.py) starts a task for each experiment.

The job's id is written down before it is submitted. If the sweep is killed in between, its next start finds
a job that Ray does not know, and the experiments wait again.
"""

import json
import os
import shlex
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from meshtune.errors import UserError
from meshtune.launch.ray import field_problems, state_of, submitted
from meshtune.rundir import write_text_atomically
from meshtune.study.children import Task
from meshtune.study.queue import SAVING, job_ids, listing_of, write_task
from meshtune.study.runner import Log
from meshtune.study.store import CRASHED, Outcome, Row, Store
from meshtune.study.sweep_file import SweepFile
from meshtune.yaml_tree import merge

TITLE: str = "Ray"
LOOK = 20.0  # seconds between looks; Ray's client takes some of them
NAME = "meshtune-"  # begins the ids of jobs
ENDED = ("", "was stopped", "succeeded", "failed")  # states of `state`; others wait or run


def options_of(plan: SweepFile) -> dict[str, Any]:
    """Fields of Ray's job, those of the base's cluster.ray. Raises UserError for those that Ray does not have
    or the sweep sets itself.
    """
    options = dict(plan.submission.get("ray", {}))
    problems = [*field_problems(options, "the sweep")]
    if isinstance(bundle := options.get("bundle"), Mapping) and "GPU" in bundle:
        problems.append("cluster.ray.bundle.GPU: an experiment has a GPU for each rank; leave it out.")
    if problems:
        raise UserError(problems)
    return options


def recover(store: Store, folder: Path, log: Log) -> None:
    """Remove the listings of jobs that have no experiment any more, which ends them: those of a retry."""
    known = {job.partition("@")[0] for job in job_ids(store)}
    for file in listing_of(folder, "").parent.glob(f"{NAME}*.txt"):
        if file.stem not in known:
            file.unlink(missing_ok=True)


def submit(store: Store, tasks: Mapping[int, Task], folder: Path, plan: SweepFile, jobs: int) -> list[str]:
    """Submit tasks as a job, the most ranks first."""
    options, number = options_of(plan), f"{NAME}{uuid4().hex[:16]}"
    job = f"{number}@{address}" if (address := options.get("address")) else number
    for task in tasks.values():
        write_task(task, folder)
    numbers = sorted(tasks, key=lambda number: (-tasks[number].world, number))
    write_text_atomically(listing_of(folder, number), "".join(f"{number}\n" for number in numbers))
    driver = ["python", "-m", "meshtune.study.ray_driver", f"--sweep={folder}", f"--job={number}"]
    driver += [f"--jobs={jobs}", f"--bundle={json.dumps(options.get('bundle', {}))}"]
    if "working_dir" not in (options.get("runtime_env") or {}):  # else Ray copies that folder
        driver.append(f"--folder={os.getcwd()}")
    ours = {
        "submission_id": number, "entrypoint": shlex.join(driver), "metadata": {"name": plan.name},
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(2 * SAVING)}},
    }  # fmt: skip
    theirs = {name: value for name, value in options.items() if name != "bundle"}
    store.start(numbers, job)
    try:
        submitted(merge(ours, theirs))
    except UserError:
        listing_of(folder, number).unlink()  # Ray may get the job, or have got it, all the same
        store.wait_again(numbers)
        raise
    return [job]


def alive(tasks: Collection[str]) -> set[str]:
    """Those of the tasks that are of jobs that wait or run."""
    state.cache_clear()
    return {task for task in tasks if state(task.rpartition("_")[0]) not in ENDED}


@cache
def state(job: str) -> str:
    """State of a job at the last look of `alive`; "" if Ray does not know it."""
    try:
        return state_of(job)
    except UserError as error:
        if f"Job {job.partition('@')[0]} does not exist" not in str(error):
            raise
        return ""


def ended_without(row: Row, folder: Path) -> Outcome | None:
    """The outcome of a task that ended without a result; None: its job was stopped, or Ray does not know it,
    and it is to be tried again.
    """
    job = str(row.job).rpartition("_")[0]
    if (ended := state(job)) in ENDED[:2]:
        listing_of(folder, job.partition("@")[0]).unlink(missing_ok=True)
        return None
    reason = f"Ray's job {ended} without this experiment's result; `meshtune submit logs ray:{job}` has why."
    return Outcome(CRASHED, f"{reason} `--retry crashed` runs it again.")


def end_of(jobs: Collection[str]) -> str:
    """Commands that end jobs."""
    return " and ".join(f"`meshtune submit cancel ray:{job}`" for job in jobs)
