"""The page of a plan: the recommended layout, all rows of the table, charts, reasons, provenance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from meshtune import __version__
from meshtune.plan.advice import comparison
from meshtune.plan.cost import RunCost, money
from meshtune.plan.programs import MESHTUNE
from meshtune.report.draw.document import Document, OnPage, Pictures
from meshtune.report.draw.page import notes, sentences, text, tiles
from meshtune.report.draw.table import Column, Table, facts
from meshtune.report.draw.words import model_title
from meshtune.report.plan.numbers import number, plus_minus, seconds
from meshtune.report.plan.tables import clusters_table, layouts_table
from meshtune.units import GIB, counted, duration, human

if TYPE_CHECKING:
    from meshtune.plan.answer import Answer
    from meshtune.plan.explanation import Explanation
    from meshtune.plan.search import Choice
    from meshtune.report.draw.kinds import Panel

FOOTER = "Predicted by meshtune; nothing here was measured."


@dataclass(frozen=True)
class Asked:
    """How the plan was asked for, for its page."""

    command: str = ""  # the whole command line; "": it was asked for from Python
    settings: str = ""  # its words that are settings, which `meshtune train` takes too


def subject(answer: Answer) -> str:
    """Cluster, batch, precision and number of layouts in one line."""
    workload, plan = answer.workload, answer.plan
    return (
        f"{plan.cluster.title} · global batch {workload.global_batch_size:,} × "
        f"{workload.seq_len:,} tokens · {workload.precision} · "
        f"{counted(plan.considered, 'layout')} considered, {len(plan):,} fit"
    )


def plan_page(answer: Answer, choices: Sequence[Choice], drawn: Sequence[Panel], asked: Asked) -> str:
    """The answer as the HTML text of a page.

    choices: rows of its table. drawn: its charts.
    """
    before = (recommended(answer, asked), clusters(answer), layouts(answer, choices))
    after = (
        sentences("What to change first", answer.changes),
        sentences("The global batch", answer.batch_advice),
        usual_layouts(answer),
        left_out(answer),
        provenance(answer, asked),
    )
    return Document(
        name=model_title(answer.workload.model),
        parts=(*map(OnPage, before), Pictures(drawn), *map(OnPage, after)),
        kind="plan",
        subtitle=text(subject(answer)),
        footer=FOOTER,
    ).html()


def explained_page(
    name: str, subtitle: str, explanations: Sequence[Explanation], drawn: Sequence[Panel]
) -> str:
    """Explained layouts as the HTML text of a page: charts, and the reasons against each and its levers."""
    after = "".join(
        sentences(f"Against {one.choice.layout}", one.against)
        + sentences(f"The largest levers of {one.choice.layout}", (lever.sentence() for lever in one.levers))
        for one in explanations
    )
    choice = explanations[0].choice
    note = notes([choice.accuracy.sentence(choice.stack, choice.cluster.gpu.name)])
    return Document(
        name, (Pictures(drawn), OnPage(after + note)), kind="plan", subtitle=text(subtitle), footer=FOOTER
    ).html()  # fmt: skip


def recommended(answer: Answer, asked: Asked) -> str:
    """The chosen layout with its figures, and the command that trains with it or exports it, as HTML."""
    choice = answer.choice
    tool, settings = answer.workload.tool, asked.settings or "…"
    command = (
        f"meshtune train {settings} layout={choice.layout}"
        if tool is MESHTUNE
        else f"meshtune plan export {tool.name} {settings} layout={choice.layout}"
    )
    verdict = "".join(f"<p>{text(sentence)}</p>" for sentence in answer.verdict)
    return (
        f"<section><h2>Recommended: <code>{text(choice.layout)}</code></h2>"
        f"{tiles(figures(answer), wide=True)}{verdict}<pre class='command'>{text(command)}</pre></section>"
    )


def figures(answer: Answer) -> Iterable[tuple[str, ...]]:
    """(name, value, error bar where there is one) of the chosen layout's figures."""
    choice, run = answer.choice, answer.run
    if choice.cluster.timed:
        error = plus_minus(choice.accuracy.time)
        yield choice.cluster.speed_unit, number(choice.tokens_per_second_per_gpu), error
        yield "a step", seconds(choice.seconds.total), error
        yield "MFU", f"{choice.mfu:.1%}"
    error = f"{plus_minus(choice.accuracy.memory)} of {choice.cluster.memory / GIB:.1f}"
    yield "peak memory, GiB", f"{choice.memory.peak / GIB:.1f}", error
    if run.seconds is not None and run.gpu_hours is not None:
        yield f"{counted(run.steps or 0, 'step')}", duration(run.seconds)
        yield "GPU-hours", number(run.gpu_hours)
    if run.cost is not None:
        yield "cost", money(run.cost, run.currency)
    if run.cost_per_million_tokens is not None:
        yield "a million tokens", money(run.cost_per_million_tokens, run.currency)


