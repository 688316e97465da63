"""Plans for the tools that run them: predicted with the tool's stack, and only of layouts that it runs."""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
from golden import refuses, says
from known import known
from shapes import of_shape
from terminal import printed

from meshtune.config import Config, load
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.placement.columns import Columns
from meshtune.placement.rules import Traits, sentences
from meshtune.plan.accounting import accounting_of, stack_accounting
from meshtune.plan.answer import Answer, offer_of
from meshtune.plan.changes import remedies
from meshtune.plan.cluster import Cluster, cluster_of
from meshtune.plan.explanation import Explanation
from meshtune.plan.hardware import stacks
from meshtune.plan.machine import machine_of
from meshtune.plan.memory.stages import Stages
from meshtune.plan.programs import MESHTUNE, TOOLS
from meshtune.plan.search import Plan, explained, search
from meshtune.plan.workload import Workload, lighter_workloads
from meshtune.report.plan import documents
from meshtune.report.plan.screen import REFUSED
from meshtune.sections import ClusterConfig
from meshtune.tools.export import EXPORTERS, check, export, tool_for, write
from meshtune.units import GIB

TEXT = ["model.name=m", "data.train=rows.jsonl", "data.format=text", "train.max_steps=10"]


def settings(batch: int, *more: str) -> Config:
    return load(overrides=[*TEXT, f"train.global_batch_size={batch}", *more])


def llama(model: str, batch: int, tool: str, seq_len: int = 4096) -> Workload:
    shape = known(model)
    config = settings(batch, f"data.seq_len={seq_len}")
    return Workload(model, shape.work, shape.traits, seq_len, batch).run_by(tool_for(tool, config))


def shaped(layers: int, batch: int, tool: str) -> Workload:
    """A model of 8B's widths with any number of layers."""
    shape = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 128256}
    work = of_shape(layers=layers, **shape)
    traits = Traits("LlamaForCausalLM", layers, 32, 8, 128256)
    return Workload("any", work, traits, 4096, batch).run_by(tool_for(tool, settings(batch)))


def h100s(gpus: int) -> Cluster:
    return cluster_of(ClusterConfig(gpu="h100-sxm", gpus=gpus))


@cache
def planned(tool: str) -> Plan:
    return search(llama("llama-3.1-8b", 64, tool), h100s(16))


def test_every_tool_has_an_exporter_and_a_stack_that_knows_its_precisions() -> None:
    assert TOOLS.keys() == {*EXPORTERS, MESHTUNE.name}
    for tool in TOOLS.values():
        for stack in (tool.stack, tool.compiled):
            assert stack in stacks()
            for precision in tool.precisions:
                how = stack_accounting(stack, precision)
                assert how.element == {"fp32": 4, "fp64": 8}.get(precision, 2), (stack, precision)
                assert tool is MESHTUNE or math.isinf(how.loss_chunk), "whole logits"


