"""torchtitan 0.3: a Python module with one function that returns its configuration.

Its command line can't name the optimizer's groups, and it has no configuration files any more. The model is
the unchanged Hugging Face one, through torchtitan's Transformers backend.
"""

from textwrap import indent
from typing import Any

from meshtune.config import Config
from meshtune.launch.allocator import SETTING
from meshtune.layout import TORCH_SCHEDULES, Layout
from meshtune.sections import SourceConfig
from meshtune.tools.planned import Exported, Planned, column_name, file_kind, is_file, row_format, torchrun
from meshtune.tools.rules import ENDS, default_stages

RECOMPUTE = {
    "none": "None",
    "selective": "SelectiveAC.Config()",
    "full": "FullAC.Config()",
}
RESHARD = {0: "never", 1: "never", 2: "never", 3: "always"}  # never: parameters stay gathered over a step

MODULE = '''\
"""{layout}, written by meshtune for torchtitan 0.3; started by the command below.

    {command}
"""

import os

from datasets import load_dataset
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.experiments.transformers_modeling_backend import model_registry
from torchtitan.experiments.transformers_modeling_backend.configs import TransformersBackendConfig
from torchtitan.experiments.transformers_modeling_backend.tokenizer import HFBackendTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, ChatDataLoader, HuggingFaceTextDataLoader

STEPS = {steps}


{rows}


def run() -> TransformersBackendConfig:
    return TransformersBackendConfig(
{fields}
    )
'''

TEXT_ROWS = """\
DATASETS["train"] = DatasetConfig(
    path={path!r},
    loader=lambda path: load_dataset({loader}),
    sample_processor=lambda row: row[{text!r}],
)"""

CHAT_ROWS = '''\
def messages(row: dict) -> list[dict]:
    """The user's and the assistant's turn of a row."""
    return [
        {{"role": "user", "content": {prompt}}},
        {{"role": "assistant", "content": {answer}}},
    ]'''
TURNS = {  # the expressions for a row's two turns
    "prompt-completion": ("row[{prompt}]", "row[{completion}]"),
    "alpaca": ('row[{instruction}] + "\\n" + (row.get({input}) or "")', "row[{output}]"),
    "messages": ('row[{messages}][0]["content"]', 'row[{messages}][1]["content"]'),
    "sharegpt": ('row[{conversations}][0]["value"]', 'row[{conversations}][1]["value"]'),
}


def write(plan: Planned) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk."""
    config, layout = plan.config, plan.layout
    program = "-m torchtitan.train --module meshtune_torchtitan --config run"
    command = f"{SETTING} PYTHONPATH=. " + torchrun(plan, program)
    if not config.train.max_steps:
        command = f"TRAIN_STEPS=… {command}"
    source = config.data.train[0] if config.data.train else SourceConfig(path="train.jsonl")
    text = MODULE.format(
        layout=layout,
        command=command,
        steps=config.train.max_steps or 'int(os.environ["TRAIN_STEPS"])',
        rows=rows(config, source),
        fields=indent("\n".join(f"{k}={v}," for k, v in fields(plan, source).items()), " " * 8),
    )
    return Exported(
        {"meshtune_torchtitan.py": text},
        command,
    )


def fields(plan: Planned, source: SourceConfig) -> dict[str, str]:
    """The configuration's fields as Python expressions, by name. source: the one that is trained on."""
    config, layout, train = plan.config, plan.layout, plan.config.train
    text = row_format(config.data, source) == "text"
    data_files = {"data_files": source.path, "split": source.split or "train"}
    pretrained = config.model.init == "pretrained"
    loader = (
        call("HuggingFaceTextDataLoader.Config", dataset="train")
        if text
        else call(
            "ChatDataLoader.Config",
            dataset_path=file_kind(source) if is_file(source) else source.path,
            load_dataset_kwargs=data_files if is_file(source) else {"split": source.split or "train"},
            sample_processor=Name("messages"),
        )
    )
    return {
        "hf_model": repr(config.model.name),
        "hf_assets_path": repr(config.model.name),
        "model_spec": "model_registry('sft_full')",  # attention within documents
        "tokenizer": "HFBackendTokenizer.Config()",
        "loss": "CrossEntropyLoss.Config()",
        "dataloader": loader,
        "optimizer": call(
            "default_adamw",
            lr=config.learning_rate,
            betas=train.adam_betas,
            eps=train.adam_eps,
            weight_decay=train.weight_decay,
        ),
        "lr_scheduler": call(
            "LRSchedulersContainer.Config",
            warmup_steps=Name(f"round({train.warmup_ratio} * STEPS)")
            if plan.warmup_steps is None
            else plan.warmup_steps,
            decay_type="cosine" if train.lr_scheduler == "cosine" else "linear",
            min_lr_factor=1.0 if train.lr_scheduler.startswith("constant") else train.min_lr_ratio or 0.0,
        ),
        "training": call("TrainingConfig", **training(config, layout)),
        "parallelism": call("ParallelismConfig", **parallelism(layout, plan.blocks)),
        "activation_checkpoint": RECOMPUTE[layout.recompute],
        "compile": call("CompileConfig", enable=train.compile),
        "checkpoint": call(
            "CheckpointManager.Config",
            enable=True,
            initial_load_in_hf=pretrained,
            interval=config.checkpoint.every or Name("STEPS"),
            keep_latest_k=max(2, config.checkpoint.keep),  # it refuses 1
            async_mode="async" if config.checkpoint.async_save else "disabled",
            last_save_in_hf=True,
        ),
        "metrics": call(
            "MetricsProcessor.Config",
            log_freq=config.log.every,
            enable_tensorboard="tensorboard" in config.log.to,
        ),
        "debug": call("DebugConfig", seed=train.seed),
        "dump_folder": repr(config.output),
    }


