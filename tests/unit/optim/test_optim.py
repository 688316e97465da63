"""The optimizer against torch.optim.AdamW on the same gradients."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshtune.optim import optimizer as optim
from meshtune.optim.optimizer import Optimizer

SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def reference(model: nn.Module) -> torch.optim.AdamW:
    """Decay on the two weight matrices only, by hand."""
    decayed = [model[0].weight, model[2].weight]
    rest = [model[0].bias, model[1].weight, model[1].bias, model[2].bias]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=SETTINGS["betas"], eps=SETTINGS["eps"])


def norm_of(optimizer: Optimizer) -> float:
    return float(optimizer.local_squared_norm()) ** 0.5


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    model(torch.randn(5, 8, generator=generator).to(dtype)).square().sum().backward()


def test_fp32_steps_equal_torch_with_decay_on_matrices_only() -> None:
    ours, theirs = small(), small()
    mine, torchs = Optimizer(ours.named_parameters(), **SETTINGS), reference(theirs)
    for seed in range(5):
        backward(ours, seed)
        backward(theirs, seed)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert norm_of(mine) == pytest.approx(float(norm), rel=1e-6)
        mine.clip(norm_of(mine), 0.5)
        mine.step(1e-2)
        torchs.step()
        torchs.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bucket", [1, 100, 10**9])
def test_masters_follow_an_fp32_adamw_on_the_bf16_gradients(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(optim.OPTIMIZERS["adamw"], bucket_elements=bucket)
    monkeypatch.setitem(optim.OPTIMIZERS, "adamw", row)
    model, shadow = small(), small()
    mine, torchs = (
        Optimizer(model.named_parameters(), compute_dtype=torch.bfloat16, **SETTINGS),
        reference(shadow),
    )
    for seed in range(5):
        backward(model, seed)
        for p, q in zip(model.parameters(), shadow.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        mine.step(1e-2)
        torchs.step()
        assert all(p.grad is None for p in model.parameters())
    masters = mine.state()
    for (name, p), q in zip(model.named_parameters(), shadow.parameters(), strict=True):
        torch.testing.assert_close(masters[f"model.{name}"], q.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(p, masters[f"model.{name}"].bfloat16())


def test_masters_are_the_storage_that_was_loaded_not_a_copy() -> None:
    model = small()
    before = model[0].weight.data_ptr()
    mine = Optimizer(model.named_parameters(), compute_dtype=torch.bfloat16, **SETTINGS)
    assert mine.state()["model.0.weight"].data_ptr() == before
    assert model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("hooks", [True, False])
def test_bf16_gradients_of_many_micro_batches_add_up_in_fp32(hooks: bool) -> None:
    model = small().bfloat16()
    mine = Optimizer(model.named_parameters(), sum_dtype=torch.float32, **SETTINGS)
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for seed in range(32):
        single = copy.deepcopy(model)
        backward(single, seed)
        for total, p in zip(expected, single.parameters(), strict=True):
            assert p.grad is not None
            total += p.grad.float()
        if hooks:
            backward(model, seed)
        else:  # a zero-bubble schedule's backward of weights puts them there by itself, and then says so
            for p, own in zip(model.parameters(), single.parameters(), strict=True):
                p.grad = own.grad
            mine.add_up()
            assert all(p.grad is None for p in model.parameters())
    for total, gradient in zip(expected, mine.gradients(), strict=True):
        assert torch.equal(total, gradient)
    mine.step(1e-2)
    assert mine.gradients() == []


def test_frozen_parameters_have_no_state() -> None:
    model = small()
    model[0].requires_grad_(False)
    mine = Optimizer(model.named_parameters(), **SETTINGS)
    backward(model, 0)
    mine.step(1e-2)
    assert not any(name.split(".")[1] == "0" for name in mine.state())
    assert "optimizer.2.weight.exp_avg" in mine.state()


def test_state_put_back_goes_on_bit_for_bit() -> None:
    first, second = small(), small()
    mine, other = (Optimizer(model.named_parameters(), **SETTINGS) for model in (first, second))
    for seed in range(3):
        backward(first, seed)
        mine.step(1e-2)
    with torch.no_grad():
        target = other.state(materialise=True)
        assert target.keys() == mine.state().keys()
        for name, tensor in mine.state().items():
            target[name].copy_(tensor)
    for model, optimizer in ((first, mine), (second, other)):
        backward(model, 9)
        optimizer.step(1e-2)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