@pytest.mark.ci
@pytest.mark.parametrize("tool", EXPORTERS)
def test_every_ranked_layout_can_be_exported(tool: str) -> None:
    plan = planned(tool)
    assert len(plan) > 20 and all(choice.tool.name == tool for choice in plan.best(3))
    config = settings(64, "data.seq_len=4096")
    for place in range(0, len(plan), max(1, len(plan) // 60)):
        layout = plan.choice(place).layout
        assert export(tool, config, layout, blocks=32, gpus_per_node=8).files, layout


@pytest.mark.parametrize(
    ("tool", "reasons"),
    [
        ("accelerate", ["without pipeline", "no ulysses", "no ZeRO-1", "whole blocks or nothing"]),
        ("deepspeed", ["PipelineModule", "is Ulysses", "not both", "shards over all data ranks"]),
        ("torchtitan", ["no ulysses", "no ZeRO-1"]),
        ("megatron", ["no schedules but 1F1B", "without pipeline stages", "no selective"]),
        ("axolotl", ["without pipeline", "no ulysses", "no ZeRO-1"]),
        ("llamafactory", ["no context parallelism", "PipelineModule", "whole blocks or nothing"]),
    ],
)
def test_what_a_tool_cannot_run_is_counted_with_the_reason(tool: str, reasons: list[str]) -> None:
    plan = planned(tool)
    for reason in reasons:
        (group,) = [each for each in plan.rejected if reason in each.reason]
        assert group.count > 0 and TOOLS[tool].title in group.reason.replace("Megatron-FSDP", "Megatron-LM")
        assert plan.workload.refusals(Layout.parse(group.example))
    assert plan.considered == len(plan) + sum(each.count for each in plan.rejected)


def test_only_tools_that_split_sequences_are_offered_sp() -> None:
    for tool in EXPORTERS:
        columns = planned(tool).columns
        split = columns.sp[columns.tp > 1]
        assert len(split) and (split == TOOLS[tool].sequence_parallel).all(), tool


def test_a_trainer_keeps_whole_logits() -> None:
    """The review's case: 2 sequences of 4096 tokens of 128,256 logits, 2 + 4 + 4 bytes each."""
    layout = Layout.parse("zero3x16-mb2-ga2")
    here, there = (
        explained(llama("llama-3.1-8b", 64, tool), h100s(16), layout) for tool in ("meshtune", "accelerate")
    )
    assert there.memory.logits == pytest.approx(2 * 4096 * 128256 * 10, rel=0.01)
    assert there.memory.logits > 2 * here.memory.logits
    assert there.memory.peak - here.memory.peak > 5 * GIB


def test_a_tools_constants_are_its_stacks() -> None:
    cluster = h100s(16)
    for tool in TOOLS.values():
        workload = llama("llama-3.1-8b", 64, tool.name)
        constants = stacks()[tool.stack]
        assert machine_of(workload, cluster).elementwise_hidden == constants["elementwise_hidden"]
        compiled = replace(workload, compile=True)
        assert compiled.stack == tool.compiled
        assert machine_of(compiled, cluster).data_overlap == stacks()[tool.compiled]["data_overlap"]
        assert accounting_of(workload, cluster).logit == stack_accounting(tool.stack, "bf16").logit


def test_gradients_are_reduced_as_the_tool_does() -> None:
    for tool, size in (("meshtune", 4), ("accelerate", 2), ("torchtitan", 4)):
        assert machine_of(llama("llama-3.1-8b", 64, tool), h100s(16)).scatter_bytes == size
    config = settings(64, "train.reduce_dtype=bf16")
    shape = known("llama-3.1-8b")
    reduced = Workload("m", shape.work, shape.traits, 4096, 64, reduce_dtype="bf16")
    there = reduced.run_by(tool_for("torchtitan", config))
    assert there.reduce_dtype == "fp32"


@pytest.mark.parametrize(
    ("layers", "text", "runs"),
    [
        (80, "tp4-sp-pp4-interleaved1f1b-v8-mb1-ga64", False),  # 20 layers a rank
        (80, "tp4-sp-pp4-interleaved1f1b-v5-mb1-ga64", True),
        (80, "tp4-sp-pp4-interleaved1f1b-v2-mb1-ga64", True),
        (126, "pp16-1f1b-mb1-ga64", True),
        (126, "pp16-interleaved1f1b-v2-mb1-ga64", True),
        (126, "pp16-interleaved1f1b-v4-mb1-ga64", False),
        (61, "pp16-1f1b-mb1-ga64", True),
        (61, "pp4-interleaved1f1b-v2-mb1-ga64", False),
    ],
)
def test_megatron_is_asked_for_stages_that_it_can_cut(layers: int, text: str, runs: bool) -> None:
    assert bool(shaped(layers, 64, "megatron").refusals(Layout.parse(text))) is not runs
    config, layout = settings(64), Layout.parse(text)
    if runs:
        assert export("megatron", config, layout, blocks=layers, gpus_per_node=8).files
    else:
        with refuses(UserError):
            export("megatron", config, layout, blocks=layers, gpus_per_node=8)


def test_rules_follow_the_model_that_is_asked_about() -> None:
    """plan max model tries other models, with other numbers of layers, in the same workload."""
    workload = shaped(61, 64, "megatron")
    layout = Layout.parse("pp4-interleaved1f1b-v2-mb1-ga64")
    other = replace(workload, work=shaped(80, 64, "megatron").work)
    assert workload.refusals(layout) and not other.refusals(layout)
    assert not sentences(MESHTUNE.rules(61, 4096), layout)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("megatron", ["method=lora"]),
        ("torchtitan", ["method=lora"]),
        ("megatron", ["train.precision=bf16-pure"]),
        ("accelerate", ["train.precision=fp64"]),
        ("deepspeed", ["train.optimizer=muon"]),
    ],
)
def test_what_a_tool_cannot_train_is_refused_before_it_is_planned(tool: str, words: list[str]) -> None:
    with refuses(UserError):
        tool_for(tool, settings(64, *words))
    with refuses(UserError):
        check(tool, settings(64, *words))


