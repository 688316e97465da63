"""This rank's micro-batches, step after step.

    sequences()    in the order of seed and epoch, each with the state that goes on after it
    Loader         the next global_batch_size of them: the same list in every layout
    deal()         sorted by length, longest first, cut into micro-batches, dealt to the data ranks
    micro_batch()  tokens -> input_ids, shifted labels, positions, document lengths

What must survive a restart is returned: `for batch, state in loader`, and `Loader(..., state=state)` goes on
after that batch without reading the data before it. The state counts global sequences, so another number of
data ranks can go on with it.

Rules. An epoch that does not fill its last global batch is completed by the first sequences of the next one.
With `epochs=N` the last batch is the one that holds the last sequence of epoch N. Without packing the
sequences of 16 global batches at a time are grouped by length, so that those of one batch are about equally
long, and the batches are shuffled again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from meshtune.data.pack import LABELLED, Dataset, permutation
from meshtune.errors import UserError

IGNORE = -100  # the label of a position that is not to be predicted
GROUPED = 16  # global batches whose sequences are sorted together when there is no packing


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes; all tensors int64 [batch, seq].

    labels are already shifted: labels[b, t] is the id of token t+1 of the same document if that one is
    labelled, else -100. documents[b] holds the lengths of row b's documents from column 0 on. The columns
    beyond their sum are padding: id 0, labels -100, positions from 0 on.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    documents: tuple[tuple[int, ...], ...]
    tokens: int  # real ones
    label_tokens: int

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch with its tensors on `device`."""
        tensors = (self.input_ids, self.labels, self.position_ids)
        ids, labels, positions = (tensor.to(device, non_blocking=True) for tensor in tensors)
        return MicroBatch(ids, labels, positions, self.documents, self.tokens, self.label_tokens)


