"""Conversions of values, by the names in the tables of trainers/: (value of a key, job) -> settings.

    @conversion
    def warmup(value, job): ...        warmup_steps = ["train.warmup_steps", "warmup"]

A conversion raises NoCounterpart, NotNeeded or Refused where it has no settings to give (job.py).
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from meshtune.migrate.job import OFF, Converted, Job, NoCounterpart, NotNeeded, Refused
from meshtune.optimizers import OPTIMIZERS
from meshtune.schedules import SCHEDULES

Conversion = Callable[[Any, Job], Converted]
CONVERSIONS: dict[str, Conversion] = {}
TEMPLATES = ("alpaca", "chatml", "gemma", "llama3", "mistral")  # built-ins of data/templates
TRACKERS = ("tensorboard", "wandb", "mlflow")
MLP = ("gate_proj", "up_proj", "down_proj")


def conversion(function: Conversion) -> Conversion:
    CONVERSIONS[function.__name__] = function
    return function


def short(value: Any) -> str:
    """The last part of a component's name in lower case: torch.optim.AdamW is adamw."""
    return str(getattr(value, "value", value)).rpartition(".")[2].lower()


# Model and method


@conversion
def attention(value: Any, job: Job) -> Converted:
    name = {"disabled": "eager"}.get(str(value), str(value))
    if name == "eager" or (name == "sdpa" and not packs(job)):
        return Converted({"model.attention": name})
    return Converted({})  # auto: the fastest that keeps packed documents apart


@conversion
def sdpa_if(value: Any, job: Job) -> Converted:
    return attention("sdpa" if value else "auto", job)


@conversion
def eager_if(value: Any, job: Job) -> Converted:
    return attention("eager" if value else "auto", job)


@conversion
def model_arguments(value: Any, job: Job) -> Converted:
    arguments = json.loads(value) if isinstance(value, str) else dict(value)
    settings = {}
    if "attn_implementation" in arguments:
        settings |= attention(arguments.pop("attn_implementation"), job).settings
    for theirs, ours in (("revision", "model.revision"), ("trust_remote_code", "model.trust_remote_code")):
        if theirs in arguments:
            settings[ours] = arguments.pop(theirs)
    left = [name for name in arguments if name not in ("dtype", "torch_dtype", "use_cache", "device_map")]
    return Converted(settings, f"without {', '.join(left)}: the model is run unchanged" if left else "")


@conversion
def random(value: Any, job: Job) -> Converted:
    return Converted({"model.init": "random"} if value else {})


@conversion
def adapter(value: Any, job: Job) -> Converted:
    if value == "lora":
        return Converted({"method": "lora"})
    if value == "qlora":
        return Converted({"method": "lora"}, "the base is held in bf16, not in 4 bit: 4 times its memory")
    raise Refused(f"adapter: {value} is not offered; meshtune trains all weights or LoRA.")


@conversion
def lora_if(value: Any, job: Job) -> Converted:
    return Converted({"method": "lora" if value else "full"})


@conversion
def lora_or_full(value: Any, job: Job) -> Converted:
    if value not in ("lora", "full"):
        raise Refused(f"finetuning_type: {value} is not offered; meshtune trains all weights or LoRA.")
    return Converted({"method": value})


@conversion
def torchtune_model(value: Any, job: Job) -> Converted:
    name = short(value)
    remark = "the base is held in bf16, not in 4 bit" if name.startswith("qlora") else ""
    return Converted({"method": "lora" if "lora_" in name else "full"}, remark)


def is_lora(job: Job) -> bool:
    """True if the file trains an adapter."""
    model = job.value("model._component_")
    chosen = job.value("adapter") or job.value("finetuning_type") or short(model)
    return bool(job.value("use_peft")) or "lora" in str(chosen)


@conversion
def llama_factory_rank(value: Any, job: Job) -> Converted:
    alpha = {} if "lora_alpha" in job.given else {"lora.alpha": 2 * value}
    return Converted({"lora.r": value, **alpha})


@conversion
def all_linear(value: Any, job: Job) -> Converted:
    return Converted({"lora.target_modules": "all-linear"} if value else {})


@conversion
def modules(value: Any, job: Job) -> Converted:
    if job.on("lora_target_linear"):
        raise NotNeeded("lora_target_linear takes all linear layers")
    names = value.split(",") if isinstance(value, str) else list(value)
    names = [name.strip() for name in names]
    if names in (["all"], ["all-linear"], ["linear"]):
        return Converted({"lora.target_modules": "all-linear"})
    return Converted({"lora.target_modules": names})


@conversion
def torchtune_modules(value: Any, job: Job) -> Converted:
    theirs = job.value("model.lora_attn_modules", default=[])
    names = ["o_proj" if name == "output_proj" else name for name in theirs]
    names += MLP if job.on("model.apply_lora_to_mlp") else ()
    head = "without the output layer, which apply_lora_to_output adds"
    return Converted(
        {"lora.target_modules": "all-linear" if len(names) == 7 else names},
        head if job.on("model.apply_lora_to_output") else "",
    )


