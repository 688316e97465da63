"""Recomputation modes by the name in `Layout.recompute`: what a block saves, what its backward runs again.

    mode        saves                                   runs again
    none        everything                              -
    attention   everything but attention's statistics   the attention core
    selective   outputs of matmuls and of attention     the rest of the block
    full        the block's input                       the block

From the least to the most that is run again: `Layout.recompute` is compared by this order.
parallel/recompute.py makes it so.
"""

from dataclasses import dataclass

from meshtune.errors import Table


@dataclass(frozen=True)
class Recomputation:
    """One mode, for the planner's formulas, the collectives of a rank and the rules."""

    saves: str  # what a block's forward saves: its bytes are in plan/memory/activations.py
    attention: bool = False  # the backward runs the attention core again
    block: bool = False  # the backward goes through the block's forward again, but for what was saved
    matmuls: bool = False  # and through all its matmuls; only with `block`, a share (Machine.selective)
    searched: bool = True  # the planner's search offers it

    @property
    def attention_alone(self) -> bool:
        """True if it is the attention function that recomputes, not the block."""
        return self.attention and not self.block

    @property
    def by_operation(self) -> bool:
        """True if operations decide, one by one, whether their outputs are saved (torch's selective mode)."""
        return self.block and not self.matmuls


RECOMPUTATIONS = Table(
    "recompute",
    {
        "none": Recomputation("everything"),
        # saves 4 bytes a head where scores are never written to memory: not worth a search
        "attention": Recomputation("all but statistics", attention=True, searched=False),
        "selective": Recomputation("outputs", block=True),
        "full": Recomputation("block input", attention=True, block=True, matmuls=True),
    },
)

# Operators whose outputs `selective` saves, by name: some exist only once their module is imported. Attention
# appears as the kernels that it dispatches to. Batched matmuls are not here: a block's only ones are the
# scores of an attention without a fused kernel, far too large to keep.
SAVED_OPERATORS = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "torch_attn._varlen_attn.default",
    "meshtune.capped_attention.default",
}
