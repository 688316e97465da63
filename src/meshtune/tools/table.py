"""Keys of other trainers' settings: what each is here. One TOML file a tool, read when it is asked for.

    carries          settings that keys of other settings write, or the training script
    [defaults]       the tool's value where its file leaves the key out and ours is another
    [counterparts]   key = "our.setting", or ["our.setting", "conversion", its arguments]
    [[export]]       keys that plan export writes, in their order (`key?`: not without a value), constants;
                     when: a condition, as in differences.toml
    [[unsupported]]  why, do (the remedy, if there is one), keys: training or its memory is another without;
                     refused = true: of another job
    [[left_out]]     why, do, keys: training is the same without
    [[ignored]]      why nothing is lost without them, keys

A key with a dot is inside a section of the tool's file; `section.*` stands for the section and all in it.
`inherits` names the tool whose table has the other keys, `beyond` the keys that are in no list of its newest
wheel (tests/data/trainer_keys.json): earlier names, and arguments of components.
"""

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from meshtune.errors import did_you_mean, nearest, written

TOOLS = ("axolotl", "llama_factory", "trl", "transformers", "torchtune")  # whose files are migrated
ORDER = ("transformers", "trl", *(tool for tool in TOOLS if tool not in ("transformers", "trl")))
OTHERS = ("accelerate", "deepspeed", "megatron", "torchtitan", "other")
FOREIGN = 3  # keys of another trainer from which on a whole file is answered, and not its keys
KINDS = ("unsupported", "left_out", "ignored")  # lists of keys without a counterpart


class Entry(NamedTuple):
    """One key of a tool: its counterpart (`setting`), or why it has none."""

    setting: str = ""  # dotted; empty: the key has no counterpart
    conversion: str = ""  # of its value; empty: the value is taken as it is
    arguments: tuple[Any, ...] = ()  # of the conversion
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
    tree: Mapping[str, Any]  # the file itself

    def entry(self, key: str) -> Entry | None:
        """The entry of a dotted key; None if the tool has no such key."""
        return entry_of(self.entries, key)


def entry_of(entries: Mapping[str, Entry], key: str) -> Entry | None:
    """Find a dotted key in a table, or the `section.*` that it falls under; None if it has neither."""
    parts = key.split(".")
    under = (".".join([*parts[:length], "*"]) for length in range(len(parts), 0, -1))
    return next((entries[name] for name in (key, *under) if name in entries), None)


