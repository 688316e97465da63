"""What is to be trained, as the planner takes it: a model's numbers and the settings that cost something."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshtune.layout import Layout
from meshtune.placement.census import document_pairs
from meshtune.placement.columns import Number
from meshtune.placement.rules import Traits, refusals
from meshtune.plan.work import Work


def attended(document_tokens: Number, window: Number) -> Number:
    """Keys that a query sees on average: (n + 1) / 2 in a document of n tokens, fewer with a window."""
    return document_pairs(document_tokens, window) / document_tokens


@dataclass(frozen=True)
class Workload:
    """What is trained, whatever the cluster. seq_len in tokens, global_batch_size in sequences;
    document_tokens as in seconds.step. attention: the implementation that the model is built with. lora_r:
    the rank of adapters beside every linear; None: all weights are trained.
    """

    model: str
    work: Work
    traits: Traits
    seq_len: int
    global_batch_size: int
    document_tokens: float | None = None
    precision: str = "bf16"
    reduce_dtype: str = "fp32"
    optimizer: str = "adamw"
    compile: bool = False
    packing: bool = True
    attention: str = "meshtune"
    lora_r: int | None = None

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch_size * self.seq_len

    def block_flops(self, document_tokens: float | None = None) -> float:
        """Per token, of an average block there and back: products (of what is frozen, forward and inputs
        alone) and causal attention in documents of this length; recomputation not counted.
        """
        w, documents = self.work, document_tokens or self.seq_len
        products = sum(
            2 * m.rows * m.cols * m.count * (1 + m.trainable + m.input_gradient) for m in w.matrices
        )
        cores = sum(
            2
            * (1 + 2 * k.backward)
            * k.count
            * k.query_heads
            * (k.qk_dim + k.v_dim)
            * attended(documents, k.window)
            for k in w.cores
        )
        return float(products + cores)

    @property
    def head_flops(self) -> float:
        """Per token, there and back."""
        return float(2 * self.work.vocabulary * self.work.hidden * (2 + self.work.head_trainable))

    @property
    def flops_per_token(self) -> float:
        """What the model needs."""
        return float(self.work.blocks * self.block_flops(self.document_tokens) + self.head_flops)

    def of_batch(self, size: int) -> Workload:
        """The same with another global batch size."""
        return replace(self, global_batch_size=size)

    def refusals(self, layout: Layout) -> list[str]:
        """Why the model can't be trained under a layout, as sentences."""
        return refusals(
            self.traits, layout, attention=self.attention, packing=self.packing, compile=self.compile
        )
