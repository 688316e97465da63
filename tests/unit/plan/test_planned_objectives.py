"""Preferences in a plan: the head's second forward, KTO's pass, the reference pass, a head of one output."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES
from golden import refuses, says
from known import known
from made_plans import load, machines
from test_seconds import IDEAL
from transformers import BertConfig

from meshtune import config
from meshtune.api.dryrun import subject_of
from meshtune.api.plan import workloads
from meshtune.data.cache import Summary
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.load import skeleton
from meshtune.objectives import OBJECTIVES
from meshtune.placement.columns import Columns
from meshtune.plan import cost
from meshtune.plan.answer import Answer, offer_of
from meshtune.plan.cost import Bounds, RunCost, RunLength, run_length
from meshtune.plan.facts import workload_facts
from meshtune.plan.over_time import memory_over_time, step_over_time
from meshtune.plan.programs import TOOLS
from meshtune.plan.search import Choice, explained, search
from meshtune.plan.seconds.step import PARTS, StepTime
from meshtune.plan.step_parts import parts_of_layouts
from meshtune.plan.workload import Workload
from meshtune.report.plan.screen import heading, reliability

PREFERENCES = [name for name in OBJECTIVES if name != "sft"]
LAYOUTS = (
    "zero3x8-mb1-ga2-full", "zero2x2-tp4-sp-mb1-ga3", "dp2-cp4-mb1-ga2-full", "pp8-1f1b-mb1-ga16",
    "dp2-pp4-zbv-mb1-ga8", "pp8-interleaved1f1b-v2-mb1-ga16-full",
)  # fmt: skip


def planned(objective: str, model: str = "llama-3.1-8b", **settings: float) -> Workload:
    workload = known(model, f"objective={objective}", "train.compile=false")
    return replace(workload, seq_len=4096, global_batch_size=16, **settings)


def time(workload: Workload, layout: str = "mb1-ga16", machine=IDEAL) -> StepTime:
    columns = Columns.of([Layout.parse(layout)])
    return StepTime(workload.work, columns, machine, workload.seq_len, workload.document_tokens)


@pytest.mark.parametrize("objective", ["dpo", "orpo", "simpo"])
def test_pairs_cost_as_documents_of_half_a_sequence_and_one_more_forward_of_the_head(objective: str) -> None:
    pairs, whole = planned(objective), planned(objective, mean_document_tokens=9999.0)
    sft = planned("sft")
    assert pairs.document_tokens == 2048 and whole.document_tokens == 4096 and sft.document_tokens is None
    work = sft.work
    flops = 2 * work.hidden * work.vocabulary * pairs.tokens
    machine = replace(IDEAL, counted=1)
    more = time(whole, machine=machine).seconds.total - time(sft, machine=machine).seconds.total
    assert more == pytest.approx(flops / IDEAL.matmul_max, rel=1e-6)
    assert whole.flops_per_token == sft.flops_per_token > pairs.flops_per_token, "a repetition is not needed"
    layout = Layout.parse("mb1-ga16-full")
    assert explained(whole, machines(1), layout).memory == explained(sft, machines(1), layout).memory


def test_the_pass_over_mismatched_answers_is_a_third_of_forward_and_backward() -> None:
    kto, sft = planned("kto"), planned("sft")
    assert kto.flops_per_token == pytest.approx(4 / 3 * sft.flops_per_token)
    machine = replace(IDEAL, counted=1)
    forward = time(kto, machine=machine).without_gradients
    assert forward.total == forward.compute
    norms = float(sum(w.elements for w in sft.work.block_weights if w.cols == 1))
    parameters = sft.work.blocks * (sft.work.block_parameters - norms) + sft.work.vocabulary * sft.work.hidden
    assert forward.compute == pytest.approx(2 * parameters * sft.tokens / IDEAL.matmul_max, rel=1e-4)
    both = time(kto, machine=machine)
    without = time(replace(kto, work=replace(kto.work, mismatched=0.0)), machine=machine)
    assert both.seconds.total - without.seconds.total == pytest.approx(forward.total)
    assert both.compute_parts["mismatched"] == pytest.approx(forward.compute)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_a_step_with_mismatched_answers_sum_to_it_in_every_layout(layout: str) -> None:
    """Its forward is shorter than forward and backward, part by part; measured parts have it too."""
    kto, cluster = planned("kto"), machines(8)
    machine = replace(IDEAL, counted=1, bandwidth=3e12, host_micro_batch=1e-3, launch=1e-5, ahead=1)
    found = time(kto, layout, machine)
    own = time(replace(kto, work=replace(kto.work, mismatched=0.0)), layout, machine).seconds
    for part in PARTS:
        more = getattr(found.seconds, part) - getattr(own, part)
        assert more == pytest.approx(getattr(found.without_gradients, part))
        assert -1e-9 <= more <= getattr(own, part) + 1e-9 or part in ("bubble", "imbalance"), part
    assert 0.1 < found.seconds.total / own.total - 1 < 0.5
    assert sum(found.compute_parts.values()) == pytest.approx(found.seconds.compute)
    parts = parts_of_layouts(kto, Columns.of([Layout.parse(layout)]), machine)
    assert sum(parts.values()) == pytest.approx(found.seconds.total)
    choice = explained(kto, cluster, Layout.parse(layout))
    drawn = step_over_time(kto, choice)
    assert drawn is not None and drawn.layout == choice.layout
    assert drawn.end == pytest.approx(choice.seconds.total, rel=0.04)
    _, held = memory_over_time(kto, choice, drawn)
    assert max(sum(one.parts.values()) for one in held) == pytest.approx(choice.memory.peak)


@pytest.mark.parametrize(("model", "tied"), [("llama-3.1-8b", False), ("llama-3.2-1b", True)])
def test_a_reward_model_has_one_output_in_place_of_the_head(model: str, tied: bool) -> None:
    reward, sft = planned("reward", model), planned("sft", model)
    head = sft.work.vocabulary * sft.work.hidden
    assert reward.work.parameters == sft.work.parameters - head * (not tied) + sft.work.hidden
    assert reward.work.trainable == 1.0 and reward.head_flops == 6 * sft.work.hidden
    for layout in ("mb1-ga16-full", "pp4-1f1b-mb1-ga16"):
        found, other = (
            explained(one, machines(int(layout == "mb1-ga16-full") or 4), Layout.parse(layout))
            for one in (reward, sft)
        )
        assert found.memory.logits < 1e-3 * other.memory.logits or other.memory.logits == 0
        assert found.seconds.total < other.seconds.total
    alone = [explained(one, machines(1), Layout.parse("mb1-ga16-full")).memory for one in (reward, sft)]
    weights = 2 * (sft.work.hidden - head * (not tied))
    assert alone[0].weights - alone[1].weights == pytest.approx(weights)


def test_a_reference_reads_every_row_once_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "objective=dpo", "train.global_batch_size=16", "data.train=a.jsonl", "data.eval_split=0.2"
    asked = load(*words, "train.num_epochs=3")
    assert run_length(asked).steps is None
    unknown = run_length(load(*words, "train.max_steps=50"))
    assert (unknown.steps, unknown.reference) == (50, 50.0)
    says(unknown.notes[0])
    monkeypatch.setattr(cost, "read_summary", lambda _: Summary(1600, 10**6, 1024.0, {}))
    length = run_length(asked)
    assert (length.steps, length.reference) == (300, pytest.approx(125)), "a fifth is held out: 2,000 / 16"
    assert run_length(load("objective=orpo", *words[1:], "train.num_epochs=3")).reference == 0

    plan = search(planned("dpo"), machines(8, price_per_gpu_hour=2.0), fixed={"zero": 3})
    choice = plan.choice(0)
    assert plan.reference[0] == choice.reference and 0.2 < choice.reference / choice.seconds.total < 0.4
    run = RunCost.of(choice, length)
    assert run.seconds and run.reference_seconds
    assert run.reference_seconds == pytest.approx(125 * choice.reference)
    assert run.seconds == pytest.approx(300 * choice.seconds.total + run.reference_seconds)
    assert run.cost == pytest.approx(run.seconds * 8 / 3600 * 2.0)
    assert length.tokens and run.cost_per_million_tokens == pytest.approx(run.cost / (length.tokens / 1e6))
    assert "The reference's pass over all rows is " in run.sentence()
    steps_only = RunLength(length.steps, length.tokens)
    bounds = Bounds(by=300 * choice.seconds.total + run.reference_seconds / 2)
    assert not offer_of(plan, length=steps_only, bounds=bounds).misses
    assert offer_of(plan, length=length, bounds=bounds).misses == ("by",)


@pytest.mark.parametrize("family", ["cohere", "bert"])  # without a class, and with one that has no `score`
def test_a_family_without_a_score_is_refused_by_a_plan_and_a_dry_run_as_by_training(
    family: str, tmp_path: Path
) -> None:
    source = BertConfig(is_decoder=True) if family == "bert" else FAMILIES[family]()
    source.save_pretrained(tmp_path)
    settings = config.load(None, [f"model.name={tmp_path}", "objective=reward", "cluster.gpu=cpu"])
    with pytest.raises(UserError, match=f"transformers has no {family} model with a score") as training:
        skeleton(str(tmp_path), dtype=torch.float32, attention="eager", scored=True)
    for ask in workloads(settings), subject_of(settings, lambda _: None):
        with pytest.raises(UserError) as refused, ask:
            pass
        assert refused.value.problems == training.value.problems


def test_a_plan_names_the_weights_of_a_larger_reference(tmp_path: Path) -> None:
    for name, blocks in ("own", 2), ("another", 8):
        FAMILIES["llama"](num_hidden_layers=blocks).save_pretrained(tmp_path / name)

    def notes(reference: str) -> list[str]:
        words = [f"model.name={tmp_path}/own", "objective=dpo", f"dpo.reference={reference}"]
        own = config.load(None, [*words, f"data.cache={tmp_path}"])
        with workloads(own) as (workload, _):
            return [note for note in workload.notes if "dpo.reference=" in note]

    assert notes("base") == notes(f"{tmp_path}/own") == []
    says(notes(f"{tmp_path}/another"))


@pytest.mark.parametrize("objective", PREFERENCES)
def test_a_plan_names_its_objective_and_what_it_adds(objective: str) -> None:
    workload = planned(objective)
    says(next(note for note in workload.notes if objective in note))
    assert workload_facts(workload)["objective"] == objective
    choice: Choice = explained(workload, machines(8), Layout.parse("zero3x8-mb1-ga2"))
    assert choice.as_dict()["objective"] == objective
    assert any("labels on all tokens" in one for one in reliability(choice)) == (objective != "reward")
    assert np.isclose(sum(choice.as_dict()["time"][part] for part in PARTS), choice.seconds.total)
    with refuses(UserError):
        workload.run_by(TOOLS["megatron"])
    plan = search(workload, machines(8), fixed={"zero": 3, "recompute": "full"})
    offer = offer_of(plan)
    assert f"objective={objective}" in heading(Answer(workload, (offer,), offer)).plain
