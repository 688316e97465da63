"""The settings of a run: one strict tree, read from YAML and `section.key=value`.

    config = load("run.yaml", ["train.max_steps=100"])

Defaults < file < command line. All unknown keys and wrong values are reported at once, an unknown key with
the nearest setting, or with our name of what another trainer calls so (setting_names.py). The tree stops at
train/build.py: below it functions take the values they use.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from meshtune.errors import UserError, expanded
from meshtune.layout import PartialLayout
from meshtune.optimizers import OPTIMIZERS
from meshtune.precision import PRECISIONS, REDUCE_DTYPES
from meshtune.setting_names import unknown_setting
from meshtune.yaml_tree import merge, overridden, read_yaml

MOST_GPUS = 10**6
LARGEST = 10**12  # of a setting that counts: beyond it search and arithmetic take for ever
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PATHS = ("model.name", "data.train", "data.eval", "data.cache", "data.chat_template", "cluster", "output")
SHORT = reprlib.Repr()  # of a value in an error
SHORT.maxstring = SHORT.maxother = 200
TABLES = {
    "precision": PRECISIONS,
    "reduce_dtype": REDUCE_DTYPES,
    "optimizer": OPTIMIZERS,
}  # of train
Format = Literal["auto", "text", "prompt-completion", "alpaca", "messages", "sharegpt", "tokens"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(Section):
    """The model to train, and how it is loaded."""

    name: str = Field(min_length=1, description="hub id or local folder")
    init: Literal["pretrained", "random"] = "pretrained"
    attention: Literal["auto", "meshtune", "sdpa", "eager"] = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    freeze: tuple[str, ...] = Field(
        default=(), description="patterns of parameter names, such as model.embed_tokens.*"
    )


class LoraConfig(Section):
    r: Positive = 16
    alpha: float = Field(default=32, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"


class SourceConfig(Section):
    """One source of rows.

    None: format, columns, roles and where are those of the data section; split is train in data.train,
    test in data.eval.
    """

    path: str = Field(min_length=1)
    weight: float = Field(default=1.0, gt=0, description="passes through this source per epoch")
    split: str | None = None
    format: Format | None = None
    columns: dict[str, str] | None = None
    roles: dict[str, str] | None = None
    where: dict[str, bool | int | float | str] | None = None


Sources = tuple[SourceConfig, ...]


class DataConfig(Section):
    train: Sources = ()
    eval: Sources = ()
    eval_split: float = Field(
        default=0, ge=0, description="held-out documents: below 1 a fraction of all, else their number"
    )
    format: Format = "auto"
    columns: dict[str, str] = {}
    roles: dict[str, str] = Field(default={}, description="their role: ours, such as bot: assistant")
    where: dict[str, bool | int | float | str] = Field(
        default={}, description="rows to train on, by a column's value; the others are left out and counted"
    )
    chat_template: str | None = Field(
        default=None,
        description="none, a built-in's name, training or a file; null: the tokenizer's own",
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default={}, description="variables of the chat template, such as enable_thinking: false"
    )
    separator: str = Field(
        default="\n", description="between prompt and completion where no chat template is in force"
    )
    seq_len: Annotated[int, Field(ge=2)] = 2048
    mean_document_tokens: float | None = Field(
        default=None, gt=0, description="length of a token's document, averaged over tokens; null: seq_len"
    )
    packing: bool = True
    train_on: Literal["assistant", "completion", "all"] = "completion"
    split_turns: bool = Field(
        default=False, description="each assistant turn is a row, rendered as when it is generated"
    )
    overlong: Literal["cut", "drop", "error"] = "cut"
    on_bad_row: Literal["error", "skip"] = "error"
    streaming: bool = False
    cache: str = Field(default="~/.cache/meshtune", description="folder of the tokenised, packed data")

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        """Accept a path, a mapping, or a list of either."""
        sources = value if isinstance(value, list | tuple) else [] if value is None else [value]
        return tuple({"path": source} if isinstance(source, str) else source for source in sources)

    @model_validator(mode="after")
    def _split_one_answer(self) -> "DataConfig":
        if self.split_turns and self.train_on == "all":
            raise UserError(
                "data.split_turns labels the last answer of each row, data.train_on=all everything; give one."
            )
        return self


class TrainConfig(Section):
    global_batch_size: Annotated[int, Field(ge=1, le=10**7)] | None = Field(
        default=None, description="sequences per optimizer step; default 64"
    )
    global_batch_tokens: Positive | None = Field(default=None, description="the same in tokens: / seq_len")
    max_steps: Positive | None = None
    num_epochs: float | None = Field(default=None, gt=0)
    learning_rate: float = Field(default=1.0e-5, gt=0)
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: Fraction = 0.03
    warmup_steps: NonNegative | None = Field(default=None, description="instead of warmup_ratio")
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, ge=0, description="0: no clipping")
    precision: str = "bf16"
    reduce_dtype: str = Field(default="fp32", description="gradients of several micro-batches add up in it")
    optimizer: str = "adamw"
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    adam_eps: float = Field(default=1.0e-8, gt=0)
    seed: NonNegative = 42
    compile: bool = False
    max_nonfinite_steps: Positive = Field(
        default=5, description="in a row, then the run stops with exit code 4"
    )
    device: Literal["auto", "cuda", "cpu"] = "auto"

    @field_validator("precision", "reduce_dtype", "optimizer")
    @classmethod
    def _in_its_table(cls, value: str, info: ValidationInfo) -> str:
        """Return `value`. Raises UserError, with the nearest name, if the setting's table lacks it."""
        TABLES[str(info.field_name)][value]
        return value

    @model_validator(mode="after")
    def _one_of(self) -> "TrainConfig":
        problems = []
        summed = PRECISIONS[self.precision].summed(self.reduce_dtype)
        if self.reduce_dtype == "bf16" and summed != REDUCE_DTYPES["bf16"]:
            problems.append(
                f"train.reduce_dtype=bf16 would round the {summed} gradients of train.precision="
                f"{self.precision}; leave train.reduce_dtype out, or set train.precision=bf16."
            )
        if self.global_batch_size and self.global_batch_tokens:
            problems.append(
                "train.global_batch_size and train.global_batch_tokens both set the batch; keep one."
            )
        if self.max_steps and self.num_epochs:
            problems.append("train.max_steps and train.num_epochs both set how long to train; keep one.")
        if problems:
            raise UserError(problems)
        return self


