"""Megatron-LM: a shell script of its command-line flags."""

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from meshtune.layout import Layout
from meshtune.schedules import SCHEDULES
from meshtune.tools.planned import Exported, Planned, torchrun

Flags = dict[str, str | int | float | bool]  # flag -> value; True: the flag alone

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
PIPELINES = ("1f1b", "interleaved1f1b")  # its schedules
ROWS = {"text", "messages"}  # text: .bin and .idx files of tools/preprocess_data.py; messages: --sft
RECOMPUTE: dict[str, Flags] = {
    "none": {},
    "attention": {"recompute-granularity": "selective", "recompute-modules": "core_attn"},
    "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
}


def write(plan: Planned) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk."""
    config, layout = plan.config, plan.layout
    flags = "".join(
        f"\n    --{name}" + ("" if value is True else f" {value}")
        for name, value in (
            arguments(plan) | uneven_stages(plan.blocks, layout) | performance(plan) | recomputation(layout)
        ).items()
        if value is not False
    )
    # Overlap of tensor and context parallelism needs one hardware queue, that of Megatron-FSDP several.
    inner = layout.tp > 1 or layout.cp > 1
    queues = "unset CUDA_DEVICE_MAX_CONNECTIONS" if fsdp(layout) else "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    names = ["CHECKPOINT", "DATA"]
    names += [] if config.train.max_steps else ["TRAIN_STEPS"]
    names += ["NODE_RANK", "MASTER_ADDR"] if plan.nodes > 1 else []
    start = torchrun(plan, 'pretrain_gpt.py "${ARGUMENTS[@]}"')
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
        missing=(*uneven_sentence(plan.blocks, layout),),
    )


def recomputation(layout: Layout) -> Flags:
    flags = RECOMPUTE[layout.recompute]
    if layout.recompute == "full" and layout.recompute_blocks is not None:  # of each stage, the first
        return flags | {"recompute-method": "block", "recompute-num-layers": layout.recompute_blocks}
    return flags


def arguments(plan: Planned) -> Flags:
    config, layout = plan.config, plan.layout
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
        "tokenizer-type": "SFTTokenizer" if fine_tuning(plan) else "HuggingFaceTokenizer",
        "tokenizer-model": shlex.quote(config.model.name),
        "sft": fine_tuning(plan),
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
        flags["lr-warmup-iters"] = plan.warmup_steps or 0
    if "tensorboard" in config.log.to:
        flags["tensorboard-dir"] = shlex.quote(f"{config.output}/tensorboard")
    if layout.cp > 1:
        # Most releases of Transformer Engine gather keys and values of unpacked sequences alone.
        gathered = "p2p" if fine_tuning(plan) else "all_gather"
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


def fine_tuning(plan: Planned) -> bool:
    """True if the rows are conversations, for --sft."""
    return "text" not in plan.rows


def performance(plan: Planned) -> Flags:
    """Flags for overlap, kernels and sums that the plan's stack counts on; all are off by default."""
    config, layout = plan.config, plan.layout
    flags: Flags = {
        "cross-entropy-loss-fusion": True,
        "cross-entropy-fusion-impl": "te",  # 2 bytes a logit instead of 6
        "overlap-grad-reduce": layout.data_ranks * layout.cp > 1,
        "overlap-param-gather": layout.zero > 0,
        "tp-comm-overlap": layout.sp and layout.tp <= plan.gpus_per_node,  # its buffers are one node's
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


def uneven_sentence(blocks: int, layout: Layout) -> Iterator[str]:
    """Yield the sentence on ranks with other numbers of layers, if there are such."""
    if uneven_stages(blocks, layout):
        first, middle, last = stage_layers(blocks, layout.pp, layout.stages_per_rank)
        between = f", {middle} on each between" if layout.pp > 2 else ""
        yield (
            f"pp{layout.pp} does not divide {blocks} layers evenly: the first pipeline rank has {first}, the "
            f"last {last}{between} (--decoder-first-pipeline-num-layers and --decoder-last-…)."
        )
