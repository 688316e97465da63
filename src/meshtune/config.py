"""The settings of a run: one strict tree, read from YAML and `section.key=value`.

    config = load("run.yaml", ["train.max_steps=100"])

Defaults < file < command line. All unknown keys and wrong values are reported at once, an unknown key with
the nearest setting, or with our name of what another trainer calls so (tools/). The tree stops in
api/: below it functions take the values they use.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import Field, StrictBool, ValidationError, field_validator, model_validator

from meshtune.errors import UserError, expanded, written
from meshtune.layout import PartialLayout
from meshtune.objectives import OBJECTIVES, default_rate
from meshtune.optimizers import OPTIMIZERS, constants_of
from meshtune.precision import PRECISIONS, REDUCE_DTYPES
from meshtune.schedules import ARGUMENTS, SCHEDULES, Schedule, schedule_problems
from meshtune.sections import (
    ANSWERING,
    ClusterConfig,
    DataConfig,
    DpoConfig,
    ExpertsConfig,
    KtoConfig,
    LoraConfig,
    ModelConfig,
    OrpoConfig,
    RewardConfig,
    SimpoConfig,
    of_objective,
)
from meshtune.setting import (
    Fraction,
    Interval,
    Need,
    NonNegative,
    Positive,
    Section,
    TokenCount,
    declared,
    epochs_of,
    setting,
    shown,
    unmet,
    usable,
    without_effect,
)
from meshtune.setting_errors import sentences
from meshtune.tools.table import file_of_another, unknown_setting
from meshtune.units import notice, on_first_rank, scientific
from meshtune.yaml_tree import merge, overridden, read_cluster, read_yaml, sets, undotted, without

STREAMED = "with data.streaming the length of an epoch is unknown"
HELD_OUT = Need(
    lambda config: not config.data.train or config.data.eval or config.data.eval_split,  # a plan needs none
    "there are no held-out rows",
    "set data.eval or data.eval_split, or leave it out", late=True,
)  # fmt: skip
EVALUATED_OFTEN = Need(
    lambda config: config.eval.every, "with eval.every=0 there is only the last evaluation",
    "set eval.every, such as eval.every=100",
)  # fmt: skip
TRACKERS = Need(
    lambda config: not {"wandb", "mlflow", "trackio"}.isdisjoint(config.log.to),
    "only W&B, MLflow and Trackio show it, and log.to names none of them",
    "add wandb, mlflow or trackio to log.to",
)


def counted_in_steps(section: str) -> Need:
    """An interval of a section in steps where rows are streamed."""
    return Need(
        lambda config: not (config.data.streaming and epochs_of(getattr(config, section).every)),
        STREAMED,
        f"give it in steps, such as {section}.every=200",
        relied_on=True,
    )


def constant(name: str) -> Need:
    """An optimizer with the constant."""
    return Need(lambda config: name in config.train.constants, f"train.optimizer has no {name}")


def warm_up(name: str) -> Need:
    """The need for a schedule with a warm-up, unless the setting `name` is 0."""
    return Need(
        lambda config: SCHEDULES[config.train.lr_scheduler].warmup or not getattr(config.train, name),
        "train.lr_scheduler has no warm-up",
        "leave it out, or use constant_with_warmup",
    )


def schedule(fits: Callable[[Schedule], Any], lacking: str, part: str = "") -> Need:
    """A schedule that fits. lacking: predicate on the others; part: as Need has it."""
    names = ", ".join(name for name, row in SCHEDULES.items() if fits(row))
    return Need(
        lambda config: fits(SCHEDULES[config.train.lr_scheduler]),
        f"train.lr_scheduler {lacking}",
        f"leave it out, or use {names}",
        part,
    )


def schedule_has_a_length(config: Any) -> bool:
    kind, fixed = config.train.lr_scheduler, config.train.warmup_steps is not None
    return kind != "constant" and not (kind == "constant_with_warmup" and fixed)


class TrainConfig(Section):
    """Batch, length, learning rate, precision and optimizer."""

    global_batch_size: Annotated[int, Field(ge=1, le=10**7)] | None = setting(
        None, "Sequences per optimizer step, in every layout; null: 64.", unit="sequences"
    )
    global_batch_tokens: Positive | None = setting(
        None, "Tokens per optimizer step, instead of global_batch_size; a multiple of data.seq_len.",
        Need(lambda config: not config.train.global_batch_size, "train.global_batch_size sets the batch",
             "keep one"), unit="tokens",
    )  # fmt: skip
    max_steps: Positive | None = setting(
        None, "Optimizer steps of the run; of several limits the smallest ends it.", unit="steps"
    )
    total_tokens: TokenCount | None = setting(
        None, "Tokens of the run: it ends with the step whose global batches reach that number.",
        Need(lambda config: config.data.packing,
             "without data.packing sequences differ in length, so the tokens of a step are unknown",
             "set train.max_steps or train.num_epochs instead", relied_on=True), unit="tokens",
    )  # fmt: skip
    num_epochs: float | None = setting(
        None, "Passes through the data; null is 1 where nothing else ends the run.",
        Need(lambda config: not config.data.streaming, STREAMED,
             "set train.max_steps or train.total_tokens instead"), unit="epochs", gt=0,
    )  # fmt: skip
    learning_rate: float | None = setting(
        None,
        "Peak learning rate; null: 1e-5 for method full, 2e-4 for lora and qlora; of preferences 1e-6, 1e-5.",
        gt=0,
    )
    lr_scheduler: str = setting(
        "cosine", "Course of the learning rate, a name of transformers' get_scheduler.", table=SCHEDULES
    )
    min_lr_ratio: float | None = setting(
        None, "Last learning rate as a share of the peak; null: 0.",
        schedule(lambda row: row.floor, "has no lowest rate"), ge=0, le=1,
    )  # fmt: skip
    lr_scheduler_kwargs: dict[str, int | float | str] = setting(
        {},
        "Further arguments of the schedule, by transformers' names, such as power: 2.",
        *(
            schedule(lambda row, name=name: name in row.arguments, f"takes no {name}", name)
            for name in ARGUMENTS
        ),
    )
    lr_decay_steps: Positive | None = setting(
        None, "Steps that the schedule spans, after which the learning rate stays; null: all.",
        Need(schedule_has_a_length, "the learning rate does not depend on the length of its schedule"),
        unit="steps",
    )  # fmt: skip
    warmup_ratio: Fraction = setting(
        0.03, "Share of the steps in which the learning rate rises to its peak.",
        Need(lambda config: config.train.warmup_steps is None, "train.warmup_steps sets the warm-up",
             "keep one"), warm_up("warmup_ratio"),
    )  # fmt: skip
    warmup_steps: NonNegative | None = setting(
        None, "Steps in which the learning rate rises to its peak, instead of warmup_ratio.",
        warm_up("warmup_steps"), unit="steps",
    )  # fmt: skip
    weight_decay: float = setting(
        0.0, "Decoupled weight decay of matrices; norms and biases have none.", ge=0
    )
    max_grad_norm: float = setting(1.0, "Norm that gradients are clipped to; 0: no clipping.", ge=0)
    label_smoothing: float = setting(
        0.0, "Share of the target spread over the vocabulary, in training; evaluation has none.",
        Need(lambda config: config.objective == "sft", "only objective=sft smooths its targets"), ge=0, lt=1,
    )  # fmt: skip
    neftune_alpha: float = setting(
        0.0, "Noise on the embeddings in training, up to alpha / sqrt(document's tokens * width).", ge=0
    )
    precision: str = setting(
        "bf16", "Compute and master dtypes: fp32, bf16 (fp32 master weights), fp8 (bf16 with matmuls in "
        "8 bits; fp8-rowwise: a scale a row), bf16-pure or fp64.",
        table=PRECISIONS,
    )  # fmt: skip
    reduce_dtype: str = setting(
        "fp32", "Dtype that gradients of several micro-batches add up in.", table=REDUCE_DTYPES
    )
    optimizer: str = setting(
        "adamw",
        "Rule of the update: adamw, adamw-bf16 and adamw-8bit (its moments in 16 or 8 bits), lion; adafactor "
        "and muon need whole tensors (dp, pp, cp).",
        table=OPTIMIZERS,
    )  # fmt: skip
    step_in_backward: StrictBool = setting(
        False,
        "Update each parameter inside the backward, once its gradient is complete, and free that; for one "
        "micro-batch a step and max_grad_norm=0.",
    )
    offload: Literal["none", "optimizer"] = setting(
        "none",
        "Keep the optimizer's states, and the fp32 master weights that ZeRO does not shard, in host memory; "
        "each update copies them to the device and back.",
    )
    mlp_tile: Positive | None = setting(
        None,
        "Tokens of a rank that an MLP runs on at a time, and again in its backward, in uncompiled blocks, so "
        "that only one tile's inner tensors are in memory; null: all.",
        unit="tokens",
    )
    adam_betas: tuple[Fraction, Fraction] = setting(
        (0.9, 0.999), "Decay of AdamW's two moments, or the two of Lion's one.", constant("betas")
    )
    adam_eps: float = setting(1.0e-8, "Term in AdamW's denominator.", constant("eps"), gt=0)
    seed: NonNegative = setting(42, "Seed of the order of samples, dropout and random weights.")
    compile: StrictBool | Literal["auto"] = setting(
        "auto", "Compile the blocks with torch.compile; auto: on CUDA, where model and layout allow it."
    )
    max_nonfinite_steps: Positive = setting(
        5, "Steps in a row without a finite loss, after which the run stops with exit code 4.", unit="steps"
    )
    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "Device to train on; auto: CUDA if there is one."
    )

    @model_validator(mode="after")
    def _one_of(self) -> "TrainConfig":
        problems = []
        summed = PRECISIONS[self.precision].summed(self.reduce_dtype)
        if self.reduce_dtype == "bf16" and summed != REDUCE_DTYPES["bf16"]:
            problems.append(
                f"train.reduce_dtype=bf16 would round the {summed} gradients of train.precision="
                f"{self.precision}; leave train.reduce_dtype out, or set train.precision=bf16."
            )
        if self.step_in_backward and self.max_grad_norm:
            problems.append(
                "train.step_in_backward=true updates each parameter inside the backward, and "
                f"train.max_grad_norm={self.max_grad_norm:g} clips by the norm of all gradients, known only "
                "after it; set train.max_grad_norm=0, or leave train.step_in_backward out."
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

    every: Interval = setting(
        0, "Steps, or epochs (0.5 epoch), between evaluations; 0: at the end only.", HELD_OUT,
        counted_in_steps("eval"), unit="steps",
    )  # fmt: skip
    at_start: bool = setting(False, "Evaluate before the first step too.", HELD_OUT)
    samples: NonNegative = setting(
        0, "Held-out prompts that are answered at each evaluation (samples.jsonl) and shown at the end.",
        HELD_OUT, ANSWERING, unit="prompts",
    )  # fmt: skip
    exact_match: NonNegative = setting(
        0, "Held-out prompts whose whole greedy answer, not only a number in it, is compared.", HELD_OUT,
        ANSWERING, unit="prompts",
    )  # fmt: skip
    max_new_tokens: Positive = setting(
        64, "Longest answer, in tokens.",
        Need(lambda config: config.eval.samples or config.eval.exact_match, "no answers are asked for",
             "set eval.samples or eval.exact_match"), unit="tokens",
    )  # fmt: skip
    keep_best: bool = setting(
        False, "Save at each lowest evaluation loss, and export that as model/.", HELD_OUT, EVALUATED_OFTEN
    )
    early_stopping: NonNegative = setting(
        0, "Evaluations without a lower loss, after which the run stops; 0: never.", HELD_OUT,
        EVALUATED_OFTEN, unit="evaluations",
    )  # fmt: skip


class CheckpointConfig(Section):
    """Checkpoints, and continuing from them."""

    every: Interval = setting(
        100, "Steps, or epochs (0.5 epoch), between checkpoints; 0: at the end only.",
        counted_in_steps("checkpoint"), unit="steps",
    )  # fmt: skip
    keep: Positive = setting(3, "Newest checkpoints that are kept.", unit="checkpoints")
    async_save: bool = setting(True, "Write while training continues, from a copy in host memory.")
    save_on_signal: bool = setting(
        True, "On a signal to stop (SIGTERM, SIGINT, SIGHUP, …) finish the step, save, exit with 75."
    )
    resume: Literal["auto", "never"] = setting(
        "auto", "Continue the unfinished run in the output folder (auto), or never."
    )


Tracker = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio", "prometheus"]


class LogConfig(Section):
    """Rows of the run, and the dashboards that get them."""

    every: Positive = setting(1, "Steps between two rows.", unit="steps")
    to: tuple[Tracker, ...] = setting(
        ("console", "jsonl", "tensorboard"),
        "Where rows are shown or sent; metrics.jsonl (jsonl) is always written.",
    )
    project: str | None = setting(
        None, "Project in W&B and Trackio, MLflow's experiment; null: the environment's, or meshtune.",
        TRACKERS, min_length=1,
    )  # fmt: skip
    name: str | None = setting(
        None, "Name of the run in W&B, MLflow and Trackio; null: its folder's.", TRACKERS, min_length=1
    )
    tags: tuple[str, ...] = setting(
        (), "Tags in W&B, MLflow and Trackio; in MLflow key=value is a tag with a value.", TRACKERS
    )
    group: str | None = setting(None, "Group of runs in W&B and Trackio, and MLflow's tag group.", TRACKERS)
    textfile_directory: str | None = setting(
        None, "Folder that Prometheus' node exporter reads; null: logs/ of the run folder.",
        Need(lambda config: "prometheus" in config.log.to, "log.to has no prometheus",
             "add prometheus to log.to"), path=True, min_length=1,
    )  # fmt: skip
    gradient_noise_scale: NonNegative = setting(
        0, "Steps between two measurements of the gradient noise scale; 0: never.", unit="steps"
    )
    memory: bool = setting(
        False, "Print a table of the memory of the first two steps, by phase and category.",
        Need(lambda config: "console" in config.log.to, "log.to has no console", "add console to log.to"),
    )  # fmt: skip


class HubConfig(Section):
    """Upload of the trained model."""

    push_to: str | None = setting(
        None, "Hub id that model/ is uploaded to at the end; it is tried once the data are read."
    )
    private: bool = setting(
        True, "Create the hub repository as a private one.",
        Need(lambda config: config.hub.push_to is not None, "nothing is uploaded",
             "set hub.push_to, or leave it out"),
    )  # fmt: skip


class Config(Section):
    """Every setting of a run."""

    model: ModelConfig
    method: Literal["full", "lora", "qlora"] = setting(
        "full", "Train all weights, low-rank adapters next to them, or adapters next to weights in 4 bits."
    )
    objective: str = setting(
        "sft", "What is learned: answers (sft), or preferences (dpo, kto, orpo, simpo, reward).",
        table=OBJECTIVES,
    )  # fmt: skip
    dpo: DpoConfig = setting(DpoConfig(), None, of_objective("dpo"))
    kto: KtoConfig = setting(KtoConfig(), None, of_objective("kto"))
    orpo: OrpoConfig = setting(OrpoConfig(), None, of_objective("orpo"))
    simpo: SimpoConfig = setting(SimpoConfig(), None, of_objective("simpo"))
    reward: RewardConfig = setting(RewardConfig(), None, of_objective("reward"))
    lora: LoraConfig = setting(
        LoraConfig(), None,
        Need(lambda config: config.adapts, "method is full", "set method=lora, or leave it out",
             part="*"),
    )  # fmt: skip
    experts: ExpertsConfig = ExpertsConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    layout: Any = setting(
        "auto", "Parallel layout: auto, a layout string, or a mapping of its fields, each may be auto."
    )
    cluster: ClusterConfig | str = setting(
        "auto", "Machines: auto, the section, a YAML file that has it, or the TOML file of a probe.",
        path=True,
    )  # fmt: skip
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    hub: HubConfig = HubConfig()
    output: str = setting("runs/run", "Folder of the run: model, report, metrics and checkpoints.", path=True)
    output_exists: Literal["new", "extend", "replace"] | None = setting(
        None,
        "Start where output holds a run that is not to be continued: write the next free name, "
        "make that run longer, or delete it; null: refused.",
        Need(lambda config: config.output_exists != "extend" or config.checkpoint.resume != "never",
             "checkpoint.resume=never forbids to resume a run", "leave one out"),
    )  # fmt: skip

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
            """Validate a tree of sections, and that each setting takes effect, whatever rows there will be.

            Raises UserError, with a sentence for each problem.
            """
            try:
                super().__init__(**tree)
            except ValidationError as error:
                raise UserError(sentences(error, unknown_key)) from None
            if problems := [*without_effect(self, late=False)]:
                raise UserError(problems)

    @model_validator(mode="after")
    def _one_of(self) -> "Config":
        if self.method == "qlora" and PRECISIONS[self.train.precision].fp8:
            raise UserError(
                f"train.precision={self.train.precision} with method=qlora: frozen matrices are held in 4 "
                "bits and multiplied in 16; use train.precision=bf16, or method=lora."
            )
        return self

    @property
    def cluster_config(self) -> ClusterConfig:
        """The cluster section, read from its file if it names one. Raises UserError for a bad file."""
        if isinstance(self.cluster, ClusterConfig):
            return self.cluster
        tree = {} if self.cluster == "auto" else read_cluster(expanded(self.cluster))
        return _cluster_config(tree)

    @property
    def partial_layout(self) -> PartialLayout:
        return PartialLayout.parse(self.layout)

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step.

        Raises UserError if train.global_batch_tokens isn't a multiple of data.seq_len.
        """
        if tokens := self.train.global_batch_tokens:
            size, rest = divmod(tokens, self.data.seq_len)
            if rest or not size:
                near = max(1, round(tokens / self.data.seq_len)) * self.data.seq_len
                raise UserError(
                    f"train.global_batch_tokens = {tokens} is not a multiple of data.seq_len = "
                    f"{self.data.seq_len}; try {near}."
                )
            return size
        return self.train.global_batch_size or 64

    @property
    def adapts(self) -> bool:
        """True if adapters are trained, next to weights that are frozen."""
        return self.method != "full"

    @property
    def modules_to_save(self) -> tuple[str, ...]:
        """Names of modules that are trained whole next to adapters, with the score of a reward model."""
        return *self.lora.modules_to_save, *["score"] * OBJECTIVES[self.objective].scores

    @property
    def quantise(self) -> str:
        """dtype, by torch's name, of frozen matrices before they are in 4 bits; "": they are not."""
        return PRECISIONS[self.train.precision].compute if self.method == "qlora" else ""

    @property
    def learning_rate(self) -> float:
        """Peak learning rate."""
        return self.train.learning_rate or default_rate(self.method, self.objective)

    def to_yaml(self) -> str:
        """Write the whole resolved tree as YAML, which `load` reads back; a comment has the default rate."""
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        unset = "\n  learning_rate: null"
        of = self.method if self.objective == "sft" else f"{self.method} and objective {self.objective}"
        default = f"{scientific(self.learning_rate)}, the default of method {of}"
        return text.replace(f"{unset}\n", f"{unset}  # {default}\n")


