"""The planner's best layouts beside the best of a published study: `python validation/best_layouts.py`.

nanotron published the fastest layout for 16 pairs of model and number of GPUs, 1.34B to 80B on 16 to 512 H100
(docs/benchmark_summary.svg of huggingface/nanotron; rows `nanotron-best-` of data/throughput.csv). For each,
every layout of the same study is predicted, with the constants of nanotron's stack and cluster, which were
fitted to these speeds among others: dp, ZeRO-1, tp, pp, micro-batch size, without recomputation. Those that
do not fit the GPU are left out. Printed, or written by --table:

    family   the axes that a layout has: is it the published one's?
    loses    speed of the published layout against the planner's choice, both predicted
    why      parts of the predicted step in which the published layout takes longer, and those in which it is
             faster, in percent of the planner's choice's step; the two largest
    MFU      published, and predicted for the published layout
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median

import numpy as np
from measured import LARGE, Row, flops_per_token, read, throughput
from peaks import capacities, peaks
from published import predict, step_of, technique_of

from meshtune.plan.hardware import catalogue
from meshtune.plan.seconds.step import PARTS
from meshtune.rundir import write_text_atomically

PREFIX = "nanotron-best-"
MOST_PARTS = 2  # of a step, that are named
WORDS = {part: part for part in PARTS} | {  # parts of a step in the words of the page
    "tensor": "tensor-parallel collectives", "context": "context-parallel collectives",
    "pipeline": "sends between stages", "data": "gradients' collectives", "bubble": "pipeline bubble",
    "imbalance": "waiting for the slowest stage", "host": "host",
}  # fmt: skip
SIZES = (1, 2, 4, 8, 16, 32)  # of tp, pp and micro-batches


def alternatives(row: Row) -> Iterator[Row]:
    """Rows of the same model, GPUs and global batch with every layout of the study."""
    gpus, batch = int(row["gpus"]), int(row["global_batch"])
    for tp, pp, micro_batch, zero in product(SIZES, SIZES, SIZES, (0, 1)):
        dp = gpus // (tp * pp)
        if gpus % (tp * pp) or batch % (dp * micro_batch) or (zero and dp == 1):
            continue
        if int(row["kv_heads"]) % tp or pp > int(row["layers"]):
            continue
        yield row | {
            "dp": str(dp), "tp": str(tp), "pp": str(pp), "zero_stage": str(zero), "sp": str(int(tp > 1)),
            "micro_batch": str(micro_batch),
        }  # fmt: skip


def layout_of(row: Row) -> str:
    """The layout in the words of the tables."""
    zero = "zero1 x " if row["zero_stage"] == "1" else "dp "
    return f"{zero}{row['dp']}, tp {row['tp']}, pp {row['pp']}, micro-batch {row['micro_batch']}"


def mfu(row: Row, speed: float) -> float:
    """Percent of the GPU's rate, FLOPs counted as the source does. speed: tokens/s/GPU."""
    return 100 * speed * flops_per_token(row) / float(catalogue()[row["gpu"]].bf16 or np.nan)


