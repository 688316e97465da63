"""What the machinery of several ranks costs: meshtune's layouts against torch's own ways, on 2 CPU ranks.

    python benchmarks/parallel.py            # everything
    python benchmarks/parallel.py --quick    # does it run? (its figures mean nothing)

    dp2       against DistributedDataParallel        same attention, loss and accumulation: only the
    zero3x2   against FSDP2's fully_shard            machinery differs
    tp2-sp    against parallelize_module             torch's styles, loss_parallel, Hugging Face's sdpa
    by hand   data parallel's three savings, switched off one at a time
    scaling   two ranks against one, with the same global batch (strong) and with twice one's (weak)
    start     8 ranks by meshtune's launcher, from after the imports to a barrier that all have passed

meshtune's side is what `meshtune train` runs: `build`, its passes, its optimizer. All contenders read the
same global batches from the same weights, and must come to the same loss. Every row is one document of
SEQ_LEN tokens, all labelled: nobody gains by keeping documents apart or by leaving out logits.
"""

import argparse
import itertools
import json
import logging
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist
from single_device import RESULTS, processor, say
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from meshtune import config, launch
from meshtune.config import Config
from meshtune.data.loader import Batch, MicroBatch
from meshtune.layout import Layout
from meshtune.model.anatomy import anatomy
from meshtune.parallel.mesh import World, join
from meshtune.parallel.zero import local
from meshtune.train import build
from meshtune.train.loss import summed_loss
from meshtune.watch import Limits

SEQ_LEN, ROWS_PER_STEP = 128, 8
LEARNING_RATE, MAX_NORM = 1e-4, 1.0
WARM_UP = 2  # DDP settles its buckets after the first step
STARTED = 8  # ranks
MODELS = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "28 M": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
             "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
}  # fmt: skip

# A global batch -> its loss, with the weights updated.
Step = Callable[[Batch], float]
# A batch -> this rank's share of its loss, with the gradients on the parameters.
Gradients = Callable[[Batch], Tensor]

# Contenders, as each rank makes them #


def meshtune(settings: Config) -> tuple[Iterator[Any], Step]:
    """The real thing, as train/loop.py steps it."""
    run = build.build(settings)

    def step(batch: Batch) -> float:
        share = run.passes.forward_backward(batch, run.memory.phase)
        loss, squares = run.world.total(share, run.optimizer.squared_norm())
        run.optimizer.clip(math.sqrt(squares), run.max_grad_norm)
        with run.memory.phase("optimizer"):
            run.optimizer.step(LEARNING_RATE)
        return loss

    return iter(run.loader), step


def rival(
    make: Callable[[nn.Module, World], tuple[nn.Module, Gradients]], attention: str, settings: Config
) -> tuple[Iterator[Any], Step]:
    """torch's own optimizer and clipping around what `make` does to the model of each rank."""
    build.quiet()
    world = join(build.layout_of(settings), torch.device("cpu"))
    tokenizer, encoder = build.tokenizer_of(settings)
    model, _ = build.model_of(settings, tokenizer, attention, world.device)
    trained, gradients = make(model, world)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(batch: Batch) -> float:
        loss = gradients(batch)
        torch.nn.utils.clip_grad_norm_(trained.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        return float(loss)

    return iter(build.loader_of(settings, build.data_of(settings, encoder).train, world)), step


class Whole(nn.Module):
    """A model and meshtune's loss of a micro-batch in one forward, as DDP and FSDP2 want their root."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.anatomy = anatomy(model)  # pyright: ignore[reportArgumentType]

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.anatomy.blocks).children())

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        return summed_loss(self.model, self.anatomy, micro_batch)


def accumulated(
    loss_of: Callable[[MicroBatch], Tensor],
    batch: Batch,
    *,
    times: float = 1,
    around: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext(),
) -> Tensor:
    """Backward of every micro-batch's share of the loss · `times`; returns the sum of the shares.

    around(last): entered for each micro-batch.
    """
    total = torch.zeros(())
    for number, micro_batch in enumerate(batch.micro_batches, 1):
        with around(number == len(batch.micro_batches)):
            loss = loss_of(micro_batch) / batch.label_tokens
            (loss * times).backward()
        total += local(loss.detach())
    return total


def ddp(model: nn.Module, world: World) -> tuple[nn.Module, Gradients]:
    wrapped = DistributedDataParallel(Whole(model), gradient_as_bucket_view=True)

    def around(last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else wrapped.no_sync()

    return wrapped, partial(accumulated, wrapped, times=world.size, around=around)  # it averages


def fsdp(model: nn.Module, world: World) -> tuple[nn.Module, Gradients]:
    whole = Whole(model)
    for block in whole.blocks:
        fully_shard(block)
    fully_shard(whole)
    return whole, partial(accumulated, whole, times=world.size)  # it averages


def styles(model: nn.Module, world: World) -> tuple[nn.Module, Gradients]:
    """Tensor and sequence parallel in torch's own words, for a Llama."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # one warning per clipping
    outside = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    gathered = {"desired_input_layouts": (Replicate(),), "input_layouts": (Shard(1),)}
    inside = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(**gathered),
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    llama: Any = model
    mesh: Any = world.mesh
    parallelize_module(model, mesh["tp"], outside)
    for block in llama.model.layers:
        parallelize_module(block, mesh["tp"], inside)
    if llama.config.tie_word_embeddings:  # which parallelize_module has untied
        llama.lm_head.weight = llama.model.embed_tokens.weight

    def loss_of(micro_batch: MicroBatch) -> Tensor:
        logits = llama(
            input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids, use_cache=False
        ).logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), micro_batch.labels.flatten(), reduction="sum"
        )

    def gradients(batch: Batch) -> Tensor:
        total = accumulated(loss_of, batch, around=lambda last: loss_parallel())
        return total / world.size  # every rank has the whole loss

    return model, gradients


