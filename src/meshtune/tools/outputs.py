"""Evaluation, checkpoints, log and hub of other trainers as settings of ours."""

from collections.abc import Sequence
from typing import Any

from meshtune.tools.job import OFF, Converted, Job, NoCounterpart, NotNeeded, conversion, short
from meshtune.tools.training import ended_by_steps

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


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


def evaluations(converted: Converted, job: Job) -> Converted:
    """Add the evaluation before the first step, which axolotl has whenever it evaluates in between."""
    first = job.tool == "axolotl" and bool(converted.settings)
    return Converted(converted.settings | ({"eval.at_start": True} if first else {}), converted.remark)


@conversion
def eval_strategy(value: Any, job: Job) -> Converted:
    return evaluations(strategy("eval.every", "eval_steps", value, job), job)


@conversion
def eval_steps(value: Any, job: Job) -> Converted:
    chosen = job.value("eval_strategy", "evaluation_strategy", default="steps")
    if short(chosen) != "steps":
        raise NotNeeded(f"eval_strategy is {short(chosen)}")
    return evaluations(every("eval.every", value, job), job)


@conversion
def evals_per_epoch(value: Any, job: Job) -> Converted:
    return evaluations(Converted({"eval.every": interval(1 / float(value))} if value else {}), job)


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
    chosen = job.given.get("save_strategy", "steps")  # steps alone make it their strategy
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
def replace_if(value: Any, job: Job) -> Converted:
    return Converted({"output_exists": "replace"} if value else {})


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


def logged_names(value: Any) -> list[str]:
    """The trackers that report_to names."""
    return [value] if isinstance(value, str) else list(value or ["none"])


@conversion
def trackers(value: Any, job: Job) -> Converted:
    return logged(logged_names(value))


@conversion
def tracker(value: Any, job: Job) -> Converted:
    used = [name for name in TRACKERS if job.on(f"use_{name}")]
    used += [name for name, key in NAMED if job.on(key) and name not in used]
    return logged(used)


@conversion
def tracked_project(value: Any, job: Job) -> Converted:
    return Converted({"log.project": str(value), **tracker(True, job).settings})


@conversion
def trackio_project(value: Any, job: Job) -> Converted:
    if "trackio" not in logged_names(job.value("report_to")):
        raise NotNeeded("only Trackio reads it, and report_to does not name it")
    return Converted({"log.project": str(value)})


NAMED = (
    ("wandb", "wandb_project"),
    ("mlflow", "mlflow_experiment_name"),
    ("trackio", "trackio_project_name"),
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
