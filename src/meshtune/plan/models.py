"""Models without their config.json: the most used ones by their published shapes (models.toml), and a typical
Llama of any number of parameters.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from math import log
from typing import Any, NamedTuple

from meshtune.errors import UserError
from meshtune.units import count


def known_config(name: str) -> dict[str, Any] | None:
    """The fields of config.json that models.toml has for a hub id, or for its own short name; None: none.

    Case does not count.
    """
    return _configs().get(name.lower())


def known_names() -> list[str]:
    """All hub ids of models.toml, as the hub writes them."""
    return [name for table in tables().values() for name in (*table["hub"], *table.get("differing", ()))]


def hub_id(name: str) -> str:
    """The first hub id of a short name of models.toml; any other name as it is."""
    table = tables().get(name.lower())
    return table["hub"][0] if table else name


def by_size() -> list[str]:
    """Short names of the models of models.toml, the one with most parameters first."""
    return sorted(tables(), key=lambda name: -tables()[name]["parameters"])


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


# A typical Llama of a number of parameters #

# It is a Llama with the proportions that published Llama, Qwen and Mistral models share. Of all shapes in
# these ranges the one is taken whose width, depth and MLP are nearest to Llama 3's, and whose parameters are
# right:
#
#     head size   128; 64 below 2 billion parameters
#     heads       a multiple of 4; of 8 from hidden 4096 on, so that tp over 8 ranks cuts them evenly
#     kv heads    8; 4 where 8 does not divide the heads
#     hidden      heads x head size; hidden / layers from 64 to 160, best 112
#     layers      even; a multiple of 4 from 28 on
#     ffn         a multiple of 256 (128 below half a billion parameters), hidden x 2.5 to 4.5, best 3.5
#     vocabulary  128,256; 49,152 below half a billion parameters. Below 4 billion the head is the embedding.


PREFIX = "typical-llama-"  # of the name that such a model has in a config: typical-llama-13B
UNITS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
FEWEST, MOST = 10**8, 10**13
TINY, SMALL, TIED = 5e8, 2e9, 4e9  # below: a smaller vocabulary; heads of 64 features; a tied head
POSITIONS = 131_072
CLOSE = 0.01  # share by which the parameters may be off
ASPECT, WIDENING = 112, 3.5  # hidden / layers and ffn / hidden that are best


class Shape(NamedTuple):
    """Sizes of a Llama."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool  # head and embedding are one matrix

    @property
    def parameters(self) -> int:
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * head_dim * (self.heads + self.kv_heads)
        block = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * block + (2 - self.tied) * self.vocabulary * self.hidden + self.hidden

    @property
    def unlikeness(self) -> float:
        """Squared distance of its proportions from the best."""
        return log(self.hidden / self.layers / ASPECT) ** 2 + log(self.ffn / self.hidden / WIDENING) ** 2


def typical_parameters(name: str) -> float | None:
    """The number of parameters of a model's name, 13e9 for typical-llama-13B and -13e9; None: another name.

    Raises UserError for a name that has no number.
    """
    if not name.startswith(PREFIX):
        return None
    text = name.removeprefix(PREFIX)
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([MBT]?)", text, re.IGNORECASE)
    if match is None:
        raise UserError(f"--params {text} is not a number of parameters; write --params 13e9, 13B or 350M.")
    return float(match[1]) * UNITS[match[2].upper()]


def typical_config(parameters: float) -> tuple[dict[str, Any], str]:
    """The fields of config.json of a Llama with this many parameters, and a sentence with its shape.

    Raises UserError for fewer than FEWEST or more than MOST.
    """
    if not FEWEST <= parameters <= MOST:
        raise UserError(
            f"--params {parameters:g} can't be planned; give {count(FEWEST)} to "
            f"{count(MOST)} parameters, such as --params 13e9."
        )
    shapes = list(_shapes(parameters))
    close = [one for one in shapes if abs(one.parameters / parameters - 1) <= CLOSE]
    shape = min(close or shapes, key=lambda one: one.unlikeness)
    fields = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": shape.tied,
    }
    sentence = (
        f"The model is a typical Llama of {count(shape.parameters)} parameters: {shape.layers} layers, "
        f"hidden size {shape.hidden:,}, MLP {shape.ffn:,}, {shape.heads} heads, {shape.kv_heads} key-value "
        "heads, "
        f"vocabulary {shape.vocabulary:,}{', embedding and head tied' * shape.tied}."
    )
    return fields, sentence


def _shapes(parameters: float) -> Iterator[Shape]:
    """Yield the shapes in the ranges whose MLP brings the parameters nearest to this many."""
    head_dim = 64 if parameters < SMALL else 128
    vocabulary, unit = (49_152, 128) if parameters < TINY else (128_256, 256)
    tied = parameters < TIED
    for heads in range(4, 1024, 4):
        hidden, kv_heads = heads * head_dim, 4 if heads % 8 else 8
        for layers in (*range(2, 28, 2), *range(28, 512, 4)):
            if not 64 <= hidden / layers <= 160 or (hidden >= 4096 and heads % 8):
                continue
            without = Shape(hidden, layers, 0, heads, kv_heads, vocabulary, tied)
            ffn = round((parameters - without.parameters) / (3 * hidden * layers) / unit) * unit
            if 2.5 * hidden <= ffn <= 4.5 * hidden:
                yield without._replace(ffn=ffn)
