"""Ranks that fail, hang or are stopped, started here or by others; and what a process' environment says."""

import gc
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import cases
from golden import refuses

from meshtune import launch
from meshtune.errors import Interrupted, NonFinite, RankFailed, UserError
from meshtune.launch import Rank, start
from meshtune.launch import rank as rank_module
from meshtune.launch.place import refuse_batch_script, threads_of
from meshtune.launch.rank import meet, open_store
from meshtune.launch.watch import HangLimits, ProcessStatus, Silence, position_and_wait
from meshtune.meter.clock import StepClock

QUICK = HangLimits(silent=1.0, stuck=1.0, end=2.0, tick=0.1, grace=1.0)


def test_a_look_at_a_thread_keeps_nothing_of_it_alive() -> None:
    gone, ready, done = [], threading.Event(), threading.Event()

    def work() -> None:
        tensor = torch.zeros(8)
        gone.append(weakref.ref(tensor))
        ready.set()
        done.wait()

    thread = threading.Thread(target=work)
    gc.disable()  # what only the garbage collector frees is what this is about
    try:
        thread.start()
        ready.wait()
        assert "wait" in position_and_wait(thread, {})[0]
        done.set()
        thread.join()
        assert gone[0]() is None
    finally:
        gc.enable()


def add_up(rank: Rank, folder: Path) -> None:
    """Every rank adds its number to the others' and writes the sum."""
    total = torch.tensor([float(rank.number)])
    dist.all_reduce(total)
    (folder / f"{rank.number}").write_text(str(total.item()))


def test_ranks_meet_and_each_runs_the_function(tmp_path: Path) -> None:
    launch.run(add_up, tmp_path, ranks=3)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(3)] == ["3.0"] * 3
    assert not dist.is_initialized()


def wait_under_a_clock(rank: Rank, folder: Path) -> None:
    """Rank 0 writes what it is seen to wait in; the last rank comes to the measured collective only then."""
    main, aside = threading.main_thread(), folder / "seen.new"

    def look() -> None:
        while not (seen := position_and_wait(main, {})[1]):
            time.sleep(0.01)
        aside.write_text(seen)
        aside.rename(folder / "seen")

    if rank.number == 0:
        threading.Thread(target=look, daemon=True).start()
    while rank.number and not (folder / "seen").exists():
        time.sleep(0.01)
    with StepClock(torch.device("cpu"), {}).running():
        dist.all_reduce(torch.zeros(1))


def test_a_rank_that_waits_is_seen_through_the_clock(tmp_path: Path) -> None:
    launch.run(wait_under_a_clock, tmp_path, ranks=2)
    assert (tmp_path / "seen").read_text() == "all_reduce over all ranks"


def test_one_rank_runs_in_this_process() -> None:
    seen: list[int] = []
    launch.run(lambda rank: seen.append(os.getpid()), ranks=1)
    assert seen == [os.getpid()]


def test_what_rank_0_returns_is_returned() -> None:
    assert launch.run(lambda rank: rank.number + 7, ranks=2) == 7
    assert launch.run(lambda rank: rank.number + 7, ranks=1) == 7


def multiply(_: Rank | None = None) -> None:
    """Compute with two OpenMP threads."""
    torch.set_num_threads(2)
    torch.randn(500, 500).matmul(torch.randn(500, 500)).exp().sum()


def multiply_here_and_on_ranks() -> None:
    multiply()
    launch.run(multiply, ranks=2)


def test_ranks_compute_with_threads_where_the_process_that_starts_them_has_done_so() -> None:
    process = multiprocessing.get_context("fork").Process(target=multiply_here_and_on_ranks)
    process.start()
    process.join(120)
    try:
        assert process.exitcode == 0, "a rank waits for threads that the fork did not copy"
    finally:
        process.kill()


def test_a_rank_ends_only_when_all_have_connected_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, close = dist.init_process_group, dist.destroy_process_group

    def connect_late(*args: Any, rank: int, **options: Any) -> None:
        connect(*args, rank=rank, **options)
        if rank == 0:
            time.sleep(0.5)
            (tmp_path / "connected").touch()

    def close_connected() -> None:
        assert (tmp_path / "connected").exists()
        close()

    monkeypatch.setattr(dist, "init_process_group", connect_late)
    monkeypatch.setattr(dist, "destroy_process_group", close_connected)
    launch.run(lambda rank: None, ranks=2)


