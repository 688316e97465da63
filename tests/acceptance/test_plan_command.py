"""`meshtune plan` as a user runs it: what it prints, draws and exports, what it refuses, and what it is for:
the layout that `train` chooses where the config leaves it open.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cases import cases
from command import Command, Ended
from golden import says

from meshtune.layout import Layout
from meshtune.plan.models import tables
from meshtune.plan.search import PEAK_TIE
from meshtune.rundir import RunDir
from meshtune.tools.export import EXPORTERS

Settings = Callable[..., list[str]]
Plan = Callable[..., Ended]

EIGHT = ["cluster.gpu=h100-sxm", "cluster.gpus=8"]
MEMORY = [
    "weights", "gathered_weights", "gradients", "optimizer", "activations", "logits", "communication",
    "temporary", "overhead",
]  # fmt: skip
TIME = [
    "compute", "tensor", "context", "experts", "pipeline", "data", "optimizer", "bubble", "imbalance", "host",
]  # fmt: skip


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of models' numbers, kept between the tests."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json alone: no weights, no tokenizer, no data."""
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("bare")
    Qwen3Config(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=4096,
    ).save_pretrained(folder)  # fmt: skip
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    return folder / "config.json"


@pytest.fixture
def plan(meshtune: Command, bare: Path, kept: Path) -> Plan:
    """Plan the bare model with these words."""
    return lambda *words, code=0: meshtune(
        "plan", *words, f"model.name={bare}", f"data.cache={kept}", code=code
    )


def is_choice(each: dict[str, Any]) -> None:
    """One layout as the contract of `plan --json` has it."""
    assert Layout.parse(each["layout"]).world == each["world"] == int(each["world"])
    for name in ("tokens_per_second_per_gpu", "step_seconds", "mfu"):
        assert isinstance(each[name], float) and each[name] > 0
    memory, time = each["memory"], each["time"]
    assert set(memory) >= {*MEMORY, "peak", "capacity"} and set(time) == {*TIME, "total"}
    assert sum(memory[name] for name in MEMORY) == pytest.approx(memory["peak"], rel=1e-6)
    assert sum(time[name] for name in TIME) == pytest.approx(time["total"], rel=1e-6)
    assert each["step_seconds"] == time["total"]
    for name in MEMORY:
        assert memory[name] >= 0 and isinstance(memory[name], float)
    for name in TIME:
        assert time[name] >= 0 and isinstance(time[name], float)


@pytest.mark.parametrize("source", cases(["a folder with weights", "a bare config.json"], test=1, ci=1))
def test_the_json_is_one_document_with_every_key_of_the_contract(
    source: str, meshtune: Command, tiny: Path, bare: Path, kept: Path
) -> None:
    model = tiny / "model" if source.startswith("a folder") else bare
    settings = ["data.seq_len=256", "train.global_batch_size=32", "train.max_steps=100"]
    ended = meshtune("plan", f"model.name={model}", f"data.cache={kept}", *EIGHT, *settings, "--json")
    found = ended.json
    assert found["model"]["name"] == str(model)
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(model.parent if model == bare else model)
    )
    assert found["model"]["parameters"] == whole.num_parameters()
    assert found["cluster"].items() >= {"gpu": "h100-sxm", "gpus": 8, "gpus_per_node": 8}.items()
    assert found["workload"].items() >= {
        "global_batch_size": 32, "seq_len": 256, "tokens": 32 * 256, "precision": "bf16"
    }.items()  # fmt: skip
    assert isinstance(found["considered"], int)
    assert 0 < len(found["layouts"]) <= 10 < found["considered"]
    for each in found["layouts"]:
        is_choice(each)
        assert each["world"] == 8
        assert each["memory"]["capacity"] == found["cluster"]["memory"] > each["memory"]["peak"]
        assert Layout.parse(each["layout"]).global_batch_size == 32
        assert each["tokens_per_second_per_gpu"] == pytest.approx(32 * 256 / each["step_seconds"] / 8)
    speeds = [each["step_seconds"] for each in found["layouts"]]
    assert all(later > 0.99 * earlier for earlier, later in pairwise(speeds))
    assert found["rejected"]
    for each in found["rejected"]:
        assert set(each) == {"reason", "count", "example"}
        assert isinstance(each["count"], int) and each["count"] > 0 and each["reason"]
        assert Layout.parse(each["example"]).world == 8
    assert found["run"]["steps"] == 100
    assert found["run"]["seconds"] == pytest.approx(100 * speeds[0])
    for name in ("reasoning", "changes", "batches"):
        assert found[name] and all(isinstance(sentence, str) for sentence in found[name])


