"""Data parallelism that shards: ZeRO-1, -2, -3 and hybrids of them with replicas, by torch's FSDP2.

    zero  parameters  gradients  optimizer state  collectives of a step, for each group of parameters
    0     whole       whole      whole            1 all-reduce (replicas.py)
    1     whole       whole      shard            1 all-gather, 1 reduce-scatter
    2     whole       shard      shard            1 all-gather, 1 reduce-scatter a micro-batch
    3     shard       shard      shard            2 all-gathers, 1 reduce-scatter a micro-batch

(Rajbhandari et al. 2020, arXiv:1910.02054; "whole" while the step's passes run, shards in between.) A group
is a block (or those that share parameters), the last one with the last norm; a block's experts, where others
are on other ranks; the embedding; and all else, which is the head. Its collectives are over one flat buffer
and overlap with the next group's computation. The backward needs neither the embedding's weights nor the
head's, whose gradient the loss has made in the forward: they are gathered once a micro-batch, and the head's
gradient is reduced while the blocks' backward runs. An embedding that is tied to the head is in its group.
With dp_replicate > 1 shards are also all-reduced over the replicas, once a step.

Context ranks see other tokens with the same parameters, so here they are data ranks. Gradients are summed,
not averaged: each micro-batch's loss is already divided by the label tokens of the global batch.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshtune import compat
from meshtune.experts.products import experts_of


@compat.sharding_integers()
def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    zero: int,
    *,
    embedding: nn.Module | None = None,
    norm: nn.Module | None = None,
    head: nn.Module | None = None,
    expert_mesh: DeviceMesh | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Shard the parameters of `root` over `mesh` by ZeRO stage `zero` (1 to 3); each of `blocks`, the
    embedding and the rest is a group.

    In place, parameters on meta or real; they become DTensors over `mesh`. Forward and backward passes
    compute in `compute_dtype` (None: in the parameters' own), gradients are summed in `reduce_dtype` (None:
    as they are computed). Everything that uses a parameter must happen inside root's forward.

    embedding, norm, head: modules inside `root` but outside `blocks`, where it has them. The norm must follow
    the last block, and the head's gradient be made in the forward (train/loss.py). expert_mesh: of the ranks
    with the same experts, where these are split over others; each block's experts are then a group over it.
    """
    # Inputs have the dtypes that the model gave them: a cast here would round its fp32 ones.
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
    blocks, options = list(blocks), {"mesh": mesh, "reshard_after_forward": zero == 3, "mp_policy": policy}
    tied = embedding is not None and head is not None and _share(embedding, head)
    sharing = _sharing(blocks)
    order: list[nn.Module] = [root]  # of a backward, in which a block's own parameters come before experts
    for together in sharing[::-1]:
        experts = [each for block in together for each in experts_of(block)] if expert_mesh else []
        for each in experts:
            fully_shard(
                each, **options | {"mesh": expert_mesh, "shard_placement_fn": partial(_cut, expert_mesh)}
            )
        if norm is not None and blocks[-1] in together and list(norm.parameters()):
            together.append(norm)
        fully_shard(together, **options)
        order += [together[0], *experts[::-1]]
    if embedding is not None and not tied:
        fully_shard(embedding, **options)
        _sharded(embedding).set_unshard_in_backward(not _is_table(embedding))
    fully_shard(root, **options)
    # By itself FSDP2 forgets, with each backward, the order of the forwards that still wait for theirs (in a
    # pipeline), and at the first group prefetches the last block of an earlier micro-batch.
    first = [embedding] if embedding is not None and not tied else []
    for module, following in pairwise([*order, *first, root]):
        _sharded(module).set_modules_to_backward_prefetch([_sharded(following)])
    for module in groups(root):  # none of these is recursive
        compat.keep_integers(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else PREMUL_SUM, which gloo doesn't support
    root.register_forward_pre_hook(lambda root, _: compat.keep_gradient_dtype(root))  # behind FSDP2's
    table = embedding if embedding is not None and _is_table(embedding) else None
    known = {p for module in (table, norm, head, *blocks) if module for p in module.parameters()}
    if all(parameter in known for parameter in root.parameters()):
        _sharded(root).set_unshard_in_backward(False)
        if norm is not None and head is not None and not tied:
            norm.register_forward_pre_hook(partial(_reduce_behind, _sharded(root)))


def _cut(mesh: DeviceMesh | None, parameter: nn.Parameter) -> Shard:
    """Dimension along which a parameter of experts is sharded: the first one that the ranks divide."""
    assert mesh is not None
    ranks = mesh.size(mesh.ndim - 1)
    divided = parameter.shape[0] % ranks == 0 or parameter.ndim < 3 or parameter.shape[1] % ranks
    return Shard(0 if divided else 1)


def _is_table(embedding: nn.Module) -> bool:
    """True if an embedding's backward reads no parameters: there is no norm inside it, as Inkling's has."""
    return all(parameter is embedding.weight for parameter in embedding.parameters())


def _sharing(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Split blocks into groups: those that share a parameter (Zamba's) are in the same one."""
    groups: list[list[nn.Module]] = []
    for block in blocks:
        sharing = [group for group in groups if any(_share(block, other) for other in group)]
        groups = [group for group in groups if group not in sharing]
        groups.append([*(other for group in sharing for other in group), block])
    return groups


def _share(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have a parameter in common."""
    return not set(one.parameters()).isdisjoint(other.parameters())


def _sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


class _ReduceBehind(torch.autograd.Function):
    """Identity; its backward reduce-scatters the gradients of a group, which are then all computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: FSDPModule) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        compat.reduce_gradients(ctx.group)
        return gradient, None


def _reduce_behind(group: FSDPModule, norm: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Hook before the last norm: behind its backward the gradients of `group`, the head's, are reduced."""
    if not torch.is_grad_enabled() or not inputs:
        return None
    return _ReduceBehind.apply(inputs[0], group), *inputs[1:]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; a plain tensor as it is."""
    if isinstance(tensor, DTensor):
        return tensor.detach().to_local()  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def groups(root: nn.Module) -> list[FSDPModule]:
    """Modules whose parameters are communicated together, `root` first; empty where nothing is sharded."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def before_backward(root: nn.Module, zero: int, *, last: bool) -> None:
    """Prepare a micro-batch's backward under ZeRO stage `zero`; nothing for a `root` that is not sharded.

    last: True for the step's last micro-batch. Only then are gradients reduce-scattered under ZeRO-1,
    parameters freed under ZeRO-1 and -2, and gradient shards all-reduced over replicas.
    """
    if isinstance(root, FSDPModule):
        root.set_reshard_after_backward(zero == 3 or last)
        root.set_requires_gradient_sync(zero >= 2 or last)
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)


def accumulate_gradients(root: nn.Module) -> None:
    """Add new unsharded gradients to their sums in the reduce dtype.

    Needed after a backward for weights only, which runs none of FSDP2's hooks.
    """
    for module in groups(root):
        compat.accumulate_gradients(module)


def reshard(root: nn.Module) -> None:
    """Free parameters that a forward pass without a backward left gathered: a step would make them stale."""
    for module in groups(root):
        module.reshard()