def test_ranks_have_the_environment_that_torchrun_gives(tmp_path: Path) -> None:
    def show(rank: Rank) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        words = [os.environ[name] for name in names]
        assert launch.joined()
        (tmp_path / str(rank.number)).write_text(" ".join(words))

    launch.run(show, ranks=2)
    assert (tmp_path / "1").read_text() == "1 2 1 2 127.0.0.1"
    assert "RANK" not in os.environ


def fail_on_one(rank: Rank, error: Callable[[], BaseException]) -> None:
    if rank.number == 1:
        raise error()
    dist.barrier()


@pytest.mark.ci
@pytest.mark.parametrize(
    "error", [UserError(["One thing.", "Another."]), NonFinite("nan"), Interrupted("TERM")]
)
def test_an_expected_error_of_one_rank_is_raised_here_as_it_was(error: Any) -> None:
    with pytest.raises(type(error), match=str(error)) as raised:
        launch.run(fail_on_one, lambda: error, ranks=3)
    assert getattr(raised.value, "problems", None) == getattr(error, "problems", None)


def test_a_bug_of_one_rank_ends_all_with_its_traceback() -> None:
    with pytest.raises(
        RankFailed, match=r"(?s)rank 1 of 3 failed.*fail_on_one.*ZeroDivisionError: by s3://b/c\?…"
    ):
        launch.run(fail_on_one, lambda: ZeroDivisionError("by s3://b/c?key=SECRET"), ranks=3)


def test_a_killed_rank_is_named_not_the_ranks_that_lost_it() -> None:
    def die(rank: Rank) -> None:
        if rank.number == 2:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailed, match=r"(?s)rank 2 of 3 was killed by SIGKILL.*memory.*last words"):
        launch.run(die, ranks=3)


def test_a_rank_that_waits_for_the_failed_one_is_ended_too() -> None:
    def sleep(rank: Rank) -> None:
        if rank.number == 0:
            raise ValueError("first")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    with pytest.raises(RankFailed, match="first"):
        launch.run(sleep, ranks=2, limits=QUICK)


def test_other_ranks_write_to_logs_native_code_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def talk(rank: Rank) -> None:
        print(f"python {rank.number}")
        rank.keep_log(tmp_path / "logs")
        subprocess.run(["echo", f"process {rank.number}"], check=True)

    launch.run(talk, ranks=3)
    assert capfd.readouterr().out.split() == ["python", "0", "process", "0"]
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == ["rank-1.log", "rank-2.log"]
    assert sorted((tmp_path / "logs" / "rank-2.log").read_text().split()) == ["2", "2", "process", "python"]


def test_a_rank_whose_log_can_not_be_written_runs_on_and_reports_its_failure(tmp_path: Path) -> None:
    def fail_on_full_disk(rank: Rank) -> None:
        if rank.number == 1:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            os.dup2(1, 2)
            print("a line\n" * 5000, flush=True)  # more than the stream's buffer
            (tmp_path / "went on").touch()
            raise UserError("the disk is full")
        dist.barrier()

    with refuses(UserError):
        launch.run(fail_on_full_disk, ranks=2, limits=QUICK)
    assert (tmp_path / "went on").exists()


@pytest.mark.ci
def test_a_stopped_rank_is_named_with_what_the_others_wait_in() -> None:
    """The others have five seconds to answer, which other work on the machine does not use up."""

    def stop(rank: Rank) -> None:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "tp"))
        rank.set_hang_facts(lambda: "step 12", {mesh.get_group("outer").group_name: "dp_shard"})
        if rank.number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1), group=mesh.get_group("outer"))
        dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))

    with pytest.raises(RankFailed) as raised:
        launch.run(stop, ranks=4, limits=replace(QUICK, silent=5.0, stuck=10.0, end=20.0))
    report = str(raised.value)
    assert report.startswith("rank 3 has not answered for 5 s (its process is stopped)")
    assert "rank 1 waits for it in all_reduce over dp_shard" in report
    assert "ranks 0, 2 wait for it in all_reduce over tp" in report
    assert report.endswith("(step 12).")


