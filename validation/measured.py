"""Published rows as the planner reads them: which it can predict, on which machine, with which software.

The columns are those of throughput.csv. A row is predicted if it states all that the planner needs; else it
is skipped, for what it lacks. A row's measurement has no part in its prediction.
"""

import csv
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np
from shapes import adapted, of_shape

from meshtune.layout import CP_METHODS, RECOMPUTE, SCHEDULES
from meshtune.placement.columns import Columns
from meshtune.plan.hardware import attention_kernel, catalogue, kernel_on, stacks
from meshtune.plan.machine import Machine
from meshtune.plan.work import Work

Row = dict[str, str]
HERE = Path(__file__).parent
LARGE = [HERE / "data" / name for name in ("throughput.csv", "simumax.csv")]
PLAYBOOK, FAILED = (HERE / "data" / name for name in ("playbook.csv", "playbook_failed.csv"))
SMALL = HERE / "data" / "throughput_single_node_small.csv"
NEEDED = (
    "layers", "hidden", "ffn", "heads", "vocab", "gpu", "gpus", "precision", "seq_len", "micro_batch",
    "global_batch", "dp", "zero_stage", "tp", "pp", "cp", "recompute",
)  # fmt: skip
HEAD_DIM = 128  # where a row leaves its heads out
LORA_RANK = 16  # where a row leaves it out
LINKS = ("network_share", "network_latency")
VARIANTS = {  # of a stack, if stacks.toml has them: the end of its name, and the pattern of a row's notes
    "-rowwise": r"rowwise",
    "-async": r"(?<!no )async ?tp",
    "-balanced": r"own pipeline slots",
}
RATES = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "mxfp8": "fp8"}


def read(file: Path) -> list[Row]:
    """Rows of a table, each with the name of its file as "file"."""
    with file.open(newline="", encoding="utf-8") as lines:
        return [row | {"file": file.name} for row in csv.DictReader(lines)]


@dataclass(frozen=True)
class Origin:
    """The cluster and the software of rows whose id has this prefix."""

    prefix: str
    stack: str  # in stacks.toml
    cluster: str  # in clusters.toml
    network: float  # of a node, bytes/s in one direction
    links: Mapping[str, float]  # constants of the cluster, of those in LINKS
    where: Mapping[str, str]  # columns and their values in the only rows that it stands for; empty: all
    gpu: str = ""  # GPU kind, where the rows' own name for it is not exact
    cp_method: str = "allgather"


@cache
def origins() -> tuple[Origin, ...]:
    """All origins of clusters.toml, longest prefix first."""
    tables = tomllib.loads((HERE / "clusters.toml").read_text(encoding="utf-8"))
    found = [
        Origin(
            prefix,
            table["stack"],
            name,
            table["network"] * 1e9,
            {key: float(table[key]) for key in LINKS if key in table},
            {name: str(value) for name, value in table.get("where", {}).items()},
            table.get("gpu", ""),
            table.get("cp_method", Origin.cp_method),
        )
        for name, table in tables.items()
        for prefix in table["ids"]
    ]
    return tuple(sorted(found, key=lambda origin: (-len(origin.prefix), -len(origin.where))))


def origin_of(row: Row, among: Sequence[Origin]) -> Origin | None:
    """The first of `among` whose prefix and columns are the row's; None if there is none."""
    fitting = (origin for origin in among if row["id"].startswith(origin.prefix))
    return next((origin for origin in fitting if origin.where.items() <= row.items()), None)


def gpu_of(row: Row, origin: Origin) -> str:
    return origin.gpu or row["gpu"]


def stack_of(row: Row, origin: Origin) -> str:
    """Name of the row's stack: the origin's, with suffixes of compile and notes that stacks.toml has."""
    stack = origin.stack
    compiled = ["-compiled"] if row["compile"] == "1" else []
    noted = [end for end, words in VARIANTS.items() if re.search(words, row["notes"], re.IGNORECASE)]
    for end in compiled + noted:
        stack = stack + end if stack + end in stacks() else stack
    return stack


