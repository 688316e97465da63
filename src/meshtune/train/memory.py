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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
from meshtune.model.census import Block, Census
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
        workload: "Workload | None" = None,
        census: Census | None = None,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.workload, self.census = workload, census
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
        """What to raise when memory ran out: which part is largest, and the cheapest changes that fit."""
        if self.device.type == "cuda":
            capacity = torch.cuda.get_device_properties(self.device).total_memory
        else:
            capacity = psutil.virtual_memory().total
        parts = {category: storage_bytes(tensors) for category, tensors in self.known().items()}
        where = f"Out of memory in {self.now} on {self.device} ({human(capacity)})"
        first = f"{where}: {message.splitlines()[0]}"
        return NothingFits([first, *explain_out_of_memory(capacity, parts, self.workload, self.census)])


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


# When there is not enough #


@dataclass(frozen=True)
class Workload:
    """What decides how much memory a step takes, beside the model."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    seq_len: int
    recompute: str  # none | attention | selective | full
    precision: str  # fp32 | bf16 | bf16-pure | fp64
    method: str = "full"  # full | lora
    lora_r: int = 16


# bytes per parameter: weights, (trainable only) gradients, optimizer state with masters
STATES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12), "bf16-pure": (2, 2, 4), "fp64": (8, 8, 16)}
LOGIT_BYTES = 12  # per logit of a chunk: its log-softmax and two gradients in fp32
CHUNK_TOKENS = 1024  # of the loss


def state_bytes(census: Census, workload: Workload) -> dict[str, int]:
    """Weights, gradients and AdamW's state once all are there; bf16 gradients add up in fp32 (4 bytes)."""
    weights, gradients, optimizer = STATES[workload.precision]
    if workload.precision == "bf16" and workload.gradient_accumulation_steps > 1:
        gradients = 4
    total, trainable = census.total, census.trainable
    if workload.method == "lora" and "adapter" not in census.parameters:
        adapters = adapter_parameters(census, workload.lora_r)
        total, trainable = total + adapters, adapters
    return {WEIGHTS: weights * total, GRADIENTS: gradients * trainable, OPTIMIZER: optimizer * trainable}


def adapter_parameters(census: Census, r: int) -> int:
    """Of adapters of rank r beside every linear of the blocks."""
    matrices = (m for block in census.blocks for m in block.matrices if m.kind in ("attention", "mlp"))
    return sum(r * (m.rows + m.cols) for m in matrices)


def activation_bytes(census: Census, workload: Workload) -> int:
    """An estimate of what a micro-batch's forward keeps for its backward, with one chunk of logits."""
    tokens = workload.micro_batch_size * workload.seq_len
    element = {"fp32": 4, "fp64": 8}.get(workload.precision, 2)
    whole = [block_bytes(census.hidden, block, element) for block in census.blocks]
    match workload.recompute:
        case "full":
            kept = len(whole) * element * census.hidden + max(whole, default=0)
        case "selective":
            outputs = [sum(m.rows * m.count for m in b.matrices) + core_width(b) for b in census.blocks]
            kept = min(sum(whole), element * sum(outputs) + max(whole, default=0))
        case "attention":
            kept = sum(whole) - element * sum(core_width(b) for b in census.blocks)
        case _:
            kept = sum(whole)
    chunk = min(tokens, CHUNK_TOKENS)
    return int(tokens * kept + LOGIT_BYTES * chunk * census.vocabulary)


def block_bytes(hidden: int, block: Block, element: int) -> float:
    """Bytes per token that a block saves for its backward without recomputation.

    Each norm its input in fp32, the normalised and the scaled value; attention q, k, v, output and the log-
    sum; each widening matrix of the MLP its output and what the activation makes of it. For a Llama in bf16:
    20h + 4·h_kv + 8f + 4a, measured to the byte (8 bytes of two reciprocal roots aside).
    """
    norms = sum(p.count for p in block.parameters if p.kind == "norm") / hidden
    wide = [m.rows * m.count for m in block.matrices if m.kind == "mlp" and m.rows != hidden]
    cores = sum(
        element * (a.query_heads * a.qk_dim + a.key_heads * (a.qk_dim + a.v_dim)) + 4 * a.query_heads
        for a in block.attention
    )
    return norms * hidden * (4 + 2 * element) + cores + element * (core_width(block) + 2 * sum(wide))


