"""Files of other tools for a plan: their keys are those of `export` in their tables, in that order."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from textwrap import indent
from typing import Any

import yaml

from meshtune.config import SETTINGS, Config
from meshtune.launch.allocator import SETTING
from meshtune.layout import TORCH_SCHEDULES
from meshtune.plan.programs import Tool
from meshtune.sections import SourceConfig
from meshtune.setting import changed
from meshtune.tools import job, layouts, outputs, preferences, rows, training
from meshtune.tools.job import Conversion
from meshtune.tools.planned import (
    Exported,
    Planned,
    column_name,
    file_kind,
    is_file,
    row_format,
    rows_of,
    torchrun,
)
from meshtune.tools.rules import ENDS, default_stages
from meshtune.tools.table import Entry, table, toml
from meshtune.yaml_tree import merge, nested

TABLES = {"accelerate": ("accelerate", "transformers"), "llamafactory": ("llama_factory", "transformers")}
GROUPS = ("export", "arguments", "optimizer")  # keys of a table with the keys that are written


def quoted(setting: str) -> Conversion:
    """A text in a shell's quotes; only written."""
    return Conversion(lambda value, job: {}, lambda plan: shlex.quote(str(plan.setting(setting))))


def cp_comm_type(plan: Planned) -> str:
    """Megatron's context parallelism: most releases of Transformer Engine gather only unpacked sequences."""
    if plan.layout.cp_method == "ulysses":
        return "a2a"
    return "all_gather" if "text" in plan.rows else "p2p"


def titan_files(plan: Planned) -> dict[str, str]:
    """Arguments of load_dataset for the rows that torchtitan trains on."""
    split = {"split": plan.first.split or "train"}
    return {"data_files": plan.first.path} | split if is_file(plan.first) else split


