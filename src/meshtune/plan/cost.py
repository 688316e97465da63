"""Length, hours and price of a whole run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from meshtune.config import Config
from meshtune.data.cache import Summary, read_summary
from meshtune.errors import UserError
from meshtune.length import ending, limits, step_tokens
from meshtune.objectives import OBJECTIVES
from meshtune.units import count, counted, duration, money, significant

if TYPE_CHECKING:
    from meshtune.plan.cluster import Cluster
    from meshtune.plan.search import Choice


SHORT = 0.8  # documents below this share of seq_len make a plan clearly too slow


@dataclass(frozen=True)
class RunLength:
    """Length of the run that is planned, as `meshtune train` will count it."""

    steps: int | None  # optimizer steps; None: unknown
    tokens: int | None  # of their global batches
    notes: tuple[str, ...] = ()  # sentences: which limit ends the run, and what could not be counted
    missing: str = ""  # sentence on why an epoch's sequences are unknown; "": they are known
    reference: float = 0.0  # global batches that a reference model reads before the first step; 0: none


UNPLANNED = RunLength(None, None)


def run_length(config: Config) -> RunLength:
    """The length that the settings give; epochs are counted by `meshtune data`.

    A note says what is missing where train.num_epochs could end the run, or the length of a run with a price
    is unknown. Raises UserError as `length.limits`.
    """
    summary, missing = epoch_of(config)
    sequences = summary and summary.sequences
    ends = limits(config, sequences)
    if not ends:
        wanted = config.train.num_epochs or config.cluster_config.price_per_gpu_hour
        return RunLength(None, None, (unknown(missing),) if wanted else (), missing)
    steps, notes = ends[0].steps, [*filter(None, [ending(ends)])]
    if config.train.num_epochs and sequences is None:
        notes.append(f"train.num_epochs={config.train.num_epochs:g} may end the run sooner: {missing}")
    if summary and not config.data.mean_document_tokens and config.data.packing:
        planned = config.data.seq_len // OBJECTIVES[config.objective].documents
        notes += _shorter_documents(summary.mean_document_tokens, planned)
    reference = 0.0
    if OBJECTIVES[config.objective].reference:
        reference, said = _reference(config, steps, sequences)
        notes += said
    return RunLength(steps, steps * step_tokens(config), tuple(notes), missing, reference)


def _reference(config: Config, steps: int, sequences: int | None) -> tuple[float, list[str]]:
    """(Global batches that a reference model reads before the first step, sentences on what is not counted).

    sequences: of one epoch; None: not known.
    """
    if sequences is None:
        return float(steps), [
            "The reference pass is counted over the sequences of all steps, as if each row came once; "
            "`meshtune data` counts the rows that it reads."
        ]
    held_out = config.data.eval_split if config.data.eval_split < 1 else 0.0  # else a number of documents
    notes = ["The rows of data.eval, which the reference reads too, are not counted."]
    return sequences / (1 - held_out) / config.global_batch_size, notes * bool(config.data.eval)


def unknown(missing: str) -> str:
    """Sentence on a run of unknown length, with the setting that gives one. missing: as in RunLength."""
    return f"The length of the run is unknown: set train.max_steps=N. An epoch can't be counted: {missing}"


def _shorter_documents(counted: float, planned: int) -> Iterator[str]:
    """Yield a sentence if the rows' documents are clearly shorter than the sequences that are planned."""
    if counted < SHORT * planned:
        yield (
            f"Documents of the rows have {counted:,.0f} tokens (mean over tokens), those of the plan "
            f"{planned:,}: set data.mean_document_tokens={counted:.0f}, with which attention takes less time."
        )


def epoch_of(config: Config) -> tuple[Summary | None, str]:
    """(Size of an epoch, "") or (None, a sentence on why it is unknown)."""
    if config.data.streaming:
        return None, "with data.streaming an epoch has no known length."
    if not config.data.train:
        return None, "data.train names no rows for `meshtune data` to count."
    if (summary := read_summary(config)) is None:
        return None, (
            "`meshtune data` has not counted these rows; run it with the same settings, where the model's "
            "tokenizer is."
        )
    if changed := summary.changed():
        return None, f"{changed[0]} has changed since `meshtune data` counted the rows; run it again."
    return summary, ""


