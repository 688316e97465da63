"""The rows of a run on the terminal: a bar with its numbers, or plain lines in a log file."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshtune.layout import Layout, in_words
from meshtune.meter.rows import memory_table, unfinished_answers
from meshtune.optimizers import checkpoint_bytes
from meshtune.plan.phrases import predicted_with
from meshtune.rundir import Row
from meshtune.streams import lost
from meshtune.units import at_words, count, counted, due_from, duration, human

BAR_WIDTH = 20  # columns of the terminal
MEMORY_ROWS = 2  # watched steps (meter/phases.py) in one table: the first ones, as a terminal has columns
# Seconds from an evaluation's beginning to the first line on it, and the most between two; they double.
EVALUATION_LINE, EVALUATION_LINES = 5.0, 40.0
RECENT = 0.02  # least weight of a new value in a `Pace`


@dataclass(frozen=True)
class Course:
    """Steps of a run, and after which of them it evaluates and saves."""

    steps: int  # of the whole run
    start: int = 0  # step resumed from, 0 for a new run
    evaluate_every: int = 0  # in steps; 0: after the last one only
    save_every: int = 0  # in steps; 0: after the last one only
    held_out_tokens: int = 0  # that one evaluation reads; 0: there is none
    answers: bool = False  # True: evaluations also generate answers, of a length that is not known
    keep_best: bool = False  # True: each evaluation may save, if its loss is the lowest

    def evaluations_from(self, step: int) -> int:
        """Evaluations after `step` and all later steps."""
        return due_from(step, self.steps, self.evaluate_every) if self.held_out_tokens else 0

    def saves_from(self, step: int) -> int:
        """Checkpoints after `step` and all later steps, as if each evaluation were the best so far."""
        evaluated = self.evaluate_every * (self.keep_best and self.held_out_tokens > 0)
        return due_from(step, self.steps, self.save_every, evaluated)


class Pace:
    """Mean seconds of something that happens again and again; the newest values count most.

    The n-th of N values has a weight in proportion to n, so that slow first ones are soon forgotten; from
    100 values on the weights fall off by RECENT a value.
    """

    def __init__(self) -> None:
        self.values, self.mean = 0, 0.0

    def add(self, seconds: float) -> None:
        self.values += 1
        self.mean += (seconds - self.mean) * max(RECENT, 2 / (self.values + 1))


class TimeLeft:
    """Predicts the seconds that a run still takes: its steps, evaluations and checkpoints.

    `train`, `evaluated` and `saved` are called as these happen. An evaluation that has not happened yet is
    taken to need a third of the time of training on these tokens, the forward's share; with answers it is not
    counted (`uncounted`); a checkpoint takes none. The
    first evaluation, which includes a warm-up, counts only until the second. One before the first step whose
    answers were cut does not count: a model that was not trained yet may never end them.
    """

    def __init__(self, course: Course) -> None:
        self.course = course
        self._step, self._evaluation, self._save = Pace(), Pace(), Pace()
        self._evaluations = 0
        self._last: tuple[int, float] | None = None  # step and time of the last row
        self._beside = 0.0  # seconds of evaluations and checkpoints since then

    def evaluated(self, seconds: float) -> None:
        self._evaluations += 1
        if self._evaluations == 2:
            self._evaluation = Pace()
        self._evaluation.add(seconds)
        self._beside += seconds

    def saved(self, seconds: float) -> None:
        self._save.add(seconds)
        self._beside += seconds

    def train(self, step: int, tokens: int, now: float) -> float | None:
        """Seconds from `now` to the end of the run; None at the first row. tokens: of the step's batch."""
        if self._last is not None and step > self._last[0]:
            self._step.add((now - self._last[1] - self._beside) / (step - self._last[0]))
        self._last, self._beside = (step, now), 0.0
        if not self._step.values:
            return None
        evaluation = self._evaluation.mean
        if not self._evaluation.values and not self.course.answers:
            evaluation = self._step.mean * self.course.held_out_tokens / max(1, tokens) / 3
        return (
            self._step.mean * (self.course.steps - step)
            + evaluation * self.course.evaluations_from(step)
            + self._save.mean * self.course.saves_from(step)
        )

    def uncounted(self, step: int) -> int:
        """Number of evaluations from `step` on whose time isn't in the time left."""
        known = self._evaluation.values or not self.course.answers
        return 0 if known else self.course.evaluations_from(step)


