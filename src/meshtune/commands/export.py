"""`meshtune export`: write a run's model as a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from meshtune.commands.options import AsJson, announce, check_target, show_json
from meshtune.units import working


def export(
    run: Annotated[Path, typer.Argument(help="a run folder, or an adapter folder")],
    to: Annotated[Path, typer.Argument(help="the folder to write")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="model.name=FOLDER, of a base that has moved"),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="fold the LoRA adapter into the weights")] = False,
    step: Annotated[
        int | None, typer.Option(help="export this checkpoint instead of the final model")
    ] = None,
    push_to: Annotated[str | None, typer.Option(help="hub id to upload the folder to")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a Hugging Face folder from a run: the final model or a checkpoint, an adapter or merged."""
    announce(str(run))
    check_target(str(run))
    from meshtune.api.export import exported

    with working("reading the weights and writing the folder"):
        folder = exported(run, to, merge=merge, step=step, push_to=push_to, overrides=settings or ())
    show_json({"folder": str(folder)}) if as_json else print(folder)
