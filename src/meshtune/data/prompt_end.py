"""Find the generation prompt that some chat templates write behind every conversation, asked for or not.

<user>Hello<eot><assistant>Yes<eot><assistant>      Llama 3 as first released, without add_generation_prompt
                                   └────────┘       not a part of the answer, which ends at <eot>
"""

from collections.abc import Sequence

from meshtune.data.example import BadRow
from meshtune.data.probe import CONVERSATION, Render
from meshtune.data.tokens import common_prefix


def prompt_behind(render: Render, ends: Sequence[str], special: Sequence[str]) -> str:
    """Return the generation prompt that the template writes behind an answer; "" if it writes none there.

    ends: texts of the tokens that generation stops at. special: texts of all special tokens. With the middle
    of a conversation, where the next user's turn follows the answer, it shares the end marker and perhaps the
    beginning of a header: `end_of_answer` tells where one ends and the other begins.
    """
    requests = [(2, False), (2, True), (1, True), (4, False)]
    texts = [render(CONVERSATION[:number], generation, None) for number, generation in requests]
    said = [message["content"] for message in CONVERSATION]
    if any(isinstance(text, BadRow) for text in texts):
        return ""
    last, asked, head, whole = map(str, texts)
    more = asked.removeprefix(last)  # of the prompt, where it is asked for (Command A's <|START_RESPONSE|>)
    if last + more != asked or whole.startswith(last) or not all(text in whole for text in said):
        return ""
    start = whole.partition(said[0])[0]
    middle = whole.partition(said[1])[2].partition(said[2])[0]
    behind, before = last.partition(said[1])[2], head.removesuffix(more).partition(said[0])[2]
    prompt = behind[end_of_answer(behind, before, middle, start, ends, special) :]
    return prompt if prompt.strip() and head.endswith(prompt + more) else ""


def end_of_answer(
    behind: str, before: str, middle: str, start: str, ends: Sequence[str], special: Sequence[str]
) -> int:
    """Return the characters of `behind`, an end marker and a generation prompt, that are the end marker.

    before: text between the first question and its answer, with the prompt at its end. middle: between that
    answer and the next question. start: before the first question, with the user's header at its end. The
    marker goes up to a token that generation stops at, else it is what the prompt and the user's header don't
    account for.
    """
    shared = behind[: common_prefix(behind, middle)]
    stops = [place + len(end) for end in ends if (place := shared.rfind(end)) >= 0]
    least = max(
        len(behind) - common_suffix(behind, before, special),
        len(middle) - common_suffix(middle, start, special),
    )
    at = max(stops) if stops else least
    return at + len(behind[at:]) - len(behind[at:].lstrip())


def common_suffix(one: str, other: str, special: Sequence[str]) -> int:
    """Return the length of the longest common suffix that does not begin inside a special token of `one`."""
    start = len(one) - common_prefix(one[::-1], other[::-1])
    for token in special:
        place = one.find(token)
        while place >= 0:
            if place < start < place + len(token):
                start = place + len(token)
            place = one.find(token, place + 1)
    return len(one) - start
