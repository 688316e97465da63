"""Held-out losses with 16-bit and 8-bit moments and 16-bit weights against AdamW in fp32, three seeds.

    python benchmarks/rounded_updates.py [--steps 200] [--seeds 3] [--json FILE.json]

A Llama of 0.9 M parameters learns the bytes of CPython's library from scratch at a learning rate of 1e-3;
then it is tuned on the English of pydoc's topics at 1e-5. Forward and backward are in fp32 for all, so that
only the update differs:

    adamw            fp32 weights and moments
    adamw-bf16       fp32 weights, 16-bit moments, the second rounded by chance
    adamw-8bit       fp32 weights, 8-bit moments of blocks of 64, the second rounded by chance
    bf16-pure        16-bit weights, rounded by chance, and moments as adamw-bf16's; gradients rounded to bf16
    bf16-pure to nearest   the same with torch's AdamW, which rounds all to nearest
"""

import argparse
import json
import pydoc_data.topics
import statistics
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from meshtune.optim.optimizer import Optimizer

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
LENGTH, ROWS, HELD_OUT = 128, 8, 64  # tokens of a row, rows of a step, rows that are held out
CONSTANTS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
KINDS = ("adamw", "adamw-bf16", "adamw-8bit", "bf16-pure", "bf16-pure to nearest")


def code() -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(path.read_bytes() for path in sorted(folder.glob("[a-f]*.py")))


def english() -> bytes:
    return "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())).encode()


def rows_of(text: bytes) -> torch.Tensor:
    """The text's bytes, [rows, LENGTH], in an order of its own that is the same in each run."""
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = rows[: len(rows) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


class Update:
    """An update of the model's fp32 parameters by one of KINDS."""

    def __init__(self, kind: str, model: nn.Module, seed: int) -> None:
        self.model, self.kept = [*model.named_parameters()], [p.data for p in model.parameters()]
        if kind.startswith("bf16-pure"):
            self.kept = [weight.bfloat16() for weight in self.kept]
        self.copies = [nn.Parameter(weight) for weight in self.kept]
        named = [(name, copy) for (name, _), copy in zip(self.model, self.copies, strict=True)]
        self.torch, self.ours = None, None
        if kind == "bf16-pure to nearest":
            self.torch = torch.optim.AdamW(self.copies, fused=True, **CONSTANTS)
        else:
            row = "adamw" if kind == "bf16-pure" else kind
            self.ours = Optimizer(named, name=row, seed=seed, **CONSTANTS)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (_, parameter), copy in zip(self.model, self.copies, strict=True):
            assert parameter.grad is not None
            copy.grad, parameter.grad = parameter.grad.to(copy.dtype), None
        if self.ours:
            self.ours.step(rate)
        else:
            assert self.torch
            self.torch.param_groups[0]["lr"] = rate
            self.torch.step()
        for (_, parameter), copy in zip(self.model, self.copies, strict=True):
            parameter.copy_(copy)


@torch.no_grad()
def held_out(model: nn.Module, rows: torch.Tensor) -> float:
    losses = [model(input_ids=part, labels=part).loss.item() for part in rows[:HELD_OUT].split(ROWS)]
    return statistics.mean(losses)


def trained(
    kind: str, start: dict[str, torch.Tensor], rows: torch.Tensor, rate: float, *, steps: int, seed: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """(Held-out loss, weights) after `steps` at a constant rate, behind a tenth of them to warm up."""
    model = AutoModelForCausalLM.from_config(CONFIG)
    model.load_state_dict(start)
    update, draw = Update(kind, model, seed), torch.Generator().manual_seed(seed)
    for step in range(steps):
        batch = rows[HELD_OUT + torch.randint(len(rows) - HELD_OUT, (ROWS,), generator=draw)]
        model(input_ids=batch, labels=batch).loss.backward()
        update.step(rate * min(1.0, (step + 1) / (steps / 10)))
    return held_out(model, rows), model.state_dict()


def table(found: Iterable[tuple[str, str, int, float]]) -> str:
    """Losses [seed], and each kind's mean difference from adamw's of the same seed."""
    losses = {(start, kind, seed): loss for start, kind, seed, loss in found}
    lines = ["| start | update | held-out losses | from adamw's |", "| --- | --- | --- | ---: |"]
    for start, kind in dict.fromkeys((start, kind) for start, kind, _ in losses):
        own = {seed: loss for (s, k, seed), loss in losses.items() if (s, k) == (start, kind)}
        more = statistics.mean(loss / losses[start, "adamw", seed] - 1 for seed, loss in own.items())
        lines.append(
            f"| {start} | {kind} | {', '.join(f'{loss:.4f}' for loss in own.values())} | {more:+.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found, (of_code, of_english) = [], (rows_of(code()), rows_of(english()))
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        first, given = (
            AutoModelForCausalLM.from_config(CONFIG).state_dict(),
            {"steps": options.steps, "seed": seed},
        )
        base = first
        for kind in KINDS:
            loss, weights = trained(kind, first, of_code, 1e-3, **given)
            found.append(("from scratch, 1e-3", kind, seed, loss))
            base = weights if kind == "adamw" else base
        model = AutoModelForCausalLM.from_config(CONFIG)
        model.load_state_dict(base)
        found.append(("trained, 1e-5", "before", seed, held_out(model, of_english)))
        for kind in KINDS:
            found.append(("trained, 1e-5", kind, seed, trained(kind, base, of_english, 1e-5, **given)[0]))
        print(table(found), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