SETTINGS = dict(declared(Config))  # by dotted key


def unchecked(tree: Mapping[str, Any]) -> Config:
    """The settings of a tree, validated, but not whether each takes effect. Raises ValidationError."""
    config = Config.__new__(Config)
    super(Config, config).__init__(**tree)
    return config


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

    Raises UserError for the first of: unreadable file, one of another trainer, malformed override, no model;
    else for all unknown keys and wrong values at once (values of one section that contradict each other: once
    each is valid; those that lack held-out rows: once all else is valid).
    """
    read = read_yaml(Path(file), SETTINGS) if file else {}
    if sentence := file_of_another(file, read, Config.model_fields):
        raise UserError(sentence)
    tree = merge(undotted(dict(defaults or {}), SETTINGS), read)
    problems: list[str] = []
    tree = usable(laid_over(tree, overrides), Config, problems)
    if problems:
        raise UserError(problems)
    if "model" not in tree:
        unknown = [name for name in tree if name not in Config.model_fields]
        raise UserError(
            [
                "No model is named; add model: {name: …} to the config, or model.name=… to the command.",
                *(unknown_key([name]) for name in unknown),
            ]
        )
    config = Config(**tree)
    if problems := [*without_effect(config, late=True, remedy=remedy)]:
        raise UserError(problems)
    return config


def laid_over(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Lay section.key=value texts over a tree, in their order.

    A setting of the tree that they leave without effect (method=full with lora.r) is left out, with a line
    on stderr; so is one that needs it. Raises UserError for a malformed override.
    """
    changed, given = dict(tree), dict[str, Any]()
    for override in overrides:
        changed, given = overridden(changed, override), overridden(given, override)
    for key, sentence in switched_off(tree, changed, given).items():
        changed = without(changed, key.split("."))
        if on_first_rank():
            notice(sentence)
    return changed


def switched_off(
    before: Mapping[str, Any], after: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, str]:
    """Dotted key -> sentence, for each setting that lost its effect when settings were laid over a tree, and
    for those that need one of these.

    Excluded (they stay errors): settings given in `given`, settings that already had no effect, and settings
    marked `relied_on`. before, after: without and with the settings `given`.
    """
    lost: dict[str, str] = {}
    if not given or "model" not in after:
        return lost
    with suppress(ValidationError, UserError):  # a wrong value, which is reported with all others
        errors = {key for key, *_ in unmet(unchecked(merge({"model": after["model"]}, before)))}
        left_out = True
        while left_out:  # it may be what another setting needs
            left_out = [
                (key, f"{key}={shown(value)} of the config is left out: {need.reason}.")
                for key, value, need in unmet(unchecked(after))
                if not (need.relied_on or key in errors or key in lost or sets(given, key.split(".")))
            ]
            for key, sentence in left_out:
                lost.setdefault(key, sentence)
                after = without(after, key.split("."))
    return lost


def unknown_key(path: Sequence[str]) -> str:
    return unknown_setting(path, [*SETTINGS], [*Config.model_fields])
