"""A run's report.html, made from the files of the run folder and nothing else.

Around the curves over steps stand the headline numbers, samples before and after, and the settings. What a
run has not written yet is left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtune.addresses import public
from meshtune.errors import check_file
from meshtune.meter.rows import memory_table, unfinished_answers
from meshtune.report.draw.document import Document, Notes, OnPage, Part, Pictures, Section, Tiles
from meshtune.report.draw.kinds import Panel
from meshtune.report.draw.page import EMPTY, text
from meshtune.report.draw.table import Table
from meshtune.report.draw.table import facts as facts_table
from meshtune.report.draw.vega import NotDrawn
from meshtune.report.draw.words import MFU, REWARDS
from meshtune.report.run.panels import panels
from meshtune.report.run.samples import Asked, samples_table
from meshtune.report.run.summary import (
    UNKNOWN,
    Rows,
    Summary,
    facts_of,
    grown,
    of_kind,
    samples_of,
    summarise,
)
from meshtune.rundir import Row, RunDir, write_text_atomically
from meshtune.units import count, counted, duration, human

LABELS = {  # facts of the "run" row about what was run; the others are its environment
    "model": "Model",
    "method": "Method",
    "objective": "Objective",
    "parameters": "Parameters",
    "trainable_parameters": "Trainable",
    "data": "Data",
    "layout": "Layout",
    "world": "Devices",
    "global_batch_size": "Global batch",
    "seq_len": "Sequence length",
    "total_steps": "Steps",
    "learning_rate": "Learning rate",
    "precision": "Precision",
    "seed": "Seed",
    "data_digest": "Digest of the data",
}
PREDICTED = "predicted"  # the fact that has a table of its own


def write_report(run: RunDir) -> Path:
    """Write the run folder's report.html, again if it exists, and return its path.

    Raises NotDrawn without Altair if there is anything to draw, and OSError where the file can't be written.
    """
    write_text_atomically(run.report_file, report_page(run))
    return run.report_file


def try_report(run: RunDir) -> str:
    """Write the report; "" or, where it could not be written, a sentence with the reason and the remedy.

    A finished training must not end in an error because its report could not be drawn.
    """
    try:
        write_report(run)
    except NotDrawn as error:
        return f"The report was not drawn. {error}; then: meshtune report {run.path}"
    except OSError as error:
        return f"{run.report_file} could not be written: {error}. Later: meshtune report {run.path}"
    return ""


def run_panels(rows: Sequence[Row]) -> list[Panel]:
    """The pictures of the report: curves over steps, then time by part and memory by category."""
    from meshtune.report.run.parts import part_panels  # it brings numpy, which a run's other files don't need

    return [*panels(rows), *part_panels(rows)]


def report_page(run: RunDir) -> str:
    """The report as HTML text."""
    return run_page(run).html()


def run_page(run: RunDir, rows: Sequence[Row] | None = None, summary: Summary | None = None) -> Document:
    """The report's parts. rows: of metrics.jsonl, summary: of these, where they are at hand."""
    rows = Rows(run.rows() if rows is None else rows)
    summary, facts = summary or summarise(run, rows), facts_of(run, rows)
    shown = {label: facts.get(key) for key, label in LABELS.items()}
    shown["Layout"] = summary.layouts_in_words or shown["Layout"]
    environment = {key: value for key, value in facts.items() if key not in (*LABELS, PREDICTED)}
    parts = (
        *_headline(summary, facts),
        Pictures(run_panels(rows)),
        Section("Why it is slow", [cause.sentence for cause in summary.causes], numbered=True),
        _samples(run),
        *_memory(of_kind(rows, "memory")),
        facts_table(shown, "What was run", _fact),
        facts_table(dict(_prediction(facts.get(PREDICTED) or {})), "What the planner predicted"),
        OnPage(_settings(run)),
        facts_table(environment, "Environment", _fact),
    )
    return Document(
        summary.name,
        parts,
        subtitle=_subtitle(summary, facts),
        later=LiveHeadline(summary, facts, rows).of,
        footer=text(f"Made by meshtune from the files of this run's folder. {conventions([facts])}"),
    )


