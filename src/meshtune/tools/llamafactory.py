"""LLaMA-Factory: its YAML, its dataset_info.json, and DeepSpeed's JSON for ZeRO and tensor parallelism."""

import json
from collections.abc import Iterator
from typing import Any

import yaml

from meshtune.config import Config
from meshtune.launch.allocator import SETTING
from meshtune.layout import Layout
from meshtune.placement.rules import Rule
from meshtune.plan.programs import TOOLS
from meshtune.sections import SourceConfig
from meshtune.setting import is_regular_expression
from meshtune.tools import deepspeed
from meshtune.tools.arguments import training_arguments
from meshtune.tools.exported import (
    Exported,
    column_name,
    evaluation_differences,
    is_file,
    nodes,
    not_carried_over,
    row_format,
    row_notes,
    whole_logits,
)

TOOL = TOOLS["llamafactory"].title
OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}


def write(config: Config, layout: Layout, blocks: int, gpus_per_node: int) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk.

    blocks: of the model.
    """
    sources = {"train": config.data.train, "eval": config.data.eval}
    datasets = {
        f"{name}_{index}": dataset(config, source)
        for name, split_sources in sources.items()
        for index, source in enumerate(split_sources)
    }
    settings = {
        **model(config),
        **data(config, datasets),
        **training_arguments(config, layout),
        "disable_gradient_checkpointing": layout.recompute != "full",
        "ddp_timeout": 180_000_000,
    }
    files = {}
    if through_deepspeed(layout):
        settings["deepspeed"] = "deepspeed.json"
        files["deepspeed.json"] = json.dumps(deepspeed.engine(config, layout), indent=2) + "\n"
    count = nodes(layout, gpus_per_node)
    several = f"NNODES={count} NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR MASTER_PORT=29500 "
    return Exported(
        files={
            "llamafactory.yaml": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
            "dataset_info.json": json.dumps(datasets, indent=2, ensure_ascii=False) + "\n",
            **files,
        },
        command=(
            f"{SETTING} FORCE_TORCHRUN=1 {several if count > 1 else ''}"
            f"NPROC_PER_NODE={layout.world // count} llamafactory-cli train llamafactory.yaml"
        ),
        missing=(*differences(config, layout), *not_carried_over(TOOL, config)),
    )


def through_deepspeed(layout: Layout) -> bool:
    """True if LLaMA-Factory needs DeepSpeed for the layout: for ZeRO and tensor parallelism."""
    return layout.zero > 0 or layout.tp > 1


def model(config: Config) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model_name_or_path": config.model.name,
        "trust_remote_code": config.model.trust_remote_code,
        "finetuning_type": config.method,
        "pure_bf16": config.train.precision == "bf16-pure",
        "flash_attn": "sdpa" if config.train.precision == "fp32" else "fa2",  # flash attention has no fp32
    }
    if config.model.revision:
        settings["model_revision"] = config.model.revision
    if config.method == "lora":
        target = config.lora.target_modules
        settings |= {
            "lora_rank": config.lora.r,
            "lora_alpha": int(config.lora.alpha),
            "lora_dropout": config.lora.dropout,
            "lora_target": "all" if target == "all-linear" else ",".join(target),
            "use_rslora": config.lora.use_rslora,
            "use_dora": config.lora.use_dora,
        }
        if config.lora.modules_to_save:
            settings["additional_target"] = ",".join(config.lora.modules_to_save)
    return settings


def data(config: Config, datasets: dict[str, Any]) -> dict[str, Any]:
    stage = "pt" if pretraining(config) else "sft"
    settings: dict[str, Any] = {
        "stage": stage,
        "do_train": True,
        "dataset_dir": ".",
        "dataset": ",".join(name for name in datasets if name.startswith("train_")),
        "cutoff_len": config.data.seq_len,
        "packing": config.data.packing,
        "streaming": config.data.streaming,
    }
    if stage == "sft":
        settings |= {
            "neat_packing": config.data.packing,  # documents don't attend to each other
            "train_on_prompt": config.data.train_on == "all",
            "mask_history": config.data.train_on == "completion",
        }
    if config.data.eval:
        settings["eval_dataset"] = ",".join(name for name in datasets if name.startswith("eval_"))
    elif config.data.eval_split:
        settings["val_size"] = config.data.eval_split
    return settings


def pretraining(config: Config) -> bool:
    """True if all rows are text, which is stage pt."""
    return bool(config.data.train) and all(
        row_format(config.data, source) == "text" for source in config.data.train
    )


def dataset(config: Config, source: SourceConfig) -> dict[str, Any]:
    """A source's entry of dataset_info.json: where it is, its format and its names of columns."""

    def named(**columns: str) -> dict[str, str]:
        return {theirs: column_name(config.data, source, ours) for theirs, ours in columns.items()}

    rows: dict[str, Any] = {"file_name" if is_file(source) else "hf_hub_url": source.path}
    if source.split:
        rows["split"] = source.split
    match row_format(config.data, source):
        case "text":
            return rows | {"columns": named(prompt="text")}
        case "messages":
            return rows | {
                "formatting": "sharegpt",
                "columns": named(messages="messages"),
                "tags": OPENAI_TAGS,
            }
        case "sharegpt":
            return rows | {"formatting": "sharegpt", "columns": named(messages="conversations")}
        case "alpaca":
            return rows | {"columns": named(prompt="instruction", query="input", response="output")}
    return rows | {"columns": named(prompt="prompt", response="completion")}


