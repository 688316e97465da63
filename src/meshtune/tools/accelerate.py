"""Hugging Face accelerate: the launcher's YAML (FSDP2 and ParallelismConfig) and, since it holds no batch
size, the TrainingArguments for a Trainer script.
"""

from typing import Any

import yaml

from meshtune.launch.allocator import SETTING
from meshtune.tools.arguments import training_arguments
from meshtune.tools.planned import Exported, Planned

# Without it FSDP2 keeps whole gradients on every rank until the last micro-batch.
SHARDED_SUMS = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def write(plan: Planned) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk."""
    config, layout = plan.config, plan.layout
    recompute = layout.recompute == "full"
    launch = launcher(plan, recompute)
    arguments = training_arguments(config, layout)
    # Under FSDP the wrapper recomputes; recomputing in the model as well would gather every block twice.
    arguments["gradient_checkpointing"] = recompute and "fsdp_config" not in launch
    if plan.sharded and layout.gradient_accumulation_steps > 1:
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
    )


def launcher(plan: Planned, recompute: bool) -> dict[str, Any]:
    """The launcher's YAML, as a mapping. recompute: FSDP recomputes whole blocks; ignored without FSDP."""
    config, layout = plan.config, plan.layout
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if plan.sharded else "MULTI_GPU" if layout.world > 1 else "NO",
        "num_machines": plan.nodes,
        "num_processes": layout.world,
        "mixed_precision": "bf16" if config.train.precision == "bf16" else "no",
        "main_training_function": "main",
        "use_cpu": False,
    }
    if settings["num_machines"] > 1:
        settings |= {"machine_rank": 0, "main_process_port": 29500, "rdzv_backend": "static"}
    if plan.sharded:
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
