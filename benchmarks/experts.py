"""Steps of a small Qwen3-MoE with meshtune's experts against transformers', in turn, on the same ranks.

    python benchmarks/experts.py             # 15 pairs of each; on an idle machine
    python benchmarks/experts.py --pairs 2   # does it run?

    grouped_mm, eager    one process: meshtune's step with each function of transformers in its place
    ep4                  four ranks: meshtune's `zero3x4-ep4` against transformers' DistributedConfig

Steps alternate, so that a slow second of the machine reaches both alike; what counts is the median of the
ratios of a step and the next. The router is untrained, and its choices are the same for both.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed.configuration_utils import DistributedConfig

from meshtune import launch
from meshtune.data.batch import Batch
from meshtune.experts.register import NAME, experts_of
from meshtune.launch import Rank
from meshtune.layout import Layout
from meshtune.parallel.mesh import World, join
from meshtune.study.bench import LEARNING_RATE, random_batches
from meshtune.train.model import ModelSpec, OptimizerSpec, RankModel, rank_model
from meshtune.train.run_row import device_of
from meshtune.train.step import Counts

SEQ_LEN, WARM_UP = 256, 2
SHAPE = Qwen3MoeConfig(
    hidden_size=128, moe_intermediate_size=64, intermediate_size=256, num_hidden_layers=4, vocab_size=2048,
    num_attention_heads=4, num_key_value_heads=2, num_experts=64, num_experts_per_tok=8,
)  # fmt: skip
EP4 = "zero3x4-ep4-mb4-ga1"
Step = Callable[[Batch], Any]


def of_meshtune(model: RankModel) -> Step:
    def step(batch: Batch) -> None:
        model.passes.step(
            model.passes.localise(batch), Counts(batch.label_tokens), lambda _: nullcontext(),
            learning_rate=LEARNING_RATE, max_grad_norm=0.0,
        )  # fmt: skip

    return step


def of_transformers(folder: str, dtype: torch.dtype, device: torch.device) -> Step:
    """Its model and experts split over the ranks, with torch's fused AdamW."""
    ranks = torch.distributed.get_world_size()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm",
        distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=ranks),
    )  # fmt: skip
    # The fused update needs parameters of one mesh.
    named = sorted(model.named_parameters(), key=lambda each: ".experts." in each[0])
    groups = [[each for _, each in group] for _, group in groupby(named, lambda each: ".experts." in each[0])]
    optimizers = [torch.optim.AdamW(group, lr=LEARNING_RATE, fused=True) for group in groups]

    def step(batch: Batch) -> None:
        for each in batch.micro_batches:
            ids, positions, labels = (
                tensor.to(device) for tensor in (each.input_ids, each.position_ids, each.labels)
            )
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            (loss * ranks / batch.label_tokens).backward()  # gradients are means over ranks
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def ratios(world: World, batches: Iterator[Batch], steps: tuple[Step, Step], pairs: int) -> list[float]:
    """Seconds of each second step by those of the first before it; both see the same batch."""
    found = []
    for _ in range(WARM_UP + pairs):
        batch, seconds = next(batches), []
        for step in steps:
            world.synchronize()
            if world.size > 1:
                torch.distributed.barrier()
            began = time.perf_counter()
            step(batch)
            world.synchronize()
            seconds.append(time.perf_counter() - began)
        found.append(seconds[1] / seconds[0])
    return found[WARM_UP:]


def functions(rank: Rank, other: str, pairs: int, precision: str) -> list[float]:
    """Ratios of one process with transformers' function `other` and with ours."""
    world = join(Layout.parse("mb4-ga1"), device_of("auto"))
    spec = ModelSpec(source=SHAPE, init="random", kernels=world.device.type, precision=precision)
    model = rank_model(spec, world, optimizer=OptimizerSpec(), tokens_per_sequence=SEQ_LEN)
    own = of_meshtune(model)

    def step_with(name: str) -> Step:
        def step(batch: Batch) -> None:
            for module in experts_of(model.parallel.modules):
                config: Any = module.config
                config._experts_implementation = name
            own(batch)

        return step

    batches = random_batches(model, world, SEQ_LEN, (SEQ_LEN,))
    return ratios(world, batches, (step_with(NAME), step_with(other)), pairs)


def split(rank: Rank, folder: str, pairs: int, precision: str) -> list[float]:
    """Ratios of EP4, with transformers' expert parallelism and with ours."""
    world = join(Layout.parse(EP4), device_of("auto"))
    spec = ModelSpec(source=folder, kernels=world.device.type, precision=precision)
    model = rank_model(spec, world, optimizer=OptimizerSpec(), tokens_per_sequence=SEQ_LEN)
    batches = random_batches(model, world, SEQ_LEN, (SEQ_LEN,))
    theirs = of_transformers(folder, spec.compute_dtype, world.device)
    return ratios(world, batches, (of_meshtune(model), theirs), pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    given, device = (options.pairs, options.precision), device_of("auto").type
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(SHAPE).save_pretrained(Path(folder))
        for title, function, source, ranks in (
            ("grouped_mm", functions, "grouped_mm", 1),
            ("eager", functions, "eager", 1),
            ("ep4", split, folder, 4),
        ):
            if device == "cuda" and ranks > torch.cuda.device_count():
                print(f"{title}: needs {ranks} GPUs")
                continue
            found = launch.run(function, source, *given, ranks=ranks, device=device)
            low, high = min(found), max(found)
            print(
                f"meshtune / transformers' {title}: {median(found):.2f} x ({low:.2f} to {high:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
