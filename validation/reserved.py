"""Memory that torchtitan's published runs reserved, against dry runs with the allocator's replay.

    python validation/reserved.py [--only titan-01,titan-02] [--out validation/reserved.md]

Each row is dry-run twice: torchtitan's own step (torchtitan_step.py), which is what was measured, and
meshtune's step under the nearest layout. Nothing is fitted. Both are eager and in bf16: of a row that was
compiled or in 8 bits, that is another program, and its difference is no error. The target is the row that is
neither: within 8 %.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

from measured import HERE, LARGE, Row, read
from torchtitan_step import Shape, trace
from transformers import LlamaConfig

from meshtune.dryrun.allocator import Replay
from meshtune.dryrun.ranks import Tell, trace_ranks
from meshtune.dryrun.requests import replay_steps
from meshtune.dryrun.workspaces import Workspaces
from meshtune.dryrun.world import Job, trace_rank
from meshtune.layout import Layout
from meshtune.meter.trace import RankTrace
from meshtune.plan.hardware import catalogue
from meshtune.rundir import write_text_atomically
from meshtune.train.model import ModelSpec, OptimizerSpec
from meshtune.units import GIB

Step = Callable[[Shape, Layout, int, int, Tell], RankTrace]  # the last two are those of trace_rank
TARGET = 0.08  # of the eager rows in bf16
PAGE = HERE / "reserved.md"


@dataclass(frozen=True)
class Result:
    """One row's dry runs; replays are of the second step."""

    row: Row
    plain: Replay | None  # torchtitan's step; None: it was not traced
    expandable: Replay | None
    ours: Replay | None  # meshtune's step
    why_not: str = ""

    @property
    def published(self) -> float:
        """GiB."""
        return float(self.row["peak_mem_gib"])

    @property
    def difference(self) -> float | None:
        """Share by which torchtitan's replay is above the published figure; None: no replay."""
        return self.plain.reserved / GIB / self.published - 1 if self.plain else None

    @property
    def counts(self) -> bool:
        """True if what was measured is what is traced."""
        return self.row["precision"] == "bf16" and self.row["compile"] == "0"


def rows() -> list[Row]:
    """torchtitan's rows with a published peak."""
    found = [row for file in LARGE for row in read(file)]
    return [row for row in found if row["id"].startswith("titan-") and row["peak_mem_gib"]]


def why_not(row: Row) -> str:
    """The reason why a row is dry-run by neither step; "": it is."""
    if not row["micro_batch"]:
        return "the number of micro-batches is not published"
    if row["dp"] == "1":
        return "it shards over context ranks alone, which is no layout of meshtune's"
    return ""


def layout_of(row: Row) -> Layout:
    """meshtune's layout nearest to a row's: full recomputation is the same, selective saves all matmuls."""
    parts = [f"zero{row['zero_stage']}x{row['dp']}"]
    parts += [f"{axis}{row[axis]}" for axis in ("tp", "cp") if row[axis] != "1"]
    parts += ["sp"] * (row["sp"] == "1")
    return Layout.parse("-".join([*parts, f"mb{row['micro_batch']}", row["recompute"]]))


def theirs(shape: Shape, layout: Layout, seq_len: int, rank: int, _: Tell = str) -> RankTrace:
    """torchtitan's two steps."""
    return RankTrace(rank, {}, (0,), trace(shape, layout, seq_len=seq_len), micro_batches=1, of=1)


def config_of(shape: Shape, seq_len: int) -> LlamaConfig:
    """Configuration of the model for Hugging Face."""
    return LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab,
        max_position_embeddings=seq_len, tie_word_embeddings=False,
    )  # fmt: skip


def ours(
    shape: Shape, layout: Layout, seq_len: int, rank: int, tell: Tell = str, **options: Any
) -> RankTrace:
    """meshtune's two steps of the same model, with one document a sequence. rank, tell: of `trace_rank`.
    options: of ModelSpec.
    """
    job = Job(
        spec=ModelSpec(source=config_of(shape, seq_len), init="random", kernels="cuda", **options),
        optimizer=OptimizerSpec(),
        layout=layout,
        seq_len=seq_len,
        documents=(seq_len,),
    )
    return trace_rank(job, rank, tell)


