"""GPU kinds and software stacks, as tables of facts with their sources; kinds as a user names them.

hardware.toml  rates, memory and links of each GPU kind, and the shares of them that are reached
kernels.toml   rates of attention kernels that others measured
stacks.toml    time that the software around it adds, and how it keeps things in memory
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from meshtune.errors import Table, UserError, did_you_mean, expanded, nearest, written
from meshtune.precision import PRECISIONS
from meshtune.units import GIB, TERA, Number
from meshtune.yaml_tree import read_toml

OTHER_CHIP_WORDS = {"MIG", "Laptop", "D"}  # a driver's name with one of these isn't a GPU of the catalogue
GIGA = 10**9
PCIE_4 = 31  # GB/s of a slot, for a user's kind that says nothing of its link to the host
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
    architecture: str  # kernels.toml has measured attention kernels by it
    bf16: float
    fp8: float | None
    tf32: float | None
    fp32: float
    memory: float  # bytes, as torch reports them
    bandwidth: float  # of the memory, bytes/s
    link: float  # to the other GPUs of its node, bytes/s in one direction
    link_kind: str
    host_link: float  # to its machine's memory, bytes/s in one direction
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
        numbers = {
            key: float(value) for key, value in table.items() if not isinstance(value, str | list | dict)
        }
        constants[name] = base | numbers
    return constants


@cache
def attention_kernels(stack: str) -> list[str]:
    """Attention kernels (kernels.toml) of a stack of stacks.toml: the newest first."""
    table = _tables("stacks.toml")[stack]
    return table["attention_kernels"] if "attention_kernels" in table else attention_kernels(table["like"])


def attention_kernel(stack: str, gpu: Gpu, flash: int | None = 4, heads: Sequence[Number] = ()) -> str:
    """Name of the newest attention kernel of a stack that runs heads of these sizes on a GPU kind.

    flash: the newest version of FlashAttention that can run; None: torch's, which stands for other kernels.
    """
    for name in (names := attention_kernels(stack)):
        table = _tables("kernels.toml")[name].get(gpu.architecture)
        low, high = (table or {}).get("refused", (0, 0))
        lacking = any(np.any((low <= size) & (size <= high)) for size in heads)
        if table and name <= f"flash-{flash or 2}" and not lacking:  # cuDNN's with any `flash`
            return name
    return names[-1]


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


@cache
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
        host_link=_host_link(table, others) * GIGA,
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


def _host_link(table: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> float:
    """GB/s to the host: the table's; else a PCIe slot's; else that of the kind in `efficiency_as`."""
    if "host_link" in table or table["link_kind"] == "pcie":
        return table.get("host_link", table["link"])
    return _host_link(others[table["efficiency_as"]], others) if "efficiency_as" in table else PCIE_4


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


# Attention kernels #


STANDS_FOR = {  # architecture -> the one whose kernels stand for its own where these have no table
    "ada": "ampere", "blackwell": "hopper", "blackwell-rtx": "ada", "cdna3": "hopper", "volta": "ampere",
    "cpu": "ampere", "ampere": "hopper", "hopper": "blackwell",
}  # fmt: skip


def kernel_on(name: str, gpu: Gpu) -> dict[str, float]:
    """Attention rates of a kernel of kernels.toml on a GPU kind, as fields of Machine.

    Those measured on another kind are scaled by the ratio of the fastest matmuls of both kinds. If a probe
    measured a kernel on this kind, its rates are taken for every kernel.
    """
    table, architecture = gpu.attention_kernel, gpu.architecture
    unit = gpu.matmul_max
    if table is None:
        kernels = _tables("kernels.toml")
        while (table := kernels[name].get(architecture)) is None:
            architecture = STANDS_FOR[architecture]
        table = kernels[table["like"]][architecture] if "like" in table else table
        unit = TERA * gpu.matmul_max / catalogue()[table["on"]].matmul_max
    rates = zip((64, 128, 256), table["forward"], strict=True)
    fields = {f"attention_{size}": rate * unit for size, rate in rates}
    return fields | {"attention_keys": table["keys"], "attention_backward": table["backward"]}


# Kinds as a user names and describes them #

# cluster.gpu       h100-sxm, H100 SXM, or a driver's name such as NVIDIA H100 80GB HBM3
# cluster.hardware  a TOML file with more kinds, in hardware.toml's form; or one that `meshtune probe` wrote,
#                   with one kind of that form in [kind], whose name is the `gpu` of its [cluster]


WITHOUT_BF16 = {"p100", "t4", "v100"}  # words of GPUs that are too old for the rates of hardware.toml
NOT_RUN_ON = {  # maker -> words in the names of its accelerators
    "Intel's": {"intel", "pvc", "max1550", "max1100", "gaudi", "gaudi2", "gaudi3", "hpu", "xpu"},
    "Huawei's Ascend": {"ascend", "npu", "910a", "910b", "910c"},
    "Google's TPUs": {"tpu"},
    "AWS's Trainium": {"trainium", "trn1", "trn2"},
}
ARCHITECTURES = tuple(STANDS_FOR)


class Key(NamedTuple):
    """A key of a kind's table, as in hardware.toml and docs/clusters.md."""

    meaning: str
    form: str = "number"  # above 0; or count, text, words, table, or choice, of `choices`
    needed: bool = True
    choices: tuple[str, ...] = ()
    peak: str = ""  # key of the peak that this rate is below


