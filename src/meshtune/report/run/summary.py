"""A run's headline numbers as one value, computed only from the rows of its folder.

The terminal's summary, the page and `--json` all show this value, so they can't disagree.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import dropwhile, pairwise
from statistics import median
from typing import Any

from meshtune import units
from meshtune.addresses import public
from meshtune.meter.causes import Cause
from meshtune.rundir import Row, RunDir

UNKNOWN = "running, or stopped without an end (its folder has no file locks that tell)"

LAST = {  # figures of the last evaluation, and their columns
    **{name: name for name in ("prompts", "answers_cut", "prompts_without_room")},
    "last_accuracy": "rewards/accuracies",
    "last_margin": "rewards/margins",
}


class Rows(tuple[Row, ...]):
    """Rows of metrics.jsonl, sorted by kind once: a run may have a hundred thousand of them."""

    left_out: Sequence[str]  # as RowList has them

    def __new__(cls, rows: Iterable[Row] = ()) -> "Rows":
        if isinstance(rows, cls):
            return rows
        sorted_once = super().__new__(cls, rows)
        sorted_once.left_out = getattr(rows, "left_out", ())
        return sorted_once

    @cached_property
    def kinds(self) -> dict[str, list[Row]]:
        kinds: dict[str, list[Row]] = {}
        for row in self:
            kinds.setdefault(row.get("kind", ""), []).append(row)
        return kinds

    @cached_property
    def last_start(self) -> "Rows":
        """From the last "run" row on; all where there is none."""
        starts = self.kinds.get("run", [])
        place = next((place for place, row in enumerate(self) if row is starts[-1]), 0) if starts else 0
        return Rows(self[place:]) if place else self


@dataclass(frozen=True)
class Stretch:
    """Steps of a run under one layout, until the next stretch."""

    layout: str
    from_step: int


@dataclass(frozen=True)
class Summary:
    """Headline numbers; None where the rows have none (a run just begun, no evaluation, MFU on a CPU).

    Losses are means per label token, or of preferences per pair or answer. first_eval_*,
    first_exact_match: of the first evaluation, last_* of the last one; with one exact match only the last is
    set.
    """

    name: str
    status: str  # running | finished | that of the last "end" row | stopped without an end (killed) | UNKNOWN
    steps: int = 0  # optimizer steps done
    skipped: int = 0  # of these, not applied because loss or gradients were not finite
    speed_unit: str = "tokens/s"  # or tokens/s/GPU, or on a processor tokens/s/rank
    first_loss: float | None = None
    last_loss: float | None = None
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_eval_step: int | None = None
    first_exact_match: float | None = None  # share of the prompts, 0 to 1
    last_exact_match: float | None = None
    last_accuracy: float | None = None  # share of held-out pairs whose chosen answer has the higher reward
    last_margin: float | None = None  # mean reward of held-out chosen answers, less that of the others
    prompts: int | None = None  # number of prompts that exact match was measured on
    answers_cut: int | None = None  # of these, without an end token
    prompts_without_room: int | None = None  # of these, not answered: they fill the model's context
    tokens_per_second_per_gpu: float | None = None  # median over the last layout's steps that aren't warm-up
    mfu: float | None = None  # median over the same steps, 0 to 1
    tokens: int | None = None  # trained on, without padding
    seconds: float | None = None  # of training steps
    peak_memory_bytes: int | None = None  # of tensors, highest in any row
    peak_resident_bytes: int | None = None  # of a process, highest in any row
    model_folder: str | None = None  # None until it exists
    report: str | None = None  # None until it exists
    causes: tuple[Cause, ...] = ()  # that make the run slow, the costliest first; empty where it is healthy
    left_out: str = ""  # a sentence on lines of its files that aren't rows; "" where all are
    job: dict[str, Any] | None = None  # of `meshtune submit`: expected and measured; None: not submitted
    layouts: tuple[Stretch, ...] = ()  # more than one where a run resumed under another

    @property
    def layouts_in_words(self) -> str:
        """Steps of each layout; "" where all steps have the same."""
        lasts = [*(stretch.from_step - 1 for stretch in self.layouts[1:]), self.steps]
        parts = [
            f"{one.from_step:,}–{end:,} under {one.layout}"
            for one, end in zip(self.layouts, lasts, strict=False)
            if end >= one.from_step
        ]
        return f"steps {', '.join(parts)}" if len(parts) > 1 else ""

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Sample:
    """One held-out prompt with the expected answer and the model's, before training and the last one."""

    prompt: str  # as the model reads it
    question: str  # the prompt without control tokens
    expected: str | None
    before: str | None  # None where the prompt was not answered before the first step
    after: str
    step: int  # of `after`


