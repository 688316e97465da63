"""Dry runs of compiled blocks: what they keep, their kernels and messages, as inductor has them."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from cases import cases
from made_traces import job_of
from transformers import Gemma2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from meshtune import compat, precision
from meshtune.attention.register import register
from meshtune.data.batch import Batch, micro_batch
from meshtune.data.pack import LABELLED
from meshtune.dryrun.costs import moved_bytes
from meshtune.dryrun.ranks import trace_ranks
from meshtune.dryrun.world import trace_rank
from meshtune.layout import Layout
from meshtune.meter.trace import ACTIVATIONS, BACKWARD, FORWARD, UPDATE, StepTrace
from meshtune.model.trace import census_of
from meshtune.parallel.mesh import join
from meshtune.placement.columns import Columns
from meshtune.placement.rules import Traits
from meshtune.plan.cluster import cluster_of
from meshtune.plan.machine import machine_of
from meshtune.plan.memory.activations import saved_by_block
from meshtune.plan.work import Work
from meshtune.plan.workload import Workload
from meshtune.sections import ClusterConfig
from meshtune.train.model import LoraSpec, ModelSpec, OptimizerSpec, rank_model, trainable_skeleton
from meshtune.train.step import Counts

H, KV, F, HEADS, BLOCKS, TOKENS, VOCABULARY = 512, 128, 768, 8, 3, 250, 1024
LLAMA = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=H, intermediate_size=F, num_hidden_layers=BLOCKS,
    num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
# Bytes per token in bf16, counted by hand: log-sums are 4 bytes a head, the norms' 1 / RMS 4 each
PROJECTED = 2 * (H + 2 * KV) + 2 * H + 2 * F * 2  # queries, keys, values; what attention adds; gate and up
CORE = 2 * H + 4 * HEADS
KEPT = {
    "": 2 * H + PROJECTED + CORE + 2 * 2 * H + 2 * F + 8,  # both normalised inputs and the MLP's product too
    "-selective": 2 * H + PROJECTED + CORE,
    "-linear": 2 * H + CORE,
    "-full": 2 * H,
}
KEPT["-attention"] = KEPT[""] - CORE


SHAPE = {name: getattr(LLAMA, name) for name in (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)}  # fmt: skip
FAMILIES: dict[str, tuple[PretrainedConfig, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama with LoRA": (LLAMA, {"lora": LoraSpec(r=8)}),
    "qwen3": (Qwen3Config(**SHAPE, head_dim=64), {}),  # norms of queries and keys
    "gemma2": (Gemma2Config(**SHAPE, head_dim=64, attn_logit_softcapping=None, pad_token_id=0), {}),
}
IN_FP8 = {"llama in fp8": (LLAMA, {"precision": "fp8"})}


def traced(layout: str, source: PretrainedConfig = LLAMA, **spec: Any) -> StepTrace:
    given = {"seq_len": 256, "kernels": "cuda", "compile": True, "precision": "bf16"} | spec
    job = job_of(source, layout, (TOKENS,), **given)
    (trace,) = trace_ranks(partial(trace_rank, job), [0], job.layout.world)
    return trace.steps[1]


def kept(step: StepTrace) -> Counter[str]:
    """Bytes per token that each block keeps from its forward to its backward."""
    inside = [each.module.startswith("model.layers") and each.phase == FORWARD for each in step.operations]
    last = max(number for number, of_block in enumerate(inside) if of_block)
    kept: Counter[str] = Counter()
    for storage in step.living_at(last + 1).values():
        if storage.category == ACTIVATIONS:
            kept[".".join(storage.module.split(".")[:3])] += storage.bytes / 256
    return kept


@pytest.mark.parametrize(
    ("family", "mode"),
    cases(
        [*product(FAMILIES | IN_FP8, KEPT)],
        ci=[("qwen3", ""), ("gemma2", "-selective"), ("llama in fp8", "")],
    ),
)
def test_the_planner_counts_what_compiled_blocks_keep(
    family: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, spec = (FAMILIES | IN_FP8)[family]
    monkeypatch.setattr(precision, "FP8_LEAST", 16)
    step = traced(f"mb1-ga1{mode}", source, **spec)
    of_block = {each.name for each in step.operations if each.module == "model.layers.1"}
    assert any(name.startswith("fused") for name in of_block), "it ran uncompiled"
    model = trainable_skeleton(ModelSpec(source=source, init="random", **spec))[0]
    work = Work.of(census_of(model)).compiled(fp8="tensorwise" * (family in IN_FP8))
    layouts = Columns.of([Layout.parse(f"mb1-ga1{mode}")])
    traces = work.traced[2]
    of_block = saved_by_block(
        traces.fullest, work, layouts, np.array([1.0]), selective=traces.selective, compiled=traces.fused
    )
    beyond = 0.002 * (family in IN_FP8)  # scales, and the norms' 1 / RMS
    assert of_block.saved == pytest.approx([kept(step)["model.layers.1"]], rel=beyond, abs=0)


@pytest.mark.ci
def test_zero_gathers_the_weights_of_matmuls_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled blocks keep no copy of them, transposed or not."""
    monkeypatch.setattr(precision, "FP8_LEAST", 16)
    narrow, wide = (traced("zero3x2-mb1-ga1", precision=name) for name in ("fp8", "fp8-rowwise"))
    gathered = [
        sum(each.bytes for each in step.collectives() if each.op == "all_gather") for step in (narrow, wide)
    ]
    matrices, scales = H * (2 * H + 2 * KV + 3 * F), 7 * 2 * 16
    assert gathered[1] - gathered[0] == 2 * BLOCKS * (matrices - scales)
    of_block = [kept(step)["model.layers.1"] for step in (narrow, wide)]
    assert of_block[0] == pytest.approx(of_block[1], rel=0.01)


