"""Streams of a page: new rows at once, the page when it is drawn again, nothing twice, nothing lost."""

import asyncio
import json
import re
from contextlib import nullcontext
from itertools import pairwise
from statistics import fmean

import pytest
from live_runs import end_row, locked, step_row, write_run

from meshtune.report.run.panels import SMOOTHED_PART, Points
from meshtune.report.run.report import run_page, run_panels
from meshtune.web import events
from meshtune.web.events import Drawing, Followed, Hidden, Stamp
from meshtune.web.folders import Entry
from meshtune.web.pages import page_of_run, stamp_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", 60)


def followed(run, *, stamp=None) -> Followed:
    entry = Entry("0", "run", "run", run.path)
    return Followed(
        lambda: page_of_run(entry),
        stamp or (lambda: stamp_of(entry)),
        lambda page, position: page.served("", scripts="/s", events="/events", position=position),
        rows=run.metrics_file,
        poll=0.02,
    )


def position_of(html: str) -> str:
    return re.search(r"data-position='(.*?)'", html)[1]


def parsed(event: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in event.strip().splitlines() if ": " in line)


async def next_of(stream, seconds: float = 20) -> dict[str, str]:
    return parsed(await asyncio.wait_for(anext(stream), seconds))


@pytest.mark.ci
async def test_rows_become_points_of_the_curves_at_once(run):
    page = followed(run)
    stream = page.stream(position_of(await page.html()))
    waiting = asyncio.create_task(next_of(stream))
    await asyncio.sleep(0.1)
    run.append(step_row(61))
    event = await waiting
    assert event["event"] == "rows"
    data = json.loads(event["data"])
    assert data["end"] == 61 and data["points"]["loss"] == [{"x": 61, "y0": 0.0655738, "y1": 0.0661202}]
    assert data["points"]["memory"] == [{"x": 61, "y0": 3.0}]
    assert "step 61 of 500" in data["html"]["subtitle"] and "0.0656" in data["html"]["before"]
    await stream.aclose()
    assert event["id"].endswith(".1")


async def test_a_row_that_is_half_written_waits_and_one_that_is_none_is_left_out(run):
    page = followed(run)
    stream = page.stream(position_of(await page.html()))
    waiting = asyncio.create_task(next_of(stream))
    line = json.dumps(step_row(61)) + "\n"
    with open(run.metrics_file, "a", buffering=1) as file:
        file.write("no JSON\n" + line[:40])
        file.flush()
        await asyncio.sleep(0.2)
        assert not waiting.done()  # a follower that has not looked yet passes, too
        file.write(line[40:])
    assert [point["x"] for point in json.loads((await waiting)["data"])["points"]["loss"]] == [61]
    await stream.aclose()


async def test_a_stream_goes_on_where_it_broke_off(run):
    page = followed(run)
    start = position_of(await page.html())
    stream = page.stream(start)
    ids = []
    for step in (61, 62, 63):
        run.append(step_row(step))
        ids.append((await next_of(stream))["id"])
    again = page.stream(ids[0])
    steps = [json.loads((await next_of(again))["data"])["end"] for _ in range(2)]
    assert steps == [62, 63]
    from_the_page = page.stream(start)
    assert json.loads((await next_of(from_the_page))["data"])["end"] == 61
    unknown = page.stream("nonsense.9")  # of another start of the server
    endless = page.stream("1." + "9" * 5000)
    for one in (unknown, endless):
        event = await next_of(one)
        assert event["event"] == "again" and event["id"] == start
    for one in (stream, again, from_the_page, unknown, endless):
        await one.aclose()
    assert page.streams == 0


@pytest.mark.ci
async def test_the_page_is_drawn_again_and_its_streams_are_told(run, monkeypatch):
    monkeypatch.setattr(events, "LEAST_PAUSE", 0.2)
    monkeypatch.setattr(events, "SHARE", 0)

    page = followed(run)
    before = await page.html()
    stream = page.stream(position_of(before))
    run.append(step_row(61))
    run.append(end_row(61, "finished"))
    kinds = {"rows": await next_of(stream)}
    while "again" not in kinds:
        event = await next_of(stream)
        kinds[event["event"]] = event
    after = await page.html()
    assert position_of(after) == kinds["again"]["id"] != position_of(before)
    assert "finished" in after and "finished" not in before
    run.metrics_file.unlink()  # another run in its place
    run.metrics_file.write_text("".join(json.dumps(step_row(step)) + "\n" for step in (1, 2)))
    assert (await next_of(stream))["event"] == "again"
    await stream.aclose()


@pytest.mark.ci
@pytest.mark.parametrize("how", ["its end", "killed", "other rows"])
async def test_a_costly_page_is_drawn_at_once_where_the_run_starts_or_ends(run, monkeypatch, how):
    monkeypatch.setattr(events, "LEAST_PAUSE", 0.2)
    monkeypatch.setattr(events, "SHARE", 10**6)

    page = followed(run)
    with locked(run) if how == "killed" else nullcontext():
        stream = page.stream(position_of(await page.html()))
        await asyncio.sleep(0.3)
        run.append(step_row(61))
        assert (await next_of(stream))["event"] == "rows"
    if how == "its end":
        run.append(end_row(61, "finished"))
    elif how == "other rows":  # a start that goes on from a checkpoint
        run.drop_after(60)
    assert (await next_of(stream))["event"] == "again"
    await stream.aclose()


