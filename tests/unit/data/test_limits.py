"""Rows, templates and tokenizers without end are refused with a sentence."""

import threading
from typing import Any

import pytest
from golden import refuses
from tokenizers import Regex, normalizers

from meshtune.data import example, readers, template
from meshtune.data.encode import Encoder
from meshtune.data.example import BadRow, Example, Origin, Source, Tally
from meshtune.data.readers import read
from meshtune.data.tokens import growth
from meshtune.errors import UserError

TURNS: Any = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "two"})
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def conversation(*turns: dict[str, Any]) -> Example:
    return Example(Origin("rows.jsonl", 1), messages=turns or TURNS, tools=None)


@pytest.mark.parametrize(
    "text",
    [
        LOOP,
        "{{ 'x' * 10**12 }}",
        "{{ [1] * 10**12 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}",
    ],
    ids=["time", "text", "list", "power", "format", "width", "many texts"],
)
def test_a_template_without_end_is_refused_before_any_row(
    text: str, tokenizer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "RENDER_SECONDS", 0.2)
    tokenizer = tokenizer_of()
    tokenizer.chat_template = text
    with refuses(UserError):
        Encoder(tokenizer, train_on="assistant", chat_template=None)


def test_a_template_that_is_slow_on_a_row_alone_is_refused_there(
    tokenizer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "RENDER_SECONDS", 0.2)
    tokenizer = tokenizer_of()
    tokenizer.chat_template = "{% if messages|length > 2 %}" + LOOP + "{% endif %}x"
    encoder = Encoder(tokenizer, train_on="all", chat_template=None)
    with refuses(UserError):
        encoder.encode([conversation(*TURNS, *TURNS)])


def test_a_thread_renders_without_signals(tokenizer_of: Any) -> None:
    made: list[Encoder] = []
    tokenizer = tokenizer_of()
    tokenizer.chat_template = "{{ messages[0].content }}"
    thread = threading.Thread(
        target=lambda: made.append(Encoder(tokenizer, train_on="all", chat_template=None))
    )
    thread.start()
    thread.join()
    assert made


def test_a_text_that_utf8_can_not_hold_is_a_bad_row(tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of()
    tokenizer.chat_template = "{{ messages[0].content }}{{ '\\ud800' }}"
    encoder = Encoder(tokenizer, train_on="all", chat_template=None)
    with refuses(UserError):
        encoder.encode([conversation()])


@pytest.mark.parametrize("templated", [True, False])
def test_a_long_row_is_named_and_the_others_are_used(
    templated: bool, tokenizer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of("<|im_start|>", "<|im_end|>")
    encoder = Encoder(tokenizer, train_on="completion", chat_template="chatml" if templated else "none")
    rows = [
        Example(Origin("rows.jsonl", n), prompt="say", completion="x" * n, messages=None) for n in (9, 4000)
    ]
    assert len(encoder.encode(rows)) == 2
    monkeypatch.setattr(example, "ROW_CHARACTERS", 3000)
    _, bad = encoder.encode_each(rows)
    assert isinstance(bad, BadRow) and bad.reason == example.TOO_LONG


def test_a_long_line_is_passed_over_in_parts(rows_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_BYTES", 1000)
    file = rows_file([{"text": text} for text in ("one", "x" * 3500, "two")])
    tally = Tally()
    rows = [*read(Source(str(file)), on_bad_row="skip", tally=tally)]
    assert [(row.text, row.origin.row) for row in rows] == [("one", 0), ("two", 2)]
    assert tally.bad_rows == {example.TOO_LONG: 1}


def test_an_open_quote_ends_the_reading_of_a_csv_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_BYTES", 1000)
    (tmp_path / "rows.csv").write_text('text\none\n"two\n' + "three\n" * 500)
    with refuses(UserError):
        [*read(Source(str(tmp_path / "rows.csv")), on_bad_row="skip")]


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Replace("e", "e" * 100_000),
        normalizers.Replace(Regex("a+"), "b" * 500),
        normalizers.Prepend("x" * 999),
        normalizers.Sequence([normalizers.Replace("e", "eeee")] * 6),
    ],
    ids=["replace", "regular expression", "prepend", "sequence"],
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(normalizer: Any, tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of()
    tokenizer.backend_tokenizer.normalizer = normalizer
    with refuses(UserError):
        Encoder(tokenizer, train_on="completion", chat_template="none")


def test_rules_of_published_tokenizers_are_far_below_the_limit() -> None:
    llama = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "NFKD"}, None,
    ]}  # fmt: skip
    assert growth(llama) == 2
    assert growth({"type": "Replace", "pattern": {"String": "``"}, "content": '"'}) == 1
    assert growth(None) == 1