def test_settings_that_only_an_export_needs_do_not_stop_a_plan() -> None:
    config = settings(64, "data.where={lang: en}")
    best = answer("megatron")
    best = replace(best, workload=best.workload.run_by(tool_for("megatron", config)))
    lines = text_of(documents.answer(best, 3, whole=False))
    assert lines[lines.index(REFUSED) + 1].strip() == best.as_dict(1)["notes"][0]
    with refuses(UserError):
        check("megatron", config)


def test_remedies_are_ones_that_the_tool_has() -> None:
    cluster = cluster_of(ClusterConfig(gpu="l4", gpus=1))
    small = {
        tool: [outcome.remedy for outcome in remedies(llama("llama-3.2-1b", 8, tool, 512), cluster)]
        for tool in ("deepspeed", "megatron")
    }
    assert any("bf16-pure" in each for each in small["deepspeed"])
    assert small["megatron"] and not any("bf16-pure" in each for each in small["megatron"])
    config = settings(8)
    assert not lighter_workloads(
        config, lambda _: pytest.fail("no numbers needed"), partial(tool_for, "megatron")
    )


def test_an_unknown_tool_is_refused() -> None:
    with refuses(UserError):
        tool_for("megatrn", settings(8))


def answer(tool: str) -> Answer:
    plan = planned(tool)
    return Answer(plan.workload, (offer_of(plan),), offer_of(plan))


def text_of(renderable: object) -> list[str]:
    return [line.rstrip() for line in printed(renderable, 400).rstrip().splitlines()]


@pytest.mark.ci
def test_the_answer_names_the_tool_and_what_runs_the_layout(tmp_path) -> None:
    line = documents.CommandLine("meshtune plan", "model.name=x", "cluster.gpus=64")
    lines = text_of(documents.answer(answer("meshtune"), 3, line=line))
    assert "run by" not in lines[0] and any("meshtune train model.name=x layout=" in each for each in lines)
    best = answer("megatron")
    lines = text_of(documents.answer(best, 3, line=line))
    assert "run by Megatron-LM" in lines[0]
    layout = best.choice.layout
    assert f"  meshtune plan export megatron model.name=x cluster.gpus=64 layout={layout}" in lines
    assert {"tool": "megatron", "stack": "megatron-core"}.items() <= best.as_dict(1).items()
    assert best.as_dict(1)["layouts"][0]["tool"] == "megatron"

    config = settings(64, "data.seq_len=4096")
    exported = export("megatron", config, layout, blocks=32, gpus_per_node=8)
    written = write(best.workload.tool, exported, layout, tmp_path / "out")
    lines = text_of(documents.answer(best, 3, written))
    said = next(line for line in lines if line.startswith(f"{layout} for Megatron-LM is in "))
    assert f"{tmp_path / 'out'}; start it with: " in said and said.endswith("bash megatron.sh")
    assert not any("meshtune train" in line for line in lines)
    start = lines.index("What Megatron-LM runs differently")
    assert start == lines.index(said) + 2 and all(
        line.startswith("  ") for line in lines[start + 1 : start + 3]
    )
    assert written.as_dict()["layout"] == str(layout) and "megatron.sh" in written.as_dict()["files"]
    with refuses(UserError):
        write(best.workload.tool, exported, layout, tmp_path / "out")


def test_a_trainer_holds_embedding_and_head_over_the_step() -> None:
    """Only blocks are wrapped: what FSDP2's root has is gathered until the backward ends."""
    for stack in ("trainer-fsdp2", "deepspeed"):
        assert not stack_accounting(stack, "bf16").ends_apart
    layout = Layout.parse("zero3x16-mb1-ga4")
    found = explained(llama("llama-3.1-8b", 64, "accelerate"), h100s(16), layout)
    apart = explained(llama("llama-3.1-8b", 64, "meshtune"), h100s(16), layout)
    assert found.memory.gathered_weights > apart.memory.gathered_weights


