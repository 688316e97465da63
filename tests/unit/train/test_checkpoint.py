"""Checkpoints: exact, whole or absent, and never the end of a run."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import psutil
import pytest
import torch
import torch.distributed as dist
from golden import refuses, says
from ranks import run_ranks
from torch import Tensor

from meshtune.errors import UserError
from meshtune.model.pieces import Piece
from meshtune.placement.split import piece, pieces
from meshtune.train import checkpoint
from meshtune.train.checkpoint import Checkpoints
from meshtune.train.checkpoint_files import SafeReader, read_metadata

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import checkpoint_tables as checkpoint_tables_benchmark

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def state(value: float = 1.0) -> dict[str, Tensor]:
    return {"model.weight": torch.full((64, 32), float(value)), "optimizer.step": torch.tensor(float(value))}


def empty(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def saved(folder: Path, *steps: int, **options) -> Checkpoints:
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(step, state(step), {"seen": step})
    assert checkpoints.wait() == []
    return checkpoints


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# Exactness #


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path, asynchronous):
    tensors = {str(dtype): (torch.randn(5, 3) * 9).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "transposed": torch.randn(4, 6).t(), "none": torch.empty(0, 4)}
    tensors |= {
        "every other": torch.randn(10)[::2],
        "row": torch.randn(100, 8)[3],
        "rng": torch.get_rng_state(),
    }
    tensors["grown"] = torch.nn.Parameter(torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]))
    checkpoints = Checkpoints(tmp_path, asynchronous=asynchronous)
    checkpoints.save(7, tensors, {})
    read = empty(tensors)
    checkpoints.load(7, read)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        same = (
            tensor.detach().contiguous().flatten().view(torch.uint8),
            read[name].flatten().view(torch.uint8),
        )
        assert torch.equal(*same) if tensor.dim() else torch.equal(read[name], tensor), name


def test_values_come_back_with_their_step(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    values = {"loader": {"epoch": 2, "index": [1, 2]}, "layout": "mb1-ga4", "best": 0.1 + 0.2, "none": None}
    checkpoints.save(3, state(), values)
    assert checkpoints.load(3, empty(state())) == {"step": 3} | values
    assert checkpoints.values(3) == {"step": 3} | values


def test_training_on_after_an_asynchronous_save_does_not_reach_the_checkpoint(tmp_path):
    checkpoints, tensors = Checkpoints(tmp_path), {"weight": torch.ones(2_000_000)}
    for step in (1, 2):  # the second one writes into the buffers of the first
        tensors["weight"].fill_(step)
        checkpoints.save(step, tensors, {})
        tensors["weight"].fill_(-1.0)
    for step in (1, 2):
        read = {"weight": torch.zeros(2_000_000)}
        checkpoints.load(step, read)
        assert read["weight"].unique().tolist() == [step]


def test_memory_is_taken_once_for_all_saves(tmp_path):
    checkpoints, tensors = Checkpoints(tmp_path), state()
    checkpoints.reserve(tensors)
    checkpoints.wait()
    reserved = {name: buffer.data_ptr() for name, buffer in checkpoints._copies.buffers.items()}
    checkpoints.save(1, tensors, {})
    checkpoints.save(2, tensors, {})
    assert {name: buffer.data_ptr() for name, buffer in checkpoints._copies.buffers.items()} == reserved
    assert reserved.keys() == tensors.keys()


@pytest.mark.parametrize("reserved", [True, False])
def test_without_memory_for_copies_the_checkpoint_is_written_at_once_and_that_is_told_once(
    tmp_path, monkeypatch, reserved
):
    def refuse(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory.\nframes")

    told: list[str] = []
    checkpoints, read = Checkpoints(tmp_path, report=told.append), empty(state())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        if reserved:
            checkpoints.reserve(state())
        checkpoints.wait()
        assert len(told) == reserved
        checkpoints.save(1, state(1.0), {})
        assert checkpoints._writing is None
    checkpoints.save(2, state(2.0), {})
    assert checkpoints._copies.buffers == {}
    assert len(told) == 1
    says(told[0])
    for step in (1, 2):
        checkpoints.load(step, read)
        assert torch.equal(read["model.weight"], state(step)["model.weight"])


def test_copies_that_would_take_over_half_of_the_free_memory_are_not_made(tmp_path, monkeypatch):
    told: list[str] = []
    tensors = {"weight": torch.zeros(1024, dtype=torch.uint8)}
    for free, times in ((2048, 0), (2047, 1)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        checkpoints = Checkpoints(tmp_path, report=told.append)
        checkpoints.reserve(tensors)
        checkpoints.save(free, tensors, {})
        assert (checkpoints._writing is None) == bool(times)
        assert checkpoints.wait() == []
        assert len(told) == times
        assert checkpoints.newest_good() == free


def test_tied_tensors_are_written_once_and_fill_both_names(tmp_path):
    embedding = torch.randn(1000, 100)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"embed": embedding, "head": embedding, "tail": embedding[500:]}, {})
    apart = {"head": torch.zeros(1000, 100), "embed": torch.zeros(1000, 100), "tail": torch.zeros(500, 100)}
    checkpoints.load(1, apart)
    assert torch.equal(apart["embed"], embedding)
    assert torch.equal(apart["head"], embedding)
    assert torch.equal(apart["tail"], embedding[500:])
    assert (tmp_path / "step-1" / "__0_0.distcp").stat().st_size < 1.6 * embedding.nbytes


def test_loading_casts_between_floating_point_types_and_writes_in_place(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"weight": torch.tensor([1.00390625, 3.0])}, {})
    target = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    before = target.data_ptr()
    checkpoints.load(1, {"weight": target})
    assert target.tolist() == [1.0, 3.0]  # 1 + 2^-8 rounds to even in bf16
    assert target.data_ptr() == before


def test_a_part_of_a_checkpoint_can_be_loaded(tmp_path):
    read = {"model.weight": torch.zeros(64, 32)}
    saved(tmp_path, 4).load(4, read)
    assert torch.equal(read["model.weight"], torch.full((64, 32), 4.0))


# Whole or absent #


def test_keep_leaves_the_newest(tmp_path):
    assert saved(tmp_path, 1, 2, 3, 4, keep=2).steps() == [3, 4]
    assert names(tmp_path) == {"step-3", "step-4"}


def test_a_protected_step_is_never_pruned(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, state(), {}, protect={2})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4]


def test_what_a_kill_after_a_save_left_is_pruned_by_the_run_that_resumes(tmp_path):
    saved(tmp_path, 1, 2, 3, 4, 9, keep=9)
    (tmp_path / "step-1").rename(tmp_path / ".tmp-gone-step-1")
    Checkpoints(tmp_path, keep=1).prune(4, {2})
    assert names(tmp_path) == {"step-2", "step-4", "step-9"}


def test_steps_are_ordered_as_numbers(tmp_path):
    assert saved(tmp_path, 9, 10, 100, keep=9).steps() == [9, 10, 100]


def test_saving_after_going_back_removes_the_steps_of_the_other_history(tmp_path):
    saved(tmp_path, 10, 20, 30, keep=5)
    assert saved(tmp_path, 15, keep=5).steps() == [10, 15]


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = saved(tmp_path, 5)
    checkpoints.save(5, state(8.0), {"seen": 8})
    read = empty(state())
    assert checkpoints.load(5, read)["seen"] == 8
    assert read["model.weight"].unique().tolist() == [8.0]
    assert names(tmp_path) == {"step-5"}


def test_what_a_killed_run_left_is_no_checkpoint_and_goes_with_the_next_save(tmp_path):
    saved(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / ".tmp-step-2")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_good() == 1
    checkpoints.save(2, state(), {})
    checkpoints.wait()
    assert names(tmp_path) == {"step-1", "step-2"}


@pytest.mark.all
def test_killed_at_any_moment_the_newest_checkpoint_is_whole(tmp_path):
    code = """if True:
        import sys, torch
        from meshtune.train.checkpoint import Checkpoints
        checkpoints, tensors = Checkpoints(sys.argv[1], keep=2), {"weight": torch.zeros(300_000)}
        for step in range(1, 10_000):
            checkpoints.save(step, {"weight": tensors["weight"].fill_(step)}, {})
            print(step, flush=True)
    """
    for delay in (0.0, 0.013, 0.031, 0.057):
        run = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
        assert run.stdout is not None
        for _ in range(6):
            run.stdout.readline()
        time.sleep(delay)
        run.send_signal(signal.SIGKILL)
        run.wait()
        told: list[str] = []
        checkpoints = Checkpoints(tmp_path, report=told.append)
        newest, read = checkpoints.newest_good(), {"weight": torch.zeros(300_000)}
        assert newest == checkpoints.steps()[-1] >= 4
        assert told == []
        checkpoints.load(newest, read)
        assert read["weight"].unique().tolist() == [newest]


# Damage #


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "values.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["changed", "cut short", "removed"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, name, harm):
    saved(tmp_path, 1, 2)
    path, told = tmp_path / "step-2" / name, []
    if harm == "changed" and name != "manifest.json":
        flip_a_byte(path)
    elif harm == "removed":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    checkpoints = Checkpoints(tmp_path, report=told.append)
    assert checkpoints.newest_good() == 1
    assert len(told) == 1
    assert str(path) in told[0]


def test_a_damaged_checkpoint_changes_no_tensor(tmp_path):
    saved(tmp_path, 1)
    flip_a_byte(tmp_path / "step-1" / "__0_0.distcp")
    read = empty(state())
    with refuses(UserError):
        Checkpoints(tmp_path).load(1, read)
    assert not read["model.weight"].any()


def test_no_checkpoint_at_all_is_no_error(tmp_path):
    assert Checkpoints(tmp_path / "nowhere").newest_good() is None


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    with refuses(UserError):
        saved(tmp_path, 2, 4).load(9, state())


def test_all_tensors_that_do_not_fit_are_named_at_once_and_none_is_touched(tmp_path):
    checkpoints = saved(tmp_path, 1)
    read = {
        "model.weight": torch.zeros(64, 33),
        "optimizer.step": torch.zeros((), dtype=torch.int64),
        "model.bias": torch.zeros(3),
    }
    with pytest.raises(UserError) as caught:
        checkpoints.load(1, read)
    told = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    says(told)
    assert not read["model.weight"].any()


# No space left #


def small_disk(folder: Path, size: str) -> Path:
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a small disk needs root")
    return folder


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_told_with_numbers_and_keeps_what_is_there(tmp_path, asynchronous):
    disk = small_disk(tmp_path / "disk", "3m")
    try:
        told: list[str] = []
        checkpoints = Checkpoints(disk, asynchronous=asynchronous, report=told.append)
        checkpoints.save(1, state(), {})
        checkpoints.save(2, {"weight": torch.zeros(1_000_000)}, {})
        checkpoints.wait()
        assert len(told) == 1
        assert "step 2 was not saved: no space left on the disk" in told[0]
        assert "3.82 MiB" in told[0]
        assert "steps: 1)" in told[0]
        assert names(disk) == {"step-1"}
        checkpoints.save(3, state(3.0), {})
        assert checkpoints.newest_good() == 3
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_fails_while_writing_is_told_and_leaves_no_half(tmp_path, asynchronous):
    checkpoints = saved(tmp_path, 1, asynchronous=asynchronous)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_500_000, hard))  # Python ignores SIGXFSZ: writes raise EFBIG
    try:
        problems = checkpoints.save(2, {f"weight {i}": torch.zeros(100_000) for i in range(9)}, {})
        problems += checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(problems) == 1
    assert "step 2 was not saved: file too large" in problems[0]
    assert names(tmp_path) == {"step-1"}
    assert checkpoints.newest_good() == 1


# Several ranks #


def whole() -> Tensor:
    return torch.arange(21.0).reshape(7, 3)  # 7 rows: uneven pieces


def cut(dim: int) -> Piece:
    """This rank's rows or columns of whole()."""
    rank, tensor = dist.get_rank(), whole()
    start, stop = piece(tensor.shape[dim], dist.get_world_size(), rank)
    offsets = (start, 0) if dim == 0 else (0, start)
    return Piece((7, 3), offsets, tensor.narrow(dim, start, stop - start).contiguous())


