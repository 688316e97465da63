"""SkyPilot 0.14: a managed job, sent by `sky jobs launch`. The machines are new at each start."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from meshtune.addresses import secrets
from meshtune.errors import Interrupted, UserError, did_you_mean, nearest, written
from meshtune.launch.client import client_output, id_in
from meshtune.submit.fields import GPUS, inputs, laid, lost, name_of, text_of
from meshtune.units import counted, duration

if TYPE_CHECKING:
    from meshtune.submit.job import Job

FILE, SETTING, WORKDIR = "job.yaml", "cluster.sky", "~/sky_workdir"
RESOURCES = f"{SETTING}.resources"
# Of job_recovery; any other passes SkyPilot's client, and does nothing.
RECOVERY = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
FIXED = (f"{SETTING}.num_nodes", f"{SETTING}.run", f"{RESOURCES}.job_recovery.recover_on_exit_codes")
OWN = ("ssh", "slurm", "k8s", "kubernetes")  # of `infra`: machines of the user, which may share folders
REMEDIES = {  # words in a refusal -> what to do
    "No value available for secret": "Set these variables where you submit.",
    "satisf|No launchable|accelerator": f"Change {RESOURCES} (accelerators, infra, cpus, memory).",
    "nabled cloud|cloud access": "Run `sky check`.",
    "API server": "Run `sky api login`, or `sky api start`.",
    "Invalid|unsupported field": f"Change {SETTING}.",
}


def files(job: "Job", options: Mapping[str, Any]) -> dict[str, str]:
    """The task. options: cluster.sky. Raises UserError with all problems of the two."""
    problems: list[str] = []
    fields = laid(task(job), options, FIXED, SETTING, problems)
    if "instance_type" in fields["resources"] and "accelerators" not in options["resources"]:
        fields["resources"].pop("accelerators", None)  # which it has
    own = str(fields["resources"].get("infra", "")).split("/")[0].lower() in OWN
    mounts = [*fields["volumes"], *([job.mount] if own and job.mount else [])]
    mounts += [
        path for path, store in fields["file_mounts"].items()
        if isinstance(store, dict) and str(store.get("mode")).upper() != "COPY"
    ]  # fmt: skip
    copied = inputs(job, mounts, problems)
    problems += [*checked(job, fields)]
    problems += lost(job, mounts, f"set cluster.storage=s3://BUCKET, or mount a volume by {SETTING}.volumes")
    problems += [
        f"{name}: SkyPilot copies no path with a space; rename it." for name in copied if " " in name
    ]
    places = {os.path.normpath(os.path.join(WORKDIR, name)): file for name, file in copied.items()}
    problems += [
        f"{file} is too far above the current folder for SkyPilot's {WORKDIR}; name it by its whole path."
        for place, file in places.items()
        if place[0] not in "~/"
    ]
    if problems:
        raise UserError(problems)
    comments = [
        *job.comments,
        "SkyPilot has no time limit, and sends no stop signal: the machines are kept until the run ends.",
        f"Exit code {Interrupted.exit_code} (saved) starts the run again on new machines. Spot machines stop "
        "without a signal: checkpoint.every decides what is lost.",
    ]
    return {FILE: text_of("sky", comments, fields | {"file_mounts": places | fields["file_mounts"]})}


def task(job: "Job") -> dict[str, Any]:
    """The task without cluster.sky and the files to copy."""
    name = None if job.processor else GPUS.get(job.gpu, (None,))[0]
    kind = {"accelerators": f"{name}:{job.gpus}"} if name else {}
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [Interrupted.exit_code]}
    store = {job.mount: {"source": job.storage, "mode": "MOUNT"}} if "://" in job.storage else {}
    return {
        "name": name_of(job), "num_nodes": job.machines,
        "resources": kind | {"cpus": f"{job.cpus}+", "memory": f"{job.memory}+", "job_recovery": recovery},
        "envs": dict(job.environment), "secrets": {}, "file_mounts": store, "volumes": {}, "setup": None,
        "run": shlex.join(job.command),
    }  # fmt: skip


def checked(job: "Job", fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field with which the job can't run."""
    resources = fields["resources"]
    given = resources.get("accelerators") or []
    pairs = [f"{name}:{number or 1}" for name, number in given.items()] if isinstance(given, dict) else given
    texts = [*map(str, pairs if isinstance(pairs, list) else [pairs])]
    if not (job.processor or texts or "instance_type" in resources):
        yield (
            f"cluster.gpu = {job.gpu}: its name in SkyPilot isn't known here; set {RESOURCES}.accelerators="
            f"NAME:{job.gpus} (`sky gpus list` has the names)."
        )
    if (texts and job.processor) or any((text.partition(":")[2] or "1") != str(job.gpus) for text in texts):
        has = "no GPU" if job.processor else counted(job.gpus, "GPU")
        yield f"{RESOURCES}.accelerators = {written(given)}: a machine of the plan has {has}."
    if not (fields["setup"] or "image_id" in resources):
        yield (
            f"The machines have no meshtune: set {SETTING}.setup, such as 'pip install /src' with "
            f"{SETTING}.file_mounts={{/src: FOLDER}} for a copy of it, or {RESOURCES}.image_id."
        )
    for name in resources["job_recovery"].keys() - RECOVERY:
        near = did_you_mean(nearest(name, RECOVERY))
        yield f"{RESOURCES}.job_recovery.{name} is not a field of SkyPilot{near}"
    if job.jobs > 1:
        yield "cluster.time_limit: SkyPilot has no time limit; leave it out."
    remedy = f"write {SETTING}.secrets={{NAME: null}}, and set NAME where you submit"
    yield from secrets(fields["envs"], f"{SETTING}.envs", remedy)
    yield from secrets(fields["secrets"], f"{SETTING}.secrets", remedy, every=True)


