"""The gradient noise scale, where it is known: linear regression with noise of a known size."""

import math

import pytest
import torch
from golden import says

from meshtune.layout import Layout
from meshtune.meter.noise_scale import DECAY, Noise, estimate, late_scale, noise_refusals, with_measurement

FEATURES, SIGMA = 8, 0.5
AWAY = torch.linspace(0.1, 0.8, FEATURES, dtype=torch.float64)  # the optimum, from the weights at 0
# x ~ N(0, 1), y = x · AWAY + N(0, SIGMA²), loss (x · w − y)² / 2 at w = 0: the gradient of a sample is −y x.
SQUARED_NORM = float(AWAY.square().sum())  # of its mean, −AWAY
VARIANCE = SQUARED_NORM * (FEATURES + 1) + SIGMA**2 * FEATURES  # E y² |x|² − |AWAY|²


def gradients(samples: int) -> torch.Tensor:
    """Mean gradient of as many samples, by autograd."""
    x = torch.randn(samples, FEATURES, dtype=torch.float64)
    y = x @ AWAY + SIGMA * torch.randn(samples, dtype=torch.float64)
    weights = torch.zeros(FEATURES, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((x @ weights - y).square().mean() / 2, weights)
    return gradient


@pytest.mark.ci
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((4, 4), id="two"),
        pytest.param((4,) * 8, id="eight", marks=pytest.mark.all),
        pytest.param((1, 2, 13), id="unequal", marks=pytest.mark.all),
    ],
)
def test_estimates_have_the_known_mean_whatever_the_micro_batches_are(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    total, steps, found = sum(sizes), 6000, []
    for _ in range(steps):
        each = [gradients(size) for size in sizes]
        shares = [size / total for size in sizes]
        small = sum(share * float(one.square().sum()) for share, one in zip(shares, each, strict=True))
        whole = torch.stack([share * one for share, one in zip(shares, each, strict=True)]).sum(0)
        found.append(estimate(small, float(whole.square().sum()), micro_batches=len(sizes), sequences=total))
    values = torch.tensor(found, dtype=torch.float64)
    error = values.std(0) / math.sqrt(steps)  # of the mean
    assert (values.mean(0) - torch.tensor([SQUARED_NORM, VARIANCE])).abs().le(4 * error).all()
    assert error[0] < 0.04 * SQUARED_NORM and error[1] < 0.04 * VARIANCE, "else the test could not fail"


def test_the_averages_leave_the_ratio_of_a_weighted_mean() -> None:
    new = [Noise(1.0, 30.0), Noise(-0.5, 20.0), Noise(2.0, 70.0)]
    averages, scales = (0.0, 0.0), []
    for one in new:
        averages, columns = with_measurement(averages, one)
        assert (columns["gradient_squared_norm"], columns["gradient_variance"]) == tuple(one)
        scales.append(columns["gradient_noise_scale"])
    weights = [DECAY**2, DECAY, 1.0]
    means = [sum(w * one[part] for w, one in zip(weights, new, strict=True)) for part in (0, 1)]
    assert scales[0] == pytest.approx(30) and scales[2] == pytest.approx(means[1] / means[0])
    assert with_measurement(averages, None) == (averages, {}), "a step that was not measured"


def test_the_scale_of_a_runs_second_half_is_the_ratio_of_means() -> None:
    rows = [{"step": step} for step in range(9)]
    assert late_scale(rows) is None
    for step, (squared_norm, variance) in enumerate([(9.0, 1.0), (9.0, 1.0), (1.0, 10.0), (-0.5, 20.0)]):
        rows[2 * step] |= {"gradient_squared_norm": squared_norm, "gradient_variance": variance}
    assert late_scale(rows) == pytest.approx(60)


@pytest.mark.parametrize("one", [Noise(-1.0, 5.0), Noise(1.0, -5.0), Noise(0.0, 5.0)])
def test_a_scale_that_is_not_known_yet_is_none(one: Noise) -> None:
    assert one.scale is None and with_measurement((0.0, 0.0), one)[1]["gradient_noise_scale"] is None


def test_one_micro_batch_tells_nothing() -> None:
    assert estimate(2.0, 1.0, micro_batches=1, sequences=4) is None
    assert estimate(math.inf, 1.0, micro_batches=2, sequences=4) is None


@pytest.mark.parametrize("layout", ["mb4-ga1", "pp2-1f1b-mb1-ga4", "dp2-cp4-mb1-ga1"])
def test_layouts_that_cannot_tell_are_refused(layout: str) -> None:
    (sentence,) = noise_refusals(Layout.parse(layout), token_loss=False)
    says(sentence)


def test_layouts_that_can_tell_are_not_refused_but_loss_functions_are() -> None:
    for layout in ("mb1-ga2", "dp2-mb4-ga1", "zero3x2-tp2-sp-mb1-ga1", "dp2-zero2x2-mb1-ga2"):
        assert noise_refusals(Layout.parse(layout), token_loss=False) == []
    assert len(noise_refusals(Layout.parse("mb1-ga2"), token_loss=True)) == 1
