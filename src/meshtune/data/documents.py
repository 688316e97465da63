"""Examples to documents that can be trained on, with every cut or dropped document counted."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshtune.data.example import SHOWN, BadRow, Dropped, Example, Notes, Origin

if TYPE_CHECKING:
    from meshtune.data.encode import Document, Encoder

Overlong = Literal["auto", "cut", "split", "drop", "error"]
ROWS_AT_ONCE = 1000  # examples encoded together

Usable = tuple[Origin, np.ndarray, np.ndarray]  # origin, ids int32 [tokens], labelled bool [tokens]


@dataclass
class Lost:
    """Documents that are dropped or cut, and their tokens that are not trained on."""

    documents: int = 0
    tokens: int = 0
    label_tokens: int = 0

    def add(self, labelled: np.ndarray) -> None:
        """Count one document's lost tokens; `labelled` bool [tokens lost]."""
        self.documents += 1
        self.tokens += len(labelled)
        self.label_tokens += int(labelled.sum())


@dataclass
class Tally:
    """Counts of examples read, cut and dropped."""

    examples: int = 0  # bad rows are not among them
    bad_rows: Dropped = field(default_factory=Dropped)
    cut: Lost = field(default_factory=Lost)  # documents cut to seq_len, and the tokens behind the cut
    split: Counter[str] = field(default_factory=Counter)  # "documents" that were split, and their "pieces"
    dropped: dict[str, Lost] = field(default_factory=dict)  # whole documents, by reason
    notes: Notes = field(default_factory=Notes)
    overlong: list[str] = field(default_factory=list)  # the first SHOWN problems under overlong="error"

    def values(self) -> dict[str, Any]:
        """The counts as JSON-able values: rows, bad_rows by reason, cut, dropped by reason, notes."""
        return {
            "rows": self.examples + self.bad_rows.total,
            "bad_rows": dict(Counter(self.bad_rows.counts).most_common()),
            "cut": vars(self.cut),
            "split": dict(self.split),
            "dropped": {reason: vars(lost) for reason, lost in self.dropped.items()},
            "notes": self.notes.values(),
        }


def usable(
    examples: Sequence[Example], encoder: "Encoder", *, seq_len: int, overlong: Overlong, tally: Tally
) -> list[Usable]:
    """Encode the examples; cut, split or leave out documents longer than `seq_len` tokens; count them in
    `tally`.

    Returns the documents that are left, in order. overlong="auto" splits plain text and cuts what else there
    is; "error" leaves them out too, and adds the first
    SHOWN problems to `tally.overlong`, for the caller to raise. Raises UserError for rows that can't be
    labelled if `encoder.on_bad_row` is "error"; under "skip" they are left out and counted.

    A document without a labelled token (before or after the cut) costs a forward pass and has no loss, so it
    is dropped: every sequence of the data set then has a label.
    """
    documents = []
    tally.examples += len(examples)
    for example, document in _encoded(examples, encoder, tally):
        tally.notes.unwritten.update(document.unwritten)
        tally.notes.unstopped.update(document.unstopped)
        tally.notes.control.update(document.control)
        tally.notes.repeated.update(document.repeated)
        tally.notes.tokenless.update(document.tokenless)
        ids, labelled = document.ids, document.labelled
        if len(ids) > seq_len:
            if overlong == "error":
                if len(tally.overlong) < SHOWN:
                    tally.overlong.append(
                        f"{example.origin}: {len(ids):,} tokens, more than data.seq_len = {seq_len:,}."
                    )
                continue
            if overlong == "drop":
                tally.dropped.setdefault(f"longer than {seq_len:,} tokens", Lost()).add(labelled)
                continue
            if overlong == "split" or (overlong == "auto" and example.text is not None):
                parts = list(_pieces(document, seq_len))
                tally.split.update(documents=1, pieces=len(parts))
                documents += [(example.origin, *part) for part in parts]
                continue
            tally.cut.add(labelled[seq_len:])
        remaining = labelled[:seq_len]
        if not remaining.any():
            reason = "nothing labelled left by the cut" if labelled.any() else "nothing labelled"
            tally.dropped.setdefault(reason, Lost()).add(remaining)
            continue
        assert not remaining[0], "no token precedes a document's first one, so it can't be predicted"
        documents.append((example.origin, ids[:seq_len], remaining))
    return documents


def _pieces(document: "Document", seq_len: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, labelled) of the pieces of a document, each a document of its own: no token precedes its
    first one, which is therefore not labelled. Pieces without a label are left out.
    """
    for start in range(0, len(document.ids), seq_len):
        labelled = document.labelled[start : start + seq_len].copy()
        labelled[0] = False
        if labelled.any():
            yield document.ids[start : start + seq_len], labelled


def _encoded(
    examples: Sequence[Example], encoder: "Encoder", tally: Tally
) -> Iterator[tuple[Example, "Document"]]:
    """Yield each example, or each part of it (`Encoder.split`), with its document.

    Those that can't be labelled raise UserError under the encoder's on_bad_row="error", before anything is
    yielded; under "skip" they are left out and counted in `tally`.
    """
    parts = [part for example in examples for part in encoder.split(example)]
    longest = {part.origin: part for part in parts}  # the last part of a row has all of its messages
    if encoder.on_bad_row == "error":
        for part, document in zip(parts, encoder.encode(parts), strict=True):
            yield (
                part,
                document if part is longest[part.origin] else replace(document, unwritten=(), control=()),
            )
        return
    bad: set[Origin] = set()  # several parts of a row are one bad row
    for part, result in zip(parts, encoder.encode_each(parts), strict=True):
        if isinstance(result, BadRow):
            if part.origin not in bad:
                bad.add(part.origin)
                tally.bad_rows.counts[result.reason] += 1
                tally.examples -= 1
        else:
            yield part, result if part is longest[part.origin] else replace(result, unwritten=(), control=())
