"""Bytes that torch's allocator reserves for large models on GPUs: the planner's closed form beside dry runs.

    python validation/memory_reserved.py [--only 8b,gemma] [--json FILE.json] [--of FILE.json] [--table FILE]

Both sides are reserved bytes of the fullest pipeline rank's kind in the second step: tensors and what the
allocator holds beside them, with expandable segments as `meshtune train` sets them. CUDA's context and
communicators are left out: neither side measures them.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from memory_cases import LARGE
from memory_rows import planned, workload_of

from meshtune.dryrun.ranks import Tell, trace_ranks
from meshtune.dryrun.requests import replay_steps
from meshtune.dryrun.workspaces import Workspaces
from meshtune.dryrun.world import Job, trace_rank
from meshtune.layout import AXES, Layout
from meshtune.placement.columns import Columns
from meshtune.placement.ranks import rank_at
from meshtune.plan.accounting import stack_accounting
from meshtune.plan.memory.states import Step
from meshtune.plan.memory.timeline import Liveness
from meshtune.plan.search import stages_of
from meshtune.plan.workload import Workload
from meshtune.rundir import write_text_atomically
from meshtune.units import GIB

LIMIT = 0.03
PAGE = Path(__file__).parent / "memory-reserved.md"
HEAD = """# Memory that torch's allocator reserves, planned and dry-run

Written by `python validation/memory_reserved.py --table validation/memory-reserved.md`. GiB on the fullest
rank in the second step: bf16, sequences of 8192 tokens (OLMo 2: 4096), H100, expandable segments, without
CUDA's context and communicators.

| case | tensors, simulated | reserved, simulated | reserved, planned | difference |
| --- | ---: | ---: | ---: | ---: |
"""
# ZeRO-1 and -2, which memory_cases.py has at small sizes alone
MORE = ("llama-3.1-8b zero2x64-mb1-ga2-selective", "llama-3.1-8b zero1x64-mb1-ga2-full")


def cases() -> Iterator[tuple[str, Job]]:
    """(Name, job) of each case."""
    yield from LARGE.items()
    for name in MORE:
        model, layout = name.split()
        like = next(job for other, job in LARGE.items() if other.split()[0] == model)
        yield name, replace(like, layout=Layout.parse(layout))


def reserved_by(job: Job, rank: int, tell: Tell) -> dict[str, int]:
    """Bytes of a rank's second step, in a process of its own."""
    steps = trace_rank(job, rank, tell).steps
    replay = replay_steps(steps, workspaces=Workspaces("hopper"), expandable=True)[-1]
    return {"tensors": steps[-1].peak()[0], "reserved": replay.reserved}


def simulate(job: Job) -> dict[str, int]:
    """Dry-run the ranks that the planner tells apart, and return the fullest one's bytes."""
    at_start = dict.fromkeys(AXES, 0)
    ranks = [rank_at(job.layout, at_start | {"pp": place}) for _, place in planned(job).ranks]
    found = trace_ranks(partial(reserved_by, job), ranks, job.layout.world)
    return max(found, key=lambda each: each["reserved"])


def predict(workload: Workload, layout: Layout) -> float:
    """Return the planner's reserved bytes of the fullest rank."""
    columns = Columns.of([layout])
    accounting = stack_accounting(workload.stack, workload.precision)
    accounting = replace(accounting, context=0.0, communicator=0.0)
    stages = stages_of(workload, columns)
    events = Liveness(Step(workload.work, columns, accounting, workload.seq_len, stages)).timeline()
    return max(float(np.max(sum(parts.values()))) for parts in events.values())


def table(found: Mapping[str, Mapping[str, int]]) -> str:
    """The page, as Markdown."""
    lines, jobs = [], dict(cases())
    for name, held in found.items():
        prediction = predict(workload_of(jobs[name]), jobs[name].layout)
        sizes = " | ".join(f"{size / GIB:.2f}" for size in (held["tensors"], held["reserved"], prediction))
        lines.append(f"| {name} | {sizes} | {prediction / held['reserved'] - 1:+.1%} |\n")
    return HEAD + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="comma-separated parts of the names of cases")
    parser.add_argument("--json", type=Path, help="where the simulated bytes go")
    parser.add_argument("--of", type=Path, help="what --json wrote, to compare again")
    parser.add_argument("--table", type=Path, help="where the page goes; default: the terminal")
    options = parser.parse_args()
    found = json.loads(options.of.read_text()) if options.of else {}
    for name, job in cases() if not options.of else ():
        if any(part in name for part in options.only.split(",")):
            found[name] = simulate(job)
            print(f"{name} done", file=sys.stderr, flush=True)
            if options.json:
                write_text_atomically(options.json, json.dumps(found, indent=1) + "\n")
    text = table(found)
    if options.table:
        write_text_atomically(options.table, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
