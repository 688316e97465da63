"""Measure meshtune's layouts beside torch's own ways of running several ranks, on 2 CPU ranks.

    python benchmarks/parallel.py            # everything
    python benchmarks/parallel.py --quick    # does it run? (its figures mean nothing)
    python benchmarks/parallel.py --against PATH [--layouts dp2-mb2-ga2 …]    # this checkout against another

    dp2       against DistributedDataParallel        same attention, loss and accumulation: only the
    zero3x2   against FSDP2's fully_shard            machinery differs
    tp2-sp    against parallelize_module             torch's styles, loss_parallel, Hugging Face's sdpa
    by hand   data parallel's three savings, switched off one at a time
    scaling   two ranks against one, with the same global batch (strong) and with twice one's (weak)
    start     8 ranks by meshtune's launcher, from after the imports to a barrier that all have passed

meshtune's side is what `meshtune train` runs: `build`, its passes, its optimizer. All contenders read the
same global batches from the same weights, and must come to the same loss and gradient norm. Every row is one
document of SEQ_LEN tokens, all labelled: nobody gains by keeping documents apart or by leaving out logits.
"""

import argparse
import io
import itertools
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist
from against import paired, sentence
from parallel_rivals import Gradients, by_hand, ddp, fsdp, styles
from single_device import RESULTS, processor, say
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshtune import config, launch
from meshtune.api import build, choose, resolve
from meshtune.config import Config
from meshtune.data.batch import Batch
from meshtune.launch.watch import HangLimits
from meshtune.layout import Layout
from meshtune.model.load import quiet
from meshtune.parallel.mesh import World, join
from meshtune.train.inputs import loader_of
from meshtune.train.model import single_model
from meshtune.train.step import Counts

SEQ_LEN, ROWS_PER_STEP = 96, 8
LEARNING_RATE, MAX_NORM = 1e-4, 1.0
UNTARGETED_ROUNDS = 3
WARM_UP = 2  # DDP settles its buckets after the first step
STARTED = 8  # ranks
MODELS = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "28 M": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
             "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
}  # fmt: skip

# A global batch -> its loss and gradient norm; the weights are then updated.
Step = Callable[[Batch], tuple[float, Any]]

# Contenders, as each rank makes them #


def meshtune(settings: Config) -> tuple[Iterator[Any], Step]:
    """(Global batches, step) of meshtune's own run, as train/loop.py steps it."""
    run = build.build(settings)
    phase = run.meter.phase

    def step(batch: Batch) -> tuple[float, Any]:
        done = run.passes.step(
            run.passes.localise(batch), Counts(batch.label_tokens), phase,
            learning_rate=LEARNING_RATE, max_grad_norm=run.max_grad_norm,
        )  # fmt: skip
        return done.loss, done.norm

    return iter(run.loader), step


