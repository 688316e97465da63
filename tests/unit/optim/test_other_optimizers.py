"""Lion and Adafactor: the paper's and transformers' updates, and states that a resumed run goes on from."""

import math

import pytest
import torch
from golden import refuses, says
from known import known
from test_optim import backward, small
from torch import nn
from transformers import Adafactor

from meshtune import config
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.optim import one_pass
from meshtune.optim.optimizer import Optimizer
from meshtune.optimizers import OPTIMIZERS
from meshtune.placement.rules import Traits, refusals
from meshtune.plan.cluster import cluster_of
from meshtune.plan.search import explained
from meshtune.plan.workload import Workload
from meshtune.sections import ClusterConfig

QWEN = known("qwen3-0.6b")
TRAITS = Traits("Plain", blocks=8, heads=8, kv_heads=8, vocabulary=64)


def made(model: nn.Module, name: str, **options: object) -> Optimizer:
    settings = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, **options}
    return Optimizer(model.named_parameters(), name=name, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("slice_elements", [3, 2**24])
def test_lion_is_algorithm_2_of_the_paper(slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "SMALLEST_SLICE", slice_elements)
    ours, theirs = small(), small()
    optimizer, momenta = made(ours, "lion"), [torch.zeros_like(p) for p in theirs.parameters()]
    for seed in range(5):
        backward(ours, seed)
        backward(theirs, seed)
        optimizer.step(1e-2)
        with torch.no_grad():
            for p, m in zip(theirs.parameters(), momenta, strict=True):
                assert p.grad is not None
                update = torch.sign(0.9 * m + (1 - 0.9) * p.grad)
                p -= 1e-2 * (update + (0.1 if p.ndim >= 2 else 0.0) * p)
                m.copy_(0.99 * m + (1 - 0.99) * p.grad)
                p.grad = None
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_adafactor_is_transformers_as_its_trainer_makes_it() -> None:
    ours, theirs = small(), small()
    optimizer = made(ours, "adafactor", weight_decay=0.0)
    reference = Adafactor(theirs.parameters(), lr=1e-2, scale_parameter=False, relative_step=False)
    for seed in range(5):
        backward(ours, seed)
        backward(theirs, seed)
        optimizer.step(1e-2)
        reference.step()
        reference.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"compute_dtype": torch.bfloat16}], ids=["fp32", "masters"])
def test_an_optimizer_goes_on_from_its_state(name: str, options: dict) -> None:
    def steps(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
        for seed in seeds:
            backward(model, seed)
            optimizer.step(1e-2)

    whole, first, second = small(), small(), small()
    optimizers = [made(model, name, **options) for model in (whole, first, second)]
    steps(whole, optimizers[0], range(4))
    steps(first, optimizers[1], range(2))
    saved = {key: tensor.clone() for key, tensor in optimizers[1].state(materialise=True).items()}
    wanted = optimizers[2].state(materialise=True)
    assert wanted.keys() == saved.keys()
    for key, tensor in wanted.items():
        assert tensor.shape == saved[key].shape and tensor.dtype == saved[key].dtype
        with torch.no_grad():
            tensor.copy_(saved[key])
    optimizers[2].publish()
    steps(second, optimizers[2], range(2, 4))
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_state_of_adafactor_is_a_row_and_a_column_of_each_matrix() -> None:
    model = nn.Linear(40, 30)
    state = made(model, "adafactor").state(materialise=True)
    bytes_of = {key.removeprefix("optimizer.weight."): tensor.nbytes for key, tensor in state.items()}
    assert (bytes_of["exp_avg_sq_row"], bytes_of["exp_avg_sq_col"]) == (4 * 30, 4 * 40)
    assert state["optimizer.bias.exp_avg_sq"].nbytes == 4 * 30
    assert [OPTIMIZERS[name].bytes_per_parameter("float32") for name in OPTIMIZERS] == [8, 4, 2.125, 4, 0, 4]
    assert OPTIMIZERS["lion"].bytes_per_parameter("bfloat16") == 2


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
@pytest.mark.parametrize(
    "layout", ["zero1x2-mb1-ga1", "zero3x2-mb1-ga1", "tp2-mb1-ga1", "dp2-zero2x2-mb1-ga1"]
)
def test_an_update_of_whole_tensors_is_refused_where_ranks_share_them(layout: str, optimizer: str) -> None:
    (sentence,) = refusals(TRAITS, Layout.parse(layout), optimizer=optimizer)
    says(sentence)
    assert layout in sentence
    assert refusals(TRAITS, Layout.parse(layout), optimizer="lion") == []


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
@pytest.mark.parametrize("layout", ["mb1-ga1", "dp2-mb1-ga1", "cp2-mb1-ga1", "pp2-1f1b-mb1-ga2"])
def test_an_update_of_whole_tensors_is_taken_where_ranks_have_them_whole(layout: str, optimizer: str) -> None:
    assert refusals(TRAITS, Layout.parse(layout), optimizer=optimizer) == []


@pytest.mark.parametrize(
    ("optimizer", "setting", "refused"),
    [("adafactor", "adam_betas=[0.8, 0.9]", True), ("adafactor", "adam_eps=1e-6", True),
     ("lion", "adam_eps=1e-6", True), ("lion", "adam_betas=[0.9, 0.99]", False),
     ("adamw", "adam_eps=1e-6", False), ("lion", "adam_eps=1e-8", False),
     ("muon", "adam_betas=[0.8, 0.9]", False), ("muon", "adam_eps=1e-6", False)],
)  # fmt: skip
def test_a_constant_that_an_optimizer_does_not_take_is_refused(
    optimizer: str, setting: str, refused: bool
) -> None:
    words = ["model.name=x", f"train.optimizer={optimizer}", f"train.{setting}"]
    if refused:
        with refuses(UserError):
            config.load(None, words)
    else:
        assert math.isfinite(config.load(None, words).train.adam_eps)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_the_planner_counts_the_state_of_each_optimizer(precision: str) -> None:
    peaks = {}
    for name in OPTIMIZERS:
        workload = Workload("m", QWEN.work, QWEN.traits, seq_len=1024, global_batch_size=8,
                            precision=precision, optimizer=name)  # fmt: skip
        cluster = cluster_of(ClusterConfig(gpu="h200", gpus=1))
        peaks[name] = explained(workload, cluster, Layout(gradient_accumulation_steps=8)).memory
    wide = 2 if precision == "bf16-pure" else 4
    parameters = float(QWEN.work.parameters)
    for name, states in (("lion", 1), ("adamw", 2)):
        more = float(peaks[name].optimizer - peaks["adafactor"].optimizer)
        assert more == pytest.approx(states * wide * parameters, rel=1e-6)
    matrices = QWEN.work.blocks * sum(w.elements for w in QWEN.work.block_weights if w.cols > 1)
    less = float(peaks["adamw"].optimizer - peaks["muon"].optimizer)
    assert 0.5 * parameters < matrices and less == pytest.approx(wide * matrices, rel=1e-6)
