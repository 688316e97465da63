"""The settings of a run: one strict tree, read from YAML and `section.key=value`.

    config = load("run.yaml", ["train.max_steps=100"])

Defaults < file < command line. All unknown keys and wrong values are reported at once, an unknown key with
the nearest setting, or with our name of what another trainer calls so (tools/). The tree stops at
train/build.py: below it functions take the values they use.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from meshtune.errors import UserError, expanded, written
from meshtune.layout import PartialLayout
from meshtune.optimizers import OPTIMIZERS, constants_of
from meshtune.precision import PRECISIONS, REDUCE_DTYPES
from meshtune.schedules import SCHEDULES, schedule_problems
from meshtune.sections import ClusterConfig, DataConfig, LoraConfig, ModelConfig
from meshtune.setting_errors import sentences
from meshtune.setting_partners import switched_off, without_effect
from meshtune.setting_types import (
    Fraction,
    Interval,
    NonNegative,
    Positive,
    Section,
    TokenCount,
    unusable,
    with_path_variables,
)
from meshtune.tools.table import unknown_setting
from meshtune.units import notice, on_first_rank, scientific
from meshtune.yaml_tree import merge, overridden, read_cluster, read_yaml, undotted, without

TABLES = {
    "precision": PRECISIONS,
    "reduce_dtype": REDUCE_DTYPES,
    "optimizer": OPTIMIZERS,
    "lr_scheduler": SCHEDULES,
}  # of train
# Adapters start at zero and are few: they take a rate at which all weights would diverge.
LEARNING_RATES = {"full": 1e-5, "lora": 2e-4}  # default peak, by method


class TrainConfig(Section):
    """Batch, length, learning rate, precision and optimizer."""

    global_batch_size: Annotated[int, Field(ge=1, le=10**7)] | None = Field(
        default=None, description="Sequences per optimizer step, in every layout; null: 64."
    )
    global_batch_tokens: Positive | None = Field(
        default=None,
        description="Tokens per optimizer step, instead of global_batch_size; a multiple of data.seq_len.",
    )
    max_steps: Positive | None = Field(
        default=None, description="Optimizer steps of the run; of several limits the smallest ends it."
    )
    total_tokens: TokenCount | None = Field(
        default=None,
        description="Tokens of the run: it ends with the step whose global batches reach so many.",
    )
    num_epochs: float | None = Field(
        default=None, gt=0, description="Passes through the data; null is 1 where nothing else ends the run."
    )
    learning_rate: float | None = Field(
        default=None, gt=0, description="Peak learning rate; null: 1e-5 for method full, 2e-4 for lora."
    )
    lr_scheduler: str = Field(
        default="cosine", description="Course of the learning rate, a name of transformers' get_scheduler."
    )
    min_lr_ratio: float | None = Field(
        default=None, ge=0, le=1, description="Last learning rate as a share of the peak; null: 0."
    )
    lr_scheduler_kwargs: dict[str, int | float | str] = Field(
        default={}, description="Further arguments of the schedule, by transformers' names, such as power: 2."
    )
    lr_decay_steps: Positive | None = Field(
        default=None,
        description="Steps that the schedule spans, after which the learning rate stays; null: all.",
    )
    warmup_ratio: Fraction = Field(
        default=0.03, description="Share of the steps in which the learning rate rises to its peak."
    )
    warmup_steps: NonNegative | None = Field(
        default=None,
        description="Steps in which the learning rate rises to its peak, instead of warmup_ratio.",
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decoupled weight decay of matrices; norms and biases have none."
    )
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="Norm that gradients are clipped to; 0: no clipping."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the target spread over the vocabulary; training alone, evaluation has none.",
    )
    neftune_alpha: float = Field(
        default=0.0,
        ge=0,
        description="Noise on the embeddings in training, up to alpha / sqrt(document's tokens * width).",
    )
    precision: str = Field(
        default="bf16",
        description="Compute and master dtypes: fp32, bf16 (fp32 master weights), bf16-pure or fp64.",
    )
    reduce_dtype: str = Field(
        default="fp32", description="Dtype that gradients of several micro-batches add up in."
    )
    optimizer: str = Field(
        default="adamw",
        description="Rule of the update: adamw, lion; adafactor and muon need whole tensors (dp, pp, cp).",
    )
    adam_betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.999), description="Decay of AdamW's two moments, or the two of Lion's one."
    )
    adam_eps: float = Field(default=1.0e-8, gt=0, description="Term in AdamW's denominator.")
    seed: NonNegative = Field(
        default=42, description="Seed of the order of samples, dropout and random weights."
    )
    compile: bool = Field(default=False, description="Compile the blocks with torch.compile.")
    max_nonfinite_steps: Positive = Field(
        default=5,
        description="Steps in a row without a finite loss, after which the run stops with exit code 4.",
    )
    device: Literal["auto", "cuda", "cpu"] = Field(
        default="auto", description="Device to train on; auto: CUDA if there is one."
    )

    @field_validator("precision", "reduce_dtype", "optimizer", "lr_scheduler", mode="before")
    @classmethod
    def _in_its_table(cls, value: Any, info: ValidationInfo) -> Any:
        """Return `value`. Raises UserError, with the nearest name, if the setting's table lacks it."""
        TABLES[str(info.field_name)][value if isinstance(value, str) else written(value)]
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
        problems += schedule_problems(self.lr_scheduler, self.min_lr_ratio, self.lr_scheduler_kwargs)
        if problems:
            raise UserError(problems)
        return self

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the constants, of betas and eps (adam_…), that the optimizer takes."""
        return constants_of(self.optimizer)


class EvalConfig(Section):
    """Evaluation on held-out rows."""

    every: Interval = Field(
        default=0, description="Steps, or epochs (0.5 epoch), between evaluations; 0: at the end only."
    )
    at_start: bool = Field(default=False, description="Evaluate before the first step too.")
    samples: NonNegative = Field(
        default=0, description="Held-out prompts that are answered greedily and shown."
    )
    exact_match: NonNegative = Field(
        default=0, description="Held-out prompts whose greedy answer is compared word for word."
    )
    max_new_tokens: Positive = Field(default=64, description="Longest answer, in tokens.")
    keep_best: bool = Field(
        default=False, description="Export the checkpoint with the lowest evaluation loss as model/."
    )
    early_stopping: NonNegative = Field(
        default=0, description="Evaluations without a lower loss, after which the run stops; 0: never."
    )


class CheckpointConfig(Section):
    """Checkpoints, and going on from them."""

    every: Interval = Field(
        default=100, description="Steps, or epochs (0.5 epoch), between checkpoints; 0: at the end only."
    )
    keep: Positive = Field(default=3, description="Newest checkpoints that are kept.")
    async_save: bool = Field(
        default=True, description="Write while training goes on, from a copy in host memory."
    )
    save_on_signal: bool = Field(
        default=True,
        description="On a signal to stop (SIGTERM, SIGINT, SIGHUP, …) finish the step, save, exit with 75.",
    )
    resume: Literal["auto", "never"] = Field(
        default="auto", description="Continue the unfinished run in the output folder (auto), or never."
    )


Tracker = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio", "prometheus"]


class LogConfig(Section):
    """Rows of the run, and the dashboards that get them."""

    every: Positive = Field(default=1, description="Steps between two rows.")
    to: tuple[Tracker, ...] = Field(
        default=("console", "jsonl", "tensorboard"),
        description="Where rows are shown or sent; metrics.jsonl (jsonl) is always written.",
    )
    project: str | None = Field(
        default=None, min_length=1,
        description="Project in W&B and Trackio, MLflow's experiment; null: the environment's, or meshtune.",
    )  # fmt: skip
    name: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the run in W&B, MLflow and Trackio; null: its folder's.",
    )
    tags: tuple[str, ...] = Field(
        default=(),
        description="Tags in W&B, MLflow and Trackio; in MLflow key=value is a tag with a value.",
    )
    group: str | None = Field(
        default=None, description="Group of runs in W&B and Trackio, and MLflow's tag group."
    )
    textfile_directory: str | None = Field(
        default=None, min_length=1,
        description="Folder that Prometheus' node exporter reads; null: logs/ of the run folder.",
    )  # fmt: skip
    gradient_noise_scale: NonNegative = Field(
        default=0, description="Steps between two measurements of the gradient noise scale; 0: never."
    )
    memory: bool = Field(
        default=False,
        description="Print a table of the memory of the first two steps, by phase and category.",
    )


class HubConfig(Section):
    """Upload of the trained model."""

    push_to: str | None = Field(
        default=None,
        description="Hub id that model/ is uploaded to at the end; it is tried once the data are read.",
    )
    private: bool = Field(default=True, description="Create the hub repository as a private one.")


class Config(Section):
    """Every setting of a run."""

    model: ModelConfig
    method: Literal["full", "lora"] = Field(
        default="full", description="Train all weights, or low-rank adapters beside them."
    )
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    layout: Any = Field(
        default="auto",
        description="Parallel layout: auto, a layout string, or a mapping of its fields, each may be auto.",
    )
    cluster: ClusterConfig | str = Field(
        default="auto",
        description="Machines: auto, the section, a YAML file that has it, or the TOML file of a probe.",
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    hub: HubConfig = HubConfig()
    output: str = Field(
        default="runs/run", description="Folder of the run: model, report, metrics and checkpoints."
    )
    output_exists: Literal["new", "extend", "replace"] | None = Field(
        default=None,
        description="Start where output holds a run that is not to be continued: write the next free name, "
        "make that run longer, or delete it; null: refused.",
    )

    @field_validator("layout")
    @classmethod
    def _layout(cls, value: Any) -> Any:
        if not isinstance(value, str | Mapping):
            raise ValueError(
                f"layout is {written(value)}; write auto, a layout string such as zero3x4-mb2, or a "
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
                f"cluster is {written(value)}; write auto, a file, or a mapping such as "
                "{gpu: h100-sxm, gpus: 64}."
            )
        return value

    if not TYPE_CHECKING:  # type checkers make the signature of the fields

        def __init__(self, /, **tree: Any) -> None:
            """Validate a tree of sections. Raises UserError, with a sentence for each problem."""
            try:
                super().__init__(**tree)
            except ValidationError as error:
                raise UserError(sentences(error, unknown_key)) from None

    @model_validator(mode="after")
    def _takes_effect(self) -> "Config":
        """Raise UserError for settings that have no effect beside the others, whatever rows there will be."""
        if problems := [*without_effect(self, late=False)]:
            raise UserError(problems)
        return self

    @property
    def cluster_config(self) -> ClusterConfig:
        """The cluster section, read from its file if it names one. Raises UserError for a bad file."""
        if isinstance(self.cluster, ClusterConfig):
            return self.cluster
        return (
            ClusterConfig()
            if self.cluster == "auto"
            else _cluster_config(read_cluster(expanded(self.cluster)))
        )

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

    @property
    def learning_rate(self) -> float:
        """Peak learning rate."""
        return self.train.learning_rate or LEARNING_RATES[self.method]

    def to_yaml(self) -> str:
        """Write the whole resolved tree as YAML, which `load` reads back; a comment has the default rate."""
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        unset = "\n  learning_rate: null"
        default = f"{scientific(self.learning_rate)}, the default of method {self.method}"
        return text.replace(f"{unset}\n", f"{unset}  # {default}\n")


def _cluster_config(tree: Mapping[str, Any]) -> ClusterConfig:
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(sentences(error, unknown_key, "cluster")) from None


def load(
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    *,
    remedy: str = "",
) -> Config:
    """Read the settings in `file` (YAML), laid over `defaults`; lay `overrides` over both, in their order.

    file: None for none. overrides: section.key=value each. defaults: a tree of sections. Keys of both trees
    may be dotted (`train.seed: 1`). remedy: the caller's own where settings lack held-out rows.

    Raises UserError for the first of: unreadable file, malformed override, no model; else for all unknown
    keys and wrong values at once (values of one section that contradict each other: once each is valid; those
    that lack held-out rows: once all else is valid).
    """
    known = [*keys(Config)]
    tree = merge(undotted(dict(defaults or {}), known), read_yaml(Path(file), known) if file else {})
    tree = laid_over(tree, overrides)
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
    config = Config(**with_path_variables(tree))
    if problems := [*without_effect(config, late=True, remedy=remedy)]:
        raise UserError(problems)
    return config


def laid_over(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Lay section.key=value texts over a tree, in their order.

    A setting of the tree that they leave without effect (method=full beside lora.r) is left out, with a line
    on stderr; so is one that needs it. Raises UserError for a malformed override.
    """
    changed, given = dict(tree), dict[str, Any]()
    for override in overrides:
        changed, given = overridden(changed, override), overridden(given, override)
    for key, sentence in switched_off(Config, tree, changed, given).items():
        changed = without(changed, key.split("."))
        if on_first_rank():
            notice(sentence)
    return changed


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
