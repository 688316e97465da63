"""`meshtune generate`: answer prompts with a target."""

import sys
from typing import Annotated

import typer

from meshtune.commands.options import AsJson, TargetWords, announce, show_json, split
from meshtune.units import printable


def generate(
    target: TargetWords,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="may be repeated; else lines of stdin")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Answer prompts, wrapped as in training (chat template, or prompt and separator)."""
    name, overrides = split(target)
    announce(name)
    from meshtune.api import generate as api

    prompts = prompt or [line.rstrip("\n") for line in sys.stdin]
    texts = api.generate(
        name, prompts, max_new_tokens=max_new_tokens, temperature=temperature, overrides=overrides
    )
    if as_json:
        show_json([{"prompt": p, "answer": a} for p, a in zip(prompts, texts, strict=True)])
    else:
        for text in texts:
            print(printable(text) if sys.stdout.isatty() else text)
