"""transformers' TrainingArguments from a config, for Trainer scripts under accelerate and LLaMA-Factory."""

from typing import Any

from meshtune.config import Config
from meshtune.layout import Layout
from meshtune.schedules import transformers_schedule


def training_arguments(config: Config, layout: Layout) -> dict[str, Any]:
    """TrainingArguments of transformers 5, by name, where `warmup_steps` below 1 is a share of all steps.

    Recomputation is not among them: each tool sets it in its own way.
    """
    train, checkpoint = config.train, config.checkpoint
    arguments = {
        "output_dir": config.output,
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": schedule(config)[0],
        "warmup_steps": train.warmup_ratio if train.warmup_steps is None else train.warmup_steps,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "optim": "adamw_torch_fused",
        "adam_beta1": train.adam_betas[0],
        "adam_beta2": train.adam_betas[1],
        "adam_epsilon": train.adam_eps,
        "bf16": train.precision == "bf16",
        "torch_compile": train.compile,
        "seed": train.seed,
        "logging_steps": config.log.every,
        "save_strategy": "steps" if checkpoint.every else "no",
        "save_total_limit": checkpoint.keep,
        "report_to": trackers(config) or "none",
        **evaluation(config),
    }
    if train.label_smoothing:
        arguments["label_smoothing_factor"] = train.label_smoothing
    if train.neftune_alpha:
        arguments["neftune_noise_alpha"] = train.neftune_alpha
    if options := schedule(config)[1]:
        arguments["lr_scheduler_kwargs"] = options
    if checkpoint.every:
        arguments["save_steps"] = checkpoint.every
    if train.max_steps:
        arguments["max_steps"] = train.max_steps
    if train.num_epochs:
        arguments["num_train_epochs"] = train.num_epochs
    if config.hub.push_to:
        arguments |= {
            "push_to_hub": True,
            "hub_model_id": config.hub.push_to,
            "hub_private_repo": config.hub.private,
        }
    return arguments


def schedule(config: Config) -> tuple[str, dict[str, Any]]:
    """(lr_scheduler_type, lr_scheduler_kwargs) of the learning-rate schedule."""
    train = config.train
    return transformers_schedule(
        train.lr_scheduler,
        peak=config.learning_rate,
        total_steps=train.max_steps or 0,
        min_ratio=train.min_lr_ratio,
        arguments=train.lr_scheduler_kwargs,
    )


def evaluation(config: Config) -> dict[str, Any]:
    """A Trainer's evaluation schedule: it has steps and epochs, but not "at the end only"."""
    if not (config.data.eval or config.data.eval_split):
        return {}
    if config.eval.every:
        return {"eval_strategy": "steps", "eval_steps": config.eval.every}
    return {"eval_strategy": "epoch"}


def trackers(config: Config) -> list[str]:
    """The trackers of log.to that transformers knows by the same name."""
    return [name for name in config.log.to if name in ("tensorboard", "wandb", "mlflow", "trackio")]
