"""Megatron-LM: a shell script of its command-line flags."""

import shlex
from collections.abc import Iterator

from meshtune.config import Config
from meshtune.layout import Layout
from meshtune.plan.export.exported import (
    Exported,
    every_block,
    guessed_formats,
    nodes,
    not_carried_over,
    refuse,
    row_format,
    schedule_refusals,
    torchrun,
    warmup_steps,
)
from meshtune.recomputation import RECOMPUTATIONS
from meshtune.schedules import SCHEDULES

TOOL = "Megatron-LM"
Flags = dict[str, str | int | float | bool]  # flag -> value; True: the flag alone

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
ROWS = {"text", "messages"}  # text: .bin and .idx files of tools/preprocess_data.py; messages: --sft
RECOMPUTE: dict[str, Flags] = {
    "none": {},
    "attention": {"recompute-granularity": "selective", "recompute-modules": "core_attn"},
    "selective": {"recompute-granularity": "selective", "recompute-modules": "layernorm"},
    "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
}


def write(config: Config, layout: Layout, gpus_per_node: int) -> Exported:
    """Return the layout and workload in this tool's form; nothing is written to disk.

    Raises UserError, with every reason, if it can't run them.
    """
    schedules = schedule_refusals(TOOL, config, with_floor=["cosine", "linear"])
    refuse(TOOL, config, layout, gpus_per_node, [*problems(config, layout), *schedules])
    flags = "".join(
        f"\n    --{name}" + ("" if value is True else f" {value}")
        for name, value in (arguments(config, layout) | recomputation(layout)).items()
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
        missing=(*differences(config, layout), *not_carried_over(TOOL, config)),
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


def problems(config: Config, layout: Layout) -> Iterator[str]:
    """Sentences on why the tool can't run the layout or the workload; empty: it can."""
    if config.method == "lora":
        yield f"{TOOL} trains every parameter; for method=lora use --export axolotl or llamafactory."
    if fsdp(layout) and layout.pp > 1:
        yield (
            f"Megatron-FSDP, {TOOL}'s ZeRO-{layout.zero}, runs without pipeline stages; with pp{layout.pp} "
            f"write zero1x{layout.dp_shard}, or zero{layout.zero}x{layout.dp_shard * layout.pp} without pp."
        )
    if layout.cp > 1 and config.data.seq_len % (2 * layout.cp):
        step = 2 * layout.cp
        yield (
            f"{TOOL} cuts a sequence into 2 x cp = {step} pieces, which do not divide data.seq_len = "
            f"{config.data.seq_len}; try {max(1, round(config.data.seq_len / step)) * step}."
        )
    micro, accumulation = layout.micro_batch_size, layout.gradient_accumulation_steps
    if fine_tuning(config) and micro > 1:
        yield (
            f"{TOOL}'s --sft takes one sequence per micro-batch; write mb1-ga{micro * accumulation} instead "
            f"of mb{micro}-ga{accumulation}."
        )
    if layout.stages_per_rank > 1 and (accumulation < layout.pp or accumulation % layout.pp):
        yield (
            f"{TOOL} interleaves stages over groups of pp = {layout.pp} micro-batches; ga{accumulation} is "
            f"no multiple, try ga{-(-accumulation // layout.pp) * layout.pp}."
        )


def differences(config: Config, layout: Layout) -> Iterator[str]:
    """Sentences on what the tool runs differently, or leaves to be done by hand."""
    yield (
        f"{TOOL} loads its own checkpoints: convert {config.model.name} with Megatron-Bridge; layers and "
        "widths are read from the checkpoint (--use-checkpoint-args)."
    )
    if layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved1f1b"):
        written = f"interleaved 1F1B with v{layout.stages_per_rank}" if layout.stages_per_rank > 1 else "1F1B"
        yield (
            f"{TOOL} has no schedule {layout.schedule}: {written} is written; its bubble and memory differ."
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
    if layout.recompute == "selective":
        yield (
            f"{TOOL}'s selective recomputation is by module: norms are recomputed, activation functions of "
            "dense MLPs are kept, so it holds more than recompute=selective."
        )
        yield from every_block(TOOL, layout)
    if config.train.precision == "bf16-pure":
        yield f"{TOOL} keeps fp32 master weights with --bf16; bf16-pure has no flag."
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
    yield from guessed_formats(config.data)
