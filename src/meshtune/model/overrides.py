"""`model.overrides`: a model with other values in its config.json, such as fewer blocks.

    config.json ──> values laid over it, each key and type checked ──> lists by layer cut ──> built anew

The configuration is built from the changed file, so that a family derives anew what it derives from sizes.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from meshtune.errors import UserError, did_you_mean, nearest, type_name, written
from meshtune.yaml_tree import nested

SETTING = "model.overrides"
LAYERS = "num_hidden_layers"  # every family's; its attribute_map has the name that its own config.json uses
# Names of sizes in a configuration -> more than any model has of it.
LARGEST = dict.fromkeys((LAYERS, "n_layer", "num_layers"), 10_000)
LARGEST |= dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 2**16)
LARGEST |= dict.fromkeys(("hidden_size", "n_embd", "d_model"), 2**20)
LARGEST |= {"intermediate_size": 2**24, "vocab_size": 2**28}
TEXTS = ("dtype", "torch_dtype", "attn_implementation", "_attn_implementation")
DECIDED = {  # keys that can't be overridden -> what decides them
    **dict.fromkeys(("dtype", "torch_dtype"), "train.precision"),
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), "model.attention"),
    **dict.fromkeys(("model_type", "architectures", "auto_map", "is_encoder_decoder"), "the family"),
    **dict.fromkeys(("quantization_config", "transformers_weights"), "how the weights are stored"),
    **dict.fromkeys(("transformers_version", "name_or_path", "_name_or_path"), "transformers"),
}


def overridden_config(
    config: PretrainedConfig, raw: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[PretrainedConfig, tuple[str, ...]]:
    """(The configuration with `overrides` in its config.json, sentences on what they change there).

    config: as transformers reads it. raw: its config.json. Raises UserError with a sentence for each key that
    it does not have, value of another type, and list by layer that can't be made longer; and for values with
    which transformers can't build it.
    """
    if not overrides:
        return config, ()
    change = _Overrides()
    fields = _laid(config, raw, overrides, change)
    problems = [*change.problems, *absurd(fields), *absurd(fields.get("text_config"))]
    if problems:
        raise UserError([f"{SETTING}: {problem}" for problem in problems])
    try:
        changed = type(config).from_dict(fields, name_or_path=config.name_or_path)
    except Exception as error:  # each family's configuration class checks itself in its own way
        raise UserError(f"{SETTING}: transformers refuses them ({' '.join(str(error).split())}).") from error
    made = changed.to_dict()
    if problems := [
        f"{SETTING}: {'.'.join(path)} = {written(value)} has no effect: the {config.model_type} model makes "
        f"{written(found)} of it."
        for path, value in change.values.items()
        if (found := _found(made, path, value)) != value and written(found) != written(value)
    ]:
        raise UserError(problems)
    said = f"{SETTING} changes config.json: {', '.join(change.changes)}."
    return changed, (*([said] if change.changes else ()), *change.cuts)


def absurd(raw: Any) -> Iterator[str]:
    """Yield a sentence for each value of a configuration that no model has: building it would never end, or
    fail far from its cause.
    """
    for name, value in raw.items() if isinstance(raw, dict) else ():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name in LARGEST and not 1 <= value <= LARGEST[name]:
            yield f"{name} is {reprlib.repr(value)}; it must be from 1 to {LARGEST[name]:,}."
        if is_number and str(name).endswith(("dropout", "_pdrop")) and not 0 <= value <= 1:
            yield f"{name} is {reprlib.repr(value)}; it must be from 0 to 1."
        if name in TEXTS and not isinstance(value, str | dict | None):
            yield f"{name} is {reprlib.repr(value)}; it must be text."


@dataclass
class _Overrides:
    """Sentences and clauses on values that are laid over a configuration."""

    problems: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)  # "key before → after"
    values: dict[tuple[str, ...], Any] = field(default_factory=dict)  # by the path of their key
    cuts: list[str] = field(default_factory=list)  # a sentence for each list that was cut


def _laid(
    part: Any, raw: Mapping[str, Any], values: Mapping[str, Any], change: _Overrides, prefix: str = ""
) -> dict[str, Any]:
    """Fields of one part of config.json with `values` laid over them.

    part: the configuration, or a mapping in it; raw: the part as the file has it; change: gets what changes;
    prefix: the part's dotted name with a dot at the end.
    """
    is_config = isinstance(part, PretrainedConfig)
    names: Mapping[str, str] = part.attribute_map if is_config else {}  # another name -> the family's own
    before = {**(part.to_dict() if is_config else part), **raw}
    known = {*before, *names, *(RopeParameters.__annotations__ if "rope_" in prefix else ())}
    fields = dict(raw)
    for given, value in values.items():
        if "." in given and given not in known:
            given, _, rest = given.partition(".")
            value = nested(rest.split("."), value)
        key, where = names.get(given, given), f"{prefix}{given}"
        now, inner = before.get(key), getattr(part, key, None)
        if key in DECIDED:
            change.problems.append(f"{where} can't be changed: {DECIDED[key]} decides it.")
        elif given not in known:
            change.problems.append(
                f"{where} is not a key of this config.json{did_you_mean(_near(where, before))}"
            )
        elif isinstance(now, Mapping) and isinstance(value, Mapping):
            inner = inner if isinstance(inner, PretrainedConfig) else now
            fields[key] = _laid(inner, raw.get(key) or now, value, change, f"{where}.")
        elif now is not None and value is not None and _kind(now) != _kind(value):
            change.problems.append(
                f"{where} is {written(value)}, {type_name(value)}; config.json has {type_name(now)} there "
                f"({written(now)})."
            )
        else:
            if now != value:
                change.changes.append(f"{where} {written(now)} → {written(value)}")
            change.values[(*prefix.split(".")[:-1], key)] = value
            fields = {name: old for name, old in fields.items() if names.get(name) != key} | {key: value}
    layers = names.get(LAYERS, LAYERS)
    _cut_lists(raw, fields, (before.get(layers), fields.get(layers)), change, prefix)
    return fields


def _cut_lists(
    raw: Mapping[str, Any], fields: dict[str, Any], layers: tuple[Any, Any], change: _Overrides, prefix: str
) -> None:
    """Cut the lists in `fields` that have one entry for each layer, unless they were given.

    raw: config.json's fields; layers: their number there and in `fields`; change, prefix: as in `_laid`.
    """
    before, after = layers
    if not isinstance(after, int) or before == after:
        return
    for key, value in raw.items():
        by_layer = isinstance(value, list) and len(value) == before and "token" not in key
        if not by_layer or key == "architectures" or fields.get(key) is not value:
            continue
        if after > before:
            change.problems.append(
                f"{prefix}{key} of config.json has an entry for each of {before} layers; set "
                f"{SETTING}.{prefix}{key} for {after} too."
            )
        fields[key] = value[:after]
        change.cuts.append(
            f"{SETTING}: {prefix}{key} has an entry for each of {before} layers; it keeps the first {after}."
        )


def _found(made: Any, path: tuple[str, ...], otherwise: Any) -> Any:
    """Value at a path of a configuration's fields; `otherwise` where it has another name there."""
    for key in path:
        if not isinstance(made, Mapping) or key not in made:
            return otherwise
        made = made[key]
    return made


def _near(where: str, before: Mapping[str, Any]) -> list[str]:
    """Dotted names of keys that an unknown one may mean: the same key in another part, else similar names."""
    part, _, last = where.rpartition(".")
    names = [f"{part}.{key}".lstrip(".") for key in before]
    names += [f"{key}.{name}" for key, inner in before.items() if isinstance(inner, dict) for name in inner]
    same = [name for name in names if name.rpartition(".")[2] == last]
    return same or nearest(where, map(str, names))


def _kind(value: Any) -> Any:
    """The JSON type of a value; all numbers have one, since files write 0 for 0.0."""
    if isinstance(value, bool | str):
        return type(value)
    return next((kind for kind in (Real, Mapping, Sequence) if isinstance(value, kind)), type(value))
