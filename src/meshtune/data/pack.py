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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from meshtune.data.example import Note, Origin, place_of
from meshtune.objectives import OBJECTIVES, Objective

LABELLED = np.uint32(1 << 31)  # the top bit of a stored token
PROMPT = np.uint32(1 << 30)  # the next one: a prompt's token that only the cross entropy trains (orpo)
NO_IDS, IN_MEMORY = np.zeros(0, np.int32), Origin("memory", 1)
SIDES = np.dtype(
    [
        ("first", np.int32),  # tokens of the chosen side of a pair; 0 of a document with one answer
        ("labels", np.int32),  # labelled tokens of the chosen side, or of the one answer
        ("shared", np.int32),  # as in Document
        ("margin", np.float32),  # as in Document
        ("good", np.bool_),  # as in Document
    ]
)


@dataclass(frozen=True)
class Document:
    """The tokens of one example."""

    ids: np.ndarray  # int32 [tokens]
    labelled: np.ndarray  # bool [tokens], true where the token is to be predicted; never the first
    notes: tuple[Note, ...] = ()
    origin: Origin = IN_MEMORY
    # Ids behind the cut to seq_len of the answer that it goes through
    answer_rest: np.ndarray = field(default_factory=lambda: NO_IDS)
    first: int = 0  # of a pair: tokens of the chosen side, which comes first
    good: bool = True  # of a judged answer
    margin: float = 0.0  # of a pair, by which the chosen reward should exceed the rejected one
    prompt: int = 0  # tokens of a trained prompt that it begins with
    shared: int = 0  # of a pair: leading tokens of the chosen side that the rejected one begins with, too

    @property
    def stored(self) -> np.ndarray:
        """Tokens as in `Dataset.tokens`, uint32; all of a trained prompt but its first get PROMPT."""
        tokens = self.ids.astype(np.uint32) | np.where(self.labelled, LABELLED, np.uint32(0))
        tokens[1 : self.prompt] |= PROMPT
        return tokens

    @property
    def sides(self) -> tuple[int, int, int, float, bool]:
        """Its record of SIDES."""
        labels = int(self.labelled[: self.first or None].sum())
        return self.first, labels, self.shared, self.margin, self.good


@dataclass(frozen=True)
class Dataset:
    """Documents, and the sequences that they are packed into; the arrays may be memory maps."""

    tokens: np.ndarray  # uint32 [tokens]: id | LABELLED, all documents one after the other
    offsets: np.ndarray  # int64 [documents + 1]: document d is tokens[offsets[d] : offsets[d + 1]]
    labels: np.ndarray  # int64 [documents]: labelled tokens of each document
    sides: np.ndarray  # SIDES [documents]
    origins: np.ndarray  # int64 [documents, 2]: index of its file in `files`, and its line there
    answer_rests: np.ndarray  # uint32 [...]: ids behind the cut to seq_len of answers that it goes through
    rest_offsets: np.ndarray  # int64 [documents + 1]: those of document d, as in `offsets`
    files: tuple[str, ...]
    members: np.ndarray  # int64 [...]: the documents of all sequences, one sequence after the other
    starts: np.ndarray  # int64 [sequences + 1]: sequence s is members[starts[s] : starts[s + 1]]
    seq_len: int  # most tokens of a sequence
    packed: bool
    digest: str  # of tokens and sequences: data sets with the same digest give the same batches
    objective: Objective = OBJECTIVES["sft"]  # whose rows these are, which decides what batches have
    # Places of answers (as in batch.Answers), int64, sorted -> their log-probabilities by a reference model,
    # fp64, with those of mismatched answers; None: without a reference model
    reference: tuple[np.ndarray, np.ndarray] | None = None
    keys: np.ndarray | None = None  # int64 [documents]: of mismatched answers, instead of their numbers

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
        whole, sides = np.diff(self.offsets)[self.members], self.sides[self.members]
        first = sides["first"]
        return np.concatenate([whole - first + sides["shared"], first[first > 0]])

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
        lengths, shared = self.answer_tokens.astype(float), self.sides["shared"][self.members].astype(float)
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

    @property
    def figures(self) -> dict[str, Any]:
        """Sizes of one pass, JSON-able."""
        return {
            "digest": self.digest,
            "packed": self.packed,
            "documents": len(self.members),
            "sequences": len(self),
            "tokens": self.token_count,
            "label_tokens": self.label_tokens,
            "good": int(self.sides["good"][self.members].sum()),  # of judged answers
            "efficiency": self.efficiency,
        }

    def members_of(self, sequence: int) -> np.ndarray:
        """Numbers of the documents of a sequence."""
        return np.asarray(self.members[self.starts[sequence] : self.starts[sequence + 1]])

    def documents(self, sequence: int) -> list[np.ndarray]:
        """The stored tokens of one sequence, document by document (views, not copies)."""
        members = self.members_of(sequence)
        begins, ends = self.offsets[members].tolist(), self.offsets[members + 1].tolist()
        return [self.tokens[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def answers(self, sequence: int) -> list[np.ndarray]:
        """As `documents`, with each pair cut into its chosen and its rejected side."""
        firsts = self.sides["first"][self.members_of(sequence)].tolist()
        parts = zip(self.documents(sequence), firsts, strict=True)
        return [side for whole, first in parts for side in (whole[:first], whole[first:]) if len(side)]

    def shared(self, sequence: int) -> list[int]:
        """Tokens of the answer before that each of `answers` begins with, which it does not have itself."""
        members = self.members_of(sequence)
        tokens = np.zeros((len(members), self.objective.documents), np.int64)
        tokens[:, -1] = self.sides["shared"][members]
        return tokens.ravel().tolist()

    def places(self, sequence: int) -> list[str]:
        """The origins of one sequence's documents, as file:line."""
        origins = self.origins[self.members_of(sequence)].tolist()
        return [place_of(self.files[file], line, ":") for file, line in origins]


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


def ids_of_stored(tokens: np.ndarray) -> np.ndarray:
    """The ids of stored tokens, without their marks, uint32."""
    return tokens & ~(LABELLED | PROMPT)


def in_memory(
    documents: Sequence[Document],
    members: np.ndarray,
    starts: np.ndarray,
    *,
    seq_len: int,
    packed: bool,
    objective: Objective = OBJECTIVES["sft"],
) -> Dataset:
    """A Dataset of documents, such as a stream's window, with all tokens copied into memory.

    members, starts: as returned by `pack` or `singles`. The others are those of `Dataset`.
    """
    lengths = np.array([len(document.ids) for document in documents], dtype=np.int64)
    files: dict[str, int] = {}
    origins = [(files.setdefault(one.origin.file, len(files)), one.origin.line) for one in documents]
    flat = np.concatenate([np.zeros(0, np.uint32), *(document.stored for document in documents)])
    sides = np.array([document.sides for document in documents], SIDES)
    digest = hashlib.blake2b(digest_size=16)
    for array in (flat, lengths, members, starts, *([] if objective.rows == "answers" else [sides])):
        digest.update(np.ascontiguousarray(array).tobytes())
    return Dataset(
        tokens=flat,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        labels=np.array([int(document.labelled.sum()) for document in documents], dtype=np.int64),
        sides=sides,
        origins=np.array(origins),
        answer_rests=np.zeros(0, np.uint32),
        rest_offsets=np.zeros(len(documents) + 1, np.int64),
        files=tuple(files),
        members=members,
        starts=starts,
        seq_len=seq_len,
        packed=packed,
        digest=digest.hexdigest(),
        objective=objective,
    )


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Sum of values[starts[i] : starts[i + 1]] for every i, [len(starts) - 1]."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[starts])
