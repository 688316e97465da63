"""`meshtune plan --verify N`: dry-run the best layouts of a plan; prediction and simulation side by side.

The dry run executes the training step, which planning never imports: it is a process of its own, one for all
layouts.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtune.errors import NothingFits, UserError
from meshtune.plan.programs import MESHTUNE
from meshtune.units import GIB

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshtune.config import Config
    from meshtune.plan.search import Choice

Document = dict[str, Any]  # of `dryrun --json`, of one layout


def check(tool: str) -> None:
    """Raise UserError for a plan for another tool, whose step can't be simulated."""
    if tool != MESHTUNE.name:
        raise UserError(f"--verify runs meshtune's own training step, not that of {tool}; leave --for out.")


def verified(config: "Config", choices: Sequence["Choice"]) -> list[Document]:
    """Dry-run these layouts of one cluster, and return a document of each; progress goes to stderr.

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


def shown(documents: Sequence[Document]) -> "RenderableType":
    """Tables of the verified layouts: a row each, then each by category and part; then `conclusions`."""
    from rich.console import Group
    from rich.text import Text

    from meshtune.report.dryrun.beside import layouts_table, side_by_side

    tables = [layouts_table(documents), *map(side_by_side, documents)]
    return Group(Text(), *tables, *map(Text, conclusions(documents)))


def conclusions(documents: Sequence[Document]) -> Iterator[str]:
    """Yield sentences where the simulation does not confirm the plan's order."""
    best, fitting = documents[0], [document for document in documents if document["fits"]]
    if not fitting:
        yield "None of these layouts fits when simulated; verify more of them, or plan with --memory-budget."
        return
    if not best["fits"]:
        yield (
            f"{best['layout']} does not fit when simulated; the best one that does is {fitting[0]['layout']}."
        )
    if all(document["time"] for document in fitting):
        quickest = min(fitting, key=lambda document: document["time"]["seconds"])
        if quickest is not fitting[0]:
            less = 1 - quickest["time"]["seconds"] / fitting[0]["time"]["seconds"]
            yield (
                f"Simulated, {quickest['layout']} is the fastest that fits, {less:.1%} less time than "
                f"{fitting[0]['layout']}."
            )
