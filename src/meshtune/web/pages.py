"""The pages that the server shows: report's own, with the list of runs and sweeps above them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from os import listdir, stat_result, uname
from os.path import samestat
from pathlib import Path
from typing import NamedTuple

from meshtune.errors import UserError
from meshtune.plan.facts import tensors
from meshtune.report.compare import MOST_RUNS, NONE, compare, comparison_page
from meshtune.report.draw.document import Document, OnPage, Pictures
from meshtune.report.draw.page import EMPTY, prose, text
from meshtune.report.draw.table import Markup, Table
from meshtune.report.experiments.database import counts_by_status, read_facts
from meshtune.report.experiments.page import sweep_page
from meshtune.report.run.report import run_page
from meshtune.report.run.summary import Rows, Summary, facts_of, summarise
from meshtune.rundir import Row, RunDir
from meshtune.units import human
from meshtune.web.events import Stamp
from meshtune.web.folders import Entry, Folders
from meshtune.web.states import State, first_and_last_rows, state_of

STOP = "USR1"  # signal on which a run ends after a step and its checkpoint (launch/signals.py)
FOOTER = prose(
    "Made by meshtune from the files of the folders that `meshtune ui` was given. Nothing here changes them."
)
WAITING = prose(
    "No runs or sweeps yet. `meshtune train` and `meshtune sweep` write them, by default below "
    "runs/; the first one appears here within some seconds."
)
HEADS = (
    "", "run", "loss", "state", "step", "held-out loss", "tokens/s per device", "planned speed",
    "peak memory", "planned memory", "changed",
)  # fmt: skip


class RunLine(NamedTuple):
    """A run's line of the list."""

    entry: Entry
    state: State
    summary: Summary  # only of its first and last rows
    facts: Row  # of its last start
    changed: float  # seconds since 1970


@dataclass
class RunLines:
    """Lines of the list, read again only of runs whose files have changed."""

    folders: Folders

    def __post_init__(self) -> None:
        self._known: dict[str, tuple[object, RunLine]] = {}

    def all(self) -> list[RunLine]:
        """A line for each run, the last changed first."""
        runs = [one for one in self.folders.entries.values() if one.kind == "run"]
        lines = [line for one in runs if (line := self._line(one))]
        self._known = {line.entry.id: self._known[line.entry.id] for line in lines}
        return sorted(lines, key=lambda line: (-line.changed, line.entry.name))

    def _line(self, entry: Entry) -> RunLine | None:
        if not self.folders.may_show(entry):
            return None
        stamp = stamp_of(entry)
        if entry.id not in self._known or self._known[entry.id][0] != stamp:
            self._known[entry.id] = stamp, run_line(entry)
        return self._known[entry.id][1]


def stamp_of(entry: Entry) -> Stamp:
    """Stamp of a run or a sweep."""
    if entry.kind == "sweep":
        return Stamp(_stamp(entry.path))
    run = RunDir(entry.path)
    files = (run.metrics_file, run.samples_file, run.config_file, *run.rank_logs)
    return Stamp(tuple(map(_stamp, files)), run.is_training)


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def run_line(entry: Entry) -> RunLine:
    """A run's line, from its first and last rows."""
    run = RunDir(entry.path)
    rows = first_and_last_rows(run.metrics_file)
    summary = summarise(run, rows, samples=False)
    changed = [stamp[2] for file in (run.metrics_file, run.config_file) if (stamp := _stamp(file))]
    return RunLine(
        entry,
        state_of(run, summary.status, rows),
        summary,
        facts_of(run, rows),
        max(changed, default=0) / 1e9,
    )


def list_page(lines: Sequence[RunLine], sweeps: Sequence[Entry]) -> Document:
    """The list of runs, to be compared, and of sweeps."""
    states = [line.state.word for line in lines]
    counts = " · ".join(f"{states.count(word):,} {word}" for word in dict.fromkeys(states))
    body = _runs(lines) + _sweeps(sweeps) or EMPTY.format(WAITING)
    return Document("Runs", (OnPage(body),), subtitle=text(counts), footer=FOOTER)


def _runs(lines: Sequence[RunLine]) -> str:
    """HTML of the table of runs, in a form; "" without any."""
    note = "Speed is the median of the last steps of a long run; memory is that of tensors on a device."
    table = Table.of_rows("", HEADS, map(_row, lines), ("run", "state"), (note,))
    button = f"<p><button>compare the chosen runs</button> <small>2 to {MOST_RUNS}</small></p>"
    return f"<form action='/compare'>{replace(table, tall=True).html()}{button}</form>" if lines else ""


