"""A sweep of real experiments that is killed three times: `make study-techniques`.

    python scripts/techniques_study.py --out FOLDER [--page docs/techniques.md]

    examples/sweeps/techniques-cpu.yaml ─> meshtune sweep, SIGKILL at random, the same again ─> sweep.db
        └─> was any result lost, changed or made twice? ─> page, and copies of both beside it

FOLDER keeps the database: a study that was stopped goes on. Speeds are of a machine that runs nothing else.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import LlamaConfig

from meshtune.report.experiments.database import DATABASE, read_sweep_rows
from meshtune.rundir import write_text_atomically
from meshtune.study.store import DONE, FINISHED
from meshtune.units import counted, human

SWEEP = Path(__file__).parents[1] / "examples" / "sweeps" / "techniques-cpu.yaml"
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
MODELS = {
    "1M": LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, **SPECIAL,
    ),
    "5M": LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, **SPECIAL,
    ),
}  # fmt: skip
STAYS = ("number", "status", "ended", "seconds", "attempts")  # of an experiment that has a result
KILLS, TOLD = 3, "kills.json"  # file of a Story, in the study's folder
REPORT, COPIES = "report.html", "studies"  # of the sweep; folder of the copies, beside the page


@dataclass(frozen=True)
class Kill:
    """One SIGKILL of the sweep."""

    after: float  # seconds after its start
    results: dict[int, tuple[Any, ...]]  # number -> STAYS, of experiments that had a result then


class Story(NamedTuple):
    """How the start of the study went that had the kills."""

    kills: Sequence[tuple[float, int]]  # seconds after a start, results by then
    seconds: float  # of all starts of the sweep together


def results(database: Path) -> list[dict[str, Any]]:
    """Rows of the experiments that have a result; none if there is no database yet."""
    if not database.exists():
        return []
    return [row for row in read_sweep_rows(database).rows if row["status"] in FINISHED]


def kept(database: Path) -> dict[int, tuple[Any, ...]]:
    """Number -> STAYS of the experiments that have a result."""
    return {row["number"]: tuple(row[name] for name in STAYS) for row in results(database)}


def sweep(out: Path, seed: int) -> Story:
    """Run the sweep in `out`, killed at random. A study that is started once more tells of the start before
    if it had more kills.

    Raises SystemExit if the last run fails, or if a result was lost, changed, or made twice.
    """
    words = [sys.executable, "-m", "meshtune", "sweep", str(SWEEP), "--out", "sweep"]
    database, draw, kills, started = out / "sweep" / DATABASE, random.Random(seed), list[Kill](), time.time()
    for _ in range(KILLS):
        running, after = subprocess.Popen(words, cwd=out), draw.uniform(20, 240)
        try:
            running.wait(timeout=after)
            break  # it was faster
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGKILL)
            running.wait()
        kills.append(Kill(after, kept(database)))
    ended = subprocess.run(words, cwd=out, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(words)} ended with {ended.returncode}.")
    now = kept(database)
    for kill in kills:
        changed = [number for number, result in kill.results.items() if now.get(number) != result]
        if changed:
            sys.exit(
                f"Experiments {changed} had a result when the sweep was killed, and have another one now."
            )
    story = Story([(kill.after, len(kill.results)) for kill in kills], time.time() - started)
    file = out / TOLD
    before = Story(**json.loads(file.read_text())) if file.exists() else None
    if before and len(before.kills) > len(kills):
        return before
    write_text_atomically(file, json.dumps(story._asdict()))
    return story


def page(database: Path, story: Story) -> str:
    """The page, as Markdown: the machine, the kills, a line for each layout, then for each mode of the 5M."""
    study = read_sweep_rows(database)
    rows = study.rows
    facts, counts = study.facts, Counter(row["status"] for row in rows)
    base = facts["file"]["base"]
    train = base["train"]
    machine = f"{facts['machine']['processor']}, {counted(facts['machine']['cores'], 'core')}"
    lines = [
        "# What each technique costs, on CPU ranks", "",
        f"`make study-techniques` writes this page from [a sweep](../examples/sweeps/{SWEEP.name}) of "
        f"{counted(len(rows), 'experiment')}: {machine}, {facts['started'][:10]}, {train['precision']}, "
        f"{train['global_batch_size']} sequences of {base['data']['seq_len']} random tokens a step, medians "
        f"of {facts['file']['steps']} steps. All ranks share the cores: a speed beside that of one rank has "
        "in it what a technique adds, what several processes gain over threads, and how the machine's own "
        "speed changed between the two.", "",
        f"{how_it_went(story, sum(row['attempts'] > 1 for row in rows))} Results: "
        + ", ".join(f"{number} {status}" for status, number in counts.items()) + ".", "",
        f"[The database]({COPIES}/{copy_of(DATABASE)}) has every figure, "
        f"[its page]({COPIES}/{copy_of(REPORT)}) draws them; [what they "
        "teach](sweep.md#what-a-study-of-techniques-taught).", "",
        "Speed: tokens/s of all ranks together. Memory: tensors on the fullest rank at their peak, and the "
        "plan's error.", "",
        *table(rows),
    ]  # fmt: skip
    failed = [f"- {row['layout']}: {row['status']}, {row['reason']}" for row in rows if row["status"] != DONE]
    return "\n".join([*lines, *(["", "Without figures:", "", *failed] if failed else [])]) + "\n"


def copy_of(name: str) -> str:
    """Name of the copy of a file of the sweep: techniques.db, techniques.html."""
    return f"techniques{Path(name).suffix}"


def how_it_went(story: Story, again: int) -> str:
    """Sentences on the time and the kills. again: experiments that ran twice."""
    took = f"It took {story.seconds / 60:.0f} minutes"
    if not story.kills:
        return f"{took}, and ended before the first SIGKILL was due."
    told = ", ".join(f"{after:.0f} s ({results} results)" for after, results in story.kills)
    verb = "was" if again == 1 else "were"
    return (
        f"{took}. SIGKILL after {told}; each time the same command went on. No result was lost, changed or "
        f"made twice; {counted(again, 'experiment')} that ran at a kill {verb} run again."
    )


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each model and experiment, beside the same on one rank."""
    yield "| model | layout | ranks | tokens/s | of one rank | spread | memory | of one rank | planned |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    alone = {work(row): row for row in rows if row["world"] == 1 and row["status"] == DONE}
    for row in rows:
        if row["status"] == DONE:
            one = alone.get(work(row))
            speed, memory = speed_of(row), row["peak_memory_bytes"]
            ratios = (speed / speed_of(one), memory / one["peak_memory_bytes"]) if one else ()
            shares = [f"{ratio:.2f}" for ratio in ratios] or ["", ""]  # the one on one rank may have failed
            planned = row["predicted_peak_bytes"] / memory - 1
            yield (
                f"| {Path(row['model']).name} | {row['layout']} | {row['world']} | {speed:,.0f} | "
                f"{shares[0]} | {row['spread']:.0%} | {human(memory)} | {shares[1]} | {planned:+.1%} |"
            )


def work(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what is computed, whatever the layout: (model, micro-batch size, recomputation)."""
    settings = row["settings"]
    return row["model"], settings["layout.micro_batch_size"], settings["layout.recompute"]


def speed_of(row: Mapping[str, Any]) -> float:
    """Tokens/s of all ranks together."""
    return row["tokens_per_second_per_gpu"] * row["world"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the study; kept")
    parser.add_argument("--page", type=Path, help="where the page goes; default: the terminal")
    parser.add_argument("--seed", type=int, default=0, help="draws the times of the kills")
    options = parser.parse_args()
    out = options.out.resolve()
    for name, config in MODELS.items():
        config.save_pretrained(out / "models" / name)
    story = sweep(out, options.seed)
    subprocess.run([sys.executable, "-m", "meshtune", "report", str(out / "sweep")], check=True)
    text = page(out / "sweep" / DATABASE, story)
    if options.page:
        copies = options.page.parent / COPIES
        copies.mkdir(exist_ok=True)
        for name in (DATABASE, REPORT):
            shutil.copyfile(out / "sweep" / name, copies / copy_of(name))
        write_text_atomically(options.page, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