def kept_by_inductor(layout: str, source: PretrainedConfig, **spec: Any) -> float:
    """Bytes per token that a block of a run keeps which inductor itself compiled, by autograd's hooks."""
    register()
    torch._dynamo.reset()
    world = join(Layout.parse(layout), torch.device("cpu"))
    model = rank_model(
        ModelSpec(source=source, init="random", precision="bf16", compile=True, **spec), world,
        optimizer=OptimizerSpec(),
    )  # fmt: skip
    kept: dict[int, dict[int, int]] = {0: {}, 1: {}}
    running: list[int] = []
    blocks = model.parallel.stages[0].own_blocks
    weights = {weight.untyped_storage().data_ptr() for weight in model.parallel.stages[0].parameters()}
    for number in kept:
        blocks[number].register_forward_pre_hook(lambda *_, number=number: running.append(number))
        blocks[number].register_forward_hook(lambda *_: running.clear())

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if running and storage.data_ptr() not in weights:
            kept[running[0]][storage.data_ptr()] = storage.nbytes()
        return tensor

    document = np.full(TOKENS, 5 | LABELLED, np.uint32)
    document[0] = 5
    batch = Batch((micro_batch([[document]], 256, 1),), tokens=TOKENS, label_tokens=TOKENS - 1, origin="")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.passes.step(
            model.passes.localise(batch), Counts(TOKENS - 1), lambda _: nullcontext(), learning_rate=1e-3,
            max_grad_norm=1.0,
        )  # fmt: skip
    return sum(size for at, size in kept[1].items() if at not in kept[0]) / 256  # both: rotary angles, bounds


@pytest.mark.parametrize(("family", "mode"), cases([*product(FAMILIES, KEPT)], ci=[("llama", "-linear")]))
def test_a_run_by_inductor_keeps_what_a_dry_run_keeps(family: str, mode: str) -> None:
    (source, spec), layout = FAMILIES[family], f"mb1-ga1{mode}"
    found = kept(traced(layout, source, kernels="cpu", **spec))["model.layers.1"]
    assert kept_by_inductor(layout, source, **spec) == found > 0


def moved_by_blocks(step: StepTrace) -> float:
    """Bytes per token that the kernels of a mean block read and write in a step."""
    of_blocks = (each for each in step.operations if each.module.startswith("model.layers") and each.kernels)
    return sum(each.read + each.written for each in of_blocks) / BLOCKS / 256


@pytest.mark.ci
def test_compiled_blocks_with_adapters_move_what_inductor_moves() -> None:
    assert moved_by_blocks(traced("mb1-ga1", lora=LoraSpec(r=16))) < 230e3, "484 kB a token uncompiled"


