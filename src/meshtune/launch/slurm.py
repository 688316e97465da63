"""Slurm's commands: their answers, the options of sbatch, the state of a job."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from meshtune.errors import UserError
from meshtune.launch.client import client_output, id_in

FORGOTTEN = "Invalid job id"  # in the error for a job that the controller has dropped
COMMENT = "meshtune: "  # begins the comment of a job that has its run's progress
PER_NODE = "gpus-per-node"  # option: a number, or kind:number
SETTINGS = {  # words in a refusal of sbatch -> what has the value
    "accounting/qos": "cluster.slurm.qos or cluster.slurm.account, or make the job smaller",
    "account": "cluster.slurm.account", "partition": "cluster.slurm.partition", "qos": "cluster.slurm.qos",
    "feature|constraint": "cluster.slurm.constraint", "time limit": "cluster.time_limit",
    "gres": "cluster.slurm.extra (such as --gpus-per-node=h100:8)", "node count": "--nodes",
    "node configuration": "cluster.gpus_per_node, or cluster.slurm.extra (--mem, --cpus-per-task)",
}  # fmt: skip
INSTEAD = {  # option -> others next to which sbatch refuses it
    "mem": ("mem-per-cpu", "mem-per-gpu"), PER_NODE: ("gres", "gpus", "gpus-per-task"),
}  # fmt: skip


slurm_output = partial(client_output, "Slurm", look="squeue --me")


def remedies_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Remedies for `slurm_output`. settings: words in a refusal -> what has the value."""
    return {rf"(?i)\b({words})\b": f"Change {setting}." for words, setting in settings.items()}


def submitted(*words: str, remedies: Mapping[str, str]) -> str:
    """Submit a job by sbatch; returns its id."""
    answer = slurm_output("sbatch", "--parsable", *words, remedies=remedies)
    return id_in(answer, r"(?m)^(\d+)(?:;|$)", "squeue --me")  # a site's own lines may be around it


def long_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of sbatch by their names as sbatch writes them: gpus-per-node for gpus_per_node."""
    return {str(name).lstrip("-").replace("_", "-"): value for name, value in options.items()}


def option_problems(names: Mapping[str, Any], ours: Collection[str], setting: str, by: str) -> Iterator[str]:
    """Yield a sentence for each option of sbatch that is set elsewhere, for each name that is none, and for a
    number of GPUs that can't be read.

    names: as `long_options` returns them. ours: options that `by` sets itself. setting: begins their names.
    """
    for name in names:
        if name in ours:
            yield f"{setting}{name} is set by {by}; leave it out."
        if not re.fullmatch(r"[a-z][a-z-]+", name):
            yield f"{setting}{name} isn't a long option of sbatch; write it as in partition: gpu."
    per_node = str(names.get(PER_NODE, "1"))
    if not re.fullmatch(r"([\w.-]+:)?[1-9]\d{0,3}", per_node):
        yield f"{setting}{PER_NODE} = {per_node}: write a number of GPUs, 8 or h100:8."


def options_of_section(
    section: Mapping[str, Any], ours: Collection[str], by: str, problems: list[str]
) -> dict[str, Any]:
    """Options of sbatch in cluster.slurm, by name. problems: gets a sentence for each wrong one, as
    `option_problems` yields them.
    """
    extra: dict[str, Any] = {}
    for word in section.get("extra", ()):
        name, equals, value = word.removeprefix("--").partition("=")
        extra[name] = value if equals else True
        if not word.startswith("--"):
            problems.append(f"cluster.slurm.extra: {word} isn't an option such as --comment=sft.")
    problems += option_problems(extra, ours, "cluster.slurm.extra: --", by)
    names = ("partition", "account", "qos", "constraint")
    return {name: section[name] for name in names if section.get(name)} | extra


def option_words(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Options of sbatch as words, --name for True, nothing for False; theirs replace ours, and those of ours
    that sbatch refuses next to them.
    """
    kept = {name: ours[name] for name in ours if theirs.keys().isdisjoint(INSTEAD.get(name, ()))}
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in {**kept, **theirs}.items()
        if value is not False
    ]


def state_of(job: str) -> str:
    """State of a job or task, by the controller or, where that has forgotten it, by the accounting; empty
    where that does not know it or is not there. Raises UserError if the controller does not answer.
    """
    try:
        words = slurm_output("scontrol", "show", "job", job).partition("JobState=")[2]
    except UserError as error:
        if FORGOTTEN not in str(error):
            raise
        words = ""
        with suppress(UserError):
            options = ("--noheader", "--parsable2", "--allocations", "--format=State")
            words = slurm_output("sacct", *options, f"--jobs={job}")
    return re.findall("^[A-Z_]*", words)[0]
