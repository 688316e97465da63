"""What a run leaves behind: a Hugging Face model folder, or a peft adapter. Safetensors only.

A folder is written aside, flushed to the disk, and renamed, so that a folder under its final name is always
whole.
"""

import copy
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from meshtune.errors import UserError
from meshtune.model.load import resize_to, tables
from meshtune.model.lora import adapted, add_lora
from meshtune.rundir import flush

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
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
