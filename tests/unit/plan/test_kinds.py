"""GPU kinds as users name and describe them, and settings of a cluster in other units."""

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from meshtune import config
from meshtune.api.plan import workloads
from meshtune.errors import UserError
from meshtune.plan.hardware import catalogue
from meshtune.plan.kinds import kind_named, kinds_of, table_problems
from meshtune.plan.other_units import other_units
from meshtune.sections import ClusterConfig

PAGE = Path(__file__).parents[3] / "docs" / "planning.md"
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
    ("name", "hint"),
    [
        ("4090", "did you mean rtx-4090?"),
        ("h100", "did you mean h100-sxm or h100-96 or h100-pcie or h100-nvl?"),
        ("h100-smx", "did you mean h100-sxm?"),
        ("a100", "did you mean a100-40 or a100-80?"),
        ("H100-80GB", "did you mean h100-sxm or"),
        ("zork", "is no kind that is known. Kinds: a100-40"),
        ("v100", "no bf16 matrix units.*docs/planning.md#clusters has the table of a V100"),
        ("Tesla V100-SXM2-32GB", "no bf16 matrix units"),
    ],
)
def test_an_unknown_kind_is_answered_with_what_may_be_meant(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint.replace("?", r"\?")):
        kind_named(name, catalogue())


def test_a_number_is_a_name() -> None:
    loaded = config.load(None, ["model.name=x", "cluster.gpu=4090"])
    assert loaded.cluster_config.gpu == "4090"


# files of kinds #


WRONG = {
    "words": ("H100", 'words = "H100": write words in the name that the driver reports'),
    "bf16": ("fast", 'bf16 = "fast": write a number above 0, dense TFLOP/s in bf16'),
    "memory_gib": (-3, "memory_gib = -3: write a number above 0, memory in GiB"),
    "network": (True, "network = true: write a number above 0, GB/s per GPU to other machines"),
    "link": (float("inf"), "link = Infinity: write a number above 0"),
    "node": (4.5, "node = 4.5: write a whole number from 1 on, GPUs of a machine"),
    "link_kind": ("nvlnk", 'link_kind = "nvlnk": write nvlink, pcie or xgmi; did you mean nvlink?'),
    "efficiency_as": ("h100-smx", 'efficiency_as = "h100-smx": write the kind whose measured'),
    "memory": (80, "has memory, which is no fact of a GPU; did you mean memory_gib?"),
    "bandwith": (1, "has bandwith, which is no fact of a GPU; did you mean bandwidth?"),
    "efficiency": ({"atention": 0.3, "matmul": 0}, "efficiency has atention, which is none; did you mean"),
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
    value, sentence = WRONG[key]
    problems = list(table_problems(GOOD | {key: value}))
    assert sentence in problems[0]
    assert len(problems) == (2 if key == "efficiency" else 1)


@pytest.mark.parametrize("key", [key for key in GOOD if key != "efficiency_as"])
def test_a_missing_key_is_named_with_its_meaning(key: str) -> None:
    (problem,) = table_problems({name: value for name, value in GOOD.items() if name != key})
    assert problem.startswith(f"lacks {key} (")


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text('[one]\nbf16 = "fast"\nmemory_gib = -3\n[two]\nlink_kind = "x"\n[[three]]\nnode = 1\n')
    with pytest.raises(UserError) as raised:
        kinds_of(str(file))
    text = str(raised.value)
    for part in (
        "[one] lacks fp32 (", "[one] lacks efficiency_as (", '[one] bf16 = "fast"', "[one] memory_gib = -3",
        "[two] lacks bf16 (", '[two] link_kind = "x": write nvlink, pcie or xgmi', "[three] = ",
    ):  # fmt: skip
        assert part in text


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
    ("settings", "sentence"),
    [
        (
            {"gpu": "h100-sxm", "network": 400},
            "If Gb/s are meant, write cluster.network=50.",
        ),
        ({"gpu": "l4", "network": 100}, "a usual l4 has 31 in its own machine"),
        ({"network": 400}, "cluster.network=400 is in GB/s per GPU"),
        ({"gpu": "h100-sxm", "link": 900}, "a usual h100-sxm has 450. Halve a rate of both directions"),
        ({"link": 7200}, "no GPU has more than 1000"),
        ({"gpu": "h100-sxm", "memory_gib": 80000}, "a usual h100-sxm has 79.11. If MiB are meant, write"),
        ({"memory_gib": 81559}, "no GPU has as much. If MiB are meant, write cluster.memory_gib=79.65."),
    ],
)
def test_other_units_are_named(settings: dict[str, Any], sentence: str) -> None:
    (found,) = other_units(ClusterConfig(**settings))
    assert sentence in found


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
        assert "cluster.network=400 is in GB/s" in workload.notes[-1]
    unknown = config.load(None, [*words, "cluster.gpu=4090", "lora.r=3", "method=lora"])
    with (
        pytest.raises(UserError, match="did you mean rtx-4090"),
        workloads(unknown, log=pytest.fail),  # refused before a model is built, which is logged
    ):
        pass


def test_no_measured_matmul_is_faster_than_the_peak() -> None:
    problems = list(table_problems(GOOD | {"matmul_max": 2000, "architecture": "hoper"}))
    assert problems == [
        "matmul_max = 2000: no matmul is faster than bf16 = 989.4.",
        'architecture = "hoper": write that of its attention kernels, ada, blackwell, cdna3, volta, cpu, '
        "ampere or hopper; did you mean hopper?",
    ]