def layouts(answer: Answer, choices: Sequence[Choice]) -> str:
    """Table of the layouts with speed, memory, cost, and why the others are not first, as HTML."""
    why = [
        "recommended"
        if choice.layout == answer.choice.layout
        else capitalised(comparison(answer.workload, choice, answer.choice))
        for choice in choices
    ]
    runs = [RunCost.of(choice, answer.length) for choice in choices]
    return layouts_table(choices, runs, why, "The best layouts").html("numbers layouts")


def clusters(answer: Answer) -> str:
    """Table of the clusters that were compared, and sentences on them, as HTML; "" if there are neither."""
    table = clusters_table(answer.offers, answer.chosen, memory=True, title="Clusters")
    compared = table.html("numbers layouts") if len(answer.offers) > 1 else ""
    return compared + sentences("", (*answer.comparison, *answer.left_out))


def capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def usual_layouts(answer: Answer) -> str:
    """The usual kinds of layout, each with why it is not first, as HTML."""
    lines = [f"{one.name} {one.sentence}" for one in answer.alternatives]
    return sentences("Why the usual ones are not first", [*map(capitalised, lines)])


def left_out(answer: Answer) -> str:
    """Table of the reasons that layouts were left out for, with counts and examples, as HTML."""
    groups = sorted(answer.plan.rejected, key=lambda group: -group.count)
    if not groups:
        return ""
    columns = (
        Column("layouts", [f"{group.count:,}" for group in groups]),
        Column("why", [group.reason for group in groups], words=True),
        Column("one of them", [str(group.example) for group in groups], words=True, code=True),
    )
    return Table("Layouts left out", columns).html("numbers left-out")


def provenance(answer: Answer, asked: Asked) -> str:
    """Command, version, date, constants and error bars, as HTML."""
    choice, cluster = answer.choice, answer.choice.cluster
    gpu, efficiency = cluster.gpu, cluster.gpu.efficiency
    as_of = f"as of {gpu.as_of}: " if gpu.as_of and gpu.as_of != gpu.name else ""
    rows = {
        "command": asked.command or None,
        "written": f"{date.today().isoformat()} by meshtune {__version__}",
        "model": answer.workload.model,
        "error bars": choice.accuracy.sentence(choice.stack, gpu.name) or None,
        "machine": (
            f"{human(cluster.memory)} a GPU; {cluster.link / 1e9:g} GB/s between the {cluster.node} GPUs of "
            f"a machine; {cluster.network / 1e9:g} GB/s a GPU between machines, of which collectives reach "
            f"{cluster.network_share:.0%}"
        ),
        gpu.name: gpu.source or None,
        "efficiency": as_of + ", ".join(f"{name} {value:.4g}" for name, value in efficiency.items()),
        "software": f"constants of the stack {choice.stack} in stacks.toml",
        "notes": "\n".join(answer.workload.notes) or None,
    }
    return facts(rows, "Where this comes from").html()
