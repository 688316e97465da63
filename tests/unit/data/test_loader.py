"""The order of samples, who gets which, and what a micro-batch holds."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_rows import Bytes, memory, numbered, prepare, write_rows
from golden import refuses

from meshtune.data.batch import evaluation_batches, micro_batch
from meshtune.data.loader import Loader, ahead, deal
from meshtune.data.pack import Document
from meshtune.errors import UserError

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(2, 30, 101)]


def run(dataset, steps, *, ranks=1, micro=1, gbs=8, seed=3, state=None, **more):
    """[[each rank's rows] of each step], batches of rank 0, and the last state."""
    settings = {"global_batch_size": gbs, "micro_batch_size": micro, "seed": seed, "state": state} | more
    iterators = [iter(Loader(dataset, data_rank=r, data_ranks=ranks, **settings)) for r in range(ranks)]
    seen, batches = [], []
    for _ in range(steps):
        now = [next(iterator) for iterator in iterators]
        seen.append([rows_of(batch) for batch, _ in now])
        batches.append(now[0][0])
        assert all(s == now[0][1] for _, s in now), "every rank has the same state"
        state = json.loads(json.dumps(now[0][1]))
    return seen, batches, state


def rows_of(batch) -> list[tuple[int, ...]]:
    """Each row's documents, as the id that fills each (see data_rows.memory)."""
    found = []
    for made in batch.micro_batches:
        for ids, lengths in zip(made.input_ids, made.documents, strict=True):
            starts = np.cumsum((0, *lengths[:-1]))
            found.append(tuple(int(ids[s]) for s in starts))
    return found


def global_lists(seen) -> list[list[tuple[int, ...]]]:
    return [sorted(row for rank in step for row in rank) for step in seen]


# What a micro-batch holds #


def test_a_micro_batch_counted_by_hand() -> None:
    #           a document of 3 ids with the last two labelled, one of 2 with its last labelled, then padding
    first = [
        Document(np.array([5, 6, 7]), np.array([0, 1, 1])).stored,
        Document(np.array([8, 9]), np.array([0, 1])).stored,
    ]
    second = [Document(np.array([1, 2, 3, 4, 5, 6, 7]), np.array([0, 0, 0, 0, 1, 0, 1])).stored]

    made = micro_batch([first, second])

    assert made.input_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0], [1, 2, 3, 4, 5, 6, 7]]
    assert made.labels.tolist() == [[6, 7, -100, 9, -100, -100, -100], [-100, -100, -100, 5, -100, 7, -100]]
    assert made.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert made.documents == ((3, 2), (7,))
    assert (made.tokens, made.label_tokens) == (12, 5)
    assert {t.dtype for t in (made.input_ids, made.labels, made.position_ids)} == {torch.int64}


def test_labels_are_those_of_each_document_by_itself() -> None:
    rng = np.random.default_rng(1)
    documents = [(rng.integers(1, 999, n), rng.random(n) < 0.5) for n in rng.integers(1, 20, 12)]
    for _, labelled in documents:
        labelled[0] = False

    made = micro_batch([[Document(*d).stored for d in documents]], multiple=16)

    expected: list[int] = []
    for (
        ids,
        labelled,
    ) in documents:  # the way transformers shifts: drop the first label, nothing after the last token
        labels = [int(i) if on else -100 for i, on in zip(ids, labelled, strict=True)]
        expected += [*labels[1:], -100]
    row = made.labels[0].tolist()
    assert row[: len(expected)] == expected
    assert set(row[len(expected) :]) <= {-100}
    assert made.input_ids.shape[1] % 16 == 0
    assert made.label_tokens == sum(int(labelled.sum()) for _, labelled in documents)


def test_packed_micro_batches_never_change_shape_and_unpacked_ones_end_with_the_longest_row() -> None:
    packed, single = memory(LENGTHS, seq_len=64), memory(LENGTHS, seq_len=64, packed=False)

    shapes = {m.input_ids.shape for b in run(packed, 20, micro=2)[1] for m in b.micro_batches}
    ends = [m for b in run(single, 20, micro=2)[1] for m in b.micro_batches]

    assert len(shapes) == 1
    assert all(m.input_ids.shape[1] == max(map(sum, m.documents)) for m in ends)


