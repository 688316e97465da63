"""`meshtune schema`: the JSON schema with which an editor completes and checks a config file."""

from pathlib import Path
from typing import Annotated

import typer


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
