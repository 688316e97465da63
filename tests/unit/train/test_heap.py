"""Giving free memory back: how much, and how often."""

import ctypes

import psutil
import pytest
import torch

from meshtune.meter.phases import PhaseMemory
from meshtune.optim.optimizer import Optimizer
from meshtune.train import measure
from meshtune.train.measure import release_free_heap, releasing
from meshtune.units import MIB


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc")
def test_free_pages_of_the_heap_go_back_where_there_are_many():
    def resident() -> int:
        return psutil.Process().memory_info().rss

    pieces = [torch.ones(4096) for _ in range(8192)]  # 16 KiB each: on the heap, 128 MiB of them
    kept = pieces[::64]  # holes between them, that the heap alone would not give back
    full = resident()
    del pieces
    release_free_heap(2**40)
    assert resident() > full - 32 * MIB
    release_free_heap(64 * MIB)
    assert resident() < full - 64 * MIB
    assert len(kept) == 128


@pytest.mark.parametrize("watched", [True, False])
def test_the_heap_is_released_after_every_so_many_backwards_watched_or_not(watched, monkeypatch):
    released = []
    monkeypatch.setattr(measure, "RELEASED_EVERY", 3)
    monkeypatch.setattr(measure, "release_free_heap", lambda: released.append(backwards))
    model = torch.nn.Linear(2, 2)
    optimizer = Optimizer(model.named_parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    memory = PhaseMemory(model, optimizer, torch.device("cpu"))
    memory.steps_left = 2 if watched else 0
    phase, backwards = releasing(memory.phase, torch.device("cpu")), 0
    for step in range(1, 4):
        with memory.watching(step):
            for _ in range(4):
                with phase("forward"):
                    pass
                backwards += 1
                with phase("backward"):
                    pass
            with phase("optimizer"):
                pass
    assert released == [3, 6, 9, 12], "counted over steps, and no other phase"


def test_no_heap_is_released_for_a_gpu():
    def phase(name: str):
        raise NotImplementedError

    assert releasing(phase, torch.device("cuda")) is phase
