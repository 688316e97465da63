"""Peak memory of each phase of a step, by category, and what to do when there is not enough.

The first three steps are watched: forward, backward and the optimizer's update. The first step, before
optimizer state exists, looks smaller than all later ones; the third shows whether the second is what lasts.

    CPU   `Ledger` counts every storage of the watched steps (ledger.py).
    CUDA  the allocator's own peak. Weights, gathered weights, gradients and optimizer state are known at the
          end of the phase; the rest is called activations, in the update temporary.
"""

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from meshtune import compat
from meshtune.errors import NothingFits
from meshtune.meter.ledger import Ledger, storages_of
from meshtune.meter.rows import memory_row
from meshtune.meter.trace import (
    ACTIVATIONS,
    CATEGORIES,
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    TEMPORARY,
    WEIGHTS,
)
from meshtune.model.anatomy import ends
from meshtune.rundir import Row
from meshtune.units import human

WATCHED_STEPS = 3

Phase = Callable[[str], AbstractContextManager[object]]  # name -> context around one part of a step


class States(Protocol):
    """Protocol of an optimizer: the model states that it owns on this rank."""

    def on_device(self) -> Mapping[str, Tensor]:
        """Masters, or what is trained in their place, and the optimizer's state, by name, but what is kept in
        host memory.
        """
        ...

    def gradients(self) -> Sequence[Tensor]:
        """Gradients of the step so far; DTensors, or this rank's shards."""
        ...


@dataclass(frozen=True)
class Peak:
    """The most bytes that were allocated at once in a phase."""

    phase: str  # "forward", "backward", "forward and backward" or "optimizer"
    bytes: int
    parts: Mapping[str, int]  # bytes by category


class PhaseMemory:
    """Measures the first steps of a run: `with memory.watching(step): … with memory.phase("forward"): …`.

    A model with compiled blocks is not watched on CPU: under a dispatch mode it would run uncompiled, and
    show another memory. On CUDA each watched phase resets the allocator's peak statistics.

    optimizer: its states get categories of their own. advice: returns sentences on what needs less memory,
    called only by `out_of_memory_error`. buffers: returns communication buffers that outlive a step, counted
    from the beginning of each watched step on. ledger: makes the ledger of each watched step on CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: States,
        device: torch.device,
        *,
        advice: Callable[[], Sequence[str]] = tuple,
        buffers: Callable[[], Sequence[Tensor]] = tuple,
        ledger: Callable[[torch.device], Ledger] = Ledger,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.advice, self.buffers, self.ledger = advice, buffers, ledger
        self.steps_left = WATCHED_STEPS
        if device.type != "cuda" and ledger is Ledger and compat.is_compiled(model):
            self.steps_left = 0  # inductor's code for processors makes tensors that no ledger sees
        self.sharded = sharded_parameters(model)
        self.peaks: dict[str, Peak] = {}  # of the step at hand, by phase
        self.step = 0  # the watched step at hand, or the last one; 0 once no more are watched
        self.current = "loading"  # the phase at hand, or the last one
        self.operations: int | None = None  # of the last watched step's passes; None: not counted
        self._ledger: Ledger | None = None  # on CPU, during a watched step
        self._most = 0  # bytes, of all watched phases
        self._cuda_peak = 0  # bytes, of the phases whose statistics were reset

    def known(self) -> dict[str, Sequence[Tensor]]:
        """Tensors by category, where they have an owner; masters are optimizer state, as in the ZeRO paper.

        A tensor may be named twice: its category is the last one.
        """
        parameters = list(self.model.parameters())
        weights, gathered = parameters, []
        if self.sharded:
            weights = [parameter.sharded_param for parameter in self.sharded]
            outputs = (tensor for parameter in self.sharded for tensor in parameter.all_gather_outputs)
            gathered = [tensor for tensor in outputs if tensor.untyped_storage().nbytes()]
        sums = (parameter.unsharded_accumulated_grad for parameter in self.sharded)
        return {
            COMMUNICATION: list(self.buffers()),
            OPTIMIZER: list(self.optimizer.on_device().values()),
            GRADIENTS: [
                *self.optimizer.gradients(),
                *(p.grad for p in parameters if p.grad is not None),
                *(gradient for gradient in sums if gradient is not None),
                *chain.from_iterable(map(compat.partial_sums, sharded_modules(self.model))),
            ],
            GATHERED: gathered,
            # Last: without masters, and as ZeRO's shards, they are in the optimizer's state too.
            WEIGHTS: [*weights, *self.model.buffers()],
        }

    def known_bytes(self) -> dict[str, int]:
        """Bytes of `known` by category, each storage counted once."""
        categories = {
            storage.data_ptr(): (category, storage.nbytes())
            for category, tensors in self.known().items()
            for tensor in tensors
            for storage in storages_of(tensor)
        }
        sizes: Counter[str] = Counter()
        for category, size in categories.values():
            sizes[category] += size
        return dict(sizes)

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Measure the step in this context; after `WATCHED_STEPS` of them, do nothing. step: its number."""
        if not self.steps_left:
            self.step = 0
            yield
            return
        self.steps_left -= 1
        self.step, self.peaks, self.operations = step, {}, None
        with ExitStack() as stack:
            if self.device.type != "cuda":
                stack.enter_context(released())
                self._ledger = stack.enter_context(self.ledger(self.device))
                self._ledger.default = TEMPORARY
                stack.callback(setattr, self, "_ledger", None)
                for parameter in self.model.parameters():
                    if parameter.requires_grad:
                        hook = parameter.register_hook(self._tag_gradient)
                        stack.callback(hook.remove)
                for module in self.model.modules():
                    if isinstance(module, PreTrainedModel) and (head := ends(module)[1]):
                        hook = head.register_forward_hook(self._tag_logits)
                        stack.callback(hook.remove)
                self._tag()
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the part of a watched step in this context; on other steps only note its name.

        The same name again in a step (the next micro-batch) keeps the higher peak.
        """
        self.current = name
        if self._ledger is not None:
            yield from self._host_phase(name, self._ledger)
        elif self.device.type == "cuda" and self.step:
            yield from self._cuda_phase(name)
        else:
            yield

    def _host_phase(self, name: str, ledger: Ledger) -> Iterator[None]:
        ledger.restart()
        ledger.default, before = rest_of(name), ledger.operations
        yield
        if name != OPTIMIZER:
            self.operations = (self.operations or 0) + ledger.operations - before
        ledger.default = TEMPORARY
        self._tag()
        self._keep(Peak(name, ledger.peak, dict(ledger.parts)))

    def _cuda_phase(self, name: str) -> Iterator[None]:
        self._cuda_peak = max(self._cuda_peak, torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        total = torch.cuda.max_memory_allocated(self.device)
        parts = self.known_bytes()
        self._keep(Peak(name, total, {**parts, rest_of(name): max(0, total - sum(parts.values()))}))

    def _tag_gradient(self, gradient: Tensor) -> None:
        """Hook of a parameter: its gradient, before it is accumulated."""
        if self._ledger is not None:
            self._ledger.tag([gradient], GRADIENTS)

    def _tag_logits(self, head: nn.Module, inputs: Any, logits: Tensor) -> None:
        if self._ledger is not None:
            self._ledger.tag_logits(logits, getattr(head, "weight", logits).shape)

    def _tag(self) -> None:
        assert self._ledger is not None
        for category, tensors in self.known().items():
            self._ledger.tag(tensors, category)

    def _keep(self, peak: Peak) -> None:
        self._most = max(self._most, peak.bytes)
        if peak.phase not in self.peaks or peak.bytes > self.peaks[peak.phase].bytes:
            self.peaks[peak.phase] = peak

    def peak_bytes(self) -> int:
        """The most bytes of tensors so far; on CPU of the watched steps, 0 without any."""
        if self.device.type == "cuda":
            return max(self._cuda_peak, torch.cuda.max_memory_allocated(self.device))
        return self._most

    def row(self, step: int, rank: int = 0) -> Row | None:
        """The row of the last watched step's peaks on this rank; None if `step` is another one."""
        if step != self.step or not self.peaks:
            return None
        return memory_row(
            step,
            {
                peak.phase: (peak.bytes, {name: peak.parts.get(name, 0) for name in CATEGORIES})
                for peak in self.peaks.values()
            },
            rank,
        )

    def out_of_memory_error(self, message: str) -> NothingFits:
        """The error to raise when memory ran out: phase, bytes by category now, and what needs less memory.

        message: the allocator's; only its first line is shown.
        """
        if self.device.type == "cuda":
            capacity = torch.cuda.get_device_properties(self.device).total_memory
        else:
            capacity = psutil.virtual_memory().total
        sizes = self.known_bytes()
        known = ", ".join(f"{label(name)} {human(sizes[name])}" for name in CATEGORIES if sizes.get(name))
        problems = [
            f"Out of memory in {self.current} on {self.device} ({human(capacity)}): "
            f"{message.splitlines()[0]}",
            f"Allocated by then: {known}; the rest was activations, logits and buffers.",
        ]
        return NothingFits([*problems, *self.advice()])


