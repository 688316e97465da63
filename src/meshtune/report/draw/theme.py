"""Colours, and the Vega-Lite configuration that gives every chart the same look, on light and dark pages.

A chart names roles, not colours: `main`, `other`, `ink`, `soft`, `chosen`, `grid` and `paper` are parameters
of the configuration, so one specification serves both themes. The palette is that of Okabe and Ito, which
colour-blind readers can tell apart, with a few shades between.
"""

from collections.abc import Mapping
from typing import Any

LIGHT = {
    "main": "#0072b2",
    "other": "#d55e00",
    "ink": "#3b4046",
    "soft": "#8b8f96",
    "chosen": "#d0103a",
    "grid": "#e4e6ea",
    "paper": "#ffffff",
}
DARK = {
    "main": "#56b4e9",
    "other": "#e69f00",
    "ink": "#b9bfc7",
    "soft": "#7d848c",
    "chosen": "#ff5c7c",
    "grid": "#2c3138",
    "paper": "#15181c",
}
OTHERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6fb0", "#8b929b")
SHADES = ("#f7faf9", "#d9e8e5", "#b5d3cd", "#8fbcb4")  # of a heat map, low to high
ON_SHADE = "#1c1f23"  # text on them, in both themes

SANS = 'system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "Liberation Sans", sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'
TEXT = 12  # px; titles are 14


def config(colours: Mapping[str, str], *, background: str) -> dict[str, Any]:
    """The `config` of a Vega-Lite specification.

    colours: LIGHT or DARK, role -> colour. background: a colour, or "transparent".
    """
    ink = colours["ink"]
    return {
        "params": [{"name": role, "value": colour} for role, colour in colours.items()],
        "background": background,
        "font": SANS,
        "padding": 2,
        "view": {"stroke": None},
        "axis": {
            "domain": False,
            "gridColor": colours["grid"],
            "labelColor": ink,
            "labelFontSize": TEXT,
            "labelPadding": 6,
            "ticks": False,
            "title": None,
            "titleColor": ink,
            "titleFontSize": TEXT,
            "titleFontWeight": "normal",
        },
        "legend": {
            "columnPadding": 14,
            "labelColor": ink,
            "labelFontSize": TEXT,
            "labelLimit": 0,
            "orient": "top",
            "offset": 10,
            "padding": 0,
            "symbolSize": 110,
            "symbolStrokeWidth": 2.5,
            "title": None,
            "titleColor": ink,
            "titleFontSize": TEXT,
            "titleFontWeight": "normal",
        },
        "header": {"labelColor": ink, "labelFontSize": TEXT, "labelFontWeight": 600},
        "title": {
            "anchor": "start",
            "color": ink,
            "fontSize": 14,
            "fontWeight": 600,
            "frame": "group",
            "offset": 12,
            "subtitleColor": ink,
            "subtitleFontSize": TEXT,
            "subtitlePadding": 4,
        },
        "text": {"color": ink, "fontSize": TEXT - 1},
        "rule": {"color": ink},
    }
