"""How far AdamW moves weights that are kept in bf16, beside fp32 masters of bf16 weights and exact updates.

    python benchmarks/pure_bf16.py [--learning-rate 1e-5]

A million weights drawn from N(0, 0.02) get 100 steps of gradients with a mean of random sign and noise as
large as it. Printed are the share of the weights that differ from where they started, and how far they moved
along the way that exact updates (fp64) take, 1 being as far.
"""

import argparse

import torch

from meshtune.optim.optimizer import Optimizer

WEIGHTS, STEPS = 2**20, 100


def moved(
    trained: torch.dtype, compute: torch.dtype, learning_rate: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights in fp64, before and after STEPS. trained, compute: dtypes of the weights that are updated
    and of those that a model would compute with.
    """
    torch.manual_seed(0)
    start = 0.02 * torch.randn(WEIGHTS, dtype=torch.float64)
    mean = torch.randint(0, 2, (WEIGHTS,), dtype=torch.float64) * 2 - 1
    parameter = torch.nn.Parameter(start.to(trained))
    optimizer = Optimizer(
        [("weight", parameter)], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, name="adamw",
        compute_dtype=compute if compute != trained else None, sum_dtype=None, copies={},
    )  # fmt: skip
    before = parameter.detach().double().clone()
    for _ in range(STEPS):
        gradient = mean + torch.randn(WEIGHTS, dtype=torch.float64)
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step(learning_rate)
    return before, parameter.detach().double()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    rate = parser.parse_args().learning_rate
    before, exact = moved(torch.float64, torch.float64, rate)
    way = exact - before
    kinds = {
        "bf16 (fp32 masters)": (torch.float32, torch.bfloat16),
        "bf16-pure": (torch.bfloat16, torch.bfloat16),
    }
    for name, (trained, compute) in kinds.items():
        start, end = moved(trained, compute, rate)
        share = (end != start).double().mean()
        progress = ((end - start) * way).sum() / (way * way).sum()
        print(f"{name}: {share:.1%} of the weights moved, {progress:.2f} of the way")


if __name__ == "__main__":
    main()