@cache
def toml(name: str) -> dict[str, Any]:
    """Read a TOML file of this folder."""
    return tomllib.loads((files("meshtune.tools") / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def table(tool: str) -> Table:
    """Read one tool's table. tool: one of TOOLS or OTHERS."""
    tree, own = toml(tool), {}
    for key, value in tree["counterparts"].items():
        setting, conversion, *arguments = [value, ""] if isinstance(value, str) else value
        own[key] = Entry(setting, conversion, tuple(arguments))
    for kind in KINDS:
        for group in tree.get(kind, ()):
            more = {"remedy": group.get("do", ""), "refused": group.get("refused", False)}
            entry = Entry(why=group["why"], kind=kind, **more)
            for key in group["keys"].split():
                assert key not in own, f"{tool}.toml has {key} twice"
                own[key] = entry
    beyond = frozenset(tree.get("beyond", "").split())
    defaults, entries = tree.get("defaults", {}), own
    if base := table(tree["inherits"]) if "inherits" in tree else None:
        defaults, entries = {**base.defaults, **defaults}, {**base.entries, **own}
    return Table(tree["name"], beyond, defaults, own, entries, tree)


def nearest_tool(keys: Collection[str]) -> tuple[str, int]:
    """(Tool that knows most of a file's keys, their number); of several the first of ORDER."""
    known = {tool: sum(table(tool).entry(key) is not None for key in keys) for tool in ORDER}
    best = max(ORDER, key=lambda tool: known[tool])
    return best, known[best]


def file_of_another(file: Any, tree: Mapping[str, Any], sections: Collection[str]) -> str:
    """Sentence on a config file that is another trainer's; "" for one that isn't, or has few of its keys.

    sections: the keys of the top level of ours.
    """
    most, model = max(FOREIGN, len(tree) / 2), tree.get("model")
    ours = len(tree.keys() - sections) < most or (isinstance(model, Mapping) and "name" in model)
    best, known = ("", 0) if ours else nearest_tool(tree)
    if known < most:
        return ""
    name = table(best).name
    return f"{file} is a configuration of {name}; `meshtune migrate {file}` makes it one of meshtune."


# Values (values.toml) #


class Counterpart(NamedTuple):
    """Values of ours that another trainer's value stands for."""

    write: str  # setting=value, separated by spaces, as on the command line
    why: str  # what differs, or why there is no other; empty: nothing to say
    see: str = ""  # section of unsupported.toml


def counterpart(setting: str, value: Any) -> Counterpart | None:
    """Our value for one of another trainer; None if no row has it. setting: ours, dotted."""
    text = written(value).rpartition(".")[2].lower()
    for row in toml("values").get(setting, ()):
        if match := re.fullmatch(row["pattern"], text):
            see = row.get("see", "")
            why = toml("unsupported")[see]["why"] if see else row.get("why", "")
            return Counterpart(match.expand(row["write"]), why, see)
    return None


def reason(setting: str, value: Any) -> str:
    """Why our value differs from one of another trainer; "" if it does not."""
    theirs = counterpart(setting, value)
    return theirs.why if theirs else ""


def pasted_value(setting: str, value: Any) -> str:
    """Sentence about a wrong value that another trainer has, or a method that isn't here; "" for others."""
    if (theirs := counterpart(setting, value)) is None:
        section = section_of("commands", written(value).lower()) if setting == "method" else ""
        return f"{setting} = {written(value)}: {unsupported(section)}" if section else ""
    why = f" ({theirs.why})" if theirs.why else ""
    return f"{setting} = {written(value)}: write {theirs.write}{why}.{page_of(theirs.see)}"


# What meshtune does not do (unsupported.toml) #


def section_of(kind: str, word: str) -> str:
    """Section of unsupported.toml that answers a word; "" if none does. kind: commands, options or keys."""
    rows = toml("unsupported").items()
    return next((name for name, row in rows if word in row.get(kind, "").split()), "")


def page_of(section: str) -> str:
    """Sentence, after a space, that names the section's place in the documentation; "" without a section."""
    return f" See docs/unsupported.md#{section}." if section else ""


def unsupported(section: str) -> str:
    """Sentences on what isn't there, what to write instead, and the page."""
    row = toml("unsupported")[section]
    return f"{row['why']}. Write {row['write']}.{page_of(section)}"


# Answers to keys that aren't settings #

SOURCES = ("data.train", "data.eval")  # lists of sources: the keys in them are those of axolotl's datasets


def unknown_setting(path: Sequence[str], settings: Sequence[str], sections: Sequence[str]) -> str:
    """Return a sentence that says what to write instead of the unknown key at `path`.

    That is a section of docs/unsupported.md, its counterpart if another trainer has the key, why it has none,
    or else the nearest setting, if it is at most two edits away. path: ["train", "lr"]. settings: every key
    of the tree, dotted. sections: the keys of its top level, which the sentence lists if no setting is near.
    """
    name, key = path[-1], ".".join(path)
    section = ".".join(part for part in path[:-1] if not part.isdigit())  # data.train.0.path: no list indices
    if row := section_of("keys", name):
        return f"{key} is not supported: {unsupported(row)}"
    known = theirs(path)
    only = {"quantised": "=qlora", "offloading": "=offload"}  # the value that a conversion writes
    named = (f"{each.setting}{only.get(each.conversion, '')}" for each in known if each.setting)
    if counterparts := dict.fromkeys(named):
        return f"{key} is not a setting{did_you_mean([*counterparts])}"
    exact = [setting for setting in settings if last(setting) == name]
    if exact and (len(exact) == 1 or not section):  # model.path may mean anything
        return f"{key} is not a setting{did_you_mean(exact)}"
    for entry in sorted(known, key=lambda entry: entry.kind == "ignored"):
        if entry.kind == "ignored":
            return f"{key} is not a setting, and not needed: {entry.why}."
        return f"{key} is not supported: {entry.reason}."
    siblings = [each for each in settings if each.rpartition(".")[0] == section] if section else [*sections]
    for names in (siblings, settings):
        near = nearest(name, names, part=last)
        if near and (names is siblings or not section or len(near) == 1):
            return f"{key} is not a setting{did_you_mean(near)}"
    if section and siblings:
        return f"{key} is not a setting; {section} has: {', '.join(map(last, siblings))}."
    return f"{key} is not a setting; sections: {', '.join(sections)}."


def last(setting: str) -> str:
    """Return the name after the last dot."""
    return setting.rpartition(".")[2]


def theirs(path: Sequence[str]) -> list[Entry]:
    """Entries of the tools that have the key: at `path`, or else at the longest end of it that one has."""
    names = [".".join(path[start:]) for start in range(len(path))]
    if ".".join(path[:2]) in SOURCES:
        names.append(f"datasets.{path[-1]}")
    owned = [table(tool).own for tool in (*TOOLS, *OTHERS)]
    found = ([entry for own in owned if (entry := entry_of(own, name))] for name in names)
    return next(filter(None, found), [])
