"""A newer FlashAttention takes the place of torch's only where it is right for the model's shapes."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.library import Library
from torch.nn.attention import _fa4, current_flash_attention_impl, register_flash_attention_impl

from meshtune.attention import cpu, flash
from meshtune.attention.arguments import Core
from meshtune.launch.installed import FLASH_4
from meshtune.layout import Layout
from meshtune.placement.census import Attention, Block
from meshtune.train import model

GROUPED, WINDOWED = Attention(4, 2, 16, 16), Attention(4, 4, 32, 32, window=20)


class Handle:
    def __init__(self, library):
        self.library = library

    def remove(self):
        self.library._destroy()


def implementation(*, forward_only=False, scaled=1.0, windowless=False):
    """Put the kernels of processors behind torch's flash calls on processors, with faults."""

    def core(args, options):
        ends, key_ends, longest, longest_key, *_ = args
        left = options.get("window_size_left")
        window = None if left in (None, -1) or windowless else left + 1
        return Core(ends, key_ends, longest, longest_key, options["scale"], window, None)

    def forward(q, k, v, *args, **options):
        out, lse = cpu.forward(q, k, v, core(args, options))
        return out, lse, torch.zeros(2), torch.zeros(0), torch.zeros(0)

    def backward(grad, q, k, v, out, lse, *args, **options):
        if forward_only:
            raise RuntimeError("no backward for heads of 16.\nmore")
        dq, dk, dv = cpu.backward(grad, (q, k, v), (out, lse), core(args, options))
        return dq, dk * scaled, dv

    def register():
        library = Library("aten", "IMPL", "CPU")
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        return Handle(library)

    return register


@pytest.fixture(autouse=True)
def _restored():
    yield
    flash.restore()
    flash.register.cache_clear()


def choose(shapes, **faults):
    register_flash_attention_impl("FA4", register_fn=implementation(**faults))
    return flash.choose([4], shapes, torch.bfloat16, torch.device("cpu"), apart=True)


def test_a_version_that_is_right_stays_and_draws_nothing_from_the_global_generator():
    state = torch.get_rng_state()
    assert choose([GROUPED, WINDOWED, replace(WINDOWED, window=1)]) == (4, [])
    assert current_flash_attention_impl() == "FA4"
    assert torch.equal(torch.get_rng_state(), state)
    with flash.built_in():
        assert current_flash_attention_impl() is None
    assert current_flash_attention_impl() == "FA4"
    flash.restore()
    with flash.built_in():  # a run
        choose([GROUPED])
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        ({"forward_only": True}, "RuntimeError: no backward for heads of 16."),
        ({"scaled": 1.1}, "it differs from attention in fp32 in gradients of keys by 0.1 of the norm."),
        ({"windowless": True}, "with 4 heads of 32, window 20 it differs from attention in fp32 in output"),
    ],
)
def test_one_that_raises_or_is_wrong_is_named_and_not_used(faults, why):
    version, [sentence] = choose([GROUPED, WINDOWED], **faults)
    assert version == flash.BUILT_IN
    assert current_flash_attention_impl() is None
    assert sentence.startswith("FlashAttention 4 is installed and not used: ")
    assert why in sentence


def test_an_error_that_loses_the_gpu_is_raised(monkeypatch):
    lost = Mock(side_effect=torch.AcceleratorError("CUDA error: an illegal memory access"))
    monkeypatch.setattr(flash.cuda, "forward", lost)
    with pytest.raises(torch.AcceleratorError):
        choose([GROUPED])


def test_one_that_lacks_windows_is_used_for_a_model_without():
    assert choose([GROUPED], windowless=True) == (4, [])


@pytest.mark.parametrize("elsewhere", [4, 2])
def test_ranks_run_the_same_version_and_all_reasons_are_printed(monkeypatch, elsewhere):
    tried = []
    monkeypatch.setattr(model, "attention_drops", lambda whole: False)
    monkeypatch.setattr(flash, "versions_here", lambda device: [4])
    monkeypatch.setattr(flash, "choose", lambda *given, apart: tried.extend([given[1], apart]) or (4, []))
    world = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), layout=Layout.parse("tp2-ulysses4-mb1-ga1"),
        all_gather_object=lambda own: [own, (elsewhere, ["Version 4 is broken there."] * (elsewhere != 4))],
    )  # fmt: skip
    census = SimpleNamespace(blocks=[Block((), (Attention(32, 8, 64, 64),), ())])
    found = model.flash_of(model.ModelSpec(source=""), SimpleNamespace(census=census, whole=None), world)
    assert tried == [{Attention(4, 1, 64, 64): None}, False], "each of 2 x 4 ranks has four of 32 heads"
    assert found[0] == elsewhere
    assert [sentence.partition(":")[0] for sentence in found[1]] == [
        "Version 4 is broken there.", "Ranks would run FlashAttention 2 and 4",
    ][: 2 * (elsewhere != 4)]  # fmt: skip


def test_the_remedy_is_what_the_extra_installs():
    extras = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    requirement = FLASH_4.split("'")[1]
    assert f'gpu = ["{requirement}"]' in extras


def test_only_attention_that_takes_the_calls_is_tried():
    unlike, softcapped = Attention(4, 4, 24, 16), Attention(4, 4, 16, 16, flash=False)
    shapes = GROUPED, unlike, softcapped, Attention(4, 4, 100, 100)
    assert [flash.runs(shape, torch.bfloat16) for shape in shapes] == [True, True, False, False]
    assert not flash.runs(GROUPED, torch.float32)


def test_torch_calls_newer_packages_whose_forward_returns_five_results(monkeypatch):
    """torch.nn.attention._fa4 unpacks two until torch 2.15."""
    made = ModuleType("flash_attn.cute.interface")
    made._flash_attn_fwd = lambda q, k, v, **options: (q + k, v, None, None, None)
    made._flash_attn_bwd = lambda *tensors, **options: tensors[:3]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.delitem(sys.modules, "meshtune.attention.flash_4", raising=False)
    monkeypatch.setattr(_fa4, "_FA4_MODULE_PATH", "meshtune.attention.flash_4")
    monkeypatch.setattr(_fa4, "_get_device_major", lambda device: 9, raising=False)  # torch 2.15 asks a GPU
    ones, ends = torch.ones(2, 1, 8), torch.tensor([0, 2], dtype=torch.int32)
    longest = (2, 2) if "max_q" in _fa4._fa4_run_forward.__code__.co_varnames else ()  # since torch 2.13
    out, lse = _fa4._fa4_run_forward(ones, ones, ones, ends, ends, *longest, None, True, None, None, None)
    assert torch.equal(out, 2 * ones)
    assert torch.equal(lse, ones)
