"""GPU kinds as users name and describe them, and settings of a cluster in other units."""

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from golden import refuses, says
from transformers import LlamaConfig

from meshtune import config
from meshtune.api.plan import workloads
from meshtune.errors import UserError
from meshtune.plan.cluster import other_units
from meshtune.plan.hardware import catalogue, kind_named, kinds_of, table_problems
from meshtune.sections import ClusterConfig

PAGE = Path(__file__).parents[3] / "docs" / "clusters.md"
GOOD: dict[str, Any] = {
    "words": ["H100"], "bf16": 989.4, "fp32": 66.9, "memory_gib": 79.11, "bandwidth": 3350, "link": 450,
    "link_kind": "nvlink", "node": 4, "network": 25, "multiprocessors": 132, "source": "an offer",
    "efficiency_as": "h100-sxm",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("h100-sxm", "h100-sxm"), ("H200", "h200"), ("RTX 4090", "rtx-4090"), ("h100_pcie", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA H100 PCIe", "h100-pcie"),
    ],
)  # fmt: skip
def test_a_kind_is_found_by_its_name_and_by_its_drivers(name: str, kind: str) -> None:
    assert kind_named(name, catalogue()).name == kind


@pytest.mark.parametrize(
    "name",
    [
        "4090",
        "h100",
        "h100-smx",
        "a100",
        "H100-80GB",
        "zork",
        "v100",
        "pvc",
        "Ascend 910B",
        "Tesla V100-SXM2-32GB",
    ],
)
def test_an_unknown_kind_is_answered_with_what_may_be_meant(name: str) -> None:
    with refuses(UserError):
        kind_named(name, catalogue())


def test_a_number_is_a_name() -> None:
    loaded = config.load(None, ["model.name=x", "cluster.gpu=4090"])
    assert loaded.cluster_config.gpu == "4090"


# files of kinds #


WRONG = {
    "words": "H100",
    "bf16": "fast",
    "memory_gib": -3,
    "network": True,
    "link": float("inf"),
    "node": 4.5,
    "link_kind": "nvlnk",
    "efficiency_as": "h100-smx",
    "memory": 80,
    "bandwith": 1,
    "efficiency": {"atention": 0.3, "matmul": 0},
}


def test_a_table_without_problems_has_none() -> None:
    assert list(table_problems(GOOD)) == []
    assert list(table_problems(GOOD | {"efficiency": {"matmul": 0.7, "source": "us"}, "tf32": 400})) == []
    for name, table in tomllib.loads(
        files("meshtune.plan").joinpath("hardware.toml").read_text("utf-8")
    ).items():
        assert list(table_problems(table)) == [], name


@pytest.mark.parametrize("key", WRONG)
def test_each_wrong_value_is_a_sentence(key: str) -> None:
    problems = list(table_problems(GOOD | {key: WRONG[key]}))
    says(problems)
    assert len(problems) == (2 if key == "efficiency" else 1)


@pytest.mark.parametrize("key", [key for key in GOOD if key != "efficiency_as"])
def test_a_missing_key_is_named_with_its_meaning(key: str) -> None:
    (problem,) = table_problems({name: value for name, value in GOOD.items() if name != key})
    assert problem.startswith(f"lacks {key} (")


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text('[one]\nbf16 = "fast"\nmemory_gib = -3\n[two]\nlink_kind = "x"\n[[three]]\nnode = 1\n')
    with refuses(UserError):
        kinds_of(str(file))


def test_the_tables_of_the_docs_are_kinds(tmp_path: Path) -> None:
    tables = re.findall(r"```toml\n(\[\w.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(tables) == 2
    (tmp_path / "gpus.toml").write_text("\n".join(tables))
    kinds = kinds_of(str(tmp_path / "gpus.toml"))
    assert kinds["v100"].fp32 == 15.7e12 and not kinds["v100"].measured
    assert kind_named("v100", kinds) is kinds["v100"]
    assert kinds["h100-pod"].efficiency == catalogue()["h100-sxm"].efficiency


# other units #


@pytest.mark.parametrize(
    "settings",
    [
        {"gpu": "h100-sxm", "network": 400},
        {"gpu": "l4", "network": 100},
        {"network": 400},
        {"gpu": "h100-sxm", "link": 900},
        {"link": 7200},
        {"gpu": "h100-sxm", "memory_gib": 80000},
        {"memory_gib": 81559},
    ],
)
def test_other_units_are_named(settings: dict[str, Any]) -> None:
    (found,) = other_units(ClusterConfig(**settings))
    says(found)


@pytest.mark.parametrize("gpu", catalogue())
def test_a_usual_machine_is_in_the_right_units(gpu: str) -> None:
    kind = catalogue()[gpu]
    usual = ClusterConfig(
        gpu=gpu, memory_gib=kind.memory / 2**30, link=kind.link / 1e9, network=kind.network / 1e9
    )
    assert other_units(usual) == ()


def test_an_answer_names_other_units(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2).save_pretrained(tmp_path)
    words = [f"model.name={tmp_path}", f"data.cache={tmp_path}", "cluster.gpu=h100-sxm"]
    with workloads(config.load(None, [*words, "cluster.network=400"])) as (
        workload,
        _,
    ):
        says(workload.notes[-1])
    unknown = config.load(None, [*words, "cluster.gpu=4090", "lora.r=3", "method=lora"])
    with (
        refuses(UserError),
        workloads(unknown, log=pytest.fail),  # refused before a model is built, which is logged
    ):
        pass


def test_no_measured_matmul_is_faster_than_the_peak() -> None:
    problems = list(table_problems(GOOD | {"matmul_max": 2000, "architecture": "hoper"}))
    says(problems)
