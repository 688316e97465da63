"""Conversions of evaluation, checkpoints, log and hub."""

from collections.abc import Sequence
from typing import Any

from meshtune.tools.job import Conversion, Converted, Job, NoCounterpart, NotNeeded, short
from meshtune.tools.planned import Planned

TRACKERS = {  # name in log.to -> axolotl's key that switches it on by naming a project
    "tensorboard": "",
    "wandb": "wandb_project",
    "mlflow": "mlflow_experiment_name",
    "trackio": "trackio_project_name",
}
NO_TRACKERS = (*TRACKERS, "all", "none", "no", "disklogger", "stdoutlogger")


def interval(share: float) -> str:
    """An interval in epochs as text: "0.25 epoch"."""
    return f"{share:g} epoch"


def every(setting: str, value: Any, job: Job) -> dict[str, Any]:
    """An interval of `value` steps, or, below 1, of that share of the run."""
    if float(value) >= 1:
        return {setting: int(float(value))}
    if job.ended_by_steps:
        return {setting: max(1, int(float(value) * int(job.value("max_steps"))))}
    return {setting: interval(float(value) * float(job.value("num_train_epochs", "num_epochs")))}


def strategy(setting: str, key: str, value: Any, job: Job) -> dict[str, Any]:
    """An interval from a strategy and the number of steps of `key`."""
    match short(value):
        case "no":
            return {setting: 0} if setting == "checkpoint.every" else {}
        case "epoch":
            return {setting: interval(1)}
        case "steps":
            return every(setting, job.value(key, "logging_steps", default=500), job)
    raise NoCounterpart(f"there is no strategy {value}; {setting} takes steps or epochs")


def evaluations(settings: dict[str, Any], job: Job) -> dict[str, Any]:
    """Add the evaluation before the first step, which axolotl has whenever it evaluates in between."""
    return settings | ({"eval.at_start": True} if job.tool == "axolotl" and settings else {})


def eval_strategy(value: Any, job: Job) -> dict[str, Any]:
    return evaluations(strategy("eval.every", "eval_steps", value, job), job)


def evaluation_strategy(plan: Planned) -> str | None:
    """A Trainer's evaluation schedule: it has steps and epochs, but not "only at the end"."""
    return ("steps" if plan.config.eval.every else "epoch") if plan.held_out else None


def eval_steps(value: Any, job: Job) -> dict[str, Any]:
    chosen = short(job.value("eval_strategy", "evaluation_strategy", default="steps"))
    if chosen != "steps":
        raise NotNeeded(f"eval_strategy is {chosen}")
    return evaluations(every("eval.every", value, job), job)


def evals_per_epoch(value: Any, job: Job) -> dict[str, Any]:
    return evaluations({"eval.every": interval(1 / float(value))} if value else {}, job)


def save_strategy(value: Any, job: Job) -> dict[str, Any]:
    return strategy("checkpoint.every", "save_steps", value, job)


def save_steps(value: Any, job: Job) -> dict[str, Any]:
    chosen = short(job.given.get("save_strategy", "steps"))  # only steps make it their strategy
    if chosen != "steps":
        raise NotNeeded(f"save_strategy is {chosen}")
    return every("checkpoint.every", value, job)


def saves_per_epoch(value: Any, job: Job) -> dict[str, Any]:
    return {"checkpoint.every": interval(1 / float(value)) if value else 0}


# Log and hub #


def log_every(value: Any, job: Job) -> dict[str, Any]:
    if float(value) < 1:
        raise NoCounterpart("log.every takes steps, 1 unless it is set")
    return {"log.every": int(float(value))}


def logged(found: Sequence[str]) -> Converted:
    """log.to for other trainers' names of trackers."""
    kept = TRACKERS if "all" in found else [name for name in TRACKERS if name in found]
    left = [name for name in found if name not in NO_TRACKERS]
    remark = f"without {', '.join(left)}" if left else ""
    return Converted({"log.to": ["console", "jsonl", *kept]}, remark)


def reported(value: Any) -> list[str]:
    """The trackers that report_to names."""
    return [value] if isinstance(value, str) else list(value or ["none"])


def trackers(plan: Planned) -> list[str] | str:
    return [name for name in plan.config.log.to if name in TRACKERS] or "none"


def switched_trackers(job: Job) -> Converted:
    """axolotl's trackers: switched on by a key of their own, or by naming their project."""
    used = [name for name in TRACKERS if job.on(f"use_{name}")]
    used += [name for name, key in TRACKERS.items() if key and job.on(key) and name not in used]
    return logged(used)


def tracker(_: str, name: str) -> Conversion:
    return Conversion(lambda value, job: switched_trackers(job), lambda plan: name in plan.config.log.to)


def tracked_project(value: Any, job: Job) -> dict[str, Any]:
    return {"log.project": str(value), **switched_trackers(job).settings}


def trackio_project(value: Any, job: Job) -> dict[str, Any]:
    if "trackio" not in reported(job.value("report_to")):
        raise NotNeeded("only Trackio reads it, and report_to does not name it")
    return {"log.project": str(value)}


def metric_logger(value: Any, job: Job) -> Converted:
    name = short(value)
    return logged([name.removesuffix("logger")] if "disk" not in name and "stdout" not in name else [])


def push_to_hub(value: Any, job: Job) -> dict[str, Any]:
    if not value:
        return {}
    name = job.value("hub_model_id") or str(job.value("output_dir")).rstrip("/").rpartition("/")[2]
    return {"hub.push_to": name}


def hub_model_id(value: Any, job: Job) -> dict[str, Any]:
    if not job.on("push_to_hub"):
        raise NotNeeded("push_to_hub is off")
    return {}


MAKERS = {"tracker": tracker}
READ = (evals_per_epoch, saves_per_epoch, tracked_project, trackio_project, metric_logger)
CONVERSIONS = {
    **{read.__name__: Conversion(read) for read in READ},
    "eval_strategy": Conversion(eval_strategy, evaluation_strategy),
    "eval_steps": Conversion(
        eval_steps, lambda plan: plan.config.eval.every or None if plan.held_out else None
    ),
    "save_strategy": Conversion(
        save_strategy, lambda plan: "steps" if plan.config.checkpoint.every else "no"
    ),
    "save_steps": Conversion(save_steps, lambda plan: plan.config.checkpoint.every or None),
    "log_every": Conversion(log_every, lambda plan: plan.config.log.every),
    "trackers": Conversion(lambda value, job: logged(reported(value)), trackers),
    "push_to_hub": Conversion(push_to_hub, lambda plan: bool(plan.config.hub.push_to)),
    "hub_model_id": Conversion(hub_model_id, lambda plan: plan.config.hub.push_to),
}
