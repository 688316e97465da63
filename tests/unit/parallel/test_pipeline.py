"""Pipelines: gradients per parameter against one rank, collectives, forward passes alone, what is kept."""

from collections import Counter
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from cases import cases
from collectives import Collectives
from families import COMMON, FAMILIES, exact
from forward import summed_loss
from golden import refuses
from ranks import run_ranks
from tiny import documents
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GraniteConfig

from meshtune import compat
from meshtune.attention.register import register
from meshtune.errors import UserError
from meshtune.layout import RECOMPUTATIONS, TORCH_SCHEDULES, ZERO_BUBBLE, Layout
from meshtune.meter.clock import StepClock
from meshtune.model.anatomy import anatomy
from meshtune.parallel.apply import cut, place
from meshtune.parallel.mesh import join
from meshtune.parallel.zero import local
from meshtune.placement.rules import Traits, refusals
from meshtune.placement.schedules import orders
from meshtune.placement.share import stage_blocks, stage_of_rank
from meshtune.train.loss import head_loss

register()

BLOCKS, VOCABULARY = 8, 256


def test_a_torch_with_other_private_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_pipelining("1f1b", split=False)
    path = "torch.distributed.pipelining.stage:PipelineStage.clear_runtime_states"
    monkeypatch.setattr(compat, "INSIDES", (*compat.INSIDES, compat.Inside(path, "renamed")))
    with refuses(UserError):
        compat.check_pipelining("1f1b", split=False)


def test_a_torch_that_cannot_split_the_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda name: "2.11.0")
    with refuses(UserError):
        compat.check_pipelining("zbv", split=True)


def test_torchs_schedules_still_take_lists_of_micro_batches() -> None:
    """`Pipeline` calls their private `_step_microbatches`: the public `step` splits tensors only."""
    for name in TORCH_SCHEDULES.values():
        taken = signature(get_schedule_class(name)._step_microbatches).parameters
        assert list(taken)[1:5] == ["arg_mbs", "kwarg_mbs", "target_mbs", "losses"]
        assert "return_outputs" in taken


