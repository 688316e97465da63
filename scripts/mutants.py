"""Change one line of the source at a time: does a test notice?

    python scripts/mutants.py draw                  places by a seeded lot -> build/mutants/places.json
    python scripts/mutants.py reach --suite new     which tests run each place -> build/mutants/new/
    python scripts/mutants.py kill --suite new      each place changed, its tests run, nearest first
    python scripts/mutants.py control --suite new   the tests that failed pass on unchanged source
    python scripts/mutants.py table old new         both suites, as a table

A place is one expression or statement, drawn by lines of code over all packages. Its mutant swaps an
operator, negates a condition, moves a number by one, flips a flag, returns nothing, or leaves out a call.
`reach` runs a suite on a copy of the tree in which each place reports the test that runs it, in every process
that the test starts (mutmut and cosmic-ray see the test's own process only). `kill` runs for each place the
tests that reach it, nearest first, and stops at the first failure or after 5 minutes, which counts as
survived. Places that no test of the suite `--base` reaches are passed over for the next ones
of the lot.

    git worktree add --detach build/mutants/before 3472e4f   # the suite of an earlier version
    python scripts/mutants.py draw --tree build/mutants/before
    python scripts/mutants.py reach --suite old --tree build/mutants/before

The lot is drawn in one version and each place looked up in the others; `draw` keeps a copy of what it saw.

An interrupted step continues; a leg of `reach` that was interrupted runs again.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "mutants"
DRAWN_FROM = FOLDER / "drawn"  # the package that the lot was drawn in
SEED, DRAWN, COUNTED = 31, 200, 80
SECONDS = 300  # of tests for one mutant
CHUNK = (
    25  # tests of one pytest run: a failure ends it, and the next ones are collected only if they are needed
)

SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/",
    ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*", ast.BitOr: "&", ast.BitAnd: "|",
    ast.LShift: ">>", ast.RShift: "<<", ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """One change of one line."""

    number: int  # in the order of the lot
    file: str  # below src/meshtune
    start: int  # offsets in the file's bytes of what is replaced
    end: int
    text: str  # that is there
    mutant: str  # that comes instead
    statement: bool  # False: an expression
    line: int  # 1-based


# Drawing #


class Candidates(ast.NodeVisitor):
    """Collect (start, end, mutant, whether it is a statement) of everything in a file that can be changed."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[int, int, str, bool]] = []
        self.visit(ast.parse(source))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Offsets of a node's first byte and of the byte after its last one."""
        return (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def add(self, node: ast.AST, mutant: str, statement: bool = False) -> None:
        self.found.append((*self.span(node), mutant, statement))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out f-strings: Python 3.11 does not tell where their parts are."""

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        self.add(node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add(node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in [*node.defaults, *node.kw_defaults]:
            if default is not None:
                self.visit(default)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in [*node.decorator_list, node.args, *node.body]:
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self.text(node.left), self.text(node.comparators[0])
            self.add(node, f"{left} {SWAPPED[type(node.ops[0])]} {right}")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        words = isinstance(node.left, ast.JoinedStr) or isinstance(node.right, ast.JoinedStr)
        if type(node.op) in SWAPPED and not words:
            self.add(node, f"({self.text(node.left)}) {SWAPPED[type(node.op)]} ({self.text(node.right)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        joined = f" {SWAPPED[type(node.op)]} ".join(f"({self.text(value)})" for value in node.values)
        self.add(node, joined)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, f"bool({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.add(node, f"({node.value!r} + 1)")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self.add(node, "return None", statement=True)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add(node, "pass", statement=True)
        self.generic_visit(node)


def draw(package: Path) -> list[Place]:
    """Draw lines of code, each as likely as any other, and of each line one change."""
    lines: list[tuple[str, int, list[tuple[int, int, str, bool]]]] = []
    sources = {}
    for file in sorted(package.rglob("*.py")):
        name, source = str(file.relative_to(package)), file.read_bytes()
        sources[name] = source
        of_line: dict[int, list[tuple[int, int, str, bool]]] = {}
        for change in Candidates(source).found:
            of_line.setdefault(source.count(b"\n", 0, change[0]) + 1, []).append(change)
        lines += [(name, line, changes) for line, changes in sorted(of_line.items())]
    lot = random.Random(SEED)
    places = []
    for file, line, changes in lot.sample(lines, DRAWN):
        start, end, mutant, statement = lot.choice(changes)
        text = sources[file][start:end].decode()
        places.append(Place(len(places), file, start, end, text, mutant, statement, line))
    return places


# Copies of a tree #


def copy(tree: Path, folder: Path) -> Path:
    """Copy what git tracks of `tree`, and what is new there, into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=tree, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, names):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # some tests ask git which files there are
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    data = ROOT.parent / "shared"
    if data.exists() and not (folder.parent / "shared").exists():
        (folder.parent / "shared").symlink_to(data.resolve())
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables of a process that imports the copy in `folder`."""
    path = os.pathsep.join([str(folder / "src"), str(folder / "build")])
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": path, **more}


def changed(source: bytes, place: Place, text: str) -> bytes:
    return source[: place.start] + text.encode() + source[place.end :]


def located(folder: Path, place: Place) -> Place | None:
    """The place in a copy of another version: None if its line is not there, or several times alike."""
    path = folder / "src" / "meshtune" / place.file
    if not path.exists():
        return None
    theirs, ours = path.read_bytes(), (DRAWN_FROM / place.file).read_bytes()
    begin, end = ours.rfind(b"\n", 0, place.start) + 1, ours.find(b"\n", place.end)
    first = begin
    while (found := theirs.count(ours[first:end])) > 1 and first > 0:  # of equal lines, by those before it
        first = ours.rfind(b"\n", 0, first - 1) + 1
    if found != 1:
        return None
    shift = theirs.index(ours[first:end]) - first
    number = theirs.count(b"\n", 0, place.start + shift) + 1
    return Place(**{**asdict(place), "start": place.start + shift, "end": place.end + shift, "line": number})


# Reaching #

HIT = '''"""Write the test that runs a place, once for each process, place and test."""
import os
seen = set()
def hit(number):
    test = os.environ.get("REACHED_BY") or os.environ.get("PYTEST_CURRENT_TEST", "import").rpartition(" ")[0]
    if (number, test) not in seen:
        seen.add((number, test))
        with open(REACHED, "a") as file:
            file.write(f"{number}\\t{test or 'import'}\\n")
'''
PLUGIN = '''"""Attribute what a shared fixture runs to the fixture; write each test's fixtures and seconds."""
import json, os, pytest
@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope == "function" or "REACHED_BY" in os.environ:
        return (yield)
    os.environ["REACHED_BY"] = "fixture:" + fixturedef.argname
    try:
        return (yield)
    finally:
        os.environ.pop("REACHED_BY", None)
