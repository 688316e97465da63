"""Examples -> documents that may be trained on, with everything that is cut or left out counted."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshtune.data.example import BadRow, Dropped, Example, Origin

if TYPE_CHECKING:
    from meshtune.data.template import Document, Encoder

Overlong = Literal["cut", "drop", "error"]
ROWS_AT_ONCE = 1000  # examples encoded together
SHOWN = 10  # problems named at once

Usable = tuple[Origin, np.ndarray, np.ndarray]  # where it is from, ids int32 [tokens], labelled bool [tokens]


@dataclass
class Lost:
    """Documents, and tokens of theirs, that are not trained on."""

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
    """Counts of what was read, cut and left out."""

    examples: int = 0
    bad_rows: Dropped = field(default_factory=Dropped)
    cut: Lost = field(default_factory=Lost)
    dropped: dict[str, Lost] = field(default_factory=dict)  # by reason
    overlong: list[str] = field(default_factory=list)  # the first problems under overlong="error"

    def values(self) -> dict[str, Any]:
        """JSON-able: rows, bad_rows by reason, cut, dropped by reason."""
        return {
            "rows": self.examples + self.bad_rows.total,
            "bad_rows": dict(Counter(self.bad_rows.counts).most_common()),
            "cut": vars(self.cut),
            "dropped": {reason: vars(lost) for reason, lost in self.dropped.items()},
        }


def usable(
    examples: Sequence[Example], encoder: "Encoder", *, seq_len: int, overlong: Overlong, tally: Tally
) -> list[Usable]:
    """Encode the examples; cut, drop or report what is longer than `seq_len`; count all of it in `tally`.

    A document without a labelled token, or with none left by the cut, would cost a forward pass and teach
    nothing, so it is left out, and every sequence of the data set has something to learn from.
    """
    kept = []
    for example, document in _encoded(examples, encoder, tally):
        tally.examples += 1
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
            tally.cut.add(labelled[seq_len:])
        learnt = labelled[:seq_len]
        if not learnt.any():
            reason = "nothing labelled left by the cut" if labelled.any() else "nothing labelled"
            tally.dropped.setdefault(reason, Lost()).add(learnt)
            continue
        assert not learnt[0], "nothing stands before a document's first token that could predict it"
        kept.append((example.origin, ids[:seq_len], learnt))
    return kept


def _encoded(
    examples: Sequence[Example], encoder: "Encoder", tally: Tally
) -> Iterator[tuple[Example, "Document"]]:
    """Each example with its document; those that the encoder leaves out (on_bad_row="skip") are counted."""
    if encoder.on_bad_row == "error":
        yield from zip(examples, encoder.encode(examples), strict=True)
        return
    for example, result in zip(examples, encoder.encode_each(examples), strict=True):
        if isinstance(result, BadRow):
            tally.bad_rows.counts[result.reason] += 1
        else:
            yield example, result
