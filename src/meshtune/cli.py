"""The command line: one thin function per command.

What a command needs is imported inside it, so that `meshtune --help` answers at once.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshtune.errors import Interrupted, NonFinite, RankFailed, UserError
from meshtune.rundir import RunDir, disk_is_full

if TYPE_CHECKING:
    from meshtune.config import Config
    from meshtune.launch import Rank

app = typer.Typer(
    name="meshtune",
    help="Plan, train and measure the fine-tuning of Hugging Face language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="a config file, section.key=value, or both"),
]
Target = Annotated[
    list[str],
    typer.Argument(metavar="TARGET [KEY=VALUE]...", help="a run folder, a model folder or a config file"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout, all else on stderr")]


def main() -> None:
    """The console script: runs the command and turns what ends it into an exit code (errors.py)."""
    try:
        app()
    except (UserError, NonFinite, Interrupted, RankFailed) as error:
        problems = error.problems if isinstance(error, UserError) else (str(error),)
        for problem in problems:
            print(f"meshtune: {problem}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if not disk_is_full(error):
            raise
        print(f"meshtune: {error}. Make room, and run the command again.", file=sys.stderr)
        sys.exit(UserError.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def split(settings: list[str] | None) -> tuple[str | None, list[str]]:
    """The config file, if one is named, and the key=value overrides. Raises UserError for a second file."""
    words = settings or []
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise UserError(
            f"Several config files are named: {', '.join(files)}; name one, and change it by "
            "section.key=value."
        )
    return (files[0] if files else None), [word for word in words if "=" in word]


def show_run(run: RunDir, *, as_json: bool) -> None:
    """Write the run's report and print what it came to, also when it was stopped."""
    from rich.console import Console

    from meshtune.report.run import report, summary, tables

    if reason := report.try_report(run):  # the model is on the disk; the report can be drawn later
        print(f"meshtune: {reason}", file=sys.stderr)
    if as_json:
        show_json(summary.summarise(run).as_dict())
    else:
        console = Console()
        console.print(tables.run_summary(run))
        if run.samples():
            console.print(tables.samples_table(run))


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


