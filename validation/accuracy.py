"""Error bars of the planner: how far predictions are from published runs that no constant was fitted to.

    python validation/accuracy.py [--apply] [--memory]

Of a stack on a GPU kind with LEAST_ROWS rows or more, time: the mean error where each quarter of the rows is
predicted by constants fitted to the other three; memory: the mean error of published peaks. Of any other
stack or kind, time: the mean over clusters, each predicted by constants fitted to the others (`fit.py
--leave-out`), so that a cluster with many runs counts as one; memory: the mean with the allocator's reserve
and communicators as [meshtune] guesses them.
`--apply` writes them to accuracy.toml, where the planner reads them; `--memory` leaves times, whose fits take
minutes, as they are there.
"""

import argparse
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from fit import FITTED_ON, PLAN, clusters, fitted_on, parts, report, unseen
from measured import LARGE, SMALL, Row, gpu_of, origin_of, origins, read, stack_of, throughput, why_not
from peaks import accounting_of, peaks, published, why_apart

from meshtune.plan.accounting import Accounting, stack_accounting
from meshtune.plan.accuracy import LEAST_ROWS
from meshtune.rundir import write_text_atomically

FILE = PLAN / "accuracy.toml"
QUARTERS = 4
HEAD = """\
# Mean errors of predictions in percent, and the number of published runs they are of, by stack and GPU kind;
# [unmeasured]: of all others. Written by `python validation/accuracy.py --apply`, which says how they are
# computed, from the rows of validation/data/.
"""

Errors = Mapping[tuple[str, str], tuple[float, int]]  # (stack, GPU kind) -> (mean error in percent, rows)
UNMEASURED = ("unmeasured", "")  # any other stack or kind


def mean_errors(rows: Sequence[Row], predicted: np.ndarray, measured: np.ndarray) -> Errors:
    """Mean errors of each stack on each GPU kind that has LEAST_ROWS rows; UNMEASURED: of all rows.

    predicted, measured: one value per row, of any quantity.
    """
    among, wrong = origins(), 100 * abs(predicted / measured - 1)
    alike: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, error in zip(rows, wrong, strict=True):
        origin = origin_of(row, among)
        assert origin is not None
        alike[stack_of(row, origin), gpu_of(row, origin)].append(float(error))
    cells = {key: (float(np.mean(some)), len(some)) for key, some in alike.items() if len(some) >= LEAST_ROWS}
    return cells | {UNMEASURED: (float(wrong.mean()), len(wrong))}


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
    _, elsewhere, _ = report(rows, unseen(rows, clusters(rows)))["clusters"]
    return quarter_errors(rows) | {UNMEASURED: (elsewhere, len(rows))}


def quarter_errors(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[float, int]]:
    """Errors of predicted speeds of each stack on each GPU kind that has LEAST_ROWS rows: four fits."""
    errors = dict(mean_errors(rows, unseen(rows, parts(rows, QUARTERS)), speeds(rows)))
    del errors[UNMEASURED]
    return errors


def speeds(rows: Sequence[Row]) -> np.ndarray:
    """Measured tokens/s/GPU."""
    return np.array([throughput(row) for row in rows])


def memory_errors() -> Errors:
    """Errors of predicted peaks."""
    among = origins()
    every = [row for file in (*LARGE, SMALL) for row in read(file) if not why_not(row, among)]
    rows = [row for row in every if row["peak_mem_gib"] and not why_apart(row)]
    elsewhere = mean_errors(rows, peaks(rows, accounting=guessed), published(rows))[UNMEASURED]
    return dict(mean_errors(rows, peaks(rows), published(rows))) | {UNMEASURED: elsewhere}


def stored(quantity: str) -> Errors:
    """The errors in accuracy.toml."""
    tables = tomllib.loads(FILE.read_text("utf-8"))
    cells = {UNMEASURED: tables.pop(UNMEASURED[0])}
    cells |= {(stack, gpu): cell for stack, gpus in tables.items() for gpu, cell in gpus.items()}
    return {
        key: (cell[quantity], cell[f"{quantity}_rows"]) for key, cell in cells.items() if quantity in cell
    }


def text(time: Errors, memory: Errors) -> str:
    """The text of accuracy.toml."""
    lines = [HEAD]
    for key in sorted({*time, *memory}):
        lines.append(f"[{'.'.join(filter(None, key))}]")
        for name, errors in (("time", time), ("memory", memory)):
            if key in errors:
                percent, rows = errors[key]
                lines += [f"{name} = {percent:.1f}", f"{name}_rows = {rows}"]
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
