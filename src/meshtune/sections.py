"""Sections of the settings tree that describe what is trained, on what and where; config.py has the tree."""

import re
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlparse

from pydantic import AfterValidator, Field, StrictBool, field_validator, model_validator

from meshtune.errors import UserError, expanded
from meshtune.objectives import OBJECTIVES
from meshtune.setting import (
    SUFFIXES,
    Format,
    Fraction,
    GpuCount,
    LayerNames,
    Margin,
    Need,
    NonNegative,
    Positive,
    Prices,
    Section,
    setting,
)

HAVE_CONVERSATIONS = {"messages", "sharegpt", "prompt-completion", "alpaca", "auto"}  # formats that may
CONVERSATIONS = Need(
    lambda config: formats(config) & HAVE_CONVERSATIONS, "rows of data.format aren't conversations"
)


def of_answers(config: Any) -> bool:
    """True if the objective reads rows with one answer, not preferences."""
    return OBJECTIVES[config.objective].rows == "answers"


ANSWERS = Need(of_answers, "an objective of preferences trains on the answers that it compares")


def formats(config: Any) -> set[str]:
    """The formats that the rows are read in; "auto" where a source's is found from its columns."""
    sources = (*config.data.train, *config.data.eval)
    return {source.format or config.data.format for source in sources} or {config.data.format}


def source_without(name: str) -> Need:
    """A source, or none at all, that has no setting `name` of its own."""

    def met(config: Any) -> bool:
        sources = (*config.data.train, *config.data.eval)
        return not sources or any(getattr(source, name) is None for source in sources)

    return Need(met, "each source has its own")