KEYS = {
    "bf16": Key("dense TFLOP/s in bf16"),
    "fp32": Key("TFLOP/s in fp32"),
    "memory_gib": Key("memory in GiB, as torch reports it"),
    "bandwidth": Key("GB/s of its memory"),
    "link": Key("GB/s to the other GPUs of its machine, one direction"),
    "network": Key("GB/s per GPU to other machines, one direction"),
    "host_link": Key("GB/s to its machine's memory, one direction, if not one PCIe slot", needed=False),
    "fp8": Key("dense TFLOP/s in fp8", needed=False),
    "tf32": Key("dense TFLOP/s in TensorFloat-32", needed=False),
    "matmul_max": Key("TFLOP/s of the fastest bf16 matmul that was measured", needed=False, peak="bf16"),
    "matmul_max_fp8": Key("TFLOP/s of the fastest fp8 matmul that was measured", needed=False, peak="fp8"),
    "node": Key("GPUs of a machine", "count"),
    "multiprocessors": Key("streaming multiprocessors", "count"),
    "words": Key('words in the name that the driver reports, such as ["H100"]', "words"),
    "link_kind": Key("nvlink, pcie or xgmi", "choice", choices=("nvlink", "pcie", "xgmi")),
    "source": Key("where the numbers are from, as text", "text"),
    "architecture": Key(
        f"that of its attention kernels, {', '.join(ARCHITECTURES[:-1])} or {ARCHITECTURES[-1]}",
        "choice", needed=False, choices=ARCHITECTURES,
    ),
    "efficiency_as": Key(
        "the kind whose measured efficiencies are used", "choice", needed=False, choices=tuple(catalogue())
    ),
    "efficiency": Key("a table of measured efficiencies", "table", needed=False),
    "attention_kernel": Key(
        "a table of forward (shares of matmul_max, heads of 64, 128, 256), keys, backward", "table",
        needed=False,
    ),
    "shared": Key(
        "tables of efficiencies with `ranks`, the number of ranks at work on the machine", "table",
        needed=False,
    ),
}  # fmt: skip
FORMS = {"number": "a number above 0, ", "count": "a whole number from 1 on, "}  # before the meaning
EFFICIENCIES = tuple(catalogue()["a100-80"].efficiency)  # all of them
# the software's, where a probe or runs (`meshtune calibrate`) measured them here
BY_PROBE = (
    "launch", "launch_blocking", "link_latency", "contention",
    "update_memory", "host_micro_batch", "host_step",
)  # fmt: skip


