"""A spawned rank on a CUDA device: NCCL for what is on the GPU, gloo for what is on the CPU."""

import pytest

torch = pytest.importorskip("torch")

from meshtune import launch  # noqa: E402
from meshtune.errors import RankFailed  # noqa: E402
from meshtune.launch.watch import HangLimits  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def add_up(rank: launch.Rank) -> None:
    import torch.distributed as dist

    for device in ("cuda", "cpu"):
        total = torch.ones(3, device=device)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0, 1.0]
    assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
    raise ValueError(f"rank {rank.number} is on cuda:{torch.cuda.current_device()}")


def test_a_rank_is_spawned_and_talks_by_nccl_and_gloo() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 0 of 1 failed.*ValueError: rank 0 is on cuda:0"):
        launch.run_here(1, add_up, (), "cuda", HangLimits())
