"""torchtitan 0.3: a Python module with one function that returns its configuration.

Its command line can't name the optimizer's groups, and it has no configuration files any more. The model is
the unchanged Hugging Face one, through torchtitan's Transformers backend.
"""

from collections.abc import Iterator
from textwrap import indent
from typing import Any

import numpy as np

from meshtune.config import Config
from meshtune.launch.allocator import SETTING
from meshtune.layout import SCHEDULES, TORCH_SCHEDULES, V_SCHEDULES, VIRTUAL_SCHEDULES, Layout
from meshtune.placement.columns import Columns, Number
from meshtune.placement.rules import Rule
from meshtune.plan.programs import TOOLS
from meshtune.sections import SourceConfig
from meshtune.tools.exported import (
    Exported,
    column_name,
    file_kind,
    is_file,
    not_carried_over,
    row_format,
    row_notes,
    schedule_refusals,
    torchrun,
    warmup_steps,
)
from meshtune.tools.refused import attention_alone, some_blocks, zero1

TOOL = TOOLS["torchtitan"].title
LOOPED = (*VIRTUAL_SCHEDULES, *V_SCHEDULES)  # that torch runs with several stages a rank
ENDS = 2  # layers that embedding and head count as, one each, when it cuts stages
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


def write(config: Config, layout: Layout, blocks: int, gpus_per_node: int) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk.

    blocks: of the model.
    """
    program = "-m torchtitan.train --module meshtune_torchtitan --config run"
    command = f"{SETTING} PYTHONPATH=. " + torchrun(layout, gpus_per_node, program)
    if not config.train.max_steps:
        command = f"TRAIN_STEPS=… {command}"
    source = config.data.train[0] if config.data.train else SourceConfig(path="train.jsonl")
    text = MODULE.format(
        layout=layout,
        command=command,
        steps=config.train.max_steps or 'int(os.environ["TRAIN_STEPS"])',
        rows=rows(config, source),
        fields=indent(
            "\n".join(f"{k}={v}," for k, v in fields(config, layout, blocks, source).items()), " " * 8
        ),
    )
    return Exported(
        {"meshtune_torchtitan.py": text},
        command,
        (*differences(config, layout), *not_carried_over(TOOL, config, random_init=True)),
    )


def fields(config: Config, layout: Layout, blocks: int, source: SourceConfig) -> dict[str, str]:
    """The configuration's fields as Python expressions, by name.

    blocks: of the model. source: the one that is trained on.
    """
    train = config.train
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
            if warmup_steps(config) is None
            else warmup_steps(config),
            decay_type="cosine" if train.lr_scheduler == "cosine" else "linear",
            min_lr_factor=1.0 if train.lr_scheduler.startswith("constant") else train.min_lr_ratio or 0.0,
        ),
        "training": call("TrainingConfig", **training(config, layout)),
        "parallelism": call("ParallelismConfig", **parallelism(layout, blocks)),
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


def default_stages(schedule: str) -> int:
    """Stages per rank unless layers per stage are set."""
    return 2 if schedule in LOOPED else 1


def layers_per_stage(blocks: int, stages: int) -> int:
    """The setting from which torchtitan derives the number of stages; embedding and head count as layers."""
    return -(-(blocks + ENDS) // stages)


def problems(config: Config) -> Iterator[str]:
    """Sentences on settings that this tool alone can't have."""
    yield from schedule_refusals(TOOL, config, with_floor=["cosine", "linear"])


def rules(_config: Config, blocks: int, seq_len: int) -> Iterator[Rule]:
    """Rules on layouts that the tool can't run."""
    yield Rule(
        f"{TOOL}'s context parallelism gathers keys and values, so no ulysses",
        lambda layouts: (layouts.cp > 1) & layouts.ulysses,
        lambda layout: (
            f"{TOOL}'s context parallelism gathers keys and values; for ulysses{layout.cp} use "
            f"deepspeed or megatron, or plan cp{layout.cp}."
        ),
    )
    yield zero1(TOOL)
    yield Rule(
        f"{TOOL}'s Transformers backend always splits sequences with tp",
        lambda layouts: (layouts.tp > 1) & (layouts.sp == 0),
        lambda layout: (
            f"{TOOL}'s Transformers backend always splits sequences with tp; write tp{layout.tp}-sp."
        ),
    )
    yield Rule(
        f"{TOOL} keeps what it gathers for attention and MLP until their backward, so no regather",
        lambda layouts: layouts.sp_regather > 0,
        lambda layout: (
            f"{TOOL} keeps what it gathers for attention and MLP until their backward; write "
            f"tp{layout.tp}-sp without regather."
        ),
    )
    yield attention_alone(TOOL)
    yield some_blocks(TOOL)
    yield stages_rule(blocks)
    yield pieces_rule(seq_len)


