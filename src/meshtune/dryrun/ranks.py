"""Which ranks of a layout differ, and a trace of each, made in a process of its own.

    layout ─> distinct_ranks ─> a child process for each, one a core at a time
                                    └─> file with its RankTrace ─> trace_ranks

A trace patches torch, and an error in it may abort the process (C++): a child keeps both away from here.
"""

import faulthandler
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from meshtune.errors import UserError
from meshtune.launch.failure import Failure, end_of_log, failure_of, raise_first
from meshtune.launch.place import Place
from meshtune.launch.rank import RankLog, cores
from meshtune.launch.start import child_process, scratch_folder
from meshtune.layout import AXES, Layout
from meshtune.meter.trace import RankTrace
from meshtune.placement.census import Census
from meshtune.placement.ranks import coordinates, rank_at
from meshtune.placement.share import census_stages, stage_of_rank
from meshtune.units import counted, duration, ranges

SILENCE = 60.0  # seconds without CPU time after which a child counts as hung
BEAT = 5.0  # seconds between lines on traces that aren't done
BUILDING = "building the model"  # the part of a trace before its first step
TICK = 0.05  # seconds of CPU time that a waiting process may use meanwhile

Tell = Callable[[str], Any]  # gets a line
Trace = Callable[[int, Tell], RankTrace]  # of a rank; tells the part of the step that it is in

# Which ranks differ #


def pipeline_copies(census: Census, layout: Layout, seq_len: int) -> dict[int, int]:
    """Index in the pipeline of each rank -> that of the rank whose trace it runs.

    The first and the last rank have their own. In the middle those with equally many blocks in each stage are
    alike: the one with most parameters stands for them and, of several, the first, which has most
    micro-batches in flight.
    """
    size = [sum(parameter.count for parameter in block.parameters) for block in census.blocks]
    blocks = _blocks(census, layout, seq_len)
    last = layout.pp - 1
    alike: dict[object, list[int]] = {}
    for index, stages in enumerate(blocks):
        kind = index if index in (0, last) else tuple(map(len, stages))
        alike.setdefault(kind, []).append(index)

    def elements(index: int) -> int:
        return sum(size[block] for stage in blocks[index] for block in stage)

    return {index: max(group, key=elements) for group in alike.values() for index in group}


def distinct_ranks(census: Census, layout: Layout, seq_len: int) -> dict[int, str]:
    """Rank -> which pipeline ranks it stands for (`pipeline_copies`); only rank 0 without a pipeline.

    On the other axes index 0 is taken: pieces that are not equally long are longest there
    (placement/split.py; FSDP2's shards), replicas are alike, and so are ranks of cp: the zigzag gives each
    the same number of columns and (query, key) pairs, Ulysses of heads. Only with packed documents the
    lengths of the pieces that their attention runs over differ.
    """
    if layout.pp == 1:
        return {0: "all ranks"}
    copies, blocks = pipeline_copies(census, layout, seq_len), _blocks(census, layout, seq_len)
    texts = {0: "the first pipeline rank", layout.pp - 1: "the last one"}
    several = len({*copies.values()}) > 3  # kinds in the middle
    found = {}
    for index in sorted({*copies.values()}):
        group = [other for other, like in copies.items() if like == index]
        middle = "those in the middle" if len(group) > 1 else "the one in the middle"
        number = sum(map(len, blocks[index]))
        text = f"{middle} with {counted(number, 'block')}" if several else middle
        place = dict.fromkeys(AXES, 0) | {"pp": index}
        numbers = " and ".join(ranges(stage) for stage in blocks[index])
        found[rank_at(layout, place)] = f"{texts.get(index, text)} (block{'s' * (number != 1)} {numbers})"
    return found


def _blocks(census: Census, layout: Layout, seq_len: int) -> list[list[range]]:
    """Blocks of each stage of every rank of the pipeline."""
    by_stage = census_stages(census, layout, seq_len)
    ranks = (
        stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, index) for index in range(layout.pp)
    )
    return [[by_stage[stage] for stage in stages] for stages in ranks]


def ranks_to_trace(distinct: Mapping[int, str], layout: Layout, asked: Iterable[int]) -> dict[int, str]:
    """The distinct ranks and those asked for, ascending. Raises UserError for one that the layout lacks."""
    wrong = [rank for rank in asked if not 0 <= rank < layout.world]
    if wrong:
        raise UserError(
            f"--rank {rank}: {layout} has the ranks 0 to {layout.world - 1}; name one of these."
            for rank in wrong
        )
    others = {rank: f"itself, {_place(layout, rank)}" for rank in asked}
    return dict(sorted((others | dict(distinct)).items()))


def _place(layout: Layout, rank: int) -> str:
    """Index on each axis of several ranks, as "pp 1, tp 3"."""
    places = [place for place in coordinates(layout, rank).items() if getattr(layout, place[0]) > 1]
    return ", ".join(f"{axis} {index}" for axis, index in places) or "the only rank"


# Trace them #


