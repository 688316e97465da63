"""Calls newer than the oldest torch we support (2.11), each with its fallback."""

from inspect import signature
from typing import Any

import torch.distributed as dist
from torch import Tensor


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_boundaries: Tensor,
    key_boundaries: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`: one after the other, the queries of each run and their keys.

    [queries, heads, head_dim] with k and v [keys, ...] of fewer heads where the model groups them -> as the
    queries; boundaries [runs + 1] int32. Where a run has more keys than queries, its last query stands at its
    last key (flash-attention since 2.1). Grouped heads need torch 2.12; before, keys and values are expanded.
    """
    from torch.nn.attention.varlen import varlen_attn  # CUDA only: not imported where it can't be used

    grouped = q.shape[1] != k.shape[1]
    options = {}
    if grouped and "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    elif grouped:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    out = varlen_attn(
        q, k, v, query_boundaries, key_boundaries, longest_query, longest_key,
        scale=scale, window_size=window_size, **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def fsdp_parameters(module: Any) -> list[Any]:
    """FSDP2's own of the parameters that travel with `module`; torch 2.13 has a list of groups."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def all_gather_single(output: Tensor, piece: Tensor, group: dist.ProcessGroup | None) -> None:
    """The ranks' pieces one after the other along dimension 0; until torch 2.13 all_gather_into_tensor."""
    _first_of("all_gather_single", "all_gather_into_tensor")(output, piece, group=group)


def reduce_scatter_single(output: Tensor, pieces: Tensor, group: dist.ProcessGroup | None) -> None:
    """This rank's piece along dimension 0 of the sum; until torch 2.13 reduce_scatter_tensor."""
    _first_of("reduce_scatter_single", "reduce_scatter_tensor")(output, pieces, group=group)


def _first_of(*names: str) -> Any:
    return next(getattr(dist, name) for name in names if hasattr(dist, name))
