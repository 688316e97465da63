"""Slurm: a batch script that is put back into the queue while its run isn't done, sent by sbatch.

Options of the container belong to srun: the script itself needs scontrol, which images lack.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from meshtune.errors import Interrupted, UserError
from meshtune.launch.slurm import (
    COMMENT,
    FORGOTTEN,
    PER_NODE,
    SETTINGS,
    option_words,
    options_of_section,
    remedies_of,
    slurm_output,
    state_of,
    submitted,
)
from meshtune.rundir import BEGUN

if TYPE_CHECKING:
    from meshtune.submit.job import Job

SCRIPT = "job.sbatch"
WAIT = 600  # seconds from the end of the first rank until srun ends the others
# Options that follow from the job; others may be given anew in cluster.slurm.extra.
OURS = (
    "nodes", "ntasks", "ntasks-per-node", "job-name", "array", "chdir", "hold", "parsable", "output",
    "requeue", "no-requeue", "open-mode", "signal", "wrap",
)  # fmt: skip
FIRST = """first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
"""  # where the ranks meet: a container lacks scontrol


def files(job: "Job", options: Mapping[str, Any]) -> dict[str, str]:
    """The batch script. options: cluster.slurm. Raises UserError for options that a job sets itself."""
    if "://" in job.storage:
        raise UserError(
            f"cluster.storage = {job.storage}: Slurm mounts no object store; name a folder that all nodes "
            "see."
        )
    comments, home, theirs = [*job.comments], job.environment.get("HF_HOME"), os.environ.get("HF_HOME")
    if home and theirs not in (None, home):
        comments.append(f"HF_HOME is {home} in the job (cluster.storage), in place of {theirs}.")
    said = "".join(f"# {line}\n" for line in comments)
    directives = "".join(f"#SBATCH {shlex.quote(word)}\n" for word in words_of(job, options))
    exports = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in job.environment.items())
    container, command = options.get("container"), job.command
    if not container and Path(shutil.which("python") or "").parent != Path(sys.executable).parent:
        command = (sys.executable, *command[1:])
    first = FIRST if container and job.machines > 1 else ""
    # --wait: a rank whose slurmstepd was killed never ends for srun. Ranks end within seconds of each other.
    wait = f'--wait="${{SLURM_WAIT:-{WAIT}}}"'
    srun = ["srun", '--cpus-per-task="$SLURM_CPUS_PER_TASK"', wait, *contained(job, container)]
    first += f"mkdir -p {shlex.quote(str(PurePosixPath(job.output).parent))}\n" if container else ""
    text = f"""#!/bin/bash
# Written by `meshtune submit --to slurm`; its next call writes it anew.
{said}{directives}
export {BEGUN}=$(date +%s)
{exports}{first}{" ".join(srun)} {shlex.join(command)}
code=$?
if [ $code -eq {Interrupted.exit_code} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""
    return {SCRIPT: text}


def words_of(job: "Job", options: Mapping[str, Any]) -> list[str]:
    """Options of sbatch; those of cluster.slurm.extra replace ours."""
    problems = list[str]()
    theirs = options_of_section(options, OURS, "meshtune submit", problems)
    if problems:
        raise UserError(problems)
    words: dict[str, Any] = {
        "job-name": job.name, "nodes": f"{job.least}-{job.machines}" if job.least else job.machines,
        "ntasks-per-node": job.gpus,
        **({} if job.processor else {PER_NODE: job.gpus}),
        "cpus-per-task": job.cpus // job.gpus, "mem": f"{job.memory}G", "time": clock(job.limit),
        "requeue": True, "open-mode": "append", "signal": f"USR1@{job.margin}",
    }  # fmt: skip
    return option_words(words, theirs)


def contained(job: "Job", container: str | None) -> list[str]:
    """Words, as the shell reads them, that put the ranks of srun into a container."""
    if not container:
        return []
    here, parent = Path.cwd(), Path(os.path.abspath(job.output)).parent
    folders = [Path(job.mount)] if job.mount else []
    folders += [parent] if not any(map(parent.is_relative_to, (here, *folders))) else []
    seen = ['"$PWD"', *(shlex.quote(str(path)) for path in folders)]
    if container.endswith(".sif"):
        binds = [word for path in seen for word in ("--bind", path)]
        return ["apptainer", "exec", *["--nv"] * (not job.processor), *binds, "--pwd", '"$PWD"',
                shlex.quote(container)]  # fmt: skip
    mounts = ",".join(f"{path}:{path}" for path in seen)
    variables = ",".join([BEGUN, *job.environment, *["MASTER_ADDR"] * (job.machines > 1)])
    return [
        shlex.quote(f"--container-image={container}"), f"--container-mounts={mounts}",
        '--container-workdir="$PWD"', "--no-container-mount-home", f"--container-env={variables}",
    ]  # fmt: skip


def clock(seconds: float) -> str:
    """Whole minutes as sbatch reads them: `clock(93600) == "26:00:00"`."""
    minutes = int(seconds // 60)
    return f"{minutes // 60}:{minutes % 60:02}:00"


def send(folder: Path) -> str:
    """Submit the script; its log is in the folder. Raises UserError with sbatch's words and the setting."""
    log = str(folder.absolute() / "%j.out")
    return submitted(f"--output={log}", str(folder / SCRIPT), remedies=remedies_of(SETTINGS))


def status(job: str) -> str:
    """Sentence on the state of a job."""
    listing = ""
    with suppress(UserError):  # squeue forgets a job that has ended
        listing = slurm_output("squeue", "--noheader", "--format=%T|%M|%l|%R|%k", f"--jobs={job}").strip()
    if listing:
        state, ran, limit, where, comment = listing.splitlines()[0].split("|", 4)
        progress = f"; {comment.removeprefix(COMMENT)}" if comment.startswith(COMMENT) else ""
        return f"Slurm's job {job} is {state}: {ran} of {limit}, {where}{progress}."
    if state := state_of(job):
        return f"Slurm's job {job} has ended: {state}."
    raise UserError(f"Slurm has no job {job}: it was never submitted here, or is forgotten.")


def logs(job: str) -> str:
    """Log of a job. Raises UserError where Slurm has forgotten the job."""
    try:
        shown = slurm_output("scontrol", "show", "job", job)
    except UserError as error:
        if FORGOTTEN not in str(error):
            raise
        raise UserError(
            f"Slurm has forgotten the job {job}; its log is {job}.out next to {SCRIPT}, where `meshtune "
            "submit` wrote it."
        ) from None
    found = re.search(r"^\s*StdOut=(.*)$", shown, re.MULTILINE)
    file = Path(found[1]) if found else Path(f"{job}.out")
    if not file.exists():
        raise UserError(f"The job {job} has written no log yet: {file}. {status(job)}")
    return file.read_text("utf-8", errors="replace")


def cancel(job: str) -> str:
    """Cancel a job: its run gets SIGTERM, and saves where Slurm's KillWait is long enough."""
    slurm_output("scancel", job)
    return (
        f"Slurm's job {job} is cancelled: a run that has begun saves a checkpoint if that and a step take "
        "less than Slurm's KillWait (30 s by default)."
    )
