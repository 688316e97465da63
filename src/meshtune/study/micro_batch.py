"""The largest micro-batch that runs: doubled until one does not, then bisected."""

from collections.abc import Callable
from dataclasses import dataclass

MOST = 4096  # sequences; nobody needs more


@dataclass(frozen=True)
class Tried:
    """One micro-batch size."""

    size: int  # sequences
    runs: bool
    peak: int | None  # bytes of tensors on the fullest rank; None: it did not run to the end
    reason: str | None = None  # why it does not run


def largest(run: Callable[[int], Tried], first: int = 1) -> tuple[int, list[Tried]]:
    """(The largest size that runs, 0 if none does; all sizes in the order in which they were tried).

    run: tries one size; a size below one that runs is taken to run. first: where to begin.
    """
    tried: list[Tried] = []

    def runs(size: int) -> bool:
        tried.append(run(size))
        return tried[-1].runs

    good, bad = 0, MOST + 1
    size = first
    while good < size < bad:
        good, bad = (size, bad) if runs(size) else (good, size)
        size = min(2 * good, MOST) if bad > MOST else (good + bad) // 2
    return good, tried
