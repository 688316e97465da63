"""Compare predicted step times of mixtures of experts with published ones, router forced to balance.

    python validation/mixtures.py [--out validation/mixtures.md]

Rows of validation/data/moe.csv in bf16 that state layout, batch and recomputation. Constants of FREE are
fitted to them; then each source is left out once and predicted by constants that were fitted to the others.
AWS's runs over EFA, where exchanges take most of a step, and rows with a learned router are apart.
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path

import numpy as np
from measured import HERE, Machines, Origin, Row, column, columns_of, constants_of, read

from meshtune.placement.columns import Columns
from meshtune.plan.calibration import fitted, left_out, spearman
from meshtune.plan.hardware import catalogue
from meshtune.plan.machine import Machine
from meshtune.plan.seconds.step import step
from meshtune.plan.work import Core, Gemm, Weight, Work
from meshtune.rundir import write_text_atomically

ROWS = HERE / "data" / "moe.csv"
NEEDED = (
    "layers", "hidden", "seq_len", "micro_batch", "global_batch", "dp", "zero_stage", "ep", "tp", "pp", "cp",
    "recompute", "tokens_per_s_per_gpu",
)  # fmt: skip
STACKS = {  # beginnings of ids -> (source, stack of stacks.toml)
    "automodel-": ("AutoModel", "megatron-core"), "mb": ("Megatron-Bridge", "megatron-core"),
    "modelzoo-": ("Megatron ModelZoo", "megatron-core"), "xtuner-": ("xtuner", "megatron-core"),
    "simumax-": ("SimuMax", "megatron-core-eager"), "aws-": ("AWS", "megatron-core"),
}  # fmt: skip
NETWORK = 400e9  # bytes/s of a node of 8 H100 or B200, in one direction; not stated
NVLINK_DOMAIN = {"gb200": "72", "gb300": "72"}  # GPUs that NVLink joins
LIKE = {"h800": ("h100-sxm", 200e9)}  # GPU -> (kind of the catalogue, its link, bytes/s)
# Lowest, as one would guess before any fit, highest
FREE: dict[str, tuple[float, float, float]] = {
    "grouped": (0.3, 0.85, 1.2),
    "expert_passes": (2, 5, 16),
    "expert_launches": (0, 20, 200),
    "expert_overlap": (0, 0.5, 1),
    "grace": (1, 1.5, 3),  # seconds to launch a kernel by a Grace processor, over the others'
    # Share of link and network that exchanges by NCCL reach, over that of rings, which is 0.7 or more; and by
    # DeepEP and HybridEP
    "alltoall": (0.2, 0.8, 1.33),
    "exchange": (0.3, 1.0, 1.33),
}


def why_not(row: Row) -> str | None:
    """The reason why a row isn't predicted; None if it is."""
    if lacks := [name for name in NEEDED if not row[name]]:
        return f"it lacks {', '.join(lacks)}"
    if row["precision"] != "bf16":
        return f"precision {row['precision']}"
    if re.search("nemotron|next-80b", row["model"] + row["id"]):
        return "recurrent layers"
    if row["gpu"] not in catalogue() and row["gpu"] not in LIKE:
        return f"unknown GPU {row['gpu']}"
    return None if any(map(row["id"].startswith, STACKS)) else "unknown source"


def origin(row: Row) -> tuple[str, str]:
    """(Source, stack)."""
    return next(found for prefix, found in STACKS.items() if row["id"].startswith(prefix))


def _latent(row: Row) -> list[float]:
    """Sizes of latent attention: queries (0: not latent), keys and values, heads without and with positions,
    values.
    """
    if row["attention"] != "mla":
        return [1, 1, 1, 1, 1]
    sizes = [float(size) for size in re.findall(r"(?:lora|nope|rope|v) (\d+)", row["notes"])]
    return sizes[:5] if "no q_lora" not in row["notes"] else [0, *sizes[:4]]


