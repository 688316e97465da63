"""A loss function of the caller's: as on one rank in every layout, the sum over the batch per its count."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import cases
from layouts import Trained, check, trained
from torch import Tensor

from meshtune.rundir import RunDir

TECHNIQUES = ["dp2", "zero3x2", "tp2-sp", "cp2", "pp2-1f1b", "pp2-zbv", "zero3x2-tp2-sp-pp2-1f1b"]


def focal(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The focal loss, in which odd tokens count a third: counts differ from numbers of label tokens."""
    weights = torch.where(labels % 2 == 1, 1 / 3, 1.0).to(logits.dtype)
    log_likelihood = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    losses = -((1 - log_likelihood.exp()) ** 2) * log_likelihood
    return (weights * losses).sum(), weights.sum()


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels)


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(folder, tmp_path_factory.mktemp("focal") / "run", "mb4-ga4", "fp64", loss=focal)


@pytest.mark.parametrize("layout", cases(TECHNIQUES, ci=["zero3x2-tp2-sp-pp2-1f1b"]))
def test_a_loss_function_gives_the_numbers_of_one_rank(
    layout: str, folder: Path, alone: Trained, tmp_path: Path
) -> None:
    check(trained(folder, tmp_path / "run", layout, "fp64", loss=focal), alone, "fp64")


@pytest.mark.parametrize("layout", cases(["mb4-ga4", "tp2-pp2-1f1b"], ci=["tp2-pp2-1f1b"]))
def test_the_cross_entropy_as_a_function_is_the_built_in_one(
    layout: str, folder: Path, reference: Callable[[str], Trained], tmp_path: Path
) -> None:
    ours = trained(folder, tmp_path / "run", layout, "fp64", loss=cross_entropy)
    check(ours, reference("fp64"), "fp64")

    def eval_losses(run: Trained) -> list[float]:
        return [row["loss"] for row in RunDir(run.folder).rows("eval")]

    assert eval_losses(ours) == pytest.approx(eval_losses(reference("fp64")), rel=1e-7)
