"""The likeliest causes of a slow run, only from its rows, with their evidence and the remedy.

    rows of kind run, time, save ──> causes ──> [Cause, …], the costliest first

Every number is a median over the warm steps unless its threshold says otherwise. A part that was planned is
held against its plan; what has no plan, only against the thresholds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from meshtune.layout import Layout
from meshtune.placement.ranks import coordinates
from meshtune.rundir import Row
from meshtune.units import counted, duration, human

MIN_STEPS = 8  # warm steps below which no cause is named: medians of fewer are noise
SHOWN = 3  # causes of a run at most
PASSES = ("forward", "backward", "recomputation")


class Threshold(NamedTuple):
    """When a cause is named: it costs `share` of the time, and its other quantity reaches `limit`."""

    share: float  # of the step; of slow saving, of all the run's time
    limit: float
    quantity: str  # that `limit` is of
    reason: str


# Fixed before the trial in validation/why-slow.md; docs/measuring.md shows this table.
THRESHOLDS = {
    "slow rank": Threshold(
        0.15, 0.8, "share of the steps in which this rank is the slowest of its stage, at least",
        "ranks that share a machine differ by some percent, and each in turn is the slowest",
    ),
    "waiting for data": Threshold(
        0.10, 0.0, "none: seconds without the longest wait",
        "prepared data take less than 1 % of a step; a single hiccup isn't a cause",
    ),
    "small micro-batches": Threshold(
        0.25, 0.01, "on a GPU, share of the passes that is left when the host has started them all, below",
        "larger micro-batches need fewer operations: most of that quarter is saved; a GPU that is never "
        "behind its host waits for it",
    ),
    "recompilation": Threshold(
        0.05, 2, "steps after the warm-up that compiled, at least",
        "compiled once more for changing widths, a step does not compile again",
    ),
    "slow collectives": Threshold(
        0.10, 3.0, "times the plan, or the slowest of usual links (LINKS), at least",
        "a plan without contention is exceeded by half at times; three times means another link or a fault",
    ),
    "overlap is off": Threshold(
        0.05, 0.01, "longest time from the start of an all-reduce to its wait, of a backward pass, below",
        "with overlap the first one starts after the last block's backward and is waited for at the end",
    ),
    "padding": Threshold(
        0.15, 0.0, "none: padded columns' share of the passes",
        "packed sequences have a few percent, sorted ones about ten",
    ),
    "uneven experts": Threshold(
        0.10, 1.2, "tokens of the rank whose experts have most, over the mean rank's, at least",
        "below it the other ranks wait less than a sixth of the experts' time",
    ),
    "allocator retries": Threshold(
        0.02, 0.1, "share of the steps with a retry, at least",
        "each retry stops the GPU to free its cached memory; a first one may come with the longest batch",
    ),
    "slow saving": Threshold(
        0.10, 2, "checkpoints before the last step, at least",
        "a checkpoint is written during training: the run waits only for a copy",
    ),
    "slowed GPU": Threshold(
        0.25, 0.5, "share of the driver's answers that name a limit of heat or power, at least",
        "under full load the power limit usually takes up to a fifth of the clock",
    ),
    "slower than planned": Threshold(
        0.20, 2.0, "times the plan, at least; named where nothing else is",
        "the planner's error bars are below a half: twice is another cause",
    ),
}  # fmt: skip

LINKS = {  # torch's type of device -> (seconds a collective, bytes/s): the slowest of usual links
    "cpu": (2e-3, 0.1e9),  # gloo between processes of a busy machine
    "cuda": (2e-4, 2e9),  # 25 Gbit/s Ethernet between hosts
}
AXES = {  # part of the communication -> its ranks in words
    "tensor": "tensor parallelism (tp)", "context": "context parallelism (cp)",
    "data": "data parallelism (dp)", "experts": "expert parallelism (ep)", "other": "all ranks",
}  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """Something that makes a run slow."""

    name: str  # one of THRESHOLDS
    share: float  # of the step; of slow saving, of all the run's time
    evidence: str  # a sentence
    remedy: str  # a sentence

    @property
    def sentence(self) -> str:
        """Name, share, evidence and remedy in one line."""
        return f"{self.name} ({self.share:.0%} of the time): {self.evidence} {self.remedy}"

    def row(self) -> Row:
        """The row of kind "cause"."""
        return {"kind": "cause", "cause": self.name} | {
            name: getattr(self, name) for name in ("share", "evidence", "remedy")
        }

    @classmethod
    def of_row(cls, row: Row) -> "Cause":
        """The cause that a row tells."""
        return cls(row["cause"], row["share"], row["evidence"], row["remedy"])


@dataclass(frozen=True)
class Steps:
    """The warm steps of one start of a run."""

    rows: Sequence[Row]  # of kind "time", without warm-up
    run: Row  # of kind "run": layout, device_type, predicted
    others: Sequence[Row]  # the start's other rows

    @property
    def seconds(self) -> float:
        """Median step."""
        return median(row["seconds"] for row in self.rows)

    @property
    def layout(self) -> Layout:
        return Layout.parse(self.run["layout"])

    @property
    def on_gpu(self) -> bool:
        return self.run.get("device_type") == "cuda"

    def prediction(self, name: str) -> Mapping[str, float]:
        """The plan's seconds; empty without any.

        name: "time", by the parts of plan.seconds.step.Seconds, or "parts", by those that are measured.
        """
        return (self.run.get("predicted") or {}).get(name) or {}

    def median(self, value: Callable[[Row], float]) -> float:
        return median(map(value, self.rows))

    def part(self, *names: str) -> float:
        """Median seconds of some parts of the step together."""
        return self.median(lambda row: sum(row["parts"][name] for name in names))


def causes(rows: Sequence[Row]) -> list[Cause]:
    """The causes that make the last start of a run slow, the costliest first; none where it is healthy.

    rows: of metrics.jsonl, at least those of kind "run" and "time".
    """
    starts = [number for number, row in enumerate(rows) if row["kind"] == "run"]
    run, *later = rows[starts[-1] :] if starts else [{}]
    warm = [row for row in later if row["kind"] == "time" and not row.get("warm_up")]
    if len(warm) < MIN_STEPS:
        return []
    steps = Steps(warm, run, [row for row in later if row["kind"] != "time"])
    found = [cause for rule in RULES for cause in rule(steps) if cause.share >= THRESHOLDS[cause.name].share]
    # A rank whose experts have more tokens computes longer, without being slow.
    uneven = sum(cause.share for cause in found if cause.name == "uneven experts")
    slow = THRESHOLDS["slow rank"].share + uneven
    found = [cause for cause in found if cause.name != "slow rank" or cause.share >= slow]
    found = found or list(_slower_than_planned(steps))
    return sorted(found, key=lambda cause: -cause.share)[:SHOWN]


def _slow_rank(steps: Steps) -> Iterator[Cause]:
    """Yield the rank that computes longer than the others of its pipeline stage."""
    first, limit = steps.rows[0], THRESHOLDS["slow rank"].limit
    if len(first.get("busy", ())) < 2:
        return
    stages: dict[int, list[int]] = {}
    for rank in range(len(first["busy"])):
        stages.setdefault(coordinates(steps.layout, rank)["pp"], []).append(rank)
    for stage in stages.values():
        for rank in stage if len(stage) > 1 else ():
            others = [other for other in stage if other != rank]
            behind = [
                row["busy"][rank] - median(row["busy"][other] for other in others) for row in steps.rows
            ]
            slowest = sum(
                row["busy"][rank] >= max(row["busy"][other] for other in others) for row in steps.rows
            )
            if slowest >= limit * len(behind):
                usual = steps.median(
                    lambda row, others=others: median(row["busy"][other] for other in others)
                )
                late = median(behind)
                yield Cause(
                    "slow rank", late / steps.seconds,
                    f"Rank {rank} computes {duration(usual + late)} a step, the others {duration(usual)}: "
                    f"{late / usual:.0%} longer, and they wait for it.",
                    f"Compare rank {rank}'s device and host with the others (clock, temperature, other "
                    "processes), or leave it out.",
                )  # fmt: skip


def _waiting_for_data(steps: Steps) -> Iterator[Cause]:
    waits = [max(row.get("loading") or [row["parts"]["loading"]]) for row in steps.rows]
    worst = waits.index(max(waits))
    left = [number for number in range(len(waits)) if number != worst]
    share = sum(waits[number] for number in left) / sum(steps.rows[number]["seconds"] for number in left)
    ranks = steps.rows[worst].get("loading", [])
    who = f"Rank {ranks.index(max(ranks))}" if len(ranks) > 1 else "The step"
    yield Cause(
        "waiting for data", share,
        f"{who} waits {duration(sum(waits) / len(waits))} for the batch of a step of "
        f"{duration(steps.seconds)}.",
        "Put data and data.cache on a faster disk; for streamed data, prepare them once without streaming.",
    )  # fmt: skip


def _small_micro_batches(steps: Steps) -> Iterator[Cause]:
    """Yield the host's cost of starting operations: counted on a processor; a GPU shows it by being idle."""
    passes, layout = steps.part(*PASSES), steps.layout
    grown = layout.micro_batch_size * min(layout.gradient_accumulation_steps, 8)
    remedy = (
        f"Use larger micro-batches for the same global batch (mb{grown} instead of "
        f"mb{layout.micro_batch_size})."
        if grown > layout.micro_batch_size
        else "Use larger micro-batches or longer sequences (data.seq_len), or compiled blocks."
    )
    if steps.on_gpu:
        if any(row.get("backlog") is None for row in steps.rows):
            return
        queued = steps.median(lambda row: row["backlog"])
        if queued < THRESHOLDS["small micro-batches"].limit * passes:
            yield Cause(
                "small micro-batches", passes / steps.seconds,
                f"The GPU has nothing left to do {duration(queued)} after the host has started the passes "
                f"of {duration(passes)}: it waits for the host.",
                remedy,
            )  # fmt: skip
    elif measured := [row for row in steps.rows if row.get("launching")]:
        launching, busy = (median(row[name] for row in measured) for name in ("launching", "host_seconds"))
        yield Cause(
            "small micro-batches", min(1.0, median(row["launching"] / row["seconds"] for row in measured)),
            f"Starting operations takes {duration(launching)} of a step of {duration(steps.seconds)} (rank "
            f"0's processor works for {duration(busy)} of it), whatever they compute.",
            remedy,
        )  # fmt: skip


