"""Files that other trainers are started with, accelerate's and DeepSpeed's, as keys of the trainer's file."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshtune.errors import UserError
from meshtune.tools.job import OFF, Note
from meshtune.tools.table import Table
from meshtune.yaml_tree import read_yaml

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


def kind_of(tree: Mapping[str, Any]) -> str:
    """The launcher that a file belongs to, "" for none."""
    return next((name for name, keys in SIGNS.items() if any(key in tree for key in keys)), "")


def launch_of(file: Path, trainer: Mapping[str, Any], known: Table) -> Launch:
    """Read a file of accelerate or DeepSpeed. trainer: the trainer's file. known: the trainer's keys.

    A key that the trainer's file has too stays as it is there. Raises UserError for another file, and for a
    trainer that neither launcher starts.
    """
    tree = read_yaml(file)  # JSON is YAML
    kind = kind_of(tree)
    if not kind:
        raise UserError(f"--with {file}: it is neither a file of accelerate nor of DeepSpeed.")
    if "deepspeed" not in known.entries:
        raise UserError(f"--with {file}: {known.name} is started by neither accelerate nor DeepSpeed.")
    keys = {"deepspeed": tree} if kind == DEEPSPEED else dict(_of_accelerate(tree, file.parent))
    if any(trainer.get(key) not in OFF for key in PRECISION) or known.defaults.get("bf16"):
        keys.pop("bf16", None)
        keys.pop("fp16", None)
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
    sizes = tree.get("parallelism_config") or {}
    if sizes:
        yield (
            "parallelism_config",
            {key.removeprefix("parallelism_config_"): size for key, size in sizes.items()},
        )
    if (precision := tree.get("mixed_precision")) in ("bf16", "fp16"):
        yield precision, True
    if tree.get("use_cpu"):
        yield "use_cpu", True
    if str((tree.get("dynamo_config") or {}).get("dynamo_backend", "no")).lower() not in ("no", "none"):
        yield "torch_compile", True
