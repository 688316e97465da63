"""Micro-batches: tokens -> input_ids, shifted labels, positions and document lengths."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from meshtune.data.boundaries import row_boundaries
from meshtune.data.pack import LABELLED, PROMPT, Dataset, Document, ids_of_stored, in_memory, pack, singles

IGNORE = -100  # the label of a position without loss, as in torch's cross_entropy


class Noise(NamedTuple):
    """Keys and sizes of the noise on each column's embedding (parallel/noise.py), [batch, seq]."""

    keys: torch.Tensor  # int64
    sizes: torch.Tensor  # fp64: its largest value times √hidden

    def map(self, function: Callable[[Tensor], Tensor]) -> "Noise":
        """The same with `function` of each tensor."""
        return Noise(*map(function, self))


class Answers(NamedTuple):
    """Answers of a micro-batch, chosen and rejected ones in turn or judged ones, for a loss on whole answers.

    Segments are the labelled columns of each answer: of its prompt (which only the cross entropy trains),
    then its own. Counts are those of the whole answer, whatever part of it a rank has (cp).
    """

    segments: Tensor  # int64 [batch, seq]: 2 · answer, + 1 in the answer itself; kept in host memory
    lengths: Tensor  # int64 [answers, 2]: labelled columns of this rank in each segment
    counts: Tensor  # fp64 [answers]: labelled tokens
    good: Tensor  # bool [answers]: of judged answers; else true
    margins: Tensor  # fp64 [answers]: of a pair, by which the chosen reward should exceed the other; else 0
    reference: Tensor  # fp64 [answers]: log-probability by the reference; 0 without one
    places: Tensor  # int64 [answers]: 2 · document or key, + 1 for a rejected answer; kept in host memory
    # Units of the loss (pairs or answers of the global batch) for a token of the global batch's chosen
    # answers: the cross entropy is averaged over tokens, the rest of the loss over units.
    units_per_token: float
    units: int  # pairs or judged answers

    def cut(self, index: Tensor, labels: Tensor) -> "Answers":
        """The same of some columns. index: int64 [columns]; labels: those columns' [batch, columns]."""
        segments = self.segments[:, index]
        found = segments[labels != IGNORE].bincount(minlength=2 * len(self.places))
        return self._replace(segments=segments, lengths=found.view(-1, 2))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Answers":
        """The same with `function` of each tensor that the loss reads."""
        moved = ("lengths", "counts", "good", "margins", "reference")
        return self._replace(**{name: function(getattr(self, name)) for name in moved})