class ModelConfig(Section):
    """The model to train, and how it is loaded."""

    name: str = setting(..., "Hub id or local folder of the model.", path=True, min_length=1)
    init: Literal["pretrained", "random"] = setting(
        "pretrained", "Start from the model's weights, or from random ones."
    )
    attention: Literal["auto", "meshtune", "sdpa", "eager"] = setting(
        "auto",
        "Attention code: ours, which packs documents, or one of transformers'; auto takes ours "
        "where the model can.",
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of a hub model.",
        Need(lambda config: not expanded(config.model.name).exists(), "model.name is a local folder"),
    )  # fmt: skip
    trust_remote_code: bool = setting(False, "Run Python code that the model's repository brings.")
    overrides: dict[str, Any] = setting(
        {}, "Other values of keys of the model's config.json, such as num_hidden_layers: 8."
    )
    freeze: tuple[str, ...] = setting(
        (), "Patterns of the names of parameters that are not trained, such as model.embed_tokens.*."
    )

    @property
    def access(self) -> dict[str, Any]:
        """Arguments with which the functions of model/ read the files of `name`."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


class LoraConfig(Section):
    """Low-rank adapters, for `method: lora` and `qlora`."""

    r: Positive = setting(16, "Rank of the two matrices added to each weight.")
    alpha: float = setting(32, "The adapter's output is scaled by alpha / r.", gt=0)
    dropout: float = setting(
        0.0, "Share of the adapter's inputs that are dropped; 0 is faster and needs less memory.", ge=0, lt=1
    )
    target_modules: LayerNames = setting(
        "all-linear",
        "Names of the linear layers that get an adapter, such as [q_proj, v_proj], or regular "
        "expressions of whole names; all-linear: all but the head; experts: the weights of a mixture's.",
    )
    use_rslora: bool = setting(
        False, "Scale the adapter's output by alpha / sqrt(r), so that it does not fall with r."
    )
    use_dora: bool = setting(False, "Train the norm of each output row apart from its direction (DoRA).")
    layers_to_transform: tuple[NonNegative, ...] | None = setting(
        None, "Numbers of the blocks that get adapters, from 0; null: all."
    )
    modules_to_save: tuple[str, ...] = setting(
        (), "Names of modules trained whole besides the adapters, such as [embed_tokens, lm_head]."
    )


def of_balance(kind: str) -> Need:
    """Experts that are balanced by `kind`."""
    return Need(
        lambda config: config.experts.balance == kind, f"experts.balance is not {kind}",
        f"set experts.balance={kind}, or leave it out",
    )  # fmt: skip


class ExpertsConfig(Section):
    """Experts of a mixture and their routers."""

    balance: Literal["config", "loss", "bias", "none"] = setting(
        "config",
        "How tokens are spread over experts: loss (per sequence and layer), bias (the router's, without a "
        "loss), none, or config: transformers' loss where config.json sets output_router_logits, else none.",
        Need(lambda config: config.experts.balance != "bias" or not config.adapts,
             "an adapter's files have no biases of the router", "set experts.balance=loss"),
    )  # fmt: skip
    aux_loss: float | None = setting(
        None, "Weight of the load-balancing loss; null: config.json's router_aux_loss_coef, or 0.001.",
        of_balance("loss"), ge=0,
    )  # fmt: skip
    z_loss: float = setting(0.0, "Weight of the router's z-loss; 0: none.", ge=0)
    bias_rate: float = setting(
        0.001, "Change of the bias in a step, towards the mean load.", of_balance("bias"), gt=0
    )
    freeze_router: StrictBool | None = setting(
        None, "Do not train the router; null: true with adapters, which it then does not get."
    )
    imbalance: float = setting(
        1.0,
        "Tokens of the rank with most under expert parallelism, over the mean, for plans; 1: balanced.",
        ge=1,
    )

    @property
    def balancing(self) -> dict[str, Any]:
        """The fields of placement.experts.BalanceSpec."""
        return {"kind": self.balance} | self.model_dump(include={"aux_loss", "z_loss", "bias_rate"})


def of_objective(name: str) -> Need:
    """The objective `name`."""
    return Need(
        lambda config: config.objective == name, f"objective is not {name}",
        f"set objective={name}, or leave it out", part="*",
    )  # fmt: skip


ANSWERING = Need(
    lambda config: not OBJECTIVES[config.objective].scores,
    "a reward model writes no answers",
    "leave it out, or set objective=dpo",
)
BETA = "Strength of the preference: {}."
SFT_WEIGHT = "Weight of the cross entropy of chosen answers, added to the loss."
REFERENCE = (
    "Model that rewards are relative to: base (this run's, before its first step), a folder, or a hub id."
)


class DpoConfig(Section):
    """Direct preference optimisation, for `objective: dpo` (Rafailov et al. 2023)."""

    beta: float = setting(0.1, BETA.format("a reward is beta times the log-ratio to the reference"), gt=0)
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = setting(
        "sigmoid", "Loss of a pair, by the difference of its rewards; ipo by that of means per token."
    )
    label_smoothing: float = setting(
        0.0, "Share of pairs whose sides are assumed to be swapped.",
        Need(lambda config: config.dpo.loss_type in ("sigmoid", "robust"),
             "only dpo.loss_type=sigmoid and robust smooth labels"), ge=0, lt=0.5,
    )  # fmt: skip
    sft_weight: float = setting(0.0, SFT_WEIGHT, ge=0)
    reference: str = setting("base", REFERENCE, path=True, min_length=1)


class KtoConfig(Section):
    """Answers that are good or bad, for `objective: kto` (Ethayarajh et al. 2024)."""

    beta: float = setting(0.1, BETA.format("a reward is beta times the log-ratio to the reference"), gt=0)
    desirable_weight: float = setting(1.0, "Weight of the loss of good answers.", ge=0)
    undesirable_weight: float = setting(1.0, "Weight of the loss of bad answers.", ge=0)
    reference: str = setting("base", REFERENCE, path=True, min_length=1)


class OrpoConfig(Section):
    """Odds ratios without a reference, for `objective: orpo` (Hong et al. 2024)."""

    beta: float = setting(0.1, "Weight of the odds ratio, next to the cross entropy.", gt=0)


class SimpoConfig(Section):
    """Mean log-probabilities without a reference, for `objective: simpo` (Meng et al. 2024)."""

    beta: float = setting(2.0, BETA.format("a reward is beta times an answer's mean log-probability"), gt=0)
    gamma: float = setting(0.5, "Difference of the rewards that is aimed at.", ge=0)
    label_smoothing: float = setting(
        0.0, "Share of pairs whose sides are assumed to be swapped.", ge=0, lt=0.5
    )
    sft_weight: float = setting(0.0, SFT_WEIGHT, ge=0)


class RewardConfig(Section):
    """A model with one output, for `objective: reward` (Bradley and Terry 1952)."""

    center_coefficient: float = setting(
        0.0, "Weight of the squared sum of a pair's rewards, which keeps them around 0.", ge=0
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

    path: Annotated[str, AfterValidator(hub_pattern)] = setting(
        ..., "File, folder, pattern, URL, or hub data set (its configuration after a colon).", path=True,
        min_length=1,
    )  # fmt: skip
    weight: float = setting(1.0, "Passes through this source per epoch.", unit="epochs", gt=0)
    split: str | None = setting(None, "Split of a hub data set; null: train, and test in data.eval.")
    format: Format | None = setting(None, "As data.format, for this source; null: data.format.")
    columns: dict[str, str] | None = setting(None, "As data.columns, for this source; null: data.columns.")
    roles: dict[str, str] | None = setting(None, "As data.roles, for this source; null: data.roles.")
    where: dict[str, bool | int | float | str] | None = setting(
        None, "As data.where, for this source; null: data.where."
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

    train: Sources = setting(
        (), "Training rows: a path, a source with its settings, or a list of either.", path=True
    )
    eval: Sources = setting(
        (), "Held-out rows, written as data.train.",
        Need(lambda config: False, "held-out rows are evaluated once each", part="weight"), path=True,
    )  # fmt: skip
    eval_split: float = setting(
        0, "Documents of data.train held out: below 1 a fraction of all, else their number.",
        Need(lambda config: not config.data.eval, "data.eval names the held-out rows", "keep one of them"),
        Need(lambda config: not config.data.streaming, "data.streaming does not know the number of documents",
             "give data.eval instead", relied_on=True), unit="documents", ge=0,
    )  # fmt: skip
    format: Format = setting(
        "auto", "Form of the rows; auto finds it from their columns.", source_without("format")
    )
    columns: dict[str, str] = setting(
        {}, "Column of each field, such as prompt: question.", source_without("columns")
    )
    roles: dict[str, str] = setting(
        {}, "Our role for each role of the rows, such as bot: assistant.", source_without("roles"),
        CONVERSATIONS,
    )  # fmt: skip
    where: dict[str, bool | int | float | str] = setting(
        {}, "Rows to train on, by a column's value; the others are left out and counted.",
        source_without("where"),
    )  # fmt: skip
    chat_template: str | None = setting(
        None, "One of none, training, a built-in's name, a file, the Jinja text; null: the tokenizer's own.",
        path=True,
    )  # fmt: skip
    chat_template_kwargs: dict[str, bool | int | float | str] = setting(
        {}, "Variables of the chat template, such as enable_thinking: false.",
        Need(lambda config: config.data.chat_template != "none", "data.chat_template is none",
             "leave it out, or name a template"),
    )  # fmt: skip
    template_date: str | None = setting(
        None, "Day that a template with a clock writes, as 2026-01-31; null: that of the run's start.",
        pattern=r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$",
    )  # fmt: skip
    control_tokens: Literal["auto", "error", "text", "keep"] = setting(
        "auto", "Special tokens in contents: an error, text or kept; auto: an error where trained on."
    )
    separator: str = setting(
        "\n", "Text between prompt and completion where no chat template is in force.",
        Need(lambda config: config.data.chat_template in (None, "none"),
             "data.chat_template names a template"),
    )  # fmt: skip
    seq_len: Annotated[int, Field(ge=2)] = setting(2048, "Length of a sequence in tokens.", unit="tokens")
    mean_document_tokens: float | None = setting(
        None,
        "Length of a token's document, averaged over tokens, for the planner; null: seq_len, of pairs half.",
        unit="tokens", gt=0,
    )  # fmt: skip
    packing: bool = setting(True, "Put several documents into one sequence; they do not see each other.")
    shared_prompts: bool = setting(
        False, "Compute the prompt of a pair once for both answers.",
        Need(lambda config: OBJECTIVES[config.objective].rows == "pairs", "objective trains on no pairs"),
    )  # fmt: skip
    train_on: Literal["assistant", "completion", "all"] = setting(
        "completion",
        "Tokens whose loss counts: of all assistant turns, of the last one (completion), or all.",
        Need(lambda config: formats(config) != {"tokens"}, "rows of input_ids have their labels"),
        ANSWERS,
    )
    split_turns: bool = setting(
        False, "Make a row of each assistant turn, rendered as when it is generated.", CONVERSATIONS,
        Need(lambda config: config.data.train_on != "all", "data.train_on=all labels everything", "give one"),
        ANSWERS,
    )  # fmt: skip
    overlong: Literal["auto", "cut", "split", "drop", "error"] = setting(
        "auto", "What becomes of documents longer than seq_len; auto: plain text is split, preferences are "
        "dropped, others cut.",
        Need(lambda config: config.data.overlong != "split" or of_answers(config),
             "answers that are compared are never split", "set data.overlong=cut or drop"),
    )  # fmt: skip
    max_samples: Positive | None = setting(
        None, "Read only the first rows of each source, at most this number; null: all.", unit="rows"
    )
    on_bad_row: Literal["error", "skip"] = setting(
        "error", "A row that can't be read or rendered is an error, or is skipped and counted."
    )
    streaming: bool = setting(
        False, "Tokenise rows as they are read, without a copy on the disk.",
        Need(lambda config: not OBJECTIVES[config.objective].reference,
             "objective compares with a reference, whose values are computed before the first step"),
    )  # fmt: skip
    cache: str = setting("~/.cache/meshtune", "Folder of the tokenised, packed data.", path=True)

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


class SlurmConfig(Section):
    """Options of Slurm's sbatch, for `meshtune submit` and `sweep --to slurm`."""

    partition: str | None = setting(None, "Partition; null: the cluster's default.", min_length=1)
    account: str | None = setting(None, "Account that is charged.", min_length=1)
    qos: str | None = setting(None, "Quality of service.", min_length=1)
    constraint: str | None = setting(None, "Features that nodes must have.", min_length=1)
    container: str | None = setting(
        None, "Image in which srun starts the ranks: one of pyxis, or a .sif file of Apptainer.", min_length=1
    )
    extra: tuple[str, ...] = setting((), "Further options of sbatch, such as [--comment=sft, --exclusive].")


