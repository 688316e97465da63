"""Run one of the three circles of checks and print what each part took.

    python scripts/circles.py test    style and the unmarked tests: while working
    python scripts/circles.py ci      and types, documentation, tests marked `ci`, pages in a browser
    python scripts/circles.py all     and tests marked `all`, real Slurm, newest releases of other tools

A circle contains the one before it. `ci` and `all` skip the parts that have passed on the same files, so an
interrupted run continues; `test` always runs. `--again` runs every part, `--only` some of them.
Results stay in build/circles/results.json, what each part printed in build/circles/<part>.log. Parts beyond
`make test` run with CI=true: what can't run there for want of a program fails and is not skipped.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "circles"
BIN = Path(sys.executable).parent
CIRCLES = ("test", "ci", "all")

WEEK = date.today().isocalendar().week  # each has another tenth of the families

# Two workers; one that has no tests left takes some of the other's.
PYTHON = sys.executable
PYTEST = f"{PYTHON} -m pytest -n 2 --dist worksteal --durations=10"
RECORD = ROOT / "tests" / "seconds.toml"
HANGS = ROOT / "build" / "hangs"  # written by tests/ranks.py


@dataclass(frozen=True)
class Part:
    """One part of a circle."""

    name: str
    circle: str  # the innermost that runs it
    commands: tuple[str, ...]  # one after the other, until one fails
    one_core: bool = False  # runs next to the part before or after it that has one core too
    minutes: float = 30  # after which it is killed, with what it has started


def marked(marks: str, *paths: str) -> str:
    """The command that runs the tests with these marks below `paths`."""
    return f"{PYTEST} -m '{marks}' {' '.join(paths)}"


PARTS = [
    Part("style", "test", (f"{BIN}/ruff check .", f"{BIN}/ruff format --check .", f"{BIN}/lint-imports")),
    Part("tests", "test", (f"{PYTEST} --junitxml={FOLDER / 'tests.xml'}",)),
    Part("types", "ci", (f"{BIN}/pyright",), one_core=True),
    Part("docs", "ci", ("make docs",), one_core=True),
    Part("tests of CI", "ci", (marked("ci and not all and not browser"),), minutes=60),
    Part("pages in a browser", "ci", (marked("browser and not all", "tests/browser"),)),
    Part("further unit tests", "all", (marked("all", "tests/unit"),), minutes=60),
    Part("further layouts", "all", (marked("all", "tests/parity"),), minutes=60),
    Part("further commands", "all", (marked("all", "tests/acceptance", "tests/fuzz"),), minutes=60),
    Part("causes of slow runs", "all", (f"{PYTHON} validation/why_slow.py --seeds 1 --healthy 2 --check",)),
    Part("oldest versions", "all", (f"scripts/test_versions oldest --tenth {WEEK % 10}",)),
    Part("newest versions", "all", (f"scripts/test_versions newest --tenth {WEEK % 10}",)),
    Part("keys of trainers", "all", (f"{PYTHON} scripts/trainer_keys.py",), one_core=True),
    Part("readers of exports", "all", (f"{PYTHON} scripts/export_readers.py",), one_core=True),
]


@dataclass
class Result:
    """How a part ended."""

    passed: bool
    seconds: float
    tests: str = ""  # pytest's last line: "5 passed, 1 skipped"
    when: float = field(default_factory=time.time)  # seconds since 1970


def digest() -> str:
    """Digest of all files that git tracks or would track, so that a result counts for these files only."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout.split(b"\0")  # fmt: skip
    files = hashlib.sha256(sys.version.encode())
    for name in sorted(set(filter(None, listed))):
        path = ROOT / os.fsdecode(name)
        if path.is_file():
            files.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return files.hexdigest()[:16]


class Results:
    """Results of parts, kept by the digest of the files that they are for; `files` is the present one."""

    def __init__(self, files: str) -> None:
        self.file, self.files = FOLDER / "results.json", files
        try:
            self.rows: dict[str, dict[str, dict[str, object]]] = json.loads(self.file.read_text())
        except (OSError, ValueError):
            self.rows = {}

    def get(self, part: Part) -> Result | None:
        row = self.rows.get(self.files, {}).get(part.name)
        return Result(**row) if row else None  # type: ignore[arg-type]

    def add(self, part: Part, result: Result) -> None:
        """Keep a part's result, unless a file has changed since the circle began."""
        if digest() != self.files:
            return
        self.rows.setdefault(self.files, {})[part.name] = asdict(result)
        aside = self.file.with_suffix(".new")
        aside.write_text(json.dumps(self.rows, indent=1))
        aside.replace(self.file)


