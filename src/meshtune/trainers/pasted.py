"""The sentence about a key that is no setting: another trainer's name of one, or a misspelt one."""

from collections.abc import Iterator, Sequence

from meshtune.nearest import did_you_mean, nearest
from meshtune.trainers.table import TOOLS, Entry, entry_of, table

SOURCES = ("data.train", "data.eval")  # lists of sources: the keys in them are those of axolotl's datasets


def unknown_setting(path: Sequence[str], settings: Sequence[str], sections: Sequence[str]) -> str:
    """Return a sentence that says what to write instead of the unknown key at `path`.

    That is its counterpart if another trainer has the key, why it has none, or else the nearest setting, if
    it is at most two edits away. path: ["train", "lr"]. settings: every key of the tree, dotted. sections:
    the keys of its top level, which the sentence lists if no setting is near.
    """
    name, key = path[-1], ".".join(path)
    section = ".".join(part for part in path[:-1] if not part.isdigit())  # data.train.0.path: no list indices
    known = [*theirs(path)]
    if counterparts := dict.fromkeys(entry.setting for entry in known if entry.setting):
        return f"{key} is no setting{did_you_mean([*counterparts])}"
    exact = [setting for setting in settings if last(setting) == name]
    if exact and (len(exact) == 1 or not section):  # model.path may mean anything
        return f"{key} is no setting{did_you_mean(exact)}"
    for entry in sorted(known, key=lambda entry: entry.kind == "ignored"):
        if entry.kind == "ignored":
            return f"{key} is no setting, and not needed: {entry.why}."
        return f"{key} is not supported: {entry.reason}."
    siblings = [each for each in settings if each.rpartition(".")[0] == section] if section else [*sections]
    for names in (siblings, settings):
        near = nearest(name, names, part=last)
        if near and (names is siblings or not section or len(near) == 1):
            return f"{key} is no setting{did_you_mean(near)}"
    if section and siblings:
        return f"{key} is no setting; {section} has: {', '.join(map(last, siblings))}."
    return f"{key} is no setting; sections: {', '.join(sections)}."


def last(setting: str) -> str:
    """Return the name after the last dot."""
    return setting.rpartition(".")[2]


def theirs(path: Sequence[str]) -> Iterator[Entry]:
    """Yield the entry of each tool that has the key: at `path`, or at the end of it."""
    names = [".".join(path[start:]) for start in range(len(path))]
    if ".".join(path[:2]) in SOURCES:
        names.append(f"datasets.{path[-1]}")
    for tool in (*TOOLS, "other"):
        found = (entry_of(table(tool).own, name) for name in names)
        if entry := next(filter(None, found), None):
            yield entry
