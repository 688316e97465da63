"""Every answer of `meshtune plan` as a Document: the best layouts with their reasons, explained layouts, the
largest workload that fits, and plans read from the files that `plan --json` and runs have written.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from meshtune import __version__
from meshtune.errors import UserError, check_file
from meshtune.plan.advice import COMPUTE, comparison
from meshtune.plan.cost import RunCost
from meshtune.plan.facts import cluster_facts
from meshtune.plan.memory.timeline import CATEGORIES
from meshtune.plan.models import tables
from meshtune.plan.phrases import device, memory_limit, of_objective
from meshtune.plan.programs import MESHTUNE
from meshtune.plan.search import PEAK_TIE, TIE_MEMORY_STEP, Choice
from meshtune.plan.seconds.step import PARTS, TIE
from meshtune.plan.workload import EXPERTS_NOT_MEASURED
from meshtune.report.draw.document import Document, InTerminal, Late, Notes, OnPage, Part, Pictures, Section
from meshtune.report.draw.kinds import Areas, Timeline
from meshtune.report.draw.page import text, tiles
from meshtune.report.draw.table import Column, Table
from meshtune.report.draw.table import facts as facts_table
from meshtune.report.draw.words import model_title
from meshtune.report.plan.numbers import by_memory_part, plus_minus, seconds
from meshtune.report.plan.panels import memory_and_time, memory_bars, over_time, predicted, time_bars
from meshtune.report.plan.screen import MORE, PYTHON, CommandLine, command, first_screen, kinds, reliability
from meshtune.report.plan.tables import clusters_table, explanation, layouts_table, side_by_side
from meshtune.units import GIB, count, counted, duration, human, money, number
from meshtune.yaml_tree import read_yaml

if TYPE_CHECKING:
    from meshtune.plan.answer import Answer
    from meshtune.plan.cluster import Cluster
    from meshtune.plan.explanation import Explanation
    from meshtune.report.draw.kinds import Panel
    from meshtune.tools.export import Written

FOOTER = "Predicted by meshtune; nothing here was measured."
MOST_REASONS = 6  # groups of layouts left out that the terminal lists
MOST_TENSORS = 6  # kinds of tensors that are listed


def answer(
    result: Answer,
    most: int = 10,
    written: Written | None = None,
    *,
    line: CommandLine = PYTHON,
    whole: bool = True,
    drawn: Sequence[Panel] = (),
) -> Document:
    """The plan's answer; its table of the best layouts has at most `most`.

    written: the export of the chosen layout; None: it was not exported. whole: with all reasons, as the page
    has them; else the first screen. drawn: pictures of the page.
    """
    workload, plan = result.workload, result.plan
    facts = Late(lambda: result.as_dict(most) | ({"export": written.as_dict()} if written else {}))
    parts = [*first_screen(result, line, written)]
    parts += (
        full(result, most, line, drawn) if whole else [InTerminal(kinds(result)), InTerminal(Notes([MORE]))]
    )
    batch = f"global batch {workload.global_batch_size:,} × {workload.seq_len:,} tokens"
    fitting = f"{counted(plan.considered, 'layout')} considered, {len(plan):,} fit"
    precision = f"{workload.precision}{of_objective(workload.objective)}"
    subtitle = " · ".join((plan.cluster.title, batch, precision, fitting))
    return Document(model_title(workload.model), parts, facts, "plan", text(subtitle), FOOTER)


def full(result: Answer, most: int, line: CommandLine, drawn: Sequence[Panel]) -> list[Part]:
    """The page, and below the first screen of `plan --full` all its reasons. Parameters as of `answer`."""
    usual = [f"{one.name} {one.sentence}" for one in result.alternatives]
    table = replace(clusters_table(result.offers, result.chosen), title="Clusters")
    return [
        OnPage(recommended(result, line)),
        *([OnPage(table)] if len(result.offers) > 1 else ()),
        OnPage(Section("", [*result.comparison, *result.left_out])),
        InTerminal(Section("How it was reached", result.reasoning, numbered=True)),
        *best_layouts(result, most),
        Pictures(drawn),
        Section("Why the usual ones are not first", usual),
        Section("What to change first", result.changes),
        Section("The global batch", result.batch_advice),
        *left_out(result),
        OnPage(Notes([*result.workload.tool.refused, *reliability(result.choice)])),
        OnPage(provenance(result, line)),
    ]


def recommended(result: Answer, line: CommandLine) -> str:
    """The chosen layout with its figures, and the command that trains with it or exports it, as HTML."""
    verdict = "".join(f"<p>{text(sentence)}</p>" for sentence in result.verdict)
    return (
        f"<section><h2>Recommended: <code>{text(result.choice.layout)}</code></h2>"
        f"{tiles(figures(result), wide=True)}{verdict}"
        f"<pre class='command'>{text(command(result, line))}</pre></section>"
    )


def figures(result: Answer) -> Iterator[tuple[str, ...]]:
    """Yield (name, value, error bar where there is one) of the chosen layout's figures."""
    choice, run = result.choice, result.run
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


