"""`meshtune plan`: predict every parallel layout on a cluster, and choose."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from meshtune import units
from meshtune.commands import verify as verification
from meshtune.commands.options import AsJson, Settings, announce, layout_words, show, split
from meshtune.commands.working import working
from meshtune.errors import UserError, expanded

if TYPE_CHECKING:
    from meshtune.config import Config
    from meshtune.plan.answer import Answer
    from meshtune.tools.export import Written

PLANNING = "counting the model and ranking layouts"
MOST_COMPARED = 6  # layouts in one table
TOP = 10  # layouts shown without --top
FOLDER = Path("plan-export")  # of an export without --to
Gpus = Annotated[
    str | None,
    typer.Option(metavar="N,NxKIND,…", help="compare clusters, such as 16,32 or 8xh100-sxm,8xmi300x"),
]
By = Annotated[
    str | None, typer.Option(metavar="TIME", help="the longest time of the run, such as 48h or 2d12h")
]
Most = Annotated[
    str | None, typer.Option("--max", metavar="WHAT", help="the largest model, seq_len or batch that fits")
]
MemoryBudget = Annotated[
    str | None, typer.Option(metavar="SIZE", help="fill at most this much of each GPU: 70GiB")
]


def plan(
    settings: Settings = None,
    explain: Annotated[
        list[str] | None, typer.Option(metavar="LAYOUT,…", help="each layout's memory and time, part by part")
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(metavar="LAYOUT,…|RUN,…", help="side by side; runs: beside their plan")
    ] = None,
    gpus: Gpus = None,
    sort: Annotated[str, typer.Option(help="what the first is best in: speed, cost, gpus, memory")] = "speed",
    goal: Annotated[str | None, typer.Option(hidden=True)] = None,
    by: By = None,
    budget: Annotated[float | None, typer.Option(help="the most that the run may cost")] = None,
    most: Most = None,
    params: Annotated[
        str | None,
        typer.Option(metavar="N", help="plan a typical Llama of N parameters (13e9, 13B) instead of a model"),
    ] = None,
    tool: Annotated[
        str | None,
        typer.Option("--for", metavar="TOOL", help="plan for the tool that will run it; --export implies it"),
    ] = None,
    memory_budget: MemoryBudget = None,
    top: Annotated[int | None, typer.Option(min=1, help=f"layouts to show, {TOP} by default")] = None,
    verify: Annotated[int | None, typer.Option(min=1, help="best layouts to dry-run beside it")] = None,
    plot: Annotated[Path | None, typer.Option(help="pictures: a file ending in .html, .png or .svg")] = None,
    export: Annotated[
        str | None, typer.Option(metavar="TOOL", help="write the plan as another tool's configuration")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help=f"the folder that --export writes into; {FOLDER} by default")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory and step time of every parallel layout on a cluster, and choose. Needs no GPU and no
    data.
    """
    file, overrides = split(settings)
    announce(file)
    from meshtune import config
    from meshtune.plan.cluster import with_memory_budget

    runs = [] if explain else runs_of(compare)
    layouts = [] if runs else layouts_of(explain, compare)
    comparing = bool(gpus or by or budget is not None or goal or sort != "speed")
    check_options(
        bool(layouts or runs), most, export, comparing=comparing, plot=plot, top=top, to=to, verify=verify
    )
    plot, to = plot and checked(plot), expanded(to or FOLDER)
    if runs:
        check_run_options(file, plot=plot, tool=tool, params=params, memory_budget=memory_budget)
        return compare_runs(runs, overrides, as_json=as_json)
    runner = tool_of(tool, export, verify)
    if params:
        overrides = with_typical_model(overrides, params, export)
    resolved = with_memory_budget(config.load(file, overrides), memory_budget)
    if layouts:
        explain_layouts(
            resolved, layouts, tool=runner, side_by_side=bool(compare), plot=plot, as_json=as_json
        )
    elif most:
        show_largest(resolved, most, tool=runner, as_json=as_json)
    else:
        best = compare_layouts(
            resolved, Clusters(gpus or (), sort, goal, by, budget), tool=runner,
            export_to=to if export else None, top=top or TOP, verify=verify or 0, as_json=as_json,
        )  # fmt: skip
        if plot:
            draw(best, plot, top=top or TOP, compare_sizes=bool(gpus), settings=settings or [])


