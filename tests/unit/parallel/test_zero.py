"""ZeRO stages: exactly their collectives, bytes and numbers."""

from typing import Any

import pytest
import torch
from cases import cases
from collectives import Collectives
from forward import summed_loss
from ranks import run_ranks
from tiny import documents
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from meshtune.attention.register import register
from meshtune.layout import Layout
from meshtune.model.anatomy import anatomy
from meshtune.optim.optimizer import Optimizer
from meshtune.parallel import zero
from meshtune.parallel.mesh import World, join, parameter_mesh

register()

GROUPS = 6  # four blocks, the last one with the norm; embedding; head
TWICE = 4  # the blocks: ZeRO-3 gathers them again in the backward
MICRO_BATCHES = 4


class Whole(nn.Module):
    """A model and its loss in one forward, as FSDP2 wants its root."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, attn_implementation="meshtune",
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).to(dtype)
        self.anatomy = anatomy(self.model)

    def forward(self, micro_batch: Any) -> torch.Tensor:
        return summed_loss(self.model, self.anatomy, micro_batch)


def micro_batches(ranks: int) -> list[Any]:
    """MICRO_BATCHES for each of the ranks, the same in every process, with very unequal labels."""
    return [documents(seed=number, vocabulary=128) for number in range(ranks * MICRO_BATCHES)]


def backward(root: Whole, own: list[Any], labels: int, stage: int) -> None:
    for number, micro_batch in enumerate(own, 1):
        zero.before_backward(root, stage, last=number == len(own))
        (root(micro_batch) / labels).backward()


def one_rank(ranks: int) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients, and their norm, of all ranks' micro-batches in one process."""
    root = Whole()
    batches = micro_batches(ranks)
    backward(root, batches, sum(each.label_tokens for each in batches), 0)
    gradients = {name: p.grad for name, p in root.named_parameters() if p.grad is not None}
    return gradients, float(torch.nn.utils.get_total_norm(gradients.values()))


def sharded_model(layout: str) -> tuple[Layout, World, Whole]:
    plan = Layout.parse(layout)
    world, root = join(plan, torch.device("cpu")), Whole()
    mesh = parameter_mesh(world)
    assert mesh is not None
    zero.shard(
        root, root.model.model.layers, mesh, plan.zero,
        embedding=root.model.model.embed_tokens, norm=root.model.model.norm, head=root.model.lm_head,
    )  # fmt: skip
    return plan, world, root


def sharded(layout: str) -> dict[str, Any]:
    plan, world, root = sharded_model(layout)
    batches = micro_batches(plan.world)
    labels = sum(each.label_tokens for each in batches)
    own = batches[world.data_rank :: plan.world]
    replicas = plan.world if plan.zero == 0 else plan.dp_replicate
    optimizer = Optimizer(
        root.named_parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
        copies={name: replicas for name, _ in root.named_parameters()},
    )  # fmt: skip
    steps = []
    for _ in range(2):  # the first step also gathers what was never gathered
        with Collectives() as collectives:
            backward(root, own, labels, plan.zero)
        steps.append(dict(collectives.count))
        (squares,) = world.sum_over_ranks(optimizer.local_squared_norm())
        gradients = {n: p.grad.full_tensor() for n, p in root.named_parameters()}  # type: ignore[union-attr]
        optimizer.zero_grad()
    held = sum(zero.local(p).numel() for p in root.parameters())
    return {"gradients": gradients, "norm": squares**0.5, "steps": steps, "held": held}


GATHER, SCATTER, REDUCE = "allgather_base", "reduce_scatter_base", "allreduce"
COLLECTIVES = {
    "zero1x2": {GATHER: GROUPS, SCATTER: GROUPS},
    "zero2x2": {GATHER: GROUPS, SCATTER: GROUPS * MICRO_BATCHES},
    "zero3x2": {GATHER: (GROUPS + TWICE) * MICRO_BATCHES, SCATTER: GROUPS * MICRO_BATCHES},
    "dp2-zero1x2": {GATHER: GROUPS, SCATTER: GROUPS, REDUCE: GROUPS},
    "dp2-zero2x2": {GATHER: GROUPS, SCATTER: GROUPS * MICRO_BATCHES, REDUCE: GROUPS},
    "dp2-zero3x2": {
        GATHER: (GROUPS + TWICE) * MICRO_BATCHES,
        SCATTER: GROUPS * MICRO_BATCHES,
        REDUCE: GROUPS,
    },
    "zero3x3": {GATHER: (GROUPS + TWICE) * MICRO_BATCHES, SCATTER: GROUPS * MICRO_BATCHES},
}


def reduced(layout: str) -> list[int]:
    """Elements of each reduce-scatter's input in a backward, in their order."""
    _, _, root = sharded_model(layout)
    loss = root(micro_batches(1)[0])
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "reduce_scatter" in func.__name__:
                sizes.append(args[1].numel())
            return func(*args, **(kwargs or {}))

    with Sizes():
        loss.backward()
    return sizes


@pytest.mark.parametrize("layout", ["zero2x2", "zero3x2"])
def test_the_heads_gradient_is_reduced_first_and_the_embeddings_last(layout: str) -> None:
    model = Whole().model
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    table = model.lm_head.weight.numel()
    sizes[-1] += model.model.norm.weight.numel()
    for found in run_ranks(2, reduced, layout):
        assert found == [table, *reversed(sizes), table]


@pytest.mark.parametrize("layout", cases(COLLECTIVES, test=["zero3x2"], ci=["zero1x2"]))
def test_each_stage_sends_its_messages_and_gives_one_ranks_gradients(layout: str) -> None:
    plan = Layout.parse(layout)
    gradients, norm = one_rank(plan.world)
    total = sum(gradient.numel() for gradient in gradients.values())
    for result in run_ranks(plan.world, sharded, layout):
        assert result["steps"][1] == COLLECTIVES[layout]
        assert result["norm"] == pytest.approx(norm, rel=1e-8)
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-7, atol=1e-12)
        assert result["held"] == pytest.approx(total / plan.dp_shard, rel=0.1), (
            "all stages keep shards between"
        )


class NormedEmbedding(nn.Embedding):
    """An embedding with a norm inside it, as Inkling has."""

    def __init__(self) -> None:
        super().__init__(128, 32, dtype=torch.float64)
        self.norm = nn.LayerNorm(32, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(ids))


class WholeNormed(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.model.model.embed_tokens = NormedEmbedding()


@pytest.mark.ci
def test_the_norm_inside_an_embedding_is_there_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Whole", WholeNormed)
    gradients, norm = one_rank(2)
    result = run_ranks(2, sharded, "zero3x2", forked=True)[0]
    assert result["norm"] == pytest.approx(norm, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-10, atol=1e-14)
