"""Sharding of other trainers as a Layout: DeepSpeed's and FSDP's configurations, sizes of axes, GPUs."""

import json
import re
from collections.abc import Mapping
from typing import Any

from meshtune.errors import UserError
from meshtune.layout import Layout, PartialLayout
from meshtune.tools.job import OFF, Converted, Job, NoCounterpart, conversion
from meshtune.units import counted
from meshtune.yaml_tree import read_yaml

PER_NODE = 8  # GPUs that hybrid sharding shards over, where a file does not say
STRATEGIES = {
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
}  # accelerate's numbers
SIZES = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "tp_size": "tp", "cp_size": "cp"}


@conversion
def deepspeed(value: Any, job: Job) -> Converted:
    """The ZeRO stage of DeepSpeed's configuration, a mapping or a file; by its name where that is missing."""
    if isinstance(value, Mapping):
        return zero_of(value)
    if value.lstrip().startswith("{"):
        return zero_of(json.loads(value))
    if path := job.read(value):
        return zero_of(read_yaml(path))  # JSON is YAML
    if stage := re.search(r"z(?:ero)?[-_]?([0-3])", value.rpartition("/")[2]):
        return Converted({"layout.zero": int(stage[1])}, f"by the name of {value}, which is not here")
    raise NoCounterpart(f"{value} is not here; set the ZeRO stage in layout")


def zero_of(tree: Mapping[str, Any]) -> Converted:
    zero = tree.get("zero_optimization", {})
    offloads = [
        name
        for name in ("offload_optimizer", "offload_param")
        if (zero.get(name) or {}).get("device") not in OFF
    ]
    lost = [f"{' and '.join(offloads)}: nothing is offloaded to the CPU"] if offloads else []
    for name in ("optimizer", "scheduler"):
        own = tree.get(name) or {}
        given = [value for value in (own.get("params") or {}).values() if value != "auto"]
        if own and (given or str(own.get("type")).lower() not in ("adam", "adamw")):
            lost.append(f"not its {name} {own.get('type')}, but the one of the trainer's file")
    if (tree.get("fp16") or {}).get("enabled") is True:
        lost.append("fp16 needs loss scaling, which is not offered")
    return Converted({"layout.zero": int(zero.get("stage", 0))}, lost="; ".join(lost))


@conversion
def fsdp(value: Any, job: Job) -> Converted:
    return sharded(job)


@conversion
def fsdp_config(value: Any, job: Job) -> Converted:
    return sharded(job)


SHARDING = ("deepspeed", "fsdp", "fsdp_config", "dp_shard_size", "parallelism_config")  # keys
DISTRIBUTED = (  # keys that only torchtune's distributed recipes have
    "fsdp_cpu_offload", "custom_sharded_layers", "tensor_parallel_dim", "memory_efficient_fsdp_wrap",
)  # fmt: skip


def shards(job: Job) -> bool:
    """True if the file is for several GPUs that share the parameters or their optimizer states."""
    return job.on(*SHARDING) or any(key in job.given for key in DISTRIBUTED)


def sharded(job: Job) -> Converted:
    """The stage that `fsdp` and `fsdp_config` make together; what is offloaded is named."""
    value, config = job.value("fsdp", default=""), job.value("fsdp_config", default={})
    config = json.loads(config) if isinstance(config, str) else config
    config = {str(name).removeprefix("fsdp_"): entry for name, entry in config.items()}
    words = value if isinstance(value, list) else "full_shard" if value is True else str(value)
    strategy = str(config.get("sharding_strategy", ""))
    text = " ".join([*(words if isinstance(words, list) else [words]), STRATEGIES.get(strategy, strategy)])
    text = text.lower()
    if not text.strip() and not config:
        return Converted({})
    settings: dict[str, Any] = {"layout.zero": 3}
    if "no_shard" in text:
        settings["layout.zero"] = 0
    elif "shard_grad_op" in text or config.get("reshard_after_forward") in (False, "SHARD_GRAD_OP"):
        settings["layout.zero"] = 2
    if "hybrid" in text and job.gpus > PER_NODE:
        settings |= {"layout.dp_shard": PER_NODE}
    if config.get("activation_checkpointing") not in OFF:
        settings["layout.recompute"] = "full"
    offloads = "offload" in text or config.get("offload_params") not in OFF
    noted = "fsdp_config.offload_params" in job.table.entries  # by itself
    return Converted(settings, lost="nothing is offloaded to the CPU" if offloads and not noted else "")


@conversion
def parallelism_config(value: Any, job: Job) -> Converted:
    sizes = json.loads(value) if isinstance(value, str) else dict(value)
    settings = {f"layout.{ours}": int(sizes[theirs]) for theirs, ours in SIZES.items() if sizes.get(theirs)}
    if settings.get("layout.dp_shard", 1) > 1:
        settings["layout.zero"] = 3
    left = [
        name for name, size in sizes.items() if name not in SIZES and str(size).isdigit() and int(size) > 1
    ]
    return Converted(settings, lost=f"{', '.join(left)}: there is no such axis" if left else "")


@conversion
def recompute(value: Any, job: Job) -> Converted:
    if job.on("selective_checkpointing"):
        return Converted({"layout.recompute": "selective"})
    remark = (
        f"{value}: activations are recomputed, not offloaded"
        if isinstance(value, str) and "off" in value
        else ""
    )
    return Converted({"layout.recompute": "none" if value in OFF else "full"}, remark)


@conversion
def no_recompute(value: Any, job: Job) -> Converted:
    return recompute(not value, job)


@conversion
def selective(value: Any, job: Job) -> Converted:
    return recompute(True, job)


def layout_of(settings: dict[str, Any], job: Job) -> Layout:
    """The layout of the job's GPUs from its `layout.*` settings; data ranks are what tp and cp leave.

    Without a stage, torchtune shards like ZeRO-3, as its distributed recipes do; others replicate. Raises
    UserError if the sizes do not make the number of GPUs.
    """
    fields = {
        key.removeprefix("layout."): int(value) if str(value).isdigit() else value
        for key, value in settings.items()
    }
    sizes = {name: fields[name] for name in ("tp", "cp", "dp_replicate", "dp_shard") if name in fields}
    if wrong := [f"{name} {size}" for name, size in sizes.items() if type(size) is not int or size < 1]:
        raise UserError(f"The file's {', '.join(wrong)}: sizes of a layout are whole numbers from 1.")
    split = fields.get("tp", 1) * fields.get("cp", 1)
    ranks, rest = divmod(job.gpus, split)
    zero = fields.pop("zero", 3 if job.tool == "torchtune" or fields.get("dp_shard", 1) > 1 else 0)
    copies, shards = fields.pop("dp_replicate", None), fields.pop("dp_shard", None)
    least = split * (copies or 1) * (shards or 1)
    if not zero:
        copies, shards = copies or ranks, 1
    elif shards is None:
        shards = max(1, ranks // (copies or 1))
    copies = copies or max(1, ranks // shards)
    if rest or copies * shards != ranks:
        number = f"--gpus {least}"
        raise UserError(
            f"The file's tp {fields.get('tp', 1)} x cp {fields.get('cp', 1)} x data ranks {copies} x "
            f"{shards} are not {counted(job.gpus, 'GPU')}; name the number that it is for, such as {number}."
        )
    data = {
        "dp_replicate": copies,
        "dp_shard": shards,
        "zero": zero if shards * fields.get("cp", 1) > 1 else 0,
    }
    return PartialLayout.parse(fields | data).known
