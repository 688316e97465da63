"""Constants are recovered from values made with them; what nothing determines stays; folds are apart."""

import numpy as np
import pytest

from meshtune.plan.calibration import determined, fitted, folds, left_out, spearman

X = np.linspace(1.0, 4.0, 12)


def test_constants_are_recovered_and_one_without_effect_stays_at_its_guess() -> None:
    truth = 2 * X + 3.0
    free = {"slope": (0.1, 1.0, 10.0), "offset": (0.1, 1.0, 10.0), "idle": (0.2, 1.0, 5.0)}

    def errors(of: dict[str, float]) -> np.ndarray:
        return np.log((of["slope"] * X + of["offset"]) / truth)

    found = fitted(errors, free, np.ones(12), scale=0.03, ridge=1e-9)
    assert (found["slope"], found["offset"]) == pytest.approx((2.0, 3.0), rel=1e-3)
    assert found["idle"] == pytest.approx(1.0, rel=1e-6)


def test_constants_with_the_same_effect_are_not_told_apart() -> None:
    slopes = {"one": X, "twice": 2 * X, "square": X**2, "none": 0 * X}
    assert determined(slopes, 0.1) == ["square", "twice"]


def test_each_part_is_predicted_by_the_others() -> None:
    parts = folds(np.array(["a"] * 6 + ["b"] * 3), 3)
    assert [sorted(parts[:6]), sorted(parts[6:])] == [[0, 0, 1, 1, 2, 2], [0, 1, 2]]
    values = np.arange(9.0)
    means = left_out(parts, lambda inside, outside: np.full(outside.sum(), values[inside].mean()))
    assert means == pytest.approx([values[parts != part].mean() for part in parts])


def test_spearman_is_of_ranks_and_ties_share_theirs() -> None:
    assert spearman(X, np.exp(X)) == pytest.approx(1.0)
    assert spearman(X, -X) == pytest.approx(-1.0)
    assert spearman(np.array([1, 1, 2]), np.array([1, 2, 3])) == pytest.approx(0.8660, abs=1e-4)
    assert np.isnan(spearman(np.ones(3), np.arange(3)))
