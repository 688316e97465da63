"""Shared by all exporters: their result, refusals that hold for every tool, and reading of a workload."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from meshtune.config import Config
from meshtune.data.example import is_url
from meshtune.data.formats import FORMATS
from meshtune.errors import written
from meshtune.layout import Layout
from meshtune.plan.programs import Tool
from meshtune.schedules import SCHEDULES
from meshtune.sections import DataConfig, SourceConfig, is_pattern
from meshtune.setting import SUFFIXES, epochs_of
from meshtune.units import counted

EXPORTED_OPTIMIZERS = ("adamw",)  # anything else is refused for all, so that none leaves it out
REGULARISATIONS = {  # setting of train -> the tools that have it
    "label_smoothing": ("accelerate", "LLaMA-Factory"),
    "neftune_alpha": ("accelerate", "LLaMA-Factory", "axolotl"),
}
EXPORTED_SCHEDULES = (
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
)  # that DeepSpeed and others have


@dataclass(frozen=True)
class Exported:
    """A layout and its workload as another tool's configuration."""

    files: Mapping[str, str]  # text by file name
    command: str  # that starts the tool with these files, in their folder; to be run on every node
    missing: tuple[str, ...]  # sentences on what the tool can't express or runs differently


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


def export_problems(tool: str, config: Config) -> Iterator[str]:
    """Sentences on settings that can't be written for `tool`, though it could train so."""
    if config.train.lr_scheduler == "warmup_stable_decay" and not config.train.max_steps:
        yield f"train.lr_scheduler=warmup_stable_decay can't be exported to {tool} without train.max_steps."
    if config.train.max_steps and config.train.num_epochs:
        yield f"train.max_steps beside train.num_epochs can't be exported to {tool}; keep one."
    if config.train.lr_decay_steps:
        yield f"train.lr_decay_steps can't be exported to {tool}; leave it out."
    for name, every in (("eval", config.eval.every), ("checkpoint", config.checkpoint.every)):
        if epochs_of(every):
            yield f"{name}.every={every} can't be exported to {tool}; give it in steps."
    for name, tools in REGULARISATIONS.items():
        if getattr(config.train, name) and tool not in tools:
            yield f"train.{name} can't be exported to {tool}; leave it out."
    sources = (*config.data.train, *config.data.eval)
    if config.data.where or any(source.where for source in sources):
        yield f"data.where can't be exported to {tool}; write the chosen rows to a file of their own."
    for name in ("split_turns", "chat_template_kwargs", "roles", "max_samples"):
        if getattr(config.data, name) or any(getattr(source, name, None) for source in sources):
            yield f"data.{name} can't be exported to {tool}; leave it out."
    if any(row_format(config.data, source) == "tokens" for source in sources):
        yield f"Rows of input_ids can't be exported to {tool}; name the rows that they were made from."
    if urls := [source.path for source in sources if is_url(source.path)]:
        yield f"{urls[0]} can't be exported to {tool}; name a file or a hub data set."
    if patterns := [source.path for source in sources if is_pattern(source.path)]:
        yield f"The pattern {patterns[0]} can't be exported to {tool}; name files or a hub data set."
    if config.data.chat_template == "training":
        yield f"data.chat_template=training can't be exported to {tool}; save the template to a file."
    if tabs := [source.path for source in sources if ".tsv" in PurePath(source.path).suffixes]:
        yield f"{tabs[0]} can't be exported to {tool}, which reads commas; convert it to .csv."


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


