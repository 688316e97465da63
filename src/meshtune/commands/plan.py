"""`meshtune plan`: predict every parallel layout on a cluster, and choose.

Other questions on the same settings are sub-commands with options of their own (SUBCOMMANDS):
`meshtune plan explain LAYOUT`, `compare`, `max` and `export`.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshtune.commands import verify as verification
from meshtune.commands.command import Command
from meshtune.commands.complete import complete_layout
from meshtune.commands.options import (
    AsJson,
    Plot,
    PlotWidth,
    Settings,
    announce,
    layout_words,
    log,
    pictures_to,
    show,
    split,
)
from meshtune.errors import UserError, expanded
from meshtune.plan.programs import MESHTUNE
from meshtune.units import counted, working
from meshtune.yaml_tree import YAML

if TYPE_CHECKING:
    from meshtune.config import Config
    from meshtune.plan.answer import Answer
    from meshtune.report.draw.document import Document
    from meshtune.report.draw.picture import Target
    from meshtune.tools.export import Written

MOST_COMPARED = 6  # layouts in one table
TOP = 10  # layouts shown without --top
FOLDER = Path("plan-export")  # of an export without --to
Gpus = Annotated[
    str | None,
    typer.Option(metavar="N,NxKIND,…", help="compare clusters, such as 16,32 or 8xh100-sxm,8xmi300x"),
]
Sort = Annotated[str, typer.Option(help="what the first is best in: speed, cost, gpus, memory")]
By = Annotated[
    str | None, typer.Option(metavar="TIME", help="the longest time of the run, such as 48h or 2d12h")
]
Budget = Annotated[float | None, typer.Option(help="the most that the run may cost")]
Params = Annotated[
    str | None,
    typer.Option(metavar="N", help="plan a typical Llama of N parameters (13e9, 13B) instead of a model"),
]
For = Annotated[str, typer.Option("--for", metavar="TOOL", help="plan for the tool that will run it")]
MemoryBudget = Annotated[
    str | None, typer.Option(metavar="SIZE", help="fill at most this much of each GPU: 70GiB")
]
Top = Annotated[int, typer.Option(min=1, help="layouts in --full, on the page and in --json")]
Full = Annotated[bool, typer.Option("--full", help="all reasons, other batches, and what was left out")]


class WithSubcommands(Command):
    """`meshtune plan`, whose first word may be one of SUBCOMMANDS."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        args = in_new_words(args)
        flags = [*takewhile(lambda word: word.startswith("-"), args)]  # --json explain LAYOUT
        if args[len(flags) : len(flags) + 1] and args[len(flags)] in SUBCOMMANDS:
            args = [*args[len(flags) :], *flags]
        if not args or args[0] not in SUBCOMMANDS:
            return super().make_context(info_name, args, parent, **extra)
        commands = typer.Typer(add_completion=False)
        name = f"{info_name} {args[0]}"
        commands.command(f"plan {args[0]}", cls=Command)(SUBCOMMANDS[args[0]])
        return typer.main.get_command(commands).make_context(name, args[1:], parent, **extra)


def in_new_words(args: list[str]) -> list[str]:
    """The words with an earlier version's options (--explain LAYOUT, --goal) as what replaced them."""
    renamed = [re.sub(r"^--goal(?=$|=)", "--sort", word) for word in args]
    if renamed != args:
        log("--goal is read in this version, not in the next; write --sort.")
    args = renamed
    name, values, others, words = "", [], [], iter(args)
    old = {} if args and args[0] in SUBCOMMANDS else SUBCOMMANDS
    for word in words:
        option, equals, value = word.partition("=")
        if option.startswith("--") and option[2:] in ({name} if name else old):
            name = option[2:]
            values.append(value if equals else next(words, ""))
        else:
            others.append(word)
    if not name:
        return args
    new = f"{name} {','.join(values)}"
    log(f"--{name} is read in this version, not in the next; write `meshtune plan {new} …`.")
    return [name, ",".join(values), *others]


