"""Panels of a dry run: memory over the first two steps, streams, passes of the pipeline, the roofline.

    RankTrace               ─> memory_panel     bytes by category, phases above them, peaks marked
    busy intervals          ─> streams_panel    compute and communication of one rank
    passes of several ranks ─> pipeline_panel   gaps are the bubble
    kernels by kind         ─> roofline_panel   FLOP/s over FLOPs per byte

What a chart can't show is thinned: of memory the highest of each stretch stays, so no peak is lost; of
streams, neighbours that are closer than a pixel become one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from meshtune.dryrun.costs import base_name
from meshtune.dryrun.kernels import Kernels
from meshtune.dryrun.streams import COMPUTE, RankTime, StepTime
from meshtune.meter.trace import CATEGORIES, RankTrace, StepTrace
from meshtune.plan.machine import Machine
from meshtune.plan.over_time import Timed
from meshtune.plan.seconds.gpu import matmul_rate
from meshtune.report.draw.kinds import (
    Areas,
    Axis,
    Band,
    Group,
    Guide,
    Interval,
    Mark,
    Point,
    Scatter,
    Timeline,
)
from meshtune.report.draw.thin import MOST_ROWS
from meshtune.report.dryrun.living import described, levels
from meshtune.report.plan.passes import passes_panel
from meshtune.units import GIB, human, significant

COLUMNS = 400  # of bands over one step: where more phases follow each other, the longest in each is drawn
MOST_INTERVALS = 2000  # of one timeline
NEAR = 0.3  # share of a GPU's memory from which a peak is drawn below its capacity
FINEST = 2000  # pixels of a timeline, about
NAMED = 6  # kinds of kernels without FLOPs
AREA, TERA = 2000, 1e12  # square px of a dot of the roofline that is all of the time; FLOP/s of a TFLOP/s
STEPS, END = ("first step", "later steps"), "end of the step"

Starts = Sequence[float]  # of each operation of a step in seconds, ascending, then the step's end


def shown(category: str) -> str:
    """Name of a category in charts and tables: "gathered weights"."""
    return category.replace("_", " ")


def rank_title(trace: RankTrace) -> str:
    """The rank with its pipeline stages: "rank 32 (stage 4)"."""
    stages = ", ".join(map(str, trace.stages))
    several = "s" if len(trace.stages) > 1 else ""
    return f"rank {trace.rank} (stage{several} {stages})" if stages else f"rank {trace.rank}"


def memory_panel(
    trace: RankTrace, *, capacity: float = 0, starts: Sequence[Starts] = (), most: int = MOST_ROWS
) -> Areas:
    """Bytes of a rank by category, over its first step and a later one.

    capacity: bytes of a GPU, which are marked if the peak comes near them; 0: not known. starts: for each
    step; (): the axis counts its operations. most: levels of a step that are drawn.
    """
    rows: list[tuple[float, dict[str, int], str]] = []  # x, bytes by category, event
    bands, sections, peaks = [], [], []
    begin = 0.0
    for number, step in enumerate(trace.steps):
        times = starts[number] if starts else [float(at) for at in range(len(step.operations) + 1)]
        for at, sizes in levels(step, most):
            rows.append((begin + times[min(at, len(times) - 1)], sizes, _event(step, at)))
        bands += [Band(begin + one.start, begin + one.end, one.name) for one in _bands(step, times)]
        sections.append(Mark(begin, STEPS[number]))
        size, at = step.peak()
        peaks.append(Point(begin + times[max(at, 0)], size / GIB, f"peak {human(size)}"))
        begin += times[-1]
        rows.append((begin, rows[-1][1], END))  # the last level lasts until the step ends
    near = capacity and max(point.y for point in peaks) * GIB > NEAR * capacity
    parts = {name: tuple(sizes[name] / GIB for _, sizes, _ in rows) for name in CATEGORIES}
    return Areas(
        f"memory_of_rank_{trace.rank}",
        f"Memory of {rank_title(trace)} over a step{_some(trace)}",
        "GiB",
        tuple(x for x, _, _ in rows),
        {shown(name): sizes for name, sizes in parts.items() if any(sizes)},
        tuple(event for _, _, event in rows),
        "seconds" if starts else "operations",
        Mark(capacity / GIB, f"capacity {capacity / GIB:.1f} GiB") if near else None,
        height=320,
        joined="steps",
        bands=tuple(bands),
        sections=tuple(sections),
        peaks=tuple(peaks),
    )


def _some(trace: RankTrace) -> str:
    """ ", n of its m micro-batches" where some were not traced."""
    some, every = trace.micro_batches, trace.of
    return "" if some == every else f", {some} of its {every} micro-batches"


def _event(step: StepTrace, at: int) -> str:
    return described(step.operations[at]) if at < len(step.operations) else END


def _bands(step: StepTrace, times: Starts) -> list[Band]:
    """Phases of a step one after the other. times: of its operations, then its end."""
    stretches: list[Band] = []
    for phase, some in groupby(enumerate(step.operations), key=lambda pair: pair[1].phase):
        numbers = [number for number, _ in some]
        stretches.append(Band(times[numbers[0]], times[numbers[-1] + 1], phase))
    if len(stretches) <= COLUMNS:
        return stretches
    length = (times[-1] - times[0]) / COLUMNS
    columns: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    for one in stretches:
        for number in range(int(one.start / length), min(int(one.end / length) + 1, COLUMNS)):
            overlap = min(one.end, (number + 1) * length) - max(one.start, number * length)
            columns[number][one.name] = columns[number].get(one.name, 0.0) + overlap
    longest = [max(column, key=lambda name: column[name]) for column in columns]
    changed = [number for number in range(COLUMNS) if number == 0 or longest[number] != longest[number - 1]]
    return [
        Band(first * length, last * length, longest[first]) for first, last in pairwise([*changed, COLUMNS])
    ]


# streams #


def busy(rank: RankTime) -> list[Interval]:
    """Kernels and collectives of a rank, a lane for each stream; kernels have the colour of their phase."""
    return [
        Interval(
            each.stream,
            each.begin,
            each.end,
            each.phase if each.stream == COMPUTE else each.part,
            " ".join(filter(None, (each.name, each.module))),
        )
        for each in rank.intervals
    ]


def streams_panel(busy: Iterable[Interval], *, title: str, key: str = "streams") -> Timeline:
    """Streams of one rank below each other, the busiest first. busy: in any order.

    If there are more than MOST_INTERVALS, those of one colour that are closer than a pixel are drawn as one;
    if they are still too many, those shorter than a pixel are drawn with the one before.
    """
    every = sorted(busy, key=lambda one: (one.lane, one.start))
    lengths: defaultdict[str, float] = defaultdict(float)
    for one in every:
        lengths[one.lane] += one.end - one.start
    end = max((one.end for one in every), default=0.0)
    pixel, drawn = 0.0, every
    while len(drawn) > MOST_INTERVALS:
        shortest = pixel  # 0 at first: then none is too short
        pixel = 2 * pixel or end / FINEST
        drawn = _joined(_joined(every, pixel), pixel, shortest)
    if pixel:
        bars = f"{len(drawn):,} bars for {len(every):,} operations"
        title += f": {bars}, as neighbours closer than {significant(1e6 * pixel, 2)} µs are joined"
    lanes = sorted(lengths, key=lambda stream: -lengths[stream])
    return Timeline(key, title, "seconds", tuple(lanes), tuple(drawn))


def _joined(every: Sequence[Interval], pixel: float, shortest: float = 0.0) -> list[Interval]:
    """Join neighbours that are closer than `pixel` seconds, if they have one colour or the later one is not
    longer than `shortest`.
    """
    joined: list[Interval] = []
    for one in every:
        last = joined[-1] if joined else None
        near = last is not None and last.lane == one.lane and one.start - last.end <= pixel
        if last is not None and near and (one.name == last.name or one.end - one.start <= shortest):
            longer = max(last, one, key=lambda each: each.end - each.start)
            end = max(last.end, one.end)
            joined[-1] = Interval(last.lane, last.start, end, last.name, longer.detail)
        else:
            joined.append(one)
    return joined


def pipeline_panel(timed: Sequence[Timed], *, title: str = "The pipeline over one step") -> Timeline:
    """Passes of each pipeline rank, and in the title the share of the step that is in none of them."""
    ranks = {one.rank for one in timed}
    length = max(one.end for one in timed) - min(one.start for one in timed)
    waits = 1 - sum(one.end - one.start for one in timed) / (length * len(ranks))
    return passes_panel(timed, f"{title}: a rank runs no pass for {waits:.1%} of it")


# Roofline #


def roofline_panel(kinds: Sequence[Kernels], machine: Machine, peak: float, *, title: str) -> Scatter | None:
    """FLOP/s over FLOPs per byte of each kind of kernel, below the roof of the prediction and, dashed, of the
    data sheet. Its unit names the kernels without FLOPs; None where all are.

    kinds: of KernelTable. peak: FLOP/s of the data sheet.
    """
    drawn = [row for row in kinds if row.flops and row.bytes and row.seconds]
    if not drawn:
        return None
    every, rest = sum(row.seconds for row in kinds), [row for row in kinds if row not in drawn]
    names = [f"{base_name(row.name)}, {row.place}: {row.seconds / every:.1%}" for row in drawn + rest]
    pairs = zip(drawn, names, strict=False)
    points = [Point(row.intensity, row.flops / row.seconds / TERA, name) for row, name in pairs]
    roofs = [(float(peak), float(machine.bandwidth), "data sheet")]
    roofs.append((float(matmul_rate(machine)), float(machine.bandwidth * machine.memory), "predicted"))
    places = [point.x for point in points] + [rate / bandwidth for rate, bandwidth, _ in roofs]
    low, high = min(places) / 6, max(places) * 6
    guides = tuple(
        Guide(
            (low, rate / bandwidth, high), (low * bandwidth / TERA, rate / TERA, rate / TERA),
            f"{name}: {significant(rate / TERA, 3)}", solid=name == "predicted",
        )
        for rate, bandwidth, name in roofs
    )  # fmt: skip
    heights = [*guides[0].y, *guides[1].y, *(point.y for point in points)]
    without = f"without FLOPs {sum(row.seconds for row in rest) / every:.1%}"
    without += f" ({'; '.join(names[len(drawn) :][:NAMED])}{' …' * (len(rest) > NAMED)})"
    return Scatter(
        "roofline", title, f"areas: shares of the kernels' seconds; {without}",
        tuple(
            Group(point.text, (point,), size=AREA * row.seconds / every, opacity=0.8)
            for row, point in zip(drawn, points, strict=True)
        ),
        Axis("FLOPs per byte", (low, high), log=True),
        Axis("TFLOP/s", (min(heights) / 1.5, max(heights) * 1.5), log=True), guides=guides, item="kernels",
    )  # fmt: skip


# Times #


def passes(rank: RankTime) -> list[Timed]:
    """Passes of a rank, each from its first kernel to its last one, in the order in which they begin."""
    found: list[Timed] = []
    for each in rank.intervals:
        kind, stage, micro_batch = each.run
        if each.stream != COMPUTE or not kind:
            continue
        if found and (found[-1].kind, found[-1].stage, found[-1].micro_batch) == each.run:
            found[-1] = found[-1]._replace(end=each.end)
        else:
            found.append(Timed(rank.pp, kind, each.begin, each.end, stage, micro_batch))
    return found


def starts_of(trace: RankTrace, times: Sequence[StepTime]) -> list[list[float]]:
    """`starts` of the operations of each step; [] for a rank without times, and one whose micro-batches were
    not all traced: its operations run at several times.

    times: of both steps, or none.
    """
    if trace.micro_batches < trace.of:
        return []
    both = zip(trace.steps, times, strict=False)
    return [starts(rank, step, time.seconds) for step, time in both if (rank := time.of_trace(trace.rank))]


def starts(rank: RankTime, step: StepTrace, seconds: float) -> list[float]:
    """Seconds at which each operation begins on the compute stream, ascending, then the step's end.

    Operations without a kernel, and those on other streams, begin with the last kernel before them. seconds:
    of the step.
    """
    begins: dict[int, float] = {}
    for each in rank.intervals:
        if each.stream == COMPUTE:
            begins.setdefault(each.operation, each.begin)
    times, now = [], 0.0
    for number in range(len(step.operations)):
        now = max(now, begins.get(number, now))
        times.append(now)
    return [*times, seconds]