@dataclass(frozen=True)
class Compared:
    """A published best layout beside the planner's for the same model, GPUs and batch."""

    row: Row
    best: Row
    tried: int  # layouts
    loses: float  # percent of the speed that the published layout lacks, both predicted
    parts: dict[str, float]  # seconds that it takes longer, in percent of the planner's choice's step
    predicted: float  # MFU of the published layout, in percent

    @property
    def same(self) -> bool:
        """Whether both have the same axes."""
        return technique_of(self.best) == technique_of(self.row)

    @property
    def splits_alike(self) -> bool:
        """Whether both use tp or not, and a pipeline or not, however data ranks hold their states."""
        return all((self.best[axis] == "1") == (self.row[axis] == "1") for axis in ("tp", "pp"))

    @property
    def error(self) -> float:
        """Percent by which the predicted MFU is off."""
        return 100 * (self.predicted / self.measured - 1)

    @property
    def measured(self) -> float:
        """MFU of the published speed, in percent; some printed ones count the embedding twice."""
        return mfu(self.row, throughput(self.row))

    @property
    def why(self) -> str:
        """The parts that differ most."""
        most = sorted(self.parts, key=lambda part: -abs(self.parts[part]))[:MOST_PARTS]
        return ", ".join(f"{WORDS[part]} {self.parts[part]:+.0f}" for part in most if self.parts[part])

    @property
    def line(self) -> str:
        """Line of the page's table."""
        cells = (
            self.row["model"].removeprefix("nanotron-"), self.row["gpus"], layout_of(self.row),
            layout_of(self.best), "yes" if self.same else "no", f"{self.loses:.1f} %", self.why,
            f"{self.measured:.1f}", f"{self.predicted:.1f}", f"{self.error:+.0f} %",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def compared(row: Row) -> Compared:
    """Predict all layouts for a published row."""
    tried = list(alternatives(row))
    fits = peaks(tried, whole=True) <= capacities(tried)
    speeds = np.where(fits, predict(tried), 0.0)
    (speed,) = predict([row])
    loses = max(0.0, 100 * float(1 - speed / speeds.max()))
    best = tried[int(speeds.argmax())]
    steps, _ = step_of([row, best])
    both = {part: np.broadcast_to(getattr(steps, part), 2) for part in PARTS}
    other = sum(float(one[1]) for one in both.values())
    parts = {part: 100 * float(one[0] - one[1]) / other for part, one in both.items()}
    return Compared(row, best, len(tried), loses, parts, mfu(row, float(speed)))


def reasons(found: Sequence[Compared], error: float) -> str:
    """A paragraph on the layouts whose axes disagree. error: percent, the median of the predicted MFU's."""
    others = [each for each in found if not each.same]
    far = [each for each in others if each.loses > error]
    largest = Counter(max(each.parts, key=lambda part: each.parts[part]) for each in far)
    text = (
        f"Of the {len(others)} whose axes disagree, the published layout is predicted within the median "
        f"error ({error:.1f} %) of the best one in {len(others) - len(far)}: the prediction can't tell these "
        "apart."
    )
    if not far:
        return text
    shown = ", ".join(f"{WORDS[part]} ({number})" for part, number in largest.most_common())
    low = sum(each.error < 0 for each in far)
    return (
        f"{text} In the other {len(far)} the published one takes longer most of all in: {shown}. MFU of the "
        f"published layout is predicted too low in {low} of them ({mean(each.error for each in far):+.0f} % "
        f"on average over the {len(far)}), so that a part of what it seems to lose is the prediction's error."
    )


def page(rows: Sequence[Row]) -> str:
    """The page, as Markdown."""
    found = [compared(row) for row in rows]
    wrong, losses = [abs(each.error) for each in found], [each.loses for each in found]
    agree, tried = sum(each.same for each in found), sum(each.tried for each in found)
    alike = sum(each.splits_alike for each in found)
    heads = ("model", "GPUs", "published best", "predicted best", "same axes", "published one loses")
    heads += ("difference by part, % of the best's step", "MFU, published", "predicted", "error")
    return "\n".join([
        "# The planner's best layouts beside a published study's", "",
        "`python validation/best_layouts.py --table validation/best-layouts.md` writes this page; "
        "[best_layouts.py](best_layouts.py) says what is compared.", "",
        f"{tried:,} layouts were predicted. In {agree} of {len(found)} groups the best one has the "
        f"axes of the published one; in {alike} both use tp and pp alike. By prediction the published "
        f"layouts lose {mean(losses):.1f} % on average and {max(losses):.1f} % at most against the planner's "
        f"choice. MFU of the published layouts: {mean(wrong):.1f} % mean error, {median(wrong):.1f} % "
        "median; constants of the prediction were fitted to these speeds among others, so that this is no "
        "test on unknown ones.", "",
        reasons(found, median(wrong)), "",
        f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |",
        *(each.line for each in found),
    ]) + "\n"  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="where the page goes; default: the terminal")
    options = parser.parse_args()
    text = page([row for file in LARGE for row in read(file) if row["id"].startswith(PREFIX)])
    if options.table:
        write_text_atomically(options.table, text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