def nodes(layout: Layout, gpus_per_node: int) -> int:
    """Nodes that the layout's ranks fill; 1 for a part of one."""
    return max(1, layout.world // gpus_per_node)


def torchrun(layout: Layout, gpus_per_node: int, program: str) -> str:
    """The command, for each node, that starts `program` on its ranks; one node's needs no address.

    program: with its arguments. Several nodes: each must set NODE_RANK and MASTER_ADDR.
    """
    count = nodes(layout, gpus_per_node)
    if count == 1:
        return f"torchrun --standalone --nproc-per-node {layout.world} {program}"
    return (
        f"torchrun --nnodes {count} --nproc-per-node {gpus_per_node} --node-rank $NODE_RANK --master-addr "
        f"$MASTER_ADDR --master-port 29500 {program}"
    )


# The workload -------------------------------------------------------------------------------------------


def not_carried_over(tool: str, config: Config, *, random_init: bool = False) -> Iterator[str]:
    """Sentences on settings that no exporter carries over. tool: its name, for the sentences.

    random_init: the tool can start from random weights, so that model.init is carried over.
    """
    if config.model.freeze:
        yield (
            f"model.freeze ({', '.join(config.model.freeze)}) is not carried over: {tool} trains every "
            f"parameter that method={config.method} does."
        )
    if config.model.overrides:
        yield f"model.overrides is not carried over: {tool} trains the model as its own config.json has it."
    if config.model.init == "random" and not random_init:
        yield f"model.init=random is not carried over: {tool} starts from the pretrained weights."
    if config.data.chat_template:
        yield (
            f"data.chat_template={written(config.data.chat_template)} is not carried over: {tool} takes the "
            "tokenizer's."
        )
    settings = ("samples", "exact_match", "keep_best", "early_stopping")
    if changed := [f"eval.{name}" for name in settings if getattr(config.eval, name)]:
        yield f"{', '.join(changed)} {'is' if len(changed) == 1 else 'are'} not carried over to {tool}."
    if config.data.overlong not in ("auto", "cut"):
        yield f"data.overlong={config.data.overlong} is not carried over: {tool} has a rule of its own."
    if any(source.weight != 1 for source in config.data.train):
        yield f"The weights of data.train are not carried over: {tool} reads every source once per epoch."


def evaluation_differences(tool: str, config: Config) -> Iterator[str]:
    """Sentences on the evaluation schedule of tools that use transformers.Trainer, where it differs."""
    if (config.data.eval or config.data.eval_split) and not config.eval.every:
        yield f"{tool} evaluates after every epoch, not at the end alone."


def whole_logits(tool: str, setting: str) -> str:
    """The sentence for tools of transformers' loss. setting: that replaces it, which no plan counts on."""
    kept = f"{tool} keeps all logits at once, as the plan counts"
    return f"{kept}; {setting}, which needs liger-kernel, keeps none."


def row_format(data: DataConfig, source: SourceConfig) -> str:
    """The format of a source's rows; for `auto`, the first whose columns the config names, else `messages`.

    What `source` sets goes before `data`. The data are not read.
    """
    row_format = source.format or data.format
    if row_format != "auto":
        return row_format
    fitting = (
        name for name, form in FORMATS.items() if set(form.needs) <= (source.columns or data.columns).keys()
    )
    return next(fitting, "messages")


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
    for source in data.train:
        if (source.format or data.format) == "auto" and not (source.columns or data.columns):
            yield f"data.format is auto: the rows of {source.path} are taken as messages; set data.format."


def column_name(data: DataConfig, source: SourceConfig, name: str) -> str:
    """Return the source's name for our column `name`: `name` itself, unless the config maps it.

    `source.columns` replaces `data.columns` as a whole.
    """
    return (data.columns if source.columns is None else source.columns).get(name, name)


def is_file(source: SourceConfig) -> bool:
    """True if a source is a file, False if it is a hub data set."""
    return source.path.endswith(SUFFIXES)


def file_kind(source: SourceConfig) -> str:
    """The loader of Hugging Face datasets for a file: json, csv, parquet or text."""
    suffixes = PurePath(source.path).suffixes
    kinds = {".parquet": "parquet", ".csv": "csv", ".txt": "text"}
    return next((kind for suffix, kind in kinds.items() if suffix in suffixes), "json")


def schedule_refusals(tool: str, config: Config, *, with_floor: Iterable[str]) -> Iterator[str]:
    """Yield why the learning-rate schedule can't be written for a tool with schedules of its own.

    tool: its name, for the sentences. with_floor: the schedules that take train.min_lr_ratio there.
    """
    train = config.train
    if train.lr_scheduler not in EXPORTED_SCHEDULES or train.lr_scheduler_kwargs:
        yield (
            f"train.lr_scheduler={train.lr_scheduler} can't be exported to {tool}; use "
            f"{' or '.join(EXPORTED_SCHEDULES)}, without train.lr_scheduler_kwargs."
        )
    elif train.min_lr_ratio is not None and train.lr_scheduler not in with_floor:
        yield f"train.min_lr_ratio can't be exported to {tool} with train.lr_scheduler={train.lr_scheduler}."


def warmup_steps(config: Config) -> int | None:
    """Warm-up in optimizer steps; None: it is a ratio, and train.max_steps is not set."""
    train = config.train
    if not SCHEDULES[train.lr_scheduler].warmup:
        return 0
    if train.warmup_steps is not None:
        return train.warmup_steps
    return round(train.warmup_ratio * train.max_steps) if train.max_steps else None