def titan_stages(plan: Planned) -> int | None:
    """Layers per stage, from which torchtitan derives the number of stages; None: its own number is right."""
    layout = plan.layout
    usual = layout.stages_per_rank == default_stages(layout.schedule)
    return None if usual else -(-(plan.blocks + ENDS) // layout.stages)


WRITTEN = {  # conversions that are only written
    "cp_comm_type": cp_comm_type,
    "tensorboard_dir": lambda plan: shlex.quote(f"{plan.config.output}/tensorboard"),
    "warmup_iters": lambda plan: plan.warmup_steps or 0 if plan.warmup_ratio is None else None,
    "save_interval": lambda plan: (
        plan.config.checkpoint.every or plan.config.train.max_steps or '"$TRAIN_STEPS"'
    ),
    "titan_path": lambda plan: file_kind(plan.first) if is_file(plan.first) else plan.first.path,
    "titan_files": titan_files,
    "titan_warmup": lambda plan: (
        f"=round({plan.warmup_ratio} * STEPS)" if plan.warmup_steps is None else plan.warmup_steps
    ),
    # A pipeline's micro-batches are parts of one local batch; what is left of the global batch accumulates.
    "titan_batch": lambda plan: (
        plan.layout.micro_batch_size * (plan.layout.gradient_accumulation_steps if plan.layout.pp > 1 else 1)
    ),
    "titan_schedule": lambda plan: TORCH_SCHEDULES[plan.layout.schedule],
    "titan_stages": titan_stages,
    "titan_kept": lambda plan: max(2, plan.config.checkpoint.keep),  # it refuses 1
}
CONVERSIONS = {
    **training.CONVERSIONS,
    **outputs.CONVERSIONS,
    **layouts.CONVERSIONS,
    **rows.CONVERSIONS,
    **preferences.CONVERSIONS,
    **{name: Conversion(lambda value, job: {}, write) for name, write in WRITTEN.items()},
}
MAKERS = {**job.MAKERS, **training.MAKERS, **outputs.MAKERS, **preferences.MAKERS, "quoted": quoted}


def conversion_of(entry: Entry) -> Conversion:
    """The conversion of a key that has a counterpart."""
    if entry.conversion in CONVERSIONS:
        return CONVERSIONS[entry.conversion]
    return MAKERS[entry.conversion](entry.setting, *entry.arguments)


def pairs(tool: str, plan: Planned, groups: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of a tool's file for a plan. groups: their key in the tool's table."""
    known = table(tool)
    for group in known.tree.get(groups, ()):
        if not plan.holds(group.get("when", "")):
            continue
        yield from group.get("constants", {}).items()
        for name in group.get("keys", "").split():
            key = name.removesuffix("?")
            value = conversion_of(known.entries[key]).write(plan)
            if key == name or not (value is None or value is False or value in ("", [], {}, ())):
                yield key, value


def written(tool: str, plan: Planned, groups: str = "export") -> dict[str, Any]:
    """The keys of a tool's file for a plan, nested by section. groups: their key in the tool's table."""
    tree: dict[str, Any] = {}
    for key, value in pairs(tool, plan, groups):
        tree = merge(tree, nested(key.split("."), value))
    return tree


def without_key(tool: Tool, plan: Planned) -> Iterator[str]:
    """Sentence on the settings that differ from their defaults and are in none of the tool's files.

    Without those that a row of differences.toml is about.
    """
    words = [row.get("when", "") for row in rows_of(tool, refused=False)]
    words += [row.get("settings", "") for refused in (True, False) for row in rows_of(tool, refused)]
    carried = {*re.findall(r"\w+\.\w+", " ".join([toml("differences")["carries"], *words]))}
    for name in TABLES.get(tool.name, (tool.name,)):
        known = table(name)
        carried |= {*known.tree.get("carries", "").split()}
        keys = {key for groups in GROUPS for key, _ in pairs(name, plan, groups)}
        carried |= {known.entries[key].setting for key in keys & known.entries.keys()}
    plain = [name.split(".") for name in SETTINGS if name.count(".") == 1 and "cluster." not in name]
    changes = [key for path in plain for key, _ in changed(plan.config, path)]
    left = [key for key in changes if not any(fnmatch(key, name) for name in carried)]
    if left:
        yield f"Not carried over to {tool.title}: {', '.join(left)}."


def as_yaml(tree: Mapping[str, Any]) -> str:
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in tree.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def as_json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def accelerate(plan: Planned) -> Exported:
    """The launcher's YAML and, since it holds no batch size, the TrainingArguments for a Trainer script."""
    several = " --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR" if plan.nodes > 1 else ""
    launcher = {"num_machines": plan.nodes, "num_processes": plan.layout.world}
    launcher |= written("accelerate", plan)
    arguments = written("transformers", plan) | written("accelerate", plan, "arguments")
    return Exported(
        {"accelerate.yaml": as_yaml(launcher), "training_arguments.yaml": as_yaml(arguments)},
        f"{SETTING} accelerate launch --config_file accelerate.yaml{several} your_script.py "
        "training_arguments.yaml",
    )


def axolotl(plan: Planned) -> Exported:
    address = " --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port 29500"
    return Exported(
        {"axolotl.yaml": as_yaml(written("axolotl", plan))},
        f"axolotl train axolotl.yaml --launcher torchrun -- --nnodes {plan.nodes} --nproc_per_node "
        f"{plan.layout.world // plan.nodes}{address if plan.nodes > 1 else ''}",
    )


def deepspeed(plan: Planned) -> Exported:
    """Its JSON; its launcher gives other nodes the variables of .deepspeed_env, but not those of a shell."""
    settings = written("deepspeed", plan) | written("deepspeed", plan, "optimizer")
    files, gpus = {"deepspeed.json": as_json(settings)}, plan.layout.world // plan.nodes
    script = f"--num_gpus {gpus} your_script.py --deepspeed --deepspeed_config deepspeed.json"
    if plan.nodes == 1:
        return Exported(files, f"{SETTING} deepspeed {script}")
    return Exported(
        files | {".deepspeed_env": f"{SETTING}\n"},
        f"deepspeed --hostfile hostfile --num_nodes {plan.nodes} {script}",
        (
            f"hostfile is yours to write: a line `HOST slots={gpus}` for each of the {plan.nodes} nodes. One "
            "node starts all of them, in this folder, where the launcher reads .deepspeed_env.",
        ),
    )


def llamafactory(plan: Planned) -> Exported:
    """Its YAML, its dataset_info.json, and DeepSpeed's JSON for ZeRO and tensor parallelism."""
    settings = written("llama_factory", plan) | written("transformers", plan)
    info = as_json(rows.dataset_info(plan.config))
    files = {"llamafactory.yaml": as_yaml(settings), "dataset_info.json": info}
    if plan.engine:
        files["deepspeed.json"] = as_json(written("deepspeed", plan))
    several = f"NNODES={plan.nodes} NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR MASTER_PORT=29500 "
    return Exported(
        files,
        f"{SETTING} FORCE_TORCHRUN=1 {several if plan.nodes > 1 else ''}"
        f"NPROC_PER_NODE={plan.layout.world // plan.nodes} llamafactory-cli train llamafactory.yaml",
    )


def megatron(plan: Planned) -> Exported:
    """A shell script with its command-line flags."""
    config, layout = plan.config, plan.layout
    flags = [
        f"\n    --{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in written("megatron", plan).items()
        if value is not False
    ]
    # Overlap of tensor and context parallelism needs one hardware queue, that of Megatron-FSDP several.
    one = "export CUDA_DEVICE_MAX_CONNECTIONS=1" if layout.tp > 1 or layout.cp > 1 else ""
    names = ["CHECKPOINT", "DATA"]
    names += [] if config.train.max_steps else ["TRAIN_STEPS"]
    names += ["NODE_RANK", "MASTER_ADDR"] if plan.nodes > 1 else []
    lines = [
        "#!/usr/bin/env bash",
        f"# {layout}; started in the folder of Megatron-LM.",
        "# CHECKPOINT: the model in Megatron's format; DATA: the rows.",
        "set -euo pipefail",
        "unset CUDA_DEVICE_MAX_CONNECTIONS" if layout.zero > 1 else one,
        f"ARGUMENTS=({''.join(flags)}\n)",
        torchrun(plan, 'pretrain_gpt.py "${ARGUMENTS[@]}"'),
    ]
    return Exported(
        {"megatron.sh": "\n".join(filter(None, lines)) + "\n"},
        " ".join([*(f"{name}=…" for name in names), "bash megatron.sh"]),
    )


# torchtitan #


def torchtitan(plan: Planned) -> Exported:
    """A Python module with one function that returns its configuration."""
    templates, steps = table("torchtitan").tree, plan.config.train.max_steps
    program = "-m torchtitan.train --module meshtune_torchtitan --config run"
    command = f"{SETTING} PYTHONPATH=. {torchrun(plan, program)}"
    command = command if steps else f"TRAIN_STEPS=… {command}"
    fields = "".join(
        f"{name}={call(templates['calls'][name], value) if isinstance(value, dict) else python(value)},\n"
        for name, value in written("torchtitan", plan).items()
    )
    text = templates["module"].format(
        layout=plan.layout,
        command=command,
        steps=steps or 'int(os.environ["TRAIN_STEPS"])',
        rows=titan_rows(plan.config, plan.first),
        fields=indent(fields.rstrip(), " " * 8),
    )
    return Exported({"meshtune_torchtitan.py": text}, command)


def python(value: Any) -> str:
    """Source code of a value; a text that begins with = is code."""
    return value[1:] if str(value).startswith("=") else repr(value)


def call(function: str, arguments: Mapping[str, Any]) -> str:
    """Source code of a call, on several lines if it is long."""
    passed = [f"{name}={python(value)}" for name, value in arguments.items()]
    line = f"{function}({', '.join(passed)})"
    return line if len(line) < 90 else f"{function}(\n" + "".join(f"    {each},\n" for each in passed) + ")"


def titan_rows(config: Config, source: SourceConfig) -> str:
    """Source code that turns a row of `source` into text or into a user's and an assistant's turn."""
    kind, templates = row_format(config.data, source), table("torchtitan").tree
    if kind == "text":
        split = f"split={source.split or 'train'!r}"
        loader = f"{file_kind(source)!r}, data_files=path, {split}" if is_file(source) else f"path, {split}"
        text = column_name(config.data, source, "text")
        return templates["text_rows"].format(path=source.path, loader=loader, text=text)
    names = ("prompt", "completion", "instruction", "input", "output", "messages", "conversations")
    columns = {name: repr(column_name(config.data, source, name)) for name in names}
    prompt, answer = (turn.format(**columns) for turn in templates["turns"][kind])
    return templates["chat_rows"].format(prompt=prompt, answer=answer)
