"""Attention on CUDA, a whole micro-batch in one call.

varlen   16 bit, no softcap: the variable-length flash kernel (op.py calls it)
flex     with a softcap: flex attention with a block mask
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshtune.attention.arguments import Core, Inputs
from meshtune.data.boundaries import Boundaries

FLEX_GRAPHS = 128  # most compiled graphs of flex attention in a process
FLEX_BLOCK = 128  # tokens of a block in its mask


def forward(q: Tensor, k: Tensor, v: Tensor, core: Core) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as `op.attention` describes them; no softcap.

    If a document has more keys than queries, its last query stands at its last key (flash-attention since
    2.1).
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *core[:4], 0.0, **_seen(core), return_debug_mask=False, scale=core.scale
    )
    return out, lse


def backward(grad: Tensor, inputs: Inputs, outputs: tuple[Tensor, Tensor], core: Core) -> Inputs:
    """Gradients of q, k and v. grad: of the output; inputs, outputs: of `forward`."""
    of_dropout = {
        "rng_state": torch.zeros(2, dtype=torch.uint64, device=grad.device),
        "unused": torch.empty(0, device=grad.device),
    }
    return torch.ops.aten._flash_attention_backward(
        grad, *inputs, *outputs, *core[:4], 0.0, **_seen(core), **of_dropout, scale=core.scale
    )


def _seen(core: Core) -> dict[str, Any]:
    """Arguments of the flash kernel for the tokens that a query sees before and after it."""
    if core.window is None or core.window >= core.longest_key:
        return {"is_causal": True}  # with any window FlashAttention 4 refuses it under torch 2.11
    return {"is_causal": False, "window_size_left": core.window - 1, "window_size_right": 0}


@cache
def compiled_flex():
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention  # imports the compiler: only where used

    # Each window, softcap and kind of shape is a graph; beyond the limit torch runs it written out, slowly.
    config.recompile_limit = max(config.recompile_limit, FLEX_GRAPHS)
    return torch.compile(flex_attention)


def block_mask(documents: Boundaries, queries: int, keys: int, window: int | None) -> Any:
    """Block mask of causal attention inside documents, of `queries` flattened tokens to `keys`.

    Made from the boundaries on their device, in blocks; queries × keys, which torch's own
    `create_block_mask` goes through, is never written.
    """
    from torch.nn.attention.flex_attention import BlockMask

    ends, key_ends = documents.queries, documents.keys
    tokens = torch.arange(queries, device=ends.device)
    document = torch.searchsorted(ends, tokens, right=True) - 1
    last = key_ends[document + 1] - ends[document + 1] + tokens  # the key that a query stands at
    first = key_ends[document].long()
    if window is not None:
        first = torch.maximum(first, last - window + 1)

    def visible(row, head, query, key):
        return (key >= first[query]) & (key <= last[query])

    def per_block(values: Tensor, pad: int, largest: bool) -> Tensor:
        padded = torch.nn.functional.pad(values, (0, -queries % FLEX_BLOCK), value=pad).view(-1, FLEX_BLOCK)
        return (padded.amax(1) if largest else padded.amin(1))[:, None]

    begin = torch.arange(0, keys, FLEX_BLOCK, device=ends.device)[None]
    end = begin + FLEX_BLOCK - 1
    seen = (end >= per_block(first, keys, False)) & (begin <= per_block(last, -1, True))
    whole = seen & (begin >= per_block(first, -1, True)) & (end <= per_block(last, keys, False))

    def sorted_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *sorted_blocks(seen & ~whole), *sorted_blocks(whole), BLOCK_SIZE=FLEX_BLOCK, mask_mod=visible,
        seq_lengths=(queries, keys),
    )  # fmt: skip


def _flex(
    q: Tensor, k: Tensor, v: Tensor, documents: Boundaries, scale: float, softcap: float, window: int | None
) -> Tensor:
    """Causal flex attention inside documents: q [queries, heads, head_dim] -> the same.

    Arguments as those of `core.attend`. Compiled at the first call.
    """

    def capped(score, row, head, query, key):
        return softcap * torch.tanh(score / softcap)

    mask = documents.cached(window, lambda: block_mask(documents, len(q), len(k), window))
    # Below 128 queries torch would take its kernel for decoding, which has no configuration for some grouped
    # heads ("No choices to select").
    training: Any = {"BACKEND": "TRITON"}
    row_q, row_k, row_v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = compiled_flex()(
        row_q, row_k, row_v, enable_gqa=q.shape[1] != k.shape[1], score_mod=capped, block_mask=mask,
        scale=scale, kernel_options=training,
    )  # fmt: skip
    return out[0].transpose(0, 1)


flex: Any = torch.compiler.disable(_flex)  # its mask holds tensors of one micro-batch
