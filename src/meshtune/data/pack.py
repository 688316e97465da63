"""Documents in flat arrays, and sequences of them.

    documents  ──pack (best-fit decreasing)──>  sequences of at most seq_len tokens   (packing)
               ──one document a sequence─────>                                        (no packing)

A document is never split. Every choice left open (which of two documents of one length) is made by the seed,
so a packing is a function of the lengths, seq_len and the seed. A token is one uint32: its id, and in the top
bit whether it is labelled, so that one memory-mapped file holds all that a micro-batch is made of.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

LABELLED = np.uint32(1 << 31)  # the top bit of a stored token


@dataclass(frozen=True)
class Dataset:
    """Documents and the sequences made of them; the arrays may be memory maps.

    tokens     uint32 [tokens]         id | LABELLED, all documents one after the other
    offsets    int64  [documents + 1]  document d is tokens[offsets[d] : offsets[d + 1]]
    labels     int64  [documents]      labelled tokens of each document
    origins    int64  [documents, 2]   number of its file in `files`, and its line there
    members    int64  [...]            the documents of all sequences, one sequence after the other
    starts     int64  [sequences + 1]  sequence s is made of members[starts[s] : starts[s + 1]]

    `digest` names the content (tokens and sequences): two data sets of one digest give the same batches.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    origins: np.ndarray
    files: tuple[str, ...]
    members: np.ndarray
    starts: np.ndarray
    seq_len: int
    packed: bool
    digest: str

    @cached_property
    def sequence_tokens(self) -> np.ndarray:
        """int64 [sequences]: known without reading a token, so every rank knows the global batch's counts."""
        return _sums(np.diff(self.offsets)[self.members], self.starts)

    @cached_property
    def sequence_labels(self) -> np.ndarray:
        """int64 [sequences]: labelled tokens of each sequence."""
        return _sums(np.asarray(self.labels)[self.members], self.starts)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.starts) - 1

    @property
    def token_count(self) -> int:
        """Real tokens of one pass."""
        return int(self.sequence_tokens.sum())

    @property
    def label_tokens(self) -> int:
        """Labelled tokens of one pass."""
        return int(self.sequence_labels.sum())

    @property
    def width(self) -> int:
        """Tokens of the longest sequence; packed micro-batches all have this width: shapes never change."""
        return int(self.sequence_tokens.max(initial=0))

    @property
    def efficiency(self) -> float:
        """Share of real tokens when every sequence is as wide as `width`."""
        return self.token_count / max(1, len(self) * self.width)

    def documents(self, sequence: int) -> list[np.ndarray]:
        """The stored tokens of one sequence, document by document (views, not copies)."""
        members = self.members[self.starts[sequence] : self.starts[sequence + 1]]
        begins, ends = self.offsets[members].tolist(), self.offsets[members + 1].tolist()
        return [self.tokens[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def places(self, sequence: int) -> list[str]:
        """Where the documents of one sequence came from, as file:line."""
        members = self.members[self.starts[sequence] : self.starts[sequence + 1]]
        return [f"{self.files[file]}:{line}" for file, line in self.origins[members].tolist()]


def pack(lengths: np.ndarray, seq_len: int, seed: int, *key: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: longest document first, each into the fullest sequence that still has room for it.

    `lengths` int [documents], each from 1 to `seq_len`. Returns (members, starts) as in `Dataset`: positions
    in `lengths`. Documents of one length are placed together: best fit puts them into the sequence with the
    least room r >= length until r // length of them are in, which leaves the least room again; so whole
    groups of (length, room) go in one step, and a million documents take a second or three. The bound of
    best-fit decreasing is 11/9 of the optimum (Johnson 1973); on many short documents it is nearly 1.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert len(lengths) == 0 or 0 < lengths.min() <= lengths.max() <= seq_len, "documents must fit"
    mixed = permutation(len(lengths), "pack", seed, *key)  # which of two equally long documents goes first
    mixed = mixed[np.argsort(-lengths[mixed], kind="stable")]
    ends = np.flatnonzero(np.diff(lengths[mixed], append=0)) + 1  # where each run of equal lengths ends

    home = np.empty(len(lengths), dtype=np.int64)  # the sequence of each document
    opened = 0
    free: dict[int, list[np.ndarray]] = {}  # room left -> the sequences that have it
    rooms = 0  # bit r is set when free[r] is not empty: the least room >= length is one shift away

    def put_back(room: int, sequences: np.ndarray) -> None:
        nonlocal rooms
        if room and len(sequences):
            free.setdefault(room, []).append(sequences)
            rooms |= 1 << room

    begin = 0
    for end in ends.tolist():
        length = int(lengths[mixed[begin]])
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
            each = room // length
            used = min(len(sequences), -(-(end - begin) // each))
            placed = min(end - begin, used * each)
            home[mixed[begin : begin + placed]] = np.repeat(sequences[:used], each)[:placed]
            begin += placed
            last = placed - (used - 1) * each  # documents in the last of them, which may have room for more
            put_back(room - each * length, sequences[: used - 1])
            put_back(room - last * length, sequences[used - 1 : used])
            put_back(room, sequences[used:])
    members = np.argsort(home, kind="stable")
    return members, np.searchsorted(home[members], np.arange(opened + 1)).astype(np.int64)


def singles(documents: int) -> tuple[np.ndarray, np.ndarray]:
    """(members, starts) without packing: one document a sequence."""
    return np.arange(documents), np.arange(documents + 1)


def permutation(size: int, purpose: str, *key: int) -> np.ndarray:
    """A random order that depends on size, purpose and key alone, on every machine and numpy version.

    numpy promises the bits of Philox to stay, but not what `Generator.permutation` makes of them, so the
    order is that of the bits themselves.
    """
    return np.argsort(random_bits(size, purpose, *key), kind="stable")


def random_bits(size: int, purpose: str, *key: int) -> np.ndarray:
    """uint64 [size], a function of purpose and key alone."""
    name = "/".join((purpose, *map(str, key))).encode()
    philox = np.random.Philox(key=int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little"))
    return philox.random_raw(size).astype(np.uint64)


def stored(ids: np.ndarray, labelled: np.ndarray) -> np.ndarray:
    """Tokens as `Dataset.tokens` keeps them; ids and labelled have one shape."""
    return ids.astype(np.uint32) | np.where(labelled, LABELLED, np.uint32(0))


def in_memory(
    documents: Sequence[tuple[np.ndarray, np.ndarray]],
    members: np.ndarray,
    starts: np.ndarray,
    *,
    seq_len: int,
    packed: bool,
    origins: np.ndarray | None = None,
    files: tuple[str, ...] = ("memory",),
) -> Dataset:
    """A Dataset of (ids, labelled) pairs, such as one window of a stream."""
    lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int64)
    if origins is None:
        origins = np.stack([np.zeros_like(lengths), np.arange(1, len(lengths) + 1)], axis=1)
    tokens = [stored(ids, labelled) for ids, labelled in documents]
    flat = np.concatenate(tokens) if tokens else np.zeros(0, np.uint32)
    digest = hashlib.blake2b(digest_size=16)
    for array in (flat, lengths, members, starts):
        digest.update(np.ascontiguousarray(array).tobytes())
    return Dataset(
        tokens=flat,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        labels=np.array([int(labelled.sum()) for _, labelled in documents], dtype=np.int64),
        origins=origins,
        files=files,
        members=members,
        starts=starts,
        seq_len=seq_len,
        packed=packed,
        digest=digest.hexdigest(),
    )


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Sum of values[starts[i] : starts[i + 1]] for every i."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[starts])