class EvalConfig(Section):
    every: NonNegative = Field(default=0, description="in steps; 0: at the end only")
    at_start: bool = False
    samples: NonNegative = Field(default=0, description="held-out prompts answered greedily and shown")
    exact_match: NonNegative = Field(
        default=0, description="held-out prompts whose greedy answer is compared word for word"
    )
    max_new_tokens: Positive = 64
    keep_best: bool = Field(
        default=False, description="model/ is the checkpoint with the lowest evaluation loss"
    )
    early_stopping: NonNegative = Field(default=0, description="evaluations without a better loss; 0: never")


class CheckpointConfig(Section):
    every: NonNegative = Field(default=100, description="in steps; 0: at the end only")
    keep: Positive = 3
    async_save: bool = True
    save_on_signal: bool = True
    resume: Literal["auto", "never"] = "auto"


class LogConfig(Section):
    every: Positive = 1
    to: tuple[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow"], ...] = (
        "console",
        "jsonl",
        "tensorboard",
    )


class ClusterConfig(Section):
    """The machines; a setting left out has the value of the GPU kind's usual machine (plan/hardware.toml)."""

    gpu: str | None = Field(default=None, description="a kind of the catalogue; null: this machine's GPUs")
    gpus: Annotated[int, Field(ge=1, le=MOST_GPUS)] | None = None
    gpus_per_node: Annotated[int, Field(ge=1, le=MOST_GPUS)] | None = None
    memory_gib: float | None = Field(default=None, gt=0, description="of each GPU")
    link: float | None = Field(default=None, gt=0, description="GB/s from a GPU to the others of its node")
    network: float | None = Field(default=None, gt=0, description="GB/s per GPU to other nodes")
    network_share: Fraction | None = Field(default=None, description="of that, what collectives reach")
    price_per_gpu_hour: float | None = Field(default=None, gt=0)
    hardware: str | None = Field(default=None, description="a TOML file with more kinds of GPUs")
    efficiency: dict[str, float] = Field(
        default={}, description="measured efficiencies (0 to 1), by hardware.toml's names"
    )


class HubConfig(Section):
    push_to: str | None = Field(default=None, description="hub id that model/ is uploaded to at the end")
    private: bool = True