def test_the_batch_counts_all_ranks() -> None:
    dataset = memory(LENGTHS, seq_len=64)

    _, (batch,), _ = run(dataset, 1)

    alone = batch.micro_batches
    assert batch.tokens == sum(m.tokens for m in alone)
    assert batch.label_tokens == sum(int((m.labels != -100).sum()) for m in alone)
    _, (quarter,), _ = run(dataset, 1, ranks=4)
    assert (quarter.tokens, quarter.label_tokens) == (batch.tokens, batch.label_tokens)


def test_to_moves_the_tensors_and_keeps_the_rest() -> None:
    made = micro_batch([[Document(np.array([1, 2]), np.array([0, 1])).stored]])

    there = made.to("meta")

    assert there.input_ids.device.type == "meta"
    assert (there.documents, there.tokens, there.label_tokens) == (
        made.documents,
        made.tokens,
        made.label_tokens,
    )


# The order #


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (1, 8), (2, 1), (4, 2), (8, 1)])
def test_the_global_batches_are_the_same_in_every_layout(packed: bool, ranks: int, micro: int) -> None:
    dataset = memory(LENGTHS, seq_len=32, packed=packed)

    plain, *_ = run(dataset, 30)
    cut, *_ = run(dataset, 30, ranks=ranks, micro=micro)

    assert global_lists(cut) == global_lists(plain)


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_has_every_sequence_once_and_the_next_has_another_order(packed: bool) -> None:
    dataset = memory(LENGTHS, seq_len=32, packed=packed)
    size = len(dataset)

    seen, *_ = run(dataset, 2 * size, gbs=1)
    rows = [step[0][0] for step in seen]

    assert len(set(rows[:size])) == size
    assert sorted(rows[:size]) == sorted(rows[size:])
    assert rows[:size] != rows[size:]


def test_the_order_depends_on_the_seed() -> None:
    dataset = memory(LENGTHS, seq_len=32)

    assert run(dataset, 5, seed=1)[0] != run(dataset, 5, seed=2)[0]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("stop", [1, 7, 20])
def test_going_on_from_a_state_is_never_having_stopped(packed: bool, stop: int) -> None:
    dataset = memory(LENGTHS, seq_len=32, packed=packed)

    whole, *_ = run(dataset, 30)
    first, _, state = run(dataset, stop)
    second, *_ = run(dataset, 30 - stop, state=state)

    assert first + second == whole


def test_another_number_of_ranks_goes_on_with_the_same_batches() -> None:
    dataset = memory(LENGTHS, seq_len=32, packed=False)

    whole, *_ = run(dataset, 20)
    _, _, state = run(dataset, 11, ranks=2)
    rest, *_ = run(dataset, 9, ranks=4, micro=2, state=state)

    assert global_lists(rest) == global_lists(whole[11:])


def test_an_epoch_that_does_not_fill_its_last_batch_goes_on_with_the_next() -> None:
    dataset = memory(LENGTHS, seq_len=64, packed=False)  # 101 sequences

    seen, _, state = run(dataset, 13)  # 13 * 8 = 104

    rows = [row for step in global_lists(seen) for row in step]
    assert len(set(rows)) == 101
    assert (state["epoch"], state["position"]) == (1, 3)


