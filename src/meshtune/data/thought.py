"""Thoughts of reasoning models: those in a message, and those that a generation prompt opens.

<|Assistant|><think>\\n                       generation prompt of DeepSeek-R1's distillations
<|Assistant|>Yes<eos>                        what their template writes of an answer
<|Assistant|><think>\\n\\n</think>\\n\\nYes<eos>   what is trained on: the thought is closed first

A prompt may also close an empty thought (Gemma 4, QwQ) that the answers written by its template lack: it is
written before them.
"""

from typing import NamedTuple

REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message that transformers knows
MARKERS = {  # opening -> closing
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|channel>thought": "<channel|>",
}


class Opened(NamedTuple):
    """A thought that a generation prompt opens."""

    before: str  # the prompt up to the opening marker
    marker: str
    space: str  # white space behind it

    @property
    def closing(self) -> str:
        """Text between the thought and the answer, with line breaks if the marker has one behind it."""
        return f"{self.space}{MARKERS[self.marker]}{self.space * 2}"


def opened(prompt: str) -> Opened | None:
    """The thought that a generation prompt ends in, None where it ends in none."""
    stripped = prompt.rstrip()
    if not stripped.endswith(tuple(MARKERS)):
        return None
    marker = next(marker for marker in MARKERS if stripped.endswith(marker))
    return Opened(stripped.removesuffix(marker), marker, prompt[len(stripped) :])


def thought_in(content: object) -> str:
    """The thought that text content starts with, between its markers; empty where there is none."""
    if not isinstance(content, str):
        return ""
    for opening, closing in MARKERS.items():
        if closing in content:
            return content.partition(closing)[0].strip().removeprefix(opening).strip()
    return ""


def thought_of(message: dict) -> str:
    """The thought of a message, in a key of its own or in its content; empty where there is none."""
    keys = (message[key] for key in REASONING if message.get(key))
    return str(next(keys, "")).strip() or thought_in(message.get("content"))


def closed(prompt: str) -> Opened | None:
    """The empty thought that a generation prompt ends with, None where it ends with none."""
    stripped = prompt.rstrip()
    for marker, closing in MARKERS.items():
        if stripped.endswith(closing) and (thought := opened(stripped.removesuffix(closing))):
            return thought if thought.marker == marker else None
    return None


def _empty_before(answer: str) -> str:
    """The empty thought that an answer begins with before another thought; "" where it has none."""
    for marker, closing in MARKERS.items():
        begin, found, rest = answer.partition(marker)
        inside, end, rest = rest.partition(closing) if found and not begin.strip() else ("", "", "")
        if end and not inside.strip() and rest.lstrip().startswith(marker):
            return answer[: len(answer) - len(rest.lstrip())]
    return ""


def with_thought(prompt: str, text: str, message: dict, template: str) -> str:
    """Write the thought of the generation prompt into a text whose answer lacks it.

    A thought that the prompt opens is the message's own, or empty; of one that the prompt closes, which is
    empty, the message must have none. prompt: generation prompt of the conversation before `message`. text:
    the conversation up to and with it. template: source of the chat template. The text is returned as it is
    if the prompt has no thought, if the template writes one itself, or if it does not know how a thought is
    closed. An empty thought that the template writes before one in the content is left out.
    """
    thought = opened(prompt) or closed(prompt)
    if thought is None and text.startswith(prompt) and thought_in(message.get("content")):
        return prompt + text[len(prompt) :].removeprefix(_empty_before(text[len(prompt) :]))
    if thought is None or MARKERS[thought.marker] not in template or not text.startswith(thought.before):
        return text
    answer = text[len(thought.before) :]
    if answer.startswith(thought.marker):
        return text
    own = thought_of(message)
    if opened(prompt) is None:
        return text if own else prompt + answer
    if answer.lstrip().startswith(MARKERS[thought.marker]):  # the template closes it (GLM-4.7-Flash)
        return prompt + own + thought.space * bool(own) + answer.lstrip()
    return prompt + own + thought.closing + answer.lstrip("\n")