@conversion
def weights_dtype(value: Any, job: Job) -> Converted:
    return precision(job)


@conversion
def bf16(value: Any, job: Job) -> Converted:
    return precision(job)


@conversion
def pure_bf16(value: Any, job: Job) -> Converted:
    return precision(job)


@conversion
def fp32(value: Any, job: Job) -> Converted:
    return precision(job)


@conversion
def fp16(value: Any, job: Job) -> Converted:
    if value not in OFF:
        raise NoCounterpart("fp16 needs loss scaling, which is not offered; train.precision is bf16")
    return precision(job)


def precision(job: Job) -> Converted:
    """The precision that the file's flags and the dtype of its weights make together."""
    dtype = job.value("dtype", "torch_dtype")
    if job.on("pure_bf16", "bfloat16"):
        return Converted({"train.precision": "bf16-pure"})
    if job.on("bf16", "fp16", "float16") and not job.on("float32"):
        pure = short(dtype) == "bfloat16" and not is_lora(job)
        return Converted({"train.precision": "bf16-pure" if pure else "bf16"})
    return Converted({"train.precision": "bf16-pure" if short(dtype) == "bfloat16" else "fp32"})


@conversion
def torchtune_dtype(value: Any, job: Job) -> Converted:
    if value == "fp16":
        raise NoCounterpart("fp16 needs loss scaling, which is not offered; train.precision is bf16")
    return Converted({"train.precision": "bf16-pure" if value == "bf16" else str(value)})


@conversion
def cpu(value: Any, job: Job) -> Converted:
    return Converted({"train.device": "cpu"} if value else {})


@conversion
def device(value: Any, job: Job) -> Converted:
    return Converted({"train.device": "cpu"} if value == "cpu" else {})


@conversion
def compiled(value: Any, job: Job) -> Converted:
    return Converted({"train.compile": value is True} if value != "auto" else {})


# Rate, length, optimizer


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
    if ended_by_steps(job):
        raise NotNeeded("the number of steps ends the run")
    return Converted({"train.num_epochs": float(value)})


@conversion
def steps_per_epoch(value: Any, job: Job) -> Converted:
    return Converted({"train.max_steps": int(value) * int(job.value("epochs", default=1))})


def ended_by_steps(job: Job) -> bool:
    return int(job.value("max_steps", default=-1)) > 0 or "max_steps_per_epoch" in job.given


@conversion
def optimizer(value: Any, job: Job) -> Converted:
    name = short(value)
    kind = next((kind for kind in OPTIMIZERS if kind in name.split("_") or name.startswith(kind)), None)
    if kind is None:
        raise NoCounterpart(f"there is no optimizer {name}; train.optimizer is adamw")
    if "8bit" in name or "4bit" in name or "fp8" in name:
        return Converted({"train.optimizer": kind}, "its states are not quantised: more memory, same updates")
    return Converted({"train.optimizer": kind})


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


# Labels and sequences


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
        raise NoCounterpart(
            "TRL labels all tokens of messages, which data.train_on=all does, and the completions of prompts"
        )
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
    return Converted({"data.overlong": {"truncate": "cut", "raise": "error"}.get(value, value)})


@conversion
def truncation(value: Any, job: Job) -> Converted:
    if value != "keep_start":
        raise NoCounterpart("rows that are too long keep their start; data.overlong: drop leaves them out")
    return Converted({})


@conversion
def no_limit(value: Any, job: Job) -> Converted:
    if value == "no limit":
        raise NoCounterpart("rows are cut to data.seq_len, 2048 unless it is set")
    return Converted({"data.seq_len": int(value)})


@conversion
def template_name(value: Any, job: Job) -> Converted:
    name = str(value).removeprefix("tokenizer_default_fallback_")
    if value == "tokenizer_default" or value != name:
        return Converted({})
    if name not in TEMPLATES:
        raise NoCounterpart(f"there is no template {name} here; the tokenizer's own chat template is used")
    return Converted({"data.chat_template": name})


@conversion
def thinking(value: Any, job: Job) -> Converted:
    return Converted({} if value else {"data.chat_template_kwargs": {"enable_thinking": False}})


@conversion
def mix(value: Any, job: Job) -> Converted:
    if value != "concat":
        raise NoCounterpart("sources are concatenated and shuffled; data.train.weight repeats or thins one")
    return Converted({})


# Evaluation, checkpoints, log, hub


def interval(share: float) -> str:
    """An interval in epochs as text: "0.25 epoch"."""
    return f"{share:g} epoch"


def every(setting: str, value: Any, job: Job) -> Converted:
    """An interval of `value` steps, or, below 1, of that share of the run."""
    if float(value) >= 1:
        return Converted({setting: int(float(value))})
    if ended_by_steps(job):
        return Converted({setting: max(1, int(float(value) * int(job.value("max_steps"))))})
    return Converted({setting: interval(float(value) * float(job.value("num_train_epochs", "num_epochs")))})


