"""The one way from prompts and conversations to answers, for generate, chat and Python."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshtune.data.example import BadRow, Example
from meshtune.data.prompts import question, several
from meshtune.errors import UserError
from meshtune.model.anatomy import anatomy, is_scored
from meshtune.model.files import context_of
from meshtune.train.generate import GREEDY, Sampling, TextStream, answer_ids, decoded

if TYPE_CHECKING:
    from meshtune.api.target import Opened


class Answerer:
    """A target's model on one device, which answers prompts wrapped as in training: by the chat template, or
    followed by the separator, which a model that was trained on whole texts does not get.
    """

    def __init__(self, opened: "Opened") -> None:
        if is_scored(opened.model.config):
            raise UserError(
                f"{opened.model.name_or_path} is a reward model: it scores answers and writes none. Export "
                "it, and score with transformers' AutoModelForSequenceClassification (docs/preferences.md)."
            )
        self.opened = opened
        self.encoder = opened.encoder
        if not self.encoder.templated and self.encoder.train_on == "all":  # trained to continue with a text
            self.encoder.separator = ""
        # Tokens of prompt and answer; None: no limit.
        self.context = context_of(opened.model.config, anatomy(opened.model).first_position)
        self.cut = 0  # answers so far that ended because the context was full

    @property
    def templated(self) -> bool:
        """Whether it takes conversations; else only texts."""
        return self.encoder.templated

    def prompt_ids(self, example: Example) -> list[int]:
        """The tokens that the answer follows. Raises UserError where the model can't take the example."""
        if not (example.messages and self.templated):
            return self.encoder.prompt_ids(example)
        try:
            return self.encoder.turn_ids(question(example), example.tools)
        except BadRow as bad:
            raise UserError(f"{example.origin}: {bad}.") from bad

    def prompts_ids(self, examples: Sequence[Example]) -> list[list[int]]:
        """`prompt_ids` of many. Raises UserError with each that the model can't take."""
        ids, problems = [], []
        for example in examples:
            try:
                ids.append(self.prompt_ids(example))
            except UserError as error:
                problems += error.problems
                continue
            if self.context is not None and len(ids[-1]) >= self.context:
                problems.append(
                    f"{example.origin}: it has {len(ids[-1]):,} tokens with what stands around it, and the "
                    f"model's context is {self.context:,}, which leaves none for an answer; shorten it."
                )
        if problems:
            raise UserError(several(problems))
        return ids

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stream: TextStream | None = None,
        advance: Callable[..., object] = lambda **_: None,
    ) -> list[str]:
        """The text that follows each prompt (of `prompt_ids`), in their order, without the stop token.

        An answer also ends where prompt and answer fill the context, which `cut` counts. stream: gets the
        text of the only prompt's answer as it is generated. advance: as of `answer_ids`.
        """
        new_ids = answer_ids(
            self.opened.parallel, self.opened.tokenizer, prompts, max_new_tokens=max_new_tokens,
            stop_ids=self.encoder.stop_ids, sampling=sampling, stream=stream, advance=advance,
        )  # fmt: skip
        self.cut += sum(
            len(ids) < max_new_tokens and len(prompt) + len(ids) == self.context
            for prompt, ids in zip(prompts, new_ids, strict=True)
        )
        return decoded(self.opened.tokenizer, new_ids)


def open_answerer(name: str | None, overrides: Sequence[str] = ()) -> Answerer:
    """Load a target's model. name, overrides: as `target_of` and `refuse_unused`
    take them, and raise for them.
    """
    from meshtune.api.target import open_model, refuse_unused, target_of

    target = target_of(name, overrides)
    refuse_unused(overrides, of_file=False)
    return Answerer(open_model(target))
