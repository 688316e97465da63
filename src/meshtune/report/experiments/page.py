"""The page of a sweep, made from its database: counts by status, pictures, all experiments, machine."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from meshtune.report.draw.document import Document, Notes, OnPage, Part, Pictures, Tiles
from meshtune.report.draw.page import text
from meshtune.report.draw.table import facts as facts_of
from meshtune.report.draw.words import MFU
from meshtune.report.experiments.ablation import Ablation
from meshtune.report.experiments.database import read_sweep_rows
from meshtune.report.experiments.panels import panels
from meshtune.report.experiments.rows import DONE, Sweep, sweep_of
from meshtune.report.experiments.table import SCRIPT, table
from meshtune.units import counted

SIMULATED = {
    "planner": "Simulated: the planner predicted every figure of this page; nothing was run.",
    "dryrun": "Simulated: every figure of this page is of dry runs on fake tensors; no device was used.",
}


def sweep_page(
    database: Path,
    may_read: Callable[[Path], bool] = lambda _: True,
    *,
    by: str | None = None,
    color: str | None = None,
) -> Document:
    """Read a sweep and make its page; `facts` counts its experiments by status.

    may_read: as of `Sweep`. by, color: axes of the pictures, as of `Ablation`. Raises UserError for another
    file or axis, NotDrawn without Altair.
    """
    sweep = replace(sweep_of(read_sweep_rows(database)), may_read=may_read)
    ablation = Ablation(sweep, by, color)
    counts = dict(Counter(one.status for one in sweep.experiments).most_common())
    return Document(
        name=sweep.name + (" (simulated)" if sweep.simulated else ""),
        kind="sweep",
        subtitle=_subtitle(sweep),
        parts=(
            Tiles([(status, f"{number:,}") for status, number in counts.items()]),
            Notes([*_cautions(sweep, counts)]),
            Pictures(panels(sweep, ablation)),
            *([ablation.table()] if ablation.gains else []),
            OnPage(table(sweep) if sweep.experiments else ""),
            *_where(sweep),
        ),
        facts={
            "experiments": counts,
            "axes": [one.key for one in ablation.axes],
            "gains": [one._asdict() for one in ablation.gains],
        },
        footer=_footer(sweep),
        scripts={SCRIPT.name: SCRIPT} if sweep.experiments else {},
    )


def _subtitle(sweep: Sweep) -> str:
    """HTML of one line: number of experiments, run, machine, versions."""
    facts = sweep.source.facts
    parts = [counted(len(sweep.experiments), "experiment")]
    if sweep.simulated:
        parts.append(f"simulated ({sweep.simulated})")
    elif facts.get("run"):
        parts.append(str(facts["run"]))
    return text(" · ".join([*parts, *_machine(sweep)]))


def _machine(sweep: Sweep) -> list[str]:
    """Words on the machine and the versions; without the machine where it did not matter."""
    facts, rows, simulated = sweep.source.facts, sweep.source.rows, bool(sweep.simulated)
    machine, versions = facts.get("machine") or {}, facts.get("versions") or {}
    words = []
    if not simulated:
        gpus = f"{counted(facts['gpus'], 'GPU')} " if facts.get("gpus") else ""
        cores = f", {counted(machine['cores'], 'core')}" if machine.get("cores") else ""
        device = facts.get("device") or machine.get("processor") or device_of(rows)
        words.append(f"{gpus}{device}{cores}")
    words += [f"{name} {versions[name]}" for name in ("meshtune", "torch") if versions.get(name)]
    return [word for word in words if word]


def device_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Name of the device of the first experiment that says it, as Slurm's nodes do; "" if none does."""
    measured = ((row["document"] or {}).get("measured") or {} for row in rows)
    return str(next((one["device"] for one in measured if one.get("device")), ""))


def _cautions(sweep: Sweep, counts: Mapping[str, int]) -> list[str]:
    """Sentences on what was simulated, on what is not on the page, and where nothing was run."""
    lines = [SIMULATED.get(sweep.simulated, "")] if sweep.simulated else []
    if unlisted := sweep.source.facts.get("unlisted"):
        lines.append(
            f"{counted(len(unlisted), 'result')} that the sweep's file doesn't list any more: in the "
            "database, but not here."
        )
    lines += [sweep.source.left_out_sentence] if sweep.source.left_out else []
    return lines if counts.get(DONE) else [*lines, "No experiment is done yet, so there is no picture."]


def _where(sweep: Sweep) -> Iterator[Part]:
    """Yield the sweep's file, and what is known of machine and software."""
    facts = dict(sweep.source.facts)
    if file := facts.pop("file", None):
        settings = yaml.safe_dump(file, sort_keys=False, allow_unicode=True)
        yield OnPage(
            f"<section><h2>The sweep's file</h2><details><summary>{text(sweep.name)}.yaml</summary>"
            f"<pre>{text(settings)}</pre></details></section>"
        )
    hidden = ("form", "axes", "name", "unlisted")
    known = {name: value for name, value in facts.items() if name not in hidden}
    yield OnPage(facts_of(known, "Environment"))


def _footer(sweep: Sweep) -> str:
    """How the numbers were made, as HTML."""
    done, seeds = sum(one.status == DONE for one in sweep.experiments), _seeds(sweep.done)
    source = sweep.source.facts.get("source")  # of experiments that no sweep ran
    which = f"those of {source}" if source else "those that were simulated"
    what = (
        f"Figures of an experiment are {which}."
        if sweep.simulated or source
        else "Figures of an experiment are medians over its timed steps; the spread is the distance of their "
        "quartiles, as a share of the median."
    )
    repeated = (
        f" Experiments that differ only in their seed are one point, the median of {seeds}." if seeds else ""
    )
    machine = ", ".join(_machine(sweep))
    return text(f"{counted(done, 'experiment')} done. {what}{repeated} {MFU} {machine}.")


def _seeds(done: Sequence[Any]) -> str:
    """The numbers of seeds in words, "3" or "2 to 3"; "" where every experiment has one."""
    most, least = max((one.repeats for one in done), default=1), min((one.repeats for one in done), default=1)
    return "" if most == 1 else str(most) if most == least else f"{least} to {most}"
