"""Run a function on several ranks: forked processes with a gloo group, the first failure ends all.

    results = run_ranks(4, function, *args)   # function(*args) on each; what rank r returned is results[r]

The parent should have imported what the function needs: a fork takes milliseconds, imports take seconds.
"""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any, seconds: float = 90) -> list[Any]:
    """What `function(*args)` returned on each rank. AssertionError has the failing one's traceback."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, ranks, folder, seconds, function, args))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        running = {process.sentinel: process for process in processes}
        try:
            while running:
                done = wait(list(running), timeout=seconds)
                assert done, f"{len(running)} of {ranks} ranks did not end within {seconds} s"
                for sentinel in done:
                    process = running.pop(sentinel)  # type: ignore[index]
                    process.join()
                    rank = processes.index(process)
                    failure = Path(folder, f"failed-{rank}")
                    assert process.exitcode == 0, (
                        f"rank {rank} of {ranks} ended with {process.exitcode}\n"
                        + (failure.read_text() if failure.exists() else "")
                    )
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(ranks)]


def _rank(
    rank: int, ranks: int, folder: str, seconds: float, function: Callable[..., Any], args: Any
) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        dist.barrier()  # a rank that ended at once would break the connections that others still make
        result = function(*args)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        Path(folder, f"failed-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)  # no clean-up of what the parent owns
