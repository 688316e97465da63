"""Constants of a machine from a probe's figures: a kind in hardware.toml's form (plan/hardware.py).

    matmul, depth, tiles    least squares of the planner's own formula (plan/seconds/gpu.py) over all shapes
    attention_kernel        the same of its formula of attention, over lengths and head sizes
    memory                  copies and sums of large tensors
    link, link_latency      least squares of the planner's rings and trees, for each number of ranks
    shared                  the same with 2, 4 … ranks at work, where they share cores

Figures that were refused are left out; a constant that has none left is another kind's (efficiency_as).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median
from typing import Any

import numpy as np

from meshtune.errors import UserError
from meshtune.plan.hardware import EFFICIENCIES, GIGA, Gpu, catalogue
from meshtune.plan.machine import Machine
from meshtune.plan.seconds.collectives import ring_collectives, tree_all_reduce
from meshtune.plan.seconds.gpu import matmul
from meshtune.plan.work import attended
from meshtune.units import GIB, TERA, counted, human, spread

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
SHARES = np.geomspace(0.1, 1.0, 70)  # that a fit tries, as do the next ones
DEPTHS = np.geomspace(1.0, 1000.0, 31)
TILES = np.geomspace(1e-3, 1.0, 11)
KEYS = np.geomspace(1.0, 2000.0, 100)
HEADS = (64, 128, 256)


@dataclass(frozen=True)
class Device:
    """The device that was measured, one of equal ones."""

    name: str  # as its driver or the system names it
    processor: bool
    memory: float  # bytes; of a processor the machine's
    multiprocessors: int  # a processor's cores
    ranks: int  # the most that were at work at once
    dtype: str  # of most figures
    like: Gpu  # the catalogue's kind for what no probe measures

    @property
    def known(self) -> bool:
        """True if `like` is this device's own kind."""
        return not self.processor and set(self.like.words) <= set(self.name.replace("-", " ").split())


@dataclass(frozen=True)
class Fitted:
    """A kind that was measured."""

    table: dict[str, Any]  # in hardware.toml's form
    off: dict[str, float]  # mean distance of figures from the planner's formula, as a share, by kind
    borrowed: tuple[str, ...]  # constants that no figure was left for


def kind_of(figures: Sequence[Figure], device: Device) -> Fitted:
    """Fit the constants of a device.

    Raises UserError if no matmul was measured well enough to say anything.
    """
    kept = [one for one in figures if not one.refused]
    alone = [one for one in kept if one.ranks == 1]
    peaks = _peaks(figures, alone, device)
    fastest = peaks[device.dtype]
    machine = replace(
        Machine.of(device.like, "meshtune"), matmul_max=fastest, element=float(DTYPE_BYTES[device.dtype]),
        multiprocessors=device.multiprocessors, clock=1.0, misaligned=1.0, unloaded=1.0,
    )  # fmt: skip
    off: dict[str, float] = {}
    bandwidth, memory = _memory(alone, device)
    if memory:
        machine = replace(machine, bandwidth=bandwidth, memory=memory["memory"])
    matmuls = _matmuls(alone, device.dtype, machine, off)
    efficiency = {"clock": 1.0} | matmuls | _alignment(alone, device.dtype, machine, matmuls) | memory
    kernel = _attention(alone, fastest, off)
    efficiency |= {"attention": 1.0} if kernel else {}
    efficiency |= _host(kept, 1, device)
    links = _links(kept, machine, off)
    link = device.like.link if device.known or not links else max(one[0] for one in links.values())
    if links:
        efficiency |= _link(min(links), links, link)
    shared = [
        _rounded(_shared(ranks, kept, efficiency, device) | _link(ranks, links, link))
        for ranks in counts(kept)
    ]
    borrowed = tuple(name for name in EFFICIENCIES if name not in efficiency)
    table = {
        **_facts(device, peaks, bandwidth, link),
        **({"efficiency_as": device.like.as_of or device.like.name} if borrowed else {}),
        **({"attention_kernel": kernel} if kernel else {}),
        "efficiency": {name: significant(value) for name, value in efficiency.items()},
        **({"shared": shared} if shared else {}),
    }
    lost = [] if kernel else ["attention_kernel"]
    lost += [] if memory else ["bandwidth"]
    lost += [] if "launch" in efficiency else ["launch"]
    every = {name for one in shared for name in one}
    lost += [f"{name} of {one['ranks']} ranks" for one in shared for name in sorted(every - one.keys())]
    return Fitted(table, off, (*borrowed, *lost))


