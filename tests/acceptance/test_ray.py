"""A real Ray of three nodes on this machine, in an environment of its own: scripts/export_readers.py ray."""

import json
import os
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from command import Command, end, losses, wait_until

from meshtune.rundir import RunDir, saved_steps
from meshtune.study.children import marked

pytestmark = [pytest.mark.all, pytest.mark.needs("ray"), pytest.mark.timeout(3000)]

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
CLUSTER = "cluster={gpu: cpu, gpus: 2, gpus_per_node: 1, efficiency: {matmul: 0.5}}"

Settings = Callable[..., list[str]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, which runs drivers, and two nodes for a machine each."""
    os.environ |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300", "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "300",
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    head = NODE | {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port}
    made = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
    made.nodes = [made.add_node(**NODE) for _ in range(2)]
    yield made
    made.shutdown()


@pytest.fixture
def submitted(
    cluster: Any,
    meshtune: Command,
    settings: Settings,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[..., tuple[str, Callable[[str], str]]]:
    """(Name of the job, function to ask for it), of a run on two machines of a rank."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def submit(*words: str, layout: str = "zero3x2") -> tuple[str, Callable[[str], str]]:
        ray = (f"cluster.ray.address=http://{cluster.webui_url}", "cluster.ray.bundle={CPU: 1}")
        words = (*settings(f"layout={layout}", *words), CLUSTER, f"cluster.storage={tiny}", *ray)
        job = meshtune("submit", *words, "--to", "ray", "--json").json["job"]
        return job, lambda command: meshtune("submit", command, job).out

    return submit


def test_a_run_goes_on_bit_for_bit_once_a_lost_node_is_back(
    cluster: Any, submitted: Any, begin: Any, settings: Settings, tmp_path: Path
) -> None:
    words = ("train.max_steps=60", "checkpoint.every=5")
    run, whole = tmp_path / "run", tmp_path / "whole"
    _, ask = submitted(*words, f"output={run}")
    wait_until(lambda: saved_steps(run / "checkpoints"))
    cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)
    wait_until(lambda: "has not given 2 machines" in ask("logs"))
    done = len(losses(run))
    assert 5 <= done < 60 and "RUNNING" in ask("status")
    cluster.nodes.append(cluster.add_node(**NODE))
    wait_until(lambda: "succeeded" in ask("status"))
    (_, again) = RunDir(run).rows("run")
    assert 0 < again["resumed_from"] <= done and "was lost" in ask("logs")
    end(begin("train", *settings("layout=zero3x2", *words, f"output={whole}")))
    assert losses(run) == losses(whole)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (run, whole)]
    assert weights[0] == weights[1]


def test_a_stopped_job_saves_and_the_next_one_resumes(submitted: Any, tmp_path: Path) -> None:
    run, long = tmp_path / "run", "train.max_steps=100000"
    _, ask = submitted(long, f"output={run}")
    wait_until(lambda: len(losses(run)) > 3)
    assert "is being stopped" in ask("cancel")
    wait_until(lambda: "was stopped" in ask("status"))
    done = len(losses(run))
    assert saved_steps(run / "checkpoints") == [done]
    assert f"Stopped by SIGTERM after step {done} of" in ask("logs")
    _, ask = submitted(f"train.max_steps={done + 2}", f"output={run}")
    wait_until(lambda: "succeeded" in ask("status"))
    assert len(losses(run)) == done + 2
    assert [row["resumed_from"] for row in RunDir(run).rows("run")][1:] == [done]


def test_an_elastic_run_continues_in_another_layout_on_the_node_that_is_left(
    cluster: Any, submitted: Any, meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", ("train.max_steps=100", "checkpoint.every=5")
    _, ask = submitted(*words, f"output={run}", "--elastic", "1:2", layout="auto")
    wait_until(lambda: saved_steps(run / "checkpoints"))
    cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)
    wait_until(lambda: "succeeded" in ask("status"))
    two, one = RunDir(run).rows("run")
    assert two["layout"] != one["layout"] and one["resumed_from"] >= 5
    assert "the run starts on 1 machine." in ask("logs")
    meshtune("train", *settings(*words, f"output={tmp_path / 'whole'}"))
    assert [loss for _, loss, _ in losses(run)] == pytest.approx(
        [loss for _, loss, _ in losses(tmp_path / "whole")], rel=1e-3
    )
    cluster.nodes.append(cluster.add_node(**NODE))


def test_a_sweep_survives_a_lost_node_a_killed_collector_and_a_stop(
    cluster: Any,
    meshtune: Command,
    begin: Any,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Four trainings of one and two ranks, two at once."""
    monkeypatch.setattr("meshtune.study.ray.LOOK", 2.0)
    out, file = tmp_path / "out", tmp_path / "sweep.yaml"
    axes = {"train.seed": [1, 2], "layout": ["mb1", "zero3x2-mb1"]}
    file.write_text(json.dumps({"run": "train", "base": {"train": {"device": "cpu"}}, "axes": axes}))
    ray = (f"cluster.ray={{address: 'http://{cluster.webui_url}', bundle: {{CPU: 1}}}}", "--to", "ray")
    words = ("sweep", file, *settings("train.max_steps=60"), *ray, "--out", out, "--json")
    collector = begin(*words)
    wait_until(lambda: sum(bool(losses(folder)) for folder in (out / "runs").glob("?")) == 2)
    (job,) = {row[0].rpartition("_")[0] for row in database(out, "SELECT job FROM experiments")}
    collector.kill()
    cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)
    wait_until(lambda: "It is started again" in meshtune("submit", "logs", f"ray:{job}").out)
    cluster.nodes.append(cluster.add_node(**NODE))
    meshtune("submit", "cancel", f"ray:{job}")
    wait_until(lambda: "was stopped" in meshtune("submit", "status", f"ray:{job}").out)
    assert not [*marked(job.partition("@")[0])]
    assert meshtune(*words).json["counts"]["waiting"] > 0
    done = meshtune(*words)
    assert done.json["counts"] == {"done": 4}, done.err
    starts = [RunDir(out / "runs" / str(number)).rows("run")[-1] for number in range(1, 5)]
    assert sorted(start["world"] for start in starts) == [1, 1, 2, 2]
    assert database(out, "SELECT DISTINCT loss IS NOT NULL, job FROM experiments") == [(1, None)]


def database(out: Path, query: str) -> list[Any]:
    return sqlite3.connect(out / "sweep.db").execute(query).fetchall()
