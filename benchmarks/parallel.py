"""What the machinery of the layouts costs: two ranks on CPU, one thread each, against torch's own ways.

    python benchmarks/parallel.py            # about 10 minutes on 2 cores
    python benchmarks/parallel.py --quick    # does it run? (its figures mean nothing)

    dp2       against DistributedDataParallel, same model, attention and loss function
    zero3x2   against plain FSDP2 (fully_shard), likewise
    tp2-sp    against torch's tensor-parallel styles, with its loss_parallel
    dp2 with its three savings taken away, one at a time
    one rank against two, for every technique: the same batch (strong), and a batch for each (weak)

All contenders of a comparison live in the same processes and take turns, step by step, on the same random
batch, all of it labelled; a figure is the median over the rounds. Each step is forward, backward, clipping
and fused AdamW, with two micro-batches (four where savings are taken away).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from single_device import RESULTS, processor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from meshtune import config, launch
from meshtune.data.loader import Batch, MicroBatch
from meshtune.model.anatomy import anatomy
from meshtune.parallel import zero
from meshtune.train import build
from meshtune.train.loss import summed_loss

NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size",
)  # fmt: skip
MODELS = {
    "tiny": dict(zip(NAMES, (64, 176, 4, 4, 2, 512), strict=True)),
    "28 M": dict(zip(NAMES, (512, 1408, 8, 8, 4, 8192), strict=True)),
}
ROWS, WIDTH = 2, 256  # of a micro-batch
Step = Callable[[], Any]


# The batch, and those who train on it #


def micro_batch(seed: int, vocabulary: int, rows: int = ROWS) -> MicroBatch:
    ids = torch.randint(3, vocabulary, (rows, WIDTH + 1), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(WIDTH).expand(rows, WIDTH).contiguous()
    documents = ((WIDTH,),) * rows
    tokens = rows * WIDTH
    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, documents, tokens, tokens)


def batch(rank: int, ranks: int, number: int, vocabulary: int) -> Batch:
    """This rank's `number` micro-batches of a global batch over `ranks` data ranks."""
    own = tuple(micro_batch(rank * number + i, vocabulary) for i in range(number))
    tokens = sum(each.tokens for each in own) * ranks
    return Batch(own, tokens, tokens, "")


def ours(folder: Path, layout: str, number: int, vocabulary: int) -> Step:
    """meshtune's own parts, from its settings on."""
    data_ranks = config.PartialLayout.parse(layout).complete(devices=1, global_batch_size=64).data_ranks
    words = [
        f"model.name={folder / 'model'}", f"data.train={folder / 'rows.jsonl'}", "data.seq_len=64",
        f"data.cache={folder / 'cache'}", f"layout={layout}-mb1-ga{number}", "train.precision=fp32",
        f"train.global_batch_size={number * data_ranks}", "train.max_steps=1", "log.to=[]",
        f"output={folder / 'runs' / f'{layout}-{number}'}",
    ]  # fmt: skip
    run = build.build(config.load(None, words))
    own = batch(run.world.data_rank, run.world.data_ranks, number, vocabulary)
    quiet = run.memory.phase

    def step() -> None:
        share = run.passes.forward_backward(own, quiet)
        _, squares = run.world.total(share, run.optimizer.squared_norm())
        run.optimizer.clip(squares**0.5, 1.0)
        run.optimizer.step(1e-4)

    return step


class Whole(nn.Module):
    """A model and our loss in one forward, for torch's own wrappers."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = LlamaForCausalLM.from_pretrained(
            folder / "model", attn_implementation="meshtune", dtype=torch.float32
        ).train()
        self.anatomy = anatomy(self.model)

    def forward(self, each: MicroBatch) -> torch.Tensor:
        return summed_loss(self.model, self.anatomy, each)


def by_hand(
    module: nn.Module, loss_of: Callable[[MicroBatch], torch.Tensor], own: Batch,
    last: Callable[[bool], Any] = lambda last: None, after: Step = lambda: None,
) -> Step:  # fmt: skip
    """The loop that one would write around a wrapped module; `last` is told before each micro-batch."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step() -> None:
        for number, each in enumerate(own.micro_batches, 1):
            last(number == len(own.micro_batches))
            (loss_of(each) / own.label_tokens).backward()
        after()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(folder: Path, number: int, vocabulary: int) -> Step:
    module = DistributedDataParallel(Whole(folder), gradient_as_bucket_view=True)
    ranks = dist.get_world_size()

    def loss_of(each: MicroBatch) -> torch.Tensor:
        return module(each) * ranks  # it averages over the ranks

    def last(is_last: bool) -> None:
        module.require_backward_grad_sync = is_last  # what its no_sync() sets

    return by_hand(module, loss_of, batch(dist.get_rank(), ranks, number, vocabulary), last)


def fsdp(folder: Path, number: int, vocabulary: int) -> Step:
    module = Whole(folder)
    for block in module.model.model.layers:
        fully_shard(block)
    fully_shard(module)
    ranks = dist.get_world_size()
    own = batch(dist.get_rank(), ranks, number, vocabulary)
    return by_hand(module, lambda each: module(each) * ranks, own)


