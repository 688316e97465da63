"""Data in the HTML of a page, for tests."""

import json
import re
from typing import Any


def data_in(html: str, name: str) -> Any:
    """The value of the JSON element `name`; {} if the page has none."""
    found = re.search(rf"<script type='application/json' id='{name}'>\n(.*)\n</script>", html)
    return json.loads(found[1]) if found else {}


def charts_of(html: str) -> dict[str, Any]:
    """The Vega-Lite specifications of a page's charts, by key."""
    return data_in(html, "charts").get("charts", {})


def valid(spec: dict[str, Any]) -> dict[str, Any]:
    """The specification of a chart; Altair, which checks none of them when it draws, refuses one that
    Vega-Lite does not know.
    """
    import altair as alt

    (alt.FacetChart if "facet" in spec else alt.LayerChart).from_dict(spec)
    return spec
