"""`meshtune probe`: what is refused before anything is measured, and real probes of a few operations."""

import json
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from golden import refuses

from meshtune import config
from meshtune.api.plan import plan
from meshtune.api.probe import probe
from meshtune.commands.probe import probe as command
from meshtune.errors import UserError
from meshtune.plan.cluster import cluster_for
from meshtune.study import probe_kind
from meshtune.study.probe import CPU, MIB, answering

FEW = replace(
    CPU, tokens=64, squares=(64, 128, 192), blocks=((64, 128), (128, 256)), attended=256,
    lengths=(64, 128, 256), copied=(MIB // 4, MIB), exchanged=(2**14, 2 * MIB),
    sample=1e-3, shared_sample=1e-3, rounds=3,
)  # fmt: skip


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every figure: tests share the machine, and are not about how quiet it is."""
    monkeypatch.setattr(probe_kind, "REFUSED", 1e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.ci
@pytest.mark.usefixtures("patient")
def test_a_rank_alone_is_measured_without_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank: rates of a processor, no link; the file plans with times. A terminal sees what is loaded."""
    file = tmp_path / "one.toml"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    document = probe(file, nproc=1, sizes=FEW)
    assert "loading PyTorch" in capsys.readouterr().err
    assert document == tomllib.loads(file.read_text())
    assert "collective" not in document["measured"]["figures"]
    assert {"link_share", "link_latency"}.isdisjoint(document["kind"]["efficiency"])
    assert document["measured"]["not_measured"] == ["link_share"]
    cluster = cluster_for(config.load(None, ["model.name=a", f"cluster={file}"]))
    assert cluster.timed
    assert cluster.gpu.fp32 > 1e9


@pytest.mark.ci
@pytest.mark.usefixtures("patient")
def test_ranks_at_work_are_measured_together(tmp_path: Path) -> None:
    """Two forked ranks: rates of both at work, and of their collectives."""
    file = tmp_path / "two.toml"
    document = probe(file, nproc=2, sizes=FEW)
    forms = {one["form"] for one in document["measured"]["figures"]["collective"]}
    assert forms == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    (two,) = document["kind"]["shared"]
    assert {"ranks", "matmul", "attention", "memory", "launch", "link_share", "link_latency"} == two.keys()
    overrides = ["model.name=typical-llama-100M", f"cluster={file}", "train.precision=fp32"]
    overrides += ["data.seq_len=128", "train.global_batch_size=4"]
    cluster = cluster_for(config.load(None, [*overrides, "cluster.gpus=2"]))
    assert cluster.memory == pytest.approx(document["kind"]["memory_gib"] * 2**30 / 2)
    one, two = (plan({}, [*overrides, f"cluster.gpus={ranks}"]).choice for ranks in (1, 2))
    assert one.seconds.total > 0
    compute = two.seconds.compute / one.seconds.compute  # half the batch, by half the cores at worst
    assert 0.3 < compute < 3


@pytest.mark.usefixtures("patient")
def test_the_command_prints_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json`: the file's tables on stdout, progress on stderr."""
    monkeypatch.setattr("meshtune.api.probe.probe", partial(probe, sizes=replace(FEW, rounds=1)))
    command(tmp_path / "one.toml", nproc=1, as_json=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["cluster"] == {"gpu": "this-cpu", "gpus_per_node": 1}
    assert "round 1 of 1 measured" in printed.err
    assert "plan with it by cluster=" in printed.err


@pytest.mark.parametrize(
    "name",
    [
        "there.toml",
        "a.yaml",
        "none/a.toml",
    ],
)
def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, name: str) -> None:
    """Nothing is measured for a file that exists, has another ending, or no folder."""
    (tmp_path / "there.toml").touch()
    with refuses(UserError):
        probe(tmp_path / name, nproc=1)


def test_a_folder_without_write_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the folder."""
    monkeypatch.setattr("os.access", lambda *_: False)
    with refuses(UserError):
        probe(tmp_path / "a.toml", nproc=1)


def test_more_ranks_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank needs a GPU of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with refuses(UserError):
        probe(tmp_path / "a.toml", nproc=3)


def test_without_torch_distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks need it; the sentence names the remedy."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with refuses(UserError):
        probe(tmp_path / "a.toml", nproc=2)


def test_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe starts its own ranks."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with refuses(UserError):
        probe(tmp_path / "a.toml")


def test_a_gpu_that_stops_answering() -> None:
    """CUDA's and NCCL's errors become a sentence; others, and memory that runs out, pass."""
    with refuses(UserError), answering():
        raise RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="another"), answering():
        raise RuntimeError("another")