def work_of(rows: Sequence[Row]) -> Work:
    """Work of each row, from its shape."""
    size = {name: column(rows, name, 0.0) for name in (
        "layers", "dense_layers", "hidden", "dense_ffn", "expert_ffn", "experts", "shared_experts", "top_k",
        "heads", "kv_heads", "head_dim", "vocab",
    )}  # fmt: skip
    hidden, heads, ffn = size["hidden"], size["heads"], size["expert_ffn"]
    more = np.array(["MTP 1" in row["notes"] for row in rows], float)  # a block that predicts a second token
    layers = size["layers"] + more
    dense = size["dense_layers"] / layers
    sparse, mla = 1 - dense, np.array([float(row["attention"] == "mla") for row in rows])
    windows = np.array([0.5 * ("window 128" in row["notes"]) for row in rows])
    numbers = np.array([_latent(row) for row in rows])
    q_lora, kv_lora, nope, rope, v_dim = numbers.T
    qk, kv = np.where(mla, nope + rope, size["head_dim"]), np.where(mla, heads, size["kv_heads"])
    v_dim, gqa = np.where(mla, v_dim, size["head_dim"]), 1 - mla
    shared = size["shared_experts"] * ffn
    of_experts = sparse * size["top_k"], sparse * size["experts"]
    matrices = (
        Gemm((heads + 2 * kv) * qk, hidden, gqa, "rows"),
        Gemm(np.maximum(q_lora, 1), hidden, mla * (q_lora > 0)),
        Gemm(heads * qk, np.where(q_lora > 0, q_lora, hidden), mla, "rows"),
        Gemm(kv_lora + rope, hidden, mla), Gemm(heads * (nope + v_dim), kv_lora, mla, "rows"),
        Gemm(hidden, heads * v_dim, 1.0, "cols"),
        Gemm(size["experts"], hidden, sparse),
        Gemm(np.maximum(shared, 1), hidden, 2 * sparse * (shared > 0), "rows"),
        Gemm(hidden, np.maximum(shared, 1), sparse * (shared > 0), "cols"),
        Gemm(np.maximum(size["dense_ffn"], 1), hidden, 2 * dense, "rows"),
        Gemm(hidden, np.maximum(size["dense_ffn"], 1), dense, "cols"),
    )  # fmt: skip
    experts = (
        Gemm(2 * ffn, hidden, of_experts[0], experts=of_experts[1]),
        Gemm(hidden, ffn, of_experts[0], experts=of_experts[1]),
    )
    stacked = Weight(size["experts"], 3 * ffn * hidden, sparse, of_experts=True)
    return Work(
        blocks=layers, hidden=hidden, vocabulary=size["vocab"],
        wide=2 * (sparse * (size["top_k"] * ffn + shared) + dense * size["dense_ffn"]),
        matrices=(*matrices, *experts),
        cores=(Core(heads, kv, qk, v_dim, count=1 - windows), Core(heads, kv, qk, v_dim, 128.0, windows)),
        block_weights=(*(Weight(m.rows, m.cols, m.count, m.cut) for m in matrices), stacked),
        first_weights=(Weight(size["vocab"], hidden, 1.0, "rows"),),
        last_weights=(Weight(size["vocab"], hidden, 1.0, "rows"),),
        imbalance=column(rows, "imbalance", 1.0),
    )  # fmt: skip


def predictor(rows: Sequence[Row]) -> Callable[[Mapping[str, float]], np.ndarray]:
    """Function from constants of FREE to the predicted tokens/s/GPU of each row."""
    plain = [
        row | {
            "recompute": re.sub(":.*", "", row["recompute"]), "compile": "", "attention": "flash",
            "gpu": LIKE.get(row["gpu"], (row["gpu"],))[0],
            "gpus_per_node": NVLINK_DOMAIN.get(row["gpu"], row["gpus_per_node"]),
        }
        for row in rows
    ]  # fmt: skip
    among = [
        Origin(prefix, stack, source, NETWORK, {"network_share": 0.7}, {})
        for prefix, (source, stack) in STACKS.items()
    ]
    constants = constants_of(among)
    columns, work = columns_of(plain, among), work_of(rows)
    machine = Machines.of(plain, among, constants).with_constants(constants)
    link = [LIKE.get(row["gpu"], ("", catalogue()[other["gpu"]].link))[1]
            for row, other in zip(rows, plain, strict=True)]  # fmt: skip
    moe = sum(gemm.count * gemm.rows * gemm.cols for gemm in work.matrices if np.any(gemm.experts))
    every = sum(gemm.count * gemm.rows * gemm.cols for gemm in work.matrices)
    again = np.array([bool(re.search(r"[:+]moe(\+|$)", row["recompute"])) for row in rows])
    once = np.array([row["dispatcher"] in ("deepep", "hybridep") for row in rows], float)
    overlaps = np.array([bool(re.search("EP overlap(?! off)", row["notes"])) for row in rows])
    graphs = np.array(["CUDA graphs of" in row["notes"] for row in rows])
    grace = np.array([row["gpu"] in NVLINK_DOMAIN for row in rows])
    seq_len = column(rows, "seq_len")
    # Megatron takes equal stages only: else embedding and head stand for blocks, or stages are listed.
    uneven = column(rows, "layers") % (columns.pp * columns.virtual_stages) > 0
    machine = replace(
        machine,
        balanced=uneven.astype(float),
        # Interleaved stages send while they compute (overlap_p2p_comm).
        send_share=np.where(columns.virtual_stages > 1, 1e3, machine.send_share),
        link=np.array(link),
        selective=np.where(again, moe / every, 0.0),
        expert_once=once,
    )

    def predict(free: Mapping[str, float]) -> np.ndarray:
        found = replace(
            machine, grouped=free["grouped"], expert_passes=free["expert_passes"],
            expert_launches=np.where(graphs, 0.0, free["expert_launches"]),
            launch=machine.launch * np.where(grace, free["grace"], 1.0),
            expert_overlap=np.where(overlaps, free["expert_overlap"], 0.0),
            expert_share=np.where(once > 0, free["exchange"], free["alltoall"]),
        )  # fmt: skip
        return speed(work, columns, found, seq_len)

    return predict


