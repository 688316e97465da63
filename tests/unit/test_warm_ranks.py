"""The tests' own ranks: kept between calls, independent of each other, and named when they fail or hang."""

import os
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from cases import cases
from ranks import run_ranks

LEFT = {"by": "nobody"}


def about_me() -> tuple[int, int, str, int]:
    """The process, the sum of all ranks, what the environment says, and a random number."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    found = os.environ.get("LEFT_BY", "nobody")
    os.environ["LEFT_BY"] = "the call before"
    return os.getpid(), int(total), found, int(torch.randint(1000, ()))


def fail_on_one(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "hangs":
            time.sleep(600)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("by 7")
    dist.barrier()


def left() -> str:
    return LEFT["by"]


def test_ranks_are_kept_and_the_group_is_new_in_each_call() -> None:
    three, two, again = run_ranks(3, about_me), run_ranks(2, about_me), run_ranks(3, about_me)
    assert [rank[0] for rank in three] == [rank[0] for rank in again]
    assert [rank[0] for rank in two] == [rank[0] for rank in three[:2]]
    assert [rank[1] for rank in (*three, *two)] == [3, 3, 3, 1, 1]
    assert {rank[2] for rank in (*three, *two, *again)} == {"nobody"}
    assert three == again


@pytest.mark.parametrize("forked", cases([False, True], ci=[True]))
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("fails", r"(?s)rank 1 of 2 failed.*fail_on_one.*ZeroDivisionError: by 7"),
        ("is killed", "rank 1 of 2 failed\nit ended with -9"),
        ("hangs", "2 of 2 ranks did not end within 1 s"),
    ],
    ids=["fails", "is killed", "hangs"],
)
def test_a_rank_that_fails_is_named_and_the_next_call_has_others(
    how: str, sentence: str, forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "HANGS", tmp_path)  # it hangs on purpose
    before = run_ranks(2, about_me)
    with pytest.raises(AssertionError, match=sentence):
        run_ranks(2, fail_on_one, how, seconds=1 if how == "hangs" else 60, forked=forked, tries=1)
    after = run_ranks(2, about_me)
    assert (before == after) is forked
    assert [rank[1:] for rank in before] == [rank[1:] for rank in after]


def hang_once(file: str) -> int:
    """Let rank 1 hang in the first call of all, so that the others wait in their barrier."""
    if dist.get_rank() == 1:
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL))
            time.sleep(600)
        except FileExistsError:
            pass
    dist.barrier()
    return dist.get_rank()


@pytest.mark.ci
def test_ranks_that_hang_are_replaced_once_and_their_stacks_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "HANGS", tmp_path / "hangs")
    with pytest.warns(UserWarning, match="2 ranks hung and were replaced once"):
        assert run_ranks(2, hang_once, str(tmp_path / "hung"), seconds=3) == [0, 1]
    (file,) = (tmp_path / "hangs").iterdir()
    text = file.read_text()
    assert "test_ranks_that_hang" in text and "hang_once" in text and "barrier" in text


def test_only_forked_ranks_see_what_is_patched_here(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(1, left)
    monkeypatch.setitem(LEFT, "by", "a test")
    assert run_ranks(1, left) == ["nobody"]
    assert run_ranks(1, left, forked=True) == ["a test"]
    assert run_ranks(1, lambda: left(), forked=True) == ["a test"]
    assert len(ranks.warm) >= 1