@pytest.mark.all
def test_a_stopped_rank_is_named_by_a_rank_that_takes_long_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the stopped rank is a failure too, and must not be the first that the parent sees."""
    record = start.record_failure

    def record_slowly(*args: Any) -> None:
        time.sleep(QUICK.grace + 1)
        record(*args)

    def stop(rank: Rank) -> None:
        if rank.number == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))

    monkeypatch.setattr(start, "record_failure", record_slowly)
    with pytest.raises(RankFailed, match=r"rank 1 has not answered for 1 s \(its process is stopped\)"):
        launch.run(stop, ranks=2, limits=QUICK)


@pytest.mark.all
def test_a_rank_that_never_comes_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def leave_out(rank: Rank) -> None:
        if rank.number == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankFailed, match=r"rank 1 has not moved.* in leave_out.*rank 0 waits for it in all_"):
        launch.run(leave_out, ranks=2, limits=QUICK)
    assert "rank 1 has not moved for 1 s" in capfd.readouterr().err


@pytest.mark.all
@pytest.mark.parametrize("before", ["open_store", "meet"])
def test_a_rank_stopped_before_the_process_group_exists_is_named(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = getattr(rank_module, before)

    def stop(place: launch.Place, *args: Any, **options: Any) -> Any:
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return begin(place, *args, **options)

    monkeypatch.setattr(rank_module, before, stop)
    with pytest.raises(RankFailed, match=r"rank 1 has not answered for 1 s \(its process is stopped\)"):
        launch.run(lambda rank: None, ranks=2, limits=QUICK)


@pytest.mark.all
def test_a_slow_rank_is_no_hang() -> None:
    def compute(rank: Rank) -> None:
        until = time.monotonic() + 4
        while rank.number == 1 and time.monotonic() < until:
            sum(range(10000))
        dist.barrier()

    launch.run(compute, ranks=2, limits=replace(QUICK, silent=20.0, end=2.5))


@pytest.mark.all
def test_where_waiting_burns_the_processor_a_rank_that_spins_inside_torch_has_not_moved() -> None:
    def spin(rank: Rank) -> None:
        rank.set_hang_facts(str, {}, spins=True)
        if rank.number == 1:
            inside: dict[str, Any] = {"__name__": "torch.cuda", "torch": torch}
            exec("def synchronize(): torch.linalg.matrix_power(torch.ones(1500, 1500), 2**60)", inside)
            inside["synchronize"]()  # for ten seconds and more
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankFailed, match=r"rank 0 waits for it in all_reduce"):
        launch.run(spin, ranks=2, limits=replace(QUICK, stuck=0.5, end=1.0))


def test_silence_is_measured_in_time_and_not_in_ticks_and_a_pause_of_the_job_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = [0.0, 0.0, 4.0, 8.0, 12.0, 200.0, 201.0, 205.0, 209.0]
    monkeypatch.setattr("meshtune.launch.watch.time", SimpleNamespace(monotonic=lambda: times.pop(0)))
    stopped = ProcessStatus("T", 1.0, 2)
    silence = Silence(tick=1.0)
    # A busy machine, where a tick of a second takes four; then this process was stopped as well.
    assert [silence.seconds(7, stopped) for _ in range(5)] == [0, 4, 8, 12, 17]
    assert silence.seconds(8, stopped) == 0
    waiting = replace(stopped, state="R")  # for a core
    assert [silence.seconds(8, waiting) for _ in range(2)] == [0, 0]


START = """
import os, signal, sys, time
from pathlib import Path
import torch
from meshtune import launch
from meshtune.errors import Interrupted

def wait(rank, folder):
    def note(number, frame):
        raise Interrupted(f"stopped by {signal.Signals(number).name}")
    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGHUP, note)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / f"{rank.number}").write_text(str(os.getpid()))
    time.sleep(600)

try:
    launch.run(wait, Path(sys.argv[1]), ranks=2)