def kind_named(name: str, kinds: Mapping[str, Gpu], setting: str = "cluster.gpu") -> Gpu:
    """The kind that a user or a driver calls so; case, spaces and underscores do not count.

    setting: what names it. Raises UserError, with the kinds that may be meant, for a name that stands for
    none or for several.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    if kind := kinds.get(name) or kinds.get(plain):
        return kind
    if " " in name.strip() and (kind := named(name, kinds)):
        return kind
    parts = set(re.split(r"[\s_-]+", name.strip().lower()))
    if parts & WITHOUT_BF16:
        raise UserError(
            f"{setting} = {name} is not in the catalogue: it has no bf16 matrix units. Describe it "
            "in a file named by cluster.hardware, and plan with train.precision=fp32; "
            "docs/clusters.md has the table of a V100."
        )
    if others := [maker for maker, words in NOT_RUN_ON.items() if parts & words]:
        raise UserError(
            f"{setting} = {name}: meshtune runs on NVIDIA's GPUs, on AMD's with ROCm and on processors, not "
            f"on {others[0]}. To compare it on paper, describe it in a file named by cluster.hardware."
        )
    near = [kind for kind in kinds if kind.startswith(plain)]
    near = near or nearest(plain, kinds) or _with_most_parts(parts, kinds)
    raise UserError(
        f"{setting} = {name} is not a known kind{did_you_mean(near)} Kinds: "
        f"{', '.join(kinds)}. Others can be described in a file named by cluster.hardware."
    )


def _with_most_parts(parts: set[str], kinds: Mapping[str, Gpu]) -> list[str]:
    """Kinds that share most parts of their names (rtx, 4090) with `parts`; [] if none shares any."""
    shared = {kind: len(parts & set(kind.split("-"))) for kind in kinds}
    most = max(shared.values())
    return [kind for kind, number in shared.items() if most and number == most]


def kinds_of(hardware: str | None) -> dict[str, Gpu]:
    """The catalogue, and the kinds of the file named by cluster.hardware; None: no such file.

    Raises UserError for a file that can't be read, and with every problem of all its tables.
    """
    if hardware is None:
        return dict(catalogue())
    file = expanded(hardware)
    tables = read_toml(file, "cluster.hardware")
    title = "[{}]"
    if "kind" in tables and isinstance(cluster := tables.get("cluster"), Mapping):
        title, tables = "[kind]", {str(cluster.get("gpu")): tables["kind"]}
    problems = [
        f"cluster.hardware = {file}: {title.format(name)} {problem}"
        for name, table in tables.items()
        for problem in table_problems(table)
    ]
    if problems:
        raise UserError(problems)
    return catalogue() | {name: gpu_of(name, table) for name, table in tables.items()}


def cluster_table(hardware: str) -> dict[str, Any]:
    """The tables of a file by `meshtune probe`. Raises UserError for any other file, and as `kinds_of`."""
    tables = read_toml(expanded(hardware), "cluster.hardware")
    if "kind" not in tables or not isinstance(tables.get("cluster"), Mapping):
        raise UserError(
            f"{hardware} has no [cluster] and [kind]: name the file that meshtune probe wrote of the machine."
        )
    kinds_of(hardware)
    return tables


def table_problems(table: Any) -> Iterator[str]:
    """Yield everything that is wrong with a kind's table, as sentences that follow its name."""
    if not isinstance(table, Mapping):
        yield f"= {written(table)}: write a table of a GPU's facts."
        return
    missing = [f"{name} ({key.meaning})" for name, key in KEYS.items() if key.needed and name not in table]
    if missing:
        yield f"lacks {', '.join(missing)}."
    meant = {name: f"{name} ({key.meaning})" for name, key in KEYS.items()}
    if not {"efficiency", "efficiency_as"} & table.keys():
        yield f"lacks {meant['efficiency_as']} or {meant['efficiency']}."
    if not {"architecture", "efficiency_as"} & table.keys():
        yield f"lacks {meant['architecture']}, which no efficiency_as tells."
    for name, value in table.items():
        if (key := KEYS.get(name)) is None:
            near = [known for known in KEYS if known.startswith(name)] or nearest(name, KEYS)
            yield f"has {name}, which is not a fact of a GPU{did_you_mean(near)}"
        elif name == "efficiency":
            yield from _efficiency_problems(value, whole="efficiency_as" not in table)
        elif name == "shared":
            yield from _shared_problems(value)
        elif name == "attention_kernel":
            yield from _kernel_problems(value)
        elif not _fits(key, value):
            shown = json.dumps(value) if isinstance(value, str) else written(value)
            near = nearest(value, key.choices) if isinstance(value, str) else []
            every = name == "efficiency_as" and not near  # a catalogue too long for its meaning
            hint = f": {', '.join(key.choices)}." if every else did_you_mean(near)
            yield f"{name} = {shown}: write {FORMS.get(key.form, '')}{key.meaning}{hint}"
        elif key.peak and _is_positive(peak := table.get(key.peak)) and value > peak:
            yield f"{name} = {written(value)}: no matmul is faster than {key.peak} = {written(peak)}."


