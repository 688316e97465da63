"""A file of another trainer as settings of ours, with what became of each of its keys.

file ── read ──> Job ── table, conversions ──> Migrated(settings, notes) ── text_of ──> commented YAML
"""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from meshtune import config
from meshtune.config import HELD_OUT, Config, unchecked
from meshtune.errors import UserError, check_file, explained, type_name, written
from meshtune.setting import unmet
from meshtune.tools import layouts
from meshtune.tools.exporters import conversion_of
from meshtune.tools.job import Job, NoCounterpart, Note, NotNeeded, Refused, flat, is_off
from meshtune.tools.other_jobs import other_job
from meshtune.tools.preferences import Told, objective_of
from meshtune.tools.table import ORDER, nearest_tool, table
from meshtune.units import counted, printable
from meshtune.yaml_tree import merge, nested, overridden, read_yaml


class Idle(NamedTuple):
    """A setting that takes no effect with the others."""

    value: Any
    reason: str  # with the remedy
    origin: str  # its key in the file, with what differs


@dataclass
class Migrated:
    """Settings, and the keys that are none."""

    job: Job
    settings: dict[str, Any] = field(default_factory=dict)  # dotted name -> value
    origins: dict[str, str] = field(default_factory=dict)  # setting -> its key in the file, with what differs
    keys: dict[str, list[str]] = field(default_factory=dict)  # setting -> its keys in the file
    unsupported: list[Note] = field(default_factory=list)  # training is another without them
    left_out: list[Note] = field(default_factory=list)  # training is the same without them
    ignored: list[Note] = field(default_factory=list)  # nothing is lost without them
    without_effect: list[Note] = field(default_factory=list)
    idle: dict[str, Idle] = field(default_factory=dict)  # dotted name -> setting that is commented out
    off: list[str] = field(default_factory=list)  # keys that switch off what is not here anyway

    @property
    def tree(self) -> dict[str, Any]:
        """The settings as a tree of sections, the overrides laid over them."""
        tree: dict[str, Any] = {}
        for name, value in self.settings.items():
            tree = merge(tree, nested(name.split("."), value))
        for override in self.job.overrides:
            tree = overridden(tree, override)
        return tree

    @property
    def lost(self) -> list[str]:
        """Names of the keys without a counterpart; one that makes a setting too is lost in part."""
        made = {key for keys in self.keys.values() for key in keys}
        keys = dict.fromkeys(note.key for note in self.unsupported)
        return [f"part of {key}" if key in made else key for key in keys]

    def config(self) -> Config:
        """The settings, validated. Raises UserError as `config.load`."""
        return config.load(None, (), self.tree)


def migrate(
    file: Path,
    *,
    tool: str | None = None,
    gpus: int | None = None,
    launcher: Path | None = None,
    overrides: Sequence[str] = (),
) -> Migrated:
    """Convert a file of another trainer; the result is valid for our own settings.

    tool: whose file it is, one of TOOLS; None: the one that has most of its keys. gpus: that it is for; None:
    the processes of `launcher`, or 1. launcher: the file of accelerate or DeepSpeed that the trainer is
    started with. overrides: section.key=value, laid over the result. Raises UserError for a file that can't
    be read or is of no known tool, for a job that is not trained here, and where no model is named.
    """
    repeated: list[tuple[str, str]] = []
    tree = read(file, repeated)
    tree = resolved(tree, tree)
    if launched_by := layouts.launcher_of(tree):
        raise UserError(
            f"{file} is a file of {launched_by}, which starts a trainer. Name the trainer's file first: "
            f"meshtune migrate TRAINER.yaml --with {file}."
        )
    other = other_job(tree, overrides)
    if other and not tool:
        try:
            tool = tool_of(tree, file)
        except UserError:  # the keys of another job are not those of a tool
            raise UserError(f"{file}: {other.sentence}") from None
    tool = tool or tool_of(tree, file)
    launch = layouts.launch_of(launcher, tree, table(tool)) if launcher else layouts.Launch()
    given: dict[str, Any] = {}
    for key, value in flat(tree | launch.keys, table(tool)):
        if key not in given or not is_off(value):  # of a list of sections, one may leave it off
            given[key] = value
    present = {key: value for key, value in given.items() if value not in (None, "")}
    told = objective_of(tool, tree, file, overrides) if not other else Told("sft")
    job = Job(tool, present, file.parent, gpus or launch.processes or 1, tuple(overrides), told.objective)
    result = Migrated(job)
    result.unsupported += launch.unsupported
    result.ignored += launch.ignored
    result.ignored += [
        Note(key, value, "the file has the key again, and its last value counts") for key, value in repeated
    ]
    refused = list(_convert(result, job.given))
    defaults = {key: value for key, value in job.defaults.items() if _applies(key, result)}
    result.off += [key for key in given if key not in job.given and key not in defaults]
    refused += _convert(result, defaults, default=True)
    if other:
        said = tuple(f"{key}{end}" for key in other.keys if key for end in (" ", ":"))
        more = [each for each in refused if not each.startswith(said)]
        raise UserError([f"{file}: {other.sentence}", *more])
    if refused:
        raise UserError([*dict.fromkeys(refused)])
    _lay_out(result)
    if told.objective != "sft":
        result.settings.setdefault("objective", told.objective)
        result.origins.setdefault("objective", told.origin)
        _drop(result, "data.train_on", "preferences label the tokens of answers")
    if "name" in result.tree.get("model", {}):
        _without_effect(result)
    result.config()
    return result


