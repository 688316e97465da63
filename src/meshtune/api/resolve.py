"""From settings to plain values: data, model, learning rates, what the run row and the model card have.

Below api/ functions take these values; nothing there reads the settings.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from meshtune.addresses import public
from meshtune.config import Config
from meshtune.data.cache import write_summary
from meshtune.data.encode import Encoder
from meshtune.data.example import Source
from meshtune.data.pack import Dataset
from meshtune.data.prepare import Prepared, prepare
from meshtune.data.recipe import Recipe
from meshtune.errors import UserError, expanded
from meshtune.model.files import context_of, resolve, stop_tokens
from meshtune.model.load import load_config, load_tokenizer, read_changed
from meshtune.objectives import OBJECTIVES
from meshtune.optim.schedule import learning_rates
from meshtune.optimizers import OPTIMIZERS
from meshtune.placement.experts import BalanceSpec
from meshtune.plan.workload import positions_note
from meshtune.rundir import Row
from meshtune.schedules import warmup
from meshtune.sections import DataConfig, ModelConfig, SourceConfig
from meshtune.train.export import kind_of, shown
from meshtune.train.inputs import Inputs
from meshtune.train.model import LoraSpec, ModelSpec, OptimizerSpec
from meshtune.train.preference import PreferenceSpec
from meshtune.units import counted, on_first_rank, scientific


def inputs_of(config: Config) -> Inputs:
    """Tokenizer, encoder and prepared data of a config, whose size is kept for the planner."""
    tokenizer = tokenizer_of(config.model, config.data)
    encoder = encoder_of(tokenizer, config, stops_of(config.model))
    prepared = data_of(config.data, encoder, seed=config.train.seed)
    if isinstance(prepared.train, Dataset) and on_first_rank():
        write_summary(config, prepared.train)
    return Inputs(tokenizer, encoder, prepared)


def tokenizer_of(model: ModelConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model to train; with data.chat_template = "none" its chat template is removed.

    Raises UserError if it can't be loaded.
    """
    tokenizer = load_tokenizer(model.name, **model.access)
    if data.chat_template == "none":  # who loads the result shall prompt it as it was trained
        tokenizer.chat_template = None
    return tokenizer


def stops_of(model: ModelConfig) -> list[int]:
    """Tokens that the model to train stops at when it generates."""
    if model.init == "random":
        return []
    return stop_tokens(model.name, **model.access)


def embedding_rows(model: ModelConfig) -> int:
    """Rows of the embedding of the model to train, as its config.json has them."""
    config = load_config(model.name, **model.access, overrides=model.overrides)
    return int(getattr(config.get_text_config(), "vocab_size", None) or 0)


def override_sentences(model: ModelConfig) -> tuple[str, ...]:
    """Sentences on what the overrides of a model change in its config.json. Raises as `load_config`."""
    if not model.overrides:
        return ()
    file = resolve(model.name, **model.access, weights=False) / "config.json"
    return read_changed(file, model.name, model.trust_remote_code, model.overrides)[1]


def positions_sentences(config: Config, prepared: Prepared) -> list[str]:
    """Sentence on documents beyond the positions of the model to train; [] without its config.json."""
    try:
        read = load_config(config.model.name, **config.model.access, overrides=config.model.overrides)
    except UserError:  # the folder may hold only a tokenizer
        return []
    positions, longest = context_of(read), prepared.longest_document
    note = positions_note(config.model.name, config.data.seq_len, positions, longest)
    return [note] if note else []


def encoder_of(tokenizer: PreTrainedTokenizerBase, config: Config, stops: Sequence[int]) -> Encoder:
    """Encoder of rows to labelled tokens, by the settings of the data. stops: see `stops_of`.

    Sets the tokenizer's chat template and adds the tokens that the template needs, in place. Raises UserError
    for an unknown template, or an eos token that is needed and missing.
    """
    data = config.data
    return Encoder(
        tokenizer,
        train_on=data.train_on,
        chat_template=data.chat_template,
        separator=data.separator,
        on_bad_row=data.on_bad_row,
        split_turns=data.split_turns,
        template_variables=data.chat_template_kwargs,
        control_tokens=data.control_tokens,
        template_date=data.template_date,
        stops=stops,
        embedding_rows=partial(embedding_rows, config.model),
        objective=OBJECTIVES[config.objective],
        shared_prompts=data.shared_prompts,
    )


def data_of(data: DataConfig, encoder: Encoder, *, seed: int) -> Prepared:
    """Training and held-out data, from the cache, which is written first where it is missing.

    seed: of the held-out split, the packing and fractions of sources. Raises UserError where no training data
    are named, and as `prepare`.
    """
    if not data.train:
        raise UserError(
            "No data is named; add data: {train: rows.jsonl} to the config, or data.train=… to the command."
        )
    recipe = Recipe(
        tuple(source_of(source, data, "train") for source in data.train),
        encoder,
        seq_len=data.seq_len,
        packing=data.packing,
        overlong=data.overlong,
        seed=seed,
        eval_split=data.eval_split,
        eval_sources=tuple(source_of(source, data, "test") for source in data.eval),
        on_bad_row=data.on_bad_row,
    )
    return prepare(recipe, expanded(data.cache, "data.cache"), streaming=data.streaming)


