"""The first screen of `meshtune plan`: the chosen layout, its figures, what to change, how to start it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from meshtune.layout import in_words
from meshtune.objectives import OBJECTIVES
from meshtune.plan.cost import RunCost
from meshtune.plan.models import PREFIX, hub_id
from meshtune.plan.phrases import device, of_objective, predicted_with, unmeasured
from meshtune.plan.programs import MESHTUNE
from meshtune.report.draw.document import InTerminal, Notes, Part, Section
from meshtune.report.draw.table import Column, Table
from meshtune.report.plan.numbers import plus_minus, seconds
from meshtune.report.plan.tables import clusters_table, layouts_table
from meshtune.units import human, number

if TYPE_CHECKING:
    from meshtune.config import Config
    from meshtune.plan.answer import Answer
    from meshtune.plan.search import Choice
    from meshtune.tools.export import Written

REFUSED = "This command is refused until the settings change"
MOST_KINDS = 5  # kinds of layouts that are listed
MORE = (
    "More: --full has how it was reached, other batches, why not the usual layouts, and what was left out; "
    "`meshtune plan explain LAYOUT` takes one layout apart, `plan compare A,B` sets several side by side."
)


@dataclass(frozen=True)
class CommandLine:
    """The words that a plan was made with."""

    command: str = ""  # all of them; "": a call from Python
    settings: str = ""  # those that `meshtune train` reads too
    cluster: str = ""  # of its settings, those on the cluster, which a plan for another tool needs again
    lacks: str = ""  # a sentence on what `meshtune train` needs besides; "": nothing

    @classmethod
    def of(cls, command: Sequence[str], settings: Sequence[str], config: Config) -> CommandLine:
        """The words of the program and, of its settings, those that training reads on the GPUs themselves."""
        of_plans = ("layout=", "layout.", "cluster.")
        kept = [_downloadable(word) for word in settings if not word.startswith(of_plans)]
        lacks = "" if config.data.train else "Add data.train=FILE, the rows to train on."
        if config.model.name.startswith(PREFIX):
            lacks = "Name a model (model.name=…) in place of --params to train it."
        cluster = [word for word in settings if word.startswith("cluster.")]
        return cls(shlex.join(command), shlex.join(kept), shlex.join(cluster), lacks)


PYTHON = CommandLine()


def _downloadable(word: str) -> str:
    """model.name=NAME with the hub's id where NAME is a short one of models.toml; other words as they are."""
    setting, _, name = word.partition("=")
    return f"model.name={hub_id(name)}" if setting == "model.name" else word


def command(result: Answer, line: CommandLine) -> str:
    """The command that trains under the chosen layout on all machines, or exports it for another tool."""
    tool, layout, cluster = result.workload.tool, result.choice.layout, result.choice.cluster
    on = "" if tool is MESHTUNE else line.cluster
    words = " ".join(filter(None, (line.settings, on, f"layout={layout}")))
    if not line.command:
        return f"layout={layout}"
    if tool is not MESHTUNE:
        return f"meshtune plan export {tool.name} {words}"
    if cluster.nodes == 1:
        return f"meshtune train {words}"
    node = cluster.gpus // cluster.nodes
    gpus = "" if cluster.gpu.processor else f" --gpus-per-node {node}"
    start = f"srun --nodes {cluster.nodes} --ntasks-per-node {node}{gpus}"
    return f"{start} python -m meshtune train {words}"


@dataclass(frozen=True)
class ShellCommand:
    """A command in lines that can be copied into a shell: they end between its words."""

    words: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for word in map(shlex.quote, shlex.split(self.words)):
            if len(lines[-1]) + len(word) > options.max_width - 6 and lines[-1]:
                lines.append("")
            lines[-1] += f"{word} "
        command = "\\\n    ".join(lines).rstrip()
        yield Text(f"\n  {command}", style="bold", no_wrap=True, overflow="ignore")