def pytest_runtest_logreport(report):
    if os.environ.get("PYTEST_XDIST_WORKER") is None and report.when != "teardown":
        with open(os.environ["REACHED"] + ".tests", "a") as file:
            row = [report.nodeid, report.when, report.outcome, report.duration]
            file.write(json.dumps(row) + "\\n")
def pytest_itemcollected(item):
    if os.environ.get("PYTEST_XDIST_WORKER") in (None, "gw0"):
        with open(os.environ["REACHED"] + ".fixtures", "a") as file:
            file.write(json.dumps([item.nodeid, list(getattr(item, "fixturenames", []))]) + "\\n")
'''


def instrument(folder: Path, places: list[Place]) -> None:
    """Let each place of a copy report the test that runs it."""
    (folder / "build").mkdir(exist_ok=True)
    rows = folder.parents[1] / "reached"  # not by an environment, which some tests empty
    (folder / "src" / "reached_by.py").write_text(f"REACHED = {str(rows)!r}\n{HIT}")
    (folder / "build" / "reach_plugin.py").write_text(PLUGIN)
    by_file: dict[str, list[Place]] = {}
    for place in places:
        if (there := located(folder, place)) is not None:
            by_file.setdefault(place.file, []).append(there)
    for name, there in by_file.items():
        path = folder / "src" / "meshtune" / name
        source = path.read_bytes()
        for place in sorted(there, key=lambda place: (place.start, -place.end), reverse=True):
            call = f"__import__('reached_by').hit({place.number})"
            nested = [one for one in there if one is not place and one.start <= place.start < one.end]
            if nested:  # the outer one runs whenever this does not return before
                continue
            report = f"{call}; {place.text}" if place.statement else f"({call} or ({place.text}))"
            source = changed(source, place, report)
        ast.parse(source)
        path.write_bytes(source)
    ranks = folder / "tests" / "ranks.py"
    text = ranks.read_text()
    if (
        "PYTEST_CURRENT_TEST" not in text
    ):  # kept ranks: they have the environment of the test that forked them
        old_call, old_result = "    with tempfile.TemporaryDirectory() as folder:\n", "    random.seed(0)\n"
        assert text.count(old_call) == 1 and text.count(old_result) == 1
        text = text.replace(
            old_call,
            old_call + "        Path(folder, 'test').write_text(os.environ.get('REACHED_BY') or "
            "os.environ.get('PYTEST_CURRENT_TEST', ''))\n",
        )
        text = text.replace(
            old_result,
            old_result + "    os.environ['PYTEST_CURRENT_TEST'] = Path(call.folder, 'test').read_text()\n",
        )
        ranks.write_text(text)


def reach(suite: str, tree: Path, legs: list[str]) -> None:
    """Run each leg (options of pytest) of a suite on an instrumented copy."""
    places = [Place(**row) for row in json.loads((FOLDER / "places.json").read_text())]
    folder = FOLDER / suite
    folder.mkdir(parents=True, exist_ok=True)
    copied = copy(tree, folder / "reach" / "tree")
    instrument(copied, places)
    env = environment(copied, REACHED=str(folder / "reached"))
    for number, leg in enumerate(legs):
        done, begun = folder / f"leg{number}.done", folder / f"leg{number}.begun"
        if done.exists():
            continue
        rows = [folder / name for name in ("reached", "reached.tests", "reached.fixtures")]
        for file in rows:
            file.touch()
        if begun.exists():  # what it wrote before it was interrupted goes
            for file, size in zip(rows, json.loads(begun.read_text()), strict=True):
                os.truncate(file, size)
        begun.write_text(json.dumps([file.stat().st_size for file in rows]))
        with (folder / f"leg{number}.log").open("w") as log:
            began = time.monotonic()
            words = [sys.executable, "-m", "pytest", "-p", "reach_plugin", *leg.split("|")]
            code = subprocess.run(words, cwd=copied, env=env, stdout=log, stderr=log).returncode
        done.write_text(json.dumps({"code": code, "seconds": time.monotonic() - began}))
        print(leg, code, round(time.monotonic() - began), "s", flush=True)


def reached(suite: str) -> dict[int, set[str]]:
    """Tests that run each place; those of a shared fixture are the tests that ask for it."""
    folder = FOLDER / suite
    users: dict[str, set[str]] = {}
    for line in (folder / "reached.fixtures").read_text().splitlines():
        test, fixtures = json.loads(line)
        for fixture in fixtures:
            users.setdefault(f"fixture:{fixture}", set()).add(test)
    tests: dict[int, set[str]] = {}
    for line in (folder / "reached").read_text().splitlines():
        number, _, test = line.partition("\t")
        tests.setdefault(int(number), set()).update(users.get(test, {test}))
    return tests


# Killing #


def in_function(place: Place) -> bool:
    """True if the place runs when a function is called: not in its defaults or decorators."""
    source = (DRAWN_FROM / place.file).read_bytes()
    starts = [0, *(match.end() for match in re.finditer(rb"\n", source))]
    return any(
        starts[part.lineno - 1] <= place.start < starts[part.end_lineno - 1] + part.end_col_offset
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for part in (node.body if isinstance(node.body, list) else [node.body])
    )


@dataclass(frozen=True)
class Suite:
    """Tests of a suite that passed while `reach` ran, and what they reach."""

    seconds: dict[str, float]  # test -> of its call and set-up
    reached: dict[int, set[str]]

    @classmethod
    def read(cls, name: str) -> "Suite":
        seconds: dict[str, float] = {}
        failed = set()
        for line in (FOLDER / name / "reached.tests").read_text().splitlines():
            test, _, outcome, duration = json.loads(line)
            seconds[test] = seconds.get(test, 0) + duration
            if outcome != "passed":
                failed.add(test)
        passed = {test: time for test, time in seconds.items() if test not in failed}
        tests = {number: {test for test in by if test in passed} for number, by in reached(name).items()}
        return cls(passed, tests)

    def nearest(self, place: Place, tree: Path) -> list[str]:
        """Tests that reach a place, nearest first. For one that runs at import (a constant, a default): all
        tests, since those that use its value are not known.
        """
        module = "meshtune." + place.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        stem, package = Path(place.file).stem, Path(place.file).parts[0]
        mentions: dict[str, bool] = {}

        def distance(test: str) -> tuple[int, float]:
            file = test.partition("::")[0]
            if file not in mentions:
                text = (tree / file).read_text() if (tree / file).exists() else ""
                mentions[file] = module in text or (
                    f"import {stem}" in text and module.rpartition(".")[0] in text
                )
            steps = [
                Path(file).stem == f"test_{stem}" and package in (*Path(file).parts, place.file),
                stem in Path(file).stem and f"/{package}/" in file,
                mentions[file],
                f"tests/unit/{package}/" in file,
                file.startswith("tests/unit/"),
                file.startswith("tests/parity/"),
            ]
            return steps.index(True) if True in steps else len(steps), self.seconds[test]

        first = self.reached.get(place.number, set())
        if not in_function(place):
            return sorted(
                self.seconds, key=lambda test: (distance(test)[0], test not in first, self.seconds[test])
            )
        return sorted(first, key=distance)


def run_tests(tree: Path, tests: list[str], seconds: float) -> tuple[int, str]:
    """Run tests up to the first failure; returns pytest's exit code, -1 if time is over, and its output."""
    chosen = tree / "build" / "chosen.txt"
    chosen.write_text("\n".join(tests))
    # Messages name temporary folders, and golden files know pytest's own names: --basetemp would change them.
    temporary = tree.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-o",
        "addopts=",
        "--tb=line",
        f"@{chosen}",
    ]
    log = tree.parent / "log"  # no pipe: a process that a test leaves behind would keep it open
    with log.open("w") as file:
        process = subprocess.Popen(
            [*words, "-p", "no:cacheprovider"],
            cwd=tree, env=environment(tree, PYTEST_DEBUG_TEMPROOT=str(temporary)),
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = -1
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, log.read_text(errors="replace")


def kill(place: Place, suite: Suite, tree: Path, likely: str = "") -> dict[str, object]:
    """Change the place in a copy, run its tests and change it back. likely: a test to begin with."""
    there = located(tree, place)
    if there is None:
        return {"place": place.number, "result": "not in this version"}
    path = tree / "src" / "meshtune" / place.file
    source = path.read_bytes()
    tests = suite.nearest(place, tree)
    if likely in suite.seconds:
        tests = [likely, *(test for test in tests if test != likely)]
    began, start, size, ran = time.monotonic(), 0, CHUNK, 0
    try:
        path.write_bytes(changed(source, there, there.mutant))
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
            stale.unlink()
        while start < len(tests) and (left := SECONDS - (time.monotonic() - began)) > 0:
            code, out = run_tests(tree, tests[start : start + size], left)
            if code == -1:
                break
            ran += len(tests[start : start + size])
            if code not in (0, 5):
                named = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
                if code == 4:  # wrong words, a test that is gone: says nothing about the mutant
                    raise RuntimeError(f"place {place.number}: {out[-2000:]}")
                by = named[0][:300] if named else out[-300:]
                return {
                    "place": place.number,
                    "result": "killed",
                    "by": by,
                    "seconds": time.monotonic() - began,
                }
            start, size = start + size, 4 * size
    finally:
        path.write_bytes(source)
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
            stale.unlink()
    seconds = time.monotonic() - began
    return {"place": place.number, "result": "survived", "ran": ran, "of": len(tests), "seconds": seconds}


def noticed(name: str) -> dict[int, str]:
    """Test that noticed the mutant of each place that a suite killed."""
    file = FOLDER / name / "kills.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    tests = {
        row["place"]: re.match(r"(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", row.get("by", "")) for row in rows
    }
    return {place: found[1] for place, found in tests.items() if found}


def kill_all(name: str, base: str, tree: Path, jobs: int, other: str) -> None:
    """Kill the first COUNTED places of the lot that a test of the suite `base` reaches.

    other: a suite whose noticing tests are tried first.
    """
    places = [Place(**row) for row in json.loads((FOLDER / "places.json").read_text())]
    counted = [place for place in places if place.number in Suite.read(base).reached][:COUNTED]
    suite, file, likely = Suite.read(name), FOLDER / name / "kills.jsonl", noticed(other)
    done = {json.loads(line)["place"] for line in file.read_text().splitlines()} if file.exists() else set()
    trees: Queue[Path] = Queue()
    for job in range(jobs):
        trees.put(copy(tree, FOLDER / name / f"kill{job}" / "tree"))
        (FOLDER / name / f"kill{job}" / "tree" / "build").mkdir(exist_ok=True)

    def one(place: Place) -> None:
        if place.number in done:
            return
        tree = trees.get()
        try:
            row = kill(place, suite, tree, likely.get(place.number, ""))
            with file.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
            print(place.number, place.file, place.line, row, flush=True)
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, counted))


def control(name: str, tree: Path) -> list[str]:
    """Run the tests that noticed a mutant in an unchanged copy; returns those that fail there too."""
    copied = copy(tree, FOLDER / name / "control" / "tree")
    (copied / "build").mkdir(exist_ok=True)
    words = ["-m", "pytest", "-q", "-n", "2", "-o", "addopts=", "--tb=line", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *words, *dict.fromkeys(noticed(name).values())],
        cwd=copied, env=environment(copied), capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout[-300:])
    return [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]


def table(names: list[str]) -> str:
    """Table of what each suite killed, and a row for each place that one of them did not."""
    places = {row["number"]: Place(**row) for row in json.loads((FOLDER / "places.json").read_text())}
    kills = {
        name: {
            row["place"]: row
            for row in map(json.loads, (FOLDER / name / "kills.jsonl").read_text().splitlines())
        }
        for name in names
    }
    numbers = sorted(set.intersection(*(set(rows) for rows in kills.values())))
    lines = [
        f"{len(numbers)} places, the last of them number {numbers[-1] + 1} of the lot (seed {SEED}).",
        "",
    ]
    lines += ["| suite | killed | survived |", "|---|---:|---:|"]
    for name in names:
        dead = sum(kills[name][number]["result"] == "killed" for number in numbers)
        lines.append(f"| {name} | {dead} | {len(numbers) - dead} |")
    lines += ["", f"| place | change | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for number in numbers:
        results = [str(kills[name][number]["result"]) for name in names]
        if any(result != "killed" for result in results):
            place = places[number]
            texts = [" ".join(text.split())[:60].replace("|", "\\|") for text in (place.text, place.mutant)]
            lines.append(
                f"| {place.file}:{place.line} | `{texts[0]}` → `{texts[1]}` | {' | '.join(results)} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("draw")
    verb.add_argument("--tree", type=Path, default=ROOT)
    verb = verbs.add_parser("reach")
    verb.add_argument("--suite", required=True)
    verb.add_argument("--tree", type=Path, default=ROOT)
    verb.add_argument("--leg", dest="legs", action="append", help="options of one pytest run, separated by |")
    verb = verbs.add_parser("kill")
    verb.add_argument("--suite", required=True)
    verb.add_argument("--base", default="old", help="suite that decides which places are counted")
    verb.add_argument("--tree", type=Path, default=ROOT)
    verb.add_argument("--jobs", type=int, default=2)
    verb.add_argument("--other", default="", help="suite whose noticing tests are tried first")
    verb = verbs.add_parser("control")
    verb.add_argument("--suite", required=True)
    verb.add_argument("--tree", type=Path, default=ROOT)
    verb = verbs.add_parser("table")
    verb.add_argument("suites", nargs="+")
    given = parser.parse_args()
    if given.verb == "draw":
        shutil.rmtree(DRAWN_FROM, ignore_errors=True)
        shutil.copytree(given.tree / "src" / "meshtune", DRAWN_FROM)
        places = [asdict(place) for place in draw(DRAWN_FROM)]
        (FOLDER / "places.json").write_text(json.dumps(places, indent=1))
    elif given.verb == "reach":
        reach(given.suite, given.tree, given.legs)
    elif given.verb == "kill":
        kill_all(given.suite, given.base, given.tree, given.jobs, given.other)
    elif given.verb == "control":
        sys.exit("\n".join(control(given.suite, given.tree)) or None)
    else:
        print(table(given.suites), end="")


if __name__ == "__main__":
    main()
