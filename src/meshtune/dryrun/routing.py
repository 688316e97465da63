"""How the routers of a dry run spread tokens over the ranks of an ep group: no router has values there.

    balanced   each rank receives equal rows
    worst      every token chooses the experts of the lowest numbers, those of the first rank
    measured   the first rank receives, in each block, the share of the rank with most in a run's step

All ranks send alike, and no row is dropped. The rank that is traced is the first one of its group.
Without torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshtune.errors import Table, UserError
from meshtune.layout import Layout
from meshtune.placement.split import piece
from meshtune.rundir import Row, RunDir

ROUTINGS = Table("--routing", {name: name for name in ("balanced", "worst", "measured")})
FULLEST = "the rank of each ep group that receives most rows"  # which the traced rank is


@dataclass(frozen=True)
class Routing:
    """Rows that the ranks of an ep group receive."""

    kind: str = "balanced"
    fullest: Mapping[int, float] = field(default_factory=dict)  # block -> first rank's rows over their mean
    note: str = ""  # a sentence for the answer

    def rows(self, tokens: int, chosen: int, experts: int, ranks: int, block: int | None) -> list[int]:
        """Rows that each of `ranks` receives of one rank.

        tokens: of that rank; each chooses `chosen` experts. experts: on each rank.
        """
        if self.kind == "worst":
            return [tokens * min(max(chosen - experts * rank, 0), experts) for rank in range(ranks)]
        rows = tokens * chosen
        first = min(rows, math.ceil(rows * self.fullest.get(-1 if block is None else block, 1.0) / ranks))
        cuts = (piece(rows - first, ranks - 1, rank) for rank in range(ranks - 1))
        return [first, *(stop - start for start, stop in cuts)]


BALANCED = Routing()


def routing_for(kind: str, layout: Layout, *, experts: int, model: str, output: str) -> Routing:
    """The routing of a dry run. kind: one of ROUTINGS. experts: of a block; 0: `model` is dense. output: the
    folder of the run that was measured.

    Raises UserError for one that isn't known, that the model can't have, or that no run has measured.
    """
    if ROUTINGS[kind] == "balanced":
        return BALANCED
    if not experts:
        raise UserError(f"--routing {kind}: {model} has no experts that tokens are sent to; leave it out.")
    if layout.ep == 1:
        what = "each rank computes the rows of all its experts, however tokens are spread"
        return Routing(note=f"--routing {kind} has no effect under {layout}: without ep {what}.")
    step = _most_uneven(Path(output), layout) if kind == "measured" else None
    planned = "The planner's figures are those of experts.imbalance, not of this routing."
    if step is None:
        receives = "every token chooses the experts of the lowest numbers, all of them of the first ranks"
        return Routing(kind, note=f"--routing worst: {receives} of each ep group. {planned}")
    each = zip(step["layers"], step["fullest_rank"], strict=True)
    return Routing(
        kind,
        {int(block): fullest for block, fullest in each},
        f"--routing measured: the first rank of each ep group receives in each block the share of the rank "
        f"with most in step {step['step']:,} of {output}, at most {max(step['fullest_rank']):.2f} times the "
        f"mean; no other step had more. {planned}",
    )


def _most_uneven(folder: Path, layout: Layout) -> Row:
    """The row of the run's step in which a rank has most rows of a block. Raises UserError if none is there
    for the layout's ep.
    """
    rows, asked = RunDir(folder).rows(), f"--routing measured: {folder}"
    steps = [row for row in rows.of_kind("experts") if row["fullest_rank"]]
    if not steps:
        raise UserError(
            f"{asked} has no rows with loads of experts; set output to the folder of a run of this "
            "model, or take --routing worst."
        )
    had = {Layout.parse(row["layout"]).ep for row in rows.of_kind("run")}
    if had != {layout.ep}:
        sizes = " and ".join(f"ep{size}" for size in sorted(had))
        raise UserError(
            f"{asked} has measured the ranks of {sizes}, and {layout} has ep{layout.ep}, whose ranks have "
            f"other experts; dry-run a layout with {sizes}, or take --routing worst."
        )
    return max(steps, key=lambda row: max(row["fullest_rank"]))
