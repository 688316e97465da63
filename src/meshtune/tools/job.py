"""Conversions between a key of another trainer and settings, and the file that a key is read from.

    warmup_steps = ["train.warmup_steps", "warmup"]        in a tool's table
    CONVERSIONS["warmup"].read(value, job) -> settings     migrate
    CONVERSIONS["warmup"].write(plan) -> value             plan export

`read` takes the value of the key and the whole job, whose other keys may matter, and returns the settings
that it makes; it raises NoCounterpart, NotNeeded or Refused where it makes none.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshtune.tools.planned import Planned
from meshtune.tools.table import Table, table

SHARDING = ("deepspeed", "fsdp", "fsdp_config", "dp_shard_size", "parallelism_config")  # keys
DISTRIBUTED = (  # keys that only torchtune's distributed recipes have
    "fsdp_cpu_offload", "custom_sharded_layers", "tensor_parallel_dim", "memory_efficient_fsdp_wrap",
)  # fmt: skip
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
    """Another key, or the value, makes this key have no effect; the text reports it."""


class Refused(Exception):
    """The file describes a job that is not trained here; the text says which."""


@dataclass(frozen=True)
class Job:
    """A file of another trainer."""

    tool: str  # one of table.TOOLS
    given: Mapping[str, Any]  # by dotted key, sections and what is in them; null values left out
    folder: Path  # that the file is in, for the files that it names
    gpus: int
    overrides: tuple[str, ...] = ()  # section.key=value of ours, laid over the result
    objective: str = "sft"  # a key of OBJECTIVES

    @property
    def table(self) -> Table:
        return table(self.tool)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The tool's values where the file leaves keys out, those of its trainer for the objective first."""
        own = self.table.tree.get("objectives", {}).get(self.objective, {})
        return {**self.table.defaults, **own.get("defaults", {})}

    def value(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of `keys` that the file has, else that the tool has a default for."""
        for values in (self.given, self.defaults):
            for key in keys:
                if key in values:
                    return values[key]
        return default

    def on(self, *keys: str) -> bool:
        """True if one of `keys` is given, or a default, and not switched off."""
        return any(self.value(key) not in OFF for key in keys)

    @property
    def shards(self) -> bool:
        """True if the file is for several GPUs that share the parameters or their optimizer states."""
        return self.on(*SHARDING) or any(key in self.given for key in DISTRIBUTED)

    @property
    def ended_by_steps(self) -> bool:
        return int(self.value("max_steps", default=-1)) > 0 or "max_steps_per_epoch" in self.given

    def read(self, name: str) -> Path | None:
        """Find a file that the job names: next to its own file, else in the working directory, else None."""
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
        for section in sections(value):
            yield from flat(section, known, f"{key}.")


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def sections(value: Any) -> list[Mapping[str, Any]]:
    """The sections in a value: itself, or those of a list."""
    return [each for each in listed(value) if isinstance(each, Mapping)]


def short(value: Any) -> str:
    """The last part of a component's name in lower case: torch.optim.AdamW is adamw."""
    return str(value).rpartition(".")[2].lower()


class Conversion(NamedTuple):
    """A key's value and settings, each as the other."""

    read: Callable[[Any, Job], Converted | dict[str, Any]]
    write: Callable[[Planned], Any] = lambda plan: None  # only keys that a table exports are asked

    def converted(self, value: Any, job: Job) -> Converted:
        """Read a key's value. Raises NoCounterpart, NotNeeded or Refused."""
        made = self.read(value, job)
        return made if isinstance(made, Converted) else Converted(made)


# Conversions for any setting: its name, and the arguments of the table #


def same(setting: str) -> Conversion:
    return Conversion(lambda value, job: {setting: value}, lambda plan: plan.setting(setting))


def unless_zero(setting: str) -> Conversion:
    """The same value; 0 is not written."""
    return Conversion(same(setting).read, lambda plan: plan.setting(setting) or None)


def above_zero(setting: str) -> Conversion:
    """The same whole number; 0 and less, such as -1, switch it off."""
    return Conversion(
        lambda value, job: {setting: int(value)} if int(value) > 0 else {}, lambda plan: plan.setting(setting)
    )


def whole(setting: str) -> Conversion:
    return Conversion(same(setting).read, lambda plan: int(plan.setting(setting)))


def on(setting: str, there: Any, otherwise: Any = None) -> Conversion:
    """A switch: `there` is the setting's value where it is on, `otherwise` where it is off."""
    off = {} if otherwise is None else {setting: otherwise}
    return Conversion(
        lambda value, job: {setting: there} if value else off, lambda plan: plan.setting(setting) == there
    )


def off(setting: str, there: Any) -> Conversion:
    """A switch that is off where the setting has the value `there`; only written."""
    return Conversion(lambda value, job: {}, lambda plan: plan.setting(setting) != there)


def fact(_: str, name: str) -> Conversion:
    """The value of Planned.setting(name); only written."""
    return Conversion(lambda value, job: {}, lambda plan: plan.setting(name))


def truth(setting: str) -> Conversion:
    """True where the setting has a value; only written."""
    return Conversion(lambda value, job: {}, lambda plan: bool(plan.setting(setting)))


def only(setting: str, values: list[Any], reason: str) -> Conversion:
    """No setting: one of `values`, which change nothing. reason: why any other has no counterpart."""

    def read(value: Any, job: Job) -> dict[str, Any]:
        if value not in values:
            raise NoCounterpart(reason.format(value=value))
        return {}

    return Conversion(read)


def choice(setting: str, theirs: dict[str, Any]) -> Conversion:
    """One of several values. theirs: by ours; other values are the same there."""
    ours = {value: key for key, value in reversed(theirs.items())}
    return Conversion(
        lambda value, job: {setting: ours.get(value, value)},
        lambda plan: theirs.get(str(plan.setting(setting)), plan.setting(setting)),
    )


def names(setting: str) -> Conversion:
    """A list of names, with commas between them."""
    return Conversion(
        lambda value, job: {setting: comma_separated(value)},
        lambda plan: ",".join(plan.setting(setting) or ()),
    )


def comma_separated(value: Any) -> list[str]:
    return [name.strip() for name in (value.split(",") if isinstance(value, str) else listed(value))]


MADE = (unless_zero, above_zero, whole, on, off, fact, truth, only, choice, names)
MAKERS: dict[str, Callable[..., Conversion]] = {"": same, **{make.__name__: make for make in MADE}}
