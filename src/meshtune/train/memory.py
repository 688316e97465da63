"""What the memory of a step is made of, and what to do when there is not enough.

The first two steps are watched: for forward, backward and the optimizer step, the peak and its composition at
that moment. The first step, before optimizer state exists, looks smaller than all later ones; hence two.

    CPU   every storage is counted as it comes and goes, by a dispatch mode that sees each operation: exact
          to the byte, workspaces inside a kernel aside.
    CUDA  the allocator's own peak; weights, gradients and optimizer state are known, activations the rest.
"""

import ctypes
import resource
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshtune.errors import NothingFits
from meshtune.train.optim import Optimizer
from meshtune.units import MIB, human

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "weights", "gradients", "optimizer", "activations"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS)
WATCHED_STEPS = 2
RELEASED_BYTES, RELEASED_EVERY = 256 * MIB, 16  # if so much is free, after so many backward passes


@dataclass(frozen=True)
class Peak:
    """The most bytes that a phase held at once, and of what; `activations` are all that is nothing else."""

    phase: str
    bytes: int
    parts: Mapping[str, int]


class PhaseMemory:
    """Watches the first steps of a run: `with memory.watching(step): … with memory.phase("forward"): …`.

    Compiled blocks are not watched on CPU: under a dispatch mode they would run uncompiled, and show another
    memory.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        *,
        advice: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.advice = advice  # what to do when there is not enough
        self.left = WATCHED_STEPS
        if device.type != "cuda" and any(m._compiled_call_impl is not None for m in model.modules()):
            self.left = 0
        self.peaks: dict[str, Peak] = {}  # of the step at hand, by phase
        self.step = 0
        self.now = "loading"  # the phase at hand, or the last one
        self._ledger: Ledger | None = None
        self._backwards = 0
        self._cuda_peak = 0  # of the phases whose statistics were reset

    def known(self) -> dict[str, list[Tensor]]:
        """The tensors that have a category; masters are optimizer state, as in the ZeRO paper."""
        return {
            OPTIMIZER: list(self.optimizer.state().values()),
            GRADIENTS: [
                *self.optimizer.gradients(),
                *(p.grad for p in self.model.parameters() if p.grad is not None),
            ],
            WEIGHTS: [*self.model.parameters(), *self.model.buffers()],
        }

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around one step: after `WATCHED_STEPS` of them it does nothing."""
        if not self.left:
            self.step = 0
            yield
            return
        self.left -= 1
        self.step, self.peaks = step, {}
        with ExitStack() as stack:
            if self.device.type != "cuda":
                self._ledger = stack.enter_context(Ledger(self.device))
                stack.callback(setattr, self, "_ledger", None)
                for parameter in self.model.parameters():
                    if parameter.requires_grad:
                        hook = parameter.register_hook(self._incoming)
                        stack.callback(hook.remove)
                self._tag()
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around one part of a step; the same name again (the next micro-batch) keeps the higher peak."""
        self.now = name
        if self.device.type != "cuda":
            yield from self._host_phase(name)
        elif self.step:
            yield from self._cuda_phase(name)
        else:
            yield

    def _host_phase(self, name: str) -> Iterator[None]:
        if self._ledger is None:
            yield
        else:
            self._ledger.restart()
            yield
            self._tag()
            self._keep(Peak(name, self._ledger.peak, dict(self._ledger.parts)))
        if name.endswith("backward"):  # the activations are gone: the cheapest moment
            self._backwards += 1
            if self._backwards % RELEASED_EVERY == 0:
                release_free_heap()

    def _cuda_phase(self, name: str) -> Iterator[None]:
        self._cuda_peak = max(self._cuda_peak, torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        total = torch.cuda.max_memory_allocated(self.device)
        parts = {category: storage_bytes(tensors) for category, tensors in self.known().items()}
        self._keep(Peak(name, total, {**parts, ACTIVATIONS: max(0, total - sum(parts.values()))}))

    def _incoming(self, gradient: Tensor) -> None:
        """A parameter's gradient, before it is accumulated."""
        if self._ledger is not None:
            self._ledger.tag([gradient], GRADIENTS)

    def _tag(self) -> None:
        assert self._ledger is not None
        for (
            category,
            tensors,
        ) in self.known().items():  # weights last: without masters they are in the state too
            self._ledger.tag(tensors, category)

    def _keep(self, peak: Peak) -> None:
        if peak.phase not in self.peaks or peak.bytes > self.peaks[peak.phase].bytes:
            self.peaks[peak.phase] = peak

    def peak_bytes(self) -> int:
        """The most memory so far: CUDA's allocator's, or the whole process's largest resident size on CPU."""
        if self.device.type == "cuda":
            return max(self._cuda_peak, torch.cuda.max_memory_allocated(self.device))
        return peak_resident_bytes()

    def line(self, step: int) -> str | None:
        """What the step peaked at, if it was watched."""
        return summary_line(step, self.peaks.values()) if step == self.step and self.peaks else None

    def explain(self, message: str) -> NothingFits:
        """What to raise when memory ran out: what was held by then, and what needs less."""
        if self.device.type == "cuda":
            capacity = torch.cuda.get_device_properties(self.device).total_memory
        else:
            capacity = psutil.virtual_memory().total
        parts = {category: storage_bytes(tensors) for category, tensors in self.known().items()}
        held = ", ".join(f"{name} {human(size)}" for name, size in parts.items() if size)
        problems = [
            f"Out of memory in {self.now} on {self.device} ({human(capacity)}): {message.splitlines()[0]}",
            f"Held by then: {held}; the rest were activations.",
        ]
        return NothingFits([*problems, *self.advice()])


