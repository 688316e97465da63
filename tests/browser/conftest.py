"""Pages in Debian's chromium, driven by playwright: windows of a desktop and of a phone, light and dark.

A page may print nothing on the browser's console, fail in no script and ask for nothing but its own file, or
what the server that it is from has.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sweeps import bench_rows, write_sweep
from tiny import short_run

CHROMIUM = "chromium"  # of Debian, which playwright drives as it is: its own browsers are downloads
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
LOADED = 60  # seconds that a busy machine may take to draw a page
DRAWN = """() => {
  const charts = [...document.querySelectorAll(".chart")];
  const drawn = canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return pixels.some(value => value > 0);
  };
  return charts.every(chart => [...chart.querySelectorAll("canvas")].some(drawn));
}"""


class Window(NamedTuple):
    """A window of the browser on one page."""

    page: Any  # of playwright
    complaints: list[str]  # lines of the console, errors, requests

    @property
    def charts(self) -> int:
        return self.page.locator(".chart canvas").count()

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression, or function without arguments, is true. playwright's own way
        makes code from text, which the pages forbid.
        """
        ends = time.monotonic() + LOADED
        while not self.page.evaluate(condition):
            assert time.monotonic() < ends, (condition, self.complaints)
            time.sleep(0.1)

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


def needed(reason: str) -> None:
    """End the test: it fails in CI, where all that it needs is to be there, and is skipped elsewhere."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, started once."""
    program = shutil.which(CHROMIUM)
    if program is None:
        needed(f"{CHROMIUM} is not installed: apt-get install {CHROMIUM}")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        needed("playwright can't be imported: pip install playwright")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=list(FLAGS), timeout=1000 * LOADED)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Window]]:
    """Function(file or address, size="desktop", scheme="light") -> Window of the page, once every chart is
    drawn. At the test's end no window may have complained.
    """
    contexts, windows = [], []

    def open_page(place: Path | str, size: str = "desktop", scheme: str = "light") -> Window:
        address = place if isinstance(place, str) else place.as_uri()
        own = "/".join(address.split("/")[:3]) + "/" if isinstance(place, str) else address
        width, height = SIZES[size]
        viewport = {"width": width, "height": height}
        context = browser.new_context(viewport=viewport, color_scheme=scheme, is_mobile=size == "phone")
        context.set_default_timeout(1000 * LOADED)
        contexts.append(context)
        window = Window(context.new_page(), [])
        windows.append(window)
        window.page.on("console", lambda line: window.complaints.append(f"{line.type}: {line.text}"))
        window.page.on("pageerror", lambda error: window.complaints.append(str(error)))
        window.page.on(
            "request", lambda request: request.url.startswith(own) or window.complaints.append(request.url)
        )
        window.page.goto(address)
        window.wait_for(DRAWN)
        return window

    yield open_page
    complaints = [line for window in windows for line in window.complaints]
    for context in contexts:
        context.close()
    assert complaints == []


def meshtune(*words: object) -> None:
    """Run a command in this process, which has imported all that it needs; it must succeed."""
    from meshtune import cli

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["meshtune", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code, words


@pytest.fixture
def command() -> Callable[..., None]:
    """`command("report", folder)` runs meshtune."""
    return meshtune


class Pages:
    """Pages of each kind, written by their commands when they are first asked for."""

    def __init__(self, tiny: Path, folder: Path) -> None:
        self._tiny, self._folder = tiny, folder
        self._written: dict[str, Path] = {}

    def __getitem__(self, kind: str) -> Path:
        if kind not in self._written:
            self._written[kind] = getattr(self, kind)()
        return self._written[kind]

    def _trained(self, name: str, *own: str) -> Path:
        run = self._folder / name
        if not run.exists():
            settings = short_run(self._tiny, self._folder / "cache", run)
            meshtune("train", *settings, "train.max_steps=12", "eval.every=6", "eval.samples=2", *own)
        return run

    def run(self) -> Path:
        return self._trained("run") / "report.html"

    def comparison(self) -> Path:
        file = self._folder / "comparison.html"
        other = self._trained("other", "train.learning_rate=3e-3")
        meshtune("report", self._trained("run"), other, "--out", file)
        return file

    def plan(self) -> Path:
        file = self._folder / "plan.html"
        asked = ("cluster.gpu=h100-sxm", "cluster.gpus=16", "train.global_batch_size=64", "data.seq_len=2048")
        meshtune("plan", "model.name=llama-3.1-8b", *asked, "--plot", file)
        return file

    def dryrun(self) -> Path:
        settings = short_run(self._tiny, self._folder / "cache", self._folder / "unused")
        simulated = ("cluster.gpu=h100-sxm", "cluster.gpus=2", "layout=zero3x2-mb1-ga2")
        meshtune("dryrun", *settings, *simulated, "--plot", self._folder / "dryrun")
        return next((self._folder / "dryrun").rglob("*.html"))

    def sweep(self) -> Path:
        """Experiments of known numbers, as a measured sweep has them."""
        folder = self._folder / "measured"
        folder.mkdir()
        facts = {"machine": {"cores": 2, "processor": "a processor"}, "axes": ["model.name", "layout"]}
        meshtune("report", write_sweep(folder, bench_rows(), **facts))
        return folder / "report.html"

    def simulated(self) -> Path:
        """A sweep that the planner has predicted."""
        file, folder = self._folder / "sweep.yaml", self._folder / "simulated"
        layout = {"dp_replicate": "auto", "dp_shard": "auto"}  # what the other axes leave of the GPUs
        base = {"train": {"global_batch_size": 64}, "cluster": {"gpu": "h100-sxm"}, "layout": layout}
        axes = {
            "model.name": ["llama-3.2-1b", "llama-3.1-8b"],
            "cluster.gpus": {"from": 4, "to": 16, "times": 2},
            "layout.zero": [0, 3],
            "layout.micro_batch_size": [1, 2],
            "layout.tp": [1, 3],
        }
        file.write_text(json.dumps({"base": base, "axes": axes}))
        meshtune("sweep", file, "--simulate", "--out", folder)
        meshtune("report", folder)
        return folder / "report.html"


@pytest.fixture(scope="session")
def pages(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """`pages["run"]`, "comparison", "plan", "dryrun", "sweep" or "simulated" is that page's file."""
    return Pages(tiny, tmp_path_factory.mktemp("pages"))
