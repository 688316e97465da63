"""What the command line prints of a run, a model family and this machine (rich, any width)."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshtune.report.summary import Summary, samples_of, summarise, values
from meshtune.report.terminal import curve
from meshtune.rundir import RunDir
from meshtune.units import count, duration, human


def run_summary(run: RunDir, *, curve_width: int = 60) -> RenderableType:
    """What a run came to: its loss curve, its headline numbers, and where model and report are."""
    summary, train = summarise(run), run.rows("train")
    parts: list[RenderableType] = []
    if losses := values(train, "loss"):
        steps = (train[0]["step"], train[-1]["step"])
        parts += [Text("loss", style="bold"), curve(losses, steps=steps, width=curve_width), Text()]
    grid = Table.grid(padding=(0, 3))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in headline(summary):
        grid.add_row(label, Text(value, style="bold" if label == "exact match" else ""))
    for label, place in (("model", summary.model_folder), ("report", summary.report)):
        if place is not None:
            grid.add_row(label, Text(place, style="blue"))
    return Padding(Group(*parts, grid), (1, 2))


def headline(summary: Summary) -> list[tuple[str, str]]:
    """The headline numbers as (label, text), the telling ones first; what is unknown is left out."""
    s, lines = summary, []
    if s.last_exact_match is not None:
        of = f" of {s.prompts:,} held-out prompts" if s.prompts else " of held-out prompts"
        lines.append(("exact match", change(s.first_exact_match, s.last_exact_match, ".1%") + of))
    if s.last_loss is not None:
        lines.append(("loss", f"{change(s.first_loss, s.last_loss, '.4f')} in {s.steps:,} steps"))
    if s.last_eval_loss is not None:
        first = s.first_eval_loss if s.first_eval_loss != s.last_eval_loss else None
        best = f" (best {s.best_eval_loss:.4f} at step {s.best_eval_step:,})" if first is not None else ""
        lines.append(("held-out loss", change(first, s.last_eval_loss, ".4f") + best))
    if s.tokens_per_second_per_gpu is not None:
        mfu = f" · MFU {s.mfu:.1%}" if s.mfu is not None else ""
        lines.append(("speed", f"{s.tokens_per_second_per_gpu:,.0f} {s.speed_unit} (median){mfu}"))
    if s.seconds is not None:
        tokens = f" · {count(s.tokens)} tokens" if s.tokens else ""
        lines.append(("time", duration(s.seconds) + tokens))
    if s.peak_memory_bytes is not None:
        lines.append(("peak memory", human(s.peak_memory_bytes)))
    if s.skipped:
        lines.append(("not applied", f"{s.skipped:,} steps, whose loss or gradients were not finite"))
    if s.status != "finished":
        lines.append(("status", s.status))
    return lines


def change(first: float | None, last: float, form: str) -> str:
    """`first → last`, or `last` alone."""
    return f"{last:{form}}" if first is None else f"{first:{form}} → {last:{form}}"


def samples_table(run: RunDir, *, limit: int = 5) -> RenderableType:
    """Held-out prompts with the expected answer and the model's, before and after; green where right."""
    samples = samples_of(run)[:limit]
    if not samples:
        return Text("No samples were taken (eval.samples says how many).", style="dim")
    table = Table(box=None, padding=(0, 2), header_style="dim", show_edge=False)
    asked_twice = any(sample.before is not None for sample in samples)
    for name in (
        ("prompt", "expected", "before", "after") if asked_twice else ("prompt", "expected", "answer")
    ):
        table.add_column(name, overflow="fold", ratio=1 if name != "prompt" else 2)
    for sample in samples:
        answers = (sample.before or "", sample.after) if asked_twice else (sample.after,)
        marked = (
            Text(answer, style="green" if answer.strip() == (sample.expected or "").strip() else "yellow")
            for answer in answers
        )
        table.add_row(Text(sample.prompt), Text(sample.expected or ""), *marked)
    return Padding(table, (0, 0, 1, 0))


def capability_table(rows: Iterable[tuple[str, bool, str]], *, title: str | None = None) -> Table:
    """What a model family supports: (feature, supported, why)."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False
    )
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for feature, supported, why in rows:
        table.add_row(feature, Text("yes", style="green") if supported else Text("no", style="yellow"), why)
    return table


def facts_table(facts: Mapping[str, Any], *, title: str | None = None) -> Table:
    """Named facts, one a line (versions, devices); a nested mapping's keys are joined by dots."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if isinstance(value, Mapping):
            for inner, leaf in value.items():
                table.add_row(f"{name}.{inner}", Text(str(leaf)))
        else:
            table.add_row(name, Text(str(value)))
    return table
