"""`meshtune submit`: a run as a job of a cluster, with its limits from the plan.

`meshtune submit status JOB`, `logs` and `cancel` are sub-commands (SUBCOMMANDS).
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.commands.command import WithSubcommands
from meshtune.commands.options import AsJson, Budget, By, Settings, announce, folder_of, log, show, split
from meshtune.units import working

if TYPE_CHECKING:
    from meshtune.config import Config

FOLDER = Path("jobs")  # has a folder for the files of each job that is sent
JobName = Annotated[str, typer.Argument(metavar="JOB", help="as submit printed it, such as slurm:1234")]


def submit(
    settings: Settings = None,
    *,
    to: Annotated[str, typer.Option(metavar="ENGINE", help="what runs the job, such as slurm")],
    write: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="write the job's files there, and submit nothing")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="machines; default: of cluster.gpus, or within the bounds")
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX", help="start with any number of machines between, laid out anew by each start"
        ),
    ] = None,
    by: By = None,
    budget: Budget = None,
    as_json: AsJson = False,
) -> None:
    """Submit a run to a cluster: machines, layout, time limit, stop signal and price are the plan's, and a
    run that is stopped before its end is resumed.

    Later: meshtune submit status JOB, logs JOB and cancel JOB; each has its own --help.
    """
    file, overrides = split(settings)
    folder = folder_of("--write", write)
    least, nodes = machines_of(elastic, nodes)
    announce(file)
    from meshtune import config
    from meshtune.api.plan import PLANNING
    from meshtune.report.draw.document import Document, Section
    from meshtune.submit import engines
    from meshtune.submit.job import job_of
    from meshtune.train.trackers import tracker_problems

    engine = engines.ENGINES[to]
    run, words = config.load(file, overrides), [*([file] if file else []), *overrides]
    check_output(run)
    with working(PLANNING) as count:
        job = job_of(run, words, nodes=nodes, least=least, by=by, budget=budget, log=log, count=count)
    paths = engines.write(files := engines.files_of(run, to, job), folder or FOLDER / job.name)
    lines, name = [*job.comments, f"Written: {', '.join(map(str, paths))}."], None
    lines += [f"On this machine, {problem}" for problem in tracker_problems(run.log.to)]
    if to != "slurm" and "wandb" in run.log.to and "WANDB_" not in "".join(files.values()):
        lines.append("The machines need WANDB_API_KEY, and these files do not name it.")
    if folder is None:
        name = f"{to}:{engine.send(FOLDER / job.name)}"
        lines.append(f"Submitted as {name}; `meshtune submit status {name}` has its state.")
    facts = job.facts() | {"job": name, "files": [*map(str, paths)]}
    show(Document(job.name, [Section("", lines)], facts), as_json=as_json)


def check_output(config: "Config") -> None:
    """Raise UserError, as `train` does, where `output` has another run; its files may be copies."""
    from meshtune.rundir import RunDir
    from meshtune.submit.job import places

    run = RunDir(Path(places(config)[0]))
    if not run.path.exists():
        return
    from meshtune.api.output import decide, differences, settings
    from meshtune.config import load

    config = config.model_copy(update={"output": str(run.path)})
    if run.config_file.exists():
        both = (json.dumps(settings(one)) for one in (config, load(run.config_file)))
        if not any(differences(*(json.loads(re.sub('"/[^"]*/', '"', text)) for text in both))):
            return
    decide(config)


def machines_of(elastic: str | None, nodes: int | None) -> tuple[int | None, int | None]:
    """(The fewest machines, the most) of --elastic, else (None, those of --nodes). Raises UserError for other
    texts than MIN:MAX, and for both options.
    """
    from meshtune.errors import UserError

    if elastic is None:
        return None, nodes
    if nodes is not None:
        raise UserError(f"--nodes {nodes} and --elastic {elastic} both set the machines; leave one out.")
    found = re.fullmatch("([1-9][0-9]*):([0-9]+)", elastic)
    if found is None or int(found[1]) >= int(found[2]):
        raise UserError(f"--elastic {elastic}: write the fewest machines and the most, as in 2:4.")
    return int(found[1]), int(found[2])


def status(job: JobName) -> None:
    """Print the state of a job."""
    from meshtune.submit.engines import found

    engine, number = found(job)
    print(engine.status(number))


def logs(job: JobName) -> None:
    """Print the log of a job, as far as it is written."""
    from meshtune.errors import UserError
    from meshtune.submit.engines import found

    engine, number = found(job)
    if not (text := engine.logs(number)):
        raise UserError(f"The job {number} has written no log yet. {engine.status(number)}")
    print(text, end="")


def cancel(job: JobName) -> None:
    """Cancel a job. A run that has begun saves a checkpoint where the engine gives it time."""
    from meshtune.submit.engines import found

    engine, number = found(job)
    print(engine.cancel(number))


SUBCOMMANDS = {"status": status, "logs": logs, "cancel": cancel}


class Submit(WithSubcommands):
    """`meshtune submit`."""

    subcommands = SUBCOMMANDS
