"""The answer to `meshtune plan` in the terminal: the workload, the steps, the best layouts, the reasons."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshtune.plan.answer import Answer
from meshtune.plan.cost import RunCost
from meshtune.plan.explanation import Explanation
from meshtune.plan.phrases import device, unmeasured
from meshtune.plan.programs import MESHTUNE
from meshtune.plan.search import PEAK_TIE, TIE_MEMORY_STEP, Choice
from meshtune.plan.seconds.step import TIE
from meshtune.report.plan.tables import NO_TIMES, clusters_table, explanation, layouts_table, side_by_side
from meshtune.tools.export import Written
from meshtune.units import counted, human

MOST_REASONS = 6  # groups of layouts left out that are listed
MOST_TENSORS = 6  # kinds of tensors that are listed


def answer(result: Answer, most: int, written: Written | None = None) -> RenderableType:
    """All sections of the plan's answer; the table of the best layouts has at most `most`.

    written: the export of the chosen layout; None: it was not exported.
    """
    plan, best = result.plan, result.best(most)
    cluster = plan.cluster
    head = Text.assemble(
        (result.workload.model, "bold"),
        f" on {cluster.title} ({human(cluster.memory)} each, {cluster.nodes} "
        f"machine{'s' * (cluster.nodes > 1)}), in {result.workload.precision}",
    )
    tool, stack = result.workload.tool, result.workload.stack
    predicted = "Memory and time are" if result.choice.cluster.timed else "Memory is"
    target = Text(f"{predicted} predicted for {tool.title} (constants of {stack}).")
    of_machine = [unmeasured(cluster)] if cluster.gpu.shared else []
    notes = [Text(note) for note in (*result.workload.notes, *filter(None, of_machine))]
    reasoning = section("How it was reached", result.reasoning, numbered=True)
    verdict = [Text(sentence, style="bold") for sentence in result.verdict]
    parts: list[RenderableType] = [head, *verdict, target, *notes, reasoning]
    if len(result.offers) > 1:
        parts += [
            title("Clusters"),
            clusters_table(result.offers, result.chosen, memory=result.sort == "memory"),
        ]
    parts += [Padding(Text(sentence), (0, 0, 0, 2)) for sentence in (*result.comparison, *result.left_out)]
    parts += [
        title(f"{len(plan):,} of {plan.considered:,} layouts were ranked; the best"),
        layouts_table(best, [RunCost.of(choice, result.length) for choice in best]),
        Text(ranking(result), style="dim"),
        section(
            "Why the usual ones are not first",
            (f"{one.name} {one.sentence}" for one in result.alternatives),
        ),
        section("What to change first", result.changes),
        section("The global batch", result.batch_advice),
    ]
    if plan.rejected:
        rejected = sorted(plan.rejected, key=lambda group: -group.count)
        lines = [
            f"{group.count:,}: {group.reason.rstrip('.')} (such as {group.example})"
            for group in rejected[:MOST_REASONS]
        ]
        if others := rejected[MOST_REASONS:]:
            more = sum(group.count for group in others)
            lines.append(f"{more:,}: {counted(len(others), 'other reason')}, which --json lists")
        parts.append(section("Left out", lines))
    if lines := [*filter(None, [result.run.sentence()]), *result.length.notes]:
        parts.append(section("The run", lines))
    parts += reliability(result.choice)
    if written:
        parts.append(section(f"What {tool.title} runs differently", written.exported.missing))
    parts.append(Text(command(result, written), style="bold"))
    return Group(*parts)


def command(result: Answer, written: Written | None) -> str:
    """The command that runs the chosen layout, or that exports it for another tool. written: its export."""
    tool, layout = result.workload.tool, result.choice.layout
    if written:
        return written.sentence
    if tool is MESHTUNE:
        return f"meshtune train … layout={layout}"
    return f"meshtune plan export {tool.name} … layout={layout}"


def ranking(result: Answer) -> str:
    """A sentence on the order of the best layouts."""
    if result.sort == "memory":
        return (
            f"Row 1: the fastest of the layouts whose peak is at most {PEAK_TIE:.0%} of a "
            f"{device(result.choice.cluster)}'s memory above the lowest; the others by peak."
        )
    if not result.choice.cluster.timed:
        return f"In the order of their speed on {result.choice.cluster.gpu.as_of}. {NO_TIMES}"
    safely = " of those that fit safely" if result.choice.safe and not result.plan.safe.all() else ""
    return (
        f"Row 1: of the layouts within {TIE:.1%} of the shortest step{safely}, the one with the lowest peak "
        f"memory, counted in whole {TIE_MEMORY_STEP:.0%} of a GPU's; of equal ones, the one that recomputes "
        "least."
    )


def explained(explanations: Sequence[Explanation]) -> RenderableType:
    """Memory and time of each layout, part by part, the reasons against it, and its levers."""
    parts: list[RenderableType] = []
    for place, one in enumerate(explanations):
        parts += [*([Text()] if place else []), explanation(one.choice), *reasons(one)]
    return Group(*parts, *reliability(explanations[0].choice))


def compared(explanations: Sequence[Explanation]) -> RenderableType:
    """Layouts side by side, then the reasons against each and its levers."""
    parts: list[RenderableType] = [side_by_side([one.choice for one in explanations])]
    for letter, one in zip(string.ascii_uppercase, explanations, strict=False):
        parts += reasons(one, letter)
    return Group(*parts, *reliability(explanations[0].choice))


def reasons(one: Explanation, letter: str = "") -> list[RenderableType]:
    """Sections of an explained layout. letter: that it has in a table of several; "": none."""
    name = f" ({letter})" if letter else ""
    tensors = (f"{human(tensor['bytes'])}: {tensor['name']}" for tensor in one.tensors[:MOST_TENSORS])
    return [
        section(f"Against it{name}", one.against),
        section(f"Largest at the memory peak{name}", tensors),
        section(f"The largest levers{name}", (lever.sentence() for lever in one.levers), numbered=True),
        section(f"The run{name}", filter(None, (one.run.sentence(), *one.length.notes))),
    ]


def largest(what: str, value: Any, choice: Choice) -> RenderableType:
    """The largest model, sequence length or batch that fits, and its layout.

    what: "model", "seq_len" or "batch". value: the model's name, tokens, or sequences.
    """
    names = {"seq_len": "sequence, in tokens", "batch": "batch at once, in sequences", "model": "model"}
    shown = f"{value:,}" if isinstance(value, int) else value
    run_by = "" if choice.tool is MESHTUNE else f", run by {choice.tool.title}"
    return Group(
        Text.assemble(f"The largest {names[what]}: ", (shown, "bold"), run_by), layouts_table([choice])
    )


def reliability(choice: Choice) -> list[RenderableType]:
    """Sentences on how far the numbers can be trusted, after an empty line."""
    sentences = [choice.accuracy.sentence(choice.stack, choice.cluster.gpu.name), unmeasured(choice.cluster)]
    return [Text(), *(Text(sentence, style="dim") for sentence in sentences if sentence)]


def title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def section(name: str, lines: Iterable[str], *, numbered: bool = False) -> RenderableType:
    """A heading and its lines, indented, numbered from 1 if `numbered`; nothing at all without any."""
    texts = [Text(f"{number}. {line}" if numbered else line) for number, line in enumerate(lines, 1)]
    return Group(*([title(name)] if texts else []), *(Padding(text, (0, 0, 0, 2)) for text in texts))