def plan(
    settings: Settings = None,
    *,
    gpus: Gpus = None,
    sort: Sort = "speed",
    by: By = None,
    budget: Budget = None,
    params: Params = None,
    tool: For = MESHTUNE.name,
    memory_budget: MemoryBudget = None,
    top: Top = TOP,
    full: Full = False,
    verify: Annotated[int, typer.Option(min=0, help="how many of the best layouts to simulate too")] = 0,
    plot: Plot = None,
    width: PlotWidth = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory and step time of every parallel layout on a cluster, and choose. Needs no GPU and no
    data.

    Other questions: meshtune plan explain, compare, max and export; each has its own --help.
    """
    if verify:
        verification.check(tool)
    config = config_of(settings, memory_budget, params)
    search(
        config, settings or [], tool=tool, top=top, full=full, verify=verify, plot=pictures_to(plot, width),
        as_json=as_json, gpus=gpus or (), sort=sort, by=by, budget=budget,
    )  # fmt: skip


def explain(
    layouts: Annotated[str, typer.Argument(metavar="LAYOUT,…", autocompletion=complete_layout)],
    settings: Settings = None,
    *,
    params: Params = None,
    tool: For = MESHTUNE.name,
    memory_budget: MemoryBudget = None,
    plot: Plot = None,
    width: PlotWidth = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory and time of layouts part by part, with the reasons against each and its levers.

    The planner chooses what a layout leaves open.
    """
    words = layout_words("plan explain", [layouts])
    config = config_of(settings, memory_budget, params)
    explain_layouts(
        config, words, tool=tool, side_by_side=False, plot=pictures_to(plot, width), as_json=as_json
    )


def compare(
    names: Annotated[
        str, typer.Argument(metavar="LAYOUT,…|RUN,…", help="runs: the folders of finished ones")
    ],
    settings: Settings = None,
    *,
    params: Params = None,
    tool: For = MESHTUNE.name,
    memory_budget: MemoryBudget = None,
    plot: Plot = None,
    width: PlotWidth = None,
    as_json: AsJson = False,
) -> None:
    """Set layouts side by side, part by part; or finished runs and their plan.

    The settings of runs are those of the cluster, for today's plan.
    """
    words = layout_words("plan compare", [names])
    if runs := runs_of(words):
        file, overrides = split(settings)
        given = {"--plot": plot, "--width": width, "--params": params, "--memory-budget": memory_budget}
        given |= {file or "": file, "--for": tool if tool != MESHTUNE.name else None}
        compare_runs(runs, overrides, unused=[name for name in given if given[name]], as_json=as_json)
        return
    if not 2 <= len(words) <= MOST_COMPARED:
        raise UserError(
            f"plan compare {names}: it takes 2 to {MOST_COMPARED} layouts, such as plan compare "
            "zero3x8-mb1-ga8,zero2x8-mb1-ga8, or folders of finished runs."
        )
    config = config_of(settings, memory_budget, params)
    explain_layouts(
        config, words, tool=tool, side_by_side=True, plot=pictures_to(plot, width), as_json=as_json
    )


def largest(
    quantity: Annotated[
        str | None,
        typer.Argument(metavar="[WHAT]", help="model, seq_len or batch; without it: a table of models"),
    ] = None,
    settings: Settings = None,
    *,
    params: Params = None,
    tool: For = MESHTUNE.name,
    memory_budget: MemoryBudget = None,
    as_json: AsJson = False,
) -> None:
    """Find the largest model, sequence length or batch that fits the cluster under any layout.

    Without WHAT: which models fit, with all weights or adapters trained, and up to which sequence length.
    """
    split([quantity] if quantity else None)  # a model or a GPU is a setting
    if quantity and ("=" in quantity or quantity.endswith(YAML)):
        quantity, settings = None, [quantity, *(settings or [])]
    named = quantity in (None, "model")  # by the table of models
    config = config_of(settings, memory_budget, params, {"model": {"name": "any"}} if named else None)
    from meshtune.api import plan as api
    from meshtune.model.census_cache import LoraShape
    from meshtune.report.plan import documents

    with working(api.PLANNING) as count:
        if quantity is None:
            cluster, longest = api.longest_sequences(config, tool=tool, log=log)
            document = documents.models_that_fit(longest, cluster, LoraShape().r, config.global_batch_size)
        else:
            found = api.largest(config, quantity, tool=tool, log=log, count=count)
            document = documents.largest(quantity, *found)
    show(document, as_json=as_json)


def export(
    tool: Annotated[str, typer.Argument(metavar="TOOL", help="that will run it, such as deepspeed")],
    settings: Settings = None,
    *,
    to: Annotated[Path, typer.Option(help="the folder to write into")] = FOLDER,
    gpus: Gpus = None,
    sort: Sort = "speed",
    by: By = None,
    budget: Budget = None,
    memory_budget: MemoryBudget = None,
    top: Top = TOP,
    full: Full = False,
    plot: Plot = None,
    width: PlotWidth = None,
    as_json: AsJson = False,
) -> None:
    """Plan for another tool, and write the chosen layout as its configuration."""
    config = config_of(settings, memory_budget)
    from meshtune.tools.export import check

    check(tool, config)
    search(
        config, settings or [], tool=tool, export_to=expanded(to), top=top, full=full,
        plot=pictures_to(plot, width), as_json=as_json, gpus=gpus or (), sort=sort, by=by, budget=budget,
    )  # fmt: skip


SUBCOMMANDS = {"explain": explain, "compare": compare, "max": largest, "export": export}


def config_of(
    settings: list[str] | None,
    memory_budget: str | None,
    params: str | None = None,
    defaults: dict[str, Any] | None = None,
) -> "Config":
    """The settings of the command line. memory_budget, params: as the options. defaults: as `config.load`.

    Raises UserError as `config.load`, and for a model that is named with --params.
    """
    file, overrides = split(settings)
    announce(file)
    from meshtune import config
    from meshtune.plan.cluster import with_memory_budget
    from meshtune.plan.models import PREFIX

    if params:
        if named := [override for override in overrides if override.startswith("model.name=")]:
            raise UserError(
                f"--params plans a typical Llama instead of a model; leave {', '.join(named)} out."
            )
        overrides = [*overrides, f"model.name={PREFIX}{params}"]
    return with_memory_budget(config.load(file, overrides, defaults), memory_budget)


def search(
    config: "Config",
    settings: Sequence[str],
    *,
    tool: str,
    top: int,
    full: bool,
    plot: "Target | None",
    as_json: bool,
    export_to: Path | None = None,
    verify: int = 0,
    **clusters: Any,
) -> None:
    """Print the best layout with its figures; all reasons and the `top` best layouts if `full`.

    settings: words of the command line that `meshtune train` takes too. tool: that runs the layout. plot: for
    charts; None: none. export_to: the folder that gets the tool's configuration; None: none. verify:
    how many of the best layouts are dry-run, 0 or more. clusters: gpus, sort, by and budget, as
    `api.plan.plan` takes them. Raises as that, and as `verify.verified`.
    """
    from meshtune.api import plan as api
    from meshtune.report.dryrun import beside
    from meshtune.report.plan import documents, panels
    from meshtune.report.plan.screen import CommandLine

    with working(api.PLANNING) as count:
        best = api.plan(config, **clusters, tool=tool, log=log, count=count)
        count("comparing the layout with others and with other batches …")
        written = write_export(config, best, export_to) if export_to else None
        line = CommandLine.of(["meshtune", *sys.argv[1:]], settings, config)
        document = documents.answer(best, top, written, line=line, whole=full)
        if as_json:
            len(document.facts)  # which are searched for when they are first read
    if not as_json or not verify:
        show(document, as_json=as_json)
    if verify:
        simulated = verification.verified(config, best.best(verify))
        facts = {**document.facts, "verified": simulated}
        show(replace(beside.verified(simulated), facts=facts), as_json=as_json)
    if plot:
        sizes = best.by_size if clusters["gpus"] else None
        with working("searching for other batches and cluster sizes to draw") as count:
            drawn = panels.panels(best, best.best(top), sizes, best.batches(count))
        draw(plot, documents.answer(best, top, written, line=line, drawn=drawn))


def explain_layouts(
    config: "Config",
    layouts: Sequence[str],
    *,
    tool: str,
    side_by_side: bool,
    plot: "Target | None",
    as_json: bool,
) -> None:
    """Print memory and time of each layout, part by part, the reasons against it, and its levers.

    layouts: as text; what they leave open, the planner chooses. tool: that runs them. side_by_side: in one
    table. plot: for charts of them; None: no charts. Raises UserError for a text that isn't a layout.
    """
    from meshtune.api import plan as api
    from meshtune.report.plan import documents

    with working(api.PLANNING):
        explanations = api.explained(config, layouts, tool=tool, log=log)
    show(documents.explained(explanations, in_one_table=side_by_side), as_json=as_json)
    if plot:
        drawn = documents.explained_panels(explanations)
        draw(plot, documents.explained(explanations, drawn=drawn))


def draw(plot: "Target", document: "Document") -> None:
    """Write the pictures of a document, and print where they are."""
    with working(f"drawing {counted(len(document.panels), 'picture')}") as count:
        plot.write(document, count)
    log(f"pictures in {plot.path}")


def runs_of(words: Sequence[str]) -> list[str]:
    """The run folders among the words; [] where they are layouts.

    Raises UserError for runs and layouts in one list, and for folders that are not runs.
    """
    from meshtune.rundir import RunDir

    runs = [word for word in words if RunDir(expanded(word)).metrics_file.is_file()]
    if folders := [word for word in words if word not in runs and expanded(word).is_dir()]:
        raise UserError(
            f"plan compare {', '.join(folders)}: there is no metrics.jsonl in it; name a run's folder."
        )
    if runs and (others := [word for word in words if word not in runs]):
        raise UserError(
            f"plan compare names the run {', '.join(runs)} and {', '.join(others)}: name either run "
            "folders, which hold metrics.jsonl, or layouts."
        )
    return runs


def compare_runs(
    runs: Sequence[str], overrides: Sequence[str], *, unused: Sequence[str], as_json: bool
) -> None:
    """Print each finished run's measured parts next to the predicted ones, and the constants that are off.

    overrides: settings of the cluster, for today's plan. unused: words that runs have no use for, which are
    refused. Raises UserError as `api.compare.compared`.
    """
    if unused:
        raise UserError(
            f"{name} has no use in plan compare of runs, whose layout and config.yaml are planned: write "
            "several runs with commas (RUN,RUN), and leave other words out."
            for name in unused
        )
    announce(None)
    from meshtune.api import plan as api
    from meshtune.api.compare import compared
    from meshtune.report.draw.document import Document
    from meshtune.report.study import compared_tables

    with working(api.PLANNING):
        entries = compared(runs, overrides, log=log)
    tables = [table for entry in entries for table in compared_tables(entry)]
    show(Document("runs", tables, entries[0] if len(entries) == 1 else {"runs": entries}), as_json=as_json)


def write_export(config: "Config", answer: "Answer", folder: Path) -> "Written":
    """Write the chosen layout into `folder` as the configuration of the tool that it was planned for.

    Raises UserError, with nothing written, if a file exists already.
    """
    from meshtune.tools.export import export, write

    tool, choice = answer.workload.tool, answer.choice
    work, node = answer.workload.work, choice.cluster.node
    exported = export(
        tool.name, config, choice.layout, blocks=int(work.blocks), gpus_per_node=node,
        adapts_experts=work.adapts_experts,
    )  # fmt: skip
    return write(tool, exported, choice.layout, folder)