def core_width(block: Block) -> int:
    """Features of the attention cores' output."""
    return sum(a.query_heads * a.v_dim for a in block.attention)


def explain_out_of_memory(
    capacity_bytes: int, parts: Mapping[str, int], workload: Workload | None, census: Census | None
) -> list[str]:
    """Sentences: which part was largest, and the cheapest changes that would fit, with their estimated size.

    parts: bytes of weights, gradients and optimizer state as they were; with workload and census what they
    will be.
    """
    if workload is None or census is None:
        held = ", ".join(f"{name} {human(size)}" for name, size in parts.items() if size)
        return [
            f"Held by then: {held}; the rest were activations. Try smaller micro-batches (mb1), recompute "
            "full, or a layout that cuts what is largest: zero for weights, gradients and optimizer state, "
            "tp with sp, or cp, for activations."
        ]
    need = estimate(census, workload)
    largest = max(need, key=lambda name: need[name])
    listed = ", ".join(
        f"{name} {human(size)}" for name, size in sorted(need.items(), key=lambda p: -p[1]) if size
    )
    problems = [f"A step needs about {human(sum(need.values()))}: {listed}. The largest part is {largest}."]
    room = 0.95 * capacity_bytes
    fitting = [
        f"{setting} (about {human(size)}; {price})"
        for setting, price, changed in changes(workload)
        if (size := sum(estimate(census, changed).values())) <= room
    ]
    if fitting:
        return [*problems, "What would fit, cheapest first: " + "; ".join(fitting[:4]) + "."]
    *_, (setting, _, smallest) = changes(workload)
    size = human(sum(estimate(census, smallest).values()))
    return [
        *problems,
        f"Nothing tried here fits, not even {setting} (about {size}): take a larger device or another model.",
    ]


def estimate(census: Census, workload: Workload) -> dict[str, int]:
    return {**state_bytes(census, workload), ACTIVATIONS: activation_bytes(census, workload)}


def changes(workload: Workload) -> Iterator[tuple[str, str, Workload]]:
    """(settings, their price, the workload with them), from what costs least to what changes most."""
    mb, ga = workload.micro_batch_size, workload.gradient_accumulation_steps
    same = "the same numbers"
    smaller = workload
    for size in (n for n in range(mb - 1, 0, -1) if mb % n == 0):
        smaller = replace(workload, micro_batch_size=size, gradient_accumulation_steps=ga * mb // size)
        yield (
            f"layout=mb{size}-ga{ga * mb // size}{_recompute(workload)}",
            f"{same}, smaller products",
            smaller,
        )
    if workload.recompute != "full":
        full = replace(workload, recompute="full")
        yield f"layout=mb{mb}-ga{ga}-full", f"{same}, up to a third more work", full
        smaller = replace(smaller, recompute="full")
        if mb > 1:
            yield (
                f"layout=mb1-ga{ga * mb}-full",
                f"{same}, up to a third more work, smaller products",
                smaller,
            )
    layout = f"layout=mb1-ga{ga * mb}-full"
    if workload.precision not in ("bf16", "bf16-pure"):
        smaller = replace(smaller, precision="bf16")
        yield f"train.precision=bf16 {layout}", "products in bf16", smaller
    if workload.method == "full":
        lora = replace(smaller, method="lora")
        yield f"method=lora {layout}", "trains adapters only", lora
        if workload.precision != "bf16-pure":
            pure = replace(smaller, precision="bf16-pure")
            yield f"train.precision=bf16-pure {layout}", "small updates are rounded away", pure
        smaller = lora
        layout = f"method=lora {layout}"
    for parts in (2, 4, 8):
        shorter = replace(smaller, seq_len=workload.seq_len // parts)
        yield f"data.seq_len={shorter.seq_len} {layout}", "cuts longer documents", shorter


def _recompute(workload: Workload) -> str:
    return "" if workload.recompute == "none" else f"-{workload.recompute}"
