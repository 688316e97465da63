"""`meshtune env`: versions, devices, and what a model's family supports."""

import os
import sys
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from meshtune.commands.options import AsJson, announce, log, show
from meshtune.units import PYTORCH, human, working


def env(
    model: Annotated[str | None, typer.Option(help="a hub id or folder: what this family supports")] = None,
    as_json: AsJson = False,
) -> None:
    """Versions, devices, and what a model's family supports."""
    announce(model or "this machine")
    with working(PYTORCH) if model else nullcontext():
        description = environment(model)
    from rich.text import Text

    from meshtune.report.draw.document import Document
    from meshtune.report.draw.table import Column, Table, facts

    tables = [facts(description["versions"] | description["devices"], title="environment")]
    if model:
        rows = description["features"]
        supported = {True: Text("yes", style="green"), False: Text("no", style="yellow")}
        columns = (
            Column("", [row["feature"] for row in rows], heading=True),
            Column("", [supported[row["supported"]] for row in rows]),
            Column("", [row["why"] for row in rows], words=True, style="dim"),
        )
        tables.append(Table(f"{model} ({description['type']})", columns))
    show(Document("environment", tables, description), as_json=as_json)


def environment(model: str | None) -> dict[str, Any]:
    """The document that `env --json` prints: "versions" and "devices", each name -> text.

    model: a hub id or folder; adds "type" and "features". Reads its configuration, not its weights.
    """
    import psutil

    from meshtune.launch.installed import has_no_gpu, processor_name, versions
    from meshtune.launch.place import threads_of
    from meshtune.launch.rank import cores

    devices: dict[str, Any] = {
        "cpu": f"{processor_name()}, {cores()} cores, {human(psutil.virtual_memory().total)}",
        "threads": threads_of(os.environ, cores()),  # of a run with one rank
    }
    if not has_no_gpu():
        from meshtune.attention import flash
        from meshtune.train.run_row import device_of, gpus_of, versions

        for index, (name, memory) in enumerate(gpus_of(device := device_of("auto"))):
            devices[f"cuda:{index}"] = f"{name}, {human(memory)}"
        if device.type == "cuda":
            version, *_ = *flash.versions_here(device), flash.BUILT_IN
            devices["attention"] = f"FlashAttention {version} is installed"
    report: dict[str, Any] = {"versions": versions() | {"executable": sys.executable}, "devices": devices}
    if model:
        from meshtune.api.model_file import model_file
        from meshtune.model.capabilities import capabilities
        from meshtune.model.load import read_config

        with model_file(model) as (file, notes):
            config = read_config(file, model, trust_remote_code=False)
        for note in notes:
            log(note)
        report["type"] = config.model_type
        report["features"] = [
            {"feature": feature, "supported": supported, "why": why}
            for feature, supported, why in capabilities(config)
        ]
    return report
