"""A global batch that the data ranks do not divide: the nearest ones, and layouts that nobody runs."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from golden import says
from made_plans import answered, machines, workload

from meshtune.layout import Layout
from meshtune.plan import advice
from meshtune.plan.advice import batch_sentences, nearest_batches
from meshtune.plan.candidates import is_uneven, nearest_sizes
from meshtune.plan.changes import remedies
from meshtune.plan.search import PEAK_TIE, Plan, explained, search
from meshtune.units import human, significant


@cache
def plan(model: str, gpus: int, size: int) -> Plan:
    return search(workload(model, size, 8192), machines(gpus))


@pytest.mark.parametrize(
    ("size", "gpus", "near"),
    [
        (1024, 1000, [1000, 1125, 1200]),
        (64, 7, [63, 70]),
        (13, 8, [8, 12, 14, 16]),
        (
            1000,
            16384,
            [1024],
        ),  # data ranks that leave two nodes to the other axes: fewer have no multiple near
        (64, 8, []),
        (1, 8, []),  # twice as many is no near one
    ],
)
def test_the_nearest_batches_are_multiples_of_more_data_ranks(size: int, gpus: int, near: list[int]) -> None:
    assert nearest_sizes(size, machines(gpus), {}) == near
    for other in near:
        assert np.gcd(other, gpus) > np.gcd(size, gpus)


def test_fixed_axes_leave_fewer_data_ranks() -> None:
    assert nearest_sizes(13, machines(8), {"tp": 4}) == [12, 14]
    assert nearest_sizes(12, machines(8), {"tp": 4}) == []
    assert nearest_sizes(12, machines(8), {"tp": 16}) == []


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "gpus", "size", "first"),
    [
        pytest.param("llama-3.1-70b", 1000, 1024, 1000, marks=pytest.mark.all),
        ("llama-3.1-8b", 7, 64, 63),
        ("llama-3.1-8b", 8, 13, 8),
    ],
)
def test_a_batch_that_does_not_divide_gets_the_nearest_with_speed_and_layout(
    model: str, gpus: int, size: int, first: int
) -> None:
    """The three cases of a review, whose answers were cp25, pp7 and cp2-tp4 without another word."""
    found = plan(model, gpus, size)
    best = found.choice(0)
    sentences = nearest_batches(found, best)
    changes = answered(found).changes
    assert sentences[0].startswith(f"{first} sequences instead of {size}, ")
    others = [said for said in changes if said not in sentences]  # the fastest of all stands first
    assert [said for said in changes if said in sentences] == sentences
    assert not any("train.global_batch_size" in said for said in others)
    for said in sentences:
        parts = re.search(r"\(train.global_batch_size=(\d+) layout=(\S+)\): ([\d.]+)% more tokens", said)
        assert parts
        layout = Layout.parse(parts[2])
        assert layout.global_batch_size == int(parts[1]) and layout.world == gpus
        other = explained(found.workload.of_batch(int(parts[1])), found.cluster, layout)
        assert other.fits
        gain = other.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1
        assert gain > 0.02 and 100 * gain == pytest.approx(float(parts[3]), abs=0.051)
        assert said.endswith(f", {human(other.memory.peak)} instead of {human(best.memory.peak)}.")


def test_a_batch_that_divides_gets_none() -> None:
    found = plan("llama-3.1-8b", 8, 64)
    assert nearest_batches(found, found.choice(0)) == []


def test_a_nearest_batch_is_a_remedy_where_nothing_fits() -> None:
    """ZeRO-3 over 7 GPUs of 35 GiB fits; the pipeline that 64 sequences leave does not."""
    found = search(workload("llama-3.1-8b", 64, 8192), machines(7, memory_gib=35), fixed={"cp": 1})
    assert not len(found)
    lines: list[str] = []
    first = next(remedies(found.workload, found.cluster, count=lines.append))
    assert lines[0].startswith("searching for what would fit: 0 changes tried, now ")
    setting = re.match(r"train\.global_batch_size=(63) layout=(\S+) ", first.remedy)
    assert setting
    w = found.workload.of_batch(int(setting[1]))
    assert explained(w, found.cluster, Layout.parse(setting[2])).fits


def test_degrees_that_divide_neither_node_nor_heads_rank_last() -> None:
    found = plan("llama-3.1-8b", 24, 8)
    uneven = found.columns.cp % 3 == 0  # of 8 GPUs a node and 32 heads; tp3 is refused
    assert uneven.any() and not uneven.all()
    assert (found.uneven == uneven).all()
    assert not uneven[: int((~uneven).sum())].any()
    assert not any(found.uneven[place] for place in found.pareto())
    answer = answered(found, "memory")
    assert all(choice.layout.cp % 3 for choice in answer.best(int((~uneven).sum())))
    first = int(uneven.argmax())
    said = [line for line in advice.reasoning(found, found.choice(0)) if line.startswith("Degrees: ")]
    if found.seconds.total[first] < 0.99 * found.seconds.total[0]:
        says(said[0])
        assert str(found.choice(first).layout) in said[0]
    else:
        assert said == []


def test_uneven_degrees_are_first_only_where_nothing_else_fits_and_the_answer_says_so() -> None:
    found = plan("llama-3.1-70b", 1000, 1024)
    assert found.uneven.all() and len(found)
    said = advice.reasoning(found, found.choice(0))[-1]
    says(said)


def test_a_degree_that_is_fixed_is_not_uneven() -> None:
    found = search(workload("llama-3.1-8b", 8, 8192), machines(24), fixed={"cp": 3})
    assert len(found) and not found.uneven.any()


def test_whole_nodes_that_split_the_sequence_are_even() -> None:
    """28 heads and nodes of 8: cp16 is two nodes; cp24 does not divide 8192 tokens."""
    w = workload("llama-3.1-8b", 16, 8192)
    w = replace(w, traits=replace(w.traits, heads=28))
    sizes = np.array([1, 2, 4, 7, 8, 14, 16, 24, 3, 5])
    assert is_uneven(sizes, w, machines(48)).tolist() == [False] * 7 + [True] * 3


def test_reasons_that_several_kinds_share_are_said_once() -> None:
    found = plan("llama-3.1-8b", 7, 64)
    impossible = [one for one in advice.alternatives(found) if "data ranks" in one.sentence]
    assert len(impossible) == 1
    says(impossible[0].sentence)
    says(impossible[0].name)


@pytest.mark.parametrize("size", [8, 64])
def test_sorting_by_memory_sorts_rows_by_peak_after_the_fastest_of_the_lowest(size: int) -> None:
    found = plan("llama-3.1-8b", 8, size)
    answer = answered(found, "memory")
    first, *others = answer.best(50)
    peaks = [choice.memory.peak for choice in others]
    assert peaks == sorted(peaks)
    lowest = found.memory.peak <= found.memory.peak.min() + PEAK_TIE * found.cluster.memory
    assert first.seconds.total == found.seconds.total[lowest].min()
    assert answer.batch_advice == [] and not any("more tokens" in said for said in answer.changes)
    fastest = answered(found)
    seconds = [choice.seconds.total for choice in fastest.best(50)[1:]]
    assert seconds == sorted(seconds)


def test_other_batches_are_predicted_with_their_updates() -> None:
    found = plan("llama-3.1-8b", 7, 64)
    best, sentences = found.choice(0), batch_sentences(found)
    assert len(sentences) == 4
    for said, size in zip(sentences, (16, 32, 128, 256), strict=True):
        parts = re.search(r"=(\d+) layout=(\S+)\): ([\d.]+)% (more|fewer)", said)
        assert parts and int(parts[1]) == size
        other = explained(found.workload.of_batch(size), found.cluster, Layout.parse(parts[2]))
        gain = other.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu - 1
        assert abs(100 * gain) == pytest.approx(float(parts[3]), abs=0.051)
        assert (gain > 0) == (parts[4] == "more")
        assert f" {significant(1e6 / 8192 / size, 2)} optimizer updates per million tokens" in said
    assert len(batch_sentences(plan("llama-3.1-8b", 8, 512))) == 1, "all as fast"
