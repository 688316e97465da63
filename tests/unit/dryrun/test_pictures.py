"""Pictures and tables of a simulation, with its streams and passes where its times are known."""

from dataclasses import replace

from made_traces import workload

from meshtune.dryrun.results import drawable
from meshtune.dryrun.simulation import Simulation
from meshtune.dryrun.streams import COMPUTE, Interval, RankTime, StepTime
from meshtune.layout import Layout
from meshtune.meter.trace import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    UPDATE,
    Change,
    Collective,
    Operation,
    RankTrace,
    StepTrace,
    Storage,
)
from meshtune.plan.cluster import cluster_of
from meshtune.plan.seconds.step import PARTS, Seconds
from meshtune.report.dryrun.page import listings, panels
from meshtune.sections import ClusterConfig

NOTHING = Seconds(**dict.fromkeys(PARTS, 0.0))


def step_of(number: int) -> StepTrace:
    """Five operations, the second and fourth without a kernel; the fourth allocates."""
    step = StepTrace(number)
    for phase in (FORWARD, FORWARD, BACKWARD, BACKWARD, UPDATE):
        step.operations.append(Operation("aten.mm.default", phase, "lm_head", 0, 0, (), ""))
    step.storages = [Storage(2**30, ACTIVATIONS, "lm_head", "aten.mm.default", BACKWARD)]
    step.changes = [Change(3, 0, True), Change(4, 0, False)]
    return step


def interval(begin: float, end: float, operation: int, kind: str, stream: str = COMPUTE) -> Interval:
    """An interval of micro-batch 0 on stage 0; without a kind, of the update."""
    phase = {"F": FORWARD, "": UPDATE}.get(kind, BACKWARD)
    number = 0 if kind else -1
    part = "compute" if stream == COMPUTE else "data"
    return Interval(
        stream, begin, end, operation, "aten.mm.default", phase, "lm_head", kind, number, number, part
    )


def time_of(pp: int, trace: int) -> RankTime:
    """A forward in two kernels, a backward whose weights come later, an update in two parts with a gap."""
    intervals = [
        interval(0.0, 0.1, 0, "F"), interval(0.1, 0.4, -1, "F"),
        interval(0.2, 0.6, 1, "F", "dp_shard all_gather"), interval(0.5, 0.7, 2, "I"),
        interval(0.8, 0.9, -1, "W"), interval(0.9, 0.95, 4, ""), interval(1.9, 2.0, -1, ""),
    ]  # fmt: skip
    return RankTime(pp, trace, intervals, NOTHING)


def trace_of(rank: int, stage: int, of: int = 1) -> RankTrace:
    return RankTrace(rank, {"pp": stage}, (stage,), [step_of(1), step_of(2)], 1, of, 0 if of > 1 else -1)


def simulation(layout: str, *traces: RankTrace) -> Simulation:
    parsed = Layout.parse(layout)
    cluster = cluster_of(ClusterConfig(gpu="h100-sxm", gpus=parsed.world)).of_size(parsed.world)
    return Simulation("tiny", parsed, cluster, "cuda", (8,), traces, {trace.rank: "" for trace in traces}, 0)


def test_a_pipeline_has_pictures_of_every_traced_rank():
    time = StepTime(2.0, [time_of(0, 0), time_of(1, 1)], NOTHING)
    run = drawable(simulation("pp2-mb1-ga1", trace_of(0, 0), trace_of(1, 1)), times=[time, time])
    assert [panel.key for panel in panels(run)] == [
        "memory_of_rank_0", "memory_of_rank_1", "pipeline", "streams_of_rank_0", "streams_of_rank_1",
    ]  # fmt: skip
    memory, streams = panels(run)[0], panels(run)[3]
    assert memory.x_title == "seconds" and memory.x[-1] == 4.0
    assert streams.lanes == ("compute", "dp_shard all_gather")
    assert {one.name for one in streams.intervals} == {FORWARD, BACKWARD, UPDATE, "data"}
    assert listings(run)[0].rows[-1] == ("peak", "1.00 GiB", "1.00 GiB", "1.00 GiB", "1.00 GiB")


def test_sentences_on_collectives_count_the_micro_batches_that_were_not_traced():
    """As often as the table of collectives has them."""
    trace = trace_of(0, 0, of=8)
    sent = Collective("all_gather", "tp", 8, 4 * 2**20)
    trace.steps[1].operations[0].collective = sent
    one = replace(
        simulation("tp8-mb1-ga8", trace),
        workload=workload(),
    )
    (sentence,) = one.disagreements
    (row,) = next(table for table in listings(drawable(one)) if table.title.startswith("Collectives")).rows
    assert sentence.startswith("8 all_gathers of 4.00 MiB over tp") and row[3] == "8"
    assert one.as_dict()["ranks"][0]["collectives"][0]["count"] == 8


def test_the_page_lists_as_many_tensors_as_were_asked_for():
    run = drawable(simulation("mb1-ga1", trace_of(0, 0)))
    sizes = [len(listings(replace(run, top=top))) for top in (0, 1)]
    assert sizes == [len(listings(run)) - 1, len(listings(run))]


def test_memory_of_a_step_in_part_is_drawn_over_operations():
    time = StepTime(2.0, [time_of(0, 0)], NOTHING)
    run = drawable(simulation("mb1-ga8", trace_of(0, 0, of=8)), times=[time, time])
    assert panels(run)[0].x_title == "operations" and not run.timed
    assert [panel.key for panel in panels(drawable(simulation("mb1-ga1", trace_of(0, 0))))] == [
        "memory_of_rank_0"
    ]
