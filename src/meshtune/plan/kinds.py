"""GPU kinds as a user names and describes them: names answered with the nearest kind, tables checked whole.

cluster.gpu       h100-sxm, H100 SXM, or a driver's name such as NVIDIA H100 80GB HBM3
cluster.hardware  a TOML file with more kinds, in hardware.toml's form; or one that `meshtune probe` wrote,
                  with one kind of that form in [kind], whose name is the `gpu` of its [cluster]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshtune.errors import UserError, expanded, written
from meshtune.nearest import did_you_mean, nearest
from meshtune.plan.hardware import SHARES, Gpu, catalogue, gpu_of, named
from meshtune.plan.kernels import STANDS_FOR
from meshtune.yaml_tree import read_toml

WITHOUT_BF16 = {"p100", "t4", "v100"}  # words of GPUs that are too old for the rates of hardware.toml
NOT_RUN_ON = {  # maker -> words in the names of its accelerators
    "Intel's": {"intel", "pvc", "max1550", "max1100", "gaudi", "gaudi2", "gaudi3", "hpu", "xpu"},
    "Huawei's Ascend": {"ascend", "npu", "910a", "910b", "910c"},
    "Google's TPUs": {"tpu"},
    "AWS's Trainium": {"trainium", "trn1", "trn2"},
}
LINK_KINDS = ("nvlink", "pcie", "xgmi")
ARCHITECTURES = tuple(STANDS_FOR)

# Keys of a kind's table with a positive number -> what it is, as in hardware.toml and docs/planning.md.
RATES = {
    "bf16": "dense TFLOP/s in bf16",
    "fp32": "TFLOP/s in fp32",
    "memory_gib": "memory in GiB, as torch reports it",
    "bandwidth": "GB/s of its memory",
    "link": "GB/s to the other GPUs of its machine, one direction",
    "network": "GB/s per GPU to other machines, one direction",
    "fp8": "dense TFLOP/s in fp8",
    "tf32": "dense TFLOP/s in TensorFloat-32",
    "matmul_max": "TFLOP/s of the fastest bf16 matmul that was measured",
    "matmul_max_fp8": "TFLOP/s of the fastest fp8 matmul that was measured",
}
COUNTS = {"node": "GPUs of a machine", "multiprocessors": "streaming multiprocessors"}  # whole numbers
OTHERS = {
    "words": 'words in the name that the driver reports, such as ["H100"]',
    "link_kind": f"{', '.join(LINK_KINDS[:-1])} or {LINK_KINDS[-1]}",
    "source": "where the numbers are from, as text",
    "architecture": f"that of its attention kernels, {', '.join(ARCHITECTURES[:-1])} or {ARCHITECTURES[-1]}",
    "efficiency_as": "the kind whose measured efficiencies are used",
    "efficiency": "a table of measured efficiencies",
    "attention_kernel": "a table of forward (shares of matmul_max, heads of 64, 128, 256), keys, backward",
    "shared": "tables of efficiencies with `ranks`, the number of ranks at work on the machine",
}
MAXIMA = {"matmul_max": "bf16", "matmul_max_fp8": "fp8"}  # measured -> the peak that it is below
EFFICIENCIES = tuple(catalogue()["a100-80"].efficiency)  # all of them
# the software's, where a probe or runs (`meshtune calibrate`) measured them here
BY_PROBE = (
    "launch", "launch_blocking", "link_latency", "contention",
    "update_memory", "host_micro_batch", "host_step",
)  # fmt: skip
MEANING = RATES | COUNTS | OTHERS
OPTIONAL = {"fp8", "tf32", "matmul_max", "matmul_max_fp8", "architecture", "efficiency_as", "efficiency"}
OPTIONAL |= {"attention_kernel", "shared"}


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
            f"{setting} = {name} is no kind of the catalogue: it has no bf16 matrix units. Describe it "
            "in a file named by cluster.hardware, and plan with train.precision=fp32; "
            "docs/planning.md#clusters has the table of a V100."
        )
    if others := [maker for maker, words in NOT_RUN_ON.items() if parts & words]:
        raise UserError(
            f"{setting} = {name}: meshtune runs on NVIDIA's GPUs, on AMD's with ROCm and on processors, not "
            f"on {others[0]}. To compare it on paper, describe it in a file named by cluster.hardware."
        )
    near = [kind for kind in kinds if kind.startswith(plain)]
    near = near or nearest(plain, kinds) or _with_most_parts(parts, kinds)
    raise UserError(
        f"{setting} = {name} is no kind that is known{did_you_mean(near)} Kinds: "
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
    if missing := [f"{key} ({MEANING[key]})" for key in MEANING if key not in {*table, *OPTIONAL}]:
        yield f"lacks {', '.join(missing)}."
    if not {"efficiency", "efficiency_as"} & table.keys():
        yield f"lacks efficiency_as ({MEANING['efficiency_as']}) or efficiency ({MEANING['efficiency']})."
    if not {"architecture", "efficiency_as"} & table.keys():
        yield f"lacks architecture ({MEANING['architecture']}), which no efficiency_as tells."
    for key, value in table.items():
        if key not in MEANING:
            yield f"has {key}, which is no fact of a GPU{did_you_mean(_nearest_keys(key))}"
        elif key == "efficiency":
            yield from _efficiency_problems(value, whole="efficiency_as" not in table)
        elif key == "shared":
            yield from _shared_problems(value)
        elif key == "attention_kernel":
            yield from _kernel_problems(value)
        elif not _fits(key, value):
            shown = json.dumps(value) if isinstance(value, str) else written(value)
            yield f"{key} = {shown}: write {_form(key)}{MEANING[key]}{_hint(key, value)}"
        elif key in MAXIMA and _is_positive(peak := table.get(MAXIMA[key])) and value > peak:
            yield f"{key} = {written(value)}: no matmul is faster than {MAXIMA[key]} = {written(peak)}."


def _nearest_keys(key: str) -> list[str]:
    """Keys of a kind's table that `key` may stand for: those it begins (memory), else those spelled alike."""
    return [known for known in MEANING if known.startswith(key)] or nearest(key, MEANING)


