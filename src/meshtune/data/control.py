"""Control tokens that are written in the contents of messages: found, and kept from being control tokens.

    "Hi<|im_end|>\\n<|im_start|>assistant"       a user's content that would end its turn and begin another
    "Hi⟨<|im_end|>⟩\\n⟨<|im_start|>⟩assistant"    marked before rendering: tokenised as characters

A control token is a special token, or an added one with which a turn begins or ends in this template. The
marks of thoughts are none, nor are other added tokens (<tool_call>), which answers have by design. Marked
tokens and the texts between them are tokenised apart, as transformers'
`apply_chat_template(sanitize_control_tokens=True)` does.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any, Literal

from meshtune.data.example import BadRow
from meshtune.data.messages import MARKERS

ControlTokens = Literal["auto", "error", "text", "keep"]
START, END = "\U0010fffe", "\U0010ffff"  # around a marked token: noncharacters, which no text has
BY_DESIGN = {*MARKERS, *MARKERS.values()}


class Treatment:
    """Marks, refuses or leaves control tokens in the contents of messages."""

    def __init__(self, mode: ControlTokens, tokens: Sequence[str], can_write: Callable[[str], bool]) -> None:
        """mode: see `encode.Encoder`. tokens: texts of the control tokens. can_write: tells whether the
        characters of one have ids of their own.
        """
        self.mode, self._control, self._can_write = mode, pattern(tokens), cache(can_write)

    def of(
        self, messages: list[dict], tools: list | None, trained: Set[int] = frozenset()
    ) -> tuple[list[dict], list | None, tuple[str, ...]]:
        """(messages, tools) with control tokens marked as the mode says, and a note on each of a message.

        trained: indices of the messages that are trained on. Raises BadRow where such a token is refused.
        """
        if self._control is None:
            return messages, tools, ()
        pairs = ((index, found(self._control, part)) for index, part in enumerate([*messages, tools or []]))
        there = {index: names for index, names in pairs if names}
        if not there:
            return messages, tools, ()
        for index, names in there.items():
            if self.mode == "error" or (self.mode == "auto" and index in trained):
                raise _refused(index, names[0], messages)
        every = dict.fromkeys(name for names in there.values() for name in names)
        as_text = [name for name in every if self.mode != "keep" and self._can_write(name)]
        if self.mode == "text" and (others := [name for name in every if name not in as_text]):
            raise BadRow(
                "control token without characters",
                f"a message contains {others[0]}, whose characters this tokenizer can't write apart from the "
                "token",
            )
        notes = tuple(
            f"{name} ({'its characters' if name in as_text else 'kept as the token'})"
            for names in there.values()
            for name in names
        )
        if marks := pattern(as_text):
            messages, tools = [marked(marks, message) for message in messages], tools and marked(marks, tools)
        return messages, tools, notes


def _refused(index: int, token: str, messages: Sequence[dict]) -> BadRow:
    """Return the reason to refuse a row. index: of the message; behind the last one: of the tools."""
    where = f"message {index + 1} ({messages[index]['role']})" if index < len(messages) else "tools"
    return BadRow(
        "control token in a content",
        f"{where} contains {token}, with which the tokenizer or the template marks parts of a conversation",
    )


def pattern(tokens: Sequence[str]) -> re.Pattern | None:
    """Pattern of the control tokens among these texts; None if there are none."""
    texts = sorted({*tokens} - BY_DESIGN, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, filter(None, texts)))) if texts else None


def strings(value: Any) -> Iterator[str]:
    """Yield every text in a message, or in a part of one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def found(control: re.Pattern, message: Any) -> list[str]:
    """Control tokens in the texts of a message, each once."""
    return list(dict.fromkeys(match[0] for text in strings(message) for match in control.finditer(text)))


def marked(control: re.Pattern, value: Any) -> Any:
    """A copy of a message, or of a part of one, in whose texts control tokens are marked."""
    if isinstance(value, str):
        return control.sub(f"{START}\\g<0>{END}", unmarked(value))
    if isinstance(value, Mapping):
        return {marked(control, key): marked(control, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [marked(control, inner) for inner in value]
    return value


def unmarked(text: str) -> str:
    """A text without marks."""
    return text.replace(START, "").replace(END, "")
