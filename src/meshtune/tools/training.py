"""Length, rate, optimizer, labels and sequences of other trainers as settings of ours."""

import json
from collections.abc import Mapping
from typing import Any

from meshtune.data.messages import REASONING
from meshtune.schedules import SCHEDULES
from meshtune.sections import DataConfig
from meshtune.setting import is_template
from meshtune.tools.job import Converted, Job, NoCounterpart, NotNeeded, Refused, conversion, short
from meshtune.tools.sources import has_alpaca_prompts, listed
from meshtune.tools.table import counterpart

TEMPLATES = ("alpaca", "chatml", "gemma", "llama3", "mistral")  # built-ins of data/templates


@conversion
def schedule(value: Any, job: Job) -> Converted:
    name = short(value).removeprefix("get_").replace("_schedule_with_warmup", "").replace("_schedule", "")
    if name not in SCHEDULES:
        raise NoCounterpart(f"there is no schedule {name}; train.lr_scheduler is cosine")
    if SCHEDULES[name].needs_floor and not (floors(job) or job.on("cosine_min_lr_ratio")):
        return Converted({"train.lr_scheduler": name.replace("_with_min_lr", "")}, "without its least rate")
    return Converted({"train.lr_scheduler": name})


def scheduled(job: Job) -> str:
    """Name of the schedule that `schedule` gives, "" for none."""
    value = job.value("lr_scheduler_type", "lr_scheduler", "lr_scheduler._component_", default="")
    try:
        return schedule(value, job).settings.get("train.lr_scheduler", "")
    except NoCounterpart:
        return ""


@conversion
def schedule_arguments(value: Any, job: Job) -> Converted:
    arguments = json.loads(value) if isinstance(value, str) else dict(value)
    settings: dict[str, Any] = floors(job)
    for name in ("min_lr", "min_lr_rate", "min_lr_ratio"):
        arguments.pop(name, None)
    taken = SCHEDULES[scheduled(job) or "cosine"].arguments
    if kept := {name: entry for name, entry in arguments.items() if name in taken}:
        settings["train.lr_scheduler_kwargs"] = kept
    left = [name for name in arguments if name not in taken]
    return Converted(settings, f"without {', '.join(left)}, which the schedule does not take" if left else "")


def floors(job: Job) -> dict[str, float]:
    """{"train.min_lr_ratio": ...} where the arguments of the schedule say how low the rate ends."""
    value = job.value("lr_scheduler_kwargs", default={})
    arguments = json.loads(value) if isinstance(value, str) else dict(value)
    if "min_lr" in arguments and job.value("learning_rate"):
        return {"train.min_lr_ratio": float(arguments["min_lr"]) / float(job.value("learning_rate"))}
    given = arguments.get("min_lr_rate", arguments.get("min_lr_ratio"))
    return {} if given is None else {"train.min_lr_ratio": float(given)}


@conversion
def least_rate(value: Any, job: Job) -> Converted:
    if SCHEDULES[scheduled(job) or "cosine"].floor is None:
        raise NotNeeded(f"the schedule {scheduled(job)} has no least rate")
    return Converted({"train.min_lr_ratio": float(value)})


@conversion
def warmup(value: Any, job: Job) -> Converted:
    no_warmup_for_constant(job)
    if not value and job.value("warmup_ratio"):
        return Converted({})
    if 0 < float(value) < 1:
        return Converted({"train.warmup_ratio": float(value)})
    return Converted({"train.warmup_steps": int(value)})


@conversion
def warmup_ratio(value: Any, job: Job) -> Converted:
    no_warmup_for_constant(job)
    if job.value("warmup_steps"):
        raise NotNeeded("warmup_steps says how long to warm up")
    return Converted({"train.warmup_ratio": float(value)})


def no_warmup_for_constant(job: Job) -> None:
    name = scheduled(job)
    if name and not SCHEDULES[name].warmup:
        raise NotNeeded(f"the schedule {name} has no warm-up")


@conversion
def above_zero(value: Any, job: Job) -> Converted:
    return Converted({"train.max_steps": int(value)} if int(value) > 0 else {})


@conversion
def epochs(value: Any, job: Job) -> Converted:
    if "max_steps_per_epoch" in job.given:
        return steps_per_epoch(job.given["max_steps_per_epoch"], job)
    if ended_by_steps(job):
        raise NotNeeded("the number of steps ends the run")
    return Converted({"train.num_epochs": float(value)})


@conversion
def steps_per_epoch(value: Any, job: Job) -> Converted:
    number = int(job.value("epochs", default=1))
    return Converted({"train.max_steps": int(value) * number}, f"{value} steps in each of {number} epochs")


def ended_by_steps(job: Job) -> bool:
    return int(job.value("max_steps", default=-1)) > 0 or "max_steps_per_epoch" in job.given