running: list[subprocess.Popen[bytes]] = []  # of this moment's parts, each in a session of its own


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and what it has started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(part: Part, shown: bool) -> Result:
    """Run a part, with what it prints in its log. shown: on the terminal too, at once."""
    log = FOLDER / f"{part.name.replace(' ', '-').replace(':', '')}.log"
    # The tests start hundreds of processes, which would all compile the package again without bytecode.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if part.circle != "test":
        env["CI"] = "true"
    began, code = time.monotonic(), 0
    # The commands write to the log: a pipe would stay open with a process that a killed one leaves behind.
    with log.open("wb") as file, log.open("rb") as printed:
        for command in part.commands:
            process = subprocess.Popen(
                command, shell=True, cwd=ROOT, env=env, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
            running.append(process)
            ended = False
            while not ended:
                ended = process.poll() is not None
                if shown:
                    sys.stdout.buffer.write(printed.read())
                    sys.stdout.buffer.flush()
                if not ended and time.monotonic() - began > 60 * part.minutes:
                    end(process)
                    print(f"{part.name}: killed after {part.minutes:.0f} minutes", flush=True)
                time.sleep(0 if ended else 0.1)
            running.remove(process)
            if code := process.returncode:
                break
    text = log.read_text(errors="replace")
    if not shown:
        print(text if code else text[-400:], flush=True)
    lines = re.findall(r"^.*\b\d+ (?:passed|failed|error).*$", text, re.MULTILINE)
    tests = re.sub(r"[= ]+$|^[= ]+| in [\d.]+s.*", "", lines[-1]) if lines else ""
    return Result(code == 0, time.monotonic() - began, tests)


def batches(parts: list[Part]) -> Iterator[list[Part]]:
    """Yield the parts in their order, two neighbours of one core together."""
    rest = list(parts)
    while rest:
        number = 2 if len(rest) > 1 and rest[0].one_core and rest[1].one_core else 1
        yield rest[:number]
        rest = rest[number:]


def folder_of(file: str) -> str:
    """Folder of a test file, two levels of it: tests/unit/plan/test_search.py is in unit/plan."""
    return "/".join(Path(file).parts[1:-1][:2]) or "."


def seconds_by_folder(report: Path) -> dict[str, tuple[int, float]]:
    """Folder -> (cases, seconds of a worker) of a report of pytest in JUnit's format."""
    folders: dict[str, tuple[int, float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").split(".test_")[0].replace(".", "/")
        cases, seconds = folders.get(name := folder_of(f"{module}/test.py"), (0, 0.0))
        folders[name] = (cases + 1, seconds + float(case.get("time", 0)))
    return dict(sorted(folders.items()))


def compared(now: dict[str, tuple[int, float]]) -> str:
    """Seconds of each folder of `make test` next to those that tests/seconds.toml has."""
    recorded = tomllib.loads(RECORD.read_text())
    lines = [f"{'folder of make test':24} {'recorded':>9} {'now':>7}  seconds of a worker"]
    for name, (_, seconds) in now.items():
        before = recorded.get(name, {}).get("seconds", 0)
        more = f"  {seconds - before:+.0f}" if seconds - before > 5 else ""
        lines.append(f"{name:24} {before:9.0f} {seconds:7.0f}{more}")
    return "\n".join(lines)


def record(now: dict[str, tuple[int, float]]) -> None:
    """Write tests/seconds.toml."""
    lines = [
        "# Seconds of a worker that the tests of `make test` take, by folder, on 2 cores that do nothing",
        "# else. `python scripts/circles.py test --record` writes this file; a change that adds more than",
        "# 5 s to a folder does so. tests/test_house.py has the budget.",
    ]
    for name, (cases, seconds) in now.items():
        lines.append(f'\n["{name}"]\ncases = {cases}\nseconds = {seconds:.0f}')
    aside = RECORD.with_suffix(".new")
    aside.write_text("\n".join(lines) + "\n")
    aside.replace(RECORD)


def table(parts: list[Part], results: dict[str, Result], earlier: set[str]) -> str:
    """One row a part: name, result, seconds, tests."""
    lines = [f"{'part':24} {'result':10} {'seconds':>8}  tests"]
    stamp = ROOT / ".venv" / ".installed"
    if stamp.exists() and (text := stamp.read_text().strip()).isdigit():
        lines.append(f"{'set-up':24} {'once':10} {int(text):8}")
    for part in parts:
        if (result := results.get(part.name)) is None:
            lines.append(f"{part.name:24} {'not run':10}")
            continue
        word = ("passed" if result.passed else "FAILED") + (" earlier" if part.name in earlier else "")
        lines.append(f"{part.name:24} {word:10} {result.seconds:8.0f}  {result.tests}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("circle", choices=CIRCLES)
    parser.add_argument("--again", action="store_true", help="run what has passed on these files too")
    parser.add_argument("--record", action="store_true", help="write the seconds of make test's folders")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS])
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if CIRCLES.index(part.circle) <= CIRCLES.index(given.circle)]
    chosen = [part for part in chosen if not given.only or part.name in given.only]
    stored = Results(digest())
    done: dict[str, Result] = {}
    if given.circle != "test" and not given.again:
        done = {part.name: result for part in chosen if (result := stored.get(part)) and result.passed}
    earlier = set(done)
    began, hangs = time.monotonic(), set(HANGS.glob("*"))
    (FOLDER / "tests.xml").unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for batch in batches([part for part in chosen if part.name not in earlier]):
        print(f"== {' and '.join(part.name for part in batch)}", flush=True)

        def make(part: Part, shown: bool) -> None:
            done[part.name] = run(part, shown)

        threads = [threading.Thread(target=make, args=(part, len(batch) == 1), daemon=True) for part in batch]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            for process in list(running):
                end(process)
            raise
        for part in batch:
            stored.add(part, done[part.name])
        if given.circle != "all" and not all(done[part.name].passed for part in batch):
            break
    if "tests" in done and "tests" not in earlier and (FOLDER / "tests.xml").exists():
        now = seconds_by_folder(FOLDER / "tests.xml")
        if given.record:  # also where the only failure is that more cases run than were recorded
            record(now)
        print(f"\n{compared(now)}", flush=True)
    print(f"\n{table(chosen, done, earlier)}\n{time.monotonic() - began:.0f} s now", flush=True)
    for file in sorted(set(HANGS.glob("*")) - hangs):
        print(f"Ranks hung and were replaced; their stacks: {file.relative_to(ROOT)}", flush=True)
    sys.exit(any(not done[part.name].passed if part.name in done else True for part in chosen))


if __name__ == "__main__":
    main()