def test_heading_and_tiles_go_on_as_a_new_drawing_has_them(tmp_path):
    """All of them but the medians, with steps and evaluations that came while the page was drawn."""
    run = write_run(tmp_path / "run", 0)
    rows = run.rows()
    for step in range(1, 41):
        rows.append(step_row(step, skipped=step == 30, loss=None if step == 30 else 4.0 / step))
        if step % 10 == 0:
            rows.append({"kind": "eval", "step": step, "loss": abs(step - 25), "exact_match": step / 100})
    for drawn in (1, 2, 12, 23, 34):
        page = run_page(run, rows[:drawn])
        first = {"subtitle": page.subtitle, "before": page.before}
        assert page.later is not None and page.later(rows[:drawn]) == {}
        shown = first | page.later(rows[max(0, drawn - 2) :])
        whole = run_page(run, rows)
        if drawn < 3:  # no speed yet
            assert shown["subtitle"] == whole.subtitle
        else:
            assert shown == {"subtitle": whole.subtitle, "before": whole.before} != first


async def test_drawing_takes_a_small_share_of_the_time(run):
    """A page that is costly is drawn seldom, however often it is asked for."""
    drawn = []

    page = followed(run, stamp=lambda: Stamp(len(drawn) + run.metrics_file.stat().st_size))
    page._page, real = lambda: drawn.append(1) or real(), page._page  # type: ignore[func-returns-value]
    for step in range(61, 81):
        run.append(step_row(step))
        await page.html()

    assert len(drawn) == 1


def drawing() -> Drawing:
    """A drawing that took 2 s, of a run that waited."""
    return Drawing(
        1, "", Stamp(1, "waiting"), 0.0, 2.0, Points([]), lambda rows: {"subtitle": str(rows)}, 0, 0
    )


def test_a_drawing_that_failed_where_the_run_starts_is_tried_again_as_seldom_as_any():
    kept, now = drawing(), Stamp(2, "running")
    kept.add([{"kind": "run", "step": 0}])
    assert events._pause(kept, now) == events.SOON * 2.0
    kept.not_drawn(now, seconds=3.0)
    assert events._pause(kept, now) == events.SHARE * 3.0 and kept.stamp != now


def test_the_newest_heading_alone_is_kept():
    kept = drawing()
    for number in range(3):
        kept.add([{"kind": "train", "step": number}])
    newest = {"subtitle": str([{"kind": "train", "step": 2}])}
    assert [event["html"] for event in kept.events] == [{}, {}, newest]


async def test_streams_of_a_run_that_may_not_be_shown_any_more_end(run):
    shown = [True]

    def stamp():
        if not shown[0]:
            raise Hidden
        return Stamp(1)

    page = followed(run, stamp=stamp)
    stream = page.stream(position_of(await page.html()))
    waiting = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0.1)
    shown[0] = False
    assert await asyncio.wait_for(waiting, 20) is None
    with pytest.raises(Hidden):
        await page.html()


def test_points_are_those_of_the_rows_that_came_later(tmp_path):
    """Values as they are, means over half of the window; a held-out loss goes to its own curve."""
    rows = [step_row(step, loss=5 + (step * 7919 % 100) / 100) for step in range(1, 402)]
    evals = [{"kind": "eval", "step": step, "loss": 3.0 - step / 1000} for step in (200, 400)]
    early = rows[:400] + evals[:1]
    points = Points(run_panels(early))
    added = points.of([rows[400], evals[1]])
    whole = {panel.key: panel for panel in run_panels([*early, rows[400], evals[1]])}
    first, _, held_out = whole["loss"].series
    by_step = {point["x"]: point for point in added["loss"]}
    assert by_step[401]["y0"] == pytest.approx(first.y[-1], rel=1e-5)
    half = 400 // SMOOTHED_PART // 2 + 1
    assert by_step[401]["y1"] == pytest.approx(fmean(first.y[-half:]), rel=1e-5)
    assert by_step[400] == {"x": 400, "y2": pytest.approx(held_out.y[-1])}
    assert points.end == 401
    assert points.of([rows[3], rows[399]]) == {}, "they are on the page"


def test_a_smoothed_curve_stays_smooth_where_rows_come_later() -> None:
    rows = [step_row(step, loss=5 + (step * 7919 % 100) / 100) for step in range(1, 502)]
    drawn = {panel.key: panel for panel in run_panels(rows[:400])}["loss"].series[1].y[50:-50]
    added = [point["y1"] for point in Points(run_panels(rows[:400])).of(rows[400:])["loss"]]
    roughest = [max(abs(one - before) for before, one in pairwise(curve)) for curve in (drawn, added)]
    assert roughest[1] < 3 * roughest[0]
