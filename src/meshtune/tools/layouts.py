"""Conversions of layouts: DeepSpeed's and FSDP's configurations, sizes of axes, recomputation, batches.

Also the files of accelerate and DeepSpeed that a trainer is started with, as keys of the trainer's file.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshtune.errors import UserError
from meshtune.layout import Layout, PartialLayout
from meshtune.tools.job import OFF, Conversion, Converted, Job, NoCounterpart, Note, NotNeeded, listed
from meshtune.tools.table import Table, reason
from meshtune.units import counted
from meshtune.yaml_tree import read_yaml

PER_NODE = 8  # GPUs that hybrid sharding shards over, where a file does not say
STRATEGIES = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard"}  # accelerate's
OFFLOADING = ("activation_offloading", "enable_activation_offloading", "use_unsloth_gc")  # keys
RECOMPUTING = ("gradient_checkpointing", "activation_checkpointing", "enable_activation_checkpointing")
SIZES = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard", "tp_size": "tp", "cp_size": "cp"}


def deepspeed(value: Any, job: Job) -> Converted:
    """Read DeepSpeed's configuration, a mapping or a file; where that is missing, the stage in its name."""
    if isinstance(value, Mapping):
        return engine(value)
    if value.lstrip().startswith("{"):
        return engine(json.loads(value))
    if path := job.read(value):
        return engine(read_yaml(path))  # JSON is YAML
    name = value.rpartition("/")[2]
    if stage := re.search(r"z(?:ero)?[-_]?([0-3])", name):
        # as axolotl and LLaMA-Factory name their files; only stage 3 has weights to offload
        parts = ["param"] if "param" in name else ["optimizer", "param"] if stage[1] == "3" else ["optimizer"]
        on_host = {f"offload_{part}": {"device": "cpu"} for part in parts if "offload" in name}
        told = engine({"zero_optimization": {"stage": stage[1], **on_host}})
        return told._replace(remark=f"by the name of {value}, a missing file")
    raise NoCounterpart(f"the file {value} is not on this machine; set the ZeRO stage in layout")


def engine(tree: Mapping[str, Any]) -> Converted:
    """Stage and sizes of DeepSpeed's configuration; what it offloads and what it would replace is lost."""
    zero = tree.get("zero_optimization", {})
    states, weights = ((zero.get(f"offload_{name}") or {}).get("device") for name in ("optimizer", "param"))
    lost = ["offload_param: weights are not offloaded to the CPU"] if weights not in OFF else []
    lost += ["offload_optimizer: to host memory, not to a disk"] if states not in (*OFF, "cpu") else []
    for name in ("optimizer", "scheduler"):
        own = tree.get(name) or {}
        given = [value for value in (own.get("params") or {}).values() if value != "auto"]
        if own and (given or str(own.get("type")).lower() not in ("adam", "adamw")):
            lost.append(f"not its {name} {own.get('type')}, but the one of the trainer's file")
    if (tree.get("fp16") or {}).get("enabled") is True:
        lost.append(reason("train.precision", "fp16"))
    settings: dict[str, Any] = {"layout.zero": int(zero.get("stage", 0))}
    settings |= {} if states in OFF else {"train.offload": "optimizer"}
    if (tp := int((tree.get("tensor_parallel") or {}).get("autotp_size", 0))) > 1:
        settings["layout.tp"] = tp
    if (cp := int(tree.get("sequence_parallel_size", 1))) > 1:
        settings |= {"layout.cp": cp, "layout.cp_method": "ulysses"}
    return Converted(settings, lost="; ".join(lost))


def sharded(job: Job) -> Converted:
    """The stage that `fsdp` and `fsdp_config` make together; what is offloaded is named."""
    value, config = job.value("fsdp", default=""), job.value("fsdp_config", default={})
    config = json.loads(config) if isinstance(config, str) else config
    config = {str(name).removeprefix("fsdp_"): entry for name, entry in config.items()}
    strategy = str(config.get("sharding_strategy", ""))
    words = listed("full_shard" if value is True else value)
    text = " ".join(map(str, [*words, STRATEGIES.get(strategy, strategy)])).lower()
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
        settings |= recompute(True, job).settings
    offloads = "offload" in text or config.get("offload_params") not in OFF
    noted = "fsdp_config.offload_params" in job.table.entries  # as a key of its own
    return Converted(settings, lost="nothing is offloaded to the CPU" if offloads and not noted else "")


