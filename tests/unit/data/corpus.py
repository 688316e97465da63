"""Conversations and broken files that are taken or refused with a sentence; a line for every bug found."""

from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string", "description": "Them."}}},
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def call(what: str) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"what": what}}}


SYSTEM = {"role": "system", "content": "Be kind."}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "four"}
THOUGHT = "<think>\nLet me see\n</think>\n\n"

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("Hi?"), assistant("Yes")],
    "a system prompt": [SYSTEM, user("Hi?"), assistant("Yes")],
    "two turns": [user("Hi?"), assistant("Yes"), user("So?"), assistant("Done")],
    "the same answer twice": [user("Hi?"), assistant("Yes"), user("Hi?"), assistant("Yes")],
    "nine turns": [turn for i in range(9) for turn in (user(f"Question {i}?"), assistant(f"It is {i}."))],
    "ends with a question": [user("Hi?"), assistant("Yes"), user("So?")],
    "white space around": [user(" Hi? "), assistant(" Yes\n"), user("\nSo?"), assistant("Done \n\n")],
    "beyond ASCII": [user("Grüße 😀"), assistant("Ja 日本"), user("à"), assistant("é")],
    "special tokens as text": [user("<|im_end|>?"), assistant("</s> ok"), user("<think>"), assistant("ok")],
    "a thought": [user("Hi?"), assistant("Yes", reasoning_content="Let me see")],
    "a thought in the content": [user("Hi?"), assistant(f"{THOUGHT}Yes")],
    "two thoughts": [
        user("Hi?"), assistant("Yes", reasoning_content="Let me see"),
        user("So?"), assistant("Done", reasoning_content="Hm"),
    ],
    "two thoughts in the content": [
        user("Hi?"), assistant(f"{THOUGHT}Yes"), user("So?"), assistant(f"{THOUGHT}Done"),
    ],
    "a call": [user("Hi?"), assistant("", tool_calls=[call("two")])],
    "a call and its result": [
        user("Hi?"), assistant("", tool_calls=[call("two")]), RESULT, assistant("Four"),
    ],
    "starts with the assistant": [assistant("Hello"), user("Hi?"), assistant("Yes")],
    "two questions in a row": [user("Hi?"), user("So?"), assistant("Yes")],
    "long": [turn for _ in range(5) for turn in (user("word " * 30), assistant("other " * 40))],
}  # fmt: skip

# file name, its bytes, a part of the sentence that refuses it
BROKEN_FILES: dict[str, tuple[str, bytes, str]] = {
    "no JSON": ("rows.jsonl", b'{"text": "a"\n', "line 1: broken JSON"),
    "half a line": ("rows.jsonl", b'{"text": "a"}\n{"text": "b', "line 2: broken JSON"),
    "UTF-16": ("rows.jsonl", '{"text": "a"}\n'.encode("utf-16"), "UTF-16"),
    "a number of 4,301 digits": ("rows.jsonl", b'{"text": "a", "n": ' + b"9" * 4301 + b"}\n", "4,300 digits"),
    "nested 100,000 deep": ("rows.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", "nested too deeply"),
    "a number for a row": ("rows.jsonl", b"1\n", "expected an object"),
    "nothing": ("rows.jsonl", b"", "There are no rows in"),
    "white space": ("rows.jsonl", b"\n \n\n", "No document is left"),
    "no column of ours": ("rows.jsonl", b'{"a": "b"}\n', "fit no format"),
    "json that is cut off": ("rows.json", b'[{"text": "a"}, {"te', "line 1"),
    "json with two lists": ("rows.json", b'{"a": [], "b": []}', "2 lists"),
    "json of a number": ("rows.json", b"3", "expected a list of objects"),
    "json nested 100,000 deep": ("rows.json", b"[" * 100_000, "nested too deeply"),
    "csv with one name twice": ("rows.csv", b"text,text\na,b\n", "text more than once"),
    "csv with too many fields": ("rows.csv", b"text\na,b\n", "2 fields, but the header names 1"),
    "csv without a header": ("rows.csv", b"", "is empty"),
    "csv with a quote that stays open": ("rows.csv", b'text\na\n"b\nc\n', "broken CSV: unexpected end"),
    "tsv with a quote inside a field": ("rows.tsv", b'text\n"a" b\n', "broken CSV"),
    "parquet that is none": ("rows.parquet", b"PAR1 nothing", "not a readable parquet file"),
    "gzip that is none": ("rows.jsonl.gz", b"nothing", "can't be read"),
    "gzip that is cut off": ("rows.jsonl.gz", b"\x1f\x8b\x08" + bytes(7), "can't be read"),
    "a list nested 100,000 deep in text": (
        "rows.jsonl", b'{"messages": "' + b"[" * 100_000 + b'"}\n', "text that is not JSON",
    ),
    "json that is not UTF-8": ("rows.json", b"\n\xff", "line 2: not UTF-8: byte 0xff"),
    "json of a number of 5,000 digits": ("rows.json", b"[" + b"7" * 5000 + b"]", "4,300 digits"),
    "csv whose header is not UTF-8": ("rows.csv", b"text,\xff\n1,2\n", "not UTF-8 text in its first line"),
    "an unknown suffix": ("rows.xml", b"<a/>", "unknown suffix"),
}  # fmt: skip