@conversion
def optimizer(value: Any, job: Job) -> Converted:
    if job.on("use_muon"):
        raise NotNeeded("use_muon chooses the optimizer")
    ours = counterpart("train.optimizer", short(value))
    if ours is None:
        raise NoCounterpart(f"there is no optimizer {short(value)}; train.optimizer is adamw")
    setting, _, name = ours.write.partition("=")
    return Converted({setting: name}, lost=ours.why)


@conversion
def weight_decay(value: Any, job: Job) -> Converted:
    """Convert torchtune's, whose default is AdamW's own: other optimizers have none."""
    if "optimizer.weight_decay" not in job.given and "adamw" not in short(job.value("optimizer._component_")):
        raise NotNeeded("the optimizer has no weight decay of its own")
    return Converted({"train.weight_decay": float(value)})


@conversion
def use_muon(value: Any, job: Job) -> Converted:
    return Converted({"train.optimizer": "muon"} if value else {})


@conversion
def first_beta(value: Any, job: Job) -> Converted:
    return Converted({"train.adam_betas": [float(value), float(job.value("adam_beta2", default=0.999))]})


@conversion
def second_beta(value: Any, job: Job) -> Converted:
    return Converted({"train.adam_betas": [float(job.value("adam_beta1", default=0.9)), float(value)]})


@conversion
def plain_loss(value: Any, job: Job) -> Converted:
    if value not in ("nll", "chunked_nll"):
        raise NoCounterpart(f"there is no loss {value}; it is the mean cross-entropy of label tokens")
    return Converted({})


PLUGINS = ("cutcrossentropy", "liger", "kernels", "expertparallel", "swanlab", "lmeval")  # train the same


@conversion
def plugins(value: Any, job: Job) -> Converted:
    others = [str(name) for name in listed(value) if short(name).removesuffix("plugin") not in PLUGINS]
    if others:
        raise NoCounterpart(f"what {', '.join(others)} changes in training is left out")
    raise NotNeeded("the forward, its attention, loss and kernels are chosen by meshtune")


@conversion
def torchtune_loss(value: Any, job: Job) -> Converted:
    if "crossentropy" not in short(value) and not short(value).startswith("ce"):
        raise NoCounterpart(f"there is no loss {short(value)}; it is the mean cross-entropy of label tokens")
    raise NotNeeded("the loss is the chunked mean cross-entropy of label tokens")


@conversion
def always(value: Any, job: Job) -> Converted:
    if not value:
        raise NoCounterpart("it is always on here")
    return Converted({})


@conversion
def never(value: Any, job: Job) -> Converted:
    if value:
        raise NoCounterpart("it is never on here")
    return Converted({})


@conversion
def packing_strategy(value: Any, job: Job) -> Converted:
    if str(value) == "wrapped" and packs(job):
        raise NoCounterpart("documents of a sequence do not see each other, and are cut only where too long")
    return Converted({})


@conversion
def trains(value: Any, job: Job) -> Converted:
    if not value:
        raise Refused(f"do_train: {value} trains nothing. meshtune eval and meshtune generate run a model.")
    raise NotNeeded("a run trains")


# Labels and sequences


LABELS = (
    "only the template and data.train_on decide which tokens are labelled, and weight or train in the rows"
)


def of_rows(key: str, job: Job) -> list[Any]:
    """The values of a key in axolotl's data sets."""
    rows = [each for each in listed(job.value("datasets")) if isinstance(each, Mapping)]
    return [each[key] for each in rows if each.get(key) is not None]


@conversion
def labelled_roles(value: Any, job: Job) -> Converted:
    roles = {role for each in of_rows("roles_to_train", job) for role in listed(each)}
    if not roles <= {"assistant", "gpt", "model"}:
        raise NoCounterpart(f"{LABELS}; see docs/data.md")
    return Converted({})


@conversion
def thought_field(value: Any, job: Job) -> Converted:
    if value not in REASONING:
        raise NoCounterpart(f"the thought of a message is its {', '.join(REASONING[:-1])} or {REASONING[-1]}")
    return Converted({})


@conversion
def labelled_ends(value: Any, job: Job) -> Converted:
    if {*of_rows("train_on_eos", job), *of_rows("train_on_eot", job)} - {"turn"}:  # axolotl's default
        raise NoCounterpart(f"{LABELS}; an answer's end is labelled with it")
    return Converted({})


@conversion
def train_on_inputs(value: Any, job: Job) -> Converted:
    return Converted({"data.train_on": "all" if value else "assistant"})


@conversion
def train_on_prompt(value: Any, job: Job) -> Converted:
    if job.value("stage") == "pt" or value:
        return Converted({"data.train_on": "all"})
    return Converted({"data.train_on": "completion" if job.on("mask_history") else "assistant"})


