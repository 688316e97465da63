"""The recipe of the data: sources to documents that can be trained on, all at once or while they are read.

    source 1 ─┐
    source 2 ─┼─ window: some documents of each, by weight ──pack──> sequences, shuffled inside it ──> Loader
    source 3 ─┘     (a thread prepares the next window meanwhile)

A `Stream` is for data that does not fit on the disk. A window starts at a row of each source. These rows are
the whole state, so resuming reads one window again and nothing before it. Every rank reads the same windows
and so knows the token counts of the global batch; the price: each rank tokenises all rows.
A source that ends starts again. Weights are proportions of rows, not numbers of passes, since the length of a
stream is unknown.
"""

import hashlib
import json
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshtune.data.example import (
    SHOWN,
    BadRow,
    Example,
    Lost,
    Notes,
    OnBadRow,
    Origin,
    Source,
    Tally,
    notes_sentences,
)
from meshtune.data.files import DataFile, files, is_hub, outline
from meshtune.data.pack import NO_IDS, Dataset, Document, in_memory, pack, singles
from meshtune.data.preferences import kind_of
from meshtune.data.readers import read
from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.data.encode import Encoder

Overlong = Literal["auto", "cut", "split", "drop", "error"]
ROWS_AT_ONCE = 1000  # examples encoded together
OF_ROW = ("unwritten", "control")  # notes that the last part of a split row has for all of them


@dataclass(frozen=True)
class Recipe:
    """Sources of rows, and the settings that decide which documents and sequences they become."""

    sources: tuple[Source, ...]  # one of weight w is passed through w times per epoch
    encoder: "Encoder"  # has a setting of its own for rows whose labels can't be exact
    seq_len: int
    packing: bool = True
    overlong: Overlong = "auto"  # what becomes of documents longer than seq_len, see `usable`
    seed: int = 0  # of packing, held-out documents and fractions of sources
    eval_split: float = 0  # fraction of the training documents that is held out if below 1, else their number
    eval_sources: tuple[Source, ...] = ()  # held-out data of their own
    on_bad_row: OnBadRow = "error"  # for rows that can't be read

    def read(self, source: Source, tally: Tally, **place: Any) -> Iterator[Example]:
        """Yield the examples of a source. place: data_files, start and streaming, as of `readers.read`."""
        needs_answer = self.encoder.train_on != "all"
        place |= {"tally": tally, "kind": kind_of(self.encoder.objective)}
        return read(source, on_bad_row=self.on_bad_row, needs_answer=needs_answer, **place)

    def documents(
        self, source: Source, tally: Tally, data_files: Sequence[DataFile]
    ) -> Iterator[list[Document]]:
        """Yield the usable documents of a source, a batch at a time; stop after SHOWN overlong ones."""
        examples = self.read(source, tally, data_files=data_files)
        while len(tally.overlong) < SHOWN and (rows := list(islice(examples, ROWS_AT_ONCE))):
            yield self.usable(rows, tally)

    def usable(self, examples: Sequence[Example], tally: Tally) -> list[Document]:
        """Encode the examples; cut, split or leave out documents longer than `seq_len` tokens; count them in
        `tally`.

        Returns the documents that are left, in order. overlong="auto" splits plain text, drops preferences
        and cuts what else there is; "error" leaves them out too, and adds the first SHOWN problems to
        `tally.overlong`, for the caller to raise. Raises UserError for rows that can't be labelled if
        `encoder.on_bad_row` is "error"; under "skip" they are left out and counted.

        A document without a labelled token (before or after the cut) costs a forward pass and has no loss, so
        it is dropped: every sequence of the data set then has a label.
        """
        documents, seq_len = list[Document](), self.seq_len
        preferences = self.encoder.objective.rows != "answers"
        tally.examples += len(examples)
        for example, document in _encoded(examples, self.encoder, tally):
            labelled = document.labelled
            if len(document.ids) > seq_len:
                if self.overlong == "error":
                    if len(tally.overlong) < SHOWN:
                        tally.overlong.append(
                            f"{example.origin}: {_size(document)}, more than data.seq_len = {seq_len:,}."
                        )
                    continue
                if self.overlong == "drop" or (self.overlong == "auto" and preferences):
                    tally.dropped.setdefault(f"longer than {seq_len:,} tokens", Lost()).add(labelled)
                    continue
                if self.overlong == "split" or (self.overlong == "auto" and example.text is not None):
                    parts = list(_pieces(document, seq_len))
                    tally.split.update(documents=1, pieces=len(parts))
                    documents += [replace(part, origin=example.origin) for part in parts]
                    continue
                document, lost = _cut(document, seq_len)
                tally.cut.add(lost)
            if reason := _useless(document, cut=len(document.labelled) < len(labelled)):
                tally.dropped.setdefault(reason, Lost()).add(document.labelled)
                continue
            starts = document.labelled[[0, document.first]]
            assert not starts.any(), "a side's first token can't be predicted"
            documents.append(replace(document, origin=example.origin))
        return documents

    def sequences(self, lengths: np.ndarray, *key: int) -> tuple[np.ndarray, np.ndarray]:
        """(members, starts) as in `Dataset` of documents of these lengths. key: as of `pack`."""
        return pack(lengths, self.seq_len, self.seed, *key) if self.packing else singles(len(lengths))


