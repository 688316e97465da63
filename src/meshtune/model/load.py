"""A causal language model, its tokenizer and its configuration, from a hub id or a local folder.

    skeleton(name)  the unchanged Hugging Face model, its parameters on meta, its buffers right
    mapped(name)    its tensors, whole, as a mapping of the safetensors files
    drawn(name)     random ones, handed over one after the other (draw.py)
    fill_whole      copies them into it on one device; ranks of a layout take their slices instead (pieces.py)

transformers' own `from_pretrained` does the reading: it builds on meta, renames keys where a family has
changed since its checkpoint was written, joins tensors of experts, and ties embeddings. It is given
`Deferred` tensors, which stay a mapping of the files, not anonymous memory. Values are copied out of it
and cast while copying: memory peaks at the model itself, and whoever rewrites a file in place does not
change the run that has read it. The skeleton is built in the dtype that is asked for: built in the files'
dtype it would hold wrong constants (Gemma's scale of the embeddings, rounded to bf16, in an fp32 model).
"""

import copy
import fnmatch
import logging
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.utils import enable_progress_bars
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from meshtune.compat import parameters_on_meta
from meshtune.errors import UserError, check_fetched, did_you_mean, explained, nearest
from meshtune.model.anatomy import aside_names, auto_class, ends, has_text_part, is_scored, set_aside
from meshtune.model.draw import Receive, draw
from meshtune.model.files import (
    ADAPTER_CONFIG,
    QUANTISED_KEYS,
    SAFETENSORS_DTYPES,
    SMALL,
    adapter_alone,
    checked_weight_files,
    quantisation,
    read_generation_config,
    read_json,
    resolve,
)
from meshtune.model.overrides import SETTING, absurd, overridden_config
from meshtune.model.pieces import StoredTensors, fill, materialise, whole_pieces
from meshtune.model.stored import deferred, refuse_misfits, untied
from meshtune.placement.families import see
from meshtune.quantised.deferred import Deferred
from meshtune.units import counted, few

logger = logging.getLogger(__name__)

NOTHING: Mapping[str, Any] = {}
CPU = torch.device("cpu")


