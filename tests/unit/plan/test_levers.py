"""Single changes to a layout, and what they are predicted to gain."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden import says
from made_plans import machines
from made_plans import workload as workload_of
from transformers import LlamaConfig

from meshtune import config
from meshtune.api.plan import plan
from meshtune.layout import Layout
from meshtune.placement.columns import Columns
from meshtune.plan.advice import faster_in_8_bits
from meshtune.plan.changes import Refused, changes, levers, neighbours
from meshtune.plan.explanation import explain
from meshtune.plan.search import explained, search
from meshtune.plan.seconds.step import TIE

CLUSTER, WORKLOAD = machines(64), workload_of(size=256, seq_len=8192)
LAYOUTS = (
    "zero3x64-mb1-ga4",
    "dp8-tp2-sp-regather-pp4-interleaved1f1b-v2-mb1-ga32",
    "dp2-zero3x2-ulysses2-tp8-sp-mb4-ga16-full",
    "pp8-zbv-tp8-sp-mb1-ga256",
)


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_neighbour_has_the_same_gpus_and_global_batch(text):
    layout = Layout.parse(text)
    near = list(neighbours(layout, 32))
    assert len(near) > 10
    for _, _, other in near:
        assert (other.world, other.global_batch_size) == (layout.world, layout.global_batch_size), other
        assert other != layout and Layout.parse(str(other)) == other


def test_a_layout_that_no_micro_batch_runs_is_explained_with_what_to_write():
    settings = ["model.name=x", "cluster.gpu=h100-sxm", "cluster.gpus=8", "train.global_batch_size=64"]
    workload = replace(WORKLOAD, global_batch_size=64)
    for text, remedy in (("zero3x8-full33", "write full, or full31 or less."), ("dp2-tp3", "try tp=2.")):
        with pytest.raises(Refused) as refused:
            explain(config.load(None, settings), workload, text)
        for problem in refused.value.problems:
            says(problem)
            assert problem.endswith(remedy)


def test_every_degree_recomputation_schedule_and_setting_is_tried():
    kinds = set()
    for text in ("dp2-zero3x4-cp2-tp2-sp-pp2-1f1b-mb2-ga16", "zero3x64-mb1-ga4"):
        choice = explained(WORKLOAD, CLUSTER, Layout.parse(text))
        kinds |= {change.kind for change in changes(WORKLOAD, CLUSTER, choice.layout)}
    assert kinds == {
        "micro-batch", "recomputation", "schedule", "tp", "cp", "pp", "ZeRO", "compile", "sums", "moments",
        "network", "batch",
    }  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("text", LAYOUTS)
def test_gains_are_those_of_a_prediction_of_the_changed_layout(text):
    choice = explained(WORKLOAD, CLUSTER, Layout.parse(text))
    found = levers(WORKLOAD, choice)
    assert 1 <= len(found) <= 3
    for lever in found:
        workload, cluster, layout = WORKLOAD, CLUSTER, choice.layout
        for word in lever.setting.split():
            name, value = word.split("=")
            match name:
                case "layout":
                    layout = Layout.parse(value)
                case "train.compile":
                    workload = workload.compiled()
                case "train.optimizer":
                    workload = replace(workload, optimizer=value)
                case "train.reduce_dtype":
                    workload = replace(workload, reduce_dtype=value)
                case "train.global_batch_size":
                    workload = workload.of_batch(int(value))
                case "cluster.network":
                    cluster = replace(cluster, network=float(value) * 1e9)
        again = explained(workload, cluster, layout)
        ratio = again.tokens_per_second_per_gpu / choice.tokens_per_second_per_gpu
        assert lever.speed == pytest.approx(ratio - 1, abs=1e-9)
        assert lever.freed == pytest.approx(choice.memory.peak - again.memory.peak, abs=1)
        assert f"{abs(lever.speed):.1%}" in lever.sentence() or abs(lever.speed) < TIE


def test_the_largest_levers_of_a_layout_that_fits_are_the_fastest_that_fit():
    choice = explained(WORKLOAD, CLUSTER, Layout.parse("dp8-tp2-sp-pp4-1f1b-mb1-ga32-full"))
    found = levers(WORKLOAD, choice)
    assert found[0].change.words == "recomputation none instead of full"
    assert all(lever.choice.fits for lever in found)
    assert [lever.speed for lever in found] == sorted((lever.speed for lever in found), reverse=True)
    fitting = [
        explained(WORKLOAD, CLUSTER, other).seconds.total
        for _, _, other in neighbours(choice.layout, 32)
        if not WORKLOAD.refusals(other) and explained(WORKLOAD, CLUSTER, other).fits
    ]
    assert found[0].choice.seconds.total <= min(fitting) * 1.0001


def test_the_levers_of_a_layout_that_does_not_fit_make_it_fit_where_one_does():
    choice = explained(WORKLOAD, CLUSTER, Layout.parse("zero1x64-mb1-ga4"))
    assert not choice.fits
    found = levers(WORKLOAD, choice)
    assert len(found) == 3 and all(lever.choice.fits and lever.freed > 0 for lever in found)
    assert any(lever.change.words.startswith("ZeRO-") for lever in found)


def test_recomputation_of_as_few_blocks_as_fit_is_a_lever():
    choice = explained(WORKLOAD, CLUSTER, Layout.parse("zero3x64-mb2-ga2-full"))
    assert not explained(WORKLOAD, CLUSTER, Layout.parse("zero3x64-mb2-ga2")).fits
    lever = levers(WORKLOAD, choice)[0]
    number = lever.choice.layout.recompute_blocks
    assert number is not None
    assert lever.change.words == f"recomputation selective{number} instead of full" and 1 < number < 32
    fewer = replace(lever.choice.layout, recompute_blocks=number - 1)
    assert lever.choice.fits and not explained(WORKLOAD, CLUSTER, fewer).fits


def test_the_compile_lever_counts_what_compiled_blocks_save():
    """As workload_of does for train.compile=true: it was counted as eager blocks save it."""
    compiled = WORKLOAD.compiled()
    assert compiled.compile is True
    eager, traced = WORKLOAD.work.traced[2].kept, compiled.work.traced[2].kept
    # Norms and the activation function keep no copies of what matmuls return.
    hidden, wide = int(WORKLOAD.work.hidden), int(WORKLOAD.work.wide)
    assert sum(eager[:5]) - sum(traced[:5]) == 8 * hidden + wide
    offered = {change.kind: change.workload for change in changes(WORKLOAD, CLUSTER)}
    assert offered["compile"] == compiled


def test_matmuls_in_8_bits_are_offered_where_they_run_and_are_faster():
    compiled = replace(workload_of(size=8), compile="auto")
    plan = search(compiled, machines(8))
    (sentence,) = faster_in_8_bits(plan, plan.choice(0))
    narrow = replace(compiled, precision="fp8")
    faster = search(narrow, machines(8)).choice(0)
    gain = faster.tokens_per_second_per_gpu / plan.choice(0).tokens_per_second_per_gpu - 1
    assert f"by 3% (train.precision=fp8): {gain:.1%} more tokens" in sentence and gain > 0.1
    matrices = tuple(replace(gemm, quantised=True) for gemm in compiled.work.matrices)
    in_4_bits = replace(compiled, work=replace(compiled.work, matrices=matrices))
    for other, cluster in (
        (WORKLOAD, machines(8)),
        (compiled, machines(8, "a100-80")),
        (in_4_bits, machines(8)),
        (narrow, machines(8)),
    ):
        assert not any(change.kind == "fp8" for change in changes(other, cluster))


@pytest.mark.ci
def test_a_plan_names_what_dropout_of_adapters_costs(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=2).save_pretrained(tmp_path)
    words = [f"model.name={tmp_path}", f"data.cache={tmp_path}", "cluster.gpu=h100-sxm", "cluster.gpus=1"]
    words += ["method=lora", "train.compile=false"]
    dropped, undropped = (plan(config.load(None, [*words, f"lora.dropout={share}"])) for share in (0.1, 0))
    gain = undropped.choice.tokens_per_second_per_gpu / dropped.choice.tokens_per_second_per_gpu - 1
    (sentence,) = (sentence for sentence in dropped.faster if "lora.dropout=0" in sentence)
    assert f"{gain:.1%} more tokens per second" in sentence
    assert not any("dropout" in sentence for sentence in undropped.faster)


def test_compiled_blocks_that_run_again_hold_random_numbers_of_dropout(tmp_path: Path) -> None:
    """Dry runs of Qwen3-8B hold as much under selective recomputation, linear and full."""
    LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=2).save_pretrained(tmp_path)
    words = [f"model.name={tmp_path}", f"data.cache={tmp_path}", "cluster.gpu=h100-sxm", "cluster.gpus=2"]
    dropped, undropped = (
        plan(config.load(None, [*words, "method=lora", f"lora.dropout={share}"])).workload.work
        for share in (0.1, 0)
    )
    assert dropped.traced[2].selective == undropped.traced[2].selective  # made again from their seeds
    for mode, elements in (("full", 6 * 512), ("linear", 2 * 512)):  # of q, k, v, o, gate and up
        columns = Columns.of([Layout(recompute=mode), Layout(recompute=mode, tp=2)])
        cut = 256 if mode == "full" else 0  # half of o's
        assert dropped.random_inputs(columns).tolist() == [elements, elements - cut]
        assert not np.any(undropped.random_inputs(columns))
