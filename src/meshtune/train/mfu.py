"""Model FLOPs utilisation: the share of the peak that the model's own arithmetic takes (docs/mfu.md)."""

import math
from collections.abc import Callable

import torch

from meshtune.data.loader import Batch
from meshtune.errors import Table
from meshtune.placement.census import Census, palm_flops, step_flops
from meshtune.plan.hardware import named
from meshtune.precision import PRECISIONS

RATES: Table[str | None] = Table(  # field of a Gpu with its peak; None where data sheets have none
    "precision",
    {name: dtypes.rate if dtypes.rate_share == 1 else None for name, dtypes in PRECISIONS.items()}
    | {"tf32": "tf32"},
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense peak FLOP/s of this device in a precision of the config; None when unknown, as for any CPU."""
    if device.type != "cuda":
        return None
    if precision == "fp32" and torch.backends.cuda.matmul.allow_tf32:
        precision = "tf32"
    return datasheet_flops(torch.cuda.get_device_name(device), precision)


def datasheet_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of a device as its driver names it; None when unknown, as for a slice of a GPU.

    precision: fp32, tf32 (fp32 with TensorFloat-32 products allowed), bf16, bf16-pure; others have no figure.
    """
    gpu, rate = named(device_name), RATES[precision]
    return getattr(gpu, rate) if gpu is not None and rate is not None else None


def flops_of(census: Census, seq_len: int, ranks: int = 1) -> Callable[[Batch], tuple[float, float]]:
    """Batch -> (what had to be computed, the common 6N figure): the share of each of the `ranks` that work on
    this data rank's micro-batches. NaN where the count is unknown.
    """

    def flops(batch: Batch) -> tuple[float, float]:
        micro_batches = batch.micro_batches
        documents = [length for micro in micro_batches for row in micro.documents for length in row]
        found = step_flops(census, documents, sum(micro.label_tokens for micro in micro_batches))
        return (found.total / ranks if found else math.nan), palm_flops(
            census, sum(documents), seq_len
        ) / ranks

    return flops