def why_not(row: Row, among: Sequence[Origin]) -> str | None:
    """The reason why a row can't be predicted; None if it can. among: `origins()`."""
    lacks = [name for name in NEEDED if not row.get(name)]
    if lacks == ["heads"]:  # its time hardly depends on them
        lacks = []
    if "WARNING" in row["notes"]:
        return "its source warns of it"
    if "same run, playbook-" in row["notes"]:
        return "the same run as another row"
    if lacks:
        return f"it lacks {', '.join(lacks)}"
    if row["gpu"] not in catalogue():
        return f"unknown GPU {row['gpu']}"
    if row["precision"] not in RATES:
        return f"precision {row['precision']}"
    if row["recompute"] not in ("none", "selective", "full"):
        return f"recompute {row['recompute']}"
    if origin_of(row, among) is None:
        return "unknown source"
    if "task=QLoRA" in row["notes"]:
        return "weights of 4 bits"
    if trains_adapters(row) and not row.get("assumed"):
        return "LoRA of unstated rank"
    return None


def trains_adapters(row: Row) -> bool:
    """True for rows of fine-tuning with LoRA."""
    return "task=LoRA" in row["notes"]


def flops_per_token(row: Row) -> float:
    """6N with the head, and attention that is not causal, as most sources count (README of the tables)."""
    layers, hidden, ffn, vocabulary, seq_len = (
        float(row[name]) for name in ("layers", "hidden", "ffn", "vocab", "seq_len")
    )
    heads = float(row["heads"] or hidden / HEAD_DIM)
    kv = float(row["kv_heads"] or heads)
    matrices = 3 if row["gated_mlp"] == "1" else 2
    n = layers * (2 * hidden**2 + 2 * hidden**2 * kv / heads + matrices * hidden * ffn) + vocabulary * hidden
    return 6 * n + 12 * layers * hidden * seq_len


def throughput(row: Row) -> float:
    """Measured tokens per second and GPU; from the printed MFU or TFLOP/s if it has only those; else NaN."""
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"])
    peak = getattr(catalogue()[row["gpu"]], RATES.get(row["precision"], "bf16"), None)
    if row["mfu_pct"] and peak:
        return float(row["mfu_pct"]) / 100 * peak / flops_per_token(row)
    if row["tflops_per_gpu"]:
        return float(row["tflops_per_gpu"]) * 1e12 / flops_per_token(row)
    return math.nan


def column(rows: Sequence[Row], name: str, default: float = math.nan) -> np.ndarray:
    """Column `name` as floats, one per row. default: for rows where it is missing or empty."""
    return np.array([float(row[name]) if row.get(name) else default for row in rows])


def work_of(rows: Sequence[Row], lora_rank: int = LORA_RANK) -> Work:
    """Work of each row. lora_rank: of the adapters in every linear layer of the rows that train with LoRA."""
    hidden = column(rows, "hidden")
    heads = column(rows, "heads")
    heads = np.where(np.isnan(heads), np.round(hidden / HEAD_DIM), heads)
    kv = column(rows, "kv_heads")
    work = of_shape(
        layers=column(rows, "layers"),
        hidden=hidden,
        ffn=column(rows, "ffn"),
        heads=heads,
        kv_heads=np.where(np.isnan(kv), heads, kv),
        vocabulary=column(rows, "vocab"),
        gated=column(rows, "gated_mlp", 0.0),
        tied=column(rows, "tied_embeddings", 0.0),
    )
    with_adapters = np.array([float(trains_adapters(row)) for row in rows])
    return adapted(work, lora_rank, with_adapters) if with_adapters.any() else work


def recompute_of(row: Row, origin: Origin) -> int:
    """Index of the row's mode in RECOMPUTE.

    "selective" means half of the matmuls in torchtitan's rows, the attention core in all others (Megatron's).
    """
    if row["recompute"] == "selective" and not stacks()[origin.stack]["selective"]:
        return RECOMPUTE.index("attention")
    return RECOMPUTE.index(row["recompute"])


def columns_of(rows: Sequence[Row], among: Sequence[Origin]) -> Columns:
    """Layout of each row, in their order; every row must be one that `why_not` returns None for."""
    dp, zero = column(rows, "dp"), column(rows, "zero_stage")
    virtual = column(rows, "vpp", 1.0)
    ran = [origin for row in rows if (origin := origin_of(row, among))]
    # torch's pipeline stages keep gathered weights and whole gradients until a step's last backward
    torch_stages = np.array([stacks()[origin.stack]["torch_stages"] > 0 for origin in ran])
    zero = np.where(torch_stages & (column(rows, "pp") > 1), np.minimum(zero, 1.0), zero)
    return Columns(
        dp_replicate=np.where(zero > 0, 1.0, dp),
        dp_shard=np.where(zero > 0, dp, 1.0),
        zero=zero,
        cp=column(rows, "cp"),
        cp_method=np.array([float(CP_METHODS.index(origin.cp_method)) for origin in ran]),
        tp=column(rows, "tp"),
        sp=column(rows, "sp", 0.0),
        sp_regather=np.zeros(len(rows)),  # a stack's habit (`Accounting.regathers_inputs`), no choice
        ep=column(rows, "ep", 1.0),
        pp=column(rows, "pp"),
        schedule=np.where(virtual > 1, SCHEDULES.index("interleaved1f1b"), SCHEDULES.index("1f1b")),
        virtual_stages=virtual,
        micro_batch_size=column(rows, "micro_batch"),
        gradient_accumulation_steps=column(rows, "global_batch") / column(rows, "micro_batch") / dp,
        recompute_blocks=np.full(len(rows), np.inf),
        recompute=np.array([float(recompute_of(row, origin)) for row, origin in zip(rows, ran, strict=True)]),
    )


