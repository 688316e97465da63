"""A conversation with a model: its turns are kept, and each answer follows all of them."""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from meshtune.api.answer import Answerer
from meshtune.data.example import Example
from meshtune.data.prompts import Given, prompts_of
from meshtune.errors import UserError
from meshtune.launch.signals import StopRequest
from meshtune.train.generate import GREEDY, Sampling, TextStream


class Conversation:
    """Turns of a user and a model. Without a chat template each message is answered separately.

    system: the first message; None: none, or what the template writes without it. sampling: turn after turn
    draws from seeds that follow each other. Raises UserError for a system message that the template refuses,
    or that no template can write.
    """

    def __init__(
        self,
        answerer: Answerer,
        *,
        system: str | None = None,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
    ) -> None:
        if system is not None and not answerer.templated:
            raise UserError(
                "--system needs a chat template, and the model has none; leave it out, or name the template "
                "that it was trained with: data.chat_template=NAME."
            )
        self.answerer = answerer
        self.max_new_tokens, self.sampling = max_new_tokens, sampling
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict] = []  # after the system message: user and assistant in turn
        self._asked = 0
        if system is not None:
            answerer.prompt_ids(Example(Given("--system", 1), messages=(*self.system, HELLO)))

    @property
    def messages(self) -> list[dict]:
        """The conversation so far, the system message first."""
        return [*self.system, *self.turns]

    def reset(self) -> None:
        """Forget all turns but the system message."""
        self.turns = []

    def ask(self, text: str, write: Callable[[str], object]) -> Iterator[str]:
        """Pass the answer to `write` as it is generated; yield sentences on what the user must know.

        Ctrl-C stops the answer after its next token: what was said stays a turn. A message without an answer
        is forgotten. Raises UserError for a message that the model can't take.
        """
        (asked,) = prompts_of([text])
        self.turns.append({"role": "user", "content": text})
        try:
            ids, left_out = self._prompt(asked)
        except UserError:
            self.turns.pop()
            raise
        if left_out:
            yield (
                f"The context of {self.answerer.context:,} tokens has no room for all messages and "
                f"an answer of {self.max_new_tokens:,} (--max-new-tokens): the oldest {left_out} "
                f"{'message is' if left_out == 1 else 'messages are'} left out from here on; /reset begins "
                "anew."
            )
        # The signal is noted, not raised at once: Python drops a KeyboardInterrupt that comes in a finalizer.
        request = StopRequest(
            enabled=threading.current_thread() is threading.main_thread(), signals=[signal.SIGINT]
        )
        stream, sampling = TextStream(write, lambda: request.requested), self.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + self._asked)
        self._asked += 1
        stopped = False
        try:
            with request:
                self.answerer.answers(
                    [ids], max_new_tokens=self.max_new_tokens, sampling=sampling, stream=stream
                )
        except KeyboardInterrupt:
            stopped = True
        except BaseException:
            self.turns.pop()
            raise
        if stream.text.strip():
            self.turns.append({"role": "assistant", "content": stream.text})
        else:
            self.turns.pop()
        yield from self._remarks(len(ids), len(stream.ids), stopped=stopped, said=bool(stream.text.strip()))

    def _prompt(self, asked: Example) -> tuple[list[int], int]:
        """(Tokens that the answer follows, the number of old messages left out for it).

        The oldest turns are left out until an answer of max_new_tokens fits; only for the last message a
        shorter answer will do. asked: the last message. Raises UserError if no token of an answer fits.
        """
        context, turns, templated = self.answerer.context, list(self.turns), self.answerer.templated
        while True:
            example = Example(asked.origin, messages=(*self.system, *turns)) if templated else asked
            ids = self.answerer.prompt_ids(example)
            fits = context is None or len(ids) + self.max_new_tokens <= context
            if fits or not templated or len(turns) == 1:
                break
            del turns[:2]
        if context is not None and len(ids) >= context:
            raise UserError(
                f"The message has {len(ids):,} tokens with what stands around it, and the model's context is "
                f"{context:,}, which leaves none for an answer; shorten it."
            )
        left_out = len(self.turns) - len(turns)
        self.turns = turns
        return ids, left_out

    def _remarks(self, prompt: int, tokens: int, *, stopped: bool, said: bool) -> Iterator[str]:
        """Yield sentences on how an answer ended. prompt, tokens: lengths of prompt and answer."""
        context = self.answerer.context
        if stopped:
            yield "Stopped." if said else "Stopped before the first word; the message is forgotten."
        elif not said:
            yield "The answer is empty; the message is forgotten."
        elif tokens == self.max_new_tokens:
            yield f"The answer was cut at {tokens:,} tokens; --max-new-tokens allows longer ones."
        elif context is not None and prompt + tokens >= context:
            yield f"The answer was cut: the context of {context:,} tokens is full."


HELLO = {"role": "user", "content": "Hello"}
