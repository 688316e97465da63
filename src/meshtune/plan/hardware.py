"""GPU kinds and software stacks, as tables of facts with their sources.

hardware.toml  rates, memory and links of each GPU kind, and the shares of them that are reached
stacks.toml    time that the software around it adds, and how it keeps things in memory
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from meshtune.errors import Table
from meshtune.precision import PRECISIONS
from meshtune.units import GIB, TERA

OTHER_CHIP_WORDS = {"MIG", "Laptop", "D"}  # a driver's name with one of these is no GPU of the catalogue
GIGA = 10**9
RATES: Table[str | None] = (
    Table(  # precision -> field of a Gpu with its peak; None where data sheets have none
        "precision",
        {name: dtypes.rate if dtypes.rate_share == 1 else None for name, dtypes in PRECISIONS.items()}
        | {"tf32": "tf32"},
    )
)


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Rates are dense peaks in FLOP/s, None where the kind has no such units."""

    name: str
    words: tuple[str, ...]  # all of them are in the driver's name of it
    bf16: float
    fp8: float | None
    tf32: float | None
    fp32: float
    memory: float  # bytes, as torch reports them
    bandwidth: float  # of the memory, bytes/s
    link: float  # to the other GPUs of its node, bytes/s in one direction
    link_kind: str
    node: int  # GPUs in its usual node
    network: float  # its part of the node's, bytes/s in one direction
    multiprocessors: int
    source: str
    efficiency: Mapping[str, float]  # fields of machine.Machine that belong to a GPU kind, by name
    measured: bool = True  # a rate of matmuls was measured on this kind; False: that of `as_of` stands for it
    as_of: str | None = None  # kind whose efficiencies stand for those that this kind has not measured


@cache
def catalogue() -> dict[str, Gpu]:
    """All GPU kinds of hardware.toml, by name."""
    tables = _tables("hardware.toml")
    return {name: gpu_of(name, table, tables) for name, table in tables.items()}


@cache
def stacks() -> dict[str, dict[str, float]]:
    """Constants of each software stack, by name. A table with `like` inherits from that one."""
    constants: dict[str, dict[str, float]] = {}
    for name, table in _tables("stacks.toml").items():
        base = constants[table["like"]] if "like" in table else {}
        numbers = {key: float(value) for key, value in table.items() if not isinstance(value, str | dict)}
        constants[name] = base | numbers
    return constants


def memory_of(stack: str) -> dict[str, Any]:
    """The `memory` table of a stack: fields of accounting.Accounting, and tables of them by precision.

    It inherits, table by table, from the stack that its own `like` names, else the stack's `like`; "": none.
    """
    table = _tables("stacks.toml")[stack]
    overrides = dict(table.get("memory", {}))
    like = overrides.pop("like", table.get("like", ""))
    memory = memory_of(like) if like else {}
    for key, value in overrides.items():
        memory[key] = memory.get(key, {}) | value if isinstance(value, dict) else value
    return memory


def named(device_name: str, kinds: Mapping[str, Gpu] | None = None) -> Gpu | None:
    """The GPU kind with this driver's name; None for an unknown one, a slice of one or a laptop's.

    kinds: by name; None: the catalogue.
    """
    words = set(device_name.replace("-", " ").split())
    if words & OTHER_CHIP_WORDS:
        return None
    fitting = [gpu for gpu in (kinds or catalogue()).values() if words.issuperset(gpu.words)]
    return max(fitting, key=lambda gpu: len(gpu.words), default=None)


def datasheet_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of a device as its driver names it; None when unknown, as for a slice of a GPU.

    precision: fp32, tf32 (fp32 with TensorFloat-32 matmuls allowed), bf16, bf16-pure; fp64: None. Raises
    UserError for any other.
    """
    gpu, rate = named(device_name), RATES[precision]
    return getattr(gpu, rate) if gpu is not None and rate is not None else None


def _tables(file: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("meshtune.plan").joinpath(file).read_text("utf-8"))


def gpu_of(name: str, table: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]] | None = None) -> Gpu:
    """Return a GPU kind from a table in hardware.toml's form and units, which has no problems.

    Its own efficiencies go before those of the kind that its `efficiency_as` names. tables: those that
    `efficiency_as` may name; None: hardware.toml's.
    """
    as_of = table.get("efficiency_as")
    others = _tables("hardware.toml") if tables is None else tables
    efficiency = (others[as_of]["efficiency"] if as_of else {}) | table.get("efficiency", {})
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
        measured="matmul" in table.get("efficiency", {}),
        as_of=as_of,
    )
