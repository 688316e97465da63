"""Choose which cases of a test always run: the others run with the slow tests, in CI and by `make test-slow`.

@pytest.mark.parametrize("layout", cases(LAYOUTS, default=["tp2-sp", "pp2-zbv"]))
"""

from collections.abc import Iterable
from typing import Any

import pytest
import transformers

# For cases that need OPT packed.
OPT_WITHOUT_MASK = pytest.mark.skipif(
    transformers.__version__.startswith("5.17."), reason="OPT of transformers 5.17 makes a mask of its own"
)


def cases(every: Iterable[Any], *, default: Iterable[Any]) -> list[Any]:
    """Return all of `every` for parametrize, those not in `default` marked slow.

    A tuple holds the values of several arguments. default: a subset of `every`.
    """
    every, default = list(every), list(default)
    assert all(case in every for case in default), "a default case that is none"
    return [case if case in default else _slow(case) for case in every]


def _slow(case: Any) -> Any:
    return pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.slow)
