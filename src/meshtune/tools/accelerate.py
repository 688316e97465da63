"""Hugging Face accelerate: the launcher's YAML (FSDP2 and ParallelismConfig) and, since it holds no batch
size, the TrainingArguments for a Trainer script.
"""

from collections.abc import Iterator
from typing import Any

import yaml

from meshtune.config import Config
from meshtune.launch.allocator import SETTING
from meshtune.layout import Layout
from meshtune.placement.rules import Rule
from meshtune.plan.programs import TOOLS
from meshtune.tools.arguments import training_arguments
from meshtune.tools.exported import (
    Exported,
    evaluation_differences,
    nodes,
    not_carried_over,
    whole_logits,
)
from meshtune.tools.refused import parts_of_blocks, sequence_parallelism, zero1

TOOL = TOOLS["accelerate"].title


# Without it FSDP2 keeps whole gradients on every rank until the last micro-batch.
SHARDED_SUMS = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def write(config: Config, layout: Layout, blocks: int, gpus_per_node: int) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk.

    blocks: of the model.
    """
    recompute = layout.recompute == "full"
    launch = launcher(config, layout, gpus_per_node, recompute)
    arguments = training_arguments(config, layout)
    # Under FSDP the wrapper recomputes; recomputing in the model as well would gather every block twice.
    arguments["gradient_checkpointing"] = recompute and "fsdp_config" not in launch
    if sharded(layout) and layout.gradient_accumulation_steps > 1:
        arguments["accelerator_config"] = SHARDED_SUMS
    several = " --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR" if "rdzv_backend" in launch else ""
    return Exported(
        files={
            "accelerate.yaml": yaml.safe_dump(launch, sort_keys=False),
            "training_arguments.yaml": yaml.safe_dump(arguments, sort_keys=False),
        },
        command=(
            f"{SETTING} accelerate launch --config_file accelerate.yaml{several} your_script.py "
            "training_arguments.yaml"
        ),
        missing=(*differences(config, layout), *not_carried_over(TOOL, config)),
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


def problems(_: Config) -> Iterator[str]:
    """Settings that this tool alone can't have: none."""
    yield from ()


def rules(_config: Config, _blocks: int, _seq_len: int) -> Iterator[Rule]:
    """Rules on layouts that the tool can't run."""
    yield from fsdp_rules(TOOL)
    yield from parts_of_blocks(TOOL)


def fsdp_rules(tool: str) -> Iterator[Rule]:
    """Rules on layouts that accelerate's FSDP2 can't run, whichever tool starts it.

    tool: its name, for the sentences.
    """
    yield Rule(
        f"{tool} trains without pipeline parallelism",
        lambda layouts: layouts.pp > 1,
        lambda layout: (
            f"{tool} trains without pipeline parallelism; pp{layout.pp} needs torchtitan or "
            f"megatron, or a layout such as zero3x{layout.dp_shard * layout.pp}."
        ),
    )
    yield Rule(
        f"{tool}'s context parallelism with FSDP gathers keys and values, so no ulysses",
        lambda layouts: (layouts.cp > 1) & layouts.ulysses,
        lambda layout: (
            f"{tool}'s context parallelism with FSDP gathers keys and values; for ulysses{layout.cp} use "
            f"deepspeed, or plan cp{layout.cp}."
        ),
    )
    yield Rule(
        f"{tool} combines tp and cp with sharded data parallelism alone",
        lambda layouts: (layouts.dp_replicate > 1) & (layouts.dp_shard == 1) & (layouts.tp * layouts.cp > 1),
        lambda layout: (
            f"{tool} combines tp and cp with sharded data parallelism alone; write "
            f"zero3x{layout.dp_replicate} instead of dp{layout.dp_replicate}."
        ),
    )
    yield zero1(tool)
    yield sequence_parallelism(tool)


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
    yield whole_logits(TOOL, "use_liger_kernel: true")
    yield from evaluation_differences(TOOL, config)


def fsdp_differences(tool: str, config: Config, layout: Layout) -> Iterator[str]:
    """Sentences on what accelerate's FSDP2 runs differently, whichever tool starts it.

    tool: its name, for the sentences.
    """
    if layout.zero == 0 and layout.cp > 1:
        yield f"{tool} shards over the {layout.cp} context ranks, as ZeRO-2 does; the layout replicates."
    if sharded(layout) and config.train.precision == "bf16" and config.train.reduce_dtype == "fp32":
        yield f"{tool}'s FSDP reduces gradients in bf16; train.reduce_dtype=fp32 has no key."
