"""The grid's comparison with one rank fails as soon as one exchange or one factor is taken away.

Every mutation removes what one line of the engine does, on all ranks, and names a layout that needs the line.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import cases
from families import FAMILIES, SPARSE
from layouts import Trained, differences, make_folder, trained
from transformers import AutoModelForCausalLM

from meshtune.experts import register
from meshtune.optim.optimizer import Optimizer
from meshtune.parallel import apply, context, exchange, mesh, regather, tensor, zero
from meshtune.parallel.pipeline import Pipeline
from meshtune.parallel.replicas import InFlight, Replicas
from meshtune.placement.split import Split
from meshtune.train import loss


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _unsynced(root: Any, stage: int, *, last: bool) -> None:
    original(root, stage, last=False)


original = zero.before_backward


def _repeated(x: torch.Tensor, axis: mesh.Axis, dim: int) -> torch.Tensor:
    """In the place of the other ranks' shards, this one's again."""
    return torch.cat([x] * axis.size, dim)


def _unsent(x: torch.Tensor, axis: mesh.Axis, cut: int, join: int) -> torch.Tensor:
    return x.unflatten(cut, (axis.size, -1)).movedim(cut, 0).movedim(0, join).flatten(join, join + 1)


class _Done:
    """A collective that never ran."""

    def wait(self) -> None: ...


class _Deaf:
    """torch.distributed as a module sees it, without its all-reduce of one kind."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op != self.op:
            dist.all_reduce(x, op, group)


def _router_not_summed(block: Any, *args: Any) -> dict[str, Any]:
    splits = honest_splits(block, *args)
    return splits | {name: Split() for name in splits if name.endswith(".gate.weight")}


def _detached_weights(module: Any, hidden: Any, index: Any, weights: Any) -> Any:
    return honest_experts(module, hidden, index, weights.detach())


def _shards_only(world: Any) -> Any:
    found: Any = honest_expert_mesh(world)
    return found["shards"]


def _parts_of_a_sum(model: Any, ep: Any) -> dict[str, Any]:
    return {name: replace(split, partial=True) for name, split in honest_experts_split(model, ep).items()}


honest_splits, honest_experts_split = tensor._block_splits, apply.split_experts
honest_experts, honest_expert_mesh = register.experts_forward, apply.expert_mesh

