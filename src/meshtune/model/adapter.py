"""Save the LoRA layers of a model as a folder in peft's format, and load such a folder. Safetensors only."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from meshtune.errors import UserError, check_fetched, expanded
from meshtune.experts.adapters import adapted_weights, peft_tensors, stacked_weights
from meshtune.model.anatomy import anatomy, aside_names, is_scored
from meshtune.model.files import ADAPTER_CONFIG, generation_config, read_json
from meshtune.model.load import resize_to, tables, untie
from meshtune.model.lora import (
    add_lora,
    is_named,
    lora_layers,
    modules_named,
    shortest_endings,
    tied_tables,
)
from meshtune.model.save import complete_folder, write_tokenizer_and_card
from meshtune.model.stored import BASE_DIGEST
from meshtune.precision import UNMIXED
from meshtune.units import counted, few, notice

ADAPTER_WEIGHTS = "adapter_model.safetensors"
IN_4_BITS = "base_in_4_bits"  # key in its weights' metadata: dtype that the base's had before
BASE_OVERRIDES = "base_overrides"  # key of adapter_config.json: model.overrides of the base that was trained
OF_COPY = re.compile(r"\.modules_to_save\.(default\.)?")  # in the name of a module's trained copy
# In names of a state dict of the wrapped model, which peft's `save_pretrained` takes out: the adapter's own
# name, and torch's wrappers.
OF_WRAPPED = re.compile(r"(?<=\.lora_[AB])\.default(?=\.)|(?<=\.lora_magnitude_vector)\.default\.weight$")
OF_BASE = re.compile(r"(\.base_layer)+(?=\.(?!base_layer\.|lora_))")  # not in the names of experts' adapters
OF_TORCH = re.compile(r"(?<![^.])_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
PREFIX = "base_model.model."  # peft's two wrappers put it before every name
# Linear layers in target_modules that peft 0.21 takes for experts', if a family's files are as Qwen2-MoE's
TAKEN = ("gate", "gate_proj", "up_proj", "down_proj")

# Keys of adapter_config.json: those that are read, and those without an effect on what an adapter computes.
READ = {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"}
READ |= {"modules_to_save", "target_parameters", "revision", BASE_OVERRIDES}
WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config",
    # the tensors' names say which layers are adapted, the layers' classes how their weights lie, and the
    # tensors of modules_to_save whether embedding and head are tied
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
    "ensure_weight_tying",
    # of initialisations, which init_lora_weights names, or without effect unless another key is set
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size",
}  # fmt: skip
# Values under which other keys are plain LoRA. Those of init_lora_weights leave the base as it is: PiSSA,
# OLoRA, CorDA, LoftQ and LoRA-GA move a part of it into the adapter.
PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": ("gaussian", "eva", "orthogonal", "mica"),
    "bias": ("none",),
}
EMPTY: tuple[Any, ...] = (None, False, {}, [])  # values under which any key has no effect
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def save_adapter(
    folder: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    base_name: str,
    lora_rank: int,
    alpha: float,
    dropout: float = 0.0,
    use_rslora: bool = False,
    use_dora: bool = False,
    layers_to_transform: Sequence[int] | None = None,
    modules_to_save: Sequence[str] = (),
    embeddings: bool = False,
    overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    base_digest: str | None = None,
    quantised: str = "",
    card: str | None = None,
    stop_ids: Sequence[int] = (),
) -> None:
    """Write the adapters of `model` as a peft adapter of the model `base_name`.

    lora_rank … modules_to_save: of `add_lora`; the saved modules are written whole, a tied embedding and head
    both, since peft keeps them tied only if it has both. embeddings: True to write the embedding and the head
    with it, whole, under the names that peft gives them (tokens were added, and they are trained); peft then
    demands that the base is resized before it loads the adapter, which `load_adapter` does automatically:
    `base.resize_token_embeddings(len(tokenizer))`. overrides: of the base's config.json; peft, which has no
    word for them, warns of the key. revision: of a base on the hub. base_digest: see stored.py. quantised:
    dtype of the base before it was in 4 bits; "": it was not. tokenizer, card, stop_ids: see `save_model`;
    stop_ids go into a generation_config.json. folder: see `complete_folder`.
    """
    layers = lora_layers(model)
    refused = "DoRA" if use_dora else "dropout" if dropout else ""
    tensors = {PREFIX + name: _stored(tensor) for name, tensor in adapter_tensors(model).items()}
    if embeddings:
        tensors |= {PREFIX + name: tensor for name, tensor in embedding_and_head(model).items()}
    saved = modules_named(model, modules_to_save)
    tied = bool(tied_tables(model) & {*saved})
    for path in saved:
        for name, tensor in model.get_submodule(path).named_parameters(prefix=f"{PREFIX}{path}"):
            tensors[name] = tensor.clone() if tied else tensor  # safetensors has no shared tensors
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_scored(model.config) else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        **({"revision": revision} if revision else {}),
        "r": lora_rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        **_targets(model, layers, others(model, saved, layers_to_transform), refused),
        "layers_to_transform": None if layers_to_transform is None else [*layers_to_transform],
        "modules_to_save": saved or None,
        "use_rslora": use_rslora,
        "use_dora": use_dora,
        "fan_in_fan_out": any(isinstance(layer, Conv1D) for layer in layers.values()),
        "bias": "none",
        "inference_mode": True,
        **({"ensure_weight_tying": True} if tied else {}),
        **({BASE_OVERRIDES: dict(overrides)} if overrides else {}),
    }
    with complete_folder(Path(folder)) as aside:
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        identity = {key: it for key, it in ((BASE_DIGEST, base_digest), (IN_4_BITS, quantised)) if it}
        save_file(stored, aside / ADAPTER_WEIGHTS, metadata={"format": "pt"} | identity)
        (aside / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2), encoding="utf-8")
        if model.can_generate():
            generation_config(model, stop_ids).save_pretrained(aside)
        write_tokenizer_and_card(aside, tokenizer, card)


def _targets(
    model: PreTrainedModel, layers: Collection[str], modules: Collection[str], refused: str
) -> dict[str, list[str] | None]:
    """Return the keys of adapter_config.json that name adapted layers and experts' parameters. The layers
    that peft would take for experts' are named by their weights, which it reads as they are.

    modules: names that the endings of layers' names must not match. refused: what the adapter has that peft
    refuses for weights, for a printed sentence; "": nothing.
    """
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    renamed = _MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type) == "qwen2_moe"
    taken = {name for name in layers if renamed and name.rpartition(".")[2] in TAKEN}
    if taken and refused:
        remedy = "set lora_dropout to 0 in its adapter_config.json, or " * (refused == "dropout")
        notice(
            f"peft 0.21 refuses this adapter, since {min(taken)} of a mixture can have no {refused} there: "
            f"{remedy}merge it (export --merge)."
        )
    if lost := _lost(model):
        notice(
            f"peft 0.21 does not load {counted(len(lost), 'tensor')} of this adapter, such as {min(lost)}: "
            "it renames them as transformers renames those of the base. Merge the adapter (export --merge)."
        )
    weights = {f"{name}.weight" for name in taken} | {*adapted_weights(model)}
    parameters = {*dict(model.named_parameters()), *aside_names(model)}
    return {
        "target_modules": shortest_endings({*layers} - taken, modules),
        "target_parameters": shortest_endings(weights, parameters) or None,
    }


def _lost(model: PreTrainedModel) -> list[str]:
    """Return the names of an adapter's tensors that transformers' rules for a base's files change: peft
    applies them to adapters too.
    """
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        get_model_conversion_mapping,
    )
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    if get_checkpoint_conversion_mapping(model.config.model_type) is None:
        return []
    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    renamed = {name: rename_source_key(name, rules, [])[0] for name in adapter_tensors(model)}
    return [name for name, other in renamed.items() if not name.endswith(other)]  # peft restores prefixes


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the matrices and magnitude vectors of a model's adapters, by the names that peft gives them.

    Each shares memory with the adapter; B of experts is [out, r, experts], which `_stored` makes a matrix.
    """
    tensors = peft_tensors(model)
    for name, layer in lora_layers(model).items():
        tensors |= {f"{name}.lora_A.weight": layer.lora_A, f"{name}.lora_B.weight": layer.lora_B}
        if layer.lora_magnitude_vector is not None:
            tensors[f"{name}.lora_magnitude_vector"] = layer.lora_magnitude_vector
    return tensors


