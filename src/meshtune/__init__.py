"""meshtune: plan, train and measure the fine-tuning of Hugging Face language models.

    from meshtune import Config, Layout, dryrun, generate, plan, train  # docs/python.md

Nothing is imported before it is used: `import meshtune` takes milliseconds.
"""

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

for _name in ("torchao", "torch.utils._pytree", "torch._higher_order_ops.wrap"):
    # transformers imports torchao where it is installed, which warns of kernels that nothing here runs; torch
    # warns of selective recomputation in compiled blocks, lest they change tensors in place: ours do not then
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(logging.ERROR)

HOMES = {
    "Callback": "meshtune.train.callbacks",
    "Config": "meshtune.config",
    "Layout": "meshtune.layout",
    "Result": "meshtune.api.train",
    "Training": "meshtune.train.callbacks",
    "generate": "meshtune.api.generate",
    "sweep": "meshtune.api.sweep",
}  # name -> the module that defines it; __init__.pyi says the same to type checkers
PACKAGES = ("dryrun", "plan", "train")  # packages whose modules are callable: CallablePackage


class CallablePackage(ModuleType):
    """A package that is also a function: meshtune.train(…) is meshtune.api.train.train(…)."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        with loading(self.__name__.rpartition(".")[2]):
            function = self._function()
        return function(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":  # of inspect.signature and editors
            return inspect.signature(self._function())
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """The function's, its signature first: help() of a module shows no other."""
        function = self._function()
        return f"{function.__name__}{inspect.signature(function)}\n\n{inspect.getdoc(function)}"

    def _function(self) -> Callable[..., Any]:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(f"meshtune.api.{name}"), name)


@contextmanager
def loading(function: str) -> Iterator[None]:
    """Show, on a terminal and in a notebook, what the block loads for a function, for seconds."""
    from meshtune.units import LOADING, on_first_rank, on_screen, working

    if function == "train" and on_first_rank():  # which then shows its parts
        on_screen(f"{LOADING[function]} …")
    elif function in ("dryrun", "sweep") and "torch" not in sys.modules and on_first_rank():
        with working(LOADING[function], on_screen):
            yield
        return
    yield


def __getattr__(name: str) -> Any:
    """Import what the name stands for."""
    if name in HOMES:
        with loading(name):
            return getattr(importlib.import_module(HOMES[name]), name)
    if name in PACKAGES:
        return importlib.import_module(f"meshtune.{name}")
    raise AttributeError(f"module 'meshtune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES, *PACKAGES})
