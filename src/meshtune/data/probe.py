"""Find out, by rendering with it, how a chat template writes a message, and which fields it leaves out.

writes(render)   once per template: can it write text parts, and how does it want a tool call's arguments?
adapted(message) a message in the form that it can write
unwritten(…)     what it leaves out of one conversation
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from meshtune.data.example import BadRow
from meshtune.data.messages import REASONING, thought_in, turns_of, with_arguments
from meshtune.data.tokens import common_prefix

Render = Callable[
    [list[dict], bool, list | None], str | BadRow
]  # messages, with the generation prompt?, tools

CONVERSATION = turns_of("Hello", "Yes", "Again", "No")
QUESTION, ANSWER = CONVERSATION[:2]
OTHER = "zqx"  # a value that stands for another text, to see whether a field is written at all
LONG_TEXT = 12  # characters from which a text stands nowhere by chance
KNOWN = {"role", "content", "tool_calls", "tool_call_id", *REASONING}  # keys that are looked at one by one
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

    text: bool  # content that is text; False only where it writes a list of text parts
    parts: int  # text parts of one message: 0, 1 (the first one) or 2 (all)
    arguments: Literal["object", "text"] | None  # of a tool call; None: it writes neither
    call_content: str | None  # content with which it writes tool calls that have none with them
    moved: bool = False  # whether a thought in the content is written right only as reasoning_content


def writes(render: Render) -> Writes:
    """Render small conversations to find out what a template can write."""

    def arrives(question: Any, answer: Any, *texts: str) -> bool:
        rendered = render(turns_of(question, answer), False, None)
        return (
            isinstance(rendered, str)
            and all(text in rendered for text in texts)
            and not ("'type'" in rendered or '"type"' in rendered)
        )

    first, second, third, fourth = texts = ["Alpha beta", "gamma delta", "Epsilon", "zeta eta"]
    parts = [text_part(text) for text in texts]
    number = 2 if arrives(parts[:2], parts[2:], *texts) else int(arrives(parts[:1], parts[2:3], first, third))
    text = number == 0 or arrives(second, fourth, second, fourth)
    whole: Render = render if text else lambda messages, *rest: render([*map(in_parts, messages)], *rest)
    return Writes(text, number, *_tool_calls(whole), moved=_only_as_a_field(whole))


def _only_as_a_field(render: Render) -> bool:
    """Whether a template writes an empty thought before one in the content, and one in reasoning_content well
    (Kimi-K2-Thinking). Where the generation prompt opens the thought, the empty one is only </think>.
    """
    answers = {"content": "<think>\nHm\n</think>\n\nYes"}, {"reasoning_content": "Hm"}
    first, second = (str(render([QUESTION, ANSWER | more], False, None)) for more in answers)
    return first.count("</think>") == second.count("</think>") + 1 and "Hm" in second


def text_part(text: str) -> dict[str, str]:
    """Return a content part."""
    return {"type": "text", "text": text}


def in_parts(message: dict) -> dict:
    """Return a message whose text content is a list of one part."""
    content = message.get("content")
    return message | {"content": [text_part(content)]} if isinstance(content, str) and content else message


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
    """A conversation in which the assistant calls TOOL. content: next to the call."""
    function = {"name": "look_up", "arguments": arguments}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return [
        QUESTION,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "name": "look_up", "content": "Sunny"},
        ANSWER,
    ]


def adapted(message: dict, can: Writes) -> dict:
    """A message with content and arguments in a form that the template can write.

    Text parts that it can't write are joined by a space, as transformers' server joins them.
    """
    content = message.get("content")
    if isinstance(content, list) and can.parts < min(2, len(content)):
        message = message | {"content": " ".join(part["text"] for part in content)}
    thought = thought_in(content) if can.moved and message["role"] == "assistant" else ""
    if thought and not any(message.get(key) for key in REASONING):
        answer = str(content).partition("</think>")[2].lstrip("\n")
        message = message | {"reasoning_content": thought, "content": answer}
    if not can.text:
        message = in_parts(message)
    if message.get("tool_calls"):
        if can.arguments == "text":
            text = partial(json.dumps, ensure_ascii=False)
            calls = [with_arguments(call, text) for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        if not message.get("content"):
            message = message | {"content": can.call_content}
    return message


class Unwritten(NamedTuple):
    """A field or message that a template leaves out of a conversation."""

    message: int | None  # index; None: of the whole conversation
    what: str
    learnable: bool  # whether an assistant turn that is trained on is incomplete without it


def unwritten(
    messages: Sequence[dict], tools: list | None, rendering: str, added: int | None, render: Render
) -> Iterator[Unwritten]:
    """Yield what the template leaves out of a conversation that it writes as `rendering`.

    added: the message whose thought is written into the text without the template (`with_thought`), or None.
    A field is replaced by another value and rendered again: if nothing changes, the template leaves it out.
    That is spared where a long text surely stands in the rendering.
    """

    for index, message in enumerate(messages):
        for what, text, change, learnable in _fields(message, rendering, added=index == added):
            if isinstance(text, str) and _is_written(text.strip(), messages, rendering):
                continue
            changed = [*messages[:index], message | change, *messages[index + 1 :]]
            if render(changed, False, tools) == rendering:
                yield Unwritten(index, what, learnable)
    if tools and render(list(messages), False, None) == rendering:
        yield Unwritten(None, "tools", False)


def _fields(message: dict, rendering: str, *, added: bool) -> Iterator[tuple[str, Any, dict, bool]]:
    """Yield (name, value, the message's keys with another value, learnable) of a message's fields to look at.

    Words of a turn are missing only with a call, or where they stand nowhere. rendering, added: see
    `unwritten`.
    """
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls") or []
    answer = role == "assistant"
    if content and (role not in ("user", "assistant") or calls or not _stands(content, rendering)):
        what = "text next to tool_calls" if calls else f"messages of the role {role}"
        yield what, content, {"content": OTHER}, answer
    if answer and not added:
        yield from ((key, message[key], {key: OTHER}, True) for key in REASONING if message.get(key))
        if thought := thought_in(content):
            changed = {"content": str(content).replace(thought, OTHER, 1)}
            yield "thought in the content", thought, changed, True
    for number, call in enumerate(calls):
        yield "tool_calls", None, {"tool_calls": [*calls[:number], _other(call), *calls[number + 1 :]]}, True
    for key in sorted(message.keys() - KNOWN):
        if message[key]:
            yield f"{key} of messages", message[key], {key: OTHER}, False


def _stands(content: Any, rendering: str) -> bool:
    """Whether all text of a message stands somewhere in the rendering."""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return all(text.strip() in rendering for text in texts)


def _is_written(text: str, messages: Sequence[dict], rendering: str) -> bool:
    """Whether a long text stands in the rendering as often as in all messages together."""
    if len(text) < LONG_TEXT:
        return False
    values = (message.get(key) for message in messages for key in ("content", *REASONING))
    return rendering.count(text) >= sum(value.count(text) for value in values if isinstance(value, str))


def _other(call: dict) -> dict:
    """The call with other arguments; with another name if it has none."""
    changed = with_arguments(call, lambda given: OTHER if isinstance(given, str) else {OTHER: OTHER})
    if changed != call:
        return changed
    function = call.get("function")
    name = {"name": OTHER}
    return call | ({"function": function | name} if isinstance(function, dict) else name)


# The generation prompt that a template writes behind every conversation #

# <user>Hello<eot><assistant>Yes<eot><assistant>      Llama 3 as first released, without add_generation_prompt
#                                    └────────┘       not a part of the answer, which ends at <eot>


def prompt_behind(render: Render, ends: Sequence[str], special: Sequence[str]) -> str:
    """Return the generation prompt that the template writes behind an answer; "" if it writes none there.

    ends: texts of the tokens that generation stops at. special: texts of all special tokens. With the middle
    of a conversation, where the next user's turn follows the answer, it shares the end marker and perhaps the
    beginning of a header: `end_of_answer` tells where one ends and the other begins.
    """
    requests = [(2, False), (2, True), (1, True), (4, False)]
    texts = [render(CONVERSATION[:number], generation, None) for number, generation in requests]
    said = [message["content"] for message in CONVERSATION]
    if any(isinstance(text, BadRow) for text in texts):
        return ""
    last, asked, head, whole = map(str, texts)
    more = asked.removeprefix(last)  # of the prompt, where it is asked for (Command A's <|START_RESPONSE|>)
    if last + more != asked or whole.startswith(last) or not all(text in whole for text in said):
        return ""
    start = whole.partition(said[0])[0]
    middle = whole.partition(said[1])[2].partition(said[2])[0]
    behind, before = last.partition(said[1])[2], head.removesuffix(more).partition(said[0])[2]
    prompt = behind[end_of_answer(behind, before, middle, start, ends, special) :]
    return prompt if prompt.strip() and head.endswith(prompt + more) else ""


def end_of_answer(
    behind: str, before: str, middle: str, start: str, ends: Sequence[str], special: Sequence[str]
) -> int:
    """Return the characters of `behind`, an end marker and a generation prompt, that are the end marker.

    before: text between the first question and its answer, with the prompt at its end. middle: between that
    answer and the next question. start: before the first question, with the user's header at its end. The
    marker goes up to a token that generation stops at, else it is what the prompt and the user's header don't
    account for.
    """
    shared = behind[: common_prefix(behind, middle)]
    stops = [place + len(end) for end in ends if (place := shared.rfind(end)) >= 0]
    least = max(
        len(behind) - common_suffix(behind, before, special),
        len(middle) - common_suffix(middle, start, special),
    )
    at = max(stops) if stops else least
    return at + len(behind[at:]) - len(behind[at:].lstrip())


def common_suffix(one: str, other: str, special: Sequence[str]) -> int:
    """Return the length of the longest common suffix that does not begin inside a special token of `one`."""
    start = len(one) - common_prefix(one[::-1], other[::-1])
    for token in special:
        place = one.find(token)
        while place >= 0:
            if place < start < place + len(token):
                start = place + len(token)
            place = one.find(token, place + 1)
    return len(one) - start
