"""Spread of repeated timings."""

from collections.abc import Sequence
from statistics import median, quantiles


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles, as a share of the median; 0 for fewer than 2 values."""
    if len(values) < 2:
        return 0.0
    first, _, third = quantiles(values, n=4, method="inclusive")
    return (third - first) / median(values)
