"""The labels of a rendered conversation, and the token that ends an answer.

    Rendered ──> Cut ──texts()──> one call of the tokenizer ──spans()──> ids, labelled turns

An answer begins behind the tokens of its generation prompt, and ends with its end marker: the first token of
the trailing run of special tokens and white space that generation stops at. Where the template writes none,
the special token that opens the next turn ends it (GLM-4.5's <|user|>).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from meshtune.data.example import BadRow
from meshtune.data.probe import ANSWER, QUESTION, TOOL, call_turns
from meshtune.data.render import Rendered, Renderer, Turn
from meshtune.data.tokens import TextTokenizer, common_prefix, unmarked
from meshtune.errors import quoted


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