def torch_styles(folder: Path, number: int, vocabulary: int) -> Step:
    """Megatron's cut by torch's styles, with sequence parallelism and a loss over the cut vocabulary."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = LlamaForCausalLM.from_pretrained(
        folder / "model", attn_implementation="sdpa", dtype=torch.float32
    ).train()
    whole, pieces = Replicate(), Shard(1)
    block = {
        "input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(input_kwarg_layouts={"hidden_states": pieces},
                                        desired_input_kwarg_layouts={"hidden_states": whole}),
        "mlp": PrepareModuleInput(input_layouts=(pieces,), desired_input_layouts=(whole,)),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=pieces),
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(output_layouts=pieces),
    }  # fmt: skip
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=pieces),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=pieces, output_layouts=Shard(-1), use_local_output=False),
    }
    plan |= {
        f"model.layers.{i}.{path}": style
        for i in range(len(model.model.layers))
        for path, style in block.items()
    }
    parallelize_module(model, mesh, plan)
    own = batch(0, 1, number, vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step() -> None:
        for each in own.micro_batches:
            with loss_parallel():
                out = model(input_ids=each.input_ids, position_ids=each.position_ids, use_cache=False)
                logits = out.logits.flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, each.labels.flatten(), reduction="sum")
                (loss / own.label_tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def replicas(
    folder: Path, number: int, vocabulary: int, *, leaves: bool = False, always: bool = False
) -> Step:
    """dp2 with one message for each matrix (leaves), or with messages in every micro-batch (always)."""
    module = Whole(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks: Iterable[nn.Module] = module.model.model.layers
    if leaves:
        blocks = [m for m in module.modules() if m is not module and list(m.parameters(recurse=False))]
    zero.shard(module, blocks, mesh, 0)
    own = batch(dist.get_rank(), dist.get_world_size(), number, vocabulary)
    return by_hand(module, module, own, lambda last: zero.before_backward(module, 0, last=last or always))


def after_the_backward(folder: Path, number: int, vocabulary: int) -> Step:
    """dp2 with the same flat messages, but only when the last backward has ended: nothing overlaps."""
    module = Whole(folder)
    groups = [list(block.parameters()) for block in module.model.model.layers]
    inside = {p for group in groups for p in group}
    groups.append([p for p in module.parameters() if p not in inside])

    def reduce() -> None:
        for group in groups:
            flat = torch.cat([p.grad.flatten() for p in group if p.grad is not None])
            dist.all_reduce(flat)
            for p, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
                p.grad = part.view_as(p)

    own = batch(dist.get_rank(), dist.get_world_size(), number, vocabulary)
    return by_hand(module, module, own, after=reduce)


# Measuring #


class Messages(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.count[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def take_turns(contenders: dict[str, Step], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """Median seconds of a step of each; turn by turn, nobody always first."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + rounds):
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            together()
            started = time.perf_counter()
            contenders[name]()
            together()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in seconds.items()}


def machinery(rank: launch.Rank, folder: Path, model: str, rounds: int, out: Path) -> None:
    """Ours against torch's own, two ranks."""
    vocabulary = MODELS[model]["vocab_size"]
    pairs = {
        "dp2 / DistributedDataParallel": (ours(folder, "dp2", 2, vocabulary), ddp(folder, 2, vocabulary)),
        "zero3x2 / fully_shard": (ours(folder, "zero3x2", 2, vocabulary), fsdp(folder, 2, vocabulary)),
        "tp2-sp / parallelize_module": (
            ours(folder, "tp2-sp", 2, vocabulary),
            torch_styles(folder, 2, vocabulary),
        ),
    }
    found = {}
    for name, (mine, theirs) in pairs.items():
        seconds = take_turns({"ours": mine, "torch": theirs}, rounds)
        found[name] = {**seconds, "ratio": seconds["torch"] / seconds["ours"]}
    write(rank, out, found)


def savings(rank: launch.Rank, folder: Path, model: str, rounds: int, out: Path) -> None:
    """Plain data parallelism, and what each of its savings saves."""
    vocabulary, number = MODELS[model]["vocab_size"], 4
    contenders = {
        "dp2": replicas(folder, number, vocabulary),
        "a message for each matrix": replicas(folder, number, vocabulary, leaves=True),
        "messages after the backward": after_the_backward(folder, number, vocabulary),
        "messages in every micro-batch": replicas(folder, number, vocabulary, always=True),
    }
    counts = {}
    for name, step in contenders.items():
        with Messages() as messages:
            step()
        counts[name] = sum(messages.count.values())
    seconds = take_turns(contenders, rounds)
    write(rank, out, {name: {"seconds": seconds[name], "messages": counts[name]} for name in contenders})


SCALED = ["dp2", "zero3x2", "tp2-sp", "cp2", "pp2-1f1b"]


