"""Conversations to text by the tokenizer's chat template, and the places of their labelled turns in it.

    Chat(messages, tools, turns) ──> requests ──> render_all ──> rendered ──> Rendered(full, turns)

Templates run in transformers' immutable Jinja sandbox and nowhere else.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from meshtune.compat import template_day
from meshtune.data.example import TOO_LONG, BadRow, Example, Mask, Note, caught, checked_text
from meshtune.data.messages import closed, is_empty, opened, turns_of, with_thought
from meshtune.data.probe import (
    ANSWER,
    QUESTION,
    TOOL,
    Writes,
    adapted,
    call_turns,
    prompt_behind,
    unwritten,
    writes,
)
from meshtune.data.rows import empty_answer, last_answer, no_answer
from meshtune.data.template import render_limit
from meshtune.data.tokens import ControlTokens, TextTokenizer, Treatment, common_prefix, unmarked
from meshtune.errors import UserError, quoted, reason_of

TrainOn = Literal["assistant", "completion", "all"]

Request = tuple[list[dict], bool, list | None]  # one rendering: messages, with the generation prompt?, tools

TOGETHER = 100  # conversations in one call of transformers


class Chat(NamedTuple):
    """A conversation that is still to be rendered."""

    messages: list[dict]
    tools: list | None
    turns: list[int]  # indices of the messages that are labelled, or under train_on=all of those that are not
    notes: tuple[Note, ...] = ()  # on control tokens in its contents, one for each in a message

    def requests(self) -> Iterator[Request]:
        """The whole, then head and upto of each labelled turn; the upto of the last message is the whole."""
        yield self.messages, False, self.tools
        for turn in self.turns:
            yield self.messages[:turn], True, self.tools
            if turn + 1 < len(self.messages):
                yield self.messages[: turn + 1], False, self.tools


class Turn(NamedTuple):
    """A labelled turn of a rendered conversation."""

    number: int  # from 0
    head: str  # a prefix of the conversation's text; if `opens`, it may continue otherwise
    stop: int  # characters of the conversation's text up to the end of the turn
    opens: bool  # whether the generation prompt opens a thought: then labels start where the two part


class Rendered(NamedTuple):
    """A conversation as text."""

    full: str
    turns: list[Turn]
    final: Literal["answer", "call", "other"]  # the last message: the assistant's, its tool call, another's
    notes: tuple[Note, ...] = ()


@dataclass(eq=False)
class Renderer:
    """Renders conversations with the chat template of a tokenizer.

    train_on, split_turns, control_tokens: see `encode.Encoder`.
    """

    tokenizer: PreTrainedTokenizerBase
    train_on: TrainOn
    tokens: TextTokenizer  # of the tokenizer
    variables: Mapping[str, Any]  # of the template, given to every rendering
    _: KW_ONLY
    ends: tuple[str, ...]  # texts of the tokens that generation stops at
    split_turns: bool
    control_tokens: ControlTokens
    day: str | None = None  # that the template's clock writes; None: now

    def chat(self, example: Example) -> Chat:
        """The conversation of a row, in the form that the template can write. Raises BadRow."""
        messages = self.messages(example)
        turns = self._turns(messages, example.masks or ())
        trained = set(range(len(messages))) - set(turns) if self.train_on == "all" else set(turns)
        for index in sorted(trained):
            if messages[index]["role"] == "assistant" and is_empty(messages[index]):
                raise empty_answer(index)
        messages, tools, control = self.treatment.of(messages, example.tools, trained)
        return Chat(self.adapt(messages), tools, turns, control)

    @cached_property
    def treatment(self) -> Treatment:
        """Marks, refuses or leaves special tokens, and added tokens at the ends of turns, in messages."""
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if not token.special]
        marks = [token for token in added if len(token.strip()) > 1 and not token.strip().isalnum()]
        turns = self.adapt([QUESTION, ANSWER] * 2)
        texts = [str(self.render(part, False, None)) for part in (turns, turns[:2])] if marks else []
        words = re.compile(f"{QUESTION['content']}|{ANSWER['content']}")
        # The text between and behind the contents; a system prompt of the template's own comes before them.
        around = [piece for text in texts for piece in words.split(text)[1:]]
        of_turns = [token for token in marks if any(token in piece for piece in around)]
        return Treatment(self.control_tokens, [*self.tokens.special_texts, *of_turns], self.tokens.can_write)

    def messages(self, example: Example) -> list[dict]:
        """The conversation, up to its last assistant turn unless everything is labelled; raises BadRow."""
        if example.messages is None:
            return turns_of(example.prompt, example.completion)
        if self.train_on == "all":
            return list(example.messages)
        last = last_answer(example.messages)
        if last is None:
            raise no_answer(example.messages)
        return list(example.messages[: last + 1])

    def try_template(self) -> None:
        """Render one short conversation. Raises UserError if that takes seconds, or writes a million words.

        Whole batches are rendered next. A template that refuses the conversation may still take others.
        """
        text = self._written([QUESTION, ANSWER], False, None)
        if isinstance(text, BadRow) and text.reason == TOO_LONG:
            raise UserError(f"The chat template makes too much of two words: {text}. See data.chat_template.")

    @cached_property
    def can(self) -> Writes:
        return writes(self.render)

    def adapt(self, messages: Sequence[dict]) -> list[dict]:
        """The messages in the form that the template can write."""
        plain = all(
            isinstance(message.get("content"), str) and "tool_calls" not in message for message in messages
        )
        return (
            list(messages)
            if plain and self.can.text and not self.can.moved
            else [adapted(message, self.can) for message in messages]
        )

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

    def render_all(self, requests: Sequence[Request]) -> list[str | BadRow]:
        """Render each request; those without tools, TOGETHER at a time, in one call per kind of ending."""
        texts: dict[int, str | BadRow] = {}
        for ending in (False, True):
            every = [i for i, (_, prompt, tools) in enumerate(requests) if prompt is ending and tools is None]
            for group in (every[start : start + TOGETHER] for start in range(0, len(every), TOGETHER)):
                with suppress(Exception):  # the template refuses some row: rendered one by one below
                    rendered = self._apply([requests[i][0] for i in group], ending, None, len(group))
                    texts |= {
                        i: self._ended(caught(checked_text, text), ending)
                        for i, text in zip(group, rendered, strict=True)
                    }
        return [texts[i] if i in texts else self.render(*request) for i, request in enumerate(requests)]

    def _apply(
        self, messages: list, generation: bool, tools: list | None, conversations: int = 1
    ) -> str | list[str]:
        """Text that the template writes for a conversation, or texts for a list of several."""
        with render_limit(conversations), template_day(self.day):
            return self.tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
                messages, tools=tools, tokenize=False, add_generation_prompt=generation, **self.variables
            )

    def render(self, messages: list[dict], generation: bool, tools: list | None) -> str | BadRow:
        """Text of a conversation, with the generation prompt if `generation`, else without; a BadRow if that
        fails.

        Raises UserError if the template is too slow: it is so for every row.
        """
        return self._ended(self._written(messages, generation, tools), generation)

    def _ended(self, text: str | BadRow, generation: bool) -> str | BadRow:
        """A rendering without a generation prompt that was not asked for."""
        return text if generation or isinstance(text, BadRow) else text.removesuffix(self._prompt_behind)

    @cached_property
    def generation_prompt(self) -> str:
        """The text between a question and its answer; "" if that can't be told."""
        question = self.adapt([QUESTION])
        asked, plain = (self._written(question, generation, None) for generation in (True, False))
        if isinstance(asked, BadRow) or isinstance(plain, BadRow) or not asked.startswith(plain):
            return ""
        return asked[len(plain) :]

    @cached_property
    def _prompt_behind(self) -> str:
        return prompt_behind(self._written, self.ends, self.tokens.special_texts)

    def _written(self, messages: list[dict], generation: bool, tools: list | None) -> str | BadRow:
        """The text as the template writes it. As `render`."""
        try:
            text = self._apply(messages, generation, tools)
        except UserError:
            raise
        except Exception as error:  # a template is a program of its own: it may fail in any way
            return BadRow(
                "refused by the chat template",
                f"the chat template refuses it: {type(error).__name__}: {reason_of(error)[:-1]}",
            )
        return caught(checked_text, text)  # pyright: ignore[reportArgumentType]

    def rendered(self, chat: Chat, texts: list[str | BadRow]) -> Rendered:
        """Check that the beginnings of a conversation are those of its text; raise BadRow if one is not.

        texts: the renderings of `chat.requests()`, in order; a BadRow among them is raised. A thought that
        the generation prompt has and the template leaves out of the answer is written into the text.
        """
        renderings = map(_raise_bad, texts)
        whole = rendering = next(renderings)
        last = len(chat.messages) - 1
        template = str(self.tokenizer.chat_template)
        parts: list[tuple[int, str, str]] = []  # number, head and upto of each labelled turn
        for number in chat.turns:
            head = next(renderings)
            upto = with_thought(
                head, next(renderings) if number < last else whole, chat.messages[number], template
            )
            whole = upto if number == last else whole
            parts.append((number, head, upto))
        turns = []
        for number, prompt, upto in parts:
            head = self._with_header(prompt, whole)
            thought = opened(head)
            if not whole.startswith(thought.before + thought.marker if thought else head):
                raise BadRow("prompt is not a prefix", _differ("its generation prompt", number, head, whole))
            stop = len(whole) if number == last else len(self.up_to(number, upto, whole))
            if stop < len(head) and thought is None:
                raise not_written(number)
            turns.append(Turn(number, head, stop, thought is not None))
        answers = chat.messages[last]["role"] == "assistant"
        final = "other" if not answers else "call" if chat.messages[last].get("tool_calls") else "answer"
        added = last if whole != rendering else None
        return Rendered(whole, turns, final, self._unwritten(chat, rendering, added) + chat.notes)

    def _with_header(self, head: str, whole: str) -> str:
        """`head`, and the assistant's header behind it where the generation prompt lacks that: behind another
        turn of the assistant, or a tool's result.
        """
        usual = self.generation_prompt
        if not usual.strip() or head.endswith(usual) or not whole.startswith(head):
            return head
        thought, rest = opened(usual) or closed(usual), whole[len(head) :]
        for header in [usual, *([thought.before] if thought else [])]:
            between, found, _ = rest.partition(header)
            for token in self.tokens.special_texts:
                between = between.replace(token, "")
            if found and not between.strip():
                return whole[: len(head) + rest.index(header) + len(header)]
        return head

    def _unwritten(self, chat: Chat, rendering: str, added: int | None) -> tuple[Note, ...]:
        """Notes on what the template leaves out. Raises BadRow if it was to be trained on.

        rendering, added: see `probe.unwritten`. Under split_turns what is left out of an earlier answer is
        not named: it is trained on in a row of its own.
        """
        notes: list[Note] = []
        for index, what, learnable in unwritten(chat.messages, chat.tools, rendering, added, self.render):
            answer = index is not None and chat.messages[index]["role"] == "assistant"
            trained = answer and (index in chat.turns) != (self.train_on == "all")
            if trained and learnable and index is not None:
                raise BadRow(
                    f"{what} is not written",
                    f"message {index + 1} (assistant): the chat template leaves out its {what}, which was to "
                    "be trained on",
                )
            if not (self.split_turns and answer):
                notes.append(("unwritten", what))
        return tuple(notes)

    def up_to(self, number: int, upto: str, whole: str) -> str:
        """The part of `upto` that ends with the end marker. Raises BadRow if that isn't a prefix of `whole`.

        number: index of the turn, for the error. upto: the conversation rendered up to this turn's answer.
        """
        eos = str(self.tokenizer.eos_token or "")
        marked = self._up_to_marker(upto)
        if not whole.startswith(marked) and eos and upto.endswith(eos):
            # Some templates (Phi-3's) close the last turn with one more eos, not there in the middle.
            marked = self._up_to_marker(upto.removesuffix(eos))
        if not whole.startswith(marked):
            raise BadRow("turn is not a prefix", _differ("the end of the conversation", number, upto, whole))
        return marked

    def _up_to_marker(self, text: str) -> str:
        """`text` without white space after a final special token: its tokens depend on what follows."""
        stripped = text.rstrip()
        return stripped if stripped.endswith(self.tokens.special_texts) else text


