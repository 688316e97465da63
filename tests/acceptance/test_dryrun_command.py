"""`meshtune dryrun` as a user runs it: from a config.json alone, what it prints, and how it ends."""

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import cases
from command import Command, Ended
from golden import says
from tiny import make_folder, short_run

from meshtune.api.dry_train import DryTraining
from meshtune.layout import Layout
from meshtune.meter.trace import FORWARD, Change, Operation, RankTrace, StepTrace, Storage
from meshtune.model.census_cache import numbers_of
from meshtune.placement.numbers import READS_VALUES, ModelNumbers
from meshtune.rundir import RunDir

PAGE = Path(__file__).parents[2] / "docs" / "dryrun.md"
DryRun = Callable[..., Ended]
CATEGORIES = {
    "weights", "gathered_weights", "gradients", "optimizer", "activations", "logits", "communication",
    "temporary",
}  # fmt: skip
NEW_MODEL = {  # that nobody has weights of
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json alone."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "config.json").write_text(json.dumps(NEW_MODEL))
    return folder


@pytest.fixture
def words(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words that name the bare model and a small batch."""
    cache = tmp_path_factory.getbasetemp() / "dryrun-cache"
    return [f"model.name={bare}", f"data.cache={cache}", "data.seq_len=128", "train.global_batch_size=8"]


@pytest.fixture
def dryrun(meshtune: Command, words: list[str]) -> DryRun:
    """Dry-run the bare model with more words, in this process; its ranks are processes of their own."""
    return lambda *more, code=0: meshtune("dryrun", *words, *more, code=code)


def check_contract(document: dict[str, Any], layout: str) -> None:
    """Check the keys and sums of DESIGN.md's `dryrun --json`."""
    assert document["layout"] == layout and document["world"] == Layout.parse(layout).world
    for rank in document["ranks"]:
        first, second = rank["steps"]
        assert rank["peak_bytes"] == second["peak_bytes"] <= rank["reserved_bytes"]
        assert rank["flops"] > 0
        for one in rank["collectives"]:
            assert {"op", "axis", "count", "bytes"} < one.keys() and one["count"] > 0 and one["bytes"] > 0
        for step in (first, second):
            assert sum(step["by_category"].values()) == step["peak_bytes"]
            assert step["by_category"].keys() <= CATEGORIES
            totals = [sum(sizes.values()) for _, sizes in step["timeline"]]
            assert max(totals) == step["peak_bytes"] and len(totals) <= 400
        passes = [next(iter(step["phases"].values())) for step in (first, second)]
        before, later = (phase["by_category"].get("optimizer", 0) for phase in passes)
        assert later > before


@pytest.mark.ci
def test_one_layout_as_json(dryrun: DryRun) -> None:
    ended = dryrun("--gpu", "h100-sxm", "--layout", "zero3x8-mb1", "--json", "--top", "3")
    document = ended.json
    assert len(document["ranks"][0]["largest"]) == 3
    check_contract(document, "zero3x8-mb1-ga1")
    (rank,) = document["ranks"]
    seconds = document["time"]["seconds"]
    assert sum(document["time"]["parts"].values()) == pytest.approx(seconds) and seconds > 0
    assert document["kernels"] == "cuda" and document["fits"] is True and rank["stands_for"] == "all ranks"
    # Twice for each of 4 blocks, once for the embedding and once for the head.
    gathers = {one["op"]: one["count"] for one in rank["collectives"] if one["axis"] == "dp_shard"}
    assert gathers["all_gather"] == 4 * 2 + 2 and gathers["reduce_scatter"] == 4 + 2
    assert "tracing two steps of zero3x8-mb1-ga1: rank 0 of 8 …" in ended.err
    assert rank["stages"] == []


@pytest.mark.ci
def test_refused_layouts_are_refused_together_before_anything_is_traced(dryrun: DryRun) -> None:
    ended = dryrun("--gpu", "h100-sxm", "--layout", "tp16-mb1,pp8-1f1b-mb1,zero3x8-mb1", code=2)
    assert ended.out == ""
    says(ended.err)
    assert "tracing" not in ended.err


def test_a_model_that_reads_values_is_refused_before_it_is_traced(
    dryrun: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No family of transformers is known to, so that one is told to."""
    from meshtune.api import dryrun as api

    def unsupported(*args: Any, **kwargs: Any) -> ModelNumbers:
        numbers = numbers_of(*args, **kwargs)
        return replace(numbers, census=replace(numbers.census, unsupported=READS_VALUES))

    monkeypatch.setattr(api, "numbers_of", unsupported)
    ended = dryrun("--gpu", "h100-sxm", "--layout", "mb1-ga1", code=2)  # another batch than 8
    says(ended.err)
    assert "tracing" not in ended.err


def test_borrowed_efficiencies_and_another_batch_are_named(
    dryrun: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshtune.api import dryrun as api

    monkeypatch.setattr(
        api, "trace_ranks", lambda _, ranks, *__, **___: [empty_trace(rank) for rank in ranks]
    )
    words = ("--gpu", "mi300x", "--layout", "mb1-ga1", "experts.imbalance=1.5", "--json")
    says(dryrun(*words).json["notes"])
    notes = dryrun("--gpu", "cpu", "--layout", "mb1-ga8", "--json").json["notes"]
    begins = ["cluster.gpu=cpu is this machi", "Predicted with labels on all"]
    assert all(map(str.startswith, notes, begins)) and len(notes) == 2, "and no borrowed efficiencies"


def test_bad_words_are_refused(dryrun: DryRun) -> None:
    cluster = ("--gpu", "h100-sxm", "--layout", "zero3x8-mb1")
    says(dryrun(*cluster, "--documents", "many", code=2).err)
    says(dryrun(*cluster, "--documents", "100,0,29", code=2).err)
    says(dryrun(*cluster, "cluster.gpu=a100-80", code=2).err)
    says(dryrun(*cluster, "--rank", "8", code=2).err)
    says(dryrun(*cluster, "--routing", "worst", code=2).err)


def empty_trace(rank: int) -> RankTrace:
    """A trace of one operation that allocates a byte."""
    operations = [Operation("aten.empty.memory_format", FORWARD, "", 0, 0, (), "")]
    storages = [Storage(1, "activations", "", "", "")]
    steps = [StepTrace(number, operations, storages, [Change(0, 0, True)]) for number in (1, 2)]
    return RankTrace(rank, {"pp": 0}, (), steps, micro_batches=1, of=1)


def fail(job: Any, rank: int, tell: Any) -> RankTrace:
    """Fail as a bug of ours does."""
    raise RuntimeError(f"no meta function for rank {rank}")


def test_a_rank_that_crashes_ends_the_command_with_its_cause(
    dryrun: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals and hangs of a rank: tests/unit/dryrun/test_traced_ranks.py."""
    from meshtune.api import dryrun as api

    monkeypatch.setattr(api, "trace_rank", fail)
    ended = dryrun("--gpu", "h100-sxm", "--layout", "pp2-1f1b-mb1", code=1)
    assert ended.out == ""
    cause = r"rank [01] of 2 failed:\n(.*\n)+RuntimeError: no meta function for rank [01]"
    assert re.search(cause, ended.err), ended.err


@pytest.mark.ci
def test_what_does_not_fit_ends_with_3_and_what_would(dryrun: DryRun) -> None:
    ended = dryrun(
        "--gpu", "h100-sxm", "--layout", "zero3x2-mb4", "cluster.memory_gib=1.0", "data.seq_len=4096", code=3
    )
    assert re.search(r"zero3x2-mb4-ga1 does not fit: it needs .* of 1.00 GiB", ended.out)
    assert "What needs less" in ended.err
    assert not re.search(r"^Predicted and simulated *$", ended.out, re.M), "a table of several layouts"


@pytest.mark.all
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("dp2-zero3x2-tp2-sp-pp2-1f1b-mb1-ga2-full", {0: 4, 3: 3, 8: 4}),
        ("cp2-pp4-1f1b-mb1-ga8", {0: 1, 2: 1, 3: 1, 6: 1}),
    ],
)
def test_layouts_of_every_axis_from_a_shell(
    process: Command, words: list[str], layout: str, ranks: Any
) -> None:
    ended = process(
        "dryrun", *words, "--gpu", "h100-sxm", "--layout", layout, "--rank", "3", "--documents", "60,40,20",
        "--json",
    )  # fmt: skip
    check_contract(ended.json, layout)
    assert [rank["rank"] for rank in ended.json["ranks"]] == [*ranks]
    assert ended.json["documents"] == [60, 40, 20]


@pytest.mark.all
def test_tables_pictures_and_traces(process: Command, words: list[str], tmp_path: Path) -> None:
    ended = process(
        "dryrun", *words, "--gpu", "h100-sxm", "--layout", "zero3x2-pp2-1f1b-mb1", "--plot", tmp_path,
        "--top", "3",
    )  # fmt: skip
    assert ended.out.startswith("zero3x2-pp2-1f1b-mb1-ga4 fits: ")
    for title in (
        "Memory at the peak",
        "Predicted and simulated",
        "Kernels of a step",
        "The largest tensors",
    ):
        assert title in ended.out
    files = {file.name for file in tmp_path.iterdir()}
    assert {"dryrun.html", "trace.json", "rank-0.pickle", "rank-2.pickle", "pipeline.png"} < files
    assert {event["ph"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]} >= {
        "X",
        "C",
    }
    events = pickle.loads((tmp_path / "rank-2.pickle").read_bytes())["device_traces"][0]
    assert {"segment_map", "alloc", "free_completed"} <= {event["action"] for event in events}
    assert all(file in ended.err for file in files)


@pytest.mark.all
def test_the_sample_of_the_page_is_what_the_command_prints(
    process: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the memory of docs/dryrun.md by category, and its largest tensors, with its first command,
    which the page runs uncompiled.
    """
    page = PAGE.read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if line.startswith("meshtune dryrun "))
    _, _, answer = page.partition("\nMemory at the peak, rank 0\n")
    _, _, largest = page.partition("\nThe largest tensors at the peak, rank 0, later steps\n")
    sample = [*answer.partition("```")[0].splitlines(), *largest.partition("…")[0].splitlines()]
    monkeypatch.setenv("COLUMNS", "200")
    ended = process(*command.split()[1:], "train.compile=false")
    printed = {" ".join(line.split()) for line in ended.out.splitlines()}
    assert len(sample) > 12 and [line for line in sample if " ".join(line.split()) not in printed] == []


@pytest.mark.all
def test_the_planner_chooses_and_the_path_of_cpus_is_traced(process: Command, words: list[str]) -> None:
    ended = process("dryrun", *words, "--gpu", "cpu", "--gpus", "4", "--json")
    document = ended.json
    assert document["kernels"] == "cpu" and document["world"] == 4 and document["outside_bytes"] == 0
    assert document["time"] is None  # nobody measured how fast processors compute
    assert document["predicted"]["layout"] == document["layout"]
    chosen = process("plan", *words, "cluster.gpu=cpu", "cluster.gpus=4", "--json")
    assert chosen.json["layouts"][0]["layout"] == document["layout"]


# plan --verify #


def test_a_plan_that_can_not_be_verified_is_refused_before_it_is_made(
    meshtune: Command, words: list[str]
) -> None:
    plan = ("plan", *words, "cluster.gpu=h100-sxm", "cluster.gpus=2", "--verify", "2")
    says(meshtune(*plan, "--for", "megatron", code=2).err)


@pytest.mark.all
def test_the_best_layouts_of_a_plan_are_simulated(process: Command, words: list[str]) -> None:
    plan = ("plan", *words, "cluster.gpu=h100-sxm", "cluster.gpus=2", "--verify", "2")
    document = process(*plan, "--json").json
    verified = document["verified"]
    assert [one["layout"] for one in verified] == [one["layout"] for one in document["layouts"][:2]]
    for simulated, planned in zip(verified, document["layouts"], strict=False):
        check_contract(simulated, planned["layout"])
        assert simulated["predicted"]["memory"] == pytest.approx(planned["memory"])
    shown = process(*plan)
    assert shown.out.count("Predicted and simulated") == 3
    assert shown.out.index("layouts fit; the best") < shown.out.index("Predicted and simulated")


# train --dry-run #


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, and rows."""
    return make_folder(tmp_path_factory.mktemp("rows"))


def test_what_train_refuses_its_dry_run_refuses(
    meshtune: Command, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = short_run(rows, tmp_path / "cache", tmp_path / "run")
    assert "gone.jsonl" in meshtune("train", *words, "data.train=gone.jsonl", "--dry-run", code=2).err
    says(meshtune("train", *words, "layout=zero3x2-mb2", "--nproc", "4", "--dry-run", code=2).err)
    names = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    says(meshtune("train", *words, "--dry-run", code=2).err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    cases(
        [
            ["layout=zero3x2-mb2", "data.packing=false", "train.precision=bf16"],
            ["layout=tp2-sp-mb1-ga4-full", "method=lora"],
            ["layout=mb2-ga2", "data.seq_len=50"],
        ]
    ),
)
def test_the_first_step_of_the_run_is_the_simulated_one(
    process: Command, rows: Path, tmp_path: Path, words: list[str]
) -> None:
    """Compare every category of every phase with what the run counts in its first step, to the byte."""
    words = [*short_run(rows, tmp_path / "cache", tmp_path / "run"), *words, "log.to=[jsonl,console]"]
    dry = process("train", *words, "--dry-run", "--json")
    assert not (tmp_path / "run").exists()
    process("train", *words)
    logged = RunDir(tmp_path / "run").rows()
    memory = next(row for row in logged if row["kind"] == "memory" and row["step"] == 1)
    first, _ = dry.json["ranks"][0]["steps"]
    counted = {
        phase: {name: size for name, size in sizes.items() if size}
        for phase, sizes in memory["phases"].items()
    }
    simulated = {
        phase: sizes["by_category"] | {"peak": sizes["peak_bytes"]}
        for phase, sizes in first["phases"].items()
    }
    assert simulated == counted
    step = next(row for row in logged if row["kind"] == "train")
    assert dry.json["run"]["first_batch"] == {key: step[key] for key in ("tokens", "label_tokens")}
    assert dry.json["run"]["steps"] == 4


def test_a_run_that_goes_on_says_how_many_steps_are_left() -> None:
    one = SimpleNamespace(
        model="m", layout=Layout(micro_batch_size=4), cluster=SimpleNamespace(gpu=SimpleNamespace(name="cpu"))
    )
    batch = SimpleNamespace(tokens=475, label_tokens=249)
    new, later = (
        DryTraining(one, "runs/x", "extend", 3, step, batch, ()).headline  # type: ignore[arg-type]
        for step in (None, 1)
    )
    says(new)
    says(later)


@pytest.mark.all
def test_the_next_step_of_a_run_that_goes_on_is_the_second_simulated_one(
    process: Command, rows: Path, tmp_path: Path
) -> None:
    words = [*short_run(rows, tmp_path / "cache", tmp_path / "run"), "layout=mb2-ga2", "data.packing=false"]
    process("train", *words, "train.max_steps=1")
    dry = process("train", *words, "train.max_steps=3", "--dry-run", "--json").json
    assert (dry["run"]["steps"], dry["run"]["resumed"]) == (3, 1)
    process("train", *words, "train.max_steps=3")
    logged = RunDir(tmp_path / "run").rows()
    step = next(row for row in logged if row["kind"] == "train" and row["step"] == 2)
    assert dry["run"]["first_batch"] == {key: step[key] for key in ("tokens", "label_tokens")}
    memory = next(row for row in logged if row["kind"] == "memory" and row["step"] == 2)
    first, later = (
        {phase: sizes["peak_bytes"] for phase, sizes in one["phases"].items()}
        for one in dry["ranks"][0]["steps"]
    )
    assert {phase: sizes["peak"] for phase, sizes in memory["phases"].items()} == later != first
