"""meshtune: plan, train and measure the fine-tuning of Hugging Face language models.

    from meshtune import Config, Layout, generate, plan, train        # docs/python.md

Nothing is imported before it is used: `import meshtune` takes milliseconds.
"""

import importlib
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
}  # name -> the module that defines it; __init__.pyi says the same to type checkers
PACKAGES = ("plan", "train")  # packages whose modules are callable: CallablePackage


class CallablePackage(ModuleType):
    """A package that is also a function: meshtune.train(…) is meshtune.api.train.train(…)."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(f"meshtune.api.{name}"), name)(*args, **options)


def __getattr__(name: str) -> Any:
    """Import what the name stands for."""
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    if name in PACKAGES:
        return importlib.import_module(f"meshtune.{name}")
    raise AttributeError(f"module 'meshtune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES, *PACKAGES})
