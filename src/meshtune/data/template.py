"""Choose the chat template: the tokenizer's own, a built-in or a file, with the tokens that it declares."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from meshtune.data.example import ROW_CHARACTERS
from meshtune.data.probe import ANSWER, QUESTION
from meshtune.data.tokens import id_bound
from meshtune.errors import UserError, check_file, expanded, written
from meshtune.setting import is_template

HEADER = r"^\s*-?\s*(special tokens|an answer ends with):[ \t]*(.*?)\s*$"  # of a template's opening comments
COMMENT = r"\s*\{#[-+]?(.*?)[-+]?#\}"
BUILT_IN = Path(__file__).parent / "templates"


def built_in_templates() -> list[str]:
    """The names that `data.chat_template` knows."""
    return sorted(file.stem for file in BUILT_IN.glob("*.jinja"))


def apply_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> list[str]:
    """Set the tokenizer's chat template; return the tokens added to its vocabulary.

    `chat_template` is a built-in's name, "training" (see training.py), a file or the Jinja text; None (the
    tokenizer's own) and "none" (no template) change nothing. The comments at its beginning may say
    `special tokens: A B`, which are added where missing, and `an answer ends with: A`, which becomes the
    tokenizer's eos token, so that generation stops where training ends an answer (`eos` keeps the one there
    is). The model's embeddings must then be resized. A second call with the same template adds nothing.

    Raises UserError for a name that is neither built in nor a file, if the template needs an eos token that
    the tokenizer lacks, and for an end token that is in neither the vocabulary nor the comment.
    """
    if chat_template is None or chat_template == "none":
        return []
    if chat_template == "training":
        tokenizer.chat_template = training_template(tokenizer)
        return []
    text = _template_text(chat_template)
    header = _header(text)
    tokens = header.get("special tokens", "").replace(",", " ").split()
    end = header.get("an answer ends with", "eos")
    if end == "eos" and tokenizer.eos_token is None and "eos_token" in text:
        raise UserError(
            f"The chat template {chat_template} ends answers with the eos token, but the tokenizer has none. "
            "Use data.chat_template=chatml, which brings its own."
        )
    before = tokenizer.get_vocab()
    if end not in ("eos", *tokens, *before):
        raise UserError(
            f"The chat template {chat_template} says in its opening comments that an answer ends with "
            f"{written(end)}, which the tokenizer's vocabulary does not have. Name a token of it, or let the "
            f"comment add one: special tokens: {end}."
        )
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    missing = [token for token in tokens if token not in special]
    if missing:
        _place_behind(tokenizer, [token for token in missing if token not in before])
        # A token that the vocabulary has as plain text is not split off whole until it is marked special.
        tokenizer.add_special_tokens(
            {"additional_special_tokens": missing}, replace_extra_special_tokens=False
        )
    if end != "eos":
        tokenizer.eos_token = end
    tokenizer.chat_template = text
    return [token for token in tokens if token not in before]


def _header(text: str) -> dict[str, str]:
    """The entries of HEADER in the comments at the beginning of a template, by their names."""
    entries, at = [], 0
    while comment := re.compile(COMMENT, re.DOTALL).match(text, at):
        entries += re.findall(HEADER, comment[1], re.M | re.I)
        at = comment.end()
    return {name.lower(): value for name, value in entries}


def _place_behind(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Give new tokens ids behind the largest one, where the vocabulary has gaps.

    The libraries take the number of tokens as the next id, which another token then has. The new ones are put
    into the vocabulary itself, since tokenizer.json keeps ids of no others. Raises UserError for a tokenizer
    to which that can't be done.
    """
    bound = id_bound(tokenizer)
    if not tokens or bound == len(tokenizer):
        return
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend else {}
    if not isinstance(state.get("model", {}).get("vocab"), dict):
        raise UserError(
            f"The tokenizer has {len(tokenizer):,} tokens and ids up to {bound - 1:,}, so "
            f"{', '.join(tokens)} can't be added behind them. Use a template without new tokens, such as "
            "data.chat_template=alpaca."
        )
    state["model"]["vocab"] |= {token: bound + number for number, token in enumerate(tokens)}
    backend.model = type(backend).from_str(json.dumps(state)).model


