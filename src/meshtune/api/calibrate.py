"""Calibrate: fit the planner's few constants to measured runs, and write a cluster file with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import datetime
from typing import Any

from meshtune import __version__
from meshtune.api.plan import Log, StrPath, cluster_of_run, folders_of, read_runs, silent, workload_of_run
from meshtune.config import Config, load
from meshtune.errors import UserError, expanded
from meshtune.plan.calibration import CAPPED, CONSTANTS, Calibration, Planned, calibrated, check_one_machine
from meshtune.plan.cluster import Cluster, cluster_of
from meshtune.plan.hardware import GIGA, catalogue, cluster_table, kind_table, stacks
from meshtune.plan.step_parts import MeasuredRun
from meshtune.rundir import RunDir, write_text_atomically
from meshtune.sections import ClusterConfig
from meshtune.study.probe_kind import significant, text_of
from meshtune.units import counted

FILE = "calibrated.toml"
DIGITS = 5  # of a constant in the file


def calibrate(
    runs: Sequence[StrPath],
    *,
    cluster: StrPath | None = None,
    out: StrPath = FILE,
    hold_out: Sequence[StrPath] = (),
    log: Log = silent,
) -> dict[str, Any]:
    """Fit constants of a machine to finished runs on it, and write its cluster file with them.

    Returns what was fitted, what was left and why, and the errors before and after on runs that were left out
    of the fit. runs: run folders of train and of `bench --out`, or folders of them. cluster: the machine's
    file, by `meshtune probe`; None: that of the runs' settings, else the catalogue's kind of their GPU. out:
    the file to write, which must not exist. hold_out: runs that no constant is fitted to, for the errors; ():
    each quarter is predicted by constants fitted to the others. Raises UserError, with every reason, for
    folders without timed steps, runs of several machines, and for too few; for processors without a file.
    """
    from meshtune.api.probe import check_writable

    file = expanded(out)
    check_writable(file)
    measured = read_runs([*runs, *hold_out])
    check_one_machine([run for run, _ in measured])
    configs = [load(folder.config_file) for _, folder in measured]
    document, here = start_of(
        [run for run, _ in measured], configs, None if cluster is None else str(cluster)
    )
    planned = [
        Planned.of(run, workload_of_run(config, run, log), here)
        for (run, _), config in zip(measured, configs, strict=True)
    ]
    kept = {folder.resolve() for folder in folders_of(runs)}
    apart = [folder.path.resolve() for folder in map(RunDir, folders_of(hold_out))]
    held = [folder.path.resolve() in apart for _, folder in measured]
    if doubled := sorted(str(path) for path in kept & set(apart)):
        raise UserError(f"{', '.join(doubled)}: named to be fitted and by --hold-out; name each once.")
    log(f"fitting constants to {counted(len(held) - sum(held), 'run')} …")
    found = calibrated(planned, highest_shares(document, here), held if hold_out else None)
    changed = changed_constants(document, here, found)
    write_text_atomically(file, text_of(with_constants(document, changed, found), file.name))
    for name, facts in (result := found.as_dict())["fitted"].items():
        facts["before"], facts["after"] = (changed[name][end] for end in (0, 1))
    return result | {"file": str(file), "runs": [run.as_dict() for run in found.fitted_on]}


def start_of(
    runs: Sequence[MeasuredRun], configs: Sequence[Config], file: str | None
) -> tuple[dict[str, Any], Cluster]:
    """(Tables of the cluster file from which a fit starts, the cluster that it describes).

    file: by `meshtune probe`; None: the one that all configs name, else a file of the kind and links of the
    first run's GPUs. Raises UserError for devices that are in no file and not in the catalogue.
    """
    files = {config.cluster_config.hardware for config in configs}
    if file := file or (files.pop() if len(files) == 1 else None):
        document = cluster_table(file)
        return document, cluster_of(ClusterConfig(hardware=file, gpu=document["cluster"]["gpu"]))
    here = cluster_of_run(configs[0], runs[0])
    here = replace(here, node=max(run.layout.world // run.nodes for run in runs))
    if not here.timed or here.gpu.name not in catalogue():
        raise UserError(
            f"The speed of {runs[0].facts.get('device')} is in no catalogue: run `meshtune probe --out "
            "my-cluster.toml` on its machine, and add --cluster my-cluster.toml."
        )
    kind = kind_table(here.gpu.name) | {
        "link": here.link / GIGA, "network": here.network / GIGA, "node": here.node,
        "efficiency": dict(here.gpu.efficiency),
        "source": f"The catalogue's {here.gpu.name}, calibrated by runs.",
    }  # fmt: skip
    settings = {"gpu": f"this-{here.gpu.name}", "gpus_per_node": here.node}
    return {"cluster": settings | {"network_share": here.network_share}, "kind": kind}, here


def highest_shares(document: Mapping[str, Any], cluster: Cluster) -> dict[str, float]:
    """Largest value of each constant that is at most 1, with any number of ranks."""
    tables = [cluster.gpu.efficiency, *document["kind"].get("shared", ())]
    tables.append({"network_share": cluster.network_share})
    names = {name for table in tables for name in table} & CONSTANTS.keys() & CAPPED
    return {name: max(table[name] for table in tables if name in table) for name in names}


def changed_constants(
    document: Mapping[str, Any], cluster: Cluster, found: Calibration
) -> dict[str, tuple[float, float]]:
    """Value of each fitted constant before and after, for one rank where it differs with their number."""
    usual = {"update_memory": 1.0, "network_share": cluster.network_share}
    usual |= stacks()["meshtune"] | dict(cluster.gpu.efficiency)
    return {
        name: (usual[name], significant(usual[name] * factor, DIGITS))
        for name, factor in found.factors.items()
    }


def with_constants(
    document: Mapping[str, Any], changed: Mapping[str, tuple[float, float]], found: Calibration
) -> dict[str, Any]:
    """The tables of the calibrated file: those of the probe's with the constants, and [calibrated]."""
    made = deepcopy(dict(document))
    kind = made["kind"]
    for name, (_, after) in changed.items():
        if name == "network_share":  # the cluster's, not the kind's
            made["cluster"][name] = after
            continue
        kind.setdefault("efficiency", {})[name] = after
        for table in kind.get("shared", ()):
            if name in table:
                table[name] = significant(table[name] * found.factors[name], DIGITS)
    facts = found.as_dict()
    made["calibrated"] = {
        "meshtune": __version__,
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "fitted": [f"{name}: {before:.4g} -> {after:.4g}" for name, (before, after) in changed.items()],
        "left": [f"{name}: {why}" for name, why in found.left.items()],
        "held_out": [
            {"of": name, "runs": score["after"]["runs"], "mean_before": score["before"]["mean"],
             "mean_after": score["after"]["mean"]}
            for name, score in facts["held_out"].items()
        ],
        "runs": [run.as_dict() for run in found.fitted_on],
    }  # fmt: skip
    return made
