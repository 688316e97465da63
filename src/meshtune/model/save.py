"""Write a Hugging Face model folder: by one process that has the whole model, or by ranks that share it.

    save_model    one process, through transformers' save_pretrained
    save_pieces   several ranks: the main rank creates each safetensors file at its full size with its header,
                  every rank writes its pieces of the parameters at their places

A folder is written under another name, synced to the disk, and renamed, so that a folder under its final name
is always complete. Safetensors only. Adapters: adapter.py.
"""

import copy
import json
import math
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from meshtune.errors import UserError, quoted
from meshtune.experts.adapters import adapted_weights
from meshtune.filesystem import replace, set_mode, sync, sync_open
from meshtune.model.anatomy import is_scored, put_back
from meshtune.model.files import ADAPTER_CONFIG, INDEX, SAFETENSORS_DTYPES, WEIGHTS, generation_config
from meshtune.model.lora import lora_layers
from meshtune.model.pieces import Piece
from meshtune.model.stored import StoredPart, stored_parts
from meshtune.rundir import disk_is_full, room

PROCESSOR_FILES = (  # of a model that also sees or hears; AutoProcessor reads them next to the tokenizer's
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
)  # fmt: skip
OLD_PROCESSOR_TEMPLATE = "chat_template.json"


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `folder` when the block ends, and removed if it fails.

    Its files get the mode that the umask gives, whoever wrote them: safetensors' are only the owner's. An
    old model or adapter in `folder` is replaced. Raises UserError if `folder` holds something else.
    """
    if folder.exists():
        if not folder.is_dir():
            raise UserError(f"{folder} is a file; name a folder to save to.")
        models = [folder / "config.json", folder / ADAPTER_CONFIG]
        if any(folder.iterdir()) and not any(path.is_file() for path in models):
            raise UserError(
                f"{folder} exists and holds no model; name another folder, so that nothing is lost."
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.parent / f".{folder.name}.writing-{os.getpid()}"
    old = folder.parent / f".{folder.name}.old-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        mode = aside.stat().st_mode & 0o666
        for path in [path for path in aside.rglob("*") if path.is_file()]:
            set_mode(path, mode)
            sync(path)
        sync(aside)
        if folder.exists():
            replace(folder, old)
        replace(aside, folder)
        sync(folder.parent)
    except BaseException:
        if old.exists() and not folder.exists():
            replace(old, folder)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def save_model(
    folder: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    card: str | None = None,
    stop_ids: Sequence[int] = (),
    max_shard_size: str = "5GB",
) -> None:
    """Write the folder that `AutoModelForCausalLM.from_pretrained` loads, or, of a model that also sees or
    hears, `AutoModelForMultimodalLM.from_pretrained`, with the parts that were set aside, or, of a reward
    model, `AutoModelForSequenceClassification.from_pretrained`.

    Weights keep their dtype, which config.json names. tokenizer: None for no tokenizer files. card: text of
    README.md; None for no file. stop_ids: the tokens that the model was trained to end an answer with;
    transformers' `generate` stops at them. folder: see `complete_folder`. Merge adapters first (`merge_lora`)
    or use `save_adapter`.
    """
    adapted = [*lora_layers(model), *adapted_weights(model)]
    assert not adapted, "merge_lora or save_adapter first: a plain model has no place for adapters"
    config, generation = model.config, model.generation_config
    with complete_folder(Path(folder)) as aside, put_back(model):
        try:  # the live model keeps its own
            model.config = _config(model, tokenizer, stop_ids)
            model.generation_config = generation_config(model, stop_ids)
            model.save_pretrained(aside, max_shard_size=max_shard_size)
            add_old_rope_names(aside / "config.json", model.config)
        finally:
            model.config, model.generation_config = config, generation
        write_tokenizer_and_card(aside, tokenizer, card)


def save_pieces(
    folder: str | Path,
    model: PreTrainedModel,
    pieces: Mapping[str, Piece],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    dtype: torch.dtype,
    gather: Callable[[Any], list[Any]],
    main: bool,
    card: str | None = None,
    stop_ids: Sequence[int] = (),
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write the folder of `save_model` by several ranks; each writes its pieces of the files.

    All ranks call it, on one file system. model: the whole one, its parameters on meta. pieces: this rank's
    part of each parameter, by name; together the ranks' pieces cover each parameter once. dtype: of the
    parameters in the files. gather: all_gather_object, returns the ranks' values in rank order. main: True on
    the rank that writes everything but parameters. max_shard_bytes: of a file, unless one tensor is larger.
    Others: see `save_model`. Raises on all ranks if one can't write.
    """
    with ExitStack() as stack, put_back(model):
        parts = stored_parts(model, dtype)
        assert parts, "ask in_pieces first"
        files = _weight_files(parts, max_shard_bytes)

        def create() -> Path:
            aside = stack.enter_context(complete_folder(Path(folder)))
            _create_files(aside, files, parts)
            return aside

        def describe() -> None:
            config = _config(model, tokenizer, stop_ids)
            config.dtype, config.architectures = str(dtype).removeprefix("torch."), [type(model).__name__]
            _write_configs(aside, files, model, config, stop_ids)
            write_tokenizer_and_card(aside, tokenizer, card)

        aside = _on_all_ranks(gather, lambda: create() if main else None)[0]
        _on_all_ranks(gather, lambda: _write_pieces(aside, files, parts, pieces, dtype))
        _on_all_ranks(gather, lambda: describe() if main else None)
        complete = stack.pop_all()
    _on_all_ranks(gather, complete.close)  # renames the folder; no rank continues before