def _stored(tensor: Tensor) -> Tensor:
    """Return one of `adapter_tensors` with the shape that peft saves."""
    return tensor.flatten(1) if tensor.ndim == 3 else tensor


def _adapted_names(
    model: PreTrainedModel, folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[str]:
    """Return the names of the linear layers and of the experts' parameters that an adapter adapts.

    tensors: by the names of `read_adapter`. target_parameters may name the weights of linear layers too, as
    those of `_targets`; UserError for others.
    """
    named, stacked = settings.get("target_parameters") or [], stacked_weights(model)
    known = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    known += stacked
    found = {target: [path for path in known if f".{path}".endswith(f".{target}")] for target in named}
    if unknown := [target for target, paths in found.items() if not paths]:
        raise UserError(
            f"{folder} uses target_parameters={json.dumps(unknown)}: of parameters, meshtune's LoRA adapts "
            "the weights of linear layers and of experts, and this model has "
            f"{few([*stacked], 2) if stacked else 'no experts'}. Merge it with peft first."
        )
    experts = {path.rpartition(".")[0] for paths in found.values() for path in paths if path in stacked}
    layers = {name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name}
    layers = {layer for layer in layers if re.sub(r"(\.base_layer)+$", "", layer) not in experts}
    return [*sorted(layers), *(path for path in stacked if any(path in paths for paths in found.values()))]


def others(
    model: PreTrainedModel, saved: Sequence[str], layers_to_transform: Sequence[int] | None
) -> set[str]:
    """Return the names that an ending in target_modules must tell from the adapted layers': those of modules,
    also of what was set aside, that peft does not leave out because of modules_to_save or of their layer.
    """
    paths = {path for path, _ in model.named_modules()}
    if layers_to_transform is not None:
        layers = tuple(f"{anatomy(model).blocks}.{index}." for index in layers_to_transform)
        paths = {path for path in paths if path.startswith(layers)}
    for name in aside_names(model):
        while name := name.rpartition(".")[0]:
            paths.add(name)
    return {path for path in paths if path and not any(f"{path}.".startswith(f"{own}.") for own in saved)}


def embedding_and_head(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the embedding's weight and, unless tied to it, the head's weight and bias; by name."""
    names = {id(module): name for name, module in model.named_modules()}
    embed, head = tables(model)
    tensors: dict[str, Tensor] = {f"{names[id(embed)]}.weight": embed.weight}
    if head.weight is not embed.weight:
        tensors[f"{names[id(head)]}.weight"] = head.weight
    if head.bias is not None:
        tensors[f"{names[id(head)]}.bias"] = head.bias
    return tensors


def load_adapter(model: PreTrainedModel, folder: str | Path) -> dict[str, Any]:
    """Add the peft LoRA adapter in `folder` to the plain model `model`, in place, and freeze all else.

    Returns the settings in adapter_config.json. If embeddings were saved with it, the model's are resized and
    overwritten, and untied where peft would have trained a copy. Raises UserError for a folder that is not a
    LoRA adapter, holds a pickle, uses more of peft than plain LoRA, or does not fit the model (which is left
    with adapters then).
    """
    folder = Path(folder)
    settings, tensors = read_adapter(folder)
    saved = settings.get("modules_to_save") or []
    saved = [saved] if isinstance(saved, str) else saved
    _settle_ties(model, folder, saved, tensors)
    names = _adapted_names(model, folder, settings, tensors)
    try:
        add_lora(
            model,
            lora_rank=settings.get("r", 8),  # peft's defaults
            alpha=settings.get("lora_alpha", 8),
            dropout=settings.get("lora_dropout", 0.0),
            target_modules=names,
            use_rslora=bool(settings.get("use_rslora")),
            use_dora=bool(settings.get("use_dora")),
            modules_to_save=saved,
        )
    except UserError as error:  # its problems name the settings of a run
        raise UserError(
            f"{folder} does not fit its base: {problem.removeprefix('lora.')}" for problem in error.problems
        ) from error
    rows = tables(model)[0].num_embeddings  # the score of a reward model has one
    stored_rows = [
        len(tensors[name]) for name, own in embedding_and_head(model).items()
        if name in tensors and len(own) == rows
    ]  # fmt: skip
    if stored_rows and stored_rows[0] != rows:
        resize_to(model, stored_rows[0])
    adapters = adapter_tensors(model)
    parameters = dict(model.named_parameters()) | embedding_and_head(model) | adapters
    stored = {id(parameters[name]) for name in tensors if name in parameters}  # once of a tied pair
    needed = adapters | {
        name: parameter
        for path in modules_named(model, saved)
        for name, parameter in model.get_submodule(path).named_parameters(prefix=path)
    }
    missing = [name for name, parameter in needed.items() if id(parameter) not in stored]
    problems = [f"{folder} lacks {name}." for name in missing[:10]]
    for name, tensor in tensors.items():
        if name not in parameters:
            problems.append(f"{folder} holds {name}, which the model has no place for.")
        elif (
            tensor.shape != (own := _stored(parameters[name]) if name in adapters else parameters[name]).shape
        ):
            stored, expected = tuple(tensor.shape), tuple(own.shape)
            problems.append(
                f"{folder}: {name} has shape {stored}, but this model needs {expected}: is its base another?"
            )
    if problems:
        raise UserError(problems[:10])
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor.view_as(parameters[name]))
    return settings


def _settle_ties(
    model: PreTrainedModel, folder: Path, modules_to_save: Sequence[str], tensors: dict[str, Tensor]
) -> None:
    """Untie embedding and head, in place, where the adapter has a copy of one of them, or adapts the head.

    Two equal tensors are one: the head's is removed from `tensors`. Raises UserError for tensors of the head
    that the base, which ties it, has no place for.
    """
    embed, head = tables(model)
    if head.weight is not embed.weight:
        return
    paths = {module: path for path, module in model.named_modules()}
    embed_name, head_name = f"{paths[embed]}.weight", f"{paths[head]}.weight"
    both = embed_name in tensors and head_name in tensors
    if any(name.startswith(f"{paths[head]}.lora_") for name in tensors):
        untie(model)
    elif both and torch.equal(tensors[embed_name], tensors[head_name]):
        del tensors[head_name]
    elif any(is_named(paths[table], modules_to_save) for table in (embed, head)):
        untie(model)
    elif head_name in tensors:
        raise UserError(
            f"{folder} holds {head_name}{f' and {embed_name}, which differ' if both else ''}, but its base "
            "ties the two (tie_word_embeddings in its config.json): it was trained on another base."
        )


def extensions_of(settings: Mapping[str, Any]) -> list[str]:
    """Return key=value of each setting in adapter_config.json with which an adapter is more than plain LoRA.

    So are keys that are not known, as those of a later peft, unless they are null, false or empty.
    """
    return [
        f"{key}={json.dumps(value)}"
        for key, value in settings.items()
        if key not in READ | WITHOUT_EFFECT
        and not (value in EMPTY or value in PLAIN_LORA.get(key, ()))
        and not (key == "init_lora_weights" and value is True)
    ]


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises UserError if it is missing or no JSON."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder} has no {ADAPTER_CONFIG}, so it is not a peft adapter.")
    return read_json(folder / ADAPTER_CONFIG)


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read (adapter_config.json, the tensors under the names that they have without peft's wrappers)."""
    settings = adapter_settings(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        note = " (its adapter_model.bin is a pickle, which is not read)" if list(folder.glob("*.bin")) else ""
        raise UserError(f"{folder} has no {ADAPTER_WEIGHTS}{note}; save the adapter again with peft ≥ 0.6.")
    check_fetched([folder / ADAPTER_WEIGHTS])
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except SafetensorError as error:
        raise UserError(f"The adapter in {folder} is damaged: {error}") from error
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{folder} is a {settings.get('peft_type')} adapter; meshtune loads LoRA.")
    if extensions := extensions_of(settings):
        initialised = any(extension.startswith("init_lora_weights") for extension in extensions)
        raise UserError(
            f"{folder} uses {', '.join(extensions)}"
            + (
                ": this initialisation took a part out of the base, so that the adapter is wrong on the base "
                "as published. Save it converted where it was trained (peft's save_pretrained with "
                "path_initial_model_for_weight_conversion); peft can also merge PiSSA and OLoRA."
                if initialised
                else ", which meshtune's LoRA has not; merge it with peft first."
            )
        )
    _check_numbers(folder, settings)
    if empty := sorted(name for name, tensor in tensors.items() if tensor.shape == (0,)):
        raise UserError(
            f"{folder} holds {counted(len(empty), 'tensor')} of shape [0] ({few(empty, 3)}), as ZeRO-3 "
            "leaves them: save it again, its shards gathered."
        )
    if bad := sorted(name for name, tensor in tensors.items() if not _finite(tensor)):
        raise UserError(
            f"{folder} holds NaN or infinity in {counted(len(bad), 'tensor')} of {len(tensors)} "
            f"({few(bad, 3)}): its training diverged. Take an earlier checkpoint of it."
        )
    if odd := sorted(name for name, tensor in tensors.items() if tensor.dtype not in FLOATS):
        raise UserError(
            f"{folder} holds tensors in {tensors[odd[0]].dtype}, such as {odd[0]}: it is quantised. Take the "
            "adapter as it was trained."
        )
    return settings, _plain_names(tensors)


def _check_numbers(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise UserError for rank, alpha or dropout in adapter_config.json that isn't a number."""
    problems = [
        f"{folder / ADAPTER_CONFIG}: {key} is {json.dumps(value)}, which must be "
        f"{'a whole number from 1 on' if key == 'r' else 'a number'}."
        for key, kinds, least in (
            ("r", int, 1),
            ("lora_alpha", (int, float), None),
            ("lora_dropout", (int, float), 0),
        )
        if key in settings
        and (
            isinstance(value := settings[key], bool)
            or not isinstance(value, kinds)
            or (least is not None and value < least)
        )
    ]
    if problems:
        raise UserError(problems)


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.float().isfinite().all())


def _plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names without peft's wrappers, those without an effect left out.

    Where peft saves embedding and head it writes what its wrappers hold: the layer under an adapter, the
    module that a copy stands in for, and the copy, which it writes under its plain name too. An older peft,
    and a state dict of the wrapped model, have the copy only under the wrapper's name.
    """
    plain: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = OF_BASE.sub("", OF_TORCH.sub("", key).removeprefix(PREFIX))
        name = OF_WRAPPED.sub("", name)
        if ".original_module." not in name:
            own = OF_COPY.sub(".", name)
            (plain if own == name else copies)[own] = tensor
    return copies | plain


def digest_of_base(folder: Path) -> str | None:
    """Return the digest of the weights that the adapter in `folder` was trained on; None if it has none.

    Raises UserError if the adapter is damaged.
    """
    return _metadata(folder).get(BASE_DIGEST)


def method_of(folder: Path) -> dict[str, Any]:
    """Return the settings by which the adapter in `folder` was trained next to weights in 4 bits; none for
    another. Raises UserError as `digest_of_base` and `adapter_settings`.
    """
    if (before := _metadata(folder).get(IN_4_BITS)) is None:
        return {}
    saved = adapter_settings(folder).get("modules_to_save") or []
    return {"method": "qlora", "lora": {"modules_to_save": saved}, "train": {"precision": UNMIXED[before]}}


def _metadata(folder: Path) -> dict[str, str]:
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as stored:
            return stored.metadata() or {}
    except FileNotFoundError:  # `read_adapter` refuses it
        return {}
    except SafetensorError as error:
        raise UserError(f"The adapter in {folder} is damaged: {error}") from error


def adapter_base(folder: str | Path) -> dict[str, Any]:
    """Return the settings of section `model` for the base, from adapter_config.json: its name, its revision
    on the hub, and the overrides of its config.json.

    Raises UserError if there is no name.
    """
    settings = adapter_settings(Path(folder))
    base = settings.get("base_model_name_or_path")
    if not base:
        raise UserError(f"{Path(folder) / ADAPTER_CONFIG} names no base_model_name_or_path; add it.")
    return {
        "name": base,
        "revision": None if expanded(base).exists() else settings.get("revision"),  # of a hub model only
        "overrides": settings.get(BASE_OVERRIDES) or {},
    }