def _raise_bad(text: str | BadRow) -> str:
    if isinstance(text, BadRow):
        raise text
    return text


def not_written(turn: int) -> BadRow:
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
    """Clause that quotes the first place where `prefix`, a rendering up to a turn, isn't a prefix of `full`.

    case: what follows the turn in `prefix`. turn: its index, from 0.
    """
    at = common_prefix(prefix, full)
    start = max(0, at - 20)
    return (
        f"message {turn + 1} (assistant): the chat template writes {_quoted(prefix, start, at + 30)} when "
        f"{case} follows, but {_quoted(full, start, at + 30)} in the whole conversation, so which part is "
        "the answer is not defined"
    )


def _quoted(text: str, start: int, stop: int) -> str:
    """A part of a text in quotes, without marks of control tokens."""
    return quoted(unmarked(text[start:stop]))


# The labels of a rendered conversation, and the token that ends an answer #

#     Rendered ──> Cut ──texts()──> one call of the tokenizer ──spans()──> ids, labelled turns
#
# An answer begins behind the tokens of its generation prompt, and ends with its end marker: the first token
# of the trailing run of special tokens and white space that generation stops at. Where the template writes
# none, the special token that opens the next turn ends it (GLM-4.5's <|user|>).


class Span(NamedTuple):
    """The tokens of a labelled turn."""

    number: int  # of the message, from 0
    start: int  # behind the generation prompt
    stop: int  # of the turn, with white space and tokens behind its end marker