class ConsoleTracker:
    """Shows a bar with the last row's numbers on a terminal, else plain lines; an evaluation always gets one.

    Plain lines (a log file, a pipe) come at most once a second; as the run continues, once per 1 % of the
    elapsed time, at least once a minute. The first and the last step always have one.

    speed_unit: of a row's tokens per second and device. memory: print the memory of the first steps.
    """

    shows_progress = True  # takes the rows of kinds "training", "evaluating" and "writing"

    def __init__(
        self, console: Console, *, course: Course, speed_unit: str = "tokens/s", memory: bool = False
    ) -> None:
        self.console = console
        self.course = course
        self.speed_unit = speed_unit
        self.memory = memory
        self._left = TimeLeft(course)
        # The bar begins with the first step: earlier lines print without it. The time left begins with the
        # first row: compilation in the first step does not count.
        self._live: Live | None = None
        self._began: float | None = None
        self._last_line = -math.inf
        self._waiting = 0.0  # when the first step began
        self._shown: tuple[Row, float | None] | None = None  # the last row, and when the run will end
        self._memory: list[Row] = []
        self._evaluating = ""  # batches that the evaluation which runs has done
        self._writing = ""  # what the run writes now
        self._evaluation_began = 0.0
        self._evaluation_line = 0.0  # when it began, or had its last line
        self._evaluation_wait = EVALUATION_LINE  # until the next one

    def log(self, row: Row) -> None:
        match row["kind"]:
            case "run":
                for line in beginning(row):
                    self._line(line)
            case "training" if self.course.start < self.course.steps and self.console.is_interactive:
                self._waiting = time.monotonic()
                self._start_bar()
            case "train":
                self._train(row)
            case "evaluating":
                self._evaluation(row)
            case "eval":
                self._evaluating = ""
                if row["step"] or not row.get("answers_cut"):
                    self._left.evaluated(row.get("seconds", 0.0))
                self._line(" · ".join(eval_parts(row)))
            case "save":
                self._left.saved(row["seconds"])
                self._writing = ""
            case "writing":
                self._writing = row["what"]
            case "memory" if self.memory and self._watched(row):
                self._memory.append(row)
                if len(self._memory) == MEMORY_ROWS or row["step"] == self.course.steps:
                    self.console.print(memory_shown(self._memory))

    def _evaluation(self, row: Row) -> None:
        """Show how far an evaluation is: in the bar, else in a line after 5, 15, 35, 75 … seconds. Without a
        bar the first evaluation also begins with a line.
        """
        now = time.monotonic()
        if not self._evaluating:
            self._evaluation_began = now
            if self._live is None and self.console.is_interactive:  # before the first step
                self._waiting = now
                self._start_bar()
            if self._live is None and not self._evaluation_line:
                prompts = f", then answers to {row['prompts']:,} prompts" if row.get("prompts") else ""
                self._line(f"evaluating at step {row['step']}: {row['total']:,} {row['unit']}{prompts} …")
            self._evaluation_line, self._evaluation_wait = now, EVALUATION_LINE
        self._evaluating = f"{row['done']:,} of {row['total']:,} {row['unit']}"
        if self._live is None and now - self._evaluation_line >= self._evaluation_wait:
            self._evaluation_line = now
            self._evaluation_wait = min(2 * self._evaluation_wait, EVALUATION_LINES)
            self._line(f"evaluating at step {row['step']}: {self._evaluating}")

    def _watched(self, row: Row) -> bool:
        """True if a memory row belongs to the table: rank 0's of the first watched steps."""
        return not row.get("rank") and "step" not in row["phases"] and len(self._memory) < MEMORY_ROWS

    def close(self, *, failed: bool = False) -> None:
        if self._live is not None:
            self._live.stop()

    def _train(self, row: Row) -> None:
        now, step = time.monotonic(), row["step"]
        self._began = now if self._began is None else self._began
        left = self._left.train(step, row["tokens"], now)
        pause = min(60.0, max(1.0, 0.01 * (now - self._began)))
        if self._live is not None and lost(2):  # the terminal was closed
            self._live.stop()
            self._live, self.console.is_interactive = None, False
        if self.console.is_interactive:
            self._shown = row, None if left is None else now + left
            self._start_bar()
        elif now - self._last_line >= pause or step == self.course.steps:
            self._last_line = now
            place = [f"step {step}/{self.course.steps}", *epoch_parts(row)]
            time_left = left_parts(left, self._left.uncounted(step))
            self._line(" · ".join([*place, *train_parts(row, self.speed_unit), *time_left]))

    def _start_bar(self) -> None:
        if self._live is None:
            self._live = Live(
                get_renderable=self._renderable, console=self.console, transient=True, refresh_per_second=4
            )
            self._live.start()

    def _renderable(self) -> RenderableType:
        """The bar with what is left, and below it the last row's numbers; before any row the time so far."""
        if lost(2):  # the terminal was closed
            return Text()
        row, end = self._shown or ({"step": self.course.start}, None)
        uncounted = self._left.uncounted(row["step"])
        now = self._evaluation_began if self._evaluating and uncounted else time.monotonic()
        left = None if end is None else max(0.0, end - now)
        bar = Table.grid(padding=(0, 1))
        done = ProgressBar(self.course.steps, row["step"], width=BAR_WIDTH, complete_style="blue")
        place = [f"{row['step']:,}/{self.course.steps:,}", *epoch_parts(row), *left_parts(left, uncounted)]
        if not self._shown:
            place.append(f"{in_whole_seconds(time.monotonic() - self._waiting)} so far")
        if self._evaluating:
            place.append(f"evaluating {self._evaluating}")
        elif self._writing:
            place.append(f"writing {self._writing}")
        bar.add_row(Text("train", "bold"), done, Text(" · ".join(place)))
        if not self._shown:
            return bar
        return Group(bar, Text(joined(train_parts(row, self.speed_unit), self.console.width)))

    def _line(self, text: str) -> None:
        width = self.console.width if self.console.is_terminal else None
        self.console.print(Text(at_words(text, width)), soft_wrap=True)


