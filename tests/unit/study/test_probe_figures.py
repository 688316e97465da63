"""Arithmetic of a probe: medians, spreads, refusals, and the constants of a made-up machine."""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from golden import refuses, says
from rich.console import Console

from meshtune import config
from meshtune.errors import UserError
from meshtune.plan.cluster import cluster_for
from meshtune.plan.hardware import catalogue, gpu_of, table_problems
from meshtune.plan.machine import Machine
from meshtune.plan.phrases import unmeasured
from meshtune.plan.seconds.collectives import ring_collectives, tree_all_reduce
from meshtune.plan.seconds.gpu import matmul
from meshtune.plan.work import attended
from meshtune.report.study import probed
from meshtune.study.probe import CPU, rank_counts, tasks_of
from meshtune.study.probe_kind import (
    Device,
    Figure,
    Fitted,
    document_of,
    kind_of,
    shape_of,
    slowdown,
    text_of,
)

DEVICE = Device("Made-up CPU", True, 8 * 2**30, 4, 4, "fp32", catalogue()["cpu"])
FP32, BF16 = 0.1e12, 0.2e12  # FLOP/s of the fastest matmul
SHARE, DEPTH, BANDWIDTH, LARGE = 0.8, 20.0, 40e9, 0.5
KEYS, ATTENTION, BACKWARD = 100.0, 0.6, 1.2  # of heads of 64: a share of FP32
LINK, LATENCY = {2: 2e9, 4: 0.8e9}, {2: 1e-4, 4: 3e-4}
SLOWER = {1: 1.0, 2: 1.25, 4: 4.0}  # with so many ranks at work
WOBBLE = (1.0, 1.01, 0.99, 1.0, 1.02)  # quartiles 1 % apart


def made_up() -> Iterator[Figure]:
    """Yield the figures of a machine that obeys the planner's formulas, its repeats 1 % apart."""
    machine = replace(
        Machine.of(DEVICE.like, "meshtune"), matmul_max=FP32, element=4.0, multiprocessors=4, clock=1.0,
        misaligned=1.0, unloaded=1.0, matmul=SHARE, depth=DEPTH, tiles=0.001, stack_matmul=1.0,
        bandwidth=BANDWIDTH, memory=LARGE, link_share=1.0,
    )  # fmt: skip
    for task in tasks_of(CPU, [1, 2, 4], "cpu"):
        what, ranks = task.what, task.ranks
        one = Figure(task.kind, what, ranks, (1.0,))
        match task.kind:
            case "matmul" if what["dtype"] == "bf16":
                seconds = 2 * what["tokens"] ** 3 / BF16
            case "matmul":
                seconds = float(matmul(machine, *shape_of(one)))
                seconds *= 1.5 if what["cols"] % 8 else 1.2 if what["cols"] % 64 else 1.0
                if what["cols"] == 1024 == what["tokens"]:
                    seconds = 2 * 1024**3 / FP32  # the fastest of all
            case "attention":
                keys = float(attended(what["length"], float("inf"))) + KEYS
                seconds = 2 * what["tokens"] * keys * what["width"] / (ATTENTION * FP32)
                seconds *= 2.5 * BACKWARD if what["form"] == "backward" else 1.0
            case "memory":
                moved = {"copy": 2, "add": 3}[what["form"]] * what["bytes"]
                seconds = moved / BANDWIDTH / (LARGE if what["bytes"] > 2**24 else 1.0)
            case "collective":
                linked = replace(machine, link=LINK[ranks], link_latency=LATENCY[ranks])
                formula = tree_all_reduce if what["form"] == "all_reduce" else ring_collectives
                seconds = float(formula(linked, what["bytes"], ranks, ranks))
            case _:
                seconds = 4e-6
        if task.kind in ("matmul", "attention", "memory"):
            seconds *= SLOWER[ranks]
        yield replace(one, repeats=tuple(seconds * factor for factor in WOBBLE))


def noisy(one: Figure) -> Figure:
    """The same figure with repeats far apart."""
    return replace(one, repeats=tuple(one.seconds * factor for factor in (0.5, 0.6, 1.0, 1.5, 2.0)))


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    """Figures of the made-up machine."""
    return list(made_up())


def written(figures: list[Figure], folder: Path) -> tuple[Path, Fitted]:
    """(The file of these figures, the constants in it)."""
    fitted = kind_of(figures, DEVICE)
    provenance = {
        "meshtune": "0",
        "date": "2026-01-01",
        "device": DEVICE.name,
        "cores": 4,
        "load_before": 1.5,
    }
    file = folder / "my-cluster.toml"
    file.write_text(text_of(document_of(figures, DEVICE, fitted, provenance), file.name))
    return file, fitted


@pytest.mark.parametrize(
    ("repeats", "spread", "verdict"),
    [
        ((2.0,), 0.0, ""),
        ((1.0, 1.0, 1.09, 1.2, 1.0), 0.09, ""),
        ((1.0, 1.0, 1.11, 1.2, 1.0), 0.11, "marked"),
        ((1.0, 1.0, 1.29, 2.0, 1.0), 0.29, "marked"),
        ((1.0, 1.0, 1.31, 2.0, 1.0), 0.31, "refused"),
    ],
)
def test_spreads_mark_and_refuse(repeats: tuple[float, ...], spread: float, verdict: str) -> None:
    """Above 10 % a figure is marked, above 30 % refused; one outlier of five repeats does neither."""
    one = Figure("host", {"form": "add"}, 1, repeats)
    assert one.spread == pytest.approx(spread)
    assert one.marked == (verdict == "marked")
    assert one.refused == (verdict == "refused")
    assert one.as_dict().get("refused", False) == one.refused