TIED = "gradients of a tied embedding"
MIXTURES = (
    "gradients of the router under sp", "a slice of the tokens for each rank's experts",
    "the router learns from the loss", "experts on several ranks are whole under tp",
    "replicas of experts' shards", "replicas of experts",
)  # fmt: skip
# what is taken away: (layout that needs it, where, what, by what it is replaced)
MUTATIONS: dict[str, tuple[str, Any, str, Any]] = {
    "gradients are sums, no means": ("zero2x2", zero.FSDPModule, "set_gradient_divide_factor", _nothing),
    "gradients of replicas": ("dp2", Replicas, "_all_reduce",
                              lambda self: self.in_flight.append(InFlight(_Done(), []))),
    "gradients of shards": ("zero1x2", zero, "before_backward", _unsynced),
    "gradients over replicas of shards": ("dp2-zero2x2", zero.FSDPModule, "set_requires_all_reduce",
                                          lambda self, _: honest_all_reduce(self, False)),
    "sums over tp in the blocks": ("tp2", tensor, "all_reduce", exchange.identity),
    "sums over tp, scattered": ("tp2-sp", tensor, "reduce_scatter", exchange.take_shard),
    "partial gradients under sp": ("tp2-sp", tensor, "reduce_partial", _nothing),
    "partial gradients of repeated heads": ("tp4", tensor, "reduce_partial", _nothing),
    "the largest logit of all words": ("tp2", loss, "dist", _Deaf(dist.ReduceOp.MAX)),
    "the sums over all words": ("tp2", loss, "dist", _Deaf(dist.ReduceOp.SUM)),
    "the tokens of the other ranks under sp": ("tp2-sp", tensor, "all_gather", _repeated),
    "the tokens of the other ranks, gathered again": ("tp2-sp-regather", regather, "all_gather", _repeated),
    "keys of the other context ranks": ("cp2", context, "all_gather", _repeated),
    "heads of the other context ranks": ("ulysses2", context, "_all_to_all", _unsent),
    "gradients of gathered keys": ("cp2", context, "reduce_scatter", exchange.take_shard),
    "the scale of a pipeline's loss": ("pp2-1f1b", Pipeline, "_scaled", lambda self, loss, _: loss * 1.0),
    TIED: ("pp2-1f1b", Pipeline, "reduce_tied", _nothing),
    "losses and norms of all ranks": ("dp2", mesh.World, "sum_over_ranks",
                                      lambda self, *n: [float(x) for x in n]),
    "one gradient counted once": ("tp2", apply.Parallel, "copies", lambda self: {}),
    "other ranks read other sequences": ("dp2", mesh.World, "data_rank", property(lambda self: 0)),
    MIXTURES[0]: ("tp2-sp", tensor, "_block_splits", _router_not_summed),
    MIXTURES[1]: ("tp2", tensor, "take_shard", lambda x, axis, dim: x.chunk(axis.size, dim)[0].contiguous()),
    MIXTURES[2]: ("dp2-ep2", register, "experts_forward", _detached_weights),
    MIXTURES[3]: ("dp2-tp2-sp-ep2", apply, "split_experts", _parts_of_a_sum),
    MIXTURES[4]: ("dp2-zero2x2-ep2", apply, "expert_mesh", _shards_only),
    MIXTURES[5]: ("dp4-ep2", apply, "expert_mesh", lambda world: None),
    "clipping": ("zero3x2", Optimizer, "clip", _nothing),
}  # fmt: skip
IN_CI = [
    "clipping", "sums over tp, scattered", "gradients of gathered keys", "the scale of a pipeline's loss",
    "gradients over replicas of shards", "losses and norms of all ranks",
]  # fmt: skip
honest_all_reduce: Callable[..., None] = zero.FSDPModule.set_requires_all_reduce


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """A model with tied embeddings, and one rank's run with it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tied")
    config = FAMILIES["llama"](
        vocab_size=301, num_hidden_layers=4, tie_word_embeddings=True, initializer_range=0.05
    )
    make_folder(folder, AutoModelForCausalLM.from_config(config))
    return folder, trained(folder, folder / "one", "mb4-ga4", "fp64")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """A mixture of experts, and one rank's run; test_sparse_parity.py compares its layouts unchanged."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixture")
    model = AutoModelForCausalLM.from_config(SPARSE["qwen3_moe"](vocab_size=301))
    make_folder(folder, model, experts="eager")
    return folder, trained(folder, folder / "one", "mb4-ga4", "fp64")


@pytest.mark.all
def test_unchanged_a_tied_embedding_agrees(tied: tuple[Path, Trained], tmp_path: Path) -> None:
    """The other layouts are compared unchanged in test_parity.py."""
    folder, reference = tied
    ours = trained(folder, tmp_path / "run", MUTATIONS[TIED][0], "fp64")
    assert max(differences(ours, reference)[:3]) < 1e-6


@pytest.mark.parametrize("name", cases(MUTATIONS, ci=IN_CI))
def test_without_it_the_comparison_fails(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == TIED or name in MIXTURES:
        data, expected = request.getfixturevalue("tied" if name == TIED else "mixture")
    else:
        data = request.getfixturevalue("folder")
        expected = request.getfixturevalue("reference")("fp64")
    layout, where, what, instead = MUTATIONS[name]
    assert hasattr(where, what)
    monkeypatch.setattr(where, what, instead)
    ours = trained(data, tmp_path / "run", layout, "fp64", forked=True)
    found = differences(ours, expected)[:3]
    assert max(found) > 1e-4, found
