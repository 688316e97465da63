"""Passes of each pipeline rank, against the action lists of torch's own schedules."""

from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from meshtune.layout import TORCH_SCHEDULES, Layout
from meshtune.placement.schedules import Pass, orders
from meshtune.placement.share import stage_of_rank

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def planned_by_torch(layout: Layout) -> list[list[Pass]]:
    stages = [
        MagicMock(
            stage_index=index, num_stages=layout.stages, group_size=layout.pp, group_rank=0,
            is_first=index == 0, is_last=index == layout.stages - 1,
        )
        for index in stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, 0)
    ]  # fmt: skip
    kind = get_schedule_class(TORCH_SCHEDULES[layout.schedule])
    planned = kind(stages, layout.gradient_accumulation_steps, loss_fn=lambda *_: 0)
    return [
        [
            Pass(LETTERS[one.computation_type.name], one.stage_index, one.microbatch_index)
            for action in filter(None, planned.pipeline_order[rank])
            for one in action.sub_actions or (action,)
        ]
        for rank in range(layout.pp)
    ]


@pytest.mark.parametrize(("pp", "steps"), [(2, 4), (2, 8), (3, 6), (4, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("interleaved1f1b", 2), ("interleaved1f1b", 4), ("loopedbfs", 2), ("zb", 1), ("zb", 2), ("zbv", 1),
        ("dualpipev", 1),
    ],
)  # fmt: skip
def test_passes_are_those_of_torch_in_its_order(schedule: str, virtual: int, pp: int, steps: int) -> None:
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=virtual, gradient_accumulation_steps=steps)
    assert orders(layout) == planned_by_torch(layout)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_each_micro_batch_goes_forward_and_back_once_with_as_many_ahead_as_the_schedule_has(schedule) -> None:
    layout = Layout(pp=4, schedule=schedule, gradient_accumulation_steps=6)
    for rank, order in enumerate(orders(layout)):
        assert len(order) == len(set(order)) == 12
        ahead = [one.kind for one in order].index("B")
        assert ahead == (6 if schedule == "gpipe" else 4 - rank)
    assert [one.kind for one in orders(Layout(gradient_accumulation_steps=2))[0]] == ["F", "B", "F", "B"]
