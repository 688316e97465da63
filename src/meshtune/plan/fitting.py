"""Constants fitted to measured values, and how well they predict what they were not fitted to.

    fitted ─> constants by name          folds, left_out ─> predictions of each part by the others' constants

`meshtune calibrate` fits those of a machine, validation/fit.py those that are shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Errors = Callable[[Mapping[str, float]], np.ndarray]  # constants -> errors, such as logarithms of ratios
# lowest, as one would guess before any fit, highest
Range = tuple[float, float, float]


def fitted(
    errors: Errors,
    free: Mapping[str, Range],
    weights: np.ndarray,
    *,
    scale: float,
    ridge: float = 1e-4,
    rounds: int = 40,
) -> dict[str, float]:
    """Values of the free constants that fit best, by Levenberg-Marquardt on logits between their bounds.

    errors: of constants by name. free: bounds and guess of each. weights: of each error. scale: of an error
    that counts linearly (a pseudo-Huber loss), or a few broken runs would decide. ridge: weight of the
    distance from the guess, so that what no measurement tells stays there. rounds: iterations at most; it
    ends before when the cost falls by less than 1e-6 of itself.
    """
    names = list(free)
    low, first, high = (np.array([free[name][end] for name in names]) for end in range(3))
    logits = np.clip(np.log((first - low + 1e-12) / np.maximum(high - first, 1e-12)), -4, 4)
    origin = logits.copy()

    def values(logits: np.ndarray) -> dict[str, float]:
        found = low + (high - low) / (1 + np.exp(-logits))
        return {name: float(value) for name, value in zip(names, found, strict=True)}

    def cost(wrong: np.ndarray, logits: np.ndarray) -> float:
        huber = 2 * scale**2 * (np.sqrt(1 + (wrong / scale) ** 2) - 1)
        return float(weights @ huber + ridge * np.sum((logits - origin) ** 2))

    damping, wrong = 1e-2, errors(values(logits))
    now = cost(wrong, logits)
    for _ in range(rounds):
        slope = np.stack(
            [(errors(values(logits + 1e-3 * unit)) - wrong) / 1e-3 for unit in np.eye(len(logits))], axis=1
        )
        w = weights / np.sqrt(1 + (wrong / scale) ** 2)
        normal = slope.T @ (slope * w[:, None]) + ridge * np.eye(len(logits))
        right = slope.T @ (w * wrong) + ridge * (logits - origin)
        before = now
        for _ in range(8):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), right)
            there = logits - np.clip(move, -1.5, 1.5)
            wrong_there = errors(values(there))
            if (then := cost(wrong_there, there)) < now:
                logits, wrong, now, damping = there, wrong_there, then, max(damping / 3, 1e-7)
                break
            damping *= 4
        if before - now < 1e-6 * before:
            break
    return values(logits)


def determined(slopes: Mapping[str, np.ndarray], least: float) -> list[str]:
    """Names of constants that can be told apart, the clearest first.

    A constant is left out where its effect is that of those before it, in some mixture, up to less than
    `least` (the length of a vector): Gram-Schmidt with pivots.

    slopes: change of every error with each constant.
    """
    left, found = dict(slopes), []
    while left:
        name = max(left, key=lambda name: float(np.linalg.norm(left[name])))
        length = float(np.linalg.norm(left[name]))
        if length < least:
            break
        unit = left.pop(name) / length
        found.append(name)
        left = {other: slope - (slope @ unit) * unit for other, slope in left.items()}
    return found


def folds(kinds: np.ndarray, count: int) -> np.ndarray:
    """Number of a part, below `count`, for each measurement, at random; each kind is spread evenly over the
    parts.

    kinds: of each measurement. The seed is fixed: the same kinds get the same parts.
    """
    found, draw = np.zeros(len(kinds), dtype=int), np.random.default_rng(0)
    for kind in dict.fromkeys(kinds):
        own = draw.permutation(np.flatnonzero(kinds == kind))
        found[own] = (np.arange(len(own)) + draw.integers(count)) % count
    return found


def left_out(labels: np.ndarray, predict: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Predictions of every measurement by constants fitted to those with other labels.

    labels: of each measurement, such as its part of `folds`; one fit for each distinct label. predict: from
    two masks, those to fit to and those to predict, to the predictions of the latter.
    """
    found = np.zeros(len(labels))
    for label in dict.fromkeys(labels):
        found[labels == label] = predict(labels != label, labels == label)
    return found


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's correlation: that of the ranks, equal values sharing their mean rank. NaN where either does
    not vary.
    """
    ranks = [_ranks(np.asarray(values, dtype=float)) for values in (one, other)]
    deviations = [each - each.mean() for each in ranks]
    size = float(np.prod([np.linalg.norm(each) for each in deviations]))
    return float(deviations[0] @ deviations[1]) / size if size else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    """Rank of each value from 1, the mean of ranks for equal values."""
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    return below + (equal + 1) / 2
