"""Compiled blocks: one graph for all blocks of a kind and one for their evaluation, whatever the documents.

A backend that runs graphs as they are counts them, and their calls.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import cases
from families import COMMON, FAMILIES, RECURRENT, WINDOWED
from graphs import Graphs
from ranks import run_ranks
from torch import nn
from transformers import AutoConfig

from meshtune import compat
from meshtune.attention.register import register
from meshtune.data.batch import Batch, micro_batch
from meshtune.data.pack import LABELLED
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.parallel.apply import width_multiple
from meshtune.parallel.mesh import World, join
from meshtune.train.model import LoraSpec, ModelSpec, OptimizerSpec, rank_model
from meshtune.train.step import Counts

SINKS = partial(AutoConfig.for_model, "granite_swa", **COMMON | WINDOWED)
EVERY = FAMILIES | RECURRENT | {"granite_swa": SINKS}
BLOCKS, STEPS, WIDTH, ROWS = 10, 20, 32, 2  # more blocks than the 8 graphs that torch makes of one function


class Found(NamedTuple):
    losses: list[float]
    graphs: list[int]  # after each step
    of_evaluation: int
    calls: int
    blocks: int  # of this rank
    breaks: dict[str, int]


def batch(step: int, world: World, *, packed: bool) -> Batch:
    """Rows of random documents, other ones in each step and micro-batch; unpacked: one document a row."""
    layout, draw = world.layout, np.random.default_rng((step, world.data_rank))
    micro_batches = []
    for _ in range(layout.gradient_accumulation_steps):
        rows = []
        for _ in range(ROWS):
            left, row = int(draw.integers(WIDTH // 2, WIDTH + 1)), []
            while left:
                length = int(draw.integers(1, left + 1)) if packed else left
                document = draw.integers(3, 200, length).astype(np.uint32) | np.uint32(LABELLED)
                document[0] &= ~np.uint32(LABELLED)
                row.append(document)
                left -= length
            rows.append(row)
        micro_batches.append(micro_batch(rows, WIDTH if packed else 0, width_multiple(layout)))
    return Batch(tuple(micro_batches), tokens=0, label_tokens=100, origin="")


def train(text: str, family: str, options: dict[str, Any], compiled: bool, packed: bool) -> Found:
    register()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = Graphs()

    def compile(module: nn.Module) -> None:
        module._compiled_call_impl = torch.compile(module._call_impl, backend=graphs)

    nn.Module.compile = compile  # type: ignore[method-assign]
    world = join(Layout.parse(text), torch.device("cpu"))
    kinds = getattr(EVERY[family](), "layer_types", None)
    config = EVERY[family](
        num_hidden_layers=BLOCKS, **({"layer_types": kinds * (BLOCKS // len(kinds))} if kinds else {})
    )
    spec = ModelSpec(source=config, init="random", precision="fp32", compile=compiled, **options)
    model = rank_model(spec, world, optimizer=OptimizerSpec())
    losses, made, of_evaluation = [], [], 0
    for step in range(STEPS if compiled else 3):
        found = batch(step, world, packed=packed)
        outcome = model.passes.step(
            model.passes.localise(found), Counts(100), lambda _: nullcontext(), learning_rate=1e-3,
            max_grad_norm=1.0,
        )  # fmt: skip
        losses.append(outcome.loss)
        made.append(graphs.made)
        if step == 2:
            model.parallel.forward(found.micro_batches, lambda model, anatomy, hidden, _: hidden)
            of_evaluation = graphs.made - made[-1]
    blocks = sum(len(stage.own_blocks) for stage in model.parallel.stages)
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    return Found(losses, made, of_evaluation, graphs.calls, blocks, breaks)


def pair(
    text: str, family: str = "llama", *, packed: bool = True, **options: Any
) -> tuple[list[Found], list[Found]]:
    """Train with compiled blocks and without, and return what each rank found."""
    ranks = Layout.parse(text).world
    compiled, plain = (
        run_ranks(ranks, train, text, family, options, compiled, packed, seconds=120, forked=True)
        for compiled in (True, False)
    )
    return compiled, plain


def tensor_parallel_is_refused(text: str) -> bool:
    """True if this torch is too old for it, which is then tested instead."""
    if Layout.parse(text).tp == 1 or compat._number(torch.__version__) >= compat.COMPILED_TENSOR:
        return False
    with pytest.raises(UserError, match="wrong gradients"):
        compat.check_compiled_tensor()
    return True


def assert_alike(compiled: list[Found], plain: list[Found], layout: Layout) -> None:
    """Assert that every block runs as one graph, in each micro-batch, with the losses of uncompiled ones."""
    for one, other in zip(compiled, plain, strict=True):
        assert not one.breaks
        assert one.calls == STEPS * layout.gradient_accumulation_steps * one.blocks
        np.testing.assert_allclose(one.losses[:3], other.losses, rtol=1e-6)


def assert_compiled(compiled: list[Found], plain: list[Found], layout: Layout, kinds: int = 1) -> None:
    """Assert that all blocks run `kinds` graphs from the first step on, and `kinds` more in evaluation."""
    assert_alike(compiled, plain, layout)
    for one in compiled:
        assert one.graphs[0] == one.graphs[2] == kinds
        assert one.of_evaluation == kinds and one.graphs[-1] == 2 * kinds


MODES = ("", "-attention", "-selective", "-linear", "-full")
LAYOUTS = (
    "mb2-ga2", "dp2-mb2-ga2", "zero1x2-mb2-ga2", "zero2x2-mb2-ga2", "zero3x2-mb2-ga2",
    "pp2-1f1b-mb2-ga4", "tp2-sp-mb2-ga2", "cp2-mb2-ga2", "ulysses2-mb2-ga2",
)  # fmt: skip


@pytest.mark.parametrize(
    "text",
    cases(
        [*(f"{layout}{mode}" for layout in LAYOUTS for mode in MODES), "zero3x2-mb2-ga2-offload"],
        ci=[
            "cp2-mb2-ga2-linear",
            "zero3x2-mb2-ga2-selective",
            "pp2-1f1b-mb2-ga4-full",
            "tp2-sp-mb2-ga2-full",
            "zero3x2-mb2-ga2-offload",
        ],
    ),
)
def test_all_blocks_are_one_graph(text: str) -> None:
    if tensor_parallel_is_refused(text):
        return
    assert_compiled(*pair(text), Layout.parse(text))


KINDS = {"qwen3": 1, "gemma2": 2, "gemma3": 2, "phi3": 1, "gpt2": 1, "granite_swa": 2}  # 2: windowed and not


@pytest.mark.parametrize("family", cases([*KINDS], ci=["gemma2"]))
@pytest.mark.parametrize("mode", cases(MODES[1:], ci=["-full"]))
def test_blocks_of_families_are_one_graph_a_kind(family: str, mode: str) -> None:
    text = f"mb2-ga2{mode}"
    assert_compiled(*pair(text, family), Layout.parse(text), KINDS[family])


@pytest.mark.all
def test_mixers_interrupt_the_compiler_and_compute_the_same() -> None:
    for one, other in zip(*pair("mb2-ga2", "lfm2"), strict=True):
        assert one.breaks and one.calls
        np.testing.assert_allclose(one.losses[:3], other.losses, rtol=1e-6)


@pytest.mark.parametrize("text", cases(["mb2-ga2-selective", "tp2-sp-mb2-ga2-full"], ci=1))
@pytest.mark.parametrize("lora", [LoraSpec(), LoraSpec(use_dora=True)], ids=["lora", "dora"])
def test_adapters_are_compiled(text: str, lora: LoraSpec) -> None:
    """The first block's input needs no gradient, so that it is a kind of its own in training."""
    if tensor_parallel_is_refused(text):
        return
    compiled, plain = pair(text, lora=lora, neftune_alpha=5.0)
    assert_alike(compiled, plain, Layout.parse(text))
    for one in compiled:
        assert one.graphs[0] == one.graphs[2] == 2 and one.graphs[-1] == 3


@pytest.mark.parametrize(
    "text",
    cases(
        [
            *(f"mb2-ga2{mode}" for mode in MODES), "tp2-sp-mb2-ga2", "zero3x2-mb2-ga2-full",
            "cp2-mb2-ga2-selective",
        ],
        ci=["mb2-ga2-full"],
    ),
)  # fmt: skip
def test_rows_of_other_widths_are_compiled_once_more(text: str) -> None:
    if tensor_parallel_is_refused(text):
        return
    compiled, plain = pair(text, packed=False)
    assert_alike(compiled, plain, Layout.parse(text))
    for one in compiled:
        assert one.graphs[1] == 2 and one.graphs[-1] == 3