def source_of(source: SourceConfig, data: DataConfig, split: str) -> Source:
    """Settings of a source, with those of the data section where it has none. split: where it has none."""
    columns = data.columns if source.columns is None else source.columns
    roles = data.roles if source.roles is None else source.roles
    where = data.where if source.where is None else source.where
    return Source(
        path=str(expanded(source.path)) if source.path.startswith("~") else source.path,
        weight=source.weight,
        split=source.split or split,
        format=source.format or data.format,
        columns=tuple(columns.items()),
        where=tuple(where.items()),
        roles=tuple(roles.items()),
        max_samples=data.max_samples,
    )


def model_spec(
    config: Config, attention: str, kernels: str, *, compile: bool = False, embeddings: int = 0
) -> ModelSpec:
    """The model of a config as plain values.

    attention, compile: of Choice, never "auto". kernels: torch's name of the kind of device. embeddings: rows
    that the tokenizer needs; 0: all that there are.
    """
    train = config.train
    return ModelSpec(
        source=config.model.name,
        init=config.model.init,
        **config.model.access,
        overrides=config.model.overrides,
        attention=attention,
        kernels=kernels,
        precision=train.precision,
        reduce_dtype=train.reduce_dtype,
        lora=LoraSpec(**{**dict(config.lora), "modules_to_save": config.modules_to_save})
        if config.adapts
        else None,
        quantise=config.quantise,
        freeze=tuple(config.model.freeze),
        embeddings=embeddings,
        label_smoothing=train.label_smoothing,
        neftune_alpha=train.neftune_alpha,
        compile=compile,
        mlp_tile=train.mlp_tile,
        preference=preference_of(config),
        balance=BalanceSpec(**config.experts.balancing),
        freeze_router=config.experts.freeze_router,
        seed=train.seed,
    )


def preference_of(config: Config) -> PreferenceSpec | None:
    """The objective and its settings; None of supervised fine-tuning."""
    if config.objective == "sft":
        return None
    return PreferenceSpec(config.objective, **dict(getattr(config, config.objective)))


def optimizer_spec(config: Config) -> OptimizerSpec:
    train = config.train
    return OptimizerSpec(
        name=train.optimizer,
        betas=train.adam_betas,
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        in_backward=train.step_in_backward,
        offload=train.offload == "optimizer",
    )


def schedule_of(config: Config, steps: int) -> Callable[[int], float]:
    """Function: number of an update, from 1 -> its learning rate. steps: updates of the whole run."""
    train = config.train
    spanned = train.lr_decay_steps or steps
    rate = learning_rates(
        train.lr_scheduler,
        peak=config.learning_rate,
        warmup_steps=warmup(spanned, ratio=train.warmup_ratio, steps=train.warmup_steps),
        total_steps=spanned,
        min_ratio=train.min_lr_ratio,
        arguments=train.lr_scheduler_kwargs,
    )
    return lambda step: rate(min(step, spanned))


def rate_in_words(config: Config) -> str:
    """The peak learning rate and its schedule, as "2e-4 (default for method=lora), cosine"."""
    default = f" (default for method={config.method})" if config.train.learning_rate is None else ""
    return f"{scientific(config.learning_rate)}{default}, {config.train.lr_scheduler}"


def run_settings(config: Config) -> Row:
    """The settings that the row of a run has, by its keys."""
    return {
        "model": public(config.model.name),
        "method": config.method,
        "objective": config.objective,
        "precision": config.train.precision,
        "optimizer": config.train.optimizer,
        "global_batch_size": config.global_batch_size,
        "seq_len": config.data.seq_len,
        "seed": config.train.seed,
        "data": [public(source.path) for source in config.data.train],
    }


def recipe(config: Config) -> dict[str, str]:
    """The settings of a run that its model card lists."""
    train, data = config.train, config.data
    row, betas = OPTIMIZERS[train.optimizer], f"betas {train.adam_betas}"
    rest = f", {row.rest} with {betas} for the rest" if row.rest else ""
    constants = f", {betas}" if "betas" in row.constants else rest
    changes = {"changes to its config.json": f"`{json.dumps(public(config.model.overrides))}`"}
    return {
        "base model": shown(config.model.name),
        **(changes if config.model.overrides else {}),
        **({} if config.objective == "sft" else {"objective": config.objective}),
        "method": config.method
        if config.method == "full"
        else f"{kind_of(config.lora.use_dora)} r {config.lora.r}, alpha {config.lora.alpha:g}"
        + ", next to weights in 4 bits" * (config.method == "qlora"),
        "data": ", ".join(shown(source.path) for source in data.train),
        "labelled": data.train_on,
        "sequence length": f"{data.seq_len}{', packed' if data.packing else ''}",
        "global batch": counted(config.global_batch_size, "sequence"),
        "learning rate": f"{scientific(config.learning_rate)}, {train.lr_scheduler}",
        "optimizer": f"{train.optimizer}{constants}, weight decay {train.weight_decay:g}",
        "precision": train.precision,
        "seed": str(train.seed),
    }
