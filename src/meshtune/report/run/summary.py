"""A run's headline numbers as one value, computed from the rows of its folder alone.

The terminal's summary, the page and `--json` all show this value, so they can't disagree.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from meshtune import units
from meshtune.errors import UserError
from meshtune.meter.causes import Cause
from meshtune.rundir import Row, RunDir


@dataclass(frozen=True)
class Summary:
    """Headline numbers; None where the rows have none (a run just begun, no evaluation, MFU on a CPU).

    Losses are means per label token. first_eval_*, first_exact_match: of the first evaluation, last_* of the
    last one; with one exact match only the last is set.
    """

    name: str
    status: str  # running | finished | what the last "end" row says | stopped without an end (killed)
    steps: int  # optimizer steps done
    skipped: int  # of these, not applied because loss or gradients were not finite
    speed_unit: str  # tokens/s, tokens/s/GPU, or on a processor tokens/s/rank
    first_loss: float | None
    last_loss: float | None
    first_eval_loss: float | None
    last_eval_loss: float | None
    best_eval_loss: float | None
    best_eval_step: int | None
    first_exact_match: float | None  # share of the prompts, 0 to 1
    last_exact_match: float | None
    prompts: int | None  # number of prompts that exact match was measured on
    tokens_per_second_per_gpu: float | None  # median over steps that are no warm-up
    mfu: float | None  # median over the same steps, 0 to 1
    tokens: int | None  # trained on, without padding
    seconds: float | None  # of training steps
    peak_memory_bytes: int | None  # of tensors, highest in any row
    peak_resident_bytes: int | None  # of a process, highest in any row
    model_folder: str | None  # None until it exists
    report: str | None  # None until it exists
    causes: tuple[Cause, ...]  # that make the run slow, the costliest first; empty where it is healthy

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

    def matches(self, answer: str) -> bool:
        """True if `answer` is the expected one, white space around it aside; False if none is expected."""
        return self.expected is not None and answer.strip() == self.expected.strip()


def summarise(run: RunDir, rows: Sequence[Row] | None = None) -> Summary:
    """Headline numbers of a run, which may still be running or have no rows yet.

    rows: of metrics.jsonl, where they have been read already.
    """
    rows = run.rows() if rows is None else rows
    train, evals = of_kind(rows, "train"), of_kind(rows, "eval")
    last_row = ([row for row in rows if row.get("kind") in ("run", "end")] or [{}])[-1]
    end: Row = last_row if last_row.get("kind") == "end" else {}  # a "run" row after it: the run was resumed
    unended = "running" if run.is_training else "stopped without an end"
    losses = values(train, "loss")
    eval_losses = [row for row in evals if row.get("loss") is not None]
    best: Row = min(eval_losses, key=lambda row: row["loss"], default={})
    exact = values(evals, "exact_match")
    steps = end.get("step", train[-1]["step"] if train else 0)
    every_step = len(train) == steps  # with log.every > 1 the end row alone has the sums over all steps
    warm = [row for row in train[1:] if not row.get("warm_up")] or train[1:] or train
    return Summary(
        name=run.path.resolve().name,
        status=end.get("status", "finished") if end else unended,
        steps=steps,
        skipped=sum(bool(row.get("skipped")) for row in train),
        speed_unit=speed_unit(rows),
        first_loss=first(losses),
        last_loss=last(losses),
        first_eval_loss=first(values(evals, "loss")),
        last_eval_loss=last(values(evals, "loss")),
        best_eval_loss=best.get("loss"),
        best_eval_step=best.get("step"),
        first_exact_match=first(exact) if len(exact) > 1 else None,
        last_exact_match=last(exact),
        prompts=last(values(evals, "prompts")),
        tokens_per_second_per_gpu=median_of(values(warm, "tokens_per_second_per_gpu")),
        mfu=median_of(values(warm, "mfu")),
        tokens=sum(values(train, "tokens")) if every_step and train else end.get("tokens"),
        seconds=sum(values(train, "step_seconds")) if every_step and train else end.get("seconds"),
        peak_memory_bytes=max(values(train, "peak_memory_bytes"), default=None),
        peak_resident_bytes=max(values(train, "peak_resident_bytes"), default=None),
        model_folder=str(run.model) if run.model.exists() else None,
        report=str(run.report_file) if run.report_file.exists() else None,
        causes=causes_of(rows),
    )


def causes_of(rows: Sequence[Row]) -> tuple[Cause, ...]:
    """The causes that the last start of a run has named."""
    starts = [number for number, row in enumerate(rows) if row.get("kind") == "run"]
    return tuple(Cause.of_row(row) for row in of_kind(rows[starts[-1] if starts else 0 :], "cause"))


def samples_of(run: RunDir) -> list[Sample]:
    """Each sampled prompt once, in the order of first answers, with the answer of step 0 and the last one.

    Raises UserError for a row without the two texts.
    """
    rows_of_prompt: dict[str, list[Row]] = {}
    for number, row in enumerate(run.samples(), 1):
        if not isinstance(row.get("prompt"), str) or not isinstance(row.get("answer"), str):
            raise UserError(f"{run.samples_file}, row {number} lacks a prompt or an answer; remove it.")
        rows_of_prompt.setdefault(row["prompt"], []).append(row)
    return [
        Sample(
            prompt=prompt,
            question=str(rows[-1].get("question") or prompt),
            expected=rows[-1].get("expected"),
            before=rows[0]["answer"] if len(rows) > 1 and rows[0].get("step") == 0 else None,
            after=rows[-1]["answer"],
        )
        for prompt, rows in rows_of_prompt.items()
    ]


def facts_of(run: RunDir, rows: Sequence[Row] | None = None) -> Row:
    """The last "run" row, written when training started: model, method, layout, device, versions; or {}.

    rows: as `summarise` takes them.
    """
    starts = run.rows("run") if rows is None else of_kind(rows, "run")
    return {key: value for key, value in (starts or [{}])[-1].items() if key not in ("kind", "step")}


def speed_unit(rows: Sequence[Row]) -> str:
    """Unit of `tokens_per_second_per_gpu` in words, by the last start of the run."""
    facts = ([{}, *of_kind(rows, "run")])[-1]
    return units.speed_unit(facts.get("world", 1), facts.get("device_type", "cuda"))


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows of one kind, in their order. kind: "run", "train", "eval" or "end"."""
    return [row for row in rows if row.get("kind") == kind]


def values(rows: Sequence[Row], name: str) -> list[Any]:
    """Values of column `name`, in the order of rows; rows where it is missing or None are left out."""
    return [row[name] for row in rows if row.get(name) is not None]


def first(column: Sequence[Any]) -> Any:
    return column[0] if column else None


def last(column: Sequence[Any]) -> Any:
    return column[-1] if column else None


def median_of(column: Sequence[float]) -> float | None:
    """The median, or None of an empty column."""
    return median(column) if column else None
