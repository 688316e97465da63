"""Sections of the settings tree that describe what is trained, on what and where; config.py has the tree."""

import re
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlparse

from pydantic import AfterValidator, Field, field_validator, model_validator

from meshtune.errors import UserError, expanded
from meshtune.setting_types import (
    SUFFIXES,
    Format,
    Fraction,
    GpuCount,
    LayerNames,
    Margin,
    NonNegative,
    Positive,
    Prices,
    Section,
)


class ModelConfig(Section):
    """The model to train, and how it is loaded."""

    name: str = Field(min_length=1, description="Hub id or local folder of the model.")
    init: Literal["pretrained", "random"] = Field(
        default="pretrained", description="Start from the model's weights, or from random ones."
    )
    attention: Literal["auto", "meshtune", "sdpa", "eager"] = Field(
        default="auto",
        description="Attention code: ours, which packs documents, or one of transformers'; auto takes ours "
        "where the model can.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that the model's repository brings."
    )
    overrides: dict[str, Any] = Field(
        default={},
        description="Other values of keys of the model's config.json, such as num_hidden_layers: 8.",
    )
    freeze: tuple[str, ...] = Field(
        default=(),
        description="Patterns of the names of parameters that are not trained, such as model.embed_tokens.*.",
    )


class LoraConfig(Section):
    """Low-rank adapters, for `method: lora`."""

    r: Positive = Field(default=16, description="Rank of the two matrices beside each weight.")
    alpha: float = Field(default=32, gt=0, description="The adapter's output is scaled by alpha / r.")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the adapter's inputs that are dropped."
    )
    target_modules: LayerNames = Field(
        default="all-linear",
        description="Names of the linear layers that get an adapter, such as [q_proj, v_proj], or regular "
        "expressions of whole names.",
    )
    use_rslora: bool = Field(
        default=False,
        description="Scale the adapter's output by alpha / sqrt(r), so that it does not fall with r.",
    )
    use_dora: bool = Field(
        default=False, description="Train the norm of each output row apart from its direction (DoRA)."
    )
    layers_to_transform: tuple[NonNegative, ...] | None = Field(
        default=None, description="Numbers of the blocks that get adapters, from 0; null: all."
    )
    modules_to_save: tuple[str, ...] = Field(
        default=(),
        description="Names of modules trained whole beside the adapters, such as [embed_tokens, lm_head].",
    )


HUB_FILES = "hf://datasets/"  # how the address of a hub data set's file begins


