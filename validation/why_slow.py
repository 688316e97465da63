"""Trial of `why it is slow`: nine causes injected into short trainings on CPU ranks, beside healthy ones.

    python validation/why_slow.py --table validation/why-slow.md        # ten seeds of each, 20 healthy
    python validation/why_slow.py --seeds 1 --healthy 2 --cases padding     # a part

Each run is a process of its own with a patch, which trains a tiny Llama or mixture by `meshtune.train`.
A seed draws the strength and, where both work, the number of ranks. Delays are shares of the run's own step,
so that they are as strong on a slow machine. Passed: the injected cause is the first that is named; for a
healthy run none is.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
HEALTHY = "healthy"
STEPS = 13
SEEDS, HEALTHY_RUNS = 10, 20  # of a whole trial
LIMIT = 240  # seconds of a run


class Case(NamedTuple):
    """An injected cause."""

    named: str  # the cause that is to be named first; "" for none
    inject: Callable[[random.Random, str], str]  # patches this process; returns the strength in words
    layouts: Sequence[str] = ("mb2-ga1",)  # one is drawn
    settings: Sequence[str] = ()
    model: str = "model"  # folder of MODELS


@dataclass(frozen=True)
class Outcome:
    """One run of the trial."""

    case: str
    seed: int
    layout: str
    injected: str  # with its strength
    causes: list[str]  # sentences of those that were named
    passed: bool
    seconds: float  # of the run
    load: float  # of the machine in the last minute, this run included


class Pace:
    """Measures how long a step of this process takes without the seconds that are injected into it."""

    def __init__(self) -> None:
        """Count the steps from now on, by the beginnings of their passes."""
        from meshtune.train.step import Passes

        self.seconds = 0.0  # of the fastest step so far; 0: none has ended
        self._began, self._injected, passes = 0.0, 0.0, Passes.forward_backward

        def forward_backward(of: Passes, *args: Any) -> Any:
            now = time.perf_counter()
            if self._began:
                took = now - self._began - self._injected
                self.seconds = min(took, self.seconds or took)
            self._began, self._injected = now, 0.0
            return passes(of, *args)

        Passes.forward_backward = forward_backward

    def sleep(self, seconds: float) -> None:
        """Inject some seconds."""
        time.sleep(seconds)
        self._injected += seconds


def nothing(_: random.Random, layout: str) -> str:
    return "nothing"


def tiny(_: random.Random, layout: str) -> str:
    return "8 tokens of a model of width 64 in a micro-batch"


def slow_loader(draw: random.Random, _: str) -> str:
    from meshtune.data.loader import Loader

    share, batches, pace = draw.uniform(0.2, 0.5), Loader.__iter__, Pace()

    def late(loader: Loader) -> Any:
        for batch in batches(loader):
            pace.sleep(share * pace.seconds)
            yield batch

    Loader.__iter__ = late
    return f"sleep of {share:.0%} of a step before each batch"


def slow_rank(draw: random.Random, _: str) -> str:
    import torch.distributed as dist

    from meshtune.train.step import Passes

    share, slow, pace = draw.uniform(0.3, 0.7), draw.randrange(2), Pace()
    passes = Passes.forward_backward

    def forward_backward(self: Passes, *args: Any) -> Any:
        if dist.get_rank() == slow:
            pace.sleep(share * pace.seconds)
        return passes(self, *args)

    Passes.forward_backward = forward_backward
    return f"rank {slow} sleeps for {share:.0%} of each step"


def slow_link(draw: random.Random, layout: str) -> str:
    """Let collectives of an axis, which are larger than those of a few numbers, end late: in all by some
    multiple of a slow link's time, and by some share of the step.
    """
    import torch.distributed as dist

    from meshtune import compat
    from meshtune.meter.clock import payload

    seconds, share, due, wait = draw.uniform(0.25, 0.45), draw.uniform(0.3, 0.7), {}, dist.Work.wait
    # Those of tp come one after the other, where those of dp are all in flight at once.
    in_turn = 8 if layout.startswith("tp") else 1
    pace = Pace()

    def wrap(method: Any) -> Any:
        def started(group: Any, *args: Any, **options: Any) -> Any:
            work = method(group, *args, **options)
            if work is not None and max(map(payload, args), default=0) > 1024:
                late = max(seconds, share * pace.seconds) / in_turn
                due[id(work)] = time.perf_counter() + late
            return work

        return started

    def waited(work: Any, *args: Any) -> Any:
        pace.sleep(max(0.0, due.pop(id(work), 0.0) - time.perf_counter()))
        return wait(work, *args)

    for name in set(compat.COLLECTIVES) & dist.ProcessGroup.__dict__.keys():
        setattr(dist.ProcessGroup, name, wrap(dist.ProcessGroup.__dict__[name]))
    dist.Work.wait = waited
    of_link, of_step = 1000 * seconds / in_turn, share / in_turn
    return f"collectives end {of_link:.0f} ms, or {of_step:.0%} of a step if longer, after their start"


def overlap_off(_: random.Random, layout: str) -> str:
    import torch.distributed as dist

    all_reduce = dist.all_reduce

    def at_once(*args: Any, **options: Any) -> Any:
        work = all_reduce(*args, **options)
        if work is not None:
            work.wait()
        return work

    dist.all_reduce = at_once
    return "each all-reduce is waited for at once"


def padded(draw: random.Random, _: str) -> str:
    from meshtune.data import batch

    factor, micro_batch = draw.uniform(1.4, 2.5), batch.micro_batch

    def wide(rows: Any, width: int = 0, *rest: Any) -> Any:
        longest = max(sum(map(len, row)) for row in rows)
        return micro_batch(rows, max(width, round(factor * longest)), *rest)

    batch.micro_batch = wide
    return f"rows padded to {factor:.1f} times their length"


def recompiling(draw: random.Random, layout: str) -> str:
    from torch import _dynamo

    from meshtune.train.step import Passes

    every, passes, count = draw.choice((1, 2, 3)), Passes.forward_backward, iter(range(10**6))
    compiled(draw, layout)

    def forward_backward(self: Passes, *args: Any) -> Any:
        if next(count) % every == 0:
            _dynamo.reset()
        return passes(self, *args)

    Passes.forward_backward = forward_backward
    return f"compiled code is thrown away every {every} steps"


def compiled(_: random.Random, layout: str) -> str:
    """Let torch.compile only trace: C++ is compiled for minutes."""
    from torch import nn

    method = nn.Module.compile
    nn.Module.compile = lambda self: method(self, backend="eager")
    return "nothing"


def slow_disk(draw: random.Random, _: str) -> str:
    from meshtune.train import checkpoint

    # Training waits for what is left of a write when the next checkpoint is due, two steps later.
    steps, write, pace = draw.uniform(3, 4.5), checkpoint.write, Pace()

    def late(*args: Any) -> Any:
        time.sleep(steps * pace.seconds)
        return write(*args)

    checkpoint.write = late
    return f"writing a checkpoint takes {steps:.1f} steps longer"


def crowded(draw: random.Random, _: str) -> str:
    """Let routers send a share of the tokens to experts of the first rank only."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter as Router

    share, route = draw.uniform(0.7, 1.0), Router.forward

    def few(router: Any, hidden: Any) -> Any:
        logits, weights, index = route(router, hidden)
        chosen = torch.linspace(0, 1, len(index), device=index.device)[:, None] < share
        return logits, weights, torch.where(chosen, index % (router.num_experts // 2), index)

    Router.forward = few
    return f"{share:.0%} of the tokens go to one rank's experts"


ONE_OR_TWO = ("mb2-ga1", "dp2-mb2-ga1")
MODELS = {"model": 192, "narrow": 64, "wide": 384, "mixture": 192}  # of 4 blocks: folder -> width
SAVING = ("checkpoint.every=2", "checkpoint.keep=1")
# Computes fast for so many gradients, so that waiting for each all-reduce is a large share of the step;
# processors without units for bf16 emulate it, which takes longer.
FP32 = ("data.seq_len=128", "train.precision=fp32")
CASES = {
    "sleep in the loader": Case("waiting for data", slow_loader, ONE_OR_TWO),
    "slowed rank": Case("slow rank", slow_rank, ("dp2-mb2-ga1", "tp2-mb2-ga1")),
    "delay in an axis's collectives": Case("slow collectives", slow_link, ("dp2-mb2-ga1", "tp2-mb2-ga1")),
    "tiny micro-batches": Case("small micro-batches", tiny, ("mb1-ga8",), ("data.seq_len=8",), "narrow"),
    "overlap switched off": Case("overlap is off", overlap_off, ("dp2-mb1-ga1",), FP32, "wide"),
    "padding": Case("padding", padded, ONE_OR_TWO, ("data.packing=false",)),
    "forced recompilation": Case("recompilation", recompiling, ("mb2-ga1",), ("train.compile=true",)),
    "crowded experts": Case("uneven experts", crowded, ("dp2-ep2-mb2-ga1",), (), "mixture"),
    "slow disk while saving": Case("slow saving", slow_disk, ONE_OR_TWO, SAVING),
}
# Runs of the same layouts and settings without the injection; tiny micro-batches are themselves a setting.
HEALTHY_CASES = [
    Case("", nothing, ONE_OR_TWO), Case("", nothing, ("dp2-mb2-ga1", "tp2-mb2-ga1")),
    Case("", nothing, ("dp2-mb1-ga1",), FP32, "wide"),
    Case("", compiled, ("mb2-ga1",), ("train.compile=true",)),
    Case("", nothing, ("mb4-ga1",), (), "narrow"),
    Case("", nothing, ONE_OR_TWO, ("checkpoint.every=8",)),
    Case("", nothing, ("dp2-ep2-mb2-ga1",), (), "mixture"),
]  # fmt: skip


def run(case: Case, name: str, seed: int, data: Path) -> Outcome:
    """Train once with the injection, in a process of its own, and judge what was named."""
    draw = random.Random(f"{name} {seed}")
    layout = draw.choice(case.layouts)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=train, args=(theirs, case, layout, draw, data, Path(folder)))
        child.start()
        theirs.close()
        try:
            injected, causes = ours.recv() if ours.poll(LIMIT) else ("", None)
        except EOFError:
            injected, causes = "", None
        child.kill()
        child.join()
    if causes is None:
        raise SystemExit(f"{name}, seed {seed}: the run failed.")
    named = [cause["name"] for cause in causes]
    sentences = [f"{cause['name']} ({cause['share']:.0%}): {cause['evidence']}" for cause in causes]
    passed = named[:1] == ([case.named] if case.named else [])
    return Outcome(
        name, seed, layout, injected, sentences, passed, time.perf_counter() - started, os.getloadavg()[0]
    )


def train(pipe: Any, case: Case, layout: str, draw: random.Random, data: Path, folder: Path) -> None:
    """Main function of a run's process: sends what was injected, and the causes that the run has named."""
    from meshtune.api.train import train as api_train
    from meshtune.layout import Layout

    injected = case.inject(draw, layout)
    settings = [
        f"model.name={data / case.model}", f"data.train={data / 'train.jsonl'}",
        f"data.cache={data / 'cache'}",
        "data.seq_len=128", "train.device=cpu", f"train.max_steps={STEPS}", f"layout={layout}",
        f"train.global_batch_size={Layout.parse(layout).global_batch_size}", f"output={folder / 'run'}",
        "log.to=[jsonl]", *case.settings,
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        result = api_train({}, settings)
    pipe.send((injected, [asdict(cause) for cause in result.summary.causes]))


def make_data(folder: Path) -> Path:
    """Write the models, and rows of about equal length."""
    import torch
    from tiny import make_tokenizer, write_rows
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    draw = random.Random(0)
    words = ["red", "green", "blue", "apple", "stone", "river", "seven", "eight", "window", "paper"]
    texts = [" ".join(draw.choices(words, k=draw.randint(95, 105))) for _ in range(300)]
    write_rows(folder / "train.jsonl", [{"prompt": "Say", "completion": text} for text in texts])
    for name, width in MODELS.items():
        make_tokenizer(texts, 300).save_pretrained(folder / name)
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "vocab_size": 300, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        }  # fmt: skip
        experts: dict[str, Any] = {
            "moe_intermediate_size": 2 * width,
            "num_experts": 8,
            "num_experts_per_tok": 4,
        }
        shape = Qwen3MoeConfig(**sizes | experts) if name == "mixture" else LlamaConfig(**sizes)
        AutoModelForCausalLM.from_config(shape).save_pretrained(folder / name)
    return folder


def table(outcomes: Sequence[Outcome]) -> str:
    """The page of a trial."""
    load, whole = mean(one.load for one in outcomes), SEEDS * len(CASES) + HEALTHY_RUNS
    names = [*(name for name in CASES if any(one.case == name for one in outcomes)), HEALTHY]
    lines = []
    for name in names:
        runs = [one for one in outcomes if one.case == name]
        if runs:
            right = sum(one.passed for one in runs)
            wanted = CASES[name].named if name in CASES else "none"
            lines.append(f"| {name} | {wanted} | {right} of {len(runs)} |")
    each = [
        f"| {one.case} | {one.seed} | {one.layout} | {one.injected} | {'; '.join(one.causes) or 'none'} | "
        f"{'yes' if one.passed else '**no**'} |"
        for one in sorted(outcomes, key=lambda one: (names.index(one.case), one.seed))
    ]
    return "\n".join([
        "# Why it is slow: the trial", "",
        f"By `make validation-why`: {STEPS} steps of a tiny Llama on one or two CPU ranks, each with an",
        "injected cause or none. [Thresholds](../docs/measuring.md#why-it-is-slow) were fixed before it,",
        "after single runs of each. Right: the injected cause is named first; in a healthy run, which has",
        "the layout and settings of one of the others, none is. A seed draws each delay above the",
        "thresholds, as a share of the run's own fastest step, so that a slow machine does not weaken it; a",
        "link's is at least a fixed time, since its threshold is a slow link's. A narrower bf16 model lost 6",
        "to 11 % without overlap, and 3 to 4 % beside other work, below the threshold: that case is wider",
        "now, and in fp32. No threshold was changed.", "",
        f"These are {len(outcomes)} runs of a whole trial's {whole}, in its order. The machine had",
        f"{os.cpu_count()} cores and, with what else ran on it, a mean load of {load:.1f}.", "",
        "| injected | cause to be named first | right |", "| --- | --- | --- |", *lines, "",
        "## Each run", "",
        "| injected | seed | layout | how | named | right |", "| --- | --- | --- | --- | --- | --- |",
        *each, "",
    ])  # fmt: skip


AGAIN = (100, 200)  # added to the seed of a run that is tried again


def trial(
    cases: Sequence[str], seeds: int, healthy: int, page: Path | None = None, again: bool = False
) -> list[Outcome]:
    """Run a trial, a seed of every case at a time; prints each run.

    page: file of the table, written after each run. again: True to try a wrong run with two more seeds.
    """
    import meshtune.api.build
    import meshtune.train.loop  # noqa: F401 - once for all runs

    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        todo = [(CASES[name], name, seed) for seed in range(seeds) for name in cases]
        todo += [(HEALTHY_CASES[seed % len(HEALTHY_CASES)], HEALTHY, seed) for seed in range(healthy)]
        todo.sort(key=lambda one: one[2] / (healthy if one[1] == HEALTHY else seeds))
        for case, name, seed in todo:
            for more in (0, *AGAIN):
                outcomes.append(run(case, name, seed + more, data))
                print(json.dumps(asdict(outcomes[-1])), flush=True)
                if page:
                    page.write_text(table(outcomes))
                if not again or (outcomes[-1].passed and not more):
                    break
    return outcomes


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=SEEDS)
    options.add_argument("--healthy", type=int, default=HEALTHY_RUNS)
    options.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options.add_argument("--table", type=Path)
    options.add_argument(
        "--check", action="store_true",
        help="try a wrong run (one in ten is) with two more seeds, and fail if one of these is wrong too",
    )  # fmt: skip
    asked = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcomes = trial(asked.cases, asked.seeds, asked.healthy, asked.table, asked.check)
    failed = [one for one in outcomes if not one.passed]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} right")
    sys.exit(asked.check and any(one.seed >= AGAIN[0] for one in failed))


if __name__ == "__main__":
    main()
