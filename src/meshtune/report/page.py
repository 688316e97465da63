"""A run as one self-contained page: report.html, made from the files of the run folder and nothing else.

It opens from a disk without a network: plotly's JavaScript is inside it, once. Everything that comes from
data, settings or a model's mouth is escaped. Light or dark follows the reader's system. What a run has not
(yet) written is left out.
"""

import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshtune.report.plots import DARK, LIGHT, panels, plotly_figure
from meshtune.report.summary import Summary, facts_of, samples_of, summarise
from meshtune.rundir import Row, RunDir, write_text_atomically
from meshtune.units import count, duration, human

SHOWN = {  # facts of the "run" row that say what was run; the others are its environment
    "model": "Model",
    "method": "Method",
    "parameters": "Parameters",
    "trainable_parameters": "Trainable",
    "data": "Data",
    "layout": "Layout",
    "world": "Devices",
    "global_batch_size": "Global batch",
    "seq_len": "Sequence length",
    "total_steps": "Steps",
    "precision": "Precision",
}


def write_report(run: RunDir) -> Path:
    """Write the run folder's report.html (again, whenever it is called) and return where it is."""
    write_text_atomically(run.report_file, page(run))
    return run.report_file


def page(run: RunDir) -> str:
    """The report as one HTML text."""
    from plotly.offline import get_plotlyjs

    summary, facts, figures = summarise(run), facts_of(run), panels(run.rows())
    sections = [
        _headline(summary),
        _figures([(panel.key, panel.title, panel.unit) for panel in figures]),
        _samples(run),
        _facts(
            "What was run",
            [(label, _fact(facts[key])) for key, label in SHOWN.items() if facts.get(key) is not None],
        ),
        _settings(run),
        _facts(
            "Environment", list(_leaves({key: value for key, value in facts.items() if key not in SHOWN}))
        ),
    ]
    last = max(summary.steps, 1)
    drawings = {
        panel.key: plotly_figure(panel, last_step=last, height=320 if index == 0 else 230)
        for index, panel in enumerate(figures)
    }
    scripts = ""
    if figures:
        themes = {"light": LIGHT, "dark": DARK}
        scripts = (
            f"<script>{get_plotlyjs()}</script>\n"
            f"<script>const FIGURES = {_json(drawings)}, THEMES = {_json(themes)};\n{DRAW}</script>"
        )
    return PAGE.format(
        title=_text(summary.name),
        style=STYLE,
        subtitle=_subtitle(summary, facts),
        body="\n".join(section for section in sections if section),
        scripts=scripts,
    )


def _subtitle(summary: Summary, facts: Row) -> str:
    """One sentence: what was done, for how long, and how it ended."""
    parts = [f"{summary.steps:,} steps"]
    if facts.get("model"):
        parts.insert(0, f"{_text(facts['model'])}, {_text(facts.get('method', 'full'))} fine-tuning")
    if summary.tokens:
        parts.append(f"{count(summary.tokens)} tokens")
    if summary.seconds:
        parts.append(duration(summary.seconds))
    if summary.skipped:
        parts.append(f"{summary.skipped:,} of the steps not applied (not finite)")
    return " · ".join([*parts, _text(summary.status)])


def _headline(s: Summary) -> str:
    """The headline numbers as tiles: (label, now, before or beside it)."""
    tiles: list[tuple[str, str, str]] = []
    if s.last_exact_match is not None:
        before = "" if s.first_exact_match is None else f"from {s.first_exact_match:.1%}"
        tiles.append(("Exact match", f"{s.last_exact_match:.1%}", before))
    if s.last_eval_loss is not None:
        changed = s.first_eval_loss is not None and s.first_eval_loss != s.last_eval_loss
        tiles.append(
            ("Held-out loss", f"{s.last_eval_loss:.4f}", f"from {s.first_eval_loss:.4f}" if changed else "")
        )
    if s.last_loss is not None:
        tiles.append(("Training loss", f"{s.last_loss:.4f}", f"from {s.first_loss:.4f}"))
    if s.tokens_per_second_per_gpu is not None:
        mfu = "median" if s.mfu is None else f"MFU {s.mfu:.1%}"
        tiles.append((s.speed_unit.replace("t", "T", 1), f"{s.tokens_per_second_per_gpu:,.0f}", mfu))
    if s.peak_memory_bytes is not None:
        tiles.append(("Peak memory", human(s.peak_memory_bytes), ""))
    if not tiles:
        return "<p class='empty'>Nothing has been measured yet.</p>"
    cells = (
        f"<div class='tile'><dt>{label}</dt><dd>{value}</dd><small>{beside}</small></div>"
        for label, value, beside in tiles
    )
    return f"<dl class='tiles'>{''.join(cells)}</dl>"


def _figures(titles: Iterable[tuple[str, str, str]]) -> str:
    """The places that the plots are drawn into."""
    cells = [
        f"<figure><figcaption>{_text(title)} <small>{_text(unit)}</small></figcaption>"
        f"<div id='plot-{key}'></div></figure>"
        for key, title, unit in titles
    ]
    return f"<section class='plots'>{''.join(cells)}</section>" if cells else ""


