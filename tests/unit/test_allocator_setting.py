"""Expandable segments of torch's CUDA allocator: set for training on GPUs unless the user has set it."""

import os
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from meshtune import launch
from meshtune.api import train
from meshtune.launch import Rank, start
from meshtune.launch.allocator import EXPANDABLE, NAME, NAMES, conflicts, expand_segments, expands

OLD = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is unset again at the end, whoever sets it
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "expandable", "said"),
    [
        ({}, True, []),
        ({NAME: EXPANDABLE}, True, []),
        ({NAME: "expandable_segments:True,max_split_size_mb:64"}, True, []),
        ({OLD: "expandable_segments:True"}, True, []),
        ({NAME: EXPANDABLE, OLD: EXPANDABLE}, True, []),
        ({NAME: "max_split_size_mb:64"}, False, [f"{NAME}=max_split_size_mb:64 is without"]),
        ({OLD: "expandable_segments:False"}, False, [f"{OLD}=expandable_segments:False is without"]),
        ({NAME: ""}, False, [f"{NAME}= is without"]),
        (
            {NAME: EXPANDABLE, OLD: "expandable_segments: False"}, False,
            [f"torch reads only {OLD}; unset {NAME}.", f"{OLD}=expandable_segments: False is without"],
        ),
        ({NAME: "a:1", OLD: EXPANDABLE}, True, [f"torch reads only {OLD}; unset {NAME}."]),
    ],
)  # fmt: skip
def test_what_the_user_has_set_stays(given: dict[str, str], expandable: bool, said: list[str]) -> None:
    environ = dict(given)
    expand_segments(environ)
    assert environ == (given or {NAME: EXPANDABLE})
    assert expands(given) is expands(environ) is expandable
    sentences = conflicts(environ)
    assert len(sentences) == len(said)
    assert all(part in sentence for part, sentence in zip(said, sentences, strict=True))


def allocator_of(*_: Any) -> dict[str, str]:
    """Settings of the allocator in the environment of this process."""
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@contextmanager
def no_group(place: Any, *_: Any, **__: Any) -> Any:
    yield Rank(place.rank)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Function: `train` without training; (what `choose` sees, what the main rank sees)."""

    def trained(device: str, ranks: int) -> tuple[dict[str, str], dict[str, str]]:
        from meshtune.api import choose

        seen: list[dict[str, str]] = []
        # Forked, so that the stand-ins are the ranks' too; a spawned rank has the same environment.
        monkeypatch.setattr(start, "spawns", lambda device: False)
        monkeypatch.setattr(start, "process_group", no_group)
        for name in ("check_name", "check_there", "check_spawned"):
            monkeypatch.setattr(train, name, lambda *_: None)
        monkeypatch.setattr(train, "settled", lambda config: (config, False))
        monkeypatch.setattr(train, "ranks_of", lambda *_: (ranks, device))
        monkeypatch.setattr(train, "train_rank", allocator_of)
        monkeypatch.setattr(choose, "choose", lambda *_: seen.append(allocator_of()))
        model = SimpleNamespace(name="m", revision=None)
        result: Any = train.train_here(SimpleNamespace(model=model, data=None), None, lambda _: None)  # type: ignore[arg-type]
        return (seen or [{}])[0], result

    return trained


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_are_started_here_have_expandable_segments(trained: Any, ranks: int) -> None:
    assert trained("cuda", ranks) == ({NAME: EXPANDABLE}, {NAME: EXPANDABLE})


def test_ranks_of_torchrun_have_expandable_segments(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    assert launch.joined()
    assert trained("cuda", 2)[1] == {NAME: EXPANDABLE}


def test_ranks_have_what_the_user_has_set(
    trained: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(OLD, "max_split_size_mb:64")
    assert trained("cuda", 2) == ({OLD: "max_split_size_mb:64"},) * 2
    assert f"{OLD}=max_split_size_mb:64 is without expandable segments" in capsys.readouterr().err


def test_nothing_is_set_for_processors(trained: Any) -> None:
    assert trained("cpu", 1) == ({}, {})
