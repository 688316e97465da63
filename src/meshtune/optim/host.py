"""Keep the optimizer's states, and masters, in host memory: `train.offload: optimizer`.

    to the device    states of bucket 1 │ bucket 2 │ bucket 3 │ …
    update                              │ bucket 1 │ bucket 2 │ …
    to the host                                    │ bucket 1 │ …

Copies run on two streams of their own, one a direction. Streams wait for each other by events: memory on the
device is allocated and freed on the stream that updates, which first waits for the copy that used it, so that
two buckets are on the device at a time. On a CPU the same code copies at once.

The host's memory is page-locked in place: torch's allocator of pinned memory takes powers of two.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshtune.errors import UserError
from meshtune.optim.updates import zeros
from meshtune.optimizers import OPTIMIZERS
from meshtune.parallel.offload import host_buffer, to_device, to_host
from meshtune.units import human

PAGE = 4096  # bytes


class Held(NamedTuple):
    """One tensor in host memory, and the place where an update looks for it."""

    owner: dict[str, Tensor] | Tensor  # the states of a parameter, or its master
    key: str  # of the state; "" for a master
    host: Tensor

    @property
    def now(self) -> Tensor:
        """The tensor that an update finds."""
        return self.owner[self.key] if isinstance(self.owner, dict) else self.owner.detach()

    def put(self, tensor: Tensor) -> None:
        """Let an update find this tensor."""
        if isinstance(self.owner, dict):
            self.owner[self.key] = tensor
        else:
            self.owner.data = tensor


class HostStates:
    """Host memory of an optimizer's buckets, by the number of the bucket. device: where updates are made."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.device, self.bytes = device, 0
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if cuda else []  # to the device, back
        self.held: dict[int, list[Held]] = {}
        self._coming: dict[int, tuple[list[Tensor], Any]] = {}  # on the device, and the end of their copy
        self._leaving: tuple[list[Tensor], Any] = [], None  # the same of the last ones that go back
        self._written: dict[int, Any] = {}  # end of the last copy to the host
        self._memories: set[int] = set()
        self._locked: list[Tensor] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def hold(self, number: int, row: str, trained: Sequence[Tensor], states: Any, *, masters: bool) -> None:
        """Make the states of a bucket, and keep them and with `masters` the trained tensors in host memory.

        row: of OPTIMIZERS. states: of the update, by trained tensor.
        """
        rows = {state.name: state for state in OPTIMIZERS[row].states}
        made: list[tuple[Any, str, Tensor]] = []
        for tensor in trained:
            for key, state in zeros(row, tensor).items():
                if rows[key].on_host or rows[key].kind == "scalar":  # too small to be worth a copy
                    states[tensor][key] = state if rows[key].on_host else state.to(self.device)
                else:
                    made.append((states[tensor], key, state))
            if masters:
                made.append((tensor, "", tensor.detach()))
        places = [0]
        for *_, tensor in made:
            places.append(places[-1] + -(-tensor.nbytes // 64) * 64)
        buffer = self._memory(places[-1], trained[0])
        self.held[number] = []
        self._memories.add(buffer.untyped_storage()._cdata)
        for (owner, key, tensor), start in zip(made, places, strict=False):
            host = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            host.copy_(tensor)
            self.held[number].append(Held(owner, key, host))
            self.held[number][-1].put(host)

    def has(self, tensor: Tensor) -> bool:
        """True if a tensor lies in the host memory of these states."""
        return tensor.untyped_storage()._cdata in self._memories

    def _memory(self, size: int, like: Tensor) -> Tensor:
        """`size` bytes of host memory, page-locked for a GPU."""
        self.bytes += size
        if self.device.type != "cuda":
            return host_buffer(like, size)
        memory = torch.empty(size + 2 * PAGE, dtype=torch.uint8)
        start, pages = -memory.data_ptr() % PAGE, -(-size // PAGE) * PAGE
        if size and int(_runtime().cudaHostRegister(memory.data_ptr() + start, pages, 0)):
            raise UserError(
                f"train.offload=optimizer: {human(size)} of host memory can't be locked for a GPU's copies, "
                f"after {human(self.bytes - size)} on this rank; raise the limit (ulimit -l), use more data "
                "ranks with zero, or leave train.offload out."
            )
        self._locked.append(memory[start : start + size])
        return self._locked[-1]

    def bring(self, number: int) -> None:
        """Begin to copy a bucket to the device, unless that is done; what left before it is freed."""
        if number in self._coming:
            return
        self.settle()
        tensors = [torch.empty_like(held.host, device=self.device) for held in self.held[number]]
        with self._aside(0, self._written.get(number)) as ended:
            for held, tensor in zip(self.held[number], tensors, strict=True):
                to_device(held.host, tensor)
        self._coming[number] = tensors, ended()

    def use(self, number: int) -> None:
        """Let the update of a bucket find its tensors on the device."""
        self.bring(number)
        tensors, copied = self._coming.pop(number)
        _wait(copied)
        for held, tensor in zip(self.held[number], tensors, strict=True):
            held.put(tensor)

    def give_back(self, number: int) -> None:
        """Begin to copy a bucket to the host, behind its update."""
        every = [held.now for held in self.held[number]]
        with self._aside(1) as ended:
            for held, tensor in zip(self.held[number], every, strict=True):
                to_host(tensor, held.host)
        for held in self.held[number]:
            held.put(held.host)
        self.settle()
        self._written[number] = ended()
        self._leaving = every, self._written[number]

    def settle(self) -> None:
        """Free what has left the device: what is computed next waits for its copy."""
        _wait(self._leaving[1])
        self._leaving = [], None

    def synchronize(self) -> None:
        """Wait until the host's memory has what was written to it."""
        if self.streams:
            self.streams[1].synchronize()

    @contextmanager
    def _aside(self, direction: int, after: Any = None) -> Iterator[Any]:
        """Copy on a stream of copies, behind all that the device computes so far and behind `after`. Gives a
        function that returns the event of its end.
        """
        if not self.streams:
            yield lambda: None
            return
        stream = self.streams[direction]
        stream.wait_stream(torch.cuda.current_stream())
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield stream.record_event


def _wait(event: Any) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def _unlock(locked: Sequence[Tensor]) -> None:
    for memory in locked:
        _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    """Functions of CUDA's runtime."""
    return torch.cuda.cudart()
