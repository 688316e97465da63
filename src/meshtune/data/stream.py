"""Data that is tokenised and packed while it is read, for data that does not fit on the disk.

    source 1 ─┐
    source 2 ─┼─ window: some documents of each, by weight ──pack──> sequences, shuffled inside it ──> Loader
    source 3 ─┘     (a thread prepares the next window meanwhile)

A window starts at a row of each source. These rows are the whole state, so resuming reads one window again
and nothing before it. Every rank reads the same windows and so knows the token counts of the global batch;
the price is that each rank tokenises the rows of all ranks. A source that ends starts again. Weights are
proportions of rows, not numbers of passes, since the length of a stream is unknown.
"""

import hashlib
import json
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.data.documents import ROWS_AT_ONCE, Overlong, Tally, Usable, usable
from meshtune.data.example import Example, Notes, OnBadRow, Source, notes_sentences
from meshtune.data.files import files, is_hub, outline
from meshtune.data.pack import Dataset, in_memory, pack, singles
from meshtune.data.readers import read
from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.data.encode import Encoder

BLOCKS = 1024  # of a source (256 MiB), which are hashed to know it again
FIRST_ROWS = 100  # of each source, in which columns that are not used are looked for at the start

# A position in the stream, with one number per source. rows: its next row; passes: its passes that have
# ended; taken: its examples so far.
Place = dict[str, list[int]]

Readers = dict[int, Iterator[tuple[Example, bool]]]  # open sources: (example, is it the last one of a pass?)


@dataclass(frozen=True)
class Stream:
    """Training data that is tokenised and packed while it is read, in windows (see `windows`).

    The settings are those of `prepare`; weights of sources are shares of the rows.
    """

    sources: tuple[Source, ...]
    encoder: "Encoder"
    seq_len: int
    packed: bool
    overlong: Overlong
    seed: int
    on_bad_row: OnBadRow
    window: int = 2000  # examples, of all sources together
    tally: Tally = field(default_factory=Tally, compare=False)  # grows while windows are read

    @cached_property
    def digest(self) -> str:
        """Digest of the sources' files and the settings, to recognise a state.

        Of a source of more than BLOCKS blocks only BLOCKS are read (see `outline`), of the hub nothing.
        """
        recipe = [
            [_identity(source) for source in self.sources],
            [
                self.encoder.fingerprint,
                self.seq_len,
                self.packed,
                self.overlong,
                self.on_bad_row,
                self.window,
            ],
        ]
        return hashlib.blake2b(json.dumps(recipe).encode(), digest_size=16).hexdigest()

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
            deque(islice(self._read(source, 0, Tally(notes=found.notes)), FIRST_ROWS), maxlen=0)
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
        documents: list[Usable] = []
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

    def _documents(self, place: Place, readers: Readers) -> tuple[list[Usable], Place]:
        """A window's usable documents and the place after it.

        A source that ends gives this window fewer rows, and starts again in the next. readers: see `_window`.
        Raises UserError for overlong documents under overlong="error".
        """
        rows, passes, taken = (list(place[name]) for name in ("rows", "passes", "taken"))
        total, weight = sum(taken) + self.window, sum(source.weight for source in self.sources)
        documents: list[Usable] = []
        for number, source in enumerate(self.sources):
            wanted = max(1, round(total * source.weight / weight) - taken[number])
            if number not in readers:
                readers[number] = with_last(self._read(source, rows[number], self.tally))
            pairs = list(islice(readers[number], wanted))
            examples = [example for example, _ in pairs]
            taken[number] += len(examples)
            if not pairs or pairs[-1][1]:
                del readers[number]
                rows[number], passes[number] = 0, passes[number] + 1
            else:
                rows[number] = examples[-1].origin.row + 1
            for begin in range(0, len(examples), ROWS_AT_ONCE):
                batch = examples[begin : begin + ROWS_AT_ONCE]
                documents += usable(
                    batch, self.encoder, seq_len=self.seq_len, overlong=self.overlong, tally=self.tally
                )
        if self.tally.overlong:
            raise UserError(
                [*self.tally.overlong, "Raise data.seq_len, or set data.overlong to cut, split or drop."]
            )
        return documents, {"rows": rows, "passes": passes, "taken": taken}

    def _read(self, source: Source, start: int, tally: Tally) -> Iterator[Example]:
        return read(
            source,
            on_bad_row=self.on_bad_row,
            streaming=True,
            start=start,
            needs_answer=self.encoder.train_on != "all",
            dropped=tally.bad_rows,
            notes=tally.notes,
        )

    def _pack(self, documents: Sequence[Usable], place: Place) -> Dataset:
        lengths = np.array([len(ids) for _, ids, _ in documents])
        if self.packed:
            members, starts = pack(lengths, self.seq_len, self.seed, *place["rows"])
        else:
            members, starts = singles(len(documents))
        files: dict[str, int] = {}
        origins = [(files.setdefault(origin.file, len(files)), origin.line) for origin, *_ in documents]
        return in_memory(
            [(ids, labelled) for _, ids, labelled in documents],
            members,
            starts,
            seq_len=self.seq_len,
            packed=self.packed,
            origins=np.array(origins),
            files=tuple(files),
        )


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
