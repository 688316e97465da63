"""A run's headline numbers as one value, worked out from the rows of its folder and from nothing else.

The terminal's summary, the page, its picture and `--json` all show this value, so they can't disagree.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from meshtune.rundir import Row, RunDir


@dataclass(frozen=True)
class Summary:
    """None stands for what the rows don't say (a run just begun, no evaluation, a CPU's MFU)."""

    name: str
    status: str  # running | finished | what the run's last word was
    steps: int  # updates done
    skipped: int  # of these, not applied because loss or gradients were not finite
    speed_unit: str
    first_loss: float | None
    last_loss: float | None
    first_eval_loss: float | None
    last_eval_loss: float | None
    best_eval_loss: float | None
    best_eval_step: int | None
    first_exact_match: float | None  # 0 to 1
    last_exact_match: float | None
    prompts: int | None  # that exact match was measured on
    tokens_per_second_per_gpu: float | None  # median
    mfu: float | None  # median, 0 to 1
    tokens: int | None
    seconds: float | None  # of training steps
    peak_memory_bytes: int | None
    model_folder: str | None  # when it is there
    report: str | None  # likewise

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Sample:
    """One held-out prompt, what was expected, and what the model said first and last."""

    prompt: str
    expected: str | None
    before: str | None  # None when the model was asked only once
    after: str


def summarise(run: RunDir) -> Summary:
    """The headline numbers of a run; works on a run that is going on, and on an empty folder."""
    rows = run.rows()
    train, evals = of_kind(rows, "train"), of_kind(rows, "eval")
    last_word = ([row for row in rows if row.get("kind") in ("run", "end")] or [{}])[-1]
    end: Row = (
        last_word if last_word.get("kind") == "end" else {}
    )  # a "run" row after it: the run was resumed
    losses = values(train, "loss")
    eval_losses = [row for row in evals if row.get("loss") is not None]
    best: Row = min(eval_losses, key=lambda row: row["loss"], default={})
    exact = values(evals, "exact_match")
    steps = train[-1]["step"] if train else 0
    whole = len(train) == steps  # with log.every > 1 sums over the rows would be too small
    warm = train[1:] or train  # the first step compiles, allocates and fills caches
    return Summary(
        name=run.path.resolve().name,
        status=end.get("status", "finished" if end else "running"),
        steps=steps,
        skipped=sum(bool(row.get("skipped")) for row in train),
        speed_unit=unit_of_speed(rows),
        first_loss=at(losses, 0),
        last_loss=at(losses, -1),
        first_eval_loss=at(values(evals, "loss"), 0),
        last_eval_loss=at(values(evals, "loss"), -1),
        best_eval_loss=best.get("loss"),
        best_eval_step=best.get("step"),
        first_exact_match=at(exact, 0) if len(exact) > 1 else None,
        last_exact_match=at(exact, -1),
        prompts=at(values(evals, "prompts"), -1),
        tokens_per_second_per_gpu=middle(values(warm, "tokens_per_second_per_gpu")),
        mfu=middle(values(warm, "mfu")),
        tokens=sum(values(train, "tokens")) if whole and train else end.get("tokens"),
        seconds=sum(values(train, "step_seconds")) if whole and train else end.get("seconds"),
        peak_memory_bytes=max(values(train, "peak_memory_bytes"), default=None),
        model_folder=str(run.model) if run.model.exists() else None,
        report=str(run.report_file) if run.report_file.exists() else None,
    )


def samples_of(run: RunDir) -> list[Sample]:
    """Each sampled prompt once, in the order first asked, with its first and its last answer."""
    answers: dict[str, list[Row]] = {}
    for row in run.samples():
        answers.setdefault(row["prompt"], []).append(row)
    return [
        Sample(
            prompt=prompt,
            expected=asked[-1].get("expected"),
            before=asked[0]["answer"] if len(asked) > 1 else None,
            after=asked[-1]["answer"],
        )
        for prompt, asked in answers.items()
    ]


def facts_of(run: RunDir) -> Row:
    """What the run said of itself when it (last) started: model, method, layout, device, versions …; maybe
    {}.
    """
    return {key: value for key, value in (run.rows("run") or [{}])[-1].items() if key not in ("kind", "step")}


def unit_of_speed(rows: Sequence[Row]) -> str:
    """How `tokens_per_second_per_gpu` is called: per GPU once there are several."""
    world = max((row.get("world", 1) for row in of_kind(rows, "run")), default=1)
    return "tokens/s" if world == 1 else "tokens/s/GPU"


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows of one kind."""
    return [row for row in rows if row.get("kind") == kind]


def values(rows: Sequence[Row], name: str) -> list[Any]:
    """One column, without what is null or missing."""
    return [row[name] for row in rows if row.get(name) is not None]


def at(column: Sequence[Any], index: int) -> Any:
    """The first (0) or last (-1) of a column; None when it is empty."""
    return column[index] if column else None


def middle(column: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return median(column) if column else None
