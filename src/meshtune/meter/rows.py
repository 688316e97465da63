"""Numbers of a step or of an evaluation -> a row of metrics.jsonl.

Pure arithmetic on plain numbers: neither torch nor a tracker is needed.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime

from meshtune.rundir import Row
from meshtune.units import MIB


def train_row(
    *,
    step: int,
    loss: float,
    grad_norm: float | None,
    learning_rate: float,
    tokens: int,
    label_tokens: int,
    step_seconds: float,
    data_seconds: float,
    world: int = 1,
    flops: float | None = None,
    flops_6n: float | None = None,
    peak_flops_per_second: float | None = None,
    peak_memory_bytes: int | None = None,
    peak_resident_bytes: int | None = None,
    warm_up: bool = False,
    epoch: float | None = None,
    skipped: bool = False,
    noise: Mapping[str, float | None] | None = None,
    measured: Mapping[str, float] | None = None,
) -> Row:
    """The row of one update of the optimizer, of kind "train".

    `loss` is the mean per label token, or of a loss on whole answers per pair or answer; `grad_norm` is
    before clipping. `tokens` (real ones, no padding), `label_tokens`, `flops` and `flops_6n` are of the
    global batch; `step_seconds` is the wall time of the whole step, the `data_seconds` it waited for data
    included. Per GPU are `tokens_per_second_per_gpu`, `tflops_per_second`, `mfu` and `peak_flops_per_second`
    (of one device; None when unknown, as on any CPU; then `mfu` and `mfu_6n` are null, as they are without
    `flops` and `flops_6n`). `peak_memory_bytes` is of tensors on the fullest rank (CUDA's allocator; on a CPU
    counted in the watched steps), `peak_resident_bytes` of the largest process. `warm_up` marks steps that
    medians leave out: the first of a run, and those whose memory is watched. `epoch` counts passes through
    the data up to the end of the step (None: unknown, as for a stream). `skipped` marks a step that was not
    applied because loss or gradients were not finite. `measured`: by a loss on whole answers, by its name.
    `noise`: columns of noise_scale.with_measurement, where the gradient noise was measured.

        mfu    = flops    / (step_seconds · world · peak_flops_per_second)
        mfu_6n = flops_6n / (step_seconds · world · peak_flops_per_second)

    `flops` counts the FLOPs that are needed (Σ matmuls + causal attention by document lengths, no
    recomputation, no weight gradients of frozen weights), so a share above 1 is impossible and means that a
    count or the peak is wrong: `mfu` is then null. `flops_6n` is the common 6N + 12·L·h·s (PaLM, Chowdhery
    et al. 2022, appendix B), which counts attention twice and frozen weights too; `mfu_6n` may therefore be
    above 1.
    """
    row: Row = {
        "kind": "train",
        "step": step,
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "tokens": tokens,
        "label_tokens": label_tokens,
        "step_seconds": step_seconds,
        "data_seconds": data_seconds,
        "tokens_per_second_per_gpu": tokens / step_seconds / world,
        "tflops_per_second": None if flops is None else flops / step_seconds / world / 1e12,
        "mfu": possible(share_of_peak(flops, step_seconds, world, peak_flops_per_second)),
        "mfu_6n": share_of_peak(flops_6n, step_seconds, world, peak_flops_per_second),
        "peak_memory_bytes": peak_memory_bytes,
        "peak_resident_bytes": peak_resident_bytes,
        "epoch": epoch,
        **(measured or {}),
        **(noise or {}),
    }
    return {**row, **({"warm_up": True} if warm_up else {}), **({"skipped": True} if skipped else {})}


def eval_row(
    *,
    step: int,
    loss: float,
    label_tokens: int,
    tokens: int | None = None,
    seconds: float | None = None,
    exact_match: float | None = None,
    prompts: int | None = None,
    answers_cut: int | None = None,
    prompts_without_room: int | None = None,
    measured: Mapping[str, float] | None = None,
) -> Row:
    """The row of one evaluation after `step` updates (0: before the first).

    `loss` is the sum of token losses over all held-out label tokens divided by their number, `perplexity`
    its exponential; `exact_match` the share (0 to 1) of the `prompts` that were answered word for word, and
    `answers_cut` the number of their answers that reached no end token. `prompts_without_room` prompts fill
    the model's context and are not answered. A number that is None is left out of the row. `measured`: as of
    `train_row`; `loss` is then a mean over pairs or answers, which has no perplexity.
    """
    row: Row = {
        "kind": "eval",
        "step": step,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,  # exp overflows a float at 709.8
        "label_tokens": label_tokens,
    }
    if measured:
        row = {name: value for name, value in row.items() if name != "perplexity"} | {**measured}
    extra = {"tokens": tokens, "seconds": seconds, "exact_match": exact_match, "prompts": prompts}
    extra |= {"answers_cut": answers_cut, "prompts_without_room": prompts_without_room}
    return {**row, **{key: value for key, value in extra.items() if value is not None}}


def matches(expected: str | None, answer: str | None) -> bool:
    """True if an answer is the expected one, white space at the ends aside; False where either is None."""
    return expected is not None and answer is not None and answer.strip() == expected.strip()


def unfinished_answers(row: Row) -> str:
    """Clauses on compared answers that were cut or have no room; "" where there are none.

    row: with the names of `eval_row`.
    """
    cut, full, prompts = (row.get(name) or 0 for name in ("answers_cut", "prompts_without_room", "prompts"))
    clauses = (
        f"{cut:,} of {prompts:,} answers have no end token within eval.max_new_tokens and the model's context"
        * bool(cut and prompts),
        f"{full:,} of {prompts:,} prompts fill the model's context and have no answer" * bool(full),
    )
    return "; ".join(filter(None, clauses))


def memory_row(step: int, phases: Mapping[str, tuple[int, Mapping[str, int]]], rank: int = 0) -> Row:
    """The row of a step whose memory was measured, on one rank.

    phases: name, in the order of the step -> (most bytes allocated at once, bytes by category at that time).
    """
    sizes = {name: {"peak": peak, **parts} for name, (peak, parts) in phases.items()}
    return {"kind": "memory", "step": step, "rank": rank, "phases": sizes}


def fullest_memory(rows: Sequence[Row]) -> dict[str, int]:
    """Bytes by category, and their sum as "peak", at the highest peak of any rank in the steps whose
    categories were counted; {} where none were.

    rows: of kind "memory".
    """
    watched = (row["phases"] for row in rows if "step" not in row["phases"])
    phases = (sizes for phases in watched for sizes in phases.values())
    return dict(max(phases, key=lambda sizes: sizes["peak"], default={}))


def time_now(then: float | None = None) -> str:
    """The time with this machine's zone, to the second, in ISO 8601. then: seconds since 1970; None: now."""
    now = datetime.now() if then is None else datetime.fromtimestamp(then)
    return now.astimezone().isoformat(timespec="seconds")


