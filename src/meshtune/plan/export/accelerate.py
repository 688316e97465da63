"""Hugging Face accelerate: the launcher's YAML (FSDP2 and ParallelismConfig) and, since it holds no batch
size, the TrainingArguments for a Trainer script.
"""

from collections.abc import Iterator
from typing import Any

import yaml

from meshtune.config import Config
from meshtune.layout import Layout
from meshtune.plan.export.arguments import training_arguments
from meshtune.plan.export.exported import (
    Exported,
    evaluation_differences,
    nodes,
    not_carried_over,
    refuse,
    whole_blocks,
    without_sequence_parallelism,
)

TOOL = "accelerate"


def write(config: Config, layout: Layout, gpus_per_node: int) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk.

    Raises UserError, with every reason, if it can't run them.
    """
    refuse(TOOL, config, layout, gpus_per_node, problems(layout))
    recompute, changed = whole_blocks(TOOL, layout)
    launch = launcher(config, layout, gpus_per_node, recompute)
    arguments = training_arguments(config, layout)
    # Under FSDP the wrapper recomputes; recomputing in the model as well would gather every block twice.
    arguments["gradient_checkpointing"] = recompute and "fsdp_config" not in launch
    several = " --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR" if "rdzv_backend" in launch else ""
    return Exported(
        files={
            "accelerate.yaml": yaml.safe_dump(launch, sort_keys=False),
            "training_arguments.yaml": yaml.safe_dump(arguments, sort_keys=False),
        },
        command=(
            f"accelerate launch --config_file accelerate.yaml{several} your_script.py training_arguments.yaml"
        ),
        missing=(*changed, *differences(config, layout), *not_carried_over(TOOL, config)),
    )


def launcher(config: Config, layout: Layout, gpus_per_node: int, recompute: bool) -> dict[str, Any]:
    """The launcher's YAML, as a mapping. recompute: FSDP recomputes whole blocks; ignored without FSDP."""
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded(layout) else "MULTI_GPU" if layout.world > 1 else "NO",
        "num_machines": nodes(layout, gpus_per_node),
        "num_processes": layout.world,
        "mixed_precision": "bf16" if config.train.precision == "bf16" else "no",
        "main_training_function": "main",
        "use_cpu": False,
    }
    if settings["num_machines"] > 1:
        settings |= {"machine_rank": 0, "main_process_port": 29500, "rdzv_backend": "static"}
    if sharded(layout):
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": recompute,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if layout.world > layout.dp_replicate:  # plain data parallelism alone takes no ParallelismConfig
        sizes: dict[str, int | str] = {
            "dp_replicate_size": layout.dp_replicate,
            "dp_shard_size": layout.dp_shard,
            "tp_size": layout.tp,
            "cp_size": layout.cp,
        }
        if layout.cp > 1:
            sizes["cp_comm_strategy"] = "allgather"
        settings["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    return settings


def sharded(layout: Layout) -> bool:
    """True if FSDP wraps the model: for ZeRO, and for cp, which shards parameters over context ranks."""
    return layout.dp_shard > 1 or layout.cp > 1


def problems(layout: Layout, tool: str = TOOL) -> Iterator[str]:
    """Sentences on why accelerate, or a tool that trains through it, can't run the layout; empty: it can.

    tool: its name, for the sentences.
    """
    if layout.pp > 1:
        yield (
            f"{tool} trains without pipeline parallelism; pp{layout.pp} needs --export torchtitan or "
            f"megatron, or a layout such as zero3x{layout.dp_shard * layout.pp}."
        )
    if layout.cp > 1 and layout.cp_method == "ulysses":
        yield (
            f"{tool}'s context parallelism with FSDP gathers keys and values; for ulysses{layout.cp} use "
            f"--export deepspeed, or plan cp{layout.cp}."
        )
    if layout.dp_replicate > 1 and layout.dp_shard == 1 and layout.tp * layout.cp > 1:
        yield (
            f"{tool} combines tp and cp with sharded data parallelism alone; write "
            f"zero3x{layout.dp_replicate} instead of dp{layout.dp_replicate}."
        )


def differences(config: Config, layout: Layout) -> Iterator[str]:
    """Sentences on what the tool runs differently, or leaves to be done by hand."""
    yield (
        "The model, the data, packing, train_on and LoRA belong to the training script: accelerate's "
        "configuration holds the layout, training_arguments.yaml the batch sizes and the optimizer."
    )
    yield from fsdp_differences(TOOL, config, layout)
    if layout.tp > 1:
        yield (
            f"The script loads the model with DistributedConfig(tp_size={layout.tp}), or accelerate refuses "
            "it."
        )
    if config.train.precision == "bf16-pure":
        yield "train.precision=bf16-pure has no key: the script loads the weights with dtype=bfloat16."
    elif config.train.precision == "bf16" and not sharded(layout):
        yield "Weights stay fp32 under autocast: the script loads them with dtype=float32."
    if layout.cp > 1:
        yield f"The script loads the model with attn_implementation='sdpa' for cp{layout.cp} to hold."
    if config.data.packing and layout.cp > 1:
        yield (
            "Under accelerate's context parallelism attention is causal over the whole sequence: documents "
            "packed into one would attend to each other, so the script must not pack."
        )
    yield from evaluation_differences(TOOL, config)


def fsdp_differences(tool: str, config: Config, layout: Layout) -> Iterator[str]:
    """Sentences on what accelerate's FSDP2 runs differently, whichever tool starts it.

    tool: its name, for the sentences.
    """
    if layout.zero == 1:
        yield (
            f"{tool}'s FSDP has no ZeRO-1: zero1x{layout.dp_shard} is written as ZeRO-2, which needs less "
            "memory and reduces gradients once per micro-batch; --export deepspeed has ZeRO-1."
        )
    if layout.zero == 0 and layout.cp > 1:
        yield f"{tool} shards over the {layout.cp} context ranks, as ZeRO-2 does; the layout replicates."
    yield from without_sequence_parallelism(tool, layout)
    if sharded(layout) and config.train.precision == "bf16" and config.train.reduce_dtype == "fp32":
        yield f"{tool}'s FSDP reduces gradients in bf16; train.reduce_dtype=fp32 has no key."
