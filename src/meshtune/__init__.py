"""meshtune: plan, train and measure the fine-tuning of Hugging Face language models.

    from meshtune import Config, Layout, dryrun, generate, plan, train  # docs/python.md

Nothing is imported before it is used: `import meshtune` takes milliseconds.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

HOMES = {
    "Callback": "meshtune.train.callbacks",
    "Config": "meshtune.config",
    "Layout": "meshtune.layout",
    "Result": "meshtune.api.train",
    "Training": "meshtune.train.callbacks",
    "generate": "meshtune.api.generate",
    "sweep": "meshtune.api.sweep",
}  # name -> the module that defines it; __init__.pyi says the same to type checkers
SLOW = ("meshtune.dryrun", "meshtune.sweep")  # that import torch, and print lines on their progress
PACKAGES = ("dryrun", "plan", "train")  # packages whose modules are callable: CallablePackage


class CallablePackage(ModuleType):
    """A package that is also a function: meshtune.train(…) is meshtune.api.train.train(…)."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        announce(self.__name__)
        return self._function()(*args, **options)

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


def announce(function: str) -> None:
    """Print, on a terminal and in a notebook, that a function is about to import PyTorch, for seconds."""
    if function in SLOW and "torch" not in sys.modules:
        from meshtune.units import on_screen

        on_screen("loading PyTorch …")


def __getattr__(name: str) -> Any:
    """Import what the name stands for."""
    if name in HOMES:
        announce(f"{__name__}.{name}")
        return getattr(importlib.import_module(HOMES[name]), name)
    if name in PACKAGES:
        return importlib.import_module(f"meshtune.{name}")
    raise AttributeError(f"module 'meshtune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES, *PACKAGES})
