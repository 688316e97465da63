"""This rank's coordinates among all ranks: one axis per kind of parallelism.

    pp  dp_replicate  dp_shard  cp  tp        outer to inner: neighbours in the world are neighbours in tp

Ranks that differ only in one index form that axis' group. Ranks of one data rank (all of `cp`, `tp`, `pp`)
read the same sequences; `cp` cuts them, `tp` and `pp` cut the model. For parameters a context rank is one
more data rank: it sees other tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshtune.compat import all_gather_single
from meshtune.errors import UserError
from meshtune.layout import AXES, Layout
from meshtune.units import counted


@dataclass(frozen=True)
class Axis:
    """One axis as this rank sees it."""

    name: str
    size: int = 1  # ranks along it
    index: int = 0  # this rank's, from 0
    group: dist.ProcessGroup | None = None  # None where the axis has one rank: nothing is communicated


@dataclass(frozen=True)
class World:
    """All axes of a layout as this rank sees them, and collectives over all ranks."""

    layout: Layout
    device: torch.device
    rank: int  # among all ranks; 0 is the main one
    axes: tuple[Axis, ...]  # in the order of AXES
    mesh: DeviceMesh | None = None  # of the axes with several ranks; None for one rank
    host_group: Any = None  # group of all ranks on a CPU backend, for objects; None for one rank
    checkpoint_group: Any = None  # another such group, for checkpoints; None for one rank
    ep: Axis = Axis("ep")  # ranks that have all experts of a block together, taken out of the other axes

    def axis(self, name: str) -> Axis:
        return self.ep if name == self.ep.name else self.axes[AXES.index(name)]

    @property
    def pp(self) -> Axis:
        return self.axis("pp")

    @property
    def cp(self) -> Axis:
        return self.axis("cp")

    @property
    def tp(self) -> Axis:
        return self.axis("tp")

    @property
    def size(self) -> int:
        return self.layout.world

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different sequences."""
        return self.layout.data_ranks

    @property
    def data_rank(self) -> int:
        return self.axis("dp_replicate").index * self.layout.dp_shard + self.axis("dp_shard").index

    @property
    def parameter_ranks(self) -> int:
        """Number of ranks that share the same parameters and see other tokens: data and context ranks."""
        return self.layout.parameter_ranks

    def sum_over_ranks(self, *numbers: float | torch.Tensor) -> list[float]:
        """Sum of each number (or scalar tensor) over all ranks, in fp64, on every rank, in the order of the
        arguments; one all-reduce for all of them.
        """
        wide = [torch.as_tensor(number, dtype=torch.float64, device=self.device) for number in numbers]
        values = torch.stack(wide)
        if self.mesh is not None:
            dist.all_reduce(values)
        return values.tolist()

    def gather_numbers(self, *numbers: float) -> list[list[float]]:
        """Each rank's numbers, in fp64, in the order of the ranks, on every rank; one all-gather for all.

        It is of the hosts: no rank waits until its device has done what it was told to do.
        """
        if self.host_group is None:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64)
        every = own.new_empty(self.size * len(own))
        all_gather_single(every, own, self.host_group)
        return every.view(self.size, -1).tolist()

    def synchronize(self) -> None:
        """Wait until this rank's device has done all it was told to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def broadcast_object(self, value: Any = None) -> Any:
        """The main rank's `value`, any object that pickles, on every rank."""
        if self.host_group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host_group)
        return values[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Each rank's `value`, in the order of the ranks, on every rank."""
        if self.host_group is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def gather_object(self, value: Any) -> list[Any]:
        """Each rank's `value`, in the order of the ranks, on the main rank; elsewhere an empty list."""
        if self.host_group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.main else None
        dist.gather_object(value, values, dst=0, group=self.host_group)
        return values or []

    @property
    def main(self) -> bool:
        """True on the rank that writes rows, prints and claims the run folder."""
        return self.rank == 0


def join(layout: Layout, device: torch.device, *, host_backend: str = "gloo") -> World:
    """Make the world of `layout`, a collective call: every rank makes it, after torch.distributed's default
    process group is initialised (not needed for one rank).

    device: of this rank. host_backend: of `host_group` and `checkpoint_group`. Raises UserError when the
    number of ranks is not the layout's.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != layout.world:
        were = "was" if ranks == 1 else "were"
        raise UserError(
            f"Layout {layout} is for {counted(layout.world, 'rank')}, but {ranks} {were} started; "
            f"start {layout.world} (--nproc {layout.world}), or change the layout."
        )
    if ranks == 1:
        return World(layout, device, 0, tuple(Axis(name) for name in AXES))
    sizes = {name: size for name in AXES if (size := getattr(layout, name)) > 1}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    axes = tuple(
        Axis(name, sizes[name], mesh.get_local_rank(name), mesh.get_group(name))
        if name in sizes
        else Axis(name)
        for name in AXES
    )
    # Checkpoints are written while training continues: in a group of their own, or collectives would mix.
    host_group, checkpoint_group = (
        dist.new_group(backend=host_backend, timeout=timedelta(minutes=30)) for _ in range(2)
    )
    rank, ep = dist.get_rank(), Axis("ep")
    if layout.ep > 1:
        rows = dict.fromkeys(layout.expert_groups(other)[0] for other in range(ranks))
        group: Any = dist.new_subgroups_by_enumeration([*rows], group_desc="ep")[0]
        ep = Axis("ep", layout.ep, rank % layout.ep, group)
    return World(layout, device, rank, axes, mesh, host_group, checkpoint_group, ep)


def parameter_mesh(world: World) -> DeviceMesh | None:
    """Mesh of the ranks that share this rank's parameters, for ZeRO and replicas; None without others.

    1-D for only replicas or only shards; (replicas, shards) for a hybrid. Its groups are those of the axes;
    one is made where context ranks, which see other tokens, join data ranks in an axis. A collective call:
    every rank of the world makes it.
    """
    if world.parameter_ranks == 1:
        return None
    layout, device_type = world.layout, world.device.type
    if layout.zero == 0:  # context ranks hold copies, as data ranks do
        _, group = _joined(world, ("dp_replicate", "cp"))
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("replicas",))
    ranks, group = _joined(world, ("dp_shard", "cp"))
    replicas = world.axis("dp_replicate")
    if replicas.group is None:
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shards",))
    step = layout.dp_shard * layout.cp * layout.tp  # from one replica to the next
    first = ranks - replicas.index * step
    both = torch.stack([first + number * step for number in range(replicas.size)])
    names = ("replicas", "shards")
    return DeviceMesh.from_group([replicas.group, group], device_type, both, mesh_dim_names=names)


def _joined(world: World, names: Sequence[str]) -> tuple[torch.Tensor, dist.ProcessGroup]:
    """(Ranks, process group) of those that differ from this one only in the axes `names`.

    A single axis has its group, and so have all ranks; others get a new one. A collective call.
    """
    several = [name for name in names if world.axis(name).size > 1]
    others = [name for name in AXES if name not in several]
    ranks = torch.arange(world.size).reshape([world.axis(name).size for name in AXES])
    rows = ranks.permute([AXES.index(name) for name in (*others, *several)])
    rows = rows.reshape(-1, math.prod(world.axis(name).size for name in several))
    own = rows[(rows == world.rank).any(1)].squeeze(0)
    group: Any = world.axis(several[0]).group
    if len(rows) == 1 or len(several) > 1:
        group = _group_of(rows.tolist())
    return own, group


def expert_mesh(world: World) -> DeviceMesh | None:
    """Mesh of the ranks that hold this rank's experts, as `parameter_mesh`; None without expert parallelism,
    and, without ZeRO, where no other rank holds them. A collective call.
    """
    layout, device_type = world.layout, world.device.type
    if layout.ep == 1:
        return None
    alike = dict.fromkeys(layout.expert_groups(rank)[1] for rank in range(world.size))
    both = [torch.tensor(ranks).view(-1, layout.expert_shards) for ranks in alike]  # [replicas, shards]
    own = next(ranks for ranks in both if (ranks == world.rank).any())
    groups = {}
    if len(own) > 1:
        groups["replicas"] = _group_of(torch.cat([ranks.T for ranks in both]).tolist())
    if layout.zero:
        groups["shards"] = _group_of(torch.cat(both).tolist())
    if not groups:
        return None
    if len(groups) == 1:
        (group,) = groups.values()
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=tuple(groups))
    return DeviceMesh.from_group([*groups.values()], device_type, own, mesh_dim_names=tuple(groups))


def _group_of(rows: Sequence[Sequence[int]]) -> Any:
    """Make a process group of each row, and return that of this rank. A collective call."""
    if len(rows) == 1:
        return dist.group.WORLD
    return dist.new_subgroups_by_enumeration(rows)[0]