@app.command()
def train(
    settings: Settings = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="ranks to start here; default: as many as the layout has, or as there are GPUs"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model: full or LoRA, from data files to a Hugging Face folder and a report. Starts its own
    ranks, or is one of those that torchrun or srun started.
    """
    file, overrides = split(settings)
    from meshtune import config, launch

    resolved = config.load(file, overrides)
    # Before ranks are forked: they share what is imported. And what can't run is refused.
    from meshtune.train import build, loop  # noqa: F401

    ranks, device = ranks_of(resolved, nproc)
    if ranks > 1 and not launch.joined():
        layout = build.layout_of(resolved, ranks)
        build.attention_of(resolved, layout, ranks)
    launch.run(train_rank, resolved, as_json, ranks=ranks, device=device)


def ranks_of(config: "Config", nproc: int | None) -> tuple[int, str]:
    """(how many ranks train, "cpu" or "cuda"): those that were started, or that `nproc`, the layout or the
    GPUs ask for.

    Raises UserError for a number that the layout, or the GPUs, can't have.
    """
    import torch

    from meshtune import launch

    wanted = config.train.device
    device = "cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu"
    if place := launch.place_of(os.environ):
        if nproc:
            raise UserError(
                f"--nproc {nproc} starts ranks here, but this is already rank {place.rank} of {place.world}; "
                "leave --nproc out, and let torchrun or srun start all ranks."
            )
        return place.world, device
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    world = config.partial_layout.world
    if world is None:
        return nproc or gpus or 1, device
    if nproc and nproc != world:
        raise UserError(
            f"--nproc {nproc}, but layout {config.layout} is for {world} ranks; leave --nproc out, or change "
            "the layout."
        )
    if gpus and world > gpus:
        raise UserError(
            f"Layout {config.layout} needs {world} GPUs, but torch sees {gpus}; change the layout, start it "
            "on several machines by torchrun or srun, or use train.device=cpu."
        )
    return world, device


def train_rank(rank: "Rank", config: "Config", as_json: bool) -> None:
    """What each rank of a training run does."""
    from meshtune.train import build, loop

    run = build.build(config)
    rank.keep_log(run.folder.logs)
    world = run.world
    axes = {str(axis.group.group_name): axis.name for axis in world.axes if axis.group is not None}
    axes |= {group.group_name: "all ranks" for group in (world.host, world.storage) if group is not None}
    rank.explain(lambda: f"step {run.progress.step}", axes, spins=world.device.type == "cuda")
    try:
        loop.train(run)
    finally:
        if rank.main:
            show_run(run.folder, as_json=as_json)


@app.command()
def plan(
    settings: Settings = None,
    explain: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help="memory and time of one layout, part by part")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="compare clusters of these numbers of GPUs")
    ] = None,
    goal: Annotated[str, typer.Option(help="speed, cost, gpus or memory")] = "speed",
    most: Annotated[
        str | None,
        typer.Option("--max", metavar="WHAT", help="the largest model, seq_len or batch that fits"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="layouts to show")] = 10,
    plot: Annotated[Path | None, typer.Option(help="pictures: a file ending in .html, .png or .svg")] = None,
    export: Annotated[
        str | None, typer.Option(metavar="TOOL", help="write the plan as another tool's configuration")
    ] = None,
    to: Annotated[Path, typer.Option(help="the folder that --export writes into")] = Path("plan-export"),
    as_json: AsJson = False,
) -> None:
    """Predict memory and step time of every parallel layout on a cluster, and choose. Needs no GPU and no
    data.
    """
    file, overrides = split(settings)
    from meshtune import config
    from meshtune.plan import answer
    from meshtune.report.plan import terminal
    from meshtune.train.planning import lighter, workload_of

    if (explain or most) and (plot or export or gpus):
        raise UserError(
            "--explain and --max answer one question; ask for --plot, --export and --gpus without them."
        )
    if plot:  # before anything is looked for
        from meshtune.report.plan.pictures import check

        check(plot)
    if export:
        from meshtune.plan.export import known

        known(export)
    resolved = config.load(file, overrides)
    workload = workload_of(resolved, lambda text: print(f"meshtune: {text}", file=sys.stderr))
    if explain:
        choice, against = answer.explain(resolved, workload, explain)
        show(choice.as_dict() | {"against": against}, terminal.explained(choice, against), as_json=as_json)
    elif most:
        value, choice = answer.largest(resolved, workload, most)
        found = {most: value} | choice.as_dict()
        show(found, terminal.largest(most, value, choice), as_json=as_json)
    else:
        asked = answer.ask(
            resolved, workload, sizes=numbers(gpus, "--gpus"), goal=goal, others=partial(lighter, resolved)
        )
        show(asked.as_dict(top), terminal.answer(asked, top), as_json=as_json)
        if plot:
            from meshtune.report.plan import pictures

            pictures.write(plot, asked.plan, sizes=asked.plans if gpus else None, batches=asked.batches())
            print(f"meshtune: pictures in {plot}", file=sys.stderr)
        if export:
            from meshtune.plan.export import write

            for sentence in write(export, resolved, asked.best(500), to):
                print(f"meshtune: {sentence}", file=sys.stderr)


def numbers(text: str | None, option: str) -> list[int]:
    """`8,16,32` -> [8, 16, 32]. Raises UserError for what is no number."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if bad := [word for word in words if not word.isdecimal() or int(word) < 1]:
        raise UserError(f"{option} {text}: '{bad[0]}' is no number of GPUs; write {option} 8,16,32.")
    return sorted({int(word) for word in words})


def show(found: dict[str, Any], renderable: Any, *, as_json: bool) -> None:
    """One result, as JSON or for people."""
    if as_json:
        show_json(found)
    else:
        from rich.console import Console

        Console().print(renderable)


@app.command()
def data(
    settings: Settings = None,
    samples: Annotated[int, typer.Option(help="documents to show, labelled parts in colour")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show what training would see: rows, tokens, labelled share, lengths, packing, samples. Trains
    nothing.
    """
    file, overrides = split(settings)
    from meshtune import config

    resolved = config.load(file, overrides)
    from meshtune.data import inspect
    from meshtune.train import commands

    description = commands.describe_data(resolved, samples=samples)
    if as_json:
        show_json(description)
    else:
        from rich.console import Console

        inspect.show(description, Console())


@app.command("eval")
def evaluate(target: Target, as_json: AsJson = False) -> None:
    """Loss and perplexity on held-out data, with answers compared word for word where asked
    (eval.exact_match=N).
    """
    from meshtune.train import commands

    result = commands.evaluate_target(*split(target))
    if as_json:
        show_json(result)
    else:
        from rich.console import Console

        from meshtune.report.facts import facts_table

        Console().print(facts_table(result, title="evaluation"))


@app.command()
def generate(
    target: Target,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="may be repeated; else lines of stdin")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Answer prompts, wrapped as in training (chat template, or prompt and separator)."""
    prompts = prompt or [line.rstrip("\n") for line in sys.stdin]
    from meshtune.train import commands

    found = commands.generate_target(
        *split(target), prompts, max_new_tokens=max_new_tokens, temperature=temperature
    )
    if as_json:
        show_json([{"prompt": p, "answer": a} for p, a in zip(prompts, found, strict=True)])
    else:
        for answer in found:
            print(answer)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="a run folder, or an adapter folder")],
    to: Annotated[Path, typer.Argument(help="the folder to write")],
    merge: Annotated[bool, typer.Option("--merge", help="fold the LoRA adapter into the weights")] = False,
    step: Annotated[
        int | None, typer.Option(help="export this checkpoint instead of the final model")
    ] = None,
    push_to: Annotated[str | None, typer.Option(help="hub id to upload the folder to")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a Hugging Face folder from a run: the final model or a checkpoint, an adapter or merged."""
    from meshtune.train import commands

    folder = commands.export_run(run, to, merge=merge, step=step, push_to=push_to)
    show_json({"folder": str(folder)}) if as_json else print(folder)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="a run folder")], as_json: AsJson = False) -> None:
    """Write the run's report.html again from what the run folder holds."""
    folder = RunDir(run)
    if not folder.config_file.exists() and not folder.metrics_file.exists():
        raise UserError(f"{run} holds no run: neither config.yaml nor metrics.jsonl is there.")
    from meshtune.report.run.report import write_report

    page_file = write_report(folder)
    show_json({"report": str(page_file)}) if as_json else print(page_file)


@app.command()
def env(
    model: Annotated[str | None, typer.Option(help="a hub id or folder: what this family supports")] = None,
    as_json: AsJson = False,
) -> None:
    """Versions, devices, and what a model's family supports."""
    from meshtune.train import commands

    description = commands.describe_environment(model)
    if as_json:
        show_json(description)
    else:
        from rich.console import Console

        from meshtune.report.facts import capability_table, facts_table

        console = Console()
        console.print(facts_table(description["versions"] | description["devices"], title="environment"))
        if model:
            rows = [(row["feature"], row["supported"], row["why"]) for row in description["features"]]
            console.print(capability_table(rows, title=f"{model} ({description['type']})"))
