"""GPU kinds and software stacks, as tables of facts with their sources.

hardware.toml  rates, memory and links of each GPU kind, and the shares of them that are reached
stacks.toml    time that the software around it adds, and how it keeps things in memory
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from meshtune.errors import Table
from meshtune.precision import PRECISIONS
from meshtune.units import GIB, TERA

OTHER_CHIP_WORDS = {"MIG", "Laptop", "D"}  # a driver's name with one of these isn't a GPU of the catalogue
GIGA = 10**9
SHARES = {"clock", "matmul", "attention", "memory", "link_share"}  # efficiencies that are parts of a peak
MEASURED_BY_RUNS = {"matmul", "clock"}  # a kind has them of its own only if runs on it were measured
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
    architecture: str  # of which attention kernels are measured (kernels.toml)
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
    matmul_max: float  # of the fastest bf16 matmul; not measured: as large a share of `bf16` as of `as_of`'s
    matmul_max_fp8: float  # the same of 8-bit floats; without such units that of bf16
    measured: bool = True  # `matmul_max` was measured on this kind
    as_of: str | None = None  # kind whose efficiencies stand for those that this kind has not measured
    attention_kernel: Mapping[str, Any] | None = None  # measured on this machine; None: as in kernels.toml
    borrowed: tuple[str, ...] = ()  # its efficiencies that are those of `as_of`
    # ranks at work on one machine -> efficiencies of each, where they are other than those of a single rank
    shared: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @property
    def processor(self) -> bool:
        """True for a CPU, whose cores and memory all ranks of a machine share."""
        return self.architecture == "cpu"

    def lacking_among(self, ranks: int) -> tuple[str, ...]:
        """Efficiencies that were measured with other numbers of ranks than this one, if any were."""
        measured = {name for table in self.shared.values() for name in table}
        here = self.efficiency if ranks == 1 else self.shared.get(ranks, {})
        return tuple(sorted(measured - here.keys()))

    def efficiency_among(self, ranks: int) -> dict[str, float]:
        """Efficiencies of each of `ranks` ranks that work on one machine at once.

        Between measured numbers of ranks, and beyond the largest, what all ranks reach together follows a
        straight line for SHARES; latencies and launches do so themselves.
        """
        among = dict(self.efficiency)
        for name in {name for table in self.shared.values() for name in table}:
            points = {1: self.efficiency[name]} if name in self.efficiency else {}
            points |= {count: table[name] for count, table in sorted(self.shared.items()) if name in table}
            together = [value * (count if name in SHARES else 1) for count, value in points.items()]
            value = float(np.interp(ranks, list(points), together))
            among[name] = value / ranks if name in SHARES else value
        return among


@cache
def catalogue() -> dict[str, Gpu]:
    """All GPU kinds of hardware.toml, by name."""
    tables = _tables("hardware.toml")
    return {name: gpu_of(name, table, tables) for name, table in tables.items()}


def kind_table(name: str) -> dict[str, Any]:
    """Table of a kind in hardware.toml. name: of the catalogue."""
    return _tables("hardware.toml")[name]


@cache
def stacks() -> dict[str, dict[str, float]]:
    """Constants of each software stack, by name. A table with `like` inherits from that one."""
    constants: dict[str, dict[str, float]] = {}
    for name, table in _tables("stacks.toml").items():
        base = constants[table["like"]] if "like" in table else {}
        numbers = {key: float(value) for key, value in table.items() if not isinstance(value, str | dict)}
        constants[name] = base | numbers
    return constants


@cache
def attention_kernel(stack: str) -> str:
    """Name of the attention kernel (kernels.toml) that a stack of stacks.toml runs."""
    table = _tables("stacks.toml")[stack]
    return table["attention_kernel"] if "attention_kernel" in table else attention_kernel(table["like"])


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
    efficiency = _efficiency(table, others)
    return Gpu(
        name=name,
        words=tuple(table["words"]),
        architecture=_inherited(table, "architecture", others),
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
        matmul_max=_matmul_max(table, "bf16", others),
        matmul_max_fp8=_matmul_max(table, "fp8" if "fp8" in table else "bf16", others),
        measured=any(key in table for key in ("matmul_max", "matmul_max_fp8"))
        or not MEASURED_BY_RUNS.isdisjoint(table.get("efficiency", {})),
        as_of=as_of,
        attention_kernel=table.get("attention_kernel"),
        borrowed=tuple(name for name in efficiency if name not in {"source", *table.get("efficiency", {})}),
        shared={
            one["ranks"]: {key: value for key, value in one.items() if key != "ranks"}
            for one in table.get("shared", ())
        },
    )


def _inherited(table: Mapping[str, Any], key: str, others: Mapping[str, Mapping[str, Any]]) -> Any:
    """The table's value for `key`, else that of the kind in its `efficiency_as`."""
    return table[key] if key in table else _inherited(others[table["efficiency_as"]], key, others)


def _efficiency(table: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The table's efficiencies, and those that it lacks of the kind in its `efficiency_as`."""
    other = others.get(table.get("efficiency_as", ""))
    return (_efficiency(other, others) if other else {}) | dict(table.get("efficiency", {}))


def _matmul_max(table: Mapping[str, Any], precision: str, others: Mapping[str, Mapping[str, Any]]) -> float:
    """FLOP/s of the fastest matmul in bf16 or fp8: measured on this kind, else its peak times the share of
    its own that the kind in `efficiency_as` reaches; without that, its peak.
    """
    key = {"bf16": "matmul_max", "fp8": "matmul_max_fp8"}[precision]
    if key in table:
        return table[key] * TERA
    other = others.get(table.get("efficiency_as", ""), {})
    share = _matmul_max(other, precision, others) / (other[precision] * TERA) if precision in other else 1.0
    return table[precision] * TERA * share
