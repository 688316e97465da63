"""axolotl: its YAML. It trains through accelerate, so what accelerate's FSDP can't run, it can't."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from meshtune.config import Config
from meshtune.layout import Layout
from meshtune.sections import SourceConfig
from meshtune.setting_types import is_regular_expression
from meshtune.tools.accelerate import SHARDED_SUMS
from meshtune.tools.arguments import evaluation, schedule, trackers
from meshtune.tools.planned import Exported, Planned, column_name, file_kind, is_file, row_format

PRECISION = {
    "fp32": {"bf16": False, "float32": True},
    "bf16": {"bf16": True},
    "bf16-pure": {"bf16": False, "bfloat16": True},
}
MATMULS = ("aten::mm", "aten::addmm", "aten::linear")
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {"gradient_checkpointing": False},
    "selective": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "selective_checkpointing": {"save": ["attention", *MATMULS]},
    },
    "full": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}
LONGER = {"auto": "truncate", "cut": "truncate", "error": "raise"}  # data.overlong -> excess_length_strategy


def write(plan: Planned) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk."""
    config, layout = plan.config, plan.layout
    settings = {
        **model(config),
        **data(config),
        **training(config, layout),
        **parallelism(plan),
        **recomputation(config, layout),
    }
    count = plan.nodes
    rendezvous = " --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port 29500" if count > 1 else ""
    return Exported(
        files={"axolotl.yaml": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)},
        command=(
            f"axolotl train axolotl.yaml --launcher torchrun -- --nnodes {count} --nproc_per_node "
            f"{layout.world // count}{rendezvous}"
        ),
    )


def model(config: Config) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "base_model": config.model.name,
        "trust_remote_code": config.model.trust_remote_code,
        # Flash attention, which context parallelism needs, has no fp32; FlexAttention packs as well.
        "attn_implementation": "flex_attention" if config.train.precision == "fp32" else "flash_attention_2",
    }
    if config.model.revision:
        settings["revision_of_model"] = config.model.revision
    if config.method == "lora":
        lora = config.lora
        settings |= {
            "adapter": "lora",
            "lora_r": lora.r,
            "lora_alpha": int(lora.alpha),
            "lora_dropout": lora.dropout,
        }
        if lora.target_modules == "all-linear":
            settings["lora_target_linear"] = True
        else:
            settings["lora_target_modules"] = targets(lora.target_modules)
        if lora.use_rslora:
            settings["peft_use_rslora"] = True
        if lora.use_dora:
            settings["peft_use_dora"] = True
        if lora.modules_to_save:
            settings["lora_modules_to_save"] = list(lora.modules_to_save)
        if lora.layers_to_transform is not None:
            settings["peft_layers_to_transform"] = list(lora.layers_to_transform)
    return settings


def data(config: Config) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "datasets": [dataset(config, source) for source in config.data.train],
        "sequence_len": config.data.seq_len,
        "sample_packing": config.data.packing,
        "train_on_inputs": config.data.train_on == "all",
        "excess_length_strategy": LONGER.get(config.data.overlong, "drop"),
    }
    if config.data.streaming:
        settings["streaming"] = True
    if config.data.eval:
        settings["test_datasets"] = [dataset(config, source) for source in config.data.eval]
    elif config.data.eval_split:
        settings["val_set_size"] = config.data.eval_split
    return settings | evaluation(config)


def dataset(config: Config, source: SourceConfig) -> dict[str, Any]:
    def named(name: str) -> str:
        return column_name(config.data, source, name)

    kind = row_format(config.data, source)
    rows: dict[str, Any] = {"path": source.path}
    if is_file(source):
        rows["ds_type"] = file_kind(source)
    if source.split or is_file(source):
        rows["split"] = source.split or "train"
    match kind:
        case "text":
            return rows | {"type": "completion", "field": named("text")}
        case "messages":
            return rows | {"type": "chat_template", "field_messages": named("messages")}
        case "sharegpt":
            mapping = {"role": "from", "content": "value"}
            turns = {"field_messages": named("conversations"), "message_property_mappings": mapping}
            return rows | {"type": "chat_template"} | turns
        case "alpaca":
            question, answer = named("instruction"), named("output")
            extra = {
                "field_input": named("input"),
                "format": "{instruction}\n{input}" + config.data.separator,
            }
        case _:
            question, answer, extra = named("prompt"), named("completion"), {}
    alone = "{instruction}" + config.data.separator
    prompter = {
        "field_instruction": question,
        "field_output": answer,
        "format": alone,
        "no_input_format": alone,
    }
    return rows | {"type": prompter | extra}


def training(config: Config, layout: Layout) -> dict[str, Any]:
    train = config.train
    settings: dict[str, Any] = {
        "micro_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler": schedule(config)[0],
        "optimizer": "adamw_torch_fused",
        "adam_beta1": train.adam_betas[0],
        "adam_beta2": train.adam_betas[1],
        "adam_epsilon": train.adam_eps,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "num_epochs": train.num_epochs or 1,
        "seed": train.seed,
        "torch_compile": train.compile,
        "output_dir": config.output,
        "logging_steps": config.log.every,
        "save_total_limit": config.checkpoint.keep,
        **PRECISION[train.precision],
        **{f"use_{name}": True for name in trackers(config)},
    }
    if train.neftune_alpha:
        settings["neftune_noise_alpha"] = train.neftune_alpha
    if options := schedule(config)[1]:
        settings["lr_scheduler_kwargs"] = options
    if config.hub.push_to:
        settings["hub_model_id"] = config.hub.push_to
    if train.max_steps:
        settings["max_steps"] = train.max_steps
    warmup = {"warmup_ratio": train.warmup_ratio} if train.warmup_steps is None else {}
    return settings | (warmup or {"warmup_steps": train.warmup_steps}) | saving(config)


def saving(config: Config) -> dict[str, Any]:
    if config.checkpoint.every:
        return {"save_steps": config.checkpoint.every}
    return {"save_strategy": "no"}


def parallelism(plan: Planned) -> dict[str, Any]:
    layout = plan.layout
    if layout.world == layout.dp_replicate:
        return {}  # plain data parallelism is its default
    settings: dict[str, Any] = {
        "dp_replicate_size": layout.dp_replicate,
        "dp_shard_size": layout.dp_shard,
        "tensor_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
    }
    if plan.sharded and layout.gradient_accumulation_steps > 1:
        settings["accelerator_config"] = SHARDED_SUMS
    if plan.sharded:
        settings["fsdp_version"] = 2
        settings["fsdp_config"] = {
            "reshard_after_forward": layout.zero == 3,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "SHARDED_STATE_DICT",
            "final_state_dict_type": "FULL_STATE_DICT",
            "cpu_ram_efficient_loading": True,
            "offload_params": False,
        }
    return settings


def recomputation(config: Config, layout: Layout) -> dict[str, Any]:
    settings = RECOMPUTE[layout.recompute]
    if selective_lora(config, layout):  # peft adds to a matmul's output in place, so it can't be saved
        settings = settings | {"selective_checkpointing": {"save": ["attention"]}}
    return settings


def selective_lora(config: Config, layout: Layout) -> bool:
    return config.method == "lora" and layout.recompute == "selective"


def targets(names: Sequence[str]) -> list[str] | str:
    """Names of layers, or, where some are regular expressions, one expression of all, which peft reads."""
    if not any(map(is_regular_expression, names)):
        return list(names)
    each = [name if is_regular_expression(name) else rf"(.*\.)?{re.escape(name)}" for name in names]
    return each[0] if len(each) == 1 else "|".join(f"({one})" for one in each)