except Interrupted as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """A process with two ranks that wait: (it, their process ids)."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)
    time.sleep(0.2)
    yield process, [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", cases([signal.SIGTERM, signal.SIGHUP], ci=2))
def test_a_signal_reaches_every_rank_and_their_exit_code_comes_back(started: Any, number: int) -> None:
    process, _ = started
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (75, f"stopped by {signal.Signals(number).name}\n"), err


@pytest.mark.ci
def test_a_second_interrupt_kills_the_ranks(started: Any) -> None:
    process, _ = started
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert err.endswith("KeyboardInterrupt\n")


@pytest.mark.ci
def test_ranks_end_with_the_process_that_started_them(started: Any) -> None:
    process, ranks = started
    os.kill(ranks[1], signal.SIGSTOP)
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.ci
def test_under_torchrun_the_ranks_are_joined_and_the_first_to_fail_speaks(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import torch.distributed as dist\nfrom meshtune import launch\n"
        "def work(rank):\n"
        "    assert dist.get_world_size() == 2\n"
        "    print('rank', rank.number)\n"
        "    if rank.number == 1:\n        raise ValueError('of rank 1')\n"
        "    dist.barrier()\n"
        "launch.run(work, ranks=7)\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert found.returncode == 1
    assert found.stdout == "rank 0\n"
    assert found.stderr.count("ValueError: of rank 1") == 1
    assert "closed by peer" not in found.stderr


@pytest.mark.timeout(60)
def test_a_rank_that_is_killed_at_once_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(store: Any, rank: int, pid: int) -> None:
        """Before the parent begins to wait for its ranks."""
        if rank == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr("meshtune.launch.rank.announce", kill)
    with pytest.raises(RankFailed, match="rank 0 of 2 was killed by SIGKILL"):
        launch.run(lambda rank: None, ranks=2, limits=QUICK)


@pytest.mark.parametrize("when", cases(["in its imports", "in training"], ci=1))
def test_ranks_end_when_torchrun_is_killed(when: str, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        f"folder, imports = Path({str(tmp_path)!r}), {when == 'in its imports'}\n"
        "def come(rank):\n"
        "    (folder / str(rank)).write_text(str(os.getpid()))\n"
        "    while not (folder / 'killed').exists():\n"
        "        time.sleep(0.1)\n"
        "def work(rank):\n"
        "    come(rank.number)\n"
        "    time.sleep(600)\n"
        "if imports:\n    come(os.environ['RANK'])\n"
        "from meshtune import launch\n"
        "from meshtune.launch.watch import HangLimits\n"
        "launch.run(work, ranks=2, limits=HangLimits(silent=3.0))\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    )
    until = time.monotonic() + 120
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        assert agent.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    time.sleep(0.2)
    ranks = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    agent.kill()
    agent.wait()
    (tmp_path / "killed").touch()
    until = time.monotonic() + 60
    try:
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


def test_other_ranks_of_this_machine_are_found_by_their_environment_from_their_first_instruction_on() -> None:
    place = launch.Place(5, 8, 1, 4, "127.0.0.1", 29876)
    tasks = {}
    for rank, world in ((4, 8), (6, 8), (5, 8), (2, 7)):  # this rank itself, and one of another run
        names = replace(place, rank=rank, world=world, local_rank=rank - 4).environment()
        tasks[rank] = subprocess.Popen(["sleep", "600"], env=names)
    try:
        script = (
            "import sys; from meshtune.launch import Place; from meshtune.launch.place import *\n"
            f"place = {place!r}\nprint(siblings(place), rank_before(place))"
        )
        seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    finally:
        for task in tasks.values():
            task.kill()
            task.wait()
    wanted = {4: (0, tasks[4].pid), 6: (2, tasks[6].pid)}
    assert seen.stdout.strip() == f"{wanted} {(4, tasks[4].pid)}"


STOPS_BEFORE_ITS_IMPORTS = """
import os, pathlib, signal, sys, time
if sys.argv[1] in (os.environ.get("RANK"), os.environ.get("SLURM_PROCID")):
    os.kill(os.getpid(), signal.SIGSTOP)
from meshtune import launch
from meshtune.errors import RankFailed
from meshtune.meter.clock import StepClock
from meshtune.launch.watch import HangLimits
if len(sys.argv) > 2:  # had rank 0 ended before another rank looks for it, that one would wait for minutes
    folder, ranks = pathlib.Path(sys.argv[2]), int(os.environ["SLURM_NTASKS"])
    (folder / os.environ["SLURM_PROCID"]).touch()
    while len(list(folder.iterdir())) < ranks - 1:
        time.sleep(0.05)
