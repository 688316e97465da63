"""GPUs, software stacks and clusters, as facts with sources and constants with who measured them.

hardware.toml  what a GPU can do, and what share of it is reached
stacks.toml    what the software around it adds, and how it accounts for memory
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from meshtune.units import GIB, TERA

OTHERS = {"MIG", "Laptop", "D"}  # a slice of a GPU, and slower chips that share a name
GIGA = 10**9
RATES = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "bf16-pure": "bf16"}  # precision -> rate of a Gpu


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Rates in FLOP/s, None where it has none; bandwidths in bytes per second.

    memory: bytes that a program can have, by what torch reports. link: to the other GPUs of its node, per
    direction. network: its part of the node's, per direction. efficiency: the fields of seconds.Machine that
    are a GPU's, by name; where they were not measured on this kind, those of the kind named in `as_of`.
    """

    name: str
    words: tuple[str, ...]
    bf16: float
    fp8: float | None
    tf32: float | None
    fp32: float
    memory: float
    bandwidth: float
    link: float
    link_kind: str
    node: int
    network: float
    multiprocessors: int
    source: str
    efficiency: Mapping[str, float]
    as_of: str | None = None


@cache
def catalogue() -> dict[str, Gpu]:
    """All GPUs of hardware.toml, by name."""
    tables = _tables("hardware.toml")
    return {name: gpu_of(name, table, tables) for name, table in tables.items()}


@cache
def stacks() -> dict[str, dict[str, float]]:
    """The constants of each software stack, by name; `like` takes those of another where it has no own."""
    tables = _tables("stacks.toml")
    found: dict[str, dict[str, float]] = {}
    for name, table in tables.items():
        base = found[table["like"]] if "like" in table else {}
        found[name] = base | {key: float(v) for key, v in table.items() if not isinstance(v, str | dict)}
    return found


def memory_of(stack: str) -> dict[str, Any]:
    """How a stack accounts for memory: its `memory` table over that of the one it is `like` (in this table,
    else in all, "": none), and so each of the tables in it.
    """
    table = _tables("stacks.toml")[stack]
    own = dict(table.get("memory", {}))
    like = own.pop("like", table.get("like", ""))
    found = memory_of(like) if like else {}
    for key, value in own.items():
        found[key] = found.get(key, {}) | value if isinstance(value, dict) else value
    return found


def named(device_name: str) -> Gpu | None:
    """The GPU that a driver calls so; None for an unknown one, a slice of one or a laptop's."""
    words = set(device_name.replace("-", " ").split())
    if words & OTHERS:
        return None
    fitting = [gpu for gpu in catalogue().values() if words.issuperset(gpu.words)]
    return max(fitting, key=lambda gpu: len(gpu.words), default=None)


def datasheet_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of a device as its driver names it; None when unknown, as for a slice of a GPU.

    precision: fp32, tf32 (fp32 with TensorFloat-32 matmuls allowed), bf16, bf16-pure; others have no figure.
    """
    gpu = named(device_name)
    return getattr(gpu, RATES[precision]) if gpu is not None and precision in RATES else None


def _tables(file: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("meshtune.plan").joinpath(file).read_text("utf-8"))


def gpu_of(name: str, table: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]] | None = None) -> Gpu:
    """A kind from a table in hardware.toml's form. Raises KeyError for a field that is missing, ValueError
    for efficiencies that are.

    tables: those that its `efficiency_as` may name; None: hardware.toml's.
    """
    if not isinstance(table, Mapping):
        raise ValueError(f"{name} is no table of a GPU's facts")
    as_of = table.get("efficiency_as")
    others = _tables("hardware.toml") if tables is None else tables
    if as_of and as_of not in others:
        raise ValueError(f"its efficiency_as names {as_of}, which is no kind")
    efficiency = dict(others[as_of]["efficiency"]) if as_of else dict(table["efficiency"])
    efficiency |= table.get("efficiency", {})  # its own, where it has some of them
    if missing := sorted(_tables("hardware.toml")["a100-80"]["efficiency"].keys() - efficiency.keys()):
        raise ValueError(f"its efficiency lacks {', '.join(missing)}")
    return Gpu(
        name=name,
        words=tuple(table["words"]),
        bf16=table["bf16"] * TERA,
        fp8=table["fp8"] * TERA if "fp8" in table else None,
        tf32=table["tf32"] * TERA if "tf32" in table else None,
        fp32=table["fp32"] * TERA,
        memory=table["memory_gib"] * GIB,
        bandwidth=table["bandwidth"] * GIGA,
        link=table["link"] * GIGA,
        link_kind=table["link_kind"],
        node=table["node"],
        network=table["network"] * GIGA,
        multiprocessors=table["multiprocessors"],
        source=table["source"],
        efficiency={key: value for key, value in efficiency.items() if not isinstance(value, str)},
        as_of=as_of,
    )
