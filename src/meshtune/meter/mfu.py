"""Model FLOPs utilisation: the share of the peak that the model's own arithmetic takes (docs/mfu.md)."""

import math
from collections.abc import Callable, Iterable

import torch

from meshtune.data.batch import Batch, MicroBatch
from meshtune.placement.census import Census, StepFlops, palm_flops, step_flops


def peak_flops(
    device: torch.device, precision: str, datasheet: Callable[[str, str], float | None]
) -> float | None:
    """Dense peak FLOP/s of this device in a precision of the config; None when unknown, as for any CPU.

    precision: train.precision; fp32 means tf32 if torch allows it for matmuls. datasheet: name of a device as
    its driver has it, precision or "tf32" -> dense peak FLOP/s, None if unknown.
    """
    if device.type != "cuda":
        return None
    if precision == "fp32" and torch.backends.cuda.matmul.allow_tf32:
        precision = "tf32"
    return datasheet(torch.cuda.get_device_name(device), precision)


def flops_of(census: Census, seq_len: int, ranks: int = 1) -> Callable[[Batch], tuple[float, float]]:
    """Function from a data rank's Batch to (FLOPs needed, FLOPs by the common 6N formula) of one rank.

    seq_len: for the 6N formula; the FLOPs needed follow from document lengths. ranks: number of ranks that
    share the batch (tp · cp · pp), each counted with an equal part. A pass over mismatched answers counts as
    the forward that it is. FLOPs needed are NaN for models whose count is unknown.
    """

    def flops(batch: Batch) -> tuple[float, float]:
        needed, common = of_pass(batch.micro_batches)
        without_gradients, third = of_pass(batch.mismatched)
        if not needed or not without_gradients:
            return math.nan, (common + third / 3) / ranks
        return (needed.total + without_gradients.forward) / ranks, (common + third / 3) / ranks

    def of_pass(micro_batches: Iterable[MicroBatch]) -> tuple[StepFlops | None, float]:
        read = [micro for micro in micro_batches if micro.tokens]  # what a rank without more repeats has none
        documents, shared = (
            [length for micro in read for row in getattr(micro, name) for length in row]
            for name in ("wholes", "shared")
        )
        needed = step_flops(census, documents, sum(micro.label_tokens for micro in read))
        again = step_flops(census, shared, 0)  # shared tokens are computed once
        if needed and again:
            needed = StepFlops(**{part: count - vars(again)[part] for part, count in vars(needed).items()})
        return needed, palm_flops(census, sum(documents) - sum(shared), seq_len)

    return flops
