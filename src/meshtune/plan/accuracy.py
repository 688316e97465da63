"""Error bars: mean errors of predictions of published runs, by software stack, GPU kind and band."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from meshtune.layout import Layout

LEAST_ROWS = 5  # published runs of a stack on a GPU kind from which they have a mean error of their own
UNMEASURED = "unmeasured"  # table of accuracy.toml for stacks and kinds without rows of their own
LOW_MFU = 0.1
PLACES = {
    "node": "on one machine",
    "nodes": "on several machines",
    "pipeline": "with a pipeline over machines",
    "tensor": "with tensor parallelism over machines",
}
# of layouts, whose times are not equally well predicted -> how sentences name them
BANDS = PLACES | {f"{place}_low": f"{words} below {LOW_MFU:.0%} MFU" for place, words in PLACES.items()}


def band_of(layout: Layout, node: float, mfu: float) -> str:
    """The key of BANDS that a layout with this predicted MFU belongs to. node: GPUs in a machine."""
    place = "pipeline" if layout.pp > 1 else "nodes"
    place = "node" if layout.world <= node else "tensor" if layout.tp > node else place
    return f"{place}_low" if mfu < LOW_MFU else place


class Accuracy(NamedTuple):
    """Mean errors of predictions for one stack on one GPU kind in one band, as shares."""

    time: float | None  # None: a processor: there are no published runs
    memory: float
    time_rows: int  # published runs of this stack on this kind in the band; 0: as of a source left out
    memory_rows: int  # of all bands
    band: str  # a key of BANDS

    def as_dict(self) -> dict[str, Any]:
        """`error` of a layout in the JSON document."""
        return self._asdict()

    def sentence(self, stack: str, gpu: str) -> str:
        """Say what the error bars of this stack on this GPU kind are."""
        quantities = [("memory", self.memory, self.memory_rows, "peaks", "")]
        if self.time is not None:
            where = f" {BANDS[self.band]}"
            quantities.insert(0, ("time", self.time, self.time_rows, "step times", where))
        sentences = [
            f"±{share:.0%} of {name}: the mean error for {rows} published runs of {stack} on {gpu}{where}."
            for name, share, rows, _, where in quantities
            if rows
        ]
        guessed = [quantity for quantity in quantities if not quantity[2]]
        if guessed:
            shares = " and ".join(f"±{share:.0%} of {name}" for name, share, *_ in guessed)
            *_, unit, where = guessed[0]
            lacking = f"{'runs' if len(guessed) > 1 else unit} of {stack} on {gpu}{where}"
            sentences.append(
                f"{shares}: nobody has published {LEAST_ROWS} {lacking}; assumed as the mean error over "
                "sources of such runs, each predicted by constants fitted to the others."
            )
        return " ".join(sentences)


def accuracy(stack: str, gpu: str, band: str) -> Accuracy:
    """Error bars of predictions for a stack of stacks.toml on a kind of hardware.toml; cpu: any processor.

    band: a key of BANDS.
    """
    tables = _tables()
    measured, others = tables.get(stack, {}).get(gpu, {}), tables[UNMEASURED]
    percent, rows = measured.get("time", {}).get(band, (others["time"][band][0], 0))
    return Accuracy(
        None if gpu == "cpu" else percent / 100,
        measured.get("memory", others["memory"]) / 100,
        rows,
        measured.get("memory_rows", 0),
        band,
    )


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(files("meshtune.plan").joinpath("accuracy.toml").read_text("utf-8"))
