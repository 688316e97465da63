"""The dry run against real training steps, over a grid of layouts on CPU ranks: `make validation-dryrun`.

    python validation/dryrun_grid.py [--only tp2-sp --only LoRA] [--json FILE.json] [--table FILE.md]
    python validation/dryrun_grid.py --kernels cuda      # the path of CUDA's kernels, on fakes alone

Each case of dryrun_cases.py trains a tiny model for two steps on real gloo ranks, every operation watched by
the Recorder that watches the fake ones too, and traces the two steps of every rank on fake tensors. Compared,
without any tolerance:

    bytes         the peak of each phase of both steps and of the reference's pass, in total and in each
                  category of the ledger
    collectives   of both steps, in the order in which they are issued: op, axis, bytes
    host memory   bytes of its buffers, and copies there and back in their order: bytes, phase

gloo's worker threads let go of a collective's tensors some time after they have woken who waits, so that a
real step may hold some that it has freed. Collectives that wait return here only when that has happened.
Where a real step differs nevertheless, it is run again, at most twice; the table says how often.

`--kernels cuda` has no real ranks to compare with. Each case must run through, and hold the same bytes of
weights, gathered weights, gradients and optimizer state as on the CPU's path.
"""

import argparse
import datetime
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

import torch  # noqa: E402
import transformers  # noqa: E402
from dryrun_cases import GRID, Case  # noqa: E402
from ranks import run_ranks  # noqa: E402

from meshtune.dryrun.ranks import trace_ranks  # noqa: E402
from meshtune.dryrun.world import (  # noqa: E402
    Job,
    batch_of,
    record,
    record_reference,
    trace_rank,
    untrained_model,
)
from meshtune.meter.trace import (  # noqa: E402
    GATHERED,
    GRADIENTS,
    OFFLOADS,
    OPTIMIZER,
    WEIGHTS,
    RankTrace,
    StepTrace,
)
from meshtune.parallel.mesh import join  # noqa: E402
from meshtune.rundir import write_text_atomically  # noqa: E402
from meshtune.train.model import RankModel, rank_model  # noqa: E402
from meshtune.units import counted  # noqa: E402

REPEATS = 2  # of a real step that differs
STATES = (WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER)

# A rank's two steps #


class Step(NamedTuple):
    """One step of one rank, as far as it is compared."""

    peaks: dict[str, tuple[int, dict[str, int]]]  # phase -> (bytes, those of each category that has any)
    most: dict[str, int]  # category -> the most bytes that it has at any time of the step
    collectives: list[tuple[str, str, int]]  # op, axis, bytes
    host: int  # bytes of host memory
    copies: list[tuple[str, int, str]]  # there and back, in their order: operation, bytes, phase


def summary(steps: Sequence[StepTrace]) -> list[Step]:
    """Return what is compared of a rank's steps."""
    summaries = []
    for step in steps:
        most: Counter[str] = Counter()
        for _, sizes in step.timeline():
            most |= Counter(sizes)
        peaks = {phase: (total, dict(+Counter(parts))) for phase, (total, parts) in step.peaks.items()}
        collectives = [(each.op, each.axis, each.bytes) for each in step.collectives()]
        moved = [each for each in step.operations if each.name in OFFLOADS]
        copies = [(each.name, each.written, each.phase) for each in moved]
        summaries.append(Step(peaks, dict(most), collectives, step.host_bytes, copies))
    return summaries


def real_steps(job: Job) -> list[Step]:
    """Train two steps on this rank, one of the layout's, with real tensors, behind its reference's pass."""
    world, before = join(job.layout, torch.device("cpu")), []
    batch, steps = batch_of(job, world), [StepTrace(1), StepTrace(2)]
    if job.reference:
        before = [record_reference(untrained_model(job, world, nullcontext()), batch.micro_batches)]
    with patch("meshtune.train.model.balance_of", return_value=None):  # a dry run measures no loads
        model = rank_model(job.spec, world, optimizer=job.optimizer, tokens_per_sequence=job.seq_len)
    choose_experts(model, job)
    if (wanted := job.spec.preference) and wanted.row.reference:
        before = before or [record_reference(model, batch.micro_batches)]
    record(
        model, model.passes.localise(batch), steps,
        units=batch.units, max_grad_norm=job.max_grad_norm, mismatched=batch.mismatched,
    )  # fmt: skip
    return summary([*before, *steps])


