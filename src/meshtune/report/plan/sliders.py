"""Sliders for GPUs, global batch and sequence length, over a table of predicted plans inside the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshtune.report.draw.page import script_json, text
from meshtune.units import GIB, count

if TYPE_CHECKING:
    from meshtune.plan.answer import Answer
    from meshtune.plan.search import Choice
    from meshtune.plan.what_if import WhatIf

NAMES = ("GPUs", "sequences a step", "tokens a sequence")


def sliders(answer: Answer, around: WhatIf) -> str:
    """A section with three sliders, its table and its script, as HTML."""
    values = (around.gpus, around.batches, around.seq_lens)
    start = (answer.choice.cluster.gpus, answer.workload.global_batch_size, answer.workload.seq_len)
    cluster, tokens = answer.choice.cluster, answer.length.tokens
    data = {
        "values": values,
        "unit": cluster.speed_unit,
        "tokens": tokens,
        "price": cluster.price,
        "currency": cluster.currency,
        "plans": {"-".join(map(str, key)): _entry(choice) for key, choice in around.choices.items()},
    }
    inputs = "".join(
        f"<label>{name} <output id='what-if-{place}'></output><input type='range' min='0' "
        f"max='{len(some) - 1}' value='{some.index(at)}' step='1'></label>"
        for place, (name, some, at) in enumerate(zip(NAMES, values, start, strict=True))
    )
    same = f" Hours and cost are for the same {count(tokens)} tokens." if tokens else ""
    note = f"Each of the {len(around.choices)} combinations was searched for and predicted.{text(same)}"
    return (
        f"<section id='what-if'><h2>What if</h2><div class='sliders'>{inputs}</div>"
        f"<p><code id='what-if-layout'></code></p><dl class='tiles four' id='what-if-tiles'></dl>"
        f"<p class='note'>{note}</p></section>"
        f"<script>\nconst WHAT_IF = {script_json(data)};\n{SCRIPT}</script>"
    )


def _entry(choice: Choice | None) -> list[str | float] | None:
    """[layout, tokens/s/GPU, seconds a step, MFU, peak GiB]; None where nothing fits."""
    if choice is None:
        return None
    return [
        str(choice.layout),
        round(choice.tokens_per_second_per_gpu, 1),
        round(choice.seconds.total, 4),
        round(choice.mfu, 4),
        round(choice.memory.peak / GIB, 4),
    ]


SCRIPT = """
{
  const inputs = [...document.querySelectorAll("#what-if input")];
  const tiles = document.getElementById("what-if-tiles");
  const digits = number => number >= 100 ? Math.round(number).toLocaleString("en") : number.toPrecision(3);
  const tile = (name, value) => {
    const box = document.createElement("div"), dt = document.createElement("dt");
    const dd = document.createElement("dd");
    box.className = "tile"; dt.textContent = name; dd.textContent = value;
    box.append(dt, dd); tiles.append(box);
  };
  const show = () => {
    const at = inputs.map((input, place) => WHAT_IF.values[place][input.value]);
    for (const [n, value] of at.entries())
      document.getElementById("what-if-" + n).textContent = value.toLocaleString("en");
    const plan = WHAT_IF.plans[at.join("-")];
    tiles.replaceChildren();
    document.getElementById("what-if-layout").textContent = plan ? plan[0] : "nothing fits";
    if (!plan) return;
    const [, speed, step, mfu, peak] = plan, hours = WHAT_IF.tokens / speed / at[0] / 3600;
    const money = amount => digits(amount) + " " + WHAT_IF.currency;
    tile(WHAT_IF.unit, digits(speed));
    tile("a step", digits(step) + " s");
    tile("MFU", (100 * mfu).toFixed(1) + "%");
    tile("peak memory, GiB", peak.toFixed(1));
    if (WHAT_IF.tokens) tile("hours", digits(hours));
    if (WHAT_IF.tokens) tile("GPU-hours", digits(hours * at[0]));
    if (WHAT_IF.tokens && WHAT_IF.price) tile("cost", money(hours * at[0] * WHAT_IF.price));
    if (WHAT_IF.price) tile("a million tokens", money(1e6 / speed / 3600 * WHAT_IF.price));
  };
  for (const input of inputs) input.addEventListener("input", show);
  show();
}
"""
