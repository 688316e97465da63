"""`meshtune config`: a commented config file to start from; `meshtune schema`: its JSON schema."""

from pathlib import Path
from typing import Annotated

import typer

METHODS = ("full", "lora", "qlora")


def config(
    method: Annotated[
        str, typer.Option(metavar="[full|lora|qlora]", help="train all weights, or adapters")
    ] = "full",
    size: Annotated[
        str | None, typer.Option(help="0.6b (the default) … 70b, or a name of plan max: llama-3.1-8b")
    ] = None,
    model: Annotated[str | None, typer.Option(help="a hub id or folder, instead of a size")] = None,
    out: Annotated[Path | None, typer.Option(help="a new file to write it to, instead of stdout")] = None,
) -> None:
    """Print a commented config file to start from.

    Batch per GPU, recomputation and the parallel layout are left to the planner.
    """
    from meshtune.errors import UserError, did_you_mean, nearest
    from meshtune.plan.models import by_size, hub_id, known_config
    from meshtune.reference.starter import SIZES, starter
    from meshtune.rundir import write_text_atomically
    from meshtune.tools.table import pasted_value

    if method not in METHODS:
        raise UserError(
            pasted_value("method", method) or f"--method {method}: it must be {' or '.join(METHODS)}."
        )
    if size and model:
        raise UserError(f"--size {size} and --model {model} both name the model; keep one.")
    if out and out.exists():
        raise UserError(f"{out} exists; name another file, or remove it first.")
    size = size or "0.6b"
    if not model and size.lower() not in SIZES and not known_config(size):
        raise UserError(
            f"--size {size} is neither {', '.join(SIZES)} nor a model of `meshtune plan max`"
            f"{did_you_mean(nearest(size.lower(), [*SIZES, *by_size()]))} --model takes any hub id or folder."
        )
    text = starter(method, hub_id(model or SIZES.get(size.lower(), size)), str(out or "run.yaml"))
    if out:
        write_text_atomically(out, text)
        print(f"Wrote {out}; its header has the next commands.")
    else:
        print(text, end="")


def schema(
    out: Annotated[Path | None, typer.Option(help="a file to write it to, instead of stdout")] = None,
) -> None:
    """Print the JSON schema of a config file, for editors.

    An editor with yaml-language-server reads it where the file's first line is
    `# yaml-language-server: $schema=PATH`. `meshtune config` writes that line.
    """
    from meshtune.reference.schema import as_json
    from meshtune.rundir import write_text_atomically

    if out:
        write_text_atomically(out, as_json())
    else:
        print(as_json(), end="")
