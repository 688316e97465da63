"""The row that begins metrics.jsonl: every fact, what it depends on, and what is left out."""

import shutil
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import yaml
from tiny import make_rows, make_tokenizer, write_rows

from meshtune import config
from meshtune.api import build
from meshtune.api.resolve import inputs_of
from meshtune.commands.env import environment
from meshtune.errors import Interrupted
from meshtune.launch import installed
from meshtune.launch.rank import cores
from meshtune.report.run.report import report_page
from meshtune.train import loop, run_row

Settings = Callable[..., list[str]]
Train = Callable[..., loop.Run]
TYPES: dict[str, type | tuple[type, ...]] = {
    "base_digest": (str, type(None)),
    "id": str, "start": int, "started": str, "model": str, "method": str, "objective": str,
    "parameters": int,
    "trainable_parameters": int, "precision": str, "optimizer": str,
    "layout": str, "world": int, "global_batch_size": int,
    "seq_len": int, "total_steps": int, "learning_rate": str, "schedule_steps": int, "seed": int,
    "resumed_from": (int, type(None)), "data": list, "data_digest": str, "label_share": float,
    "longest_sequence": int,
    "flash_attention": (int, type(None)), "experts": (str, type(None)),
    "loss_function": (str, type(None)),
    "host": str, "nodes": int, "device": str, "device_type": str, "cores": int, "meshtune": str, "torch": str,
    "transformers": str, "python": str, "git_commit": str, "git_dirty": bool, "predicted": dict,
}  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a repository of one commit."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (folder / "file").write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "file"], [*who, "commit", "--quiet", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    return folder


@pytest.mark.ci
def test_a_run_row_has_every_fact_in_its_type(train: Train, repository: Path) -> None:
    run = train("train.seed=7", "train.max_steps=1")
    (row,), (end,) = run.folder.rows("run"), run.folder.rows("end")
    assert row.keys() == {"kind", *TYPES}
    for name, kind in TYPES.items():
        assert isinstance(row[name], kind), name
    assert row["start"] == row["nodes"] == 1 and row["seed"] == 7
    assert row["device"] == run_row.processor_name() and row["cores"] == cores() >= 1
    started, ended = (datetime.fromisoformat(text) for text in (row["started"], end["ended"]))
    assert started.tzinfo and started <= ended and (ended - started).seconds < 600
    assert row["predicted"] == yaml.safe_load(run.folder.plan_file.read_text())["predicted"]
    memory = row["predicted"]["memory"]
    assert memory["peak"] > memory["weights"] == 4 * row["parameters"]
    page = report_page(run.folder)
    assert "What the planner predicted" in page and "memory: weights" in page and row["data_digest"] in page


@pytest.mark.ci
def test_a_run_that_goes_on_keeps_its_id_and_counts_its_starts(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*more: str) -> list[Any]:
        run = build.build(config.load(None, settings("checkpoint.every=1", "train.max_steps=2", *more)))
        run.stop.requested = "SIGTERM" if not run.progress.step else None
        if run.stop.requested:
            with pytest.raises(Interrupted):
                loop.train(run)
        return run.folder.rows("run")

    (first,), (_, second) = start(), start()
    assert (second["id"], second["start"]) == (first["id"], 2) and second["resumed_from"] == 1
    (other,) = start(f"output={tmp_path / 'other'}")
    assert other["id"] != first["id"] and other["start"] == 1