def strategy(setting: str, key: str, value: Any, job: Job) -> Converted:
    """An interval from a strategy and the number of steps of `key`."""
    match short(value):
        case "no":
            return Converted({setting: 0} if setting == "checkpoint.every" else {})
        case "epoch":
            return Converted({setting: interval(1)})
        case "steps":
            return every(setting, job.value(key, "logging_steps", default=500), job)
    raise NoCounterpart(f"there is no strategy {value}; {setting} takes steps or epochs")


def holds_out(job: Job) -> bool:
    """True if the file names rows to evaluate on."""
    keys = ("val_set_size", "test_datasets", "val_size", "eval_dataset", "test_split_size", "dataset_name")
    return job.on(*keys) or any(override.startswith("data.eval") for override in job.overrides)


def needs_held_out_rows(job: Job) -> None:
    if not holds_out(job):
        raise NotNeeded("the file names no rows to evaluate on; with data.eval, set eval.every")


@conversion
def eval_strategy(value: Any, job: Job) -> Converted:
    if short(value) != "no":
        needs_held_out_rows(job)
    return strategy("eval.every", "eval_steps", value, job)


@conversion
def eval_steps(value: Any, job: Job) -> Converted:
    needs_held_out_rows(job)
    chosen = job.value("eval_strategy", "evaluation_strategy", default="steps")
    if short(chosen) != "steps":
        raise NotNeeded(f"eval_strategy is {short(chosen)}")
    return every("eval.every", value, job)


@conversion
def evals_per_epoch(value: Any, job: Job) -> Converted:
    needs_held_out_rows(job)
    return Converted({"eval.every": interval(1 / float(value))} if value else {})


@conversion
def keep_best(value: Any, job: Job) -> Converted:
    return Converted({"eval.keep_best": True} if value else {})


@conversion
def best_by_loss(value: Any, job: Job) -> Converted:
    if value not in ("loss", "eval_loss"):
        raise NoCounterpart("the best checkpoint is the one with the lowest loss on held-out rows")
    return Converted({})


@conversion
def save_strategy(value: Any, job: Job) -> Converted:
    return strategy("checkpoint.every", "save_steps", value, job)


@conversion
def save_steps(value: Any, job: Job) -> Converted:
    chosen = job.value("save_strategy", default="steps")
    if short(chosen) != "steps":
        raise NotNeeded(f"save_strategy is {short(chosen)}")
    return every("checkpoint.every", value, job)


@conversion
def saves_per_epoch(value: Any, job: Job) -> Converted:
    return Converted({"checkpoint.every": interval(1 / float(value)) if value else 0})


@conversion
def resume(value: Any, job: Job) -> Converted:
    if value not in (*OFF, True):
        raise NoCounterpart("a run goes on from the checkpoints of its own output folder; set output")
    return Converted({})  # checkpoint.resume: auto is the default


@conversion
def log_every(value: Any, job: Job) -> Converted:
    if float(value) < 1:
        raise NoCounterpart("log.every takes steps, 1 unless it is set")
    return Converted({"log.every": int(float(value))})


def logged(names: Sequence[str]) -> Converted:
    """log.to for other trainers' names of trackers."""
    kept = TRACKERS if "all" in names else [name for name in TRACKERS if name in names]
    left = [
        name for name in names if name not in (*TRACKERS, "all", "none", "no", "disklogger", "stdoutlogger")
    ]
    remark = f"without {', '.join(left)}" if left else ""
    return Converted({"log.to": ["console", "jsonl", *kept]}, remark)


@conversion
def trackers(value: Any, job: Job) -> Converted:
    return logged([value] if isinstance(value, str) else list(value or ["none"]))


@conversion
def tracker(value: Any, job: Job) -> Converted:
    used = [name for name in TRACKERS if job.on(f"use_{name}")]
    used += [name for name, key in NAMED if job.on(key) and name not in used]
    return logged(used)


NAMED = (
    ("wandb", "wandb_project"),
    ("mlflow", "mlflow_experiment_name"),
)  # axolotl: naming one switches it on


@conversion
def metric_logger(value: Any, job: Job) -> Converted:
    name = short(value)
    return logged([name.removesuffix("logger")] if "disk" not in name and "stdout" not in name else [])


@conversion
def push_to_hub(value: Any, job: Job) -> Converted:
    if not value:
        return Converted({})
    name = job.value("hub_model_id") or str(job.value("output_dir")).rstrip("/").rpartition("/")[2]
    return Converted({"hub.push_to": name})


@conversion
def hub_model_id(value: Any, job: Job) -> Converted:
    if not job.on("push_to_hub"):
        raise NotNeeded("push_to_hub is off")
    return Converted({})


@conversion
def section(value: Any, job: Job) -> Converted:
    """Give nothing: the keys in the section are converted one by one."""
    return Converted({})


@conversion
def elsewhere(value: Any, job: Job) -> Converted:
    """Give nothing: the conversion of another key reads this one."""
    return Converted({})
