"""HTML of the pages that runs and plans are shown on: parts of them, the frame, and the style."""

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any


def text(value: Any) -> str:
    """Convert a value to str and escape it for HTML, quotes too."""
    return html.escape(str(value))


def tiles(figures: Iterable[Sequence[str]], *, wide: bool = False) -> str:
    """HTML of headline figures. figures: (name, value, small text below it or nothing)."""
    cells = "".join(
        f"<div class='tile'><dt>{text(name)}</dt><dd>{text(value)}</dd>"
        f"{''.join(f'<small>{text(line)}</small>' for line in small if line)}</div>"
        for name, value, *small in figures
    )
    return f"<dl class='tiles{' four' * wide}'>{cells}</dl>"


def prose(line: Any) -> str:
    """HTML of a sentence, in which what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text(line))


def notes(lines: Iterable[str]) -> str:
    """HTML of pale paragraphs; "" without lines."""
    return "".join(f"<p class='note'>{prose(line)}</p>" for line in lines)


def sentences(title: str, lines: Iterable[str], *, numbered: bool = False) -> str:
    """HTML of a heading, if there is one, and a list; "" without lines."""
    items = "".join(f"<li>{prose(line)}</li>" for line in lines)
    heading, kind = f"<h2>{text(title)}</h2>" if title else "", "ol" if numbered else "ul"
    return f"<section>{heading}<{kind}>{items}</{kind}></section>" if items else ""


def script_json(value: Any) -> str:
    """JSON for a script element, with `<` escaped so that nothing ends the element. ValueError for NaN."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def data_element(name: str, value: Any) -> str:
    """An element with the id `name` that holds a value as JSON, for the page's scripts."""
    return f"<script type='application/json' id='{name}'>\n{script_json(value)}\n</script>"


EMPTY = "<section><p class='empty'>{}</p></section>"  # where there is nothing to show

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{head}
<title>{title}</title>
<style>{style}</style>
</head>
<body{follows}>
<main>
{links}
<header><h1>{heading}</h1><p id="subtitle">{subtitle}</p></header>
<div id="before">{before}</div>
{charts}
<div id="after">{after}</div>
<footer>{footer}</footer>
</main>
{scripts}
</body>
</html>
"""

STYLE = """
:root {
  --ink: #1c1f23; --soft: #666d76; --line: #e4e6ea; --paper: #ffffff; --card: #f6f7f8; --right: #00795b;
  --chosen: #d0103a;
  --sans: system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "Liberation Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e3e6ea; --soft: #98a0aa; --line: #2c3138; --paper: #15181c; --card: #1d2126; --right: #4fc4a0;
    --chosen: #ff5c7c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 var(--sans); font-variant-numeric: tabular-nums;
}
main { max-width: 1080px; margin: 0 auto; padding: 48px 24px 32px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 6px; overflow-wrap: anywhere; }
header p { margin: 0; color: var(--soft); }
h2 { font-size: 17px; letter-spacing: -0.005em; margin: 44px 0 12px; }
small { color: var(--soft); font-size: 13px; font-weight: 400; }
code, pre, .samples td { font-family: var(--mono); font-size: 13px; }

.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 32px 0 8px;
}
.tile { background: var(--card); border-radius: 8px; padding: 14px 16px 12px; }
.tile dt { color: var(--soft); font-size: 13px; }
.tile dd { margin: 2px 0 0; font-size: 25px; line-height: 1.25; font-weight: 600; letter-spacing: -0.02em; }

.tiles.four { grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); margin-top: 16px; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }

.plots {
  display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 28px 36px; margin-top: 36px;
}
.plots figure { margin: 0; min-width: 0; overflow-x: auto; }
.plots figure:first-child, .plots .whole { grid-column: 1 / -1; }
.plots .chart { width: 100%; }
figcaption { font-weight: 600; margin-bottom: 6px; }
figcaption small { margin-left: 6px; }
figcaption button {
  float: right; margin-left: 8px; padding: 0 8px; font: 12px/1.6 var(--sans); color: var(--soft);
  background: var(--card); border: 1px solid var(--line); border-radius: 6px;
}
figcaption button[aria-pressed=true] { color: var(--paper); background: var(--ink); }

progress { display: block; width: 100%; height: 10px; margin: 24px 0 -12px; accent-color: var(--right); }
.note { color: var(--soft); font-size: 13px; margin: 20px 0 0; }

