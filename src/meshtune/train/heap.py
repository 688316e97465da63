"""Giving free memory of glibc's heap back, on CPU.

Documents differ in length from one micro-batch to the next, so their activations fit badly into each other's
holes, and the heap grows to 1.5 times what is needed. Giving free pages back costs page faults when they are
taken again, a fifth of a step if it is done after every backward pass: so only every 16th, and only where
256 MiB are free.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count

import torch

from meshtune.meter.phases import Phase
from meshtune.units import MIB

RELEASED_BYTES, RELEASED_EVERY = 256 * MIB, 16  # free bytes at least; backward passes between two releases


def releasing(phase: Phase, device: torch.device) -> Phase:
    """Wrap `phase` so that the heap's free memory is released after every 16th phase whose name ends with
    "backward", when activations are freed.

    On CUDA, whose tensors are not on the heap, `phase` itself.
    """
    if device.type == "cuda":
        return phase
    backward_passes = count(1)

    @contextmanager
    def released(name: str) -> Iterator[None]:
        with phase(name):
            yield
        if name.endswith("backward") and next(backward_passes) % RELEASED_EVERY == 0:
            release_free_heap()

    return released


def release_free_heap(at_least: int = RELEASED_BYTES) -> None:
    """Give the heap's free pages back to the operating system, if `at_least` so many bytes are free.

    Nothing where the C library is no glibc of 2.33 or newer.
    """
    library = _glibc()
    if library is not None and library.mallinfo2().fordblks >= at_least:
        library.malloc_trim(0)


class HeapInfo(ctypes.Structure):
    """glibc's struct mallinfo2; `fordblks` is the heap's free bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is a glibc that reports how much of its heap is free (2.33 or newer)."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    try:
        library.mallinfo2.restype = HeapInfo
    except AttributeError:
        return None
    return library