def parallelism_config(value: Any, job: Job) -> Converted:
    sizes = json.loads(value) if isinstance(value, str) else dict(value)
    settings = {f"layout.{ours}": int(sizes[theirs]) for theirs, ours in SIZES.items() if sizes.get(theirs)}
    if settings.get("layout.dp_shard", 1) > 1:
        settings["layout.zero"] = sharded(job).settings.get("layout.zero", 3)
    left = [
        name for name, size in sizes.items() if name not in SIZES and str(size).isdigit() and int(size) > 1
    ]
    lost = f"{', '.join(left)}: meshtune lacks this axis" if left else ""
    if "ep_size" in left:  # accelerate's ranks of experts share a batch
        lost = f"{lost}; layout.ep splits experts over ranks that have batches of their own"
    return Converted(settings, lost=lost)


def recompute(value: Any, job: Job) -> Converted:
    if job.on("selective_checkpointing"):
        return Converted({"layout.recompute": "selective"})
    if "offload" in str(value) or job.on(*OFFLOADING):
        return Converted({"layout.recompute": "offload"})
    return Converted({"layout.recompute": "none" if value in OFF else "full"})


def offloading(value: Any, job: Job) -> Converted:
    """A switch that keeps what is saved for the backward in host memory."""
    if value in OFF:
        return Converted({})
    if job.on("selective_checkpointing"):
        raise NoCounterpart("selective recomputation offloads nothing; set layout.recompute=offload")
    lost = "to host memory, not to a disk" if value == "disk" else ""
    if not job.on(*RECOMPUTING) and job.tool != "llama_factory":
        lost = "blocks are computed again, so that only their inputs are in host memory"
    return Converted({"layout.recompute": "offload"}, lost=lost)