def counts(figures: Sequence[Figure]) -> list[int]:
    """Numbers of ranks above 1 that were at work at once."""
    return sorted({one.ranks for one in figures} - {1})


def _facts(device: Device, peaks: Mapping[str, float], bandwidth: float, link: float) -> dict[str, Any]:
    """Rates, memory and links of the kind; peaks of a data sheet where the catalogue has this device."""
    like = device.like
    bf16 = like.bf16 if device.known else peaks["bf16"]
    facts: dict[str, Any] = {
        "words": list(like.words) if device.known or device.processor else device.name.split(),
        "architecture": like.architecture,
        "bf16": significant(bf16 / TERA),
        "fp32": significant((like.fp32 if device.known else peaks["fp32"]) / TERA),
        "matmul_max": significant(min(bf16, peaks["bf16"]) / TERA),
        "memory_gib": significant(device.memory / GIB, 5),
        "bandwidth": significant(bandwidth / GIGA),
        "link": significant(link / GIGA),
        "link_kind": like.link_kind if device.known else "pcie",
        "node": device.ranks,
        "network": significant(like.network / GIGA),
        "multiprocessors": device.multiprocessors,
    }
    if device.known:
        facts |= {name: rate / TERA for name in ("fp8", "tf32") if (rate := getattr(like, name))}
        facts["host_link"] = significant(like.host_link / GIGA)
    return facts


# a single rank #


def _rate(one: Figure) -> float:
    return 2 * one.what["tokens"] * one.what["rows"] * one.what["cols"] / one.seconds


def _peaks(figures: Sequence[Figure], alone: Sequence[Figure], device: Device) -> dict[str, float]:
    """FLOP/s of the fastest matmul of each dtype; one that has no figure left takes the other's."""
    rates: dict[str, float] = {}
    for one in alone:
        if one.kind == "matmul":
            rates[one.what["dtype"]] = max(_rate(one), rates.get(one.what["dtype"], 0.0))
    if device.dtype not in rates:
        spreads = [one.spread for one in figures if one.kind == "matmul"]
        raise UserError(
            f"{counted(len(spreads), 'matmul')} were timed, and repeats of those of {device.dtype} differ by "
            f"more than {REFUSED:.0%} (the least of all by {min(spreads, default=0):.0%}): the machine does "
            "other work. Stop that, and run the probe again."
        )
    return {dtype: rates.get(dtype, rates[device.dtype]) for dtype in DTYPE_BYTES}


def _alignment(
    alone: Sequence[Figure], dtype: str, machine: Machine, fitted: Mapping[str, float]
) -> dict[str, float]:
    """Slowdown of matmuls whose rows aren't multiples of 64 elements, and of 8: their seconds over those of
    the formula.

    fitted: of aligned shapes; {} for none.
    """
    found = {}
    for one in alone if fitted else ():
        if one.kind == "matmul" and one.what["dtype"] == dtype and (odd := one.what["cols"] % 64):
            seconds = float(matmul(replace(machine, stack_matmul=1.0, **fitted), *shape_of(one)))
            found["unloaded" if odd % 8 else "misaligned"] = max(1.0, one.seconds / seconds)
    return found


def _matmuls(
    alone: Sequence[Figure], dtype: str, machine: Machine, off: dict[str, float]
) -> dict[str, float]:
    """`matmul`, `depth` and `tiles` of the planner's formula, from all aligned shapes of a dtype."""
    points = [one for one in alone if one.kind == "matmul" and one.what["dtype"] == dtype]
    points = [one for one in points if one.what["cols"] % 64 == 0]
    if len(points) < 3:
        return {}
    sizes = np.array([shape_of(one) for one in points], dtype=float).T
    share, depth, tiles = np.meshgrid(SHARES, DEPTHS, TILES, indexing="ij")
    tried = replace(
        machine, matmul=share[..., None], depth=depth[..., None], tiles=tiles[..., None], stack_matmul=1.0
    )
    rows, cols, inner = sizes
    errors = np.log(matmul(tried, rows, cols, inner) / [one.seconds for one in points])
    best = np.unravel_index(np.argmin((errors**2).mean(-1)), share.shape)
    off["matmul"] = _distance(errors[best])
    return {"matmul": float(share[best]), "depth": float(depth[best]), "tiles": float(tiles[best])}


