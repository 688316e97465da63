"""Held-out prompts and answers on a page: a table, on a narrow screen a list of cards."""

from collections.abc import Sequence
from typing import NamedTuple

from meshtune.report.draw.page import text

ALL_SAMPLES_CHARACTERS = 60_000  # of prompts and answers on a page, so that it stays small
NONE = "–"  # where a prompt was not answered


class Asked(NamedTuple):
    """A prompt with the answers to it."""

    prompt: str  # as the model reads it
    question: str  # the prompt without control tokens
    expected: str | None
    answers: tuple[str | None, ...]  # one a column; None: not answered


def samples_section(columns: Sequence[str], rows: Sequence[Asked], more: str) -> str:
    """HTML of the prompts, with a switch that shows their control tokens; "" without any.

    columns: names of the answers. more: what has the prompts that no longer fit on the page.
    """
    if not rows:
        return ""
    shown = _within_budget(rows)
    names = ("Prompt", "Expected", *columns)
    titles = "".join(f"<th>{text(name)}</th>" for name in names)
    cells = "".join(f"<tr>{_cells(names, row)}</tr>" for row in shown)
    table = f"<table class='samples'><thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table>"
    rest = len(rows) - len(shown)
    note = f"<p class='note'>{rest:,} more are in {text(more)}.</p>" if rest else ""
    switch = SWITCH if any(row.prompt != row.question for row in shown) else ""
    return f"<section><h2>Samples</h2>{switch}<div class='wide'>{table}</div>{note}</section>"


SWITCH = (
    "<input type='checkbox' id='control-tokens'>"
    "<label for='control-tokens'>show control tokens in prompts</label>"
)


def _cells(names: Sequence[str], row: Asked) -> str:
    """HTML of a table row's cells. names: of the columns, which a narrow screen shows next to each cell."""
    prompt = text(row.question)
    if row.prompt != row.question:
        prompt = f"<span class='plain'>{prompt}</span><span class='exact'>{text(row.prompt)}</span>"
    cells = [("", prompt), ("", text(row.expected or ""))]
    for answer in row.answers:
        right = None not in (answer, row.expected) and answer.strip() == row.expected.strip()  # type: ignore[union-attr]
        cells.append((f" class='{'right' if right else 'wrong'}'", text(NONE if answer is None else answer)))
    return "".join(
        f"<td{kind} data-name='{text(name)}'>{cell}</td>"
        for name, (kind, cell) in zip(names, cells, strict=True)
    )


def _within_budget(rows: Sequence[Asked]) -> Sequence[Asked]:
    """As many rows from the first on as have ALL_SAMPLES_CHARACTERS together, but at least one."""
    characters = 0
    for place, row in enumerate(rows):
        characters += sum(len(part or "") for part in (*row[:3], *row.answers))
        if characters > ALL_SAMPLES_CHARACTERS and place:
            return rows[:place]
    return rows
