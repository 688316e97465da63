"""Held-out prompts and answers on a page: a table, on a narrow screen a list of cards."""

from collections.abc import Sequence
from typing import NamedTuple

from meshtune.meter.rows import matches
from meshtune.report.draw.page import text
from meshtune.report.draw.table import Column, Markup, Table

ALL_SAMPLES_CHARACTERS = 60_000  # of prompts and answers on a page, so that it stays small
NONE = "–"  # where a prompt was not answered
SWITCH = (
    "<input type='checkbox' id='control-tokens'>"
    "<label for='control-tokens'>show control tokens in prompts</label>"
)


class Asked(NamedTuple):
    """A prompt with the answers to it."""

    prompt: str  # as the model reads it
    question: str  # the prompt without control tokens
    expected: str | None
    answers: tuple[str | None, ...]  # one a column; None: not answered

    def html(self) -> Markup:
        """The prompt, with and without control tokens where they differ."""
        plain, exact = text(self.question), text(self.prompt)
        spans = f"<span class='plain'>{plain}</span><span class='exact'>{exact}</span>"
        return Markup(plain if self.prompt == self.question else spans)

    def answer(self, place: int) -> Markup:
        """An answer, marked as right or wrong."""
        answer = self.answers[place]
        mark = "right" if matches(self.expected, answer) else "wrong"
        return Markup(text(NONE if answer is None else answer), mark)


def samples_table(columns: Sequence[str], rows: Sequence[Asked], more: str) -> Table:
    """Table of the prompts, with a switch that shows their control tokens.

    columns: names of the answers. more: what has the prompts that the page has no room for.
    """
    listed = _within_budget(rows)
    rest = len(rows) - len(listed)
    return Table(
        "Samples",
        (
            Column("Prompt", [row.html() for row in listed]),
            Column("Expected", [row.expected or "" for row in listed]),
            *(Column(name, [row.answer(n) for row in listed]) for n, name in enumerate(columns)),
        ),
        (f"{rest:,} more are in {more}.",) if rest else (),
        above=SWITCH if any(row.prompt != row.question for row in listed) else "",
        kind="samples",
    )


def _within_budget(rows: Sequence[Asked]) -> Sequence[Asked]:
    """The first rows, up to ALL_SAMPLES_CHARACTERS together, but at least one."""
    characters = 0
    for place, row in enumerate(rows):
        characters += sum(len(part or "") for part in (*row[:3], *row.answers))
        if characters > ALL_SAMPLES_CHARACTERS and place:
            return rows[:place]
    return rows
