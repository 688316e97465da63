"""A run in the terminal: its loss curve, headline numbers and samples, at any width."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshtune.meter.rows import matches, unfinished_answers
from meshtune.objectives import OBJECTIVES
from meshtune.report.draw.document import Section
from meshtune.report.draw.table import facts
from meshtune.report.run.summary import Summary, objective_of, samples_of, summarise, values
from meshtune.rundir import RunDir
from meshtune.units import count, counted, duration, human, money, printable

LABEL_WIDTH = 16  # columns of the terminal, of labels and the space behind them


def run_summary(run: RunDir, *, curve_width: int = 60) -> RenderableType:
    """A run's loss curve and its headline numbers, as far as they exist.

    curve_width: width of the curve in terminal columns, without its axis.
    """
    summary, train = summarise(run), run.rows("train")
    parts: list[RenderableType] = []
    if losses := values(train, "loss"):
        steps = (train[0]["step"], train[-1]["step"])
        few, rest = divmod(len(losses), curve_width)
        means = f", means of {few} or {few + 1} steps" if rest else f", means of {few} steps"
        title = Text.assemble(("loss", "bold"), (means if len(losses) > curve_width else "", "dim"))
        parts += [title, curve(losses, steps=steps, width=curve_width), Text()]
    lines = {
        f"{label:<{LABEL_WIDTH - 2}}": Text(value, style="bold" if label == "exact match" else "")
        for label, value in headline(summary)
    }
    notes = [Text(), Text(summary.left_out, style="yellow")] if summary.left_out else []
    causes = Section("why it is slow", [cause.sentence for cause in summary.causes], numbered=True)
    return Padding(Group(*parts, facts(lines), causes, *notes), (1, 2))


def places(run: RunDir) -> list[Text]:
    """Lines with the paths of a run's model and report, as far as they exist, and what can be done next.

    They are not in a table, which would cut a long path in two, so that it can't be copied.
    """
    paths = {"model": run.model, "report": run.report_file}
    lines = {label: str(path) for label, path in paths.items() if path.exists()}
    if run.model.exists():
        folder = shlex.quote(str(run.path))
        answers = "" if run.rows("eval") else " data.eval=FILE"
        merge = " --merge" if (run.model / "adapter_config.json").exists() else ""
        scores = OBJECTIVES[objective_of(run.rows("run"))].scores
        page = "preferences" if scores else "serve"  # a reward model answers nothing
        lines |= {} if scores else {"chat with it": f"meshtune chat {folder}"}
        lines |= {
            "evaluate it": f"meshtune eval {folder}{answers}",
            "serve it": f"meshtune export {folder} FOLDER{merge}   (then docs/{page}.md)",
        }
    return [Text.assemble(f"  {label:<{LABEL_WIDTH}}", (words, "blue")) for label, words in lines.items()]


def headline(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the known headline numbers as pairs of label and text, the most important first."""
    steps = counted(summary.steps, "step")
    if summary.last_exact_match is not None:
        shares = change(summary.first_exact_match, summary.last_exact_match, ".1%")
        prompts = counted(summary.prompts, "held-out prompt") if summary.prompts else "held-out prompts"
        cut = unfinished_answers(vars(summary))
        yield "exact match", "; ".join(filter(None, [f"{shares} of {prompts}", cut]))
    if (margin := summary.last_margin) is not None:
        preferred = "chosen answers preferred in {:.1%} of the held-out pairs · "
        accuracy = "" if summary.last_accuracy is None else preferred.format(summary.last_accuracy)
        yield "rewards", f"{accuracy}margin {margin:.3g}"
    if summary.last_loss is not None:
        yield "loss", f"{change(summary.first_loss, summary.last_loss, '.4f')} in {steps}"
    if (loss := summary.last_eval_loss) is not None:
        first = None if summary.first_eval_loss == loss else summary.first_eval_loss
        best = (
            ""
            if first is None
            else f" (best {summary.best_eval_loss:.4f} at step {summary.best_eval_step:,})"
        )
        yield "held-out loss", change(first, loss, ".4f") + best
    if (speed := summary.tokens_per_second_per_gpu) is not None:
        mfu = f" · MFU {summary.mfu:.1%}" if summary.mfu is not None else ""
        several = " of the last layout" if summary.layouts_in_words else ""
        yield "speed", f"{speed:,.0f} {summary.speed_unit} (median{several}){mfu}"
    if summary.seconds is not None:
        tokens = f" · {count(summary.tokens)} tokens" if summary.tokens else ""
        yield "time of steps", duration(summary.seconds) + tokens
    if job := summary.job:
        took = [
            f"{duration(job['seconds'])} of {duration(job['expected_seconds'])} expected (at most "
            f"{duration(job['most_seconds'])})"
        ]
        if job["cost"] is not None:
            amounts = (money(job[name], job["currency"]) for name in ("cost", "expected_cost", "most_cost"))
            took.append("{} of {} expected (at most {})".format(*amounts))
        yield "submitted job", " · ".join(took)
    if (peak := summary.peak_memory_bytes) is not None:
        process = summary.peak_resident_bytes
        yield "peak memory", human(peak) + (f" (process {human(process)})" if process else "")
    if layouts := summary.layouts_in_words:
        yield "layouts", layouts
    if summary.skipped:
        skipped = counted(summary.skipped, "step")
        yield "not applied", f"{skipped}, whose loss or gradients were not finite"
    if summary.status != "finished":
        yield "status", summary.status


