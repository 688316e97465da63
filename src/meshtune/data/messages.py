"""The messages of a conversation, as files have them, in one form; and which of them a row trains on.

{"from": "gpt", "value": …}                     ─┐
{"role": …, "content": [{"type": "text", …}]}    ├─> {"role", "content", …}   for the chat template
{"function": {"arguments": "{\\"a\\": 1}"}}        ─┘   arguments are objects, content is text or text parts
weight, train, training                         ───> Mask: train on this message, or not
"""

import json
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any, NamedTuple

from meshtune.data.example import BadRow, Mask, is_absent
from meshtune.errors import type_name, written

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",  # its value is the JSON of one call or of a list of them
}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text")  # types of content parts, as OpenAI's two APIs name them
MASKS = ("weight", "train", "training")  # keys of a message: OpenAI's and Mistral's; axolotl's
MASKS_WITHIN = ("train_detail", "training_detail")  # axolotl's, of parts of a message


def turns_of(*contents: Any) -> list[dict[str, Any]]:
    """Messages of the user and the assistant in turn."""
    roles = cycle(("user", "assistant"))
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def message_of(value: Any, number: int, roles: Mapping[str, str]) -> tuple[dict, Mask | None]:
    """Return (a message as a chat template takes it, its mask or None where it has none).

    The message has `role` and the other keys of `value` that are neither empty nor masks; ShareGPT's keys are
    renamed; empty content parts are left out; with tool calls `content` may be missing. Raises BadRow for
    wrong types, unknown roles, parts that aren't text, and arguments that aren't a JSON object. number: its
    place in the conversation, from 1, for errors. roles: their names to ours, where data.roles maps them.
    """
    try:
        return _message(value, roles)
    except BadRow as bad:
        raise BadRow(bad.reason, f"message {number}: {bad}") from None


def _message(value: Any, roles: Mapping[str, str]) -> tuple[dict, Mask | None]:
    if not isinstance(value, dict):
        raise BadRow("wrong type", f"it is {type_name(value)}, expected an object")
    if "from" in value and "role" not in value:
        message = _from_sharegpt(value, roles)
    else:
        message = _filled(value)
        if isinstance(message.get("role"), str):
            message["role"] = roles.get(message["role"], message["role"])
        if message.get("role") not in ROLES:
            shown = repr(message["role"]) if "role" in message else "missing"
            expected = f"expected one of {', '.join(ROLES)} (data.roles maps others)"
            raise BadRow("unknown role", f"the role is {shown}, {expected}")
    mask = _take_mask(message)
    if isinstance(call := message.pop("function_call", None), dict):  # OpenAI's form before tool_calls
        message.setdefault("tool_calls", [{"type": "function", "function": call}])
    if (calls := message.get("tool_calls")) is not None:
        if not is_list_of_objects(calls):
            raise BadRow("wrong type", f"tool_calls is {type_name(calls)}, expected a list of objects")
        message["tool_calls"] = [with_arguments(call, _arguments) for call in calls]
    for key in REASONING:
        if not isinstance(message.get(key, ""), str):
            raise BadRow("wrong type", f"{key} is {type_name(message[key])}, expected text")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [{"type": "text", "text": _part_text(part)} for part in content] or ""
    elif content is None and not (message["role"] == "assistant" and calls):
        raise BadRow("message without content", f"no content ({message['role']})")
    elif not isinstance(content, str | None):
        raise BadRow("wrong type", f"content is {type_name(content)}, expected text")
    return message, mask


def _filled(message: dict) -> dict:
    """A message without the keys and the content parts that hold nothing.

    Text of the content stays as it is: "[]" may be an answer.
    """
    kept = ("content", *MASKS_WITHIN)
    filled = {key: inner for key, inner in message.items() if key in kept or not is_absent(inner)}
    content = filled.pop("content", None)
    if isinstance(content, list):
        content = [part for part in content if not _is_empty_part(part)]
    return filled if content is None else filled | {"content": content}


def _is_empty_part(part: Any) -> bool:
    """Whether a content part is null or {}, or what it has under the name of its type is empty."""
    if not isinstance(part, Mapping) or not part:
        return is_absent(part)
    kind = part.get("type")
    value = part.get("text" if kind in TEXT_PARTS else kind, part)
    return value == "" if isinstance(value, str) else is_absent(value)


