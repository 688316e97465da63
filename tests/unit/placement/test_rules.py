"""Layouts that a model can't take are refused, every reason at once, each with something that works."""

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
from golden import says
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage

from meshtune.layout import SCHEDULES, VIRTUAL_SCHEDULES, Layout
from meshtune.placement.columns import Columns
from meshtune.placement.rules import Traits, compiles, refusals, uncompiled

LLAMA = Traits(
    "LlamaForCausalLM", blocks=6, heads=12, kv_heads=4, vocabulary=256, cuts=((768, "rows of mlp.gate_proj"),)
)


DRAWING = replace(LLAMA, draws=True)


def refused(layout: str, traits: Traits = LLAMA, **settings) -> list[str]:
    return refusals(traits, Layout.parse(layout), **settings)


@pytest.mark.parametrize(
    "layout",
    ["dp3", "zero3x5", "dp2-zero2x3", "tp4", "tp12", "tp2-sp", "cp5", "ulysses3", "pp6-ga6", "pp3-zbv",
     "zero3x2-cp2-tp2", "zero1x2-pp2-zb-ga4", "zero3x2-pp2-1f1b-ga2", "pp2-gpipe-ga1",
     "tp4-pp3-interleaved1f1b-v2-ga6"],
)  # fmt: skip
def test_what_fits_is_taken(layout):
    assert refused(layout) == []


def test_updates_inside_the_backward_need_whole_gradients_there() -> None:
    works = ["mb2-ga1", "dp3-mb1-ga1", "zero3x4-mb1-ga1", "zero1x2-cp2-tp2-sp-mb1-ga1-full"]
    assert [refused(layout, step_in_backward=True) for layout in works] == [[]] * 4
    for layout in ("mb1-ga2", "pp2-1f1b-mb1-ga2", "dp2-zero3x2-mb1-ga1"):
        says(refused(layout, step_in_backward=True)[0])
        assert refused(layout) == []


def test_mlps_run_in_tiles_where_their_passes_can_be_repeated() -> None:
    assert refused("zero3x2-tp2-sp-pp2-1f1b-ga4-full", tiled=True) == refused("tp2", DRAWING) == []
    for layout, traits in (
        ("pp2-zbv-ga4", LLAMA),
        ("tp2", DRAWING),
        ("mb1", replace(LLAMA, tiles="has none")),
    ):
        says(refused(layout, traits, tiled=True)[0])
    says(refused("mb1", tiled=True, compile=True)[0])
    says(uncompiled("auto", LLAMA, Layout(), processor=False, tiled=True))
    assert compiles("auto", LLAMA, Columns.of([Layout()]), processor=False, tiled=True) == [False]


def test_matrices_in_4_bits_are_cut_between_blocks() -> None:
    cut = replace(LLAMA, cuts=((128, "columns of mlp.down_proj"), (96, "columns of self_attn.o_proj")))
    assert refused("tp4", cut) == refused("tp2", cut, quantised=True) == []  # one of them stays in 16 bits
    assert [sentence[-11:] for sentence in refused("tp4", cut, quantised=True)] == ["; try tp=2."]


@pytest.mark.parametrize(
    ("layout", "works"),
    [
        ("tp8", "tp4"),
        ("tp6", "tp4"),
        ("tp2-ulysses4", "ulysses3-tp2"),
        ("ulysses5", "ulysses4"),
        ("pp4-zbv", "pp3-zbv"),
        ("pp3-interleaved1f1b-v3-ga3", "pp2-interleaved1f1b-v3-ga3"),
        ("pp4-1f1b-ga2", "pp4-1f1b-ga4"),
        ("pp2-dualpipev-ga2", "pp2-dualpipev-ga4"),
        ("pp2-interleaved1f1b-v2-ga5", "pp2-interleaved1f1b-v2-ga4"),
        ("zero3x2-pp2-zb-ga4", "zero1x2-pp2-zb-ga4"),
        ("zero2x2-pp2-zbv-ga4", "zero2x2-pp2-1f1b-ga4"),
        ("pp2-zb-ga4-selective", "pp2-zb-ga4-attention"),
        ("tp2-sp-regather-pp2-zb-ga4", "tp2-sp-regather-pp2-1f1b-ga4"),
        ("pp2-zbv-ga4-full", "pp2-1f1b-ga4-full"),
        ("pp2-zbv-ga4-full1", "pp2-1f1b-ga4-full1"),
        ("full6", "full5"),
        ("offload1", "offload2"),
        ("pp4-1f1b-ga4-offload", "pp3-1f1b-ga4-offload"),
        ("pp4-1f1b-ga4-selective2", "pp4-1f1b-ga4-selective1"),
        ("pp3-interleaved1f1b-v2-ga6-full1", "pp6-1f1b-ga6-full"),
    ],
)  # fmt: skip
def test_the_refusal_names_what_works(layout, works):
    (sentence,) = refused(layout)

    says(sentence)
    assert refused(works) == []


def test_all_reasons_come_at_once():
    found = refused("ulysses5-tp5-pp7-zb-ga1", compile=True, ranks=4)

    assert [sentence.split()[0] for sentence in found] == [
        "Layout", "tp=5", "tp=5", "ulysses5", "pp=7", "train.compile",
    ]  # fmt: skip


