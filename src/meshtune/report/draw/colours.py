"""One fixed colour for each part of memory and of a step, in charts and in the terminal."""

from collections.abc import Sequence

from meshtune.plan.memory.timeline import CATEGORIES
from meshtune.plan.seconds.step import PARTS
from meshtune.report.draw.theme import DARK, LIGHT, OTHERS

# In the order of CATEGORIES and of PARTS; "optimizer" is in both, with one colour.
MEMORY = (LIGHT["main"], LIGHT["other"], "#009e73", "#7a6fb0", "#cc79a7", DARK["other"], "#8b929b")
TIME = (
    DARK["main"], LIGHT["other"], "#cc79a7", "#7a6fb0", DARK["other"], "#009e73", "#b9bfc7", "#a6761d",
    "#6b727b",
)  # fmt: skip
COLOURS = dict(zip(CATEGORIES, MEMORY, strict=True)) | dict(zip(PARTS, TIME, strict=True))


def colours_of(names: Sequence[str]) -> list[str]:
    """Colours as "#rrggbb", one per name, in the order of `names`.

    Parts of memory and of a step have their fixed colour (COLOURS); other names take the palette's in turn.
    """
    spare = iter(OTHERS * (1 + len(names) // len(OTHERS)))
    return [COLOURS.get(name) or next(spare) for name in names]
