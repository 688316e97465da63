"""A real Slurm of three nodes on this machine, whose names do not resolve: scripts/slurm-local."""

import hashlib
import json
import os
import random
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command import Command, end, losses, wait_until
from tiny import short_run

from meshtune.rundir import RunDir
from meshtune.train.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm-local"
TRAIN = [sys.executable, "-m", "meshtune", "train"]
TWO_NODES = ["srun", "--nodes=2", "--ntasks-per-node=1"]

Settings = Callable[..., list[str]]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = [pytest.mark.all, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Function(words) that runs a command in the environment of a Slurm of three nodes.

    With CI=true the packages are fetched if they are missing; else the test is skipped.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if os.environ.get("CI") != "true" and not (cache / "meshtune" / "slurm" / "unpacked").exists():
        pytest.skip("Slurm's packages are not unpacked here: run scripts/slurm-local unpack (Debian 12)")
    state = tmp_path_factory.mktemp("slurm")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    clean["NODES"] = "3"
    start = 'set -e; words=$("$0" start "$1"); eval "$words"; env -0'
    started = subprocess.run(
        ["bash", "-c", start, SCRIPT, state], capture_output=True, text=True, env=clean, timeout=300
    )
    if started.returncode:
        pytest.fail(f"Slurm did not start: {started.stderr}")
    environment = dict(line.split("=", 1) for line in started.stdout.split("\0") if line)

    def run(*words: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*map(str, words)], capture_output=True, text=True, env=environment, timeout=300
        )

    yield run
    subprocess.run([SCRIPT, "stop", state], env=clean, check=True, timeout=60)


