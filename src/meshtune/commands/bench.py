"""`meshtune bench`: time layouts on this machine, beside what was predicted and simulated."""

from typing import Annotated

import typer

from meshtune.commands.complete import complete_layout
from meshtune.commands.options import AsJson, Settings, announce, show, split
from meshtune.errors import NothingFits
from meshtune.units import notice, speed_unit


def bench(
    settings: Settings = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYOUT,…|auto:N",
            help="instead of the config's; auto:N: the planner's N best",
            autocompletion=complete_layout,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps to time, after those that warm up")] = 10,
    limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="for one layout")] = 1800,
    as_json: AsJson = False,
) -> None:
    """Time training steps of layouts on this machine: tokens/s/GPU, MFU, step time by part, memory by
    category, each predicted, simulated and measured. Without data the sequences are random tokens.
    """
    file, overrides = split(settings)
    announce(file)
    words = [word.strip() for text in layouts or () for word in text.split(",") if word.strip()]
    from rich.console import Group

    from meshtune.api.bench import bench as run
    from meshtune.config import load
    from meshtune.meter.causes import Cause
    from meshtune.report.bench import layouts_table, side_by_side
    from meshtune.report.run.tables import cause_lines

    done = run(
        load(file, overrides), layouts=words, steps=steps, limit=limit,
        log=lambda line: notice(f"meshtune: {line}"),
    )  # fmt: skip
    devices = {one["measured"]["device_type"] for one in done if one["measured"]}
    unit = speed_unit(max(one["world"] for one in done), next(iter(devices), "cuda"))
    tables = [layouts_table(done, unit), *(table for one in done for table in side_by_side(one))]
    why = [
        line
        for one in done
        for line in cause_lines([Cause(**cause) for cause in one["causes"]], f"why {one['layout']} is slow")
    ]
    show({"layouts": done}, Group(*(table.rendered() for table in tables), *why), as_json=as_json)
    if not any(one["measured"] for one in done):
        raise NothingFits(f"{one['layout']}: {one['failed']}" for one in done)
