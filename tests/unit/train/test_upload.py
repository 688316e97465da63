"""Uploads through the real huggingface_hub to a small hub on this machine."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from golden import refuses
from huggingface_hub import constants

from meshtune import config
from meshtune.api import build
from meshtune.api.train import settled
from meshtune.errors import UserError
from meshtune.rundir import RunDir
from meshtune.train.export import Exporter, push, try_repository


class Hub(ThreadingHTTPServer):
    """Answers what the uploads ask; `refused` maps a part of a path to the status that it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[str] = []
        self.uploaded: list[str] = []
        self.refused: dict[str, int] = {}
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.answer({"siblings": [], "id": "me/tuned", "sha": "1" * 40})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if "preupload" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for file in json.loads(body)["files"]]  # fmt: skip
            return self.answer({"files": files})
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            self.server.uploaded = [line["value"]["path"] for line in lines if line["key"] == "file"]
        url = f"{self.server.address}/me/tuned"
        self.answer({"url": url, "commitUrl": f"{url}/commit/1", "commitOid": "1" * 40, "name": "me/tuned"})

    def answer(self, content: dict[str, Any]) -> None:
        self.server.asked.append(self.path)
        status = next((code for part, code in self.server.refused.items() if part in self.path), 200)
        self.send_response(status)
        body = json.dumps(content if status == 200 else {"error": "You have no right to do this"}).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield server
    server.shutdown()


def test_a_folder_is_uploaded_after_its_repository_was_tried(hub: Hub, tmp_path: Path) -> None:
    try_repository("me/tuned", private=True)
    paths = [path for path in hub.asked if "me/tuned" in path or "repos" in path]
    assert paths == ["/api/repos/create", "/api/models/me/tuned/auth-check/write"]
    (tmp_path / "config.json").write_text("{}")
    address = push(tmp_path, "me/tuned", private=True, again="")
    assert hub.uploaded == ["config.json"] and hub.address in address


@pytest.mark.parametrize("refused", ["repos/create", "auth-check/write"])
def test_a_repository_that_can_not_be_written_is_refused_before_the_model_loads(
    refused: str,
    hub: Hub,
    settings: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(build, "rank_model")
    hub.refused = {refused: 403} if refused != "repos/create" else {"": 401}
    with pytest.raises(UserError, match=r"hub\.push_to=me/tuned can't be written: .*40[13].*hf auth login"):
        build.build(config.load(None, settings("hub.push_to=me/tuned")))
    assert not (tmp_path / "run").exists()


def test_bad_data_leaves_no_empty_repository(
    hub: Hub, settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    wanted = config.load(None, settings("hub.push_to=me/tuned", f"data.train={tmp_path / 'bad.jsonl'}"))
    settled(wanted)
    with refuses(UserError):
        build.build(wanted)
    assert hub.asked == []


def test_no_network_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"can't be written: .*refused"):
        try_repository("me/tuned", private=True)


def test_a_failed_upload_is_one_sentence_with_the_command_that_uploads_later(
    hub: Hub, tmp_path: Path
) -> None:
    hub.refused = {"/commit/": 403}
    run = RunDir(tmp_path / "run")
    run.model.mkdir(parents=True)
    (run.model / "config.json").write_text("{}")
    exporter: Any = SimpleNamespace(push_to="me/tuned", private=True, world=SimpleNamespace(main=True))
    said = Exporter.push(exporter, run)
    assert said and said.startswith(f"{run.model} is complete, but was not uploaded to me/tuned: 403 ")
    assert said.endswith(f"To upload it: meshtune export {run.path} {run.path}-upload --push-to me/tuned")
    hub.refused = {}
    assert str(Exporter.push(exporter, run)).startswith("Uploaded to http")


@pytest.mark.ci
def test_a_run_whose_upload_failed_is_finished(hub: Hub, train: Callable[..., Any], capfd: Any) -> None:
    hub.refused = {"/commit/": 403}
    run = train("hub.push_to=me/tuned", "log.to=[console]")
    assert capfd.readouterr().err.count("was not uploaded to me/tuned") == 1
    assert run.folder.rows("end")[-1]["status"] == "finished"