class Name(str):
    """A Python expression, which `call` writes as it is: its repr is its text, without quotes."""

    __repr__ = str.__str__


def call(function: str, **arguments: Any) -> str:
    """Source code of a call, on several lines if it is long. Values are written by repr, a Name as it is."""
    passed = [f"{name}={value!r}" for name, value in arguments.items()]
    line = f"{function}({', '.join(passed)})"
    if len(line) < 90:
        return line
    return f"{function}(\n" + "".join(f"    {argument},\n" for argument in passed) + ")"


def training(config: Config, layout: Layout) -> dict[str, Any]:
    # A pipeline's micro-batches are parts of one local batch; what is left of the global batch accumulates.
    flowing = layout.gradient_accumulation_steps if layout.pp > 1 else 1
    return {
        "local_batch_size": layout.micro_batch_size * flowing,
        "global_batch_size": layout.global_batch_size,
        "seq_len": config.data.seq_len,
        "max_norm": config.train.max_grad_norm or Name('float("inf")'),  # it always clips
        "steps": Name("STEPS"),
        "dtype": "bfloat16" if config.train.precision == "bf16-pure" else "float32",
        "mixed_precision_param": "float32" if config.train.precision == "fp32" else "bfloat16",
        "disable_cuda_graphs": True,
    }


def parallelism(layout: Layout, blocks: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
        "context_parallel_degree": layout.cp,
        "tensor_parallel_degree": layout.tp,
        "enable_sequence_parallel": layout.tp > 1,
        "pipeline_parallel_degree": layout.pp,
        "fsdp_reshard_after_forward": RESHARD[layout.zero],
    }
    if layout.pp > 1:
        sizes["pipeline_parallel_schedule"] = TORCH_SCHEDULES[layout.schedule]
        sizes["pipeline_parallel_microbatch_size"] = layout.micro_batch_size
        if layout.stages_per_rank != default_stages(layout.schedule):
            sizes["pipeline_parallel_layers_per_stage"] = layers_per_stage(blocks, layout.stages)
    if layout.cp > 1:
        sizes["context_parallel_load_balancer"] = "ptrr"  # the one that cuts masks of packed documents
    return sizes


def rows(config: Config, source: SourceConfig) -> str:
    """Source code that turns a row of `source` into text or into a user's and an assistant's turn."""
    kind = row_format(config.data, source)
    if kind == "text":
        split = f"split={source.split or 'train'!r}"
        loader = f"{file_kind(source)!r}, data_files=path, {split}" if is_file(source) else f"path, {split}"
        return TEXT_ROWS.format(
            path=source.path, loader=loader, text=column_name(config.data, source, "text")
        )
    names = ("prompt", "completion", "instruction", "input", "output", "messages", "conversations")
    columns = {name: repr(column_name(config.data, source, name)) for name in names}
    prompt, answer = (turn.format(**columns) for turn in TURNS[kind])
    return CHAT_ROWS.format(prompt=prompt, answer=answer)


def layers_per_stage(blocks: int, stages: int) -> int:
    """The setting from which torchtitan derives the number of stages; embedding and head count as layers."""
    return -(-(blocks + ENDS) // stages)
