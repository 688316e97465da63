"""One file of another trainer while it is migrated, and conversions of values, by their names in the tables.

    @conversion
    def warmup(value, job): ...        warmup_steps = ["train.warmup_steps", "warmup"]

A conversion takes the value of a key and the whole job, whose other keys may matter, and returns the settings
that it makes. It raises NoCounterpart, NotNeeded or Refused where it makes none.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshtune.tools.table import Table, table

OFF: tuple[Any, ...] = (None, "", False, [], {}, "none", "no", "None")  # values that switch a key off


def is_off(value: Any) -> bool:
    """True for a value that switches its key off: one of OFF, or a section with enabled: false."""
    return value in OFF or (isinstance(value, Mapping) and value.get("enabled") is False)


class Note(NamedTuple):
    """One key of the file that became no setting."""

    key: str
    value: Any
    reason: str


class Converted(NamedTuple):
    """Settings that one key makes."""

    settings: dict[str, Any]  # by dotted name; empty: the key says what is so anyway
    remark: str = ""  # what differs
    lost: str = ""  # what has no counterpart, and changes what is trained or whether it fits


class NoCounterpart(Exception):
    """The value of a key has no counterpart; the text says why, and what is so instead."""


class NotNeeded(Exception):
    """Another key, or the value, makes this key have no effect; the text says so."""


class Refused(Exception):
    """The file describes another job than supervised fine-tuning; the text says which."""


@dataclass(frozen=True)
class Job:
    """A file of another trainer."""

    tool: str  # one of trainers.table.TOOLS
    given: Mapping[
        str, Any
    ]  # dotted key -> value, keys of sections and of what is in them; null values left out
    folder: Path  # that the file is in, for the files that it names
    gpus: int
    overrides: tuple[str, ...] = ()  # section.key=value of ours, laid over the result

    @property
    def table(self) -> Table:
        return table(self.tool)

    def value(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of `keys` that the file has, else that the tool has a default for."""
        for values in (self.given, self.table.defaults):
            for key in keys:
                if key in values:
                    return values[key]
        return default

    def on(self, *keys: str) -> bool:
        """True if one of `keys` is given, or a default, and not switched off."""
        return any(self.value(key) not in OFF for key in keys)

    def read(self, name: str) -> Path | None:
        """Find a file that the job names: beside its own file, else in the working directory, else None."""
        paths = (self.folder / name, Path(name))
        return next((path for path in paths if path.is_file()), None)


def flat(tree: Mapping[str, Any], known: Table, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every key, and of those in sections whose keys the table has one by one.

    A list of sections, such as axolotl's datasets, yields the keys of all. prefix: with a dot at the end.
    """
    for name, value in tree.items():
        key = f"{prefix}{name}"
        yield key, value
        if f"{key}.*" in known.entries or not any(entry.startswith(f"{key}.") for entry in known.entries):
            continue
        for section in value if isinstance(value, list) else [value]:
            if isinstance(section, Mapping):
                yield from flat(section, known, f"{key}.")


Conversion = Callable[[Any, Job], Converted]
CONVERSIONS: dict[str, Conversion] = {}


def conversion(function: Conversion) -> Conversion:
    CONVERSIONS[function.__name__] = function
    return function


def short(value: Any) -> str:
    """The last part of a component's name in lower case: torch.optim.AdamW is adamw."""
    return str(getattr(value, "value", value)).rpartition(".")[2].lower()


@conversion
def section(value: Any, job: Job) -> Converted:
    """Give nothing: the keys in the section are converted one by one."""
    return Converted({})


@conversion
def elsewhere(value: Any, job: Job) -> Converted:
    """Give nothing: the conversion of another key reads this one."""
    return Converted({})
