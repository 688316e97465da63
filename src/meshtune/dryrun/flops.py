"""FLOPs of one operation: torch's own formulas, and those of attention by the documents that it attends in.

torch counts attention as if every query saw every key. Here a query counts the keys that it sees: 4 FLOPs a
pair and element of a head in the forward (two matmuls), 10 in the backward of a flash kernel, which computes
the scores again (Dao 2023, arXiv:2307.08691).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry

FORWARD_MATMULS, BACKWARD_MATMULS = 2, 5
CPU_KERNEL = "aten._scaled_dot_product_flash_attention_for_cpu"
# Operator of an attention kernel -> (position of q, of k, which v follows, number of matmuls).
KERNELS = {
    "torch_attn._varlen_attn": (0, 1, FORWARD_MATMULS),
    "torch_attn._varlen_attn_backward": (1, 2, BACKWARD_MATMULS),
    CPU_KERNEL: (0, 1, FORWARD_MATMULS),
    f"{CPU_KERNEL}_backward": (1, 2, BACKWARD_MATMULS),
    "meshtune.capped_attention": (0, 1, FORWARD_MATMULS),
    "meshtune.capped_attention_backward": (1, 2, BACKWARD_MATMULS),
    "meshtune_dryrun.flex_attention": (0, 1, FORWARD_MATMULS),
    "meshtune_dryrun.flex_attention_backward": (1, 2, BACKWARD_MATMULS),
}
KERNELS |= {
    f"aten._scaled_dot_product_{kernel}_attention{backward}": at
    for kernel in ("flash", "efficient")
    for backward, at in (("", (0, 1, FORWARD_MATMULS)), ("_backward", (1, 2, BACKWARD_MATMULS)))
}


def visible_pairs(documents: Sequence[int], window: int | None, columns: Iterable[int] | None = None) -> int:
    """(Query, key) pairs of causal attention inside the documents of one row.

    window: keys that a query sees at most, its own included; None: all earlier ones of its document.
    columns: of the queries that count; None: all. Padding beyond the documents sees nothing.
    """
    if columns is None:
        return sum(_triangle(length, window) for length in documents)
    starts, position = [], 0
    for length in documents:
        starts += [position] * length
        position += length
    seen = (column - starts[column] + 1 for column in columns if column < position)
    return sum(seen if window is None else (min(keys, window) for keys in seen))


def _triangle(length: int, window: int | None) -> int:
    reach = length if window is None else min(length, window)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def is_attention(name: str) -> bool:
    """Whether an operator is an attention kernel. name: with its overload, as "aten.mm.default"."""
    return name.rpartition(".")[0] in KERNELS


def flops_of(func: Any, args: Any, kwargs: Any, out: Any, pairs: Callable[[Any, Any], float]) -> int:
    """FLOPs of one call of an operator.

    pairs: (name of an attention operator, its arguments) -> (query, key) pairs of the call, over its rows.
    """
    name = f"{func.namespace}.{func._opname}"
    if name in KERNELS:
        query, key, matmuls = KERNELS[name]
        q, v = args[query], args[key + 1]
        heads = q.shape[1]  # of [rows, heads, seq, head_dim] as of [tokens, heads, head_dim]
        width = (q.shape[-1] + v.shape[-1]) / 2  # of the matmuls with keys and of those with values
        return round(matmuls * 2 * pairs(name, args) * heads * width)
    if name == "aten._grouped_mm":  # [tokens, inner] @ [groups, inner, cols], each token in one group
        return 2 * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
