"""`meshtune migrate`: another trainer's configuration as ours."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.commands.options import AsJson, announce, show_json, words_of
from meshtune.errors import UserError
from meshtune.units import counted

if TYPE_CHECKING:
    from meshtune.tools.migrate import Migrated


def migrate(
    file: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE [KEY=VALUE]...",
            help="a YAML of axolotl, LLaMA-Factory, TRL or torchtune, or arguments of transformers as JSON",
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs of the layout and the global batch; default: --with's, or 1"),
    ] = None,
    launcher: Annotated[
        Path | None,
        typer.Option("--with", help="the accelerate or DeepSpeed file that the trainer is started with"),
    ] = None,
    tool: Annotated[
        str | None, typer.Option("--from", help="the tool, where it can't be told from the keys")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="file to write; default: standard output")] = None,
    as_json: AsJson = False,
) -> None:
    """Write another trainer's configuration as ours, with a comment for each key that has no counterpart."""
    name, overrides = words_of(file or [])
    if name is None:
        raise UserError("Name the file to migrate, such as meshtune migrate axolotl.yaml.")
    announce(name)
    from meshtune.api.plan import layout_refused
    from meshtune.reference.schema import EDITOR_LINE
    from meshtune.rundir import write_text_atomically
    from meshtune.tools.migrate import migrate as converted
    from meshtune.tools.migrate import text_of
    from meshtune.tools.table import TOOLS

    if tool is not None and tool not in TOOLS:
        raise UserError(f"--from {tool} is not a tool; it is one of {', '.join(TOOLS)}.")
    if out is not None and out.exists():
        raise UserError(f"{out} exists; name another file with --out, or remove it.")
    result = converted(Path(name), tool=tool, gpus=gpus, launcher=launcher, overrides=overrides)
    text = text_of(result, Path(name).name)
    if out is not None:
        write_text_atomically(out, f"{EDITOR_LINE}\n{text}")
    config = result.config()
    refused = layout_refused(config, result.job.gpus)
    if as_json:
        kinds = {"unsupported": result.unsupported, "without_effect": result.without_effect}
        kinds |= {"left_out": result.left_out, "ignored": result.ignored}
        show_json(
            {"tool": result.job.tool, "config": result.tree, "refused": refused}
            | {kind: [note._asdict() for note in notes] for kind, notes in kinds.items()}
        )
    elif out is None:
        print(text, end="")
    begin = f"{out}: " if out else ""
    print(f"{begin}{counted(len(result.settings), 'setting')} from {kept_and_lost(result)}.", file=sys.stderr)
    if result.job.gpus == 1 and gpus is None and result.job.shards:
        print(f"{name} shards over GPUs, the layout is for one; name how many with --gpus.", file=sys.stderr)
    if refused:
        end = "Change it, or write layout: auto."
        print(f"Training refuses the layout {config.layout}: {' '.join(refused)} {end}", file=sys.stderr)
    elif refused is None and result.job.gpus > 1:  # the model was not counted here, which takes torch
        says = f"meshtune dryrun {out or 'FILE'} says whether {config.model.name} trains under"
        print(f"{says} {config.layout}.", file=sys.stderr)


def kept_and_lost(result: "Migrated") -> str:
    """Clause on the tool, and the keys that make no setting."""
    unused = ", ".join(note.key for note in result.without_effect)
    others = ", ".join(dict.fromkeys(note.key for note in result.left_out))
    lost = f"{result.job.table.name}; without a counterpart: {', '.join(result.lost) or 'none'}"
    lost += f"; without effect: {unused}" if unused else ""
    return f"{lost}; left out, which changes no weight: {others}" if others else lost
