"""Micro-batches in flight, against the action lists of torch's own schedules."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from meshtune.layout import TORCH_SCHEDULES, Layout
from meshtune.placement.columns import Columns
from meshtune.placement.schedules import Pass, orders
from meshtune.placement.share import stage_of_rank
from meshtune.plan.memory.stages import fullest, in_flight, in_flight_in_head, interleaved_share

BEGINS = {"FORWARD"}
ENDS = {"FULL_BACKWARD", "BACKWARD_WEIGHT"}  # what is kept goes with the gradients of weights


def actions(layout: Layout) -> dict[int, list[Any]]:
    """Each rank's actions in their order, as torch plans them."""
    count = layout.pp * layout.stages_per_rank
    stages = [
        MagicMock(
            stage_index=index, num_stages=count, group_size=layout.pp, group_rank=0, is_first=index == 0,
            is_last=index == count - 1,
        )
        for index in stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, 0)
    ]  # fmt: skip
    kind = get_schedule_class(TORCH_SCHEDULES[layout.schedule])
    planned: Any = kind(stages, layout.gradient_accumulation_steps, loss_fn=lambda *_: 0)
    return planned.pipeline_order


def most_held(order: list[Any]) -> int:
    """The most (stage, micro-batch) pairs between their forward and the end of their backward."""
    held: set[tuple[int, int]] = set()
    most = 0
    for action in filter(None, order):
        for each in action.sub_actions or (action,):
            pair, kind = (each.stage_index, each.microbatch_index), each.computation_type.name
            if kind in BEGINS:
                held.add(pair)
            most = max(most, len(held))
            if kind in ENDS:
                held.discard(pair)
    return most


@pytest.mark.parametrize(("pp", "steps"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("interleaved1f1b", 2), ("interleaved1f1b", 4), ("loopedbfs", 2), ("zb", 1), ("zb", 2), ("zbv", 1),
     ("dualpipev", 1)],
)  # fmt: skip
def test_what_is_in_flight_is_what_torch_plans(schedule: str, virtual: int, pp: int, steps: int) -> None:
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=virtual, gradient_accumulation_steps=steps)
    columns = Columns.of([layout])
    for rank, order in actions(layout).items():
        assert in_flight(columns, float(rank))[0] == most_held(order) / layout.stages_per_rank, rank


def held_before(order: list[Pass], kind: str, stage: int) -> list[tuple[int, int, int]]:
    """Count what a rank holds when each pass of a kind through a stage begins, itself included: (passes
    through a stage, those of them whose W is still to come behind their I, those of `stage`).
    """
    held, waiting, found = set(), set(), []
    for one in order:
        pair = one.stage, one.micro_batch
        if one.kind == "F":
            held.add(pair)
        if (one.kind, one.stage) == (kind, stage):
            found.append((len(held), len(waiting), sum(other == stage for other, _ in held)))
        if one.kind == "I":
            waiting.add(pair)
        elif one.kind in "BW":
            held.discard(pair)
            waiting.discard(pair)
    return found


@pytest.mark.parametrize(("pp", "steps"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_gradients_of_weights_wait_at_the_end_of_zbv(pp: int, steps: int) -> None:
    layout = Layout(pp=pp, schedule="zbv", gradient_accumulation_steps=steps)
    columns = Columns.of([layout])
    for rank, order in enumerate(orders(layout)):
        stages = stage_of_rank("zbv", pp, 1, rank)
        held = [pair[:2] for stage in stages for pair in held_before(order, "I", stage)]
        for waiting in (0.1, 1.0):  # bytes of what waits, where 1 is saved
            expected = max((saved + waiting * late, saved, late) for saved, late in held)[1:]
            micro_batches, late = fullest(columns, float(rank), 1.0, waiting)
            assert (2 * micro_batches[0], 2 * late[0]) == expected, (rank, waiting)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 1), ("dualpipev", 1)]
)
def test_the_head_s_backward_follows_its_loss(schedule: str, virtual: int) -> None:
    layout = Layout(pp=4, schedule=schedule, virtual_stages=virtual, gradient_accumulation_steps=16)
    columns, last = Columns.of([layout]), 4 * layout.stages_per_rank - 1
    (rank,) = (r for r in range(4) if last in stage_of_rank(schedule, 4, virtual, r))
    in_head = max(alike for _, _, alike in held_before(orders(layout)[rank], "F", last))
    assert in_flight_in_head(columns, in_flight(columns, float(rank)))[0] == in_head - 1 == 0


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_dualpipev_needs_more_micro_batches_for_gradients_of_its_first_stage_before_a_loss(pp: int) -> None:
    for steps, before in ((2 * pp, False), (2 * pp + 1, True)):
        order = orders(Layout(pp=pp, schedule="dualpipev", gradient_accumulation_steps=steps))[0]
        most = max(held for held, *_ in held_before(order, "F", 2 * pp - 1))
        fullest_losses = [
            at for at, one in enumerate(order)
            if (one.kind, one.stage) == ("F", 2 * pp - 1)
            and held_before(order[: at + 1], "F", 2 * pp - 1)[-1][0] == most
        ]  # fmt: skip
        backwards = [at for at, one in enumerate(order) if one.kind in "BI" and one.stage == 0]
        assert (max(fullest_losses) > backwards[0]) == before


