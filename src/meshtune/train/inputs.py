"""From settings to what a model reads: tokenizer, encoder, prepared data, loader."""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from meshtune.config import Config
from meshtune.data.cache import write_summary
from meshtune.data.encode import Encoder
from meshtune.data.example import Source
from meshtune.data.loader import Loader
from meshtune.data.pack import LABELLED, Dataset
from meshtune.data.prepare import Prepared, prepare, sentences
from meshtune.data.recipe import Recipe, Stream
from meshtune.errors import UserError, expanded, explained
from meshtune.layout import Layout
from meshtune.length import limits
from meshtune.model.files import stop_tokens
from meshtune.model.load import load_config, load_tokenizer
from meshtune.parallel.apply import width_multiple
from meshtune.sections import DataConfig, ModelConfig, SourceConfig
from meshtune.units import on_first_rank


class Inputs(NamedTuple):
    """The text side of a run."""

    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    prepared: Prepared


def inputs_of(config: Config) -> Inputs:
    """Tokenizer, encoder and prepared data of a config, whose size is kept for the planner."""
    tokenizer = tokenizer_of(config.model, config.data)
    encoder = encoder_of(tokenizer, config, stops_of(config.model))
    prepared = data_of(config.data, encoder, seed=config.train.seed)
    if isinstance(prepared.train, Dataset) and on_first_rank():
        write_summary(config, prepared.train)
    return Inputs(tokenizer, encoder, prepared)


def first_texts(inputs: Inputs, most: int = 20) -> list[str]:
    """The texts of the first documents of the training data; none of a stream."""
    train = inputs.prepared.train
    if not isinstance(train, Dataset):
        return []
    documents = (document for place in range(len(train)) for document in train.documents(place))
    return [str(inputs.tokenizer.decode(document & ~LABELLED)) for document in islice(documents, most)]


def tokenizer_of(model: ModelConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model to train; with data.chat_template = "none" its chat template is removed.

    Raises UserError if it can't be loaded.
    """
    tokenizer = load_tokenizer(model.name, trust_remote_code=model.trust_remote_code, revision=model.revision)
    if data.chat_template == "none":  # who loads the result shall prompt it as it was trained
        tokenizer.chat_template = None
    return tokenizer


def stops_of(model: ModelConfig) -> list[int]:
    """Tokens that the model to train stops at when it generates."""
    if model.init == "random":
        return []
    return stop_tokens(model.name, trust_remote_code=model.trust_remote_code, revision=model.revision)


def embedding_rows(model: ModelConfig) -> int:
    """Rows of the embedding of the model to train, as its config.json has them."""
    config = load_config(
        model.name,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        overrides=model.overrides,
    )
    return int(getattr(config.get_text_config(), "vocab_size", None) or 0)


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


def steps_of(config: Config, train: Dataset | Stream) -> int:
    """Updates in the whole run, by the limit that ends it first (length.py).

    Raises UserError for a stream without train.max_steps and train.total_tokens.
    """
    ends = limits(config, None if isinstance(train, Stream) else len(train))
    if not ends:
        raise UserError(
            "data.streaming = true: the length of an epoch is unknown; set train.max_steps or "
            "train.total_tokens."
        )
    return ends[0].steps


def loader_of(
    config: Config,
    train: Dataset | Stream,
    layout: Layout,
    data_rank: int,
    state: dict[str, Any] | None = None,
) -> Loader:
    """Loader of a data rank's batches under a layout.

    state: a checkpoint's, to continue after it; None: from the beginning.

    Raises UserError if the state belongs to other data or another seed.
    """
    made = partial(
        Loader,
        train,
        global_batch_size=config.global_batch_size,
        micro_batch_size=layout.micro_batch_size,
        seed=config.train.seed,
        data_rank=data_rank,
        data_ranks=layout.data_ranks,
        multiple=width_multiple(layout),
        uniform=layout.pp > 1,
    )
    if state is None:
        return made()
    with explained("The checkpoint has no usable position in the data", "Use one that a run wrote."):
        return made(state=state)


def stream_sentences(prepared: Prepared) -> list[str]:
    """Sentences about the rows that were cut, dropped or skipped of a stream so far; none for data on the
    disk, which were reported at the start.
    """
    if not isinstance(prepared.train, Stream):
        return []
    return sentences(prepared.stats | prepared.train.tally.values())