@conversion
def mask_history(value: Any, job: Job) -> Converted:
    return train_on_prompt(job.value("train_on_prompt"), job)


@conversion
def stage(value: Any, job: Job) -> Converted:
    if value not in ("sft", "pt"):
        raise Refused(f"stage: {value} is no supervised fine-tuning; meshtune trains the stages sft and pt.")
    return train_on_prompt(job.value("train_on_prompt"), job)


@conversion
def assistant_only(value: Any, job: Job) -> Converted:
    return Converted({"data.train_on": "assistant"} if value else {})


@conversion
def completion_only(value: Any, job: Job) -> Converted:
    if job.on("assistant_only_loss"):
        raise NotNeeded("assistant_only_loss says which tokens are labelled")
    if value == "by the rows":
        if "completion" in job.value("datasets.columns", default=()):
            return Converted({"data.train_on": "completion"})
        remark = "so for messages and text; where rows have a prompt and a completion, set completion"
        return Converted({"data.train_on": "all"}, remark)
    return Converted({"data.train_on": "completion" if value else "all"})


@conversion
def llama_factory_packing(value: Any, job: Job) -> Converted:
    given = job.given.get("packing", job.value("stage") == "pt")
    remark = "" if job.on("neat_packing") else "documents of a sequence do not see each other"
    if given or job.on("neat_packing"):
        return Converted({"data.packing": True}, remark)
    return Converted({"data.packing": False})


def packs(job: Job) -> bool:
    return job.on("packing", "neat_packing", "sample_packing", "dataset.packed")


@conversion
def overlong(value: Any, job: Job) -> Converted:
    rows = job.value("datasets", default=[])
    kinds = {str(each.get("type")) for each in listed(rows) if isinstance(each, Mapping)}
    if kinds == {"completion"} or job.on(
        "pretraining_dataset"
    ):  # axolotl splits plain text, whatever this says
        value = "truncate"  # as `auto` does
    return Converted({"data.overlong": {"truncate": "auto", "raise": "error"}.get(value, value)})


@conversion
def truncation(value: Any, job: Job) -> Converted:
    if value != "keep_start":
        raise NoCounterpart("rows that are too long keep their start; data.overlong: drop leaves them out")
    return Converted({})


@conversion
def no_limit(value: Any, job: Job) -> Converted:
    if value == "no limit":
        length = DataConfig.model_fields["seq_len"].default
        return Converted(
            {"data.seq_len": length}, "rows have no limit there; meshtune data counts the cut ones"
        )
    return Converted({"data.seq_len": int(value)})


@conversion
def template_name(value: Any, job: Job) -> Converted:
    if is_template(str(value)):
        return Converted({"data.chat_template": value})
    if has_alpaca_prompts(job):
        raise NotNeeded("rows of type alpaca have a prompt of their own")
    name = str(value).removeprefix("tokenizer_default_fallback_")
    if value != name and name in TEMPLATES:
        return Converted({}, lost=f"where the tokenizer has no template, set data.chat_template={name}")
    if value != name:
        return Converted({}, lost=f"where the tokenizer has no template: there is no template {name} here")
    if value == "tokenizer_default":
        return Converted({})
    if job.on("chat_template_jinja"):
        raise NotNeeded("chat_template_jinja is the template")
    if name not in TEMPLATES:
        raise NoCounterpart(
            f"there is no template {name} here; the tokenizer's own is used, and where it has none, "
            "data.chat_template takes a built-in's name, a file or the template itself"
        )
    alpaca = name == "alpaca" and job.tool == "llama_factory"
    return Converted({"data.chat_template": name}, "without the first line (Below is ...)" if alpaca else "")


@conversion
def jinja(value: Any, job: Job) -> Converted:
    return Converted({"data.chat_template": str(value)})


@conversion
def thinking(value: Any, job: Job) -> Converted:
    return Converted({} if value else {"data.chat_template_kwargs": {"enable_thinking": False}})


@conversion
def mix(value: Any, job: Job) -> Converted:
    if value != "concat":
        raise NoCounterpart("sources are concatenated and shuffled; data.train.weight repeats or thins one")
    return Converted({})


@conversion
def answer_tokens(value: Any, job: Job) -> Converted:
    if value == 0:
        raise NotNeeded("0: no answers are written")
    return Converted({"eval.max_new_tokens": value})


@conversion
def batch_of_rank(value: Any, job: Job) -> Converted:
    """axolotl's batch_size: sequences of a GPU in a step, from which the accumulation follows."""
    micro = int(job.value("micro_batch_size"))
    if "gradient_accumulation_steps" in job.given:
        raise NotNeeded("gradient_accumulation_steps comes before it")
    if int(value) % micro:
        raise NoCounterpart(f"micro_batch_size {micro} does not divide it; set train.global_batch_size")
    return Converted({"layout.gradient_accumulation_steps": int(value) // micro})
