"""Megatron-LM: a shell script of its command-line flags."""

import shlex
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshtune.config import Config
from meshtune.layout import Layout
from meshtune.placement.columns import Columns, Number
from meshtune.placement.rules import Rule
from meshtune.plan.programs import TOOLS
from meshtune.recomputation import RECOMPUTATIONS
from meshtune.schedules import SCHEDULES
from meshtune.tools.exported import (
    Exported,
    nodes,
    not_carried_over,
    row_format,
    row_notes,
    schedule_refusals,
    torchrun,
    warmup_steps,
)
from meshtune.tools.refused import selective

TOOL = TOOLS["megatron"].title
Flags = dict[str, str | int | float | bool]  # flag -> value; True: the flag alone

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
PIPELINES = ("1f1b", "interleaved1f1b")  # its schedules
ROWS = {"text", "messages"}  # text: .bin and .idx files of tools/preprocess_data.py; messages: --sft
RECOMPUTE: dict[str, Flags] = {
    "none": {},
    "attention": {"recompute-granularity": "selective", "recompute-modules": "core_attn"},
    "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
}


def write(config: Config, layout: Layout, blocks: int, gpus_per_node: int) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk.

    blocks: of the model.
    """
    flags = "".join(
        f"\n    --{name}" + ("" if value is True else f" {value}")
        for name, value in (
            arguments(config, layout)
            | uneven_stages(blocks, layout)
            | performance(config, layout, gpus_per_node)
            | recomputation(layout)
        ).items()
        if value is not False
    )
    # Overlap of tensor and context parallelism needs one hardware queue, that of Megatron-FSDP several.
    inner = layout.tp > 1 or layout.cp > 1
    queues = "unset CUDA_DEVICE_MAX_CONNECTIONS" if fsdp(layout) else "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    names = ["CHECKPOINT", "DATA"]
    names += [] if config.train.max_steps else ["TRAIN_STEPS"]
    names += ["NODE_RANK", "MASTER_ADDR"] if nodes(layout, gpus_per_node) > 1 else []
    start = torchrun(layout, gpus_per_node, 'pretrain_gpt.py "${ARGUMENTS[@]}"')
    script = "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {layout}; started in the folder of Megatron-LM.",
            "# CHECKPOINT: the model in Megatron's format; DATA: the rows.",
            "set -euo pipefail",
            *([queues] if inner or fsdp(layout) else []),
            f"ARGUMENTS=({flags}\n)",
            start,
            "",
        ]
    )
    return Exported(
        files={"megatron.sh": script},
        command=" ".join([*(f"{name}=…" for name in names), "bash megatron.sh"]),
        missing=(*differences(config, layout, blocks), *not_carried_over(TOOL, config)),
    )


def recomputation(layout: Layout) -> Flags:
    flags = RECOMPUTE[layout.recompute]
    if layout.recompute == "full" and layout.recompute_blocks is not None:  # of each stage, the first
        return flags | {"recompute-method": "block", "recompute-num-layers": layout.recompute_blocks}
    return flags


def arguments(config: Config, layout: Layout) -> Flags:
    train, data = config.train, config.data
    flags: Flags = {
        "tensor-model-parallel-size": layout.tp,
        "sequence-parallel": layout.sp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "micro-batch-size": layout.micro_batch_size,
        "global-batch-size": layout.global_batch_size,
        "seq-length": data.seq_len,
        "max-position-embeddings": data.seq_len,
        "use-checkpoint-args": True,
        "pretrained-checkpoint": '"$CHECKPOINT"',
        "finetune": True,
        "tokenizer-type": "SFTTokenizer" if fine_tuning(config) else "HuggingFaceTokenizer",
        "tokenizer-model": shlex.quote(config.model.name),
        "sft": fine_tuning(config),
        "data-path": '"$DATA"',
        "split": "100,0,0",
        "eval-iters": 0,
        "train-iters": train.max_steps or '"$TRAIN_STEPS"',
        "lr": config.learning_rate,
        "min-lr": float(f"{config.learning_rate * (train.min_lr_ratio or 0.0):.12g}"),
        "lr-decay-style": train.lr_scheduler.removesuffix("_with_warmup"),
        "optimizer": "adam",
        "adam-beta1": train.adam_betas[0],
        "adam-beta2": train.adam_betas[1],
        "adam-eps": train.adam_eps,
        "weight-decay": train.weight_decay,
        "clip-grad": train.max_grad_norm,
        "calculate-per-token-loss": True,  # the mean over the global batch's labels, as here
        "bf16": train.precision != "fp32",
        "grad-reduce-in-bf16": train.precision != "fp32" and train.reduce_dtype == "bf16",
        "seed": train.seed,
        "log-interval": config.log.every,
        "save": shlex.quote(config.output),
        "save-interval": config.checkpoint.every or train.max_steps or '"$TRAIN_STEPS"',
        "use-distributed-optimizer": layout.zero > 0,
    }
    if train.warmup_steps is None and SCHEDULES[train.lr_scheduler].warmup:
        flags["lr-warmup-fraction"] = train.warmup_ratio
    else:
        flags["lr-warmup-iters"] = warmup_steps(config) or 0
    if "tensorboard" in config.log.to:
        flags["tensorboard-dir"] = shlex.quote(f"{config.output}/tensorboard")
    if layout.cp > 1:
        # Most releases of Transformer Engine gather keys and values of unpacked sequences alone.
        gathered = "p2p" if fine_tuning(config) else "all_gather"
        flags["cp-comm-type"] = "a2a" if layout.cp_method == "ulysses" else gathered
    if layout.stages_per_rank > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = layout.stages_per_rank
    if layout.zero and layout.dp_replicate > 1:
        flags["num-distributed-optimizer-instances"] = layout.dp_replicate
    if fsdp(layout):
        flags |= {
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": SHARDING[layout.zero],
            "no-gradient-accumulation-fusion": True,
            "ckpt-format": "fsdp_dtensor",
            "init-model-with-meta-device": True,
        }
    return flags


def fsdp(layout: Layout) -> bool:
    """True if Megatron-FSDP shards: ZeRO-2 and -3. ZeRO-1 is the distributed optimizer."""
    return layout.zero in SHARDING


def fine_tuning(config: Config) -> bool:
    """True if the rows are conversations, for --sft."""
    return all(row_format(config.data, source) != "text" for source in config.data.train)


def performance(config: Config, layout: Layout, gpus_per_node: int) -> Flags:
    """Flags for overlap, kernels and sums that the plan's stack counts on; all are off by default."""
    flags: Flags = {
        "cross-entropy-loss-fusion": True,
        "cross-entropy-fusion-impl": "te",  # 2 bytes a logit instead of 6
        "overlap-grad-reduce": layout.data_ranks * layout.cp > 1,
        "overlap-param-gather": layout.zero > 0,
        "tp-comm-overlap": layout.sp and layout.tp <= gpus_per_node,  # its buffers are one node's
    }
    if config.train.precision != "fp32":
        flags["attention-backend"] = "fused"  # cuDNN's, the stack's kernel: no fp32, and no scores in memory
        flags["accumulate-allreduce-grads-in-fp32"] = config.train.reduce_dtype == "fp32"
    return flags