def trace_ranks(
    trace: Trace,
    ranks: Sequence[int],
    world: int,
    *,
    tell: Tell = lambda _: None,
    silence: float = SILENCE,
) -> list[RankTrace]:
    """Call `trace(rank, tell)` for each of `ranks` in a process of its own; return the traces in this order.

    trace: picklable on a machine with GPUs (`start_method`), such as a partial of a module's function.
    world: ranks of the layout, for sentences. tell: called with a line when a rank is traced, and every BEAT
    seconds. silence: seconds without CPU time after which a process counts as hung.
    The first failure ends all: UserError and OSError are raised as they are; anything else, a signal, and a
    hang as RankFailed, with the rank and its traceback or the end of its log.
    """
    context: Any = get_context(start_method())
    running: dict[int, tuple[int, BaseProcess]] = {}  # sentinel -> (rank, its process)
    waiting = list(ranks)
    began = time.monotonic()

    def beat() -> None:
        doing = " · ".join(f"rank {rank:,}: {_phase(folder, rank)}" for rank, _ in running.values())
        done = len(ranks) - len(waiting) - len(running)
        tell(
            f"{doing} · {done} of {counted(len(ranks), 'rank')} traced, {duration(time.monotonic() - began)}"
        )

    # A thread of their own starts them, for the reason that launch/start.py has.
    with scratch_folder() as folder, ThreadPoolExecutor(1) as starter:
        try:
            while waiting or running:
                while waiting and len(running) < cores():
                    rank = waiting.pop(0)
                    place = Place(rank, world, 0, 1, "", 0)
                    process = context.Process(target=_child, args=(trace, place, folder, os.getpid()))
                    starter.submit(process.start).result()
                    running[process.sentinel] = rank, process
                for sentinel in _ended(running, folder, silence, beat):
                    rank, process = running.pop(sentinel)
                    process.join()
                    if not (folder / f"trace-{rank}").exists():
                        name, now = f"The trace of rank {rank}", time.time()
                        raise_first([failure_of(rank, process, folder, name=name, seconds=now)], [])
                    tell(f"rank {rank:,} of {world:,} traced")
            return [pickle.loads((folder / f"trace-{rank}").read_bytes()) for rank in ranks]
        finally:
            for _, process in running.values():
                process.kill()
                process.join()


def start_method() -> str:
    """Name of the way to start the processes that trace, one of multiprocessing's.

    Neither CUDA nor autograd's threads, one for each GPU, survive a fork.
    """
    import torch

    return "spawn" if torch.cuda.is_available() else "fork"


def _child(trace: Trace, place: Place, folder: Path, parent: int) -> None:
    """Trace one rank into `folder`/trace-<rank>; the target of its process, which exits here. The part of the
    step that it is in stands in `folder`/phase-<rank>.

    parent: the parent's process id, with which this process ends.
    """
    with child_process(parent, folder, place):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a trace touches no GPU: torch's optimizers would ask it
        RankLog(folder / f"rank-{place.rank}.log")
        faulthandler.enable()  # a crash in native code leaves its stack in the log
        faulthandler.register(signal.SIGUSR2)  # and so does a hang, when the parent asks
        aside = folder / f".trace-{place.rank}"
        with aside.open("wb") as file:
            pickle.dump(
                trace(place.rank, (folder / f"phase-{place.rank}").write_text), file, pickle.HIGHEST_PROTOCOL
            )
        aside.rename(folder / f"trace-{place.rank}")


def _phase(folder: Path, rank: int) -> str:
    """The part of the step that a rank's trace is in."""
    with suppress(FileNotFoundError):
        return (folder / f"phase-{rank}").read_text() or BUILDING
    return BUILDING


def _ended(
    running: Mapping[int, tuple[int, BaseProcess]], folder: Path, silence: float, beat: Callable[[], None]
) -> list[int]:
    """Wait until children end, with a `beat` every BEAT seconds; return their sentinels. Raises RankFailed if
    one uses no CPU time.
    """
    while True:
        before = {sentinel: _cpu_seconds(process) for sentinel, (_, process) in running.items()}
        until = time.monotonic() + silence
        while (left := until - time.monotonic()) > 0:
            if ended := wait(list(running), timeout=min(left, BEAT)):
                return ended  # type: ignore[return-value]
            if silence > BEAT:
                beat()
        for sentinel, (rank, process) in running.items():
            if _cpu_seconds(process) - before[sentinel] < TICK:
                os.kill(process.pid or 0, signal.SIGUSR2)
                time.sleep(min(1.0, silence))  # until its stack is in the log
                text = f"The trace of rank {rank} hangs: it used no CPU for {duration(silence)}."
                raise_first([Failure(time.time(), f"{text}{end_of_log(folder, rank, 40)}")], [])


def _cpu_seconds(process: BaseProcess) -> float:
    with suppress(psutil.Error):
        return sum(psutil.Process(process.pid).cpu_times()[:2])
    return float("inf")  # it has just ended
