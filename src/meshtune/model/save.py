"""What a run leaves behind: a Hugging Face model folder, or a peft adapter. Safetensors only.

A folder is written aside, flushed to the disk, and renamed, so that a folder under its final name is always
whole.
"""

import copy
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from meshtune.errors import UserError
from meshtune.model.files import INDEX, WEIGHTS
from meshtune.model.lora import adapted, add_lora
from meshtune.model.pieces import Piece
from meshtune.model.trainable import resize_to, tables
from meshtune.rundir import flush

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DTYPE_WORDS = {  # as safetensors writes them
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
PREFIX = "base_model.model."  # what peft's two wrappers put before every name

# Settings of peft that change what an adapter computes, and the values under which it is plain LoRA.
PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "exclude_modules": (None, []),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` when the block ends well and vanishes when it
    doesn't."""
    if folder.exists():
        if not folder.is_dir():
            raise UserError(f"{folder} is a file; name a folder to save to.")
        known = [folder / "config.json", folder / ADAPTER_CONFIG]
        if any(folder.iterdir()) and not any(path.is_file() for path in known):
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
        for path in [*(path for path in aside.rglob("*") if path.is_file()), aside]:
            flush(path)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        flush(folder.parent)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
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
    """Write the folder that `AutoModelForCausalLM.from_pretrained` loads, with `card` as its README.md.

    Weights keep their dtype, which config.json names. stop_ids: the tokens that the model was taught to end
    an answer with; whoever generates with the folder stops at them too. Merge adapters first (`merge_lora`)
    or use `save_adapter`.
    """
    assert not adapted(model), "merge_lora or save_adapter first: a plain model has no place for adapters"
    config, generation = model.config, model.generation_config
    with _whole(Path(folder)) as aside:
        try:  # the live model keeps its own
            model.config, model.generation_config = copy.deepcopy(config), _generation(model, stop_ids)
            if stop_ids:
                model.config.eos_token_id = stop_ids[0]
            model.save_pretrained(aside, max_shard_size=max_shard_size)
        finally:
            model.config, model.generation_config = config, generation
        _finish(aside, tokenizer, card)


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
    """`save_model` by several ranks, none of which has the whole: each writes its pieces of the files.

    model: the whole one, its parameters on meta. pieces: what this rank writes, by parameter; together the
    ranks' cover each parameter once. gather(value) gives what every rank gave, on all of them; the main rank
    writes what is no parameter. All call it, on one file system. Raises on all when one can't write.
    """
    files = _files(model, dtype, max_shard_bytes)
    with ExitStack() as stack:

        def begin() -> Path:
            aside = stack.enter_context(_whole(Path(folder)))
            _make_files(aside, files, model)
            return aside

        aside = _together(gather, lambda: begin() if main else None)[0]
        _together(gather, lambda: _write_pieces(aside, files, pieces, dtype))
        described = partial(_describe, aside, files, model, dtype, tokenizer, card, stop_ids)
        _together(gather, lambda: described() if main else None)
        whole = stack.pop_all()
    _together(gather, whole.close)  # only now the folder has its name, and nobody goes on before


def renames(model: PreTrainedModel) -> bool:
    """Whether transformers stores a family's tensors otherwise than its modules hold them (experts fused)."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


@dataclass(frozen=True)
class _File:
    """One safetensors file: where the bytes of each tensor begin, and the header that says so."""

    name: str
    header: bytes
    begins: dict[str, int]
    bytes: int


def _files(model: PreTrainedModel, dtype: torch.dtype, most: int) -> list[_File]:
    """The files of a model, its tensors in order; none is larger than `most` bytes, unless one tensor is."""
    stored = _stored(model)
    split = split_state_dict_into_shards_factory(
        stored,
        get_storage_size=lambda tensor: tensor.numel() * _stored_dtype(tensor, dtype).itemsize,
        filename_pattern=WEIGHTS.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=most,
    )
    return [
        _file(file, {name: stored[name] for name in names}, dtype)
        for file, names in split.filename_to_tensors.items()
    ]


def _stored(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a model's files hold: parameters, tied ones once, and the buffers that are not made anew."""
    parameters = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in every}
    return {**parameters, **buffers}


def _stored_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point() else tensor.dtype


def _file(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> _File:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, at = {}, 0
    for key, tensor in tensors.items():
        stored = _stored_dtype(tensor, dtype)
        end = at + tensor.numel() * stored.itemsize
        entries[key] = {"dtype": DTYPE_WORDS[stored], "shape": list(tensor.shape), "data_offsets": [at, end]}
        begins[key], at = at, end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return _File(name, header, {key: len(header) + begin for key, begin in begins.items()}, len(header) + at)


def _together(gather: Callable[[Any], list[Any]], work: Callable[[], Any]) -> list[Any]:
    """What `work` returned on each rank; where it failed on one, all raise (else the others would wait)."""
    try:
        mine = (work(), None)
    except Exception as error:
        mine = (None, _portable(error))
    found = gather(mine)
    for _, error in found:
        if isinstance(error, OSError):
            remedy = "Make room, and export it from the run's checkpoint."
            raise UserError(f"The model could not be written: {error}. {remedy}")
        if error is not None:
            raise error
    return [result for result, _ in found]


def _portable(error: Exception) -> Exception:
    """An error that other ranks can be told: not every one survives pickling."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _make_files(aside: Path, files: Sequence[_File], model: PreTrainedModel) -> None:
    """The files at their full size, with all that is no parameter."""
    parameters = dict(model.named_parameters())
    for file in files:
        with open(aside / file.name, "wb") as stream:
            stream.write(file.header)
            stream.truncate(file.bytes)
    state = model.state_dict()
    own = {name: state[name] for file in files for name in file.begins if name not in parameters}
    _write_pieces(aside, files, {n: Piece(tuple(t.shape), (0,) * t.ndim, t) for n, t in own.items()}, None)


def _write_pieces(
    aside: Path, files: Sequence[_File], pieces: Mapping[str, Piece], dtype: torch.dtype | None
) -> None:
    """This rank's rows, or parts of rows, at their places."""
    for file in files:
        own = [name for name in file.begins if name in pieces]
        if not own:
            continue
        descriptor = os.open(aside / file.name, os.O_WRONLY)
        try:
            for name in own:
                _write_piece(descriptor, file.begins[name], pieces[name], dtype)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_piece(descriptor: int, begin: int, piece: Piece, dtype: torch.dtype | None) -> None:
    held = piece.tensor.detach().to("cpu", dtype).contiguous()
    if not held.numel():
        return
    item, data = held.element_size(), held.reshape(-1).view(torch.uint8).numpy()
    rows = 1 if held.shape[1:] == piece.shape[1:] else held.shape[0]  # whole rows lie side by side
    each = len(data) // rows
    inner = math.prod(piece.shape[1:])
    column = piece.offsets[1] * math.prod(piece.shape[2:]) if held.ndim > 1 else 0
    for row in range(rows):
        at = begin + ((piece.offsets[0] + row) * inner + column) * item if held.ndim else begin
        written: Any = memoryview(data[row * each : (row + 1) * each])  # pyright: ignore[reportArgumentType]
        while written:
            done = os.pwrite(descriptor, written, at)
            written, at = written[done:], at + done


def _describe(
    aside: Path,
    files: Sequence[_File],
    model: PreTrainedModel,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None,
    card: str | None,
    stop_ids: Sequence[int],
) -> None:
    """What lies beside the weights, as `save_pretrained` would write it."""
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = str(dtype).removeprefix("torch."), [type(model).__name__]
    if stop_ids:
        config.eos_token_id = stop_ids[0]
    config.save_pretrained(aside)
    if model.can_generate():
        _generation(model, stop_ids).save_pretrained(aside)
    if len(files) > 1:
        size = sum(file.bytes - len(file.header) for file in files)
        index = {
            "metadata": {"total_parameters": model.num_parameters(), "total_size": size},
            "weight_map": {name: file.name for file in files for name in file.begins},
        }
        (aside / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _finish(aside, tokenizer, card)


def _generation(model: PreTrainedModel, stop_ids: Sequence[int]) -> GenerationConfig:
    """How the saved model is to generate: as before, but first of all stopping at `stop_ids`."""
    generation = copy.deepcopy(model.generation_config or GenerationConfig())
    if generation.do_sample is not True and _samples(generation):
        # What the base model's author meant; transformers refuses to save it otherwise.
        generation.do_sample = True
    if stop_ids:
        old = generation.eos_token_id
        ends = list(dict.fromkeys([*stop_ids, *([old] if isinstance(old, int) else old or [])]))
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    return generation


def _samples(generation: GenerationConfig) -> bool:
    return any(
        value is not None and value != plain
        for value, plain in (
            (generation.temperature, 1.0),
            (generation.top_p, 1.0),
            (generation.top_k, 50),
        )
    )


def _finish(aside: Path, tokenizer: PreTrainedTokenizerBase | None, card: str | None) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(aside)  # with its chat template
    if card is not None:
        (aside / "README.md").write_text(card, encoding="utf-8")


# Adapters #


def save_adapter(
    folder: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    base_name: str,
    r: int,
    alpha: float,
    dropout: float = 0.0,
    embeddings: bool = False,
    card: str | None = None,
    stop_ids: Sequence[int] = (),
) -> None:
    """Write the adapters of `model` as a peft adapter of the model `base_name`.

    With `embeddings` (tokens were added, or the tables are trained) the embedding and the head go with it,
    whole, under the names that peft gives them. Who loads it with peft resizes the base first, as peft
    demands: `base.resize_token_embeddings(len(tokenizer))`; `load_adapter` does so by itself. `stop_ids`,
    as of `save_model`, go into a generation_config.json beside it (`GenerationConfig.from_pretrained`).
    """
    layers = adapted(model)
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = layer.lora_A
        tensors[f"{PREFIX}{name}.lora_B.weight"] = layer.lora_B
    if embeddings:
        tensors |= {PREFIX + name: tensor for name, tensor in _tables(model).items()}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(layers),  # whole names, so that nothing else can match
        "fan_in_fan_out": any(isinstance(layer, Conv1D) for layer in layers.values()),
        "bias": "none",
        "inference_mode": True,
    }
    with _whole(Path(folder)) as aside:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, aside / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (aside / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2), encoding="utf-8")
        _generation(model, stop_ids).save_pretrained(aside)
        _finish(aside, tokenizer, card)


def _tables(model: PreTrainedModel) -> dict[str, Tensor]:
    """Embedding and, unless tied to it, head with its bias; by name."""
    names = {id(module): name for name, module in model.named_modules()}
    embed, head = tables(model)
    found: dict[str, Tensor] = {f"{names[id(embed)]}.weight": embed.weight}
    if head.weight is not embed.weight:
        found[f"{names[id(head)]}.weight"] = head.weight
    if head.bias is not None:
        found[f"{names[id(head)]}.bias"] = head.bias
    return found


def load_adapter(model: PreTrainedModel, folder: str | Path) -> dict[str, Any]:
    """Put the peft LoRA adapter in `folder` on the plain model `model`, in place; returns
    adapter_config.json.

    Embeddings that were saved with it are resized to and loaded. Raises UserError for a folder that is not
    a LoRA adapter, holds a pickle, uses more of peft than plain LoRA, or does not fit the model.
    """
    folder = Path(folder)
    settings, tensors = _read_adapter(folder)
    names = sorted({name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name})
    add_lora(
        model,
        r=settings["r"],
        alpha=settings["lora_alpha"],
        dropout=settings.get("lora_dropout", 0.0),
        target_modules=names,
    )
    embed_name = next(iter(_tables(model)))
    if embed_name in tensors and len(tensors[embed_name]) != tables(model)[0].num_embeddings:
        resize_to(model, len(tensors[embed_name]))
    places: dict[str, Tensor] = dict(_tables(model))
    for name, layer in adapted(model).items():
        places |= {f"{name}.lora_A.weight": layer.lora_A, f"{name}.lora_B.weight": layer.lora_B}
    lacking = [name for name in places if ".lora_" in name and name not in tensors]
    problems = [f"{folder} lacks {name}." for name in lacking[:10]]
    for name, tensor in tensors.items():
        if name not in places:
            problems.append(f"{folder} holds {name}, which the model has no place for.")
        elif tensor.shape != places[name].shape:
            found, wanted = tuple(tensor.shape), tuple(places[name].shape)
            problems.append(
                f"{folder}: {name} has shape {found}, but this model needs {wanted}: is its base another?"
            )
    if problems:
        raise UserError(problems[:10])
    with torch.no_grad():
        for name, tensor in tensors.items():
            places[name].copy_(tensor)
    return settings


def _adapter_settings(folder: Path) -> dict[str, Any]:
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder} has no {ADAPTER_CONFIG}, so it is not a peft adapter.")
    try:
        return json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder / ADAPTER_CONFIG} can't be read as JSON: {error}") from error


def _read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    settings = _adapter_settings(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickle = (
            " (its adapter_model.bin is a pickle, which is not read)" if list(folder.glob("*.bin")) else ""
        )
        raise UserError(f"{folder} has no {ADAPTER_WEIGHTS}{pickle}; save the adapter again with peft ≥ 0.6.")
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except SafetensorError as error:
        raise UserError(f"The adapter in {folder} is damaged: {error}") from error
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{folder} is a {settings.get('peft_type')} adapter; meshtune loads LoRA.")
    more = [f"{key}={settings[key]}" for key, plain in PLAIN.items() if settings.get(key) not in plain]
    if more:
        raise UserError(
            f"{folder} uses {', '.join(more)}, which meshtune's LoRA has not; merge it with peft first."
        )
    return settings, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def adapter_base(folder: str | Path) -> str:
    """The base model that an adapter's folder names. Raises UserError when it is no adapter or names none."""
    base = _adapter_settings(Path(folder)).get("base_model_name_or_path")
    if not base:
        raise UserError(f"{Path(folder) / ADAPTER_CONFIG} names no base_model_name_or_path; add it.")
    return base
