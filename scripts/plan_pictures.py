"""The docs' picture of where a GPT's parameters are.

    python scripts/plan_pictures.py [FOLDER]

It is drawn from the formula that the planner counts with.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from meshtune.plan.memory import gpt_parameters
from meshtune.report.draw.colours import COLOURS
from meshtune.report.draw.picture import known_suffix, save
from meshtune.report.draw.theme import LIGHT
from meshtune.units import count

VOCABULARY, SEQ_LEN, FEATURES_A_BLOCK = 50257, 1024, 128  # GPT-2's; GPT-3 of 175 B has h = 128 L
NARROW, WIDE, WIDTHS = 64, 16384, 120  # hidden sizes: ends of the axis, and how many are drawn between
SHADES = (LIGHT["main"], "#e69f00", COLOURS["optimizer"])


def parameter_shares(hidden: np.ndarray) -> dict[str, np.ndarray]:
    """Shares of the terms of L(12h² + 13h) + (V + s)h + 2h, the parameters of GPTs with L = h/128 blocks."""
    layers = hidden / FEATURES_A_BLOCK
    terms = {
        "matrices of the blocks, 12Lh²": 12 * layers * hidden**2,
        "embeddings, (V + s)h": (VOCABULARY + SEQ_LEN) * hidden,
        "biases and norms, 13Lh + 2h": 13 * layers * hidden + 2 * hidden,
    }
    total = gpt_parameters(layers, hidden, VOCABULARY, SEQ_LEN)
    return {name: term / total for name, term in terms.items()}


def parameters_picture(file: Path) -> Path:
    """Draw how the matrices of the blocks take over as a GPT gets wider, as .svg or .png."""
    known_suffix(file, (".svg", ".png"))
    save(parameters_chart(), file)
    return file


def parameters_chart() -> dict[str, Any]:
    """Stacked areas over the hidden size, with the names inside them, as a Vega-Lite specification."""
    import altair as alt

    hidden = np.geomspace(NARROW, WIDE, WIDTHS)
    shares = parameter_shares(hidden)
    matrices, embeddings, rest = shares
    half = float(np.interp(0.5, shares[matrices], hidden))
    starts = dict(zip(shares, np.cumsum([np.zeros(WIDTHS), *shares.values()], axis=0), strict=False))
    rows = [
        {"h": round(float(h), 2), "part": name, "from": float(start), "to": float(start + share)}
        for name in shares
        for h, start, share in zip(hidden, starts[name], shares[name], strict=True)
    ]
    x = alt.X(
        "h:Q",
        scale=alt.Scale(type="log", base=2, domain=[NARROW, WIDE], nice=False),
        axis=alt.Axis(
            values=[2**n for n in range(6, 15)],
            labelExpr="[format(datum.value, ','), " + _sizes() + "]",
            grid=False,
            title=f"hidden size h, and parameters with L = h/{FEATURES_A_BLOCK} blocks, V = {VOCABULARY:,}, "
            f"s = {SEQ_LEN:,}",
        ),
    )
    y = alt.Y("from:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", grid=False))
    colour = alt.Color("part:N", scale=alt.Scale(domain=list(shares), range=list(SHADES)), legend=None)
    areas = alt.Chart(alt.Data(values=rows)).mark_area().encode(x=x, y=y, y2="to:Q", color=colour)
    way = [{"h": NARROW, "from": 0.5}, {"h": half, "from": 0.5}, {"h": half, "from": 0}]
    dashes = alt.Chart(alt.Data(values=way)).mark_line(
        color="white", strokeDash=[4, 3], strokeWidth=1.3, interpolate="linear"
    )
    layers = [areas, dashes.encode(x=x, y=y, order=alt.Order("from:Q", sort="descending"))]
    for text, h, share, colour_of_text, weight in (
        (matrices, 3600, 0.5, "white", "bold"),
        (embeddings, 130, 0.72, LIGHT["ink"], "bold"),
        (f"half at h = {half:.0f}", half * 1.45, 0.04, "white", "normal"),
    ):
        words = alt.Chart(alt.Data(values=[{"h": h, "from": share, "text": text}]))
        words = words.mark_text(color=colour_of_text, fontSize=13, fontWeight=alt.FontWeight(weight))
        layers.append(words.encode(x=x, y=y, text="text:N"))
    title = alt.Title(
        "Parameters of a GPT by part", subtitle=f"{rest}: at most {shares[rest].max():.2%}, too few to see"
    )
    return alt.layer(*layers).properties(width=760, height=360, title=title, padding=16).to_dict()


def _sizes() -> str:
    """Vega expression that maps a tick to the number of parameters there, in words."""
    words = {str(2**n): parameters_of(2**n) for n in range(6, 15)}
    return "({" + ", ".join(f"'{hidden}': '{text}'" for hidden, text in words.items()) + "})[datum.value]"


def parameters_of(hidden: float) -> str:
    return count(float(gpt_parameters(hidden / FEATURES_A_BLOCK, hidden, VOCABULARY, SEQ_LEN)))


def main(folder: str = "docs/images") -> None:
    print(parameters_picture(Path(folder, "plan-parameters.svg")))


if __name__ == "__main__":
    main(*sys.argv[1:])
