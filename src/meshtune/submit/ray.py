"""Ray: a job whose driver (ray_driver.py) starts the run on each machine, sent by `ray job submit`."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from meshtune.errors import UserError, written
from meshtune.launch.ray import ENVIRON, OURS, client, field_problems, state_of, submitted, words_of
from meshtune.submit.fields import inputs, laid, text_of
from meshtune.units import counted

if TYPE_CHECKING:
    from meshtune.submit.job import Job

FILE = "job.yaml"
WAIT = 24 * 3600  # seconds in which Ray has to have the machines, at the start and when one was lost
SAVING = 60  # seconds that Ray waits beyond the margin, for the driver


def files(job: "Job", options: Mapping[str, Any]) -> dict[str, str]:
    """The job as Ray's client reads it. options: cluster.ray. Raises UserError, with all problems at once."""
    problems, here = [*checked(job, options)], Path.cwd()
    gpus = {} if job.processor else {"GPU": job.gpus}
    given = options.get("bundle")
    bundle = {"CPU": job.cpus} | gpus | (dict(given) if isinstance(given, Mapping) else {})
    if bundle.get("GPU", 0) != gpus.get("GPU", 0):
        has = counted(gpus.get("GPU", 0), "GPU")
        problems.append(f"cluster.ray.bundle = {written(given)}: a machine of the plan has {has}.")
    problems += [
        f"{name} is neither in {here}, which Ray copies, nor below cluster.storage: move it there."
        for name in inputs(job, [job.mount] if job.mount else [], problems)
        if not Path(os.path.abspath(name)).is_relative_to(here)
    ]
    shared = bool(job.mount) and here.is_relative_to(job.mount)
    words = {
        "machines": job.machines, "ranks": job.gpus, "bundle": json.dumps(bundle), "margin": job.margin,
        "wait": WAIT, "output": job.output, **({"folder": here} if shared else {}),
        **({"least": job.least} if job.least else {}),
    }  # fmt: skip
    driver = ["python", "-m", "meshtune.submit.ray_driver"]
    driver += [f"--{name}={word}" for name, word in words.items()]
    variables = {
        **job.environment,
        "OMP_NUM_THREADS": str(job.cpus // job.gpus),  # of a rank; Ray would set that of the machine
        "RAY_JOB_STOP_WAIT_TIME_S": str(job.margin + SAVING),
    }
    ours = {
        "entrypoint": shlex.join([*driver, "--", *job.command[3:]]),
        "runtime_env": {"env_vars": variables, **({} if shared else {"working_dir": "."})},
        "metadata": {"name": job.name},
    }
    theirs = {name: value for name, value in options.items() if name not in ("bundle", *OURS)}
    request = laid(ours, theirs, (), "cluster.ray", problems)
    if problems:
        raise UserError(problems)
    copied = (
        "Files: Ray copies this folder (up to 512 MiB, without what .gitignore excludes) to the machines."
    )
    comments = [
        *job.comments,
        f"Files: all machines see {here}, where the run starts." if shared else copied,
        f"Ray has no time limit; a job that is stopped has {job.margin} s to save.",
    ]
    at = f"{ENVIRON[0]}={shlex.quote(str(request['address']))} " if request.get("address") else ""
    comments.append(f"Sent as: {at}ray job {shlex.join(words_of(request))}")
    return {FILE: text_of("ray", comments, request)}


def checked(job: "Job", options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field of cluster.ray that Ray does not have or the job sets itself, and for a
    folder that the machines do not share.
    """
    yield from field_problems(options, "meshtune submit")
    if "://" in job.storage:
        yield (
            f"cluster.storage = {job.storage}: Ray mounts no object store; name a folder that all nodes see."
        )
    elif not job.output.startswith("/"):
        yield (
            f"output = {job.output} would be in Ray's copy of this folder, which is deleted; set "
            "cluster.storage, or name a whole path on storage that all nodes see."
        )
    if (job.most_jobs or job.jobs) > 1:
        yield "cluster.time_limit: a job of Ray has no time limit; leave it out."


def send(folder: Path) -> str:
    """Submit the job; returns its id, with the address of the cluster where the settings have it."""
    return submitted(yaml.safe_load((folder / FILE).read_text("utf-8")))


def status(job: str) -> str:
    """Sentence on the state of a job."""
    state = state_of(job)
    seen = f"; `meshtune submit logs ray:{job}` has why" if state == "failed" else ""
    return f"Ray's job {job.partition('@')[0]}: {state}{seen}."


def logs(job: str) -> str:
    """Log of a job."""
    return client(job, "logs", job.partition("@")[0])


def cancel(job: str) -> str:
    """Stop a job: its run gets SIGTERM, and saves."""
    number = job.partition("@")[0]
    client(job, "stop", "--no-wait", number)
    return f"Ray's job {number} is being stopped: a run that has begun saves a checkpoint first."