def _samples(run: RunDir) -> str:
    """Held-out prompts with the expected answer and the model's, before and after."""
    samples = samples_of(run)
    if not samples:
        return ""
    twice = any(sample.before is not None for sample in samples)
    head = ("Prompt", "Expected", "Before", "After") if twice else ("Prompt", "Expected", "Answer")
    body = []
    for sample in samples:
        answers = (sample.before or "", sample.after) if twice else (sample.after,)
        cells = [f"<td>{_text(sample.prompt)}</td><td>{_text(sample.expected or '')}</td>"]
        for answer in answers:
            right = sample.expected is not None and answer.strip() == sample.expected.strip()
            cells.append(f"<td class='{'right' if right else 'wrong'}'>{_text(answer)}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    titles = "".join(f"<th>{title}</th>" for title in head)
    table = f"<table class='samples'><thead><tr>{titles}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f"<section><h2>Samples</h2><div class='wide'>{table}</div></section>"


def _facts(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """A small table of names and values."""
    rows = [f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts]
    return f"<section><h2>{title}</h2><table class='facts'>{''.join(rows)}</table></section>" if rows else ""


def _settings(run: RunDir) -> str:
    """The resolved config, as it can be run again."""
    if not run.config_file.exists():
        return ""
    again = f"meshtune train {run.config_file}"
    text = run.config_file.read_text(encoding="utf-8", errors="replace")
    return (
        f"<section><h2>Settings</h2><p>Run it again with <code>{_text(again)}</code></p>"
        f"<details><summary>config.yaml</summary><pre>{_text(text)}</pre></details></section>"
    )


def _leaves(facts: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """A tree of facts as (dotted name, text)."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", _fact(value)


def _fact(value: Any) -> str:
    """A fact as text; large counts get a short form beside the exact one."""
    if isinstance(value, list):
        return ", ".join(map(_fact, value))
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10**6:
        return f"{value:,} ({count(value)})"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _text(value: Any) -> str:
    """Anything as text of the page: what it holds is shown, never obeyed."""
    return html.escape(str(value))


def _json(value: Any) -> str:
    """JSON inside a script element, which only `</script` or `<!--` could end or confuse."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · meshtune</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>{title}</h1><p>{subtitle}</p></header>
{body}
<footer>Made by meshtune from the files of this run's folder.</footer>
</main>
{scripts}
</body>
</html>
"""

STYLE = """
:root {
  --ink: #1c1f23; --soft: #666d76; --line: #e4e6ea; --paper: #ffffff; --card: #f6f7f8; --right: #00795b;
  --sans: system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "Liberation Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e3e6ea; --soft: #98a0aa; --line: #2c3138; --paper: #15181c; --card: #1d2126; --right: #4fc4a0;
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

.plots { display: grid; grid-template-columns: 1fr 1fr; gap: 28px 36px; margin-top: 36px; }
.plots figure { margin: 0; min-width: 0; }
.plots figure:first-child { grid-column: 1 / -1; }
figcaption { font-weight: 600; margin-bottom: 4px; }
figcaption small { margin-left: 6px; }

.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; }
.samples { width: 100%; }
.samples th { padding: 4px 20px 6px 0; border-bottom: 1px solid var(--line); }
.samples td {
  padding: 7px 20px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: pre-wrap; overflow-wrap: anywhere; min-width: 90px;
}
.samples .right { color: var(--right); }
.samples .right::after { content: " ✓"; }
.samples .wrong { color: var(--soft); }
.facts { font-size: 14px; }
.facts th { width: 150px; }
.facts th, .facts td { padding: 4px 28px 4px 0; vertical-align: top; overflow-wrap: anywhere; }
.facts th { white-space: nowrap; }
pre { background: var(--card); border-radius: 8px; padding: 14px 16px; overflow-x: auto; line-height: 1.5; }
code { background: var(--card); border-radius: 4px; padding: 2px 6px; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--soft); }
.empty, footer { color: var(--soft); }
footer { margin-top: 56px; padding-top: 14px; border-top: 1px solid var(--line); font-size: 13px; }
@media (max-width: 720px) { .plots { grid-template-columns: 1fr; } main { padding-top: 28px; } }
@media print { .plots figure { break-inside: avoid; } }
"""

DRAW = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const draw = () => {
  const theme = THEMES[dark.matches ? "dark" : "light"];
  for (const [key, figure] of Object.entries(FIGURES)) {
    for (const trace of figure.data) {
      trace.line.color = trace.marker.color = theme[trace.meta];
    } const layout = figure.layout; layout.font.color = theme.ink; layout.hoverlabel = {bgcolor:
    theme.paper, bordercolor: theme.grid, font: {color: theme.ink}}; for (const axis of [layout.xaxis,
    layout.yaxis]) axis.gridcolor = axis.linecolor = theme.grid; Plotly.react("plot-" + key, figure.data,
    layout, {displaylogo: false, displayModeBar: false, responsive: true});
  }
};
draw();
dark.addEventListener("change", draw);
"""