sky = partial(
    client_output, "SkyPilot", "sky", "jobs", remedies=REMEDIES, look="sky jobs queue",
    remedy='Install it: pip install "skypilot[CLOUD]"',
)  # fmt: skip


def send(folder: Path) -> str:
    """Submit the task, with those of its secrets that are set here."""
    names = yaml.safe_load((folder / FILE).read_text("utf-8")).get("secrets", {})
    here = [f"--secret={name}" for name in names if name in os.environ]
    # The first job of a user starts the machine of SkyPilot's controller.
    answer = sky("launch", "--yes", "--detach-run", *here, str(folder / FILE), seconds=1800)
    return id_in(answer, r"Managed Job ID: (\d+)", "sky jobs queue")


def status(job: str) -> str:
    """Sentence on the state of a job."""
    answer = sky("queue", "--all", "--output=json")
    rows = json.loads(answer[answer.find("[") :])
    row = next((row for row in rows if str(row["job_id"]) == job), None)
    if row is None:
        raise UserError(f"SkyPilot has no job {job} of yours; `sky jobs queue --all` has all.")
    parts = [f"{row['status']}, {duration(row.get('job_duration') or 0)}"]
    parts += [f"started again {counted(row['recovery_count'], 'time')}"] if row.get("recovery_count") else []
    parts += [row["failure_reason"].rstrip(".")] if row.get("failure_reason") else []
    return f"SkyPilot's job {job} is {', '.join(parts)}."


def logs(job: str) -> str:
    """Log of a job."""
    ended = (0, 100, 101, 103)  # exit codes for the job's state: succeeded, failed, unfinished, cancelled
    return sky("logs", "--no-follow", "--tail=0", job, codes=ended)


def cancel(job: str) -> str:
    """Cancel a job: its run gets SIGTERM, and 30 s."""
    sky("cancel", "--yes", job)
    return (
        f"SkyPilot's job {job} is cancelled: a run that has begun saves a checkpoint if that and a step take "
        "less than 30 s."
    )