def summary_line(step: int, peaks: Any) -> str:
    """`step 1 memory: forward 412 MiB (weights 107, activations 305) · backward …`, without empty parts."""

    def one(peak: Peak) -> str:
        rest = "temporary" if peak.phase == OPTIMIZER else ACTIVATIONS
        parts = [
            f"{rest if name == ACTIVATIONS else name} {peak.parts[name] / unit:,.{digits}f}"
            for name in CATEGORIES
            if peak.parts.get(name, 0) >= 0.5 * unit / 10**digits
        ]
        return f"{peak.phase} {peak.bytes / unit:,.{digits}f} {label} ({', '.join(parts)})"

    peaks = list(peaks)
    large = max(peak.bytes for peak in peaks) >= 10 * MIB
    unit, label, digits = (MIB, "MiB", 0) if large else (MIB, "MiB", 2)
    return f"step {step} memory: " + " · ".join(one(peak) for peak in peaks)


def peak_resident_bytes() -> int:
    """The largest resident size that this process ever had."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size  # Linux counts in KiB


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
    """The C library, where it is a glibc that can say how much of its heap is free (2.33 or newer)."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    try:
        library.mallinfo2.restype = HeapInfo
    except AttributeError:
        return None
    return library


def release_free_heap(at_least: int = RELEASED_BYTES) -> None:
    """Give the heap's free pages back to the operating system, if there are so many bytes of them.

    Documents differ in length from one micro-batch to the next, so their activations fit badly into each
    other's holes, and glibc's heap grows to 1.5 times what is needed. Below `at_least`, or after every pass,
    it is not worth the page faults of taking the pages again: those cost a fifth of a step.
    """
    library = _glibc()
    if library is not None and library.mallinfo2().fordblks >= at_least:
        library.malloc_trim(0)


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    storages = {storage.data_ptr(): storage.nbytes() for t in tensors for storage in storages_of(t)}
    return sum(storages.values())


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """What holds a tensor's bytes: none on meta, a sharded one's own piece, all parts of a wrapper."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        return list(chain.from_iterable(storages_of(getattr(tensor, name)) for name in names))
    return [tensor.untyped_storage()]


# Counting storages on CPU #


@dataclass
class Entry:
    """A living storage."""

    bytes: int
    category: str
    born: int  # at which event
    ref: Any = None  # whose callback removes it


class Ledger(TorchDispatchMode):
    """Counts the bytes of all living storages by category, and keeps the composition of the highest moment.

    A tensor often gets its category after it was made (a gradient when it reaches its parameter, optimizer
    state after the step). It then moves in the composition of the peak too, if it was alive at that moment.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.entries: dict[int, Entry] = {}
        self.live: Counter[str] = Counter()
        self.total = self.clock = 0
        self.restart()

    def restart(self) -> None:
        """Begin a phase: what is alive now is its peak so far."""
        self.peak, self.parts, self.peak_clock = self.total, Counter(self.live), self.clock

    def tag(self, tensors: list[Tensor], category: str) -> None:
        for tensor in tensors:
            for storage in storages_of(tensor):
                entry = self._see(storage, category)
                if entry.category != category:
                    self.live[entry.category] -= entry.bytes
                    self.live[category] += entry.bytes
                    if entry.born <= self.peak_clock:
                        self.parts[entry.category] -= entry.bytes
                        self.parts[category] += entry.bytes
                    entry.category = category

    def _see(self, storage: torch.UntypedStorage, category: str) -> Entry:
        """The storage's entry, made or grown as needed."""
        entry = self.entries.get(key := storage._cdata)
        if entry is None:
            self.clock += 1
            entry = self.entries[key] = Entry(0, category, self.clock)
            entry.ref = weakref.ref(storage, self._goodbye(key))
        if storage.nbytes() != entry.bytes:
            self._grow(entry, storage.nbytes() - entry.bytes)
        return entry

    def _goodbye(self, key: int) -> Callable[[object], None]:
        def remove(_: object) -> None:
            entry = self.entries.pop(key)
            self._grow(entry, -entry.bytes)

        return remove

    def _grow(self, entry: Entry, change: int) -> None:
        entry.bytes += change
        self.total += change
        self.live[entry.category] += change
        if self.total > self.peak:
            self.restart()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on the local tensors
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == self.device.type:
                for storage in storages_of(leaf):
                    self._see(storage, ACTIVATIONS)
        return out

    def __enter__(self) -> "Ledger":
        self._resize = torch.UntypedStorage.resize_  # not an operation, so that no dispatch mode sees it

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = self._resize(storage, size)
            if storage._cdata in self.entries:
                self._see(storage, ACTIVATIONS)
            return out

        torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*details)
