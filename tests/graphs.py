"""A backend of torch.compile that counts."""

from collections.abc import Callable
from typing import Any

import torch


class Graphs:
    """A backend that runs graphs as they are and counts them, and their calls where gradients are wanted."""

    def __init__(self) -> None:
        self.made = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.made += 1

        def run(*values: Any) -> Any:
            self.calls += torch.is_grad_enabled()
            return graph(*values)

        return run
