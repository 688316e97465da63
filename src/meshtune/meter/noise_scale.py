"""The simple gradient noise scale: tr(Σ) / |G|², in sequences (McCandlish et al. 2018, arXiv:1812.06162).

G is the gradient of the mean loss per label token over all data, Σ the covariance of the gradient of one
sequence. Global batches far below the noise scale are all noise: twice the batch then takes nearly half the
updates. Far above it a larger batch saves hardly any.

Both are estimated from the squared norms of gradients at two batch sizes (appendix A.1, equations A.2 to
A.4): a small one, of one micro-batch on one data rank, and the global batch. With B sequences in K
micro-batches

    E |g_small|² = |G|² + tr(Σ) · K/B        |G|²  ≈ (K · |g_big|² − |g_small|²) / (K − 1)
    E |g_big|²   = |G|² + tr(Σ) / B          tr(Σ) ≈ (|g_small|² − |g_big|²) · B / (K − 1)

Both estimates are without bias and noisy, |G|² may even be negative: so each is averaged over the measured
steps, and the ratio is taken of the averages.

Label tokens. The loss of a step is a mean per label token, and micro-batches have unequal numbers of them:
n_j of N. So g_j is micro-batch j's own mean per label token, and |g_small|² the mean of |g_j|² weighted by
n_j / N. The equations then hold without bias if the variance of g_j is in inverse proportion to its label
tokens, which for equal numbers isn't an assumption, and to first order in K/B for any sequences that are
drawn independently (the variance of a ratio estimator).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from meshtune.layout import Layout
from meshtune.rundir import Row

DECAY = 0.98  # of the averages, a measurement: they reach back some 50 measurements
ESTIMATES = ("gradient_squared_norm", "gradient_variance")  # columns of a measured step's own |G|² and tr(Σ)


class Noise(NamedTuple):
    """|G|² and tr(Σ), estimated from one step or averaged over several."""

    squared_norm: float  # |G|², of the gradient per label token
    variance: float  # tr(Σ), of the gradient of one sequence per label token

    @property
    def scale(self) -> float | None:
        """The noise scale in sequences; None where |G|² or tr(Σ) is not positive: not known yet."""
        return self.variance / self.squared_norm if min(self) > 0 else None


def estimate(small: float, big: float, *, micro_batches: int, sequences: int) -> Noise | None:
    """Estimate from one step; None with less than two micro-batches, or a norm that is not finite.

    small: mean of the micro-batches' squared gradient norms, weighted by their label tokens; big: of the
    global batch, before clipping. micro_batches: of all data ranks, those that have label tokens. sequences:
    of the global batch.
    """
    if micro_batches < 2 or not math.isfinite(small):
        return None
    between = micro_batches - 1
    return Noise((micro_batches * big - small) / between, (small - big) * sequences / between)


def with_measurement(
    before: tuple[float, float], new: Noise | None
) -> tuple[tuple[float, float], dict[str, float | None]]:
    """(Exponential averages of |G|² and tr(Σ) after a step; columns of its train row, {} without a
    measurement).

    before: the averages until then, (0, 0) at first. They are not divided by the sum of their weights, which
    is the same in both and leaves the ratio. new: estimated from the step; None: not measured.
    """
    if new is None:
        return before, {}
    averages = Noise(*(DECAY * old + (1 - DECAY) * now for old, now in zip(before, new, strict=True)))
    columns = {"gradient_noise_scale": averages.scale, **dict(zip(ESTIMATES, new, strict=True))}
    return (averages.squared_norm, averages.variance), columns


def late_scale(rows: Sequence[Row]) -> float | None:
    """The noise scale of a run's second half, in sequences; None as in `scales`. rows: of kind "train"."""
    return scales(rows, 2)[-1]


def scales(rows: Sequence[Row], parts: int) -> list[float | None]:
    """The noise scale of each part of a run, in sequences: the ratio of both estimates' means over the
    measured steps of the part. None where nothing was measured, or one of the means is not positive.

    rows: of kind "train". parts: their number; two parts differ by one measured step at most.
    """
    measured = [row for row in rows if row.get(ESTIMATES[1]) is not None]
    ends = [len(measured) * part // parts for part in range(parts + 1)]
    found = []
    for some in (measured[start:end] for start, end in pairwise(ends)):
        noise = Noise(*(fmean(row[name] for row in some) for name in ESTIMATES)) if some else None
        found.append(noise and noise.scale)
    return found


def noise_refusals(layout: Layout, *, token_loss: bool) -> list[str]:
    """Sentences on why the noise scale of a run can't be measured; [] where it can.

    token_loss: the run has a loss function of its own, or one on whole answers.
    """
    setting, problems = "log.gradient_noise_scale", []
    if layout.data_ranks * layout.gradient_accumulation_steps == 1:
        problems.append(
            f"{setting} compares the gradients of a micro-batch with those of the global batch, but layout "
            f"{layout} has one micro-batch on one data rank; set a smaller layout.micro_batch_size, or leave "
            f"{setting} out."
        )
    axes = ("pp", layout.pp, "pipeline ranks"), ("cp", layout.cp, "context ranks"), ("ep", layout.ep, "ranks")
    for axis, size, ranks in axes:
        if size > 1:
            problems.append(
                f"{setting} needs the gradients of each micro-batch, but layout {layout} has parts of them "
                f"on {size} {ranks}; choose a layout without {axis}, or leave {setting} out."
            )
    if token_loss:
        problems.append(
            f"{setting} weights micro-batches by their label tokens, but a loss of your own or on whole "
            f"answers has counts of its own; leave {setting} out."
        )
    return problems
