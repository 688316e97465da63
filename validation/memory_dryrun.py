"""The planner's memory against that of dry runs: random small layouts, and large models at their real size.

    python validation/memory_dryrun.py [--only pp2,cp] [--cases small|large] [--json FILE.json]
    python validation/memory_dryrun.py --of FILE.json     # compares what was simulated before

A dry run holds the bytes of real ranks exactly (dryrun_grid.py), so it stands for them: FILE.json has the
form of memory_grid.py's, one entry a case. Each phase's peak of the second step is compared with the
planner's (memory_rows.py), in total and by category. A category's error is its share of the phase's peak, so
that what one counts too much and another too little shows.

    small  cases of memory_cases.py, drawn with a fixed seed: 1 to 8 ranks, every technique, recomputation
           mode and precision, adapters, packed documents; the kernels of CPU and of CUDA
    large  models of plan/models.toml at their real size, the kernels of CUDA
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from memory_cases import LARGE, SMALL
from memory_rows import Row, compare, errors, planned

from meshtune.dryrun.ranks import Tell, trace_ranks
from meshtune.dryrun.world import Job, trace_rank
from meshtune.layout import AXES
from meshtune.meter.trace import OFFLOADS
from meshtune.placement.ranks import rank_at
from meshtune.rundir import write_text_atomically

HEAD = """# The planner's memory beside dry runs

`make validation-memory` writes this page; [memory_dryrun.py](memory_dryrun.py) says what each figure is.
"""
LIMITS = {"small": 0.02, "large": 0.03}  # of a phase's peak and of each of its categories


def simulate(job: Job) -> list[dict[str, Any]]:
    """Dry-run the ranks that `planned` tells apart; return what each held, as `compare` takes it."""
    at_start = dict.fromkeys(AXES, 0)
    ranks = [rank_at(job.layout, at_start | {"pp": place}) for _, place in planned(job).ranks]
    return trace_ranks(partial(held_by, job), ranks, job.layout.world)


def held_by(job: Job, rank: int, tell: Tell) -> dict[str, Any]:
    """Peaks of a rank's two steps, in a process of its own."""
    trace = trace_rank(job, rank, tell)
    steps = [
        {"step": step.step, "phase": phase, "bytes": size, "parts": {k: v for k, v in parts.items() if v}}
        for step in trace.steps
        for phase, (size, parts) in step.peaks.items()
    ]
    later = trace.steps[-1]
    host = [later.host_bytes, *map(later.offloaded_bytes, OFFLOADS)]
    return {"rank": rank, "steps": steps, "host": host}


def tables(rows: Iterable[Row], limit: float) -> str:
    """Return the rows as Markdown. limit: see LIMITS."""
    rows = list(rows)
    wrong = {row.name for row in rows if abs(row.error) > limit}
    shifted = {row.name for row in rows if max(map(abs, row.terms.values())) > limit}
    names = {row.name for row in rows}
    return "\n".join([
        f"{len(names) - len(wrong)} of {len(names)} layouts within {limit:.0%}, "
        f"{len(names) - len(shifted)} in each category: {errors(row.error for row in rows)}.",
        "",
        "| layout | rank | phase | simulated | predicted | error | event | largest error of a category |",
        "| --- | --- | --- | ---: | ---: | ---: | --- | --- |",
        *(
            f"| {row.name} | {row.rank} | {row.phase} | {row.bytes:,.0f} | {row.predicted_bytes:,.0f} | "
            f"{row.error:+.1%} | {row.event} | {worst_term(row)} |"
            for row in rows
        ),
    ])  # fmt: skip


def worst_term(row: Row) -> str:
    """Say which category is furthest off, and by what share of the peak."""
    name, error = next(iter(row.terms.items()))
    return f"{name.replace('_', ' ')} {error:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="comma-separated parts of the names of cases")
    parser.add_argument("--cases", choices=["small", "large"], help="default: both")
    parser.add_argument("--json", type=Path, help="where the simulated bytes go")
    parser.add_argument("--of", type=Path, help="what --json wrote, to compare again")
    parser.add_argument("--table", type=Path, help="where the tables go; default: the terminal")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.of.read_text()) if options.of else {}
    parts = [HEAD]
    for kind, cases in (("small", SMALL), ("large", LARGE)):
        if options.cases not in (None, kind):
            continue
        chosen = {name: job for name, job in cases.items() if wanted(name, options)}
        for name, job in chosen.items() if not options.of else ():
            started = time.perf_counter()
            found[name] = {"ranks": simulate(job)}
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            if options.json:
                write_text_atomically(options.json, json.dumps(found, indent=1) + "\n")
        rows = [
            row
            for name, job in chosen.items()
            if name in found
            for row in compare(name, job, found[name]["ranks"])
        ]
        if rows:
            simulated = len({row.name for row in rows})
            count = f"{simulated} of {len(cases)} cases were simulated."
            parts.append(f"## {kind.capitalize()}\n\n{count}\n{tables(rows, LIMITS[kind])}\n")
    text = "\n".join(parts)
    if options.table:
        write_text_atomically(options.table, text)
    else:
        print(text)


def wanted(name: str, options: argparse.Namespace) -> bool:
    """Whether a case is among those asked for."""
    return any(part in name for part in options.only.split(","))


if __name__ == "__main__":
    main()