def rest_of(phase: str) -> str:
    """Category of what has no other one in this phase: only a forward or backward has activations."""
    return TEMPORARY if phase == OPTIMIZER else ACTIVATIONS


def sharded_parameters(model: nn.Module) -> list[Any]:
    """FSDP2's own objects for the parameters that ZeRO shards; they have the shard at any time."""
    modules = sharded_modules(model)
    return [parameter for module in modules for parameter in compat.fsdp_parameters(module)]


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Modules whose parameters FSDP2 gathers together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def label(category: str) -> str:
    """The category as people read it."""
    return category.replace("_", " ")


def peak_resident_bytes() -> int:
    """The largest resident size that this process ever had."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size  # Linux counts in KiB


# Gloo's memory #


# Functions of torch.distributed that wait; some have two names, by torch's version.
WAITING = (
    "all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all_single",
)  # fmt: skip


@contextmanager
def released() -> Iterator[None]:
    """While open, a collective that waits returns only when gloo's worker thread holds its tensors no more.

    The thread lets go of them some time after it has woken who waits: until then a tensor that the step has
    freed would be counted. Nothing without a process group of gloo.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() != "gloo":
        yield
        return
    real = {name: getattr(dist, name) for name in WAITING if hasattr(dist, name)}
    for name, collective in real.items():
        setattr(dist, name, partial(_call_and_wait, collective))
    try:
        yield
    finally:
        for name, collective in real.items():
            setattr(dist, name, collective)


def _call_and_wait(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = (*args, *kwargs.values())  # FSDP2 names what it reduce-scatters
    tensors: list[Any] = [each for each in given if isinstance(each, Tensor)]
    users = [tensor._use_count() for tensor in tensors]
    work = collective(*args, **kwargs)
    while work is None and any(
        tensor._use_count() > count for tensor, count in zip(tensors, users, strict=True)
    ):
        time.sleep(1e-4)
    return work