@pytest.mark.ci
def test_the_digest_of_the_data_depends_on_rows_tokenizer_template_and_length(
    settings: Settings, tiny: Path, tmp_path: Path
) -> None:
    def digest(*more: str) -> str:
        return inputs_of(config.load(None, settings(*more))).prepared.digest

    copy = shutil.copy(tiny / "train.jsonl", tmp_path / "copy.jsonl")
    first = digest()
    assert digest(f"data.train={copy}", "train.max_steps=9") == first, "neither the file's name nor the run"
    rows = make_rows(120)
    rows[-1]["completion"] += " red"
    other = shutil.copytree(tiny / "model", tmp_path / "model")
    make_tokenizer(["red"], 270).save_pretrained(other)
    chats = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}] * 9
    talk = f"data.train={write_rows(tmp_path / 'talk.jsonl', chats)}"
    digests = [
        first,
        digest(f"data.train={write_rows(tmp_path / 'changed.jsonl', rows)}"),
        digest(f"model.name={other}"),
        digest("data.seq_len=129"),
        digest("data.packing=false"),
        digest("data.packing=false", "data.seq_len=129"),
        digest(f"data.eval={copy}"),
        digest(talk, "data.chat_template=chatml"),
        digest(talk, "data.chat_template=llama3"),
        digest("data.streaming=true"),
        digest("data.streaming=true", "data.seq_len=129"),
        digest("data.streaming=true", f"model.name={other}"),
    ]
    assert len(set(digests)) == len(digests)


def test_nodes_are_the_hosts_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["b", "b", "a", "a", "c"]
    world = SimpleNamespace(all_gather_object=lambda host: hosts, main=True)
    assert run_row.hosts_of(cast(Any, world)) == {"host": "b", "nodes": 3}


def test_a_changed_file_makes_a_repository_dirty_and_a_new_one_does_not(repository: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    (repository / "new").write_text("")
    assert run_row.git_facts() == {"git_commit": head, "git_dirty": False}
    (repository / "file").write_text("2")
    assert run_row.git_facts() == {"git_commit": head, "git_dirty": True}


def test_without_git_a_repository_or_a_commit_there_are_no_facts_of_it(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(repository / ".git")
    assert run_row.git_facts() == {}
    subprocess.run(["git", "init", "--quiet"], check=True)
    assert run_row.git_facts() == {}, "no commit yet"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_row.git_facts() == {}


def test_no_program_keeps_a_run_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "git", 'test "$1" = rev-parse && echo 1a2b || exec sleep 600')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(run_row, "PATIENCE", 0.2)
    assert run_row.git_facts() == {"git_commit": "1a2b"}


def test_processors_have_the_model_that_the_system_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "PROCESSOR", tmp_path / "cpuinfo")
    assert run_row.processor_name(), "a system without the file"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Xeon 8480+\nmodel name\t: Xeon 8480+\n")
    assert run_row.processor_name() == "Xeon 8480+" == run_row.device_name(torch.device("cpu"))
    assert environment(None)["devices"]["cpu"].startswith(f"Xeon 8480+, {cores()} cores, ")


@pytest.mark.parametrize(
    ("build", "none"), [({}, True), ({"cuda": "13.0"}, True), ({"hip": "7.2"}, False), ({"xpu": "1"}, False)]
)
def test_torch_is_asked_for_gpus_only_where_it_may_see_one(
    monkeypatch: pytest.MonkeyPatch, build: dict[str, str], none: bool
) -> None:
    assert installed.versions()["torch"] == torch.__version__
    monkeypatch.setattr(installed, "torch_build", lambda: {"cuda": None, "hip": None} | build)
    without_driver = Mock(side_effect=OSError)
    monkeypatch.setattr(installed.ctypes, "CDLL", without_driver)
    assert installed.has_no_gpu() is none
    monkeypatch.setattr(installed.ctypes, "CDLL", Mock())
    assert installed.has_no_gpu() is not bool(build)


def test_versions_of_cuda_nccl_and_the_driver_are_there_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_row.versions()
    assert not {"cuda", "nccl", "driver"} & plain.keys() or torch.cuda.is_available()
    program(tmp_path / "nvidia-smi", "echo 570.86.15; echo 570.86.15")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(run_row.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert run_row.versions() == plain | {"cuda": "12.8", "nccl": "2.27.5", "driver": "570.86.15"}
    program(tmp_path / "nvidia-smi", "exit 9")
    assert run_row.gpu_versions() == {"cuda": "12.8", "nccl": "2.27.5"}


def program(file: Path, script: str) -> None:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
