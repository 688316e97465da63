"""The batch size study: its runs, its picture, and the tables of its page.

    python scripts/batch_size_study.py --data GSM8K --out FOLDER [--page docs/batch-size.md] [KEY=VALUE …]

It makes a tokenizer of GSM8K's training rows and a small Llama (model/), runs two sweeps of examples/sweeps
(losses/, costs/), and draws their results. A study that was stopped goes on in its folder. key=value changes
the base of both sweeps, to try it with fewer tokens.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from meshtune.meter.noise_scale import scales
from meshtune.report.draw.kinds import Panel, Scatter
from meshtune.report.draw.picture import write
from meshtune.report.experiments.batch import RUNS, Curve, at, batch_panels, curves_of
from meshtune.report.experiments.database import database_of, read_sweep_rows
from meshtune.report.experiments.rows import DONE, Experiment, Sweep, best, sweep_of
from meshtune.rundir import Row, RunDir, write_text_atomically
from meshtune.units import MIB, counted

ROOT = Path(__file__).parents[1]
SWEEPS = {"losses": "batch-size.yaml", "costs": "micro-batch.yaml"}  # folder of the results -> sweep
PICTURE = ROOT / "docs" / "images" / "batch-size.svg"
BEGIN, END = "<!-- results: written by scripts/batch_size_study.py -->", "<!-- end of the results -->"
VOCABULARY, HIDDEN, BLOCKS = 1024, 128, 4


def make_model(folder: Path, rows: Path) -> None:
    """Write a tokenizer of the questions and answers in `rows`, and a Llama's config.json, into `folder`."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import make_tokenizer
    from transformers import LlamaConfig

    texts = [f"{row['question']}\n{row['answer']}" for row in map(json.loads, rows.read_text().splitlines())]
    make_tokenizer(texts, VOCABULARY).save_pretrained(folder)
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=BLOCKS,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip


def run(out: Path, rows: Path, overrides: Sequence[str]) -> None:
    """Run both sweeps, or what is left of them."""
    if not (out / "model" / "config.json").exists():
        make_model(out / "model", rows)
    for folder, file in SWEEPS.items():
        words = [
            f"model.name={out / 'model'}",
            f"data.train={rows}",
            f"data.cache={out / 'cache'}",
            *overrides,
        ]
        sweep = ROOT / "examples" / "sweeps" / file
        command = [sys.executable, "-m", "meshtune", "sweep", str(sweep), "--out", str(out / folder)]
        subprocess.run([*command, "--jobs", "1", *words], check=True)


def read(out: Path, folder: str) -> Sweep:
    file = database_of(out / folder)
    assert file is not None
    return sweep_of(read_sweep_rows(file))


def draw(losses: Sweep, costs: Sweep, file: Path) -> None:
    """Draw losses and noise scale above speed and memory."""
    drawn: dict[str, Panel] = {panel.key: panel for panel in batch_panels(costs)}
    drawn |= {
        panel.key: panel for panel in batch_panels(losses) if panel.key.startswith(("batch_l", "batch_n"))
    }
    rows = [["batch_loss_tokens", "batch_loss_steps"], ["batch_noise", "batch_speed"]]
    first = drawn["batch_speed"]
    assert isinstance(first, Scatter)
    write(file, [[drawn[key] for key in row] for row in rows], title="Global batch on GSM8K, three seeds")