def hub_pattern(path: str) -> str:
    """The address of a pattern of files of a hub data set, org/name/*.parquet; any other path unchanged.

    A pattern below a folder that is here is of its files.
    """
    is_one = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*/[^$]*[*\[][^$]*", path)
    return f"{HUB_FILES}{path}" if is_one and not Path(path.split("/")[0]).exists() else path


class SourceConfig(Section):
    """One source of rows.

    None: format, columns, roles and where are those of the data section; split is train in data.train,
    test in data.eval.
    """

    path: Annotated[str, AfterValidator(hub_pattern)] = Field(
        min_length=1,
        description="File, folder, pattern, URL, or hub data set (its configuration after a colon).",
    )
    weight: float = Field(default=1.0, gt=0, description="Passes through this source per epoch.")
    split: str | None = Field(
        default=None, description="Split of a hub data set; null: train, and test in data.eval."
    )
    format: Format | None = Field(
        default=None, description="As data.format, for this source; null: data.format."
    )
    columns: dict[str, str] | None = Field(
        default=None, description="As data.columns, for this source; null: data.columns."
    )
    roles: dict[str, str] | None = Field(
        default=None, description="As data.roles, for this source; null: data.roles."
    )
    where: dict[str, bool | int | float | str] | None = Field(
        default=None, description="As data.where, for this source; null: data.where."
    )

    @model_validator(mode="after")
    def _has_splits(self) -> "SourceConfig":
        """Raise UserError for a split of a single file or a pattern, whose rows would all be read."""
        if self.split and is_one_file(self.path):
            raise UserError(
                f"{self.path} has no splits, so split={self.split} would read all its rows: name the file "
                "of that split, or leave split out."
            )
        return self


def is_pattern(path: str) -> bool:
    """True if the path of a source, or its URL, is a pattern of files, such as rows/*.jsonl."""
    if "://" in path:
        return "*" in path or ("[" in path and path.startswith(HUB_FILES))
    return any(sign in path for sign in "*?[") and not expanded(path).exists()


def is_one_file(path: str) -> bool:
    """True if the path of a source, or its URL, is that of a file or pattern, which has no splits."""
    is_file = urlparse(path).path.lower().endswith(SUFFIXES) and not expanded(path).is_dir()
    return is_file or is_pattern(path)


Sources = tuple[SourceConfig, ...]


class DataConfig(Section):
    """The rows, how they become tokens, and which of them are trained on."""

    train: Sources = Field(
        default=(), description="Training rows: a path, a source with its settings, or a list of either."
    )
    eval: Sources = Field(default=(), description="Held-out rows, written as data.train.")
    eval_split: float = Field(
        default=0,
        ge=0,
        description="Documents of data.train held out: below 1 a fraction of all, else their number.",
    )
    format: Format = Field(default="auto", description="Form of the rows; auto finds it from their columns.")
    columns: dict[str, str] = Field(default={}, description="Column of each field, such as prompt: question.")
    roles: dict[str, str] = Field(
        default={}, description="Our role for each role of the rows, such as bot: assistant."
    )
    where: dict[str, bool | int | float | str] = Field(
        default={},
        description="Rows to train on, by a column's value; the others are left out and counted.",
    )
    chat_template: str | None = Field(
        default=None,
        description="One of none, training, a built-in's name, a file, the Jinja text; null: the "
        "tokenizer's own.",
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default={}, description="Variables of the chat template, such as enable_thinking: false."
    )
    template_date: str | None = Field(
        default=None,
        pattern=r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$",
        description="Day that a template with a clock writes, as 2026-01-31; null: that of the run's start.",
    )
    control_tokens: Literal["auto", "error", "text", "keep"] = Field(
        default="auto",
        description="Special tokens in contents: an error, text or kept; auto: an error where trained on.",
    )
    separator: str = Field(
        default="\n",
        description="Text between prompt and completion where no chat template is in force.",
    )
    seq_len: Annotated[int, Field(ge=2)] = Field(default=2048, description="Length of a sequence in tokens.")
    mean_document_tokens: float | None = Field(
        default=None,
        gt=0,
        description="Length of a token's document, averaged over tokens, for the planner; null: seq_len.",
    )
    packing: bool = Field(
        default=True, description="Put several documents into one sequence; they do not see each other."
    )
    train_on: Literal["assistant", "completion", "all"] = Field(
        default="completion",
        description="Tokens whose loss counts: of all assistant turns, of the last one (completion), or all.",
    )
    split_turns: bool = Field(
        default=False,
        description="Make a row of each assistant turn, rendered as when it is generated.",
    )
    overlong: Literal["auto", "cut", "split", "drop", "error"] = Field(
        default="auto",
        description="What becomes of documents longer than seq_len; auto: plain text is split, others cut.",
    )
    max_samples: Positive | None = Field(
        default=None, description="Read only the first rows of each source, at most so many; null: all."
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="A row that can't be read or rendered is an error, or is skipped and counted.",
    )
    streaming: bool = Field(
        default=False, description="Tokenise rows as they are read, without a copy on the disk."
    )
    cache: str = Field(default="~/.cache/meshtune", description="Folder of the tokenised, packed data.")

    @field_validator("template_date", mode="before")
    @classmethod
    def _day(cls, value: Any) -> Any:
        """Accept a day as YAML reads it."""
        return value.isoformat() if isinstance(value, date) else value

    @field_validator("template_date")
    @classmethod
    def _of_the_calendar(cls, value: str | None) -> str | None:
        """Raise ValueError for a day that no month has."""
        with suppress(ValueError):
            return value and date.fromisoformat(value).isoformat()
        raise ValueError("write a day of the calendar, such as 2026-01-31")

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        """Accept a path, a mapping, or a list of either."""
        sources = value if isinstance(value, list | tuple) else [] if value is None else [value]
        return tuple({"path": source} if isinstance(source, str) else source for source in sources)


class ClusterConfig(Section):
    """The machines; a setting left out has the value of the GPU kind's usual machine (plan/hardware.toml)."""

    gpu: str | None = Field(
        default=None, description="A GPU kind of the catalogue; null: this machine's GPUs."
    )
    gpus: GpuCount | None = Field(default=None, description="Number of GPUs.")
    gpus_per_node: GpuCount | None = Field(default=None, description="GPUs of a node.")
    memory_gib: float | None = Field(default=None, gt=0, description="Memory of each GPU, in GiB.")
    link: float | None = Field(default=None, gt=0, description="GB/s from a GPU to the others of its node.")
    network: float | None = Field(default=None, gt=0, description="GB/s per GPU to other nodes.")
    network_share: Fraction | None = Field(
        default=None, description="Share of `network` that collectives reach."
    )
    price_per_gpu_hour: Prices = Field(
        default=None,
        description="Price of a GPU for an hour: a number, prices by kind such as {h100-sxm: 2.5, currency: "
        "USD}, or a TOML or YAML file of these.",
    )
    memory_margin: Margin | None = Field(
        default=None, description="Share of each GPU's memory that a plan leaves free; null: 0.04 or 0.1."
    )
    memory_budget_gib: float | None = Field(
        default=None, gt=0, description="The most that a plan fills of each GPU, in GiB, below the margin."
    )
    hardware: str | None = Field(default=None, description="A TOML file with more kinds of GPUs.")
    efficiency: dict[str, float] = Field(
        default={},
        description="Measured efficiencies, by hardware.toml's names; shares of a peak are at most 1.",
    )

    @field_validator("gpu", mode="before", json_schema_input_type=str | int | None)
    @classmethod
    def _name(cls, value: Any) -> Any:
        """Accept 4090, a number in YAML."""
        return str(value) if type(value) is int else value
