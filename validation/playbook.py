"""Grade the planner on the Ultra-Scale Playbook's runs, each group of them by constants fitted without it.

    python validation/playbook.py [--folds 13] [--json FILE]

A group is a model on a number of GPUs. The rows of all other sources are always fitted to. Rows in the slow
state and those whose memory is nearly full are printed apart: no constant is fitted to them. Printed: errors
of speed and memory, how much slower than the best measured layout of its group the one ranked first is, and
whether runs that failed are refused. Four minutes.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fit import FITTED_ON, fit, fitted_on, predictor
from measured import FAILED, PLAYBOOK, Row, column, constants_of, origins, read, throughput, why_not
from peaks import capacities, peaks, published
from published import OFF
from published import errors as relative_errors

from meshtune.plan.calibration import folds
from meshtune.rundir import write_text_atomically

HIGH = 10.0  # percent of the peak: the band of MFU that people train in
CLOSE = 15.0  # percent by which the second best layout of a group may be slower, for its choice to be graded
LEAST = 3  # layouts of a group whose choice is graded
LAYOUT = ("dp", "zero_stage", "tp", "pp", "micro_batch")
TOO_LARGE = 1.1  # times the GPU's memory that a failed run needs by `least_bytes`, to be obviously too large


@dataclass(frozen=True)
class Graded:
    """The rows that ran, and what is predicted of each."""

    rows: Sequence[Row]
    speed: np.ndarray  # measured tokens/s/GPU
    fitted: np.ndarray  # predicted by constants fitted to all groups
    unseen: np.ndarray  # predicted by constants fitted without the row's group
    memory: np.ndarray  # measured peak, GiB
    peak: np.ndarray  # predicted

    @property
    def usual(self) -> np.ndarray:
        """True for rows that are not in the slow state, and whose memory is not nearly full."""
        return np.array([not row["state"] for row in self.rows])

    @property
    def high(self) -> np.ndarray:
        return self.usual & (column(self.rows, "mfu_pct") >= HIGH)

    def states(self) -> dict[str, np.ndarray]:
        """Name of a set of rows -> True for its rows."""
        state = np.array([row["state"] for row in self.rows])
        return {
            f"at {HIGH:.0f} % MFU and more": self.high,
            "all": self.usual,
            "slow state": state == "slow",
            "nearly full": state == "nearly full",
        }


def ran() -> list[Row]:
    """The measured runs that can be predicted."""
    among = origins()
    return [row | {"assumed": ""} for row in read(PLAYBOOK) if not why_not(row, among)]


def group_of(row: Row) -> str:
    """The model and the number of GPUs."""
    return f"{row['model'].removeprefix('nanotron-')} on {row['gpus']} GPUs"


def graded(parts: int) -> Graded:
    """The rows, predicted by a fit to everything and by `parts` fits that each leave out some groups."""
    rows, every, start = ran(), fitted_on(FITTED_ON), constants_of(origins())
    predict = predictor(rows, start)
    groups = np.array([group_of(row) for row in rows])
    names = np.unique(groups)
    part_of = dict(zip(names, folds(np.zeros(len(names)), parts), strict=True))
    unseen = np.full(len(rows), np.nan)
    for part in range(parts):
        out = {name for name in names if part_of[name] == part}
        print(f"fit {part + 1} of {parts} …", file=sys.stderr)
        kept = [row for row in every if group_of(row) not in out]  # rows of other files too
        own = np.isin(groups, list(out))
        unseen[own] = predict(fit(kept))[own]
    speed = np.array([throughput(row) for row in rows])
    return Graded(rows, speed, predict(fit(every)), unseen, published(rows), peaks(rows))


def errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, Any]:
    """As errors of published.py, and "low": how many are more than OFF percent too low."""
    return relative_errors(predicted, measured) | {
        "low": int((100 * (predicted / measured - 1) < -OFF).sum())
    }


def choices(found: Graded) -> list[dict[str, Any]]:
    """Each group with LEAST layouts: how much slower than the best measured one the one ranked first is.

    A layout that was measured more than once counts by its median. "gap": how much slower the second best is,
    percent.
    """
    layouts: dict[str, dict[tuple[str, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for place in np.flatnonzero(found.usual).tolist():
        row = found.rows[place]
        layouts[group_of(row)][tuple(row[name] for name in LAYOUT)].append(place)
    answer = []
    for group, each in layouts.items():
        if len(each) < LEAST:
            continue
        speeds = np.array([np.median(found.speed[own]) for own in each.values()])
        ranked = np.array([np.median(found.unseen[own]) for own in each.values()])
        best, second = np.sort(speeds)[::-1][:2]
        names = [_named(layout) for layout in each]
        answer.append({
            "group": group, "layouts": len(each),
            "chosen": names[ranked.argmax()], "best": names[speeds.argmax()],
            "slower": 100 * float(1 - speeds[ranked.argmax()] / best), "gap": 100 * float(1 - second / best),
        })  # fmt: skip
    return sorted(answer, key=lambda each: -each["slower"])


def _named(layout: tuple[str, ...]) -> str:
    dp, zero, tp, pp, micro_batch = layout
    return f"{'zero1x' if zero == '1' else 'dp'}{dp}-tp{tp}-pp{pp}-mb{micro_batch}"


def fits(rows: Sequence[Row]) -> dict[str, Any]:
    """Runs that ran and are refused; of those that failed, how many are said to fit. rows: that ran."""
    among = origins()
    failed = [row | {"assumed": ""} for row in read(FAILED) if not why_not(row, among)]
    refused = peaks(rows, whole=True) > capacities(rows)
    said = peaks(failed, whole=True) <= capacities(failed)
    largest: dict[tuple[str, ...], float] = defaultdict(float)
    for row in rows:
        largest[_family(row)] = max(largest[_family(row)], float(row["micro_batch"]))
    most = np.array([largest[_family(row)] for row in failed])
    micro_batch = column(failed, "micro_batch")
    sets = {
        "obviously too large": least_bytes(failed) > TOO_LARGE * 80e9,
        "twice the largest micro-batch that ran": micro_batch == 2 * most,
        "no larger than one that ran": micro_batch <= most,
    }
    return {
        "ran": len(rows),
        "refused": [row["id"] for row, is_refused in zip(rows, refused, strict=True) if is_refused],
        "failed": len(failed),
        "said to fit": int(said.sum()),
        "sets": {
            name: {"n": int(own.sum()), "said to fit": int((said & own).sum())} for name, own in sets.items()
        },
    }


def _family(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("model", "gpus", "dp", "zero_stage", "tp", "pp"))


def least_bytes(rows: Sequence[Row]) -> np.ndarray:
    """Bytes that a run needs: 6 + 12 a parameter, and 34h a token and block (Korthikanti et al. 2022)."""
    ranks, shards = (
        column(rows, "tp") * column(rows, "pp"),
        np.where(column(rows, "zero_stage") == 1, column(rows, "dp"), 1),
    )
    states = 1e9 * column(rows, "params_b") / ranks * (6 + 12 / shards)
    tokens = column(rows, "micro_batch") * column(rows, "seq_len")
    return states + 34 * column(rows, "hidden") * tokens * column(rows, "layers") / column(rows, "tp")


def answer(found: Graded) -> dict[str, Any]:
    """Everything that is printed."""
    states, picked = found.states(), choices(found)
    slower = [each["slower"] for each in picked]
    close = [each["slower"] for each in picked if each["gap"] <= CLOSE]
    compared = {
        "speed, groups left out": (found.unseen, found.speed),
        "speed, fitted to all": (found.fitted, found.speed),
        "memory": (found.peak, found.memory),
    }
    of_states = {
        title: {name: errors(predicted[own], measured[own]) for name, own in states.items()}
        for title, (predicted, measured) in compared.items()
    }
    choice = {"groups": len(picked), "mean": float(np.mean(slower)), "worst": max(slower)}
    choice |= {"worst of close": max(close, default=0.0), "each": picked}
    return of_states | {"choice": choice, "fits": fits(found.rows)}


def table(found: Mapping[str, Any]) -> str:
    """The answer as text."""
    lines = []
    for title in ("speed, groups left out", "speed, fitted to all", "memory"):
        lines += ["", title]
        for name, e in found[title].items():
            low = f"  {e['low']} more than {OFF:.0f} % too low" if title == "memory" else ""
            means = f"mean {e['mape']:6.1f} %  median {e['median']:6.1f} %  bias {e['bias']:+7.1f} %"
            lines.append(f"  {name:24} n={e['n']:4d}  {means}{low}")
    choice, found_fits = found["choice"], found["fits"]
    refused = found_fits["refused"]
    lines += [
        "",
        f"the choice among measured layouts, {choice['groups']} groups: {choice['mean']:.1f} % slower than "
        f"the best on average, {choice['worst']:.1f} % at worst",
        f"(of those whose second best is within {CLOSE:.0f} %: {choice['worst of close']:.1f} %)",
    ]
    for each in choice["each"]:
        picked = f"{each['chosen']} of {each['layouts']}, best {each['best']}"
        lines.append(f"  {each['group']:22} {each['slower']:5.1f} %  {picked}")
    lines += [
        "",
        f"of {found_fits['ran']} that ran {len(refused)} are refused: {', '.join(refused) or 'none'}",
        f"of {found_fits['failed']} that failed {found_fits['said to fit']} are said to fit",
    ]
    lines += [f"  {e['n']} {name}: {e['said to fit']} said to fit" for name, e in found_fits["sets"].items()]
    return "\n".join(lines[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folds", type=int, default=13, help="parts of the groups that are left out in turn")
    parser.add_argument("--json", type=Path, help="also write the answer to this file")
    options = parser.parse_args()
    print(f"fitting constants {options.folds} times, some 20 seconds each …", file=sys.stderr)
    found = answer(graded(options.folds))
    print(table(found))
    if options.json:
        write_text_atomically(options.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
