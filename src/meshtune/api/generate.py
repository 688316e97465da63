"""Generate: answer prompts with a target."""

import os
from collections.abc import Sequence

from meshtune.errors import UserError

LOWEST_TEMPERATURE = 1e-5


def generate(
    model: str | os.PathLike[str] | None,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Answers in the order of the prompts, without the prompts and the stop token.

    model: a run, model or adapter folder, a hub id or a config file; None: `overrides` (section.key=value,
    as in train.device=cpu) alone name the model. Prompts are wrapped as in training: by the chat template, or
    followed by the separator, which a model that was trained on whole texts does not get. temperature: 0 is
    greedy. Raises UserError without prompts, and where `model` holds none.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not prompts:
        raise UserError("No prompt is given; use --prompt, or write prompts to stdin, one a line.")
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise UserError(
            f"--temperature {temperature:g} is below {LOWEST_TEMPERATURE:g}, and logits divided by it would "
            "be infinite; use 0 for the likeliest token."
        )
    for number, prompt in enumerate(prompts, 1):
        if not prompt.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise UserError(f"Prompt {number} has bytes that are not UTF-8: {prompt[:40]!r}.")
    from meshtune.api.target import open_model, target_of
    from meshtune.data.example import Example, Origin
    from meshtune.train.generate import answers

    opened = open_model(target_of(None if model is None else str(model), overrides))
    encoder = opened.encoder
    if not encoder.templated and encoder.train_on == "all":  # trained to go on with a text, not to answer
        encoder.separator = ""
    origin = Origin("prompt", 1)
    examples = [
        Example(
            origin,
            messages=({"role": "user", "content": prompt},),
            tools=None,
            prompt=None,
            completion=None,
            text=None,
        )
        if encoder.templated
        else Example(origin, messages=None, tools=None, prompt=prompt, completion="", text=None)
        for prompt in prompts
    ]
    return answers(
        opened.parallel,
        opened.tokenizer,
        [encoder.prompt_ids(example) for example in examples],
        max_new_tokens=max_new_tokens,
        stop_ids=encoder.stop_ids,
        temperature=temperature,
    )