def summarise(run: RunDir, rows: Sequence[Row] | None = None, *, samples: bool = True) -> Summary:
    """Headline numbers of a run, which may still be running or have no rows yet.

    rows: of metrics.jsonl, where they have been read already. samples: read samples.jsonl, too, for
    `left_out`.
    """
    rows = Rows(run.rows() if rows is None else rows)
    end = last(of_kind(rows.last_start, "end")) or {}  # a "run" row after it: the run was resumed
    unended = {True: "running", False: "stopped without an end", None: UNKNOWN}[run.is_training]
    known = Summary(
        name=run.path.resolve().name,
        status=end.get("status", "finished") if end else unended,
        speed_unit=speed_unit(rows),
        model_folder=str(run.model) if run.model.exists() else None,
        report=str(run.report_file) if run.report_file.exists() else None,
        causes=causes_of(rows),
        left_out=run.left_out(rows.left_out, run.samples().left_out if samples else ()),
        layouts=layouts_of(of_kind(rows, "run")),
        job=job_of(rows),
    )
    known = grown(known, rows)
    train = of_kind(rows, "train")
    steps = end.get("step", known.steps)
    every_step = known.tokens is not None and known.steps == steps
    begins = max((one.from_step for one in known.layouts if one.from_step <= known.steps), default=1)
    timed = [row for row in train if row["step"] >= begins]
    warm = [row for row in timed[1:] if not row.get("warm_up")] or timed[1:] or timed
    return replace(
        known,
        steps=steps,
        tokens=known.tokens if every_step else end.get("tokens"),
        seconds=known.seconds if every_step else end.get("seconds"),
        tokens_per_second_per_gpu=median_of(values(warm, "tokens_per_second_per_gpu")),
        mfu=median_of(values(warm, "mfu")),
    )


def grown(summary: Summary, rows: Sequence[Row]) -> Summary:
    """The summary with the steps and evaluations of later rows, each given once, in order.

    Medians, causes and the end stay as they are: for these `summarise` reads all rows. Sums are None where a
    step has no row of its own: with log.every > 1 only the end row has those over all steps.
    """
    train, evals = of_kind(rows, "train"), of_kind(rows, "eval")
    losses, eval_losses = values(train, "loss"), values(evals, "loss")
    exact = [one for one in (summary.first_exact_match, summary.last_exact_match) if one is not None]
    exact += values(evals, "exact_match")
    best = [(summary.best_eval_loss, summary.best_eval_step)] if summary.best_eval_loss is not None else []
    best += [(row["loss"], row["step"]) for row in evals if row.get("loss") is not None]
    best_loss, best_step = min(best, key=lambda one: one[0], default=(None, None))
    steps = [row["step"] for row in train]
    every_step = steps == [*range(summary.steps + 1, summary.steps + len(steps) + 1)]

    def total(known: float | None, column: str) -> Any:
        known = known if summary.steps else 0
        return known + sum(values(train, column)) if every_step and known is not None else None

    def highest(known: int | None, column: str) -> int | None:
        return max([*values(train, column), *([known] if known is not None else [])], default=None)

    return replace(
        summary,
        steps=steps[-1] if steps else summary.steps,
        skipped=summary.skipped + sum(bool(row.get("skipped")) for row in train),
        first_loss=first(losses) if summary.first_loss is None else summary.first_loss,
        last_loss=last(losses) if losses else summary.last_loss,
        first_eval_loss=first(eval_losses) if summary.first_eval_loss is None else summary.first_eval_loss,
        last_eval_loss=last(eval_losses) if eval_losses else summary.last_eval_loss,
        best_eval_loss=best_loss,
        best_eval_step=best_step,
        first_exact_match=first(exact) if len(exact) > 1 else None,
        last_exact_match=last(exact),
        **{name: last(values(evals, column) or [getattr(summary, name)]) for name, column in LAST.items()},
        tokens=total(summary.tokens, "tokens") if steps else summary.tokens,
        seconds=total(summary.seconds, "step_seconds") if steps else summary.seconds,
        peak_memory_bytes=highest(summary.peak_memory_bytes, "peak_memory_bytes"),
        peak_resident_bytes=highest(summary.peak_resident_bytes, "peak_resident_bytes"),
    )


