"""A loss function of the caller's on one rank: its count, its result, a run that goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import refuses
from torch import Tensor

from meshtune import config
from meshtune.api import build
from meshtune.errors import UserError
from meshtune.rundir import RunDir
from meshtune.train import loop
from meshtune.train.callbacks import Hooks
from meshtune.train.loss import TokenLoss, check_same

LOGITS, LABELS = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])


def halves(logits: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels) / 2


def test_sum_gradient_and_counts_are_the_functions() -> None:
    loss = TokenLoss(halves)
    total, gradient = loss(LOGITS.bfloat16(), LABELS, vocabulary=None, gradient=True)
    wide = LOGITS.bfloat16().float().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, LABELS, reduction="sum")
    expected.backward()
    assert gradient is not None and gradient.dtype == torch.bfloat16 and wide.grad is not None
    assert torch.equal(total, expected.detach()) and torch.equal(gradient, wide.grad.bfloat16())
    assert loss(LOGITS, LABELS, vocabulary=None, gradient=False)[1] is None
    assert loss.take() == [6] and loss.take() == [0]


@pytest.mark.parametrize(
    "result",
    [lambda x, y: x.sum(), lambda x, y: (x.sum(1), 6), lambda x, y: (x.sum(), y), lambda x, y: (1.0, 6)],
    ids=["no count", "no sum", "many counts", "no tensor"],
)
def test_a_result_of_another_form_is_refused(result: Any) -> None:
    with refuses(UserError):
        TokenLoss(result)(LOGITS, LABELS, vocabulary=None, gradient=True)


def test_a_loss_without_a_gradient_is_refused() -> None:
    with refuses(UserError):
        TokenLoss(lambda logits, labels: (labels.sum().float(), 6))(
            LOGITS, LABELS, vocabulary=None, gradient=True
        )


def test_a_run_goes_on_with_the_loss_it_began_with(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append({"kind": "run", "loss_function": TokenLoss(halves).name})
    check_same(TokenLoss(halves), run)
    with refuses(UserError):
        check_same(None, run)
    run.append({"kind": "run"})
    with refuses(UserError):
        check_same(TokenLoss(halves), run)


@pytest.mark.ci
def test_loss_and_gradients_are_per_count_over_micro_batches(
    settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = settings("layout=mb1", "train.global_batch_size=4", "train.max_steps=1", "train.max_grad_norm=0")
    rows = []
    for number, loss in enumerate((None, halves)):
        chosen = config.load(None, [*words, f"output={tmp_path / str(number)}"])
        run = build.build(chosen, hooks=Hooks(loss))
        loop.train(run)
        (row,) = run.folder.rows("train")
        rows.append((row["loss"], row["grad_norm"], run.folder.rows("eval")[-1]["loss"]))
    assert rows[1] == pytest.approx([2 * number for number in rows[0][:2]] + [rows[1][2]], rel=1e-5)
    assert rows[1][2] == pytest.approx(2 * rows[0][2], rel=1e-3), "the evaluation is per count too"
