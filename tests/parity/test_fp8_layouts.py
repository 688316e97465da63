"""Matmuls in 8-bit floats under the techniques: ranks that multiply the same tensors have equal scales."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from cases import cases
from families import FAMILIES
from layouts import Trained, check, make_folder, trained
from transformers import AutoModelForCausalLM

from meshtune import precision
from meshtune.quantised import fp8

ONE = "mb4-ga4"
LORA = ("method=lora", "lora.r=4", "lora.alpha=8")
METHODS = {"full": (), "lora": LORA, "dora": (*LORA, "lora.use_dora=true")}
Run = Callable[..., Trained]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Function(layout, precision="fp8", method="full", *settings) -> a run of a tiny model, made once."""
    folder = tmp_path_factory.mktemp("fp8")
    torch.manual_seed(0)
    config = FAMILIES["llama"](vocab_size=304, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    make_folder(folder, AutoModelForCausalLM.from_config(config))

    @cache
    def of(layout: str, kind: str = "fp8", method: str = "full", *more: str) -> Trained:
        output = folder / "-".join((layout, kind, method, *more)).replace("/", "_")
        return trained(folder, output, layout, kind, *METHODS[method], *more, forked=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "FP8_LEAST", 16)
        yield of


LAYOUTS = [
    ("zero3x2", "full"), ("zero1x2-selective", "full"), ("pp2-1f1b", "full"), ("dp2-full", "lora"),
    ("zero2x2-pp2-1f1b-attention", "full"), ("zero3x2-full2", "dora"), ("zero3x2", "lora"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "method"), cases(LAYOUTS, ci=4))
def test_a_layout_gives_the_numbers_of_one_rank(layout: str, method: str, run: Run) -> None:
    """Each rank scales the whole weight, and the activations of whole micro-batches.

    After an update a weight that differs by fp32's rounding may fall on the other side of a step of 8 bits.
    """
    first = (run(each, "fp8", method, "train.max_steps=1") for each in (layout, ONE))
    check(*(replace(each, evaluated=[]) for each in first), "fp32")
    ours, one, wide = run(layout, "fp8", method), run(ONE, "fp8", method), run(ONE, "bf16", method)
    assert abs(ours.losses[-1] - one.losses[-1]) < abs(one.losses[-1] - wide.losses[-1])


@pytest.mark.parametrize(
    "layout", cases(["zero3x2", "zero1x2-selective", "dp2-zero3x2-tp2-sp"], test=["zero3x2"])
)
def test_gathering_in_8_bits_changes_no_bit(layout: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = run(layout, "fp8", "full")
    monkeypatch.setattr(fp8, "gather_in_8_bits", lambda *_: None)
    wide = run(layout, "fp8", "full", "log.every=1")
    assert (ours.losses, ours.norms, ours.evaluated) == (wide.losses, wide.norms, wide.evaluated)
    assert all(torch.equal(ours.tensors[name], wide.tensors[name]) for name in wide.tensors)


PARTS = [("cp2", "full"), ("tp2-sp", "full"), ("tp2", "lora"), ("ulysses2-full", "full")]


@pytest.mark.parametrize(("layout", "method"), cases(PARTS, ci=PARTS[:2]))
def test_parts_with_scales_of_their_own_change_less_than_8_bits_do(
    layout: str, method: str, run: Run
) -> None:
    ours, one, wide = run(layout, "fp8", method), run(ONE, "fp8", method), run(ONE, "bf16", method)
    assert 0 < abs(ours.losses[0] - one.losses[0]) < abs(one.losses[0] - wide.losses[0])


LEARNS = [("full", "fp8"), ("lora", "fp8"), ("full", "fp8-rowwise")]


@pytest.mark.parametrize(("method", "precision"), cases(LEARNS, ci=LEARNS[:1]))
def test_it_learns_as_in_16_bits(method: str, precision: str, run: Run) -> None:
    more = "train.max_steps=40", "train.learning_rate=2e-3"
    narrow, wide = (run(ONE, kind, method, *more) for kind in (precision, "bf16"))
    assert narrow.losses != wide.losses
    fall, fall_in_16 = (each.losses[0] - each.losses[-1] for each in (narrow, wide))
    assert fall == pytest.approx(fall_in_16, rel=0.03) and fall > 0.1 * wide.losses[0]
    assert {n: t.dtype for n, t in narrow.tensors.items()} == {n: t.dtype for n, t in wide.tensors.items()}
