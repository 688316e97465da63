"""Engines that read one YAML file: our fields, those of the user laid over them, and the checks of both."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import yaml

from meshtune.config import SETTINGS, Config
from meshtune.data.files import matches
from meshtune.errors import expanded, type_name, written
from meshtune.filesystem import texts
from meshtune.setting import is_path
from meshtune.yaml_tree import overridden, read_yaml

if TYPE_CHECKING:
    from meshtune.submit.job import Job

GPUS = {  # kind of our catalogue -> name in SkyPilot (None: it has none), name and memory in dstack
    "a100-40": ("A100", "A100:40GB"), "a100-80": ("A100-80GB", "A100:80GB"),
    "h100-sxm": ("H100", "H100:80GB"), "h100-nvl": ("H100-NVL", "H100NVL:94GB"),
    "h200": ("H200", "H200:141GB"), "h200-nvl": (None, "H200NVL:141GB"), "gh200": ("GH200", "GH200:96GB"),
    "b200": ("B200", "B200:180GB"), "gb200": ("GB200", "GB200:186GB"), "b300": ("B300", "B300:270GB"),
    "gb300": ("GB300", "GB300:270GB"), "mi300x": ("MI300X", "MI300X:192GB"), "l40s": ("L40S", "L40S:48GB"),
    "l4": ("L4", "L4:24GB"), "a10g": ("A10G", "A10G:24GB"), "a6000": ("RTXA6000", "A6000:48GB"),
    "rtx-3090": ("RTX3090", "RTX3090:24GB"), "rtx-3090-ti": (None, "RTX3090Ti:24GB"),
    "rtx-4090": ("RTX4090", "RTX4090:24GB"), "rtx-5090": ("RTX5090", "RTX5090:32GB"),
}  # fmt: skip
WRITTEN = ("output", "data.cache", "cluster.storage", "log.textfile_directory")  # paths that a run writes


def name_of(job: "Job") -> str:
    """The job's name; engines ask for two characters and a letter first."""
    return job.name if re.match("[a-z].", job.name) else f"run-{job.name}"[:40].rstrip("-")


def inputs(job: "Job", mounts: Iterable[str], problems: list[str]) -> dict[str, str]:
    """Files of this machine that the command names, but for those below `mounts`: name there -> file here.

    Files of folders are listed one by one: of folders the clients leave out what a .gitignore names.
    problems: gets a sentence for each of them with a name that means another file on the machines.
    """
    words = job.command[job.command.index("train") + 1 :]
    files = [word for word in words if "=" not in word]
    trees: list[dict[str, Any]] = [{}, {}]  # all settings; those of a cluster that a file describes
    for file in files:
        trees[0] |= read_yaml(expanded(file), SETTINGS) if expanded(file).exists() else {}
    for word in words:
        if "=" in word:
            described = isinstance(trees[0].get("cluster"), str)  # by a file, which the run reads too
            place = described and word.startswith("cluster.")
            trees[place] = overridden(trees[place], word)
    named = [(text, key) for tree in trees for key, text in texts(tree) if key not in WRITTEN]
    written_so = [*files, *(one for one, key in named if is_path(one, key, Config))]
    read = [expanded(text) for text in written_so]
    problems += [
        f"{text} is {path} here, and the home folder or a variable is another on the machines: write {path}."
        for text, path in zip(written_so, read, strict=True)
        if re.match(r"~|.*\$", text) and (path.exists() or matches(path))
    ]
    found = [path for one in read for path in ([one] if one.exists() else matches(one))]
    names = [
        str(file) for path in found for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.is_file() and not re.search(r"/\.", str(file.relative_to(path.parent)))
    ]  # fmt: skip
    return {name: os.path.realpath(name) for name in names if not below(name, mounts)}


def below(path: str, folders: Iterable[str]) -> bool:
    """True if the path is in one of the folders, or is one."""
    return any(map(PurePosixPath(path).is_relative_to, folders))


def laid(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], fixed: Iterable[str], place: str, problems: list[str]
) -> dict[str, Any]:
    """Our fields with those of the user laid over them.

    place: the setting that has `theirs`. fixed: full names of fields that a job sets itself. problems: gets a
    sentence for each of these, and for each value of another kind than our mapping or list.
    """
    fields = dict(ours)
    for name, value in theirs.items():
        field, kind = f"{place}.{name}", type(ours.get(name))
        if field in fixed:
            problems.append(f"{field} is set by meshtune submit; leave it out.")
        elif kind not in (dict, list):
            fields[name] = value
        elif type(value) is not kind:
            problems.append(f"{field} = {written(value)}: write {type_name(ours[name])}.")
        else:
            fields[name] = (
                laid(ours[name], value, fixed, field, problems) if isinstance(value, dict) else value
            )
    return fields


def lost(job: "Job", mounts: Iterable[str], remedy: str) -> Iterator[str]:
    """Yield a sentence if the run folder is on none of the folders that outlive the machines."""
    if not below(job.output, mounts):
        yield f"output = {job.output} would be lost with its machines: {remedy}."


def text_of(
    to: str, comments: Iterable[str], *trees: Mapping[str, Any], dumper: Any = yaml.SafeDumper
) -> str:
    """The file of an engine, a document for each tree; fields without a value are left out."""
    lines = [f"Written by `meshtune submit --to {to}`; its next call writes it anew.", *comments]
    given = ({name: value for name, value in tree.items() if value not in (None, {}, [])} for tree in trees)
    dumped = yaml.dump_all(given, Dumper=dumper, sort_keys=False, allow_unicode=True, width=10**6)
    return "".join(f"# {line}\n" for line in lines) + dumped
