"""Examples to token ids and an exact label mask.

    Example ──> texts ──> ids (one call of the fast tokenizer for many rows) ──> Document(ids, labelled)

The labels of a chat template are exact or the row is refused. The answer in turn i lies between two
renderings of the conversation's beginning:

    head = render(messages[:i], generation prompt)      the model's input when it starts to answer
    upto = render(messages[:i + 1])                     the same text with the answer
    full = render(messages)                             the whole conversation

    full: <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n<|im_start|>user\\n...
          └───────────────────── head ─────────────────────────────────┘
          └───────────────────── upto ─────────────────────────────────────────────────────┘

Both must be prefixes of `full` as text, and their tokens must be prefixes of `full`'s tokens. Where either
fails (a template that rewrites earlier turns, a merge across the boundary) the row is refused with the
reason. The answer ends with its end marker: the first token of the trailing run of special tokens and white
space that generation stops at. Many templates write a line break after it; a model never generates that, so
it is not labelled.

Templates run in transformers' immutable Jinja sandbox and nowhere else.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from meshtune.data.example import SHOWN, BadRow, Dropped, Example, Mask, OnBadRow
from meshtune.data.probe import Writes, adapted, unwritten, writes
from meshtune.data.rows import last_answer, no_answer
from meshtune.errors import UserError

TrainOn = Literal["assistant", "completion", "all"]

BUILT_IN = Path(__file__).parent / "templates"
VERSION = 2  # part of the cache's key: raise it when the same rows become other ids or labels
TOKENIZER_ROWS = 1024  # rows in one call of the tokenizer, which bounds its memory


@dataclass(frozen=True)
class Document:
    """The tokens of one example."""

    ids: np.ndarray  # int32 [tokens]
    labelled: np.ndarray  # bool [tokens], true where the token is to be predicted; never the first
    unwritten: tuple[str, ...] = ()  # what the chat template leaves out, once for each message that has it


# --- the template in force ----------------------------------------------------------------------------------


def built_in_templates() -> list[str]:
    """The names that `data.chat_template` knows."""
    return sorted(file.stem for file in BUILT_IN.glob("*.jinja"))


def apply_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> list[str]:
    """Set the tokenizer's chat template; return the tokens added to its vocabulary.

    `chat_template` is a built-in's name or a file; None (the tokenizer's own) and "none" (no template)
    change nothing. A template's opening comment may say `special tokens: A B`, which are added where missing,
    and `an answer ends with: A`, which becomes the tokenizer's eos token, so that generation stops where
    training ends an answer (`eos` keeps the one there is). The model's embeddings must then be resized. A
    second call with the same template adds nothing.

    Raises UserError for a name that is neither built in nor a file, and if the template needs an eos token
    that the tokenizer lacks.
    """
    if chat_template is None or chat_template == "none":
        return []
    text = _template_text(chat_template)
    comment = re.match(r"\s*\{#(.*?)#\}", text, re.DOTALL)
    entries = r"^\s*-?\s*(special tokens|an answer ends with):[ \t]*(.*?)\s*$"
    header = dict(re.findall(entries, comment[1], re.M)) if comment else {}
    tokens = header.get("special tokens", "").split()
    end = header.get("an answer ends with", "eos")
    if end == "eos" and tokenizer.eos_token is None and "eos_token" in text:
        raise UserError(
            f"The chat template {chat_template} ends answers with the eos token, but the tokenizer has none. "
            "Use data.chat_template=chatml, which brings its own."
        )
    before = tokenizer.get_vocab()
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    missing = [token for token in tokens if token not in special]
    if missing:
        # A token that the vocabulary has as plain text is not split off whole until it is marked special.
        tokenizer.add_special_tokens(
            {"additional_special_tokens": missing}, replace_extra_special_tokens=False
        )
    if end != "eos":
        tokenizer.eos_token = end
    tokenizer.chat_template = text
    return [token for token in tokens if token not in before]


def _template_text(chat_template: str) -> str:
    if chat_template in built_in_templates():
        return (BUILT_IN / f"{chat_template}.jinja").read_text(encoding="utf-8")
    file = Path(chat_template).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"The chat template {file} is not UTF-8 text.") from None
    except OSError:
        raise UserError(
            f"data.chat_template={chat_template[:80]} is neither a file nor a built-in template "
            f"({', '.join(built_in_templates())}). null uses the tokenizer's own, none uses none."
        ) from None


# --- rows on their way to a document ------------------------------------------------------------------------

Request = tuple[list[dict], bool, list | None]  # one rendering: messages, with the generation prompt?, tools


class _Chat(NamedTuple):
    """A conversation that is still to be rendered."""

    messages: list[dict]
    tools: list | None
    turns: list[int]  # indices of the messages that are labelled, or under train_on=all of those that are not

    def requests(self) -> Iterator[Request]:
        """The rendering of the whole, then of each labelled turn's head and, unless it is the last, upto."""
        yield self.messages, False, self.tools
        for turn in self.turns:
            yield self.messages[:turn], True, self.tools
            if turn + 1 < len(self.messages):
                yield self.messages[: turn + 1], False, self.tools


