"""Seconds of a step's parts on one rank: what it computes, and what it waits for.

    phases          forward, backward, optimizer … : contexts around the parts of the training step
    recomputation   what a backward repeats of the forward; called where a checkpoint runs a part again
    collectives     how long this rank stands still for one, by the part of parallelism

On a CPU by the host's clock. On CUDA by events on the stream that computes, so that a collective during
computation costs nothing, and the host is not held up; they are read when the step's work is done.

A collective's time is that between the call of its `wait` and its return. On CUDA, as the compute stream sees
it, that between the call which starts one and its return too (NCCL runs a collective that is not asynchronous
on the stream it is started from), and that of a `Stream.wait_event`, by which FSDP2 waits; what other streams
run or wait for is not exposed. torch has no hook there: the methods of ProcessGroup that start one, Work.wait
and Stream.wait_event are replaced while a `StepClock` runs.
"""

import operator
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from meshtune import compat

if TYPE_CHECKING:
    from meshtune.placement.schedules import Pass

PASSES = ("backward", "forward and backward")  # parts that a step's passes end with

_running: "StepClock | None" = None


class Span(NamedTuple):
    """One part of a step, from start to end."""

    name: str
    inside: str  # name of the part around it; "": none
    start: Any  # seconds, or a CUDA event
    end: Any
    what: "Pass | None" = None  # of a pipeline


class Flight(NamedTuple):
    """A collective that has started."""

    part: str
    started: float  # by the host's clock, in seconds
    reduces: bool  # an all-reduce: what replicas hide behind the backward pass


@dataclass
class HostFacts:
    """A step as the host has seen it, in seconds of its own clock."""

    calls: Counter[str] = field(default_factory=Counter)  # collectives that it started, by part
    bytes: Counter[str] = field(default_factory=Counter)  # of each one's largest argument, by part
    # Most seconds between the start of an all-reduce of data parallelism and its wait: what ran meanwhile
    # hides it. None without one.
    head_start: float | None = None
    # Seconds from the end of the passes to the update, on CUDA: the ranks agree on the norm there, so the
    # host waits until the device has done all that is queued. None without an update.
    backlog: float | None = None