def _size(document: Document) -> str:
    """Clause with the tokens of a document, of a pair also those of each side."""
    tokens, first = len(document.ids), document.first
    sides = f" ({first:,} of the chosen side, {tokens - first:,} of the rejected)" if first else ""
    return f"{tokens:,} tokens{sides}"


def _cut(document: Document, seq_len: int) -> tuple[Document, np.ndarray]:
    """(The first `seq_len` tokens of a document, labels of those behind the cut).

    Each side of a pair keeps half of them; one that needs less leaves the rest to the other.
    """
    tokens, first = len(document.ids), document.first
    other = min(tokens - first, max(seq_len // 2, seq_len - first))
    kept = np.zeros(tokens, bool)
    kept[: seq_len - other] = kept[first : first + other] = True
    ids, labelled = document.ids[kept], document.labelled[kept]
    sides = {"first": min(first, seq_len - other), "prompt": min(seq_len - other, document.prompt)}
    rest = NO_IDS if first else _answer_rest(document, seq_len)
    cut = replace(document, ids=ids, labelled=labelled, answer_rest=rest, **sides)
    return cut, document.labelled[~kept]


def _useless(document: Document, *, cut: bool) -> str:
    """The reason why a document can't be trained on; "" if it can. cut: whether it was cut to seq_len."""
    sides = np.split(document.labelled, [document.first]) if document.first else [document.labelled]
    if not all(side.any() for side in sides):
        return "nothing labelled left by the cut" if cut else "nothing labelled"
    chosen, rejected = np.split(document.ids, [document.first])
    same = np.array_equal(chosen[document.shared :], rejected)
    return "both sides are the same behind the cut" if same else ""


def _answer_rest(document: Document, seq_len: int) -> np.ndarray:
    """Ids of the answer that a cut to `seq_len` tokens goes through, from the cut to its end; none where the
    cut leaves all answers before it whole.
    """
    from_last = document.labelled[seq_len - 1 :]  # from the last token that is left
    length = len(from_last) if from_last.all() else int(from_last.argmin())
    return document.ids[seq_len : seq_len - 1 + length]


def _pieces(document: Document, seq_len: int) -> Iterator[Document]:
    """Yield the pieces of a document, each a document of its own: no token precedes its first one, which is
    therefore not labelled. Pieces without a label are left out.
    """
    for start in range(0, len(document.ids), seq_len):
        labelled = document.labelled[start : start + seq_len].copy()
        labelled[0] = False
        if labelled.any():
            yield replace(document, ids=document.ids[start : start + seq_len], labelled=labelled)


def _encoded(
    examples: Sequence[Example], encoder: "Encoder", tally: Tally
) -> Iterator[tuple[Example, Document]]:
    """Yield each example, or each part of it (`Encoder.split`), with its document, whose notes are counted.

    Those that can't be labelled raise UserError under the encoder's on_bad_row="error", before anything is
    yielded; under "skip" they are left out and counted in `tally`.
    """
    parts = [part for example in examples for part in encoder.split(example)]
    longest = {part.origin: part for part in parts}  # the last part of a row has all of its messages
    results = encoder.encode(parts) if encoder.on_bad_row == "error" else encoder.encode_each(parts)
    bad: set[Origin] = set()  # several parts of a row are one bad row
    for part, result in zip(parts, results, strict=True):
        if not isinstance(result, BadRow):
            whole = part is longest[part.origin]
            tally.notes.add(note for note in result.notes if whole or note[0] not in OF_ROW)
            yield part, result
        elif part.origin not in bad:
            bad.add(part.origin)
            tally.bad_rows[result.reason] += 1
            tally.examples -= 1


# Streams #


BLOCKS = 1024  # of a source (256 MiB), which are hashed to know it again
FIRST_ROWS = 100  # of each source, in which columns that are not used are looked for at the start

# A position in the stream, with one number per source. rows: its next row; passes: its passes that have
# ended; taken: its examples so far.
Place = dict[str, list[int]]

Readers = dict[int, Iterator[tuple[Example, bool]]]  # open sources: (example, is it the last one of a pass?)


@dataclass(frozen=True)
class Stream(Recipe):
    """Training data that is tokenised and packed while it is read, in windows (see `windows`).

    Weights of sources are shares of the rows; eval_sources and eval_split have no effect.
    """

    window: int = 2000  # examples, of all sources together
    tally: Tally = field(default_factory=Tally, compare=False)  # grows while windows are read

    @cached_property
    def digest(self) -> str:
        """Digest of the sources' files and the settings, to recognise a state.

        Of a source of more than BLOCKS blocks only BLOCKS are read (see `outline`), of the hub nothing.
        """
        settings = [self.seq_len, self.packing, self.overlong, self.on_bad_row, self.window]
        recipe = [[_identity(source) for source in self.sources], [self.encoder.fingerprint, *settings]]
        return hashlib.blake2b(json.dumps(recipe).encode(), digest_size=16).hexdigest()

    @property
    def packed(self) -> bool:
        return self.packing

    @property
    def width(self) -> int:
        """Tokens to which packed sequences are padded, so that shapes never change."""
        return self.seq_len

    @property
    def label_share(self) -> None:
        """Labelled tokens as a share of full sequences: not known before it is read."""

    def start(self) -> Place:
        """The place of the first window."""
        nothing = [0] * len(self.sources)
        return {"rows": nothing, "passes": nothing, "taken": nothing}

    def unused_columns(self) -> Tally:
        """Tally of the columns that the first FIRST_ROWS rows of each source have and that are not read.

        All its other counts are 0. Raises UserError for bad rows among these, as `windows`.
        """
        found = Tally()
        for source in self.sources:
            examples = self.read(source, Tally(notes=found.notes), streaming=True)
            deque(islice(examples, FIRST_ROWS), maxlen=0)
        found.notes = Notes(unused=found.notes.unused)
        return found

    def windows(self, place: Place) -> Generator[tuple[Dataset, Place, Place], None, None]:
        """Yield windows without end from `place` on: (sequences, the window's place, the place after it).

        A thread prepares the next window meanwhile; close the generator to end it. Raises UserError for bad
        rows and overlong documents where they are errors, and if a whole pass gives no document.
        """
        readers: Readers = {}
        with ThreadPoolExecutor(max_workers=1) as thread:
            following = thread.submit(self._window, place, readers)
            while True:
                dataset, after = following.result()
                following = thread.submit(self._window, after, readers)
                yield dataset, place, after
                place = after

    def _window(self, place: Place, readers: Readers) -> tuple[Dataset, Place]:
        """The window at `place` and the place after it; rows without a usable document are passed over.

        readers: the open sources, which resume from where they are; updated. Raises UserError as `windows`.
        """
        documents: list[Document] = []
        after = place
        while not documents:
            documents, after = self._documents(after, readers)
            if not documents and min(after["passes"]) > min(place["passes"]) + 1:
                raise UserError(
                    [
                        "A whole pass through the stream gave no document to train on: check its rows.",
                        *notes_sentences(self.tally.notes.values()),
                    ]
                )
        return self._pack(documents, place), after

    def _documents(self, place: Place, readers: Readers) -> tuple[list[Document], Place]:
        """A window's usable documents and the place after it.

        A source that ends gives this window fewer rows, and starts again in the next. readers: see `_window`.
        Raises UserError for overlong documents under overlong="error".
        """
        rows, passes, taken = (list(place[name]) for name in ("rows", "passes", "taken"))
        total, weight = sum(taken) + self.window, sum(source.weight for source in self.sources)
        documents: list[Document] = []
        for number, source in enumerate(self.sources):
            wanted = max(1, round(total * source.weight / weight) - taken[number])
            if number not in readers:
                readers[number] = with_last(self.read(source, self.tally, start=rows[number], streaming=True))
            pairs = list(islice(readers[number], wanted))
            examples = [example for example, _ in pairs]
            taken[number] += len(examples)
            if not pairs or pairs[-1][1]:
                del readers[number]
                rows[number], passes[number] = 0, passes[number] + 1
            else:
                rows[number] = examples[-1].origin.row + 1
            for begin in range(0, len(examples), ROWS_AT_ONCE):
                documents += self.usable(examples[begin : begin + ROWS_AT_ONCE], self.tally)
        self.tally.refuse_overlong(self.encoder.objective.rows)
        return documents, {"rows": rows, "passes": passes, "taken": taken}

    def _pack(self, documents: Sequence[Document], place: Place) -> Dataset:
        lengths = np.array([len(one.ids) for one in documents])
        members, starts = self.sequences(lengths, *place["rows"])
        settings = {"packed": self.packing, "objective": self.encoder.objective}
        return in_memory(documents, members, starts, seq_len=self.seq_len, **settings)


def _identity(source: Source) -> list[Any]:
    """Return what decides a source's rows: the outline of its files, and how they are read."""
    settings = {name: value for name, value in vars(source).items() if name != "path"}
    if is_hub(source.path):
        return [source.path, settings]
    return [outline(files(source), BLOCKS), settings]


def with_last(examples: Iterator[Example]) -> Iterator[tuple[Example, bool]]:
    """Yield (example, is it the last one?): a pass ends with its last example, not after it."""
    ahead = next(examples, None)
    while ahead is not None:
        example, ahead = ahead, next(examples, None)
        yield example, ahead is None
