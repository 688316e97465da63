"""The answer to `meshtune plan`, for a terminal: the workload, the steps, the best layouts, the reasons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshtune.plan.answer import Answer
from meshtune.plan.search import Choice
from meshtune.report.planned import explanation, layouts_table, sizes_table
from meshtune.units import human


def answer(asked: Answer, most: int) -> RenderableType:
    """Everything there is to say, the best layouts in the middle."""
    plan = asked.plan
    cluster = plan.cluster
    head = Text.assemble(
        (asked.workload.model, "bold"),
        f" on {cluster.gpus} x {cluster.gpu.name} ({human(cluster.memory)} each, {cluster.nodes} "
        f"machine{'s' * (cluster.nodes > 1)}), in {asked.workload.precision}",
    )
    parts: list[RenderableType] = [head, section("How it was reached", asked.reasoning, numbered=True)]
    if len(asked.plans) > 1:
        best = {gpus: each.choice(0) if len(each) else None for gpus, each in asked.plans.items()}
        parts += [title("How many GPUs"), sizes_table(best)]
    parts += [Text(f"  {sentence}") for sentence in asked.left_out]
    parts += [
        title(f"{len(plan):,} of {plan.considered:,} layouts fit; the best"),
        layouts_table(asked.best(most)),
        Text(
            "Within half a per cent of the shortest step, what leaves more memory free is first.", style="dim"
        ),
        section(
            "Why the usual ones are not first",
            (f"{each.name} {each.sentence}" for each in asked.alternatives),
        ),
        section("What to change first", asked.changes),
        section("The global batch", asked.batch_advice),
    ]
    if plan.rejected:
        rejected = sorted(plan.rejected, key=lambda each: -each.count)
        lines = [
            f"{each.count:,}: {each.reason.rstrip('.')} (such as {each.example})" for each in rejected[:6]
        ]
        parts.append(section("Left out", lines))
    if asked.run is not None:
        parts.append(section("The run", [asked.run.sentence()]))
    if note := unmeasured(asked.choice):
        parts.append(Text(note, style="dim"))
    parts.append(Text(f"meshtune train … layout={asked.choice.layout}", style="bold"))
    return Group(*parts)


def explained(choice: Choice, against: Iterable[str]) -> RenderableType:
    """One layout, part by part."""
    lines = list(against)
    parts: list[RenderableType] = [explanation(choice)]
    if lines:
        parts.append(section("Against it", lines))
    return Group(*parts)


def largest(what: str, value: Any, choice: Choice) -> RenderableType:
    """The largest model, sequence length or batch that fits, and how."""
    names = {"seq_len": "sequence, in tokens", "batch": "batch at once, in sequences", "model": "model"}
    shown = f"{value:,}" if isinstance(value, int) else value
    return Group(Text.assemble(f"The largest {names[what]}: ", (shown, "bold")), layouts_table([choice]))


def unmeasured(choice: Choice) -> str:
    """What the prediction rests on that was not measured here."""
    gpu = choice.cluster.gpu
    if gpu.as_of and gpu.as_of != gpu.name:
        return (
            f"Efficiencies of a {gpu.as_of} stand for those of a {gpu.name}, which nobody has measured here."
        )
    return ""


def title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def section(name: str, lines: Iterable[str], *, numbered: bool = False) -> RenderableType:
    """A heading and its sentences; nothing without sentences."""
    own = [Text(f"{number}. {line}" if numbered else line) for number, line in enumerate(lines, 1)]
    return Group(title(name), *(Padding(line, (0, 0, 0, 2)) for line in own)) if own else Text("")