class LiveHeadline:
    """Makes subtitle and tiles of a run's page anew from rows that come after it was drawn."""

    def __init__(self, summary: Summary, facts: Row, rows: Sequence[Row]) -> None:
        """summary, facts: of the rows that the page was drawn with."""
        self._summary, self._facts = summary, facts
        self._evaluated = max((row["step"] for row in of_kind(rows, "eval")), default=-1)

    def of(self, rows: Sequence[Row]) -> dict[str, str]:
        """HTML of the elements `subtitle` and `before`; {} where rows that came later change nothing there.

        rows: each given once, in order; what the page was drawn with does not count again.
        """
        seen = {"train": self._summary.steps, "eval": self._evaluated}
        new = [row for row in rows if (kind := row.get("kind")) in seen and row["step"] > seen[kind]]
        if not new:
            return {}
        self._evaluated = max((row["step"] for row in of_kind(new, "eval")), default=self._evaluated)
        self._summary = grown(self._summary, new)
        parts = _headline(self._summary, self._facts)
        headline = "\n".join(filter(None, (part.html() for part in parts)))
        return {"subtitle": _subtitle(self._summary, self._facts), "before": headline}


def conventions(facts: Sequence[Mapping[str, Any]]) -> str:
    """Sentences on how figures of runs were made, and where. facts: of `facts_of`, one for each run."""
    names = ("device", "meshtune", "torch")
    known = [{name: str(one[name]) for name in names if one.get(name)} for one in facts]
    where = [
        ", ".join(word if name == "device" else f"{name} {word}" for name, word in one.items())
        for one in known
    ]
    machines = "; ".join(dict.fromkeys(word for word in where if word))
    steps = "Speed and MFU in figures are medians over the last layout's steps, without those that warm up."
    rewards = [REWARDS] if any(one.get("objective", "sft") != "sft" for one in facts) else []
    return " ".join([steps, MFU, *rewards, *([f"Measured on {machines}."] if machines else [])])


def _subtitle(summary: Summary, facts: Row) -> str:
    """HTML of one line: model, method, layout, steps, tokens, time, and how the run ended or when it will.

    facts: of `facts_of`.
    """
    total, running = facts.get("total_steps"), summary.status in ("running", UNKNOWN)
    of_all = total and summary.status != "finished"
    parts = [f"step {summary.steps:,} of {total:,}" if of_all else counted(summary.steps, "step")]
    if facts.get("layout"):
        parts.insert(0, f"<code>{text(facts['layout'])}</code>")
    if facts.get("model"):
        objective = "" if facts.get("objective", "sft") == "sft" else f" by {text(facts['objective'])}"
        parts.insert(0, f"{text(facts['model'])}, {text(facts.get('method', 'full'))} fine-tuning{objective}")
    if summary.tokens:
        parts.append(f"{count(summary.tokens)} tokens")
    if summary.seconds:
        parts.append(f"{duration(summary.seconds)} of steps")
    if summary.skipped:
        parts.append(f"{summary.skipped:,} of the steps not applied (not finite)")
    if total and running and summary.steps and summary.seconds:
        left = max(0, total - summary.steps) * summary.seconds / summary.steps
        parts.append(f"about {duration(left)} of steps left")
    return " · ".join([*parts, text(summary.status)])


def _headline(summary: Summary, facts: Row) -> tuple[Part, ...]:
    """A bar of a run that continues, the headline numbers as tiles, a sentence on rows that were left out."""
    total = facts.get("total_steps") if summary.status in ("running", UNKNOWN) else None
    bar = f"<progress max='{total}' value='{summary.steps}' aria-label='steps'></progress>" if total else ""
    figures = [*_figures(summary)]
    tiles = Tiles(figures) if figures else OnPage(EMPTY.format("Nothing has been measured yet."))
    return OnPage(bar), tiles, Notes([summary.left_out] if summary.left_out else [])