def layouts_of(starts: Sequence[Row]) -> tuple[Stretch, ...]:
    """The layouts of a run's steps. starts: its "run" rows; a resumed one replaces later steps."""
    stretches: list[Stretch] = []
    for row in starts:
        first_step = (row.get("resumed_from") or 0) + 1
        stretches = [one for one in stretches if one.from_step < first_step]
        if row.get("layout") and [one.layout for one in stretches[-1:]] != [row["layout"]]:
            stretches.append(Stretch(row["layout"], first_step))
    return tuple(stretches)


def job_of(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Time and price that a submitted run was expected to take, and that its starts took; None for
    others. A start counts from where its job or process begins; of one that was killed, what comes before the
    first step and the seconds of its steps.
    """
    starts = [place for place, row in enumerate(rows) if row.get("kind") == "run"]
    starts = [*dropwhile(lambda place: not rows[place].get("expected"), starts)]
    if not starts:
        return None
    seconds, expected = 0.0, rows[starts[0]]["expected"]
    for first, last in pairwise([*starts, len(rows)]):
        ended = values(of_kind(rows[first:last], "end"), "ended")
        started = rows[first].get("started") or ""
        begun = rows[first].get("begun") or started
        until = ended[-1] if ended else started
        seconds += _between(begun, until) if begun and until else 0.0
        if not (ended and begun):
            seconds += sum(values(of_kind(rows[first:last], "train"), "step_seconds"))
    hourly = None if expected["price"] is None else expected["price"] * expected["gpus"] / 3600
    times = {"expected_seconds": expected["seconds"], "most_seconds": expected["most"], "seconds": seconds}
    costs = {name.replace("seconds", "cost"): hourly and hourly * time for name, time in times.items()}
    return {**times, **costs, "currency": expected.get("currency", "")}


def _between(earlier: str, later: str) -> float:
    """Seconds from a time to another, both in ISO 8601."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def causes_of(rows: Sequence[Row]) -> tuple[Cause, ...]:
    """The causes that the last start of a run has named."""
    return tuple(Cause.of_row(row) for row in of_kind(of_last_start(rows), "cause"))


def samples_of(run: RunDir) -> list[Sample]:
    """Each sampled prompt once, in the order of first answers, with the answer of step 0 and the last one."""
    rows_of_prompt: dict[str, list[Row]] = {}
    for row in run.samples():
        rows_of_prompt.setdefault(row["prompt"], []).append(row)
    return [
        Sample(
            prompt=prompt,
            question=str(rows[-1].get("question") or prompt),
            expected=as_text(rows[-1].get("expected")),
            before=rows[0]["answer"] if len(rows) > 1 and rows[0].get("step") == 0 else None,
            after=rows[-1]["answer"],
            step=rows[-1].get("step") or 0,
        )
        for prompt, rows in rows_of_prompt.items()
    ]


def as_text(expected: str | float | None) -> str | None:
    """An expected answer as text: data sets have numbers, too."""
    return expected if expected is None or isinstance(expected, str) else json.dumps(expected)


def facts_of(run: RunDir, rows: Sequence[Row] | None = None) -> Row:
    """The last "run" row, written when training started: model, method, layout, device, versions; or {}.

    rows: as `summarise` takes them.
    """
    starts = run.rows("run") if rows is None else of_kind(rows, "run")
    return {key: public(value) for key, value in (starts or [{}])[-1].items() if key not in ("kind", "step")}


def speed_unit(rows: Sequence[Row]) -> str:
    """Unit of `tokens_per_second_per_gpu` in words, by the last start of the run."""
    facts = ([{}, *of_kind(rows, "run")])[-1]
    return units.speed_unit(facts.get("world", 1), facts.get("device_type", "cuda"))


def objective_of(rows: Sequence[Row]) -> str:
    """The objective that the last start of a run trained."""
    return ([{}, *of_kind(rows, "run")])[-1].get("objective", "sft")


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows of one kind, in their order. kind: "run", "train", "eval" or "end"."""
    if isinstance(rows, Rows):
        return rows.kinds.get(kind, [])
    return [row for row in rows if row.get("kind") == kind]


def of_last_start(rows: Sequence[Row]) -> Rows:
    """The rows from the last "run" row on; all where there is none."""
    return Rows(rows).last_start


def values(rows: Sequence[Row], name: str) -> list[Any]:
    """Values of column `name`, in the order of rows; rows where it is missing or None are left out."""
    return [value for row in rows if (value := row.get(name)) is not None]


def first(column: Sequence[Any]) -> Any:
    return column[0] if column else None


def last(column: Sequence[Any]) -> Any:
    return column[-1] if column else None


def median_of(column: Sequence[float]) -> float | None:
    """The median, or None of an empty column."""
    return median(column) if column else None