def _fits(key: Key, value: Any) -> bool:
    match key.form:
        case "words":
            return isinstance(value, list) and value != [] and all(isinstance(word, str) for word in value)
        case "text":
            return isinstance(value, str)
        case "choice":
            return value in key.choices
        case _:
            return _is_positive(value) and (key.form == "number" or isinstance(value, int))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _efficiency_problems(efficiency: Any, *, whole: bool) -> Iterator[str]:
    """Yield what is wrong with a table of efficiencies. whole: True if no other kind's stand behind it."""
    if not isinstance(efficiency, Mapping):
        yield f"efficiency = {written(efficiency)}: write {KEYS['efficiency'].meaning}."
        return
    if whole and (missing := [key for key in EFFICIENCIES if key not in efficiency]):
        yield (
            f"efficiency lacks {', '.join(missing)}; add efficiency_as ({KEYS['efficiency_as'].meaning}) for "
            "what nobody measured."
        )
    for key, value in efficiency.items():
        if key not in {*EFFICIENCIES, *BY_PROBE, "source"}:
            yield f"efficiency has {key}, which is none{did_you_mean(nearest(key, EFFICIENCIES))}"
        elif key != "source":
            yield from out_of_range(key, value)


def _shared_problems(shared: Any) -> Iterator[str]:
    """Yield what is wrong with the efficiencies of several ranks at work."""
    if not isinstance(shared, list) or not all(isinstance(table, Mapping) for table in shared):
        yield f"shared = {written(shared)}: write {KEYS['shared'].meaning}."
        return
    for table in shared:
        ranks = table.get("ranks")
        if not (_is_positive(ranks) and isinstance(ranks, int)):
            yield f"shared has ranks = {written(ranks)}: write a whole number from 1 on."
        efficiency = {key: value for key, value in table.items() if key != "ranks"}
        yield from (f"shared: {problem}" for problem in _efficiency_problems(efficiency, whole=False))


def _kernel_problems(kernel: Any) -> Iterator[str]:
    """Yield what is wrong with an attention kernel that was measured."""
    names = {"forward", "keys", "backward"}
    if not isinstance(kernel, Mapping) or kernel.keys() != names:
        yield f"attention_kernel = {written(kernel)}: write {KEYS['attention_kernel'].meaning}."
        return
    forward = kernel["forward"]
    if not isinstance(forward, list) or len(forward) != 3 or not all(map(_is_positive, forward)):
        yield f"attention_kernel.forward = {written(forward)}: write three numbers above 0."
    for name in ("keys", "backward"):
        if not _is_positive(kernel[name]):
            yield f"attention_kernel.{name} = {written(kernel[name])}: write a number above 0."


def out_of_range(efficiency: str, value: Any) -> Iterator[str]:
    """Yield a clause if `value` can't be an efficiency of this name: one of SHARES is at most 1."""
    if not _is_positive(value):
        yield f"efficiency.{efficiency} = {written(value)}: write a number above 0."
    elif efficiency in SHARES and value > 1:
        yield f"efficiency.{efficiency} = {written(value)}: it is a share of a peak; write at most 1."