class _Turn(NamedTuple):
    """A labelled turn of a rendered conversation, by two prefixes of its text."""

    number: int  # from 0
    head: str
    upto: str | None  # None: up to the end of the conversation


class _Rendered(NamedTuple):
    """A conversation as text."""

    full: str
    turns: list[_Turn]
    unwritten: tuple[str, ...] = ()  # see Document

    def texts(self) -> Iterator[str]:
        """All texts whose tokens are needed."""
        yield self.full
        for _, head, upto in self.turns:
            yield head
            if upto is not None:
                yield upto


class _Plain(NamedTuple):
    """The texts of a row without a template, which are tokenised apart: (text,) or (prompt, completion)."""

    parts: tuple[str, ...]

    def texts(self) -> tuple[str, ...]:
        return self.parts


def _unless_bad(step: Callable, row: Any, *arguments: Any) -> Any:
    """Return `step(row, *arguments)`, or the BadRow that it raises or that `row` is already."""
    if isinstance(row, BadRow):
        return row
    try:
        return step(row, *arguments)
    except BadRow as bad:
        return bad


# --- encoding -----------------------------------------------------------------------------------------------


class Encoder:
    """Turns examples into documents.

    train_on: `assistant` labels every assistant turn with its end marker, `completion` the last one only (or
    the completion), `all` everything but the first token; a message's own mask comes before it. Rows of plain
    text have no parts: all but their
    first token is labelled. Conversations end with their last assistant turn, unless everything is labelled.
    chat_template: see `apply_template`.

    Under a template, prompt and completion become a user and an assistant message. Without one, the ids are
    bos (where the tokenizer adds one) + prompt and separator + completion + eos, tokenised apart, so that the
    boundary is exact. Text is bos + text + eos.

    `apply_template` changes the tokenizer; `added` lists the tokens that it added. Rows whose labels can't be
    exact raise in `encode`; with `on_bad_row="skip"` they are left out and counted in `dropped`.

    Raises UserError if the tokenizer has no eos token where one is needed, or if there is no such template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        train_on: TrainOn,
        chat_template: str | None,
        separator: str = "\n",
        on_bad_row: OnBadRow = "error",
    ) -> None:
        if train_on not in ("assistant", "completion", "all"):
            raise UserError(f"data.train_on={train_on} is unknown; it is assistant, completion or all.")
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.separator = separator
        self.on_bad_row = on_bad_row
        self.dropped = Dropped()
        self.added = apply_template(tokenizer, chat_template)
        self.templated = chat_template != "none" and tokenizer.chat_template is not None
        if not self.templated and tokenizer.eos_token_id is None:
            raise UserError(
                "The tokenizer has no eos token, so an answer could not end. Set data.chat_template=chatml, "
                "which brings its own end marker, or give the tokenizer an eos_token."
            )
        self._special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special |= set(tokenizer.all_special_ids)
        self._special_texts = tuple(tokenizer.convert_ids_to_tokens(sorted(self._special)))
        self._blank: dict[int, bool] = {}  # token id -> True if it is white space only
        self._backend = self._fast_backend()
        self._bos = self._prefix()

    def encode(self, examples: Sequence[Example]) -> list[Document]:
        """One document for each example, in order (fewer under `on_bad_row="skip"`).

        Raises UserError with the first SHOWN rows whose labels can't be exact, and their number among these
        examples.
        """
        documents: list[Document] = []
        problems: list[str] = []
        for example, result in zip(examples, self.encode_each(examples), strict=True):
            if isinstance(result, Document):
                documents.append(result)
            elif self.on_bad_row == "skip":
                self.dropped.counts[result.reason] += 1
            else:
                problems.append(f"{example.origin}: {result}.")
        if problems:
            bad = f"{len(problems):,} of {len(examples):,} rows can't be labelled exactly. {_REMEDY}"
            raise UserError([*problems[:SHOWN], bad])
        return documents

    def encode_each(self, examples: Sequence[Example]) -> Iterator[Document | BadRow]:
        """For each example its document, or the reason why its labels can't be exact."""
        for first in range(0, len(examples), TOKENIZER_ROWS):
            yield from self._encode(examples[first : first + TOKENIZER_ROWS])

    def _encode(self, examples: Sequence[Example]) -> list[Document | BadRow]:
        """Render, then tokenize, the texts of all examples in one call each."""
        rows: list[Any] = [_unless_bad(self._unrendered, example) for example in examples]
        requests = [list(row.requests()) if isinstance(row, _Chat) else [] for row in rows]
        texts = iter(self._render_all([request for row in requests for request in row]))
        for index, row in enumerate(rows):
            if isinstance(row, _Chat):
                rows[index] = _unless_bad(self._rendered, row, list(islice(texts, len(requests[index]))))
        unique = dict.fromkeys(text for row in rows if not isinstance(row, BadRow) for text in row.texts())
        ids = dict(zip(unique, self._tokenize(list(unique)), strict=True))
        return [_unless_bad(self._document, row, ids) for row in rows]

    def prompt_ids(self, example: Example) -> list[int]:
        """The tokens that generation starts from: those before the last answer, or all of a plain text."""
        if example.text is not None or not self.templated:
            return self._bos + self._tokenize([self._plain(example).parts[0]])[0]
        messages = self._adapted(example.messages or self._messages(example))
        text = self._render(messages[: last_answer(messages)], True, example.tools)
        if isinstance(text, BadRow):
            raise UserError(f"{example.origin}: {text}.")
        return self._tokenize([text])[0]

    def answer(self, example: Example) -> str:
        """The expected answer: the completion, or the last assistant turn's text; empty for a plain text."""
        if example.messages is None:
            return example.completion or ""
        last = last_answer(example.messages)
        content = example.messages[last].get("content") if last is not None else None
        if isinstance(content, list):
            return "".join(part.get("text", "") for part in content)
        return content or ""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the template's end marker first, then the tokenizer's eos."""
        stops: list[int] = []
        if self.templated:
            turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
            head, full = self._render(turns[:1], True, None), self._render(turns, False, None)
            if isinstance(head, str) and isinstance(full, str):
                ids = self._tokenize([full])[0]
                start = len(self._tokenize([head])[0]) if full.startswith(head) else 0
                stops += [ids[index] for index in self._markers(ids, start, len(ids))[:1]]
        if self.tokenizer.eos_token_id is not None:
            stops.append(int(self.tokenizer.eos_token_id))  # pyright: ignore[reportArgumentType]
        return tuple(dict.fromkeys(stops))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides ids and labels: tokenizer, template, train_on, separator."""
        if self._backend is not None:
            vocabulary = _unpadded(self._backend).to_str()
        else:
            tokens = {id: str(token) for id, token in self.tokenizer.added_tokens_decoder.items()}
            vocabulary = repr(
                (type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items()), tokens)
            )
        template = self.tokenizer.chat_template if self.templated else None
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        settings = [self.train_on, self.separator, self._bos, self.on_bad_row]
        parts = [VERSION, vocabulary, template, special, *settings]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    # Tokenizing #

    def _fast_backend(self) -> Any:
        """The Rust tokenizer, None where calling it directly gives other ids (as in a few wrappers)."""
        if not self.tokenizer.is_fast:
            return None
        backend: Any = self.tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        probes = ["Hello  world", " a\n\nb", "".join(self._special_texts[:3]) + "x"]
        direct = [encoding.ids for encoding in backend.encode_batch(probes, add_special_tokens=False)]
        return backend if direct == self.tokenizer(probes, add_special_tokens=False)["input_ids"] else None

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """ids of each text, nothing added; special tokens written in the text are recognised."""
        if not texts:
            return []
        if self._backend is None:
            return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]
        backend = _unpadded(self._backend)
        backend.encode_special_tokens = False
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _prefix(self) -> list[int]:
        """The ids that the tokenizer adds before every text: its bos token, or nothing."""
        with_special = self.tokenizer("a")["input_ids"]
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        assert isinstance(with_special, list)
        assert isinstance(bare, list)
        for start in range(len(with_special)):
            if with_special[start : start + len(bare)] == bare:
                return with_special[:start]
        return []

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not str(self.tokenizer.decode([token])).strip()
        return self._blank[token]

    # Rendering #

    def _unrendered(self, example: Example) -> _Chat | _Plain:
        """The example as messages where a template is in force, else as texts; raises BadRow."""
        if example.text is not None or not self.templated:
            return self._plain(example)
        messages = self._messages(example)
        turns = self._turns(messages, example.masks or ())
        return _Chat(self._adapted(messages), example.tools, turns)

    def _plain(self, example: Example) -> _Plain:
        if example.text is not None:
            return _Plain((example.text,))
        if example.messages is not None:
            raise UserError(
                f"{example.origin}: the row is a conversation, but the tokenizer has no chat template or "
                "data.chat_template is none. Set data.chat_template to one of "
                f"{', '.join(built_in_templates())}, or to a file."
            )
        assert example.prompt is not None
        assert example.completion is not None
        return _Plain((example.prompt + self.separator, example.completion))

    def _messages(self, example: Example) -> list[dict]:
        """The conversation, up to its last assistant turn unless everything is labelled; raises BadRow."""
        if example.messages is None:
            return [
                {"role": "user", "content": example.prompt},
                {"role": "assistant", "content": example.completion},
            ]
        if self.train_on == "all":
            return list(example.messages)
        last = last_answer(example.messages)
        if last is None:
            raise no_answer(example.messages)
        return list(example.messages[: last + 1])

    @cached_property
    def _can(self) -> Writes:
        return writes(self._render)

    def _adapted(self, messages: Sequence[dict]) -> list[dict]:
        """The messages in the form that the template can write."""
        plain = all(
            isinstance(message.get("content"), str) and "tool_calls" not in message for message in messages
        )
        return list(messages) if plain else [adapted(message, self._can) for message in messages]

    def _turns(self, messages: list[dict], masks: Sequence[Mask | None]) -> list[int]:
        """Indices of the messages that are labelled; under train_on=all of those that are not. Raises BadRow.

        masks: of each message, or none; they come before train_on.
        """
        asked = {index: mask.trained for index, mask in enumerate(masks[: len(messages)]) if mask}
        roles = [message["role"] for message in messages]
        if self.train_on == "all":
            turns = [index for index, trained in asked.items() if not trained]
            if foreign := [index for index in turns if roles[index] != "assistant"]:
                raise _mask_of_another(
                    foreign[0], roles, masks, "data.train_on=assistant leaves out all of these"
                )
            return turns
        if foreign := [index for index, trained in asked.items() if trained and roles[index] != "assistant"]:
            raise _mask_of_another(foreign[0], roles, masks, "data.train_on=all trains on every message")
        answers = [index for index, role in enumerate(roles) if role == "assistant"]
        default = set(answers if self.train_on == "assistant" else answers[-1:])
        turns = [index for index in answers if asked.get(index, index in default)]
        if turns and turns[0] == 0:
            raise BadRow(
                "starts with the assistant",
                "the conversation starts with the assistant, so its first turn answers nothing",
            )
        return turns

    def _render_all(self, requests: Sequence[Request]) -> list[str | BadRow]:
        """Render each request; those without tools in one call of transformers per kind of ending."""
        texts: list[str | BadRow | None] = [None] * len(requests)
        for ending in (False, True):
            group = [i for i, (_, prompt, tools) in enumerate(requests) if prompt is ending and tools is None]
            if not group:
                continue
            try:
                rendered = self.tokenizer.apply_chat_template(
                    [requests[i][0] for i in group], tokenize=False, add_generation_prompt=ending
                )
            except Exception:
                continue  # the template refuses some row: rendered one by one below, to find out which
            for i, text in zip(group, rendered, strict=True):
                texts[i] = text  # pyright: ignore[reportArgumentType, reportCallIssue]
        return [
            self._render(*request) if text is None else text
            for text, request in zip(texts, requests, strict=True)
        ]

    def _render(self, messages: list[dict], generation: bool, tools: list | None) -> str | BadRow:
        """Text of a conversation, with the generation prompt if `generation`; a BadRow if that fails."""
        try:
            return self.tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
                messages, tools=tools, tokenize=False, add_generation_prompt=generation
            )
        except Exception as error:  # a template is a program of its own: it may fail in any way
            return BadRow(
                "refused by the chat template",
                f"the chat template refuses it: {type(error).__name__}: {error}",
            )

    def _rendered(self, chat: _Chat, texts: list[str | BadRow]) -> _Rendered:
        """Check that each head and upto is a prefix of the whole; raise BadRow if one is not.

        texts: the renderings of `chat.requests()`, in order; a BadRow among them is raised.
        """
        rendered = map(_raise_bad, texts)
        whole = next(rendered)
        turns = []
        for number in chat.turns:
            head = next(rendered)
            if not whole.startswith(head):
                raise BadRow("prompt is no prefix", _differ("its generation prompt", number, head, whole))
            upto = None
            if number + 1 < len(chat.messages):
                upto = self._upto(number, next(rendered), whole)
                if len(upto) < len(head):
                    raise _not_written(number)
            turns.append(_Turn(number, head, upto))
        return _Rendered(whole, turns, self._unwritten(chat, whole))

    def _unwritten(self, chat: _Chat, whole: str) -> tuple[str, ...]:
        """Names of what the template leaves out. Raises BadRow if it was to be trained on."""
        names = []
        for index, what in unwritten(chat.messages, chat.tools, whole, self._render):
            answer = index is not None and chat.messages[index]["role"] == "assistant"
            if index is not None and answer and (index in chat.turns) != (self.train_on == "all"):
                raise BadRow(
                    f"{what} is not written",
                    f"message {index + 1} (assistant): the chat template leaves out its {what}, which was to "
                    "be trained on; choose another template (data.chat_template)",
                )
            names.append(what)
        return tuple(names)

    def _upto(self, number: int, upto: str, whole: str) -> str:
        """The part of `upto` that ends with the end marker. Raises BadRow if that is no prefix of `whole`.

        number: index of the turn, for the error. upto: the conversation rendered up to this turn's answer.
        """
        eos = str(self.tokenizer.eos_token or "")
        marked = self._up_to_marker(upto)
        if not whole.startswith(marked) and eos and upto.endswith(eos):
            # Some templates (Phi-3's) close the last turn with one more eos, not there in the middle.
            marked = self._up_to_marker(upto.removesuffix(eos))
        if not whole.startswith(marked):
            raise BadRow("turn is no prefix", _differ("the end of the conversation", number, upto, whole))
        return marked

    def _up_to_marker(self, text: str) -> str:
        """`text` without white space after a final special token: its tokens depend on what follows."""
        stripped = text.rstrip()
        return stripped if stripped.endswith(self._special_texts) else text

    # Labelling #

    def _document(self, row: _Rendered | _Plain, ids: dict[str, list[int]]) -> Document:
        if isinstance(row, _Plain):
            return self._label_plain([ids[text] for text in row.parts])
        return self._label(row, ids)

    def _label_plain(self, parts: list[list[int]]) -> Document:
        """bos + the parts + eos. The last of two parts is labelled, or all of it where there is one."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise UserError(
                "Rows of plain text end with the eos token, but the tokenizer has none; give it an eos_token."
            )
        unlabelled = len(self._bos) + (len(parts[0]) if len(parts) == 2 and self.train_on != "all" else 0)
        ids = np.array([*self._bos, *(id for part in parts for id in part), eos], dtype=np.int32)
        labelled = np.ones(len(ids), dtype=bool)
        labelled[: max(1, unlabelled)] = False
        return Document(ids, labelled)

    def _label(self, rendered: _Rendered, ids: dict[str, list[int]]) -> Document:
        """Label the answers of a conversation; `ids` has the tokens of each of its texts.

        Raises BadRow if the tokens of a prefix are no prefix of the whole's tokens, or an answer is blank.
        """
        full = ids[rendered.full]
        labelled = np.full(len(full), self.train_on == "all")
        for number, head, upto in rendered.turns:
            start = len(ids[head])
            stop = len(full) if upto is None else len(ids[upto])
            if full[:start] != ids[head]:
                raise _merged("begins", number, head, rendered.full)
            if upto is not None and full[:stop] != ids[upto]:
                raise _merged("ends", number, upto, rendered.full)
            end = self._end_of_answer(full, start, stop)
            marked = end > start and full[end - 1] in self._special
            if all(map(self._is_blank, full[start : end - marked])):
                raise _not_written(number)
            labelled[start:end] = self.train_on != "all"
        labelled[:1] = False
        return Document(np.array(full, dtype=np.int32), labelled, rendered.unwritten)

    def _end_of_answer(self, ids: list[int], start: int, stop: int) -> int:
        """Index behind the end marker of the answer in ids[start:stop]; `stop` if there is no marker.

        The end marker is the first token that generation stops at among the markers, else the first one:
        `Hello<|end|>\\n<|endoftext|>` ends with <|end|>.
        """
        markers = self._markers(ids, start, stop)
        stops = [index for index in markers if ids[index] in self.stop_ids]
        return (stops or markers)[0] + 1 if markers else stop

    def _markers(self, ids: list[int], start: int, stop: int) -> list[int]:
        """Indices of the special tokens in the run of special tokens and white space before `stop`."""
        run = stop
        while run > start and (ids[run - 1] in self._special or self._is_blank(ids[run - 1])):
            run -= 1
        return [index for index in range(run, stop) if ids[index] in self._special]


def _unpadded(backend: Any) -> Any:
    """The Rust tokenizer with padding and truncation off, which a call of its wrapper may have set."""
    backend.no_padding()
    backend.no_truncation()
    return backend


# --- refusals -----------------------------------------------------------------------------------------------

_REMEDY = (
    "Label the last answer only with data.train_on=completion, use a template that writes every turn the "
    "same whatever follows it (data.chat_template, for example chatml), or leave such rows out with "
    "data.on_bad_row=skip."
)


def _raise_bad(text: str | BadRow) -> str:
    if isinstance(text, BadRow):
        raise text
    return text


def _not_written(turn: int) -> BadRow:
    return BadRow(
        "turn not written", f"message {turn + 1} (assistant): the chat template writes nothing of it"
    )


def _mask_of_another(turn: int, roles: list[str], masks: Sequence[Mask | None], instead: str) -> BadRow:
    """Return the reason to refuse a row that masks a message which is not the assistant's.

    turn: its index, from 0. instead: clause that names a setting.
    """
    return BadRow(
        f"mask of a {roles[turn]} message",
        f"message {turn + 1} ({roles[turn]}) has {masks[turn]}, but only the assistant's messages can be "
        f"chosen one by one; {instead}",
    )


def _differ(case: str, turn: int, prefix: str, full: str) -> str:
    """Clause that quotes the first place where `prefix`, a rendering up to a turn, is no prefix of `full`.

    case: what follows the turn in `prefix`. turn: its index, from 0.
    """
    pairs = enumerate(zip(prefix, full, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(prefix), len(full)))
    start = max(0, at - 20)
    return (
        f"message {turn + 1} (assistant): the chat template writes {prefix[start : at + 30]!r} when {case} "
        f"follows, but {full[start : at + 30]!r} in the whole conversation, so "
        "which part is the answer is not defined"
    )


def _merged(verb: str, turn: int, prefix: str, full: str) -> BadRow:
    """Return the reason to refuse a turn whose answer `verb` ("begins", "ends") inside a token of `full`.

    turn: its index, from 0. prefix: the text of `full` before that place.
    """
    at = len(prefix)
    return BadRow(
        "tokens merge across the boundary",
        f"message {turn + 1} (assistant) {verb} inside a token: the tokens of {prefix[max(0, at - 20) :]!r} "
        f"change when {full[at : at + 20]!r} follows, so the label mask would not be exact",
    )
