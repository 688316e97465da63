"""`meshtune data`: show what training would read."""

from typing import Annotated

import typer

from meshtune.commands.options import AsJson, Settings, show_json, split


def data(
    settings: Settings = None,
    samples: Annotated[int, typer.Option(help="documents to show, labelled parts in colour")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show what training would see: rows, tokens, labelled share, lengths, packing, samples. Trains
    nothing.
    """
    file, overrides = split(settings)
    from meshtune import config

    resolved = config.load(file, overrides)
    from meshtune.data import inspect
    from meshtune.train import inputs

    encoder = inputs.encoder_of(inputs.tokenizer_of(resolved.model, resolved.data), resolved.data)
    prepared = inputs.data_of(resolved.data, encoder, seed=resolved.train.seed)
    description = inspect.describe(prepared, encoder.tokenizer, samples=samples)
    if as_json:
        show_json(description)
    else:
        from rich.console import Console

        inspect.show(description, Console())