def stages_rule(blocks: int) -> Rule:
    """Numbers of stages that no number of layers per stage gives, or that leave a stage without a layer."""

    def refuses(layouts: Columns) -> Number:
        stages = layouts.pp * layouts.virtual_stages
        per_stage = np.ceil((blocks + ENDS) / stages)
        default = np.where(layouts.runs(*(name for name in SCHEDULES if name in LOOPED)), 2, 1)
        counted = np.ceil((blocks + ENDS) / per_stage) != stages
        return (layouts.pp > 1) & (layouts.virtual_stages != default) & counted

    def sentence(layout: Layout) -> str:
        return (
            f"{TOOL} derives stages from layers per stage, and no number of them cuts {blocks} layers, "
            f"embedding and head into {layout.stages} stages; write v{default_stages(layout.schedule)} "
            f"instead of v{layout.virtual_stages}."
        )

    return Rule(
        f"{TOOL} can't cut {blocks} layers, embedding and head into that many stages", refuses, sentence
    )


def pieces_rule(seq_len: int) -> Rule:
    """Sequences that its pieces for tp and cp don't divide."""

    def pieces(layout: Layout) -> int:
        return layout.tp * (2 * layout.cp if layout.cp > 1 else 1)

    return Rule(
        f"{TOOL} cuts a sequence into tp x 2 cp pieces, which do not divide data.seq_len",
        lambda layouts: seq_len % (layouts.tp * np.where(layouts.cp > 1, 2 * layouts.cp, 1)) != 0,
        lambda layout: (
            f"{TOOL} cuts a sequence into tp x 2 cp = {pieces(layout)} pieces, which do not divide "
            f"data.seq_len = {seq_len}; try {max(1, round(seq_len / pieces(layout))) * pieces(layout)}."
        ),
    )


def differences(config: Config, layout: Layout) -> Iterator[str]:
    """Sentences on what the tool runs differently, or leaves to be done by hand."""
    data, train = config.data, config.train
    yield (
        f"{TOOL} reads weights and tokenizer from a folder: set hf_assets_path to a local copy of "
        f"{config.model.name}."
    )
    if layout.zero == 0 and layout.cp > 1:
        yield f"{TOOL} shards over the {layout.cp} context ranks, as ZeRO-2 does; the layout replicates."
    if layout.recompute == "selective":
        yield f"{TOOL}'s SelectiveAC keeps every second matmul's output alone, as the plan counts."
    if layout.pp > 1:
        yield f"{TOOL} counts embedding and head as one layer each when it cuts stages."
    if train.precision == "bf16" and train.reduce_dtype == "bf16":
        yield f"{TOOL} reduces gradients in fp32; train.reduce_dtype=bf16 has no key."
    if not train.max_steps:
        yield f"{TOOL} counts steps, not epochs: set TRAIN_STEPS, as train.max_steps is not set."
    if not data.packing:
        yield f"data.packing=false has no key: {TOOL} always packs, with attention within documents."
    kinds = {row_format(data, source) for source in data.train}
    if kinds - {"text"} and data.train_on != "completion":
        yield f"{TOOL} labels the answer alone; train_on={data.train_on} has no key."
    if kinds & {"messages", "sharegpt"}:
        yield f"{TOOL} takes conversations of one user's and one assistant's turn; later turns are dropped."
    if len(data.train) > 1:
        yield (
            f"{TOOL} is given the first of the {len(data.train)} sources of data.train: {data.train[0].path}."
        )
    yield from row_notes(data, TOOL)