def batch_of_rank(value: Any, job: Job) -> dict[str, Any]:
    """axolotl's batch_size: sequences of a GPU in a step, from which the accumulation follows."""
    micro = int(job.value("micro_batch_size"))
    if "gradient_accumulation_steps" in job.given:
        raise NotNeeded("gradient_accumulation_steps comes before it")
    if int(value) % micro:
        raise NoCounterpart(f"micro_batch_size {micro} does not divide it; set train.global_batch_size")
    return {"layout.gradient_accumulation_steps": int(value) // micro}


CONVERSIONS = {
    "deepspeed": Conversion(deepspeed, lambda plan: "deepspeed.json" if plan.engine else None),
    "fsdp": Conversion(lambda value, job: sharded(job)),
    "parallelism_config": Conversion(parallelism_config),
    "offloading": Conversion(offloading),
    "recompute": Conversion(recompute, lambda plan: plan.layout.recompute != "none"),
    "no_recompute": Conversion(
        lambda value, job: recompute(not value, job), lambda plan: plan.layout.recompute != "full"
    ),
    "selective": Conversion(lambda value, job: recompute(True, job)),
    "batch_of_rank": Conversion(batch_of_rank),
}


def layout_of(settings: dict[str, Any], job: Job) -> Layout:
    """The layout of the job's GPUs from its `layout.*` settings; data ranks are what tp and cp leave.

    Without a stage, torchtune shards like ZeRO-3, as its distributed recipes do; others replicate. Raises
    UserError if the sizes do not make the number of GPUs.
    """
    fields = {
        key.removeprefix("layout."): int(value) if str(value).isdigit() else value
        for key, value in settings.items()
    }
    sizes = {name: fields[name] for name in ("tp", "cp", "ep", "dp_replicate", "dp_shard") if name in fields}
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
        raise UserError(
            f"The file's tp {fields.get('tp', 1)} x cp {fields.get('cp', 1)} x data ranks {copies} x "
            f"{shards} are not {counted(job.gpus, 'GPU')}; name the number that it is for, such as "
            f"--gpus {least}."
        )
    zero = zero if shards * fields.get("cp", 1) > 1 else 0
    return PartialLayout.parse(fields | {"dp_replicate": copies, "dp_shard": shards, "zero": zero}).known


# Files that a trainer is started with #

ACCELERATE, DEEPSPEED = "accelerate", "DeepSpeed"
SIGNS = {  # top-level keys that no trainer's file has
    ACCELERATE: ("compute_environment", "distributed_type", "machine_rank", "main_training_function"),
    DEEPSPEED: ("zero_optimization", "train_micro_batch_size_per_gpu"),
}
NOT_READ = ("fp8_config", "megatron_lm_config", "mpirun_config", "ipex_config")  # that change the training
PRECISION = ("bf16", "fp16", "bfloat16", "float16", "float32", "pure_bf16")


class Launch(NamedTuple):
    """Contents of a launcher's file."""

    keys: Mapping[str, Any] = {}  # of the trainer's file, where it does not have them
    processes: int | None = None
    unsupported: tuple[Note, ...] = ()
    ignored: tuple[Note, ...] = ()


def launcher_of(tree: Mapping[str, Any]) -> str:
    """The launcher that a file belongs to, "" for none."""
    return next((name for name, keys in SIGNS.items() if any(key in tree for key in keys)), "")


def launch_of(file: Path, trainer: Mapping[str, Any], known: Table) -> Launch:
    """Read a file of accelerate or DeepSpeed. trainer: the trainer's file. known: the trainer's keys.

    A key that the trainer's file has too stays as it is there. Raises UserError for another file, and for a
    trainer that neither launcher starts.
    """
    tree = read_yaml(file)  # JSON is YAML
    kind = launcher_of(tree)
    if not kind:
        raise UserError(f"--with {file}: it is neither a file of accelerate nor of DeepSpeed.")
    if "deepspeed" not in known.entries:
        raise UserError(f"--with {file}: {known.name} is started by neither accelerate nor DeepSpeed.")
    keys = {"deepspeed": tree} if kind == DEEPSPEED else dict(_of_accelerate(tree, file.parent))
    if any(trainer.get(key) not in OFF for key in PRECISION) or known.defaults.get("bf16"):
        keys = {key: value for key, value in keys.items() if key not in ("bf16", "fp16")}
    left = {key: value for key, value in keys.items() if trainer.get(key) not in OFF}
    notes = [
        Note(f"{file.name}: {key}", value, "the trainer's own file has the key")
        for key, value in left.items()
    ]
    lost = [
        Note(f"{file.name}: {key}", tree[key], f"{kind}'s {key} is not read")
        for key in NOT_READ
        if tree.get(key) not in OFF
    ]
    processes = tree.get("num_processes")
    return Launch(
        {key: value for key, value in keys.items() if key not in left},
        processes if isinstance(processes, int) and processes > 0 else None,
        tuple(lost),
        tuple(notes),
    )


def _of_accelerate(tree: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield (key of transformers, value) for what changes the training. folder: that the file is in."""
    kind = str(tree.get("distributed_type", "")).upper()
    deepspeed, fsdp = tree.get("deepspeed_config") or {}, tree.get("fsdp_config") or {}
    if "DEEPSPEED" in kind and "deepspeed_config_file" in deepspeed:
        name = str(deepspeed["deepspeed_config_file"])
        yield "deepspeed", str(folder / name) if (folder / name).is_file() else name
    elif "DEEPSPEED" in kind:
        offload = {
            part: {"device": deepspeed.get(f"{part}_device")}
            for part in ("offload_optimizer", "offload_param")
        }
        yield "deepspeed", {"zero_optimization": {"stage": deepspeed.get("zero_stage", 2), **offload}}
    elif "FSDP" in kind:
        yield "fsdp_config", {"reshard_after_forward": True, **fsdp}
    if sizes := tree.get("parallelism_config"):
        prefix = "parallelism_config_"
        yield "parallelism_config", {key.removeprefix(prefix): size for key, size in sizes.items()}
    if (precision := tree.get("mixed_precision")) in ("bf16", "fp16"):
        yield precision, True
    if tree.get("use_cpu"):
        yield "use_cpu", True
    if str((tree.get("dynamo_config") or {}).get("dynamo_backend", "no")).lower() not in ("no", "none"):
        yield "torch_compile", True