def rival(
    make: Callable[[nn.Module, World], tuple[nn.Module, Gradients]], attention: str, settings: Config
) -> tuple[Iterator[Any], Step]:
    """(Global batches, step) with torch's own optimizer and clipping.

    make: ddp, fsdp, styles or by_hand, applied to this rank's model. attention: name of the attention
    function that the model is built with.
    """
    quiet()
    world = join(choose.choose_together(settings).layout, torch.device("cpu"))
    model = single_model(resolve.model_spec(settings, attention, world.device.type), world.device)
    trained, gradients = make(model, world)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(batch: Batch) -> tuple[float, Any]:
        loss = gradients(batch)
        norm = torch.nn.utils.clip_grad_norm_(trained.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        return float(loss), norm

    prepared = resolve.inputs_of(settings).prepared
    loader = loader_of(prepared.train, world.layout, world.data_rank, settings.train.seed)
    return iter(loader), step


class Contender(NamedTuple):
    """A way to train: on each rank `make` returns (global batches, step)."""

    layout: str  # it gives the micro-batches and the number of ranks
    make: Callable[[Config], tuple[Iterator[Any], Step]] = meshtune


PAIRS = {
    "dp2": Contender("dp2-mb2-ga2"),
    "DDP": Contender("dp2-mb2-ga2", partial(rival, ddp, "meshtune")),
    "zero3x2": Contender("zero3x2-mb2-ga2"),
    "FSDP2": Contender("zero3x2-mb2-ga2", partial(rival, fsdp, "meshtune")),
    "tp2-sp": Contender("tp2-sp-mb4-ga2"),
    "parallelize_module": Contender("tp2-sp-mb4-ga2", partial(rival, styles, "sdpa")),
}
ALONE = {
    "1 rank": Contender("mb4-ga2"),
    "1 rank, half the batch": Contender("mb2-ga2"),
    "pp2": Contender("pp2-1f1b-mb2-ga4"),
    "cp2": Contender("cp2-mb4-ga2"),
}
SAVINGS = {
    "dp2, ga4": Contender("dp2-mb1-ga4"),
    **{
        name: Contender("dp2-mb1-ga4", partial(rival, partial(by_hand, **off), "meshtune"))
        for name, off in {
            "by hand": {},
            "one message per parameter": {"flat": False},
            "no overlap": {"overlap": False},
            "sync on every micro-batch": {"once": False},
        }.items()
    },
}
CONTENDERS = PAIRS | ALONE | SAVINGS
SCALED = ("dp2", "zero3x2", "tp2-sp", "pp2", "cp2")
TARGETS = (  # ours, theirs, model -> lowest ratio
    *((us, them, model, 0.97) for us, them in (("dp2", "DDP"), ("zero3x2", "FSDP2")) for model in MODELS),
    ("tp2-sp", "parallelize_module", "tiny", 1.5),
    ("tp2-sp", "parallelize_module", "28 M", 1.0),
)

# Running them #


class Messages(TorchDispatchMode):
    """Counts collectives inside `with`; not DDP's and those between pipeline stages, which it can't see."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def measure(rank: launch.Rank, name: str, words: Sequence[str], steps: int, file: Path) -> None:
    """Run one rank of one run; the main one writes what it measured to `file` as JSON.

    name: a key of CONTENDERS. words: settings. steps: measured ones, after WARM_UP others.
    """
    with redirect_stderr(io.StringIO()):  # what a run says of its data
        batches, step = CONTENDERS[name].make(config.load(None, words))
    taken = [batch for batch, _ in itertools.islice(batches, WARM_UP + steps)]
    with Messages() as messages:
        step(taken[0])
    for batch in taken[1:WARM_UP]:
        step(batch)
    seconds, loss = [], math.nan
    norm: Any = math.nan
    for batch in taken[WARM_UP:]:
        dist.barrier()
        began = time.perf_counter()
        loss, norm = step(batch)
        seconds.append(time.perf_counter() - began)
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if rank.main:
        found = {
            "seconds": seconds, "tokens": taken[0].tokens, "loss": loss, "norm": norm,
            "messages": messages.count,
        }  # fmt: skip
        file.write_text(json.dumps(found))


def started(rank: launch.Rank, folder: Path) -> None:
    dist.barrier()
    (folder / str(rank.number)).write_text(repr(time.monotonic()))


def on_ranks(ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Run `function(rank, *args)` on forked ranks by the launcher of `meshtune train`.

    A single rank is forked too, so that this process stays as it is.
    """
    launch.run_here(ranks, function, args, "cpu", HangLimits())


def start_seconds() -> float:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        on_ranks(STARTED, started, Path(folder))
        return max(float(file.read_text()) for file in Path(folder).iterdir()) - began


def set_up(work: Path, sizes: dict[str, Any]) -> int:
    """Write a model with random weights, its tokenizer and rows of random words; return its parameter count.

    sizes: arguments of LlamaConfig.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"w{number}" for number in range(sizes["vocab_size"] - 2)]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(work / "model")

    quiet()
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            **sizes, max_position_embeddings=SEQ_LEN, bos_token_id=None, eos_token_id=1, pad_token_id=0
        )
    )
    made.save_pretrained(work / "model")

    draw = random.Random(0)
    with (work / "train.jsonl").open("w") as file:
        for _ in range(40 * ROWS_PER_STEP):
            row = {"prompt": draw.choice(words), "completion": " ".join(draw.choices(words, k=2 * SEQ_LEN))}
            print(json.dumps(row), file=file)
    return sum(parameter.numel() for parameter in made.parameters())


def settings_words(work: Path, layout: Layout) -> list[str]:
    """section.key=value of a run on what `set_up` wrote to `work`, without steps and output."""
    return [
        f"model.name={work / 'model'}", f"data.train={work / 'train.jsonl'}", f"layout={layout}",
        f"data.cache={work / 'cache'}", f"data.seq_len={SEQ_LEN}", "data.train_on=all",
        f"train.global_batch_size={layout.global_batch_size}", "train.precision=fp32",
        f"train.learning_rate={LEARNING_RATE}", "train.weight_decay=0", f"train.max_grad_norm={MAX_NORM}",
        "log.to=[jsonl]",
    ]  # fmt: skip


def once(work: Path, name: str, steps: int) -> dict[str, Any]:
    """Run a contender on fresh ranks; returns "seconds" of `steps` steps, "loss" and so on."""
    layout = Layout.parse(CONTENDERS[name].layout)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        words = [*settings_words(work, layout), "train.max_steps=1000", f"output={folder}/run"]
        result = Path(folder, "result.json")
        on_ranks(layout.world, measure, name, words, steps, result)
        found = json.loads(result.read_text())
    found["tokens_per_second"] = found["tokens"] / statistics.median(found["seconds"])
    return found


def rounds(work: Path, model: str, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Contender -> its runs, by round; contenders take turns, in every other round in reverse order.

    model: a key of MODELS. PAIRS have all rounds, the others, which have no target, at most
    UNTARGETED_ROUNDS. Raises SystemExit if the contenders do not agree (`check`).
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(options.rounds):
        names = list(CONTENDERS if number < UNTARGETED_ROUNDS else PAIRS)
        for name in reversed(names) if number % 2 else names:
            one = once(work, name, options.tiny_steps if model == "tiny" else options.steps)
            found[name].append(one)
            say(f"{model}, {name}: {one['tokens_per_second']:.0f} tokens/s, loss {one['loss']:.5f}")
    check(model, found)
    return found


def check(model: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Raise SystemExit if a contender's loss or gradient norm differs by more than 0.1 % from one rank's.

    found: contender -> its runs. "1 rank, half the batch" has other global batches and is left out.
    """
    one = found["1 rank"][0]
    for name, key in itertools.product(found.keys() - {"1 rank, half the batch"}, ("loss", "norm")):
        for run in found[name]:
            if abs(run[key] / one[key] - 1) > 1e-3:
                raise SystemExit(f"{model}: {name} came to a {key} of {run[key]}, one rank to {one[key]}.")


# What came out #


def speed(result: dict[str, Any], model: str, name: str) -> float:
    """Median tokens/s of a contender's runs. model, name: keys of MODELS and CONTENDERS."""
    return statistics.median(run["tokens_per_second"] for run in result["runs"][model][name])


def against(result: dict[str, Any], model: str, us: str, them: str) -> list[float]:
    """tokens/s of contender `us` over that of `them`, one ratio per round.

    A machine whose speed drifts changes both sides of a round.
    """
    runs = result["runs"][model]
    return [
        a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(runs[us], runs[them], strict=True)
    ]


def scaling(result: dict[str, Any], model: str, name: str) -> tuple[float, float]:
    """(Strong, weak) scaling of a layout on two ranks, 2 if ideal.

    Its tokens/s over those of one rank with the same global batch, and with half of it.
    """
    two = speed(result, model, name)
    return two / speed(result, model, "1 rank"), two / speed(result, model, "1 rank, half the batch")


def markdown(result: dict[str, Any], picture: str) -> str:
    runs = result["runs"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    sizes = ", ".join(f"{name}: {count:,}" for name, count in result["parameters"].items())
    fewer = min(UNTARGETED_ROUNDS, result["rounds"])
    lines = [
        "# Parallel layouts", "",
        f"{result['date']} · {result['machine']} · one thread a rank · gloo · {versions}", "",
        f"Llamas in fp32 (parameters: {sizes}) · {ROWS_PER_STEP} rows of {SEQ_LEN} tokens a step · medians "
        f"of {result['rounds']} interleaved runs ({fewer} where there is no target), each the median of "
        f"{result['tiny_steps']} steps (tiny) or {result['steps']} (28 M) after {WARM_UP} of warm-up.",
        *table("## Against the targets", ["", "measured", "target"], against_targets(result)),
    ]  # fmt: skip
    for model in runs:
        lines += table(f"## {model}", ["", "layout", "tokens/s", "lowest – highest"], speeds(runs[model]))
    for model in runs:
        title = f"## What data parallel saves, {model} (`{SAVINGS['by hand'].layout}`)"
        lines += table(title, ["", "step, ms", "by hand = 1", "collectives"], savings(result, model))
    scales = [
        [name, *(f"{value:.2f}" for model in runs for value in scaling(result, model, name))]
        for name in SCALED
    ]
    heads = ["", *(f"{model}, {kind}" for model in runs for kind in ("strong", "weak"))]
    lines += [
        "", "Collectives are those of a step, one of them for the loss. `dp2, ga4` is meshtune's own layout; "
        "the rows below it are a data parallel of the benchmark, with all three savings and then without one "
        "of them.",
        *table("## Scaling", heads, scales), "", f"![Speed of two ranks against one]({picture})", "",
        "tokens/s of two ranks over those of one: strong with the same global batch, weak with half of it on "
        "the one. Two is ideal. Two cores of one machine can't show what a network costs: messages are "
        "gloo's copies through memory, made by the cores that compute; the ranks share cache and memory "
        "bandwidth; and nothing says how it goes on beyond two.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown section with a table; all columns but the first are right-aligned."""
    lines = [" | ".join(row) for row in (heads, ["---", *["---:"] * (len(heads) - 1)], *rows)]
    return ["", title, "", *(f"| {line} |" for line in lines)]


def against_targets(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for us, them, model, target in TARGETS:
        if model in result["runs"]:
            each = against(result, model, us, them)
            found = f"{statistics.median(each):.2f} ({min(each):.2f} – {max(each):.2f})"
            rows.append([f"{model}: {us} / {them}, tokens/s", found, f"≥ {target}"])
    start = statistics.median(result["start_seconds"])
    return [*rows, [f"{STARTED} ranks started, seconds beyond the imports", f"{start:.2f}", "≤ 2"]]


def speeds(runs: dict[str, Any]) -> list[list[str]]:
    each = {name: [run["tokens_per_second"] for run in runs[name]] for name in (*PAIRS, *ALONE)}
    return [
        [name, f"`{CONTENDERS[name].layout}`", f"{statistics.median(found):.0f}",
         f"{min(found):.0f} – {max(found):.0f}"]
        for name, found in each.items()
    ]  # fmt: skip


def savings(result: dict[str, Any], model: str) -> list[list[str]]:
    base, rows = speed(result, model, "by hand"), []
    for name in SAVINGS:
        own, one = speed(result, model, name), result["runs"][model][name][0]
        milliseconds = one["tokens"] / own * 1000
        rows.append([name, f"{milliseconds:.1f}", f"{base / own:.2f}", str(one["messages"])])
    return rows


def draw(result: dict[str, Any], file: Path) -> None:
    """Write a picture with bars for each layout of SCALED: tokens/s of two ranks over that of one.

    file: .svg or .png.
    """
    from meshtune.report.draw.kinds import Mark, Stacks
    from meshtune.report.draw.picture import write

    ratios = {model: [scaling(result, model, name) for name in SCALED] for model in result["runs"]}
    panels = [
        Stacks(
            f"scaling_{place}",
            model,
            "tokens/s of 2 ranks / tokens/s of 1 rank",
            tuple(SCALED),
            {kind: tuple(pair[n] for pair in pairs) for n, kind in enumerate(("strong", "weak"))},
            mark=Mark(2, "ideal: 2"),
            stacked=False,
        )
        for place, (model, pairs) in enumerate(ratios.items())
    ]
    write(file, [panels], title="Speed of two ranks against one")


def compare(options: argparse.Namespace) -> None:
    """Print how fast this checkout trains beside another one, for each model and layout that is asked for."""
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            set_up(Path(folder), MODELS[model])
            for layout in map(Layout.parse, options.layouts):
                words = [*settings_words(Path(folder), layout), "checkpoint.every=0"]
                figures = paired(
                    words, other=options.against, ranks=layout.world, pairs=options.pairs, say=say
                )
                print(f"{model}, {layout}: {sentence(figures)}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run of the 28 M model")
    parser.add_argument("--tiny-steps", type=int, default=15, help="and of the tiny one")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--against", type=Path, help="another checkout's root: only the two are compared")
    parser.add_argument("--pairs", type=int, default=20, help="steps of each that are compared")
    parser.add_argument(
        "--layouts", nargs="+", default=["mb4-ga2", "dp2-mb2-ga2", "zero3x2-mb2-ga2"], help="compared layouts"
    )
    parser.add_argument("--quick", action="store_true", help="one short round, written to a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.quick:
        options.rounds, options.steps, options.tiny_steps = 1, 1, 1
        options.out = Path(tempfile.mkdtemp())
    if options.against:
        return compare(options)
    result: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": processor(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("meshtune", "torch", "transformers")},
        "rounds": options.rounds,
        "steps": options.steps,
        "tiny_steps": options.tiny_steps,
        "start_seconds": [start_seconds() for _ in range(options.rounds)],
        "parameters": {},
        "runs": {},
    }
    say(f"{STARTED} ranks started in {statistics.median(result['start_seconds']):.2f} s")
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            result["parameters"][model] = set_up(Path(folder), MODELS[model])
            result["runs"][model] = rounds(Path(folder), model, options)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"parallel-{datetime.now(UTC):%Y-%m-%d}"
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1))
    (options.out / f"{name}.md").write_text(markdown(result, f"{name}.svg"))
    draw(result, options.out / f"{name}.svg")
    print(markdown(result, f"{name}.svg"))
    say(f"written: {options.out / name}.json, .md and .svg")


if __name__ == "__main__":
    main()
