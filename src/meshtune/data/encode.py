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
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from meshtune.data.example import SHOWN, BadRow, Dropped, Example, OnBadRow
from meshtune.data.render import Chat, Rendered, Renderer, TrainOn, not_written
from meshtune.data.rows import last_answer
from meshtune.data.template import apply_template, built_in_templates
from meshtune.errors import UserError

VERSION = 2  # part of the cache's key: raise it when the same rows become other ids or labels
TOKENIZER_ROWS = 1024  # rows in one call of the tokenizer, which bounds its memory
_REMEDY = (
    "Label the last answer only with data.train_on=completion, use a template that writes every turn the "
    "same whatever follows it (data.chat_template, for example chatml), or leave such rows out with "
    "data.on_bad_row=skip."
)


@dataclass(frozen=True)
class Document:
    """The tokens of one example."""

    ids: np.ndarray  # int32 [tokens]
    labelled: np.ndarray  # bool [tokens], true where the token is to be predicted; never the first
    unwritten: tuple[str, ...] = ()  # what the chat template leaves out, once for each message that has it


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


class Encoder:
    """Turns examples into documents.

    train_on: `assistant` labels every assistant turn with its end marker, `completion` the last one only (or
    the completion), `all` everything but the first token; a message's own mask comes before it. Rows of plain
    text have no parts: all but their first token is labelled. Conversations end with their last assistant
    turn, unless everything is labelled. chat_template: see `apply_template`.

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
        self._renderer = Renderer(tokenizer, train_on, self._special_texts)
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
        requests = [list(row.requests()) if isinstance(row, Chat) else [] for row in rows]
        texts = iter(self._renderer.render_all([request for row in requests for request in row]))
        for index, row in enumerate(rows):
            if isinstance(row, Chat):
                rows[index] = _unless_bad(
                    self._renderer.rendered, row, list(islice(texts, len(requests[index])))
                )
        unique = dict.fromkeys(text for row in rows if not isinstance(row, BadRow) for text in row.texts())
        ids = dict(zip(unique, self._tokenize(list(unique)), strict=True))
        return [_unless_bad(self._document, row, ids) for row in rows]

    def prompt_ids(self, example: Example) -> list[int]:
        """The tokens that generation starts from: those before the last answer, or all of a plain text."""
        if example.text is not None or not self.templated:
            return self._bos + self._tokenize([self._plain(example).parts[0]])[0]
        messages = self._renderer.adapt(example.messages or self._renderer.messages(example))
        text = self._renderer.render(messages[: last_answer(messages)], True, example.tools)
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
            head, full = (
                self._renderer.render(turns[:1], True, None),
                self._renderer.render(turns, False, None),
            )
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

    # From rows to texts #

    def _unrendered(self, example: Example) -> Chat | _Plain:
        """The example as messages where a template is in force, else as texts; raises BadRow."""
        if example.text is not None or not self.templated:
            return self._plain(example)
        return self._renderer.chat(example)

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

    # Labelling #

    def _document(self, row: Rendered | _Plain, ids: dict[str, list[int]]) -> Document:
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

    def _label(self, rendered: Rendered, ids: dict[str, list[int]]) -> Document:
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
                raise not_written(number)
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