def best_layouts(result: Answer, most: int) -> tuple[Part, Part]:
    """Table of the layouts with speed, memory and cost; on the page with why the others are not first."""
    choices = result.best(most)
    why = [
        capitalised(comparison(result.workload, choice, result.choice)) if place else "recommended"
        for place, choice in enumerate(choices)
    ]
    table = layouts_table(choices, [RunCost.of(choice, result.length) for choice in choices], why)
    title = f"{len(result.plan):,} of {result.plan.considered:,} layouts were ranked; the best"
    table = replace(table, notes=(ranking(result),))
    return InTerminal(replace(table, title=f"\n{title}")), OnPage(replace(table, title="The best layouts"))


def capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def ranking(result: Answer) -> str:
    """A sentence on the order of the best layouts."""
    if result.sort == "memory":
        return (
            f"Row 1: the fastest of the layouts whose peak is at most {PEAK_TIE:.0%} of a "
            f"{device(result.choice.cluster)}'s memory above the lowest; the others by peak."
        )
    safely = " of those that fit safely" if result.choice.safe and not result.plan.safe.all() else ""
    return (
        f"Row 1: of the layouts within {TIE:.1%} of the shortest step{safely}, the one with the lowest peak "
        f"memory, in steps of {TIE_MEMORY_STEP:.0%} of a GPU's memory; in a step, the one whose mode of "
        "recomputation runs least again, then the lower peak."
    )


def left_out(result: Answer) -> Iterator[Part]:
    """Yield the reasons that layouts were left out for, with counts and examples; the terminal has
    MOST_REASONS.
    """
    groups = sorted(result.plan.rejected, key=lambda group: -group.count)
    lines = [f"{one.count:,}: {one.reason.rstrip('.')} (such as {one.example})" for one in groups]
    if others := groups[MOST_REASONS:]:
        more = sum(group.count for group in others)
        lines[MOST_REASONS:] = [f"{more:,}: {counted(len(others), 'other reason')}, which --json lists"]
    yield InTerminal(Section("Left out", lines))
    columns = (
        Column("layouts", [f"{group.count:,}" for group in groups]),
        Column("why", [group.reason for group in groups], words=True),
        Column("one of them", [str(group.example) for group in groups], words=True, code=True),
    )
    yield OnPage(Table("Layouts left out", columns, kind="numbers left-out"))


def provenance(result: Answer, line: CommandLine) -> Table:
    """Command, version, date and constants."""
    cluster = result.choice.cluster
    gpu = cluster.gpu
    as_of = f"as of {gpu.as_of}: " if gpu.as_of and gpu.as_of != gpu.name else ""
    rows = {
        "command": line.command or None,
        "written": f"{date.today().isoformat()} by meshtune {__version__}",
        "model": result.workload.model,
        "machine": (
            f"{human(cluster.memory)} a GPU; {cluster.link / 1e9:g} GB/s between the {cluster.node} GPUs of "
            f"a machine; {cluster.network / 1e9:g} GB/s a GPU between machines; collectives reach "
            f"{cluster.network_share:.0%} of that"
        ),
        gpu.name: gpu.source or None,
        "efficiency": as_of + ", ".join(f"{name} {value:.4g}" for name, value in gpu.efficiency.items()),
        "software": f"constants of the stack {result.choice.stack} in stacks.toml",
        "notes": "\n".join(result.workload.notes) or None,
    }
    return facts_table(rows, "Where this comes from")


