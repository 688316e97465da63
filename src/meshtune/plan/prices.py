"""Prices of a GPU-hour: the user's, by GPU kind. None of ours would be current.

price_per_gpu_hour: 2.5                            of cluster.gpu
price_per_gpu_hour: {h100-sxm: 2.5, mi300x: 1.9, currency: USD}
price_per_gpu_hour: prices.toml                    the same keys in a file, TOML or YAML
"""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from meshtune.errors import UserError, expanded, written
from meshtune.nearest import did_you_mean, nearest
from meshtune.yaml_tree import read_toml, read_yaml

SETTING = "cluster.price_per_gpu_hour"


class Prices(NamedTuple):
    """Prices of a GPU-hour."""

    of_kind: Mapping[str, float]
    currency: str = ""  # as the user wrote it; "": not named


def prices_of(given: float | Mapping[str, Any] | str | None, kind: str, kinds: Collection[str]) -> Prices:
    """The prices that the setting gives. A number is that of `kind`.

    kinds: all names that a price may have. Raises UserError for a file that can't be read, and with every
    name and price that is wrong.
    """
    if given is None:
        return Prices({})
    if isinstance(given, int | float):
        return Prices({kind: given})
    table, source = (given, SETTING) if isinstance(given, Mapping) else (_read(given), f"{SETTING} = {given}")
    if problems := list(_problems(table, source, kinds)):
        raise UserError(problems)
    prices = {name: float(price) for name, price in table.items() if name != "currency"}
    return Prices(prices, table.get("currency", ""))


def _read(file: str) -> Mapping[str, Any]:
    path = expanded(file)
    if path.suffix.lower() != ".toml":
        return read_yaml(path)
    return read_toml(path, SETTING)


def _problems(table: Mapping[str, Any], source: str, kinds: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each entry that isn't a price of a known kind and not the currency."""
    for name, price in table.items():
        if name == "currency":
            if not isinstance(price, str):
                yield f"{source}: currency = {written(price)} is no text; write it as USD."
            continue
        if name not in kinds:
            word = str(name).lower().replace("_", "-")
            near = [kind for kind in kinds if kind.startswith(word)] or nearest(word, kinds)
            yield f"{source}: {written(name)} is no GPU kind{did_you_mean(near)}"
        number = isinstance(price, int | float) and not isinstance(price, bool)
        if not (number and 0 < price < math.inf):
            yield f"{source}: {written(name)} = {written(price)}: write a number above 0."