def shape_of(one: Figure) -> tuple[int, int, int]:
    """(Rows, columns, inner size) of the matmul of a linear layer's pass."""
    tokens, rows, cols = (one.what[name] for name in ("tokens", "rows", "cols"))
    return {"forward": (tokens, rows, cols), "inputs": (tokens, cols, rows), "weights": (rows, cols, tokens)}[
        one.what["form"]
    ]


def _attention(alone: Sequence[Figure], fastest: float, off: dict[str, float]) -> dict[str, Any] | None:
    """The attention kernel: its forward's rate for heads of 64, 128 and 256 as shares of the fastest
    matmul's; a head size without a figure takes the next smaller one's. None without figures of heads of 64.
    """
    by_head = {head: _passes(alone, head) for head in HEADS}
    forward = {head: passes["forward"] for head, passes in by_head.items() if passes["forward"]}
    ratios = [
        backward.seconds / one.seconds / 2.5
        for passes in by_head.values()
        for length, backward in passes["backward"].items()
        if (one := passes["forward"].get(length))
    ]
    if 64 not in forward or not ratios:
        return None

    def rates(keys: float) -> dict[int, list[float]]:
        """FLOP/s of each figure, if a query costs the time of `keys` more keys."""
        return {
            head: [
                2 * one.what["tokens"] * one.what["width"] / one.seconds
                * (float(attended(length, np.inf)) + keys)
                for length, one in figures.items()
            ]
            for head, figures in forward.items()
        }  # fmt: skip

    def errors(keys: float) -> np.ndarray:
        """Logarithms of each figure's rate over the mean of its head size."""
        return np.concatenate([np.log(each) - np.mean(np.log(each)) for each in rates(keys).values()])

    keys = min(KEYS, key=lambda keys: float((errors(keys) ** 2).sum()))
    off["attention"] = _distance(errors(keys))
    means = {head: geometric_mean(each) for head, each in rates(keys).items()}
    shares, last = [], means[64]
    for head in HEADS:
        last = means.get(head, last)
        shares.append(significant((last or 0.0) / fastest))
    backward = geometric_mean(ratios) or 1.0
    return {"forward": shares, "keys": significant(float(keys)), "backward": significant(backward)}


def _passes(alone: Sequence[Figure], head: int) -> dict[str, dict[int, Figure]]:
    """Attention's figures of a head size, by form and length."""
    found: dict[str, dict[int, Figure]] = {"forward": {}, "backward": {}}
    for one in alone:
        if one.kind == "attention" and one.what["head"] == head:
            found[one.what["form"]][one.what["length"]] = one
    return found


def _large(figures: Sequence[Figure]) -> list[Figure]:
    """Copies and sums of the largest tensors."""
    copies = [one for one in figures if one.kind == "memory"]
    largest = max((one.what["bytes"] for one in copies), default=0)
    return [one for one in copies if one.what["bytes"] == largest]


def _memory(alone: Sequence[Figure], device: Device) -> tuple[float, dict[str, float]]:
    """(Bytes/s of the fastest copy, or of the data sheet; share of it that large tensors reach).

    Without a figure of large tensors: that of the kind that stands for it, and nothing.
    """
    moved = {"copy": 2, "add": 3}  # tensors read and written
    speeds = [
        moved[one.what["form"]] * one.what["bytes"] / one.seconds for one in alone if one.kind == "memory"
    ]
    large = geometric_mean(moved[one.what["form"]] * one.what["bytes"] / one.seconds for one in _large(alone))
    if large is None:
        return device.like.bandwidth, {}
    bandwidth = device.like.bandwidth if device.known else max(speeds)
    return bandwidth, {"memory": min(1.0, large / bandwidth)}


def _host(kept: Sequence[Figure], ranks: int, device: Device) -> dict[str, float]:
    """Seconds in which the host runs or launches a small operation; on a processor nothing runs meanwhile."""
    seconds = [one.seconds for one in kept if one.kind == "host" and one.ranks == ranks]
    if not seconds:
        return {}
    # gloo's threads compute on the cores of the ranks: what runs during a collective takes as much longer
    blocking = {"launch_blocking": 1.0, "contention": 1.0} if device.processor and ranks == 1 else {}
    return {"launch": float(np.mean(seconds)), **blocking}


# several ranks #


