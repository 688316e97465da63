"""torch's names that differ between the versions we support: newer calls with their fallbacks, and private
names, which are checked before they are used.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtune.errors import UserError


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
    """FSDP2's records of the parameters that it gathers with `module`."""
    return [parameter for group in _fsdp_groups(module) for parameter in group.fsdp_params]


def _fsdp_groups(module: Any) -> list[Any]:
    """FSDP2's groups of parameters of `module`; torch 2.13 has a list of them."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def partial_sums(module: Any) -> list[Tensor]:
    """Gradients of `module` that FSDP2 has reduce-scattered, and not all-reduced over replicas yet."""
    sums = (group._partial_reduce_output for group in _fsdp_groups(module))
    return [partial for partial in sums if partial is not None]


def reduce_gradients(module: Any) -> None:
    """Do what FSDP2 does after the backward of the parameters that it gathers with `module`: reduce-scatter
    their gradients, or add them up, and free the gathered weights. It then does not do so once more.
    """
    for group in _fsdp_groups(module):
        group.post_backward()


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


def compiled_graphs() -> int:
    """Graphs that torch.compile has compiled in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# Methods of ProcessGroup that start a collective and return its Work; torch 2.13 renamed some.
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "all_gather_single",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "broadcast",
    "reduce", "gather", "scatter", "send", "recv", "recv_anysource", "barrier", "_end_coalescing",
)  # fmt: skip


def in_backward() -> bool:
    """Whether a backward pass calls, as it does where a checkpoint runs a part of the forward again."""
    return torch._C._current_graph_task_id() >= 0


TESTED_PIPELINES = "2.13"  # the version of torch that pipelines were tested with

# Private names of torch.distributed.pipelining that pipeline.py calls or replaces, with the parameters used.
_LISTS = "arg_mbs kwarg_mbs target_mbs losses return_outputs"
PIPELINING = {
    "schedules.PipelineScheduleSingle._step_microbatches": _LISTS,
    "schedules.PipelineScheduleMulti._step_microbatches": _LISTS,
    "stage.PipelineStage.backward_weight_one_chunk": "",
    "stage.PipelineStage.backward_maybe_with_nosync": "backward_type bwd_kwargs last_backward",
    "stage.PipelineStage.perform_reduce_grad": "grad_scale_factor",
    "stage.PipelineStage.clear_runtime_states": "",
    "_backward.stage_backward": "stage_output output_grads input_values",
}


def check_pipelining() -> None:
    """Raise UserError if this torch lacks a private name that pipelines use, or a parameter of one."""
    from torch.distributed import pipelining

    changed = [name for name, used in PIPELINING.items() if not _takes(pipelining, name, used.split())]
    if changed:
        raise UserError(
            f"Pipelines use names of torch that are not public, and torch {torch.__version__} has others for "
            f"{', '.join(changed)}. They were tested with torch {TESTED_PIPELINES}: install that, or use a "
            "layout without pp."
        )


def _takes(owner: Any, path: str, names: Sequence[str]) -> bool:
    """Whether the function at a dotted path below `owner` is there and takes these parameters."""
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return callable(owner) and set(names) <= signature(owner).parameters.keys()


def _first_of(*names: str) -> Any:
    return next(getattr(dist, name) for name in names if hasattr(dist, name))