def make(family: str, meta: bool = False) -> Any:
    torch.manual_seed(0)
    changes: dict[str, Any] = {"num_hidden_layers": BLOCKS}
    name = family.removesuffix("-tied")
    if family.endswith("-tied"):
        changes["tie_word_embeddings"] = True
    if name == "gemma2":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * (BLOCKS // 2)
    if name == "granite":  # its body scales the embeddings before the first block
        config = GraniteConfig(**COMMON | changes, embedding_multiplier=12.0)
    else:
        config = FAMILIES[name](**changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="meshtune").double()
    if meta:
        places: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for key, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[key] = places.setdefault(p, nn.Parameter(p.detach().to("meta")))
    return model


def batches(number: int, width: int = 32, seed: int = 0) -> list[Any]:
    return [documents(seed=seed + n, vocabulary=VOCABULARY, width=width) for n in range(number)]


def reference(family: str, steps: list[list[Any]]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    model = make(family)
    parts, found = anatomy(model), []
    for step in steps:
        model.zero_grad()
        scale = 1 / sum(each.label_tokens for each in step)
        total = 0.0
        for each in step:
            loss = summed_loss(model, parts, each) * scale
            loss.backward()
            total += float(loss.detach())
        found.append((total, {n: p.grad.clone() for n, p in model.named_parameters()}))
    return found


class OnParameters:
    """Gradients where autograd leaves them, as replicas want them."""

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return parameter.grad

    def replace_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        parameter.grad = gradient

    def complete(self, parameter: nn.Parameter) -> None:
        """No update is made in the backward."""


def build(family: str, layout: Layout) -> Any:
    world = join(layout, torch.device("cpu"))
    every = stage_blocks([1.0] * BLOCKS, layout.stages, last=0.5)
    own = stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, world.pp.index)
    made = cut(
        partial(make, family, True), world, {s: every[s] for s in own},
        finish=partial(head_loss, single_backward=layout.schedule not in ZERO_BUBBLE),
        compute_dtype=torch.float64, reduce_dtype=None,
    )  # fmt: skip
    parallel = place(made, world)
    whole = dict(make(family).named_parameters())
    for name, piece in parallel.named_pieces():
        block = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
        piece.tensor.copy_(whole[name].detach()[block])
    if parallel.replicas is not None:
        parallel.replicas.watch(OnParameters())
    return parallel


def step(parallel: Any, own: list[Any], scale: float) -> tuple[float, dict[str, torch.Tensor], Counter[str]]:
    for _, p in parallel.named_parameters():
        p.grad = None
    parallel.begin(len(own))
    with Collectives() as collectives:
        total = parallel.pipeline.forward_backward([parallel.localise(b) for b in own], scale, lambda: None)

    def gradients(names: Any) -> dict[str, torch.Tensor]:
        return {
            n: local(p.grad) for n, p in parallel.named_parameters()
            if p.grad is not None and (names is None or n in names)
        }  # fmt: skip

    parallel.finish_gradients(gradients)
    found = {}
    for name, p in parallel.named_parameters():
        assert p.grad is not None, f"{name} has no gradient"
        found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
    return float(total), found, collectives.count


def worst(parallel: Any, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(
        float((g - expected[parallel.tied.get(n, n)]).norm() / expected[parallel.tied.get(n, n)].norm())
        for n, g in found.items()
    )


def rank_steps(family: str, text: str, steps: list[list[Any]], expected: Any) -> Any:
    with exact():
        layout = Layout.parse(text)
        parallel = build(family, layout)
        world, out, clock = parallel.world, [], StepClock(torch.device("cpu"), {})
        for own_step, (loss, grads) in zip(steps, expected, strict=True):
            scale = 1 / sum(each.label_tokens for each in own_step)
            mine = own_step[world.data_rank :: world.data_ranks]
            clock.take()
            with clock.running():
                total, found, count = step(parallel, mine, scale)
            clock.take()
            assert all(0 <= start <= end for start, end, _ in clock.passes)
            planned = orders(replace(layout, gradient_accumulation_steps=len(mine)))[world.pp.index]
            assert [what for _, _, what in clock.passes] == planned
            out.append((total, loss, worst(parallel, found, grads), dict(count)))
        return out


def check(family: str, text: str, steps: list[list[Any]]) -> Any:
    with exact():
        expected = reference(family, steps)
    results = run_ranks(Layout.parse(text).world, rank_steps, family, text, steps, expected)
    for number in range(len(steps)):
        share = sum(rank[number][0] for rank in results)
        assert abs(share / results[0][number][1] - 1) < 1e-7
        assert max(rank[number][2] for rank in results) < 1e-7
    return results


TWO = "pp2-gpipe pp2-1f1b pp2-interleaved1f1b-v2 pp2-loopedbfs-v2 pp2-zb-v2 pp2-zbv pp2-dualpipev"


@pytest.mark.parametrize(
    ("family", "text"),
    cases(
        [
            *(("llama", text) for text in TWO.split()), ("llama-tied", "pp2-1f1b"), ("llama-tied",
            "pp2-zbv"), ("gemma2", "pp2-1f1b"), ("granite", "pp2-zbv"), ("cohere", "pp2-zb-v2"),
        ],
        ci=[("llama", "pp2-interleaved1f1b-v2"), ("llama-tied", "pp2-zbv")],
    ),
)  # fmt: skip
def test_gradients_are_those_of_one_rank(family: str, text: str) -> None:
    """The second step has another shape, the third the first one's again."""
    check(family, text, [batches(4), batches(4, 48, seed=9), batches(4, seed=20)])


@pytest.mark.parametrize(
    "text", cases(["pp4-1f1b", "pp4-gpipe", "pp4-zb-v2", "pp4-zbv", "pp4-dualpipev"], ci=1)
)
def test_four_ranks_and_a_tied_embedding(text: str) -> None:
    check("llama-tied", text, [batches(8), batches(8, seed=9)])


COUNTS = {  # groups of a rank: four blocks, and embedding or head; four micro-batches
    "zero1x2-pp2-1f1b": (5, 5), "zero2x2-pp2-1f1b": (5, 20), "zero3x2-pp2-1f1b": (36, 20),
    "zero1x2-pp2-gpipe": (5, 5), "zero2x2-pp2-gpipe": (5, 20), "zero3x2-pp2-gpipe": (36, 20),
}  # fmt: skip


@pytest.mark.parametrize("text", cases(COUNTS, ci=["zero3x2-pp2-gpipe"]))
def test_zero_inside_stages_sends_its_messages(text: str) -> None:
    for rank in check("llama", text, [batches(8), batches(8, seed=9)]):
        count = rank[1][3]
        assert (count["allgather_base"], count["reduce_scatter_base"]) == COUNTS[text]


@pytest.mark.parametrize("text", cases(["zero2x2-pp2-interleaved1f1b-v2", "zero3x2-pp2-interleaved1f1b-v2",
                                  "zero1x2-pp2-zbv", "dp2-pp2-zb-v2"], ci=1))  # fmt: skip
def test_zero_inside_several_stages(text: str) -> None:
    check("llama-tied", text, [batches(8), batches(8, seed=9)])


def rank_forward(text: str, mine: list[Any]) -> Any:
    """(Losses, or None without the last stage; exchanges with other ranks)."""
    parallel = build("llama", Layout.parse(text))
    exchange = Mock(wraps=dist.batch_isend_irecv)
    with torch.no_grad(), patch.object(dist, "batch_isend_irecv", exchange):
        return parallel.pipeline.forward_only(mine, head_loss), exchange.call_count


@pytest.mark.ci
@pytest.mark.parametrize("text", ["pp2-1f1b", "pp2-interleaved1f1b-v2", "pp2-zbv", "pp4-zbv"])
def test_forward_only(text: str) -> None:
    mine = [*batches(2), *batches(1, 40, seed=3)]
    model = make("llama")
    parts = anatomy(model)
    with torch.no_grad():
        expected = [float(summed_loss(model, parts, each)) for each in mine]
    results = run_ranks(Layout.parse(text).world, rank_forward, text, mine)
    found = [losses for losses, _ in results if losses is not None]
    assert len(found) == 1
    assert [float(x) for x in found[0]] == pytest.approx(expected, rel=1e-7)


@pytest.mark.ci
@pytest.mark.parametrize("text", ["pp2-1f1b", "pp2-zbv"])
def test_ranks_work_at_once_in_a_forward_only(text: str) -> None:
    """One micro-batch after the other would be 12 exchanges with two stages, and 36 with four."""
    layout, mine = Layout.parse(text), batches(12)
    for _, exchanges in run_ranks(2, rank_forward, text, mine):
        assert exchanges <= layout.stages + len(mine) - 2


def rank_kept(text: str, widths: list[int]) -> list[int]:
    parallel = build("llama", Layout.parse(text))
    kept = []
    for width in widths:
        step(parallel, batches(4, width), 1.0)
        made = parallel.pipeline._schedules.values()
        stages = [s for each in made for s in parallel.pipeline._torch_stages(each)]
        infos = [
            i for s in stages for r in (s.args_recv_info, s.grad_recv_info) for t in r.values() for i in t
        ]
        buffers = [i.buffer for i in infos if i.buffer is not None]
        tensors = [t for buffer in buffers for t in (buffer, buffer.grad) if t is not None]
        kept.append(sum(t.nbytes for t in tensors))
    return kept


@pytest.mark.ci
def test_kept_buffers_do_not_grow_with_the_number_of_shapes() -> None:
    for kept in run_ranks(2, rank_kept, "pp2-1f1b", [32, 40, 48, 56, 32]):
        assert kept[-1] <= 2 * kept[0]


def rank_ragged() -> None:
    parallel = build("llama", Layout.parse("pp2-1f1b"))
    parallel.pipeline.forward_backward([*batches(2), *batches(2, 40)], 1.0, lambda: None)


def test_two_shapes_in_a_step_are_refused() -> None:
    with pytest.raises(AssertionError, match="have 2 shapes"):
        run_ranks(2, rank_ragged)


class Kernels(TorchDispatchMode):
    """Counts the calls of the attention kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.startswith("_scaled_dot_product_flash_attention_for_cpu.")
        return func(*args, **(kwargs or {}))


def forwards(text: str) -> tuple[float, int]:
    """(MLP forwards a block and micro-batch, calls of the attention kernel) in one step on this rank."""
    layout = Layout.parse(text)
    parallel, own, calls = build("llama", layout), batches(4), []
    mlps = [m for s in parallel.stages for n, m in s.named_modules() if n.endswith(".mlp")]
    for mlp in mlps:
        mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    parallel.begin(len(own))
    with Kernels() as kernels:
        parallel.pipeline.forward_backward([parallel.localise(b) for b in own], 1.0, lambda: None)
    return len(calls) / (len(mlps) * len(own)), kernels.count


@pytest.mark.parametrize("schedule", cases(TWO.split(), ci=["pp2-zbv"]))
def test_a_block_is_recomputed_once_in_every_mode_that_is_not_refused(schedule: str) -> None:
    traits = Traits("LlamaForCausalLM", blocks=BLOCKS, heads=4, kv_heads=2, vocabulary=VOCABULARY)
    plain = run_ranks(2, forwards, schedule)
    for name, mode in RECOMPUTATIONS.items():
        text = f"{schedule}-{name}" if name != "none" else schedule
        if refusals(traits, Layout.parse(f"{text}-ga4")):
            continue
        for (mlp, attention), (_, once) in zip(run_ranks(2, forwards, text), plain, strict=True):
            assert mlp == 1 + mode.block
            assert attention == (1 + mode.attention) * once
