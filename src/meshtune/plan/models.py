"""Well-known models from their published shapes (models.toml)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from meshtune.placement.rules import Traits
from meshtune.plan.work import Work

SHAPE = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary")  # numbers of a model in models.toml


@dataclass(frozen=True)
class KnownModel:
    """A model's numbers from its row in models.toml, without its configuration; all weights are trained."""

    work: Work
    traits: Traits


@cache
def models() -> dict[str, KnownModel]:
    """All models of models.toml, by name."""
    tables = tomllib.loads(files("meshtune.plan").joinpath("models.toml").read_text("utf-8"))
    return {name: _known_model(name, table) for name, table in tables.items()}


def _known_model(name: str, table: Mapping[str, Any]) -> KnownModel:
    work = Work.of_shape(**{number: table[number] for number in SHAPE}, tied=float(table.get("tied", False)))
    cuts = ((table["ffn"], "features of the MLP"),)
    layers, heads, kv_heads, vocabulary = (table[n] for n in ("layers", "heads", "kv_heads", "vocabulary"))
    return KnownModel(work, Traits(name, layers, heads, kv_heads, vocabulary, cuts=cuts))