def _links(kept: Sequence[Figure], machine: Machine, off: dict[str, float]) -> dict[int, tuple[float, float]]:
    """Ranks -> (bytes/s of a ring past each rank, seconds of a ring's step), by relative least squares."""
    found, errors = {}, []
    for ranks in counts(kept):
        points = [one for one in kept if one.kind == "collective" and one.ranks == ranks]
        points = [one for one in points if one.what["form"] != "send"]
        if len({one.what["bytes"] for one in points}) < 2:
            continue
        bare = replace(machine, link=1.0, link_share=1.0, link_latency=0.0)
        latent = replace(machine, link=np.inf, link_share=1.0, link_latency=1.0)
        measured = np.array([one.seconds for one in points])
        columns = [np.array([_collective(each, one) for one in points]) / measured for each in (bare, latent)]
        per_byte, latency = np.linalg.lstsq(np.stack(columns, 1), np.ones(len(points)), rcond=None)[0]
        if per_byte <= 0 or latency <= 0:  # noise: the largest sizes tell the rate, the smallest the latency
            sizes = np.array([one.what["bytes"] for one in points])
            per_byte = np.median(1 / columns[0][sizes == sizes.max()])
            latency = np.median(1 / columns[1][sizes == sizes.min()])
        found[ranks] = (1 / float(per_byte), float(latency))
        errors.append(np.log(columns[0] * per_byte + columns[1] * latency))
    if errors:
        off["collective"] = _distance(np.concatenate(errors))
    return found


def _collective(machine: Machine, one: Figure) -> float:
    """Seconds that the planner predicts for a collective inside a machine."""
    size, ranks = float(one.what["bytes"]), float(one.ranks)
    formula = tree_all_reduce if one.what["form"] == "all_reduce" else ring_collectives
    return float(formula(machine, size, ranks, ranks))


def _link(ranks: int, links: Mapping[int, tuple[float, float]], link: float) -> dict[str, float]:
    """Efficiencies of the links between this many ranks; {} where none are known."""
    if ranks not in links:
        return {}
    speed, latency = links[ranks]
    return {"link_share": min(1.0, speed / link), "link_latency": latency}


def _shared(
    ranks: int, kept: Sequence[Figure], alone: Mapping[str, float], device: Device
) -> dict[str, float]:
    """Efficiencies of each of several ranks that share a processor: a single rank's over the slowdown of the
    operations that both ran.
    """
    table: dict[str, float] = {"ranks": ranks}
    if not device.processor:
        return table
    for name in ("matmul", "attention", "memory"):
        figures = _large(kept) if name == "memory" else kept
        slower = slowdown(figures, name, ranks)
        if slower is not None and name in alone:
            table[name] = min(1.0, alone[name] / slower)
    return table | _host(kept, ranks, device)


def _rounded(table: Mapping[str, float]) -> dict[str, float]:
    return {name: value if name == "ranks" else significant(value) for name, value in table.items()}


def _distance(errors: np.ndarray) -> float:
    """Mean distance from a formula as a share, from logarithms of ratios."""
    return significant(float(np.expm1(np.abs(errors).mean())), 2)


def like_of(name: str, gpu: Gpu | None) -> Gpu:
    """The catalogue's kind for what no probe measures: the device's own, else a processor, else an A100.

    name: "cpu", or the driver's of a GPU. gpu: the kind of that name, None for an unknown one.
    """
    return catalogue()["cpu"] if name == "cpu" else gpu or catalogue()["a100-80"]


# Figures #


MARKED, REFUSED = 0.10, 0.30  # spread above which a figure is marked, and above which it is left out
SPREAD = "distance of the quartiles of all repeats, as a share of their median"


@dataclass(frozen=True)
class Figure:
    """An operation's seconds on each of the ranks that run it at once, from several repeats."""

    kind: str  # matmul, attention, memory, collective or host
    what: Mapping[str, Any]  # its sizes, dtype and form
    ranks: int  # that run it at once, on one machine
    repeats: Sequence[float]  # seconds of one operation, in each round

    @property
    def seconds(self) -> float:
        """Median of the repeats."""
        return median(self.repeats)

    @property
    def spread(self) -> float:
        """Spread of the repeats."""
        return spread(self.repeats)

    @property
    def marked(self) -> bool:
        """True if it is kept, with a spread that a reader should know."""
        return MARKED < self.spread <= REFUSED

    @property
    def refused(self) -> bool:
        """True if its repeats differ too much to say anything."""
        return self.spread > REFUSED

    @property
    def name(self) -> str:
        """Kind, form, sizes and ranks: "collective all_reduce, 1.00 MiB, 4 ranks"."""
        words = [value for value in self.what.values() if isinstance(value, str)]
        sizes = [
            human(value) if key == "bytes" else f"{key} {value}"
            for key, value in self.what.items()
            if not isinstance(value, str)
        ]
        return ", ".join([" ".join([self.kind, *words]), *sizes, counted(self.ranks, "rank")])

    def as_dict(self) -> dict[str, Any]:
        """The figure's entry in the file and in `--json`."""
        marks = {name: True for name in ("marked", "refused") if getattr(self, name)}
        return {
            **self.what, "ranks": self.ranks, "seconds": significant(self.seconds),
            "spread": significant(self.spread), **marks,
        }  # fmt: skip


