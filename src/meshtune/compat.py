"""Calls of torch that are newer than the oldest version we support (2.11), each with its fallback."""

from inspect import signature
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


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
    """Call `torch.nn.attention.varlen.varlen_attn`: attention inside each of several packed runs of tokens.

    q [queries, heads, head_dim], k and v [keys, key-value heads, head_dim] -> as q. query_boundaries: int32
    [runs + 1], on the device; run i has the queries from boundary i up to, but without, boundary i + 1.
    key_boundaries: the same for keys. longest_query, longest_key: most queries and most keys of one run.
    If a run has more keys than queries, its last query stands at its last key (flash-attention since 2.1).
    scale: factor of the scores. window_size: (tokens before, tokens after) that a query sees; -1: all.

    Grouped key-value heads need torch 2.12; before, keys and values are expanded.
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
    """FSDP2's records of the parameters that it gathers with `module`; torch 2.13 has a list of groups."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was asked for a module of `model`, by its method compile()."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def all_gather_single(output: Tensor, piece: Tensor, group: dist.ProcessGroup | None) -> None:
    """Concatenate the ranks' `piece`s [n, …], in rank order, into `output` [ranks · n, …].

    group: None for all ranks. Until torch 2.13 it was called all_gather_into_tensor.
    """
    _first_of("all_gather_single", "all_gather_into_tensor")(output, piece, group=group)


def reduce_scatter_single(output: Tensor, pieces: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum the ranks' `pieces` [ranks · n, …] and write this rank's n rows of the sum to `output` [n, …].

    group: None for all ranks. Until torch 2.13 it was called reduce_scatter_tensor.
    """
    _first_of("reduce_scatter_single", "reduce_scatter_tensor")(output, pieces, group=group)


def _first_of(*names: str) -> Any:
    return next(getattr(dist, name) for name in names if hasattr(dist, name))
