"""Several runs as one value, and as a Document: final figures, curves over each other, settings that differ,
answers to the same prompts.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from meshtune.addresses import public
from meshtune.errors import UserError
from meshtune.objectives import OBJECTIVES, default_rate
from meshtune.report.draw.document import Document, InTerminal, Notes, OnPage, Part, Pictures
from meshtune.report.draw.kinds import Lines
from meshtune.report.draw.page import EMPTY, text
from meshtune.report.draw.table import BEST, Column, Table
from meshtune.report.draw.theme import OTHERS
from meshtune.report.run.panels import QUANTITIES, UNIT
from meshtune.report.run.report import conventions
from meshtune.report.run.samples import Asked, samples_table
from meshtune.report.run.summary import Summary, facts_of, objective_of, samples_of, summarise
from meshtune.rundir import RunDir
from meshtune.units import count, duration, human, printable
from meshtune.yaml_tree import read_yaml

MOST_RUNS = len(OTHERS)  # one colour each
NONE = "–"  # where a run has no value
ALWAYS_DIFFERS = ("output",)  # settings
# Facts of the "run" row that a setting says already, or that only tell how a run was started.
KNOWN_FACTS = (
    "model", "method", "objective", "precision", "global_batch_size", "seq_len", "data", "resumed_from",
    "learning_rate", "total_steps", "schedule_steps", "seed", "id", "start", "started", "begun", "expected",
    "predicted",
)  # fmt: skip
# Settings that choose the held-out labels: where one differs, losses are means over other tokens.
HELD_OUT = (
    "model.name", "data.eval", "data.format", "data.columns", "data.chat_template", "data.train_on",
    "data.seq_len",
)  # fmt: skip
LOSSES = ("objective", *(f"{name}." for name in OBJECTIVES))  # settings of what a loss is
HELD_OUT_OF_TRAIN = ("data.train.", "data.where", "data.max_samples")  # under data.eval_split, these too

NOT_DRAWN = ("mfu", "noise_scale", "rewards")
DRAWN = [part for one in QUANTITIES if one.key not in NOT_DRAWN for part in one.apart()]


@dataclass(frozen=True)
class Line:
    """One figure or setting of all runs."""

    name: str
    cells: tuple[str, ...]  # a text per run; NONE where it has no value
    best: tuple[bool, ...] = ()  # per run; (): no value is better than another


@dataclass(frozen=True)
class Comparison:
    """Runs side by side; every tuple of cells is in the order of `names`."""

    names: tuple[str, ...]
    runs: tuple[RunDir, ...]
    summaries: tuple[Summary, ...]
    figures: tuple[Line, ...]
    settings: tuple[Line, ...]  # that differ, by dotted key
    environment: tuple[Line, ...]  # facts of the "run" rows that differ
    samples: tuple[Asked, ...]  # with the last answer of each run
    caution: str  # a sentence on figures that do not compare; "" where they do
    facts: tuple[Mapping[str, Any], ...]  # of each run's last "run" row, by dotted name

    @property
    def notes(self) -> list[str]:
        """Sentences below the figures."""
        left_out = (
            f"{name}: {one.left_out}"
            for name, one in zip(self.names, self.summaries, strict=True)
            if one.left_out
        )
        return [*([self.caution] if self.caution else []), *left_out]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "runs": [{"name": n, **s.as_dict()} for n, s in zip(self.names, self.summaries, strict=True)],
            "settings": {line.name: list(line.cells) for line in self.settings},
            "environment": {line.name: list(line.cells) for line in self.environment},
            "caution": self.caution,
        }


def compare(paths: Sequence[Path]) -> Comparison:
    """Read two to MOST_RUNS run folders. Raises UserError for more, for fewer, and for one named twice."""
    if not 2 <= len({path.resolve() for path in paths}) == len(paths) <= MOST_RUNS:
        raise UserError(f"A comparison takes 2 to {MOST_RUNS} different run folders; {len(paths)} are named.")
    runs = tuple(RunDir(path) for path in paths)
    summaries = tuple(map(summarise, runs))
    configs = [_config(run) for run in runs]
    settings = differing(configs, leave_out=ALWAYS_DIFFERS)
    facts = [dict(leaves(facts_of(run))) for run in runs]
    split = HELD_OUT_OF_TRAIN if any(config.get("data.eval_split") for config in configs) else ()
    chosen = [line.name for line in settings if line.name.startswith((*HELD_OUT, *LOSSES, *split))]
    compared = any(summary.last_eval_loss is not None for summary in summaries)
    why = "" if any(name.startswith(LOSSES) for name in chosen) else "are means over different tokens, and "
    caution = (
        f"{', '.join(chosen)} differ{'s' if len(chosen) == 1 else ''}: losses {why}do not compare."
        if chosen and compared
        else ""
    )
    return Comparison(
        names=names_of(paths),
        runs=runs,
        summaries=summaries,
        figures=tuple(figures(summaries, losses_compare=not chosen)),
        settings=tuple(settings),
        environment=tuple(differing(facts, leave_out=KNOWN_FACTS)),
        samples=tuple(answers_of(runs)),
        caution=caution,
        facts=tuple(facts),
    )


def names_of(paths: Sequence[Path]) -> tuple[str, ...]:
    """Names of the folders; where two have the same name, all paths from their common folder on."""
    names = tuple(path.resolve().name for path in paths)
    if len(set(names)) == len(names):
        return names
    whole = [path.resolve() for path in paths]
    above = os.path.commonpath([path.parent for path in whole])
    return tuple(str(path.relative_to(above)) for path in whole)


def in_words(line: Line) -> Line:
    """A fact of the "run" rows with words for its name, and numbers with their thousands apart."""
    cells = (f"{int(cell):,}" if cell.isdigit() else cell for cell in line.cells)
    return replace(line, name=line.name.replace("_", " "), cells=tuple(cells))


def figures(summaries: Sequence[Summary], *, losses_compare: bool) -> Iterator[Line]:
    """Yield the final figures that any run has, the most important first, with the best value of each.

    losses_compare: False marks no loss, accuracy and exact match as the best.
    """
    low, high = (min, max) if losses_compare else (None, None)
    rows: tuple[tuple[str, str, Callable[[Any], str], Callable[..., Any] | None], ...] = (
        ("status", "status", str, None),
        ("exact match", "last_exact_match", "{:.1%}".format, high),
        ("held-out accuracy", "last_accuracy", "{:.1%}".format, high),
        ("held-out margin of rewards", "last_margin", "{:.3g}".format, None),
        ("held-out loss", "last_eval_loss", "{:.4f}".format, low),
        ("best held-out loss", "best_eval_loss", "{:.4f}".format, low),
        ("training loss", "last_loss", "{:.4f}".format, low),
        ("steps", "steps", "{:,}".format, None),
        ("steps not applied", "skipped", "{:,}".format, None),
        ("tokens", "tokens", count, None),
        ("time of training steps", "seconds", duration, None),
        (_speed(summaries), "tokens_per_second_per_gpu", "{:,.0f}".format, max),
        ("MFU", "mfu", "{:.1%}".format, max),
        ("peak memory", "peak_memory_bytes", human, min),
        ("peak memory of a process", "peak_resident_bytes", human, min),
    )
    for name, column, form, better in rows:
        values = [getattr(summary, column) for summary in summaries]
        known = [value for value in values if value is not None]
        if not any(known):  # measured by no run; no step was skipped
            continue
        best = better(known) if better and len(set(known)) > 1 else None
        yield Line(
            name,
            tuple(NONE if value is None else form(value) for value in values),
            tuple(best is not None and value == best for value in values),
        )


def _speed(summaries: Sequence[Summary]) -> str:
    """Unit of the runs' speed: per GPU if any run has several; tokens/s is the case of one GPU."""
    return max((summary.speed_unit for summary in summaries), key=len)


