"""Options and output that several commands share."""

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshtune import __version__
from meshtune.commands.complete import complete_settings
from meshtune.errors import UserError, entries, expanded
from meshtune.rundir import RunDir
from meshtune.streams import encodes
from meshtune.units import log, on_first_rank
from meshtune.yaml_tree import YAML

if TYPE_CHECKING:
    from meshtune.report.draw.document import Document
    from meshtune.report.draw.picture import Target

ROWS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")  # endings of data files
MOST_NAMED = 5  # runs in a sentence

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="a config file, section.key=value, or both",
        autocompletion=complete_settings,
    ),
]
TargetWords = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET [KEY=VALUE]...",
        help="a run folder, a model folder or a config file",
        autocompletion=complete_settings,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="tokens of an answer at most")]
Temperature = Annotated[float, typer.Option(min=0, help="0: the likeliest token; above 0: drawn by chance")]
TopP = Annotated[
    float, typer.Option(help="draw from the fewest tokens with this probability; needs a temperature")
]
Seed = Annotated[int | None, typer.Option(help="of the drawing; needs a temperature")]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|DIR",
        help="pictures: a .html page, one .png, .svg or .pdf, or a folder for a file of each in all formats",
    ),
]
PlotWidth = Annotated[
    str | None, typer.Option("--width", metavar="84mm", help="of the pictures on paper: mm, cm, in or pt")
]
By = Annotated[
    str | None, typer.Option(metavar="TIME", help="the longest time of the run, such as 48h or 2d12h")
]
Budget = Annotated[float | None, typer.Option(help="the most that the run may cost")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout, all else on stderr")]


def split(settings: list[str] | None) -> tuple[str | None, list[str]]:
    """(The word without "=", a config file, or None; the key=value words, in their order).

    Raises UserError for two words without "=", and for a name of a model or GPU or rows: settings.
    """
    file, overrides = words_of(settings or [])
    if file and file.endswith(ROWS):
        there = "holds rows" if expanded(file).exists() else "is a name of rows (no such file is here)"
        raise UserError(
            f"{file} {there}, and a config file is expected here. Write model.name=Qwen/Qwen3-0.6B "
            f"data.train={file} instead, or begin with a file of meshtune config."
        )
    if not file or file.endswith(YAML) or expanded(file).exists():
        return file, overrides
    from meshtune.plan.hardware import catalogue
    from meshtune.plan.models import known_config

    if known_config(file):
        raise UserError(f"{file} is a model, and a config file is expected here; write model.name={file}.")
    if file in catalogue():
        raise UserError(f"{file} is a GPU, and a config file is expected here; write cluster.gpu={file}.")
    return file, overrides


def words_of(words: list[str]) -> tuple[str | None, list[str]]:
    """(The word without "=", a config file or target, or None; the key=value words, in their order).

    Raises UserError for two words without "=".
    """
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise UserError(
            f"Several config files are named: {', '.join(files)}; name one, and change it by "
            "section.key=value."
        )
    return (files[0] if files else None), [word for word in words if "=" in word]


def layout_words(option: str, texts: Sequence[str] | None) -> list[str]:
    """The layouts that an option names, given several times or once with commas; None: it is not given.

    Raises UserError for an option that names none.
    """
    words = [word.strip() for text in texts or () for word in text.split(",") if word.strip()]
    if texts and not words:
        raise UserError(f"{option} {','.join(texts)} names no layout; write {option} zero3x8-mb1-ga8.")
    return words


def folder_of(option: str, path: Path | None) -> Path | None:
    """The folder that an option names, with ~ expanded; None: not given. Raises UserError for a file."""
    folder = path and expanded(path)
    if folder and folder.exists() and not folder.is_dir():
        raise UserError(f"{option} {folder} is a file; name a folder.")
    return folder


def pictures_to(plot: Path | None, width: str | None) -> "Target | None":
    """Resolve --plot and --width; None: no pictures are asked for. Raises as `picture.target`."""
    if plot is None:
        if width is not None:
            raise UserError(f"--width {width} is of pictures; name a file or folder for them with --plot.")
        return None
    from meshtune.report.draw.picture import target

    return target(expanded(plot), width)


def stdin_lines() -> Iterator[str]:
    """Yield the lines of stdin as they come, without their ends. Bytes that are not UTF-8 become surrogates,
    which are refused by name where the line is used.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def announce(reading: str | None) -> None:
    """Print on stderr the version and what is read, before the imports of a command, which take seconds.

    reading: a file or folder; None: only the command line names the settings. Only the first rank prints.
    """
    if on_first_rank():
        log(f"version {__version__}, reading {reading or 'the settings of the command line'} …")


def target_of(words: list[str], remedy: str = "name one.") -> tuple[str | None, list[str]]:
    """Split the words, print what is read, and raise UserError for a name that stands for nothing here, and
    for two names.

    remedy: clause that follows the names where there are two.
    """
    names = [word for word in words if not re.match(r"\s*[\w.-]+\s*=", word)]  # "2+2=" isn't a setting
    if len(names) > 1:
        raise UserError(f"Several targets are named: {', '.join(names)}; {remedy}")
    name, overrides = words_of(words)
    announce(name)
    if name:
        check_target(name)
    return name, overrides


def check_target(name: str) -> None:
    """Raise UserError, with what it may mean, for a name that isn't a run folder, model or config file."""
    if expanded(name).exists():
        return
    from meshtune.model.hub import MODEL_OR_RUN, check_name
    from meshtune.yaml_tree import read_yaml

    if name.endswith(YAML):
        read_yaml(expanded(name))
    try:
        check_name(name, holding=MODEL_OR_RUN)
    except UserError as error:
        raise UserError([*error.problems, *filter(None, [runs_there(expanded(name).parent)])]) from None


def runs_there(folder: Path) -> str:
    """Sentence on the newest runs in a folder, by their time; "" where there are none."""
    runs = [path for path in entries(folder, 1) if RunDir(path).holds_run] if folder.is_dir() else []
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    more = f" and {len(runs) - MOST_NAMED} more" if len(runs) > MOST_NAMED else ""
    return f"Runs in {folder}: {', '.join(map(str, runs[:MOST_NAMED]))}{more}." if runs else ""


def show(document: "Document", *, as_json: bool) -> None:
    """Print one result on stdout: its facts as one JSON document if as_json, else its parts."""
    if as_json:
        show_json({**document.facts})
    else:
        from rich.console import Console

        Console().print(document, crop=False)  # a command with a long path stays whole


def show_json(value: Any) -> None:
    """Print one JSON document on stdout; signs that stdout's encoding lacks are JSON's escapes."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    print(text if encodes(text) else json.dumps(value, indent=2))
