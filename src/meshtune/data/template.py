"""Examples to token ids and an exact label mask.

    Example ──> texts ──> ids (one call of the fast tokenizer for many rows) ──> Document(ids, labelled)

Which tokens are labelled is never guessed. For a conversation under a chat template, the answer in turn i
lies between two rendered prefixes of the whole:

    head = render(messages[:i], generation prompt)      what the model sees when it starts to answer
    upto = render(messages[:i + 1])                     ... and when it has answered
    full = render(messages)

    full: <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n<|im_start|>user\\n...
          └───────────────────── head ─────────────────────────────────┘
          └───────────────────── upto ─────────────────────────────────────────────────────┘

Both must be prefixes of `full` as text, and their tokens must be prefixes of `full`'s tokens. Where either
fails (a template that rewrites earlier turns, a merge across the boundary) the row is refused with the
reason. Inside, the answer ends with its end marker: the first token of the trailing run of special tokens and
white space that generation stops at; the line break that many templates write after it is never generated and
so not labelled.

Templates run in transformers' immutable Jinja sandbox and nowhere else.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from meshtune.data.example import SHOWN, BadRow, Dropped, Example, OnBadRow
from meshtune.errors import UserError

TrainOn = Literal["assistant", "completion", "all"]

BUILT_IN = Path(__file__).parent / "templates"
VERSION = 1  # raise it when the same rows would become other ids or labels, so that caches are made anew
ROWS_AT_ONCE = 1024  # bounds the memory of one call of the tokenizer


@dataclass(frozen=True)
class Document:
    """ids: int32 [tokens]; labelled: bool [tokens], true where the token is to be predicted (never the
    first).
    """

    ids: np.ndarray
    labelled: np.ndarray


# --- the template in force ----------------------------------------------------------------------------------


def built_in_templates() -> list[str]:
    """The names that `data.chat_template` knows."""
    return sorted(file.stem for file in BUILT_IN.glob("*.jinja"))


def apply_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> list[str]:
    """Makes a built-in template or a file the tokenizer's own; returns the tokens that its vocabulary gained.

    None keeps the tokenizer's template and "none" means that no template is used: both change nothing. A
    template's opening comment may say `special tokens: A B` (added to the tokenizer where missing) and `an
    answer ends with: A` (it becomes the tokenizer's eos token, so that what is trained as the end is what
    generation stops at; `eos` keeps the one there is). Applying it twice is applying it once. The model's
    embeddings must then be resized.

    Raises UserError for a name that is neither built in nor a file, and if the template needs an eos token
    that the tokenizer lacks.
    """
    if chat_template is None or chat_template == "none":
        return []
    text = _template_text(chat_template)
    comment = re.match(r"\s*\{#(.*?)#\}", text, re.DOTALL)
    said = dict(
        re.findall(r"^\s*-?\s*(special tokens|an answer ends with):[ \t]*(.*?)\s*$", comment[1], re.M)
        if comment
        else ()
    )
    tokens = said.get("special tokens", "").split()
    end = said.get("an answer ends with", "eos")
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


# --- encoding -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rendered:
    """A conversation as text: `full`, and for each labelled turn the prefixes (head, upto), upto being None
    for the end.
    """

    full: str
    turns: tuple[tuple[int, str, str | None], ...]  # turn's number, head, upto

    def texts(self) -> Iterator[str]:
        yield self.full
        for _, head, upto in self.turns:
            yield head
            if upto is not None:
                yield upto


class Encoder:
    """Turns examples into documents.

    train_on: `assistant` labels every assistant turn with its end marker, `completion` the last one only (or
    the completion), `all` everything but the first token. Rows of plain text have no parts: all but their
    first token is labelled. Conversations end with their last assistant turn, unless everything is labelled.

    Under a template, prompt and completion become a user and an assistant message. Without one, the ids are
    bos (where the tokenizer adds one) + prompt and separator + completion + eos, tokenised apart, so that the
    boundary is exact. Text is bos + text + eos.

    `apply_template` is called on the tokenizer given, `added` holds what it added. With `on_bad_row="skip"`,
    rows whose labels can't be exact are left out and counted in `dropped`.

    Raises UserError if the tokenizer has no eos token where one is needed, or the template can't be found.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        train_on: TrainOn,
        chat_template: str | None,
        separator: str = "\n",
        on_bad_row: OnBadRow = "error",
        dropped: Dropped | None = None,
    ) -> None:
        if train_on not in ("assistant", "completion", "all"):
            raise UserError(f"data.train_on={train_on} is unknown; it is assistant, completion or all.")
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.separator = separator
        self.on_bad_row = on_bad_row
        self.dropped = Dropped() if dropped is None else dropped
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
        self._blank: dict[int, bool] = {}  # token id -> whether it is white space only
        self._backend = self._fast_backend()
        self._bos = self._prefix()

    # Tokenizing #

    def _fast_backend(self) -> Any:
        """The Rust tokenizer where calling it directly gives the same ids (it does for all but a few
        wrappers), else None.
        """
        if not self.tokenizer.is_fast:
            return None
        backend: Any = self.tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        probes = ["Hello  world", " a\n\nb", "".join(self._special_texts[:3]) + "x"]
        ours = [encoding.ids for encoding in backend.encode_batch(probes, add_special_tokens=False)]
        return backend if ours == self.tokenizer(probes, add_special_tokens=False)["input_ids"] else None

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """ids of each text, nothing added; special tokens written in the text are recognised."""
        if not texts:
            return []
        if self._backend is None:
            return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = False
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _prefix(self) -> list[int]:
        """What the tokenizer puts before a text by itself: its bos token, or nothing."""
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

    def _messages(self, example: Example) -> list[dict]:
        """The conversation, up to its last assistant turn unless everything is labelled; raises BadRow."""
        if example.messages is None:
            return [
                {"role": "user", "content": example.prompt},
                {"role": "assistant", "content": example.completion},
            ]
        messages = list(example.messages)
        if self.train_on == "all":
            return messages
        last = _last_answer(messages)
        if last is None:
            raise BadRow("no assistant turn", f"none of the {len(messages)} messages is the assistant's")
        return messages[: last + 1]

    def _render_all(self, wanted: Sequence[tuple[list[dict], bool, list | None]]) -> list[str | BadRow]:
        """Texts of (messages, generation prompt?, tools); one call of transformers for all that share the
        last two.
        """
        texts: list[str | BadRow] = [""] * len(wanted)
        groups: dict[bool, list[int]] = {False: [], True: []}
        for index, (messages, generation, tools) in enumerate(wanted):
            if tools is None:
                groups[generation].append(index)
            else:
                texts[index] = self._render(messages, generation, tools)
        for generation, indices in groups.items():
            if not indices:
                continue
            try:
                rendered = self.tokenizer.apply_chat_template(
                    [wanted[index][0] for index in indices], tokenize=False, add_generation_prompt=generation
                )
            except Exception:  # some row's: render one by one to find out which
                rendered = [self._render(wanted[index][0], generation, None) for index in indices]
            for index, text in zip(indices, rendered, strict=True):
                texts[index] = text  # pyright: ignore[reportArgumentType, reportCallIssue]
        return texts

    def _render(self, messages: list[dict], generation: bool, tools: list | None) -> str | BadRow:
        try:
            return self.tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
                messages, tools=tools, tokenize=False, add_generation_prompt=generation
            )
        except Exception as error:  # a template is a program of its own: it may fail in any way
            return BadRow(
                "refused by the chat template",
                f"the chat template refuses it: {type(error).__name__}: {error}",
            )

    def _conversations(self, examples: Sequence[Example]) -> list[_Rendered | BadRow]:
        """Each example's texts, checked to be prefixes of the whole."""
        wanted: list[tuple[list[dict], bool, list | None]] = []
        slots: list[list[tuple[int, int]] | BadRow] = []  # per example: (turn, index of its head in wanted)
        firsts: list[int] = []
        for example in examples:
            firsts.append(len(wanted))
            try:
                messages = self._messages(example)
                turns = self._labelled_turns(messages)
            except BadRow as bad:
                slots.append(bad)
                continue
            wanted.append((messages, False, example.tools))
            slots.append([])
            for turn in turns:
                slots[-1].append((turn, len(wanted)))  # pyright: ignore[reportAttributeAccessIssue]
                wanted.append((messages[:turn], True, example.tools))
                if turn + 1 < len(messages):
                    wanted.append((messages[: turn + 1], False, example.tools))
        texts = self._render_all(wanted)
        return [
            slot if isinstance(slot, BadRow) else self._checked(texts, wanted, first, slot)
            for first, slot in zip(firsts, slots, strict=True)
        ]

    def _labelled_turns(self, messages: list[dict]) -> list[int]:
        if self.train_on == "all":
            return []
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        turns = turns if self.train_on == "assistant" else turns[-1:]
        if turns[0] == 0:
            raise BadRow(
                "starts with the assistant",
                "the conversation starts with the assistant, who has nothing to answer",
            )
        return turns

    def _checked(
        self, texts: list, wanted: list, first: int, slots: list[tuple[int, int]]
    ) -> _Rendered | BadRow:
        full, whole = texts[first], len(wanted[first][0])
        if isinstance(full, BadRow):
            return full
        turns = []
        for turn, index in slots:
            head = texts[index]
            upto = texts[index + 1] if turn + 1 < whole else None
            for text in (head, upto):
                if isinstance(text, BadRow):
                    return text
            if not full.startswith(head):
                return BadRow("prompt is no prefix", _differ("its generation prompt", turn, head, full))
            if upto is not None:
                cut = self._up_to_marker(upto)
                if (
                    not full.startswith(cut)
                    and self.tokenizer.eos_token
                    and upto.endswith(self.tokenizer.eos_token)
                ):
                    # Some templates (Phi-3's) close the last turn with one more eos, not there in the middle.
                    cut = self._up_to_marker(upto.removesuffix(self.tokenizer.eos_token))
                if not full.startswith(cut):
                    return BadRow(
                        "turn is no prefix", _differ("the end of the conversation", turn, upto, full)
                    )
                if len(cut) < len(head):
                    return BadRow(
                        "turn not written",
                        f"message {turn + 1} (assistant): the chat template writes nothing of it",
                    )
                upto = cut
            turns.append((turn, head, upto))
        return _Rendered(full, tuple(turns))

    def _up_to_marker(self, text: str) -> str:
        """`text` without the white space after its end marker, whose tokens depend on what follows; else all
        of it.
        """
        stripped = text.rstrip()
        return stripped if stripped.endswith(self._special_texts) else text

    # Labelling #

    def _end_of_answer(self, ids: list[int], start: int, stop: int) -> int:
        """Where the answer in ids[start:stop] ends: after its end marker, or at `stop` if there is none.

        The end marker is the first token that generation stops at in the trailing run of special tokens and
        white space (else the first special one): `Hello<|end|>\\n<|endoftext|>` ends with <|end|>.
        """
        run = stop
        while run > start and (ids[run - 1] in self._special or self._is_blank(ids[run - 1])):
            run -= 1
        markers = [index for index in range(run, stop) if ids[index] in self._special]
        stops = [index for index in markers if ids[index] in self.stop_ids]
        return (stops or markers)[0] + 1 if markers else stop

    def _label(self, rendered: _Rendered, ids: dict[str, list[int]]) -> Document:
        """Raises BadRow if the tokens of a prefix are no prefix of the whole's tokens."""
        full = ids[rendered.full]
        labelled = np.zeros(len(full), dtype=bool)
        for turn, head, upto in rendered.turns:
            start = len(ids[head])
            stop = len(full) if upto is None else len(ids[upto])
            if full[:start] != ids[head]:
                raise BadRow("tokens merge across the boundary", _merged("begins", turn, head, rendered.full))
            if upto is not None and full[:stop] != ids[upto]:
                raise BadRow("tokens merge across the boundary", _merged("ends", turn, upto, rendered.full))
            end = self._end_of_answer(full, start, stop)
            marked = end > start and full[end - 1] in self._special
            if all(map(self._is_blank, full[start : end - marked])):
                raise BadRow(
                    "turn not written",
                    f"message {turn + 1} (assistant): the chat template writes nothing of it",
                )
            labelled[start:end] = True
        if self.train_on == "all":
            labelled[:] = True
        labelled[:1] = False
        return Document(np.array(full, dtype=np.int32), labelled)

    def _pieces(self, example: Example) -> tuple[str, ...]:
        """The texts of a row without a template, tokenised apart."""
        if example.text is not None:
            return (example.text,)
        if example.messages is not None:
            raise UserError(
                f"{example.origin}: the row is a conversation, but the tokenizer has no chat template or "
                "data.chat_template is none. Set data.chat_template to one of "
                f"{', '.join(built_in_templates())}, or to a file."
            )
        assert example.prompt is not None
        assert example.completion is not None
        return (example.prompt + self.separator, example.completion)

    def _plain(self, parts: list[list[int]]) -> Document:
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

    # The interface #

    def encode(self, examples: Sequence[Example]) -> list[Document]:
        """One document for each example, in order (fewer under `on_bad_row="skip"`).

        Raises UserError with the first ten rows whose labels can't be exact, and their number among these
        examples.
        """
        documents: list[Document] = []
        problems: list[str] = []
        total = 0
        for example, result in zip(examples, self.encode_each(examples), strict=True):
            if isinstance(result, Document):
                documents.append(result)
            elif self.on_bad_row == "skip":
                self.dropped.counts[result.reason] += 1
            else:
                total += 1
                problems += [f"{example.origin}: {result}."] if total <= SHOWN else []
        if total:
            raise UserError(
                [*problems, f"{total:,} of {len(examples):,} rows can't be labelled exactly. {_REMEDY}"]
            )
        return documents

    def encode_each(self, examples: Sequence[Example]) -> Iterator[Document | BadRow]:
        """For each example its document, or what keeps its labels from being exact."""
        for first in range(0, len(examples), ROWS_AT_ONCE):
            yield from self._encode(examples[first : first + ROWS_AT_ONCE])

    def _encode(self, examples: Sequence[Example]) -> list[Document | BadRow]:
        chats = [index for index, example in enumerate(examples) if self.templated and example.text is None]
        rows: list[_Rendered | BadRow | tuple[str, ...]] = [()] * len(examples)
        for index, rendered in zip(chats, self._conversations([examples[i] for i in chats]), strict=True):
            rows[index] = rendered
        texts: dict[str, None] = {}  # each text once, in order
        for index, row in enumerate(rows):
            if isinstance(row, _Rendered):
                texts |= dict.fromkeys(row.texts())
            elif not isinstance(row, BadRow):
                rows[index] = pieces = self._pieces(examples[index])
                texts |= dict.fromkeys(pieces)
        ids = dict(zip(texts, self._tokenize(list(texts)), strict=True))
        return [self._document(row, ids) for row in rows]

    def _document(
        self, row: _Rendered | BadRow | tuple[str, ...], ids: dict[str, list[int]]
    ) -> Document | BadRow:
        if isinstance(row, BadRow):
            return row
        if isinstance(row, tuple):
            return self._plain([ids[piece] for piece in row])
        try:
            return self._label(row, ids)
        except BadRow as bad:
            return bad

    def prompt_ids(self, example: Example) -> list[int]:
        """What generation starts from: the tokens before the last answer, or all of a plain text."""
        if example.text is not None:
            return self._bos + self._tokenize([example.text])[0]
        if not self.templated:
            return self._bos + self._tokenize([self._pieces(example)[0]])[0]
        messages = list(example.messages or self._messages(example))
        last = _last_answer(messages)
        text = self._render(messages if last is None else messages[:last], True, example.tools)
        if isinstance(text, BadRow):
            raise UserError(f"{example.origin}: {text}.")
        return self._tokenize([text])[0]

    def answer(self, example: Example) -> str:
        """The expected answer: the completion, or the last assistant turn's text; empty for a plain text."""
        if example.messages is None:
            return example.completion or ""
        last = _last_answer(example.messages)
        content = example.messages[last].get("content") if last is not None else None
        if isinstance(content, list):
            return "".join(part.get("text", "") for part in content)
        return content or ""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the template's end marker first, then the tokenizer's eos."""
        stops: dict[int, None] = {}
        if self.templated:
            turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
            head, full = self._render_all([(turns[:1], True, None), (turns, False, None)])
            if isinstance(head, str) and isinstance(full, str):
                ids = self._tokenize([full])[0]
                start = len(self._tokenize([head])[0]) if full.startswith(head) else 0
                run = len(ids)
                while run > start and (ids[run - 1] in self._special or self._is_blank(ids[run - 1])):
                    run -= 1
                stops |= dict.fromkeys([id for id in ids[run:] if id in self._special][:1])
        if self.tokenizer.eos_token_id is not None:
            stops[int(self.tokenizer.eos_token_id)] = None  # pyright: ignore[reportArgumentType]
        return tuple(stops)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that decides ids and labels: tokenizer, template, train_on, separator."""
        if self._backend is not None:
            self._backend.no_padding()
            self._backend.no_truncation()
            vocabulary = self._backend.to_str()
        else:
            tokens = {id: str(token) for id, token in self.tokenizer.added_tokens_decoder.items()}
            vocabulary = repr(
                (type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items()), tokens)
            )
        template = self.tokenizer.chat_template if self.templated else None
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        parts = [
            VERSION,
            vocabulary,
            template,
            special,
            self.train_on,
            self.separator,
            self._bos,
            self.on_bad_row,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# --- sentences ----------------------------------------------------------------------------------------------

_REMEDY = (
    "Label the last answer only with data.train_on=completion, use a template that writes every turn the "
    "same whatever follows it (data.chat_template, for example chatml), or leave such rows out with "
    "data.on_bad_row=skip."
)


def _last_answer(messages: Iterable[dict]) -> int | None:
    return max(
        (index for index, message in enumerate(messages) if message["role"] == "assistant"), default=None
    )


def _differ(what: str, turn: int, prefix: str, full: str) -> str:
    """Names the first place where the chat template contradicts itself."""
    at = next(
        (i for i, (one, other) in enumerate(zip(prefix, full, strict=False)) if one != other),
        min(len(prefix), len(full)),
    )
    start = max(0, at - 20)
    return (
        f"message {turn + 1} (assistant): the chat template writes {prefix[start : at + 30]!r} when {what} "
        f"follows, but {full[start : at + 30]!r} in the whole conversation, so "
        "which part is the answer is not defined"
    )


def _merged(verb: str, turn: int, prefix: str, full: str) -> str:
    at = len(prefix)
    return (
        f"message {turn + 1} (assistant) {verb} inside a token: the tokens of {prefix[max(0, at - 20) :]!r} "
        f"change when {full[at : at + 20]!r} follows, so the label mask would not be exact"
    )
