"""Rows of preferences: pairs of answers to one prompt, and answers that are good or bad.

    prompt | messages | conversations | instruction, with chosen + rejected   ─┐
    chosen + rejected, whole conversations or texts that begin with the prompt ├─> Example, and its `other`
    an answer + label ──────────────────────────────────────────────────────────> Example, `good` or not
    margin, by a pair of a reward model ────────────────────────────────────────> Example, its `margin`

The prompt is what both sides share, up to the beginning of a message. Trained on are the assistant's messages
behind it.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from meshtune.data.example import BadRow, Example, Mask, Origin, is_absent
from meshtune.data.formats import (
    ANSWERS,
    FORMATS,
    SYSTEM_ROLES,
    Columns,
    Format,
    Kind,
    conversation,
    history,
    instruction,
    messages_in,
)
from meshtune.data.messages import message_of, turns_of
from meshtune.data.tokens import common_prefix
from meshtune.errors import argument, written
from meshtune.objectives import Objective, Rows

SIDES = ("chosen", "rejected")
OTHERS = ("system", "history", "tools")  # columns that make texts a conversation
TURNS = ("system", "tools")  # those of conversations
SAME = "both sides are the same"
TWO_PROMPTS = "the sides answer different prompts"
NO_PROMPT = "no prompt"
ECHO = 4  # words from which a prompt that both texts begin with is taken for the prompt, not for their answer
PROMPTS = ("prompt", "question", "query", "instruction", "input")  # columns that may hold the prompt
# Where a turn begins in a text: a name at the start of a line.
NAME = r"(?:^|\n)[^\w\n]*(?:{})[^\w\n]*:[ \t]*\n*"
ANSWERER = re.compile(NAME.format("assistant|ai|bot|gpt|model|response|answer|output|a|tl;dr"), re.IGNORECASE)
ASKER = re.compile(NAME.format("human|user|prompter|question|instruction|system|q"), re.IGNORECASE)


# Pairs #


def _pair(origin: Origin, columns: Columns, *, prompt: str | None) -> Example:
    """Example of the chosen side, whose `other` is the rejected one. Raises BadRow.

    prompt: our name of the column with the prompt; None: both sides begin with it.
    """
    asked = _prompt(columns, prompt)
    sides = [_side(columns, name) for name in SIDES]
    texts = [side for side in sides if isinstance(side, str)]
    if len(texts) == 2 and isinstance(asked, str) and not _fields(columns):
        return _pair_of_texts(origin, asked, *texts)
    if len(texts) == 2 and asked is None:
        return _pair_without_prompt(origin, columns, *texts)
    turns = turns_of(asked) if isinstance(asked, str) else asked or []
    turns = [] if turns in sides else turns  # a copy of one side
    sides = [turns_of("", side)[1:] if isinstance(side, str) else side for side in sides]
    examples = [
        conversation(origin, columns, history(columns) + _whole(columns, turns, side, name))
        for name, side in zip(SIDES, sides, strict=True)
    ]
    return _checked_pair(*map(_ended, examples))


def _fields(columns: Columns) -> list[str]:
    """The optional columns that a row has, by our names."""
    return [name for name in OTHERS if not is_absent(columns.get(name))]


def _prompt(columns: Columns, name: str | None) -> list | str | None:
    """The prompt of a row: messages as they were read, text, or None where no column has it."""
    if name is None:
        return None
    if name == "instruction":
        return instruction(columns)
    return columns.text(name) if (messages := messages_in(columns, name)) is None else messages


def _side(columns: Columns, name: str) -> list | str:
    """One side of a pair: messages as they were read, or text. Raises BadRow if it is empty."""
    messages = messages_in(columns, name)
    if messages is None:
        return columns.text(name, empty="empty answer")
    if not messages:
        raise BadRow("empty answer", f"column {columns.names.get(name, name)} is empty")
    return messages


def _whole(columns: Columns, prompt: list, side: list, name: str) -> list:
    """The messages of a side with those of the prompt, which it may begin with. Raises BadRow if it begins
    with other ones.
    """
    head, tail = ([message_of(one, at, columns.roles)[0] for at, one in enumerate(part, 1)]
                  for part in (prompt, side))  # fmt: skip
    systems = next((at for at, one in enumerate(head) if one["role"] not in SYSTEM_ROLES), len(head))
    if not head or tail[: len(head)] == head:
        return side
    if tail[0]["role"] == "assistant":
        return prompt + side
    begun = next((at for at, one in enumerate(tail) if one["role"] not in SYSTEM_ROLES), len(tail))
    asked = head[systems:]
    if asked and tail[begun : begun + len(asked)] == asked and not (begun and systems):
        return prompt[:systems] + side
    if len(asked) == 1 and asked[0] in tail[:-1]:  # the last question of a conversation
        return prompt[:systems] + side
    theirs = columns.names.get(name, name)
    raise BadRow(
        "two prompts", f"column {theirs} begins with another message than the row's prompt; keep one"
    )


def _ended(example: Example) -> Example:
    """A conversation up to its last answer. Raises BadRow without one."""
    messages = example.messages or ()
    last = max((at for at, one in enumerate(messages) if one["role"] == "assistant"), default=None)
    if last is None:
        detail = f"none of the {len(messages)} messages of a side is the assistant's"
        raise BadRow("no assistant turn", detail)
    masks = example.masks and example.masks[: last + 1]
    return replace(example, messages=messages[: last + 1], masks=masks)


def _checked_pair(chosen: Example, rejected: Example) -> Example:
    """The pair of two conversations. Raises BadRow unless they are different answers to one prompt."""
    one, other = chosen.messages or (), rejected.messages or ()
    if one == other:
        raise BadRow(SAME, "chosen and rejected are the same")
    shared = common_prefix(one, other)
    if shared == min(len(one), len(other)):
        raise BadRow("one side begins with the other", "one side is the beginning of the other")
    roles = [side[shared]["role"] for side in (one, other)]
    if set(roles) != {"assistant"}:
        raise BadRow(
            TWO_PROMPTS,
            f"chosen and rejected differ in message {shared + 1} ({' and '.join(dict.fromkeys(roles))}); "
            "both must answer the same prompt",
        )
    if all(message["role"] in SYSTEM_ROLES for message in one[:shared]):
        raise BadRow(
            NO_PROMPT,
            "both sides begin with the assistant, and the row has no prompt; name its column, such as "
            + argument("data.columns", {"prompt": "question"}),
        )
    return replace(_answers_from(chosen, shared), other=_answers_from(rejected, shared))


def _answers_from(example: Example, first: int) -> Example:
    """The conversation with the assistant's messages from index `first` on trained on, and no other.

    Raises BadRow if a message's own mask says otherwise.
    """
    messages, masks = example.messages or (), example.masks or ()
    answers = [at for at, one in enumerate(messages) if one["role"] == "assistant" and at >= first]
    for at, mask in enumerate(masks):
        if mask is not None and mask.trained != (at in answers):
            raise BadRow(
                "mask in a row of preferences",
                f"message {at + 1} has {mask}, but of preferences the answers that are compared are trained "
                "on, and nothing else",
            )
    trained = tuple(Mask(True, "answer") if at in answers else None for at in range(len(messages)))
    return replace(example, masks=trained if len(answers) > 1 else None)


# Pairs of texts #


def _pair_of_texts(origin: Origin, prompt: str, *answers: str) -> Example:
    """Example of a prompt and two answers, which may both begin with it. Raises BadRow."""
    repeated = all(answer.startswith(prompt) for answer in answers) and (
        len(prompt.split()) >= ECHO or ANSWERER.search(prompt) is not None
    )
    behind = [answer[len(prompt) : len(prompt) + 1] for answer in answers]
    notes = ()
    if repeated and (not prompt[-1:].isalnum() or not any(one.isalnum() for one in behind)):
        answers = tuple(answer[len(prompt) :].lstrip() for answer in answers)
        notes = (("repeated", "repeat the prompt in both sides"),)
    if not all(answer.strip() for answer in answers):
        raise BadRow("empty answer", "a side holds the prompt only")
    if answers[0] == answers[1]:
        raise BadRow(SAME, "chosen and rejected are the same")
    chosen, rejected = (Example(origin, prompt=prompt, completion=answer) for answer in answers)
    return replace(chosen, other=rejected, notes=notes)


def _pair_without_prompt(origin: Origin, columns: Columns, chosen: str, rejected: str) -> Example:
    """Example of two texts that begin with their prompt, which the encoder finds. Raises BadRow."""
    for name in PROMPTS:
        if isinstance(columns.row.get(name), str) and name not in columns.names.values():
            remedy = f"if their prompt is the column {name}, set {argument('data.columns', {'prompt': name})}"
            raise BadRow(NO_PROMPT, f"chosen and rejected are texts; {remedy}")
    if fields := _fields(columns):
        detail = f"chosen and rejected are whole texts, next to which {fields[0]} can't be read"
        raise BadRow(NO_PROMPT, f"{detail}; write messages")
    if chosen == rejected:
        raise BadRow(SAME, "chosen and rejected are the same")
    return Example(origin, text=chosen, other=Example(origin, text=rejected))


def answers_start(chosen: str, rejected: str, opening: str, ends: Sequence[str]) -> int:
    """Characters of the prompt that two texts begin with: up to where a turn of the assistant begins.

    That is behind the template's generation prompt, `opening`, or a name such as "Assistant:" at the start of
    a line. ends: texts with which a turn ends. Raises BadRow if the common beginning has no such place, or if
    the sides differ in more than this turn.
    """
    shared = chosen[: common_prefix(chosen, rejected)]
    places = [match.end() for match in ANSWERER.finditer(shared)]
    if opening.strip() and opening in shared:
        places.append(shared.rindex(opening) + len(opening))
    start = len(shared[: max(places, default=0)].rstrip(" \t"))
    if not start:
        raise BadRow(
            NO_PROMPT,
            "chosen and rejected are texts, and in their common beginning no turn of the assistant begins "
            "(Assistant: at the start of a line, or what the chat template writes); name the column of the "
            "prompt, or write messages",
        )
    between = shared[start:]
    if any(end in between for end in ends) or any(ASKER.search(side[start:]) for side in (chosen, rejected)):
        raise BadRow(
            TWO_PROMPTS,
            "chosen and rejected are texts that differ in more than the last answer; write messages",
        )
    for side in (chosen, rejected):
        if not side[start:].strip():
            raise BadRow("empty answer", "a side holds the prompt only")
    return start


LARGEST_MARGIN = 1e6  # larger than any score; it is kept in fp32


def _with_margin(example: Callable[[Origin, Columns], Example], origin: Origin, columns: Columns) -> Example:
    """Example of a pair with the value of the column margin, 0 without one. Raises BadRow."""
    value: Any = columns.get("margin")
    try:
        margin = float(0.0 if is_absent(value) else value)
    except (TypeError, ValueError):
        margin = math.nan
    if not abs(margin) <= LARGEST_MARGIN:
        theirs = columns.names.get("margin", "margin")
        raise BadRow(
            "margin is not a number",
            f"column {theirs} is {written(value)[:40]}, expected a number of at most {LARGEST_MARGIN:,.0f}",
        )
    return replace(example(origin, columns), margin=margin)


# Answers that are judged #


def _judged(origin: Origin, columns: Columns, *, form: str) -> Example:
    """Example of an answer that the column label calls good or bad. form: key of FORMATS. Raises BadRow."""
    example = FORMATS[form].example(origin, columns)
    good = _good(columns)
    if example.messages is None:
        return replace(example, good=good)
    of_answer = messages_in(columns, "completion") if form == "prompt-completion" else None
    before = len(example.messages) - len(of_answer or ())
    example = _ended(example)
    messages = example.messages or ()
    return replace(_answers_from(example, min(before, len(messages) - 1)), good=good)


def _good(columns: Columns) -> bool:
    """The value of the column label. Raises BadRow if it is neither true nor false."""
    value: Any = columns.get("label")
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    name = str(value).strip().lower()
    if value is None or name not in known:
        theirs = columns.names.get("label", "label")
        raise BadRow(
            "label is neither true nor false",
            f"column {theirs} is {written(value)[:40]}; an answer is good (true or 1) or bad (false or 0)",
        )
    return known[name]


# The formats of each kind of rows #

BOTH = "messages of both sides"  # the first word is the value of data.format
PAIRS = {
    "prompt-completion": Format(("prompt", *SIDES), OTHERS, partial(_pair, prompt="prompt")),
    "alpaca": Format(("instruction", *SIDES), ("input", *OTHERS), partial(_pair, prompt="instruction")),
    "sharegpt": Format(("conversations", *SIDES), TURNS, partial(_pair, prompt="conversations")),
    "messages": Format(("messages", *SIDES), TURNS, partial(_pair, prompt="messages")),
    BOTH: Format(SIDES, TURNS, partial(_pair, prompt=None)),
}
JUDGED = {
    name: Format((*FORMATS[name].needs, "label"), FORMATS[name].reads, partial(_judged, form=name))
    for name in ("prompt-completion", "alpaca", "sharegpt", "messages")
}
PAIR_NAMES = (
    (
        "prompt chosen rejected", "question chosen rejected", "query chosen rejected",
        "instruction chosen_response rejected_response", "prompt chosen_response rejected_response",
        "question chosen_response rejected_response",
    ),
    ("chosen rejected", "chosen_messages rejected_messages", "chosen_response rejected_response"),
)  # fmt: skip
JUDGED_NAMES = (
    (
        "prompt completion label", "prompt response label", "question answer label",
        "question response label", "prompt completion kto_tag",
    ),
    ("instruction output label", "instruction output kto_tag", "instruction response label"),
    ("messages label", "messages kto_tag", "conversation label"),
    ("conversations label", "conversations kto_tag"),
)  # fmt: skip
ELSE = "Rows with one answer to each prompt are for objective=sft"
KINDS: dict[Rows, Kind] = {
    "answers": ANSWERS,
    "pairs": Kind(
        PAIRS,
        PAIR_NAMES,
        "Without a prompt, chosen and rejected are whole conversations. "
        f"{ELSE}, those with a label, good or bad, for objective=kto.",
    ),
    "judged": Kind(
        JUDGED | {f"{name} of pairs": form for name, form in PAIRS.items()},
        (*JUDGED_NAMES, *PAIR_NAMES),
        f"Pairs of chosen and rejected are read too. {ELSE}.",
    ),
}


def kind_of(objective: Objective) -> Kind:
    """The rows of an objective; pairs of one that scores answers may have a margin."""
    kind = KINDS[objective.rows]
    if not objective.scores:
        return kind
    forms = {
        name: Format(form.needs, (*form.reads, "margin"), partial(_with_margin, form.example))
        for name, form in kind.forms.items()
    }
    return kind._replace(forms=forms)
