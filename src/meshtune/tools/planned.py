"""A config with the layout that it is exported with: its values by name, its rows, what tools lack."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import PurePath
from typing import Any, NamedTuple

from meshtune.config import Config
from meshtune.data.example import is_url
from meshtune.data.formats import FORMATS
from meshtune.layout import RECOMPUTATIONS, Layout
from meshtune.plan.programs import Tool
from meshtune.schedules import SCHEDULES
from meshtune.sections import DataConfig, SourceConfig, is_pattern
from meshtune.setting import SUFFIXES, epochs_of, is_regular_expression
from meshtune.tools.table import toml
from meshtune.units import counted

EXPORTED_OPTIMIZERS = ("adamw",)  # anything else is refused for all, so that none leaves it out
# Those of tools with schedules of their own.
EXPORTED_SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")


@dataclass(frozen=True)
class Exported:
    """A layout and its workload as another tool's configuration."""

    files: Mapping[str, str]  # text by file name
    command: str  # that starts the tool with these files, in their folder; on every node, DeepSpeed's on one
    missing: tuple[str, ...] = ()  # sentences on what the tool can't express or runs differently


@dataclass(frozen=True)
class Planned:
    """A config and the layout that it is exported with."""

    config: Config
    layout: Layout
    blocks: int  # of the model
    gpus_per_node: int
    adapts_experts: bool = False  # as Work.adapts_experts

    def setting(self, name: str) -> Any:
        """Value of a setting by its dotted name, of a field of the layout, of this class or of FACTS.

        A setting of data that its sources may have too: the first source's that has one.
        """
        section, _, key = name.rpartition(".")
        if key in FACTS and not section:
            return FACTS[key](self)
        if not section:
            return getattr(self, key) if hasattr(type(self), key) else getattr(self.config, key)
        if section in ("layout", "stage_layers"):
            return getattr(getattr(self, section), key)
        if name in ("train.learning_rate", "train.global_batch_size"):
            return getattr(self.config, key)
        value = attrgetter(name)(self.config)
        if name == "train.compile" and value == "auto":
            return False  # other tools compile only where they are told to
        own = [getattr(source, key, None) for source in self.sources] if section == "data" else []
        return value or next(filter(None, own), value)

    def holds(self, when: str) -> bool:
        """True if every word of a condition holds, as differences.toml describes them."""
        return all(self._word(word.removeprefix("!")) is not word.startswith("!") for word in when.split())

    def _word(self, word: str) -> bool:
        name, sign, value = re.split("([=>]|$)", word, maxsplit=1)
        actual = self.setting(name)
        if sign == "=":
            values = {*actual} if isinstance(actual, frozenset | tuple) else {str(actual)}
            return not values.isdisjoint(value.split("|"))
        number = len(actual) if isinstance(actual, tuple) else actual
        return number > int(value) if sign else bool(actual)

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        return (*self.config.data.train, *self.config.data.eval)

    @property
    def rows(self) -> frozenset[str]:
        return kinds_of_rows(self.config)

    @property
    def first(self) -> SourceConfig:
        """The source that tools which take only one are given."""
        return next(iter(self.config.data.train), SourceConfig(path="train.jsonl"))

    @property
    def sharded(self) -> bool:
        """True if FSDP wraps the model: for ZeRO, and for cp, which shards parameters over context ranks."""
        return self.layout.dp_shard > 1 or self.layout.cp > 1

    @property
    def engine(self) -> bool:
        """True if LLaMA-Factory needs DeepSpeed for the layout: for ZeRO and tensor parallelism."""
        return self.layout.zero > 0 or self.layout.tp > 1

    @property
    def nodes(self) -> int:
        """Nodes that the layout's ranks fill; 1 for a part of one."""
        return max(1, self.layout.world // self.gpus_per_node)

    @property
    def held_out(self) -> bool:
        return bool(self.config.data.eval or self.config.data.eval_split)

    @property
    def epochs(self) -> float:
        """Epochs of a run that train.max_steps does not end."""
        return self.config.train.num_epochs or 1.0

    def beyond(self, every: int | str) -> bool:
        """True if an interval in epochs is not a share of the run, as transformers' Trainer takes it."""
        train, epochs = self.config.train, epochs_of(every)
        in_steps = not train.num_epochs and (train.max_steps or train.total_tokens)
        return epochs not in (None, 1) and bool(in_steps or epochs >= self.epochs)

    @property
    def stage_layers(self) -> "StageLayers":
        return stage_layers(self.blocks, self.layout.pp, self.layout.stages_per_rank)

    @property
    def warmup_ratio(self) -> float | None:
        """Warm-up as a share of all steps; None: it is given in steps, or there is none."""
        train = self.config.train
        has = train.warmup_steps is None and SCHEDULES[train.lr_scheduler].warmup
        return train.warmup_ratio if has else None

    @property
    def warmup_steps(self) -> int | None:
        """Warm-up in optimizer steps; None: it is a ratio, and train.max_steps is not set."""
        train = self.config.train
        if not SCHEDULES[train.lr_scheduler].warmup:
            return 0
        if train.warmup_steps is not None:
            return train.warmup_steps
        return round(train.warmup_ratio * train.max_steps) if train.max_steps else None


def evaluations_per_checkpoint(plan: Planned) -> int:
    """Evaluations from a checkpoint to the next; 0 if a Trainer refuses to choose the best of them."""
    evaluated, saved = plan.config.eval.every, plan.config.checkpoint.every
    if isinstance(evaluated, str) or isinstance(saved, str) or not evaluated:
        return int(evaluated == saved)
    return 0 if saved % evaluated else saved // evaluated


# Facts that only the tables of tools ask for.
def patterns(targets: str | Sequence[str]) -> list[str] | str | None:
    """Names of layers; where some are regular expressions, one expression of all, which peft reads."""
    if isinstance(targets, str):
        return None
    if not any(map(is_regular_expression, targets)):
        return list(targets)
    each = [name if is_regular_expression(name) else rf"(.*\.)?{re.escape(name)}" for name in targets]
    return each[0] if len(each) == 1 else "|".join(f"({pattern})" for pattern in each)


def named_modules(plan: Planned) -> str:
    targets = plan.config.lora.target_modules
    return "all" if isinstance(targets, str) else ",".join(targets)


FACTS: Mapping[str, Callable[[Planned], Any]] = {
    "first_rows": lambda plan: row_format(plan.config.data, plan.first),
    "chats": lambda plan: bool(plan.rows - {"text"}),
    "meshed": lambda plan: plan.layout.world > plan.layout.dp_replicate,  # more than plain data parallelism
    "recomputes_blocks": lambda plan: RECOMPUTATIONS[plan.layout.recompute].block,
    "own_cache": lambda plan: plan.config.data.cache != DataConfig().cache,
    "weighted": lambda plan: any(source.weight != 1 for source in plan.config.data.train),
    "other_schedule": lambda plan: (  # that tools with schedules of their own lack
        plan.config.train.lr_scheduler not in EXPORTED_SCHEDULES
        or bool(plan.config.train.lr_scheduler_kwargs)
    ),
    "patterns_of_layers": lambda plan: (
        plan.config.lora.target_modules != "all-linear"
        and any(map(is_regular_expression, plan.config.lora.target_modules))
    ),
    "adapters_of_experts": lambda plan: plan.adapts_experts or "experts" in plan.config.lora.target_modules,
    "fractional_alpha": lambda plan: plan.config.lora.alpha != int(plan.config.lora.alpha),
    "eval_beyond": lambda plan: plan.beyond(plan.config.eval.every),
    "checkpoint_beyond": lambda plan: plan.beyond(plan.config.checkpoint.every),
    "checkpoint_in_epochs": lambda plan: bool(epochs_of(plan.config.checkpoint.every)),
    "eval_in_steps": lambda plan: not epochs_of(plan.config.eval.every),
    "evaluations_per_checkpoint": evaluations_per_checkpoint,
    "tp_in_node": lambda plan: plan.layout.tp <= plan.gpus_per_node,
    # The ranks of the pipeline can't all have equal numbers of layers.
    "uneven_stages": lambda plan: plan.blocks % plan.layout.pp > 0,
    # The learning rate at the end of the run, as a share of the highest and as it is.
    "least_share": lambda plan: plan.config.train.min_lr_ratio or 0.0,
    "least_rate": lambda plan: float(
        f"{plan.config.learning_rate * (plan.config.train.min_lr_ratio or 0.0):.12g}"
    ),
    "warmup_from_1": lambda plan: max(1, plan.warmup_steps or 0),  # for schedules that count at least one
}


class StageLayers(NamedTuple):
    """Layers on a pipeline rank."""

    first: int
    middle: int
    last: int


def stage_layers(blocks: int, pp: int, stages_per_rank: int) -> StageLayers:
    """Split layers so that the fullest rank has fewest: all ranks but the first and the last are equal.

    A rank's layers are a multiple of its stages, so `stages_per_rank` must divide `blocks`.
    """
    units = blocks // stages_per_rank
    splits = []
    for middle in {units // pp, -(-units // pp)}:
        ends = units - middle * (pp - 2)
        if ends >= 2:
            splits.append((-(-ends // 2), middle, ends // 2))
    return StageLayers(*(stages_per_rank * size for size in min(splits, key=max)))


# Sentences #


def rows_of(tool: Tool, refused: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of differences.toml that are about a tool. refused: those of what it can't have."""
    for row in toml("differences")["row"]:
        if tool.name in row.get("tools", tool.name).split() and row.get("refused", False) is refused:
            yield row


def differences(tool: Tool, plan: Planned, *, refused: bool = False) -> Iterator[str]:
    """Sentences on what a tool runs differently or leaves to be done; refused: on what it can't have."""
    for row in rows_of(tool, refused):
        for setting in row.get("settings", "").split() or [""]:
            if plan.holds(f"{row.get('when', '')} {setting}"):
                yield row["text"].format(
                    tool=tool.title, setting=setting, plan=plan, config=plan.config, layout=plan.layout
                )


def training_problems(tool: Tool, config: Config) -> Iterator[str]:
    """Sentences on why the tool can't train as the settings say, under whatever layout."""
    train = config.train
    if train.precision not in tool.precisions:
        yield f"{tool.title} doesn't train in train.precision={train.precision}; use fp32 or bf16."
    if config.method not in tool.methods:
        yield (
            f"{tool.title} trains every parameter; axolotl and llamafactory train with "
            f"method={config.method}."
        )
    if train.optimizer not in EXPORTED_OPTIMIZERS:
        yield (
            f"train.optimizer={train.optimizer} can't be exported to {tool.title}; use "
            f"{' or '.join(EXPORTED_OPTIMIZERS)}."
        )


def setting_problems(tool: Tool, config: Config, *, adapts_experts: bool = False) -> Iterator[str]:
    """Sentences on settings that can't be exported to a tool, under whatever layout."""
    yield from differences(tool, Planned(config, Layout(), 1, 1, adapts_experts), refused=True)
    yield from training_problems(tool, config)
    for source in (*config.data.train, *config.data.eval):
        if row_format(config.data, source) == "tokens":
            yield (f"Rows of input_ids can't be exported to {tool.title}; name the rows that made them.")
        if is_url(source.path):
            yield f"{source.path} can't be exported to {tool.title}; name a file or a hub data set."
        elif is_pattern(source.path):
            yield (
                f"The pattern {source.path} can't be exported to {tool.title}; name files or a hub data set."
            )
        if ".tsv" in PurePath(source.path).suffixes:
            yield f"{source.path} can't be exported to {tool.title}, which reads commas; convert it to .csv."


def world_problems(config: Config, layout: Layout, gpus_per_node: int) -> Iterator[str]:
    """Sentences on partly filled nodes and on another global batch than the settings'."""
    if layout.world > gpus_per_node and layout.world % gpus_per_node:
        yield (
            f"{layout.world} GPUs do not fill nodes of {gpus_per_node}; choose a layout of "
            f"{layout.world // gpus_per_node * gpus_per_node} GPUs, or set cluster.gpus_per_node."
        )
    if layout.global_batch_size != config.global_batch_size:
        yield (
            f"{layout} makes {counted(layout.global_batch_size, 'sequence')} per step, but "
            f"train.global_batch_size is {config.global_batch_size}; change one of them."
        )


def torchrun(plan: Planned, program: str) -> str:
    """The command, for each node, that starts `program` on its ranks; one node's needs no address.

    program: with its arguments. Several nodes: each must set NODE_RANK and MASTER_ADDR.
    """
    if plan.nodes == 1:
        return f"torchrun --standalone --nproc-per-node {plan.layout.world} {program}"
    return (
        f"torchrun --nnodes {plan.nodes} --nproc-per-node {plan.gpus_per_node} --node-rank $NODE_RANK "
        f"--master-addr $MASTER_ADDR --master-port 29500 {program}"
    )


# Rows #


def row_format(data: DataConfig, source: SourceConfig) -> str:
    """The format of a source's rows; for `auto`, the first whose columns the config names, else `messages`.

    What `source` sets goes before `data`. The data are not read.
    """
    row_format = source.format or data.format
    if row_format != "auto":
        return row_format
    fitting = (name for name, form in FORMATS.items() if set(form.needs) <= columns_of(data, source).keys())
    return next(fitting, "messages")


def kinds_of_rows(config: Config) -> frozenset[str]:
    """Formats of the sources that are trained on."""
    return frozenset(row_format(config.data, source) for source in config.data.train)


def row_notes(data: DataConfig, tool: str) -> Iterator[str]:
    """Sentences on sources whose format is auto and whose columns do not tell it, and on columns that may be
    inside objects (`columns.reach`), where the tool does not look.
    """
    tables = [data.columns, *(source.columns or {} for source in data.train)]
    for ours, name in dict.fromkeys(pair for table in tables for pair in table.items() if "." in pair[1]):
        yield (
            f"data.columns maps {ours} to {name}: {tool} reads only a column of that whole name. If it is "
            "inside an object, write it to a column of its own."
        )
    for source in (*data.train, *data.eval):
        if (source.format or data.format) == "auto" and not columns_of(data, source):
            yield f"data.format is auto: the rows of {source.path} are taken as messages; set data.format."


def column_name(data: DataConfig, source: SourceConfig, name: str) -> str:
    """Return the source's name for our column `name`: `name` itself, unless the config maps it.

    `source.columns` replaces `data.columns` as a whole.
    """
    return columns_of(data, source).get(name, name)


def columns_of(data: DataConfig, source: SourceConfig) -> Mapping[str, str]:
    """The source's names for our columns, where the config maps them."""
    return data.columns if source.columns is None else source.columns


def is_file(source: SourceConfig) -> bool:
    """True if a source is a file, False if it is a hub data set."""
    return source.path.endswith(SUFFIXES)


def file_kind(source: SourceConfig) -> str:
    """The loader of Hugging Face datasets for a file: json, csv, parquet or text."""
    suffixes = PurePath(source.path).suffixes
    kinds = {".parquet": "parquet", ".csv": "csv", ".txt": "text"}
    return next((kind for suffix, kind in kinds.items() if suffix in suffixes), "json")