def scaling(rank: launch.Rank, folder: Path, model: str, rounds: int, out: Path, layouts: list[str]) -> None:
    """Seconds of a step, with as many micro-batches as one rank has (strong), and with twice (weak)."""
    vocabulary, found = MODELS[model]["vocab_size"], {}
    for layout in layouts:
        for kind, number in (("strong", 4), ("weak", 8)):
            share = number // 2 if layout in ("dp2", "zero3x2") else number
            mine = ours(folder, layout, share, vocabulary)
            found[f"{layout} {kind}"] = take_turns({layout: mine}, rounds)[layout]
    write(rank, out, found)


def present(rank: launch.Rank, out: Path) -> None:
    """The moment at which all ranks have met."""
    dist.barrier()
    write(rank, out, time.time())


def write(rank: launch.Rank, out: Path, found: Any) -> None:
    if rank.main:
        out.write_text(json.dumps(found))


def on_ranks(function: Callable[..., None], *args: Any, ranks: int = 2) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        launch.run(function, *args[:3], out, *args[3:], ranks=ranks) if args else launch.run(
            function, out, ranks=ranks
        )
        return json.loads(out.read_text())


def start_seconds(ranks: int) -> float:
    """From the parent, with everything imported, to the moment that all ranks have met."""
    started = time.time()
    return on_ranks(present, ranks=ranks) - started


# What came out #


def set_up(folder: Path, model: str) -> None:
    """A model folder with random weights, and some rows that nobody trains on."""
    torch.manual_seed(0)
    shape = MODELS[model]
    LlamaForCausalLM(
        LlamaConfig(**shape, max_position_embeddings=WIDTH, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    ).save_pretrained(folder / "model")
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(shape["vocab_size"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="w2", pad_token="w0").save_pretrained(
        folder / "model"
    )
    rows = [json.dumps({"prompt": "w5", "completion": "w6 w7"}) for _ in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")


TARGETS = {
    ("tiny", "dp2 / DistributedDataParallel"): "≥ 0.97", ("28 M", "dp2 / DistributedDataParallel"): "≥ 0.97",
    ("tiny", "zero3x2 / fully_shard"): "≥ 0.97", ("28 M", "zero3x2 / fully_shard"): "≥ 0.97",
    ("tiny", "tp2-sp / parallelize_module"): "≥ 1.5", ("28 M", "tp2-sp / parallelize_module"): "≥ 1",
}  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "# Layouts on two ranks",
        "",
        f"{result['date']} · {result['machine']} · one thread a rank · torch {torch.__version__} · medians "
        f"of {result['rounds']} rounds, contenders in turn",
        "",
        f"Eight ranks started and met in {result['start_seconds']:.2f} s beyond the imports (target ≤ 2 s).",
        "",
        "## Against torch's own (speed of ours / speed of torch's)",
        "",
        "| model | | ours, ms | torch's, ms | ratio | target |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for model, found in result["machinery"].items():
        for name, each in found.items():
            lines.append(
                f"| {model} | {name} | {1e3 * each['ours']:.0f} | {1e3 * each['torch']:.0f} | "
                f"{each['ratio']:.2f} | {TARGETS[model, name]} |"
            )
    lines += ["", "## What data parallelism saves (four micro-batches a step)", "",
              "| model | | a step, ms | messages |", "|---|---|---:|---:|"]  # fmt: skip
    for model, found in result["savings"].items():
        lines += [
            f"| {model} | {name} | {1e3 * e['seconds']:.0f} | {e['messages']} |" for name, e in found.items()
        ]
    lines += ["", "## Two ranks against one (28 M)", "",
              "Strong: the same batch, speed-up over one rank (2 is ideal). Weak: twice the batch, the share "
              "of one rank's speed that each keeps (1 is ideal).", "",
              "| | strong | weak |", "|---|---:|---:|"]  # fmt: skip
    scaled = result["scaling"]
    for layout in SCALED:
        strong = scaled["dp1 strong"] / scaled[f"{layout} strong"]
        weak = scaled["dp1 strong"] / scaled[f"{layout} weak"]
        lines.append(f"| {layout} | {strong:.2f} | {weak:.2f} |")
    lines += ["", "Two cores of one processor share their memory's bandwidth and have no network: messages "
              "are copies by gloo. Nothing here says how a layout scales over GPUs."]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round on the tiny model, printed only")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds, models = (1, ["tiny"]) if options.quick else (options.rounds, list(MODELS))
    result: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": processor(), "rounds": rounds,
        "start_seconds": statistics.median(start_seconds(8) for _ in range(3)),
        "machinery": {}, "savings": {}, "scaling": {},
    }  # fmt: skip
    for model in models:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            set_up(folder, model)
            result["machinery"][model] = on_ranks(machinery, folder, model, rounds)
            result["savings"][model] = on_ranks(savings, folder, model, rounds)
            if model == models[-1]:
                one = on_ranks(scaling, folder, model, max(1, rounds // 2), ["dp1"], ranks=1)
                result["scaling"] = one | on_ranks(scaling, folder, model, max(1, rounds // 2), SCALED)
    print(markdown(result))
    if not options.quick:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / f"parallel-{datetime.now(UTC):%Y-%m-%d}"
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1))
        stem.with_suffix(".md").write_text(markdown(result))


if __name__ == "__main__":
    main()
