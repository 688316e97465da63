"""Process groups: one for each axis with several ranks, and no second one of the same ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import cases
from ranks import run_ranks

from meshtune.layout import AXES, Layout
from meshtune.parallel.mesh import join, parameter_mesh

# layout -> (groups of this rank on the device beside that of all, dimensions of the parameters' mesh)
GROUPS = {
    "dp2": (0, [2]), "zero3x2": (0, [2]), "tp2": (0, None), "dp2-zero3x2": (2, [2, 2]), "zero1x2-tp2": (2,
    [2]), "zero3x2-cp2": (2, [4]), "dp2-cp2": (2, [4]), "dp2-zero2x2-pp2": (3, [2, 2]),
    "dp2-zero3x2-cp2": (4, [2, 4]), "dp2-zero3x2-tp2": (3, [2, 2]),
}  # fmt: skip


def groups(text: str) -> tuple[int, Any, bool]:
    def several() -> list[Any]:
        return [g for g in dist.distributed_c10d._world.pg_map if dist.get_world_size(g) > 1]

    before = len(several())
    layout = Layout.parse(text)
    world = join(layout, torch.device("cpu"))
    mesh = parameter_mesh(world)
    host = 2  # for objects and for checkpoints
    same = mesh is None or all(
        world.rank in dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)
    )
    return len(several()) - before - host, None if mesh is None else list(mesh.shape), same


@pytest.mark.parametrize("text", cases(list(GROUPS), test=["zero3x2", "dp2-zero3x2", "zero3x2-cp2"]))
def test_ranks_have_one_group_for_each_axis(text: str) -> None:
    for number, shape, same in run_ranks(Layout.parse(text).world, groups, text):
        assert (number, shape) == GROUPS[text] and same


def test_joined_axes_hold_the_ranks_that_share_parameters() -> None:
    assert AXES.index("dp_shard") < AXES.index("cp") < AXES.index("tp")
    found = run_ranks(4, joined, "zero3x2-cp2")
    assert found == [[[0, 1, 2, 3]]] * 4
    found = run_ranks(8, joined, "dp2-zero3x2-tp2")
    assert found[3] == [[3, 7], [1, 3]] and found[4] == [[0, 4], [4, 6]]


def joined(text: str) -> list[list[int]]:
    mesh = parameter_mesh(join(Layout.parse(text), torch.device("cpu")))
    assert mesh is not None
    return [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)]