def read(file: Path, repeated: list[tuple[str, str]] | None = None) -> dict[str, Any]:
    """Read YAML or JSON. repeated: see `read_yaml`. Raises UserError for others."""
    check_file(file)
    if file.name == "training_args.bin":
        raise UserError(
            f"{file} is a pickle of a Trainer's arguments, which only their own classes can read; use the "
            "YAML or JSON that the run was started with, or write its command-line arguments as YAML."
        )
    if file.suffix == ".json":
        with explained(f"{file} is not JSON"):
            tree = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=partial(_paired, repeated))
            if not isinstance(tree, dict):
                raise ValueError(f"it holds {type_name(tree)}, not keys and values")
            return tree
    return read_yaml(file, repeated=repeated)


def _paired(repeated: list[tuple[str, str]] | None, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of JSON; a key that comes again is kept in `repeated` with its earlier value."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made and repeated is not None:
            repeated.append((key, written(made[key])))
        made[key] = value
    return made


def resolved(value: Any, names: Mapping[str, Any]) -> Any:
    """Replace ${key} by what `names` has, as torchtune's OmegaConf does; read 3e-4 as a number."""
    if isinstance(value, Mapping):
        return {str(key): resolved(item, names) for key, item in value.items()}  # YAML reads `on:` as true
    if isinstance(value, list):
        return [resolved(item, names) for item in value]
    if isinstance(value, str) and (whole := re.fullmatch(r"\$\{(\w+)\}", value)):
        value = names.get(whole[1], value)  # as it is: a number stays one
    if isinstance(value, str):
        value = re.sub(r"\$\{(\w+)\}", lambda match: str(names.get(match[1], match[0])), value)
        return float(value) if re.fullmatch(r"[-+]?[\d.]*\d[\d.]*[eE][-+]?\d+", value) else value
    return value


def tool_of(tree: Mapping[str, Any], file: Path) -> str:
    """The tool that knows most keys of a file, at least half of them. Raises UserError if none does."""
    best, known = nearest_tool(tree)
    if tree and all(key.partition(".")[0] in Config.model_fields for key in tree):
        raise UserError(f"{file} is a configuration of meshtune already: meshtune train {file} runs it.")
    if known < max(1, len(tree) / 2):
        names = ", ".join(table(tool).name for tool in ORDER)
        raise UserError(
            f"{file} has {counted(len(tree), 'key')}; {table(best).name} knows {known} of them. It is "
            f"not a configuration of {names}. If it is, name the tool with --from."
        )
    return best


def _applies(key: str, result: Migrated) -> bool:
    """True if the file neither sets the key of a default, nor makes its setting by another key."""
    return key not in result.job.given and result.job.table.entries[key].setting not in result.settings


def _convert(result: Migrated, keys: Mapping[str, Any], default: bool = False) -> Iterator[str]:
    """Convert keys, and note those without a counterpart; yield a sentence for each that is refused."""
    job = result.job
    for key, value in keys.items():
        entry = job.table.entry(key)
        if entry is None:
            result.unsupported.append(Note(key, value, f"it is not a key of {job.table.name}"))
        elif not entry.setting:
            if isinstance(value, Mapping) and any(other.startswith(f"{key}.") for other in job.given):
                continue  # its keys follow
            if is_off(value) and entry.kind != "ignored":
                result.off.append(key)
            elif entry.refused:
                yield f"{key} makes this another job. {entry.reason[0].upper()}{entry.reason[1:]}."
            else:
                notes: list[Note] = getattr(result, entry.kind)
                notes.append(Note(key, value, entry.reason))
        else:
            try:
                made = conversion_of(entry).converted(value, job)
            except Refused as refusal:
                yield str(refusal)
                continue
            except NoCounterpart as reason:
                result.unsupported.append(Note(key, value, str(reason)))
                continue
            except NotNeeded as reason:
                if not default:
                    result.ignored.append(Note(key, value, str(reason)))
                continue
            except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
                yield f"{key} = {written(value)} is not what {job.table.name} takes there; correct it first."
                continue
            if made.lost and not _said(result, made.lost, entry.conversion):
                result.unsupported.append(Note(key, value, made.lost))
            elif not (default or made.lost or made.settings or entry.conversion in ("section", "elsewhere")):
                _note_without_setting(result, key, value, made.remark)
            for number, (setting, converted) in enumerate(made.settings.items()):
                result.settings[setting] = converted
                result.keys.setdefault(setting, []).append(f"{job.table.name}'s default" if default else key)
                origin = ", ".join(dict.fromkeys(result.keys[setting]))
                result.origins[setting] = f"{origin}: {made.remark}" if made.remark and not number else origin


def _said(result: Migrated, lost: str, conversion: str) -> bool:
    """True if another key, which the same conversion reads, has said what is lost."""
    entries = ((note, result.job.table.entry(note.key)) for note in result.unsupported)
    return any(entry and entry.conversion == conversion and note.reason == lost for note, entry in entries)


def _note_without_setting(result: Migrated, key: str, value: Any, remark: str) -> None:
    """Note a key whose value asks for no setting: what differs, that it is off, or that it is so anyway."""
    if remark:
        result.unsupported.append(Note(key, value, remark))
    elif is_off(value):
        result.off.append(key)
    else:
        result.ignored.append(Note(key, value, "it is so here without a setting"))


def _without_effect(result: Migrated) -> None:
    """Drop settings that can take no effect, and note those that the file has."""
    if result.tree.get("method", "full") == "full":
        for name in [name for name in result.settings if name.startswith("lora.")]:
            _drop(result, name, "method is full; set method=lora")
    with suppress(ValidationError):  # a wrong value, which `config` reports with all others
        for setting, _, need in unmet(unchecked(result.tree)):
            _drop(result, setting, need.answer)
        data = unchecked(result.tree).data
        for setting, value in [*result.settings.items()]:  # also where the file names no rows at all
            if setting.startswith("eval.") and not (data.eval or data.eval_split or is_off(value)):
                _drop(result, setting, HELD_OUT.answer)


def _drop(result: Migrated, setting: str, reason: str) -> None:
    """Move a setting to those without effect; one that the file has no key for is left out."""
    if setting in result.settings:
        idle = Idle(result.settings.pop(setting), reason, result.origins.pop(setting))
        noted, given = {note.key for note in result.without_effect}, result.job.given
        if keys := dict.fromkeys(key for key in result.keys.get(setting, ()) if key in given):
            result.idle[setting] = idle
        result.without_effect += [Note(key, given[key], reason) for key in keys if key not in noted]


def _lay_out(result: Migrated) -> None:
    """Make one layout string of the settings `layout.*`, and the global batch of its data ranks."""
    names = [name for name in result.settings if name.startswith("layout.")]
    layout = layouts.layout_of({name: result.settings.pop(name) for name in names}, result.job)
    result.settings["layout"] = str(layout)
    result.origins["layout"] = "; ".join(dict.fromkeys(result.origins.pop(name) for name in names))
    result.settings["train.global_batch_size"] = layout.global_batch_size
    micro, accumulated = layout.micro_batch_size, layout.gradient_accumulation_steps
    result.origins["train.global_batch_size"] = (
        f"micro-batches of {micro}, {accumulated} accumulated, {layout.data_ranks} data "
        f"rank{'s' * (layout.data_ranks > 1)}"
    )


# The settings as YAML: a comment on each says which key it is from; the other keys follow #

WIDTH = 110
SHOWN = 60  # characters of a value in a comment


def text_of(result: Migrated, source: str) -> str:
    """Write the whole file. source: name of the file that it was made from."""
    job, tree = result.job, result.tree
    gpus = f"{job.gpus} GPU{'s' * (job.gpus > 1)}"
    head = (
        f"Made by `meshtune migrate` from {source}, a configuration of {job.table.name}, for {gpus} "
        "(--gpus). `layout: auto` lets the planner choose instead. Comments name the key that a setting is "
        "from; a setting that is commented out would have no effect, for the reason above it."
    )
    lines = [*comment(head), ""]
    if not tree.get("data", {}).get("train"):
        lines += [*comment("The file names no rows: add data.train.")]
    for name in Config.model_fields:
        if isinstance(tree.get(name), Mapping):
            lines.append(f"{name}:")
            for key, value in tree[name].items():
                lines += setting(key, value, origin(result, f"{name}.{key}"), "  ")
        elif name in tree:
            lines += setting(name, tree[name], origin(result, name), "")
        lines += idle(result, name)
    lines += [
        *notes("No counterpart:", result.unsupported),
        *notes("Left out; what is trained is the same without:", result.left_out),
        *notes("Not needed:", result.ignored),
        *(["", *comment(f"Off, and not here anyway: {', '.join(result.off)}")] if result.off else []),
    ]
    return "\n".join(lines) + "\n"


def origin(result: Migrated, name: str) -> str:
    if any(override.partition("=")[0].startswith(name) for override in result.job.overrides):
        return "the command line"
    return result.origins.get(name, "")


def idle(result: Migrated, section: str) -> Iterator[str]:
    """Yield the settings of a section that would have no effect, as comments."""
    rows = {name: row for name, row in result.idle.items() if name.partition(".")[0] == section}
    lead = "  # " if section in result.tree else "#   "
    if rows and section not in result.tree:
        yield f"# {section}:"
    for reason in dict.fromkeys(row.reason for row in rows.values()):  # `# #`: uncommented it is a comment
        yield from (f"{lead}{line}" for line in comment(f"No effect: {reason}."))
        for name, row in rows.items():
            if row.reason == reason:
                lines = setting(name.rpartition(".")[2], row.value, row.origin, "")
                yield from (f"{lead}{line}" for line in lines)


def setting(key: str, value: Any, said: str, indent: str) -> Iterator[str]:
    """Yield the lines of one setting; a list of sources has a line for each."""
    if (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and any(isinstance(each, Mapping) for each in value)
    ):
        yield from setting(key, None, said, indent)
        yield from (f"{indent}  - {flow(each)}" for each in value)
        return
    line = f"{indent}{key}:" if value is None else f"{indent}{key}: {flow(value)}"
    said = "" if said == key else " ".join(printable(said).split())
    if said and len(line) + len(said) + 4 > WIDTH:
        yield from (f"{indent}{above}" for above in comment(said))
        said = ""
    yield f"{line}  # {said}" if said else line


def flow(value: Any) -> str:
    """Write a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("...\n").strip()
    return json.dumps(value) if "\n" in text else text  # JSON is YAML, and has no line breaks


def notes(title: str, keys: Sequence[Note]) -> Iterator[str]:
    """Yield comments that give the keys without a setting, those of one reason together."""
    by_reason: dict[str, list[Note]] = {}
    for note in keys:
        by_reason.setdefault(note.reason, []).append(note)
    if by_reason:
        yield from ("", f"# {title}")
    for reason, group in by_reason.items():
        yield from comment(f"{', '.join(shown(note) for note in group)}", "- ")
        yield from comment(f"{reason}.", "    ")


def shown(note: Note) -> str:
    value = flow(note.value)
    return f"{note.key}: {value if len(value) <= SHOWN else value[: SHOWN - 1] + '…'}"


def comment(text: str, lead: str = "") -> list[str]:
    """Text as comment lines; the first begins with `lead`, the others are indented as far."""
    wrapped = textwrap.wrap(printable(text), WIDTH - 10, break_long_words=False, break_on_hyphens=False)
    return [f"# {lead if not number else ' ' * len(lead)}{line}" for number, line in enumerate(wrapped)]