@pytest.mark.parametrize(
    "mode", cases(["", "-attention", "-selective", "-linear", "-full"], ci=["-selective"])
)
def test_compiled_blocks_keep_what_inductor_keeps_and_fuse_what_it_fuses(mode: str) -> None:
    step = traced(f"mb1-ga1{mode}")
    of_blocks = [
        (number, each)
        for number, each in enumerate(step.operations)
        if each.module.startswith("model.layers")
    ]
    assert {kept(step)[f"model.layers.{block}"] for block in range(1, BLOCKS)} == {KEPT[mode]}
    moved = moved_by_blocks(step)
    assert moved < (200e3 if mode in ("", "-attention") else 260e3), "395 kB a token uncompiled"
    names = {each.name for _, each in of_blocks if each.kernels}
    assert {name.partition(".")[0] for name in names} == {"fused", "aten", "meshtune"}
    of_loss = [each for each in step.operations if each.name.startswith("fused.") and not each.module]
    logits = (TOKENS - 1) * VOCABULARY
    assert sum(each.read + each.written for each in of_loss) / logits < 8.1, "28 bytes uncompiled"
    assert not step.host_copies and list(step.host_reads.values()) == [1]


UPDATES = [  # bytes a parameter: the norm's, the gradient, the trained weight, its states, the rounded weight
    (
        "adamw",
        "bf16",
        "fp32",
        True,
        4 + 4 + 8 + 16 + 6 + 4,
    ),  # rounded by a kernel of its own; scaled gradient
    ("adamw-bf16", "bf16", "fp32", True, 4 + 4 + 8 + 8 + 2),
    ("adamw-bf16", "bf16", "bf16", True, 2 + 2 + 8 + 8 + 2),
    ("adamw-8bit", "bf16", "fp32", True, 4 + 4 + 8 + 4.25 + 8 + 2),
    ("adamw", "bf16-pure", "bf16", True, 2 + 2 + 4 + 8),
    ("lion", "bf16", "fp32", True, 4 + 4 + 8 + 8 + 2),
    ("adamw-bf16", "bf16", "fp32", False, 538),
    ("adamw", "bf16-pure", "bf16", False, 640),
    ("adamw-8bit", "bf16", "fp32", False, 904),
    ("adamw-8bit", "bf16-pure", "bf16", False, 1009),
    ("lion", "bf16", "fp32", False, 126),
    ("adafactor", "fp32", "fp32", False, 96),
]


@pytest.mark.parametrize(
    ("optimizer", "precision", "reduce_dtype", "compiled", "expected"), cases(UPDATES, ci=2)
)
def test_an_update_moves_the_bytes_that_the_planner_counts(
    optimizer: str, precision: str, reduce_dtype: str, compiled: bool, expected: float
) -> None:
    settings = {"precision": precision, "reduce_dtype": reduce_dtype}
    job = job_of(LLAMA, "mb1-ga2", (64,), kernels="cuda", compile=compiled, **settings)
    job = replace(job, optimizer=OptimizerSpec(name=optimizer))
    (trace,) = trace_ranks(partial(trace_rank, job), [0], 1)
    model = trainable_skeleton(job.spec)[0]
    operations = (each for each in trace.steps[1].operations if each.phase == UPDATE)
    trained = sum(parameter.numel() for parameter in model.parameters())
    moved = sum(map(moved_bytes, operations)) / trained
    assert moved == pytest.approx(expected, rel=0.01)
    workload = Workload(
        "m", Work.of(census_of(model)), Traits("Llama", BLOCKS, HEADS, 2, VOCABULARY), seq_len=64,
        global_batch_size=2, optimizer=optimizer, compile=compiled, **settings,
    )  # fmt: skip
    machine = machine_of(workload, cluster_of(ClusterConfig(gpu="h200", gpus=1)))
    assert machine.optimizer_bytes + machine.rounding_bytes == pytest.approx(moved, rel=0.01)


@pytest.mark.ci
@pytest.mark.skipif(
    compat._number(torch.__version__) < compat.COMPILED_TENSOR, reason="refused: wrong gradients under tp"
)
def test_messages_of_compiled_blocks_are_traced_with_the_reductions_that_are_not_repeated() -> None:
    step = traced("tp2-mb1-ga1-full")
    hidden = [each for each in step.collectives() if each.bytes == 2 * H * 256]
    assert {(each.op, each.axis, each.ranks) for each in hidden} == {("all_reduce", "tp", 2)}
    # Two a block in each pass and one again; one of the embedding, one of the head
    assert len(hidden) == BLOCKS * (2 + 2 + 1) + 2
    assert {each.phase for each in step.operations if each.collective in hidden} == {FORWARD, BACKWARD}