def _recompilation(steps: Steps) -> Iterator[Cause]:
    """Yield what the steps that compile take longer than the quickest quarter of the steps."""
    compiled = [row for row in steps.rows if row.get("recompilations")]
    if len(compiled) < THRESHOLDS["recompilation"].limit:
        return
    quick = sorted(row["seconds"] for row in steps.rows)[len(steps.rows) // 4]
    others = [row["seconds"] for row in steps.rows if row not in compiled]
    usual = median(others) if others else quick
    extra = sum(max(0.0, row["seconds"] - usual) for row in compiled)
    yield Cause(
        "recompilation", extra / sum(row["seconds"] for row in steps.rows),
        f"{counted(len(compiled), 'step')} of {len(steps.rows)} compiled the model again, "
        f"{sum(row['recompilations'] for row in compiled)} graphs in {duration(extra)}.",
        "Make batches equally wide (data.packing=true), or set train.compile=false.",
    )  # fmt: skip


def _slow_collectives(steps: Steps) -> Iterator[Cause]:
    """Yield each axis whose collectives hold the step up for longer than their plan or any usual link."""
    (latency, rate), plan = LINKS["cuda" if steps.on_gpu else "cpu"], steps.prediction("time")
    for axis in sorted({axis for row in steps.rows for axis in row.get("exposed", ())}):
        exposed = steps.median(lambda row, axis=axis: row["exposed"].get(axis, 0.0))
        calls, size = (
            steps.median(lambda row, axis=axis, place=place: row["traffic"].get(axis, (0, 0))[place])
            for place in (0, 1)
        )
        expected = max(calls * latency + size / rate, plan.get(axis, 0.0))
        if calls and exposed >= THRESHOLDS["slow collectives"].limit * expected:
            planned = f"; planned: {duration(plan[axis])}" if axis in plan else ""
            yield Cause(
                "slow collectives", exposed / steps.seconds,
                f"{counted(round(calls), 'collective')} of {AXES[axis]} with {human(size)} a step hold it "
                f"up for {duration(exposed)}; a slow link would take {duration(expected)}{planned}.",
                f"Check the link between the ranks of {AXES[axis]} (NCCL_DEBUG=INFO names the one in use, "
                "NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose it), or place this axis inside a host.",
            )  # fmt: skip


def _overlap_is_off(steps: Steps) -> Iterator[Cause]:
    """Yield the gradients' all-reduces of replicas, where nothing runs between their start and their wait."""
    ahead = [row["head_start"] for row in steps.rows if row.get("head_start") is not None]
    backward = steps.part("backward", "recomputation") / steps.layout.gradient_accumulation_steps
    if len(ahead) < len(steps.rows) or steps.layout.zero or steps.layout.pp > 1:
        return
    longest, exposed = median(ahead), steps.median(lambda row: row["exposed"].get("data", 0.0))
    if longest < THRESHOLDS["overlap is off"].limit * backward:
        yield Cause(
            "overlap is off", min(exposed, backward) / steps.seconds,
            f"Each all-reduce of gradients is waited for within {duration(longest)} of its start; the step "
            f"stands still for {duration(exposed)}, which a backward of {duration(backward)} could hide.",
            "Start them asynchronously: unset TORCH_NCCL_BLOCKING_WAIT and CUDA_LAUNCH_BLOCKING, and look "
            "for hooks that wait.",
        )  # fmt: skip


def _padding(steps: Steps) -> Iterator[Cause]:
    padded, passes = steps.median(lambda row: row.get("padding", 0.0)), steps.part(*PASSES)
    yield Cause(
        "padding", padded * passes / steps.seconds,
        f"{padded:.0%} of the columns that are computed are padding.",
        "Set data.packing=true, or a data.seq_len nearer to the rows' lengths.",
    )  # fmt: skip


def imbalance_of(rows: Iterable[Row]) -> float:
    """Tokens of the rank whose experts have most, over the mean rank's: the mean over layers of the median
    step, 1.0 without ep. rows: of kind "experts".
    """
    steps = [fmean(row["fullest_rank"]) for row in rows if row["fullest_rank"]]
    return median(steps) if steps else 1.0


def _uneven_experts(steps: Steps) -> Iterator[Cause]:
    """Yield what ranks wait for the one whose experts have most tokens, by the share of FLOPs in experts."""
    loads = [row for row in steps.others if row["kind"] == "experts" and row["fullest"]]
    fullest = imbalance_of(loads)
    if fullest < THRESHOLDS["uneven experts"].limit:
        return
    largest = median(max(row["fullest"]) for row in loads)
    computed = (steps.run.get("expert_share") or 0.0) * steps.part(*PASSES)
    yield Cause(
        "uneven experts", (1 - 1 / fullest) * computed / steps.seconds,
        f"The rank whose experts have most tokens has {fullest:.2f} times the mean of its layer, one expert "
        f"{largest:.1f} times; experts are {duration(computed)} of a step of {duration(steps.seconds)}.",
        "Set experts.balance=loss, or a larger experts.aux_loss; fewer ranks for experts spread less.",
    )  # fmt: skip


def _allocator_retries(steps: Steps) -> Iterator[Cause]:
    retried = [row for row in steps.rows if row.get("allocator_retries")]
    if len(retried) < max(1, THRESHOLDS["allocator retries"].limit * len(steps.rows)):
        return
    others = [row["seconds"] for row in steps.rows if row not in retried]
    usual = median(others) if others else min(row["seconds"] for row in steps.rows)
    extra = sum(max(0.0, row["seconds"] - usual) for row in retried)
    yield Cause(
        "allocator retries", extra / sum(row["seconds"] for row in steps.rows),
        f"The allocator freed its cache and tried again in {len(retried)} of {len(steps.rows)} steps: the "
        "GPU's memory is full.",
        "Use smaller micro-batches or recompute more; `meshtune plan` shows layouts that need less memory.",
    )  # fmt: skip


def _slow_saving(steps: Steps) -> Iterator[Cause]:
    """Yield what the run waits for checkpoints other than the last step's, which every run writes."""
    last = steps.rows[-1]["step"]
    saves = [row["seconds"] for row in steps.others if row["kind"] == "save" and row["step"] < last]
    if len(saves) < THRESHOLDS["slow saving"].limit:
        return
    whole = steps.seconds * (last - steps.rows[0]["step"] + 1) + sum(saves)
    yield Cause(
        "slow saving", sum(saves) / whole,
        f"The run waits {duration(median(saves))} for each of {len(saves)} checkpoints, steps take "
        f"{duration(steps.seconds)}.",
        "Save less often (checkpoint.every), keep checkpoint.async_save=true, or put `output` on a "
        "faster disk.",
    )  # fmt: skip


def _slowed_gpu(steps: Steps) -> Iterator[Cause]:
    """Yield the clock that the driver takes away, where it tells why."""
    answers = [row for row in steps.others if row["kind"] == "device"]
    slowed = [row for row in answers if row["limits"]]
    if not slowed or len(slowed) < THRESHOLDS["slowed GPU"].limit * len(answers):
        return
    clock = median(row["clock"] / row["full_clock"] for row in slowed)
    limits = " and ".join(sorted({limit for row in slowed for limit in row["limits"]}))
    yield Cause(
        "slowed GPU", (1 - clock) * steps.part(*PASSES) / steps.seconds,
        f"The driver holds {slowed[-1]['gpu']} at {clock:.0%} of its clock because of {limits} in "
        f"{len(slowed)} of {len(answers)} answers.",
        "Check cooling and the power limit (`nvidia-smi -q -d PERFORMANCE,POWER`).",
    )  # fmt: skip


def _slower_than_planned(steps: Steps) -> Iterator[Cause]:
    """Yield parts that take a multiple of their plan."""
    compared = {
        "The passes take": PASSES, "The optimizer takes": ("optimizer",),
        "The pipeline's bubble takes": ("bubble",),
    }  # fmt: skip
    limit, planned_parts = THRESHOLDS["slower than planned"], steps.prediction("parts")
    for name, parts in compared.items():
        taken, planned = steps.part(*parts), sum(planned_parts.get(part, 0.0) for part in parts)
        share = (taken - planned) / steps.seconds
        if planned and taken >= limit.limit * planned and share >= limit.share:
            yield Cause(
                "slower than planned", share,
                f"{name} {duration(taken)} a step, planned: {duration(planned)}.",
                "`meshtune bench` compares each part with the plan and the dry run; other processes on the "
                "devices and a low clock are the usual reasons.",
            )  # fmt: skip


RULES: Sequence[Callable[[Steps], Iterator[Cause]]] = (
    _slow_rank, _waiting_for_data, _small_micro_batches, _recompilation, _slow_collectives, _overlap_is_off,
    _padding, _uneven_experts, _allocator_retries, _slow_saving, _slowed_gpu,
)  # fmt: skip