def choose_experts(model: RankModel, job: Job) -> None:
    """Let each router with a bias choose the first experts for all tokens, or some of each rank."""
    for module in model.parallel.modules.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if isinstance(bias, torch.Tensor):
            chosen: Any = module.top_k
            step = 1 if job.routing.kind == "worst" else len(bias) // chosen
            bias[: step * chosen : step] = 9


def traces(job: Job) -> list[RankTrace]:
    """Trace two steps of every rank on fake tensors."""
    ranks = job.layout.world
    return trace_ranks(partial(trace_rank, job), range(ranks), ranks)


def simulated(job: Job) -> list[list[Step]]:
    """Steps of every rank on fake tensors."""
    return [summary(trace.every) for trace in traces(job)]


def real(job: Job) -> list[list[Step]]:
    """Steps of every rank on real tensors and real ranks."""
    return run_ranks(job.layout.world, real_steps, job, seconds=300)


# Comparison #


def differences(expected: Sequence[Sequence[Step]], found: Sequence[Sequence[Step]]) -> Iterator[str]:
    """Sentences on what differs between the ranks' real steps and those on fake tensors."""
    for where, step, fake in _pairs(expected, found):
        for phase in step.peaks.keys() | fake.peaks.keys():
            total, parts = step.peaks.get(phase, (0, {}))
            other, others = fake.peaks.get(phase, (0, {}))
            if (total, parts) != (other, others):
                more = _unequal(parts, others)
                yield f"{where}: peak of {phase} {total:,} bytes, dry run {other:,}: {more}"
        if more := _unequal(step.most, fake.most):
            yield f"{where}: most bytes at any time, {more}"
        if step.host != fake.host:
            yield f"{where}: {step.host:,} bytes of host memory, dry run {fake.host:,}"
        for kind, both in (
            ("collective", zip_longest(step.collectives, fake.collectives)),
            ("copy", zip_longest(step.copies, fake.copies)),
        ):
            wrong = next(((n, *pair) for n, pair in enumerate(both) if pair[0] != pair[1]), None)
            if wrong is not None:
                yield f"{where}: {kind} {wrong[0]} is {wrong[1]}, dry run {wrong[2]}"


def state_differences(expected: Sequence[Sequence[Step]], found: Sequence[Sequence[Step]]) -> Iterator[str]:
    """Sentences on what differs in the model states between two dry runs."""
    for where, step, other in _pairs(expected, found):
        sizes, others = ({name: each.most.get(name, 0) for name in STATES} for each in (step, other))
        if more := _unequal(sizes, others):
            yield f"{where}: most bytes at any time, {more}"


def _pairs(
    expected: Sequence[Sequence[Step]], found: Sequence[Sequence[Step]]
) -> Iterator[tuple[str, Step, Step]]:
    for rank, steps in enumerate(zip(expected, found, strict=True)):
        for number, (step, other) in enumerate(zip(*steps, strict=True), 3 - len(steps[0])):
            yield f"rank {rank}, step {number}", step, other


def _unequal(sizes: dict[str, int], others: dict[str, int]) -> str:
    """Categories whose bytes differ, with both."""
    return ", ".join(
        f"{name} {sizes.get(name, 0):,} | {others.get(name, 0):,}"
        for name in sorted(sizes.keys() | others.keys())
        if sizes.get(name, 0) != others.get(name, 0)
    )


# The grid #


@dataclass(frozen=True)
class Row:
    """One case of the grid."""

    case: str
    ranks: int
    first_peak: int  # bytes of the fullest rank in the first step
    peak: int  # in the second
    sizes: int  # that are compared: (rank, step, phase, category) with bytes
    collectives: int  # of all ranks in both steps
    differences: tuple[str, ...]  # from the last real step; with CUDA's kernels from the CPU's states
    repeats: int  # of the real steps
    seconds: float

    def cells(self) -> str:
        """The row of the table."""
        right = "equal" if not self.differences else f"**{counted(len(self.differences), 'difference')}**"
        return (
            f"| {self.case} | {self.ranks} | {self.first_peak:,} | {self.peak:,} | {self.sizes} | "
            f"{self.collectives:,} | {right} | {self.repeats or ''} |"
        )


