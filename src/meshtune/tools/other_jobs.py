"""Tell files of jobs that are not trained here, by the keys of jobs.toml."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshtune.tools.job import is_off
from meshtune.tools.preferences import told_values
from meshtune.tools.table import toml

COMPONENTS = ("_component_", "_target_")  # keys with the name of a class or a function
NAMED = ("datasets.type", "plugins")  # axolotl's


class OtherJob(NamedTuple):
    """A job that is not trained here."""

    keys: tuple[str, ...]  # that tell it
    sentence: str


def other_job(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> OtherJob | None:
    """The job of a file by the keys that tell it; None for one that is trained here.

    Of several jobs it is the one with most such keys. overrides: of ours, which may name the objective.
    """
    tree = {**tree, "objective": any(each.startswith("objective=") for each in overrides)}
    told = [(list(dict.fromkeys(_signs(tree, job))), job) for job in toml("jobs")["job"]]
    told = [([] if job.get("dialect") and len(signs) < 2 else signs, job) for signs, job in told]
    signs, job = max(told, key=lambda pair: min(len(pair[0]), 1) if pair[1].get("weak") else len(pair[0]))
    if not signs:
        return None
    keys = tuple(sign.partition(":")[0] for sign in signs)
    shown = ", ".join(signs[:4])
    if job.get("dialect"):
        return OtherJob(keys, f"{shown}: this is {job['name']}, whose keys are not read.")
    instead = f" Instead: {job['instead']}." if job["instead"] else ""
    trained = f"meshtune trains on answers and preferences.{instead}"
    return OtherJob(keys, f"{shown}: this is {job['name']}; {trained}")


def _signs(tree: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of a file tells a job: keys, keys with their value, and components."""
    if job.get("staged") and str(tree.get("stage")).lower() in told_values("llama_factory", "stage"):
        return  # its other keys are defaults
    trains = tree.get("do_train") in (None, True)
    if trains and any(not is_off(tree.get(key)) for key in job.get("without", "").split()):
        return
    for key in job["keys"].split():
        if key in tree and (job.get("dialect") or not is_off(tree[key])):
            yield key
    for key, values in job["values"].items():
        given = tree.get(key)
        if any(str(each).lower() in values for each in (given if isinstance(given, list) else [given])):
            yield f"{key}: {given}"
    for key, name in _components(tree):
        if any(_is_part(part, name.lower()) for part in job["parts"]):
            yield f"{key}: {name}"


def _is_part(part: str, name: str) -> bool:
    """Whether a word of a component's name begins with a part; "support" has no "ppo"."""
    return part in name if "_" in part else any(word.startswith(part) for word in re.split(r"[._]", name))


def _components(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key of its section, name) of each component in a file."""
    if isinstance(value, str) and path in NAMED:
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key in COMPONENTS and isinstance(inner, str):
                yield path, inner
            else:
                yield from _components(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _components(inner, path)