def test_tasks_of_srun_and_torchrun_under_srun_train_as_one_rank(
    slurm: Run, meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    meshtune("train", *settings(f"output={tmp_path / 'one'}"))

    words = settings(f"output={tmp_path / 'srun'}", "layout=zero3x2", "log.to=[jsonl,console]")
    tasks = slurm(*TWO_NODES, *TRAIN, *words, "--json")
    assert tasks.returncode == 0, tasks.stderr
    assert json.loads(tasks.stdout)["steps"] == 4
    assert tasks.stderr.count("step 4/4") == 1

    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=1"]
    words = settings(f"output={tmp_path / 'torchrun'}", "layout=zero3x2")
    agents = slurm(*TWO_NODES, *torchrun, "-m", "meshtune", "train", *words, "--json")
    assert agents.returncode == 0, agents.stderr
    assert json.loads(agents.stdout)["steps"] == 4

    for run in ("srun", "torchrun"):
        assert [loss for _, loss, _ in losses(tmp_path / run)] == pytest.approx(
            [loss for _, loss, _ in losses(tmp_path / "one")], rel=1e-5
        )
        assert [file.name for file in (tmp_path / run / "logs").iterdir()] == ["rank-1.log"]


def test_a_first_node_without_an_address_is_refused_at_once(
    slurm: Run, settings: Settings, tmp_path: Path
) -> None:
    """In a container, for example, whose PATH has no scontrol."""
    started = time.monotonic()
    command = ["env", f"PATH={tmp_path}", *TRAIN, *settings("layout=zero3x2")]
    ended = slurm("srun", "--nodes=1", "--ntasks=2", *command)
    assert ended.returncode == 2, ended.stderr
    assert (
        ended.stderr.count("at node1 (the first node of this Slurm job), but this name does not resolve") == 1
    )
    assert "scontrol is not on PATH. Set MASTER_ADDR" in ended.stderr
    assert time.monotonic() - started < 120  # the rendezvous alone would wait for 300 s


def documented_script(**replaced: str) -> str:
    """Return the batch script of docs/slurm.md with some of its words replaced."""
    page = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    script = next(block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "#SBATCH" in block)
    for name, word in {
        "tasks": "--ntasks-per-node=8 --gpus-per-node=8", "time": "--time=24:00:00", "signal": "USR1@300",
        "train": "python -m meshtune train run.yaml layout=dp2-zero3x8 output=runs/sft",
    }.items():  # fmt: skip
        assert script.count(word) == 1, word
        script = script.replace(word, replaced[name])
    return script


def test_a_job_stops_before_its_time_limit_is_requeued_and_goes_on_bit_for_bit(
    slurm: Run, begin: Any, settings: Settings, tmp_path: Path
) -> None:
    """The batch script of docs/slurm.md; then scancel."""
    words = settings("train.max_steps=100000", "layout=zero3x2", "train.global_batch_size=16")
    whole, parts, out = tmp_path / "whole", tmp_path / "parts", tmp_path / "job.out"
    script = tmp_path / "job.sh"
    # The signal is due when the limit is 150 s away. Slurm looks every 30 s, which it adds.
    script.write_text(
        documented_script(
            tasks="--ntasks-per-node=1", time="--time=60", signal="USR1@150",
            train=shlex.join([*TRAIN, *words, f"output={parts}"]),
        )
    )  # fmt: skip
    submitted = slurm("sbatch", "--parsable", f"--output={out}", script)
    assert submitted.returncode == 0, submitted.stderr
    job, started = submitted.stdout.strip(), time.monotonic()
    uninterrupted = begin("train", *words, f"output={whole}")

    def state() -> str:
        return re.findall(r"JobState=(\w+)", slurm("scontrol", "show", "job", job).stdout)[0]

    def limit(minutes: int) -> bool:
        return slurm("scontrol", "update", f"jobid={job}", f"timelimit={minutes}").returncode == 0

    wait_until(lambda: len(losses(parts)) > 3)
    assert limit(int((time.monotonic() - started) / 60) + 3)
    wait_until(lambda: state() == "PENDING")
    assert limit(60)
    done = len(losses(parts))
    assert f"Stopped by SIGUSR1 after step {done} of" in out.read_text()
    assert "exit code 75" in out.read_text()
    assert Checkpoints(parts / "checkpoints").steps() == [done]

    wait_until(lambda: len(losses(parts)) > done + 3)
    assert slurm("scancel", job).returncode == 0
    wait_until(lambda: state() == "CANCELLED")
    assert "Stopped by SIGTERM" in out.read_text()
    seen = losses(parts)
    assert Checkpoints(parts / "checkpoints").steps() == [done, len(seen)]
    assert [row["resumed_from"] for row in RunDir(parts).rows("run")][1:] == [done]

    wait_until(lambda: len(losses(whole)) >= len(seen))
    uninterrupted.send_signal(signal.SIGTERM)
    end(uninterrupted, code=75)
    assert seen == losses(whole)[: len(seen)]


def test_a_sweep_is_submitted_as_arrays_and_collected_after_a_kill(
    slurm: Run, tiny: Path, tmp_path: Path
) -> None:
    """One array for each number of ranks; the sweep is killed while its jobs run, and collects later."""
    out, file = tmp_path / "out", tmp_path / "sweep.yaml"
    base = {
        "model": {"name": str(tiny / "model"), "init": "random"}, "data": {"seq_len": 64},
        "train": {"precision": "fp32", "device": "cpu"},
    }  # fmt: skip
    layouts = ["mb1-ga2", "mb2-ga1", "zero3x2-mb1-ga1", "tp3-mb1-ga1"]
    axes = {"layout": layouts}
    file.write_text(json.dumps({"base": base, "steps": 1, "axes": axes, "slurm": {"comment": "a study"}}))
    words = [sys.executable, "-m", "meshtune", "sweep", file, "--to", "slurm", "--out", out, "--json"]
    killed = slurm("timeout", "--signal=KILL", "30", *words)
    assert killed.returncode in (0, -9, 137), killed.stderr  # timeout kills itself, too
    database = sqlite3.connect(out / "sweep.db")
    statuses = [status for (status,) in database.execute("SELECT status FROM experiments ORDER BY number")]
    assert statuses[3] == "refused" and "waiting" not in statuses
    if "running" in statuses:
        elsewhere = slurm(*[word for word in words if word not in ("--to", "slurm")])
        assert elsewhere.returncode == 2 and "collect them with --to slurm" in elsewhere.stderr
    done = slurm(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"] == {"done": 3, "refused": 1}
    attempts = "SELECT attempts, peak_memory_bytes > 0 FROM results WHERE status = 'done'"
    assert database.execute(attempts).fetchall() == [(1, 1)] * 3
    assert len({*(out / "slurm").glob("*.txt")}) == 2 and not [*(out / "results").glob("*.json")]


def test_an_experiment_on_two_machines_trains_and_a_held_array_of_a_killed_sweep_is_cancelled(
    slurm: Run, tiny: Path, tmp_path: Path
) -> None:
    """Two ranks, one a machine. The sweep before was killed after its array was submitted, held."""
    out, file = tmp_path / "out", tmp_path / "sweep.yaml"
    settings = short_run(tiny, tmp_path / "cache", tmp_path / "unused")
    document = {
        "run": "train", "base": {"train": {"device": "cpu"}}, "axes": {"layout": ["zero3x2-mb1"]},
        "slurm": {"gpus-per-node": 1},
    }  # fmt: skip
    file.write_text(json.dumps(document))
    out.mkdir()
    (out / "sweep.sbatch").write_text("#!/bin/bash\ntrue\n")
    held = slurm("sbatch", "--parsable", "--hold", "--array=0-1", out / "sweep.sbatch", "x")
    words = [sys.executable, "-m", "meshtune", "sweep", file, *settings, "--to", "slurm", "--json"]
    words += ["--out", out]
    done = slurm(*words)
    assert done.returncode == 0, done.stderr
    assert f"Cancelled the held array {held.stdout.strip()}," in done.stderr
    logs = [log.read_text() for log in (out / "logs").glob("*.log")]
    assert json.loads(done.stdout)["counts"] == {"done": 1}, (done.stdout, logs)
    (start,) = RunDir(out / "runs" / "1").rows("run")
    assert start["world"] == 2
    jobs = slurm("scontrol", "show", "job").stdout.split("\n\n")
    assert ["NumNodes=2 " in job for job in jobs if "JobState=COMPLETED" in job and str(out) in job] == [True]


def test_a_submitted_run_asks_for_what_a_real_slurm_takes_and_has_its_log(
    slurm: Run, meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    """Two machines of one rank; the speed of the processor is a made one."""
    meshtune("train", *settings(f"output={tmp_path / 'one'}"))
    cluster = "cluster={gpu: cpu, gpus: 2, gpus_per_node: 1, efficiency: {matmul: 0.5}, time_limit: 2h}"
    words = [*settings(f"output={tmp_path / 'my run'}", "layout=zero3x2"), cluster, "--to", "slurm"]

    def submit(*words: object) -> "subprocess.CompletedProcess[str]":
        inside = 'cd "$0" && PATH="$1:$PATH" && shift && exec python -m meshtune submit "$@"'
        return slurm("bash", "-c", inside, tmp_path, Path(sys.executable).parent, *words)

    extra = "cluster.slurm.extra=['--comment=a study']"
    written = submit(*words, extra, "--write", "files")
    assert written.returncode == 0, written.stderr
    tried = slurm("sbatch", "--test-only", tmp_path / "files" / "job.sbatch")
    assert tried.returncode == 0, tried.stderr
    refused = submit(*words, "cluster.slurm.partition=gpus")
    assert refused.returncode == 2 and "Change cluster.slurm.partition." in refused.stderr

    sent = submit(*words, "--json")
    assert sent.returncode == 0, sent.stderr
    job = json.loads(sent.stdout)["job"]
    number = job.removeprefix("slurm:")
    wait_until(lambda: "COMPLETED" in slurm("scontrol", "show", "job", number).stdout, seconds=500)
    ended = slurm("scontrol", "show", "job", number).stdout
    assert re.search(r"Comment=meshtune: at [\d:]+ step (\d+) of \1, loss \d", ended), ended
    (run,) = RunDir(tmp_path / "my run").rows("run")
    allocated = re.search(r"StartTime=(\S+)", ended)
    assert allocated and allocated[1] <= run["begun"][:19] < run["started"][:19], (
        "the job's script begins first"
    )
    assert submit("status", job).stdout == f"Slurm's job {number} has ended: COMPLETED.\n"
    assert "submitted job" in submit("logs", job).stdout
    assert [loss for _, loss, _ in losses(tmp_path / "my run")] == pytest.approx(
        [loss for _, loss, _ in losses(tmp_path / "one")], rel=1e-5
    )


CPUS = "cluster={gpu: cpu, gpus: 3, gpus_per_node: 1, efficiency: {matmul: 0.5}, time_limit: 2h}"
EVENTS = int(os.environ.get("SLURM_EVENTS", "3"))  # 20 were run once: docs/clusters.md
KINDS = ("signal", "requeue", "killed stepd", "drained", "limit", "controller")


def submitted(slurm: Run, folder: Path, words: list[str], wait: int = 600) -> str:
    """Number of the job that `meshtune submit` sends from the folder. wait: srun's, in seconds."""
    inside = (
        'cd "$0" && export PATH="$1:$PATH" SLURM_WAIT=$2 && shift 2 && exec python -m meshtune submit "$@"'
    )
    words = [*words, CPUS, "--to", "slurm", "--json"]
    sent = slurm("bash", "-c", inside, folder, Path(sys.executable).parent, wait, *words)
    assert sent.returncode == 0, sent.stderr
    return json.loads(sent.stdout)["job"].removeprefix("slurm:")


def shown(slurm: Run, job: str, field: str) -> str:
    found = re.search(rf"\b{field}=(\S+)", slurm("scontrol", "show", "job", job).stdout)
    return found[1] if found else ""


def weights(run: Path) -> dict[str, str]:
    files = sorted((run / "model").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def stop_by(slurm: Run, kind: str, job: str) -> None:
    """One event that ends a start of the job, until it may start again; a new controller does not end it."""
    if kind == "signal":
        assert slurm("scancel", "--signal=USR1", job).returncode == 0
    elif kind in ("requeue", "drained"):
        if kind == "drained":
            words = ("nodename=node2", "state=drain", "reason=test")
            assert slurm("scontrol", "update", *words).returncode == 0
        assert slurm("scontrol", "requeuehold", job).returncode == 0
        # Without cgroups an srun that waits for a killed slurmstepd outlives its script, and then ends the
        # step of this name in the next start.
        wait_until(lambda: not any(processes_on(state_of(slurm), "", job)))
        if kind == "drained":
            assert slurm("scontrol", "update", "nodename=node2", "state=resume").returncode == 0
        assert slurm("scontrol", "release", job).returncode == 0
    elif kind == "limit":  # USR1 comes a margin of more than a minute ahead of it
        before, ran = shown(slurm, job, "Restarts"), shown(slurm, job, "RunTime")
        hours, minutes, seconds = map(int, ran.split(":"))
        limit = f"timelimit={60 * hours + minutes + 1 + (seconds > 20)}"
        wait_until(lambda: slurm("scontrol", "update", f"jobid={job}", limit).returncode == 0)
        wait_until(lambda: shown(slurm, job, "Restarts") != before)
        wait_until(lambda: slurm("scontrol", "update", f"jobid={job}", "timelimit=120").returncode == 0)
    elif kind == "killed stepd":
        _, stepds = processes_on(state_of(slurm), "node2", job)
        assert len(stepds) == 1
        os.kill(stepds.pop(), signal.SIGKILL)
    else:
        pid = int((state_of(slurm) / "slurmctld.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        assert slurm(SCRIPT, "again", state_of(slurm)).returncode == 0
        wait_until(lambda: shown(slurm, job, "JobState"))


@pytest.mark.timeout(1200 + 200 * EVENTS)
def test_a_run_that_events_stop_again_and_again_ends_bit_for_bit(
    slurm: Run, settings: Settings, tmp_path: Path
) -> None:
    chosen = random.Random(int(os.environ.get("SLURM_SEED", "0"))).choices(KINDS, k=EVENTS)
    # A limit that is reached while srun waits for a killed slurmstepd ends the job: no script is left to
    # requeue it.
    for before, kind in enumerate(chosen[1:]):
        if (chosen[before], kind) == ("killed stepd", "limit"):
            chosen[before + 1] = "signal"
    steps = 100 + 30 * EVENTS + 400 * chosen.count("limit")  # a limit is a minute or more away
    words = settings(
        f"train.max_steps={steps}", "layout=zero3x3", "train.global_batch_size=12", "checkpoint.every=10"
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job = submitted(slurm, tmp_path, [*words, f"output={parts}"], wait=30)
    for kind in chosen:
        done = len(losses(parts)) if parts.exists() else 0
        # srun waits for a killed slurmstepd, Slurm for credentials, and the run for its ranks.
        wait_until(lambda done=done: parts.exists() and len(losses(parts)) > done + 12, seconds=500)
        print(f"{kind} after step {len(losses(parts))}", flush=True)
        stop_by(slurm, kind, job)
    wait_until(
        lambda: shown(slurm, job, "JobState") not in ("RUNNING", "PENDING", "COMPLETING"),
        seconds=900 + 120 * EVENTS,
    )
    other = submitted(slurm, tmp_path, [*words, f"output={whole}"])
    wait_until(lambda: shown(slurm, other, "JobState") == "COMPLETED", seconds=900 + 120 * EVENTS)
    assert losses(parts) == losses(whole) and weights(parts) == weights(whole) != {}


def test_a_dead_node_leaves_two_of_three_in_the_next_layout(
    slurm: Run, meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    output = tmp_path / "elastic"
    words = settings("train.max_steps=200", "train.global_batch_size=12", "checkpoint.every=10")
    job = submitted(slurm, tmp_path, [*words, f"output={output}", "--elastic", "2:3"])
    wait_until(lambda: output.exists() and len(losses(output)) > 12)
    kill_node(state_of(slurm), "node3", job)
    wait_until(lambda: shown(slurm, job, "JobState") == "COMPLETED", seconds=550)
    three, two = RunDir(output).rows("run")
    assert three["layout"] != two["layout"] and two["resumed_from"] >= 10
    assert shown(slurm, job, "NumNodes") == "2"
    meshtune("train", *words, f"output={tmp_path / 'one'}")
    assert [loss for _, loss, _ in losses(output)] == pytest.approx(
        [loss for _, loss, _ in losses(tmp_path / "one")], rel=1e-3
    )
    assert slurm(SCRIPT, "again", state_of(slurm)).returncode == 0


def state_of(slurm: Run) -> Path:
    """The folder of the cluster's daemons."""
    return Path(slurm("printenv", "SLURM_CONF").stdout.strip()).parent


def processes_on(state: Path, node: str, job: str) -> tuple[set[int], set[int]]:
    """(Processes of a job on a node, those that have started them); node: "" for all processes."""
    names = {f"SLURM_CONF={state}/slurm.conf", f"SLURM_JOB_ID={job}"}
    names |= {f"SLURMD_NODENAME={node}"} if node else set()
    tasks, parents = set[int](), set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process of someone else, or one that has ended
            if names <= {*(folder / "environ").read_text(errors="replace").split("\0")}:
                tasks.add(int(folder.name))
                parents.add(int((folder / "stat").read_text().rpartition(")")[2].split()[1]))
    return tasks, parents - tasks


def kill_node(state: Path, node: str, job: str) -> None:
    """Kill the node's daemon, its tasks of the job and what has started them."""
    tasks, stepds = processes_on(state, node, job)
    for pid in {int((state / f"{node}.pid").read_text()), *tasks, *stepds}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