def differing(trees: Sequence[Mapping[str, Any]], *, leave_out: Sequence[str]) -> list[Line]:
    """Lines of the keys whose values are not the same in all trees. leave_out: names at the top.

    A missing key is the same as an empty value: an earlier version lacked what is now off by default.
    """
    lines = []
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = [tree.get(key) for tree in trees]
        missing = not all(key in tree for tree in trees)
        same = not any(values) if missing else all(value == values[0] for value in values)
        if key.partition(".")[0] not in leave_out and not same:
            lines.append(Line(key, tuple(_written(tree.get(key)) for tree in trees)))
    return lines


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of each leaf of a tree of mappings and lists of mappings.

    The only mapping of a list has the list's name; of several, each has its number from 1. prefix: of all
    names, without its dot at the end.
    """
    if isinstance(tree, list) and tree and all(isinstance(one, Mapping) for one in tree):
        tree = {str(number): one for number, one in enumerate(tree, 1)} if len(tree) > 1 else tree[0]
    if isinstance(tree, Mapping) and (tree or not prefix):
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def answers_of(runs: Sequence[RunDir]) -> Iterator[Asked]:
    """Yield each prompt that any run was asked, in the order of the first run that has it."""
    samples = [{sample.prompt: sample for sample in samples_of(run)} for run in runs]
    for prompt in dict.fromkeys(prompt for by_prompt in samples for prompt in by_prompt):
        each = [by_prompt.get(prompt) for by_prompt in samples]
        expected = next((one.expected for one in each if one and one.expected is not None), None)
        question = next((one.question for one in each if one), prompt)
        yield Asked(prompt, question, expected, tuple(one and one.after for one in each))


def _config(run: RunDir) -> dict[str, Any]:
    """The settings by dotted key, the default learning rate as a number; {} for a run without config.yaml."""
    if not run.config_file.exists():
        return {}
    settings = dict(leaves(public(read_yaml(run.config_file))))
    if settings.get("train.learning_rate") is None:
        settings["train.learning_rate"] = default_rate(
            settings.get("method", "full"), settings.get("objective", "sft")
        )
    return settings


def _written(value: Any) -> str:
    if value is None:
        return NONE
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# The page and the terminal #


def comparison_page(comparison: Comparison) -> Document:
    """Final figures, settings and environment that differ, and answers to the same prompts."""
    names, environment = comparison.names, [*map(in_words, comparison.environment)]
    figures = _table("", names, comparison.figures)
    settings = _table("Settings that differ", names, comparison.settings)
    others = _table("Model and environment that differ", names, environment)
    nothing = OnPage(EMPTY.format("Nothing has been measured yet."))
    same = OnPage(EMPTY.format("All settings are the same."))
    parts: list[Part] = [
        *([figures, InTerminal(Text())] if figures.rows else [nothing]),
        OnPage(Notes(comparison.notes)),
        Pictures(panels(comparison)),
        settings if settings.rows else same,
        *([others] if others.rows else []),
        OnPage(samples_table(names, comparison.samples, "the runs' samples.jsonl")),
        *(InTerminal(Group(Text(note, style="yellow"), Text())) for note in comparison.notes),
    ]
    return Document(
        " · ".join(names),
        parts,
        comparison.as_dict(),
        "comparison",
        text(f"{len(names)} runs: {', '.join(str(run.path) for run in comparison.runs)}"),
        text("Made by meshtune from the files of these runs' folders. " + conventions(comparison.facts)),
    )


def panels(comparison: Comparison) -> list[Lines]:
    """Every panel that any run has values for, with a curve for each run that has."""
    rows = [run.rows() for run in comparison.runs]
    units = dict.fromkeys(OBJECTIVES[objective_of(of_run)].unit for of_run in rows)
    words, drawn = {UNIT: " or ".join(units)}, []
    for quantity in DRAWN:
        curves, averaged = [], False
        for name, colour, of_run in zip(comparison.names, OTHERS, rows, strict=False):
            parts = quantity.curves(of_run)
            averaged |= len(parts) > 1
            curves += [replace(part, name=name, colour=colour) for part in parts[-1:]]
        drawn.append(quantity.panel(curves, words, ", running mean" * averaged, 0))
    end = max((x for panel in drawn for curve in panel.series for x in curve.x), default=1)
    return [replace(panel, x_end=end) for panel in drawn if panel.series]


def _table(title: str, names: Sequence[str], lines: Sequence[Line]) -> Table:
    """A line a quantity or setting, a column a run."""
    columns = [Column("", [line.name for line in lines], heading=True, style="dim")]
    for place, name in enumerate(names):
        cells = [
            Text(printable(line.cells[place]), style=BEST if line.best and line.best[place] else "")
            for line in lines
        ]
        columns.append(Column(printable(name), cells, wraps=True))
    return Table(title, tuple(columns), kind="compared")
