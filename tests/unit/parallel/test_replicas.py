"""Replicas: their all-reduces, when they start, and one rank's gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from collectives import Collectives
from ranks import run_ranks
from test_zero import MICRO_BATCHES, REDUCE, Whole, micro_batches, one_rank

from meshtune.layout import Layout
from meshtune.optim.optimizer import Optimizer
from meshtune.parallel.apply import groups_of
from meshtune.parallel.mesh import join, parameter_mesh
from meshtune.parallel.replicas import Replicas

BLOCKS = "model.model.layers"

GROUPS = 5  # four blocks, and what lies outside


def stepped(
    ranks: int,
    prepare: Callable[[Whole, int], Any] = lambda root, rank: None,
    dtype: torch.dtype | None = None,
    hooks: bool = True,
) -> dict[str, Any]:
    """One step of replicas: all-reduces started in each micro-batch's backward, and the gradients."""
    world, root = join(Layout(dp_replicate=ranks), torch.device("cpu")), Whole()
    root.first = True  # type: ignore[assignment]  # as a stage is
    prepare(root, world.rank)
    mesh = parameter_mesh(world)
    assert mesh is not None
    optimizer = Optimizer(root.named_parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    blocks = list(root.get_submodule(BLOCKS).children())
    replicas = Replicas([(group, mesh) for group in groups_of(root, blocks)[::-1]], dtype)  # type: ignore[arg-type]
    replicas.watch(optimizer)
    batches = micro_batches(ranks)
    labels = sum(each.label_tokens for each in batches)
    replicas.begin(MICRO_BATCHES if hooks else MICRO_BATCHES + 1)  # one that never comes
    left = []
    for micro_batch in batches[world.data_rank :: ranks]:
        with Collectives() as collectives:
            (root(micro_batch) / labels).backward()
        left.append(collectives.count[REDUCE])
    with Collectives() as collectives:
        replicas.finish()
    left.append(collectives.count[REDUCE])
    gradients = {name: gradient.clone() for name, gradient in optimizer.named_gradients().items()}
    storages = {g.untyped_storage().data_ptr() for g in optimizer.gradients()}
    return {"left": left, "gradients": gradients, "storages": len(storages)}


def freeze_some(root: Whole, rank: int) -> None:
    """A whole block, and the embedding."""
    for parameter in (*root.get_submodule(f"{BLOCKS}.1").parameters(), root.model.model.embed_tokens.weight):
        parameter.requires_grad_(False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_leave_during_the_last_backward_alone(ranks: int) -> None:
    gradients, _ = one_rank(ranks)
    for found in run_ranks(ranks, stepped, ranks):
        assert found["left"] == [0] * (MICRO_BATCHES - 1) + [GROUPS, 0]
        assert found["storages"] == GROUPS, "the gradients are views of the buffers"
        assert found["gradients"].keys() == gradients.keys()
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-7, atol=1e-12)


def test_what_no_hook_told_of_is_sent_at_the_end() -> None:
    gradients, _ = one_rank(2)
    for found in run_ranks(2, partial(stepped, hooks=False), 2):
        assert found["left"] == [0] * MICRO_BATCHES + [GROUPS]
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-7, atol=1e-12)


def test_frozen_parameters_send_nothing() -> None:
    gradients, _ = one_rank(2)
    for found in run_ranks(2, stepped, 2, freeze_some):
        assert found["left"] == [0] * (MICRO_BATCHES - 1) + [GROUPS - 1, 0]
        assert not any(".1." in name or "embed" in name for name in found["gradients"])
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-7, atol=1e-12)


@pytest.mark.ci
def test_messages_in_a_reduce_dtype_of_their_own() -> None:
    gradients, _ = one_rank(2)
    for found in run_ranks(2, partial(stepped, dtype=torch.bfloat16), 2):
        for name, gradient in found["gradients"].items():
            assert gradient.dtype == torch.bfloat16
            torch.testing.assert_close(gradient.double(), gradients[name], rtol=3e-2, atol=1e-4)


def skip_some(root: Whole, rank: int) -> None:
    """Rank 1 never runs block 2, nobody block 3."""
    for number in (2, 3) if rank else (3,):
        root.get_submodule(f"{BLOCKS}.{number}").forward = lambda hidden, *_, **__: hidden  # type: ignore[method-assign]


def test_ranks_that_reach_other_parameters_agree() -> None:
    batches = micro_batches(2)
    labels = sum(each.label_tokens for each in batches)
    expected: dict[str, torch.Tensor] = {}
    for rank in range(2):
        root = Whole()
        skip_some(root, rank)
        for micro_batch in batches[rank::2]:
            (root(micro_batch) / labels).backward()
        for name, parameter in root.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, 0) + parameter.grad
    for found in run_ranks(2, stepped, 2, skip_some):
        assert found["gradients"].keys() == expected.keys()
        assert any(".2." in name for name in expected) and not any(".3." in name for name in expected)
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-7, atol=1e-12)
