"""Ray's client, `ray job …`, the fields of a job of Ray, and processes that a worker of Ray starts."""

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshtune.addresses import secrets
from meshtune.errors import UserError, did_you_mean, nearest, written
from meshtune.launch.client import client_output, id_in

ENVIRON = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # variables with the address, for Ray's client
JSON = ("runtime_env", "metadata", "entrypoint_resources", "entrypoint_label_selector")
FIELDS = (  # of cluster.ray; all but the first two are those of Ray's job
    "address", "bundle", *JSON, "entrypoint_num_cpus", "entrypoint_num_gpus", "entrypoint_memory",
)  # fmt: skip
OURS = ("entrypoint", "submission_id", "job_id")
ORDINARY = {"env_vars": {"RAY_worker_niceness": "0"}}  # priority; Ray's workers have the nice value 15


def field_problems(options: Mapping[str, Any], by: str) -> Iterator[str]:
    """Yield a sentence for each field of cluster.ray that Ray does not have or `by` sets itself."""
    for name, value in options.items():
        if name in OURS:
            yield f"cluster.ray.{name} is set by {by}; leave it out."
        elif name not in FIELDS:
            yield f"cluster.ray.{name} is not a field of a job of Ray{did_you_mean(nearest(name, FIELDS))}"
        elif name in ("bundle", *JSON) and not isinstance(value, Mapping):
            yield f"cluster.ray.{name} = {written(value)}: write a mapping."
    if isinstance(bundle := options.get("bundle"), Mapping):
        for name, number in bundle.items():
            if type(number) not in (int, float) or number < 0:
                yield f"cluster.ray.bundle.{name} = {written(number)}: write a number, memory in bytes."
    given = options.get("runtime_env")
    environ = given.get("env_vars", {}) if isinstance(given, Mapping) else {}
    if not isinstance(environ, Mapping):
        yield f"cluster.ray.runtime_env.env_vars = {written(environ)}: write a mapping."
    else:
        remedy = "set it where Ray's nodes are started"
        yield from secrets(environ, "cluster.ray.runtime_env.env_vars", remedy)


def submitted(fields: Mapping[str, Any]) -> str:
    """Submit a job of Ray; returns its id, with the address of the cluster where the fields have it."""
    address = fields.get("address")
    if not (address or any(map(os.environ.get, ENVIRON))):  # else Ray's client starts a cluster here
        raise UserError(
            f"No address of a cluster of Ray: set cluster.ray.address=http://HEAD:8265, or {ENVIRON[0]}."
        )
    at = f"@{address}" if address else ""
    return id_in(client(at, *words_of(fields)), r"Job '(.+?)' submitted", "ray job list") + at


def words_of(fields: Mapping[str, Any]) -> list[str]:
    """Words of `ray job` that submit a job, without its address; no option of Ray's reads a file of these."""
    words = ["submit", "--no-wait"]
    for name, value in fields.items():
        if name not in ("address", "entrypoint"):
            option = name.replace("_", "-") + ("-json" if name in JSON[:2] else "")
            words.append(f"--{option}={json.dumps(value) if name in JSON else value}")
    return [*words, "--", *shlex.split(fields["entrypoint"])]


def client(job: str, command: str, *words: str) -> str:
    """Output of `ray job COMMAND`. job: as `submitted` returns it."""
    address = job.partition("@")[2]
    options = [f"--address={address}"] if address else []
    where = {"": f"Asked at {address or 'the address of RAY_API_SERVER_ADDRESS'}."}
    return client_output("Ray", "ray", "job", command, *options, *words, look="ray job list", remedies=where)


def state_of(job: str) -> str:
    """State of a job: PENDING, RUNNING, succeeded, failed, was stopped."""
    answer = client(job, "status", job.partition("@")[0])
    states = r"Job '.+?' (succeeded|failed|was stopped)|Status for job '.+?': (\w+)"
    return next((ended or runs for ended, runs in re.findall(states, answer)), "in an unknown state")


def started(words: Sequence[str], environment: Mapping[str, str], **options: Any) -> Any:
    """Start `meshtune`, which is killed when this process dies; returns its Popen. options: of that."""
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    return subprocess.Popen(
        [sys.executable, "-m", "meshtune", *words], env=environment, stdin=subprocess.DEVNULL, **options,
        preexec_fn=library and (lambda: library.prctl(1, signal.SIGKILL)),  # PR_SET_PDEATHSIG
    )  # fmt: skip
