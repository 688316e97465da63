"""FLOPs of one operation: torch's own formulas, and those of attention by the documents that it attends in.

torch counts attention as if every query saw every key. Here a query counts the keys that it sees: 4 FLOPs a
pair and element of a head in the forward (two matmuls), 10 in the backward of a flash kernel, which computes
the scores again (Dao 2023, arXiv:2307.08691).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry

from meshtune.dryrun.costs import ATTENTION
from meshtune.placement.census import attended_pairs


def visible_pairs(documents: Sequence[int], window: int | None, columns: Iterable[int] | None = None) -> int:
    """(Query, key) pairs of causal attention inside the documents of one row.

    window: keys that a query sees at most, its own included; None: all earlier ones of its document.
    columns: of the queries that count; None: all. Padding beyond the documents sees nothing.
    """
    if columns is None:
        return attended_pairs(documents, window)
    starts, position = [], 0
    for length in documents:
        starts += [position] * length
        position += length
    seen = (column - starts[column] + 1 for column in columns if column < position)
    return sum(seen if window is None else (min(keys, window) for keys in seen))


def flops_of(func: Any, args: Any, kwargs: Any, out: Any, pairs: Callable[[Any, Any], float]) -> int:
    """FLOPs of one call of an operator.

    pairs: (name of an attention operator, its arguments) -> (query, key) pairs of the call, over its rows.
    """
    name = f"{func.namespace}.{func._opname}"
    if name in ATTENTION:
        query, key, matmuls = ATTENTION[name]
        q, v = args[query], args[key + 1]
        heads = q.shape[1]  # of [rows, heads, seq, head_dim] as of [tokens, heads, head_dim]
        width = (q.shape[-1] + v.shape[-1]) / 2  # of the matmuls with keys and of those with values
        return round(matmuls * 2 * pairs(name, args) * heads * width)
    if name == "aten._grouped_mm":  # [tokens, inner] @ [groups, inner, cols], each token in one group
        return 2 * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
