"""Documents in flat arrays, packed into sequences.

    documents  ──pack (best-fit decreasing)──>  sequences of at most seq_len tokens   (packing)
               ──one document a sequence─────>                                        (no packing)

A document is never split. The seed decides between documents of the same length, so a packing is a function
of the lengths, seq_len and the seed. A stored token is one uint32: its id, and in the top bits whether it is
labelled or a trained prompt's, so that a micro-batch is read from one memory-mapped file.

A pair of answers is one document: the chosen side, prompt and answer, then the rejected side, prompt and
answer. So both are in one sequence; attention sees each side as a document. With shared prompts the rejected
side has only the last token of what both begin with (data/boundaries.py).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshtune.data.example import place_of

LABELLED = np.uint32(1 << 31)  # the top bit of a stored token
PROMPT = np.uint32(1 << 30)  # the next one: a prompt's token that only the cross entropy trains (orpo)


@dataclass(frozen=True)
class Dataset:
    """Documents, and the sequences that they are packed into; the arrays may be memory maps."""

    tokens: np.ndarray  # uint32 [tokens]: id | LABELLED, all documents one after the other
    offsets: np.ndarray  # int64 [documents + 1]: document d is tokens[offsets[d] : offsets[d + 1]]
    labels: np.ndarray  # int64 [documents]: labelled tokens of each document
    # int32 [documents, 4]: tokens of the first side, 0 of a document with one answer; labelled tokens of the
    # first side, or of the one answer; 1 if the one answer is good, of a pair its margin as float32 bits;
    # tokens that the other side begins with and that are in the first side only
    sides: np.ndarray
    origins: np.ndarray  # int64 [documents, 2]: index of its file in `files`, and its line there
    answer_rests: np.ndarray  # uint32 [...]: ids behind the cut to seq_len of answers that it goes through
    rest_offsets: np.ndarray  # int64 [documents + 1]: those of document d, as in `offsets`
    files: tuple[str, ...]
    members: np.ndarray  # int64 [...]: the documents of all sequences, one sequence after the other
    starts: np.ndarray  # int64 [sequences + 1]: sequence s is members[starts[s] : starts[s + 1]]
    seq_len: int  # most tokens of a sequence
    packed: bool
    digest: str  # of tokens and sequences: data sets with the same digest give the same batches
    # fp64 [documents, 2]: log-probability of each side by a reference model; None: there is none
    reference: np.ndarray | None = None
    # int64 and fp64 [known], sorted: document · documents + next one -> log-probability of that one's answer
    # to this one's prompt, by a reference model
    mismatched: tuple[np.ndarray, np.ndarray] | None = None
    keys: np.ndarray | None = None  # int64 [documents], of mismatched answers: as in `mismatched`

    @cached_property
    def sequence_tokens(self) -> np.ndarray:
        """Tokens of each sequence, int64 [sequences], known on every rank without reading a token."""
        return _sums(np.diff(self.offsets)[self.members], self.starts)

    @cached_property
    def sequence_labels(self) -> np.ndarray:
        """Labelled tokens of each sequence, int64 [sequences]."""
        return _sums(np.asarray(self.labels)[self.members], self.starts)

    @cached_property
    def answer_tokens(self) -> np.ndarray:
        """Tokens of each side of all sequences' documents, shared ones too, int64 [answers], in no order."""
        whole, (first, _, _, shared) = np.diff(self.offsets)[self.members], self.sides[self.members].T
        return np.concatenate([whole - first + shared, first[first > 0]])

    @property
    def paired(self) -> bool:
        """Whether documents are pairs of answers: all of a data set are, or none."""
        return bool(len(self.sides)) and bool(self.sides[0, 0])

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.starts) - 1

    @property
    def token_count(self) -> int:
        """Tokens of one pass, without padding."""
        return int(self.sequence_tokens.sum())

    @property
    def label_tokens(self) -> int:
        """Labelled tokens of one pass."""
        return int(self.sequence_labels.sum())

    @property
    def label_share(self) -> float:
        """Labelled tokens as a share of sequences that are all `seq_len` long."""
        return self.label_tokens / max(1, len(self) * self.seq_len)

    @property
    def mean_document_tokens(self) -> float:
        """Length of a token's document, averaged over tokens: attention costs this much. A side of a pair
        counts as a document, whose shared tokens cost nothing.
        """
        lengths, shared = self.answer_tokens.astype(float), self.sides[self.members, 3].astype(float)
        return float(((lengths**2).sum() - (shared**2).sum()) / max(1, self.token_count))

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document of any sequence, or of the longest side of a pair."""
        return int(self.answer_tokens.max(initial=0))

    @property
    def width(self) -> int:
        """Tokens of the longest sequence: the width of all packed micro-batches, so shapes never change."""
        return int(self.sequence_tokens.max(initial=0))

    @property
    def efficiency(self) -> float:
        """Tokens as a share of sequences that are all `seq_len` long."""
        return self.token_count / max(1, len(self) * self.seq_len)

    def documents(self, sequence: int) -> list[np.ndarray]:
        """The stored tokens of one sequence, document by document (views, not copies)."""
        members = self.members[self.starts[sequence] : self.starts[sequence + 1]]
        begins, ends = self.offsets[members].tolist(), self.offsets[members + 1].tolist()
        return [self.tokens[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def answers(self, sequence: int) -> list[np.ndarray]:
        """As `documents`, with each pair cut into its chosen and its rejected side."""
        members = self.members[self.starts[sequence] : self.starts[sequence + 1]]
        parts = zip(self.documents(sequence), self.sides[members, 0].tolist(), strict=True)
        return [side for whole, first in parts for side in (whole[:first], whole[first:]) if len(side)]

    def shared(self, sequence: int) -> list[int]:
        """Tokens of the answer before that each of `answers` begins with, which it does not have itself."""
        members = self.members[self.starts[sequence] : self.starts[sequence + 1]]
        pairs = self.sides[members][:, [0, 3]].tolist()
        return [shared for first, last in pairs for shared in ((0, last) if first else (0,))]

    def places(self, sequence: int) -> list[str]:
        """The origins of one sequence's documents, as file:line."""
        members = self.members[self.starts[sequence] : self.starts[sequence + 1]]
        return [place_of(self.files[file], line, ":") for file, line in self.origins[members].tolist()]


