"""Layout: one frozen value that prints, parses, and refuses contradictions."""

from dataclasses import fields
from typing import Any

import pytest
from golden import refuses
from hypothesis import given
from hypothesis import strategies as st

from meshtune.errors import UserError
from meshtune.layout import SCHEDULES, VIRTUAL_SCHEDULES, Layout, PartialLayout

sizes = st.integers(1, 8)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp_shard, cp, tp, pp = (draw(sizes) for _ in range(4))
    schedule = draw(st.sampled_from(SCHEDULES)) if pp > 1 else "1f1b"
    recompute = draw(st.sampled_from(("none", "attention", "selective", "full")))
    return Layout(
        dp_replicate=draw(sizes), dp_shard=dp_shard, zero=draw(st.integers(1, 3)) if dp_shard > 1 else 0,
        cp=cp, cp_method=draw(st.sampled_from(("allgather", "ulysses"))) if cp > 1 else "allgather", tp=tp,
        sp=draw(st.booleans()) if tp > 1 else False, pp=pp, schedule=schedule,
        virtual_stages=draw(sizes) if schedule in VIRTUAL_SCHEDULES and pp > 1 else 1,
        micro_batch_size=draw(sizes), gradient_accumulation_steps=draw(sizes), recompute=recompute,
        recompute_blocks=draw(st.none() | sizes) if recompute in ("selective", "full") else None,
    )  # fmt: skip


@given(layouts())
def test_parse_reads_what_str_writes(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_the_documented_example() -> None:
    layout = Layout.parse("dp2-zero3x4-tp2-sp-pp2-1f1b-mb2-ga8-full")
    assert layout.world == 32
    assert layout.data_ranks == 8
    assert layout.global_batch_size == 128
    assert str(layout) == "dp2-zero3x4-tp2-sp-pp2-1f1b-mb2-ga8-full"
    assert str(Layout()) == "mb1-ga1"


@pytest.mark.parametrize(
    "text",
    [
        "tpp2-mb1", "tp2-tp4", "sp-mb1", "tp2-regather", "tp2-sp-regather-full", "tp2-sp-regather-selective",
        "pp1-gpipe", "pp2-1f1b-v2", "tp0", "ful8", "ful-mb1", "full0", "attention8", "none8", "full8-full",
        "tp2-sp-regather-full8", "zero3x1",
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

    named = parse_fields("dp2-zero3x4-ulysses2-tp2-sp-regather-pp2-zb-v2-mb2-ga8-full8")
    assert set(named) == {each.name for each in fields(Layout)}


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_a_switch_of_a_layout_is_true_or_false(value: object) -> None:
    with refuses(UserError):
        PartialLayout.parse({"tp": 2, "sp": value})
