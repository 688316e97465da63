"""Golden files: the texts of refusals, notes and warnings, word for word, in tests/golden/<area>.txt.

    with refuses(UserError):        # pytest.raises; the message is this test's next entry
        parse("dp2-dp2")
    says(note)                      # the text is this test's next entry

A test asserts numbers, exception types and exit codes; the golden file has the words. `make golden` runs the
tests that call one of the two and rewrites the files, to be reviewed as a diff; `python tests/golden.py plan
web` runs only files whose path has one of these words. The entries of a test are counted in its own process,
in the order of its calls: functions that run_ranks or hypothesis runs can't use it.
"""

import ast
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDER = TESTS / "golden"
WRITTEN = TESTS.parent / "build" / "golden"  # what the processes of `make golden` collect, a file each
REWRITE = bool(os.environ.get("REWRITE_GOLDEN"))

VERSION = re.compile(r"\b(version|torch|transformers) \d+\.\d+(?:\.\d+[^\s,]*| to \d+\.\d+)")
OWN_FOLDER = re.compile(
    r"/[^\s'\"]*?/pytest-of-[^/\s]+/pytest-[^/\s]+(?:/popen-gw\d+)?/[^/\s'\"]*?\d+(?=[/\s'\".,:;)]|$)"
)
PROGRESS = re.compile(r"^meshtune: (.* …|Building .* are cached\.)\n?", re.M)  # before a command's answer
REASON = re.compile(  # what another library says within a sentence of ours
    r"(Expecting|Extra data)[^.;)]*?(?=: line| at column|[.;)]|$)"
    r"|(?<=is not YAML: )(while|invalid|Exceeds|month).*"
    r"|(?<=is not TOML: ).*|(?<=parquet file: ).*|(?<=access to attribute ).*"
    r"|Validation error for field.*?(?=\)\.|$)|GenerationConfig is invalid.*?(?=\. Mend)"
    r"|(?<=built by transformers: ).*?(?=\. Mend)|(?<=can't be loaded: ).*?(?=\. It needs)"
)
ENTRY = re.compile(r"^=== (.*)$")

Entries = dict[str, list[str]]  # test -> its texts

_said: dict[str, int] = {}  # test -> number of texts so far


def plain(text: str) -> str:
    """Replace what differs between machines and releases: folders, versions, other libraries' messages."""
    text = OWN_FOLDER.sub("<tmp>", PROGRESS.sub("", text)).replace(str(TESTS.parent), "<repo>")
    text = REASON.sub("<reason>", VERSION.sub(r"\1 <version>", text))
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def area(test: str) -> str:
    """Name of a test's golden file: its folders, without `unit/`."""
    folders = Path(test.partition("::")[0]).parts[1:-1]
    folders = folders[1:] if folders[:1] == ("unit",) else folders
    return "-".join(folders) or "house"


def read(file: Path) -> Entries:
    entries: Entries = {}
    if not file.exists():
        return entries
    for line in file.read_text("utf-8").splitlines():
        if heading := ENTRY.match(line):
            texts = entries.setdefault(heading[1], [])
            texts.append("")
        else:
            texts[-1] += f"{line}\n"
    return {test: [text.strip("\n") for text in texts] for test, texts in entries.items()}


def write(file: Path, entries: Entries) -> None:
    rows = [f"=== {test}\n{text}\n" for test in sorted(entries) for text in entries[test]]
    aside = file.with_suffix(".new")
    aside.write_text("\n".join(rows), "utf-8")
    aside.replace(file)


@cache
def _golden(file: Path) -> Entries:
    return read(file)


