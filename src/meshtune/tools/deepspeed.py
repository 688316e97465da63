"""DeepSpeed: its JSON, with ZeRO, AutoTP and Ulysses."""

import json
from collections.abc import Iterator
from typing import Any

from meshtune.config import Config
from meshtune.launch.allocator import SETTING
from meshtune.layout import Layout
from meshtune.placement.rules import Rule
from meshtune.plan.programs import TOOLS
from meshtune.tools.exported import (
    Exported,
    nodes,
    not_carried_over,
    schedule_refusals,
    warmup_steps,
)
from meshtune.tools.refused import parts_of_blocks, sequence_parallelism

TOOL = TOOLS["deepspeed"].title
SCHEDULERS = {
    "cosine": "WarmupCosineLR",
    "linear": "WarmupDecayLR",
    "constant": "WarmupLR",
    "constant_with_warmup": "WarmupLR",
}


def write(config: Config, layout: Layout, blocks: int, gpus_per_node: int) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk.

    blocks: of the model.
    """
    settings = {**engine(config, layout), "optimizer": optimizer(config)}
    if config.train.max_steps:
        settings["scheduler"] = scheduler(config, config.train.max_steps)
    count = nodes(layout, gpus_per_node)
    hosts = f"--hostfile hostfile --num_nodes {count} " if count > 1 else ""
    return Exported(
        files={"deepspeed.json": json.dumps(settings, indent=2) + "\n"},
        command=(
            f"{SETTING} deepspeed {hosts}--num_gpus {layout.world // count} your_script.py --deepspeed "
            "--deepspeed_config deepspeed.json"
        ),
        missing=(*differences(config, layout), *not_carried_over(TOOL, config)),
    )


def engine(config: Config, layout: Layout) -> dict[str, Any]:
    """DeepSpeed's JSON, as a mapping, without optimizer and schedule, which a Trainer brings along."""
    train = config.train
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


def scheduler(config: Config, steps: int) -> dict[str, Any]:
    """DeepSpeed's learning-rate schedule, as JSON: warm-up, and decay until `steps` optimizer steps.

    steps: of the whole run, as train.max_steps. A constant schedule does not decay.
    """
    train = config.train
    # Its schedules count at least one warm-up step.
    settings: dict[str, Any] = {
        "warmup_num_steps": max(1, warmup_steps(config) or 0),
        "warmup_type": "linear",
    }
    if train.lr_scheduler == "cosine":
        settings |= {"warmup_min_ratio": 0.0, "cos_min_ratio": train.min_lr_ratio or 0.0}
    else:
        settings |= {"warmup_min_lr": 0.0, "warmup_max_lr": config.learning_rate}
    if not train.lr_scheduler.startswith("constant"):
        settings["total_num_steps"] = steps
    return {"type": SCHEDULERS[train.lr_scheduler], "params": settings}


def problems(config: Config) -> Iterator[str]:
    """Sentences on settings that this tool alone can't have."""
    yield from schedule_refusals(TOOL, config, with_floor=["cosine"])


def rules(_config: Config, _blocks: int, _seq_len: int) -> Iterator[Rule]:
    """Rules on layouts that the tool can't run."""
    yield from engine_rules(TOOL)
    yield Rule(
        f"{TOOL}'s context parallelism is Ulysses",
        lambda layouts: (layouts.cp > 1) & ~layouts.ulysses,
        lambda layout: (
            f"{TOOL}'s context parallelism is Ulysses; for cp{layout.cp} use accelerate or "
            f"torchtitan, or plan ulysses{layout.cp}."
        ),
    )
    yield Rule(
        f"{TOOL} runs Ulysses or AutoTP, not both",
        lambda layouts: (layouts.cp > 1) & (layouts.tp > 1),
        lambda layout: f"{TOOL} runs Ulysses or AutoTP, not both; drop ulysses{layout.cp} or tp{layout.tp}.",
    )


def engine_rules(tool: str) -> Iterator[Rule]:
    """Rules on layouts that DeepSpeed's engine can't run, whichever tool starts it, but for those on cp.

    tool: its name, for the sentences.
    """
    yield Rule(
        f"{tool} pipelines models written as its PipelineModule, not Hugging Face models",
        lambda layouts: layouts.pp > 1,
        lambda layout: (
            f"{tool} pipelines models written as its PipelineModule, not Hugging Face models; for "
            f"pp{layout.pp} use torchtitan or megatron, or a layout such as "
            f"zero3x{layout.dp_shard * layout.pp}."
        ),
    )
    yield Rule(
        f"{tool} shards over all data ranks",
        lambda layouts: (layouts.dp_replicate > 1) & (layouts.dp_shard > 1),
        lambda layout: (
            f"{tool} shards over all data ranks; write zero{layout.zero}x{layout.data_ranks} instead of "
            f"dp{layout.dp_replicate}-zero{layout.zero}x{layout.dp_shard}."
        ),
    )
    yield sequence_parallelism(tool)
    yield from parts_of_blocks(tool)


def differences(config: Config, layout: Layout) -> Iterator[str]:
    """Sentences on what the tool runs differently, or leaves to be done by hand."""
    yield "The model, the data, packing, train_on and LoRA belong to the training script."
    if layout.recompute != "none":
        yield (
            f"recompute={layout.recompute} has no key: the script calls "
            "model.gradient_checkpointing_enable(), which recomputes whole blocks."
        )
    if not config.train.max_steps:
        yield (
            "Without train.max_steps DeepSpeed's schedules can't be written: the script sets the learning "
            "rate."
        )
    yield from engine_differences(config, layout)


def engine_differences(config: Config, layout: Layout) -> Iterator[str]:
    """Sentences on what DeepSpeed's engine runs differently, whichever tool starts it."""
    if layout.cp > 1:
        yield (
            "The script registers UlyssesSPAttentionHF and wraps its loader in UlyssesSPDataLoaderAdapter "
            f"for ulysses{layout.cp} to hold."
        )
    if config.train.precision == "bf16" and not layout.zero and config.train.reduce_dtype == "fp32":
        yield (
            "DeepSpeed without ZeRO adds up bf16 gradients in bf16; train.reduce_dtype=fp32 has no key there."
        )
    if config.train.precision == "bf16-pure" and not layout.zero:
        yield "DeepSpeed without ZeRO keeps fp32 master weights with bf16; bf16-pure has no key there."
    if config.train.compile:
        yield "train.compile has no key: the script calls engine.compile()."