def quiet() -> None:
    """Switch transformers' progress bars off, which would break ours (downloads from the hub keep theirs),
    and its report on loaded weights, where `mapped` tells each part. bitsandbytes, which peft imports, warns
    of kernels that nothing here runs.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers.modeling_utils").addFilter(is_no_loading_report)
    enable_progress_bars()


def is_no_loading_report(record: logging.LogRecord) -> bool:
    return record.module != "loading_report"


def load_config(
    name: str,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    overrides: Mapping[str, Any] = NOTHING,
) -> PretrainedConfig:
    """The configuration of a causal language model; `name`: a hub id or a folder; `overrides`: other values
    in it, as in `overridden_config`.

    Raises UserError if it is missing, damaged, of an unknown type, of no causal language model, or needs code
    that is not trusted, and for overrides that it can't have.
    """
    folder = resolve(name, revision=revision, weights=False, trust_remote_code=trust_remote_code)
    return read_config(folder / "config.json", name, trust_remote_code, overrides)


def read_config(
    file: Path, name: str, trust_remote_code: bool, overrides: Mapping[str, Any] = NOTHING
) -> PretrainedConfig:
    """The configuration in `file`, which need not be called config.json. Raises as `load_config`.

    name: of the model as the user wrote it, for errors.
    """
    return read_changed(file, name, trust_remote_code, overrides)[0]


def read_changed(
    file: Path, name: str, trust_remote_code: bool, overrides: Mapping[str, Any]
) -> tuple[PretrainedConfig, tuple[str, ...]]:
    """(The configuration of `read_config`, sentences on what the overrides change). Raises as that."""
    folder = file.parent
    if not file.is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            raise UserError(adapter_alone(folder, name))
        raise UserError(
            f"{name} has no config.json, so it is not a model in Hugging Face's format; name the folder that "
            "holds one."
        )
    raw = read_json(file)
    kind = raw.get("model_type")
    if not isinstance(kind, str) and "auto_map" not in raw:
        raise UserError(
            f"{file} names no `model_type`, so it is not the configuration of a transformers model; take the "
            "config.json that was published with the weights."
        )
    if problems := [*absurd(raw), *absurd(raw.get("text_config"))]:
        raise UserError([f"{file}: {problem}" for problem in problems])
    needs_code = "auto_map" in raw and not (isinstance(kind, str) and kind in CONFIG_MAPPING)
    if needs_code and not trust_remote_code:
        raise UserError(
            f"{name} brings its own Python code, which is not run by default; if you have read and "
            f"trust it, set model.trust_remote_code=true."
        )
    if not needs_code and kind not in CONFIG_MAPPING:
        hint = did_you_mean(nearest(str(kind), CONFIG_MAPPING.keys()), "; a newer transformers may.")
        raise UserError(
            f"transformers {transformers.__version__} can't read {file}: it knows no model_type {kind}{hint}"
        )
    source = folder if file.name == "config.json" else file
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # each family's configuration class checks itself in its own way
        raise UserError(f"transformers can't read {file}: {_first_line(error)}") from error
    if config.is_encoder_decoder:
        raise UserError(
            f"{name} ({config.model_type}) is an encoder-decoder; meshtune trains causal language models. "
            f"{see('encoder')}"
        )
    if not needs_code and type(config) not in auto_class(config)._model_mapping:
        raise UserError(
            f"{name} ({config.model_type}) is not a causal language model that transformers knows. "
            f"{see('not-built')}"
        )
    changed, notes = overridden_config(config, raw, overrides)
    for part in (changed, changed.get_text_config()):  # what is built of it, and saved, is not quantised
        for key in QUANTISED_KEYS:
            part.__dict__.pop(key, None)
    return changed, notes


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def load_tokenizer(
    name: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model (or of an adapter's folder). Raises UserError if it can't be read."""
    folder = resolve(name, revision=revision, weights=False, trust_remote_code=trust_remote_code)
    check_fetched(path for pattern in SMALL for path in folder.glob(pattern))
    if (folder / "tokenizer.json").is_file():
        _refuse_far_ids(folder / "tokenizer.json")
    remedy = "It needs tokenizer.json and tokenizer_config.json, or the family's own vocabulary files."
    with explained(f"The tokenizer of {name} can't be loaded", remedy):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except OSError as error:  # a missing file, in some families
            raise UserError(
                f"The tokenizer of {name} can't be loaded ({_first_line(error)}). {remedy}"
            ) from error
    if len(tokenizer) == 0:
        raise UserError(f"The tokenizer of {name} is empty; the folder needs tokenizer.json.")
    return tokenizer


def _refuse_far_ids(file: Path) -> None:
    """Raise UserError for a token whose id is far beyond the others: those between would take the memory."""
    tree = read_json(file)
    model, added = tree.get("model"), tree.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    tokens = len(ids) + (len(vocabulary) if isinstance(vocabulary, list) else 0)  # Unigram
    most = max((number for number in ids if isinstance(number, int)), default=0)
    if most > 2 * tokens + 100_000:
        raise UserError(f"{file} has {tokens:,} tokens, and one with the id {most:,}; mend it.")


