"""Steps of a small Qwen3-MoE with meshtune's experts against transformers', in turn, in one process.

    python benchmarks/experts.py             # 15 pairs with each function of transformers; on an idle machine
    python benchmarks/experts.py --pairs 2   # does it run?

Steps alternate, so that a slow second of the machine reaches both alike; what counts is the median of the
ratios of a step and the next. The router is untrained, and its choices are the same for both.
"""

import argparse
import time
from contextlib import nullcontext
from statistics import median
from typing import Any

from transformers import Qwen3MoeConfig

from meshtune import launch
from meshtune.experts.register import NAME, experts_of
from meshtune.launch import Rank
from meshtune.layout import Layout
from meshtune.parallel.mesh import join
from meshtune.study.bench import LEARNING_RATE, random_batches
from meshtune.train.model import ModelSpec, OptimizerSpec, rank_model
from meshtune.train.run_row import device_of
from meshtune.train.step import Counts

SEQ_LEN, WARM_UP = 256, 2
SHAPE = Qwen3MoeConfig(
    hidden_size=256, moe_intermediate_size=128, intermediate_size=512, num_hidden_layers=4, vocab_size=2048,
    num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_experts=16, num_experts_per_tok=4,
)  # fmt: skip


def ratios(rank: Rank, other: str, pairs: int, precision: str) -> list[float]:
    """Seconds of each step with transformers' function `other`, by those of the step before with ours."""
    world = join(Layout.parse("mb4-ga1"), device_of("auto"))
    spec = ModelSpec(source=SHAPE, init="random", kernels=world.device.type, precision=precision)
    model = rank_model(spec, world, optimizer=OptimizerSpec(), tokens_per_sequence=SEQ_LEN)
    batches, seconds = random_batches(model, world, SEQ_LEN, (SEQ_LEN,)), {NAME: [0.0], other: [0.0]}
    for _ in range(WARM_UP + pairs):
        for name, measured in seconds.items():
            for module in experts_of(model.parallel.modules):
                config: Any = module.config
                config._experts_implementation = name
            batch = next(batches)
            local = model.passes.localise(batch)
            world.synchronize()
            began = time.perf_counter()
            model.passes.step(
                local, Counts(batch.label_tokens), lambda _: nullcontext(),
                learning_rate=LEARNING_RATE, max_grad_norm=1.0,
            )  # fmt: skip
            world.synchronize()
            measured.append(time.perf_counter() - began)
    ours, theirs = (measured[1 + WARM_UP :] for measured in seconds.values())
    return [two / one for one, two in zip(ours, theirs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    for other in ("grouped_mm", "eager"):
        found = launch.run(
            ratios, other, options.pairs, options.precision, ranks=1, device=device_of("auto").type
        )
        low, high = min(found), max(found)
        print(
            f"meshtune / transformers' {other}: {median(found):.2f} x ({low:.2f} to {high:.2f})", flush=True
        )


if __name__ == "__main__":
    main()