def says(text: str | BaseException | Iterable[str]) -> None:
    """Assert that `text` is the running test's next entry. An iterable of texts has one a line."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    number = _said.get(test, 0)
    _said[test] = number + 1
    now = plain(str(text) if isinstance(text, str | BaseException) else "\n".join(text))
    if REWRITE:
        WRITTEN.mkdir(parents=True, exist_ok=True)
        with (WRITTEN / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([test, now]) + "\n")
        return
    texts = _golden(FOLDER / f"{area(test)}.txt").get(test, [])
    golden = texts[number] if number < len(texts) else ""
    if now != golden:
        changes = difflib.unified_diff(
            golden.splitlines(), now.splitlines(), "golden", "now", lineterm="", n=1
        )
        pytest.fail("The text differs; `make golden` rewrites it.\n" + "\n".join(changes))


def said_all(test: str) -> None:
    """Assert that a test has said all of its entries: a text that is missing is a change too."""
    texts = [] if REWRITE else _golden(FOLDER / f"{area(test)}.txt").get(test, [])
    if missing := texts[_said.get(test, 0) :]:
        pytest.fail("The test did not say this; `make golden` rewrites it.\n" + "\n".join(missing))


@contextmanager
def refuses(kind: type[BaseException] | tuple[type[BaseException], ...]) -> Iterator[pytest.ExceptionInfo]:
    """Assert that the block raises `kind` and that the message is the running test's next entry."""
    with pytest.raises(kind) as info:
        yield info
    says(info.value)


# make golden #


def users(file: Path) -> list[str]:
    """Tests of a file that call `says` or `refuses`, also through functions of the same file."""
    functions = {
        node.name: {getattr(part, "id", getattr(part, "arg", None)) for part in ast.walk(node)}
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    using = {"says", "refuses"}
    while more := {name for name, names in functions.items() if names & using} - using:
        using |= more
    return [name for name in functions if name in using and name.startswith("test_")]


class Outcomes:
    """A plugin of pytest that collects the functions that passed, and those that failed or were skipped."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.others: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            (self.passed if report.passed else self.others).add(function_of(report.nodeid))


def function_of(test: str) -> str:
    return test.partition("[")[0]


def merged(old: Entries, new: Entries, ran: set[str], unsure: set[str]) -> Entries:
    """Entries of a golden file after a run of `make golden`.

    ran: files of the run; all their entries are replaced, and those of files that are gone dropped.
    unsure: test functions of which not every case passed; their entries stay as they are.
    """
    kept = {
        test: texts
        for test, texts in old.items()
        if function_of(test) in unsure
        or (test.partition("::")[0] not in ran and (TESTS.parent / test.partition("::")[0]).exists())
    }
    return kept | {test: texts for test, texts in new.items() if function_of(test) not in unsure}


def collected() -> dict[str, Entries]:
    """Entries that the processes of the run have written, by golden file."""
    areas: dict[str, Entries] = {}
    for file in WRITTEN.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            test, text = json.loads(line)
            areas.setdefault(area(test), {}).setdefault(test, []).append(text)
        file.unlink()
    return areas


def main(words: list[str]) -> int:
    os.environ["REWRITE_GOLDEN"] = "1"
    collected()  # of a run that was interrupted
    files = [str(file.relative_to(TESTS.parent)) for file in sorted(TESTS.rglob("test_*.py"))]
    files = [file for file in files if not words or any(word in file for word in words)]
    tests = [f"{file}::{name}" for file in files for name in users(TESTS.parent / file)]
    if not tests:
        sys.exit(f"No test with golden texts is in a file whose path has {' or '.join(words)}.")
    outcomes = Outcomes()
    options = ["-n", "2", "--dist", "loadfile", "-m", "not gpu and not browser", "-q"]
    code = pytest.main([*options, *tests], plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return code  # interrupted: which cases did not run is not known
    unsure = outcomes.others | (set(tests) - outcomes.passed)
    new = collected()
    if not new:
        sys.exit("No process wrote a text: the files stay as they are.")
    FOLDER.mkdir(exist_ok=True)
    for name in sorted(new.keys() | {file.stem for file in FOLDER.glob("*.txt")}):
        file = FOLDER / f"{name}.txt"
        entries = merged(read(file), new.get(name, {}), set(files), unsure)
        write(file, entries) if entries else file.unlink()
        print(f"{file.relative_to(TESTS.parent)}: {sum(map(len, entries.values()))} texts")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
