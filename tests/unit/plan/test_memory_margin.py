"""The share of a GPU's memory that a plan leaves free: 4 % on measured kinds, 10 % on others, or as set."""

from pathlib import Path
from typing import Any

import pytest

from meshtune.config import Config
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.plan import advice, fits
from meshtune.plan.cluster import Cluster, cluster_here, cluster_of
from meshtune.plan.facts import cluster_facts
from meshtune.plan.hardware import catalogue
from meshtune.plan.models import models
from meshtune.plan.search import explained, search
from meshtune.plan.workload import Workload
from meshtune.sections import ClusterConfig

UNMEASURED = next(name for name, gpu in catalogue().items() if not gpu.measured and name != "cpu")


def machines(gpu: str = "h100-sxm", gpus: int = 8, **settings: Any) -> Cluster:
    return cluster_of(ClusterConfig(gpu=gpu, gpus=gpus, **settings))


def workload(size: int = 64, model: str = "llama-3.1-8b") -> Workload:
    shape = models()[model]
    return Workload(model, shape.work, shape.traits, 4096, size)


@pytest.mark.parametrize(("gpu", "margin"), [("h100-sxm", 0.04), ("a100-80", 0.04), (UNMEASURED, 0.1)])
def test_kinds_without_a_measured_matmul_rate_keep_more_memory_free(gpu: str, margin: float) -> None:
    cluster = machines(gpu)
    assert cluster.margin == margin
    plan = search(workload(), cluster)
    assert plan.memory.peak.max() <= cluster.memory * (1 - margin)
    assert f"leaves {margin:.0%} of it free (cluster.memory_margin" in " ".join(
        advice.reasoning(plan, plan.choice(0))
    )


def test_a_margin_that_is_set_holds_in_every_question() -> None:
    cluster = machines(memory_margin=0.5)
    w, half = workload(), cluster.memory / 2
    assert cluster_facts(cluster)["usable_memory"] == half
    plan = search(w, cluster)
    assert 0.8 * half < plan.memory.peak.max() <= half
    for alternative in advice.alternatives(plan):
        if alternative.sentence.startswith("does not fit"):
            assert alternative.choice and alternative.choice.memory.peak > half
    tight = next(choice for choice in search(w, machines()).best(200) if choice.memory.peak > half)
    assert not explained(w, cluster, tight.layout).fits
    assert fits.largest(w, cluster, "batch")[1].memory.peak <= half
    for remedy in fits.remedies(workload(64, "llama-3.1-70b"), machines(gpus=8, memory_margin=0.5)):
        layout = remedy.split("layout=")[1].split(" ")[0]
        assert Layout.parse(layout)
        gib = float(remedy.rsplit("(", 1)[1].split(" ")[0])
        assert gib <= max(gpu.memory for gpu in catalogue().values()) / 2**31


def test_another_kind_of_gpu_has_its_own_margin_in_a_remedy() -> None:
    for remedy in fits.remedies(workload(8, "llama-3.2-3b"), machines("rtx-4090", gpus=1)):
        if remedy.startswith("cluster.gpu="):
            kind, need = catalogue()[remedy[12:].split(" ")[0]], float(remedy.rsplit("(", 1)[1].split(" ")[0])
            assert need * 2**30 <= kind.memory * (0.96 if kind.measured else 0.9) * 1.01


def test_a_run_leaves_the_margin_of_its_settings_free() -> None:
    """`layout: auto` of a run plans with `cluster_here`, on GPUs and on a processor."""
    config = Config.model_validate({"model": {"name": "any"}, "cluster": {"memory_margin": 0.3}})
    assert cluster_here(config, 8, [("NVIDIA H100 80GB HBM3", 79e9)] * 8).margin == 0.3
    assert cluster_here(config, 2, []).margin == 0.3
    usual = Config.model_validate({"model": {"name": "any"}})
    assert cluster_here(usual, 8, [("NVIDIA H100 80GB HBM3", 79e9)] * 8).margin == 0.04


OWN = """
[own]
words = ["Own"]
bf16 = 400
fp32 = 50
memory_gib = 64
bandwidth = 2000
link = 200
link_kind = "nvlink"
node = 4
network = 50
multiprocessors = 100
source = "measured here"
efficiency_as = "h100-sxm"
"""


def test_a_kind_of_ones_own_is_measured_if_it_has_a_matmul_rate(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    assert machines("own", hardware=str(file)).margin == 0.1
    assert machines("own", hardware=str(file), efficiency={"matmul": 0.7}).margin == 0.04
    file.write_text(f"{OWN}efficiency = {{matmul = 0.7}}\n")
    assert machines("own", hardware=str(file)).margin == 0.04


@pytest.mark.parametrize("margin", [-0.1, 1.0])
def test_a_margin_is_a_share_below_one(margin: float) -> None:
    from meshtune.config import load

    with pytest.raises(UserError, match=r"cluster\.memory_margin"):
        load(None, ["model.name=any", f"cluster.memory_margin={margin}"])
