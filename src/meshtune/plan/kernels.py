"""Attention kernels as others measured them alone (kernels.toml), on every GPU kind."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from meshtune.units import TERA

if TYPE_CHECKING:
    from meshtune.plan.hardware import Gpu

STANDS_FOR = {  # architecture -> the one whose kernels stand for its own where these have no table
    "ada": "ampere", "blackwell": "hopper", "cdna3": "hopper", "volta": "ampere", "cpu": "ampere",
    "ampere": "hopper", "hopper": "blackwell",
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """An attention kernel on a GPU kind: FLOP/s of the forward of long causal sequences, by head size."""

    heads_64: float
    heads_128: float
    heads_256: float
    keys: float  # time of a query compared with that of the keys that it sees, in keys
    backward: float  # time per FLOP of the backward, over the forward's


def kernel_on(name: str, gpu: Gpu, kinds: Mapping[str, Gpu]) -> Kernel:
    """A kernel of kernels.toml on a GPU kind, scaled by the rate of its fastest matmul where it was measured
    on another one of `kinds`, the catalogue. A kernel that was measured on this machine stands for all.
    """
    if own := gpu.attention_kernel:
        rates = (share * gpu.matmul_max for share in own["forward"])
        return Kernel(*rates, keys=own["keys"], backward=own["backward"])
    architecture = gpu.architecture
    while (table := _tables()[name].get(architecture)) is None:
        architecture = STANDS_FOR[architecture]
    faster = gpu.matmul_max / kinds[table["on"]].matmul_max
    rates = (rate * TERA * faster for rate in table["forward"])
    return Kernel(*rates, keys=table["keys"], backward=table["backward"])


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("meshtune.plan").joinpath("kernels.toml").read_text("utf-8"))
