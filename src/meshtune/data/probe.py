"""Find out, by rendering with it, how a chat template writes a message, and which fields it leaves out.

writes(render)   once per template: can it write text parts, and how does it want a tool call's arguments?
adapted(message) a message in the form that it can write
unwritten(…)     what it leaves out of one conversation
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from meshtune.data.example import BadRow
from meshtune.data.messages import with_arguments
from meshtune.data.thought import REASONING, thought_in

Render = Callable[
    [list[dict], bool, list | None], str | BadRow
]  # messages, with the generation prompt?, tools

OTHER = "zqx"  # a value that stands for another text, to see whether a field is written at all
CALL_ID = "call00001"  # of nine characters, as Mistral's templates demand
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city."}},
            "required": ["city"],
        },
    },
}


class Writes(NamedTuple):
    """Forms of a message that a template writes."""

    parts: bool  # content that is a list of text parts
    arguments: Literal["object", "text"] | None  # of a tool call; None: it writes neither
    call_content: (
        str | None
    )  # content beside tool calls alone: "", or None where it writes them beside nothing else


def writes(render: Render) -> Writes:
    """Render small conversations to find out what a template can write."""
    texts = ["Alpha beta", "gamma delta", "Epsilon", "zeta eta"]
    parts = [{"type": "text", "text": text} for text in texts]
    turns = [{"role": "user", "content": parts[:2]}, {"role": "assistant", "content": parts[2:]}]
    rendered = render(turns, False, None)
    arrived = isinstance(rendered, str) and all(text in rendered for text in texts)
    as_a_value = isinstance(rendered, str) and ("'type'" in rendered or '"type"' in rendered)
    return Writes(arrived and not as_a_value, *_tool_calls(render))


def _tool_calls(render: Render) -> tuple[Literal["object", "text"] | None, str | None]:
    """(arguments, call_content) of Writes: the first of the four forms that the template writes."""
    forms: dict[Literal["object", "text"], Any] = {"object": {"city": "Paris"}, "text": '{"city": "Paris"}'}
    for content in ("", None):
        for form, arguments in forms.items():
            rendered = render(call_turns(content, arguments), False, [TOOL])
            # As text the arguments stand there as they are: quotes that are escaped were encoded twice.
            wanted = "Paris" if form == "object" else arguments
            if isinstance(rendered, str) and wanted in rendered and "{'city'" not in rendered:
                return form, content
    return None, ""


def call_turns(content: str | None, arguments: Any) -> list[dict]:
    """A conversation in which the assistant calls TOOL. content: beside the call."""
    function = {"name": "look_up", "arguments": arguments}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "name": "look_up", "content": "Sunny"},
        {"role": "assistant", "content": "Yes"},
    ]


def adapted(message: dict, can: Writes) -> dict:
    """A message with content and arguments in a form that the template can write.

    Text parts that it can't write are joined by a space, as transformers' server joins them.
    """
    if isinstance(message.get("content"), list) and not can.parts:
        message = message | {"content": " ".join(part["text"] for part in message["content"])}
    if message.get("tool_calls"):
        if can.arguments == "text":
            calls = [with_arguments(call, json.dumps) for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        if not message.get("content"):
            message = message | {"content": can.call_content}
    return message


class Unwritten(NamedTuple):
    """A field or message that a template leaves out of a conversation."""

    message: int | None  # index; None: of the whole conversation
    what: str


def unwritten(
    messages: Sequence[dict], tools: list | None, rendering: str, whole: str, render: Render
) -> Iterator[Unwritten]:
    """Yield what the template leaves out of a conversation.

    rendering: what the template writes. whole: the text that is trained on, with thoughts that were added.

    Looked at are tools, system and developer prompts, tool results, reasoning and tool calls. What does not
    stand in `whole` as it is, is replaced by another value and rendered again: if nothing changes, the
    template leaves it out.
    """

    def left_out(index: int, change: dict) -> bool:
        changed = [*messages[:index], messages[index] | change, *messages[index + 1 :]]
        return render(changed, False, tools) == rendering

    for index, message in enumerate(messages):
        if message["role"] == "user":
            continue
        prompt = message.get("content") if message["role"] in ("system", "developer", "tool") else None
        if prompt and not stands_in(prompt, whole) and left_out(index, {"content": OTHER}):
            yield Unwritten(index, f"messages of the role {message['role']}")
        for key in REASONING:
            text = message.get(key)
            if text and not stands_in(text, whole) and left_out(index, {key: OTHER}):
                yield Unwritten(index, key)
        thought = thought_in(message.get("content")) if message["role"] == "assistant" else ""
        if thought and thought not in whole:
            yield Unwritten(index, "thought in the content")
        calls = message.get("tool_calls")
        if calls and not stands_in(calls, whole):
            others = [with_arguments(call, _other_arguments) for call in calls]
            if left_out(index, {"tool_calls": others}):
                yield Unwritten(index, "tool_calls")
    as_they_are = tools and json.dumps(tools[0], ensure_ascii=False) in whole
    if tools and not as_they_are and render(list(messages), False, None) == rendering:
        yield Unwritten(None, "tools")


def _other_arguments(arguments: Any) -> Any:
    return OTHER if isinstance(arguments, str) else {OTHER: OTHER}


def stands_in(value: Any, whole: str) -> bool:
    """Whether every text in a JSON value, its keys apart, stands in `whole` as it is."""
    if isinstance(value, dict):
        return all(stands_in(inner, whole) for key, inner in value.items() if key not in ("type", "id"))
    if isinstance(value, list):
        return all(stands_in(inner, whole) for inner in value)
    return not isinstance(value, str) or value.strip() in whole