@dataclass(frozen=True)
class Batch:
    """One step: this rank's micro-batches, and the counts of the whole global batch."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int  # real ones, of all ranks
    label_tokens: int  # of all ranks
    origin: str  # names the batch in messages


class Loader:
    """Batches of `dataset` for data rank `data_rank` of `data_ranks`: iterate for (Batch, state).

    `state` is a JSON-able dict; the loader given it goes on exactly after its batch. `epochs=None` goes on
    for ever. `multiple` makes every width a multiple of it (tensor and context parallelism cut the sequence).
    Raises UserError when the sizes do not divide, or when the state belongs to other data or another seed.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        state: dict[str, Any] | None = None,
        epochs: int | None = None,
        multiple: int = 1,
    ) -> None:
        _check_sizes(global_batch_size, micro_batch_size, data_ranks)
        if not len(dataset):
            raise UserError("There is no sequence to train on; `meshtune data` shows what was left out.")
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.epochs = epochs
        self.multiple = multiple
        self.seed = seed
        self._identity = {"seed": seed, "data": dataset.digest}
        self._start = dict(state) if state else {"epoch": 0, "position": 0, **self._identity}
        _check_state(self._start, self._identity)

    @property
    def steps_per_epoch(self) -> int:
        """Batches that hold at least one sequence of an epoch begun at a batch's start."""
        return -(-len(self.dataset) // self.global_batch_size)

    @property
    def steps(self) -> int | None:
        """Batches of a whole run of `epochs` epochs; None when it has no end."""
        return None if self.epochs is None else -(-self.epochs * len(self.dataset) // self.global_batch_size)

    def __iter__(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        group = None if self.dataset.packed else self.global_batch_size
        order = sequences(self.dataset, self.seed, self._start, group=group)
        state = self._start
        while self.epochs is None or state["epoch"] < self.epochs:
            origin = f"epoch {state['epoch'] + 1}, sequences from position {state['position']}"
            picked = list(islice(order, self.global_batch_size))
            state = picked[-1][1] | self._identity
            yield self._batch([sequence for sequence, _ in picked], origin), state

    def _batch(self, picked: list[int], origin: str) -> Batch:
        numbers = np.array(picked)
        tokens = self.dataset.sequence_tokens[numbers]
        hands = deal(tokens, self.micro_batch_size, self.data_ranks)[self.data_rank]
        fixed = self.dataset.width if self.dataset.packed else 0
        rows = [[self.dataset.documents(sequence) for sequence in numbers[hand]] for hand in hands]
        return Batch(
            micro_batches=tuple(micro_batch(hand, fixed, self.multiple) for hand in rows),
            tokens=int(tokens.sum()),
            label_tokens=int(self.dataset.sequence_labels[numbers].sum()),
            origin=f"{origin}: {_some(picked, str)}; rows {_some(picked, self._place)}",
        )

    def _place(self, sequence: int) -> str:
        return self.dataset.places(sequence)[0]


def sequences(
    dataset: Dataset, seed: int, state: dict[str, Any], *, group: int | None
) -> Iterator[tuple[int, dict[str, int]]]:
    """Sequence numbers without end from `state` on, each with the state after it (`group`: see epoch_order)."""
    epoch, position = state["epoch"], state["position"]
    while True:
        order = epoch_order(dataset.sequence_tokens, seed, epoch, group=group)
        for at in range(position, len(order)):
            last = at + 1 == len(order)
            yield int(order[at]), {"epoch": epoch + last, "position": 0 if last else at + 1}
        epoch, position = epoch + 1, 0


def epoch_order(sequence_tokens: np.ndarray, seed: int, epoch: int, *, group: int | None) -> np.ndarray:
    """The order of one epoch's sequences, a function of seed and epoch (and of `group`, where it is given).

    `group` is the global batch size where batches are to hold sequences of about one length: the shuffled
    sequences are cut into parts of GROUPED batches, each part is sorted by length and cut into batches, and
    all batches are shuffled. The epoch's first sequences complete the last batch of the epoch before, so they
    are left as shuffled, and so are the last ones, which do not fill a batch.
    """
    size = len(sequence_tokens)
    order = permutation(size, "order", seed, epoch)
    if group is None or group == 1:
        return order
    head = min(size, -epoch * size % group)
    full = (size - head) // group
    middle = order[head : head + full * group]
    parts = [middle[i : i + GROUPED * group] for i in range(0, len(middle), GROUPED * group)]
    by_length = [part[np.argsort(sequence_tokens[part], kind="stable")] for part in parts]
    batches = np.concatenate([*by_length, order[:0]]).reshape(full, group)
    batches = batches[permutation(full, "batches", seed, epoch)]
    return np.concatenate([order[:head], batches.reshape(-1), order[head + full * group :]])


def deal(tokens: np.ndarray, micro_batch_size: int, data_ranks: int) -> list[list[np.ndarray]]:
    """Which sequences of a global batch go where: result[rank][j], their positions, is micro-batch j of a rank.

    The rule: sort by length, longest first (what needs the most memory comes first; equal ones stay in
    order); cut into micro-batches; deal these round the ranks, forth and back (0 1 2, 2 1 0, ...), so that
    the ranks' micro-batches of one moment are about equally long, and so are their sums.
    """
    order = np.argsort(-np.asarray(tokens), kind="stable")
    rounds = order.reshape(-1, data_ranks, micro_batch_size)
    return [
        [round_[rank if j % 2 == 0 else data_ranks - 1 - rank] for j, round_ in enumerate(rounds)]
        for rank in range(data_ranks)
    ]


def micro_batch(rows: Sequence[Sequence[np.ndarray]], width: int = 0, multiple: int = 1) -> MicroBatch:
    """Rows of documents (stored tokens, see pack.py) as tensors as wide as the longest row and `width`."""
    lengths = tuple(tuple(len(document) for document in row) for row in rows)
    width = max(width, *(sum(row) for row in lengths))
    width += -width % multiple
    stored = np.zeros(
        (len(rows), width + 1), dtype=np.uint32
    )  # one column more: nothing follows the last token
    positions = np.zeros((len(rows), width), dtype=np.int64)
    for row, documents in enumerate(rows):
        flat = np.concatenate(documents)
        stored[row, : len(flat)] = flat
        starts = np.cumsum((0, *lengths[row]))
        positions[row] = np.arange(width) - np.repeat(starts, np.diff(starts, append=width))
    labelled = (stored & LABELLED) != 0
    ids = (stored & ~LABELLED).astype(np.int64)
    # A document's first token is never labelled, so the shift alone keeps labels from crossing documents.
    labels = np.where(labelled[:, 1:], ids[:, 1:], IGNORE)
    return MicroBatch(
        input_ids=torch.from_numpy(np.ascontiguousarray(ids[:, :-1])),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        documents=lengths,
        tokens=sum(map(sum, lengths)),
        label_tokens=int(labelled.sum()),
    )


def evaluation_batches(
    dataset: Dataset, *, micro_batch_size: int, data_rank: int = 0, data_ranks: int = 1, multiple: int = 1
) -> Iterator[MicroBatch]:
    """Every sequence once, longest first; micro-batch m goes to rank m % data_ranks, the last may be smaller.

    All ranks get the same number of micro-batches, because sharded models gather their weights together: a
    rank that runs short gets its last turn from the last micro-batch again with nothing labelled and counted
    as nothing.
    """
    order = np.argsort(-dataset.sequence_tokens, kind="stable")
    cuts = [order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]
    fixed = dataset.width if dataset.packed else 0
    for turn in range(0, len(cuts), data_ranks):
        mine = turn + data_rank
        picked = cuts[min(mine, len(cuts) - 1)]
        made = micro_batch([dataset.documents(s) for s in picked], fixed, multiple)
        yield made if mine < len(cuts) else _blank(made)


def _blank(made: MicroBatch) -> MicroBatch:
    labels = torch.full_like(made.labels, IGNORE)
    return MicroBatch(made.input_ids, labels, made.position_ids, made.documents, tokens=0, label_tokens=0)


def _check_sizes(global_batch_size: int, micro_batch_size: int, data_ranks: int) -> None:
    at_once = micro_batch_size * data_ranks
    if global_batch_size % at_once or global_batch_size < 1:
        below, above = global_batch_size // at_once * at_once, -(-global_batch_size // at_once) * at_once
        sizes = f"{above}" if below == 0 else f"{below} or {above}"
        per_rank, rest = divmod(global_batch_size, data_ranks)
        divisors = [size for size in range(1, min(per_rank, 64) + 1) if rest == 0 and per_rank % size == 0]
        other = f", or a micro-batch of {' or '.join(map(str, divisors))}" if divisors else ""
        raise UserError(
            f"The global batch of {global_batch_size} sequences is not a multiple of micro-batch x data ranks "
            f"= {micro_batch_size} x {data_ranks} = {at_once}; use a global batch of {sizes}{other}."
        )


def _check_state(state: dict[str, Any], identity: dict[str, Any]) -> None:
    if state["seed"] != identity["seed"]:
        raise UserError(
            f"The checkpoint was made with train.seed = {state['seed']}, this run has {identity['seed']}: the "
            "order of samples would not go on. Use that seed, or start a new run in another output folder."
        )
    if state["data"] != identity["data"]:
        raise UserError(
            "The checkpoint was made with other data (rows, tokenizer, template, seq_len or packing): its place "
            "in the data means nothing here. Use those settings, or start a new run in another output folder."
        )


def _some(things: list[int], name: Any, most: int = 8) -> str:
    """The first few by name, and how many more there are."""
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(name(thing) for thing in things[:most]) + more
