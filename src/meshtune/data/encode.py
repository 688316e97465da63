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
reason. Only a generation prompt that opens a thought may continue otherwise than the answer: labels then
start at their longest common prefix of tokens. render.py says where an answer ends.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from meshtune.data.example import (
    NO_MARKER,
    NOT_UTF8,
    SHOWN,
    TOO_LONG,
    BadRow,
    Example,
    Ids,
    Mask,
    Note,
    OnBadRow,
    caught,
    checked_text,
)
from meshtune.data.pack import Document
from meshtune.data.preferences import NO_PROMPT, SAME, SIDES, TWO_PROMPTS, answers_start
from meshtune.data.probe import ANSWER, QUESTION
from meshtune.data.render import Chat, Cut, End, Endings, Renderer, TrainOn, endings_of, not_written
from meshtune.data.rows import last_answer
from meshtune.data.template import apply_template, built_in_templates, check_variables
from meshtune.data.tokens import ControlTokens, TextTokenizer, bare, common_prefix, once, unpadded
from meshtune.errors import UserError, argument
from meshtune.objectives import OBJECTIVES, Objective

CLOCK = "strftime_now"  # the function with which templates write the time
VERSION = 7  # part of the cache's key: raise it when the same rows become other ids or labels
Texts = tuple[str, ...]  # of a row without a template, tokenised apart: (text,) or (prompt, completion)
TOKENIZER_ROWS = 1024  # rows in one call of the tokenizer, which bounds its memory