class StepClock:
    """Measures this rank's steps: `with clock.running(): … with clock.part("forward"): … clock.take()`.

    groups: part of the time that a group's collectives are, by the group's name (ProcessGroup.group_name);
    None: they are not measured. Of any other group they are "data".
    """

    def __init__(self, device: torch.device, groups: Mapping[str, str | None]) -> None:
        self.device, self.groups = device, groups
        self._spans: list[Span] = []
        self._inside = ""  # name of the part at hand
        self._in_flight: dict[int, Flight] = {}  # by id of their Work
        self._facts, self._passes_end = HostFacts(), 0.0
        self._compute_stream: Any = None  # on CUDA, while it runs
        self._origin = self._now()
        self.passes: list[tuple[float, float, Pass]] = []  # (start, end, pass) before the last `take`

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure waits and recomputation in this context; parts are measured in any case."""
        global _running
        before, _running = _running, self
        if self.device.type == "cuda":
            self._compute_stream = torch.cuda.current_stream(self.device)
        restore = self._watch_collectives() if dist.is_available() and dist.is_initialized() else lambda: None
        try:
            yield
        finally:
            restore()
            _running = before

    @contextmanager
    def part(self, name: str, what: "Pass | None" = None) -> Iterator[None]:
        """Measure a part of a step, or of the part at hand; the same name again adds up. what: the pass of a
        pipeline that it is.
        """
        inside, self._inside, start = self._inside, name, self._now()
        cuda = self.device.type == "cuda"
        if cuda and name == "optimizer":
            self._facts.backlog = time.perf_counter() - self._passes_end
        try:
            yield
        finally:
            if cuda and name in PASSES:
                self._passes_end = time.perf_counter()
            self._spans.append(Span(name, inside, start, self._now(), what))
            self._inside = inside

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by name: each part's own, without those of the parts inside it.

        A wait's name is `wait <part>`. On CUDA what the device has not ended is in the next call's.
        """
        ended = [
            self._has_ended(span) for span in self._spans
        ]  # asked once: it may end between two questions
        done = list(compress(self._spans, ended))
        self._spans = list(compress(self._spans, map(operator.not_, ended)))
        self._in_flight.clear()  # of collectives that nobody waited for
        seconds: dict[str, float] = defaultdict(float)
        self.passes = [
            (self._between(self._origin, span.start), self._between(self._origin, span.end), span.what)
            for span in done if span.what
        ]  # fmt: skip
        self._origin = self._now()
        for span in done:
            length = self._between(span.start, span.end)
            seconds[span.name] += length
            if span.inside:
                seconds[span.inside] -= length
        return dict(seconds)

    def take_facts(self) -> HostFacts:
        """Return the host's facts since the last call."""
        facts, self._facts = self._facts, HostFacts()
        return facts

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _has_ended(self, span: Span) -> bool:
        return self.device.type != "cuda" or span.end.query()

    def _between(self, start: Any, end: Any) -> float:
        return end - start if self.device.type != "cuda" else start.elapsed_time(end) / 1000

    def _watch_collectives(self) -> Callable[[], None]:
        """Replace the methods that start collectives, and the one that waits; returns what undoes it."""
        group_type, work_type = dist.ProcessGroup, dist.Work
        originals: list[tuple[type, str, Any]] = []

        def replace(owner: type, name: str, method: Callable[..., Any]) -> None:
            originals.append((owner, name, owner.__dict__[name]))
            setattr(owner, name, wraps(owner.__dict__[name])(method))

        for name in compat.COLLECTIVES:
            if name in group_type.__dict__:
                replace(group_type, name, self._starting(group_type.__dict__[name], name))
        replace(work_type, "wait", self._waiting(work_type.__dict__["wait"]))
        if self.device.type == "cuda":
            stream_type = torch.cuda.Stream
            replace(stream_type, "wait_event", self._waiting_for_event(stream_type.wait_event))

        def restore() -> None:
            for owner, name, original in originals:
                setattr(owner, name, original)

        return restore

    def _starting(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a method of a process group so that the Work which it returns is known by its part."""
        reduces = name.startswith("allreduce")

        def started(group: Any, *args: Any, **kwargs: Any) -> Any:
            part = self.groups.get(group.group_name, "data")
            with self._stalling(part) if part and self.device.type == "cuda" else nullcontext():
                work = method(group, *args, **kwargs)
            if part:
                self._in_flight[id(work)] = Flight(part, time.perf_counter(), reduces)
                self._facts.calls[part] += 1
                self._facts.bytes[part] += max(map(payload, args), default=0)
            return work

        return started

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            flight = self._in_flight.pop(id(work), None)
            if flight is None:
                return method(work, *args, **kwargs)
            if flight.reduces and flight.part == "data":
                hidden = time.perf_counter() - flight.started
                self._facts.head_start = max(hidden, self._facts.head_start or 0.0)
            with self._stalling(flight.part):
                return method(work, *args, **kwargs)

        return waited

    def _waiting_for_event(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Stream.wait_event`: the compute stream waits for what FSDP2 runs on streams of its own."""

        def waited(stream: Any, event: Any) -> None:
            with self._stalling("data") if stream == self._compute_stream else nullcontext():
                method(stream, event)

        return waited

    def _stalling(self, part: str) -> AbstractContextManager[object]:
        """Return a context that is measured as waiting for a collective, where it is the compute stream's."""
        if torch.compiler.is_compiling():
            return nullcontext()
        cuda = self.device.type == "cuda"
        if cuda and torch.cuda.current_stream(self.device) != self._compute_stream:
            return nullcontext()
        return self.part(f"wait {part}")


def payload(argument: Any) -> int:
    """Bytes of the tensors in an argument of a collective: a tensor, or lists of them."""
    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    return sum(map(payload, argument)) if isinstance(argument, list | tuple) else 0


def measured(name: str, what: "Pass | None" = None) -> AbstractContextManager[object]:
    """Return a context that is measured as a part of the step, if a clock runs. what: as of `part`."""
    idle = _running is None or torch.compiler.is_compiling()
    return nullcontext() if idle else _running.part(name, what)  # pyright: ignore[reportOptionalMemberAccess]


def recomputing() -> AbstractContextManager[object]:
    """Return a context that is measured as recomputation, if a clock runs and a backward pass calls it."""
    if torch.compiler.is_compiling() or not compat.in_backward():
        return nullcontext()
    return measured("recomputation")
