"""Compare the planner with published measurements: throughput and peak memory, row by row.

    python validation/published.py [FILE.csv …] [--json] [--predictions OUT.csv] [--picture FILE.svg]

Without a file: the large runs of validation/data/. A file of your own has the same columns.

Every row that states all that the planner needs is predicted, and those of some tables with assumptions for
what they leave out (assumed.py), scored apart; nothing is fitted here. Printed: the error by
source, GPU and technique (median, mean absolute percentage, worst, signed bias); in each group of rows that
differ only in their layout the rank correlation and the regret: how much slower the planner's choice was,
when measured, than the best measured. Of memory: the same errors, rows that are more than 8 % off, and
whether runs that did not fit are refused. `--predictions` writes each row with its assumptions.
"""

import argparse
import csv
import io
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from assumed import completed
from fit import FREE
from measured import (
    LARGE,
    LORA_RANK,
    RATES,
    Machines,
    Row,
    columns_of,
    constants_of,
    origins,
    read,
    throughput,
    trains_adapters,
    why_not,
    work_of,
)
from peaks import (
    FITTED,
    capacities,
    fitted,
    peaks,
    published,
    ran_out,
    why_apart,
)

from meshtune.placement.columns import Columns
from meshtune.plan.seconds.step import Seconds, step
from meshtune.rundir import write_text_atomically

# columns in which the rows of a group agree, and in which its layouts differ
SAME = (
    "model", "layers", "hidden", "vocab", "gpu", "gpus", "seq_len", "global_batch", "precision", "recompute",
    "compile", "attention",
)  # fmt: skip
DIFFERS = ("dp", "zero_stage", "tp", "pp", "cp", "vpp", "micro_batch", "sp")
LEAST = 3  # layouts in a group that is compared
OFF = 8.0  # percent: a row whose peak is predicted so much too low is counted, and listed as one too high


def predict(rows: Sequence[Row], lora_rank: int = LORA_RANK) -> np.ndarray:
    """Predicted tokens per second and GPU of each row; for rows that `why_not` returns None for."""
    seconds, columns = step_of(rows, lora_rank)
    seq_len = np.array([float(row["seq_len"]) for row in rows])
    return columns.global_batch_size * seq_len / seconds.total / columns.world


def step_of(rows: Sequence[Row], lora_rank: int = LORA_RANK) -> tuple[Seconds, Columns]:
    """(Predicted seconds of a step of each row by part, the rows' layouts)."""
    among = origins()
    constants = constants_of(among)
    columns, seq_len = columns_of(rows, among), np.array([float(row["seq_len"]) for row in rows])
    machine = Machines.of(rows, among, constants).with_constants(constants)
    return step(work_of(rows, lora_rank), columns, machine, seq_len), columns


def source_of(row: Row) -> str:
    """The beginning of a row's id; SimuMax's rows of Megatron-LM have it after that."""
    first, second = row["id"].split("-")[:2]
    return second if second == "simumax" else first


def file_of(row: Row) -> str:
    """The row's file, the bits of its matmuls, and whether a part of it is assumed."""
    bits = 16 if RATES[row["precision"]] == "bf16" else 8
    assumed = (", LoRA" if trains_adapters(row) else ", assumed") if row["assumed"] else ""
    return f"{row['file'].removesuffix('.csv')}, {bits} bits{assumed}"


def technique_of(row: Row) -> str:
    """The axes of a row's layout."""
    names = []
    if float(row["dp"]) > 1:
        names.append(f"zero{row['zero_stage']}" if row["zero_stage"] not in ("", "0") else "dp")
    names += [axis for axis in ("tp", "pp", "cp") if float(row[axis] or 1) > 1]
    return "+".join(names) or "one GPU"


def errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, Any]:
    """Relative errors in percent, and the rank correlation. predicted, measured: parallel, not empty."""
    wrong = 100 * (predicted / measured - 1)
    return {
        "n": len(wrong),
        "mape": float(abs(wrong).mean()),
        "median": float(np.median(abs(wrong))),
        "worst": float(wrong[abs(wrong).argmax()]),
        "bias": float(wrong.mean()),
        "spearman": spearman(predicted, measured),
    }


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's rank correlation of parallel values; equal values share their mean rank.

    None if there are fewer than two values, or if all of one side are equal.
    """
    if len(a) < 2:
        return None
    first, second = _ranks(a), _ranks(b)
    if first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def by(
    rows: Sequence[Row], key: Callable[[Row], str], predicted: np.ndarray, measured: np.ndarray
) -> dict[str, Any]:
    """Key -> `errors` of the rows that have it. predicted, measured: one value per row."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[key(row)].append(place)
    return {name: errors(predicted[own], measured[own]) for name, own in sorted(places.items())}