def check_options(
    layouts: bool,
    most: str | None,
    export: str | None,
    *,
    comparing: bool,
    plot: Path | None,
    top: int | None,
    to: Path | None,
    verify: int | None,
) -> None:
    """Raise UserError for options that the question asked has no use for.

    layouts: whether --explain or --compare name any. comparing: whether clusters are compared or sorted.
    Others: as the options; None: not given.
    """
    problems = []
    if (layouts and (export or comparing or most)) or (most and (plot or export or comparing)):
        problems.append(
            "--explain, --compare and --max answer one question: --plot goes with the first two; ask for "
            "--export, --gpus, --sort, --by and --budget without them."
        )
    if top and (layouts or most):
        problems.append(
            f"--top {top} is the number of layouts that a search shows; --explain, --compare and --max have "
            "no use for it."
        )
    if verify and (layouts or most):
        problems.append(
            f"--verify {verify} dry-runs the best layouts of a search; for layouts of your own use "
            "meshtune dryrun --layout."
        )
    if to and not export:
        problems.append(f"--to {to} is the folder that --export writes into; add --export TOOL.")
    if problems:
        raise UserError(problems)


class Clusters(NamedTuple):
    """Options on the clusters that are compared, as `api.plan.plan` takes them."""

    gpus: str | tuple[()]
    sort: str
    goal: str | None  # the old name of `sort`
    by: str | None
    budget: float | None


def compare_layouts(
    config: "Config",
    clusters: Clusters,
    *,
    tool: str,
    export_to: Path | None,
    top: int,
    verify: int,
    as_json: bool,
) -> "Answer":
    """Print the `top` best layouts with the reasons, and return the whole answer.

    tool: that runs the layout. export_to: the folder that gets the tool's configuration; None: none. verify:
    how many of the best layouts are dry-run, 0 or more. Raises as `api.plan.plan`, as `verify.verified`, and
    UserError, before anything is predicted, for settings that can't be exported.
    """
    from meshtune.api import plan as api
    from meshtune.report.plan import terminal
    from meshtune.tools.export import check

    if export_to:
        check(tool, config)
    with working(PLANNING):
        best = api.plan(config, **clusters._asdict(), tool=tool, log=notice)
    written = write_export(config, best, export_to) if export_to else None
    facts = best.as_dict(top) | ({"export": written.as_dict()} if written else {})
    if not as_json or not verify:
        show(facts, terminal.answer(best, top, written), as_json=as_json)
    if verify:
        documents = verification.verified(config, best.best(verify))
        show(facts | {"verified": documents}, verification.shown(documents), as_json=as_json)
    return best


def checked(plot: Path) -> Path:
    """The file of --plot, without ~. Raises UserError if no picture can be written into it."""
    from meshtune.report.plan.pictures import check

    check(plot := expanded(plot))
    return plot


def tool_of(tool: str | None, export: str | None, verify: int | None = None) -> str:
    """Return the name of the tool to plan for.

    tool, export, verify: as in --for, --export and --verify; None: not given. Raises UserError for a name
    that is unknown, or two that differ, and for another tool's plan that is to be verified.
    """
    from meshtune.plan.programs import MESHTUNE
    from meshtune.tools.export import check_tool

    if export:
        check_tool(export)
    if tool and tool != MESHTUNE.name:
        check_tool(tool, "--for")
    if tool and export and tool != export:
        raise UserError(
            f"--for {tool} with --export {export}: an export is planned for its tool; drop --for."
        )
    runner = export or tool or MESHTUNE.name
    if verify:
        verification.check(runner)
    return runner