def _fits(key: str, value: Any) -> bool:
    if key in RATES:
        return _is_positive(value)
    if key in COUNTS:
        return _is_positive(value) and isinstance(value, int)
    checks: dict[str, Callable[[Any], bool]] = {
        "words": lambda words: (
            isinstance(words, list) and words != [] and all(isinstance(word, str) for word in words)
        ),
        "link_kind": LINK_KINDS.__contains__,
        "architecture": ARCHITECTURES.__contains__,
        "source": lambda text: isinstance(text, str),
        "efficiency_as": lambda kind: isinstance(kind, str) and kind in catalogue(),
    }
    return bool(checks[key](value))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _form(key: str) -> str:
    """The form of a key's value, which stands before its meaning."""
    return "a number above 0, " if key in RATES else "a whole number from 1 on, " if key in COUNTS else ""


def _hint(key: str, value: Any) -> str:
    of_keys = {
        "link_kind": LINK_KINDS, "architecture": ARCHITECTURES, "efficiency_as": tuple(catalogue())
    }  # fmt: skip
    choices = of_keys.get(key, ())
    near = nearest(value, choices) if isinstance(value, str) else []
    return did_you_mean(near) if near or key != "efficiency_as" else f": {', '.join(choices)}."


def _efficiency_problems(efficiency: Any, *, whole: bool) -> Iterator[str]:
    """Yield what is wrong with a table of efficiencies. whole: True if no other kind's stand behind it."""
    if not isinstance(efficiency, Mapping):
        yield f"efficiency = {written(efficiency)}: write {MEANING['efficiency']}."
        return
    if whole and (missing := [key for key in EFFICIENCIES if key not in efficiency]):
        yield (
            f"efficiency lacks {', '.join(missing)}; add efficiency_as ({MEANING['efficiency_as']}) for what "
            "nobody measured."
        )
    for key, value in efficiency.items():
        if key not in {*EFFICIENCIES, *BY_PROBE, "source"}:
            yield f"efficiency has {key}, which is none{did_you_mean(nearest(key, EFFICIENCIES))}"
        elif key != "source":
            yield from out_of_range(key, value)


def _shared_problems(shared: Any) -> Iterator[str]:
    """Yield what is wrong with the efficiencies of several ranks at work."""
    if not isinstance(shared, list) or not all(isinstance(table, Mapping) for table in shared):
        yield f"shared = {written(shared)}: write {MEANING['shared']}."
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
        yield f"attention_kernel = {written(kernel)}: write {MEANING['attention_kernel']}."
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
