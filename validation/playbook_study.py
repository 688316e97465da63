"""The Ultra-Scale Playbook's study as a page of our own: `make study-playbook`.

    python validation/playbook_study.py --out FOLDER [--page docs/playbook.md]

    playbook.csv, playbook_failed.csv ─> playbook.py predicts ─> sweep.db, as if a sweep had run them
        ├─> report.html and its pictures
        └─> the numbers of the page, between two comments
    examples/sweeps/playbook.yaml ─> meshtune sweep --simulate ─> the grid's layouts, predicted for meshtune

Runs in the slow state and those with nearly full memory are left out of the database; their number and the
errors of their predictions are among the numbers. Five minutes.
"""

import argparse
import math
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from measured import FAILED, Row, origins, read, why_not
from playbook import Graded, answer, graded
from transformers import LlamaConfig

from meshtune.layout import Layout
from meshtune.report.draw.document import Document
from meshtune.report.draw.kinds import Panel
from meshtune.report.draw.part import SHORTENED
from meshtune.report.draw.picture import write
from meshtune.report.draw.words import short
from meshtune.report.experiments.ablation import Ablation
from meshtune.report.experiments.ablation import layout_of as parsed
from meshtune.report.experiments.database import DATABASE, read_sweep_rows
from meshtune.report.experiments.page import sweep_page
from meshtune.report.experiments.rows import Experiment, Sweep, best, sweep_of
from meshtune.rundir import write_text_atomically
from meshtune.study.store import DONE, Outcome, Store
from meshtune.study.sweep_file import Experiment as Asked
from meshtune.units import GIB

ROOT = Path(__file__).parents[1]
SWEEP = ROOT / "examples" / "sweeps" / "playbook.yaml"
SOURCE = "the Ultra-Scale Playbook's runs (nanotron, 2025)"
AXES: tuple[str, ...] = ("model.name", "cluster.gpus", "layout")
FOLDS = 13  # parts of the groups that are left out in turn
NODE = 8  # GPUs
HALF = 40.0  # GiB of an H100's memory
STEPS = {  # field of a layout -> its values, each compared with the one before
    "tp": (1, 2, 4, 8, 16, 32), "pp": (1, 2, 4, 8, 16, 32), "zero": (0, 1), "micro_batch_size": (1, 2, 4, 8)
}  # fmt: skip
CONFIG = {  # column of the rows -> key of a config.json
    "hidden": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "seq_len": "max_position_embeddings",
}  # fmt: skip
speed_of = attrgetter("measured.speed")  # of an experiment
BEGIN, END = "<!-- results: written by validation/playbook_study.py -->", "<!-- end of the results -->"
PICTURES = {  # file of docs/images -> keys of its panels, row by row
    "playbook-best": [["best_layouts"]],
    "playbook-gains": [["gains"]],
    "playbook-speed": [["utilisation"], ["front"]],
    "playbook-predicted": [["step_beside", "memory_beside"], ["regret"]],
}


def name_of(row: Row) -> str:
    """The model's size: "1.34B"."""
    return row["model"].removeprefix("nanotron-").upper()


def layout_of(row: Row) -> Layout:
    dp, size = int(row["dp"]), int(row["micro_batch"])
    zero = int(row["zero_stage"]) if dp > 1 else 0
    return Layout(
        dp_replicate=1 if zero else dp, dp_shard=dp if zero else 1, zero=zero, tp=int(row["tp"]),
        sp=row["sp"] == "1", pp=int(row["pp"]), micro_batch_size=size,
        gradient_accumulation_steps=int(row["global_batch"]) // (size * dp),
    )  # fmt: skip


def asked(row: Row) -> Asked:
    """The experiment that a row is of; its key is the row's table and id."""
    values: list[Any] = [name_of(row), int(row["gpus"]), str(layout_of(row))]
    return Asked(dict(zip(AXES, values, strict=True)), {}, f"{row['file']}: {row['id']}")


def figures(row: Row, *measured: float) -> dict[str, Any]:
    """Columns of an experiment. measured: of a run, (tokens/s/GPU, as predicted, GiB, as predicted)."""
    batch, seq_len, gpus = int(row["global_batch"]), int(row["seq_len"]), int(row["gpus"])
    known = {
        "parameters": round(1e9 * float(row["params_b"])), "global_batch_size": batch, "seq_len": seq_len,
        "model": name_of(row), "gpus": gpus, "world": gpus, "layout": str(layout_of(row)),
    }  # fmt: skip
    if not measured:
        return known
    speed, predicted, memory, peak = measured
    mfu, seconds = float(row["mfu_pct"]) / 100, batch * seq_len / gpus
    return known | {
        "tokens_per_second_per_gpu": speed, "mfu": mfu, "step_seconds": seconds / speed,
        "peak_memory_bytes": None if math.isnan(memory) else memory * GIB,
        "predicted_tokens_per_second_per_gpu": predicted, "predicted_mfu": mfu * predicted / speed,
        "predicted_step_seconds": seconds / predicted, "predicted_peak_bytes": peak * GIB,
    }  # fmt: skip