@pytest.mark.parametrize(("epochs", "gbs"), [(1, 8), (2, 8), (3, 101), (2, 300)])
def test_epochs_end_with_the_batch_that_holds_the_last_sequence(epochs: int, gbs: int) -> None:
    dataset = memory(LENGTHS, seq_len=64, packed=False)
    loader = Loader(dataset, global_batch_size=gbs, micro_batch_size=1, seed=0, epochs=epochs)

    batches = [batch for batch, _ in loader]

    assert len(batches) == -(-epochs * 101 // gbs)
    assert all(len(batch.micro_batches) == gbs for batch in batches), "every batch is whole"


def test_fewer_sequences_than_a_global_batch_are_repeated() -> None:
    seen, _, state = run(memory([3, 4, 5], seq_len=8, packed=False), 1, gbs=8)

    assert sorted(seen[0][0]).count((1,)) in (2, 3)
    assert (state["epoch"], state["position"]) == (2, 2)


def test_without_packing_little_is_padding_even_with_one_micro_batch_a_step() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).lognormal(5, 0.5, 4000)]
    dataset = memory(lengths, seq_len=2048, packed=False)

    loader = Loader(dataset, global_batch_size=8, micro_batch_size=8, seed=0, epochs=1)
    made = [m for batch, _ in loader for m in batch.micro_batches]

    real = sum(m.tokens for m in made) / sum(m.input_ids.numel() for m in made)
    shuffled = np.random.default_rng(0).permutation(lengths).reshape(-1, 8)
    assert shuffled.sum() / (shuffled.max(1) * 8).sum() < 0.6, "what padding costs when nothing is grouped"
    assert real > 0.9
    widths = [m.input_ids.shape[1] for m in made]
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.2, (
        "the batches come in no order of length"
    )


# Who gets which #


def test_the_deal_is_longest_first_and_forth_and_back() -> None:
    tokens = np.array([1, 8, 3, 6, 5, 4, 7, 2])

    hands = deal(tokens, 1, 2)

    assert [[tokens[hand].tolist() for hand in rank] for rank in hands] == [
        [[8], [5], [4], [1]],
        [[7], [6], [3], [2]],
    ]


def test_sizes_that_do_not_divide_are_refused_with_ones_that_do() -> None:
    with refuses(UserError):
        Loader(memory([3], seq_len=4), global_batch_size=64, micro_batch_size=3, data_ranks=8, seed=0)


@pytest.mark.parametrize("change", [{"seed": 9}, {"data": "other"}, {"data": "other", "window": {}}])
def test_a_state_of_another_seed_or_other_data_is_refused(change: dict) -> None:
    dataset = memory(LENGTHS, seq_len=32)
    _, _, state = run(dataset, 1)

    with refuses(UserError):
        run(dataset, 1, state=state | change)


@pytest.mark.parametrize("change", [{"position": "*"}, {"position": -1}, {"epoch": None}, {"epoch": 2**64}])
def test_a_position_that_no_run_wrote_is_refused(change):
    dataset = memory([3] * 8, seq_len=4)
    *_, state = run(dataset, 1)
    with refuses(ValueError):
        run(dataset, 1, state=state | change)


def test_the_origin_names_epoch_place_and_rows() -> None:
    _, (batch,), _ = run(memory(LENGTHS, seq_len=64, packed=False), 1, gbs=4)

    assert batch.origin.startswith("epoch 1, from sequence 0 on: memory:")
    assert batch.origin.count("memory:") == 4


# Evaluation #


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (4, 1), (4, 3), (7, 2), (300, 4)])
def test_evaluation_sees_every_label_once_and_all_ranks_turn_as_often(micro: int, ranks: int) -> None:
    dataset = memory(LENGTHS, seq_len=32)

    of_rank = [
        list(evaluation_batches(dataset, micro_batch_size=micro, data_rank=r, data_ranks=ranks))
        for r in range(ranks)
    ]

    assert len({len(turns) for turns in of_rank}) == 1
    made = [m for turns in of_rank for m in turns]
    assert (
        sum(int((m.labels != -100).sum()) for m in made)
        == sum(m.label_tokens for m in made)
        == dataset.label_tokens
    )
    assert sum(m.tokens for m in made) == sum(LENGTHS)


# Streams #


def stream_of(tmp_path, rows: int, window: int, **settings):
    source = write_rows(tmp_path / "rows.jsonl", numbered(rows))
    arguments = {"seq_len": 64, "seed": 0, "cache_dir": tmp_path / "cache", "streaming": True} | settings
    return replace(prepare([source], Bytes(), **arguments).train, window=window)