def by_hand(
    model: nn.Module, world: World, *, flat: bool = True, overlap: bool = True, once: bool = True
) -> tuple[nn.Module, Gradients]:
    """Data parallel in a few lines, with its three savings.

    flat: one message for each block and one for the rest, else one for each parameter. overlap: a message
    leaves as soon as the last micro-batch's backward pass has its gradients, else after that pass. once: only
    the last micro-batch's pass sends.
    """
    whole = Whole(model)
    blocks = [list(block.parameters()) for block in whole.blocks]
    inside = set(itertools.chain(*blocks))
    groups = [*blocks, [p for p in whole.parameters() if p not in inside]]
    if not flat:
        groups = [[parameter] for group in groups for parameter in group]
    missing: Counter[int] = Counter()  # gradients by group, of the pass at hand
    sent: list[tuple[list[nn.Parameter], Tensor, Any]] = []
    sums: dict[nn.Parameter, Tensor] = {}

    def send(group: list[nn.Parameter]) -> None:
        gradients = [p.grad for p in group if p.grad is not None]
        message = torch.cat([g.flatten() for g in gradients]) if len(group) > 1 else gradients[0].flatten()
        sent.append((group, message, dist.all_reduce(message, async_op=True)))

    def arrived(index: int, _: nn.Parameter) -> None:
        missing[index] -= 1
        if missing[index] == 0 and overlap:
            send(groups[index])

    def finish() -> None:
        for group in [] if overlap else groups:
            send(group)
        for group, message, work in sent:
            work.wait()
            for parameter, piece in zip(group, message.split([p.numel() for p in group]), strict=True):
                shaped = piece.view_as(parameter)
                sums[parameter] = sums[parameter].add_(shaped) if parameter in sums else shaped
                parameter.grad = None
        sent.clear()

    for index, group in enumerate(groups):
        for parameter in group:
            parameter.register_post_accumulate_grad_hook(partial(arrived, index))

    def gradients(batch: Batch) -> Tensor:
        total = torch.zeros(())
        for number, micro_batch in enumerate(batch.micro_batches, 1):
            sends = number == len(batch.micro_batches) or not once
            for index, group in enumerate(groups):
                missing[index] = len(group) if sends else -1  # -1: never comes to 0
            loss = whole(micro_batch) / batch.label_tokens
            loss.backward()
            total += loss.detach()
            if sends:
                finish()
        for parameter, gradient in sums.items():
            parameter.grad = gradient
        sums.clear()
        return total

    return whole, gradients


class Contender(NamedTuple):
    layout: str  # whose micro-batches it gets; its world is how many ranks run
    make: Callable[[Config], tuple[Iterator[Any], Step]] = meshtune


def ours(layout: str) -> Contender:
    return Contender(layout)