class Mapped(Protocol):
    """Tensors that attention reads of the documents, made with the batch."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Mapped": ...


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass; all tensors int64 [batch, seq].

    The columns of a row beyond its documents are padding: id 0, labels -100, positions from 0 on.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor  # shifted: the id of the document's next token if that is labelled, else -100
    position_ids: torch.Tensor  # from 0 in each document, or from its number of shared tokens
    documents: tuple[tuple[int, ...], ...]  # of each row, the lengths of its documents from column 0 on
    tokens: int  # without padding
    label_tokens: int
    columns: torch.Tensor | None = None  # [seq]: this rank's columns of the rows (cp); None: all of them
    noise: Noise | None = None  # on the embeddings; None: none
    answers: Answers | None = None  # with a loss on whole answers
    # The documents as attention reads them, of whole rows or, under all-gather context parallelism, of this
    # rank's columns (parallel/context.py). None: made of `documents`.
    boundaries: Mapped = None  # type: ignore[assignment]
    # Tokens of the document before that each document begins with and does not have itself, as a rejected
    # answer its prompt; (): none
    shared: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.boundaries is None:
            found = row_boundaries(self.documents, self.input_ids.shape[-1], self.shared)
            object.__setattr__(self, "boundaries", found)

    @property
    def units(self) -> int:
        """Number of what its loss is a sum over: label tokens, pairs or judged answers."""
        return self.label_tokens if self.answers is None else self.answers.units

    def document_tokens(self) -> torch.Tensor:
        """Length of each column's document [batch, seq], shared tokens too, on the CPU; padding has 0."""
        columns = torch.arange(self.input_ids.shape[1]) if self.columns is None else self.columns.cpu()
        rows = []
        for row, wholes in zip(self.documents, self.wholes, strict=True):
            ends = torch.tensor(row, dtype=torch.int64).cumsum(0)
            rows.append(torch.tensor([*wholes, 0])[torch.bucketize(columns, ends, right=True)])
        return torch.stack(rows)

    @property
    def wholes(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of each document, shared ones too."""
        rows = zip_longest(self.documents, self.shared, fillvalue=())
        return tuple(tuple(map(sum, zip_longest(*row, fillvalue=0))) for row in rows)

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch with its tensors on `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """The same micro-batch with `function` of each tensor that the passes read."""
        return replace(
            self,
            input_ids=function(self.input_ids),
            labels=function(self.labels),
            position_ids=function(self.position_ids),
            noise=self.noise and self.noise.map(function),
            answers=self.answers and self.answers.map(function),
            boundaries=self.boundaries.map(function),
        )


@dataclass(frozen=True)
class Batch:
    """One step: this rank's micro-batches, and the counts of the whole global batch."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int  # of all ranks, without padding
    label_tokens: int  # of all ranks
    origin: str  # epoch and rows of the batch, for messages
    answers: int | None = None  # pairs or judged answers of all ranks, with a loss on whole answers
    # Each prompt with the next row's answer, for an objective that wants them; all ranks have equally many
    mismatched: tuple[MicroBatch, ...] = ()

    @property
    def units(self) -> int:
        """Number of what the loss of the step is a mean over: its label tokens, pairs or judged answers."""
        return self.label_tokens if self.answers is None else self.answers

    @property
    def place(self) -> str:
        """The epoch and the place in it, without the names of files: the same wherever the data lie."""
        return self.origin.partition(": ")[0]


def micro_batch(
    rows: Sequence[Sequence[np.ndarray]], width: int = 0, multiple: int = 1,
    shared: tuple[tuple[int, ...], ...] = (),
) -> MicroBatch:  # fmt: skip
    """Make tensors of rows, each a list of documents in stored tokens (uint32, see pack.py).

    They are as wide as the longest row, at least `width` columns, and padded to a multiple of `multiple`.
    shared: as in `MicroBatch`.
    """
    lengths = tuple(tuple(len(document) for document in row) for row in rows)
    width = max(width, *(sum(row) for row in lengths))
    width += -width % multiple
    # One column more than `width`: the label of the last column is "no token".
    stored = np.zeros((len(rows), width + 1), dtype=np.uint32)
    positions = np.zeros((len(rows), width), dtype=np.int64)
    for row, documents in enumerate(rows):
        flat = np.concatenate(documents)
        stored[row, : len(flat)] = flat
        starts = np.cumsum((0, *lengths[row]))
        firsts = -starts
        if shared:
            firsts[:-1] += shared[row]
        positions[row] = np.arange(width) + np.repeat(firsts, np.diff(starts, append=width))
    trained, ids = (stored & (LABELLED | PROMPT)) != 0, ids_of_stored(stored).astype(np.int64)
    # A document's first token is never labelled, so only the shift keeps labels from crossing documents.
    labels = np.where(trained[:, 1:], ids[:, 1:], IGNORE)
    return MicroBatch(
        input_ids=torch.from_numpy(np.ascontiguousarray(ids[:, :-1])),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        documents=lengths,
        tokens=sum(map(sum, lengths)),
        label_tokens=int(trained.sum()),
        shared=shared,
    )


Sequences = Sequence[tuple[Dataset, int]]  # a data set, and the number of a sequence in it


def micro_batch_of(
    sequences: Sequences, width: int = 0, multiple: int = 1, units_per_token: float = 0.0
) -> MicroBatch:
    """The micro-batch of some sequences, with their answers unless their objective is on tokens.

    units_per_token: of the global batch, see `Answers`. The others are those of `micro_batch`.
    """
    objective = sequences[0][0].objective
    rows = [data.answers(number) for data, number in sequences]
    shared = tuple(tuple(data.shared(number)) for data, number in sequences)
    made = micro_batch(rows, width, multiple, shared if any(map(any, shared)) else ())
    if objective.rows == "answers":
        return made
    segments = np.zeros(made.labels.shape, np.int64)
    counts: list[int] = []  # labelled tokens of each answer
    scored = np.full(made.labels.shape, IGNORE)
    for row, answers in enumerate(rows):
        end = 0
        for answer in answers:
            start, end, labelled = end, end + len(answer), (answer & LABELLED) != 0
            # A column's label is its next token, so that the last column of an answer has none.
            segments[row, start : end - 1] = 2 * len(counts) + labelled[1:]
            segments[row, end - 1] = 2 * len(counts) + 1
            scored[row, end - 1] = 0
            counts.append(int(labelled.sum()))
    if objective.scores:  # one value, at the answer's last token
        made = replace(made, labels=torch.from_numpy(scored), label_tokens=len(counts))
    fields = zip(*(_of_documents(*each) for each in sequences), strict=True)
    good, margins, reference, places = (torch.from_numpy(np.concatenate(field)) for field in fields)
    answers = Answers(
        torch.from_numpy(segments), torch.zeros(0), torch.tensor(counts).double(), good, margins, reference,
        places, units_per_token, len(counts) // objective.documents,
    )  # fmt: skip
    return replace(made, answers=answers.cut(torch.arange(made.labels.shape[1]), made.labels))


def _of_documents(data: Dataset, number: int) -> tuple[np.ndarray, ...]:
    """(Whether each answer of a sequence is good, its margin, log-probability by the reference, place), as in
    `Answers`.
    """
    members, answers = data.members_of(number), np.arange(data.objective.documents)
    sides = np.repeat(data.sides[members], len(answers))
    keys = members if data.keys is None else data.keys[members]
    places = (2 * keys[:, None] + answers).ravel()
    return sides["good"], sides["margin"].astype(float), _looked_up(data.reference, places), places


def answers_of(sequences: Sequences) -> tuple[int | None, float]:
    """(Pairs or judged answers of some sequences, the same for each token of their chosen answers, with those
    of prompts where these are trained on); (None, 0) of an objective on tokens, and of no sequence.
    """
    if not sequences or (objective := sequences[0][0].objective).rows == "answers":
        return None, 0.0
    count = sum(len(data.members_of(number)) for data, number in sequences)
    if objective.prompts:
        chosen = (answer for data, number in sequences for answer in data.answers(number)[::2])
        tokens = sum(int(((answer & (LABELLED | PROMPT)) != 0).sum()) for answer in chosen)
    else:
        tokens = sum(int(data.sides["labels"][data.members_of(number)].sum()) for data, number in sequences)
    return count, count / max(1, tokens)


def mismatched(own: Sequence[tuple[Dataset, int]]) -> Dataset:
    """The prompt of each document with the answer of the next one; the last has the first one's answer. What
    is longer than a sequence is cut. own: pairs of a data set and a document's number.
    """
    data, numbers = own[0][0], np.array([one for _, one in own])
    cut = [np.asarray(each.tokens[each.offsets[one] : each.offsets[one + 1]]) for each, one in own]
    first = [int(np.argmax((tokens & LABELLED) != 0)) for tokens in cut]
    documents = []
    for place, tokens in enumerate(cut):
        following = (place + 1) % len(cut)
        tokens = np.concatenate([tokens[: first[place]], cut[following][first[following] :]])[: data.seq_len]
        documents.append(Document(ids_of_stored(tokens), (tokens & LABELLED) != 0))
    lengths = np.array([len(document.ids) for document in documents])
    members, starts = pack(lengths, data.seq_len, 0) if data.packed else singles(len(lengths))
    settings = {"seq_len": data.seq_len, "packed": data.packed, "objective": data.objective}
    made = in_memory(documents, members, starts, **settings)
    keys = (1 + numbers) * len(data.labels) + np.roll(numbers, -1)  # behind the numbers of documents
    return replace(made, reference=data.reference, keys=keys)


def held_out_mismatched(data: Dataset) -> Dataset:
    """`mismatched` of held-out documents in the order in which they were read, however they are packed."""
    return mismatched([(data, int(document)) for document in np.unique(data.members)])


def _looked_up(known: tuple[np.ndarray, np.ndarray] | None, places: np.ndarray) -> np.ndarray:
    """The log-probabilities of answers, fp64, 0 for those that are not known. known: `Dataset.reference`."""
    if known is None or not len(known[0]):
        return np.zeros(len(places))
    at = np.searchsorted(known[0], places).clip(max=len(known[0]) - 1)
    return np.where(known[0][at] == places, known[1][at], 0.0)


def evaluation_batches(
    dataset: Dataset,
    *,
    micro_batch_size: int,
    data_rank: int = 0,
    data_ranks: int = 1,
    multiple: int = 1,
    sequences: np.ndarray | None = None,
    width: int = 0,
) -> Iterator[MicroBatch]:
    """Yield micro-batches of every sequence once, longest first; the last micro-batch may be smaller.

    sequences: numbers of those to yield; None: all of them. width: columns that packed ones have at least.

    Micro-batch m goes to rank m % data_ranks; this is rank `data_rank`. multiple: see `Loader`. All ranks get
    the same number of micro-batches, because the ranks of a sharded model all-gather their weights together:
    a rank that has none left gets the last one again, with no label and counts of 0.
    """
    chosen = np.arange(len(dataset)) if sequences is None else sequences
    _, per_token = answers_of([(dataset, number) for number in chosen.tolist()])
    order = chosen[np.argsort(-dataset.sequence_tokens[chosen], kind="stable")]
    cuts = [order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]
    width = max(width, dataset.width) if dataset.packed else 0
    for first in range(0, len(cuts), data_ranks):
        number = first + data_rank
        picked = cuts[min(number, len(cuts) - 1)]
        micro = micro_batch_of([(dataset, sequence) for sequence in picked], width, multiple, per_token)
        yield micro if number < len(cuts) else _unlabelled(micro)


def _unlabelled(micro: MicroBatch) -> MicroBatch:
    """The same input without labels and answers, counted as 0 tokens."""
    return replace(
        micro, labels=torch.full_like(micro.labels, IGNORE), tokens=0, label_tokens=0, answers=None
    )
