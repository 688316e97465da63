"""Values of other trainers for settings of ours (values.toml): what each is here."""

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from meshtune.errors import written


class Counterpart(NamedTuple):
    """Values of ours that another trainer's value stands for."""

    write: str  # setting=value, separated by spaces, as on the command line
    why: str  # what differs, or why there is no other; empty: nothing to say


@cache
def patterns() -> dict[str, list[dict[str, str]]]:
    """Setting -> rows of values.toml."""
    return tomllib.loads((files("meshtune.trainers") / "values.toml").read_text(encoding="utf-8"))


def counterpart(setting: str, value: Any) -> Counterpart | None:
    """Our value for one of another trainer; None if no row has it. setting: ours, dotted."""
    text = written(value).rpartition(".")[2].lower()
    for row in patterns().get(setting, ()):
        if match := re.fullmatch(row["pattern"], text):
            return Counterpart(match.expand(row["write"]), row.get("why", ""))
    return None


def pasted_value(setting: str, value: Any) -> str:
    """Sentence about a wrong value that another trainer has; "" if none has it."""
    if (theirs := counterpart(setting, value)) is None:
        return ""
    why = f" ({theirs.why})" if theirs.why else ""
    return f"{setting} = {written(value)}: write {theirs.write}{why}."
