"""Choose in which circle each case of a test runs: `make test`, `.ci/run` or `make test-all`.

@pytest.mark.parametrize("layout", cases(LAYOUTS, test=["tp2-sp"], ci=["pp2-zbv", "cp2"]))
@pytest.mark.parametrize("family", cases(FAMILIES, test=1, ci=3))      # the first one, the next three
"""

from collections.abc import Iterable
from typing import Any

import pytest
import transformers

# For cases that need OPT packed.
OPT_WITHOUT_MASK = pytest.mark.skipif(
    transformers.__version__.startswith("5.17."), reason="OPT of transformers 5.17 makes a mask of its own"
)


def cases(every: Iterable[Any], *, test: Iterable[Any] | int = (), ci: Iterable[Any] | int = ()) -> list[Any]:
    """Return all of `every` for parametrize: those of `test` unmarked, those of `ci` marked ci, the rest all.

    A tuple holds the values of several arguments. test, ci: subsets of `every`, or how many of its first
    cases and of the next ones.
    """
    every = list(every)
    default = every[:test] if isinstance(test, int) else list(test)
    rest = [case for case in every if case not in default]
    further = rest[:ci] if isinstance(ci, int) else list(ci)
    assert all(case in every for case in [*default, *further]), "a chosen case that is not among the cases"
    return [
        case if case in default else _marked(case, pytest.mark.ci if case in further else pytest.mark.all)
        for case in every
    ]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, mark], id=case.id)
    return pytest.param(*case if isinstance(case, tuple) else (case,), marks=mark)