class Cut:
    """A rendered conversation, cut into pieces whose tokens make up the whole's."""

    def __init__(self, rendered: Rendered, tokens: TextTokenizer) -> None:
        self.rendered = rendered
        self._pieces = tokens.pieces(rendered.full)
        self._texts = self._pieces.texts()
        full, turns = rendered.full, rendered.turns
        self._heads = [self._tail(common_prefix(turn.head, full), turn.head) for turn in turns]
        self._stops = [self._tail(turn.stop, full[: turn.stop]) for turn in turns]

    def texts(self) -> Iterator[str]:
        """All texts whose tokens `spans` needs."""
        yield from self._texts
        for _, tail in (*self._heads, *self._stops):
            yield tail

    def spans(self, table: Mapping[str, list[int]]) -> tuple[list[int], list[Span]]:
        """(ids of the whole, the tokens of each labelled turn). table: ids by text.

        Raises BadRow if the tokens of a turn's beginning or end aren't a prefix of the whole's.
        """
        full: list[int] = []
        counts = []  # of tokens before each piece
        for text in self._texts:
            counts.append(len(full))
            full += table[text]
        spans = []
        tails = zip(self.rendered.turns, self._heads, self._stops, strict=True)
        for turn, (first, head), (last, tail) in tails:
            head_ids, tail_ids = table[head], table[tail]
            there = full[counts[first] : counts[first] + len(head_ids)]
            start = counts[first] + common_prefix(head_ids, there)
            if start < counts[first] + len(head_ids) and not turn.opens:
                raise self._merged("begins", turn, len(turn.head))
            stop = counts[last] + len(tail_ids)
            if full[counts[last] : stop] != tail_ids:
                raise self._merged("ends", turn, turn.stop)
            spans.append(Span(turn.number, start, stop))
        return full, spans

    def _tail(self, end: int, prefix: str) -> tuple[int, str]:
        """(Index of the piece that `end` lies in, `prefix` from the beginning of that piece on)."""
        index, start = self._pieces.tail(end)
        return index, prefix[start:]

    def _merged(self, verb: str, turn: Turn, at: int) -> BadRow:
        """Return the reason to refuse a turn whose answer `verb` ("begins", "ends") inside a token."""
        full = self.rendered.full
        return BadRow(
            "tokens merge across the boundary",
            f"message {turn.number + 1} (assistant) {verb} inside a token: the tokens of "
            f"{quoted(unmarked(full[max(0, at - 20) : at]))} change when "
            f"{quoted(unmarked(full[at : at + 20]))} follows, so the "
            "label mask would not be exact",
        )


