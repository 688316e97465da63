"""Figures on the terminal in words: counts with their noun."""

from golden import says
from terminal import printed

from meshtune.data.example import Notes
from meshtune.data.prepare import sentences
from meshtune.report.data import histogram
from meshtune.units import counted


def test_one_thing_is_singular() -> None:
    assert [counted(number, "row") for number in (0, 1, 2_176)] == ["0 rows", "1 row", "2,176 rows"]


def test_one_document_in_one_sequence_is_told_in_the_singular() -> None:
    one = {"documents": 1, "tokens": 1, "label_tokens": 1}
    stats = {
        "train": {**one, "sequences": 1, "packed": True, "efficiency": 0.5}, "eval": None, "seq_len": 64,
        "kind": "answers",
        "template_date": None, "not_read": [], "cut": one, "split": {}, "dropped": {"empty": one},
        "bad_rows": {}, "notes": Notes().values(),
    }  # fmt: skip
    said = "\n".join(sentences(stats))
    says(said)


def test_a_bar_of_one_length_shows_it_once() -> None:
    bars = [{"from": 1, "to": 1, "documents": 4}, {"from": 2, "to": 9, "documents": 2}]
    text = printed(histogram(bars))
    assert "2–9" in text and "1–1" not in text