class ClusterConfig(Section):
    """The machines; a setting left out has the value of the GPU kind's usual machine (plan/hardware.toml)."""

    gpu: str | None = setting(None, "A GPU kind of the catalogue; null: this machine's GPUs.")
    gpus: GpuCount | None = setting(None, "Number of GPUs.", unit="GPUs")
    gpus_per_node: GpuCount | None = setting(None, "GPUs of a node.", unit="GPUs")
    memory_gib: float | None = setting(None, "Memory of each GPU, in GiB.", unit="GiB", gt=0)
    link: float | None = setting(None, "GB/s from a GPU to the others of its node.", unit="GB/s", gt=0)
    network: float | None = setting(None, "GB/s per GPU to other nodes.", unit="GB/s", gt=0)
    network_share: Fraction | None = setting(None, "Share of `network` that collectives reach.")
    price_per_gpu_hour: Prices = setting(
        None,
        "Price of a GPU for an hour: a number, prices by kind such as {h100-sxm: 2.5, currency: "
        "USD}, or a TOML or YAML file of these.", path=True,
    )  # fmt: skip
    memory_margin: Margin | None = setting(
        None, "Share of each GPU's memory that a plan leaves free; null: 0.04 or 0.1."
    )
    memory_budget_gib: float | None = setting(
        None, "The most that a plan fills of each GPU, in GiB, below the margin.", unit="GiB", gt=0
    )
    hardware: str | None = setting(None, "A TOML file with more kinds of GPUs.", path=True)
    efficiency: dict[str, float] = setting(
        {}, "Measured efficiencies, by hardware.toml's names; shares of a peak are at most 1."
    )
    storage: str | None = setting(
        None, "Folder that all machines see: `meshtune submit` puts a relative output, the data cache and "
        "HF_HOME there.", path=True, min_length=1,
    )  # fmt: skip
    time_limit: str | None = setting(
        None, "Longest job that the cluster allows, such as 24h: `meshtune submit` divides a longer run."
    )
    slurm: SlurmConfig = SlurmConfig()
    sky: dict[str, Any] = setting(
        {}, "Fields of SkyPilot's task, for `meshtune submit --to sky`; they replace ours."
    )
    kubeflow: dict[str, Any] = setting(
        {}, "Fields of Kubeflow's TrainJob, for `meshtune submit --to kubeflow`; they replace ours."
    )
    dstack: dict[str, Any] = setting(
        {}, "Fields of dstack's task, for `meshtune submit --to dstack`; they replace ours."
    )
    ray: dict[str, Any] = setting(
        {}, "Fields of a job of Ray, for `meshtune submit` and `sweep --to ray`; they replace ours."
    )

    @field_validator("time_limit", mode="before", json_schema_input_type=str | int | None)
    @classmethod
    def _time(cls, value: Any) -> Any:
        """As text: YAML reads 24:00:00 as 86400, and `submit` says how to write it."""
        return str(value) if type(value) is int else value

    @field_validator("gpu", mode="before", json_schema_input_type=str | int | None)
    @classmethod
    def _name(cls, value: Any) -> Any:
        """Accept 4090, a number in YAML."""
        return str(value) if type(value) is int else value