@dataclass(frozen=True)
class Machines:
    """The machine of each row, as references into a flat table of constants, so that a fit can vary them."""

    facts: Mapping[str, np.ndarray]  # fields of Machine that are no constants, one value per row
    keys: Mapping[str, tuple[list[str], np.ndarray]]  # by field: names of constants, and each row's index

    @classmethod
    def of(cls, rows: Sequence[Row], among: Sequence[Origin], constants: Collection[str]) -> "Machines":
        """Machines of rows that `why_not` returns None for.

        constants: keys as in `constants_of`; a row takes that of its cluster, else its GPU, else its stack.
        """
        gpus, facts, places = catalogue(), [], []
        for row in rows:
            origin = origin_of(row, among)
            assert origin is not None
            name, stack = gpu_of(row, origin), stack_of(row, origin)
            gpu = gpus[name]
            facts.append({
                "matmul_max": gpu.matmul_max_fp8 if RATES[row["precision"]] == "fp8" else gpu.matmul_max,
                "core_matmul_max": gpu.matmul_max,
                **kernel_on(attention_kernel(stack, gpu), gpu),
                "element": 2.0,
                "weight_bytes": 1.0 if "fp8 all-gather" in row["notes"] else 2.0,
                "bandwidth": gpu.bandwidth,
                "link": gpu.link,
                "network": origin.network,
                "node": float(row["gpus_per_node"] or 8),
                "multiprocessors": gpu.multiprocessors,
                "block_update": 0.0,  # all were trained with AdamW
                "update_memory": 1.0,  # its own share is measured by probes alone
                "fp8_matmul_max": 0.0,  # matmul_max has it, and constants have casts
                "fp8_rowwise": 0.0,
                "host_bandwidth": np.inf,  # nothing was in host memory
                "host_states": 0.0,
                "host_master": 0.0,
                "loss_memory": 0.0,  # all logits at once, or chunks of one size
                "mlp_tile": np.inf,
                "flash": 0.0 if row["attention"] == "naive" else 1.0,
            })  # fmt: skip
            places.append((f"cluster.{origin.cluster}", f"gpu.{name}", f"stack.{stack}"))
        keys = {}
        for field in (field.name for field in fields(Machine)):
            if field in facts[0]:
                continue
            each = [next(f"{p}.{field}" for p in own if f"{p}.{field}" in constants) for own in places]
            if field == "gradient_bytes":  # fp16 gradients are reduced in fp16
                each = [
                    key + ".fp16" if row["precision"] == "fp16" else key
                    for key, row in zip(each, rows, strict=True)
                ]
            distinct = sorted(set(each))
            keys[field] = (distinct, np.array([distinct.index(key) for key in each]))
        return cls({name: np.array([row[name] for row in facts], dtype=float) for name in facts[0]}, keys)

    def with_constants(self, constants: Mapping[str, float]) -> Machine:
        """One Machine whose fields have a value per row. constants: values by the keys given to `of`."""
        values = {
            field: np.array([2.0 if key.endswith(".fp16") else constants[key] for key in distinct])[which]
            for field, (distinct, which) in self.keys.items()
        }
        return Machine(**values, **self.facts)


def constants_of(among: Iterable[Origin]) -> dict[str, float]:
    """All constants of GPU kinds, stacks and clusters, by "gpu.<name>.<field>" and the like."""
    found = {
        f"gpu.{name}.{key}": value
        for name, gpu in catalogue().items()
        for key, value in gpu.efficiency.items()
    }
    found |= {
        f"stack.{name}.{key}": value for name, stack in stacks().items() for key, value in stack.items()
    }
    return found | {
        f"cluster.{origin.cluster}.{key}": value for origin in among for key, value in origin.links.items()
    }
