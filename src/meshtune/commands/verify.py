"""`meshtune plan --verify N`: dry-run the best layouts of a plan; prediction and simulation side by side.

The dry run executes the training step, which planning never imports: it is a process of its own, one for all
layouts.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshtune.errors import NothingFits, UserError
from meshtune.plan.programs import MESHTUNE
from meshtune.units import GIB

if TYPE_CHECKING:
    from meshtune.config import Config
    from meshtune.plan.search import Choice
    from meshtune.report.dryrun.beside import Facts


def check(tool: str) -> None:
    """Raise UserError for a plan for another tool, whose step can't be simulated."""
    if tool != MESHTUNE.name:
        raise UserError(f"--verify runs meshtune's own training step, not that of {tool}; leave --for out.")


def verified(config: "Config", choices: Sequence["Choice"]) -> "list[Facts]":
    """Dry-run these layouts of one cluster, and return the facts of each; progress goes to stderr.

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
