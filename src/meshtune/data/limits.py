"""How large a row, and how slow a chat template, may be: beyond it a sentence ends the work, which would
go on for minutes without a word.
"""

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshtune.data.example import BadRow
from meshtune.errors import UserError

ROW_CHARACTERS = 2**22  # of one row's text: a million tokens, for which a tokenizer needs some 7 s
LINE_BYTES = 4 * ROW_CHARACTERS  # of a line of a file, or of a csv field, which is read whole
RENDER_SECONDS = 3  # of processor time: a conversation takes milliseconds, and a template can be a loop
GROWTH = 100  # characters that normalizers may make of one; NFKD makes up to 18
TOO_LONG, NOT_UTF8 = "too long", "not UTF-8"  # reasons of a BadRow


def bounded_product(one: Any, other: Any) -> Any:
    """Return `one` * `other` in a template. Raises UserError if that is too long a text or list."""
    for value, times in ((one, other), (other, one)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            _refuse_long(len(value) * times)
    return one * other


def bounded_power(base: Any, exponent: Any) -> Any:
    """Return `base` ** `exponent` in a template. Raises UserError for a number of too many digits."""
    if isinstance(base, int) and isinstance(exponent, int):
        _refuse_long(base.bit_length() * exponent)
    return base**exponent


def bounded_format(text: Any, values: Any) -> Any:
    """Return `text` % `values` in a template. Raises UserError for padding to too great a length."""
    if isinstance(text, str):
        stars = [value for value in (values if isinstance(values, tuple) else ()) if type(value) is int]
        widths = [int(digits[:20]) for digits in re.findall(r"\d+", text)]
        _refuse_long(max([0, *widths, *(map(abs, stars) if "*" in text else ())]))
    return text % values


def _refuse_long(size: int) -> None:
    if size > ROW_CHARACTERS:
        raise UserError(
            f"The chat template makes a value of size {size:,}, and at most {ROW_CHARACTERS:,} is sensible; "
            "choose another (data.chat_template)."
        )


# Jinja's own hook for the environment in which transformers renders. It also keeps constants such as
# 'x' * 10**9 from being multiplied when a template is compiled, which no signal interrupts.
ImmutableSandboxedEnvironment.intercepted_binops = frozenset(("*", "**", "%"))
ImmutableSandboxedEnvironment.default_binop_table = {
    **ImmutableSandboxedEnvironment.default_binop_table,
    "*": bounded_product,
    "**": bounded_power,
    "%": bounded_format,
}


def checked_text(text: str) -> str:
    """Return `text`. Raises BadRow if it is too long to tokenize, or if UTF-8 can't hold it."""
    if len(text) > ROW_CHARACTERS:
        raise BadRow(
            TOO_LONG,
            f"its text has {len(text):,} characters, and at most {ROW_CHARACTERS:,} are read; split it into "
            "several rows",
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRow(NOT_UTF8, "its text is not UTF-8: it has half of a surrogate pair") from None
    return text


@contextmanager
def render_limit(conversations: int = 1) -> Iterator[None]:
    """Raise UserError in the block after RENDER_SECONDS of this thread's processor time, and 1/20 s more for
    each of `conversations` that are rendered in it.

    Only in the main thread, the only one that signals interrupt; data are prepared there, and a streaming
    thread uses a template that was tried there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    until = time.thread_time() + RENDER_SECONDS + conversations / 20

    def interrupt(number: int, frame: FrameType | None) -> None:
        left = until - time.thread_time()
        if left > 0.01:  # the timer counts all threads of the process
            signal.setitimer(signal.ITIMER_VIRTUAL, left)
            return
        raise UserError(
            f"The chat template ran for more than {RENDER_SECONDS} s, and may never end; choose another "
            "(data.chat_template)."
        )

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def growth(component: Any) -> float:
    """The most characters that a normalizer or decoder makes of one, at least 1.

    component: as tokenizer.json describes it: a mapping with "type", or None.
    """
    if not isinstance(component, dict):
        return 1.0
    most = 1.0
    for parts in (component.get("normalizers"), component.get("decoders")):
        for part in parts or ():
            most *= growth(part)
    if component.get("type") == "Prepend":
        most *= 1 + len(component["prepend"])
    if component.get("type") == "Replace":
        pattern = component["pattern"].get("String") or ""  # a regular expression may match one character
        most *= max(1.0, len(component["content"]) / max(1, len(pattern)))
    return most