@dataclass(frozen=True)
class RunCost:
    """Time and price of a run under one layout; None: the run's length, price or step time is unknown."""

    steps: int | None
    tokens: int | None
    seconds: float | None
    gpu_hours: float | None
    cost: float | None  # in `currency`
    cost_per_million_tokens: float | None
    currency: str  # as the user named it; "": not named
    error: float | None = None  # error bar of time and price, as a share
    reference_seconds: float | None = None  # of `seconds`, before the first step; None: no reference

    @classmethod
    def of(cls, choice: Choice, length: RunLength) -> RunCost:
        """The run of this length under the choice's layout, at its cluster's price."""
        cluster = choice.cluster
        if not cluster.timed:
            return cls(length.steps, length.tokens, None, None, None, None, cluster.currency)
        seconds = None if length.steps is None else length.steps * choice.seconds.total
        reference = length.reference * choice.reference or None
        if seconds and reference:
            seconds += reference
        gpu_hours = None if seconds is None else seconds * choice.layout.world / 3600
        price, million = cluster.price, 1e6 / choice.tokens_per_second_per_gpu / 3600  # GPU-hours
        if gpu_hours and length.tokens:
            million = gpu_hours / length.tokens * 1e6  # with the reference's pass
        return cls(
            steps=length.steps,
            tokens=length.tokens,
            seconds=seconds,
            gpu_hours=gpu_hours,
            cost=None if price is None or gpu_hours is None else gpu_hours * price,
            cost_per_million_tokens=None if price is None else million * price,
            currency=cluster.currency,
            error=choice.accuracy.time,
            reference_seconds=reference,
        )

    def sentence(self) -> str:
        """The run's duration, GPU-hours and price, as far as they are known, and its part before the first
        step; "" if none is.
        """
        rate = self.cost_per_million_tokens
        per_million = "" if rate is None else f"{money(rate, self.currency)} per million tokens"
        if self.steps is None or self.tokens is None or self.seconds is None or self.gpu_hours is None:
            return f"Training costs {per_million}." if per_million else ""
        takes = "takes" if self.steps == 1 else "take"
        error = "" if self.error is None else f" ±{self.error:.0%}"
        hours = f"{self.gpu_hours:,.1f}" if self.gpu_hours >= 0.1 else significant(self.gpu_hours, 1)
        sentence = (
            f"{counted(self.steps, 'step')} ({count(self.tokens)} tokens) {takes} "
            f"{duration(self.seconds)}{error}: {hours} GPU-hours"
        )
        if self.cost is not None:
            sentence += f", which cost {money(self.cost, self.currency)} ({per_million})"
        if not self.reference_seconds:
            return f"{sentence}."
        before, share = duration(self.reference_seconds), self.reference_seconds / self.seconds
        return f"{sentence}. The reference's pass over all rows is {before} of it ({share:.1%})."


# bounds #


@dataclass(frozen=True)
class Bounds:
    """The most that the run may take; None: no bound."""

    by: float | None = None  # seconds
    budget: float | None = None  # in the currency of the prices

    def run_seconds(self, cluster: Cluster, length: RunLength) -> float:
        """The longest run of a known length within the bounds on this cluster."""
        longest = math.inf
        if length.steps and self.by is not None:
            longest = self.by
        if length.steps and self.budget is not None and cluster.price:
            longest = min(longest, self.budget / cluster.price / cluster.gpus * 3600)
        return longest

    def shares(self, run: RunCost) -> dict[str, float]:
        """By field, what the run takes as a share of the bound; more than 1 exceeds it."""
        pairs = {"by": (run.seconds, self.by), "budget": (run.cost, self.budget)}
        return {
            name: used / most for name, (used, most) in pairs.items() if used is not None and most is not None
        }

    def clause(self, currency: str, *, several: bool = False) -> str:
        """A clause with the bounds: "ends the run within 2 h and costs at most 9.00 EUR".

        several: its subject is plural.
        """
        clauses, s = [], "" if several else "s"
        if self.by is not None:
            clauses.append(f"end{s} the run within {duration(self.by)}")
        if self.budget is not None:
            clauses.append(f"cost{s} at most {money(self.budget, currency)}")
        return " and ".join(clauses)


NO_BOUNDS = Bounds()


def bounds_of(by: str | timedelta | None, budget: float | None) -> Bounds:
    """Bounds from a time and an amount. Raises UserError, with all problems, for those not above 0."""
    problems, seconds = [], None
    try:
        if by is not None:
            seconds = by.total_seconds() if isinstance(by, timedelta) else seconds_of(by)
            if seconds <= 0:
                problems.append(f"--by {by}: write a time above 0.")
    except UserError as error:
        problems += error.problems
    if budget is not None and not 0 < budget < math.inf:
        problems.append(f"--budget {budget:g}: write an amount above 0.")
    if problems:
        raise UserError(problems)
    return Bounds(seconds, budget)


DURATION = re.compile(r"(?:\s*\d+(?:\.\d+)?\s*(?:d|h|min))+\s*")


def seconds_of(text: str, option: str = "--by ") -> float:
    """Seconds of a time such as "48h", "2d12h" or "90min". Raises UserError for any other text and for 0.

    option: that has the text, for the error.
    """
    units = {"d": 86400, "h": 3600, "min": 60}
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(d|h|min)", text) if DURATION.fullmatch(text) else []
    if not (seconds := sum(float(number) * units[unit] for number, unit in parts)):
        raise UserError(f"{option}{text}: write a time above 0 in d, h and min, such as 48h, 2d12h or 90min.")
    return seconds
