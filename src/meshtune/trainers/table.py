"""Keys of other trainers' settings: what each is here. One TOML file a tool, read when it is asked for.

    [defaults]       the tool's value where its file leaves the key out and ours is another
    [counterparts]   key = "our.setting", or ["our.setting", "conversion"] (migrate/)
    [[unsupported]]  why, do (the remedy, if there is one), keys: training or its memory is another without;
                     refused = true: of another job
    [[left_out]]     why, do, keys: training is the same without
    [[ignored]]      why nothing is lost without them, keys

A key with a dot is inside a section of the tool's file; `section.*` stands for the section and all in it.
`inherits` names the tool whose table has the other keys, `beyond` the keys that are in no list of its newest
wheel (tests/data/trainer_keys.json): earlier names, and arguments of components.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

TOOLS = ("axolotl", "llama_factory", "trl", "transformers", "torchtune")


KINDS = ("unsupported", "left_out", "ignored")  # lists of keys without a counterpart


class Entry(NamedTuple):
    """One key of a tool: its counterpart (`setting`), or why it has none."""

    setting: str = ""  # dotted; empty: the key has no counterpart
    conversion: str = ""  # of its value; empty: the value is taken as it is
    why: str = ""  # without a counterpart
    remedy: str = ""
    kind: str = ""  # without a counterpart: one of KINDS
    refused: bool = False  # with the key, a file is for another job than ours

    @property
    def reason(self) -> str:
        """The why, with the remedy where there is one."""
        return f"{self.why}; {self.remedy}" if self.remedy else self.why


class Table(NamedTuple):
    """The keys of one tool, those that it inherits too."""

    name: str  # as people write it
    beyond: frozenset[str]
    defaults: Mapping[str, Any]
    own: Mapping[str, Entry]  # without what it inherits
    entries: Mapping[str, Entry]

    def entry(self, key: str) -> Entry | None:
        """The entry of a dotted key; None if the tool has no such key."""
        return entry_of(self.entries, key)


def entry_of(entries: Mapping[str, Entry], key: str) -> Entry | None:
    """Find a dotted key in a table, or the `section.*` that it falls under; None if it has neither."""
    parts = key.split(".")
    under = (".".join([*parts[:length], "*"]) for length in range(len(parts), 0, -1))
    return next((entries[name] for name in (key, *under) if name in entries), None)


@cache
def table(tool: str) -> Table:
    """Read one tool's table. tool: one of TOOLS, or "other"."""
    tree = tomllib.loads((files("meshtune.trainers") / f"{tool}.toml").read_text(encoding="utf-8"))
    own = {}
    for key, value in tree["counterparts"].items():
        own[key] = Entry(value) if isinstance(value, str) else Entry(*value)
    for kind in KINDS:
        for group in tree.get(kind, ()):
            entry = Entry(
                why=group["why"],
                remedy=group.get("do", ""),
                kind=kind,
                refused=group.get("refused", False),
            )
            for key in group["keys"].split():
                assert key not in own, f"{tool}.toml has {key} twice"
                own[key] = entry
    beyond = frozenset(tree.get("beyond", "").split())
    defaults, entries = tree.get("defaults", {}), own
    if base := table(tree["inherits"]) if "inherits" in tree else None:
        defaults, entries = {**base.defaults, **defaults}, {**base.entries, **own}
    return Table(tree["name"], beyond, defaults, own, entries)