def fused(sizes: Sequence[int]) -> Piece:
    """This rank's rows of whole() as if matrices of these sizes were fused in it: a block of each."""
    rows = pieces(sizes, dist.get_world_size(), dist.get_rank())
    tensor = torch.cat([whole()[run.start : run.stop] for run in rows])
    return Piece((7, 3), (rows[0].start, 0), tensor, rows)


def sharded_state() -> dict[str, Tensor | Piece]:
    rank = dist.get_rank()
    one = Piece((1,), (min(rank, 1),), torch.ones(1 - min(rank, 1)))  # empty but on one rank, and tied
    tensors: dict[str, Tensor | Piece] = {
        "rows": cut(0),
        "columns": cut(1),
        "all": whole(),
        "fused": fused((4, 2, 1)),
    }
    return tensors | {"one": one, "the same one": one, f"of rank {rank}": torch.full((2,), rank)}


def save_sharded(folder: Path) -> None:
    for asynchronous in (True, False):
        place = folder / ("beside" if asynchronous else "plain")
        group = dist.new_group(backend="gloo")
        checkpoints = Checkpoints(place, asynchronous=asynchronous, process_group=group, keep=1)
        tensors = sharded_state()
        for step in (1, 2):
            checkpoints.save(step, tensors, {"seen": step})
        assert checkpoints.wait() == []
        assert checkpoints.newest_good() == 2
        for name, across in (("rows", cut(1)), ("rows", fused((3, 4))), ("fused", fused((1, 6)))):
            expected = across.tensor.clone()
            across.tensor.zero_()
            assert checkpoints.load(2, {name: across}) == {"step": 2, "seen": 2}, "cut otherwise than written"
            assert torch.equal(across.tensor, expected)


