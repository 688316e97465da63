"""`meshtune data`: show what training would read."""

from typing import Annotated

import typer

from meshtune.commands.options import AsJson, Settings, announce, show, split
from meshtune.filesystem import paths_named
from meshtune.units import working


def data(
    settings: Settings = None,
    samples: Annotated[int, typer.Option(help="documents to show, labelled parts in colour")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show what training would see: rows, tokens, labelled share, lengths, packing, samples. Trains
    nothing.
    """
    file, overrides = split(settings)
    announce(file)
    from meshtune import config

    resolved = config.load(file, overrides)
    from meshtune.data.files import check_there
    from meshtune.model.hub import check_name

    check_name(resolved.model.name, resolved.model.revision)
    check_there(resolved.data)
    with working("loading the tokenizer and the rows"):
        from meshtune.api.resolve import inputs_of, positions_sentences
        from meshtune.data import inspect
        from meshtune.report.data import document

    with paths_named(resolved):
        tokenizer, _, prepared = inputs_of(resolved)
        description = inspect.describe(prepared, tokenizer, samples, resolved.data.max_samples)
        description["sentences"] += positions_sentences(resolved, prepared)
    show(document(description), as_json=as_json)
