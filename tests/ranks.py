"""Run a function on several ranks with a gloo group of their own; the first failure ends all.

    results = run_ranks(4, function, *args)   # function(*args) on each rank; results[r] is rank r's

Ranks are processes forked from this one. They are kept for the next call, because a rank that has trained
once needs a third less time for its next run; the process group, the seeds and the environment are new in
each call. A kept rank sees nothing that was patched or set here after it was forked, and gets its function by
name: for patches and closures, `forked=True` runs the function on ranks that are forked now and end with it.
`fresh=True` starts new interpreters instead, whose memory owes nothing to what this process has run.

On a loaded machine gloo rarely hangs. Ranks that do not answer are killed, the stack of each is written
to build/hangs, and the call is made once more on new ranks: pytest lists it among the warnings. A second hang
fails.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as forget_meshes

HANGS = Path(__file__).parents[1] / "build" / "hangs"

FORK, SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")


class Rank(NamedTuple):
    """A rank's process, as the parent has it."""

    process: BaseProcess
    pipe: Connection  # our end: a call goes in, (function's result, None) or (None, traceback) comes out


class Call(NamedTuple):
    """Arguments of a `run_ranks` for one of its ranks."""

    rank: int
    ranks: int
    folder: str  # an empty one, for the rendezvous
    seconds: float  # that the parent waits for the next answer
    function: Callable[..., Any]
    args: tuple[Any, ...]
    test: str  # the running test, as pytest names it to its processes


class Hang(AssertionError):
    """No rank answered within the time."""


warm: list[Rank] = []  # kept ranks: each waits for its next call


def run_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, seconds: float = 90, forked: bool = False,
    fresh: bool = False, tries: int = 2, clean: Callable[[], object] = lambda: None,
) -> list[Any]:  # fmt: skip
    """Run `function(*args)` on `ranks` ranks of a gloo group and return its results by rank.

    Results are pickled; so are function and arguments, unless forked. seconds: how long to wait until the
    next rank has ended. forked, fresh: only this call has these ranks; see the module's docstring. tries: how
    many times the call may be made, if its ranks hang. clean: called before it is made again, to remove what
    the first try has written. Raises AssertionError, with the traceback, if a rank fails, and Hang if the
    time is over in the last try; the ranks are then killed.
    """
    for left in reversed(range(tries)):
        try:
            patience = seconds if left or tries == 1 else max(seconds, 60)  # new ranks must also meet
            return _run(ranks, function, args, patience, forked, fresh)
        except Hang as hang:
            HANGS.mkdir(parents=True, exist_ok=True)
            file = HANGS / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}.txt"
            file.write_text(f"{os.environ.get('PYTEST_CURRENT_TEST')}\n{hang}\n")
            if not left:
                raise
            warnings.warn(f"{ranks} ranks hung and were replaced once; their stacks: {file}", stacklevel=2)
            clean()
    raise AssertionError("unreachable")