def test_megatron_in_fp32_keeps_twice_as_much() -> None:
    half, whole = (stack_accounting("megatron-core", precision) for precision in ("bf16", "fp32"))
    assert whole.saved.wide == 2 * half.saved.wide and whole.logit == 2 * half.logit
    assert whole.precision.optimizer == half.precision.optimizer and not whole.precision.master


@pytest.mark.parametrize("tool", ["accelerate", "deepspeed", "llamafactory"])
def test_tensor_parallel_ranks_of_hugging_face_hold_all_logits(tool: str) -> None:
    cluster, texts = h100s(16), ("dp16-mb2-ga2", "zero2x4-tp4-mb2-ga8")
    whole, cut = (explained(llama("llama-3.1-8b", 64, tool), cluster, Layout.parse(text)) for text in texts)
    assert cut.memory.logits == pytest.approx(whole.memory.logits)
    split = explained(llama("llama-3.1-8b", 64, "megatron"), cluster, Layout.parse("zero1x4-tp4-sp-mb2-ga8"))
    assert split.memory.logits == pytest.approx(2 * 4096 * 128256 / 4 * 2, rel=0.01)


def test_an_explained_layout_names_its_tool() -> None:
    workload = llama("llama-3.1-8b", 64, "megatron")
    choice = explained(workload, h100s(16), Layout.parse("zero1x16-mb1-ga4"))
    assert {"tool": "megatron", "stack": "megatron-core"}.items() <= choice.as_dict().items()
    head = text_of(documents.explained([Explanation(workload, choice, ())]))[0]
    says(head)
    assert head.startswith("zero1x16-mb1-ga4")
    says(text_of(documents.largest("batch", 8, choice))[0])


def test_deepspeed_shards_as_many_bytes_as_it_estimates() -> None:
    """estimate_zero3_model_states_mem_needs: 18 bytes of each parameter, over the ranks."""
    workload = llama("llama-3.1-8b", 64, "deepspeed")
    few, many = (
        explained(workload, h100s(gpus), Layout.parse(f"zero3x{gpus}-mb1-ga{64 // gpus}")).memory
        for gpus in (8, 32)
    )
    states = [found.weights + found.gradients + found.optimizer for found in (few, many)]
    assert states == pytest.approx([18 * 8.03e9 / 8, 18 * 8.03e9 / 32], rel=0.01)
    assert few.peak - many.peak == pytest.approx(18 * 8.03e9 * (1 / 8 - 1 / 32), rel=0.1)


@pytest.mark.parametrize("tool", [*EXPORTERS, "meshtune"])
def test_ranks_share_a_key_value_head_only_where_the_tool_replicates_it(tool: str) -> None:
    """8 key-value heads over 16 ranks: half a head each, which transformers' attention can't view."""
    text = f"tp16{'-sp' * TOOLS[tool].sequence_parallel}-mb1-ga64"
    against = llama("llama-3.1-8b", 64, tool).refusals(Layout.parse(text))
    if tool in ("megatron", "meshtune"):
        assert not against
    else:
        says(against)


def test_torchtitan_counts_embedding_and_head_as_layers() -> None:
    work = shaped(61, 64, "torchtitan").work
    cut = Stages.cut(work, Columns.of([Layout.parse("pp4-1f1b-mb1-ga64")]), "slots")
    assert cut.blocks[:, 0].tolist() == [15, 16, 15]
    for stack in (TOOLS["torchtitan"].stack, TOOLS["torchtitan"].compiled):
        assert stack_accounting(stack, "bf16").stage_cut == "slots"


@pytest.mark.parametrize(
    ("layers", "pp", "stages"), [(80, 4, [2, 4, 5]), (126, 16, [2]), (61, 4, []), (48, 4, [2, 3, 4, 6])]
)
def test_megatron_is_offered_every_number_of_stages_that_it_can_cut(
    layers: int, pp: int, stages: list[int]
) -> None:
    fixed = {"pp": pp, "schedule": "interleaved1f1b", "tp": 4, "micro_batch_size": 1}
    plan = search(shaped(layers, 128, "megatron"), h100s(128), fixed=fixed)
    assert sorted({*plan.columns.virtual_stages.astype(int).tolist()}) == stages
