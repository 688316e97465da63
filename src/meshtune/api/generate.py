"""Generate: answer prompts with a target."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from meshtune.errors import UserError

if TYPE_CHECKING:
    from meshtune.data.prompts import Prompt


def generate(
    model: str | os.PathLike[str] | None,
    prompts: "Prompt | Sequence[Prompt]",
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Answers in the order of the prompts, without the prompts and the stop token.

    model: a run, model or adapter folder, a hub id or a config file; None: `overrides` (section.key=value,
    as in train.device=cpu) alone name the model. prompts: texts, conversations (lists of messages {role,
    content}), or one of these. A text is wrapped as in training: by the chat template, or followed by the
    separator, which a model that was trained on whole texts does not get. temperature: 0 is greedy. top_p,
    seed: see `Sampling`. Raises UserError without prompts, for those that the model can't take, and where
    `model` holds none.
    """
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Mapping)):
        prompts = cast("list[Prompt]", [prompts])
    if not prompts:
        raise UserError("No prompt is given; use --prompt, or write prompts to stdin, one a line.")
    from meshtune.api.answer import open_answerer
    from meshtune.data.prompts import prompts_of
    from meshtune.train.generate import Sampling

    sampling = Sampling(temperature, top_p, seed)
    examples = prompts_of(cast("Sequence[Prompt]", prompts))
    answerer = open_answerer(None if model is None else str(model), overrides)
    ids = [answerer.prompt_ids(example) for example in examples]
    return answerer.answers(ids, max_new_tokens=max_new_tokens, sampling=sampling)
