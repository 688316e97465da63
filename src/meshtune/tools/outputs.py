"""Conversions of evaluation, checkpoints, log and hub."""

from collections.abc import Sequence
from typing import Any

from meshtune.setting import epochs_of
from meshtune.tools.job import Conversion, Converted, Job, NoCounterpart, NotNeeded, short
from meshtune.tools.planned import Planned

TRACKERS = {  # name in log.to -> axolotl's key that switches it on by naming a project
    "tensorboard": "",
    "wandb": "wandb_project",
    "mlflow": "mlflow_experiment_name",
    "trackio": "trackio_project_name",
}
PER_EPOCH = {"eval.every": "evals_per_epoch", "checkpoint.every": "saves_per_epoch"}  # axolotl's keys
NO_TRACKERS = (*TRACKERS, "all", "none", "no", "disklogger", "stdoutlogger")


def interval(share: float) -> str:
    """An interval in epochs as text: "0.25 epoch"."""
    return f"{share:g} epoch"


def asked(setting: str, plan: Planned) -> int | str:
    """The interval of a setting; 0 for evaluations of no rows."""
    return plan.setting(setting) if plan.held_out or setting != "eval.every" else 0


def times(every: int | str) -> int | None:
    """How often in an epoch, where an interval below one epoch is a whole part of it; None for others."""
    number = round(1 / (epochs_of(every) or 1))
    return number if number > 1 and interval(1 / number) == every else None


def trainer_strategy(every: int | str) -> str:
    return "epoch" if every == interval(1) else "steps"


def every(setting: str, value: Any, job: Job) -> dict[str, Any]:
    """An interval of `value` steps, or, below 1, of that share of the run."""
    if float(value) >= 1:
        return {setting: int(float(value))}
    if job.ended_by_steps:
        return {setting: max(1, int(float(value) * int(job.value("max_steps"))))}
    return {setting: interval(float(value) * float(job.value("num_train_epochs", "num_epochs")))}


def strategy(setting: str, key: str, value: Any, job: Job) -> dict[str, Any]:
    """An interval from a strategy and the number of steps of `key`."""
    if job.on(PER_EPOCH[setting]):
        raise NotNeeded(f"{PER_EPOCH[setting]} says how often")
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
    first = job.tool == "axolotl" and "eval.every" in settings
    return settings | ({"eval.at_start": True} if first else {})


def eval_strategy(value: Any, job: Job) -> dict[str, Any]:
    return evaluations(strategy("eval.every", "eval_steps", value, job), job)


def evaluation_strategy(plan: Planned) -> str | None:
    """A Trainer's evaluation schedule: it has steps and epochs, but not "only at the end"."""
    return trainer_strategy(plan.config.eval.every or interval(1)) if plan.held_out else None


def trainer_steps(setting: str, per_epoch: bool = False) -> Conversion:
    """An interval in steps or, below 1, as a share of the run.

    per_epoch: the tool has another key for the number of times in an epoch.
    """

    def read(value: Any, job: Job) -> dict[str, Any]:
        if setting == "eval.every":
            key, chosen = "eval_strategy", job.value("eval_strategy", "evaluation_strategy", default="steps")
        else:  # only steps make it their strategy
            key, chosen = "save_strategy", job.given.get("save_strategy", "steps")
        if short(chosen) != "steps":
            raise NotNeeded(f"{key} is {short(chosen)}")
        return evaluations(every(setting, value, job), job)

    def write(plan: Planned) -> float | None:
        epochs = epochs_of(interval := asked(setting, plan))
        if epochs is None:
            return int(interval) or None
        return None if epochs == 1 or (per_epoch and times(interval)) else epochs / plan.epochs

    return Conversion(read, write)


def per_epoch(setting: str) -> Conversion:
    """The number of times in an epoch."""

    def read(value: Any, job: Job) -> dict[str, Any]:
        if not value:
            return {} if setting == "eval.every" else {setting: 0}
        return evaluations({setting: interval(1 / float(value))}, job)

    return Conversion(read, lambda plan: times(asked(setting, plan)))


def save_strategy(value: Any, job: Job) -> dict[str, Any]:
    return strategy("checkpoint.every", "save_steps", value, job)


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


def tracked(setting: str, name: str) -> Conversion:
    """A tracker's key for the project or the name of the run."""

    def read(value: Any, job: Job) -> dict[str, Any]:
        return {setting: str(value), **switched_trackers(job).settings}

    return Conversion(read, lambda plan: plan.setting(setting) if name in plan.config.log.to else None)


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


MAKERS = {make.__name__: make for make in (tracker, tracked, trainer_steps, per_epoch)}
CONVERSIONS = {
    "early_stopping": Conversion(  # axolotl stops early only with load_best_model_at_end
        lambda value, job: {"eval.early_stopping": value} | ({"eval.keep_best": True} if value else {}),
        lambda plan: plan.config.eval.early_stopping,
    ),
    "trackio_project": Conversion(
        trackio_project, lambda plan: plan.config.log.project if "trackio" in plan.config.log.to else None
    ),
    "metric_logger": Conversion(metric_logger),
    "eval_strategy": Conversion(eval_strategy, evaluation_strategy),
    "save_strategy": Conversion(
        save_strategy,
        lambda plan: trainer_strategy(every) if (every := plan.config.checkpoint.every) else "no",
    ),
    "log_every": Conversion(log_every, lambda plan: plan.config.log.every),
    "trackers": Conversion(lambda value, job: logged(reported(value)), trackers),
    "push_to_hub": Conversion(push_to_hub, lambda plan: bool(plan.config.hub.push_to)),
    "hub_model_id": Conversion(hub_model_id, lambda plan: plan.config.hub.push_to),
}