def significant(value: float, digits: int = 4) -> float:
    """The value rounded to this many significant digits."""
    return float(f"{value:.{digits}g}")


def geometric_mean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of no values."""
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs)) if logs else None


def slowdown(figures: Sequence[Figure], kind: str, ranks: int) -> float | None:
    """Seconds of a kind's operations with `ranks` ranks at work over those of a single rank: the geometric
    mean over operations that both have; None without any.
    """
    alone = {
        frozenset(one.what.items()): one.seconds for one in figures if one.kind == kind and one.ranks == 1
    }
    pairs = ((one, alone.get(frozenset(one.what.items()))) for one in figures)
    return geometric_mean(
        one.seconds / single for one, single in pairs if single and one.kind == kind and one.ranks == ranks
    )


# The file of a probe #

# [cluster]    settings of the cluster section
# [kind]       the device, in hardware.toml's form
# [measured]   versions, date, machine, and every figure with its spread
# [calibrated] only by `meshtune calibrate`: what was fitted, and the runs


def document_of(
    figures: Sequence[Figure], device: Device, fitted: Fitted, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """The tables of the file, which `probe --json` prints too.

    provenance: versions, date and machine, as [measured] has them.
    """
    name = f"this-{device.like.name if device.known or device.processor else 'gpu'}"
    cluster: dict[str, Any] = {"gpu": name, "gpus_per_node": device.ranks}
    if not device.processor:
        cluster |= {"gpus": device.ranks}
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for one in figures:
        by_kind.setdefault(one.kind, []).append(one.as_dict())
    network = f"The network, which was not measured, is that of {device.like.name}."
    source = f"meshtune probe, {provenance['date']}, {device.name}. {network}"
    if versions := sorted({one.what["flash"] for one in figures if "flash" in one.what}):
        source += f" Attention ran FlashAttention {' and '.join(map(str, versions))}."
    return {
        "cluster": cluster,
        "kind": fitted.table | {"source": source},
        "measured": {
            **provenance,
            "repeats": max(len(one.repeats) for one in figures),
            "spread": SPREAD,
            "marked_above": MARKED,
            "refused_above": REFUSED,
            "marked": [f"{one.name}: {one.spread:.0%}" for one in figures if one.marked],
            "refused": [f"{one.name}: {one.spread:.0%}" for one in figures if one.refused],
            "not_measured": list(fitted.borrowed),
            "off": fitted.off,
            "figures": by_kind,
        },
    }


def text_of(document: Mapping[str, Any], file: str) -> str:
    """The document as TOML. file: its name, for the first line."""
    lines = [f"# `cluster: {file}` in a config, or cluster={file} on the command line, plans with it."]
    if by := document.get("measured"):
        lines.insert(0, f"# Measured by meshtune {by['meshtune']} on {by['date']}: {by['device']}.")
    for name, table in document.items():
        lines += ["", *_table(name, table)]
    return "\n".join(lines) + "\n"


def _table(name: str, table: Mapping[str, Any]) -> list[str]:
    """Lines of a table: plain values, then its tables and lists of tables."""
    lines, after = [f"[{name}]"], []
    for key, value in table.items():
        if key in ("efficiency", "figures"):
            after += ["", *_table(f"{name}.{key}", value)]
        elif key == "shared":
            after += [line for one in value for line in ("", *_table(f"[{name}.{key}]", one))]
        else:
            lines.append(f"{key} = {_value(value)}")
    return lines + after


def _key(key: str) -> str:
    return json.dumps(key) if key[:1].isdigit() else key


def _value(value: Any) -> str:
    """A value in TOML; a list of tables or texts has a line for each."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(one)}' for key, one in value.items())} }}"
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], Mapping | str) and len(value) > 1:
            return "[\n" + "".join(f"    {_value(one)},\n" for one in value) + "]"
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)