class End(NamedTuple):
    """The token that ends an assistant turn under a chat template."""

    token: int | None  # None: the template ends it with no special token
    written: bool  # in the turn; else it is the one that opens the next turn


class Endings(NamedTuple):
    """Tokens that end an assistant turn: of an answer, and of a call of tools."""

    answer: End
    call: End

    @property
    def tokens(self) -> list[int]:
        return [end.token for end in self if end.token is not None]


def endings_of(renderer: Renderer, tokens: TextTokenizer, known: Sequence[int]) -> Endings:
    """Find out how a template ends a turn, by rendering small conversations.

    known: tokens that generation stops at (the model's, the tokenizer's eos); of several markers one of these
    is the end. Looked at is a turn in the middle, where the template allows one: some templates write another
    token behind the last.
    """
    turns = renderer.adapt([QUESTION, ANSWER] * 2)
    answer = _end(renderer, tokens, known, turns, None)
    if not renderer.can.arguments:
        return Endings(answer, answer)
    calls = renderer.adapt(call_turns("", {"city": "Paris"}))
    return Endings(answer, _end(renderer, tokens, known, calls, [TOOL]))


def _end(
    renderer: Renderer, tokens: TextTokenizer, known: Sequence[int], messages: list[dict], tools: list | None
) -> End:
    """The end of the first assistant turn, in the middle of the conversation or else as its last turn."""
    following = None
    for part in (messages, messages[:2]):
        markers, behind = _after(renderer, tokens, part, tools)
        if markers:
            # A call may be closed by a token of its own before the turn ends.
            unknown = markers[-1] if tools else markers[0]
            return End(next((token for token in markers if token in known), unknown), True)
        following = behind if following is None else following
    return End(following, False)


def _after(
    renderer: Renderer, tokens: TextTokenizer, messages: list[dict], tools: list | None
) -> tuple[list[int], int | None]:
    """(Markers at the end of the first answer, the special token that follows it); nothing if refused."""
    whole, upto = (renderer.render(part, False, tools) for part in (messages, messages[:2]))
    if isinstance(whole, BadRow) or isinstance(upto, BadRow):
        return [], None
    try:
        stop = len(renderer.up_to(1, upto, whole)) if len(messages) > 2 else len(whole)
        cut = Cut(Rendered(whole, [Turn(1, "", stop, opens=True)], "answer"), tokens)
        ids, (span,) = cut.spans(tokens.table(cut.texts()))
    except BadRow:
        return [], None
    markers = [ids[index] for index in tokens.markers(ids, span.start, span.stop)]
    following = ids[span.stop] if span.stop < len(ids) and ids[span.stop] in tokens.special else None
    return markers, following
