"""Altair and vl-convert: one writes specifications, the other turns them into pictures and brings the
JavaScript for pages. Neither needs a browser or a network.

Both are imported only when something is drawn. Without them `NotDrawn` says how to install them.
"""

import os
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshtune.errors import UserError
from meshtune.rundir import write_text_atomically

SCRIPTS = Path("~/.cache/meshtune")  # making the page's JavaScript takes some seconds, so it is kept here
SNIPPET = "window.vegaEmbed = vegaEmbed;"
LONG_NUMBER = re.compile(r"\d+\.\d{3,}(?:e-\d+)?")
PNG_SCALE = 2.0  # pixels of a .png for each of the chart's
PRINTED = 300  # pixels of an inch of a .png whose width on paper is given


class NotDrawn(UserError):
    """Altair or vl-convert can't be imported; the text says which and how to install it."""


def require() -> None:
    """Import Altair and vl-convert, or raise NotDrawn."""
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        missing = error.name or str(error)
        raise NotDrawn(
            f"Charts are drawn by altair and vl-convert-python, and '{missing}' can't be imported; install "
            "them with: pip install altair vl-convert-python"
        ) from error


@cache
def vega_lite_version() -> str:
    """Version of Vega-Lite that Altair writes, as vl-convert names it, such as "6.4"."""
    require()
    import altair

    return ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


@cache
def javascript() -> str:
    """JavaScript of Vega, Vega-Lite and vega-embed in one piece, which sets `window.vegaEmbed`.

    Cached in SCRIPTS. Raises NotDrawn without Altair or vl-convert.
    """
    require()
    import vl_convert

    name = f"vega-{version('vl-convert-python')}-{vega_lite_version()}.js"
    file = Path(os.path.expanduser(SCRIPTS), name)
    with suppress(OSError, ValueError):  # not there yet, or damaged
        text = file.read_text(encoding="utf-8")
        if "window.vegaEmbed=" in text:
            return text
    text = vl_convert.javascript_bundle(SNIPPET, vl_version=vega_lite_version())
    text = re.sub(r"</(?=script)", r"<\\/", text, flags=re.IGNORECASE)  # can't end the element it stands in
    with suppress(OSError):  # where it can't be kept it is made again next time
        write_text_atomically(file, text)
    return text


def svg(spec: dict[str, Any]) -> str:
    """A Vega-Lite specification, with its theme (`config`), as the text of an SVG picture.

    Paths are rounded to a hundredth of a pixel: their digits are most of a large picture.
    """
    import vl_convert

    text = vl_convert.vegalite_to_svg(spec, vl_version=vega_lite_version(), allowed_base_urls=[])
    return re.sub(r' d="[^"]*"', lambda path: LONG_NUMBER.sub(_rounded, path[0]), text)


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def converted(svg: str, suffix: str, width: float | None = None) -> bytes:
    """A picture of `svg` as the bytes of a .svg, .png or .pdf file. width: px of 1/96 inch that it is wide on
    paper; None: as it was drawn, with PNG_SCALE pixels in a .png for each of its own.
    """
    import vl_convert

    size = re.search(r'width="([\d.]+)" height="([\d.]+)"', svg)
    assert size
    across, up = map(float, size.groups())
    scale = width / across if width else 1.0

    def of_size(px: float, unit: str) -> str:
        return svg.replace(
            size[0], f'width="{across * scale * px:.4f}{unit}" height="{up * scale * px:.4f}{unit}"', 1
        )

    match suffix:
        case ".pdf":  # whose unit is 1/72 inch
            return vl_convert.svg_to_pdf(of_size(0.75, ""))
        case ".png" if width:
            return vl_convert.svg_to_png(of_size(0.75, ""), ppi=PRINTED)
        case ".png":
            return vl_convert.svg_to_png(svg, scale=PNG_SCALE)
    return (of_size(25.4 / 96, "mm") if width else svg).encode()