def write_sweep(folder: Path, found: Graded, failed: Sequence[Row]) -> Path:
    """Write the usual runs and the failed ones as a sweep's database, and return it."""
    each = np.stack([found.speed, found.unseen, found.memory, found.peak], axis=1).tolist()
    ran = [(row, known) for row, known in zip(found.rows, each, strict=True) if not row["state"]]
    outcomes = [Outcome(DONE, figures=figures(row, *known)) for row, known in ran]
    outcomes += [Outcome("failed", "crashed or out of memory", figures(row)) for row in failed]
    states, gpus = [row["state"] for row in found.rows], sorted(int(row["gpus"]) for row in found.rows)
    left_out = f"{states.count('slow')} runs in the slow state, {states.count('nearly full')} nearly full"
    facts = {"name": "The Ultra-Scale Playbook's runs", "source": SOURCE, "left out": left_out}
    file = folder / DATABASE
    file.unlink(missing_ok=True)
    with Store(file) as store:
        store.add([asked(row) for row in [*(row for row, _ in ran), *failed]], AXES)
        device = f"{gpus[0]} to {gpus[-1]} GPUs {found.rows[0]['gpu']}"
        store.describe(facts | {"axes": AXES, "device": device})
        store.finish(dict(enumerate(outcomes, 1)))
    return file


def draw(page: Document, folder: Path) -> list[Path]:
    """Write the pictures of PICTURES, and return them."""
    panels: dict[str, Panel] = {panel.key: panel for panel in page.panels}
    files = []
    for name, rows in PICTURES.items():
        drawn = [[panels[key] for key in row] for row in rows]
        files.append(write(folder / f"{name}.svg", drawn, title="", width=1060))
        write_text_atomically(files[-1], SHORTENED.sub("", files[-1].read_text(encoding="utf-8")))
    return files


