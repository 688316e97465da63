"""Rows that leave out a part of their layout, completed with stated assumptions.

A completed row has an `assumed` column that lists them; "": nothing is assumed.
"""

from collections.abc import Sequence

from measured import LORA_RANK, Row, origins, trains_adapters, why_not
from peaks import recomputation_that_fits

# tables of NVIDIA, Meta and torchtune: some rows leave fields out
SOURCES = (
    "nemo-long-", "nemo24-", "mbridge-", "megatron-h100", "llama3paper-", "automodel-", "titan-",
    "torchtune-",
)  # fmt: skip
NAMES = {"rtx4090": "rtx-4090"}  # GPU kinds under other names than hardware.toml's
RACK = {"gb200": "72", "gb300": "72"}  # their tables count trays of 4 GPUs as nodes, but NVLink joins 72


def completed(rows: Sequence[Row]) -> list[Row]:
    """The rows, with what those of SOURCES leave out: `layout_of`, `recomputation_that_fits`, LORA_RANK."""
    return [_completed(row) if row["id"].startswith(SOURCES) else row | {"assumed": ""} for row in rows]


def _completed(row: Row) -> Row:
    left_out = {name: value for name, value in layout_of(row).items() if not row[name]}
    assumed = [f"{name} {value}" for name, value in left_out.items()]
    found = row | left_out | {"gpu": NAMES.get(row["gpu"], row["gpu"])}
    if row["gpu"] in RACK:
        found["gpus_per_node"] = RACK[row["gpu"]]
        assumed.append(f"gpus_per_node {RACK[row['gpu']]}")
    if trains_adapters(row):
        assumed.append(f"LoRA of rank {LORA_RANK} in every linear layer")
    if not row["recompute"]:
        tried = found | {"recompute": "none", "assumed": "all but its recomputation"}
        if not why_not(tried, origins()):
            found["recompute"] = recomputation_that_fits(tried)
            assumed.append(f"recompute {found['recompute']}")
    return found | {"assumed": "; ".join(assumed)}


def layout_of(row: Row) -> Row:
    """Values of the fields of the layout that a row of SOURCES may leave out.

    One sequence a micro-batch. ZeRO-1, the distributed optimizer. A pipeline interleaves single blocks, which
    makes its bubble smallest (Narayanan et al. 2021, section 2.2), where its ranks divide the micro-batches.
    torchtitan's defaults are two stages a rank where its schedule interleaves, and as many micro-batches as
    pipeline ranks.
    """
    pp = int(row["pp"] or 1)
    if row["id"].startswith("titan-"):
        micro_batch = int(row["global_batch"]) // (int(row["dp"]) * pp)
        virtual = 2 if "interleaved" in row["schedule"] else 1
        return {"micro_batch": str(micro_batch), "vpp": str(virtual)} if pp > 1 else {}
    found = {"micro_batch": "1", "zero_stage": "1"}
    if pp > 1:
        micro_batches = int(row["global_batch"]) // (int(row["micro_batch"] or 1) * int(row["dp"] or 1))
        found["vpp"] = str(int(row["layers"]) // pp if micro_batches % pp == 0 else 1)
    return found