def beginning(row: Row) -> Iterator[str]:
    """Yield lines on a run that begins, from its row: what is trained, how, and what was predicted."""
    trained, parameters = row["trainable_parameters"], row["parameters"]
    what = f"all {count(parameters)} parameters are trained"
    if trained < parameters:
        what = f"{count(trained)} of {count(parameters)} parameters are trained ({trained / parameters:.2%})"
    yield f"{row['model']}: {what}, in {row['precision']}."
    tokens = row["global_batch_size"] * row["seq_len"]
    yield (
        f"{counted(row['total_steps'], 'step')} of {counted(row['global_batch_size'], 'sequence')} of "
        f"{row['seq_len']:,} tokens: {tokens:,} tokens a step. Learning rate {row['learning_rate']}."
    )
    layout = in_words(Layout.parse(row["layout"]))
    flash = f", FlashAttention {version}" if (version := row.get("flash_attention")) else ""
    experts = f", experts by {products}" if (products := row.get("experts")) else ""
    yield f"Layout {row['layout']}: {layout}; {row['world']} x {row['device']}{flash}{experts}."
    saved = checkpoint_bytes(trained, row["precision"], row["optimizer"])
    checkpoint = f"A checkpoint has {human(saved)} of weights and optimizer states."
    if predicted := row.get("predicted"):
        step, memory = predicted.get("step_seconds"), predicted["memory"]
        time = f", {duration(step)} a step, {duration(step * row['total_steps'])} in all" if step else ""
        memory_of = f"{human(memory['peak'])} of {human(memory['capacity'])} a rank"
        share = row.get("label_share")
        of_width = share and share * row["seq_len"] / row["longest_sequence"]
        yield f"{predicted_with(of_width)}: {memory_of}{time}. {checkpoint}"
    else:
        yield checkpoint


def train_parts(row: Row, speed_unit: str = "tokens/s") -> list[str]:
    """The numbers of a train row as text; those that are not known (None) are left out.

    speed_unit: printed after the row's tokens per second and device.
    """
    parts = [f"loss {row['loss']:.4f}", *reward_parts(row), f"lr {row['learning_rate']:.2e}"]
    if row["grad_norm"] is not None:
        parts.append(f"grad norm {row['grad_norm']:#.3g}")
    parts.append(f"{count(row['tokens_per_second_per_gpu'])} {speed_unit}")
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    if (memory := row["peak_memory_bytes"] or row["peak_resident_bytes"]) is not None:
        parts.append(f"memory {human(memory)}")
    return parts


def reward_parts(row: Row, accuracy: str = "accuracy {:.1%}") -> Iterator[str]:
    """Yield what a loss on whole answers measured: accuracy and margin, or rewards of judged answers and kl.

    accuracy: format of it.
    """
    if "rewards/accuracies" in row:
        yield accuracy.format(row["rewards/accuracies"])
        yield f"margin {row['rewards/margins']:.3g}"
    elif "kl" in row:
        yield f"rewards {row['rewards/chosen']:.3g} good, {row['rewards/rejected']:.3g} bad"
        yield f"kl {row['kl']:.3g}"


def epoch_parts(row: Row) -> list[str]:
    """The epochs done as text; [] if they are not known."""
    return [] if row.get("epoch") is None else [f"epoch {row['epoch']:.2f}"]


def left_parts(seconds: float | None, evaluations: int = 0) -> list[str]:
    """The time left as text; [] if it is None. evaluations: whose time it leaves out."""
    more = f" + {counted(evaluations, 'evaluation')}" if evaluations else ""
    return [] if seconds is None else [f"{in_whole_seconds(max(1.0, seconds))}{more} left"]


def in_whole_seconds(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else duration(whole)


def eval_parts(row: Row) -> list[str]:
    """An eval row as text: loss, perplexity or rewards, and exact match where measured."""
    parts = [f"eval at step {row['step']}: loss {row['loss']:.4f}"]
    if "perplexity" in row:
        parts.append(f"perplexity {row['perplexity']:.4g}")
    parts += reward_parts(row, "chosen answers preferred in {:.1%} of the pairs")
    if "exact_match" in row:
        parts.append(f"exact match {row['exact_match']:.1%}")
        parts += filter(None, [unfinished_answers(row)])
    return parts


def joined(parts: Sequence[str], width: int) -> str:
    """The parts with a dot between, in lines of at most `width`; no part is cut."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def memory_shown(rows: Sequence[Row]) -> Table:
    """Table of the peak memory of each phase, by category, in MiB. rows: of kind "memory", at least one."""
    head, lines = memory_table(rows)
    table = Table(title="Peak memory of each phase, MiB", title_justify="left", box=None, padding=(0, 1))
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left")
    for line in lines:
        table.add_row(*line)
    return table
