"""A Document as a part of another page, such as a notebook's output: HTML without scripts, whose pictures are
SVG, in the colours of the notebook's theme.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

from meshtune.report.draw import vega
from meshtune.report.draw.document import Document, Pictures
from meshtune.report.draw.kinds import Lines, Panel
from meshtune.report.draw.page import STYLE, notes, text
from meshtune.report.draw.picture import picture_of
from meshtune.report.draw.theme import DARK, LIGHT, SANS, config
from meshtune.units import counted

MOST = 60_000  # bytes of a part
OF_TEXT = 30_000  # of these, for everything but pictures
CURVE, WHOLE = 420, 900  # px of a plot of curves, and of another one
DARK_THEME = ":is([data-jp-theme-light=false], .vscode-dark, [theme=dark]) &"  # Jupyter, VS Code, Colab
SHORTENED = re.compile(r' (?:aria-[a-z]+|role|class|pointer-events)="[^"]*"')
ROLES = {role: f"var(--chart-{role})" for role in LIGHT}  # colours that the part's style gives


class Picture:
    """All pictures of a document, in one that a notebook shows."""

    def __init__(self, document: Document) -> None:
        self._specification = picture_of(document)
        self._line = f"{document.name}: {', '.join(panel.title for panel in document.panels)}"

    def __repr__(self) -> str:
        return f"<Picture {self._line}>"

    def _repr_svg_(self) -> str:
        return vega.svg({**self._specification, "config": config(LIGHT, background=LIGHT["paper"])})


def part(document: Document) -> str:
    """The document's parts in their order while there is room for them, and how many are left out."""
    bodies: dict[int, str] = {}
    room, left_out = OF_TEXT, 0
    for place, one in enumerate(document.parts):
        if isinstance(one, Pictures):
            continue
        body = one.html()
        if "<script" in body or len(body.encode()) > room:  # without its script it shows nothing
            left_out += 1
            continue
        bodies[place] = body
        room -= len(body.encode())
    room += MOST - OF_TEXT - len(style()) - 1_000  # of the frame
    for place, one in enumerate(document.parts):
        if isinstance(one, Pictures):
            bodies[place], without, room = pictures(one.panels, room)
            left_out += without
    rest = f"{counted(left_out, 'part')} of the page left out here; .plot('page.html') writes all of it."
    return (
        f"<div class='meshtune'><style>{style()}</style><header><h1>{text(document.name)}</h1>"
        f"<p>{document.subtitle}</p></header>{''.join(bodies[place] for place in sorted(bodies))}"
        f"{notes([rest] if left_out else [])}</div>"
    )


def pictures(panels: Sequence[Panel], room: int) -> tuple[str, int, int]:
    """(HTML of the panels that have room, the number of the others, bytes that are left)."""
    drawn: dict[str, str] = {}
    for panel in panels:
        svg = as_svg(panel)
        if len(svg.encode()) + 500 <= room:
            drawn[panel.key] = svg
            room -= len(svg.encode()) + 500
    html = Pictures([panel for panel in panels if panel.key in drawn]).html()
    for key, svg in drawn.items():
        html = html.replace(f"id='chart-{key}'></div>", f">{svg}</div>")
    return html, len(panels) - len(drawn), room


def as_svg(panel: Panel) -> str:
    """A panel without its title, of few bytes, whose identifiers no other picture of the notebook has."""
    vega.require()
    from meshtune.report.draw.charts import specification

    spec = specification(panel, width=CURVE if isinstance(panel, Lines) else WHOLE)
    svg = vega.svg({**spec, "config": config(ROLES, background="transparent")})
    svg = SHORTENED.sub("", svg).replace(f' font-family="{text(SANS)}"', "")
    name = f"m{crc32(svg.encode()):x}-"
    return re.sub(r'(id="|url\(#|href="#)', rf"\1{name}", svg)


def style() -> str:
    """The page's style for what stands in the part, with the colours of its charts."""
    light, dark = ("".join(f"--chart-{role}: {c};" for role, c in theme.items()) for theme in (LIGHT, DARK))
    own = STYLE.replace("@media (prefers-color-scheme: dark)", DARK_THEME)
    own = own.replace(":root", "&").replace("body {", "& {")
    more = f"{light} padding: 16px; table {{ color: inherit; }} svg {{ max-width: 100%; height: auto; }}"
    more += f" {DARK_THEME} {{ {dark} }}"
    return re.sub(r"\s+", " ", f".meshtune {{ {more} {own} }}")
