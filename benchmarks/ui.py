"""Cost of `meshtune ui`: how long pages take to open, and the server's processor time while it follows a run.

    python benchmarks/ui.py                            # 50 runs of 2,000 rows; on an idle machine
    python benchmarks/ui.py --seconds 10 --runs 5      # does it run?

The server is a process of its own. A client asks for pages as a browser does; then it keeps a run's
page open, follows its stream and fetches the page when it is drawn again, while a row a second is written;
it measures how long each row takes to come.
"""

import argparse
import fcntl
import http.client
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil

from meshtune.meter.parts import PARTS
from meshtune.meter.rows import train_row
from meshtune.rundir import Row, RunDir, json_line

GIB = 2**30


def rows_of_step(step: int) -> list[Row]:
    """The rows that the trainer writes in a step."""
    train = train_row(
        step=step, loss=2 + 1 / step + (step * 7919 % 1000) / 5000, grad_norm=1 + (step * 31 % 100) / 100,
        learning_rate=1e-4, tokens=65_536, label_tokens=40_000, step_seconds=1 + (step * 17 % 10) / 100,
        data_seconds=0.01, world=8, flops=1e15, flops_6n=1.1e15, peak_flops_per_second=9.9e14,
        peak_memory_bytes=60 * GIB, peak_resident_bytes=8 * GIB, epoch=step / 1000,
    )  # fmt: skip
    return [train, {"kind": "time", "step": step, "seconds": 1.0, "parts": dict.fromkeys(PARTS, 0.1)}]


def write_run(folder: Path, rows: int) -> RunDir:
    """A run of that many rows, half of them of kind train."""
    run = RunDir(folder).create()
    run.config_file.write_text("model: {name: tiny}\n")
    start = {"kind": "run", "id": folder.name, "start": 1, "model": "8B", "world": 8, "total_steps": 10**6}
    steps = range(1, rows // 2 + 1)
    lines = [json_line(start), *(json_line(row) for step in steps for row in rows_of_step(step))]
    run.metrics_file.write_text("".join(lines))
    return run


@contextmanager
def served(folder: Path) -> Iterator[tuple[psutil.Process, int, float]]:
    """(Process, port, seconds until it listened) of a server of the folder."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "meshtune", "ui", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        port = int(process.stdout.readline().rstrip("/\n").rpartition(":")[2])
        try:
            yield psutil.Process(process.pid), port, time.perf_counter() - began
        finally:
            process.terminate()


def get(port: int, path: str) -> tuple[str, float]:
    """(Page, seconds that it took)."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, (path, answer.status)
    return text, time.perf_counter() - began


def follow(
    port: int, path: str, stop: threading.Event, counts: dict[str, int], came: dict[int, float]
) -> None:
    """Read the stream of a page, and fetch the page when it is drawn again, until `stop`.

    counts: events by name, which are counted. came: last step on the page -> time.perf_counter when it came.
    """
    position = re.search(r"data-position='(.*?)'", get(port, path)[0])
    assert position
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", f"{path}/events?from={position[1]}")
    answer = connection.getresponse()
    while not stop.is_set() and (line := answer.readline().decode()):
        name, _, event = line.strip().partition("event: ")
        if event and not name:
            counts[event] = counts.get(event, 0) + 1
            if event == "again":
                get(port, path)
        if line.startswith("data: ") and (end := json.loads(line[6:]).get("end")):
            came[end] = time.perf_counter()


def following(process: psutil.Process, port: int, path: str, run: RunDir, seconds: int) -> str:
    """Share of a core that the server takes, events by name, and seconds until a row comes, while a row a
    second is written.
    """
    stop, counts, came, wrote = threading.Event(), {}, {}, {}
    reader = threading.Thread(target=follow, args=(port, path, stop, counts, came), daemon=True)
    reader.start()
    time.sleep(2)
    step = run.rows("train")[-1]["step"]
    with open(run.lock_file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before, began = process.cpu_times(), time.perf_counter()
        for number in range(1, seconds + 1):
            for row in rows_of_step(step + number):
                run.append(row)
            wrote[step + number] = time.perf_counter()
            time.sleep(max(0.0, began + number - time.perf_counter()))
        after, took = process.cpu_times(), time.perf_counter() - began
    stop.set()
    share = (after.user + after.system - before.user - before.system) / took
    late = [
        min((came[end] for end in came if end >= one), default=float("inf")) - at for one, at in wrote.items()
    ]
    return (
        f"{share:.2%} of a core, {counts}; a row comes after {median(late):.2f} s, at most {max(late):.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--rows", type=int, default=2000, help="of each run")
    parser.add_argument("--large", type=int, default=100_000, help="rows of one more run, alone")
    parser.add_argument("--seconds", type=int, default=120, help="for which a run is followed")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        runs = [write_run(folder / f"run-{number}", options.rows) for number in range(options.runs)]
        large = write_run(Path(name) / "large" / "run", options.large)
        starts, lists, pages = [], [], []
        for _ in range(options.repeat):
            with served(folder) as (process, port, seconds):
                text, opened = get(port, "/")
                paths = dict(re.findall(r"<a href='(/runs/\w+)'>(.*?)</a>", text))
                starts.append(seconds)
                lists.append(opened)
                pages.append(get(port, next(iter(paths)))[1])
        print(f"{options.runs} runs, {options.runs * options.rows:,} rows:", json.dumps({
            "server_starts_seconds": round(median(starts), 3),
            "first_list_seconds": [round(value, 3) for value in lists],
            "first_run_page_seconds": [round(value, 3) for value in pages],
        }))  # fmt: skip
        with served(folder) as (process, port, _):
            paths = {
                shown: path
                for path, shown in re.findall(r"<a href='(/runs/\w+)'>(.*?)</a>", get(port, "/")[0])
            }
            followed = following(process, port, paths["run-0"], runs[0], options.seconds)
            idle = process.memory_info().rss / 2**20
        print(f"following a run of {options.rows:,} rows: {followed}; {idle:.0f} MiB")
        with served(large.path.parent) as (process, port, _):
            path = re.findall(r"<a href='(/runs/\w+)'>", get(port, "/")[0])[0]
            opened = get(port, path)[1]
            followed = following(process, port, path, large, options.seconds)
        print(f"a run of {options.large:,} rows opens in {opened:.2f} s; followed: {followed}")


if __name__ == "__main__":
    main()
