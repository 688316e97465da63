"""Begin and end tokens that rows hold already and that are added to them: each is written once.

    {"text": "<s>Hello</s>"}           bos and eos are added          ──> <s> Hello </s>
    prompt "<s>Q</s>", completion "<s>A</s>"                          ──> <s> Q A </s>
    {"content": "Hello<|im_end|>\\n"}   the template ends the answer   ──> "Hello"

Such rows were rendered before. White space outside of these tokens goes with them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from meshtune.data.tokens import TextTokenizer


def bare(parts: Sequence[list[int]], tokens: TextTokenizer) -> tuple[list[list[int]], tuple[str, ...]]:
    """(ids of a row's texts without bos and eos at their ends, a note on each that was there).

    parts: ids of (text,) or (prompt, completion). bos: what the tokenizer adds before every text, or nothing.
    """
    begin, end = tokens.prefix, tokens.tokenizer.eos_token_id
    result, notes = [], []
    for number, part in enumerate(parts):
        ids = _without_begin(part, begin, tokens.is_blank)
        if len(ids) < len(part):
            notes.append(f"begin {'the completion ' if number else ''}with {tokens.tokenizer.decode(begin)}")
        stop = _end(ids, end, tokens.is_blank)
        behind: list[int] = []
        if stop < len(ids):
            prompt = number < len(parts) - 1
            notes.append(f"end {'the prompt ' if prompt else ''}with {tokens.tokenizer.eos_token}")
            if prompt:  # the separator stays
                behind = ids[len(ids) - ids[::-1].index(ids[stop]) :]
        result.append(ids[:stop] + behind)
    return result, tuple(notes)


def _without_begin(ids: list[int], begin: list[int], is_blank: Callable[[int], bool]) -> list[int]:
    start = 0
    while begin:
        at = next((at for at in range(start, len(ids)) if not is_blank(ids[at])), len(ids))
        if ids[at : at + len(begin)] != begin:
            break
        start = at + len(begin)
    return ids[start:]


def _end(ids: list[int], end: Any, is_blank: Callable[[int], bool]) -> int:
    """Number of ids before the tokens `end` and white space at their end; all of them if there are none."""
    stop = len(ids)
    while True:
        at = next((at for at in range(stop - 1, -1, -1) if not is_blank(ids[at])), None)
        if at is None or ids[at] != end:
            return stop
        stop = at


def once(messages: Sequence[dict], begin: str, end: str) -> tuple[list[dict], tuple[str, ...]]:
    """(messages without what the template writes around them, a note on each message that had it).

    begin: text with which the template begins a conversation. end: text with which it ends an answer. Both
    "" where there is none.
    """
    result, notes = list(messages), []
    if begin and messages and (cut := _cut(messages[0], begin, first=True)) is not None:
        result[0] = cut
        notes.append(f"{begin} (begins a conversation, as the template does: written once)")
    for index, message in enumerate(result):
        answer = message["role"] == "assistant" and not message.get("tool_calls")
        if end and answer and (cut := _cut(message, end, first=False)) is not None:
            result[index] = cut
            notes.append(f"{end} (ends an answer, as the template does: written once)")
    return result, tuple(notes)


def _cut(message: dict, token: str, *, first: bool) -> dict | None:
    """A copy of a message without `token` at the beginning (first) or the end of its content; None if its
    content has none there.
    """
    content = message.get("content")
    if isinstance(content, str):
        text = _without(content, token, first)
        return None if text == content else message | {"content": text}
    if not content:
        return None
    parts = list(content)
    at = 0 if first else len(parts) - 1
    parts[at] = parts[at] | {"text": _without(parts[at]["text"], token, first)}
    return None if parts == content else message | {"content": parts}


def _without(text: str, token: str, first: bool) -> str:
    while True:
        bare = text.lstrip() if first else text.rstrip()
        if not (bare.startswith(token) if first else bare.endswith(token)):
            return text
        text = bare.removeprefix(token) if first else bare.removesuffix(token)