def texts_of(batch) -> list[bytes]:
    """The documents of a batch as `Bytes` encoded them."""
    found = []
    for made in batch.micro_batches:
        for ids, lengths in zip(made.input_ids, made.documents, strict=True):
            found += [bytes(part.tolist()) for part in torch.split(ids[: sum(lengths)], lengths)]
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_gives_every_row_once_an_epoch(tmp_path, packing: bool) -> None:
    stream = stream_of(tmp_path, 100, window=25, packing=packing)

    loader = Loader(stream, global_batch_size=1, micro_batch_size=1, seed=0, epochs=2)
    seen = [text for batch, _ in loader for text in texts_of(batch)]

    expected = [f"{p}{c}\0".encode() for p, c in numbered(100)]
    assert sorted(seen[:100]) == sorted(seen[100:]) == sorted(expected)
    assert seen[:100] != expected, "sequences are shuffled inside a window"


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("stop", [1, 6, 13])
def test_a_stream_goes_on_from_a_state_by_reading_one_window_again(
    tmp_path, packing: bool, stop: int
) -> None:
    stream = stream_of(tmp_path, 100, window=20, packing=packing)
    settings = {"global_batch_size": 4, "micro_batch_size": 2, "seed": 0}

    whole = iter(Loader(stream, **settings))
    before = [next(whole) for _ in range(20)]
    state = json.loads(json.dumps(before[stop - 1][1]))
    rest = iter(Loader(stream, **settings, state=state))
    after = [next(rest) for _ in range(20 - stop)]

    assert [texts_of(b) for b, _ in after] == [texts_of(b) for b, _ in before[stop:]]
    assert [s for _, s in after] == [s for _, s in before[stop:]]


def test_a_resumed_stream_encodes_nothing_before_its_window(tmp_path) -> None:
    stream = stream_of(tmp_path, 1000, window=20)
    loader = iter(Loader(stream, global_batch_size=4, micro_batch_size=4, seed=0))
    state = [next(loader)[1] for _ in range(40)][-1]
    assert state["window"]["rows"][0] > 300
    stream.encoder.encoded = 0

    rest = iter(Loader(stream, global_batch_size=4, micro_batch_size=4, seed=0, state=state))
    next(rest)
    rest.close()

    assert stream.encoder.encoded <= 60  # this window, and the ones made ahead


def test_a_stream_draws_from_its_sources_by_weight(tmp_path) -> None:
    often = write_rows(tmp_path / "often.jsonl", [("a", "x" * 6)] * 1000)
    seldom = write_rows(tmp_path / "seldom.jsonl", [("b", "y" * 6)] * 1000)
    sources = [type(often)(often.path, weight=3), seldom]
    stream = prepare(sources, Bytes(), seq_len=64, seed=0, cache_dir=tmp_path, streaming=True).train

    loader = iter(Loader(replace(stream, window=40), global_batch_size=5, micro_batch_size=1, seed=0))
    seen = b"".join(text for _ in range(10) for text in texts_of(next(loader)[0]))

    assert 2.5 < seen.count(b"a") / seen.count(b"b") < 3.5


def test_a_stream_without_a_usable_document_is_refused(tmp_path) -> None:
    stream = stream_of(tmp_path, 10, window=4, seq_len=2, overlong="drop")

    with refuses(UserError):
        next(iter(Loader(stream, global_batch_size=1, micro_batch_size=1, seed=0)))


def test_items_are_made_one_ahead_and_an_error_comes_in_its_place() -> None:
    made, second = [], threading.Event()

    def items() -> Iterator[int]:
        for number in range(3):
            made.append(number)
            if number == 1:
                second.set()
            yield number
        raise UserError("row 3 is bad")

    found = ahead(items())
    assert next(found) == 0
    assert second.wait(60), "made by the thread, without being asked"
    assert [next(found), next(found)] == [1, 2] and made == [0, 1, 2]
    with pytest.raises(UserError, match="row 3"):
        next(found)
