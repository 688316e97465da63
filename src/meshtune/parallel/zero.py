"""Data parallelism that shards: ZeRO-1, -2, -3 and hybrids of them with replicas, by torch's FSDP2.

    zero  parameters  gradients  optimizer state  messages of a step, for each group of parameters
    0     whole       whole      whole            1 all-reduce (replicas.py)
    1     whole       whole      shard            1 all-gather, 1 reduce-scatter
    2     whole       shard      shard            1 all-gather, 1 reduce-scatter a micro-batch
    3     shard       shard      shard            2 all-gathers, 1 reduce-scatter a micro-batch

(Rajbhandari et al. 2020, arXiv:1910.02054; "whole" while the step's passes run, shards in between.) A group
is a block, or all that lies outside the blocks. Its message is one flat buffer and travels while the next
group computes. With dp_replicate > 1 shards are also all-reduced over the replicas, once a step.

Context ranks see other tokens with the same parameters, so here they are data ranks. Gradients are summed,
not averaged: each micro-batch's loss is already divided by the label tokens of the global batch.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshtune import compat
from meshtune.parallel.mesh import World


def parameter_mesh(world: World) -> DeviceMesh | None:
    """The ranks that share this rank's parameters, as a mesh (FSDP2 wants one); None when it is alone.

    1-D for replicas alone or shards alone; (replicas, shards) for a hybrid. Every rank of the world must call
    it at the same moment.
    """
    if world.parameter_ranks == 1:
        return None
    layout = world.layout
    replicas, shards = layout.dp_replicate, layout.dp_shard * layout.cp
    if layout.zero == 0:  # context ranks hold copies, as data ranks do
        replicas, shards = replicas * shards, 1
    names = ("pp", "dp_replicate", "dp_shard_cp", "tp")
    mesh = init_device_mesh(world.device.type, (layout.pp, replicas, shards, layout.tp), mesh_dim_names=names)
    if shards == 1:
        return mesh["dp_replicate"]
    return mesh["dp_shard_cp"] if replicas == 1 else mesh["dp_replicate", "dp_shard_cp"]


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    zero: int,
    *,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Make `root` hold its parameters as `zero` says over `mesh`; each of `blocks`, and the rest, is a group.

    In place, parameters on meta or real; they become DTensors over `mesh`. Forward and backward passes
    compute in `compute_dtype` (None: in the parameters' own), gradients are summed in `reduce_dtype` (None:
    as they are computed). Everything that uses a parameter must happen inside root's forward.
    """
    # Inputs are already what the model makes them: casting here would round what it keeps in fp32.
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
    for module in groups(root):  # both are of one module, not of those inside it
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else a pre-multiplied sum, which gloo has not


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, sharing its memory: of a sharded tensor the shard, a plain one as it is."""
    if isinstance(tensor, DTensor):
        return tensor.detach().to_local()  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def groups(root: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters travel together, `root` first; none where nothing is sharded."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def before_backward(root: nn.Module, zero: int, *, last: bool) -> None:
    """Say before each micro-batch's backward whether it is the step's last: only then gradients that stay
    whole are reduced, and parameters that stay whole are let go.
    """
    if isinstance(root, FSDPModule):
        root.set_reshard_after_backward(zero == 3 or last)
        root.set_requires_gradient_sync(zero >= 2 or last)
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)


def add_up(root: nn.Module) -> None:
    """After a backward of weights alone, which FSDP2 does not see: gradients that wait for the step's last
    micro-batch go into their sum, which is in the reduce dtype.
    """
    for module in groups(root):
        for parameter in compat.fsdp_parameters(module):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def let_go(root: nn.Module) -> None:
    """Free parameters that a forward pass without a backward left gathered: a step would outdate them."""
    for module in groups(root):
        module.reshard()