def first_screen(result: Answer, line: CommandLine, written: Written | None = None) -> Iterator[Part]:
    """Yield the answer, clusters where several were compared, and how sure it is; all for the terminal.

    written: the export of the chosen layout; None: it was not exported.
    """
    workload, choice = result.workload, result.choice
    yield InTerminal(heading(result))
    yield InTerminal(summary(result))
    yield InTerminal(
        Text(f"\n{written.sentence}", "bold") if written else ShellCommand(command(result, line))
    )
    yield InTerminal(Section("", [] if written else [*filter(None, [line.lacks])]))
    yield InTerminal(Section(REFUSED, workload.tool.refused))
    lost = written.exported.missing if written else ()
    yield InTerminal(Section(f"What {workload.tool.title} runs differently", lost))
    if len(result.offers) > 1:
        table = clusters_table(result.offers, result.chosen)
        yield InTerminal(replace(table, title="\nClusters"))
    yield InTerminal(Section("", [*result.comparison, *result.left_out]))
    yield InTerminal(Text())
    yield InTerminal(Notes([*reliability(choice), *workload.notes, *result.length.notes]))


def reliability(choice: Choice) -> list[str]:
    """Sentences on how far the numbers can be trusted; the first screen says of an unmeasured processor."""
    borrowed = unmeasured(choice.cluster) if choice.cluster.timed else ""
    accuracy = choice.accuracy.sentence(choice.stack, choice.cluster.gpu.name)
    labels = "" if OBJECTIVES[choice.objective].scores else f"{predicted_with(None)}."
    return [*filter(None, [accuracy, labels, borrowed, *choice.notes])]


def heading(result: Answer) -> Text:
    """The model, the batch and the cluster."""
    cluster, workload = result.plan.cluster, result.workload
    machines = f"{cluster.nodes} machine{'s' * (cluster.nodes > 1)}"
    runner = "" if workload.tool is MESHTUNE else f", run by {workload.tool.title}"
    return Text.assemble(
        (workload.model, "bold"),
        f" on {cluster.title} ({human(cluster.memory)} each, {machines}), in {workload.precision}"
        f"{of_objective(workload.objective)}{runner}: "
        f"{workload.global_batch_size:,} sequences of {workload.seq_len:,} tokens a step\n",
    )


def summary(result: Answer) -> Table:
    """The chosen layout with its speed, memory and cost, what is faster and what needs less memory."""
    choice = result.choice
    cluster, peak, accuracy = choice.cluster, choice.memory.peak, choice.accuracy
    time, memory = plus_minus(accuracy.time), plus_minus(accuracy.memory)
    speed = (
        f"{number(choice.tokens_per_second_per_gpu)} {cluster.speed_unit} {time}, "
        f"{seconds(choice.seconds.total)} a step, MFU {choice.mfu:.1%}"
    )
    rows = [
        ("Layout", Text(str(choice.layout), "bold")),
        ("", Text(in_words(choice.layout))),
        *(("", Text(sentence)) for sentence in result.verdict),
        ("Speed", Text(speed if cluster.timed else unmeasured(cluster))),
        (
            "Memory",
            Text(
                f"{human(peak)} {memory} of a {device(cluster)}'s {human(cluster.memory)}; "
                f"{human(cluster.memory - peak)} free"
            ),
        ),
        ("The run", Text(result.run.sentence())),
        *(("Faster", Text(sentence)) for sentence in result.faster[:1]),
        *(("Safer", Text(f"{one.setting}: {one.gain}.")) for one in result.safer),
    ]
    labels, texts = zip(*(row for row in rows if row[1].plain), strict=True)
    return Table("", (Column("", labels, heading=True, style="dim"), Column("", texts, words=True)))


def kinds(result: Answer) -> Table:
    """The best layout of each kind, with the number of others of its kind that are as good."""
    found = result.kinds(MOST_KINDS)
    choices = [choice for choice, _ in found]
    table = layouts_table(choices, [RunCost.of(choice, result.length) for choice in choices])
    alike = Column("others\n≤ 1%", [f"+{count:,}" if count else "" for _, count in found], priority=1)
    plan = result.plan
    title = f"\n{len(plan):,} of {plan.considered:,} layouts fit; the best of each kind"
    columns = tuple(column for column in table.columns if not column.bars and not column.replaces)
    return replace(table, title=title, columns=(*columns, alike), legends={})