# Explained layouts, and the largest workload #


def explained(
    explanations: Sequence[Explanation], *, in_one_table: bool = False, drawn: Sequence[Panel] = ()
) -> Document:
    """Why layouts are refused; memory and time of each one, part by part, reasons against it, and its levers.

    explanations: at least one. in_one_table: the layouts side by side. drawn: pictures of the page.
    """
    choices = [one.choice for one in explanations]
    parts: list[Part] = [
        Section(
            f"{one.choice.tool.title} can't train {one.choice.layout}; numbers are predicted as if it could",
            one.refused,
            style="bold",
        )
        for one in explanations
    ]
    parts.append(Pictures(drawn))
    if in_one_table:
        parts.append(InTerminal(side_by_side(choices)))
    for place, one in enumerate(explanations):
        letter = string.ascii_uppercase[place] if in_one_table else ""
        if not in_one_table:
            parts.append(InTerminal(Group(*[Text()] * bool(place or one.refused), explanation(one.choice))))
        parts += [OnPage(f"<h2><code>{text(one.choice.layout)}</code></h2>"), *reasons(one, letter)]
    entries = [one.as_dict() for one in explanations]
    return Document(
        model_title(explanations[0].workload.model),
        (*parts, InTerminal(Text()), Notes(reliability(choices[0]))),
        entries[0] if len(entries) == 1 else {"layouts": entries},
        "plan",
        text(f"{counted(len(choices), 'layout')} on {choices[0].cluster.title}"),
        FOOTER,
    )


def explained_panels(explanations: Sequence[Explanation]) -> list[Panel]:
    """Memory and time of each layout, then each one's over a step, on common axes."""
    choices = [one.choice for one in explanations]
    drawn = [
        panel
        if len(choices) == 1
        else replace(panel, key=f"{panel.key}_{number}", title=f"{panel.title}: {name}")
        for number, one in enumerate(explanations, 1)
        for name in [one.choice.layout]
        for panel in over_time(one.workload, one.choice)
    ]
    memory = [panel for panel in drawn if isinstance(panel, Areas)]
    passes = [panel for panel in drawn if isinstance(panel, Timeline)]
    end = max(
        [*(one.x[-1] for one in memory), *(each.end for one in passes for each in one.intervals)], default=0.0
    )
    high = max((sum(sizes) for one in memory for sizes in zip(*one.parts.values(), strict=True)), default=0.0)
    over_step: list[Panel] = [replace(one, x_end=end, y_end=high) for one in memory]
    over_step += [replace(one, x_end=end) for one in passes]
    return predicted(memory_and_time(choices) + over_step)


def reasons(one: Explanation, letter: str = "") -> list[Part]:
    """Sections of an explained layout. letter: that it has in a table of several; "": none."""
    name = f" ({letter})" if letter else ""
    lines: dict[bool, list[str]] = {True: [], False: []}  # of overhead; of tensors
    for held in one.tensors:
        lines[held["category"] == "overhead"].append(f"{human(held['bytes'])}: {held['name']}")
    compute = [
        f"{seconds(time)} ({time / one.choice.seconds.compute:.0%}): {COMPUTE[kind]}"
        for kind, time in (one.compute or {}).items()
        if time
    ]
    return [
        Section(f"Compute of a step by kind of work{name}", compute),
        Section(f"Against it{name}", one.against),
        Section(f"Largest at the memory peak{name}", lines[False][:MOST_TENSORS]),
        Section(f"Overhead at the memory peak{name}", lines[True]),
        Section(f"The largest levers{name}", [lever.sentence() for lever in one.levers], numbered=True),
        Section(f"The run{name}", [*filter(None, (one.run.sentence(), *one.length.notes))]),
    ]


