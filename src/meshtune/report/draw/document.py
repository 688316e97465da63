"""An answer of meshtune: sentences, tables and pictures as one value, which terminal, page and JSON draw.

    terminal   every part in its order, but for pictures and what is OnPage
    page       one HTML file of every part but those InTerminal
    JSON       `facts`

A page opens from a disk, without a network: the JavaScript of Vega is inside it, once, however many pictures
there are. All text from data, settings or a model's answers is escaped by `text` or `script_json`. Light or
dark follows the reader's system. The page's content security policy forbids it to load anything and to make
code from text, so Vega interprets its expressions (`ast`) and the page reads its tables itself. All data
stand in elements of JSON, so that the scripts are the same on every page: `meshtune ui` serves the same page
with the scripts as files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from meshtune.report.draw import vega
from meshtune.report.draw.kinds import Lines, Multiples, Panel
from meshtune.report.draw.page import PAGE, STYLE, data_element, notes, sentences, text, tiles
from meshtune.report.draw.theme import DARK, LIGHT, config
from meshtune.report.draw.thin import MOST_ROWS, THINNED

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # of a file
SERVED = ("vega.js", "draw.js", "follow.js")  # scripts of a served page with pictures, in this order
DRAW = Path(__file__).with_name("draw.js")


class Part(Protocol):
    """A part of a document: HTML for the page, "" for none, and what rich prints."""

    def html(self) -> str: ...

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult: ...


@dataclass(frozen=True)
class Section:
    """A heading and lines below it; nothing at all without lines."""

    title: str
    lines: Sequence[str]
    numbered: bool = False  # from 1
    style: str = ""  # of the lines in the terminal

    def html(self) -> str:
        return sentences(self.title, self.lines, numbered=self.numbered)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.lines and self.title:
            yield Text(f"\n{self.title}", style="bold")
        for number, line in enumerate(self.lines, 1):
            line = f"{number}. {line}" if self.numbered else line
            yield Padding(Text(line, style=self.style), (0, 0, 0, 2 if self.title else 0))


@dataclass(frozen=True)
class Notes:
    """Lines without a heading, pale on the page."""

    lines: Sequence[str]
    style: str = "dim"  # in the terminal

    def html(self) -> str:
        return notes(self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from (Text(line, style=self.style) for line in self.lines)


@dataclass(frozen=True)
class Tiles:
    """Headline figures of a page: (name, value, small text below it or nothing)."""

    figures: Sequence[Sequence[str]]
    wide: bool = False

    def html(self) -> str:
        return tiles(self.figures, wide=self.wide)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from ()


@dataclass(frozen=True)
class Pictures:
    """Pictures of a page: `Lines` two a row, but for the first; it and all others take the whole width."""

    panels: Sequence[Panel]

    def html(self) -> str:
        """An empty element with a caption for each, which the page's script fills."""
        cells = "".join(
            f"<figure{'' if isinstance(panel, Lines) else ' class=whole'}>"
            f"<figcaption>{text(panel.title)} <small>{text(panel.unit)}</small></figcaption>"
            f"<div class='chart' id='chart-{panel.key}'></div></figure>"
            for panel in self.panels
        )
        curves = [curve for panel in self.panels if isinstance(panel, Lines) for curve in panel.series]
        note = notes([THINNED] if any(len(curve.x) > MOST_ROWS for curve in curves) else [])
        return f"<section class='plots'>{cells}</section>{note}" if cells else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from ()


@dataclass(frozen=True)
class OnPage:
    """A part, or HTML, that only the page has."""

    part: Part | str

    def html(self) -> str:
        return self.part if isinstance(self.part, str) else self.part.html()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from ()


@dataclass(frozen=True)
class InTerminal:
    """A part that only the terminal prints."""

    part: RenderableType

    def html(self) -> str:
        return ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.part


class Late(Mapping[str, Any]):
    """Facts that are computed when they are first read."""

    def __init__(self, compute: Callable[[], Mapping[str, Any]]) -> None:
        self.compute = compute

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        return self.compute()

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)


