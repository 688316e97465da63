"""The most used models by their published shapes (models.toml), for planning without their config.json."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from meshtune.placement.rules import Traits
from meshtune.plan.work import Work

UNGATED = {"gpt_neox", "phi", "starcoder2"}  # model types whose MLP has two matrices, not three


@dataclass(frozen=True)
class KnownModel:
    """A dense model's numbers from its shape alone, without norms and biases; all weights are trained."""

    work: Work
    traits: Traits


def known_config(name: str) -> dict[str, Any] | None:
    """The fields of config.json that models.toml has for a hub id, or for its own short name; None: none.

    Case does not count.
    """
    return _configs().get(name.lower())


def known_names() -> list[str]:
    """All hub ids of models.toml, as the hub writes them."""
    return [name for table in tables().values() for name in (*table["hub"], *table.get("differing", ()))]


@cache
def models() -> dict[str, KnownModel]:
    """The dense models of models.toml whose config has the usual fields, by short name."""
    shapes = {name: _fields(table) for name, table in tables().items()}
    return {
        name: _known_model(name, config.get("text_config", config))
        for name, config in shapes.items()
        if "intermediate_size" in config.get("text_config", config) and not _experts(config)
    }


@cache
def tables() -> dict[str, dict[str, Any]]:
    """The entries of models.toml, by short name."""
    return tomllib.loads(files("meshtune.plan").joinpath("models.toml").read_text("utf-8"))


@cache
def _configs() -> dict[str, dict[str, Any]]:
    """Fields of config.json by name in lower case."""
    configs = {}
    for short, table in tables().items():
        differing = {name: {} for name in (short, *table["hub"])} | table.get("differing", {})
        configs |= {name.lower(): _fields(table) | fields for name, fields in differing.items()}
    return configs


def _fields(table: Mapping[str, Any]) -> dict[str, Any]:
    return table["config"] | dict.fromkeys(table.get("null", ()))


def _experts(config: Mapping[str, Any]) -> bool:
    return any(name.endswith("_experts") for name in config)


def _known_model(name: str, config: Mapping[str, Any]) -> KnownModel:
    layers, hidden, ffn = (config[n] for n in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    kv_heads = config.get("num_key_value_heads", heads)
    work = Work.of_shape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=vocabulary,
        head_dim=config.get("head_dim"),
        gated=float(config["model_type"] not in UNGATED),
        tied=float(_tied(config)),
    )
    cuts = ((ffn, "features of the MLP"),)
    return KnownModel(work, Traits(name, layers, heads, kv_heads, vocabulary, cuts=cuts))


def _tied(config: Mapping[str, Any]) -> bool:
    """True if the head is the embedding: as the config says, else as transformers takes it for the family."""
    family = config["model_type"]
    return config.get("tie_word_embeddings", family.startswith("gemma") or family in ("starcoder2", "cohere"))
