"""Optimizers by the name in `train.optimizer`: the state that each keeps, for memory and checkpoints.

The planner counts these states, checkpoints name them; the updates are in optim/. Torch-free.
"""

from dataclasses import dataclass

from meshtune.errors import Table
from meshtune.precision import DTYPE_BYTES


@dataclass(frozen=True)
class State:
    """One tensor of optimizer state for each trained parameter tensor."""

    name: str  # in checkpoints: optimizer.<parameter>.<name>
    dtype: str | None = None  # torch's name; None: that of the trained weights
    scalar: bool = False  # one element for the whole tensor, instead of one for each of its elements


@dataclass(frozen=True)
class Optimizer:
    """State of an optimizer between steps, and its working memory during one."""

    states: tuple[State, ...]
    bucket_elements: int  # elements of gradients cast to the dtype of the trained weights at a time

    def bytes_per_parameter(self, trained: str) -> int:
        """Bytes of state per trained parameter, scalars aside. trained: dtype of the trained weights."""
        return sum(DTYPE_BYTES[state.dtype or trained] for state in self.states if not state.scalar)


BUCKET_ELEMENTS = 64 * 2**20  # 256 MiB of fp32 gradients at a time

OPTIMIZERS = Table(
    "train.optimizer",
    {
        "adamw": Optimizer(
            (State("step", "float32", scalar=True), State("exp_avg"), State("exp_avg_sq")), BUCKET_ELEMENTS
        ),
    },
)