def by_group(sweep: Sweep, slow: Mapping[tuple[str, int], int]) -> Iterator[str]:
    """Lines of the table of each model and number of GPUs. slow: number of their runs in the slow state."""
    yield (
        "| model | GPUs | slow runs | layouts | fastest | MFU | peak, GiB | × the median one | best with tp "
        f"{NODE} | best in {HALF:.0f} GiB | ranked first |"
    )
    yield f"| --- |{' ---: |' * 3} --- |{' ---: |' * 6}"
    groups: dict[tuple[float, str, int], list[Experiment]] = {}
    for one in sweep.done:
        groups.setdefault((one.parameters or 0, one.model, one.gpus or 0), []).append(one)
    for (_, model, gpus), some in sorted(groups.items()):
        first = max(some, key=speed_of)
        others = (
            [one for one in some if parsed(one.layout).tp == NODE],
            [one for one in some if (one.measured.peak_gib or HALF) < HALF],
            [max(some, key=lambda one: one.predicted.speed or 0)],
        )
        cells = (
            model, f"{gpus}", f"{slow.get((model, gpus), 0)}", f"{len(some)}",
            " ".join(short(first.layout)), f"{first.measured.mfu or 0:.1%}",
            f"{first.measured.peak_gib or 0:.0f}", f"{speed_of(first) / median(map(speed_of, some)):.1f}",
            *(f"{max(map(speed_of, each)) / speed_of(first):.0%}" if each else "" for each in others),
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def changes(sweep: Sweep) -> Iterator[str]:
    """Lines of the table of the report's gains between neighbouring values, of all layouts and without tp."""
    yield "| with everything else equal | speed | peak memory | pairs | speed without tp | pairs |"
    yield f"| --- |{' ---: |' * 5}"
    for field, pair in ((field, pair) for field, values in STEPS.items() for pair in pairwise(values)):
        some = [
            one
            for one in sweep.experiments
            if one.status == DONE and getattr(parsed(one.layout), field) in pair
        ]
        parts = (some, [one for one in some if parsed(one.layout).tp == 1])
        gains = [gain for part in parts for gain in Ablation(replace(sweep, experiments=tuple(part))).gains]
        if found := [gain for gain in gains if gain.axis == f"layout.{field}"]:
            cells = (f"× {found[0].speed:.2f}", f"× {found[0].memory:.2f}", f"{found[0].pairs}")
            without = (f"× {found[1].speed:.2f}", f"{found[1].pairs}") if found[1:] else ("", "")
            name = f"{field.removesuffix('_size').replace('_', '-')} {pair[0]} → {pair[1]}"
            yield f"| {' | '.join((name, *cells, *without))} |"


def numbers(file: Path, found: Graded) -> Iterator[str]:
    """Yield the lines of the page's block, in Markdown. file: the sweep's database."""
    sweep = sweep_of(read_sweep_rows(file))
    first = [*best(sweep.done, lambda one: (one.model, one.gpus)).values()]
    layouts = [*(parsed(one.layout) for one in first)]
    failed = sum(one.status != DONE for one in sweep.experiments)
    slow, full = (np.array([row["state"] == name for row in found.rows]) for name in ("slow", "nearly full"))
    yield (
        f"{len(found.rows)} runs of nanotron in 2025 and {failed} that failed, a half of the study by whole "
        f"groups of model and number of GPUs. Left out here: {sweep.source.facts['left out']}. The slow ones "
        f"took {median(found.unseen[slow] / found.speed[slow]):.1f} times as long as predicted, the nearly "
        f"full ones {median(found.unseen[full] / found.speed[full]):.1f} times (medians). Behind the median: "
        "the best of some layouts and the planner's choice, in percent of the fastest one's speed."
    )
    counts = Counter((name_of(row), int(row["gpus"])) for row in found.rows if row["state"] == "slow")
    yield from ("", *by_group(sweep, counts), "")
    yield (
        f"Of the {len(first)} fastest layouts {sum(one.tp == 1 for one in layouts)} have no tp, "
        f"{sum(1 < one.tp < NODE for one in layouts)} tp 2 or 4, {sum(one.tp == NODE for one in layouts)} "
        f"tp {NODE}, {sum(one.tp > NODE for one in layouts)} more; {sum(one.pp > 1 for one in layouts)} a "
        f"pipeline; {sum(one.zero == 1 for one in layouts)} ZeRO-1; "
        f"{sum(one.micro_batch_size < 3 for one in layouts)} a micro-batch of 1 or 2."
    )
    yield from ("", *changes(sweep), "")
    facts = answer(found)
    choice, memory = facts["choice"], facts["memory"]
    left, fitted = facts["speed, groups left out"], facts["speed, fitted to all"]
    high, every = [*left][:2]
    yield (
        f"**The planner on these runs.** The layout that it ranks first is {choice['mean']:.1f} % slower "
        f"than the fastest one on average over {choice['groups']} groups, each predicted by constants fitted "
        f"without it; {choice['worst']:.1f} % at worst. Speed, groups left out: {left[high]['mape']:.1f} % "
        f"mean and {left[high]['median']:.1f} % median error of {left[high]['n']} runs {high}, "
        f"{left[every]['mape']:.1f} and {left[every]['median']:.1f} % of all {left[every]['n']}; fitted to "
        f"all groups {fitted[high]['mape']:.1f} and {fitted[every]['mape']:.1f} % mean. Memory, in-sample: "
        f"{memory[every]['mape']:.1f} % mean, {memory[every]['median']:.1f} % median. Of "
        f"{facts['fits']['ran']} runs that ran, it refuses {len(facts['fits']['refused'])}; of the "
        f"{facts['fits']['failed']} that failed, {facts['fits']['said to fit']} are said to fit."
    )


def predict_grid(out: Path, rows: Sequence[Row]) -> None:
    """Write the models' configs and predict the whole grid for meshtune; print how long it took."""
    for row in {row["model"]: row for row in rows}.values():
        sizes: dict[str, Any] = {key: int(row[name]) for name, key in CONFIG.items()}
        model = LlamaConfig(**sizes, tie_word_embeddings=row["tied_embeddings"] == "1")
        model.save_pretrained(out / "models" / name_of(row))
    words = [sys.executable, "-m", "meshtune", "sweep", str(SWEEP), "--simulate", "--out", "grid"]
    subprocess.run(words, cwd=out, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"Predicted the grid in {used.ru_utime + used.ru_stime:.0f} CPU s.")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--page", type=Path, help="page whose numbers, pictures and copy are written")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = [row for row in read(FAILED) if not why_not(row, origins())]
    predict_grid(options.out, failed)
    found = graded(FOLDS)
    file = write_sweep(options.out, found, failed)
    page, text = sweep_page(file), "\n".join(numbers(file, found))
    write_text_atomically(options.out / "report.html", page.html())
    print(text)
    draw(page, options.page.parent / "images" if options.page else options.out)
    if options.page:
        shutil.copyfile(options.out / "report.html", options.page.parent / "studies" / "playbook.html")
        before, _, rest = options.page.read_text(encoding="utf-8").partition(BEGIN)
        end = rest.partition(END)[2]
        write_text_atomically(options.page, f"{before}{BEGIN}\n\n{text}\n\n{END}{end}")


if __name__ == "__main__":
    main()