def fill_whole(model: PreTrainedModel, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Give a skeleton's parameters memory on `device` and copy `values` into them and into its buffers.

    values: as `mapped` returns them, with those of parameters that the files do not hold (adapters); each is
    dropped once it is copied. Rows of the embedding and the head beyond the stored ones get their mean.
    """
    weights = StoredTensors(values)
    materialise(model, device)
    fill(whole_pieces(model), weights, free=True)
    weights.copy_buffers(model)


def skeleton(
    source: str | PretrainedConfig,
    *,
    init: Literal["pretrained", "random"] = "pretrained",
    dtype: torch.dtype,
    attention: str = "meshtune",
    trust_remote_code: bool = False,
    revision: str | None = None,
    overrides: Mapping[str, Any] = NOTHING,
    scored: bool = False,
) -> PreTrainedModel:
    """The model of a hub id, a folder or a configuration, in training mode with every parameter on meta: no
    bytes, no values, nothing drawn.

    Of a model that also sees or hears, the language part and its head; the others are set aside. Its buffers
    are real and right, in the family's own dtype (rotary frequencies stay fp32 under bf16), those
    too that no file holds (Gemma's scale of the embeddings), so that nothing has to be restored once the
    parameters get memory.

    init: with "random" the folder's generation_config.json is not read. overrides: of `load_config`; none
    for a configuration, which has them. attention: a name that transformers
    knows or that was registered with its AttentionInterface. scored: a reward model, with one output in place
    of the vocabulary's. Raises UserError as `load_config`, and if
    transformers can't build the model; reads no weights.
    """
    folder, config = _folder_and_config(source, trust_remote_code, revision, overrides, scored)
    with no_init_weights(), parameters_on_meta():
        model = _from_config(config, source, dtype, attention, trust_remote_code)
    model.tie_weights()
    if is_scored(config):
        # transformers gives it to models that generate only
        model.generation_config = None  # pyright: ignore[reportAttributeAccessIssue]
    elif folder and init == "pretrained" and (folder / "generation_config.json").is_file():
        model.generation_config = read_generation_config(folder)
    return set_aside(model).train()


def on_meta(config: PretrainedConfig, *, name: str = "", trust_remote_code: bool = False) -> PreTrainedModel:
    """The language part of a configuration's model, parameters and buffers on meta. Raises UserError if it
    can't be built.

    name: of the model as the user wrote it, for the error; "": its type stands there.
    """
    subject = f"{name or _named(config)} can't be built by transformers"
    with explained(subject, f"Mend its config.json. {see('not-built')}"), torch.device("meta"):
        return set_aside(auto_class(config).from_config(config, trust_remote_code=trust_remote_code))


def _folder_and_config(
    source: str | PretrainedConfig,
    trust_remote_code: bool,
    revision: str | None,
    overrides: Mapping[str, Any],
    scored: bool,
    weights: bool = False,
) -> tuple[Path | None, PretrainedConfig]:
    """Return (folder of a named model, its configuration), or (None, a copy of the configuration `source`).

    The caller may change the configuration. weights: fetch them too.
    """
    if isinstance(source, PretrainedConfig):
        assert not overrides, "a configuration is given with its overrides"
        return None, _with_head(copy.deepcopy(source), _named(source), scored)
    folder = resolve(source, revision=revision, weights=weights, trust_remote_code=trust_remote_code)
    config = read_config(folder / "config.json", source, trust_remote_code, overrides)
    return folder, _with_head(config, source, scored)


def _with_head(config: PretrainedConfig, name: str, scored: bool) -> PretrainedConfig:
    """Return the configuration, changed into that of a reward model if `scored`. Raises UserError for a head
    that it can't have. name: of the model, for errors.
    """
    if not scored:
        if is_scored(config):
            raise UserError(
                f"{name} is a {(config.architectures or [''])[0]}, which scores answers and has no head that "
                "writes them: train it further with objective=reward."
            )
        return config
    if is_scored(config) and config.num_labels != 1:
        raise UserError(
            f"{name} has {config.num_labels} outputs, but a reward model has one: name the causal language "
            "model that it was trained from."
        )
    found: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if found is None or has_text_part(config):
        raise _without_score(config)
    config.architectures, config.num_labels = [found.__name__], 1
    return config


def check_scored(file: Path, name: str, trust_remote_code: bool, overrides: Mapping[str, Any]) -> None:
    """Raise UserError, as `skeleton` does, if the model of a configuration file can't be a reward model."""
    config = _with_head(read_config(file, name, trust_remote_code, overrides), name, True)
    with torch.device("meta"):
        _from_config(config, config, torch.bfloat16, "eager", trust_remote_code)


def _without_score(config: PretrainedConfig) -> UserError:
    return UserError(
        f"objective=reward: transformers has no {config.model_type} model with a score in place of its "
        "vocabulary's head; use a family that has one, such as llama or qwen3, or objective=dpo."
    )


def _from_config(
    config: PretrainedConfig,
    source: str | PretrainedConfig,
    dtype: torch.dtype,
    attention: str,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Build the model of `config`, which is changed: it gets dtype and attention. Raises UserError.

    source: the model's name, which the model's config records, or the caller's own configuration.
    """
    with explained(f"{_named(source)} can't be built by transformers"):
        model = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    if is_scored(config) and not isinstance(getattr(model, "score", None), nn.Linear):
        raise _without_score(config)
    if isinstance(source, str):
        model.config.name_or_path = source  # not the cache's folder: adapters record it as their base
    return model


def _named(source: str | PretrainedConfig) -> str:
    return source if isinstance(source, str) else f"A {source.model_type} model"


def mapped(
    source: str | PretrainedConfig,
    *,
    init: Literal["pretrained", "random"] = "pretrained",
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    revision: str | None = None,
    overrides: Mapping[str, Any] = NOTHING,
    scored: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The tensors of a model, whole, by name, memory-mapped from its files: tied ones under all names.

    They have the dtype that they are stored in, or promote to where a model's files mix several; reading a
    slice touches nothing else. With init="random" they are drawn
    in `dtype`, always the same for one `seed`, and are in memory too; else dtype has no effect, and `seed`
    only on the score of a reward model (`scored`) that the files lack. Raises UserError as `skeleton`, for
    damaged files, for tensors missing or of a wrong shape, and for a `source` that is a configuration unless
    init="random".
    """
    if init == "random":
        _, config = _folder_and_config(source, trust_remote_code, revision, overrides, scored)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _from_config(config, source, dtype, "eager", trust_remote_code)
    elif isinstance(source, PretrainedConfig):
        raise UserError("A configuration has no weights: set model.init=random, or name a model's folder.")
    else:
        folder, config = _folder_and_config(source, trust_remote_code, revision, overrides, scored, True)
        assert folder
        made_by = f"config.json with {SETTING}" if overrides else "config.json"
        with (
            explained(f"{_named(source)} can't be built by transformers"),
            torch.random.fork_rng(devices=[]),  # for a score that is drawn
        ):
            torch.manual_seed(seed)
            model = _load_pretrained(folder, config, trust_remote_code, made_by)
    parameters = {key: p.detach() for key, p in model.named_parameters(remove_duplicate=False)}
    tensors = {**model.state_dict(), **parameters}
    for parameter in model.parameters():  # a cycle may keep the modules alive; they must not keep the bytes
        if not isinstance(parameter, Deferred):
            parameter.data = parameter.data.new_empty(0)
    return tensors


def drawn(
    source: str | PretrainedConfig,
    receive: Receive,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    revision: str | None = None,
    overrides: Mapping[str, Any] = NOTHING,
    scored: bool = False,
    seed: int = 0,
    device: torch.device = CPU,
) -> dict[str, Tensor]:
    """Draw random weights in `dtype` and hand each whole parameter to `receive`, which keeps its part of it;
    return the buffers by name.

    The values are those of `mapped` with init="random", but one module's parameters are in memory at a time;
    all of them in a family whose initialisation does not allow it (draw.py), with a warning. On a GPU as
    `device` other values are drawn, sooner. Raises UserError as `skeleton`.
    """
    _, config = _folder_and_config(source, trust_remote_code, revision, overrides, scored)
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        model = draw(
            lambda: _from_config(copy.deepcopy(config), source, dtype, "eager", trust_remote_code),
            parameters_on_meta,
            receive,
            device,
        )
    if model is not None:
        return {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    logger.warning("Random weights of %s are drawn whole on every rank.", _named(source))
    tensors = mapped(
        source, init="random", dtype=dtype, trust_remote_code=trust_remote_code, revision=revision,
        overrides=overrides, scored=scored, seed=seed,
    )  # fmt: skip
    for name, tensor in tensors.items():
        receive((name,), tensor)
    return tensors


def _load_pretrained(
    folder: Path, config: PretrainedConfig, trust_remote_code: bool, made_by: str
) -> PreTrainedModel:
    """Load the model in `folder` on the CPU, its weights `Deferred` tensors in the dtype that those stored
    promote to.

    made_by: what decides the shapes, for errors. Raises UserError for damaged files, missing tensors and
    wrong shapes, and as `checked_weight_files`; warns of tensors that the model does not use.
    """
    files = checked_weight_files(folder)
    try:
        state, words = deferred(folder, files, quantisation(folder))
        with no_init_weights(), parameters_on_meta():
            built = _from_config(copy.deepcopy(config), config, torch.float32, "eager", trust_remote_code)
        stored = [key for key, word in SAFETENSORS_DTYPES.items() if word in words and key.is_floating_point]
        loaded: Any = type(built).from_pretrained(
            None,
            state_dict=state,
            config=config,
            dtype=reduce(torch.promote_types, stored or [torch.float32]),
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported below, in our words
        )
    except (SafetensorError, EOFError) as error:
        raise UserError(f"The weights in {folder} are damaged: {_first_line(error)}") from error
    model, report = loaded
    refuse_misfits(folder, model, words, report)
    problems = []
    drawn_here = {"score.weight"} if is_scored(config) else set()
    if missing := sorted({*report["missing_keys"]} - drawn_here):
        problems.append(
            f"{folder} lacks {counted(len(missing), 'tensor')} of a {config.model_type} model as "
            f"{made_by} makes it: {few(missing)}."
        )
    for key, shape, expected in sorted(report["mismatched_keys"])[:10]:
        problems.append(f"{folder}: {key} has shape {list(shape)}, but {made_by} makes it {list(expected)}.")
    if any(list(shape) == [0] for _, shape, _ in report["mismatched_keys"]):
        problems.append("Tensors of shape [0] come from ZeRO-3: save the model again, its shards gathered.")
    if problems := problems + untied(folder, model):
        raise UserError(problems)
    inside = f"{model.base_model_prefix}." if is_scored(config) else ""  # its vocabulary's head is left out
    if unexpected := sorted(key for key in report["unexpected_keys"] if key.startswith(inside)):
        count = counted(len(unexpected), "tensor")
        logger.warning("%s holds %s that the model has no use for: %s", folder, count, few(unexpected))
    return model


# Changes before training #


def grow_embeddings(model: PreTrainedModel, needed: int) -> int:
    """Make embedding and head (with its bias) at least `needed` rows long; return how many were added.

    New rows have arbitrary values until stored values are copied in (`pieces.StoredTensors`). Never shrinks
    (many families round their rows up). `config.vocab_size` follows.
    """
    rows = tables(model)[0].num_embeddings
    if needed > rows:
        resize_to(model, needed)
    return max(0, needed - rows)


def resize_to(model: PreTrainedModel, rows: int) -> None:
    """Make embedding and head `rows` long; their values, requires_grad and tying stay.

    New rows have arbitrary values. Torch's random state is left as it was.
    """
    trainable = [table.weight.requires_grad for table in tables(model)]
    devices = [table.weight.device for table in tables(model) if table.weight.is_cuda]
    with torch.random.fork_rng(devices):  # what it draws is overwritten; adapters drawn later must not differ
        model.resize_token_embeddings(rows, mean_resizing=False)
    for table, grad in zip(tables(model), trainable, strict=True):
        table.weight.requires_grad_(grad)


def train_tables(model: PreTrainedModel) -> None:
    """Train embedding and head whole, where the embedding of a model with adapters grew: all new rows are the
    same mean, and untrained, the model could not tell the new tokens apart.
    """
    for table in tables(model):
        table.weight.requires_grad_(True)


def untie(model: PreTrainedModel) -> None:
    """Give the head of a model that shares its embedding's weight a copy of its own, in place.

    The configuration doesn't tie them any more.
    """
    embed, head = tables(model)
    head.weight = nn.Parameter(embed.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def tables(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """The embedding and the output head. Raises UserError for a model without one."""
    embed, head = ends(model)
    if not isinstance(embed, nn.Embedding) or not isinstance(head, nn.Linear):
        raise UserError(f"{type(model).__name__} has no plain embedding and output head.")
    return embed, head


def freeze(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Freeze the parameters whose names match a glob (`model.layers.0.*`, `*norm*`); return their names.

    `*` matches dots too; tied parameters match under all their names; parts that were set aside are frozen
    already. Raises UserError for every pattern that
    matches nothing, naming near ones, before any is frozen, and afterwards if nothing is left to train.
    """
    names = dict(model.named_parameters(remove_duplicate=False))  # a tied head is found under both its names
    aside = aside_names(model)
    frozen: set[str] = set()
    problems = []
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches and not fnmatch.filter(aside, pattern):
            near = (nearest(pattern, names) or [*names])[:3]
            problems.append(
                f"The pattern {pattern} matches no parameter; globs match names such as {', '.join(near)}."
            )
        frozen.update(matches)
    if problems:
        raise UserError(problems)
    for name in frozen:
        names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise UserError(f"With {counted(len(frozen), 'parameter')} frozen, nothing is left to train.")
    return sorted(frozen)
