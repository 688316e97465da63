"""The table of engines, and the names of their jobs: slurm:1234 is the job 1234 of Slurm."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshtune.addresses import has_secret, public, written_out
from meshtune.config import Config
from meshtune.errors import Table, UserError
from meshtune.rundir import write_text_atomically
from meshtune.setting import Section
from meshtune.submit import dstack, kubeflow, ray, sky, slurm

if TYPE_CHECKING:
    from meshtune.submit.job import Job


class Engine(Protocol):
    """A module of this package that submits jobs to one kind of cluster.

    Each function raises UserError where the engine's client is missing or refuses, with its words.
    """

    def files(self, job: "Job", options: Mapping[str, Any]) -> dict[str, str]:
        """Texts of the files of a job, by name. options: the engine's section of the settings."""
        ...

    def send(self, folder: Path) -> str:
        """Submit what `files` made, now in `folder`; returns the engine's id of the job."""
        ...

    def status(self, job: str) -> str:
        """Sentence on a job, by its id."""
        ...

    def logs(self, job: str) -> str:
        """Log of a job, as far as it is written."""
        ...

    def cancel(self, job: str) -> str:
        """Cancel a job; returns a sentence on it."""
        ...


ELASTIC = ("slurm", "ray")  # engines that start a job on more than one number of machines
ENGINES: Mapping[str, Engine] = Table(
    "--to", {"slurm": slurm, "sky": sky, "kubeflow": kubeflow, "ray": ray, "dstack": dstack}
)


def files_of(config: Config, to: str, job: "Job") -> dict[str, str]:
    """Texts of the files of a job for the engine `to`. Raises UserError as the engine, where it starts a job
    on one number of machines, and for files with a secret.
    """
    if job.least and to not in ELASTIC:
        raise UserError(
            f"--elastic {job.least}:{job.machines}: {to} starts a job on one number of machines; give it by "
            f"--nodes, or use {' or '.join(ELASTIC)}."
        )
    problems = [
        f"{public(word)}: the file would have the secret of an address; leave that out, and give credentials "
        "as variables of the machines."
        for word in job.command
        if has_secret(word)
    ]
    if to != "slurm" and job.mount and not job.mount.startswith("/"):
        problems.append(
            f"cluster.storage = {job.storage}: write the whole path, which is the same on all machines."
        )
    if problems:
        raise UserError(problems)
    engine, options = ENGINES[to], getattr(config.cluster_config, to)
    files = engine.files(job, options.model_dump() if isinstance(options, Section) else options)
    if problems := [problem for name, text in files.items() for problem in written_out(text, name)]:
        raise UserError(problems)
    return files


def write(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write the files of a job; those of an earlier call are replaced. Returns their paths."""
    for name, text in files.items():
        write_text_atomically(folder / name, text)
    return [folder / name for name in files]


def found(job: str) -> tuple[Engine, str]:
    """(The engine, its id) of a job's name. Raises UserError for a name without an engine."""
    to, colon, number = job.partition(":")
    if not (colon and number and to in ENGINES):
        kinds = ", ".join(f"{name}:ID" for name in ENGINES)
        raise UserError(f"{job} is not the name of a job, as `meshtune submit` printed it: {kinds}.")
    return ENGINES[to], number
