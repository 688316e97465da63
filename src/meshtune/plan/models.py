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


@dataclass(frozen=True)
class Shape:
    work: Work
    traits: Traits


@cache
def models() -> dict[str, Shape]:
    """Well-known models from their published shapes (models.toml)."""
    tables = tomllib.loads(files("meshtune.plan").joinpath("models.toml").read_text("utf-8"))
    return {name: _shape(name, table) for name, table in tables.items()}


def _shape(name: str, t: Mapping[str, Any]) -> Shape:
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary")
    work = Work.of_shape(**{each: t[each] for each in names}, tied=float(t.get("tied", False)))
    cuts = ((t["ffn"], "features of the MLP"),)
    return Shape(work, Traits(name, t["layers"], t["heads"], t["kv_heads"], t["vocabulary"], True, cuts))
