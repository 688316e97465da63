"""One fixed colour for each part of memory and of a step, in charts and in the terminal.

A colour means one thing: no two names share one, and a plan's charts use none of them for anything else.
"""

from collections.abc import Sequence

from meshtune.plan.memory.timeline import CATEGORIES
from meshtune.plan.seconds.step import PARTS
from meshtune.report.draw.theme import OTHERS

MEMORY_PARTS = tuple(name.replace("_", " ") for name in CATEGORIES)
# In the order of MEMORY_PARTS and of PARTS; "optimizer" is in both, with one colour.
MEMORY = (
    "#0072b2", "#5ec4b6", "#d55e00", "#009e73", "#7a6fb0", "#cc79a7", "#e69f00", "#b59a82", "#8b929b",
)  # fmt: skip
TIME = (
    "#56b4e9", "#882255", "#d9c45a", "#117733", "#3f51b5", "#999933", "#009e73", "#c9ced6", "#a6761d",
    "#5d646d",
)  # fmt: skip
PASSES = {  # of a micro-batch through a stage, and the time between them
    "forward without gradients": "#d3e9f7",
    "forward": "#9ed4f5",
    "backward": "#2b8cc4",
    "recomputation": "#f2b6a0",
    "backward of inputs": "#4ba3d6",
    "backward of weights": "#135c86",
}
MEASURED = {"waiting": "#b3a6d9", "loading": "#7b3f00", "rest": "#4c7f9e"}  # only of a run's step
COLOURS = dict(zip((*MEMORY_PARTS, *PARTS), (*MEMORY, *TIME), strict=True)) | PASSES | MEASURED


def colours_of(names: Sequence[str]) -> list[str]:
    """Colours as "#rrggbb", one per name, in the order of `names`.

    Parts of memory and of a step have their fixed colour (COLOURS); other names take the palette's in turn.
    """
    spare = iter(OTHERS * (1 + len(names) // len(OTHERS)))
    return [COLOURS.get(name) or next(spare) for name in names]