def test_an_mlp_width_is_a_reason_of_its_own():
    narrow = replace(LLAMA, heads=15, kv_heads=15, cuts=((768, "rows of mlp.gate_proj"),))

    says(refused("tp5", narrow))


def test_a_family_that_computes_attention_itself_is_told_what_works():
    inside, uncut = "it computes its attention inside the model", "BloomForCausalLM can't be cut."
    own = replace(LLAMA, name="BloomForCausalLM", attention=inside, tensor=uncut)

    assert refused("dp2-zero3x2", own, attention="eager", packing=False) == []
    packed, context, tensor = refused("cp2-tp2", own, attention="eager")
    says(packed)
    assert inside in packed
    says(context)
    assert tensor == own.tensor


def test_answers_share_a_prompt_where_only_attention_sees_other_tokens():
    assert refused("zero3x2-cp2-tp2-full", shared_prompts=True) == []
    (sentence,) = refused("dp2", replace(LLAMA, prompts="has recurrent layers"), shared_prompts=True)
    says(sentence)


def test_another_attention_than_ours_is_for_plain_layouts():
    found = refused("cp2-tp2-attention", attention="sdpa", packing=False)

    assert [sentence.split(":")[0] for sentence in found] == ["recompute = attention", "cp=2", "tp=2"]
    assert all("model.attention=auto" in sentence for sentence in found[1:])


@pytest.mark.parametrize(
    "layout",
    ["dp2", "zero3x2-full", "zero3x2-attention", "tp2-sp-selective", "pp2-1f1b-ga4-full2", "cp2-full"],
)
def test_blocks_are_compiled_in_every_recompute_mode_and_layout(layout):
    assert refused(layout, compile=True) == []
    assert compiles("auto", LLAMA, Columns.of([Layout.parse(layout)]), processor=False) == [True]
    assert not uncompiled("auto", LLAMA, Layout.parse(layout), processor=False)


@pytest.mark.parametrize(
    ("layout", "traits"),
    [
        ("zero1x2-pp2-zb-ga4", LLAMA),
        ("tp2-sp-regather", LLAMA),
        ("dp2", replace(LLAMA, experts=True)),
        ("zero3x2-full", replace(LLAMA, interrupts="has recurrent layers")),
        ("zero3x2-selective2", replace(LLAMA, interrupts="has recurrent layers")),
        ("tp2", replace(LLAMA, draws=True)),
    ],
)
def test_what_interrupts_the_compiler_is_refused(layout, traits):
    (sentence,) = refused(layout, traits, compile=True)

    says(sentence)
    assert refused(layout, traits, compile="auto") == refused(layout, traits) == []
    for setting, processor, compiled in [("auto", False, False), ("auto", True, False), (True, True, True)]:
        columns = Columns.of([Layout.parse(layout)])
        assert compiles(setting, traits, columns, processor=processor) == [compiled]
    assert uncompiled("auto", traits, Layout.parse(layout), processor=False)
    assert not uncompiled("auto", traits, Layout.parse(layout), processor=True)


def test_experts_are_split_where_ranks_and_experts_divide():
    mixture = replace(LLAMA, name="MixtralForCausalLM", experts=24)
    for layout in ("zero3x8-ep8", "dp2-zero3x4-ep8-pp2-1f1b-mb1-ga16-full", "zero1x6-cp2-ep12"):
        assert refused(layout, mixture) == []
    for own, layout in [
        (mixture, "dp16-ep16"),
        (replace(mixture, experts=7), "dp16-ep16"),
        (replace(mixture, apart="has experts of its own kind"), "dp2-ep2"),
        (LLAMA, "dp2-ep2"),
    ]:
        (sentence,) = refused(layout, own)
        says(sentence)


def test_the_number_of_ranks_is_the_layouts():
    (sentence,) = refused("dp4", ranks=3)

    says(sentence)


TORCH_SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B,
    "interleaved1f1b": schedules.ScheduleInterleaved1F1B, "loopedbfs": schedules.ScheduleLoopedBFS,
    "zb": schedules.ScheduleInterleavedZeroBubble, "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}  # fmt: skip


@cache
def stand_in():
    return mock.create_autospec(PipelineStage, instance=True)


def torch_takes(layout: Layout) -> bool:
    """Whether torch's schedule can be made; with stand-ins for the stages."""
    stage = stand_in()
    stage.group_rank, stage.group_size, stage.submod = 0, layout.pp, None
    stage.num_stages = layout.stages
    several = [stage] * (layout.stages // layout.pp)
    made = TORCH_SCHEDULES[layout.schedule]
    stages = several if issubclass(made, schedules.PipelineScheduleMulti) else stage
    try:
        made(stages, layout.gradient_accumulation_steps)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_are_refused_where_torchs_schedule_refuses_them(schedule):
    deep = replace(LLAMA, blocks=99)
    for pp in (2, 3, 4):
        for virtual in (1, 2, 3) if schedule in VIRTUAL_SCHEDULES else (1,):
            for micro_batches in range(1, 11):
                layout = Layout(
                    pp=pp,
                    schedule=schedule,
                    virtual_stages=virtual,
                    gradient_accumulation_steps=micro_batches,
                )
                assert torch_takes(layout) == (not refusals(deep, layout)), layout