def change(first: float | None, last: float, form: str) -> str:
    """`first → last`, or only `last` if `first` is None; `form` is Python's format of both."""
    return f"{last:{form}}" if first is None else f"{first:{form}} → {last:{form}}"


def samples_table(run: RunDir, *, limit: int = 5) -> RenderableType:
    """The first `limit` held-out prompts, each with the expected answer and the model's, green where right.

    Answers before training, if any prompt was answered more than once, and the last ones. Without samples, a
    sentence says so.
    """
    every = samples_of(run)
    samples, more = every[:limit], len(every) - limit
    if not samples:
        return Text("No samples were taken; set eval.samples to a number of prompts.", style="dim")
    twice = any(sample.before is not None for sample in samples)
    blocks = []
    for sample in samples:
        answers = {"before": sample.before or ""} if twice else {}
        answers |= {f"at step {sample.step:,}": sample.after}
        coloured = {
            name: Text(printable(answer), style="green" if matches(sample.expected, answer) else "yellow")
            for name, answer in answers.items()
        }
        block = {"prompt": sample.question, "expected": sample.expected or ""} | coloured
        blocks.append(Padding(facts(block), (0, 2, 1, 2)))
    if more > 0:
        blocks.append(Text(f"{counted(more, 'prompt')} more in {run.samples_file.name}.", style="dim"))
    return Group(*blocks)


# The loss curve, made of characters #

# 5.60 ┤╮
#      │╰─╮
#      │  ╰──╮
# 0.06 ┤     ╰───────────
#      └ 1 ────────── 300


def curve(values: Sequence[float], *, steps: tuple[int, int], width: int = 64, height: int = 7) -> Text:
    """A line of box-drawing characters through `values`, with both axes; without values a sentence.

    values: in order, evenly spaced, finite. More values than columns are averaged column by column; fewer are
    spread out. steps: (first, last) step, written at the ends of the x axis. width, height: terminal columns
    and rows of the line, without the axes.
    """
    if not values:
        return Text("no values yet", style="dim")
    columns = resampled(values, width)
    low, high = min(columns), max(columns)
    scale = (height - 1) / (high - low) if high > low else 0.0
    levels = [round((value - low) * scale) for value in columns]  # 0: the bottom row
    cells = [[" "] * width for _ in range(height)]
    previous = levels[0]
    for column, level in enumerate(levels):
        if level == previous:
            cells[level][column] = "─"
        else:
            upper, lower = max(level, previous), min(level, previous)
            for between in range(lower + 1, upper):
                cells[between][column] = "│"
            cells[previous][column] = "╮" if level < previous else "╯"
            cells[level][column] = "╰" if level < previous else "╭"
        previous = level
    ends = {0: f"{low:.3g}", height - 1: f"{high:.3g}"}
    margin = max(map(len, ends.values()))
    picture = Text()
    for row in reversed(range(height)):
        picture.append(f"{ends.get(row, ''):>{margin}} {'┤' if row in ends else '│'}", style="dim")
        picture.append("".join(cells[row]) + "\n", style="blue")
    first, last = f" {steps[0]} ", f" {steps[1]}"
    axis = "└" + first + "─" * (width - len(first) - len(last)) + last
    return picture.append(" " * (margin + 1) + axis, style="dim")


def resampled(values: Sequence[float], width: int) -> list[float]:
    """`width` numbers: means of equal slices of `values`; with fewer values, values are repeated."""
    edges = [column * len(values) / width for column in range(width + 1)]
    slices = (values[int(start) : max(int(start) + 1, int(end))] for start, end in pairwise(edges))
    return [fmean(part) for part in slices]