@dataclass(eq=False)
class Encoder:
    """Turns examples into documents.

    Rows of plain text have no parts: all but their first token is labelled. Conversations end with their last
    assistant turn, unless everything is labelled.

    Under a template, prompt and completion become a user and an assistant message. Without one, the ids are
    bos (where the tokenizer adds one) + prompt and separator + completion + eos, tokenised apart, so that the
    boundary is exact. Text is bos + text + eos. A row that holds them already gets no second ones.

    `apply_template` changes the tokenizer; `added` lists the tokens that it added. Rows whose labels can't be
    exact raise in `encode`.

    Raises UserError if the tokenizer has no eos token where one is needed, or if there is no such template.
    """

    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    # assistant labels every assistant turn with its end marker, completion the last one only (or the
    # completion), all everything but the first token; a message's own mask comes before it
    train_on: TrainOn
    chat_template: str | None  # see `apply_template`
    separator: str = "\n"  # between prompt and completion without a template
    on_bad_row: OnBadRow = "error"  # for rows whose labels can't be exact
    split_turns: bool = False  # see `split`
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # given to every rendering
    # What becomes of special tokens, and of tokens that turns begin or end with, in the contents of messages:
    # keep leaves them, text tokenises their characters, error refuses the row; auto refuses it where the
    # message is trained on, and is text elsewhere, where the tokenizer can.
    control_tokens: ControlTokens = "auto"
    template_date: str | None = None  # that a template with a clock writes, as 2026-01-31; None: today
    stops: Sequence[int] = ()  # tokens that the model's generation stops at; the tokenizer's eos is added
    embedding_rows: Callable[[], int] = int  # rows of the model's embedding, which may be more than tokens
    objective: Objective = OBJECTIVES["sft"]  # its rows, and whether prompts are trained
    shared_prompts: bool = False  # of a pair, what both sides begin with is in the chosen one only

    def __post_init__(self) -> None:
        if self.train_on not in ("assistant", "completion", "all"):
            raise UserError(f"data.train_on={self.train_on} is unknown; it is assistant, completion or all.")
        if self.split_turns or self.objective.rows != "answers":
            self.train_on = "completion"
        tokenizer = self.tokenizer
        self.added = apply_template(tokenizer, self.chat_template)
        self.templated = self.chat_template != "none" and tokenizer.chat_template is not None
        self.chat_template = None if self.templated else "none"
        template = str(tokenizer.chat_template) if self.templated else None
        if not self.templated and tokenizer.eos_token_id is None:
            raise UserError(
                "The tokenizer has no eos token, so an answer could not end. Set data.chat_template=chatml, "
                "which brings its own end marker, or give the tokenizer an eos_token."
            )
        self.template_variables = dict(self.template_variables or {})
        check_variables(self.template_variables, template)
        self._tokens = TextTokenizer(tokenizer)
        eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]  # pyright: ignore[reportArgumentType]
        self.stops = tuple(dict.fromkeys([*eos, *self.stops]))
        clock = CLOCK in (template or "")
        self.template_date = (self.template_date or date.today().isoformat()) if clock else None
        self._renderer = Renderer(
            tokenizer, self.train_on, self._tokens, self.template_variables,
            ends=self._tokens.texts_of(self.stops), split_turns=self.split_turns,
            control_tokens=self.control_tokens, day=self.template_date,
        )  # fmt: skip
        if self.templated:
            self._renderer.try_template()

    def split(self, example: Example) -> list[Example]:
        """The example, or under split_turns one for each assistant turn that is trained on; a pair, where
        answers are judged, is a good and a bad one.

        Each ends with its turn, so it is rendered as it would be when the turn is generated. A mask of
        another role's message stays, so that it is refused as without split_turns.
        """
        if example.other is not None and self.objective.rows == "judged":
            sides = caught(self._sides, example)
            return [example] if isinstance(sides, BadRow) else [sides[0], replace(sides[1], good=False)]
        if not self.split_turns or example.messages is None:
            return [example]
        masks = example.masks or (None,) * len(example.messages)
        answers = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
        others = tuple(None if i in answers else mask for i, mask in enumerate(masks))
        trained = [i for i in answers if (mask := masks[i]) is None or mask.trained]
        parts = [replace(example, messages=example.messages[: i + 1], masks=others[: i + 1]) for i in trained]
        return parts or [example]

    def encode(self, examples: Sequence[Example]) -> list[Document]:
        """One document for each example, in order.

        Raises UserError with the first SHOWN rows whose labels can't be exact, and their number among these
        examples.
        """
        results = list(self.encode_each(examples))
        pairs = zip(examples, results, strict=True)
        if refused := [(example, bad) for example, bad in pairs if isinstance(bad, BadRow)]:
            raise UserError(
                [
                    *(f"{example.origin}: {bad}." for example, bad in refused[:SHOWN]),
                    f"{len(refused):,} of {len(examples):,} rows can't be labelled exactly.",
                    *remedies(self, refused),
                ]
            )
        return [document for document in results if isinstance(document, Document)]

    def with_settings(self, **settings: Any) -> Encoder:
        """An encoder with other settings, and a copy of the tokenizer. Raises UserError as the class."""
        return replace(self, tokenizer=copy.deepcopy(self.tokenizer), **settings)

    def encode_each(self, examples: Sequence[Example]) -> Iterator[Document | BadRow]:
        """For each example its document, or the reason why its labels can't be exact."""
        for first in range(0, len(examples), TOKENIZER_ROWS):
            rows = [caught(self._sides, one) for one in examples[first : first + TOKENIZER_ROWS]]
            sides = [side for row in rows if not isinstance(row, BadRow) for side in row]
            made = iter(self._encode(sides))
            for row in rows:
                documents = [] if isinstance(row, BadRow) else [*islice(made, len(row))]
                yield caught(self._of_sides, row, documents)

    def _sides(self, example: Example) -> list[Example]:
        """The example, or the sides of a pair. Raises BadRow if the prompt in texts can't be found."""
        if example.other is None:
            return [example]
        sides = [replace(example, other=None), example.other]
        if example.text is None or example.answer_at:
            return sides
        ends = self._tokens.texts_of(self.stops)
        opening = self._renderer.generation_prompt if self.templated else ""
        start = answers_start(example.text, str(example.other.text), opening, ends)
        return [replace(side, answer_at=start) for side in sides]

    def _of_sides(self, sides: list[Example], documents: Sequence[Document | BadRow]) -> Document:
        """The document of a row, of a pair the chosen side and then the rejected one. Raises BadRow."""
        for name, document in zip(SIDES, documents, strict=False):
            if isinstance(document, BadRow):
                raise BadRow(document.reason, f"{name}: {document}") if len(sides) > 1 else document
        first, *others = (document for document in documents if isinstance(document, Document))
        first = replace(first, good=sides[0].good)
        if not others:
            return first
        (other,) = others
        if np.array_equal(first.ids, other.ids):
            raise BadRow(SAME, "chosen and rejected have the same tokens")
        shared = 0
        if self.shared_prompts:  # but for the last token, which predicts another one on each side
            same = common_prefix(first.ids.tolist(), other.ids.tolist())
            shared = max(0, int(min(same, first.labelled.argmax(), other.labelled.argmax())) - 1)
        return Document(
            np.concatenate([first.ids, other.ids[shared:]]),
            np.concatenate([first.labelled, other.labelled[shared:]]),
            tuple((Counter(first.notes) | Counter(other.notes)).elements()),  # the prompt's once
            first=len(first.ids),
            margin=sides[0].margin,
            prompt=int(first.labelled.argmax()) if self.objective.prompts else 0,
            shared=shared,
        )

    def _encode(self, examples: Sequence[Example]) -> list[Document | BadRow]:
        """Render, then tokenize, the texts of all examples in one call each."""
        rows: list[Any] = [caught(self._unrendered, example) for example in examples]
        requests = {i: list(row.requests()) for i, row in enumerate(rows) if isinstance(row, Chat)}
        texts = iter(self._renderer.render_all([*chain.from_iterable(requests.values())]))
        for index, own in requests.items():
            rows[index] = caught(self._cut, rows[index], list(islice(texts, len(own))))
        table = self._tokens.table(
            text
            for row in rows
            if isinstance(row, Cut | tuple)
            for text in (row.texts() if isinstance(row, Cut) else row)
        )
        return [caught(self._document, row, table) for row in rows]

    def prompt_ids(self, example: Example) -> list[int]:
        """The tokens that generation starts from: those before the last answer, or all of a plain text.

        Raises UserError if there are none.
        """
        ids = caught(self._prompt_ids, example)
        if isinstance(ids, BadRow):
            raise UserError(f"{example.origin}: {ids}.") from ids
        if ids:
            return ids
        raise UserError(f"{example.origin}: the prompt has no tokens, so there is nothing to answer.")

    def _prompt_ids(self, example: Example) -> list[int]:
        if (row := example.ids) is not None:
            answer = next((i for i in range(1, len(row.ids)) if row.labelled[i]), len(row.ids))
            return list(row.ids[:answer])
        if example.text is not None or not self.templated:
            (first, *_), _ = bare(self._tokens.ids(self._plain(example)), self._tokens)
            return self._tokens.prefix + first
        messages = example.messages or self._renderer.messages(example)
        return self.turn_ids(messages[: last_answer(messages)], example.tools)

    def turn_ids(self, messages: Sequence[dict], tools: list | None = None) -> list[int]:
        """The tokens that the assistant's next turn after `messages` starts from. Raises BadRow."""
        marked, tools, _ = self._renderer.treatment.of(self._once(messages)[0], tools)
        text = self._renderer.render(self._renderer.adapt(marked), True, tools)
        if isinstance(text, BadRow):
            raise text
        return self._tokens.ids_of(text)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the template's end marker, then the tokenizer's and the model's."""
        return tuple(dict.fromkeys([*self._endings.tokens, *self.stops]))

    @cached_property
    def _openings(self) -> set[int]:
        """Tokens of the generation prompt, which open a turn of the assistant."""
        return set(self._tokens.ids([self._renderer.generation_prompt])[0])

    @cached_property
    def _endings(self) -> Endings:
        if not self.templated:
            return Endings(End(None, True), End(None, True))
        return endings_of(self._renderer, self._tokens, self.stops)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides ids and labels: tokenizer, template, train_on, separator."""
        if self._tokens.backend is not None:
            vocabulary = unpadded(self._tokens.backend).to_str()
        else:
            tokens = {id: str(token) for id, token in self.tokenizer.added_tokens_decoder.items()}
            vocabulary = repr(
                (type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items()), tokens)
            )
        template = self.tokenizer.chat_template if self.templated else None
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        settings = [self.train_on, self.separator, self._tokens.prefix, self.on_bad_row, self.split_turns]
        settings += [self.template_variables, self.stops, self.control_tokens, self.template_date]
        if self.objective.rows != "answers":  # earlier versions' fingerprint of supervised rows stays
            of_objective = self.objective.rows, self.objective.prompts, self.objective.scores
            settings += [*of_objective, self.shared_prompts]
        parts = [VERSION, vocabulary, template, special, *settings]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    # From rows to texts #

    def _unrendered(self, example: Example) -> Chat | Texts | Document:
        """The example as messages where a template is in force, else as texts or tokens; raises BadRow."""
        if example.ids is not None:
            return self._tokenised(example.ids)
        if example.text is not None or not self.templated:
            return self._plain(example)
        messages, repeated = self._once(self._renderer.messages(example))
        chat = self._renderer.chat(replace(example, messages=tuple(messages), prompt=None, completion=None))
        return chat._replace(notes=chat.notes + repeated)

    def _once(self, messages: Sequence[dict]) -> tuple[list[dict], tuple[Note, ...]]:
        """(messages without the tokens that the template writes around them, a note on each such message).

        Under control_tokens "text" and "error" they stay, as the user chose.
        """
        if self.control_tokens in ("text", "error"):
            return list(messages), ()
        return once(messages, *self._edges)

    @cached_property
    def _edges(self) -> tuple[str, str]:
        """Texts of the tokens with which the template begins a conversation and ends an answer, or ""."""
        bos, end = str(self.tokenizer.bos_token or ""), self._endings.answer.token
        rendering = str(self._renderer.render(self._renderer.adapt([QUESTION, ANSWER]), False, None))
        texts = self._tokens.texts_of([] if end is None else [end])
        return bos if rendering.startswith(bos) else "", texts[0] if texts else ""

    def _tokenised(self, row: Ids) -> Document:
        """The document of given tokens. Raises BadRow if the model's embedding has no row for an id."""
        tokenless = sorted({*row.ids} - self._tokens.all_ids)
        if bad := next((id for id in tokenless if not 0 <= id < self._rows), None):
            raise BadRow(UNKNOWN_IDS, f"input_ids has {bad}, but the model's ids end at {self._rows - 1:,}")
        ids, labelled = np.array(row.ids, np.int32), np.array(row.labelled)
        labelled[:1] = False
        return Document(ids, labelled, tuple(("tokenless", str(id)) for id in tokenless))

    @cached_property
    def _rows(self) -> int:
        """Number of ids that a row of tokens may have: the tokenizer's, or the model's where it has more."""
        return max(self._tokens.bound, self.embedding_rows())

    def _plain(self, example: Example) -> Texts:
        if example.text is not None:
            text, start = checked_text(example.text), example.answer_at
            return (text[:start], text[start:]) if start else (text,)
        if example.messages is not None:
            raise UserError(
                f"{example.origin}: the row is a conversation, but the tokenizer has no chat template or "
                "data.chat_template is none. Set data.chat_template to one of "
                f"{', '.join(built_in_templates())}, or to a file."
            )
        assert example.prompt is not None
        assert example.completion is not None
        return checked_text(example.prompt + self.separator), checked_text(example.completion)

    def _cut(self, chat: Chat, texts: list[str | BadRow]) -> Cut:
        """The rendered conversation, cut into the pieces that are tokenised. texts: see `rendered`."""
        return Cut(self._renderer.rendered(chat, texts), self._tokens)

    # Labelling #

    def _document(self, row: Cut | Texts | Document, table: dict[str, list[int]]) -> Document:
        """The document of a row. table: ids of all texts."""
        if isinstance(row, Cut):
            return self._label(row, table)
        return self._label_plain([table[text] for text in row]) if isinstance(row, tuple) else row

    def _label_plain(self, parts: list[list[int]]) -> Document:
        """bos + the parts + eos. The last of two parts is labelled, or all of it where there is one."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise UserError(
                "Rows of plain text end with the eos token, but the tokenizer has none; give it an eos_token."
            )
        parts, repeated = bare(parts, self._tokens)
        if repeated and all(map(self._tokens.is_blank, parts[-1])):
            kind = "text" if len(parts) == 1 else "answer"
            raise BadRow(ENDS_ONLY, f"empty {kind}: it holds {ENDS_ONLY}")
        unlabelled = len(self._tokens.prefix) + (
            len(parts[0]) if len(parts) == 2 and self.train_on != "all" else 0
        )
        ids = np.array([*self._tokens.prefix, *chain.from_iterable(parts), eos], dtype=np.int32)
        labelled = np.ones(len(ids), dtype=bool)
        labelled[: max(1, unlabelled)] = False
        return Document(ids, labelled, tuple(("repeated", what) for what in repeated))

    def _label(self, cut: Cut, table: dict[str, list[int]]) -> Document:
        """Label the answers of a conversation; `table` has the tokens of its texts.

        Raises BadRow if the tokens of a prefix aren't a prefix of the whole's tokens, or an answer is blank.
        """
        full, spans = cut.spans(table)
        full += self._missing_end(cut, full)
        labelled, notes = np.full(len(full), self.train_on == "all"), [*cut.rendered.notes]
        for number, start, stop in spans:
            end = self._end_of_answer(full, start, stop)
            marked = end > start and full[end - 1] in self._tokens.special
            if all(map(self._tokens.is_blank, full[start : end - marked])):
                raise not_written(number)
            labelled[start:end] = self.train_on != "all"
            if full[end - 1] not in self.stop_ids:
                token = str(self.tokenizer.decode([full[end - 1]])) if marked else NO_MARKER
                notes.append(("unstopped", token))
        labelled[:1] = False
        return Document(np.array(full, np.int32), labelled, tuple(notes))

    def _missing_end(self, cut: Cut, full: list[int]) -> list[int]:
        """The end marker of the last turn, where the template leaves it to the turn after that."""
        final = cut.rendered.final
        end = self._endings.call if final == "call" else self._endings.answer
        return [] if final == "other" or end.written or end.token is None else [end.token]

    def _end_of_answer(self, ids: list[int], start: int, stop: int) -> int:
        """Index behind the end marker of the answer in ids[start:stop]; `stop` if there is no marker.

        The end marker is the first token that generation stops at among the markers, else the first one:
        `Hello<|end|>\\n<|endoftext|>` ends with <|end|>. Without one it is the special token behind the turn,
        unless that opens another turn of the assistant.
        """
        markers = self._tokens.markers(ids, start, stop)
        if not markers:
            behind = ids[stop] if stop < len(ids) and ids[stop] in self._tokens.special else None
            return stop + (behind is not None and (behind in self.stop_ids or behind not in self._openings))
        stops = [index for index in markers if ids[index] in self.stop_ids]
        return (stops or markers)[0] + 1


# Settings with which refused rows would be trained on #


THINKING = ("enable_thinking", "thinking")  # variables of templates that open or close a thought
UNKNOWN_IDS = "ids that are not in the vocabulary"
ENDS_ONLY = "begin and end tokens only"
NO_SETTING = {  # what helps rows that no setting helps, by their reason
    UNKNOWN_IDS: "Train the model whose tokenizer made the ids",
    ENDS_ONLY: "Give them a text",
    NOT_UTF8: "Write them anew in whole characters",
    TOO_LONG: "Split them",
    SAME: "Write two different answers",
    NO_PROMPT: "Give the prompt a column of its own",
    TWO_PROMPTS: "Write pairs of answers to the same prompt",
}
SKIP = "data.on_bad_row=skip leaves such rows out"


class Remedy(NamedTuple):
    """One change, of the settings or of the rows, that may help."""

    clause: str
    settings: Mapping[str, Any] = {}  # of Encoder
    change: Callable[[Example], Example] | None = None  # of a row


def remedies(encoder: Encoder, refused: Sequence[tuple[Example, BadRow]]) -> list[str]:
    """Sentences on what would help, one for each reason that rows were refused for.

    Settings are tried with the first SHOWN rows; named is what helps all of these that have the reason.
    """
    every = {bad.reason for _, bad in refused}
    sentences = [f"{remedy}; {SKIP}." for reason, remedy in NO_SETTING.items() if reason in every]
    refused = [pair for pair in refused[:SHOWN] if pair[1].reason not in NO_SETTING]
    reasons = list(dict.fromkeys(bad.reason for _, bad in refused))
    helpful: dict[str, list[str]] = {reason: [] for reason in reasons}
    for remedy in _candidates(encoder):
        try:
            changed = encoder.with_settings(**remedy.settings) if remedy.settings else encoder
        except UserError:
            continue
        for reason in reasons:
            rows = [example for example, bad in refused if bad.reason == reason]
            if all(_helps(changed, remedy.change(row) if remedy.change else row) for row in rows):
                helpful[reason].append(remedy.clause)
    for reason, clauses in helpful.items():
        subject = f"Of rows with the reason {reason}: " if len(reasons) > 1 else ""
        helps = f"What would help: {'; '.join([*clauses, SKIP])}."
        no_help = f"No setting that was tried would help; {SKIP}."
        sentences.append(subject + (helps if clauses else no_help))
    return sentences


def _helps(encoder: Encoder, row: Example) -> bool:
    """Whether an encoder takes a row."""
    try:
        results = list(encoder.encode_each(encoder.split(row)))
    except UserError:
        return False
    return not any(isinstance(result, BadRow) for result in results)


def _candidates(encoder: Encoder) -> Iterator[Remedy]:
    """Yield the changes that are tried, those of the settings first."""
    template = str(encoder.tokenizer.chat_template or "")
    if not encoder.split_turns and encoder.train_on != "all" and encoder.objective.rows == "answers":
        yield Remedy(
            "data.split_turns=true makes each assistant turn a row of its own", {"split_turns": True}
        )
        if encoder.train_on != "completion":
            yield Remedy("data.train_on=completion labels the last answer only", {"train_on": "completion"})
    training = "data.chat_template=training writes every turn as the last one"
    yield Remedy(training, {"chat_template": "training"})
    given = encoder.template_variables
    for name in (name for name in THINKING if name in template):
        for value in (value for value in (True, False) if given.get(name) is not value):
            clause = argument("data.chat_template_kwargs", {name: str(value).lower()})
            yield Remedy(clause, {"template_variables": {**given, name: value}})
    if encoder.control_tokens != "text":
        yield Remedy("data.control_tokens=text trains on their characters", {"control_tokens": "text"})
    if encoder.control_tokens != "keep":
        yield Remedy("data.control_tokens=keep trains on the tokens themselves", {"control_tokens": "keep"})
    yield Remedy("data.chat_template=chatml is a template that writes them", {"chat_template": "chatml"})
    yield Remedy("take off the white space at the beginning of the answers", change=_stripped)
    if encoder.objective.rows == "answers":
        yield Remedy("give the first message a weight of 0", change=lambda row: _untrained(row, 0))


def _stripped(row: Example) -> Example:
    """A row whose answers begin without white space."""
    row = replace(row, other=row.other and _stripped(row.other))
    if row.messages is None:
        return replace(row, completion=(row.completion or "").lstrip())
    begun = [
        message | {"content": message["content"].lstrip()}
        if message["role"] == "assistant" and isinstance(message.get("content"), str)
        else message
        for message in row.messages
    ]
    return replace(row, messages=tuple(begun))


def _untrained(row: Example, index: int) -> Example:
    """A row in which a message has a weight of 0."""
    masks = list(row.masks or [None] * len(row.messages or ()))
    masks[index : index + 1] = [Mask(False, "weight")] if masks else []
    return replace(row, masks=tuple(masks))