def _run(
    ranks: int, function: Callable[..., Any], args: tuple[Any, ...], seconds: float, forked: bool, fresh: bool
) -> list[Any]:
    """Run the function once on each rank, as `run_ranks` does in each of its tries."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    with tempfile.TemporaryDirectory() as folder:
        calls = [Call(rank, ranks, folder, seconds, function, args, test) for rank in range(ranks)]
        alone = forked or fresh
        if alone:
            team = [_start(call, SPAWN if fresh else FORK) for call in calls]
        else:
            warm[:] = [rank for rank in warm if rank.process.is_alive()]  # one may have been killed since
            warm.extend(_start(None, FORK) for _ in range(ranks - len(warm)))
            team = warm[:ranks]
            for rank, call in zip(team, calls, strict=True):
                rank.pipe.send_bytes(pickle.dumps(call))
        try:
            return _results(team, Path(folder), seconds)
        except BaseException:
            _end(team)
            if not alone:
                _end(warm)
                warm.clear()
            raise
        finally:
            if alone:
                _end(team)


def _results(team: list[Rank], folder: Path, seconds: float) -> list[Any]:
    """Results by rank. Raises AssertionError if a rank fails, Hang if none answers within `seconds`.

    folder: the call's, where ranks that do not answer write where they are.
    """
    results: dict[int, Any] = {}
    failures: list[str] = []  # the first to fail, and those that lost it: which is heard first is chance
    waiting = {rank.pipe: number for number, rank in enumerate(team)}
    while waiting and (ready := wait(list(waiting), timeout=0.3 if failures else seconds)):
        for pipe in ready:
            number = waiting.pop(pipe)  # type: ignore[arg-type]
            try:
                results[number], failure = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                team[number].process.join()
                failure = f"it ended with {team[number].process.exitcode}"
            if failure is not None:
                failures.append(f"rank {number} of {len(team)} failed\n{failure}")
    assert not failures, "\n".join(failures)
    if waiting:
        for number in waiting.values():
            pid = team[number].process.pid
            assert pid
            os.kill(pid, signal.SIGUSR2)
        time.sleep(1)
        stacks = "\n".join(file.read_text()[:3000] for file in sorted(folder.glob("stack*")))
        raise Hang(f"{len(waiting)} of {len(team)} ranks did not end within {seconds} s:\n{stacks}")
    return [results[number] for number in range(len(team))]


def _end(team: list[Rank]) -> None:
    for rank in team:
        rank.process.kill()
        rank.process.join()
        rank.pipe.close()


def _start(call: Call | None, way: ForkContext | SpawnContext) -> Rank:
    """Start a process for one call, or with None one that waits for calls in its pipe."""
    ours, theirs = Pipe()
    inherited = [ours, *(rank.pipe for rank in warm)] if way is FORK else []
    process = way.Process(target=_rank, args=(theirs, inherited, call), daemon=True)
    process.start()
    theirs.close()  # so that its end is seen here when the process ends
    return Rank(process, ours)


def _rank(pipe: Connection, others: list[Connection], call: Call | None) -> None:
    """Main function of a rank's process: run `call`, or with None all that come until the parent has ended.

    pipe: the rank's end. others: the parent's ends of pipes, which are closed here.
    """
    try:
        for other in others:
            other.close()  # they are the parent's, whose end a rank sees by its pipe
        torch.set_num_threads(1)
        if call is not None:
            pipe.send_bytes(_answer(call))
        else:
            gc.freeze()  # collections need not look at what the parent has
            environment = dict(os.environ)
            while True:
                content = pipe.recv_bytes()
                os.environ.clear()
                os.environ.update(environment)
                pipe.send_bytes(_answer(content))
                gc.collect()
    except EOFError:
        pass
    finally:
        os._exit(0)  # no clean-up of what the parent owns


def _answer(content: Call | bytes) -> bytes:
    """Run a call, pickled or not; return its pickled (result, None), or (None, traceback)."""
    try:
        call = pickle.loads(content) if isinstance(content, bytes) else content
        with Path(call.folder, f"stack{call.rank}").open("w") as stack:
            faulthandler.register(signal.SIGUSR2, stack)  # asked for its stack, a rank that hangs writes it
            try:
                return _result(call)
            finally:
                faulthandler.unregister(signal.SIGUSR2)
    except BaseException:
        return pickle.dumps((None, traceback.format_exc()))


def _result(call: Call) -> bytes:
    """Run the function in a new process group; return its pickled (result, None)."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    os.environ.update(RANK=str(call.rank), WORLD_SIZE=str(call.ranks), LOCAL_RANK=str(call.rank))
    os.environ["PYTEST_CURRENT_TEST"] = call.test
    dist.init_process_group(
        "gloo", init_method=f"file://{call.folder}/rendezvous", rank=call.rank, world_size=call.ranks,
        timeout=timedelta(seconds=2 * call.seconds + 60),  # longer than the parent, which keeps stacks
    )  # fmt: skip
    dist.barrier()  # a rank that ended at once would break the connections that others still make
    result = pickle.dumps((call.function(*call.args), None))
    dist.barrier()  # nobody leaves the group while others still use it
    dist.destroy_process_group()
    forget_meshes()
    return result