def _from_sharegpt(value: dict, roles: Mapping[str, str]) -> dict:
    """Rename ShareGPT's from and value to role and content; a function_call's value becomes tool_calls.

    Raises BadRow for an unknown sender or call. roles: see `message_of`.
    """
    sender, known = value["from"], SHAREGPT_ROLES | dict(roles)
    if not isinstance(sender, str) or sender not in known:
        names = f"expected one of {', '.join(known)}; data.roles maps more"
        raise BadRow("unknown role", f"the sender is {written(sender)}, {names}")
    others = {key: inner for key, inner in value.items() if key not in ("from", "value")}
    message = _filled({"role": known[sender], "content": value.get("value"), **others})
    if sender == "function_call" and sender not in roles:
        message["tool_calls"], message["content"] = _function_calls(value.get("value")), ""
    return message


def _function_calls(value: Any) -> list[dict]:
    """Return tool_calls from the JSON of one call {name, arguments}, or of a list of them.

    Raises BadRow for anything else.
    """
    try:
        calls = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        raise BadRow("broken JSON", "the value of a function_call is not JSON") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadRow("wrong type", "the value of a function_call is not an object with a name")
    return [{"type": "function", "function": call} for call in calls]


def _take_mask(message: dict) -> Mask | None:
    """Remove the mask from a message and return it; None if it has none.

    Raises BadRow if it is not 0, 1, true or false, if two of them contradict each other, and for a mask of
    parts of the message.
    """
    for key in MASKS_WITHIN:
        if message.pop(key, None) is not None:
            raise BadRow(f"{key} is not supported", f"{key} masks parts of a message")
    values = {key: value for key in MASKS if (value := message.pop(key, None)) is not None}
    for key, value in values.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRow(
                f"{key} is neither 0 nor 1",
                f"{key} is {json.dumps(value, default=str)[:40]}; a message is trained on (1 or true) or not "
                "(0 or false)",
            )
    masks = [Mask(bool(value), key) for key, value in values.items()]
    if len({mask.trained for mask in masks}) > 1:
        raise BadRow("masks contradict each other", f"{' and '.join(values)} contradict each other")
    return masks[0] if masks else None


def _arguments(arguments: Any) -> dict:
    """The arguments of a call, written as an object or as its JSON text. Raises BadRow otherwise."""
    if isinstance(arguments, str):  # as OpenAI's API writes them
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise BadRow(
                "arguments are not JSON",
                f"the arguments of a tool call are text that is not JSON: {written(arguments[:40])}",
            ) from None
    if not isinstance(arguments, dict):
        found = f"the arguments of a tool call are {type_name(arguments)}"
        raise BadRow("wrong type", f"{found}, expected an object")
    return arguments


def with_arguments(call: dict, change: Callable[[Any], Any]) -> dict:
    """A tool call, {function: {name, arguments}} or {name, arguments}, with changed arguments; a copy.

    Without arguments (null, or none) it is returned as it is.
    """
    function = call.get("function")
    if isinstance(function, dict):
        if function.get("arguments") is None:
            return call
        return call | {"function": function | {"arguments": change(function["arguments"])}}
    return call if call.get("arguments") is None else call | {"arguments": change(call["arguments"])}


def is_empty(message: dict) -> bool:
    """Whether an assistant's message has neither text nor tool calls."""
    content = message.get("content")
    texts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
    return not message.get("tool_calls") and not any(text.strip() for text in texts)


def _part_text(part: Any) -> str:
    """The text of a content part, {"type": "text", "text": …}. Raises BadRow for any other part."""
    if not isinstance(part, dict):
        raise BadRow("wrong type", "content is a list, but not of objects")
    kind, text = part.get("type"), part.get("text")
    if kind not in TEXT_PARTS:
        raise BadRow(
            f"content part of type {kind}",
            f"a content part is of type {written(kind)}; meshtune trains on text, so each must be of type "
            "text",
        )
    if not isinstance(text, str):
        has = f"the part has {', '.join(map(str, part))}"
        raise BadRow("wrong type", f"a text part's text is {type_name(text)}, expected text ({has})")
    return text


def is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(inner, dict) for inner in value)


# Thoughts of reasoning models #

# <|Assistant|><think>\n                       generation prompt of DeepSeek-R1's distillations
# <|Assistant|>Yes<eos>                        what their template writes of an answer
# <|Assistant|><think>\n\n</think>\n\nYes<eos>   what is trained on: the thought is closed first
#
# A prompt may also close an empty thought (Gemma 4, QwQ) that the answers written by its template lack: it is
# written before them.


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
