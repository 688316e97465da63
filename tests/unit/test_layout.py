"""Layout: one frozen value that prints, parses, and refuses contradictions."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from golden import refuses
from hypothesis import given
from hypothesis import strategies as st

from meshtune.errors import UserError
from meshtune.layout import SCHEDULES, VIRTUAL_SCHEDULES, Layout, PartialLayout, expert_sizes

sizes = st.integers(1, 8)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp_shard, cp, tp, pp = (draw(sizes) for _ in range(4))
    schedule = draw(st.sampled_from(SCHEDULES)) if pp > 1 else "1f1b"
    recompute = draw(st.sampled_from(("none", "attention", "selective", "full")))
    layout = Layout(
        dp_replicate=draw(sizes), dp_shard=dp_shard, zero=draw(st.integers(1, 3)) if dp_shard > 1 else 0,
        cp=cp, cp_method=draw(st.sampled_from(("allgather", "ulysses"))) if cp > 1 else "allgather", tp=tp,
        sp=draw(st.booleans()) if tp > 1 else False, pp=pp, schedule=schedule,
        virtual_stages=draw(sizes) if schedule in VIRTUAL_SCHEDULES and pp > 1 else 1,
        micro_batch_size=draw(sizes), gradient_accumulation_steps=draw(sizes), recompute=recompute,
        recompute_blocks=draw(st.none() | sizes) if recompute in ("selective", "full") else None,
    )  # fmt: skip
    splits = layout.sp or layout.tp == 1
    return replace(layout, ep=draw(st.sampled_from([1, *(expert_sizes(layout) if splits else [])])))


@given(layouts())
def test_parse_reads_what_str_writes(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(layouts())
def test_groups_of_experts_are_neighbours_and_each_has_all_of_them(layout: Layout) -> None:
    if layout.tp > 1 and not layout.sp:
        return
    ranks, whole = np.arange(layout.world), layout.token_ranks
    parts = ranks.reshape(layout.pp, -1, layout.expert_shards, layout.ep)
    shard_ranks = ranks.reshape(layout.pp, layout.dp_replicate, -1)
    for rank in {0, layout.world // 2, layout.world - 1}:
        group, same = layout.expert_groups(rank)
        stage, replica, shard, _ = np.argwhere(parts == rank)[0]
        assert group == tuple(parts[stage, replica, shard])
        assert same == tuple(parts[stage, :, :, rank % layout.ep].ravel())
        assert len(group) * len(same) == whole
        # What ZeRO shards stays inside a replica.
        own = shard_ranks[np.argwhere(shard_ranks == rank)[0][0]]
        assert sum(set(parts[stage, replica, :, rank % layout.ep]) <= {*row} for row in own) == 1


def test_the_documented_example() -> None:
    layout = Layout.parse("dp2-zero3x4-tp2-sp-pp2-1f1b-mb2-ga8-full")
    assert layout.world == 32
    assert layout.data_ranks == 8
    assert layout.global_batch_size == 128
    assert str(layout) == "dp2-zero3x4-tp2-sp-pp2-1f1b-mb2-ga8-full"
    assert str(Layout()) == "mb1-ga1"
    experts = Layout.parse("dp2-zero3x4-ep8-pp2-1f1b-mb1-ga16-full")
    assert (experts.world, experts.ep, experts.expert_shards) == (16, 8, 1)
    assert Layout.parse("dp2-zero3x8-cp2-ep4").expert_shards == 4


@pytest.mark.parametrize(
    "text",
    [
        "tpp2-mb1", "tp2-tp4", "sp-mb1", "tp2-regather", "tp2-sp-regather-full", "tp2-sp-regather-selective",
        "pp1-gpipe", "pp2-1f1b-v2", "tp0", "ful8", "ful-mb1", "full0", "attention8", "none8", "full8-full",
        "tp2-sp-regather-full8", "zero3x1", "ep2", "dp8-ep3", "dp3-zero3x4-ep6", "zero3x2-tp2-ep2",
    ],
)  # fmt: skip
def test_a_wrong_layout_is_refused_with_the_remedy(text: str) -> None:
    with refuses(UserError):
        Layout.parse(text)


def test_every_contradiction_is_said_at_once() -> None:
    with pytest.raises(UserError) as refused:
        Layout(sp=True, cp_method="ulysses", micro_batch_size=0)
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 6, 12])
def test_a_completed_layout_makes_the_global_batch(micro: int) -> None:
    layout = PartialLayout.parse(f"dp2-mb{micro}").complete(devices=2, global_batch_size=24)
    assert layout.global_batch_size == 24
    assert layout.micro_batch_size == micro


def test_auto_is_data_parallel_over_all_devices_with_the_largest_micro_batch_up_to_four() -> None:
    assert str(PartialLayout.parse("auto").complete(devices=4, global_batch_size=24)) == "dp4-mb3-ga2"


def test_experts_are_split_over_data_ranks_that_are_to_choose() -> None:
    known = PartialLayout.parse({"zero": 3, "dp_shard": "auto", "ep": 4})
    assert str(known.complete(devices=8, global_batch_size=8)) == "zero3x8-ep4-mb1-ga1"
    with refuses(UserError):
        known.complete(devices=6, global_batch_size=12)


def test_a_product_that_is_not_the_global_batch_is_refused_with_one_that_is() -> None:
    with refuses(UserError):
        PartialLayout.parse({"micro_batch_size": 5}).complete(devices=1, global_batch_size=16)
    with refuses(UserError):
        PartialLayout.parse("dp3").complete(devices=3, global_batch_size=16)


def test_a_mapping_may_fix_some_fields_and_leave_others_auto() -> None:
    partial = PartialLayout.parse({"dp_replicate": "auto", "recompute": "full"})
    assert str(partial.complete(devices=2, global_batch_size=4)) == "dp2-mb2-ga1-full"
    with refuses(UserError):
        PartialLayout.parse({"micro_batch": 2})


@pytest.mark.parametrize(
    ("value", "devices", "layout"),
    [
        ({"dp_shard": "auto", "zero": 3}, 4, "zero3x4-mb4-ga1"),
        ({"dp_shard": "auto", "zero": 3}, 1, "mb4-ga4"),
        ({"dp_shard": 4, "zero": 3, "cp": "auto"}, 4, "zero3x4-mb4-ga1"),
        ({"dp_replicate": 2, "dp_shard": "auto", "zero": 2}, 4, "dp2-zero2x2-mb4-ga1"),
        ({"dp_shard": 4, "zero": "auto", "dp_replicate": "auto"}, 8, "dp2-zero1x4-mb2-ga1"),
        ({"pp": 2, "schedule": "auto", "virtual_stages": 2}, 2, "pp2-interleaved1f1b-v2-mb4-ga4"),
        ({"tp": "auto", "sp": True}, 1, "mb4-ga4"),
        ({"tp": "auto", "sp": "auto", "sp_regather": True}, 1, "mb4-ga4"),
        ({"tp": 2, "sp": True, "sp_regather": True}, 2, "tp2-sp-regather-mb4-ga4"),
        ({"recompute": "full", "recompute_blocks": 3}, 1, "mb4-ga4-full3"),
        ({"recompute": "full", "recompute_blocks": "auto"}, 1, "mb4-ga4-full"),
        ({"recompute": "full", "recompute_blocks": None}, 1, "mb4-ga4-full"),
        ({"recompute": "auto", "recompute_blocks": 3}, 1, "mb4-ga4"),
    ],
    ids=str,
)
def test_what_belongs_together_may_be_open_in_part(value: dict[str, Any], devices: int, layout: str) -> None:
    partial = PartialLayout.parse(value)
    assert str(partial.complete(devices=devices, global_batch_size=16)) == layout
    assert partial.given.items() >= {(name, each) for name, each in value.items() if each != "auto"}


def test_a_size_is_a_whole_number() -> None:
    for value in ("two", 2.5, True, None):
        with refuses(UserError):
            PartialLayout.parse({"tp": value, "micro_batch_size": 1})


def test_every_field_has_a_token() -> None:
    from meshtune.layout import parse_fields

    named = parse_fields("dp2-zero3x4-ulysses2-tp2-sp-regather-ep2-pp2-zb-v2-mb2-ga8-full8")
    assert set(named) == {each.name for each in fields(Layout)}


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_a_switch_of_a_layout_is_true_or_false(value: object) -> None:
    with refuses(UserError):
        PartialLayout.parse({"tp": 2, "sp": value})