def speed(work: Work, columns: Columns, machine: Machine, seq_len: np.ndarray) -> np.ndarray:
    """Tokens per second and GPU."""
    seconds = step(work, columns, machine, seq_len).total
    return columns.global_batch_size * seq_len / seconds / columns.world


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Constants that fit best; a source counts by its number of rows to the power of 0.65."""
    predict, measured = predictor(rows), column(rows, "tokens_per_s_per_gpu")
    names = np.array([origin(row)[0] for row in rows])
    weights = np.array([np.sum(names == name) ** -0.35 for name in names])
    return fitted(lambda free: np.log(predict(free) / measured), FREE, weights, scale=0.03)


def imbalance_of(row: Row, free: Mapping[str, float]) -> float:
    """Imbalance, 1 to 8, with which a row's prediction is nearest to its measurement."""
    tried = np.linspace(1, 8, 141)
    several = [row | {"imbalance": str(value)} for value in tried]
    wrong = np.abs(np.log(predictor(several)(free) / float(row["tokens_per_s_per_gpu"])))
    return float(tried[wrong.argmin()])


def errors(rows: Sequence[Row], predicted: np.ndarray) -> dict[str, tuple[int, float, float]]:
    """Source -> (rows, mean absolute error in percent, rank correlation); "all rows", "all sources"."""
    measured, names = column(rows, "tokens_per_s_per_gpu"), np.array([origin(row)[0] for row in rows])
    wrong = 100 * abs(predicted / measured - 1)
    found = {
        str(name): (
            int(np.sum(names == name)), float(wrong[names == name].mean()),
            spearman(predicted[names == name], measured[names == name]),
        )
        for name in dict.fromkeys(names)
    }  # fmt: skip
    means = [mean for _, mean, _ in found.values()]
    every = {"all rows": (len(rows), float(wrong.mean()), math.nan)}
    return found | every | {"all sources": (len(means), float(np.mean(means)), math.nan)}


def page(every: Sequence[Row]) -> str:
    """The tables, as Markdown."""
    rows = [row for row in every if why_not(row) is None]
    forced = [row for row in rows if row["balanced"] == "forced"]
    main = [row for row in forced if not row["id"].startswith("aws-")]
    names = np.array([origin(row)[0] for row in main])

    def predict(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
        kept, out = ([*compress(main, mask)] for mask in (inside, outside))
        return predictor(out)(fit(kept))

    free = fit(main)
    own, unseen = predictor(main)(free), left_out(names, predict)
    within, without = errors(main, own), errors(main, unseen)
    reasons = Counter(
        why_not(row) for row in every if row["balanced"] == "forced" and row["precision"] == "bf16"
    )
    reasons.pop(None)
    aws = [row for row in forced if row["id"].startswith("aws-")]
    learned = [
        row
        for row in rows
        if row["balanced"] == "real" and row["method"] != "lora" and "functional check" not in row["notes"]
    ]
    of_aws = errors(aws, predictor(aws)(free))["AWS"]
    lines = [
        "# Mixtures of experts: predicted and published speed", "",
        "Written by `python validation/mixtures.py --out validation/mixtures.md`. Forced balance, bf16; mean "
        "absolute error of tokens/s/GPU. Not predicted: "
        + "; ".join(f"{count} rows: {reason}" for reason, count in reasons.most_common()) + ".", "",
        "| source | rows | in sample | left out | rank correlation, left out |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {name} | {count} | {wrong:.1f} % | {without[name][1]:.1f} % | "
            f"{'' if math.isnan(without[name][2]) else format(without[name][2], '.2f')} |"
            for name, (count, wrong, _) in within.items()
        ), "",
        "Fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in free.items()) + ".", "",
        f"Apart, AWS over EFA, bound by its network: {of_aws[0]} rows, {of_aws[1]:.0f} %, rank correlation "
        f"{of_aws[2]:.2f}.", "",
        "| row | published | in sample | left out |", "| --- | ---: | ---: | ---: |",
        *(
            f"| {row['id']} | {float(row['tokens_per_s_per_gpu']):,.0f} | {mine:,.0f} | {other:,.0f} |"
            for row, mine, other in zip(main, own, unseen, strict=True)
        ), "",
        "Learned router, not fitted to: the imbalance (1 to 8) that explains the difference.", "",
        "| row | published | balanced | imbalance |", "| --- | ---: | ---: | ---: |",
        *(
            f"| {row['id']} | {float(row['tokens_per_s_per_gpu']):,.0f} | {balanced:,.0f} | "
            f"{imbalance_of(row, free):.2f} |"
            for row, balanced in zip(learned, predictor(learned)(free), strict=True)
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = page(read(ROWS))
    print(text)
    if options.out:
        write_text_atomically(options.out, text)


if __name__ == "__main__":
    main()
