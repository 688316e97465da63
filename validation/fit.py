"""Fit the planner's constants to published throughput; show how far off each source is when it is left out.

    python validation/fit.py [FILE.csv …] [--apply] [--leave-out] [--folds 4]

Without a file: those of FITTED_ON in validation/data/.

Constants are of a GPU kind, a software stack or a cluster; FREE says which are fitted, within which bounds.
Everything else follows from what hardware and software are. Weighted so that no source counts by its number
of rows alone; errors beyond 5 % count linearly (a pseudo-Huber loss), or a few broken runs would decide. What
the rows can't tell stays at its guess, so that a source that was left out is predicted as a new one would be.
"""

import argparse
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from assumed import completed
from measured import (
    LARGE,
    PLAYBOOK,
    SMALL,
    Machines,
    Row,
    columns_of,
    constants_of,
    origin_of,
    origins,
    read,
    throughput,
    trains_adapters,
    why_not,
    work_of,
)

from meshtune.plan.calibration import fitted, folds, left_out
from meshtune.plan.hardware import catalogue, stacks
from meshtune.plan.seconds.step import step

HERE = Path(__file__).parent
PLAN = HERE.parent / "src" / "meshtune" / "plan"
FITTED_ON = [*LARGE, SMALL, PLAYBOOK]
# torchtune's optimizers are of other kinds; torchtitan's pipelines leave out their micro-batches
UNFITTED = ("torchtune-", *(f"titan-{number}" for number in range(13, 19)))
SCALE = 0.03  # of an error that counts linearly
# lowest, as one would guess before any fit, highest
FREE: dict[str, tuple[float, float, float]] = {
    "gpu.*.matmul": (0.7, 0.93, 1.0), "gpu.h100-96.clock": (0.5, 0.75, 1.0),
    "gpu.a100.attention": (0.4, 0.75, 1.0), "gpu.h100.attention": (0.4, 0.75, 1.0),
    "gpu.b200.attention": (0.4, 0.75, 1.0), "gpu.b200.clock": (0.5, 0.9, 1.0),
    "stack.megatron-core.stack_matmul": (0.5, 0.9, 1.2),
    "stack.megatron-core-eager.stack_matmul": (0.4, 0.9, 1.0), "gpu.a100.depth": (0, 100, 800),
    "gpu.h100.depth": (0, 200, 1500), "gpu.*.tiles": (0, 0.5, 2), "gpu.*.misaligned": (1, 1.5, 2.5),
    "gpu.*.unloaded": (1, 2, 5), "gpu.*.memory": (0.5, 0.8, 0.95),
    "gpu.a100.link_share": (0.4, 0.75, 0.95), "gpu.h100.link_share": (0.2, 0.75, 0.95),
    "stack.megatron-deepspeed.stack_matmul": (0.7, 1.0, 1.1),
    "stack.nanotron.stack_matmul": (0.6, 0.95, 1.1), "stack.nanotron.stack_attention": (0.3, 0.8, 1),
    "stack.torchtitan-compiled-rowwise.stack_matmul": (0.3, 0.8, 1.0),
    "stack.*.score_bytes": (4, 12, 30),
    "stack.*.batched": (0.2, 0.6, 1),
    "stack.composer.elementwise_hidden": (2, 16, 40), "stack.composer.elementwise_wide": (0.5, 4, 12),
    "stack.megatron.logit_bytes": (6, 20, 60), "stack.composer.logit_bytes": (6, 20, 60),
    "stack.megatron-deepspeed.launch": (5e-6, 1.5e-5, 2.5e-5),
    "stack.bigscience.launch": (5e-6, 1.5e-5, 2e-4),
    "stack.nanotron.launch": (5e-6, 1.5e-5, 1e-4),
    "stack.megatron-deepspeed.host_micro_batch": (0, 1e-3, 2e-2),
    "stack.nanotron.host_micro_batch": (0, 1e-2, 1e-1),
    "stack.nanotron-async.tensor_hold": (1e-4, 1e-3, 6e-3),
    "stack.*-async.tensor_overlap": (0, 0.5, 1), "stack.composer.shard_overlap": (0, 0.5, 1),
    "stack.deepspeed-zero3.shard_share": (0.1, 0.8, 1), "stack.*.optimizer_bytes": (10, 40, 150),
    "stack.*.link_latency": (1e-6, 2e-5, 1e-4),
    "cluster.mosaic-a100.network_share": (0.05, 0.7, 0.95),
    "cluster.jean-zay.network_share": (0.05, 0.7, 0.95),
    "cluster.vtrain-multi.network_share": (0.05, 0.7, 0.95),
    "cluster.selene.network_share": (0.05, 0.7, 0.95),
    "cluster.nanotron.network_share": (0.03, 0.7, 0.95), "cluster.titan.network_share": (0.05, 0.7, 0.95),
    "cluster.titan-a100.network_share": (0.05, 0.7, 0.95),
    "cluster.nanotron.network_latency": (1e-6, 1e-5, 3e-4),
}  # fmt: skip


