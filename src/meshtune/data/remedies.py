"""Settings with which refused rows would be trained on, found out by trying each on the rows themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from meshtune.data.example import SHOWN, BadRow, Example, Mask
from meshtune.data.limits import NOT_UTF8, TOO_LONG
from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.data.encode import Encoder

THINKING = ("enable_thinking", "thinking")  # variables of templates that open or close a thought
UNKNOWN_IDS = "ids that are not in the vocabulary"
ENDS_ONLY = "begin and end tokens only"
NO_SETTING = {  # what helps rows that no setting helps, by their reason
    UNKNOWN_IDS: "Train the model whose tokenizer made the ids",
    ENDS_ONLY: "Give them a text",
    NOT_UTF8: "Write them anew in whole characters",
    TOO_LONG: "Split them",
}
SKIP = "data.on_bad_row=skip leaves such rows out"


class Remedy(NamedTuple):
    """One change, of the settings or of the rows, that may help."""

    clause: str
    settings: Mapping[str, Any] = {}  # of Encoder
    change: Callable[[Example], Example] | None = None  # of a row


def remedies(encoder: Encoder, refused: Sequence[tuple[Example, BadRow]]) -> list[str]:
    """Sentences on what would help, one for each reason that rows were refused for.

    Settings are tried with the first SHOWN rows; named is what helps all of these that have the reason.
    """
    every = {bad.reason for _, bad in refused}
    sentences = [f"{remedy}; {SKIP}." for reason, remedy in NO_SETTING.items() if reason in every]
    refused = [pair for pair in refused[:SHOWN] if pair[1].reason not in NO_SETTING]
    reasons = list(dict.fromkeys(bad.reason for _, bad in refused))
    helpful: dict[str, list[str]] = {reason: [] for reason in reasons}
    for remedy in _candidates(encoder):
        try:
            changed = encoder.changed(**remedy.settings) if remedy.settings else encoder
        except UserError:
            continue
        for reason in reasons:
            rows = [example for example, bad in refused if bad.reason == reason]
            if all(_helps(changed, remedy.change(row) if remedy.change else row) for row in rows):
                helpful[reason].append(remedy.clause)
    if len(reasons) == 1:
        return [*sentences, _sentence("", helpful[reasons[0]])]
    return sentences + [
        _sentence(f"Of rows with the reason {reason}: ", clauses) for reason, clauses in helpful.items()
    ]


def _sentence(subject: str, clauses: Sequence[str]) -> str:
    if not clauses:
        return f"{subject}No setting that was tried would help; {SKIP}."
    return f"{subject}What would help: {'; '.join([*clauses, SKIP])}."


def _helps(encoder: Encoder, row: Example) -> bool:
    """Whether an encoder takes a row."""
    try:
        results = list(encoder.encode_each(encoder.split(row)))
    except UserError:
        return False
    return not any(isinstance(result, BadRow) for result in results)


def _candidates(encoder: Encoder) -> Iterator[Remedy]:
    """Yield the changes that are tried, those of the settings first."""
    template = str(encoder.tokenizer.chat_template or "")
    if not encoder.split_turns and encoder.train_on != "all":
        yield Remedy(
            "data.split_turns=true makes each assistant turn a row of its own", {"split_turns": True}
        )
        if encoder.train_on != "completion":
            yield Remedy("data.train_on=completion labels the last answer only", {"train_on": "completion"})
    yield Remedy(
        "data.chat_template=training writes every turn as the last one", {"chat_template": "training"}
    )
    for name in THINKING:
        given = encoder.template_variables
        for value in (True, False):
            if name in template and given.get(name) is not value:
                written = str(value).lower()
                yield Remedy(
                    f"data.chat_template_kwargs={{{name}: {written}}}",
                    {"template_variables": {**given, name: value}},
                )
    if encoder.control_tokens != "text":
        yield Remedy("data.control_tokens=text trains on their characters", {"control_tokens": "text"})
    if encoder.control_tokens != "keep":
        yield Remedy("data.control_tokens=keep trains on the tokens themselves", {"control_tokens": "keep"})
    yield Remedy("data.chat_template=chatml is a template that writes them", {"chat_template": "chatml"})
    yield Remedy("take off the white space at the beginning of the answers", change=_stripped)
    yield Remedy("give the first message a weight of 0", change=lambda row: _untrained(row, 0))


def _stripped(row: Example) -> Example:
    """A row whose answers begin without white space."""
    if row.messages is None:
        return replace(row, completion=(row.completion or "").lstrip())
    return replace(
        row,
        messages=tuple(
            message | {"content": message["content"].lstrip()}
            if message["role"] == "assistant" and isinstance(message.get("content"), str)
            else message
            for message in row.messages
        ),
    )


def _untrained(row: Example, index: int) -> Example:
    """A row in which a message has a weight of 0."""
    masks = list(row.masks or [None] * len(row.messages or ()))
    masks[index : index + 1] = [Mask(False, "weight")] if masks else []
    return replace(row, masks=tuple(masks))