limits = HangLimits(silent=2.0, stuck=300.0, tick=0.2, grace=1.0)
launch.run(lambda rank: None, ranks=1, limits=limits)
"""
SILENT = r"rank {} has not answered for \d s \(its process is stopped\)"


@pytest.mark.parametrize("stopped", cases([0, 1, 2], ci=1))
def test_a_task_of_srun_that_is_stopped_before_its_first_heartbeat_is_named(
    stopped: int, tmp_path: Path
) -> None:
    """Rank 0 holds the store; without it the others have no watch yet. Rank 2 is checked by rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCH"))}
    names = {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "3", "MASTER_ADDR": "127.0.0.1"}
    names |= {"SLURM_STEP_ID": "0"}
    words = [sys.executable, "-c", STOPS_BEFORE_ITS_IMPORTS, str(stopped), str(tmp_path)]
    tasks = [
        subprocess.Popen(
            words, stderr=subprocess.PIPE, text=True,
            env=clean | names | {"MASTER_PORT": str(port), "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)},
        )
        for n in range(3)
    ]  # fmt: skip
    try:
        errors = [task.communicate(timeout=300)[1] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert re.search(SILENT.format(stopped), "".join(errors)), errors
    codes = [task.returncode for task in tasks]
    assert codes.pop(stopped) == -signal.SIGKILL
    assert codes == [1, 1]


@pytest.mark.ci
def test_a_rank_of_torchrun_that_is_stopped_before_its_first_heartbeat_is_named(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(STOPS_BEFORE_ITS_IMPORTS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*torchrun, script, "1"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert re.search(SILENT.format(1), ended.stderr), ended.stderr


def test_temporary_folders_of_killed_processes_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(start, "YOUNG_SECONDS", -60)
    (tmp_path / f"{start.PREFIX}dead").mkdir()
    (tmp_path / f"{start.PREFIX}dead" / "rank-1.log").touch()
    (tmp_path / "meshtune-of-others").mkdir()
    with start.scratch_folder() as used:
        assert {path.name for path in tmp_path.iterdir()} == {used.name, "meshtune-of-others"}
        start.remove_abandoned()
        assert used.exists()
    assert not used.exists()


SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77"}
SLURM |= {"SLURM_STEP_ID": "0"}


def test_srun_tasks_meet_at_the_first_host_of_the_node_list() -> None:
    nodes = {"SLURM_JOB_NODELIST": "gpu[03-04,7],x1", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}
    place = launch.place_of(SLURM | nodes)
    assert place is not None
    assert (place.rank, place.world, place.local_rank, place.local_world) == (5, 8, 1, 4)
    assert place.address == "gpu03"
    assert launch.place_of(SLURM | nodes | {"SLURM_PROCID": "0"}).port == place.port  # type: ignore[union-attr]


ELSEWHERE = "node1.invalid"  # a name that no resolver knows (RFC 2606)


@pytest.fixture
def slurm_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None], None]:
    """Function(script): this process becomes a task of two on nodes whose names do not resolve; its PATH has
    only a scontrol with this shell script, or none.
    """

    def become(script: str | None) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        if script is not None:
            (folder / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
            (folder / "scontrol").chmod(0o755)
        names = {"PATH": str(folder), "SLURM_JOB_NODELIST": f"{ELSEWHERE},node2.invalid"}
        names |= {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
        for name, value in (SLURM | names).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SLURM_LOCALID", "0")

    return become


@pytest.fixture
def met_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses at which `launch.run` would have waited for the other ranks."""
    addresses: list[str] = []

    @contextmanager
    def group(place: launch.Place, *args: object, **kwargs: object) -> Iterator[Rank]:
        addresses.append(place.address)
        yield Rank()

    monkeypatch.setattr("meshtune.launch.start.process_group", group)
    monkeypatch.setattr("meshtune.launch.start.RankLog", lambda: None)
    return addresses


def test_a_node_name_that_does_not_resolve_is_asked_from_slurm(slurm_task: Any, met_at: list[str]) -> None:
    slurm_task('echo "NodeName=$3 Arch=x86_64"; echo "  NodeAddr=127.0.0.7 NodeHostName=ip-10 Port=6818"')
    launch.run(lambda rank: None, ranks=1)
    assert met_at == ["127.0.0.7"]


def test_the_host_name_of_a_node_is_taken_where_its_address_does_not_resolve(
    slurm_task: Any, met_at: list[str]
) -> None:
    slurm_task('echo "NodeName=$3 NodeAddr=$3 NodeHostName=localhost"')
    launch.run(lambda rank: None, ranks=1)
    assert met_at == ["localhost"]


def test_a_master_addr_that_resolves_is_left_alone(
    slurm_task: Any, met_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_task("echo NodeAddr=127.0.0.7")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.8")
    launch.run(lambda rank: None, ranks=1)
    assert met_at == ["127.0.0.8"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "can't be asked: scontrol is not on PATH"),
        ('echo "Node $3 not found"; exit 1', f"failed: Node {ELSEWHERE} not found"),
        ("exit 3", "failed: exit code 3"),
        ("echo NodeAddr=$3 NodeHostName=also.invalid", f"gives: {ELSEWHERE} and also.invalid"),
        ("echo something else", "gives: no address"),
    ],
)
def test_a_first_node_without_an_address_is_refused_at_once(
    script: str | None, reason: str, slurm_task: Any, met_at: list[str]
) -> None:
    slurm_task(script)
    with pytest.raises(UserError) as raised:
        launch.run(lambda rank: None, ranks=1)
    sentence = str(raised.value)
    assert f"at {ELSEWHERE} (the first node of this Slurm job), but this name does not resolve" in sentence
    assert f"`scontrol show node {ELSEWHERE}` {reason}" in sentence
    assert "Set MASTER_ADDR to an IP address of the machine of rank 0" in sentence
    assert met_at == []


def test_one_rank_of_a_machine_reports_that_the_first_node_has_no_address(
    slurm_task: Any, met_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_task(None)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    with pytest.raises(SystemExit) as raised:
        launch.run(lambda rank: None, ranks=1)
    assert raised.value.code == 2


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"},  # the shell of salloc
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},  # its shell where that is a step of its own
        SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"RANK": "", "WORLD_SIZE": " ", "SLURM_PROCID": ""},
        SLURM | {"SLURM_STEP_ID": "", "SLURM_JOB_NUM_NODES": "1"},  # a batch script without srun
        SLURM | {"SLURM_STEP_ID": "4294967291"},  # the same, where its step has a number
    ],
)
def test_one_process_is_no_rank(environ: dict[str, str]) -> None:
    assert launch.place_of(environ) is None


def test_an_environment_that_says_too_little_is_refused() -> None:
    with refuses(UserError):
        launch.place_of({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (TORCHRUN | {"RANK": "one"}, "RANK=one: it must be a whole number from 0 on"),
        (TORCHRUN | {"WORLD_SIZE": "-2"}, "WORLD_SIZE=-2: it must be a whole number from 1 on"),
        (TORCHRUN | {"LOCAL_RANK": "0,1"}, "LOCAL_RANK=0,1: it must be"),
        (TORCHRUN | {"MASTER_PORT": "tcp://10.0.0.1:443"}, "MASTER_PORT=tcp://10.0.0.1:443: it must be"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000: a port is at most 65535"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "but MASTER_ADDR is not"),
        (TORCHRUN | {"RANK": "2"}, "RANK and WORLD_SIZE say rank 2 of 2"),
        (SLURM | {"SLURM_NTASKS": "8(x2)"}, "SLURM_NTASKS=8(x2): it must be"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "none"}, "SLURM_TASKS_PER_NODE=none: it must be"),
    ],
)
def test_a_variable_that_can_not_be_used_is_named(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("(x2)", r"\(x2\)")):
        launch.place_of(environ)


def test_no_ranks_are_started_in_a_batch_script_of_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_batch_script(SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_NNODES": "2"})  # the shell of salloc
    refuse_batch_script(SLURM | {"SLURM_STEP_ID": "0", "SLURM_NNODES": "2"})  # a task of srun
    with pytest.raises(UserError, match=r"job of 2 nodes .* Put srun before the command"):
        refuse_batch_script(SLURM | {"SLURM_STEP_ID": "", "SLURM_NNODES": "2"})
    for name, value in (SLURM | {"SLURM_STEP_ID": "", "SLURM_NNODES": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="job of 2 nodes"):
        launch.run(lambda rank: rank, ranks=1)


def test_threads_are_read_as_openmp_reads_them() -> None:
    found = [threads_of({"OMP_NUM_THREADS": text}, 3) for text in ("", " ", "4", "4,2", " 8 ")]
    assert found == [3, 3, 4, 4, 8]
    with pytest.raises(UserError, match="OMP_NUM_THREADS=auto: it must be a whole number from 1 on"):
        threads_of({"OMP_NUM_THREADS": "auto"}, 3)


def test_ranks_that_do_not_come_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtune.launch.rank.RENDEZVOUS_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr("meshtune.launch.rank.QUIET", timedelta(seconds=0.5))
    place = launch.Place(0, 2, 0, 2, "127.0.0.1", 29876)
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    said: list[str] = []
    with refuses(UserError):
        meet(place, open_store(place, HangLimits(), pytest.fail, pytest.fail), said.append)
    assert said == ["meshtune: rank 0 of 2 waits at 127.0.0.1:29876 for rank 1, for 1.0 s at most."]
