"""Short names of models and layouts, for headings, cells and labels; sentences that several pages have."""

import re
from pathlib import PurePath

from meshtune.layout import RECOMPUTE, SCHEDULES, Layout

MFU = (
    "MFU counts the model's own arithmetic (forward and backward of what is trained, attention by documents, "
    "no recomputation, no padding) over the device's dense peak; it is not known on processors (docs/mfu.md)."
)


def model_title(name: str) -> str:
    """A model's name without its folders or organization: "Llama-3.1-8B" of "meta-llama/Llama-3.1-8B"."""
    parts = [part for part in PurePath(name).parts if part != "config.json"]
    return parts[-1] if parts else name


def in_words(layout: Layout) -> str:
    """A layout's axes, batches and recomputation: "ZeRO-3 in 16 shards · 4 sequences at once"."""
    shards = f"ZeRO-{layout.zero} in {layout.shard_ranks} shards" if layout.zero else ""
    sequence = " and sequence" if layout.sp else ""
    blocks = f", {layout.recompute_blocks} blocks" if layout.recompute_blocks else ""
    parts = {
        f"{layout.dp_replicate} replicas": layout.dp_replicate > 1,
        shards: layout.zero,
        f"tensor{sequence} parallel over {layout.tp}": layout.tp > 1,
        f"context parallel over {layout.cp} ({layout.cp_method})": layout.cp > 1,
        f"{layout.stages} pipeline stages on {layout.pp} ranks ({layout.schedule})": layout.pp > 1,
        f"micro-batch {layout.micro_batch_size}": True,
        f"{layout.gradient_accumulation_steps} accumulated": layout.gradient_accumulation_steps > 1,
        f"recompute: {layout.recompute}{blocks}": layout.recompute != "none",
    }
    return " · ".join(part for part, there in parts.items() if there)


def short(layout: Layout | str) -> tuple[str, ...]:
    """(its axes, its micro-batch and recomputation): `short(…) == ("zero3x4 tp2 pp2", "mb2 full8")`."""
    words = str(layout).split("-")
    inner = [word for word in words if re.fullmatch(rf"mb\d+|({'|'.join(RECOMPUTE)})\d*", word)]
    left_out = [word for word in words if re.fullmatch(r"sp|regather|v\d+|ga\d+", word) or word in SCHEDULES]
    axes = [word for word in words if word not in (*inner, *left_out)]
    return (*([" ".join(axes)] if axes else []), " ".join(inner))