@dataclass(frozen=True)
class Document:
    """Parts in their order, and what stands around them on a page."""

    name: str  # plain text: the heading, and the beginning of the title
    parts: Sequence[Part]
    facts: Mapping[str, Any] = field(default_factory=dict)  # plain values, for --json
    kind: str = ""  # plain text behind the name in the title, such as "plan"
    subtitle: str = ""  # HTML, as is `footer`: the caller escapes it
    footer: str = ""
    scripts: Mapping[str, Path] = field(default_factory=dict)  # of the page's own elements: name -> file
    # Rows that came later, each given once -> HTML of the elements `subtitle` and `before`, which holds the
    # parts in front of the pictures, where they change.
    later: Callable[[Sequence[Any]], Mapping[str, str]] | None = None

    @property
    def panels(self) -> list[Panel]:
        """All of its pictures."""
        return [panel for part in self.parts if isinstance(part, Pictures) for panel in part.panels]

    @property
    def before(self) -> str:
        """HTML of the parts in front of the pictures; without pictures of all."""
        return _joined(takewhile(lambda part: not isinstance(part, Pictures), self.parts))

    @property
    def after(self) -> str:
        """HTML of the parts behind the pictures."""
        behind = dropwhile(lambda part: not isinstance(part, Pictures), self.parts)
        return _joined(part for part in behind if not isinstance(part, Pictures))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.parts

    def html(self) -> str:
        """One file. Raises NotDrawn where there are pictures and Altair is missing."""
        meta = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        own = [f"<script>\n{_code(file)}</script>" for file in self.scripts.values()]
        draws = [f"<script type='module'>{vega.javascript()}</script>"] if self.panels else []
        data = self._charts()
        draws += [data, f"<script type='module'>\n{_code(DRAW)}</script>"] if self.panels else []
        return self._filled(meta, "", [*own, *draws])

    def served(self, links: str, *, scripts: str, events: str, position: str) -> str:
        """The page as `meshtune ui` serves it: without code inside.

        links: HTML above the heading. scripts: address of the folder of scripts. events: address of the
        stream that tells of changes. position: what is sent to it, so that it begins where this page ends.
        """
        names = [*self.scripts, *(SERVED if self.panels else SERVED[-1:])]
        code = [f"<script type='module' src='{text(scripts)}/{text(name)}'></script>" for name in names]
        follows = f" data-events='{text(events)}' data-position='{text(position)}'"
        return self._filled('<link rel="icon" href="data:,">', follows, [self._charts(), *code], links)

    def _filled(self, head: str, follows: str, scripts: Sequence[str], links: str = "") -> str:
        return PAGE.format(
            head=head,
            title=" · ".join(text(part) for part in (self.name, self.kind, "meshtune") if part),
            style=STYLE,
            follows=follows,
            links=links,
            heading=text(self.name),
            subtitle=self.subtitle,
            before=self.before,
            charts="".join(part.html() for part in self.parts if isinstance(part, Pictures)),
            after=self.after,
            footer=self.footer,
            scripts="\n".join(scripts),
        )

    def _charts(self) -> str:
        """An element with the charts' specifications as JSON; "" without charts."""
        return data_element("charts", _specifications(self.panels)) if self.panels else ""


def _joined(parts: Iterable[Part]) -> str:
    return "\n".join(filter(None, (part.html() for part in parts)))


def _specifications(panels: Sequence[Panel]) -> dict[str, Any]:
    """Specifications of the charts by key, those that differ on a phone, and the two themes."""
    vega.require()
    from meshtune.report.draw.charts import specification

    charts = {panel.key: specification(panel, width="container") for panel in panels}
    of_phones = {
        panel.key: specification(panel, width="container", narrow=True)
        for panel in panels
        if not isinstance(panel, Lines | Multiples)
    }
    narrow = {key: chart for key, chart in of_phones.items() if chart != charts[key]}
    themes = {
        name: config(colours, background="transparent")
        for name, colours in (("light", LIGHT), ("dark", DARK))
    }
    return {"charts": charts, "narrow": narrow, "themes": themes}


def _code(file: Path) -> str:
    return file.read_text(encoding="utf-8")
