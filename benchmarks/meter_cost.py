"""Cost of a step's time by part: steps with and without the meter in turn, in one process.

    python benchmarks/meter_cost.py                       # three sizes, 1 and 2 ranks; on an idle machine
    python benchmarks/meter_cost.py --steps 6 --hidden 64 # does it run?

Steps alternate, so that a slow second of the machine reaches both alike; the cost is the median of
what a step takes longer than the one before it. Ranks begin and end each step together: else a step
without the meter would leave its wait for the slower rank to the next one, which has it. No memory is
watched: its ledger is of a run's first three steps alone.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median, quantiles

import torch.distributed as dist
from transformers import LlamaConfig

from meshtune import launch
from meshtune.launch import Rank
from meshtune.layout import Layout
from meshtune.parallel.mesh import World, join
from meshtune.study.bench import LEARNING_RATE, random_batches
from meshtune.train.measure import Meter
from meshtune.train.model import ModelSpec, OptimizerSpec, rank_model
from meshtune.train.run_row import device_of
from meshtune.train.step import Counts

HIDDEN = (128, 256, 512)  # sizes of the models
LAYOUTS = ("mb2-ga2", "zero3x2-mb2-ga1")
SEQ_LEN, WARM_UP = 256, 4


def alternate(rank: Rank, hidden: int, layout: str, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of the steps (without the meter, with it) on this rank."""
    world = join(Layout.parse(layout), device_of("auto"))
    shape = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, vocab_size=2048,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32,
    )  # fmt: skip
    kernels = "cuda" if world.device.type == "cuda" else "cpu"
    spec = ModelSpec(source=shape, init="random", kernels=kernels, precision="fp32")
    model = rank_model(spec, world, optimizer=OptimizerSpec(), tokens_per_sequence=SEQ_LEN)
    batches = random_batches(model, world, SEQ_LEN, (SEQ_LEN,))
    memory = model.memory()
    memory.steps_left = 0
    meter, seconds = Meter(world, memory), (list[float](), list[float]())
    for step in range(2 * (WARM_UP + steps)):
        batch, metered = next(batches), step % 2
        local = model.passes.localise(batch)
        wait_for_all(world)
        began = time.perf_counter()
        with meter.running() if metered else nullcontext():
            if metered:
                meter.begin()
            model.passes.step(
                local, Counts(batch.label_tokens), meter.phase if metered else lambda _: nullcontext(),
                learning_rate=LEARNING_RATE, max_grad_norm=1.0,
            )  # fmt: skip
            world.synchronize()
            if metered:
                meter.end(step, micro_batches=batch.micro_batches, loading=0.0, in_flight=0.0, stop=False)
        wait_for_all(world)
        if step >= 2 * WARM_UP:
            seconds[metered].append(time.perf_counter() - began)
    return seconds


def cost(bare: Sequence[float], metered: Sequence[float]) -> tuple[float, float]:
    """Share that a step with the meter takes longer: median over pairs of neighbours, and half of the width
    of its 95 % interval (1.57 · distance of the quartiles / √n; McGill, Tukey and Larsen 1978).
    """
    pairs = [with_it / without - 1 for without, with_it in zip(bare, metered, strict=True)]
    low, _, high = quantiles(pairs, n=4)
    return median(pairs), 1.57 * (high - low) / len(pairs) ** 0.5


def wait_for_all(world: World) -> None:
    """Wait until every rank has reached this line, and its device has done its work."""
    world.synchronize()
    if world.size > 1:
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of each kind")
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    given = parser.parse_args()
    print("| hidden | layout | step without | with the meter | cost | 95 % |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for hidden in given.hidden:
        for layout in LAYOUTS:
            world = Layout.parse(layout).world
            device = device_of("auto").type
            bare, metered = launch.run(alternate, hidden, layout, given.steps, ranks=world, device=device)
            share, margin = cost(bare, metered)
            print(
                f"| {hidden} | {layout} | {median(bare):.4f} s | {median(metered):.4f} s | {share:+.2%} | "
                f"± {margin:.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
