"""dstack 0.22: a task, sent by `dstack apply`.

dstack stops a run with SIGINT and kills it 10 s later, at max_duration too. `timeout` signals earlier, so
that the run has time to save.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from meshtune.addresses import secrets
from meshtune.errors import Interrupted, UserError, written
from meshtune.launch.client import client_output, id_in
from meshtune.submit.fields import GPUS, inputs, laid, lost, name_of, text_of
from meshtune.units import counted

if TYPE_CHECKING:
    from meshtune.submit.job import Job

FILE, SETTING = "job.dstack.yml", "cluster.dstack"
OURS = ("type", "nodes", "groups", "commands", "entrypoint", "retry.on_events")
FIXED = tuple(f"{SETTING}.{name}" for name in OURS)
ENDED = ("terminated", "failed", "done")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "": 1}
REMEDIES = {  # words in a refusal -> what to do
    "No default project": "Run `dstack login`, or `dstack project add`.",
    "CODE_UPLOAD_LIMIT": "Keep large files on a volume, or a machine's folder (cluster.storage).",
    "is not set": "Set the variable where you submit.",
    "olume": f"Change {SETTING}.volumes.",
    "validation error|Extra inputs": f"Change {SETTING}.",
}


def files(job: "Job", options: Mapping[str, Any]) -> dict[str, str]:
    """The task. options: cluster.dstack. Raises UserError with all problems of the two."""
    problems: list[str] = []
    theirs = {**options, "env": variables(options.get("env", {}))}
    fields = laid(task(job), theirs, FIXED, SETTING, problems)
    mounts = [
        str(volume.get("path")) if isinstance(volume, dict) else str(volume).partition(":")[2]
        for volume in fields["volumes"]
    ]
    copied = inputs(job, mounts, problems)
    limit = seconds_of(fields["max_duration"])
    problems += [*checked(job, fields, limit)]
    problems += lost(job, mounts, f"set cluster.storage, or mount a volume there by {SETTING}.volumes")
    if problems:
        raise UserError(problems)
    stop = ["timeout", "--foreground", "--preserve-status", "--signal=USR1", str((limit or 0) - job.margin)]
    fields |= {
        "files": [*({"local_path": file, "path": name} for name, file in copied.items()), *fields["files"]],
        "env": [name if text is None else f"{name}={text}" for name, text in fields["env"].items()],
        "commands": [f"exec {shlex.join([*(stop if limit else ()), *job.command])}"],
    }
    comments = [
        *job.comments,
        f"dstack reads no exit code: a run that was stopped and has saved ({Interrupted.exit_code}) ends as "
        "failed, and is not repeated; submit it again, and it resumes.",
        f"{', '.join(mounts)}: of volumes, or folders of the machines' hosts"
        + (", which all machines have to share." if job.machines > 1 else "."),
    ]
    return {FILE: text_of("dstack", comments, fields)}


def variables(env: Any) -> Any:
    """The variables of a list, NAME=VALUE or NAME, as a mapping; a NAME without a value is None there."""
    if not isinstance(env, list):
        return env
    words = [str(word).partition("=") for word in env]
    return {name: value if equals else None for name, equals, value in words}


def task(job: "Job") -> dict[str, Any]:
    """The task without cluster.dstack, its command and the files to copy."""
    known = {"gpu": f"{GPUS[job.gpu][1]}:{job.gpus}"} if job.gpu in GPUS else {}
    gpu = {"gpu": 0} if job.processor else known
    return {
        "type": "task", "name": name_of(job), "nodes": job.machines, "image": None, "commands": [],
        "env": dict(job.environment), "registry_auth": {}, "files": [],
        "resources": gpu | {
            "cpu": f"{job.cpus}..", "memory": f"{job.memory}GB..",
            "shm_size": f"{job.memory // 2}GB",  # as Linux has it outside of containers
        },
        "volumes": [{"instance_path": job.mount, "path": job.mount}] if job.mount else [],
        "retry": {"on_events": ["no-capacity", "interruption"]},
        "max_duration": f"{job.limit}s",
    }  # fmt: skip


def seconds_of(text: Any) -> int | None:
    """Seconds of a duration as dstack reads it; None: without a limit, or not a duration."""
    found = None if isinstance(text, bool) else re.fullmatch(r"(\d+) *([smhdw]?)", str(text))
    return int(found[1]) * SECONDS[found[2]] if found else None


def checked(job: "Job", fields: Mapping[str, Any], limit: int | None) -> Iterator[str]:
    """Yield a sentence for each field with which the job can't run. limit: seconds of max_duration."""
    gpu = fields["resources"].get("gpu")
    words = str(gpu.get("count", "") if isinstance(gpu, dict) else gpu).split(":")
    if gpu is None:
        yield (
            f"cluster.gpu = {job.gpu}: its name in dstack isn't known here; set {SETTING}.resources.gpu="
            f"NAME:MEMORY:{job.gpus} (`dstack offer` has the names)."
        )
    elif str(0 if job.processor else job.gpus) not in words:
        has = "no GPU" if job.processor else counted(job.gpus, "GPU")
        yield f"{SETTING}.resources.gpu = {written(gpu)}: a machine of the plan has {has}; write that number."
    if not fields["image"]:
        yield f"{SETTING}.image is not set: it names an image that has meshtune."
    if limit is not None and limit <= job.margin:
        yield (
            f"{SETTING}.max_duration = {fields['max_duration']}: a step and a checkpoint take {job.margin} s "
            "at its end; raise it."
        )
    if "://" in job.storage:
        yield (
            f"cluster.storage = {job.storage}: dstack mounts no object store; name a folder of its machines, "
            f"or a volume's, which {SETTING}.volumes mounts there."
        )
    remedy = f"write {SETTING}.env=[NAME], and set NAME where you submit"
    yield from secrets(fields["env"], f"{SETTING}.env", remedy)
    remedy = "write '${{ secrets.NAME }}', a secret of dstack's server"
    yield from secrets(fields["registry_auth"], f"{SETTING}.registry_auth", remedy)


