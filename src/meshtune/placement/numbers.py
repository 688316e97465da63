"""The numbers of a model that planning needs, as one value. model/census_cache.py derives them."""

from dataclasses import dataclass
from typing import ClassVar

from meshtune.placement.census import Census
from meshtune.placement.rules import Traits

READS_VALUES = "its forward reads values of tensors, which a trace does not have"  # Census.unsupported


@dataclass(frozen=True)
class ModelNumbers:
    """A model as planning sees it, with LoRA's adapters and frozen weights as the config sets them."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # for the cache's files

    census: Census
    traits: Traits
    attention: str  # name of the implementation that model.attention=auto means for it
    text_part: str | None  # sentence on what is trained of a model that also sees or hears; None: another one
    positions: int | None  # tokens of the longest document that its positions are made for; None: no limit
    dropout: bool = False  # True if its attention draws random numbers
    changes: tuple[str, ...] = ()  # sentences on what model.overrides changes in its config.json
