"""This rank's micro-batches, step after step.

    shuffled()     sequences in the order of seed and epoch, each with the state to resume after it
    streamed()     the same for a stream, window after window
    Loader         the next global_batch_size sequences: the same list in every layout
    deal()         sort them by length, longest first, cut into micro-batches, deal these to the data ranks

The state that a restart needs is returned: `for batch, state in loader`, and `Loader(..., state=state)`
continues after that batch without reading the data before it. The state counts global sequences, so a run can
resume with another number of data ranks.

An epoch that does not fill its last global batch is completed by the first sequences of the next one. With
`epochs=N` the last batch is the one with the last sequence of epoch N. Without packing, the sequences of
GROUPED global batches at a time are sorted by length, so that those of one batch are about equally long, and
the batches are shuffled again.
"""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from meshtune.data.batch import (
    Batch,
    MicroBatch,
    Sequences,
    answers_of,
    evaluation_batches,
    micro_batch_of,
    mismatched,
)
from meshtune.data.pack import Dataset, permutation
from meshtune.data.recipe import Stream
from meshtune.errors import UserError

T = TypeVar("T")
State = dict[str, Any]  # JSON-able
GROUPED = 16  # global batches whose sequences are sorted together when there is no packing


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield `items`, each made by a thread while the one before it is used; an error comes in its place."""
    end = object()
    pool = ThreadPoolExecutor(1)
    try:
        made = pool.submit(next, items, end)
        while (item := made.result()) is not end:
            made = pool.submit(next, items, end)
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Loader:
    """Yields (Batch, state) of `dataset` for data rank `data_rank` of `data_ranks`.

    A yielded state is a JSON-able dict; a loader that gets it continues exactly after its batch. state: None
    for the beginning; each `iter()` starts from it again. global_batch_size: sequences of a step on all data
    ranks together. micro_batch_size: sequences of one micro-batch on one rank. epochs: of the whole training,
    those before `state` included; None never ends. multiple: every width is padded to a multiple of it
    (sequence and context parallelism cut the sequence). uniform: True to make the micro-batches of a step
    equally wide without packing (pipelines need it); packed ones always are.

    Raises UserError if global_batch_size isn't a multiple of micro_batch_size · data_ranks, if the state
    belongs to other data or another seed, and, while it is read, at a batch of one row of kto.
    """

    def __init__(
        self,
        dataset: Dataset | Stream,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        state: State | None = None,
        epochs: int | None = None,
        multiple: int = 1,
        uniform: bool = False,
    ) -> None:
        _check_sizes(global_batch_size, micro_batch_size, data_ranks)
        self._identity = {"seed": seed, "data": dataset.digest}
        if state is None:
            place = {"window": dataset.start(), "drawn": 0} if isinstance(dataset, Stream) else {}
            state = {"epoch": 0, "position": 0, **place, **self._identity}
        _check_state(state, self._identity)
        self._start = state
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.epochs = epochs
        self.multiple = multiple
        self.uniform = uniform
        group = None if dataset.packed else global_batch_size
        order = streamed if isinstance(dataset, Stream) else shuffled
        self._order = partial(order, dataset, seed, group=group)

    def epochs_at(self, state: State) -> float | None:
        """Passes through the data up to a state; None for a stream, whose length is unknown."""
        if isinstance(self.dataset, Stream):
            return None
        return state["epoch"] + state["position"] / len(self.dataset)

    def first(self, count: int) -> np.ndarray:
        """Numbers of the sequences among the first `count` of the training, each once. Not of a stream."""
        assert isinstance(self.dataset, Dataset)
        if count >= len(self.dataset):
            return np.arange(len(self.dataset))
        with closing(self._order(self._start)) as order:
            return np.unique([number for _, number, _ in islice(order, count)])

    def __iter__(self) -> Iterator[tuple[Batch, State]]:
        state = self._start
        with closing(self._order(state)) as order:
            while self.epochs is None or state["epoch"] < self.epochs:
                picked = list(islice(order, self.global_batch_size))
                where = f"epoch {state['epoch'] + 1}, from sequence {state['position']} on"
                state = picked[-1][2] | self._identity
                yield self._batch(picked, where), state

    def _batch(self, picked: Sequence["Pick"], where: str) -> Batch:
        tokens = np.array([data.sequence_tokens[number] for data, number, _ in picked])
        labels = sum(int(data.sequence_labels[number]) for data, number, _ in picked)
        shares = deal(tokens, self.micro_batch_size, self.data_ranks)[self.data_rank]
        width = self.dataset.width if self.dataset.packed else int(tokens.max()) if self.uniform else 0
        sequences = [(data, number) for data, number, _ in picked]
        count, per_token = answers_of(sequences)
        made = partial(micro_batch_of, width=width, multiple=self.multiple, units_per_token=per_token)
        return Batch(
            micro_batches=tuple(made([sequences[i] for i in share]) for share in shares),
            tokens=int(tokens.sum()),
            label_tokens=labels,
            origin=f"{where}: {_places(picked)}",
            answers=count,
            mismatched=tuple(self._mismatched(sequences)),
        )

    def _mismatched(self, sequences: Sequences) -> Iterator[MicroBatch]:
        """Yield the mismatched answers of a batch, if its objective has a pass over them."""
        if sequences[0][0].objective.mismatched:
            documents = [(data, int(one)) for data, place in sequences for one in data.members_of(place)]
            if len(documents) == 1:
                raise UserError(
                    "The objective compares each prompt with the answer of the next row of the global batch, "
                    "and a global batch has one row; set a larger train.global_batch_size."
                )
            yield from evaluation_batches(
                mismatched(documents),
                micro_batch_size=self.micro_batch_size,
                data_rank=self.data_rank,
                data_ranks=self.data_ranks,
                multiple=self.multiple,
                width=self.dataset.width,
            )


Pick = tuple[Dataset, int, State]  # a sequence by its number, and the state to resume after it


def shuffled(dataset: Dataset, seed: int, state: State, *, group: int | None) -> Generator[Pick, None, None]:
    """Yield the sequences of epoch after epoch without end, each epoch shuffled, from `state` on.

    The states that are yielded have only epoch and position; Loader adds seed and data. group: the global
    batch size within which lengths are made alike (see `grouped`); None, as with packing, leaves the order.
    """
    epoch, position = state["epoch"], state["position"]
    while True:
        order = permutation(len(dataset), "order", seed, epoch)
        if group:
            order = grouped(order, dataset.sequence_tokens, group, epoch * len(dataset), seed)
        for at in range(position, len(order)):
            last = at + 1 == len(order)
            yield dataset, int(order[at]), {"epoch": epoch + last, "position": 0 if last else at + 1}
        epoch, position = epoch + 1, 0


def streamed(stream: Stream, seed: int, state: State, *, group: int | None) -> Generator[Pick, None, None]:
    """Yield the sequences of window after window, shuffled inside each, without end, from `state` on.

    The states that are yielded lack seed and data; Loader adds them. group: see `shuffled`.
    """
    position, drawn = state["position"], state["drawn"]  # in this window; sequences before this window
    with closing(stream.windows(state["window"])) as windows:
        for dataset, place, after in windows:
            order = permutation(len(dataset), "order", seed, *place["rows"], *place["passes"])
            if group:
                order = grouped(order, dataset.sequence_tokens, group, drawn, seed)
            for at in range(position, len(order)):
                resume = {"position": at + 1, "window": place, "drawn": drawn}
                if at + 1 == len(order):
                    resume = {"position": 0, "window": after, "drawn": drawn + len(order)}
                yield dataset, int(order[at]), {"epoch": min(resume["window"]["passes"]), **resume}
            position, drawn = 0, drawn + len(order)


def grouped(order: np.ndarray, sequence_tokens: np.ndarray, batch: int, drawn: int, seed: int) -> np.ndarray:
    """Return `order` rearranged so that the sequences of one global batch have about the same length.

    GROUPED batches at a time are sorted by length and cut into batches, then all batches are shuffled by the
    seed. Sequences that complete a batch begun before `order`, and the last ones, which fill no batch, keep
    their places. batch of 1: `order` itself.

    order: sequence numbers. sequence_tokens: length of each sequence, by its number. batch: sequences of a
    global batch. drawn: sequences drawn before `order`.
    """
    if batch == 1:
        return order
    head = min(len(order), -drawn % batch)
    full = (len(order) - head) // batch
    middle = order[head : head + full * batch].copy()
    for begin in range(0, len(middle), GROUPED * batch):
        part = middle[begin : begin + GROUPED * batch]
        part[:] = part[np.argsort(sequence_tokens[part], kind="stable")]
    middle = middle.reshape(full, batch)[permutation(full, "batches", seed, drawn)]
    return np.concatenate([order[:head], middle.reshape(-1), order[head + full * batch :]])


def deal(tokens: np.ndarray, micro_batch_size: int, data_ranks: int) -> list[list[np.ndarray]]:
    """Deal a global batch to the data ranks: result[rank][j] are the sequences of its micro-batch j.

    tokens: length of each sequence of the batch; their number is a multiple of micro_batch_size · data_ranks.
    In the result sequences are indices into `tokens`, int [micro_batch_size]. Sort by length, longest
    first (so that the micro-batch with the most memory comes first; equal ones stay in order), cut into
    micro-batches, and deal these round the ranks, forth and back (0 1 2, 2 1 0, ...). The micro-batches that
    all ranks process at the same time are then about equally long, and so are the ranks' sums.
    """
    order = np.argsort(-np.asarray(tokens), kind="stable")
    rounds = order.reshape(-1, data_ranks, micro_batch_size)
    return [
        [round_[rank if j % 2 == 0 else data_ranks - 1 - rank] for j, round_ in enumerate(rounds)]
        for rank in range(data_ranks)
    ]


def _check_sizes(global_batch_size: int, micro_batch_size: int, data_ranks: int) -> None:
    """Raise UserError, with sizes that work, unless micro-batch · data ranks divides the global batch."""
    unit = micro_batch_size * data_ranks  # sequences of one micro-batch on every data rank
    if global_batch_size % unit or global_batch_size < 1:
        below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
        sizes = f"{above}" if below == 0 else f"{below} or {above}"
        per_rank, rest = divmod(global_batch_size, data_ranks)
        divisors = [size for size in range(1, min(per_rank, 64) + 1) if rest == 0 and per_rank % size == 0]
        other = f", or a micro-batch of {' or '.join(map(str, divisors))}" if divisors else ""
        raise UserError(
            f"The global batch of {global_batch_size} sequences is not a multiple of micro-batch x data "
            f"ranks = {micro_batch_size} x {data_ranks} = {unit}; use a global batch of {sizes}{other}."
        )


def _check_state(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise UserError for a state of other data or another seed, ValueError for one that no run wrote."""
    place = {name: value for name, value in state.items() if name not in identity}
    if not place.keys() >= {"epoch", "position"} or not _are_counts(place):
        raise ValueError("epoch and position must be whole numbers from 0 on.")
    if state["seed"] != identity["seed"]:
        raise UserError(
            f"The checkpoint was written with train.seed = {state['seed']}, this run has {identity['seed']}: "
            "the order of samples would change. Use that seed, or start a new run in another folder."
        )
    if state["data"] != identity["data"]:
        if "window" in state:  # of a stream, whose digest may differ between versions
            raise UserError(
                "The checkpoint was written with another stream, so its position is not valid here: files "
                "have changed, a setting has (sources, tokenizer, template, seq_len, packing, overlong or "
                "on_bad_row), or another version of meshtune wrote it. Use those files, settings and "
                "version, or start a new run in another folder."
            )
        raise UserError(
            "The checkpoint was written with other data (rows, tokenizer, template, seq_len or packing), so "
            "its position in the data is not valid here. Use those settings, or start a new run in another "
            "folder."
        )


def _are_counts(value: Any) -> bool:
    """True if every number in a tree of lists and dicts is a whole one from 0 to 2**63, and nothing else."""
    if isinstance(value, dict | list):
        return all(map(_are_counts, value.values() if isinstance(value, dict) else value))
    return type(value) is int and 0 <= value < 2**63


def _places(picked: Sequence[Pick], most: int = 8) -> str:
    """Text: file:line of the first document of each of the first `most` sequences, and how many follow."""
    more = f" and {len(picked) - most} more" if len(picked) > most else ""
    return ", ".join(data.places(number)[0] for data, number, _ in picked[:most]) + more
