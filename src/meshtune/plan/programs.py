"""The programs that can run a plan: whose constants predict it, and which layouts they can't run.

    --for megatron ──> Tool ──> stack of stacks.toml: memory and time        (machine.py, accounting.py)
                            └─> rules: layouts that are refused before ranking     (Workload.rules)

This engine is one of them. What writes a plan for the others is in export/, and so are their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshtune.precision import PRECISIONS

if TYPE_CHECKING:
    from meshtune.placement.rules import Rule


def no_rules(_blocks: int, _seq_len: int) -> Iterable[Rule]:
    """Return no rule: this engine's own are those of placement/rules.py."""
    return ()


@dataclass(frozen=True)
class Tool:
    """A program that trains, as the planner sees it."""

    name: str  # as in --for
    title: str  # for sentences
    stack: str  # of stacks.toml, whose constants predict its memory and time
    compiled: str  # the stack with train.compile
    methods: tuple[str, ...] = ("full", "lora", "qlora")  # that it trains with
    precisions: tuple[str, ...] = ("fp32", "bf16", "bf16-pure")
    reduce_dtype: str | None = None  # of its gradients, whatever train.reduce_dtype is; None: as that says
    own_blocks: bool = False  # the model is built of its own blocks, not of Hugging Face's
    sequence_parallel: bool = True  # tp may split sequences
    virtual_stages: tuple[int, ...] = (1, 2, 4, 8)  # stages per pipeline rank that a search tries
    replicates_keys: bool = False  # tp may be a multiple of the key-value heads
    rules: Callable[[int, int], Iterable[Rule]] = no_rules  # by blocks of the model and tokens of a sequence
    refused: tuple[str, ...] = ()  # sentences on settings that can't be exported to it


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "meshtune", "meshtune", "meshtune", "meshtune-compiled", precisions=tuple(PRECISIONS),
            replicates_keys=True,
        ),
        Tool(
            "accelerate", "accelerate", "trainer-fsdp2", "trainer-fsdp2-compiled", reduce_dtype="bf16",
            sequence_parallel=False,
        ),
        Tool("deepspeed", "DeepSpeed", "deepspeed", "deepspeed-compiled", sequence_parallel=False),
        Tool(
            "torchtitan", "torchtitan", "torchtitan-2025-eager", "torchtitan-2025", methods=("full",),
            reduce_dtype="fp32",
        ),
        Tool(
            "megatron", "Megatron-LM", "megatron-core", "megatron-core", methods=("full",),
            precisions=("fp32", "bf16"), own_blocks=True, replicates_keys=True,
            virtual_stages=tuple(range(1, 9)),  # those that divide the layers of a rank
        ),
        Tool(
            "axolotl", "axolotl", "trainer-fsdp2", "trainer-fsdp2-compiled", reduce_dtype="bf16",
            sequence_parallel=False,
        ),
        Tool("llamafactory", "LLaMA-Factory", "deepspeed", "deepspeed-compiled", sequence_parallel=False),
    )
}  # fmt: skip
MESHTUNE = TOOLS["meshtune"]
