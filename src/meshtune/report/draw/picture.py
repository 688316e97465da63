"""Panels as .png, .svg and .pdf pictures, drawn without a browser: several in rows, or each in a file."""

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshtune.errors import UserError
from meshtune.report.draw import vega
from meshtune.report.draw.document import Document, Pictures
from meshtune.report.draw.kinds import Areas, HeatMap, Lines, Multiples, Panel, Scatter, Stacks, Timeline
from meshtune.report.draw.theme import LIGHT, config
from meshtune.report.draw.words import longest_line
from meshtune.rundir import write_atomically, write_text_atomically
from meshtune.units import counted

SUFFIXES = (".png", ".svg", ".pdf")
PX = {"mm": 96 / 25.4, "cm": 96 / 2.54, "in": 96.0, "pt": 96 / 72}  # px of a unit of length
LEAST, MOST = 40 * PX["mm"], 1000 * PX["mm"]  # px of a picture's width
NARROW, HEIGHT = 520, 0.62  # px of width below which pictures are of columns, and their height as a share
MOST_BARS = 16  # of a column's picture, which is not longer than a page then
PAGE, CAPTIONS = ".html", "captions.txt"
SIMULATED = "simulated"  # in the name of a document whose experiments were not run
WIDTH, GAP = 1200, 44  # px of a picture, and between charts side by side
NUMBERS, UNNAMED = 52, 8  # px left of a chart for the labels of a number axis, or for none
CHARACTER = 6.7  # px of a name's monospaced characters
TITLE, LEGEND = 12, 19  # px between title and chart, and of a legend in one line
INDEPENDENT = {"scale": {"color": "independent", "opacity": "independent"}}


def known_suffix(file: Path, known: Sequence[str] = SUFFIXES) -> str:
    """The file's suffix in lower case, with its dot. Raises UserError where it is not among `known`."""
    suffix = file.suffix.lower()
    if suffix not in known:
        raise UserError(
            f"'{file}' ends in {repr(suffix) if suffix else 'nothing'}; pictures are written as "
            f"{', '.join(known)}, such as {file.with_suffix(known[0])}."
        )
    return suffix


@dataclass(frozen=True)
class Target:
    """Place of pictures: a page, one picture of all, or a folder with a file for each of them in every format
    of SUFFIXES and, where they are of a paper, CAPTIONS.
    """

    path: Path
    width: float | None = None  # px of each picture; None: WIDTH about, for a screen

    @property
    def is_folder(self) -> bool:
        return not self.path.suffix or self.path.is_dir()

    def of(self, name: str) -> "Target":
        """Place of one of several documents: a folder in the folder, or the file with its name."""
        path = self.path
        return replace(self, path=path / name if self.is_folder else path.with_stem(f"{path.stem}-{name}"))

    def write(self, document: Document, count: Callable[[str], None] = lambda _: None) -> list[Path]:
        """Write the document as a page or its pictures; return the files. count: gets how many are drawn."""
        if self.path.suffix.lower() == PAGE:
            write_text_atomically(self.path, document.html())
            return [self.path]
        if not self.is_folder:
            return save(picture_of(document, self.width), self.path, width=self.width)
        files: list[Path] = []
        for number, panel in enumerate(document.panels):
            count(f"drew {number} of {counted(len(document.panels), 'picture')}")
            spec = picture_of(replace(document, parts=[Pictures([panel])]), self.width)
            names = [self.path / f"{panel.key}{suffix}" for suffix in SUFFIXES]
            files += save(spec, *names, width=self.width)
        if files and self.width:  # which have no titles
            lines = [
                f"{panel.key}: {panel.title}{f' ({panel.unit})' * bool(panel.unit)}\n"
                for panel in document.panels
            ]
            files.append(self.path / CAPTIONS)
            write_text_atomically(files[-1], "".join(lines))
        return files


def target(path: Path, width: str | None = None) -> Target:
    """Check the values of --plot and --width. Raises UserError for another ending and for
    another width, NotDrawn without Altair.
    """
    suffix = "" if Target(path).is_folder else known_suffix(path, (PAGE, *SUFFIXES))
    if not suffix and path.is_file():
        raise UserError(f"{path} is a file; name a folder, or a file ending in {', '.join(SUFFIXES)}.")
    vega.require()
    if width is None:
        return Target(path)
    if suffix == PAGE:
        raise UserError(f"The width {width} is of pictures; {path} is a page, as wide as its window.")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(mm|cm|in|pt)", str(width).strip().lower())
    px = float(found[1]) * PX[found[2]] if found else 0.0
    if not LEAST <= px <= MOST:
        raise UserError(
            f"The width {width}: write a length from 40mm to 1000mm, such as 84mm, 8.4cm, 3.3in or 240pt."
        )
    return Target(path, px)


def picture_of(document: Document, width: float | None = None) -> dict[str, Any]:
    """All pictures of a document (at least one), as `specification`.

    width: px of a column of a paper, whose caption has the title; the picture says only that it is simulated.
    None: WIDTH, with the document's title.
    """
    if width:
        panels, several = document.panels, len(document.panels) > 1
        word = SIMULATED * (SIMULATED in document.name)
        titles = [", ".join(filter(None, [panel.title * several, word])) for panel in panels]
        rows = [[replace(panel, title=words)] for panel, words in zip(panels, titles, strict=True)]
        return specification(rows, title="", width=round(width))
    title = f"{document.name} · {html.unescape(re.sub('<[^>]*>', '', document.subtitle))}"
    return specification(in_rows(document.panels), title=title)