@cache
def replays(
    step: Step, shape: Shape, layout: Layout, seq_len: int, architecture: str
) -> tuple[Replay, Replay]:
    """The second step of rank 0 (without, with expandable segments), traced in a process of its own."""
    (found,) = trace_ranks(partial(step, shape, layout, seq_len), [0], layout.world)
    workspaces = Workspaces(architecture)
    plain, expandable = (
        replay_steps(found.steps, workspaces=workspaces, expandable=expandable)[-1]
        for expandable in (False, True)
    )
    return plain, expandable


def result(row: Row) -> Result:
    """Dry-run a row."""
    if reason := why_not(row):
        return Result(row, None, None, None, reason)
    shape = Shape(**{field.name: int(row[field.name]) for field in fields(Shape)})
    job = shape, layout_of(row), int(row["seq_len"]), catalogue()[row["gpu"]].architecture
    own, _ = replays(ours, *job)
    if row["cp"] != "1":
        return Result(row, None, None, own, "torchtitan_step.py has no ring attention")
    return Result(row, *replays(theirs, *job), own)


def page(results: Sequence[Result]) -> str:
    """The table, as Markdown."""

    def gib(replay: Replay | None, what: str = "reserved") -> str:
        return f"{getattr(replay, what) / GIB:.1f}" if replay else "-"

    lines = [
        "# Reserved memory of torchtitan's published runs, dry-run",
        "",
        "Written by `python validation/reserved.py --out validation/reserved.md`; what it means is in "
        "[README.md](README.md#reserved-memory-by-dry-run-2026-11-23). GiB.",
        "",
        "| row | layout | published run | published | active | reserved | difference "
        "| with expandable segments | meshtune's step |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in results:
        row, more = each.row, each.difference
        program = ", ".join([row["precision"], "compiled" if row["compile"] == "1" else "eager"])
        layout = "-" if each.why_not and not each.ours else f"`{layout_of(row)}`"
        lines.append(
            f"| {row['id']} | {layout} | {row['model']}, {row['seq_len']} tokens, {program} "
            f"| {each.published:.1f} | {gib(each.plain, 'active')} | {gib(each.plain)} "
            f"| {'-' if more is None else f'{more:+.1%}'}{' (target)' if each.counts else ''} "
            f"| {gib(each.expandable)} | {gib(each.ours)} |"
        )
    reasons: dict[str, list[str]] = {}
    for each in results:
        if each.why_not:
            reasons.setdefault(each.why_not, []).append(each.row["id"])
    lines += [
        "",
        *(f"- torchtitan's step not traced: {reason} ({', '.join(ids)})." for reason, ids in reasons.items()),
    ]
    return "\n".join(lines) + "\n"


def options_of(text: str | None, only: str) -> argparse.Namespace:
    """Options of the command line: `only`, a list of names or None, and `out`, a file or None.

    text: of --help. only: what its names are, and what is run without them.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda names: names.split(","), help=f"comma-separated {only}")
    parser.add_argument("--out", type=Path, help="where the page goes, beside the terminal")
    return parser.parse_args()


def show(text: str, out: Path | None) -> None:
    """Print a page, and write it to `out` if there is one."""
    if out:
        write_text_atomically(out, text)
    print(text)


def main() -> None:
    options = options_of(__doc__, "ids; default: all rows")
    chosen = options.only or [row["id"] for row in rows()]
    results = []
    for row in rows():
        if row["id"] in chosen:
            results.append(result(row))
            print(f"{row['id']} done", file=sys.stderr, flush=True)
    show(page(results), options.out)
    off = [each.row["id"] for each in results if each.counts and abs(each.difference or 0.0) > TARGET]
    if off:
        sys.exit(f"further off than {TARGET:.0%}: {', '.join(off)}")


if __name__ == "__main__":
    main()
