"""Progress for what runs the job: a server in the place of Kubeflow's, and scripts in that of Slurm's."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from golden import says

from meshtune.rundir import EXPECTED, RunDir
from meshtune.train import dashboards
from meshtune.train.console import Course
from meshtune.train.trackers import Metrics

NUMBERS = {
    "loss": 2.5, "grad_norm": 1.25, "learning_rate": 1e-4, "tokens": 1000, "label_tokens": 400,
    "step_seconds": 0.5, "data_seconds": 0.01, "epoch": 0.7512,
}  # fmt: skip

SPACING = dashboards.ProgressTracker.spacing


class Server(ThreadingHTTPServer):
    """Keeps what is posted; answers with `code`, or not at all until `released` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posts: list[tuple[str, dict[str, Any]]] = []  # (token, trainerStatus)
        self.code, self.released = 200, Event()
        self.released.set()

    def waited(self, posts: int) -> list[dict[str, Any]]:
        """Statuses once there are so many."""
        for _ in range(1000):
            if len(self.posts) >= posts:
                break
            time.sleep(0.01)
        assert len(self.posts) == posts
        return [status for _, status in self.posts]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Content-Type"] == "application/json" and body.keys() == {"trainerStatus"}
        self.server.posts.append((self.headers["Authorization"], body["trainerStatus"]))
        self.server.released.wait(60)
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "token").write_text("first\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setattr(dashboards.ProgressTracker, "spacing", 0.0)
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def opened(folder: Path, rank: int = 0) -> Metrics:
    return Metrics.open(RunDir(folder / "run").create(), [], course=Course(8), rank=rank)


def comparable(status: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The status without its times, and with the metrics of these names."""
    metrics = {metric["name"]: metric["value"] for metric in status["metrics"]}
    return {"percent": status["progressPercentage"]} | {n: metrics[n] for n in names & metrics.keys()}


@pytest.mark.ci
def test_posts_have_the_fields_and_values_of_transformers(server: Server, tmp_path: Path) -> None:
    from transformers import integrations

    theirs: Any = getattr(integrations, "KubeflowCallback", pytest.skip.Exception)()
    if isinstance(theirs, pytest.skip.Exception):
        pytest.skip("this transformers has no KubeflowCallback")
    assert theirs._MIN_UPDATE_INTERVAL == SPACING
    theirs._MIN_UPDATE_INTERVAL = 0
    state: Any = SimpleNamespace(is_world_process_zero=True, max_steps=8, global_step=3, epoch=0.7512)
    theirs.on_train_begin(None, state, None)
    theirs.on_log(None, state, None, {key: NUMBERS[key] for key in ("loss", "grad_norm", "learning_rate")})
    theirs.on_step_end(None, state, None)
    theirs.on_train_end(None, state, None)
    expected = server.waited(3)
    with opened(tmp_path) as metrics:
        metrics.start(model="m")
        server.waited(4)
        metrics.train(step=2, **NUMBERS)
        server.waited(5)
        (tmp_path / "token").write_text("second")
        metrics.train(step=3, **NUMBERS)
        server.waited(6)
    first, _, third, last = server.waited(7)[3:]
    for post, reference in ((first, expected[0]), (third, expected[1]), (last, expected[2])):
        names = {metric["name"] for metric in reference["metrics"]}
        assert comparable(post, names) == comparable(reference, names)
        assert post.keys() >= reference.keys() - {"estimatedRemainingSeconds"}
    assert "estimatedRemainingSeconds" not in first and last["estimatedRemainingSeconds"] == 0
    assert type(third["estimatedRemainingSeconds"]) is int and third["lastUpdatedTime"][-6:] == "+00:00"
    assert [token for token, _ in server.posts[3:]] == [
        f"Bearer {t}" for t in ("first", "first", "second", "second")
    ]


def test_posts_keep_their_distance_and_a_stopped_run_does_not_end_at_100(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboards.ProgressTracker, "spacing", 600.0)
    metrics = opened(tmp_path)
    metrics.start(model="m")
    server.waited(1)
    metrics.train(step=1, **NUMBERS)
    server.waited(2)  # the first step does not wait
    for step in range(2, 9):
        metrics.train(step=step, **NUMBERS)
    metrics.close(failed=True)
    assert [post["progressPercentage"] for post in server.waited(3)] == [0, 12, 99]


@pytest.mark.parametrize("hangs", [True, False, None])
def test_a_server_that_hangs_or_refuses_changes_nothing_in_a_run(
    server: Server, hangs: bool | None, train: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(dashboards.ProgressTracker, "patience", 0.1)
    server.code = 403
    (server.released.clear if hangs else server.released.set)()
    if hangs is None:
        (tmp_path / "token").unlink()
    train(f"output={tmp_path / 'one'}")
    assert bool(server.posts) == (hangs is not None) and server.released.is_set() != bool(hangs)
    says([line for line in capfd.readouterr().err.splitlines() if "outside the run" in line])
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "true")
    assert len(opened(tmp_path).trackers) == 1
    train(f"output={tmp_path / 'other'}")
    rows = [[row["loss"] for row in RunDir(tmp_path / name).rows("train")] for name in ("one", "other")]
    assert rows[0] == rows[1] and len(rows[0]) > 1
    monkeypatch.delenv("DISABLE_KUBEFLOW_INTEGRATION")
    assert opened(tmp_path, rank=1).trackers == ()


@pytest.mark.parametrize("comment", ["", "meshtune: step 1 of 8", "grant 12"])
def test_slurms_comment_has_the_progress_unless_it_has_another(
    comment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'test "$1" = update && echo "$*" >> {tmp_path}/called\necho "   Comment={comment}"'
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert [type(tracker).__name__ for tracker in opened(tmp_path).trackers] == ["JsonlTracker"]
    monkeypatch.setenv(EXPECTED, "{}")
    with opened(tmp_path) as metrics:
        metrics.start(model="m")
        metrics.train(step=8, **NUMBERS)
    called = tmp_path / "called"
    assert called.exists() == (comment != "grant 12")
    if called.exists():
        last = called.read_text().splitlines()[-1]
        assert re.fullmatch(
            r"update JobId=7 Comment=meshtune: at \d\d:\d\d:\d\d step 8 of 8, loss 2.5000", last
        )