def test_a_slowdown_compares_the_same_operations() -> None:
    """The geometric mean over operations that ranks ran alone and together; None for a kind without any."""
    alone = [Figure("memory", {"form": form}, 1, (1.0,)) for form in ("copy", "add")]
    both = [Figure("memory", {"form": "copy"}, 2, (2.0,)), Figure("memory", {"form": "add"}, 2, (8.0,))]
    assert slowdown([*alone, *both], "memory", 2) == pytest.approx(4.0)
    assert slowdown([*alone, *both], "matmul", 2) is None


def test_the_constants_of_a_made_up_machine_are_found(figures: list[Figure]) -> None:
    """Fits give back the rates, latencies and slowdowns that the figures were made with, within 5 %."""
    fitted = kind_of(figures, DEVICE)
    assert [*table_problems(fitted.table | {"source": ""})] == []
    assert fitted.borrowed == ()
    assert "efficiency_as" not in fitted.table
    gpu = gpu_of("this-cpu", fitted.table | {"source": ""})
    near = {"rel": 0.05}
    assert (gpu.fp32, gpu.bf16, gpu.bandwidth) == pytest.approx((FP32, BF16, BANDWIDTH), **near)
    alone, two, four = (gpu.efficiency_among(ranks) for ranks in (1, 2, 4))
    assert alone["matmul"] == pytest.approx(SHARE, **near)
    assert alone["depth"] == pytest.approx(DEPTH, rel=0.3)
    assert (alone["misaligned"], alone["unloaded"]) == pytest.approx((1.2, 1.5), **near)
    assert alone["memory"] == pytest.approx(LARGE, **near)
    assert two["matmul"] == pytest.approx(SHARE / 1.25, **near)
    assert four["matmul"] == pytest.approx(SHARE / 4, **near)
    assert four["memory"] == pytest.approx(LARGE / 4, **near)
    assert gpu.link * two["link_share"] == pytest.approx(LINK[2], **near)
    assert gpu.link * four["link_share"] == pytest.approx(LINK[4], **near)
    assert [table["link_latency"] for table in (two, four)] == pytest.approx([1e-4, 3e-4], **near)
    assert (alone["launch"], alone["launch_blocking"]) == pytest.approx((4e-6, 1), **near)
    machine = Machine.of(gpu, "meshtune")
    assert machine.attention_64 == pytest.approx(ATTENTION * BF16, **near)
    assert (machine.attention_keys, machine.attention_backward) == pytest.approx((KEYS, BACKWARD), **near)
    assert max(fitted.off.values()) < 0.05


def test_a_refused_figure_has_no_say(figures: list[Figure]) -> None:
    """One noisy copy of large tensors changes nothing that the other figures don't."""
    spoilt = next(one for one in figures if one.kind == "memory" and one.what["bytes"] > 2**24)
    kept = [noisy(one) if one is spoilt else one for one in figures]
    assert kind_of(kept, DEVICE).table["efficiency"]["memory"] == pytest.approx(LARGE, rel=0.02)


def test_constants_without_a_figure_are_another_kinds(figures: list[Figure], tmp_path: Path) -> None:
    """All large copies refused: the file names them, the plan takes another kind's and says so."""
    spoilt = [noisy(one) if one.kind == "memory" else one for one in figures]
    file, fitted = written(spoilt, tmp_path)
    assert "memory" in fitted.borrowed
    assert "bandwidth" in fitted.borrowed
    document = tomllib.loads(file.read_text())
    assert len(document["measured"]["refused"]) == sum(one.kind == "memory" for one in figures)
    cluster = cluster_for(config.load(None, ["model.name=a", f"cluster={file}"]))
    assert cluster.gpu.efficiency["memory"] == catalogue()["a100-80"].efficiency["memory"]
    says(unmeasured(cluster))


def test_ranks_whose_figures_were_refused_are_named(figures: list[Figure], tmp_path: Path) -> None:
    """Matmuls of 2 ranks refused: a plan for 2 ranks takes what 1 and 4 reached, and says so."""
    spoilt = [noisy(one) if one.kind == "matmul" and one.ranks == 2 else one for one in figures]
    file, fitted = written(spoilt, tmp_path)
    assert fitted.borrowed == ("matmul of 2 ranks",)
    overrides = ["model.name=a", f"cluster={file}"]
    two = cluster_for(config.load(None, [*overrides, "cluster.gpus=2"]))
    says(unmeasured(two))
    assert unmeasured(two.of_size(4)) == ""


def test_the_written_file_is_read_by_a_config(figures: list[Figure], tmp_path: Path) -> None:
    """Round trip: settings, constants and every figure with its spread."""
    file, fitted = written(figures, tmp_path)
    document = tomllib.loads(file.read_text())
    assert document["kind"]["efficiency"] == fitted.table["efficiency"]
    assert sum(map(len, document["measured"]["figures"].values())) == len(figures)
    assert all(one["spread"] < 0.03 for one in document["measured"]["figures"]["matmul"])
    cluster = cluster_for(config.load(None, ["model.name=a", f"cluster={file}", "cluster.gpus=4"]))
    assert cluster.timed
    assert unmeasured(cluster) == ""
    assert cluster.gpu.efficiency_among(4) == gpu_of("a", document["kind"]).efficiency_among(4)
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(probed(document))
    shown = console.export_text()
    assert "GFLOP/s" in shown
    assert "300 µs" in shown
    assert "1.5 other processes ran on 4 cores" in shown


def test_nothing_is_written_where_no_matmul_is_sure(figures: list[Figure]) -> None:
    """All matmuls refused: the error names the least spread, and the remedy."""
    with refuses(UserError):
        kind_of([noisy(one) if one.kind == "matmul" else one for one in figures], DEVICE)


def test_numbers_of_ranks() -> None:
    """Powers of 2, and all of them."""
    assert [rank_counts(ranks) for ranks in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