class Config(Section):
    """Every setting of a run."""

    model: ModelConfig
    method: Literal["full", "lora"] = "full"
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    layout: Any = "auto"  # auto, a layout string, or a mapping of layout.Layout's fields
    cluster: ClusterConfig | str = "auto"  # auto, a YAML file that has the section, or the section
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    hub: HubConfig = HubConfig()
    output: str = "runs/run"

    @field_validator("layout")
    @classmethod
    def _layout(cls, value: Any) -> Any:
        if not isinstance(value, str | Mapping):
            raise ValueError(
                f"layout is {SHORT.repr(value)}; write auto, a layout string such as zero3x4-mb2, or a "
                "mapping of its fields."
            )
        PartialLayout.parse(value)
        return value

    @field_validator("cluster", mode="before")
    @classmethod
    def _cluster(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _cluster_config(value)
        if not isinstance(value, str | ClusterConfig):
            raise ValueError(
                f"cluster is {SHORT.repr(value)}; write auto, a file, or a mapping such as "
                "{gpu: h100-sxm, gpus: 64}."
            )
        return value

    @property
    def cluster_config(self) -> ClusterConfig:
        """The cluster section, read from its file if it names one. Raises UserError for a bad file."""
        if isinstance(self.cluster, ClusterConfig):
            return self.cluster
        return ClusterConfig() if self.cluster == "auto" else _cluster_config(read_yaml(Path(self.cluster)))

    @property
    def partial_layout(self) -> PartialLayout:
        return PartialLayout.parse(self.layout)

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step.

        Raises UserError if train.global_batch_tokens is no multiple of data.seq_len.
        """
        if tokens := self.train.global_batch_tokens:
            size, rest = divmod(tokens, self.data.seq_len)
            if rest or not size:
                near = max(1, round(tokens / self.data.seq_len)) * self.data.seq_len
                raise UserError(
                    f"train.global_batch_tokens = {tokens} is no multiple of data.seq_len = "
                    f"{self.data.seq_len}; try {near}."
                )
            return size
        return self.train.global_batch_size or 64

    def to_yaml(self) -> str:
        """Write the whole resolved tree as YAML; a run from that file repeats this one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _cluster_config(tree: Mapping[str, Any]) -> ClusterConfig:
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(sentences(error, "cluster")) from None


def load(
    file: str | Path | None = None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> Config:
    """Read the settings in `file` (YAML), laid over `defaults`; lay `overrides` over both, in their order.

    file: None for none. overrides: section.key=value each. defaults: a tree of sections.

    Raises UserError for the first of: unreadable file, malformed override, no model; else for all unknown
    keys and wrong values at once (values of one section that contradict each other: once each is valid).
    """
    tree = merge(dict(defaults or {}), read_yaml(Path(file)) if file else {})
    for override in overrides:
        tree = overridden(tree, override)
    if problems := [*unusable(tree)]:
        raise UserError(problems)
    if "model" not in tree:
        unknown = [name for name in tree if name not in Config.model_fields]
        raise UserError(
            [
                "No model is named; add model: {name: …} to the config, or model.name=… to the command.",
                *(unknown_key([name]) for name in unknown),
            ]
        )
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(sentences(error)) from None


def sentences(error: ValidationError, section: str = "") -> Iterator[str]:
    """Yield pydantic's problems as sentences with a remedy; a UserError of a validator yields its own.

    section: dotted path of the section that was validated; "" for the whole tree.
    """
    for problem in error.errors():
        path = [section] if section else []
        path += [
            str(part)
            for part in problem["loc"]
            if part not in ("str", "tuple[str, ...]", "literal['all-linear']")
        ]
        key, cause = ".".join(path), problem.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            yield from cause.problems
        elif problem["type"] == "extra_forbidden":
            yield unknown_key(path)
        elif problem["type"] == "missing":
            yield f"{key} is missing."
        elif isinstance(cause, ValueError):
            yield str(cause)
        else:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            yield f"{key} = {SHORT.repr(problem['input'])}: {message}."


def unusable(value: Any, key: str = "") -> Iterator[str]:
    """Yield a sentence for each key or text of a tree that no file name, model or encoding can take.

    key: dotted name of `value`.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            if isinstance(name, str):
                yield from unusable(name, f"the key {name!r}")
                yield from unusable(item, f"{key}.{name}".lstrip("."))
            else:
                yield f"{f'{key}: ' if key else ''}the key {name!r} is no text; write it in quotes."
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from unusable(item, f"{key}.{number}")
    elif isinstance(value, str):
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            shown = SHORT.repr(value)
            yield f"{key} = {shown} has a character that is no text (NUL or a broken one); remove it."
        elif value.startswith("~") and key.startswith(PATHS):
            try:
                expanded(value)
            except UserError as error:
                yield f"{key}: {error}"


def unknown_key(path: Sequence[str]) -> str:
    return unknown_setting(path, list(keys(Config)), list(Config.model_fields))


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every field of `section` and, recursively, of the sections in it.

    prefix: begins every key; the section's own path with a dot at the end, "train.".
    """
    for name, info in section.model_fields.items():
        yield prefix + name
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(kind, f"{prefix}{name}.")
