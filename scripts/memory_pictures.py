"""The pictures of docs/memory.md: what fills a GPU during a step, from dry runs of Llama-3.1-8B.

    python scripts/memory_pictures.py [FOLDER]

The trainer's own step runs on fake tensors (`meshtune dryrun`), so nothing is drawn by hand. It prints the
tables of the page, and takes some minutes.
"""

import sys
from dataclasses import replace
from pathlib import Path

from meshtune.dryrun.simulation import Simulation
from meshtune.meter.trace import CATEGORIES
from meshtune.report.draw.kinds import Areas, Timeline
from meshtune.report.draw.picture import write
from meshtune.report.draw.table import Table
from meshtune.report.dryrun.document import panels, reserved
from meshtune.report.dryrun.panels import memory_panel, shown, starts_of
from meshtune.report.dryrun.tables import largest_table, module_table, peak_notes, peak_table
from meshtune.units import duration

MODEL, SEQ_LEN, GPUS = "meta-llama/Llama-3.1-8B", 4096, 8
MODES = {"none": "", "selective": "-selective", "full": "-full"}  # recomputation -> end of the layout's name
LEVELS, WIDTH, HEIGHT, TOP = 160, 1000, 190, 12  # levels of a step; px; rows of the table of tensors


def simulated(mode: str) -> Simulation:
    """The dry run with this recomputation."""
    from meshtune.api.dryrun import dryrun  # torch is needed for nothing else here

    settings = {
        "model": {"name": MODEL},
        "data": {"seq_len": SEQ_LEN},
        "cluster": {"gpu": "h100-sxm", "gpus": GPUS},
        "train": {"global_batch_size": GPUS, "compile": False},  # the page has every tensor of a module
    }
    return dryrun(settings, layout=f"zero3x{GPUS}-mb1-ga1{MODES[mode]}")


def memory_picture(file: Path, runs: dict[str, Simulation]) -> Path:
    """Draw memory over the first and later steps of each run, over axes of equal length."""
    drawn = [titled(mode, run) for mode, run in runs.items()]
    highest = max(sum(sizes) for panel in drawn for sizes in zip(*panel.parts.values(), strict=True))
    rows = [[replace(panel, y_end=highest)] for panel in drawn]
    title = f"Llama 3.1 8B on {GPUS} H100, zero3x{GPUS}, a sequence of {SEQ_LEN:,} tokens a GPU"
    return write(file, rows, title=title, width=WIDTH)


def titled(mode: str, run: Simulation) -> Areas:
    """Memory of the run's rank, with the recomputation as its title."""
    trace = run.traces[0]
    panel = memory_panel(trace, starts=starts_of(trace, run.times), most=LEVELS)
    return replace(panel, key=mode, title=f"recompute: {mode}", height=HEIGHT)


def streams_picture(file: Path, run: Simulation) -> Path:
    """Draw the streams of one rank over a later step."""
    (streams,) = (panel for panel in panels(run) if isinstance(panel, Timeline))
    return write(file, [[streams]], title=f"Llama 3.1 8B, {run.layout}: a later step", width=WIDTH)


def peaks(runs: dict[str, Simulation]) -> str:
    """Table of the peaks by category of all runs, as Markdown, without categories below a MiB."""
    tables = {mode: peak_table(run.traces, reserved(run)) for mode, run in runs.items()}
    cells = {mode: {row[0]: row for row in table.rows} for mode, table in tables.items()}
    parts = [*map(shown, CATEGORIES)]
    names = [*parts, *(name for name in cells["none"] if name not in parts)]
    heads = ("", *(f"`{mode}`, {step}" for mode in tables for step in ("first", "later")))
    rows = [
        (name, *(cells[mode].get(name, [""] * 4)[place] for mode in tables for place in (1, 3)))
        for name in names
    ]
    large = [row for row in rows if "iB" in "".join(row[1:])]
    seconds = (duration(step.seconds) for run in runs.values() for step in run.times)
    large.append(("the step takes", *seconds))
    return Table.of_rows("", heads, tuple(large), ("",)).markdown()


def main(folder: str = "docs/images") -> None:
    runs = {mode: simulated(mode) for mode in MODES}
    print(memory_picture(Path(folder, "memory-steps.svg"), runs))
    print(streams_picture(Path(folder, "memory-streams.svg"), runs["none"]))
    print(peaks(runs))
    for run in runs.values():
        notes = peak_notes(run.traces[0])
        print("\n".join(("", *notes)))
        print(f"\n{run.layout}\n{largest_table(run.traces[0], run.layout, TOP).markdown()}")
        print(module_table(run.traces[0]).markdown())


if __name__ == "__main__":
    main(*sys.argv[1:2])