def _row(line: RunLine) -> tuple[str | Markup, ...]:
    entry, summary, state = line.entry, line.summary, line.state
    speed, memory = planned_numbers(line.facts)
    total = line.facts.get("total_steps")
    reasons = "".join(f" <small>{text(why)}</small>" for why in (state.why, summary.left_out) if why)
    return (
        Markup(
            f"<input type='checkbox' name='run' value='{entry.id}' aria-label='choose {text(entry.name)}'>"
        ),
        Markup(f"<a href='/runs/{entry.id}'>{text(entry.name)}</a>"),
        _number(summary.last_loss, ".4f"),
        Markup(f"<b>{state.word}</b>{reasons}"),
        f"{summary.steps:,}{f' of {total:,}' if total and state.word != 'finished' else ''}",
        _number(summary.last_eval_loss, ".4f"),
        _number(summary.tokens_per_second_per_gpu, ",.0f"),
        _number(speed, ",.0f"),
        human(summary.peak_memory_bytes) if summary.peak_memory_bytes else NONE,
        human(memory) if memory else NONE,
        f"{datetime.fromtimestamp(line.changed):%Y-%m-%d %H:%M:%S}",
    )


def planned_numbers(facts: Row) -> tuple[float | None, float | None]:
    """(tokens/s per device, bytes of tensors on a device) of the plan at a run's start; None: not known."""
    predicted = facts.get("predicted") or {}
    memory = tensors(predicted["memory"])["peak"] if predicted.get("memory") else None
    seconds, batch = predicted.get("step_seconds"), facts.get("global_batch_size")
    if not (seconds and batch and facts.get("seq_len")):
        return None, memory
    return batch * facts["seq_len"] / seconds / facts.get("world", 1), memory


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"


def _sweeps(sweeps: Iterable[Entry]) -> str:
    items = []
    for entry in sweeps:
        try:
            counts = ", ".join(
                f"{number:,} {status}" for status, number in counts_by_status(entry.path).items()
            )
            if simulated := read_facts(entry.path).get("simulated"):
                counts = f"simulated ({simulated}) · {counts}"
        except UserError:
            counts = "its database can't be read"
        items.append(
            f"<li><a href='/sweeps/{entry.id}'>{text(entry.name)}</a> <small>{text(counts)}</small></li>"
        )
    return f"<section><h2>Sweeps</h2><ul>{''.join(items)}</ul></section>" if items else ""


def page_of_run(entry: Entry) -> Document:
    """A run's page: its report, with its state and the command that stops it."""
    run = RunDir(entry.path)
    rows = Rows(run.rows())
    summary = summarise(run, rows)
    page = run_page(run, rows, summary)
    state = state_of(run, summary.status, rows)
    why = f" · {text(state.why)}" if state.why and state.why not in summary.status else ""
    stop = _stop(run, facts_of(run, rows)) if run.is_training else ""
    first = next(n for n, part in enumerate(page.parts) if isinstance(part, Pictures)) + 1
    parts = (*page.parts[:first], OnPage(stop), *page.parts[first:])
    return replace(page, subtitle=page.subtitle + why, parts=parts)


def _stop(run: RunDir, facts: Row) -> str:
    """HTML of the command that ends a run after its next step, with a checkpoint."""
    host, pid = facts.get("host"), holder_of(run.lock_file)
    if pid:
        how = f"<pre class='command'>kill -{STOP} {pid}</pre>"
    else:
        how = f"<pre class='command'>scancel --signal={STOP} JOB</pre>"
    where = f" on {text(host)}" if host and host != uname().nodename else ""
    other = "" if pid else " (JOB is its Slurm job; without Slurm press Ctrl-C where it runs)"
    return (
        f"<section><h2>Stop it</h2><p>This command{where} lets it finish its step, save a checkpoint and "
        f"end; the same <code>meshtune train</code> resumes from there{other}.</p>{how}</section>"
    )


def holder_of(lock: Path) -> int | None:
    """Id of the process that holds a file locked and open, on this machine; None where that is not known.

    The table of locks has inodes, numbered by each disk: a process without the file open is another
    file's, and must get no signal.
    """
    try:
        status = lock.stat()
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for words in map(str.split, locks):  # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF
        if (
            words[1:2] == ["FLOCK"]
            and words[5].rpartition(":")[2] == str(status.st_ino)
            and int(words[4]) > 0
            and has_open(int(words[4]), status)
        ):
            return int(words[4])
    return None


def has_open(pid: int, status: stat_result) -> bool:
    """True if a process has a file open, as far as this user may know. status: of the file."""
    folder = Path(f"/proc/{pid}/fd")
    with suppress(OSError):  # it has ended, or is another user's
        for name in listdir(folder):
            with suppress(OSError):  # closed meanwhile
                if samestat((folder / name).stat(), status):
                    return True
    return False


def page_of_sweep(entry: Entry, may_read: Callable[[Path], bool]) -> Document:
    """A sweep's page, as report draws it. may_read: True for files of its runs that may be shown."""
    return sweep_page(entry.path, may_read)


def page_of_several(entries: Sequence[Entry]) -> Document:
    """The comparison of runs. Raises UserError for fewer than two, or for too many."""
    return comparison_page(compare([one.path for one in entries]))