def test_what_ranks_saved_together_one_process_reads_whole(tmp_path):
    run_ranks(2, save_sharded, tmp_path)
    for name in ("beside", "plain"):
        read = {key: torch.zeros(7, 3) for key in ("rows", "columns", "all", "fused")}
        read |= {"one": torch.zeros(1), "the same one": torch.zeros(1)}
        read |= {f"of rank {rank}": torch.full((2,), -1) for rank in (0, 1)}
        checkpoints = Checkpoints(tmp_path / name)
        assert checkpoints.steps() == [2]
        checkpoints.load(2, read)
        assert all(torch.equal(read[key], whole()) for key in ("rows", "columns", "all", "fused"))
        assert [read["one"].item(), read["the same one"].item()] == [1.0, 1.0]
        assert [read[f"of rank {rank}"].tolist() for rank in (0, 1)] == [[0, 0], [1, 1]]


def fail_one_rank(folder: Path) -> None:
    group = dist.new_group(backend="gloo")
    checkpoints = Checkpoints(folder, process_group=group)
    checkpoints.save(1, sharded_state(), {})
    assert checkpoints.wait() == []
    tensors, limits = sharded_state(), resource.getrlimit(resource.RLIMIT_FSIZE)
    group.barrier().wait()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    checkpoints.save(2, tensors, {})
    problems = checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "file too large" in problems[0]
    assert checkpoints.newest_good() == 1