dstack = partial(
    client_output, "dstack", "dstack", remedies=REMEDIES, look="dstack ps --all",
    remedy="Install it: pip install dstack",
)  # fmt: skip


def run_of(name: str) -> dict[str, Any]:
    """A run as dstack's server has it; {} if there is none of the name."""
    try:
        return json.loads(dstack("run", "get", name, "--json"))
    except UserError as error:
        if "not found" in str(error):
            return {}
        raise


def send(folder: Path) -> str:
    """Submit the task; returns its name. Raises UserError for a name that an active run has."""
    name = yaml.safe_load((folder / FILE).read_text("utf-8"))["name"]
    state = run_of(name).get("status", ENDED[0])
    if state not in ENDED:  # dstack would stop it
        raise UserError(
            f"dstack's run {name} is {state}, and another of its name would stop it: wait, `meshtune submit "
            f"cancel dstack:{name}`, or set {SETTING}.name."
        )
    answer = dstack("apply", "--yes", "--detach", "--file", str(folder / FILE), seconds=600)
    id_in(answer, "(submitted)", "dstack ps --all")
    return name


def status(job: str) -> str:
    """Sentence on the state of a run."""
    if not (run := run_of(job)):
        raise UserError(f"dstack has no run {job}: it was never submitted, or is deleted.")
    parts = [run["status_message"] or run["status"], f"{run['cost']:.2f} USD"]
    last = run.get("latest_job_submission") or {}
    if (code := last.get("exit_status")) is not None:
        saved = code == Interrupted.exit_code
        parts.append(f"exit code {code}" + (" (saved): submit it again, and it resumes" if saved else ""))
    return f"dstack's run {job} is {', '.join(parts)}."


def logs(job: str) -> str:
    """Log of the first machine."""
    return dstack("logs", job)


def cancel(job: str) -> str:
    """Stop a run: it gets SIGINT, and 10 s."""
    dstack("stop", "--yes", job)
    return (
        f"dstack's run {job} is being stopped: a run that has begun saves a checkpoint if that and a step "
        "take less than 10 s."
    )