def spread(free: Mapping[str, float], start: Mapping[str, float]) -> dict[str, float]:
    """All constants: each key of `start` with the value of its nearest fitted constant, else that of `start`.

    free: fitted constants by their names in FREE, which may stand for several keys (`_bearers`). start: all
    constants, by key.
    """
    return dict(start) | {key: free[name] for key, name in _taken(tuple(start), tuple(free)).items()}


@cache
def _taken(keys: tuple[str, ...], free: tuple[str, ...]) -> dict[str, str]:
    """Name of the fitted constant whose value each key takes, of those that take one."""
    nearest = {key: next((name for name in _bearers(key) if name in free), None) for key in keys}
    return {key: name for key, name in nearest.items() if name}


@cache
def _tables(file: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((PLAN / file).read_text("utf-8"))


@cache
def _bearers(key: str) -> list[str]:
    """Names of fitted constants whose value this key may take, nearest first.

    First its own name. For a GPU: the kinds in `efficiency_as` up to the one whose table has the field, then
    its family (the name up to a hyphen), unless it has the field of its own beside `efficiency_as`. For a
    stack: "*-" and its last word, then the same for the stacks that it is `like`, up to the one whose table
    has the field. At last "*".
    """
    kind, name, field = key.split(".")
    names = [name]
    if kind == "gpu":
        kinds = _tables("hardware.toml")
        while field not in kinds[names[-1]].get("efficiency", {}):
            names.append(kinds[names[-1]]["efficiency_as"])
        if "efficiency_as" not in kinds[names[-1]]:
            names.append(names[-1].split("-")[0])
    if kind == "cluster":
        names.append(name.rpartition("-")[0])
    if kind == "stack":
        tables = _tables("stacks.toml")
        while field not in tables[name] and "like" in tables[name]:
            name = tables[name]["like"]
            names.append(name)
        names = [each for name in names for each in (name, "*-" + name.split("-")[-1])]
    return [f"{kind}.{each}.{field}" for each in (*names, "*")]


def predictor(rows: Sequence[Row], start: Mapping[str, float]) -> Callable[[Mapping[str, float]], np.ndarray]:
    """Function from fitted constants (as `spread` takes them) to predicted tokens/s/GPU of each row.

    start: all constants, for those that are not fitted.
    """
    among = origins()
    work, columns = work_of(rows), columns_of(rows, among)
    machines = Machines.of(rows, among, start)
    seq_len = np.array([float(row["seq_len"]) for row in rows])

    def predict(free: Mapping[str, float]) -> np.ndarray:
        machine = machines.with_constants(spread(free, start))
        seconds = step(work, columns, machine, seq_len).total
        return columns.global_batch_size * seq_len / seconds / columns.world

    return predict


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Values of the constants of FREE that fit best."""
    predict, measured = predictor(rows, constants_of(origins())), np.array([throughput(row) for row in rows])
    return fitted(lambda free: np.log(predict(free) / measured), FREE, _weights(rows), scale=SCALE)


def clusters(rows: Sequence[Row]) -> np.ndarray:
    """Name of each row's cluster; every row must have an origin."""
    among = origins()
    return np.array([origin.cluster for row in rows if (origin := origin_of(row, among))])


def _weights(rows: Sequence[Row]) -> np.ndarray:
    names = clusters(rows)
    return np.array([np.sum(names == each) ** -0.35 for each in names])


def parts(rows: Sequence[Row], count: int) -> np.ndarray:
    """Number of a part, below `count`, for each row; each cluster is spread evenly over the parts."""
    return folds(clusters(rows), count)


def unseen(rows: Sequence[Row], label: np.ndarray) -> np.ndarray:
    """Predicted tokens/s/GPU of each row, by constants fitted to the rows with other labels.

    label: of each row, such as its part or cluster; one fit for each distinct label.
    """
    start = constants_of(origins())

    def predict(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
        kept, out = ([*compress(rows, mask)] for mask in (inside, outside))
        return predictor(out, start)(fit(kept))

    return left_out(label, predict)


def apply(constants: Mapping[str, float]) -> None:
    """Write constants into hardware.toml, stacks.toml and clusters.toml, on the lines that have them already.

    Raises ValueError, after writing, if a constant has no line of its own.
    """
    for kind, file in (
        ("gpu", PLAN / "hardware.toml"), ("stack", PLAN / "stacks.toml"), ("cluster", HERE / "clusters.toml"),
    ):  # fmt: skip
        lines, table = file.read_text("utf-8").splitlines(keepends=True), ""
        for place, line in enumerate(lines):
            if header := re.match(r"\[([^\]]+)\]", line):
                table = header[1]

            def new(found: re.Match[str], table: str = table, kind: str = kind) -> str:
                key = f"{kind}.{table}.{found[1]}"
                if key not in constants or float(f"{constants[key]:.4g}") == float(found[3]):
                    return found[0]
                return f"{found[1]}{found[2]}{constants[key]:.4g}"

            if kind != "gpu" or line.startswith("efficiency = "):
                lines[place] = re.sub(r"(\w+)( = )([-+.e\d]+)", new, line)
        file.write_text("".join(lines), "utf-8")
    catalogue.cache_clear()
    stacks.cache_clear()
    origins.cache_clear()
    there = constants_of(origins())
    if lost := [key for key, value in constants.items() if abs(there[key] - value) > 1e-3 * abs(value)]:
        raise ValueError(f"These have no line of their own to be written to: {', '.join(lost)}.")


def fitted_on(files: Sequence[Path]) -> list[Row]:
    """The rows that can be predicted, in 16 and in 8 bits, without adapters and those of UNFITTED."""
    among = origins()
    rows = completed([row for file in files for row in read(file)])
    return [
        row
        for row in rows
        if not why_not(row, among) and np.isfinite(throughput(row)) and not trains_adapters(row)
        and not row["id"].startswith(UNFITTED) and not row.get("state")
    ]  # fmt: skip


def report(rows: Sequence[Row], predicted: np.ndarray) -> dict[str, tuple[int, float, float]]:
    """Cluster -> (number of rows, mean, median of the absolute errors in percent); "all": of the rows,
    "clusters": of the clusters' means.
    """
    measured = np.array([throughput(row) for row in rows])
    wrong, names = abs(predicted / measured - 1), clusters(rows)
    found = {}
    for cluster in [*dict.fromkeys(names), "all"]:
        own = wrong if cluster == "all" else wrong[names == cluster]
        found[str(cluster)] = (len(own), 100 * float(own.mean()), 100 * float(np.median(own)))
    means = [mean for name, (_, mean, _) in found.items() if name != "all"]
    return found | {"clusters": (len(means), float(np.mean(means)), float(np.median(means)))}


def show(errors: Mapping[str, tuple[int, float, float]]) -> None:
    for name, (n, mean, median) in errors.items():
        print(f"{name:16s} n={n:4d}  mean {mean:5.1f} %  median {median:5.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=FITTED_ON)
    parser.add_argument("--apply", action="store_true", help="write the constants to where they belong")
    parser.add_argument("--leave-out", action="store_true", help="also predict each cluster by the others")
    parser.add_argument(
        "--folds", type=int, default=0, help="also predict each part of the rows by the others"
    )
    options = parser.parse_args()
    rows, start = fitted_on(options.files), constants_of(origins())
    best = fit(rows)
    print(f"{len(rows)} rows, {len(best)} constants")
    show(report(rows, predictor(rows, start)(best)))
    for name, value in best.items():
        low, _, high = FREE[name]
        at = (value - low) / (high - low)
        bound = " (at its lower bound)" if at < 0.03 else " (at its upper bound)" if at > 0.97 else ""
        print(f"  {name} = {value:.4g}{bound}")
    if options.apply:
        apply(spread(best, start))
    if options.folds:
        print(f"each of {options.folds} parts predicted by the others")
        show(report(rows, unseen(rows, parts(rows, options.folds))))
    if options.leave_out:
        print("each cluster predicted by the others")
        show(report(rows, unseen(rows, clusters(rows))))


if __name__ == "__main__":
    main()