def memory_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Peak memory in MiB as text: (heads of the columns, lines of a category each; the peak is the last one).

    rows: of `memory_row`, of one run. Categories that are 0 everywhere are left out.
    """
    columns = [(row["step"], name, sizes) for row in rows for name, sizes in row["phases"].items()]
    most = max((sizes["peak"] for _, _, sizes in columns), default=0)
    digits = 0 if most >= 10 * MIB else 2
    names = [*dict.fromkeys(name for _, _, sizes in columns for name in sizes if name != "peak"), "peak"]
    lines = [
        [name.replace("_", " "), *(f"{sizes.get(name, 0) / MIB:,.{digits}f}" for _, _, sizes in columns)]
        for name in names
        if any(sizes.get(name, 0) >= 0.5 * MIB / 10**digits for _, _, sizes in columns)
    ]
    return ["", *(f"step {step}\n{name}" for step, name, _ in columns)], lines


def share_of_peak(
    flops: float | None, seconds: float, world: int, peak_flops_per_second: float | None
) -> float | None:
    """FLOPs of a step as a share of the peak of `world` devices over its `seconds`; None if unknown.

    flops: of all devices. peak_flops_per_second: of one.
    """
    if flops is None or peak_flops_per_second is None:
        return None
    return flops / (seconds * world * peak_flops_per_second)


def possible(share: float | None) -> float | None:
    """The share of peak, or None where it is above 1, which no device can reach."""
    return share if share is not None and share <= 1 else None