def in_pieces(model: PreTrainedModel) -> bool:
    """True if `save_pieces` can write a family: each tensor in its files is a block of one parameter."""
    with put_back(model):
        return stored_parts(model, torch.float32) is not None


def _config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, stop_ids: Sequence[int]
) -> PreTrainedConfig:
    """Return a copy of the model's configuration as it is saved. stop_ids: see `save_model`."""
    config = copy.deepcopy(model.config)
    if stop_ids:
        config.eos_token_id = stop_ids[0]
    if is_scored(config) and tokenizer is not None:
        # transformers scores the last token that is not padding, which the end of an answer must not be.
        config.pad_token_id = tokenizer.pad_token_id
        if tokenizer.pad_token_id in (tokenizer.eos_token_id, _last_of_template(tokenizer)):
            config.pad_token_id = None
    return config


def _last_of_template(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the last token that a tokenizer's chat template writes behind an answer; None without one."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        ids: Any = tokenizer.apply_chat_template(turns, return_dict=False)
    except Exception:  # no template, or one that takes other rows
        return None
    return ids[-1]


@dataclass(frozen=True)
class _WeightFile:
    """Layout of one safetensors file."""

    name: str
    header: bytes  # its length in 8 bytes, then JSON
    offsets: dict[str, int]  # where each tensor begins, in bytes from the start of the file
    bytes: int  # of the whole file


def _weight_files(parts: Mapping[str, StoredPart], max_bytes: int) -> list[_WeightFile]:
    """Lay out the tensors of a model in files of at most `max_bytes`; a larger tensor has its own file."""
    tensors = {name: part.tensor for name, part in parts.items()}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=WEIGHTS.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_bytes,
    )
    return [
        _plan_weight_file(file, {name: tensors[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    ]


def _plan_weight_file(name: str, tensors: Mapping[str, Tensor]) -> _WeightFile:
    """Plan header and offsets of one file, tensors in the order given."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, begin = {}, 0  # in bytes after the header
    for key, tensor in tensors.items():
        end = begin + tensor.nbytes
        entries[key] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begins[key], begin = begin, end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {key: len(header) + start for key, start in begins.items()}
    return _WeightFile(name, header, offsets, len(header) + begin)


def _on_all_ranks(gather: Callable[[Any], list[Any]], work: Callable[[], Any]) -> list[Any]:
    """Call `work` and return the ranks' results, in rank order; if it fails on one rank, all raise its error.

    If only one rank raised, the others would wait in their next collective. An OSError becomes the
    cause of a UserError. gather: see `save_pieces`; results are pickled.
    """
    try:
        outcome = (work(), None)
    except Exception as error:
        outcome = (None, _picklable(error))
    outcomes = gather(outcome)
    for _, error in outcomes:
        if isinstance(error, OSError):
            first = room(error) if disk_is_full(error) else "Mend that."
            remedy = f"{first} Then export it from the run's checkpoint."
            raise UserError(f"The model could not be written: {error}. {remedy}") from error
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def _picklable(error: Exception) -> Exception:
    """Return the error, or one with its text if pickle can't carry it to other ranks."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _create_files(aside: Path, files: Sequence[_WeightFile], parts: Mapping[str, StoredPart]) -> None:
    """Create the files in `aside` at their full size, with headers and the values of the model's buffers.

    Parameters are left as zeros.
    """
    for file in files:
        with open(aside / file.name, "wb") as stream:
            stream.write(file.header)
            if file.bytes > len(file.header):  # some file systems can't lengthen a file by truncate
                stream.seek(file.bytes - 1)
                stream.write(b"\0")
    buffers = {part.source: part.tensor for part in parts.values() if not part.tensor.is_meta}
    whole = {name: Piece(tuple(buffer.shape), (0,) * buffer.ndim, buffer) for name, buffer in buffers.items()}
    _write_pieces(aside, files, parts, whole, None)


def _write_pieces(
    aside: Path,
    files: Sequence[_WeightFile],
    parts: Mapping[str, StoredPart],
    pieces: Mapping[str, Piece],
    dtype: torch.dtype | None,
) -> None:
    """Write this rank's pieces at their places in the files, cast to `dtype` (None: as they are), and sync.

    The files exist in `aside`. parts: of `stored_parts`. pieces: by the parameter's or buffer's name.
    """
    for file in files:
        names = [name for name in file.offsets if parts[name].source in pieces]
        if not names:
            continue
        descriptor = os.open(aside / file.name, os.O_WRONLY)
        try:
            for name in names:
                for block in parts[name].blocks(pieces[parts[name].source]):
                    _write_block(descriptor, file.offsets[name], block, dtype)
            sync_open(descriptor, aside / file.name)
        finally:
            os.close(descriptor)


def _write_block(descriptor: int, offset: int, block: Piece, dtype: torch.dtype | None) -> None:
    """Write a block of the tensor that begins at byte `offset` of an open file.

    Whole rows are contiguous in the file and written at once, parts of rows one by one. Only the first two
    dimensions may be sharded. dtype: to cast to; None leaves it as it is.
    """
    tensor = block.tensor.detach().to("cpu", dtype).contiguous()
    if not tensor.numel():
        return
    assert tensor.shape[2:] == block.shape[2:], "only the first two dimensions can be sharded"
    itemsize, data = tensor.element_size(), tensor.reshape(-1).view(torch.uint8).numpy()
    runs = 1 if tensor.shape[1:] == block.shape[1:] else tensor.shape[0]
    run_bytes = len(data) // runs
    row_elements = math.prod(block.shape[1:])
    column = block.offsets[1] * math.prod(block.shape[2:]) if tensor.ndim > 1 else 0  # elements into the row
    for run in range(runs):
        at = offset + ((block.offsets[0] + run) * row_elements + column) * itemsize if tensor.ndim else offset
        rest: Any = memoryview(data[run * run_bytes : (run + 1) * run_bytes])  # pyright: ignore[reportArgumentType]
        while rest:
            written = os.pwrite(descriptor, rest, at)
            rest, at = rest[written:], at + written


def _write_configs(
    aside: Path,
    files: Sequence[_WeightFile],
    model: PreTrainedModel,
    config: PreTrainedConfig,
    stop_ids: Sequence[int],
) -> None:
    """Write config.json, generation_config.json and, if there are several files, their index to `aside`.

    They are those of transformers' `save_pretrained`, with older names of the rotary settings.
    stop_ids: see `save_model`.
    """
    config.save_pretrained(aside)
    add_old_rope_names(aside / "config.json", config)
    if model.can_generate():
        generation_config(model, stop_ids).save_pretrained(aside)
    if len(files) > 1:
        size = sum(file.bytes - len(file.header) for file in files)
        index = {
            "metadata": {"total_parameters": model.num_parameters(), "total_size": size},
            "weight_map": {name: file.name for file in files for name in file.offsets},
        }
        (aside / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_tokenizer_and_card(
    folder: Path, tokenizer: PreTrainedTokenizerBase | None, card: str | None
) -> None:
    """Write the tokenizer's files, with those of the processor that lie where it was read, and README.md with
    the text `card`, each unless it is None.
    """
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder)
        processor = [*PROCESSOR_FILES]
        if not (folder / "chat_template.jinja").exists():  # a processor would prefer the old one
            processor.append(OLD_PROCESSOR_TEMPLATE)
        for file in (Path(tokenizer.name_or_path) / name for name in processor):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


# Rotary settings under older names #

# transformers 5 writes only `rope_parameters`. Without `rope_theta` and `rope_scaling` older readers use the
# defaults of the model's class, and don't report it.


# transformers 4 refuses a rope_scaling of these families with any other keys; "type" is the name of its kind.
EXACT_KEYS = {
    **dict.fromkeys(("phi3", "phi4_multimodal"), ("type", "short_factor", "long_factor")),
    **dict.fromkeys(("olmo", "olmo2", "chameleon", "fuyu", "persimmon"), ("type", "factor")),
}
NOT_SCALING = ("rope_theta", "partial_rotary_factor")  # they stand next to rope_scaling in transformers 4
KINDS = {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}  # that transformers 4 knows
OLD_NAMES = (
    "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct",
    "rope_local_base_freq", "global_rope_theta", "local_rope_theta",
)  # fmt: skip


def add_old_rope_names(file: Path, config: PreTrainedConfig) -> None:
    """Add the older names to a config.json that was written from `config`, and to its parts.

    Each part gets them only if transformers reads them, with and without `rope_parameters`, as what it has.
    """
    tree = json.loads(file.read_text("utf-8"))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # each class warns of keys that it doesn't know
    try:
        changed = _add(tree, config)
    finally:
        logging.set_verbosity(verbosity)
    if changed:
        file.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _add(tree: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Add the older names to one part of a config.json and those in it; returns whether it has changed."""
    changed = False
    for name in config.sub_configs:
        part, inner = getattr(config, name, None), tree.get(name)
        if isinstance(part, PreTrainedConfig) and isinstance(inner, dict):
            changed |= _add(inner, part)
    parameters = tree.get("rope_parameters")
    if not isinstance(parameters, dict) or not parameters:
        return changed
    before, rest = _rope(config, tree), {key: tree[key] for key in tree if key != "rope_parameters"}
    for names in _candidates(parameters, str(config.model_type)):
        if before == _rope(config, {**rest, **names}) == _rope(config, {**tree, **names}):
            tree |= names
            return True
    return changed


def _rope(config: PreTrainedConfig, tree: Mapping[str, Any]) -> Any:
    """The whole configuration that transformers makes of a config.json's part, without the older name of the
    kind (`type`); the error's type if it refuses it.
    """
    try:
        read = type(config).from_dict(json.loads(json.dumps(tree))).to_dict()
    except Exception as error:  # each family's class checks itself in its own way
        return type(error)
    rope = read.get("rope_parameters") or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict):
            parameters.pop("type", None)
    # It computes with `rope_parameters`; some classes keep older names as attributes.
    return {key: value for key, value in read.items() if key not in OLD_NAMES}


def _candidates(parameters: Mapping[str, Any], model_type: str) -> Iterator[dict[str, Any]]:
    """Yield sets of older names and their values for `rope_parameters`, the likelier ones first."""
    by_layer = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    full, local = by_layer.get("full_attention"), by_layer.get("sliding_attention")
    if by_layer and not (full and local):
        return  # no family of transformers 4
    kinds = {kind.get("rope_type") for kind in by_layer.values() or [parameters]}
    if not kinds <= KINDS:
        return
    scaling = {"rope_scaling": _scaling(full or parameters, model_type)}
    theta, part = ((full or parameters).get(key) for key in NOT_SCALING)
    if full and local:
        local_theta = local.get("rope_theta")
        if model_type.startswith("modernbert"):
            yield {"global_rope_theta": theta, "local_rope_theta": local_theta}
        if theta == local_theta:
            yield {"rope_theta": theta, **scaling}  # OLMo 3
        yield {"rope_theta": theta, "rope_local_base_freq": local_theta, **scaling}  # Gemma 3
    elif model_type.startswith("gpt_neox"):
        yield {"rotary_emb_base": theta, "rotary_pct": part, **scaling}
    else:
        if part in (None, 1):  # most families have no name for it
            yield {"rope_theta": theta, **scaling}
        yield {"rope_theta": theta, "partial_rotary_factor": part, **scaling}


def _scaling(parameters: Mapping[str, Any], model_type: str) -> dict[str, Any] | None:
    """transformers 4's `rope_scaling`; None where the frequencies are not scaled."""
    scaling = {key: value for key, value in parameters.items() if key not in NOT_SCALING}
    kind = scaling.get("rope_type", "default")
    if kind == "default" and set(scaling) <= {"rope_type", "type"}:
        return None
    if model_type in EXACT_KEYS:
        return {
            key: value for key, value in {**scaling, "type": kind}.items() if key in EXACT_KEYS[model_type]
        }
    return scaling


# The tokenizer #

# The base's own files are copied where nothing was added to its vocabulary: `save_pretrained` writes them in
# the form of the installed transformers, which older ones read otherwise, and leaves out settings (`legacy`).
# Where tokens were added, settings that it leaves out are put back.


CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
READ = ("tokenizer_class", "bos_token", "eos_token", "unk_token", "pad_token")
READING = ("is_local", "local_files_only")  # how and where transformers read it: nothing of the tokenizer
FILES = (CONFIG, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model")


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files, with the chat template that it has now, to a folder."""
    tokenizer.save_pretrained(folder)
    base, saved = Path(tokenizer.name_or_path), _settings(folder)
    _write(saved, folder)
    if not tokenizer.name_or_path or not (base / CONFIG).is_file():
        return
    own = _settings(base)
    if "auto_map" in own:  # code of its own, which may not be run here
        return
    own.pop("chat_template", None)  # it stands in a file of its own
    names = [
        name for name in dict.fromkeys([*FILES, *tokenizer.vocab_files_names.values()]) if name != CONFIG
    ]
    if _same(tokenizer, base):
        # The class and these tokens may follow from config.json, which an adapter's folder has not.
        own = {name: saved[name] for name in READ if name in saved} | own
        for name in names:
            (folder / name).unlink(missing_ok=True)
            if (base / name).is_file():
                shutil.copyfile(base / name, folder / name)
        _write(own, folder)
        return
    both = {name: value for name, value in own.items() if name != "added_tokens_decoder"} | saved
    for settings in (_older(both, own), both):  # the older form where it is read as the same tokenizer
        _write(settings, folder)
        if _same(tokenizer, folder):
            return


def _older(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The settings with the class of the base's, `own`, and the name of added special tokens that
    transformers 4 reads, if the base's have no newer name.
    """
    older = settings | {name: own[name] for name in ("tokenizer_class",) if name in own}
    if "extra_special_tokens" not in own and isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older


def _settings(folder: Path) -> dict[str, Any]:
    settings = json.loads((folder / CONFIG).read_text("utf-8"))
    return {name: value for name, value in settings.items() if name not in READING}


def _write(settings: dict[str, Any], folder: Path) -> None:
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def check_written(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> None:
    """Raise UserError if a tokenizer that is written and read back makes other ids of one of the texts, or of
    words between its special tokens.
    """
    special = [str(token) for token in tokenizer.all_special_tokens]
    texts = [*texts, *(f"{token}Hello{token} there" for token in special)]
    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(tokenizer, Path(name))
        if "auto_map" in json.loads((Path(name) / CONFIG).read_text("utf-8")):
            return
        again = _read(Path(name))
    for text in texts:
        ids, others = (
            one(text, add_special_tokens=False, verbose=False)["input_ids"] for one in (tokenizer, again)
        )
        if ids != others:
            raise UserError(
                f"The tokenizer is saved as another one: {quoted(text[:60])} has {len(ids)} tokens now, "
                f"and {len(others)} others when it is read back. Save it by transformers, and train with the "
                "copy."
            )


def _same(tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    """Whether a tokenizer has the class and the tokens of that in a folder."""

    def tokens(one: PreTrainedTokenizerBase) -> tuple[Any, ...]:
        added = {id: (str(token), token.special) for id, token in one.added_tokens_decoder.items()}
        return (
            type(one),
            len(one),
            added,
            {name: str(token) for name, token in one.special_tokens_map.items()},
        )

    return tokens(tokenizer) == tokens(_read(folder))


def _read(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
