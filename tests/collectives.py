"""Collectives that a block of code calls."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Names of the collectives that are called, in their order, such as "allgather_base"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func.__name__.split(".")[0].strip("_"))
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> Counter[str]:
        return Counter(self.names)
