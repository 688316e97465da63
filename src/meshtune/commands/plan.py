"""`meshtune plan`: predict every parallel layout on a cluster, and choose.

Other questions on the same settings are sub-commands with options of their own (SUBCOMMANDS):
`meshtune plan explain LAYOUT`, `compare`, `max` and `export`.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshtune.commands.command import WithSubcommands
from meshtune.commands.complete import complete_layout
from meshtune.commands.options import (
    AsJson,
    Budget,
    By,
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
from meshtune.errors import NothingFits, UserError, expanded
from meshtune.plan.programs import MESHTUNE
from meshtune.units import GIB, counted, working
from meshtune.yaml_tree import YAML

if TYPE_CHECKING:
    from meshtune.config import Config
    from meshtune.plan.answer import Answer
    from meshtune.plan.search import Choice
    from meshtune.report.draw.document import Document
    from meshtune.report.draw.picture import Target
    from meshtune.report.dryrun.beside import Facts
    from meshtune.tools.export import Written

MOST_COMPARED = 6  # layouts in one table
TOP = 10  # layouts shown without --top
FOLDER = Path("plan-export")  # of an export without --to
Gpus = Annotated[
    str | None,
    typer.Option(metavar="N,NxKIND,…", help="compare clusters, such as 16,32 or 8xh100-sxm,8xmi300x"),
]
Sort = Annotated[str, typer.Option(help="what the first is best in: speed, cost, gpus, memory")]
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
        check_verified(tool)
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


class Plan(WithSubcommands):
    """`meshtune plan`."""

    subcommands = SUBCOMMANDS

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return super().make_context(info_name, in_new_words(args), parent, **extra)


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
    `api.plan.plan` takes them. Raises as that, and as `verified`.
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
        simulated = verified(config, best.best(verify))
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


# --verify #


def check_verified(tool: str) -> None:
    """Raise UserError for a plan for another tool, whose step can't be simulated."""
    if tool != MESHTUNE.name:
        raise UserError(f"--verify runs meshtune's own training step, not that of {tool}; leave --for out.")


def verified(config: "Config", choices: Sequence["Choice"]) -> "list[Facts]":
    """Dry-run these layouts of one cluster, and return the facts of each; progress goes to stderr. A process
    of its own does it: planning never imports the training step.

    Raises SystemExit with the exit code of a dry run that failed; it has printed why.
    """
    cluster = choices[0].cluster
    layouts = ",".join(str(choice.layout) for choice in choices)
    words = ["--layout", layouts, "--gpus", str(cluster.gpus), "--gpu", cluster.gpu.name, "--json"]
    words.append(f"cluster.memory_gib={cluster.memory / GIB}")  # of GPUs seen here it is the driver's
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.yaml")
        file.write_text(config.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "meshtune", "dryrun", str(file), *words]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode not in (0, NothingFits.exit_code) or not ended.stdout:
        raise SystemExit(ended.returncode)
    document = json.loads(ended.stdout)
    return document.get("layouts", [document])
