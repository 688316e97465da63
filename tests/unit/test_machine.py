"""Several machines, on each of which a platform starts one process: which one this is, and its ranks."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from golden import refuses

from meshtune import launch
from meshtune.errors import UserError
from meshtune.launch.machine import ONLY, Machine
from meshtune.launch.rank import announced_ranks

SKY = {
    "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-2026-11-30_sft-1",
}  # fmt: skip
DSTACK = {
    "DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    "DSTACK_GPUS_PER_NODE": "8", "DSTACK_RUN_NAME": "sft",
}  # fmt: skip
KUBEFLOW = {
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "sft-node-0-0.sft",
    "PET_MASTER_PORT": "29500", "PET_NPROC_PER_NODE": "8",
}  # fmt: skip
INDEXED = {
    "MESHTUNE_MACHINES": "2", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "sft-0.sft", "MASTER_PORT": "29500",
}  # fmt: skip
RANK = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
STEP = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "ranks", "address", "port"),
    [
        (SKY, 8, "10.0.0.4", None), (SKY | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, None, "10.0.0.4", None),
        (SKY | {"MASTER_PORT": "4000"}, 8, "10.0.0.4", 4000), (DSTACK, 8, "10.0.0.4", None),
        (KUBEFLOW, 8, "sft-node-0-0.sft", 29500),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, None, "sft-node-0-0.sft", 29500),
        (INDEXED, None, "sft-0.sft", 29500), (INDEXED | {"MESHTUNE_RANKS": "4"}, 4, "sft-0.sft", 29500),
        (SKY | DSTACK, 8, "10.0.0.4", None),  # they agree
        (SKY | STEP, 8, "10.0.0.4", None),  # SkyPilot on Slurm: a task a machine
    ],
)  # fmt: skip
def test_a_platform_numbers_the_machines(
    environ: dict[str, str], ranks: int | None, address: str, port: int | None
) -> None:
    machine = launch.machine_of(environ)
    assert machine is not None
    assert (machine.number, machine.machines, machine.ranks, machine.address) == (1, 2, ranks, address)
    assert port == machine.port if port else 10000 <= machine.port < 30000
    places = machine.places(4, None)
    assert [(place.rank, place.world, place.local_rank) for place in places] == [
        (4, 8, 0), (5, 8, 1), (6, 8, 2), (7, 8, 3),
    ]  # fmt: skip
    first = {
        "SKYPILOT_NODE_RANK": "0",
        "DSTACK_NODE_RANK": "0",
        "PET_NODE_RANK": "0",
        "JOB_COMPLETION_INDEX": "0",
    }
    other = launch.machine_of({name: first.get(name, text) for name, text in environ.items()})
    assert other is not None
    assert (other.number, other.port) == (0, machine.port)


@pytest.mark.parametrize(
    "environ",
    [
        {}, SKY | RANK, KUBEFLOW | RANK, SKY | {"SKYPILOT_NUM_NODES": "1"}, KUBEFLOW | {"PET_NNODES": "1"},
        {"JOB_COMPLETION_INDEX": "1"},  # an indexed job of tasks that have nothing to do with each other
        INDEXED | STEP,  # the inner ones count
    ],
)  # fmt: skip
def test_one_machine_and_a_rank_are_none_of_several(environ: dict[str, str]) -> None:
    assert launch.machine_of(environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        SKY | KUBEFLOW | {"PET_NODE_RANK": "0"},
        KUBEFLOW | {"PET_NNODES": "1:4"},
        KUBEFLOW | {"PET_NPROC_PER_NODE": "gpus"},
        KUBEFLOW | {"PET_NODE_RANK": "2"},
        {name: text for name, text in KUBEFLOW.items() if name not in ("PET_NODE_RANK", "PET_MASTER_ADDR")},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    ],
)
def test_variables_that_can_not_be_used_are_named(environ: dict[str, str]) -> None:
    with refuses(UserError):
        launch.machine_of(environ)


def test_the_ranks_of_all_machines_are_the_layouts() -> None:
    machine = Machine(0, 2, 8, "a", 1, "PET_NNODES=2 with PET_NODE_RANK=0")
    assert machine.world(None, None, 8, "auto") == machine.world(16, None, 8, "zero3x16") == 16
    assert machine.world(8, 4, 8, "zero3x8") == 8
    assert Machine(0, 2, None, "a", 1).world(8, None, 0, "zero3x8") == 8
    with refuses(UserError):
        machine.world(8, None, 8, "zero3x8")
    with refuses(UserError):
        Machine(0, 2, None, "a", 1, "PET_NNODES=2").world(7, None, 0, "zero3x7")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as taken, pytest.raises(UserError, match="set another MASTER_PORT"):
        Machine(0, 2, 1, "a", taken.getsockname()[1]).door()
    with ONLY.door() as door:
        assert door is not None


def test_what_waits_for_the_first_machine_ends_with_the_ranks() -> None:
    place = Machine(1, 2, 1, "127.0.0.1", 9).places(1, None)[0]
    with announced_ranks(place, {place.rank: os.getpid()}, None):
        assert "meshtune-announce" in {thread.name for thread in threading.enumerate()}
    # One that is left in torch's client aborts the process at its end.
    assert "meshtune-announce" not in {thread.name for thread in threading.enumerate()}


def test_a_first_machine_that_never_answers_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtune.launch.rank.QUIET", timedelta(seconds=0.1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Machine(1, 2, 1, "127.0.0.1", silent.getsockname()[1]).places(1, None)[0]
        began = time.monotonic()
        with announced_ranks(place, {place.rank: os.getpid()}, None):
            time.sleep(1.5)  # it is in torch's client, which the closed socket ends
        assert time.monotonic() - began < 60


SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from meshtune import launch
from meshtune.errors import Interrupted
from meshtune.launch.watch import HangLimits

def work(rank, how):
    total = torch.tensor([float(rank.number)])
    dist.all_reduce(total)
    assert total.item() == 6
    if how == "raise" and rank.number == 3:
        raise ValueError("of rank 3")
    if how == "kill" and rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    print("up", flush=True)
    while how != "return":
        stop = torch.tensor([float(len(asked))])
        dist.all_reduce(stop)
        if stop.item():
            raise Interrupted("stopped")
        time.sleep(0.02)
    return rank.number

try:
    limits = HangLimits(silent=5.0, stuck=5.0, end=10.0, tick=0.1, grace=1.0)
    print("returned", launch.run(work, sys.argv[1], ranks=4, limits=limits))
except Interrupted as stopped:
    sys.exit(stopped.exit_code)
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[[str], list["subprocess.Popen[str]"]]]:
    """Start the script on two machines of two ranks each."""
    script, started = tmp_path / "ranks.py", []
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environ = os.environ | KUBEFLOW | {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}

    def start(how: str) -> list["subprocess.Popen[str]"]:
        for number in "10":  # the first machine is the last to come
            started.append(subprocess.Popen(
                [sys.executable, script, how], env=environ | {"PET_NODE_RANK": number}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            ))  # fmt: skip
        return started[::-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.mark.parametrize("how", cases(["return", "raise", "kill"], ci=3))
def test_machines_run_as_one_and_the_one_that_failed_first_speaks(machines: Any, how: str) -> None:
    (first, out, err), (second, _, other) = map(ended, machines(how))
    if how == "return":
        assert (first, second, out) == (0, 0, "up\nreturned 0\n")
    elif how == "raise":
        assert (first, second) == (1, 1)
        assert "ValueError: of rank 3" in other
        assert "Machine 0 of 2 ended after machine 1 had failed" in err
    else:
        assert (first, second) == (1, 1)
        assert "rank 1 of 4 was killed by SIGKILL" in err
        assert re.search("Machine 1 of 2 ended after (machine 0 had failed|it lost the connection)", other)


@pytest.mark.parametrize("number", cases([signal.SIGTERM, signal.SIGKILL], ci=2))
def test_a_signal_to_one_machine_ends_all(machines: Any, number: signal.Signals) -> None:
    first, second = machines("wait")
    assert first.stdout.readline() == "up\n"
    time.sleep(0.2)  # the other ranks have set their handlers
    second.send_signal(number)
    (code, _, err), (other, _, _) = ended(first), ended(second)
    if number == signal.SIGTERM:
        assert (code, other) == (75, 75)
    else:
        assert (code, other) == (1, -9)
        assert "lost the connection to another, which may be gone" in err