def largest(quantity: str, value: int | str, choice: Choice) -> Document:
    """The largest model, sequence length or batch that fits, and its layout.

    quantity: "model", "seq_len" or "batch". value: the model's name, tokens, or sequences.
    """
    names = {"seq_len": "sequence, in tokens", "batch": "batch at once, in sequences", "model": "model"}
    figure = f"{value:,}" if isinstance(value, int) else value
    run_by = "" if choice.tool is MESHTUNE else f", run by {choice.tool.title}"
    line = Text.assemble(f"The largest {names[quantity]}: ", (figure, "bold"), run_by)
    return Document(
        "largest", (InTerminal(line), layouts_table([choice])), {quantity: value} | choice.as_dict()
    )


def models_that_fit(
    longest: Mapping[str, Mapping[str, int | None]], cluster: Cluster, rank: int, batch: int
) -> Document:
    """Table of models: the longest sequence that fits for each method, and the name to download.

    longest: tokens by model and method, the largest model first; None: nothing fits. rank: of the adapters.
    batch: sequences in a step.
    """
    entries = [
        {"model": name, "download": table["hub"][0], "parameters": table["parameters"], **longest[name]}
        for name, table in sorted(tables().items(), key=lambda item: -item[1]["parameters"])
        if name in longest
    ]
    methods = [*next(iter(longest.values()))]
    fitting = [entry for entry in entries if any(entry[method] for method in methods)]
    heads = {"full": "full", "lora": f"LoRA r{rank}", "qlora": "QLoRA"}
    lengths = [[f"{entry[name]:,}" if entry[name] else "–" for entry in fitting] for name in methods]
    columns = (
        Column("download", [entry["download"] for entry in fitting], heading=True),
        Column("parameters", [count(entry["parameters"]) for entry in fitting], priority=1),
        *(Column(heads[name], cells) for name, cells in zip(methods, lengths, strict=True)),
        Column("name in meshtune", [entry["model"] for entry in fitting], words=True, priority=2),
    )
    first = fitting[0]
    method = next(name for name in methods if first[name])
    notes = (
        "Tokens of the longest sequence, of 512, 1,024, 2,048 … up to the model's positions, in the layout "
        f"that needs least memory; {memory_limit(cluster)}. A global batch has {batch:,} sequences: a "
        "smaller one (train.global_batch_size) that a micro-batch of each GPU holds needs no gradient sums.",
        f"Models that don't fit: {len(entries) - len(fitting)}. Models that can't keep packed documents "
        f"apart are counted with data.packing=false. {EXPERTS_NOT_MEASURED}",
        f"Next: meshtune plan max seq_len model.name={first['model']} method={method} "
        f"cluster.gpu={cluster.gpu.name} cluster.gpus={cluster.gpus}",
    )
    table = Table(f"What fits {cluster.title}", columns, notes)
    return Document(
        "models", (table,), {"cluster": cluster_facts(cluster), "lora_r": rank, "models": entries}
    )


# Plans in files #

SUFFIXES = (".json", ".yaml", ".yml")
MOST = 10  # layouts of one file
Tree = Mapping[str, Any]


@dataclass(frozen=True)
class PlanFile:
    """The plan in a file that `plan --json` or a run has written."""

    name: str
    model: str
    tree: Tree
    layouts: Sequence[Tree]  # as in `plan --json`, the best first

    def lines(self, key: str) -> list[str]:
        """The sentences under a key; [] for anything else there."""
        value = self.tree.get(key)
        return [*map(str, value)] if isinstance(value, list) else []


