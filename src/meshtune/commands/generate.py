"""`meshtune generate`: answer prompts with a target."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from meshtune.commands.options import (
    AsJson,
    MaxNewTokens,
    Seed,
    TargetWords,
    Temperature,
    TopP,
    log,
    show_json,
    stdin_lines,
    target_of,
)
from meshtune.errors import UserError, expanded, explained, reason_of
from meshtune.rundir import append_line
from meshtune.streams import lost
from meshtune.units import LOADING, printable, working


def generate(
    target: TargetWords,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="may be repeated; else lines of stdin")
    ] = None,
    messages: Annotated[
        list[str] | None,
        typer.Option(help="a conversation as a JSON list of messages, or a file with one; may be repeated"),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="a file of prompts: lines of .txt, rows {prompt} or {messages}")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="a new file for the answers, one JSON row each")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Answer prompts, wrapped as in training (chat template, or prompt and separator), and conversations."""
    name, overrides = target_of(target, "name one, and give each prompt by --prompt TEXT.")
    lists = [text for text in prompt or () if re.match(r'\s*\[\s*\{\s*"role"\s*:', text)]
    if lists:
        raise UserError(
            [f"--prompt {shortened(text)} is a list of messages; give it by --messages." for text in lists]
        )
    given = [*(prompt or ()), *map(conversation_of, messages or ())]
    if not (given or prompts):
        if sys.stdin.isatty():
            log("type prompts, a line each; Ctrl-D ends them, then all are answered.")
        given = [*stdin_lines()]
    to = out and expanded(out)
    if to and to.exists():
        raise UserError(f"--out {to} exists already; name a new file.")
    with working(LOADING["generate"]):
        from meshtune.api.generate import answer_rows
        from meshtune.train.generate import Sampling

    rows = answer_rows(
        name, given, prompts and expanded(prompts), max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_p, seed), overrides=overrides, log=log,
    )  # fmt: skip
    if to:
        written = write_rows(rows, to)
        show_json({"out": str(to), "answers": written}) if as_json else print(to)
    elif as_json:
        show_json([*rows])
    else:
        several = sys.stdout.isatty() and (len(given) > 1 or prompts)  # answers have lines of their own
        for number, row in enumerate(rows, 1):
            if several:
                print(f"── answer {number}")
            print(printable(row["answer"]) if sys.stdout.isatty() else row["answer"], flush=True)
            if lost(1):  # nobody reads them
                break


def conversation_of(text: str) -> list[dict[str, Any]]:
    """The messages in a JSON list, or in the file that `text` names. Raises UserError for anything else."""
    shown = shortened(text)
    if not text.lstrip().startswith(("[", "{")):
        try:
            text = expanded(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(
                f"--messages {shown} is neither a JSON list of messages nor a file with one: "
                f"{reason_of(error)}"
            ) from None
    with explained(f"--messages {shown} is not JSON"):
        value = json.loads(text)
    if not isinstance(value, list):
        raise UserError(f'--messages {shown} is not a list; write [{{"role": "user", "content": "…"}}].')
    return value


def shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"


def write_rows(rows: Iterator[dict[str, Any]], file: Path) -> int:
    """Write each row as a line of JSON as soon as it is there; returns their number."""
    written = 0
    for row in rows:
        append_line(file, row)
        written += 1
    return written