def choices(rows: Sequence[Row], predicted: np.ndarray, measured: np.ndarray) -> dict[str, Any]:
    """Percent of speed that the planner's choice loses against the best measured layout (regret), by group.

    predicted, measured: tokens/s/GPU, one value per row. A group has the same model on the same cluster in at
    least LEAST layouts. A layout that was measured more than once counts by its median.
    """
    groups: dict[tuple, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, row in enumerate(rows):
        same = (source_of(row), *(row[name] for name in SAME))
        groups[same][tuple(row[name] for name in DIFFERS)].append(place)
    found, ranks = [], []
    for same, layouts in groups.items():
        if len(layouts) < LEAST:
            continue
        ours = np.array([np.median(predicted[own]) for own in layouts.values()])
        theirs = np.array([np.median(measured[own]) for own in layouts.values()])
        regret = 100 * (1 - theirs[ours.argmax()] / theirs.max())
        found.append(
            {"group": "-".join(same[:2]) + f"-{same[6]}g", "layouts": len(layouts), "regret": float(regret)}
        )
        if (rho := spearman(ours, theirs)) is not None:
            ranks.append(rho)
    losses = [each["regret"] for each in found]
    return {
        "groups": len(found),
        "mean": float(np.mean(losses)) if losses else None,
        "worst": max(losses, default=None),
        "spearman": float(np.mean(ranks)) if ranks else None,
        "each": sorted(found, key=lambda each: -each["regret"]),
    }


def memory_errors(rows: Sequence[Row], skipped: Sequence[Row], reasons: Sequence[str]) -> dict[str, Any]:
    """Errors of the predicted peak memory of `rows`, and the reasons of `skipped` rows that have a peak.

    rows: all that can be predicted; those of a partly assumed layout are not counted among runs that fitted.
    reasons: of each of `skipped`, in the same order.
    """
    ours, theirs = peaks(rows), published(rows)
    reason = np.array([why_apart(row) for row in rows])
    apart, known = reason != "", np.isfinite(theirs)
    scored = [row for row, own in zip(rows, known & ~apart, strict=True) if own]
    refused, failed = peaks(rows, whole=True) > capacities(rows), ran_out(rows)
    ran = ~failed & np.array([not row["assumed"] for row in rows], dtype=bool)

    wrong = 100 * (ours / theirs - 1)

    def under(own: np.ndarray) -> dict[str, Any]:
        found = errors(ours[own], theirs[own]) if own.any() else {"n": 0}
        return found | {"under_8": int((wrong[own] < -OFF).sum())}

    return {
        "all": under(known & ~apart),
        "by_source": by(scored, source_of, ours[known & ~apart], theirs[known & ~apart]),
        "apart": {why: under(known & (reason == why)) for why in dict.fromkeys(reason[known & apart])},
        "off": {
            rows[at]["id"]: float(wrong[at])
            for at in np.argsort(wrong)
            if abs(wrong[at]) > OFF and not apart[at]
        },
        "out_of_memory": {"n": int(failed.sum()), "predicted": int((failed & refused).sum())},
        "ran": {"n": int(ran.sum()), "refused": int((ran & refused).sum())},
        "skipped": dict(
            Counter(
                reason for row, reason in zip(skipped, reasons, strict=True) if row["peak_mem_gib"]
            ).most_common()
        ),
        "constants": {"fitted": len(FITTED), "values": fitted()},
    }


def trends(rows: Sequence[Row], predicted: np.ndarray, measured: np.ndarray) -> dict[str, Any]:
    """GPU kind -> errors of NeMo's runs with long sequences, and percent by which each doubling moves them.

    predicted, measured: one value per row.
    """
    found = {}
    for gpu in sorted({row["gpu"] for row in rows if row["id"].startswith("nemo-long-")}):
        own = np.array([row["id"].startswith("nemo-long-") and row["gpu"] == gpu for row in rows])
        doublings = np.log2([float(row["seq_len"]) for row in rows])[own]
        slope, _ = np.polyfit(doublings, np.log(predicted[own] / measured[own]), 1)
        found[gpu] = errors(predicted[own], measured[own]) | {"slope": 100 * float(slope)}
    return found


def adapters(rows: Sequence[Row], measured: np.ndarray) -> dict[str, list[float]]:
    """Id of each row that trains adapters -> errors in percent for ranks 8, LORA_RANK and 64.

    measured: tokens/s/GPU, one value per row.
    """
    own = [place for place, row in enumerate(rows) if trains_adapters(row)]
    tuned = [rows[place] for place in own]
    wrong = [100 * (predict(tuned, rank) / measured[own] - 1) for rank in (8, LORA_RANK, 64)] if own else []
    return {row["id"]: [float(each[at]) for each in wrong] for at, row in enumerate(tuned)}


def validate(rows: Sequence[Row]) -> tuple[dict[str, Any], list[Row], np.ndarray]:
    """Return the whole comparison, the rows that were predicted, and their predicted throughput."""
    among = origins()
    rows = completed(rows)
    reasons = [why_not(row, among) for row in rows]
    skipped = [row for row, reason in zip(rows, reasons, strict=True) if reason]
    kept = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    predicted = predict(kept) if kept else np.zeros(0)
    measured = np.array([throughput(row) for row in kept])
    known = np.isfinite(measured)
    scored = [row for row, is_known in zip(kept, known, strict=True) if is_known]
    ours, theirs = predicted[known], measured[known]
    stated = np.array([not row["assumed"] for row in scored], dtype=bool)
    whole = [row for row in scored if not row["assumed"]]
    answer: dict[str, Any] = {
        "rows": len(rows),
        "predicted": len(kept),
        "skipped": dict(Counter(reason for reason in reasons if reason).most_common()),
        "throughput": {
            "all": errors(ours, theirs) if len(scored) else {"n": 0},
            **sixteen_bits(whole, ours[stated], theirs[stated]),
            "by_source": by(scored, source_of, ours, theirs),
            "by_file": by(scored, file_of, ours, theirs),
            "by_gpu": by(scored, lambda row: row["gpu"], ours, theirs),
            "by_technique": by(scored, technique_of, ours, theirs),
            "by_precision": by(scored, lambda row: row["precision"], ours, theirs),
            "long": trends(scored, ours, theirs),
            "lora": adapters(scored, theirs),
        },
        "memory": memory_errors(kept, skipped, [reason for reason in reasons if reason]) if kept else {},
        "regret": choices(whole, ours[stated], theirs[stated]),
        "constants": {
            "fitted": len(FREE),
            "on": "the rows of the published throughput tables without adapters (validation/README.md)",
            "values": constants_of(among),
        },
    }
    return answer, kept, predicted


def sixteen_bits(rows: Sequence[Row], predicted: np.ndarray, measured: np.ndarray) -> dict[str, Any]:
    """Errors of the rows in 16 bits that state their whole layout, with and without nanotron.

    predicted, measured: one value per row.
    """
    sixteen = np.array([RATES[row["precision"]] == "bf16" for row in rows], dtype=bool)
    rest = sixteen & np.array([source_of(row) != "nanotron" for row in rows], dtype=bool)
    named = {"16-bit": sixteen, "16-bit without nanotron": rest}
    return {name: errors(predicted[own], measured[own]) for name, own in named.items() if own.any()}


def table(answer: dict[str, Any]) -> str:
    lines = [f"{answer['rows']} rows, {answer['predicted']} predicted"]
    lines += [f"  skipped {n}: {reason}" for reason, n in answer["skipped"].items()]
    found = answer["throughput"]
    sections = [
        ("", {name: found[name] for name in ("all", "16-bit", "16-bit without nanotron") if name in found})
    ]
    sections += [
        (kind, found[kind]) for kind in ("by_file", "by_source", "by_gpu", "by_technique", "by_precision")
    ]
    for title, rows in sections:
        lines += section(title.replace("_", " ") or "throughput", rows)
    if found["long"]:
        lines += section("long sequences, NeMo", found["long"])
        lines += [f"  {gpu}: {e['slope']:+.1f} % with each doubling" for gpu, e in found["long"].items()]
    if found["lora"]:
        lines += ["", f"LoRA, errors in percent for ranks 8, {LORA_RANK} and 64"]
        lines += [
            f"  {name:26}{''.join(f'{wrong:8.1f}' for wrong in each)}" for name, each in found["lora"].items()
        ]
    if held := answer["memory"]:
        apart = {f"apart: {why}": own for why, own in held["apart"].items()}
        rows = {"all": held["all"], **held["by_source"], **apart}
        out, ran = held["out_of_memory"], held["ran"]
        low = ", ".join(name for name, percent in held["off"].items() if percent < 0)
        lines += [
            *section("peak memory", rows),
            f"  {held['all']['under_8']} are predicted more than {OFF:.0f} % too low ({low or 'none'});"
            f" {out['predicted']} of {out['n']} that ran out of memory are refused, and {ran['refused']} of"
            f" {ran['n']} that ran; {held['constants']['fitted']} constants fitted",
            *(f"  skipped {n}: {reason}" for reason, n in held["skipped"].items()),
        ]
    regret = answer["regret"]
    if regret["groups"]:
        lines += [
            "",
            f"the choice among layouts, {regret['groups']} groups: {regret['mean']:.1f} % slower than the",
            f"best measured on average, {regret['worst']:.1f} % at worst; ranks {regret['spearman']:.2f}",
            *(
                f"  {each['regret']:5.1f} %  {each['group']} ({each['layouts']} layouts)"
                for each in regret["each"][:5]
                if each["regret"] > 0
            ),
        ]
    return "\n".join(lines)


def section(title: str, rows: Mapping[str, dict[str, Any]]) -> list[str]:
    lines = ["", title, f"{'':28}{'n':>6}{'mean %':>9}{'median':>9}{'worst':>9}{'bias':>9}{'ranks':>8}"]
    for name, e in rows.items():
        if e["n"]:
            ranks = "" if e["spearman"] is None else f"{e['spearman']:.3f}"
            lines.append(
                f"{name:28}{e['n']:6}{e['mape']:9.1f}{e['median']:9.1f}{e['worst']:9.1f}{e['bias']:9.1f}{ranks:>8}"
            )
    return lines


def predictions(kept: Sequence[Row], predicted: np.ndarray) -> str:
    """CSV text of predicted tokens/s/GPU and of peak memory in GiB, as each row's published figure counts it,
    with what is assumed of each row.

    predicted: tokens/s/GPU of each of `kept`.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["id", "tokens_per_s_per_gpu", "peak_mem_gib", "assumed"])
    held = peaks(kept)
    writer.writerows(
        [row["id"], f"{speed:.6g}", f"{memory:.6g}", row["assumed"]]
        for row, speed, memory in zip(kept, predicted, held, strict=True)
    )
    return out.getvalue()


def draw(kept: Sequence[Row], predicted: np.ndarray, file: Path) -> None:
    """Write predicted against measured throughput as a picture, each source in its colour, 10 % dashed.

    predicted: tokens/s/GPU of each of `kept`; rows without a measured throughput are left out. file: .svg or
    .png.
    """
    from meshtune.report.draw.kinds import Axis, Group, Guide, Point, Scatter
    from meshtune.report.draw.picture import write

    measured = np.array([throughput(row) for row in kept])
    known = np.isfinite(measured)
    ends = float(measured[known].min()) * 0.7, float(measured[known].max()) * 1.4
    points: dict[str, list[Point]] = {}
    for row, real, guess, is_known in zip(kept, measured, predicted, known, strict=True):
        if is_known:
            points.setdefault(source_of(row), []).append(Point(float(real), float(guess), row["id"]))
    panel = Scatter(
        "published",
        "Throughput, tokens/s per GPU",
        "dashed: 10 % more and less than measured",
        tuple(
            Group(f"{source} ({len(points[source])})", tuple(points[source]), size=24, opacity=0.6)
            for source in sorted(points)
        ),
        Axis("measured", ends, log=True),
        Axis("predicted", ends, log=True),
        guides=(
            Guide(ends, ends, solid=True),
            *(Guide(ends, (share * ends[0], share * ends[1])) for share in (0.9, 1.1)),
        ),
        height=820,
        item="row",
    )
    write(file, [[panel]], title="Predicted against measured", width=900)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=LARGE)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--predictions", type=Path, help="write id,tokens_per_s_per_gpu,peak_mem_gib,assumed")
    parser.add_argument("--picture", type=Path, help="predicted against measured, .svg or .png")
    options = parser.parse_args()
    answer, kept, predicted = validate([row for file in options.files for row in read(file)])
    if options.predictions:
        write_text_atomically(options.predictions, predictions(kept, predicted))
    if options.picture:
        draw(kept, predicted, options.picture)
    print(json.dumps(answer, indent=1) if options.json else table(answer))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