PAIRS = {
    "dp2": ours("dp2-mb2-ga2"),
    "DDP": Contender("dp2-mb2-ga2", partial(rival, ddp, "meshtune")),
    "zero3x2": ours("zero3x2-mb2-ga2"),
    "FSDP2": Contender("zero3x2-mb2-ga2", partial(rival, fsdp, "meshtune")),
    "tp2-sp": ours("tp2-sp-mb4-ga2"),
    "parallelize_module": Contender("tp2-sp-mb4-ga2", partial(rival, styles, "sdpa")),
}
ALONE = {
    "1 rank": ours("mb4-ga2"),
    "1 rank, half the batch": ours("mb2-ga2"),
    "pp2": ours("pp2-1f1b-mb2-ga4"),
    "cp2": ours("cp2-mb4-ga2"),
}
SAVINGS = {
    "dp2, ga4": ours("dp2-mb1-ga4"),
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
    """Counts collectives. DDP's, and those between stages of a pipeline, are made where it does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def measure(rank: launch.Rank, name: str, words: Sequence[str], steps: int, file: Path) -> None:
    """One rank of one run; the main one leaves the seconds of each step and what else there is to say."""
    batches, step = CONTENDERS[name].make(config.load(None, words))
    taken = [batch for batch, _ in itertools.islice(batches, WARM_UP + steps)]
    with Messages() as messages:
        losses = [step(taken[0])]
    seconds = []
    for batch in taken[1:]:
        dist.barrier()
        started = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - started)
    if rank.main:
        found = {
            "seconds": seconds[WARM_UP - 1 :], "tokens": taken[0].tokens, "loss": losses[-1],
            "messages": messages.count,
        }  # fmt: skip
        file.write_text(json.dumps(found))


def started(rank: launch.Rank, folder: Path) -> None:
    dist.barrier()
    (folder / str(rank.number)).write_text(repr(time.monotonic()))


def on_ranks(ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Forked ranks by the launcher of `meshtune train`, one too, so that this process stays as it is."""
    launch.run_here(ranks, function, args, "cpu", Limits())


def start_seconds() -> float:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        on_ranks(STARTED, started, Path(folder))
        return max(float(file.read_text()) for file in Path(folder).iterdir()) - began


def set_up(work: Path, sizes: dict[str, Any]) -> int:
    """A model with random weights, its tokenizer, and rows of random words; returns its parameters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"w{number}" for number in range(sizes["vocab_size"] - 2)]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(work / "model")

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


def once(work: Path, name: str, steps: int) -> dict[str, Any]:
    """One run of one contender, on fresh ranks."""
    layout = Layout.parse(CONTENDERS[name].layout)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        words = [
            f"model.name={work / 'model'}", f"data.train={work / 'train.jsonl'}", f"layout={layout}",
            f"data.cache={work / 'cache'}", f"data.seq_len={SEQ_LEN}", "data.train_on=all",
            f"train.global_batch_size={layout.global_batch_size}", "train.max_steps=1000",
            "train.precision=fp32", f"train.learning_rate={LEARNING_RATE}", "train.weight_decay=0",
            f"train.max_grad_norm={MAX_NORM}", "log.to=[jsonl]", f"output={folder}/run",
        ]  # fmt: skip
        result = Path(folder, "result.json")
        on_ranks(layout.world, measure, name, words, steps, result)
        found = json.loads(result.read_text())
    found["tokens_per_second"] = found["tokens"] / statistics.median(found["seconds"])
    return found


def rounds(work: Path, model: str, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Every contender's runs, interleaved; every other round backwards, so that nobody is always the first.

    The pairs have all rounds. The others, which no target hangs on, have at most three with the large model.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(options.rounds):
        names = list(PAIRS if model == "28 M" and number >= 3 else CONTENDERS)
        for name in reversed(names) if number % 2 else names:
            one = once(work, name, options.tiny_steps if model == "tiny" else options.steps)
            found[name].append(one)
            say(f"{model}, {name}: {one['tokens_per_second']:.0f} tokens/s, loss {one['loss']:.5f}")
    check(model, found)
    return found


def check(model: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Contenders with the same global batches must come to the same loss, or they did not do the same."""
    wanted = found["1 rank"][0]["loss"]
    for name, runs in found.items():
        for run in runs:
            if name != "1 rank, half the batch" and abs(run["loss"] / wanted - 1) > 1e-4:
                raise SystemExit(f"{model}: {name} came to a loss of {run['loss']}, one rank to {wanted}.")


# What came out #


def speed(result: dict[str, Any], model: str, name: str) -> float:
    return statistics.median(run["tokens_per_second"] for run in result["runs"][model][name])


def scaling(result: dict[str, Any], model: str, name: str) -> tuple[float, float]:
    """(strong, weak): tokens/s of two ranks over one's, and of that half of it that each had to do."""
    two = speed(result, model, name)
    return two / speed(result, model, "1 rank"), two / speed(result, model, "1 rank, half the batch")


def markdown(result: dict[str, Any], picture: str) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    sizes = ", ".join(f"{name}: {count:,}" for name, count in result["parameters"].items())
    lines = [
        "# Parallel layouts", "",
        f"{result['date']} · {result['machine']} · one thread a rank · gloo · {versions}", "",
        f"Llamas in fp32 (parameters: {sizes}) · {ROWS_PER_STEP} rows of {SEQ_LEN} tokens a step · medians of "
        f"{result['rounds']} interleaved runs (those without a target, 28 M: {min(3, result['rounds'])}), each "
        f"the median of {result['tiny_steps']} (tiny) or {result['steps']} steps after {WARM_UP} of warm-up.",
        "", "## Against the targets", "", "| | measured | target |", "|---|---:|---:|",
    ]  # fmt: skip
    for us, them, model, target in TARGETS:
        ratio = speed(result, model, us) / speed(result, model, them)
        lines.append(f"| {model}: {us} / {them}, tokens/s | {ratio:.2f} | ≥ {target} |")
    start = statistics.median(result["start_seconds"])
    lines.append(f"| {STARTED} ranks started, seconds beyond the imports | {start:.2f} | ≤ 2 |")
    for model, runs in result["runs"].items():
        lines += ["", f"## {model}", "", "| | layout | tokens/s | lowest – highest |", "|---|---|---:|---:|"]
        for name in (*PAIRS, *ALONE):
            each = [run["tokens_per_second"] for run in runs[name]]
            lines.append(
                f"| {name} | `{CONTENDERS[name].layout}` | {statistics.median(each):.0f} "
                f"| {min(each):.0f} – {max(each):.0f} |"
            )
        lines += [
            "", f"### What data parallel saves, {model} (`{SAVINGS['by hand'].layout}`)", "",
            "| | step, ms | against by hand | collectives |", "|---|---:|---:|---:|",
        ]  # fmt: skip
        base = speed(result, model, "by hand")
        for name in SAVINGS:
            own, tokens = speed(result, model, name), runs[name][0]["tokens"]
            lines.append(
                f"| {name} | {tokens / own * 1000:.1f} | {base / own:.2f} × | {runs[name][0]['messages']} |"
            )
    lines += [
        "",
        "Collectives of a step; one of them is for the loss. `dp2, ga4` is meshtune's own layout, the rows below "
        "it the benchmark's data parallel with all three savings, then without one. FSDP2's all-reduce blocks "
        "on CPU, so meshtune's row has no overlap here; on CUDA it runs on a stream of its own.",
        "", "## Scaling", "", "| | " + " | ".join(f"{m}, strong | {m}, weak" for m in result["runs"]) + " |",
        "|---|" + "---:|" * 2 * len(result["runs"]),
    ]  # fmt: skip
    for name in SCALED:
        figures = [f"{value:.2f}" for model in result["runs"] for value in scaling(result, model, name)]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    lines += [
        "", f"![Speed of two ranks against one]({picture})", "",
        "tokens/s of two ranks over those of one: strong with the same global batch, weak with half of it on "
        "the one. Two is ideal. Two cores of one machine can't show what a network costs: messages are gloo's "
        "copies through memory, made by the cores that compute, the ranks share memory bandwidth and cache, "
        "and nothing says how it goes on beyond two.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any], file: Path) -> None:
    """Bars for each technique: how many times one rank's speed two have."""
    import matplotlib.pyplot as plt

    models = list(result["runs"])
    figure, panels = plt.subplots(1, len(models), figsize=(9, 3.2), sharey=True, squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        for at, (kind, colour) in enumerate((("strong", "#0072b2"), ("weak", "#009e73"))):
            heights = [scaling(result, model, name)[at] for name in SCALED]
            panel.bar(
                [x + 0.4 * at - 0.2 for x in range(len(SCALED))], heights, 0.38, label=kind, color=colour
            )
        panel.axhline(2, color="#3b4046", linewidth=0.8, linestyle="--")
        panel.axhline(1, color="#3b4046", linewidth=0.8)
        panel.set_xticks(range(len(SCALED)), SCALED)
        panel.set_title(f"{model}: tokens/s, 2 ranks / 1 rank")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run of the 28 M model")
    parser.add_argument("--tiny-steps", type=int, default=20, help="and of the tiny one")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--quick", action="store_true", help="one short round, written to a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.quick:
        options.rounds, options.steps, options.tiny_steps = 1, 1, 1
        options.out = Path(tempfile.mkdtemp())
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