def _figures(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Yield (label, value, small text below it) of the figures that are known."""
    if (exact := summary.last_exact_match) is not None:
        before = "" if summary.first_exact_match is None else f"from {summary.first_exact_match:.1%}"
        cut = unfinished_answers(vars(summary))
        yield "Exact match", f"{exact:.1%}", "; ".join(filter(None, [before, cut]))
    if (margin := summary.last_margin) is not None:
        if (accuracy := summary.last_accuracy) is None:
            yield "Held-out margin", f"{margin:.3g}", "of rewards"
        else:
            yield "Held-out accuracy", f"{accuracy:.1%}", f"margin of rewards {margin:.3g}"
    if (loss := summary.last_eval_loss) is not None:
        known = summary.first_eval_loss not in (None, loss)
        yield "Held-out loss", f"{loss:.4f}", f"from {summary.first_eval_loss:.4f}" if known else ""
    if summary.last_loss is not None:
        yield "Training loss", f"{summary.last_loss:.4f}", f"from {summary.first_loss:.4f}"
    if (speed := summary.tokens_per_second_per_gpu) is not None:
        mfu = "median" if summary.mfu is None else f"MFU {summary.mfu:.1%}"
        yield summary.speed_unit.replace("t", "T", 1), f"{speed:,.0f}", mfu
    if summary.peak_memory_bytes is not None:
        process = summary.peak_resident_bytes
        small = f"of tensors; process {human(process)}" if process else "of tensors"
        yield "Peak memory", human(summary.peak_memory_bytes), small
    if layouts := summary.layouts_in_words:
        yield "Layouts", str(len(summary.layouts)), layouts


def _samples(run: RunDir) -> Table:
    """Table of held-out prompts with the expected answer and the model's, before and after."""
    samples = samples_of(run)
    twice = any(sample.before is not None for sample in samples)
    rows = [
        Asked(one.prompt, one.question, one.expected, (one.before, one.after) if twice else (one.after,))
        for one in samples
    ]
    steps = {one.step for one in samples}
    last = f"At step {max(steps):,}" if len(steps) == 1 else "Last"
    return samples_table((*["Before"] * twice, last), rows, run.samples_file.name)


def _memory(rows: list[Row]) -> Iterator[Table]:
    """Yield a table of the peak memory of each phase of the last two watched steps, if there are any."""
    rows = [row for row in rows if row.get("rank", 0) == 0 and "step" not in row["phases"]]
    if rows:
        note = f"MiB on rank 0, at the peak of each phase, of the last {len(rows[-2:])} that were watched."
        yield Table.of_rows("Memory of the first steps", *memory_table(rows[-2:]), ("",), (note,), totals=1)


def _prediction(predicted: Row) -> Iterable[tuple[str, str]]:
    """Yield (part, bytes or seconds as text) of a plan's memory and step time, less the parts that are 0."""
    for name, size in (predicted.get("memory") or {}).items():
        if isinstance(size, float) and size:
            yield f"memory: {name.replace('_', ' ')}", human(size)
    for name, seconds in (predicted.get("time") or {}).items():
        if seconds:
            yield f"time of a step: {name}", duration(seconds, like=predicted["step_seconds"])


def _settings(run: RunDir) -> str:
    """The resolved config and the command that runs it again."""
    if not run.config_file.exists():
        return ""
    again = f"meshtune train {run.config_file} output=NEW"
    check_file(run.config_file)
    settings = run.config_file.read_text(encoding="utf-8", errors="replace")
    return (
        f"<section><h2>Settings</h2><p>Run it again, in the folder NEW, with <code>{text(again)}</code></p>"
        f"<details><summary>config.yaml</summary><pre>{text(public(settings))}</pre></details></section>"
    )


def _fact(value: Any) -> str:
    """A fact as text; large counts get a short form next to the exact one."""
    if isinstance(value, list):
        return ", ".join(map(_fact, value))
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10**6:
        return f"{value:,} ({count(value)})"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