@pytest.mark.ci
def test_the_terminal_shows_the_best_and_how_to_run_it(plan: Plan) -> None:
    best = plan(*EIGHT, "--json").json["layouts"][0]["layout"]
    first = plan(*EIGHT)
    assert f"layout={best}" in first.out and "Left out" not in first.out
    shown = plan(*EIGHT, "--top", 3, "--full")
    for words in (
        "How it was reached",
        "Why the usual ones are not first",
        "What to change first",
        "Left out",
    ):
        assert words in shown.out
    assert shown.out.startswith(first.out[: first.out.index("layouts fit")].rstrip(" 0123456789,of\n"))
    assert re.search(r"^ *3  ", shown.out, re.M) and not re.search(
        r"^ *4  (dp|zero|tp|mb|cp)", shown.out, re.M
    )


@pytest.mark.ci
def test_a_second_plan_of_a_model_needs_no_torch(plan: Plan, bare: Path, kept: Path) -> None:
    plan(*EIGHT, "--json")
    words = ["plan", f"model.name={bare}", f"data.cache={kept}", *EIGHT, "data.seq_len=512", "--json"]
    script = (
        "import sys\nfrom meshtune import cli\n"
        f"sys.argv = ['meshtune', *{words!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    code = end.code or 0\n"
        "heavy = sorted({'torch', 'transformers', 'datasets'} & sys.modules.keys())\n"
        "sys.exit(code or (f'imported {heavy}' if heavy else 0))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["workload"]["seq_len"] == 512


@pytest.mark.ci
def test_a_config_file_and_words_after_it_plan_alike(
    plan: Plan, meshtune: Command, bare: Path, kept: Path, tmp_path: Path
) -> None:
    tree = {
        "model": {"name": str(bare)}, "data": {"cache": str(kept), "seq_len": 256},
        "cluster": {"gpu": "h100-sxm", "gpus": 4},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "cluster.yaml").write_text("{gpu: h100-sxm, gpus: 4}")
    by_file = meshtune("plan", tmp_path / "config.yaml", "--json").json
    assert by_file == plan("data.seq_len=256", "cluster.gpu=h100-sxm", "cluster.gpus=4", "--json").json
    assert by_file == plan("data.seq_len=256", f"cluster={tmp_path / 'cluster.yaml'}", "--json").json


@pytest.mark.ci
def test_explain_takes_one_layout_apart(plan: Plan) -> None:
    for text in ("zero3x8-mb2-ga4", "tp2-sp-zero1x2-pp2-1f1b-mb1-ga32-full"):
        found = plan("explain", text, *EIGHT, "--json").json
        is_choice(found)
        assert found["layout"] == str(Layout.parse(text)) and found["against"] == []
    shown = plan("explain", "zero3x8-mb1-ga8", *EIGHT)
    assert all(name in shown.out for name in ("weights", "activations", "optimizer"))
    best = plan("explain", "zero2x8", *EIGHT, "--json").json["layout"]
    assert best.startswith("zero2x8-mb") and Layout.parse(best).global_batch_size == 64
    refused = plan("explain", "tp8-sp-ulysses3-mb1-ga64", *EIGHT, "cluster.gpus_per_node=24", "--json").json
    says(refused["against"])
    says(plan("explain", "dp8-mb8-ga1", *EIGHT, "cluster.memory_gib=1", "--json").json["against"])
    assert plan("explain", "auto", *EIGHT, "--json").json["world"] == 8


@pytest.mark.ci
def test_several_layouts_are_explained_compared_and_drawn(plan: Plan, tmp_path: Path) -> None:
    both = ["zero3x8-mb2-ga4", "tp2-sp-zero1x4-mb1-ga16-full"]
    picture = tmp_path / "two.png"
    found = plan("explain", ",".join(both), *EIGHT, "--plot", picture, "--json").json
    assert [each["layout"] for each in found["layouts"]] == [str(Layout.parse(text)) for text in both]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    for each in found["layouts"]:
        is_choice(each)
        assert 1 <= len(each["levers"]) <= 3
        for lever in each["levers"]:
            assert {"change", "setting", "speed", "freed", "fits"} == set(lever)
        assert {"name", "category", "bytes"} == set(each["tensors"][0])
    assert plan("--json", "compare", ",".join(both), *EIGHT).json["layouts"][0]["layout"] == both[0]
    shown = plan("compare", ",".join(both), *EIGHT)
    assert "B - A" in shown.out and "The largest levers (B)" in shown.out
    for words in (["compare", both[0]], ["explain", ","]):
        assert "zero3x8-mb1-ga8" in plan(*words, *EIGHT, code=2).err


@pytest.mark.ci
@pytest.mark.parametrize(
    "words",
    [
        ["explain", "zero3x8", "--top", "3"], ["explain", "zero3x8", "--verify", "2"],
        ["compare", "dp8,dp4", "--gpus", "8"], ["max", "batch", "--top", "3"], ["max", "batch", "--by", "3h"],
        ["max", "batch", "--plot", "x.html"], ["export", "megatron", "--for", "axolotl"], ["--to", "x"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_question_has_its_own_options(words: list[str], plan: Plan) -> None:
    assert "No such option" in plan(*words, *EIGHT, code=2).err


@pytest.mark.ci
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--explain", "zero3x8-mb1", "--explain=dp8-mb1"], ["explain", "zero3x8-mb1,dp8-mb1"]),
        (["--compare", "zero3x8-mb1,dp8-mb1"], ["compare", "zero3x8-mb1,dp8-mb1"]),
        (["--max=batch"], ["max", "batch"]),
    ],
    ids=" ".join,
)
def test_an_option_of_earlier_versions_is_answered_with_its_new_spelling(
    old: list[str], new: list[str], plan: Plan
) -> None:
    before, after = plan(*EIGHT, *old, "--json"), plan(*new, *EIGHT, "--json")
    assert before.json == after.json
    assert f"write `meshtune plan {' '.join(new)} …`" in before.err and "write" not in after.err


def test_a_config_file_called_as_a_sub_command_is_named_by_its_path(
    meshtune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("max").write_text("train.lr: 1")
    assert "train.lr is not a setting" in meshtune("plan", "./max", "model.name=x", code=2).err
    meshtune("plan", "max", code=2)  # without what is to be largest


@pytest.mark.ci
def test_kinds_are_compared_by_price_and_a_deadline_that_none_keeps_ends_with_3(plan: Plan) -> None:
    words = [
        "cluster.gpu=h100-sxm", "train.max_steps=1000", "--gpus", "2,2xmi300x,4xa100-80",
        "cluster.price_per_gpu_hour={h100-sxm: 2.5, mi300x: 2, a100-80: 1.5, currency: EUR}",
    ]  # fmt: skip
    found = plan(*words, "--sort", "cost", "--by", "2d", "--json").json
    assert {each["gpu"]: each["measured"] for each in found["clusters"]}["h100-sxm"] is True
    costs = [each["run"]["cost"] for each in found["clusters"]]
    assert costs[1:] == sorted(costs[1:]) and found["by"] == 172_800
    assert sum(each["chosen"] for each in found["clusters"]) == 1
    shown = plan(*words, "--sort", "cost")
    assert "EUR" in shown.out and "→ chosen" in shown.out
    says(plan(*words, "--budget", "0.0001", code=3).err)
    says(plan(*words[:2], "--gpus", "2xfoo,0", code=2).err)


@pytest.mark.ci
def test_a_memory_budget_bounds_every_question(plan: Plan) -> None:
    words = [*EIGHT, "--memory-budget", "2GiB", "--json"]
    answer, free = plan(*words).json, plan(*EIGHT, "--json").json
    assert answer["cluster"]["usable_memory"] == 2 * 2**30
    assert all(layout["memory"]["peak"] <= 2 * 2**30 for layout in answer["layouts"])
    large = max(free["layouts"], key=lambda layout: layout["memory"]["peak"])
    assert large["memory"]["peak"] > 2 * 2**30
    assert plan("max", "batch", *words).json["memory"]["peak"] <= 2 * 2**30
    says(plan("explain", large["layout"], *words).json["against"])
    says(plan(*EIGHT, "--memory-budget", "much", code=2).err)


@pytest.mark.ci
def test_clusters_are_compared_and_sorted(plan: Plan) -> None:
    sizes = [
        "cluster.gpu=h100-sxm", "train.global_batch_size=64", "data.seq_len=4096", "--gpus", "1,2,4",
        "--json",
    ]  # fmt: skip
    speed = plan(*sizes).json
    assert [each["gpus"] for each in speed["clusters"]] == [1, 2, 4]
    for each in speed["clusters"]:
        is_choice(each["best"])
        assert each["best"]["world"] == each["gpus"]
    seconds = {each["gpus"]: each["best"]["step_seconds"] for each in speed["clusters"]}
    assert speed["goal"] == "speed" and seconds[speed["cluster"]["gpus"]] == min(seconds.values())
    cost = plan(*sizes, "--sort", "cost").json
    assert cost["cluster"]["gpus"] == min(seconds, key=lambda gpus: gpus * seconds[gpus])
    old = plan(*sizes, "--goal", "cost")
    assert old.json["cluster"] == cost["cluster"]
    says(old.err)
    assert plan(*sizes, "--sort", "gpus").json["cluster"]["gpus"] == 1
    memory = plan(*sizes, "--sort", "memory").json
    peaks = [each["memory"]["peak"] for found in (speed, cost, memory) for each in found["layouts"]]
    chosen = memory["layouts"][0]["memory"]
    assert chosen["peak"] <= min(peaks) + PEAK_TIE * chosen["capacity"]
    assert not any(
        "the chosen layout (" in each["sentence"]
        for each in memory["alternatives"]
        if each["layout"] != memory["layouts"][0]["layout"]
    )


@pytest.mark.ci
def test_the_first_command_of_the_readme_needs_no_hub(meshtune: Command, kept: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\$ meshtune (plan model.*)$", readme.replace("\\\n", ""), re.M)
    ended = meshtune(*line.split(), f"data.cache={kept}", "--json")
    assert ended.json["model"]["parameters"] == 8_030_261_248
    assert "plan/models.toml" in ended.json["notes"][0]
    assert len(ended.err.splitlines()) <= 3


@pytest.mark.all
def test_the_largest_of_each_kind(plan: Plan) -> None:
    small = ["cluster.gpu=l4", "cluster.gpus=2", "train.global_batch_size=2", "--json"]
    length = plan("max", "seq_len", *small).json
    is_choice(length)
    assert length["seq_len"] >= 2048
    assert plan(*small, f"data.seq_len={length['seq_len']}").json["fitting"] > 0
    plan(*small, f"data.seq_len={length['seq_len'] + 1024}", code=3)
    assert plan("max", "batch", *small).json["batch"] >= 2
    assert plan("max", "model", *small).json["model"] in tables()


@pytest.mark.parametrize("suffix", cases(["png", "html"], ci=["html"]))
def test_a_plan_is_drawn(suffix: str, plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / f"plan.{suffix}"
    ended = plan(*EIGHT, "--plot", file, "--json")
    assert ended.json["layouts"] and str(file) in ended.err
    start = {"png": b"\x89PNG", "html": b"<!DOCTYPE html"}[suffix]
    assert file.read_bytes()[:20].lower().startswith(start.lower())


@pytest.mark.ci
@pytest.mark.parametrize("tool", EXPORTERS)
def test_a_plan_is_exported_once(tool: str, plan: Plan, tiny: Path, tmp_path: Path) -> None:
    words = [
        *EIGHT, "layout=zero3x8-mb1-ga8", "train.max_steps=10", f"data.train={tiny / 'train.jsonl'}",
        "data.format=prompt-completion", "--to", tmp_path / "out", "--json",
    ]  # fmt: skip
    ended = plan("export", tool, *words)
    assert ended.json["layouts"][0]["layout"] == "zero3x8-mb1-ga8"
    assert ended.json["tool"] == tool and "start it with" not in ended.err
    said = ended.json["export"]
    assert (said["tool"], said["layout"], said["folder"]) == (tool, "zero3x8-mb1-ga8", str(tmp_path / "out"))
    assert said["command"] and said["missing"] and said["files"]
    files = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert files and all(files.values())
    says(plan("export", tool, *words, code=2).err)
    assert {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()} == files


# what is refused #


@pytest.mark.parametrize(
    "words",
    [
        ["cluster.gpu=h100"],
        ["cluster.gpu=h100-sxm", "cluster.gpus=12"],
        [*EIGHT, "--gpus", "12"],
        [*EIGHT, "--gpus", "8,many"],
        [*EIGHT, "--sort", "fun"],
        ["max", "everything", *EIGHT],
        ["explain", "tpp8", *EIGHT],
        ["explain", "tpp8,dp2-tp3", *EIGHT],
        ["explain", "zero3x8-mb3", *EIGHT],
        [*EIGHT, "layout=dp8", "train.global_batch_size=12"],
        [*EIGHT, "layout=dp4"],
        [*EIGHT, "layout={tp: 16, dp_shard: auto}"],
        [*EIGHT, "train.global_batch_tokens=1000"],
        ["export", "deepsped", *EIGHT],
        [*EIGHT, "--plot", "plan.jpeg"],
        [*EIGHT, "cluster.efficiency={matmull: 0.5}"],
        [*EIGHT, "cluster.node=8"],
    ],
    ids=lambda value: " ".join(value[:2] if value[0].isalpha() else value[-2:]),
)  # fmt: skip
def test_bad_words_are_refused_with_a_remedy(words: list[str], plan: Plan) -> None:
    ended = plan(*words, code=2)
    says(ended.err)
    assert all(line.startswith("meshtune: ") for line in ended.err.strip().splitlines())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"model_type": "nonesuch", "hidden_size": 8}', "nonesuch"),
        ('{"hidden_size": 8}', "model_type"),
        ("{", "config.json"),
        ('{"model_type": "bert"}', "set is_decoder to true in its config.json. See docs/families.md#causal"),
        (None, "There is no folder"),
    ],
    ids=["unknown", "without a type", "no JSON", "no language model", "nothing there"],
)
def test_what_is_no_model_is_refused(
    content: str | None, said: str, meshtune: Command, tmp_path: Path
) -> None:
    if content:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(content)
    ended = meshtune(
        "plan", f"model.name={tmp_path / 'model'}", f"data.cache={tmp_path / 'cache'}", *EIGHT, code=2
    )
    assert said in ended.err and "Traceback" not in ended.err
    assert ended.out == ""


@pytest.mark.ci
def test_where_nothing_fits_the_nearest_is_named_and_what_would_fit_does(plan: Plan) -> None:
    tight = [
        "cluster.gpu=l4", "cluster.gpus=1", "cluster.memory_gib=2", "data.seq_len=524288",
        "train.global_batch_size=4", "--json",
    ]  # fmt: skip
    ended = plan(*tight, code=3)
    assert ended.out == ""
    says(re.sub(r"meshtune: searching .*\n", "", ended.err))  # a line of slow machines
    nearest = re.search(r"The layout that needs least is (\S+): ", ended.err)
    assert nearest
    against = plan("explain", nearest[1], *tight).json["against"]
    says(against[0])
    assert len(against) == 1
    remedies = re.findall(r"([a-z]+(?:\.\w+)?=\S+) layout=(\S+) \(", ended.err)
    assert len(remedies) >= 2
    for setting, layout in remedies:
        more = ["cluster.memory_gib=null"] if setting.startswith("cluster.gpu=") else []
        assert plan(*tight, setting, f"layout={layout}", *more).json["layouts"][0]["layout"] == layout


# layout: auto #


def losses(run: RunDir) -> list[float]:
    return [row["loss"] for row in run.rows("train")]


@pytest.mark.ci
def test_train_runs_the_layout_that_the_planner_chose(
    meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    meshtune("train", *settings("layout=auto", "eval.every=0"))
    plan = yaml.safe_load(run.plan_file.read_text())
    layout = Layout(**plan["fields"])
    assert plan["layout"] == str(layout) == plan["predicted"]["layout"] == run.rows("run")[0]["layout"]
    assert layout.world == 1 and layout.global_batch_size == 4
    assert plan["predicted"]["memory"]["peak"] < plan["cluster"]["memory"]
    assert plan["cluster"]["gpu"] == "cpu" and plan["workload"]["seq_len"] == 128
    assert str(layout) in run.report_file.read_text()
    planned = meshtune("plan", *settings(), "cluster.gpu=cpu", "--json").json["layouts"]
    assert str(layout) in [each["layout"] for each in planned]
    named = RunDir(tmp_path / "named")
    meshtune("train", *settings(f"layout={layout}", f"output={named.path}"))
    assert losses(named) == losses(run) and len(losses(run)) == 4
    assert yaml.safe_load(named.plan_file.read_text())["predicted"] == plan["predicted"]


@pytest.mark.parametrize(
    "layout", cases(["auto", "{tp: auto, dp_replicate: auto}", "{pp: 2, schedule: auto}"])
)
def test_ranks_run_the_layout_that_the_planner_chose_for_them(
    layout: str, process: Command, settings: Settings, tmp_path: Path
) -> None:
    run, named = RunDir(tmp_path / "run"), RunDir(tmp_path / "named")
    process("train", *settings(f"layout={layout}"), "--nproc", 2)
    plan = yaml.safe_load(run.plan_file.read_text())
    chosen = Layout(**plan["fields"])
    assert chosen.world == 2
    assert plan["layout"] == str(chosen) == plan["predicted"]["layout"] == run.rows("run")[0]["layout"]
    for name, value in (yaml.safe_load(layout) if layout != "auto" else {}).items():
        assert value in ("auto", getattr(chosen, name))
    process("train", *settings(f"layout={chosen}", f"output={named.path}"))
    assert losses(named) == losses(run) and len(losses(run)) == 4


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_cannot_fit_ends_before_anything_is_written(
    ranks: int, meshtune: Command, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**20, available=2**20))
    ended = meshtune("train", *settings("layout=auto"), "--nproc", ranks, code=3)
    assert f"No layout of {ranks} x cpu" in ended.err and "The layout that needs least is " in ended.err
    assert not (tmp_path / "run").exists()
    assert [file.name for file in (tmp_path / "cache").rglob("*") if "census" not in file.name] == []


@pytest.mark.ci
def test_devices_that_nobody_knows_train_under_a_named_layout(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meshtune: Command
) -> None:
    """A prediction is missing, no more."""
    from meshtune.api import build, choose, output

    for module in (build, choose, output):
        monkeypatch.setattr(module, "gpus_of", lambda device: [("GT 710", 2.0**31)])
    ended = meshtune("train", *settings("layout=auto", "train.max_steps=1"), code=2)
    says(ended.err)
    ended = meshtune("train", *settings("layout=mb2-ga2", "train.max_steps=1"))
    plan = yaml.safe_load(RunDir(tmp_path / "run").plan_file.read_text())
    assert plan["layout"] == "mb2-ga2" and "predicted" not in plan
