"""Error bars of the planner: how far predictions are from published runs that no constant was fitted to.

    python validation/accuracy.py [--apply] [--memory]

Of a stack on a GPU kind with LEAST_ROWS rows or more, time, by band (`accuracy.BANDS`): the mean error where
each quarter of the rows is predicted by constants fitted to the other three; memory: the mean error of
published peaks. Of any other stack, kind or band, time: the mean over clusters, each predicted by constants
fitted to the others (`fit.py --leave-out`), so that a cluster with many runs counts as one; memory: the same
mean with the allocator's reserve and communicators as [meshtune] guesses them.
`--apply` writes them to accuracy.toml, where the planner reads them; `--memory` leaves times, whose fits take
minutes, as they are there.
"""

import argparse
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from fit import FITTED_ON, PLAN, clusters, fitted_on, parts, unseen
from measured import (
    LARGE,
    PLAYBOOK,
    RATES,
    SMALL,
    Row,
    flops_per_token,
    gpu_of,
    origin_of,
    origins,
    read,
    stack_of,
    throughput,
    why_not,
)
from peaks import accounting_of, peaks, published, why_apart
from playbook import group_of

from meshtune.layout import Layout
from meshtune.plan.accounting import Accounting, stack_accounting
from meshtune.plan.accuracy import BANDS, LEAST_ROWS, band_of
from meshtune.plan.hardware import catalogue
from meshtune.rundir import write_text_atomically

FILE = PLAN / "accuracy.toml"
QUARTERS = 4
HEAD = """\
# Mean errors of predictions in percent, and the number of published runs they are of, by stack and GPU kind,
# of time also by band (accuracy.py); [unmeasured]: of all others. Written by `python validation/accuracy.py
# --apply`, which says how they are computed, from the rows of validation/data/.
"""

# (stack, GPU kind, band, "" for memory) -> (mean error in percent, rows)
Errors = Mapping[tuple[str, str, str], tuple[float, int]]
UNMEASURED = ("unmeasured", "")  # any other stack or kind


def mean_errors(
    rows: Sequence[Row], predicted: np.ndarray, measured: np.ndarray, bands: Sequence[str]
) -> Errors:
    """Mean errors of each stack on each GPU kind in each band that has LEAST_ROWS rows.

    predicted, measured, bands: one value per row, of any quantity; bands "": the quantity has none.
    """
    among, wrong = origins(), 100 * abs(predicted / measured - 1)
    alike: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, error, band in zip(rows, wrong, bands, strict=True):
        origin = origin_of(row, among)
        assert origin is not None
        alike[stack_of(row, origin), gpu_of(row, origin), band].append(float(error))
    return {key: (float(np.mean(some)), len(some)) for key, some in alike.items() if len(some) >= LEAST_ROWS}


def bands_of(rows: Sequence[Row], predicted: np.ndarray) -> np.ndarray:
    """The band of each row (`accuracy.BANDS`), as the planner would put it. predicted: tokens/s/GPU."""
    found = []
    for row, speed in zip(rows, predicted, strict=True):
        peak = getattr(catalogue()[row["gpu"]], RATES[row["precision"]])
        layout = Layout(dp_replicate=int(row["dp"]), tp=int(row["tp"]), pp=int(row["pp"]), cp=int(row["cp"]))
        found.append(band_of(layout, float(row["gpus_per_node"] or 8), speed * flops_per_token(row) / peak))
    return np.array(found)


def guessed(row: Row) -> Accounting:
    """The row's accounting with an allocator and communicators that nobody has measured."""
    guess = stack_accounting("meshtune", "bf16")
    return replace(
        accounting_of(row),
        reserved=guess.reserved,
        own_streams=guess.own_streams,
        communicator=guess.communicator,
    )