def results(losses: Sweep, costs: Sweep) -> str:
    """The tables of the page, in Markdown."""
    curves = curves_of(losses)
    runs = [one for one in losses.experiments if one.number in curves]
    tokens = min(curves[one.number].tokens[-1] for one in runs)
    updates = min(curves[one.number].steps[-1] for one in runs)
    head = f"held-out loss after {tokens:,.0f} tokens | after {updates:,.0f} updates"
    lines = [
        f"| global batch | learning rate | updates | {head} | noise scale | step, s |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for batch, some in by_batch(runs).items():
        cells = (
            f"{batch}",
            f"{some[0].settings['train.learning_rate']:.1e}",
            f"{curves[some[0].number].steps[-1]:,.0f}",
            spread(some, lambda one: at(curves[one.number], "tokens", tokens), ".3f"),
            spread(some, lambda one: at(curves[one.number], "steps", updates), ".3f"),
            spread(some, lambda one: one.noise_scale, ".0f"),
            f"{median(one.measured.step_seconds or 0 for one in some):.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *on_the_way(losses, runs, curves)]
    fastest = best(costs.done, lambda one: (one.global_batch, one.micro_batch))
    sizes = sorted({one.micro_batch or 0 for one in fastest.values()})
    heads = [f"micro-batch {size}" for size in sizes]
    lines += [
        "",
        f"| global batch | {' | '.join(heads)} |",
        f"| ---: |{' ---: |' * len(sizes)}",
    ]
    for batch in sorted({one.global_batch or 0 for one in fastest.values()}):
        cells = [cost(fastest.get((batch, size))) for size in sizes]
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", facts(losses)])


def on_the_way(losses: Sweep, runs: Sequence[Experiment], curves: Mapping[int, Curve]) -> Iterator[str]:
    """Lines of the table of each batch's runs over time. The head comes first."""
    last = [median(curves[one.number].losses[-1] for one in some) for some in by_batch(runs).values()]
    loss = math.ceil(10 * max(last)) / 10  # that the median of each batch has reached
    rows = {one.number: train_rows(losses, one) for one in runs}
    noise = {number: scales(of_run, 4) for number, of_run in rows.items()}
    norms = {  # a step whose gradients were not finite has none
        number: [norm for row in of_run if (norm := row["grad_norm"]) is not None]
        for number, of_run in rows.items()
    }
    quarters = " | ".join(f"noise scale, {name} quarter" for name in ("first", "second", "third", "last"))
    heads = f"updates to a held-out loss of {loss:.1f} | {quarters} | largest gradient norm | usual"
    yield f"| global batch | {heads} |"
    yield f"| ---: |{' ---: |' * 7}"
    for batch, some in by_batch(runs).items():
        cells = (
            f"{batch}",
            spread(some, lambda one: reached(curves[one.number], loss), ".0f"),
            *(spread(some, lambda one, part=part: noise[one.number][part], ".0f") for part in range(4)),
            spread(some, lambda one: max(norms[one.number]), ".1f"),
            spread(some, lambda one: median(norms[one.number]), ".2f"),
        )
        yield f"| {' | '.join(cells)} |"


def by_batch(runs: Sequence[Experiment]) -> dict[int, list[Experiment]]:
    """Experiments by their global batch, the smallest first."""
    batches = sorted({one.global_batch or 0 for one in runs})
    return {batch: [one for one in runs if one.global_batch == batch] for batch in batches}


def train_rows(sweep: Sweep, one: Experiment) -> list[Row]:
    """Rows of an experiment's steps."""
    return RunDir(sweep.source.folder / RUNS / str(one.number)).rows("train")


def reached(curve: Curve, loss: float) -> float | None:
    """Updates after which a run has a held-out loss, on the line between evaluations; None: not on one."""
    for (low, before), (high, after) in pairwise(zip(curve.steps, curve.losses, strict=True)):
        if after <= loss < before:
            return low + (high - low) * (before - loss) / (before - after)
    return None


def spread(some: Sequence[Experiment], value: Callable[[Experiment], float | None], form: str) -> str:
    """Median of the seeds with the lowest and the highest, and their number where not all have the value."""
    known = [number for one in some if (number := value(one)) is not None]
    if not known:
        return "unknown"
    of_all = "" if len(known) == len(some) else f"; {len(known)} of {len(some)} runs"
    return f"{median(known):{form}} ({min(known):{form}} to {max(known):{form}}{of_all})"


def cost(one: Experiment | None) -> str:
    if one is None or one.measured.speed is None:
        return ""
    return f"{one.measured.speed:,.0f} tokens/s, {(one.measured.peak_bytes or 0) / MIB:,.0f} MiB"


def facts(sweep: Sweep) -> str:
    """Sentence on what was run where."""
    source, machine = sweep.source.facts, sweep.source.facts.get("machine") or {}
    one = next(one for one in sweep.experiments if one.status == DONE)
    versions = source.get("versions") or {}
    device = f"{counted(machine.get('cores') or 0, 'core')} of {machine.get('processor')}"
    named = ", ".join(f"{name} {versions[name]}" for name in ("meshtune", "torch") if versions.get(name))
    minutes = sum(other.seconds or 0 for other in sweep.experiments) / 60
    runs, seeds = len(sweep.done), max(one.repeats for one in sweep.done)
    return (
        f"{runs} batches × {seeds} seeds, a Llama of {(one.parameters or 0) / 1e6:.2f} M parameters; "
        f"{minutes:.0f} minutes on {device}; {named}. Medians of the seeds, with the lowest and the highest."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--page", type=Path, help="page whose tables are written, with docs/images/batch-size.svg"
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="changes of both sweeps' base")
    options = parser.parse_args()
    rows = options.data / "train.jsonl"
    if not rows.is_file():
        raise SystemExit(f"There is no {rows}; name the folder of GSM8K's train.jsonl with --data.")
    run(options.out, rows.absolute(), options.settings)
    losses, costs = read(options.out, "losses"), read(options.out, "costs")
    text = results(losses, costs)
    print(text)
    draw(losses, costs, PICTURE if options.page else options.out / PICTURE.name)
    if options.page:
        before, _, rest = options.page.read_text().partition(BEGIN)
        write_text_atomically(options.page, f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
