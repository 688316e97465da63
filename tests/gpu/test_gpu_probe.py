"""A probe of the GPUs of this machine, with NCCL where there are several."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshtune import config
from meshtune.api.probe import probe
from meshtune.plan.cluster import cluster_for
from meshtune.study import probe_kind
from meshtune.study.probe import CUDA, MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FEW = replace(
    CUDA, tokens=1024, squares=(512, 1024, 2048), blocks=((512, 1408), (2048, 8192)), attended=4096,
    lengths=(512, 2048), copied=(64 * MIB, 256 * MIB), exchanged=(MIB, 16 * MIB), rounds=3,
)  # fmt: skip


def test_a_probe_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of a GPU below its peaks, launches of some microseconds, collectives between all GPUs."""
    monkeypatch.setattr(probe_kind, "REFUSED", 1e9)
    file, gpus = tmp_path / "gpus.toml", torch.cuda.device_count()
    document = probe(file, sizes=FEW)
    assert document == tomllib.loads(file.read_text())
    cluster = cluster_for(config.load(None, ["model.name=a", f"cluster={file}"]))
    assert cluster.gpus == gpus
    assert cluster.gpu.matmul_max <= cluster.gpu.bf16
    assert 1e-6 < cluster.gpu.efficiency["launch"] < 1e-4
    assert ("collective" in document["measured"]["figures"]) == (gpus > 1)
