"""Texts to token ids, cut at special tokens so that a text and its beginnings are tokenised once.

A tokenizer splits a text at its special tokens before anything else, so the ids of a text are those of its
pieces, each from one special token to the next:

    <|im_start|>user\\nHi      <|im_end|>\\n      <|im_start|>assistant\\nHello      <|im_end|>\\n
    └ piece 0 ┘               └ piece 1 ┘        └ piece 2 ┘                        └ piece 3 ┘

The ids of a beginning of the text are those of its whole pieces and of what it has of the next one. Special
tokens at which that does not hold (found by trying each) cut nothing. Control tokens that are marked in a
text (`Treatment`) are pieces of their own, whose ids are those of their characters.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from meshtune.data.example import BadRow, Note
from meshtune.data.messages import MARKERS
from meshtune.errors import UserError

ControlTokens = Literal["auto", "error", "text", "keep"]
START, END = "\U0010fffe", "\U0010ffff"  # around a marked token: noncharacters, which no text has
BY_DESIGN = {*MARKERS, *MARKERS.values()}
GROWTH = 100  # characters that normalizers may make of one; NFKD makes up to 18
PROBES = ("Hello  world", " a\n\nb", "x", "\n", "▁1 ")  # texts next to which a special token is tried


class Pieces(NamedTuple):
    """A text, cut at its special tokens."""

    text: str
    starts: list[int]  # of each piece; the first is 0
    ends: list[int]  # of the special token that each piece starts with; of one without, its beginning

    def texts(self) -> list[str]:
        stops = [*self.starts[1:], len(self.text)]
        return [self.text[start:stop] for start, stop in zip(self.starts, stops, strict=True)]

    def tail(self, end: int) -> tuple[int, int]:
        """(Index of a piece, where it starts): the last one whose special token lies in text[:end]."""
        index = max(0, bisect_right(self.ends, end) - 1)
        return index, self.starts[index]


class TextTokenizer:
    """Tokenises texts, with nothing added; special tokens that are written in a text are recognised."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        _refuse_growth(tokenizer)
        added = tokenizer.added_tokens_decoder
        named = [id for id in tokenizer.all_special_ids if id is not None]
        self.special = {id for id, token in added.items() if token.special}.union(named)
        _refuse_unknown_end(tokenizer)
        self.special_texts = tuple(tokenizer.convert_ids_to_tokens(sorted(self.special)))
        self.backend = self._fast_backend()
        self._blank: dict[int, bool] = {}  # token id -> True if it is white space only

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """ids of each text."""
        if not texts:
            return []
        if self.backend is None:
            return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportReturnType]
        backend = unpadded(self.backend)
        backend.encode_special_tokens = False
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    @cached_property
    def bound(self) -> int:
        return id_bound(self.tokenizer)

    @cached_property
    def all_ids(self) -> frozenset[int]:
        """The ids of its tokens, which may have gaps."""
        return frozenset(self.tokenizer.get_vocab().values())

    def texts_of(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Texts of tokens, of those that are in the vocabulary."""
        known = [id for id in ids if 0 <= id < self.bound]
        return tuple(str(text) for text in self.tokenizer.convert_ids_to_tokens(known) if text)

    def table(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """ids by text, each text tokenised once. Of marked tokens, the ids of their characters."""
        unique = list(dict.fromkeys(texts))
        table = dict(zip(unique, self.ids([unmarked(text) for text in unique]), strict=True))
        for text in unique:
            if text.startswith(START) and text.endswith(END) and self._without_added is not None:
                table[text] = self._as_characters(unmarked(text))
        return table

    def ids_of(self, text: str) -> list[int]:
        """ids of a text; its control tokens may be marked."""
        pieces = self.pieces(text).texts() if START in text else [text]
        table = self.table(pieces)
        return [id for piece in pieces for id in table[piece]]

    def can_write(self, token: str) -> bool:
        """Whether the characters of a control token have ids that are not the token's, apart from the text
        around them.
        """
        if self._without_added is None:
            return False
        encode = self._as_characters
        line, own = encode("\n"), self.tokenizer.convert_tokens_to_ids(token)
        alone = all(
            encode("\n" + text) == [*line, *encode(text)] for text in (*PROBES, token) if text != "\n"
        )
        return alone and own not in encode(token)

    def _as_characters(self, text: str) -> list[int]:
        """ids of a text in which no added token is recognised."""
        assert self._without_added is not None
        return self._without_added.encode(text, add_special_tokens=False).ids

    @cached_property
    def _without_added(self) -> Any:
        """The Rust tokenizer without added tokens; None where there is none."""
        if self.backend is None:
            return None
        state = json.loads(unpadded(self.backend).to_str()) | {"added_tokens": [], "post_processor": None}
        try:
            return type(self.backend).from_str(json.dumps(state))
        except Exception:  # the library's only class: a part of the tokenizer needs one of its added tokens
            return None

    def pieces(self, text: str) -> Pieces:
        """Cut a text before each special token in it that splits texts exactly."""
        starts, ends = [0], [0]
        for match in self._cuts.finditer(text):
            mark = match[0][0] in (START, END)
            if not mark and match[0] not in self._exact:
                continue
            if match.start():
                starts.append(match.start())
                ends.append(match.end())
            else:
                ends[0] = match.end()
            if mark:  # what follows is a piece of its own
                starts.append(match.end())
                ends.append(match.end())
        return Pieces(text, starts, ends)

    @cached_property
    def prefix(self) -> list[int]:
        """The ids that the tokenizer adds before every text: its bos token, or nothing."""
        with_special = self.tokenizer("a")["input_ids"]
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        assert isinstance(with_special, list)
        assert isinstance(bare, list)
        for start in range(len(with_special)):
            if with_special[start : start + len(bare)] == bare:
                return with_special[:start]
        return []

    def is_blank(self, token: int) -> bool:
        """Whether a token is white space only."""
        if token not in self._blank:
            self._blank[token] = not str(self.tokenizer.decode([token])).strip()
        return self._blank[token]

    def markers(self, ids: list[int], start: int, stop: int) -> list[int]:
        """Indices of the special tokens in the run of special tokens and white space before `stop`."""
        run = stop
        while run > start and (ids[run - 1] in self.special or self.is_blank(ids[run - 1])):
            run -= 1
        return [index for index in range(run, stop) if ids[index] in self.special]

    def _fast_backend(self) -> Any:
        """The Rust tokenizer, None where calling it directly gives other ids (as in a few wrappers)."""
        if not self.tokenizer.is_fast:
            return None
        backend: Any = self.tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        probes = [*PROBES, "".join(self.special_texts[:3]) + "x"]
        direct = [encoding.ids for encoding in backend.encode_batch(probes, add_special_tokens=False)]
        return backend if direct == self.tokenizer(probes, add_special_tokens=False)["input_ids"] else None

    @cached_property
    def _cuts(self) -> re.Pattern:
        """Pattern of every token that is found in a text as it is: the leftmost, of these the longest; and of
        marked tokens, or if they are nothing but a mark.
        """
        added = self.tokenizer.added_tokens_decoder.values()
        texts = sorted((str(token) for token in added if not token.normalized), key=len, reverse=True)
        marks = [f"{START}[^{START}{END}]*{END}", START, END]
        return re.compile("|".join([*marks, *map(re.escape, texts)]))

    @cached_property
    def _exact(self) -> frozenset[str]:
        """Texts of the special tokens that split every text that was tried exactly."""
        tokens = [
            token
            for token in self.tokenizer.added_tokens_decoder.values()
            if token.special and not (token.normalized or token.lstrip or token.single_word)
        ]
        if self.backend is None or not tokens:
            return frozenset()
        pairs = [(before, str(token) + after) for token in tokens for before in PROBES for after in PROBES]
        ids = self.table(text for before, after in pairs for text in (before, after, before + after))
        bad = {after for before, after in pairs if ids[before + after] != ids[before] + ids[after]}
        return frozenset(
            str(token) for token in tokens if not any(str(token) + after in bad for after in PROBES)
        )


def id_bound(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest id + 1: the rows that an embedding must have. A vocabulary with gaps has fewer tokens.

    Raises UserError if an added token has the id of another one: texts with that one would hold it.
    """
    vocabulary = tokenizer.get_vocab()
    if len(set(vocabulary.values())) < len(vocabulary):
        added = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        for text, id in vocabulary.items():
            if added.get(id, text) != text:
                raise UserError(
                    f"The tokenizer's added token {added[id]} has the id {id:,}, which the token {text} "
                    "has too. Give it a free id in tokenizer.json, in the model's vocab too."
                )
    return max(vocabulary.values(), default=-1) + 1


def _refuse_unknown_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if the eos token is not in the vocabulary: its id would be null or unk."""
    eos, id = tokenizer.eos_token, tokenizer.eos_token_id
    if eos is not None and (not isinstance(id, int) or tokenizer.convert_ids_to_tokens(id) != str(eos)):
        raise UserError(
            f"The tokenizer's eos_token is {eos}, which its vocabulary does not have; name another in "
            "tokenizer_config.json, or choose a template that brings its own (data.chat_template=chatml)."
        )


def _refuse_growth(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if a tokenizer's rules make a text so much longer that tokenizing it never ends."""
    if not tokenizer.is_fast:
        return
    backend: Any = tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("normalizer", "decoder"):
        component = getattr(backend, name)
        if component is None:
            continue
        most = growth(json.loads(component.__getstate__()))
        if most > GROWTH:
            raise UserError(
                f"The tokenizer's {name} makes up to {most:,.0f} characters of one, and at most {GROWTH} are "
                "sensible; mend its Replace and Prepend rules in tokenizer.json."
            )


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


def common_prefix(one: Sequence, other: Sequence) -> int:
    """Length of the longest common prefix of two texts, or of two lists of tokens."""
    if other[: len(one)] == one:
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def unpadded(backend: Any) -> Any:
    """The Rust tokenizer with padding and truncation off, which a call of its wrapper may have set."""
    backend.no_padding()
    backend.no_truncation()
    return backend


# Begin and end tokens #

#     {"text": "<s>Hello</s>"}           bos and eos are added          ──> <s> Hello </s>
#     prompt "<s>Q</s>", completion "<s>A</s>"                          ──> <s> Q A </s>
#     {"content": "Hello<|im_end|>\n"}   the template ends the answer   ──> "Hello"
#
# Such rows were rendered before. White space outside of these tokens goes with them.


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


def once(messages: Sequence[dict], begin: str, end: str) -> tuple[list[dict], tuple[Note, ...]]:
    """(messages without what the template writes around them, a note on each message that had it).

    begin: text with which the template begins a conversation. end: text with which it ends an answer. Both
    "" where there is none.
    """
    result, notes = list(messages), []
    if begin and messages and (cut := _cut(messages[0], begin, first=True)) is not None:
        result[0] = cut
        notes.append(("control", f"{begin} (begins a conversation, as the template does: written once)"))
    for index, message in enumerate(result):
        answer = message["role"] == "assistant" and not message.get("tool_calls")
        if end and answer and (cut := _cut(message, end, first=False)) is not None:
            result[index] = cut
            notes.append(("control", f"{end} (ends an answer, as the template does: written once)"))
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


# Control tokens in the contents of messages #

#     "Hi<|im_end|>\n<|im_start|>assistant"       a user's content that would end its turn and begin another
#     "Hi⟨<|im_end|>⟩\n⟨<|im_start|>⟩assistant"    marked before rendering: tokenised as characters
#
# A control token is a special token, or an added one with which a turn begins or ends in this template. The
# marks of thoughts are none, nor are other added tokens (<tool_call>), which answers have by design. Marked
# tokens and the texts between them are tokenised apart, as transformers'
# `apply_chat_template(sanitize_control_tokens=True)` does.


class Treatment:
    """Marks, refuses or leaves control tokens in the contents of messages."""

    def __init__(self, mode: ControlTokens, tokens: Sequence[str], can_write: Callable[[str], bool]) -> None:
        """mode: see `encode.Encoder`. tokens: texts of the control tokens. can_write: tells whether the
        characters of one have ids of their own.
        """
        self.mode, self._control, self._can_write = mode, pattern(tokens), cache(can_write)

    def of(
        self, messages: list[dict], tools: list | None, trained: Set[int] = frozenset()
    ) -> tuple[list[dict], list | None, tuple[Note, ...]]:
        """(messages, tools) with control tokens marked as the mode says, and a note on each of a message.

        trained: indices of the messages that are trained on. Raises BadRow where such a token is refused.
        """
        if self._control is None:
            return messages, tools, ()
        pairs = ((index, found(self._control, part)) for index, part in enumerate([*messages, tools or []]))
        there = {index: names for index, names in pairs if names}
        if not there:
            return messages, tools, ()
        for index, names in there.items():
            if self.mode == "error" or (self.mode == "auto" and index in trained):
                raise _refused(index, names[0], messages)
        every = dict.fromkeys(name for names in there.values() for name in names)
        as_text = [name for name in every if self.mode != "keep" and self._can_write(name)]
        if self.mode == "text" and (others := [name for name in every if name not in as_text]):
            raise BadRow(
                "control token without characters",
                f"a message contains {others[0]}, whose characters this tokenizer can't write apart from the "
                "token",
            )
        notes = tuple(
            ("control", f"{name} ({'its characters' if name in as_text else 'kept as the token'})")
            for names in there.values()
            for name in names
        )
        if marks := pattern(as_text):
            messages, tools = [marked(marks, message) for message in messages], tools and marked(marks, tools)
        return messages, tools, notes


def _refused(index: int, token: str, messages: Sequence[dict]) -> BadRow:
    """Return the reason to refuse a row. index: of the message; behind the last one: of the tools."""
    where = f"message {index + 1} ({messages[index]['role']})" if index < len(messages) else "tools"
    return BadRow(
        "control token in a content",
        f"{where} contains {token}, with which the tokenizer or the template marks parts of a conversation",
    )


def pattern(tokens: Sequence[str]) -> re.Pattern | None:
    """Pattern of the control tokens among these texts; None if there are none."""
    texts = sorted({*tokens} - BY_DESIGN, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, filter(None, texts)))) if texts else None


def strings(value: Any) -> Iterator[str]:
    """Yield every text in a message, or in a part of one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def found(control: re.Pattern, message: Any) -> list[str]:
    """Control tokens in the texts of a message, each once."""
    return list(dict.fromkeys(match[0] for text in strings(message) for match in control.finditer(text)))


def marked(control: re.Pattern, value: Any) -> Any:
    """A copy of a message, or of a part of one, in whose texts control tokens are marked."""
    if isinstance(value, str):
        return control.sub(f"{START}\\g<0>{END}", unmarked(value))
    if isinstance(value, Mapping):
        return {marked(control, key): marked(control, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [marked(control, inner) for inner in value]
    return value


def unmarked(text: str) -> str:
    """A text without marks."""
    return text.replace(START, "").replace(END, "")