def test_when_one_rank_cannot_write_all_ranks_know_and_nothing_is_left(tmp_path):
    run_ranks(2, fail_one_rank, tmp_path)
    assert names(tmp_path) == {"step-1"}


def fail_one_reader(folder: Path) -> None:
    checkpoints = Checkpoints(folder, process_group=dist.new_group(backend="gloo"))
    checkpoints.save(1, sharded_state(), {})
    assert checkpoints.wait() == []
    broken = patch.object(SafeReader, "read_data", side_effect=OSError("the disk is gone"))
    with (
        broken if dist.get_rank() == 1 else nullcontext(),
        pytest.raises(UserError, match="the disk is gone"),
    ):
        checkpoints.load(1, sharded_state())


def test_when_one_rank_cannot_read_all_ranks_know(tmp_path):
    run_ranks(2, fail_one_reader, tmp_path)


def test_the_manifest_lists_every_file_with_its_size(tmp_path):
    saved(tmp_path, 1)
    manifest = json.loads((tmp_path / "step-1" / "manifest.json").read_text())
    sizes = {name: facts["size"] for name, facts in manifest["files"].items()}
    on_disk = {path.name: path.stat().st_size for path in (tmp_path / "step-1").iterdir()}
    assert sizes | {"manifest.json": on_disk["manifest.json"]} == on_disk


def test_the_tables_of_512_ranks_are_made_once(tmp_path: Path) -> None:
    """`benchmarks/checkpoint_tables.py` measures what they take."""
    checkpoints = checkpoint_tables_benchmark.FirstOfMany(tmp_path, 512)
    pieces = checkpoint_tables_benchmark.pieces(8)
    with (
        patch.object(checkpoint, "dealt", Mock(wraps=checkpoint.dealt)) as dealing,
        patch.object(checkpoint, "metadata", Mock(wraps=checkpoint.metadata)) as making,
    ):
        for step in (1, 2):
            assert checkpoints.save(step, pieces, {}) == []
        assert dealing.call_count == making.call_count == 1
        first, second = ((tmp_path / f"step-{step}" / ".metadata").read_bytes() for step in (1, 2))
        assert first == second
        del pieces["tensor.7"]
        checkpoints.save(3, pieces, {})
        assert dealing.call_count == making.call_count == 2
    names = [name for name in os.listdir(tmp_path / "step-3") if name.endswith(".distcp")]
    read = read_metadata((tmp_path / "step-3" / ".metadata").read_bytes(), names, "")
    assert len(read.state_dict_metadata) == 7 and len(read.state_dict_metadata["tensor.0"].chunks) == 512


def test_a_save_whose_table_was_not_written_leaves_no_old_table_to_the_next(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    with patch.object(checkpoint, "metadata", side_effect=OSError(28, "No space left on device")):
        (problem,) = checkpoints.save(1, state(1), {})
    assert "step 1 was not saved: no space left" in problem
    assert checkpoints.save(2, state(2), {}) == []
    read = empty(state())
    Checkpoints(tmp_path).load(2, read)
    assert all(torch.equal(tensor, state(2)[name]) for name, tensor in read.items())
