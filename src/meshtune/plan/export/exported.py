"""What every exporter shares: its result, the refusals that hold everywhere, and the parts of a workload
that are read alike.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from meshtune.config import Config, DataConfig, SourceConfig
from meshtune.errors import UserError
from meshtune.layout import Layout

# As in data/source.py, which planning can't import: it reads the hub through a library that brings torch.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
}
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")


EXPORTED_RECOMPUTATIONS = ("none", "attention", "selective", "full")
EXPORTED_PRECISIONS = ("fp32", "bf16", "bf16-pure")  # that every tool's export knows how to write


@dataclass(frozen=True)
class Exported:
    files: Mapping[str, str]  # file name -> its text
    command: str  # how the tool is started with them; on every node where there are several
    missing: tuple[str, ...]  # what that tool can't express of this layout or workload, as sentences


def refuse(config: Config, layout: Layout, gpus_per_node: int, problems: Iterable[str]) -> None:
    """Raises UserError with `problems` and those that hold for every tool, if there are any."""
    if found := [*problems, *everywhere(config, layout, gpus_per_node)]:
        raise UserError(found)


def everywhere(config: Config, layout: Layout, gpus_per_node: int) -> Iterator[str]:
    if config.train.precision not in EXPORTED_PRECISIONS:
        yield (
            f"train.precision={config.train.precision} runs in meshtune alone, no other tool trains in it; "
            "use fp32 or bf16."
        )
    if layout.recompute not in EXPORTED_RECOMPUTATIONS:
        *others, last = EXPORTED_RECOMPUTATIONS
        yield (f"recompute={layout.recompute} runs in meshtune alone; use {', '.join(others)} or {last}.")
    if layout.world > gpus_per_node and layout.world % gpus_per_node:
        yield (
            f"{layout.world} GPUs do not fill nodes of {gpus_per_node}; choose a layout of "
            f"{layout.world // gpus_per_node * gpus_per_node} GPUs, or set cluster.gpus_per_node."
        )
    if layout.global_batch_size != config.global_batch_size:
        yield (
            f"{layout} makes {layout.global_batch_size} sequences per step, but train.global_batch_size is "
            f"{config.global_batch_size}; change one of them."
        )


def nodes(layout: Layout, gpus_per_node: int) -> int:
    return max(1, layout.world // gpus_per_node)


def torchrun(layout: Layout, gpus_per_node: int, program: str) -> str:
    """The command that starts `program` on every rank; NODE_RANK and MASTER_ADDR are each node's to set."""
    count = nodes(layout, gpus_per_node)
    if count == 1:
        return f"torchrun --standalone --nproc-per-node {layout.world} {program}"
    return (
        f"torchrun --nnodes {count} --nproc-per-node {gpus_per_node} --node-rank $NODE_RANK --master-addr "
        f"$MASTER_ADDR --master-port 29500 {program}"
    )


# Recomputation ------------------------------------------------------------------------------------------


def whole_blocks(tool: str, layout: Layout) -> tuple[bool, list[str]]:
    """For tools that recompute whole blocks or nothing: which of the two fits the layout's memory, and what
    that changes.
    """
    if layout.recompute == "attention":
        return False, [no_attention_recompute(tool)]
    if layout.recompute == "selective":
        sentence = (
            f"{tool} recomputes whole blocks or nothing: recompute=selective is written as full, which holds "
            "less memory and takes longer."
        )
        return True, [sentence]
    return layout.recompute == "full", []


def no_attention_recompute(tool: str) -> str:
    return (
        f"{tool} has no recomputation of the attention core alone: recompute=attention is written as none, "
        "which keeps the attention's inputs and output (its fused kernels never keep the scores)."
    )


# The workload -------------------------------------------------------------------------------------------


def unsaid(tool: str, config: Config, *, random_init: bool = False) -> Iterator[str]:
    """Settings that no exporter carries over; `random_init`: unless the tool starts from random weights."""
    if config.model.freeze:
        yield (
            f"model.freeze ({', '.join(config.model.freeze)}) is not carried over: {tool} trains every "
            f"parameter that method={config.method} does."
        )
    if config.model.init == "random" and not random_init:
        yield f"model.init=random is not carried over: {tool} starts from the pretrained weights."
    if config.data.chat_template:
        yield (
            f"data.chat_template={config.data.chat_template} is not carried over: {tool} takes the "
            "tokenizer's."
        )
    settings = ("samples", "exact_match", "keep_best", "early_stopping")
    if changed := [f"eval.{name}" for name in settings if getattr(config.eval, name)]:
        yield f"{', '.join(changed)} {'is' if len(changed) == 1 else 'are'} not carried over to {tool}."
    if config.data.overlong != "cut":
        yield f"data.overlong={config.data.overlong} is not carried over: {tool} has a rule of its own."
    if any(source.weight != 1 for source in config.data.train):
        yield f"The weights of data.train are not carried over: {tool} reads every source once per epoch."


def evaluated(tool: str, config: Config) -> Iterator[str]:
    """What a Trainer, which knows steps and epochs, does otherwise."""
    if (config.data.eval or config.data.eval_split) and not config.eval.every:
        yield f"{tool} evaluates after every epoch, not at the end alone."


def row_format(data: DataConfig, source: SourceConfig) -> str:
    """The format of a source's rows; `auto` is told by the columns that the config names, else `messages`."""
    named = source.format or data.format
    if named != "auto":
        return named
    fitting = (
        name for name, needed in FORMATS.items() if set(needed) <= (source.columns or data.columns).keys()
    )
    return next(fitting, "messages")


def guessed(data: DataConfig) -> Iterator[str]:
    """Says so where a format was guessed without a hint."""
    for source in data.train:
        if (source.format or data.format) == "auto" and not (source.columns or data.columns):
            yield f"data.format is auto: the rows of {source.path} are taken as messages; set data.format."


def column(data: DataConfig, source: SourceConfig, name: str) -> str:
    """What our column `name` is called in the source."""
    return (data.columns if source.columns is None else source.columns).get(name, name)


def is_file(source: SourceConfig) -> bool:
    """Whether a source is a file rather than a hub data set."""
    return source.path.endswith(SUFFIXES)


def file_kind(source: SourceConfig) -> str:
    """The name that Hugging Face datasets has for a file's kind."""
    suffixes = PurePath(source.path).suffixes
    return next((kind for kind in ("parquet", "csv") if f".{kind}" in suffixes), "json")


def warmup_steps(config: Config) -> int | None:
    """None where it can't be told without the number of steps."""
    train = config.train
    if train.warmup_steps is not None:
        return train.warmup_steps
    return round(train.warmup_ratio * train.max_steps) if train.max_steps else None
