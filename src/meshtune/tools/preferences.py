"""The objective that a file of another trainer is for, and conversions of the keys of preferences.

    tree, file name ── objective_of ──> Told("dpo", "by beta, loss_type") ──> Job.objective

[told] of a tool's table has the keys and values that tell it. A file of TRL has none that names its trainer:
[objectives] of trl.toml lists the keys and losses of each.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from meshtune.errors import UserError
from meshtune.objectives import OBJECTIVES
from meshtune.sections import DataConfig, DpoConfig
from meshtune.tools.job import (
    Conversion,
    Converted,
    Job,
    NoCounterpart,
    NotNeeded,
    Refused,
    flat,
    is_off,
    listed,
    sections,
    short,
)
from meshtune.tools.table import table

LOSSES = {
    "dpo": get_args(DpoConfig.model_fields["loss_type"].annotation),
    "kto": ("kto",),
    "simpo": ("simpo",),
}
NAMING = ("output_dir", "run_name", "hub_model_id")


class Told(NamedTuple):
    """The objective of a file."""

    objective: str
    origin: str = ""  # clause on what tells it


def objective_of(tool: str, tree: Mapping[str, Any], file: Path, overrides: Sequence[str]) -> Told:
    """The objective of a file; sft where nothing tells another. Raises UserError where several fit.

    overrides: section.key=value of ours; `objective=…` among them decides.
    """
    chosen = [value for key, _, value in (each.partition("=") for each in overrides) if key == "objective"]
    if chosen:
        return Told(OBJECTIVES[chosen[-1]] and chosen[-1], "the command line")
    if tool == "trl":
        return _told_by_keys(tree, file)
    known, given = table(tool), set[str]()
    for key, value in flat(tree, known):
        if not is_off(value):
            names = value, short(value), str(value).partition(".")[0]
            given |= {key, *(f"{key}={name}" for name in names)}
    for conditions, settings in known.tree.get("told", {}).items():
        if {*conditions.split()} <= given:
            return Told(settings["objective"], f"by {conditions.partition('=')[0]}")
    return Told("sft")


def told_values(tool: str, key: str) -> dict[str, dict[str, Any]]:
    """Values of a key that tell the objective of a file -> their settings."""
    told, start = table(tool).tree["told"], f"{key}="
    values = (each for each in told if each.startswith(start) and " " not in each)
    return {each.removeprefix(start): told[each] for each in values}


def _told_by_keys(tree: Mapping[str, Any], file: Path) -> Told:
    """`objective_of` a file of TRL: whose configurations have all its keys, or else by names in the file."""
    known = table("trl").tree["objectives"]
    every = {key for each in known.values() for key in each["keys"].split()}
    keys = [key for key in tree if key in every and not is_off(tree[key])]
    fitting = [name for name, each in known.items() if {*keys} <= {*each["keys"].split()}]
    losses = {str(loss) for loss in listed(tree.get("loss_type") or [])}
    if losses & {loss for each in known.values() for loss in each["losses"].split()}:
        keys.append("loss_type")
        fitting = [name for name in fitting if losses <= {*known[name]["losses"].split()}]
    if str(tree.get("lora_task_type")).lower() == "seq_cls":
        keys.append("lora_task_type")
        fitting = [name for name in fitting if name == "reward"]
    if any({"chosen", "rejected"} <= columns for columns in _columns(tree)):
        keys.append("the columns chosen and rejected")
    words = [*_words(file.stem), file.parent.name]
    words += [word for key in NAMING for word in _words(str(tree.get(key) or ""))]
    objectives = {word: name for name, each in known.items() for word in each["names"].split()}
    objectives |= dict.fromkeys(table("trl").tree["other_names"].split(), "")
    named = dict.fromkeys(objectives[word] for word in words if word in objectives)
    clause = f"by {', '.join(keys)}"
    if not keys:
        named = {} if "sft" in words else named
        return Told(next(iter(named)) or "sft", "by its name") if len(named) == 1 else Told("sft")
    if len(fitting) > 1 and len(among := [name for name in named if name in fitting]) == 1:
        return Told(among[0], f"{clause} and its name")
    if "loss_type" in keys and "dpo" in fitting:
        fitting = ["dpo"]
    if len(fitting) != 1 or "" in named:
        these = " or ".join(fitting) if fitting else "no single objective"
        raise UserError(
            f"{file} has {', '.join(keys)}: these tune by preferences, and fit {these}. Name the objective "
            "of its trainer: objective=dpo, kto, orpo, simpo (CPOTrainer with its loss simpo) or reward. "
            "Answers that are generated while training (GRPO, PPO) are not supported."
        )
    return Told(fitting[0], clause)


def _words(text: str) -> list[str]:
    return re.findall("[a-z]+", text.lower())


def _columns(tree: Mapping[str, Any]) -> Iterator[set[str]]:
    """Yield the columns of each data set that names them."""
    mixture = tree.get("dataset_mixture")
    for rows in (tree.get("datasets"), mixture.get("datasets") if isinstance(mixture, Mapping) else None):
        yield from ({*(each.get("columns") or ())} for each in sections(rows))


# Conversions #


def preference(setting: str, *more: str) -> Conversion:
    """The same value in the section of the objective. more: settings of other objectives."""

    def read(value: Any, job: Job) -> dict[str, Any]:
        for name in (setting, *more):
            if name.partition(".")[0] == job.objective:
                return {name: value}
        raise NotNeeded(f"it has no effect with objective {job.objective}")

    return Conversion(read)


def losses(setting: str, weights: str, supervised: str = "") -> Conversion:
    """Loss of preferences, or several, with the cross entropy (sft) as dpo.sft_weight.

    weights: the key that has theirs. supervised: why a loss of sft has no counterpart; empty: it isn't read.
    """

    def read(value: Any, job: Job) -> Converted:
        if job.objective == "sft" and supervised and value not in ("nll", "chunked_nll"):
            raise NoCounterpart(supervised.format(value=value))
        if job.objective == "sft" and supervised:
            return Converted({})
        if job.objective not in LOSSES:
            raise NotNeeded(f"it has no effect with objective {job.objective}")
        own = "gamma_beta_ratio" in job.given and value == "sigmoid"  # of SimPO's own trainer
        names = ["simpo"] if own else listed(value)
        shares = dict(zip(names, job.value(weights) or [1.0] * len(names), strict=True))
        supervision = float(shares.pop("sft", 0)) if job.objective == "dpo" else 0.0
        if len(shares) != 1 or not shares.keys() <= {*LOSSES[job.objective]}:
            not_offered(", ".join(names), job)
        ((name, share),) = shares.items()
        made: dict[str, Any] = {"dpo.loss_type": name} if job.objective == "dpo" else {}
        if supervision:
            made["dpo.sft_weight"] = supervision / float(share)
        scaled = f"the sum of losses is divided by the weight {share} of {name}" if float(share) != 1 else ""
        return Converted(made, scaled)

    return Conversion(read)


def not_offered(name: str, job: Job) -> None:
    """Refuse a loss, or note it where the command line chooses another. Raises Refused or NoCounterpart."""
    offered = LOSSES[job.objective]
    chosen = ("objective=", f"{job.objective}.loss_type=")
    only = "only its own" if job.objective == "kto" else ", ".join(offered)
    sentence = f"objective {job.objective} has {only}"
    if any(override.startswith(chosen) for override in job.overrides):
        raise NoCounterpart(f"{sentence}; the command line chooses one")
    way = f"dpo.loss_type={offered[0]}" if job.objective == "dpo" else f"objective={job.objective}"
    trainer = " of CPO" * (job.objective == "simpo")
    raise Refused(
        f"The loss {name}{trainer} is not offered: {sentence}. {way} on the command line trains that instead."
    )


def told(_: str, key: str, refusal: str) -> Conversion:
    """The settings of a value of `key` in [told]. refusal: sentence on a value that isn't there."""

    def read(value: Any, job: Job) -> dict[str, Any]:
        offered = told_values(job.tool, key)
        if value not in offered:
            raise Refused(refusal.format(value=value, offered=", ".join(offered)))
        return offered[value]

    return Conversion(read)


