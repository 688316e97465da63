"""The docs' pictures of plans: where a GPT's parameters are, the best layouts of a model, one step over time,
experts of a mixture split over ranks.

    python scripts/plan_pictures.py [FOLDER]

They are drawn from the formulas that the planner counts with, as `meshtune plan --plot` draws them.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from meshtune import config
from meshtune.api.plan import known_workload
from meshtune.layout import Layout
from meshtune.plan.cluster import cluster_of
from meshtune.plan.memory.states import gpt_parameters
from meshtune.plan.search import explained, search
from meshtune.plan.workload import Workload
from meshtune.report.draw.colours import COLOURS
from meshtune.report.draw.picture import known_suffix, save, write
from meshtune.report.draw.theme import LIGHT
from meshtune.report.plan.panels import memory_and_time, over_time
from meshtune.sections import ClusterConfig
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


def workload_of(model: str, batch: int, seq_len: int = 8192) -> Workload:
    """The model's workload. batch: sequences of a global batch. seq_len: their tokens."""
    words = ["model.name=x", f"data.seq_len={seq_len}", f"train.global_batch_size={batch}"]
    return known_workload(config.load(None, words), model)


def layouts_picture(file: Path) -> Path:
    """Draw memory and time of the best layouts of an 8B model on 64 GPUs."""
    workload, cluster = workload_of("llama-3.1-8b", 256), cluster_of(ClusterConfig(gpu="h100-sxm", gpus=64))
    plan = search(workload, cluster)
    stacks = memory_and_time(plan.best(6), chosen=0)
    return write(file, [stacks], title="Llama 3.1 8B on 64 H100, global batch 256 × 8,192 tokens, predicted")


def over_time_picture(file: Path) -> Path:
    """Draw one step of a 70B model on 64 GPUs with pipeline, tensor and data parallelism."""
    layout = Layout.parse("zero1x2-tp8-sp-pp4-1f1b-mb1-ga128-selective")
    workload = workload_of("llama-3.1-70b", layout.global_batch_size)
    cluster = cluster_of(ClusterConfig(gpu="h100-sxm", gpus=layout.world, network=12.5))
    panels = over_time(workload, explained(workload, cluster, layout))
    return write(file, [[panel] for panel in panels], title=f"Llama 3.1 70B, {layout}, predicted", width=1000)


def experts_picture(file: Path) -> Path:
    """Draw memory and time of a mixture by ep, with short and long micro-batches."""
    layouts = [
        Layout.parse(f"zero3x8{ep}-{batch}-full")
        for batch in ("mb1-ga8", "mb4-ga2")
        for ep in ("", "-ep2", "-ep8")
    ]
    workload = workload_of("qwen3-30b-a3b", layouts[0].global_batch_size, 4096)
    cluster = cluster_of(ClusterConfig(gpu="h100-sxm", gpus=8))
    stacks = memory_and_time([explained(workload, cluster, layout) for layout in layouts])
    title = "Qwen3-30B-A3B on 8 H100, global batch 64 × 4,096 tokens, predicted"
    return write(file, [stacks], title=title)


def main(folder: str = "docs/images") -> None:
    print(parameters_picture(Path(folder, "plan-parameters.svg")))
    print(layouts_picture(Path(folder, "plan-layouts.svg")))
    print(over_time_picture(Path(folder, "plan-over-time.svg")))
    print(experts_picture(Path(folder, "experts.svg")))


if __name__ == "__main__":
    main(*sys.argv[1:])