def explain_layouts(
    config: "Config",
    layouts: Sequence[str],
    *,
    tool: str,
    side_by_side: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print memory and time of each layout, part by part, the reasons against it, and its levers.

    layouts: as text; what they leave open, the planner chooses. tool: that runs them. side_by_side: in one
    table. plot: a file for charts of them; None: no charts. Raises UserError for a text that is no layout.
    """
    from meshtune.api.plan import explained
    from meshtune.report.plan import pictures, terminal

    with working(PLANNING):
        explanations = explained(config, layouts, tool=tool, log=notice)
    entries = [one.as_dict() for one in explanations]
    facts = entries[0] if len(entries) == 1 else {"layouts": entries}
    printed = terminal.compared(explanations) if side_by_side else terminal.explained(explanations)
    show(facts, printed, as_json=as_json)
    if plot:
        pictures.write_explained(plot, explanations)
        notice(f"pictures in {plot}")


def runs_of(compare: Sequence[str] | None) -> list[str]:
    """The run folders of --compare; [] where it names layouts or is not given.

    Raises UserError for runs beside layouts, and for folders that are no run.
    """
    from meshtune.rundir import RunDir

    words = layout_words("--compare", compare)
    runs = [word for word in words if RunDir(expanded(word)).metrics_file.is_file()]
    if folders := [word for word in words if word not in runs and expanded(word).is_dir()]:
        raise UserError(
            f"--compare {', '.join(folders)}: no run, there is no metrics.jsonl in it; name a run's folder."
        )
    if runs and (others := [word for word in words if word not in runs]):
        raise UserError(
            f"--compare names the run {', '.join(runs)} beside {', '.join(others)}: name run folders, which "
            "hold metrics.jsonl, or layouts alone."
        )
    return runs


def check_run_options(
    file: str | None,
    *,
    plot: Path | None,
    tool: str | None,
    params: str | None,
    memory_budget: str | None,
) -> None:
    """Raise UserError for words that --compare of runs has no use for.

    file: a config file that is named; None: none. Others: as the options; None: not given.
    """
    options = {"--plot": plot, "--for": tool, "--params": params, "--memory-budget": memory_budget}
    unused = [*([file] if file else []), *(name for name, value in options.items() if value)]
    if unused:
        raise UserError(
            f"{name} has no use in --compare of runs, whose layout and config.yaml are planned; leave it out."
            for name in unused
        )


def compare_runs(runs: Sequence[str], overrides: Sequence[str], *, as_json: bool) -> None:
    """Print each finished run's measured parts beside the predicted ones, and the constants that are off.

    overrides: settings of the cluster, for today's plan. Raises UserError as `api.compare.compared`.
    """
    from rich.console import Group

    from meshtune.api.compare import compared
    from meshtune.report.comparison import tables

    with working(PLANNING):
        documents = compared(runs, overrides, log=notice)
    facts = documents[0] if len(documents) == 1 else {"runs": documents}
    printed = (table.rendered() for document in documents for table in tables(document))
    show(facts, Group(*printed), as_json=as_json)


def show_largest(config: "Config", quantity: str, *, tool: str, as_json: bool) -> None:
    """Print the largest `quantity` (model, seq_len or batch) that fits, with its best layout.

    tool: that runs it. Raises NothingFits if not even the smallest fits.
    """
    from meshtune.api.plan import largest
    from meshtune.report.plan import terminal

    with working(PLANNING):
        value, choice = largest(config, quantity, tool=tool, log=notice)
    facts = {quantity: value} | choice.as_dict()
    show(facts, terminal.largest(quantity, value, choice), as_json=as_json)


def draw(answer: "Answer", file: Path, *, top: int, compare_sizes: bool, settings: Sequence[str]) -> None:
    """Draw an answer into `file` (.html, .png or .svg) and print its name on stderr.

    top: layouts that are shown. compare_sizes: draw also the best layout of each number of GPUs that was
    asked for. settings: words of the command line that `meshtune train` takes too.
    """
    from meshtune.report.plan import pictures
    from meshtune.report.plan.page import Asked

    asked = Asked(shlex.join(["meshtune", *sys.argv[1:]]), shlex.join(settings))
    notice("searching for other batches and cluster sizes to draw …")
    pictures.write(file, answer, top, compare_sizes=compare_sizes, asked=asked)
    notice(f"pictures in {file}")


def write_export(config: "Config", answer: "Answer", folder: Path) -> "Written":
    """Write the chosen layout into `folder` as the configuration of the tool that it was planned for.

    Raises UserError, with nothing written, if a file exists already.
    """
    from meshtune.tools.export import export, write

    tool, choice = answer.workload.tool, answer.choice
    blocks, node = int(answer.workload.work.blocks), choice.cluster.node
    exported = export(tool.name, config, choice.layout, blocks=blocks, gpus_per_node=node)
    return write(tool, exported, choice.layout, folder)


def notice(text: str) -> None:
    """Print a line of the planner on stderr."""
    units.notice(f"meshtune: {text}")


def layouts_of(explain: Sequence[str] | None, compare: Sequence[str] | None) -> list[str]:
    """The layouts of --explain or --compare, each as text; [] without these options.

    Raises UserError for both options at once, for one layout to compare and for more than MOST_COMPARED.
    """
    if explain and compare:
        raise UserError("--explain and --compare name layouts; use one of them for all.")
    layouts = layout_words("--compare" if compare else "--explain", explain or compare)
    if compare and not 2 <= len(layouts) <= MOST_COMPARED:
        raise UserError(
            f"--compare {','.join(compare)}: it takes 2 to {MOST_COMPARED} layouts, such as "
            "--compare zero3x8-mb1-ga8,zero2x8-mb1-ga8, or folders of finished runs."
        )
    return layouts


def with_typical_model(overrides: Sequence[str], parameters: str, export: str | None) -> list[str]:
    """The overrides, and one that names the typical Llama of this many parameters.

    parameters: as text, 13e9 or 13B. Raises UserError for a model among `overrides`, and for an export, which
    needs one that exists.
    """
    from meshtune.plan.models import PREFIX

    problems = [
        f"--params plans a typical Llama instead of a model; leave {override} out."
        for override in overrides
        if override.startswith("model.name=")
    ]
    if export:
        problems.append("--export needs a model that exists; name it instead of --params.")
    if problems:
        raise UserError(problems)
    return [*overrides, f"model.name={PREFIX}{parameters}"]