def cpo_alpha(value: Any, job: Job) -> Converted:
    """CPO's weight of the cross entropy, which SimPO's own trainer lacks."""
    own = "gamma_beta_ratio" in job.given
    return Converted({}) if own else preference("simpo.sft_weight").converted(value, job)


def gamma_beta_ratio(value: Any, job: Job) -> Converted:
    """Gamma of SimPO's own trainer, as a share of a beta whose default is not CPO's."""
    if "beta" not in job.given:
        raise Refused("gamma_beta_ratio is a share of beta, which the file leaves out; set beta in it.")
    return preference("simpo.gamma").converted(float(value) * float(job.given["beta"]), job)


def pref_loss(value: Any, job: Job) -> dict[str, Any]:
    """LLaMA-Factory's loss of the stage dpo, which may be another objective."""
    if value == job.objective:
        return {"objective": value}
    if job.value("stage") != "dpo":
        raise NotNeeded("it is of the stage dpo")
    return losses("dpo.loss_type", "").converted(value, job).settings


def pref_ftx(value: Any, job: Job) -> dict[str, Any]:
    if value and job.objective in ("kto", "orpo"):
        raise NoCounterpart(f"objective {job.objective} has no weight of the cross entropy")
    return preference("dpo.sft_weight", "simpo.sft_weight").converted(value, job).settings


def reference_folder(value: Any, job: Job) -> dict[str, Any]:
    """torchtune's reference; the model's own folder is what `base` means."""
    base = value == job.value("checkpointer.checkpoint_dir")
    return preference("dpo.reference").converted("base" if base else value, job).settings


def sides(value: Any, job: Job) -> Converted:
    """The length of a row; a pair has two sides, which are one sequence here."""
    free = "rows have no limit there; meshtune data counts the cut ones" if value == "no limit" else ""
    length = DataConfig.model_fields["seq_len"].default if free else int(value)
    made: dict[str, Any] = {"data.seq_len": length}
    if job.objective != "sft" and job.tool != "axolotl":  # which has a key for it
        made["data.overlong"] = "drop" if (job.tool, job.objective) == ("trl", "reward") else "cut"
    if free or OBJECTIVES[job.objective].rows != "pairs":
        return Converted(made, free)
    remark = f"a sequence has both sides of a pair, {length} tokens each"
    return Converted(made | {"data.seq_len": 2 * length}, remark)


def dropout(value: Any, job: Job) -> Converted:
    """Dropout of adapters, which trainers of preferences switch off with all other."""
    off = job.objective != "sft" and job.value("disable_dropout", default=job.value("stage") != "rm")
    if not (off and value):
        return Converted({"lora.dropout": value})
    return Converted(
        {"lora.dropout": 0.0}, f"trainers of preferences switch dropout off, also {value} of the adapter"
    )


MAKERS = {make.__name__: make for make in (preference, losses, told)}
CONVERSIONS = {
    **{
        read.__name__: Conversion(read)
        for read in (cpo_alpha, gamma_beta_ratio, pref_loss, pref_ftx, reference_folder)
    },
    "sides": Conversion(sides, lambda plan: plan.config.data.seq_len),
    "dropout": Conversion(dropout, lambda plan: plan.config.lora.dropout),
}