def check_variables(variables: Mapping[str, Any], template: str | None) -> None:
    """Raise UserError for variables (data.chat_template_kwargs) that the template does not read.

    template: its source; None: no template is in force.
    """
    if not variables:
        return
    if template is None:
        raise UserError(
            f"data.chat_template_kwargs has {', '.join(variables)}, but no chat template is in force."
        )
    own = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    if taken := [name for name in variables if name in own or name == "messages"]:
        raise UserError(f"data.chat_template_kwargs has {', '.join(taken)}, which meshtune sets itself.")
    if unread := [name for name in variables if not re.search(rf"\b{re.escape(name)}\b", template)]:
        raise UserError(
            f"data.chat_template_kwargs has {', '.join(unread)}, which the chat template does not read."
        )


def _template_text(chat_template: str) -> str:
    if is_template(chat_template):
        return chat_template
    if chat_template in built_in_templates():
        return (BUILT_IN / f"{chat_template}.jinja").read_text(encoding="utf-8")
    file = expanded(chat_template)
    try:
        check_file(file)
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"The chat template {file} is not UTF-8 text.") from None
    except OSError:
        raise UserError(
            f"data.chat_template={chat_template[:80]} is neither a file nor a built-in template "
            f"({', '.join(built_in_templates())}). null uses the tokenizer's own, training "
            "its training form, none uses none."
        ) from None


# A template that writes every assistant turn as it writes the last one #

# Templates of reasoning models leave thoughts out of what was said before, so the answer that a model gave in
# an earlier turn is not the one that stands there. The changed template is equal to the original for every
# conversation that ends with its only assistant turn, and keeps what was said before as it was generated.


# Each rule: a pattern in the source of a template, and what stands there in the changed one.
RULES: tuple[tuple[str, str], ...] = (
    # Qwen3, 3.5 and 3.6, GLM-4.5, Gemma 4, LFM2.5: thoughts are written after the last user turn only.
    (r"loop\.index0 > \w+\.last_(?:query|user)_(?:index|idx)\b", "true"),
    # Nemotron 3: the same, the other way round.
    (r"loop\.index0 < \w+\.last_user_idx\b", "false"),
    # Qwen3: an answer without a thought has an empty one only if it is the last message.
    (r"loop\.last or \(not loop\.last and reasoning_content\)", "true"),
    # gpt-oss: only the last message has its thought and ends with <|return|>; a call loses its thought to the
    # answer that follows.
    (r"loop\.last and not add_generation_prompt\b", "true"),
    (r"not future_final_message\.found\b", "true"),
    # DeepSeek R1's distillations and V3.1: the thought that the generation prompt opens is in no message.
    (
        r"\{\{'<｜Assistant｜>' \+ content \+ '<｜end▁of▁sentence｜>'\}\}",
        "{%- if loop.last %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- else %}"
        "{{'<｜Assistant｜><think>\\n' + (message['reasoning_content'] or (message['content']"
        ".split('</think>')[0].split('<think>')[-1] if '</think>' in message['content'] else '')).strip() + "
        "'\\n</think>\\n\\n' + content.lstrip('\\n') + '<｜end▁of▁sentence｜>'}}{%- endif %}",
    ),
)
SINGLE_TURNS = tuple(
    (QUESTION, ANSWER | extra)
    for extra in ({}, {"reasoning_content": "Hm."}, {"content": "<think>\nHm.\n</think>\n\nYes"})
)


def training_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's own chat template, changed by RULES; unchanged where none applies.

    Raises UserError without a template, and if a conversation of one turn is written otherwise than before.
    """
    original = tokenizer.chat_template
    if not isinstance(original, str):
        has = "has none" if original is None else f"has several ({', '.join(original)})"
        raise UserError(
            f"data.chat_template=training changes the tokenizer's template, but it {has}; "
            "name a file with one."
        )
    changed = original
    for pattern, replacement in RULES:
        changed = re.sub(pattern, lambda _, text=replacement: text, changed)
    for messages in SINGLE_TURNS:
        before, after = (_written(tokenizer, list(messages), template) for template in (original, changed))
        if before != after:
            raise UserError(
                "data.chat_template=training would change what the tokenizer's template writes of one turn; "
                "use data.split_turns=true, which leaves the template as it is."
            )
    return changed


def _written(tokenizer: PreTrainedTokenizerBase, messages: list[dict], template: str) -> str:
    """The rendering of a conversation; why it failed if the template refuses it. Raises UserError if slow."""
    try:
        with render_limit():
            return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except UserError:
        raise
    except Exception as error:  # a template is a program of its own
        return str(error)


# How slow a chat template may be, and how large what it writes #


RENDER_SECONDS = 3  # of processor time: a conversation takes milliseconds, and a template can be a loop


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
