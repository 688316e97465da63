"""Rotary settings of a config.json under the names that transformers 4, vLLM and llama.cpp read.

transformers 5 writes only `rope_parameters`. Without `rope_theta` and `rope_scaling` older readers use the
defaults of the model's class, and don't report it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

# Families of which transformers 4 refuses a rope_scaling with any other keys; "type" is the name of its kind.
EXACT_KEYS = {
    **dict.fromkeys(("phi3", "phi4_multimodal"), ("type", "short_factor", "long_factor")),
    **dict.fromkeys(("olmo", "olmo2", "chameleon", "fuyu", "persimmon"), ("type", "factor")),
}
NOT_SCALING = ("rope_theta", "partial_rotary_factor")  # they stand beside rope_scaling in transformers 4
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
