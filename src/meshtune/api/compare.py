"""Compare: finished runs next to what was predicted for them, and the planner's constant that is off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshtune.api.plan import Log, StrPath, cluster_of_run, read_runs, silent, workload_of_run
from meshtune.config import Config, load
from meshtune.errors import UserError
from meshtune.plan.calibration import Planned, parts_off
from meshtune.plan.facts import tensors
from meshtune.plan.search import explained
from meshtune.plan.step_parts import MeasuredRun, predicted_parts
from meshtune.rundir import RunDir

PROBE = "run `meshtune probe --out my-cluster.toml` on its machine"
UNTIMED = f"The speed of its processor is not measured: {PROBE}, and add cluster=my-cluster.toml."
STARTED_UNTIMED = (
    f"It began without predicted seconds: nobody had measured its processor. For later runs {PROBE}, and "
    "train with cluster=my-cluster.toml."
)
STARTED_UNPLANNED = "It began without a prediction: the planner can't count its model or its devices."
Document = dict[str, Any]


def compared(runs: Sequence[StrPath], overrides: Sequence[str] = (), *, log: Log = silent) -> list[Document]:
    """Compare each finished run with its prediction at its start and with today's plan of the same config.

    Each document has `measured`, `at_start` and `today`: seconds of the step and its parts, bytes by category
    (None: not predicted, with the reason under `missing`); `off`: groups of parts whose plan of today is off,
    the largest error first, each with the constants that explain it. overrides: cluster=FILE and other
    settings of the cluster, for today's plan. Raises UserError for other overrides, for folders without timed
    steps, and, with overrides, for a run that can't be planned.
    """
    if others := [word for word in overrides if word.partition("=")[0].strip().split(".")[0] != "cluster"]:
        raise UserError(
            f"plan compare of a run plans its own config.yaml; leave {', '.join(others)} out. Settings of "
            "the cluster can be given, such as cluster=my-cluster.toml."
        )
    return [_compared(run, folder, overrides, log) for run, folder in read_runs(runs)]


def _compared(run: MeasuredRun, folder: RunDir, overrides: Sequence[str], log: Log) -> Document:
    """Return the document of one run."""
    facts = run.facts.get("predicted") or {}
    at_start = {
        "step_seconds": facts.get("step_seconds"),
        "parts": facts.get("parts"),
        "memory": tensors(facts["memory"]) if facts.get("memory") else None,
    }
    caused = folder.rows("cause")
    document: Document = {
        "run": run.name,
        "layout": str(run.layout),
        "steps": run.steps,
        "measured": {
            "step_seconds": run.seconds,
            "parts": dict(run.parts),
            "memory": {name: size for name, size in run.memory.items() if size} or None,
        },
        "at_start": at_start if facts else None,
        "missing": {},
        "causes": [row["cause"] for row in caused],
    }
    if left_out := folder.left_out(caused.left_out):
        document["missing"]["rows"] = left_out
    if not facts:
        document["missing"]["at_start"] = STARTED_UNPLANNED
    elif at_start["parts"] is None:
        document["missing"]["at_start"] = STARTED_UNTIMED
    try:
        config = load(folder.config_file, overrides)
        today = _planned_today(config, run, log)
    except UserError as error:
        if overrides:
            raise
        document["missing"]["today"] = f"It can't be planned today: {' '.join(error.problems)}"
        return document | {"today": None, "off": None, "cluster": None}
    if today["parts"] is None:
        document["missing"]["today"] = UNTIMED
    return document | today.pop("found") | {"today": today, "cluster": config.cluster_config.hardware}


def _planned_today(config: Config, run: MeasuredRun, log: Log) -> Document:
    """Today's prediction of a run, and under `found` the parts that are off. Raises UserError for a model or
    devices that the planner can't predict.
    """
    planned_cluster = cluster_of_run(config, run)
    workload = workload_of_run(config, run, log)
    choice = explained(workload, planned_cluster, run.layout)
    memory = tensors(choice.memory.as_dict())
    if not planned_cluster.timed:
        return {"step_seconds": None, "parts": None, "memory": memory, "found": {"off": None}}
    planned = Planned.of(run, workload, planned_cluster)
    return {
        "step_seconds": choice.seconds.total,
        "parts": predicted_parts(workload, run.layout, planned.machine),
        "memory": memory,
        "found": {"off": [group.as_dict() for group in parts_off(planned)]},
    }
