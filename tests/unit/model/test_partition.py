"""Who holds what: pieces, stages and coordinates, against counts by hand and torch's own rules."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshtune.layout import SCHEDULES, VIRTUAL_SCHEDULES
from meshtune.model.partition import V_SCHEDULES, piece, stage_blocks, stage_of_rank


@given(size=st.integers(0, 50), parts=st.integers(1, 12))
def test_pieces_are_those_of_torch_chunk(size, parts):
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)] if size else []
    expected = chunks + [[]] * (parts - len(chunks))

    assert [list(range(*piece(size, parts, index))) for index in range(parts)] == expected


COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=9)


def largest(costs, cuts, first, last):
    stages = [sum(costs[start:stop]) for start, stop in pairwise(cuts)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


@given(costs=COSTS, data=st.data(), first=st.integers(0, 20), last=st.integers(0, 20))
def test_no_other_cut_has_a_smaller_largest_stage(costs, data, first, last):
    n = len(costs)
    stages = data.draw(st.integers(1, n))
    every = [(0, *cuts, n) for cuts in combinations(range(1, n), stages - 1)]

    found = stage_blocks(costs, stages, first=first, last=last)

    assert all(len(blocks) >= 1 for blocks in found)
    assert [i for blocks in found for i in blocks] == list(range(n))
    cuts = (0, *(blocks.stop for blocks in found))
    assert largest(costs, cuts, first, last) == min(largest(costs, c, first, last) for c in every)


def test_equal_blocks_are_spread_evenly():
    assert [len(blocks) for blocks in stage_blocks([1.0] * 7, 3)] == [2, 2, 3]


def test_embedding_and_head_take_blocks_off_their_stages():
    found = stage_blocks([1.0] * 8, 4, first=0.5, last=2.0)

    assert [len(blocks) for blocks in found] == [2, 2, 3, 1]


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ValueError, match="2 blocks do not make 3 stages"):
        stage_blocks([1, 1], 3)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_belongs_to_one_rank(schedule, pp):
    virtual = 3 if schedule in VIRTUAL_SCHEDULES else 1
    held = [stage_of_rank(schedule, pp, virtual, rank) for rank in range(pp)]

    each = 2 if schedule in V_SCHEDULES else virtual
    assert sorted(stage for stages in held for stage in stages) == list(range(pp * each))


def test_a_v_schedule_turns_round_at_the_last_rank():
    assert [stage_of_rank("zbv", 2, 1, rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert [stage_of_rank("interleaved1f1b", 2, 2, rank) for rank in range(2)] == [(0, 2), (1, 3)]