.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; }
.wide.tall {
  max-height: 75vh; overflow: auto; margin-top: 16px; border: 1px solid var(--line); border-radius: 8px;
}
.tall table { min-width: 100%; }
.tall thead th {
  position: sticky; top: 0; background: var(--card); padding: 6px 12px; vertical-align: bottom;
  white-space: normal; overflow-wrap: normal; z-index: 2;
}
.tall td {
  padding: 5px 12px; white-space: nowrap; max-width: 420px; overflow: hidden; text-overflow: ellipsis;
}
#chosen thead th { white-space: nowrap; }
.tall .facts td, .tall .facts th { padding: 6px 12px; vertical-align: baseline; }
.tall tr > :nth-child(-n+2) { position: sticky; left: 0; background: var(--paper); z-index: 1; }
.tall thead tr > :nth-child(-n+2) { background: var(--card); z-index: 3; }
.tall .facts tr > :first-child { min-width: 34px; padding-right: 0; }
.tall .facts tr > :nth-child(2) { left: 34px; }
.tall td input { margin: 0; vertical-align: -2px; }
th button { all: unset; cursor: pointer; overflow-wrap: normal; }
th button:focus-visible { outline: 2px solid var(--right); }
th[aria-sort=ascending] button::after { content: " ▲"; }
th[aria-sort=descending] button::after { content: " ▼"; }
.filters { display: flex; flex-wrap: wrap; gap: 8px 18px; margin-bottom: 8px; }
.filters label { margin: 0; }
.filters input, .filters select, #chosen button {
  font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 8px; max-width: 240px;
}
#chosen button { margin: 8px 0 12px; cursor: pointer; }
label { color: var(--soft); font-size: 13px; margin-left: 6px; }
.facts { font-size: 14px; }
.facts th { width: 150px; }
.facts th, .facts td { padding: 4px 28px 4px 0; vertical-align: top; overflow-wrap: anywhere; }
.facts th { white-space: nowrap; }
.samples { width: 100%; }
.samples th { width: auto; padding: 4px 20px 6px 0; border-bottom: 1px solid var(--line); }
.samples td {
  padding: 7px 20px 7px 0; border-bottom: 1px solid var(--line); white-space: pre-wrap; min-width: 90px;
}
.samples .exact, #control-tokens:checked ~ .wide .plain { display: none; }
#control-tokens:checked ~ .wide .exact { display: inline; }
.samples .right { color: var(--right); }
.samples .right::after { content: " ✓"; }
.samples .wrong { color: var(--soft); }
.compared th { width: auto; }
.compared .best { color: var(--right); font-weight: 600; }
.facts.numbers th { width: auto; }
.facts.numbers td, .facts.numbers thead th { text-align: right; overflow-wrap: normal; }
.layouts td.layout, .layouts th.layout { text-align: left !important; }
.facts.listing td.left, .facts.listing thead th.left { text-align: left; }
.listing td, .listing th { padding-right: 20px; border-bottom: 1px solid var(--line); }
.listing .total { font-weight: 600; }
.layouts .why { color: var(--soft); font: 13px/1.45 var(--sans); margin-top: 3px; max-width: 560px; }
.layouts .chosen { background: var(--card); box-shadow: inset 3px 0 var(--chosen); }
.layouts .chosen strong { color: var(--chosen); }
.layouts td, .layouts th { padding: 7px 14px; border-bottom: 1px solid var(--line); white-space: nowrap; }
.layouts td.layout { white-space: normal; }
.layouts { width: 100%; }
h2 code { font-size: 16px; }
ul, ol { padding-left: 20px; margin: 0; }
li { margin: 4px 0; overflow-wrap: anywhere; }
.facts.left-out th, .facts.left-out td { width: auto; }
.facts.left-out td:first-child { text-align: right; white-space: nowrap; }
pre { background: var(--card); border-radius: 8px; padding: 14px 16px; overflow-x: auto; line-height: 1.5; }
code { background: var(--card); border-radius: 4px; padding: 2px 6px; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); }
.empty, footer { color: var(--soft); }
footer { margin-top: 56px; padding-top: 14px; border-top: 1px solid var(--line); font-size: 13px; }
@media (min-width: 1144px) {
  .wide.tall { --all: min(1480px, 100vw - 64px); width: var(--all); }
  .wide.tall { margin-left: calc((100% - var(--all)) / 2); }
}
@media (max-width: 720px) {
  .tall tr > :nth-child(2) { min-width: 110px; white-space: normal; overflow-wrap: anywhere; }
  .tall td.left { min-width: 170px; white-space: normal; }
  .wide:not(.tall) > .numbers:not(.layouts) tr > :first-child {
    position: sticky; left: 0; background: var(--paper);
  }
  .plots { grid-template-columns: minmax(0, 1fr); }
  main { padding: 28px 16px; }
  .tiles.four { grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); }
  .tile dd { font-size: 20px; }
  .layouts thead { display: none; }
  .layouts, .layouts tbody { display: block; }
  .layouts tr { display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 10px 8px; }
  .layouts tr { border-bottom: 1px solid var(--line); }
  .layouts td { border: 0; padding: 0; text-align: left !important; }
  .layouts td.layout { flex: 1 0 85%; }
  .layouts td[data-name]::before { content: attr(data-name) " "; color: var(--soft); font-size: 12px; }
  .facts th { width: 90px; white-space: normal; }
  .facts td, .facts th { padding-right: 10px; }
  .samples thead { display: none; }
  .samples, .samples tbody, .samples tr, .samples td { display: block; }
  .samples tr { border-bottom: 1px solid var(--line); padding: 10px 0; }
  .samples td { border: 0; padding: 3px 0; min-width: 0; }
  .samples td::before {
    content: attr(data-name); display: block; color: var(--soft); font: 12px/1.4 var(--sans);
  }
}
@media print { .plots figure { break-inside: avoid; } }
"""
