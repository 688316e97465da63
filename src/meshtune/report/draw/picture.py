"""Panels as one .png or .svg picture, in rows, drawn without a browser."""

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtune.errors import UserError
from meshtune.report.draw import vega
from meshtune.report.draw.document import Document
from meshtune.report.draw.kinds import Areas, HeatMap, Lines, Multiples, Panel, Scatter, Stacks, Timeline
from meshtune.report.draw.theme import LIGHT, config
from meshtune.rundir import write_text_atomically

SUFFIXES = (".png", ".svg")
PAGE = ".html"
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


def check(file: Path) -> str:
    """Suffix in lower case of a file that `write_document` can write. Raises UserError for another one, and
    without Altair.
    """
    suffix = known_suffix(file, (PAGE, *SUFFIXES))
    vega.require()
    return suffix


def write_document(file: Path, document: Document) -> None:
    """Write a document as a page, or its pictures as one picture, by the file's suffix. Raises as `check`."""
    if check(file) == PAGE:
        write_text_atomically(file, document.html())
    else:
        save(picture_of(document), file)


def picture_of(document: Document) -> dict[str, Any]:
    """All pictures of a document, of which there is at least one, as `specification`."""
    title = f"{document.name} · {html.unescape(document.subtitle)}"
    return specification(in_rows(document.panels), title=title)


def in_rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Panels of a picture by row: stacks side by side, then a row for each other one, then scatter charts."""
    stacks: list[Panel] = [panel for panel in panels if isinstance(panel, Stacks)]
    scatters: list[Panel] = [panel for panel in panels if isinstance(panel, Scatter)]
    others: list[list[Panel]] = [[panel] for panel in panels if not isinstance(panel, Stacks | Scatter)]
    return [row for row in (stacks, *others, scatters) if row]


def write(
    file: Path,
    rows: Sequence[Sequence[Panel]],
    *,
    title: str,
    width: int = WIDTH,
) -> Path:
    """Write panels as one picture, .png or .svg by the file's suffix, and return `file`.

    rows: panels from top to bottom, those of a row side by side; at least one row, and no row empty. In a row
    only the first panel shows the names of `Stacks`, so all `Stacks` of a row must have the same names.
    title: above all panels. width: px of the whole picture, about; a .png has PNG_SCALE times that.
    Raises UserError for another suffix, and without Altair.
    """
    known_suffix(file)
    save(specification(rows, title=title, width=width), file)
    return file


def specification(rows: Sequence[Sequence[Panel]], *, title: str, width: int = WIDTH) -> dict[str, Any]:
    """Rows of panels under one title as a Vega-Lite specification without a theme (`config`), for `save`.

    Arguments as those of `write`. Raises NotDrawn without Altair.
    """
    vega.require()
    from meshtune.report.draw import charts

    whole: dict[str, Any] = {
        "title": {"text": title, "fontSize": 16, "offset": 24},
        "padding": 24,
        "spacing": GAP,
        "align": "none",
        "resolve": INDEPENDENT,
        "params": [],
        "vconcat": [],
    }
    left = max(_labels_width(row[0]) for row in rows)  # the charts of all rows begin in line
    for row in rows:
        named = [place == 0 or not isinstance(panel, Stacks) for place, panel in enumerate(row)]
        labels = left + sum(map(_labels_width, row[1:], named[1:]))
        plot_width = round((width - GAP * (len(row) - 1) - labels) / len(row))
        legends = any(map(has_legend, row))
        specs = [
            charts.specification(
                panel,
                width=plot_width,
                title_offset=TITLE if has_legend(panel) or not legends else TITLE + LEGEND,
                named=with_names,
            )
            for panel, with_names in zip(row, named, strict=True)
        ]
        for spec in specs:  # selections belong to the outermost specification
            whole["$schema"] = spec.pop("$schema")
            whole["params"] += spec.pop("params", [])
        whole["vconcat"].append({"hconcat": specs, "spacing": GAP, "align": "none", "resolve": INDEPENDENT})
    return whole


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
    """Px left of a chart that its axis labels take. named: False for `Stacks` drawn without their names."""
    match panel:
        case Stacks():
            return CHARACTER * max(map(len, panel.names)) + 10 if named else UNNAMED
        case HeatMap():
            return CHARACTER * max(map(len, panel.rows)) + 10
        case _:
            return NUMBERS


def save(spec: dict[str, Any], file: Path) -> None:
    """Write a specification with the light theme as .png or .svg, by the file's suffix.

    spec: without `config`; it is not changed. The file is replaced atomically, and its folder is made. The
    same specification gives the same bytes. Raises UserError for another suffix.
    """
    suffix = known_suffix(file)
    themed = {**spec, "config": config(LIGHT, background=LIGHT["paper"])}
    if suffix == ".svg":
        write_text_atomically(file, vega.svg(themed))
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(vega.png(themed))
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
