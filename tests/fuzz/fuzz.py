"""Run the command line on broken input, and count how it ends: `make fuzz`.

    python tests/fuzz/fuzz.py                                    250 seeds of each kind, on 2 processes
    python tests/fuzz/fuzz.py --kind data --first 17 --seeds 1   one case again, with what it printed

A seed gives the same case each time. Exits with 1 if a case is bad (judge.py).
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import judge  # noqa: E402
import materials  # noqa: E402
from kinds import KINDS, Case  # noqa: E402

TABLE = """\
# Broken input

`make fuzz` damages configurations and command lines (configs), model folders (models), data files (data),
prompts and chats (prompts), and run folders with their checkpoints (runs), each in one to three places
chosen by a seed, and runs a command on the result. Good is an exit code of the command line, with a sentence
if it is not 0, without a traceback or a process left, within {seconds:.0f} s and {memory:.0f} GiB
(`tests/fuzz/judge.py`).

{facts}:

{lines}
"""


class Result(NamedTuple):
    """A case and how it ended."""

    kind: str
    seed: int
    case: Case
    ended: judge.Ended


def command(words: list[str]) -> None:
    """Run a command line through the function that the console script calls."""
    from meshtune import cli

    sys.argv = ["meshtune", *words]
    cli.main()


def import_everything() -> None:
    """Import what commands import as they go, so that the cases, which are forks, need not."""
    import altair  # noqa: F401
    import datasets  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import rich._emoji_codes  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401
    import vl_convert  # noqa: F401
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM  # noqa: F401

    import meshtune.api.chat
    import meshtune.api.target
    import meshtune.cli
    import meshtune.data.inspect
    import meshtune.launch
    import meshtune.model.census_cache
    import meshtune.plan.answer
    import meshtune.report.compare
    import meshtune.report.plan.documents
    import meshtune.report.run.report
    import meshtune.report.run.tables
    import meshtune.tools.export
    import meshtune.train.loop  # noqa: F401


@contextmanager
def made_materials() -> Iterator[Path]:
    """Yield the folder of the materials, in a temporary folder."""
    import_everything()
    with tempfile.TemporaryDirectory(prefix="meshtune-fuzz-") as name:
        ended = judge.run(lambda: materials.make(Path(name) / "materials"), Path(name), seconds=120)
        assert ended.outcome == "exit 0", ended.output
        yield Path(name) / "materials"


def run(job: tuple[str, int], folder: Path, seconds: float = judge.SECONDS) -> Result:
    """Run one case of (kind, seed). folder: the materials', beside which the case gets its own. seconds:
    after which it counts as a hang.
    """
    kind, seed = job
    place = folder.parent / f"{kind}-{seed}"
    box = place / "box"
    materials.copy(folder, box)
    try:
        case = KINDS[kind](Random(f"{kind} {seed}"), box)
        (box / ".stdin").write_bytes(case.stdin)
        ended = judge.run(partial(command, case.words), box, stdin=box / ".stdin", seconds=seconds)
        return Result(kind, seed, case, ended)
    finally:
        shutil.rmtree(place)


def described(result: Result) -> str:
    """The case, the end of its output, and the command that runs it alone."""
    return (
        f"{result.kind} {result.seed}: {result.ended.outcome} after {result.ended.seconds:.1f} s\n"
        f"  meshtune {' '.join(map(repr, result.case.words))[:400]}\n  {result.case.mutation[:300]!r}\n"
        f"{result.ended.output[-2500:]}\n"
        f"  again: python tests/fuzz/fuzz.py --kind {result.kind} --first {result.seed} --seeds 1\n"
    )


def table(results: list[Result]) -> str:
    """Markdown: for each kind how many cases ended how, and the longest."""
    import torch
    import transformers

    outcomes = [f"exit {code}" for code in judge.EXIT_CODES]
    header = ["kind", "cases", *outcomes, "bad", "longest (s)"]
    lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
    for kind in [*(kind for kind in KINDS if any(result.kind == kind for result in results)), "all"]:
        ended = [result.ended for result in results if kind in (result.kind, "all")]
        counts = Counter(one.outcome for one in ended)
        cells = [kind, len(ended), *(counts[outcome] for outcome in outcomes)]
        cells += [sum(one.fault is not None for one in ended), f"{max(one.seconds for one in ended):.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    seeds = [result.seed for result in results]
    return TABLE.format(
        seconds=judge.SECONDS,
        memory=judge.MEMORY / 2**30,
        facts=f"{datetime.now(UTC):%Y-%m-%d}, seeds {min(seeds)} to {max(seeds)} of each kind; "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; 2 processes on {os.cpu_count()} cores",
        lines="\n".join(lines),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kind", choices=list(KINDS), help="default: all kinds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=250, help="of each kind")
    parser.add_argument("--table", type=Path, help="a Markdown file to write")
    arguments = parser.parse_args()
    kinds = [arguments.kind] if arguments.kind else list(KINDS)
    jobs = [
        (kind, seed) for seed in range(arguments.first, arguments.first + arguments.seeds) for kind in kinds
    ]
    results: list[Result] = []
    with made_materials() as folder, ProcessPoolExecutor(2, get_context("fork")) as pool:
        for done in as_completed([pool.submit(run, job, folder) for job in jobs]):
            results.append(result := done.result())
            if result.ended.fault or len(jobs) == 1:
                print(described(result), flush=True)
            if len(results) % 100 == 0:
                print(f"{len(results)} of {len(jobs)} cases", file=sys.stderr, flush=True)
    text = table(results)
    print(text)
    if arguments.table:
        arguments.table.write_text(text)
    sys.exit(any(result.ended.fault for result in results))


if __name__ == "__main__":
    main()
