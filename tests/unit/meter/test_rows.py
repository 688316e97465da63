"""Rows of metrics.jsonl from plain numbers."""

import math
from pathlib import Path

import pytest

from meshtune.meter.rows import eval_row, memory_row, train_row

NUMBERS = {
    "loss": 2.5, "grad_norm": 1.25, "learning_rate": 1e-4, "tokens": 1000, "label_tokens": 400,
    "step_seconds": 0.5, "data_seconds": 0.01,
}  # fmt: skip
CONTRACT = {
    "kind", "step", "loss", "grad_norm", "learning_rate", "tokens", "label_tokens", "step_seconds",
    "data_seconds", "tokens_per_second_per_gpu", "mfu", "peak_memory_bytes",
}  # fmt: skip


def test_a_train_row_has_every_field_of_the_contract():
    row = train_row(step=1, **NUMBERS)
    assert set(row) >= CONTRACT
    assert row["kind"] == "train"


def test_rates_are_per_gpu_and_over_the_whole_step():
    # by hand: 1000 tokens / 0.5 s / 4 GPUs; 8e12 FLOPs / 0.5 s / 4 GPUs = 4 TFLOP/s of 10
    row = train_row(step=1, **NUMBERS, world=4, flops=8e12, flops_6n=10e12, peak_flops_per_second=10e12)
    assert row["tokens_per_second_per_gpu"] == 500
    assert row["tflops_per_second"] == pytest.approx(4)
    assert row["mfu"] == pytest.approx(0.4)
    assert row["mfu_6n"] == pytest.approx(0.5)


def test_mfu_is_null_when_the_peak_of_the_device_is_unknown():
    row = train_row(step=1, **NUMBERS, flops=8e12, flops_6n=8e12, peak_flops_per_second=None)
    assert row["mfu"] is None
    assert row["mfu_6n"] is None
    assert row["tflops_per_second"] == pytest.approx(16)


@pytest.mark.parametrize(("flops", "expected"), [(4.99e12, 0.998), (5e12, 1.0), (5.01e12, None)])
def test_mfu_is_never_above_one(flops, expected):
    row = train_row(step=1, **NUMBERS, flops=flops, peak_flops_per_second=10e12)
    assert row["mfu"] == (expected if expected is None else pytest.approx(expected))


def test_perplexity_is_the_exponential_of_the_loss():
    row = eval_row(step=3, loss=2.0, label_tokens=10)
    assert row == {
        "kind": "eval", "step": 3, "loss": 2.0, "perplexity": pytest.approx(7.389056), "label_tokens": 10,
    }  # fmt: skip


def test_perplexity_of_a_huge_loss_is_infinite_and_not_an_error():
    assert eval_row(step=3, loss=1e6, label_tokens=10)["perplexity"] == math.inf


def test_exact_match_is_in_the_row_only_when_measured():
    assert "exact_match" not in eval_row(step=0, loss=1.0, label_tokens=1)
    assert eval_row(step=0, loss=1.0, label_tokens=1, exact_match=0.0, prompts=8)["exact_match"] == 0.0


def test_the_page_on_measuring_names_every_number() -> None:
    page = Path("docs/measuring.md").read_text(encoding="utf-8")
    train = train_row(**NUMBERS, step=1)
    evaluated = eval_row(step=1, loss=2.0, label_tokens=9, tokens=10, seconds=1.0, exact_match=0.5, prompts=2)
    rows = (train, evaluated, memory_row(1, {}))
    assert [key for row in rows for key in row if key != "kind" and f"`{key}`" not in page] == []
    assert [row["kind"] for row in rows if f"| `{row['kind']}` |" not in page] == []
