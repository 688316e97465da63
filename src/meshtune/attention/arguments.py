"""Arguments of the kernels behind `op.attention`."""

from typing import NamedTuple

from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor]  # q, k and v, or their gradients


class Core(NamedTuple):
    """Arguments besides q, k and v, as `op.attention` describes them."""

    query_boundaries: Tensor
    key_boundaries: Tensor
    longest_query: int
    longest_key: int
    scale: float
    window: int | None
    softcap: float | None