def problems(config: Config) -> Iterator[str]:
    """Sentences on settings that this tool alone can't have."""
    targets = config.lora.target_modules if config.method == "lora" else "all-linear"
    if targets != "all-linear" and any(map(is_regular_expression, targets)):
        yield f"{TOOL} has no regular expressions of layers: name them in lora.target_modules."
    kinds = {row_format(config.data, source) for source in config.data.train}
    if "text" in kinds and len(kinds) > 1:
        yield (
            f"{TOOL} trains on text (stage pt) or on conversations (stage sft), not on both; split "
            "data.train."
        )
    if config.method == "lora" and config.lora.layers_to_transform is not None:
        yield f"{TOOL} adapts every layer: lora.layers_to_transform has no key; leave it out."
    if config.method == "lora" and config.lora.alpha != int(config.lora.alpha):
        yield f"{TOOL} takes a whole lora_alpha, not {config.lora.alpha}; try {round(config.lora.alpha)}."


def rules(config: Config, _blocks: int, _seq_len: int) -> Iterator[Rule]:
    """Rules on layouts that the tool can't run."""
    yield Rule(
        f"{TOOL}'s trainer has no context parallelism",
        lambda layouts: layouts.cp > 1,
        lambda layout: (
            f"{TOOL}'s trainer has no context parallelism; for "
            f"{'ulysses' if layout.cp_method == 'ulysses' else 'cp'}{layout.cp} use accelerate or "
            "deepspeed."
        ),
    )
    yield from deepspeed.engine_rules(TOOL)
    if config.train.precision == "bf16-pure":
        yield Rule(
            f"{TOOL} has no pure_bf16 under DeepSpeed",
            lambda layouts: (layouts.zero > 0) | (layouts.tp > 1),
            lambda _: (
                f"{TOOL} has no pure_bf16 under DeepSpeed; set train.precision=bf16, or plan plain data "
                "parallelism."
            ),
        )


def differences(config: Config, layout: Layout) -> Iterator[str]:
    """Sentences on what the tool runs differently, or leaves to be done by hand."""
    if through_deepspeed(layout):
        yield from deepspeed.engine_differences(config, layout)
    if not config.data.train:
        yield "data.train is empty: fill in dataset_info.json and the key dataset."
    if pretraining(config) and config.data.packing:
        yield f"In stage pt {TOOL} packs texts that attend to each other."
    if config.method == "lora" and config.train.precision == "fp32":
        yield (
            f"{TOOL} loads frozen weights in the checkpoint's dtype: precision=fp32 holds for the adapter "
            "alone."
        )
    yield whole_logits(TOOL, "enable_liger_kernel: true")
    yield from evaluation_differences(TOOL, config)
    yield from row_notes(config.data, TOOL)