class StageLayers(NamedTuple):
    """Layers on a pipeline rank."""

    first: int
    middle: int
    last: int


def stage_layers(blocks: int, pp: int, stages_per_rank: int) -> StageLayers:
    """Split layers so that the fullest rank has fewest: all ranks but the first and the last are equal.

    A rank's layers are a multiple of its stages, so `stages_per_rank` must divide `blocks`.
    """
    units = blocks // stages_per_rank
    splits = []
    for middle in {units // pp, -(-units // pp)}:
        ends = units - middle * (pp - 2)
        if ends >= 2:
            splits.append((-(-ends // 2), middle, ends // 2))
    return StageLayers(*(stages_per_rank * size for size in min(splits, key=max)))


def uneven_stages(blocks: int, layout: Layout) -> Flags:
    """Flags for a pipeline whose ranks can't all have as many layers; none where they can."""
    if blocks % layout.pp == 0:
        return {}
    split = stage_layers(blocks, layout.pp, layout.stages_per_rank)
    return {
        "decoder-first-pipeline-num-layers": split.first,
        "decoder-last-pipeline-num-layers": split.last,
    }


def problems(config: Config) -> Iterator[str]:
    """Sentences on settings that this tool alone can't have."""
    yield from schedule_refusals(TOOL, config, with_floor=["cosine", "linear"])


def rules(config: Config, blocks: int, seq_len: int) -> Iterator[Rule]:
    """Rules on layouts that the tool can't run."""
    yield Rule(
        f"Megatron-FSDP, {TOOL}'s ZeRO-2 and -3, runs without pipeline stages",
        lambda layouts: (layouts.zero >= 2) & (layouts.pp > 1),
        lambda layout: (
            f"Megatron-FSDP, {TOOL}'s ZeRO-{layout.zero}, runs without pipeline stages; with pp{layout.pp} "
            f"write zero1x{layout.dp_shard}, or zero{layout.zero}x{layout.dp_shard * layout.pp} without pp."
        ),
    )
    yield Rule(
        f"{TOOL} cuts a sequence into 2 x cp pieces, which do not divide data.seq_len",
        lambda layouts: (layouts.cp > 1) & (seq_len % (2 * layouts.cp) != 0),
        lambda layout: (
            f"{TOOL} cuts a sequence into 2 x cp = {2 * layout.cp} pieces, which do not divide data.seq_len "
            f"= {seq_len}; try {max(1, round(seq_len / (2 * layout.cp))) * 2 * layout.cp}."
        ),
    )
    if fine_tuning(config):
        yield Rule(
            f"{TOOL}'s --sft takes one sequence per micro-batch",
            lambda layouts: layouts.micro_batch_size > 1,
            lambda layout: (
                f"{TOOL}'s --sft takes one sequence per micro-batch; write "
                f"mb1-ga{layout.micro_batch_size * layout.gradient_accumulation_steps} instead of "
                f"mb{layout.micro_batch_size}-ga{layout.gradient_accumulation_steps}."
            ),
        )
    yield selective(TOOL, "recomputes the attention core or whole blocks")
    yield from pipeline_rules(blocks)


def pipeline_rules(blocks: int) -> Iterator[Rule]:
    """Rules on schedules, and on the layers and micro-batches that they take."""
    yield Rule(
        f"{TOOL} has no schedules but 1F1B and interleaved 1F1B",
        lambda layouts: (layouts.pp > 1) & ~layouts.runs(*PIPELINES),
        lambda layout: (
            f"{TOOL} has no schedule {layout.schedule}; write 1f1b, or interleaved1f1b with "
            f"v{max(2, layout.stages_per_rank)}."
        ),
    )
    yield Rule(
        f"{TOOL} gives all stages of a rank as many layers, and {blocks} can't be cut so",
        lambda layouts: ~cuts(blocks, layouts.pp, layouts.virtual_stages),
        lambda layout: (
            f"{TOOL} gives all stages of a rank as many layers: {blocks} can't be cut evenly into "
            f"{layout.pp} x {layout.stages_per_rank} stages; write {nearest_stages(blocks, layout)}."
        ),
    )

    def broken_rounds(layouts: Columns) -> Number:
        steps = layouts.gradient_accumulation_steps
        return (layouts.pp > 1) & (layouts.virtual_stages > 1) & (np.fmod(steps, layouts.pp) != 0)

    yield Rule(
        f"{TOOL} interleaves stages over groups of pp micro-batches",
        broken_rounds,
        lambda layout: (
            f"{TOOL} interleaves stages over groups of pp = {layout.pp} micro-batches; "
            f"ga{layout.gradient_accumulation_steps} is no multiple, try "
            f"ga{-(-layout.gradient_accumulation_steps // layout.pp) * layout.pp}."
        ),
    )


def cuts(blocks: int, pp: Number, stages_per_rank: Number) -> Number:
    """True if as many stages per rank have whole layers, without more of them on the fullest rank."""
    fullest = stages_per_rank * np.ceil(blocks / (pp * stages_per_rank))
    whole = (blocks % stages_per_rank == 0) & (blocks >= pp * stages_per_rank)
    return whole & (fullest == np.ceil(blocks / pp))


def nearest_stages(blocks: int, layout: Layout) -> str:
    """Return a number of stages per rank that cuts the layers, as a token, or the plain schedule."""
    fitting = [count for count in range(2, blocks // layout.pp + 1) if cuts(blocks, layout.pp, count)]
    nearest = min(fitting, key=lambda count: abs(count - layout.stages_per_rank), default=None)
    return f"v{nearest}" if nearest else "1f1b"


def differences(config: Config, layout: Layout, blocks: int) -> Iterator[str]:
    """Sentences on what the tool runs differently, or leaves to be done by hand. blocks: of the model."""
    yield (
        f"{TOOL} loads its own checkpoints: convert {config.model.name} with Megatron-Bridge; layers and "
        "widths are read from the checkpoint (--use-checkpoint-args)."
    )
    if uneven_stages(blocks, layout):
        first, middle, last = stage_layers(blocks, layout.pp, layout.stages_per_rank)
        between = f", {middle} on each between" if layout.pp > 2 else ""
        yield (
            f"pp{layout.pp} does not divide {blocks} layers evenly: the first pipeline rank has {first}, the "
            f"last {last}{between} (--decoder-first-pipeline-num-layers and --decoder-last-…)."
        )
    if layout.cp > 1 and fine_tuning(config):
        if layout.cp_method == "ulysses":
            yield (
                f"ulysses{layout.cp} over --sft's packed rows needs a recent Transformer Engine (a2a with "
                "thd)."
            )
        else:
            yield f"cp{layout.cp} over --sft's packed rows is written as ring attention (--cp-comm-type p2p)."
    if layout.sp and not layout.sp_regather and not RECOMPUTATIONS[layout.recompute].block:
        yield (
            "With --sequence-parallel the backward always gathers the inputs of attention and MLP again, as "
            f"the layout does with tp{layout.tp}-sp-regather: less memory, two more all-gathers in a block."
        )
    if layout.recompute == "attention":
        yield (
            "recompute=attention is --recompute-modules core_attn; a fused attention kernel keeps no scores "
            "anyway."
        )
    if not config.train.max_steps:
        yield f"{TOOL} counts steps, not epochs: set TRAIN_STEPS, as train.max_steps is not set."
    if config.train.compile:
        yield f"train.compile is not carried over: {TOOL} has fused kernels of its own."
    if fine_tuning(config):
        yield (
            f"With --sft {TOOL} reads JSON Lines of messages and labels assistant turns in its own prompt "
            "format: set --sft-tokenizer-prompt-format; train_on and the model's chat template are not "
            "carried over."
        )
        if config.data.packing:
            yield (
                f"{TOOL} packs nothing by itself: one row is one sequence of {config.data.seq_len} tokens, "
                "so put several conversations into a row, each beginning with its system message."
            )
    else:
        yield (
            f"{TOOL} reads text as .bin and .idx files: DATA is the prefix that tools/preprocess_data.py "
            "wrote."
        )
    others = {row_format(config.data, source) for source in config.data.train} - ROWS
    if others:
        yield f"{TOOL} has no reader for {', '.join(sorted(others))} rows: rewrite them as messages."
    yield from row_notes(config.data, TOOL)