def pack(lengths: np.ndarray, seq_len: int, seed: int, *key: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into sequences by best-fit decreasing; return (members, starts) as in `Dataset`.

    The longest document goes first, each into the fullest sequence that still has room for it. `lengths`:
    int [documents], tokens, each from 1 to `seq_len`; `members` are indices into it. `seed` and `key`, more
    numbers like it, decide which of two equally long documents goes first.

    Documents of the same length are placed together: best fit puts them into the sequence with the least room
    r >= length until r // length of them are in, which leaves the least room again. So a whole group of
    (length, room) is one step, and a million documents of GSM8K's lengths take under a second
    (benchmarks/packing.py). Best-fit decreasing needs
    at most 11/9 of the optimum's sequences (Johnson 1973), and nearly the optimum with many short documents.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert len(lengths) == 0 or 0 < lengths.min() <= lengths.max() <= seq_len, "documents must fit"
    order = permutation(len(lengths), "pack", seed, *key)
    order = order[np.argsort(-lengths[order], kind="stable")]  # longest first, equal ones by the seed
    ends = np.flatnonzero(np.diff(lengths[order], append=0)) + 1  # where each run of equal lengths ends

    sequence_of = np.empty(len(lengths), dtype=np.int64)  # of each document
    opened = 0  # sequences so far
    free: dict[int, list[np.ndarray]] = {}  # room left, in tokens -> the sequences that have it
    rooms = 0  # bit r is set when free[r] is not empty: the least room >= length is one shift away

    def put_back(room: int, sequences: np.ndarray) -> None:
        nonlocal rooms
        if room and len(sequences):
            free.setdefault(room, []).append(sequences)
            rooms |= 1 << room

    begin = 0
    for end in ends.tolist():
        length = int(lengths[order[begin]])
        while begin < end:
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                sequences = np.concatenate(free.pop(room))
                rooms &= ~(1 << room)
            else:
                room = seq_len
                sequences = opened + np.arange(-(-(end - begin) // (seq_len // length)))
                opened += len(sequences)
            fit = room // length  # documents of this length that fit into each of `sequences`
            used = min(len(sequences), -(-(end - begin) // fit))
            placed = min(end - begin, used * fit)
            sequence_of[order[begin : begin + placed]] = np.repeat(sequences[:used], fit)[:placed]
            begin += placed
            last = placed - (used - 1) * fit  # documents in the last of them, which may have room for more
            put_back(room - fit * length, sequences[: used - 1])
            put_back(room - last * length, sequences[used - 1 : used])
            put_back(room, sequences[used:])
    members = np.argsort(sequence_of, kind="stable")
    return members, np.searchsorted(sequence_of[members], np.arange(opened + 1)).astype(np.int64)


def singles(documents: int) -> tuple[np.ndarray, np.ndarray]:
    """(members, starts) as in `Dataset` without packing: one document a sequence."""
    return np.arange(documents), np.arange(documents + 1)


def permutation(size: int, purpose: str, *key: int) -> np.ndarray:
    """A random order of range(size), the same for a purpose and key on every machine and numpy version.

    purpose: any word; two words give independent orders for the same key. key: the seed and other numbers.
    numpy guarantees the bits of Philox but not the result of `Generator.permutation`, so the order is that of
    sorted random bits.
    """
    return np.argsort(random_bits(size, purpose, *key), kind="stable")


def random_bits(size: int, purpose: str, *key: int) -> np.ndarray:
    """Random bits, uint64 [size]: a function only of purpose and key."""
    name = "/".join((purpose, *map(str, key))).encode()
    philox = np.random.Philox(key=int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little"))
    return philox.random_raw(size).astype(np.uint64)


def stored(ids: np.ndarray, labelled: np.ndarray, prompt: int = 0) -> np.ndarray:
    """Tokens as in `Dataset.tokens`, uint32; `ids` and `labelled` (bool) have the same shape.

    prompt: tokens of the prompt that they begin with, if it is trained: all but its first get PROMPT.
    """
    tokens = ids.astype(np.uint32) | np.where(labelled, LABELLED, np.uint32(0))
    tokens[1:prompt] |= PROMPT
    return tokens


def ids_of_stored(tokens: np.ndarray) -> np.ndarray:
    """The ids of stored tokens, without their marks, uint32."""
    return tokens & ~(LABELLED | PROMPT)


def in_memory(
    documents: Sequence[tuple[np.ndarray, np.ndarray]],
    members: np.ndarray,
    starts: np.ndarray,
    *,
    seq_len: int,
    packed: bool,
    origins: np.ndarray | None = None,
    files: tuple[str, ...] = ("memory",),
    sides: np.ndarray | None = None,
    prompts: Sequence[int] | None = None,
) -> Dataset:
    """A Dataset of (ids, labelled) pairs, such as a stream's window, with all tokens copied into memory.

    documents: ids and bool labels of each, [tokens]. members, starts: as returned by `pack` or `singles`.
    origins, files, sides: as in `Dataset`; origins None: lines 1, 2, … of the first file; sides None: one
    answer each, all good. prompts: of each document, as in `stored`.
    """
    lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int64)
    if origins is None:
        origins = np.stack([np.zeros_like(lengths), np.arange(1, len(lengths) + 1)], axis=1)
    labels = np.array([int(labelled.sum()) for _, labelled in documents], dtype=np.int64)
    parts = zip(documents, prompts or [0] * len(documents), strict=True)
    tokens = [stored(*document, prompt) for document, prompt in parts]
    flat = np.concatenate(tokens) if tokens else np.zeros(0, np.uint32)
    digest = hashlib.blake2b(digest_size=16)
    for array in (flat, lengths, members, starts, *([] if sides is None else [sides])):
        digest.update(np.ascontiguousarray(array).tobytes())
    return Dataset(
        tokens=flat,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        labels=labels,
        sides=one_answer(labels) if sides is None else sides,
        origins=origins,
        answer_rests=np.zeros(0, np.uint32),
        rest_offsets=np.zeros(len(documents) + 1, np.int64),
        files=files,
        members=members,
        starts=starts,
        seq_len=seq_len,
        packed=packed,
        digest=digest.hexdigest(),
    )


def one_answer(labels: np.ndarray) -> np.ndarray:
    """`Dataset.sides` of documents with one answer each, which is good. labels: as in `Dataset`."""
    zeros = np.zeros_like(labels)
    return np.stack([zeros, labels, np.ones_like(labels), zeros], axis=1).astype(np.int32)


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Sum of values[starts[i] : starts[i + 1]] for every i, [len(starts) - 1]."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[starts])
