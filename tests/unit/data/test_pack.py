"""The packing against a best-fit decreasing that is written down plainly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtune.data.pack import Document, pack, permutation, random_bits, singles


def plain_best_fit_decreasing(lengths: list[int], seq_len: int) -> list[list[int]]:
    """Lengths of each sequence, by looking at every sequence for every document."""
    sequences: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [s for s in sequences if seq_len - sum(s) >= length]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            sequences.append([length])
    return sequences


def as_lists(members: np.ndarray, starts: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(members, starts[1:-1])]


@pytest.mark.ci
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 5))
def test_every_document_lands_once_and_no_sequence_overflows(lengths: list[int], seed: int) -> None:
    packed = as_lists(*pack(np.array(lengths), 40, seed))

    assert sorted(d for sequence in packed for d in sequence) == list(range(len(lengths)))
    assert all(0 < sum(lengths[d] for d in sequence) <= 40 for sequence in packed)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_sequences_are_as_full_as_those_of_plain_best_fit_decreasing(lengths: list[int]) -> None:
    packed = as_lists(*pack(np.array(lengths), 40, 0))

    # which of two sequences with equal room takes a document is free, and changes no other choice
    ours = sorted(sum(lengths[d] for d in sequence) for sequence in packed)
    assert ours == sorted(sum(s) for s in plain_best_fit_decreasing(lengths, 40))


def test_packing_is_a_function_of_lengths_and_seed() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 500)

    first, again, other = (pack(lengths, 256, seed) for seed in (1, 1, 2))

    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0]), "the seed chooses between documents of one length"


def test_short_documents_fill_nearly_everything() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.4, 8000).astype(int), 20, 1024)

    _, starts = pack(lengths, 1024, 0)

    assert lengths.sum() / ((len(starts) - 1) * 1024) > 0.97


def test_a_million_documents_are_packed() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.6, 1_000_000).astype(int), 1, 1024)

    members, _ = pack(lengths, 1024, 0)  # 0.8 s; a plain loop over sequences takes hours

    assert sorted(members) == list(range(1_000_000))


def test_too_long_a_document_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        pack(np.array([5, 11]), 10, 0)


def test_no_documents_make_no_sequences() -> None:
    members, starts = pack(np.zeros(0, dtype=int), 10, 0)

    assert len(members) == 0
    assert starts.tolist() == [0]


def test_without_packing_each_document_is_a_sequence() -> None:
    assert as_lists(*singles(3)) == [[0], [1], [2]]


def test_a_permutation_has_every_number_and_depends_on_each_part_of_its_key() -> None:
    base = permutation(100, "order", 1, 2)

    assert sorted(base.tolist()) == list(range(100))
    for other in (("order", 1, 3), ("order", 2, 2), ("split", 1, 2), ("order", 12)):
        assert not np.array_equal(base, permutation(100, *other))


def test_random_bits_never_change_between_versions() -> None:
    # From numpy 2.4 (Philox 4x64-10 keyed by BLAKE2b); another value would reorder everyone's data on resume.
    assert random_bits(2, "order", 42, 0).tolist() == [12878783337583570333, 13434439939574651627]


def test_the_label_bit_leaves_the_id_alone() -> None:
    tokens = Document(np.array([0, 7, 2**31 - 1]), np.array([False, True, True])).stored

    assert (tokens & 0x7FFFFFFF).tolist() == [0, 7, 2**31 - 1]
    assert (tokens >> 31).tolist() == [0, 1, 1]
