"""A simulated step as a trace file for Perfetto (https://ui.perfetto.dev).

    process    a rank of the pipeline
    thread     its passes; then a thread for each stream
    counter    bytes by category, of ranks that were traced themselves

The format is Chrome's JSON ("Trace Event Format", Google 2016): M names processes and threads, X is an event
with its duration, C a counter; times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshtune.dryrun.streams import COMPUTE, RankTime, StepTime
from meshtune.meter.trace import CATEGORIES, RankTrace
from meshtune.report.dryrun.panels import passes, starts
from meshtune.report.plan.passes import PASSES
from meshtune.rundir import write_text_atomically

OF_PASSES = 0  # number of the thread with a rank's passes; streams follow

Event = dict[str, Any]


def write_trace(file: Path, time: StepTime, traces: Sequence[RankTrace], step: int = 2) -> None:
    """Write a simulated step. traces, step: those that were simulated. Raises OSError."""
    events = list(events_of(time, traces, step))
    write_text_atomically(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def events_of(time: StepTime, traces: Sequence[RankTrace], step: int) -> Iterator[Event]:
    """Yield the events of all ranks of the pipeline."""
    traced = {trace.rank: trace for trace in traces}
    for rank in time.ranks:
        itself = traced[rank.trace].coordinates.get("pp", 0) == rank.pp
        like = "" if itself else f", as rank {rank.trace:,}"
        yield from _names(rank, f"pipeline rank {rank.pp}{like}")
        for each in passes(rank):
            name = f"{PASSES[each.kind]} {each.micro_batch}, stage {each.stage}"
            yield _complete(rank.pp, OF_PASSES, name, "pass", each.start, each.end)
        threads = _thread_numbers(rank)
        for each in rank.intervals:
            event = _complete(rank.pp, threads[each.stream], each.name, each.part, each.begin, each.end)
            event["args"] = {
                "module": each.module, "phase": each.phase, "stage": each.run.stage,
                "micro-batch": each.run.micro_batch, "operation": each.operation,
            }  # fmt: skip
            yield event
        if itself:
            yield from _memory(rank, traced[rank.trace], time.seconds, step)


def _thread_numbers(rank: RankTime) -> dict[str, int]:
    """Number of the thread of each stream: the compute stream's first, then as they begin."""
    streams = dict.fromkeys([COMPUTE, *(each.stream for each in rank.intervals)])
    return {stream: number for number, stream in enumerate(streams, OF_PASSES + 1)}


def _names(rank: RankTime, title: str) -> Iterator[Event]:
    yield _named(rank.pp, OF_PASSES, "process_name", name=title)
    yield _named(rank.pp, OF_PASSES, "process_sort_index", sort_index=rank.pp)
    for stream, thread in {"passes": OF_PASSES, **_thread_numbers(rank)}.items():
        yield _named(rank.pp, thread, "thread_name", name=stream)
        yield _named(rank.pp, thread, "thread_sort_index", sort_index=thread)


def _named(process: int, thread: int, what: str, **values: Any) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": values}


def _complete(process: int, thread: int, name: str, category: str, begin: float, end: float) -> Event:
    """An event with its duration. Both ends are rounded to nanoseconds, so that neighbours don't overlap."""
    first, last = round(1e9 * begin), round(1e9 * end)
    return {
        "ph": "X", "pid": process, "tid": thread, "name": name, "cat": category,
        "ts": first / 1000, "dur": (last - first) / 1000,
    }  # fmt: skip


def _memory(rank: RankTime, trace: RankTrace, seconds: float, step: int) -> Iterator[Event]:
    """Bytes by category after each change; of several at one time the highest sum, then the last one."""
    traced = trace.steps[step - 1]
    times = starts(rank, traced, seconds)
    highest: dict[float, dict[str, int]] = {}
    last: dict[float, dict[str, int]] = {}
    for at, sizes in traced.timeline():
        time = round(1e9 * times[max(at, 0)]) / 1000 if times[:-1] else 0.0
        highest[time] = max(highest.get(time, sizes), sizes, key=lambda each: sum(each.values()))
        last[time] = sizes
    for time, sizes in highest.items():
        settled = [(time + 0.001, last[time])] if last[time] != sizes else []  # a nanosecond later
        for begin, parts in ((time, sizes), *settled):
            args = {category: parts.get(category, 0) for category in CATEGORIES}
            yield {"ph": "C", "pid": rank.pp, "tid": OF_PASSES, "name": "memory", "ts": begin, "args": args}