def compare(case: Case, kernels: str = "cpu") -> Row:
    """Compare one case with real ranks; with CUDA's kernels, with the states of the CPU's path."""
    started, repeats = time.perf_counter(), 0
    found = simulated(case.job(kernels))
    if kernels == "cuda":
        unequal = [*state_differences(simulated(case.job()), found)]
    else:
        while (unequal := [*differences(real(case.job()), found)]) and repeats < REPEATS:
            print(f"{case.name}: once more, since {unequal[0]}", file=sys.stderr, flush=True)
            repeats += 1
    first, later = ([max(total for total, _ in steps[n].peaks.values()) for steps in found] for n in (-2, -1))
    every = [step for steps in found for step in steps]
    return Row(
        case=case.name,
        ranks=len(found),
        first_peak=max(first),
        peak=max(later),
        sizes=sum(len(parts) for step in every for _, parts in step.peaks.values()),
        collectives=sum(len(step.collectives) for step in every),
        differences=tuple(unequal),
        repeats=repeats,
        seconds=round(time.perf_counter() - started, 1),
    )


def page(rows: Sequence[Row], kernels: str) -> str:
    """All cases as Markdown."""
    left = [case.name for case in GRID if case.name not in {row.case for row in rows}]
    wrong = sum(bool(row.differences) for row in rows)
    against = (
        "real ranks (gloo)" if kernels == "cpu" else "the CPU's path: weights, gradients, optimizer state"
    )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return "\n".join([
        "# The dry run against real training steps",
        "",
        f"{datetime.date.today()}, {versions}, Python {platform.python_version()}; kernels: {kernels}, "
        f"against {against}.",
        "",
        "```",
        "make validation-dryrun" if kernels == "cpu" else "python validation/dryrun_grid.py --kernels cuda",
        "```",
        "",
        f"{counted(len(rows), 'case')}, {len(rows) - wrong} equal; {sum(row.sizes for row in rows):,} sizes "
        f"and {sum(row.collectives for row in rows):,} collectives compared, without a tolerance; "
        f"{counted(sum(row.repeats for row in rows), 'real step')} made again.",
        "[dryrun_grid.py](dryrun_grid.py) says what is compared, [dryrun_cases.py](dryrun_cases.py) has the "
        "models and options. Peaks are bytes of the fullest rank.",
        *(["", f"Not run: {'; '.join(left)}."] if left else []),
        "",
        "| case | ranks | peak, step 1 | peak, step 2 | sizes | collectives | | again |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
        *(row.cells() for row in rows),
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="a part of cases' names, as often as needed")
    parser.add_argument("--kernels", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="the rows; those that it has are not run again")
    parser.add_argument("--done", action="store_true", help="only those that --json has already")
    parser.add_argument("--table", type=Path, help="write the page here, such as validation/dryrun-grid.md")
    options = parser.parse_args()
    parts = options.only or [""]
    done: dict[str, Row] = {}
    if options.json and options.json.exists():
        done = {each["case"]: Row(**each) for each in json.loads(options.json.read_text())}
    rows = []
    for case in GRID:
        if not any(part in case.name for part in parts) or (options.done and case.name not in done):
            continue
        row = done.get(case.name) or compare(case, options.kernels)
        rows.append(row)
        if options.json:
            write_text_atomically(options.json, json.dumps([asdict(each) for each in rows], indent=1) + "\n")
        print(f"{row.cells()} {row.seconds} s", file=sys.stderr, flush=True)
        for sentence in row.differences:
            print(f"    {sentence}", file=sys.stderr, flush=True)
    text = page(rows, options.kernels)
    print(text)
    if options.table:
        write_text_atomically(options.table, text)
    sys.exit(any(row.differences for row in rows))


if __name__ == "__main__":
    main()