def in_rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Panels of a picture by row: stacks side by side, a row for each other one, scatter charts in pairs."""
    stacks: list[Panel] = [panel for panel in panels if isinstance(panel, Stacks)]
    scatters: list[Panel] = [panel for panel in panels if isinstance(panel, Scatter)]
    others: list[list[Panel]] = [[panel] for panel in panels if not isinstance(panel, Stacks | Scatter)]
    pairs = [scatters[first : first + 2] for first in range(0, len(scatters), 2)]
    return [row for row in (stacks, *others, *pairs) if row]


def write(
    file: Path,
    rows: Sequence[Sequence[Panel]],
    *,
    title: str,
    width: int = WIDTH,
) -> Path:
    """Write panels as one picture, .png, .svg or .pdf by the file's suffix, and return `file`.

    rows: panels from top to bottom, those of a row side by side; at least one row, and no row empty. In a row
    only the first panel shows the names of `Stacks`, so all `Stacks` of a row must have the same names.
    title: above all panels. width: px of the whole picture, about; a .png has PNG_SCALE times that.
    Raises UserError for another suffix, and without Altair.
    """
    known_suffix(file)
    save(specification(rows, title=title, width=width), file)
    return file


def specification(rows: Sequence[Sequence[Panel]], *, title: str, width: int = WIDTH) -> dict[str, Any]:
    """Rows of panels under one title as a Vega-Lite specification without a theme (`config`). Below NARROW px
    they are drawn as on a phone, no higher than HEIGHT of the width.

    title: above all; "": none. A panel without a title has no room for one.

    Other arguments as those of `write`. Raises NotDrawn without Altair.
    """
    vega.require()
    from meshtune.report.draw import charts

    whole: dict[str, Any] = {
        **({"title": {"text": title, "fontSize": 16, "offset": 24}} if title else {}),
        "padding": 24 if title else 2,
        "spacing": GAP,
        "align": "none",
        "resolve": INDEPENDENT,
        "params": [],
        "vconcat": [],
    }
    narrow = width < NARROW
    if narrow:
        rows = [[_lower(panel, round(HEIGHT * width)) for panel in row] for row in rows]
    left = max(_labels_width(row[0], not narrow) for row in rows)  # the charts of all rows begin in line
    for row in rows:
        named = [place == 0 or not isinstance(panel, Stacks) for place, panel in enumerate(row)]
        labels = left + sum(map(_labels_width, row[1:], named[1:]))
        plot_width = round((width - GAP * (len(row) - 1) - labels) / len(row))
        legends = any(map(has_legend, row))
        specs = [
            charts.specification(
                panel,
                width=plot_width,
                title_offset=TITLE + LEGEND * (legends and not has_legend(panel)) if panel.title else None,
                named=with_names,
                narrow=narrow,
            )
            for panel, with_names in zip(row, named, strict=True)
        ]
        for spec in specs:  # selections belong to the outermost specification
            whole["$schema"] = spec.pop("$schema")
            whole["params"] += spec.pop("params", [])
        whole["vconcat"].append({"hconcat": specs, "spacing": GAP, "align": "none", "resolve": INDEPENDENT})
    return whole


def _lower(panel: Panel, height: int) -> Panel:
    """The panel with at most this height, or MOST_BARS bars; cells and lanes have their own height."""
    if isinstance(panel, Lines | Scatter | Areas):
        return replace(panel, height=min(panel.height, height))
    if isinstance(panel, Stacks) and len(panel.names) > MOST_BARS:
        note = f"the first {MOST_BARS} of {counted(len(panel.names), panel.item)}"
        parts = {part: sizes[:MOST_BARS] for part, sizes in panel.parts.items()}
        names, ends = panel.names[:MOST_BARS], panel.ends[:MOST_BARS]
        title = ", ".join(filter(None, [panel.title, note]))
        return replace(panel, title=title, names=names, ends=ends, parts=parts)
    return panel


def has_legend(panel: Panel) -> bool:
    """True if a chart of this panel has a legend, which stands between the chart and its title."""
    match panel:
        case Lines():
            return len(panel.series) > 1
        case Scatter() | Multiples():
            return len(panel.groups) > 1
        case _:
            return isinstance(panel, Stacks | Timeline | Areas)


def _labels_width(panel: Panel, named: bool = True) -> float:
    """Px left of a chart that its axis labels take. named: False where names of bars don't stand there, and
    those of rows stand in lines.
    """
    match panel:
        case Stacks():
            return CHARACTER * max(map(len, panel.names)) + 10 if named else UNNAMED
        case HeatMap():
            return CHARACTER * longest_line(panel.rows, narrow=not named) + 10
        case _:
            return NUMBERS


def save(spec: dict[str, Any], *files: Path, width: float | None = None) -> list[Path]:
    """Write a specification with the light theme as .png, .svg or .pdf, by each file's suffix; returns them.

    spec: without `config`; it is not changed. width: px of the pictures, exactly; None: as they come. Files
    are replaced atomically, and their folder is made. The same specification gives the same pixels. Raises
    UserError for another suffix.
    """
    suffixes = [known_suffix(file) for file in files]
    drawn = vega.svg({**spec, "config": config(LIGHT, background=LIGHT["paper"])})
    for file, suffix in zip(files, suffixes, strict=True):
        write_atomically(file, vega.converted(drawn, suffix, width))
    return [*files]
