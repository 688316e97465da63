"""`meshtune ui` as a reader sees it while a run writes: the list, a run's page, a comparison, a sweep."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from browser_looks import LOOKS
from live_runs import end_row, locked, step_row, write_run
from sweeps import bench_rows, write_sweep

pytestmark = [pytest.mark.ci, pytest.mark.browser]


@contextmanager
def writing(run, first: int, seconds: float = 0.25) -> Iterator[None]:
    """Hold the run's lock and write a row again and again, as a run does that trains."""
    stop = threading.Event()

    def write() -> None:
        step = first
        while not stop.wait(seconds):
            run.append(step_row(step))
            step += 1

    thread = threading.Thread(target=write)
    with locked(run):
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "done", 200, end_row(200, "finished"))
    write_run(folder / "failed", 30, end_row(30, "stopped: loss or gradients were not finite"))
    live = write_run(folder / "live", 60)
    for step in (0, 60):
        live.append_sample({"step": step, "prompt": "2+2=", "expected": "4", "answer": str(step)})
    (folder / "study").mkdir()
    write_sweep(folder / "study", bench_rows())
    return folder


@contextmanager
def serving(folder) -> Iterator[str]:
    """Address of a server of a folder, which ends with the block."""
    command = [sys.executable, "-m", "meshtune", "ui", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    address = process.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:"), address
    try:
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


@pytest.fixture(scope="module")
def server(runs) -> Iterator[str]:
    with serving(runs) as address:
        yield address


def path_of(window, name: str) -> str:
    """Address of a run or sweep in the list."""
    return window.page.get_by_role("link", name=name, exact=True).evaluate("link => link.href")


PICTURE = "document.querySelector('#chart-loss canvas').toDataURL()"
STEPS = (
    "Number(document.getElementById('subtitle').innerText.match(/step ([\\d,]+) of/)[1].replaceAll(',', ''))"
)


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_a_run_that_writes_is_followed(opened, server, runs, size, scheme):
    from meshtune.rundir import RunDir

    run = RunDir(runs / "live")
    with writing(run, run.rows("train")[-1]["step"] + 1):
        window = opened(path_of(opened(server), "live"), size, scheme)
        assert window.charts > 4
        assert "running" in window.texts("#subtitle")[0] and "Stop it" in window.texts("h2")
        window.page.evaluate(f"window.before = {{picture: {PICTURE}, steps: {STEPS}}}")
        window.wait_for(f"{PICTURE} !== window.before.picture")
        window.wait_for(f"{STEPS} > window.before.steps + 2")
        assert window.page.evaluate("window.before"), "the page was not loaded again"
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert window.page.evaluate(overflow) <= 0
        red, green, blue = window.page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        )
        assert (red + green + blue > 3 * 128) == (scheme == "light")


def test_the_pointer_shows_a_step_that_came_after_the_page(opened, server, runs):
    run = write_run(runs / "short", 8)
    listed = opened(server)
    listed.wait_for("document.body.innerText.includes('short')")
    window = opened(path_of(listed, "short"))
    canvas = window.page.locator("#chart-grad_norm canvas")
    run.append(step_row(9, grad_norm=77.0))
    shown, tries = "", 0
    while "77.000" not in shown and tries < 60:
        tries += 1
        width = canvas.bounding_box()["width"]
        canvas.hover(position={"x": width / 2, "y": 60})
        canvas.hover(position={"x": width - 14, "y": 60})
        window.page.wait_for_timeout(250)
        shown = " ".join(window.texts("#vg-tooltip-element"))
    assert "77.000" in shown and "9" in shown


def test_a_run_that_ends_says_so_on_the_open_page_and_keeps_what_is_unfolded(opened, server, runs):
    run = write_run(runs / "ends", 40)
    with locked(run):
        listed = opened(server)
        listed.wait_for("document.body.innerText.includes('ends')")
        window = opened(path_of(listed, "ends"))
        assert "running" in window.texts("#subtitle")[0]
        window.page.locator("summary").click()
    run.append(end_row(40, "finished"))
    window.wait_for("document.querySelector('#subtitle').innerText.includes('finished')")
    assert "Stop it" not in window.texts("h2")
    listed.wait_for(
        "[...document.querySelectorAll('tr')].some(row => /ends\\s.*finished/.test(row.innerText))"
    )


def test_a_curve_gets_a_log_axis_and_shows_the_stretch_that_is_dragged_out(opened, server):
    window = opened(path_of(opened(server), "done"))
    picture = "document.querySelector('#chart-loss canvas').toDataURL()"
    window.page.evaluate(f"window.pictures = [{picture}]")
    log, every = (window.page.locator("figure:has(#chart-loss) button").nth(place) for place in (0, 1))
    assert not every.is_visible()
    log.click()
    window.wait_for(f"window.pictures.indexOf({picture}) < 0")
    assert log.get_attribute("aria-pressed") == "true"
    window.page.evaluate(f"window.pictures.push({picture})")
    box = window.page.locator("#chart-loss canvas").bounding_box()
    window.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 90)
    window.page.mouse.down()
    window.page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 90, steps=3)
    window.page.mouse.up()
    window.wait_for(f"window.pictures.indexOf({picture}) < 0")
    every.click()
    assert not every.is_visible()
    window.page.mouse.move(0, 0)
    window.wait_for(f"window.pictures[1] === {picture}")


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_the_list_has_states_and_compares_the_chosen_runs(opened, server, size, scheme):
    window = opened(server, size, scheme)
    text = window.page.locator("table").inner_text()
    for shown in ("done", "finished", "failed", "loss or gradients were not finite", "planned"):
        assert shown in text
    assert window.page.get_by_role("link", name="study", exact=True).count() == 1
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert window.page.evaluate(overflow) <= 0
    for name in ("done", "failed"):
        window.page.get_by_label(f"choose {name}", exact=True).check()
    window.page.get_by_role("button").click()
    window.wait_for("document.querySelectorAll('.chart canvas').length > 3")
    assert set(window.texts("h1")) == {"done · failed"} or set(window.texts("h1")) == {"failed · done"}


def test_the_chosen_runs_stay_chosen_while_the_list_goes_on(opened, server, runs):
    window = opened(server)
    window.page.get_by_label("choose done", exact=True).check()
    write_run(runs / "newcomer", 3)
    window.wait_for("document.body.innerText.includes('newcomer')")
    assert window.page.get_by_label("choose done", exact=True).is_checked()


def test_a_sweep_is_served_with_its_table(opened, server):
    window = opened(path_of(opened(server), "study"))
    assert window.charts > 1
    assert window.page.locator("#experiments tbody tr").count() == 20
    window.page.get_by_label("words").fill("dp2 large")
    assert window.page.locator("#experiments tbody tr").count() == 3


def test_a_page_says_when_its_server_has_ended(opened, runs):
    with serving(runs) as address:
        window = opened(address)
    window.wait_for("document.body.innerText.includes('The server does not answer')")
    window.complaints.clear()  # the browser's own lines on the lost connection
