"""DeepSpeed: its JSON, with ZeRO, AutoTP and Ulysses."""

import json
from typing import Any

from meshtune.config import Config
from meshtune.launch.allocator import SETTING
from meshtune.tools.planned import Exported, Planned

SCHEDULERS = {
    "cosine": "WarmupCosineLR",
    "linear": "WarmupDecayLR",
    "constant": "WarmupLR",
    "constant_with_warmup": "WarmupLR",
}


def write(plan: Planned) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk."""
    config, layout = plan.config, plan.layout
    settings = {**engine(plan), "optimizer": optimizer(config)}
    if config.train.max_steps:
        settings["scheduler"] = scheduler(plan, config.train.max_steps)
    count = plan.nodes
    hosts = f"--hostfile hostfile --num_nodes {count} " if count > 1 else ""
    return Exported(
        files={"deepspeed.json": json.dumps(settings, indent=2) + "\n"},
        command=(
            f"{SETTING} deepspeed {hosts}--num_gpus {layout.world // count} your_script.py --deepspeed "
            "--deepspeed_config deepspeed.json"
        ),
    )


def engine(plan: Planned) -> dict[str, Any]:
    """DeepSpeed's JSON, as a mapping, without optimizer and schedule, which a Trainer brings along."""
    train, layout = plan.config.train, plan.layout
    # No train_batch_size: DeepSpeed checks it against the world before it knows of tensor-parallel ranks.
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_clipping": train.max_grad_norm,
        "zero_optimization": {"stage": layout.zero, "overlap_comm": layout.zero > 0},
        "bf16": {"enabled": train.precision != "fp32"},
    }
    if layout.zero == 3:
        settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if train.precision == "bf16-pure" and layout.zero:
        settings["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if train.precision == "bf16" and layout.zero and train.reduce_dtype == "fp32":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
    if layout.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.cp > 1:
        settings["sequence_parallel_size"] = layout.cp
    return settings


def optimizer(config: Config) -> dict[str, Any]:
    train = config.train
    return {
        "type": "AdamW",
        "params": {
            "lr": config.learning_rate,
            "betas": list(train.adam_betas),
            "eps": train.adam_eps,
            "weight_decay": train.weight_decay,
        },
    }


def scheduler(plan: Planned, steps: int) -> dict[str, Any]:
    """DeepSpeed's learning-rate schedule, as JSON: warm-up, and decay until `steps` optimizer steps.

    steps: of the whole run, as train.max_steps. A constant schedule does not decay.
    """
    train = plan.config.train
    # Its schedules count at least one warm-up step.
    settings: dict[str, Any] = {
        "warmup_num_steps": max(1, plan.warmup_steps or 0),
        "warmup_type": "linear",
    }
    if train.lr_scheduler == "cosine":
        settings |= {"warmup_min_ratio": 0.0, "cos_min_ratio": train.min_lr_ratio or 0.0}
    else:
        settings |= {"warmup_min_lr": 0.0, "warmup_max_lr": plan.config.learning_rate}
    if not train.lr_scheduler.startswith("constant"):
        settings["total_num_steps"] = steps
    return {"type": SCHEDULERS[train.lr_scheduler], "params": settings}