def read_plan(file: Path) -> PlanFile | None:
    """The plan in a file; None for a file that holds none. Raises UserError for text that can't be read."""
    if file.suffix.lower() not in SUFFIXES or not file.exists():
        return None
    check_file(file)
    tree = _json(file) if file.suffix.lower() == ".json" else read_yaml(file)
    if not isinstance(tree, Mapping):
        return None
    given = tree.get("layouts") or [tree.get("predicted")]
    layouts = [one for one in given if isinstance(one, Mapping) and "memory" in one and "layout" in one]
    if not layouts:
        return None
    model = tree.get("model") or tree.get("workload") or {}
    if isinstance(model, Mapping):
        model = model.get("name") or model.get("model") or file.stem
    stem = file.resolve().parent.name if file.name == "plan.yaml" else file.stem
    return PlanFile(stem, str(model), tree, layouts[:MOST])


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}.") from None


def of_files(plans: Sequence[PlanFile]) -> Document:
    """Plans on one page: memory and time of their layouts, the reasons, what was left out."""
    parts: list[Part] = [Pictures(file_panels(plans))]
    for plan in plans:
        title = f" of {plan.name}" if len(plans) > 1 else ""
        rejected = [
            f"{group.get('count', 0):,}: {group.get('reason', '')} ({group.get('example', '')})"
            for group in plan.tree.get("rejected") or ()
        ]
        parts += [
            _layouts(f"Layouts{title}", plan.layouts),
            Section(f"Why this layout{title}", plan.lines("reasoning")),
            Section(f"What to change first{title}", plan.lines("changes")),
            Section(f"Layouts left out{title}", rejected),
        ]
    name = " · ".join(dict.fromkeys(model_title(plan.model) for plan in plans))
    subtitle = text(", ".join(f"{plan.name}: {_cluster(plan.tree)}" for plan in plans))
    return Document(name, parts, kind="plan", subtitle=subtitle, footer=FOOTER)


def file_panels(plans: Sequence[PlanFile]) -> list[Panel]:
    """Memory of each layout and, where all have predicted times, the time of their steps. In front of layouts
    of several files stands their name.
    """
    rows = [(plan, layout) for plan in plans for layout in plan.layouts]
    names = [f"{plan.name}: {one['layout']}" if len(plans) > 1 else str(one["layout"]) for plan, one in rows]
    memory = [one["memory"] for _, one in rows]
    capacities = {one.get("capacity") for one in memory}
    capacity = capacities.pop() if len(capacities) == 1 else None
    categories = [by_memory_part({**dict.fromkeys(CATEGORIES, 0.0), **one}) for one in memory]
    drawn: list[Panel] = [memory_bars(names, categories, capacity, "Peak memory of a GPU")]
    if all(one.get("time") for _, one in rows):
        times = [{part: one["time"].get(part, 0.0) for part in PARTS} for _, one in rows]
        ends = [f"{seconds(one['step_seconds'])} · MFU {one['mfu']:.0%}" for _, one in rows]
        drawn.append(time_bars(names, times, ends, "Time of a step"))
    return predicted(drawn)


def _cluster(tree: Tree) -> str:
    cluster, workload = tree.get("cluster") or {}, tree.get("workload") or {}
    batch, length = workload.get("global_batch_size"), workload.get("seq_len")
    words = f"{cluster.get('gpus', '')} x {cluster.get('gpu', '')}".strip(" x")
    return f"{words}, global batch {batch:,} × {length:,} tokens" if batch and length else words


def _layouts(title: str, rows: Sequence[Tree]) -> Table:
    columns = [
        Column("", [f"{place}" for place in range(1, len(rows) + 1)]),
        Column("layout", [str(one["layout"]) for one in rows], words=True, code=True),
    ]
    if rows[0].get("step_seconds") is not None:
        columns += [
            Column("tokens/s/GPU", [number(one["tokens_per_second_per_gpu"]) for one in rows]),
            Column("step", [seconds(one["step_seconds"]) for one in rows]),
            Column("MFU", [f"{one['mfu']:.1%}" for one in rows]),
        ]
    columns.append(Column("peak GiB", [f"{one['memory']['peak'] / GIB:.1f}" for one in rows]))
    return Table(title, tuple(columns), kind="numbers layouts")