def time_errors() -> Errors:
    """Errors of predicted speeds; it fits the constants once for each quarter and each cluster: minutes."""
    rows = fitted_on(FITTED_ON)
    names, predicted = clusters(rows), unseen(rows, clusters(rows))
    bands, wrong = bands_of(rows, predicted), 100 * abs(predicted / speeds(rows) - 1)
    elsewhere: dict[tuple[str, str, str], tuple[float, int]] = {}
    for band in BANDS:  # below LOW_MFU the wider one: few sources have rows there
        own = bands == band
        means = [float(wrong[own & (names == name)].mean()) for name in dict.fromkeys(names[own])]
        at_least = elsewhere.get((*UNMEASURED, band.removesuffix("_low")), (0.0, 0))
        elsewhere[*UNMEASURED, band] = max((float(np.mean(means or [0.0])), int(own.sum())), at_least)
    return quarter_errors(rows) | elsewhere


def quarter_errors(rows: Sequence[Row]) -> dict[tuple[str, str, str], tuple[float, int]]:
    """Errors of predicted speeds of each stack on each GPU kind in each band: four fits.

    Each leaves out a quarter of every cluster's rows, of the Playbook's a quarter of its groups.
    """
    quarters = parts(rows, QUARTERS)
    groups = np.array([group_of(row) if row["file"] == PLAYBOOK.name else "" for row in rows])
    for part, name in enumerate(sorted({*groups} - {""})):
        quarters[groups == name] = part % QUARTERS
    predicted = unseen(rows, quarters)
    return dict(mean_errors(rows, predicted, speeds(rows), bands_of(rows, predicted).tolist()))


def speeds(rows: Sequence[Row]) -> np.ndarray:
    """Measured tokens/s/GPU."""
    return np.array([throughput(row) for row in rows])


def memory_errors() -> Errors:
    """Errors of predicted peaks."""
    among = origins()
    every = [row for file in (*LARGE, SMALL, PLAYBOOK) for row in read(file) if not why_not(row, among)]
    rows = [row for row in every if row["peak_mem_gib"] and not row.get("state") and not why_apart(row)]
    wrong, names = 100 * abs(peaks(rows, accounting=guessed) / published(rows) - 1), clusters(rows)
    elsewhere = float(np.mean([wrong[names == name].mean() for name in dict.fromkeys(names)]))
    cells = mean_errors(rows, peaks(rows), published(rows), [""] * len(rows))
    return dict(cells) | {(*UNMEASURED, ""): (elsewhere, len(rows))}


def stored(quantity: str) -> Errors:
    """The errors in accuracy.toml."""
    tables = tomllib.loads(FILE.read_text("utf-8"))
    cells = {UNMEASURED: tables.pop(UNMEASURED[0])}
    cells |= {(stack, gpu): cell for stack, gpus in tables.items() for gpu, cell in gpus.items()}
    found: dict[tuple[str, str, str], tuple[float, int]] = {}
    for (stack, gpu), cell in cells.items():
        if quantity == "time":
            found |= {(stack, gpu, band): (own[0], own[1]) for band, own in cell.get("time", {}).items()}
        elif "memory" in cell:
            found[stack, gpu, ""] = (cell["memory"], cell["memory_rows"])
    return found


def text(time: Errors, memory: Errors) -> str:
    """The text of accuracy.toml."""
    lines = [HEAD]
    for key in sorted({found[:2] for found in (*time, *memory)}):
        lines.append(f"[{'.'.join(filter(None, key))}]")
        bands = [(band, time[*key, band]) for band in BANDS if (*key, band) in time]
        if bands:
            cells = ", ".join(f"{band} = [{percent:.1f}, {rows}]" for band, (percent, rows) in bands)
            lines.append(f"time = {{ {cells} }}")
        if (*key, "") in memory:
            percent, rows = memory[*key, ""]
            lines += [f"memory = {percent:.1f}", f"memory_rows = {rows}"]
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--apply", action="store_true", help=f"write them to {FILE.name}")
    parser.add_argument("--memory", action="store_true", help="leave the errors of times as they are")
    options = parser.parse_args()
    found = text(stored("time") if options.memory else time_errors(), memory_errors())
    print(found, end="")
    if options.apply:
        write_text_atomically(FILE, found)


if __name__ == "__main__":
    main()
