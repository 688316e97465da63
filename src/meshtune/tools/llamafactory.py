"""LLaMA-Factory: its YAML, its dataset_info.json, and DeepSpeed's JSON for ZeRO and tensor parallelism."""

import json
from typing import Any

import yaml

from meshtune.config import Config
from meshtune.launch.allocator import SETTING
from meshtune.sections import SourceConfig
from meshtune.tools import deepspeed
from meshtune.tools.arguments import training_arguments
from meshtune.tools.planned import Exported, Planned, column_name, is_file, row_format

OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}


def write(plan: Planned) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk."""
    config, layout = plan.config, plan.layout
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
    if plan.engine:
        settings["deepspeed"] = "deepspeed.json"
        files["deepspeed.json"] = json.dumps(deepspeed.engine(plan), indent=2) + "\n"
    count = plan.nodes
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
    )


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