def makespan(layout: Layout) -> float:
    """Seconds of a step of torch's actions, if F, B and W of all stages of a rank take one second each."""
    per_stage, last = 1 / layout.stages_per_rank, layout.pp * layout.stages_per_rank - 1
    orders = {rank: [action for action in order if action] for rank, order in actions(layout).items()}
    ends: dict[tuple[str, int, int], float] = {}  # (pass, stage, micro-batch) -> when it ends
    clock = dict.fromkeys(orders, 0.0)

    def run(rank: int, action: Any) -> bool:
        """Run the rank's next action; False if its inputs are not computed yet."""
        passes, inputs, seconds = [], [], 0.0
        for part in action.sub_actions or (action,):
            stage, batch, kind = part.stage_index, part.microbatch_index, part.computation_type.name
            seconds += 2 * per_stage if kind == "FULL_BACKWARD" else per_stage
            if kind == "FORWARD":
                inputs += [("F", stage - 1, batch)] if stage > 0 else []
                passes.append(("F", stage, batch))
            elif kind != "BACKWARD_WEIGHT":
                inputs += [("F", stage, batch), *([("B", stage + 1, batch)] if stage < last else [])]
                passes.append(("B", stage, batch))
        inputs = [needed for needed in inputs if needed not in passes]
        if any(needed not in ends for needed in inputs):
            return False
        clock[rank] = max([clock[rank], *(ends[needed] for needed in inputs)]) + seconds
        ends.update(dict.fromkeys(passes, clock[rank]))
        return True

    while any(orders.values()):
        ready = [rank for rank, order in orders.items() if order and run(rank, order[0])]
        assert ready, "a deadlock"
        for rank in ready:
            orders[rank].pop(0)
    return max(clock.values())


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "virtual", "forwards"),
    [("interleaved1f1b", 2, 3 / 2), ("interleaved1f1b", 4, 3 / 4), ("loopedbfs", 2, 3 / 2), ("zb", 1, 1),
     ("zb", 2, 1 / 2), ("zbv", 1, 1 / 2), ("dualpipev", 1, 1)],
)  # fmt: skip
def test_bubbles_of_the_docs_are_those_of_torchs_actions(
    schedule: str, virtual: int, forwards: float, pp: int
) -> None:
    """docs/parallelism.md's table: seconds of a forward that a step waits for each rank beyond the first."""
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=virtual, gradient_accumulation_steps=4 * pp)
    assert makespan(layout) - 3 * 4 * pp == pytest.approx((pp - 1) * forwards)


def test_interleaved_stages_of_unequal_sizes() -> None:
    """Stages of 2, 2, 3 and 1 blocks on two ranks: a dry run has (3, 2) and (2, 1) of them in flight."""
    assert interleaved_share([2, 3], 2, 0, of_last=False) == pytest.approx((3 * 2 + 2 * 3) / (5 / 2 * 5))
    assert interleaved_share([2, 1], 2, 1, of_last=True) == pytest.approx((2 * 2 + 1 * 1) / (3 / 2 * 3))
    assert interleaved_share([2, 2], 2, 0, of_last=False) == 1
