"""The gradient noise of a run, beside gradients of each micro-batch by plain autograd and the paper's own
formulas on them.
"""

from pathlib import Path

import pytest
import torch
from cases import cases
from golden import refuses
from layouts import GLOBAL_BATCH, settings, trained, whole
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from meshtune import config
from meshtune.api import build
from meshtune.api.resolve import inputs_of
from meshtune.data.batch import IGNORE, MicroBatch
from meshtune.errors import UserError
from meshtune.rundir import RunDir
from meshtune.train.inputs import loader_of

MEASURED = ("log.gradient_noise_scale=1", "train.max_steps=1")
LAYOUTS = """
mb2-ga8 mb8-ga2 dp2-mb2 dp2-mb8 zero1x2-mb4 zero2x2-mb4 zero3x2-mb4 tp2-mb4 tp2-sp-mb4
tp4-sp-mb2 zero3x2-tp2-sp-mb2 dp2-tp2-mb4 dp2-zero2x2-mb2 dp2-zero3x2-mb2
"""


def gradient(model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """Gradient of the micro-batch's mean loss per label token, flat, one document after the other."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(micro_batch.documents):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            logits = model(micro_batch.input_ids[row : row + 1, part], use_cache=False).logits[0]
            labels = micro_batch.labels[row, part]
            total = total + cross_entropy(logits.double(), labels, ignore_index=IGNORE, reduction="sum")
            start += length
    (total / micro_batch.label_tokens).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def reference(folder: Path, words: list[str], layout: str) -> tuple[float, float]:
    """(|G|², tr(Σ)) of the first step, by equations A.2 to A.4 of McCandlish et al. 2018 at the batch sizes b
    and B in sequences, from the unsharded model.
    """
    chosen, of = config.load(None, words), whole(layout)
    train = inputs_of(chosen).prepared.train
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float64, attn_implementation="eager"
    )
    batches = [next(iter(loader_of(train, of, rank, chosen.train.seed)))[0] for rank in range(of.data_ranks)]
    micro_batches = [each for batch in batches for each in batch.micro_batches]
    counts = torch.tensor([each.label_tokens for each in micro_batches], dtype=torch.float64)
    assert counts.max() > 1.15 * counts.min() and counts.min() > 0, "the label counts must be unequal"
    gradients = torch.stack([gradient(model, each) for each in micro_batches])
    weights = counts / counts.sum()
    small = float(weights @ gradients.square().sum(1))
    big = float((weights @ gradients).square().sum())
    b, big_b = GLOBAL_BATCH / len(micro_batches), GLOBAL_BATCH
    return (big_b * big - b * small) / (big_b - b), (small - big) / (1 / b - 1 / big_b)


@pytest.mark.parametrize("layout", cases(LAYOUTS.split(), ci=["mb2-ga8", "zero3x2-mb4"]))
def test_the_noise_is_that_of_plain_autograd(layout: str, folder: Path, tmp_path: Path) -> None:
    run = RunDir(trained(folder, tmp_path / "run", layout, "fp64", *MEASURED).folder)
    (row,) = run.rows("train")
    squared_norm, variance = reference(folder, settings(folder, tmp_path, layout, "fp64"), layout)
    assert row["gradient_squared_norm"] == pytest.approx(squared_norm, rel=1e-6)
    assert row["gradient_variance"] == pytest.approx(variance, rel=1e-6)
    assert row["gradient_noise_scale"] == pytest.approx(variance / squared_norm, rel=1e-6)


@pytest.mark.parametrize("layout", cases(["dp2-mb2", "tp2-sp-mb2", "zero3x2-tp2-sp-mb2"], test=[]))
def test_adapters_have_the_noise_of_one_rank(layout: str, folder: Path, tmp_path: Path) -> None:
    """Micro-batches of two sequences are the same in each of these layouts."""
    words = (*MEASURED, "method=lora", "lora.r=4")
    runs = [trained(folder, tmp_path / name, name, "fp64", *words) for name in ("mb2-ga8", layout)]
    (alone,), (ours,) = (RunDir(run.folder).rows("train") for run in runs)
    for name in ("gradient_squared_norm", "gradient_variance"):
        assert ours[name] == pytest.approx(alone[name], rel=1e-6)


@pytest.mark.parametrize("precision", cases(["fp32", "bf16"], ci=["fp32"]))
def test_measuring_changes_no_bit_of_the_training(precision: str, folder: Path, tmp_path: Path) -> None:
    words = ("train.max_steps=2",)
    without = trained(folder, tmp_path / "without", "mb4-ga4", precision, *words)
    measured = trained(folder, tmp_path / "with", "mb4-ga4", precision, *words, "log.gradient_noise_scale=2")
    first, second = RunDir(measured.folder).rows("train")
    assert "gradient_variance" not in first and second["gradient_variance"] > 0
    assert measured.losses == without.losses and measured.norms == without.norms
    assert all(torch.equal(measured.tensors[name], without.tensors[name]) for name in without.tensors)


def test_a_layout_with_one_micro_batch_is_refused_before_the_model_is_read(
    folder: Path, tmp_path: Path
) -> None:
    words = settings(folder, tmp_path / "run", "mb16-ga1", "fp32", MEASURED)
    with refuses(UserError):
        build.build(config.load(None, words))
    assert not (tmp_path / "run").exists()
