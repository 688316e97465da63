"""Stand-ins for fused kernels in a forward and backward on meta: what they save, and none of what they avoid.

transformers' attention functions, torch's scaled_dot_product_attention ──> FlashAttention
torch's dropout                                                         ──> a mask of one byte an element
grouped matmuls, by which experts run                                   ──> in every dtype
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, _meta_registrations, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

STAND_IN = "meshtune_census"  # name of the attention function that a traced model is built with


class FlashAttention(torch.autograd.Function):
    """Attention that saves its queries, keys, values, output and the log-sums of its softmax.

    Uninitialised values. [batch, heads, tokens, size] in and out.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, heads_first: bool) -> Tensor:  # type: ignore[override]
        """heads_first: memory order of the output; else it has tokens first."""
        first, second = (1, 2) if heads_first else (2, 1)
        shape = (query.shape[0], query.shape[first], query.shape[second], value.shape[-1])
        out = query.new_empty(shape).transpose(1, first)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor):  # type: ignore[override]
        return *(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3]), None


def flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
    heads_first: bool = False, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers: [batch, tokens, heads, size], and no attention weights.

    heads_first: of torch's kernels, which write in the memory order of the queries, so that o_proj takes a
    copy. Our operator writes tokens first.
    """
    return FlashAttention.apply(query, key, value, heads_first).transpose(1, 2), None


class FusedAttention(TorchFunctionMode):
    """Run a call of torch's attention function as a flash kernel's, where it runs one."""

    def __init__(self, attention: Callable[..., tuple[Tensor, None]]) -> None:
        """attention: an attention function of transformers."""
        super().__init__()
        self.attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
        if given["query"].shape[1] != given["key"].shape[1] and not given.get("enable_gqa"):
            if isinstance(mask := given.get("attn_mask"), Tensor) and mask.is_floating_point():
                given["attn_mask"] = mask.to(given["query"].dtype)
            return func(**given)  # no fused kernel broadcasts heads: scores are written
        inputs = query, _, value = tuple(given[name] for name in ("query", "key", "value"))
        heads_first = query.stride(1) > query.stride(2) and query.shape[-1] == value.shape[-1]
        out, _ = self.attention(nn.Identity(), *inputs, heads_first=heads_first)
        return out.transpose(1, 2)


def cuda_dropout(
    *args: Any, made: Callable[[Tensor, Tensor, Tensor], None] = lambda *_: None, **kwargs: Any
) -> Tensor:
    """Run torch's dropout as CUDA does, where the mask that it saves has one byte an element.

    made: called with the input, output and mask, three times the input where nothing is dropped. The other
    arguments are those of torch's.
    """
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    x, probability = given["input"], given.get("p", 0.5)
    if not probability or not given.get("training", True):
        if given.get("training", True):
            made(x, x, x)
        return x
    out, mask = torch.native_dropout(x, probability, True)
    made(x, out, mask)
    return out


class FusedDropout(TorchFunctionMode):
    """Run dropout as on a GPU."""

    def __init__(self, made: Callable[[Tensor, Tensor, Tensor], None] = lambda *_: None) -> None:
        """made: as in `cuda_dropout`."""
        super().__init__()
        self.made = made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        return cuda_dropout(*args, **(kwargs or {}), made=self.made)


def in_any_dtype(grouped_mm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let torch's function for the shapes of grouped matmuls, which refuses all dtypes but bf16, take any."""

    @wraps(grouped_mm)
    def shaped(mat_a: Tensor, mat_b: Tensor, **options: Any) -> Tensor:
        alike = (
            torch.empty_strided(m.shape, m.stride(), dtype=torch.bfloat16, device="meta")
            for m in (mat_a, mat_b)
        )
        out = grouped_mm(*alike, **options)
        return torch.empty_strided(out.shape, out.stride(), dtype=mat_a.dtype, device="meta")

    return shaped


class Counts(list[int]):
    """Numbers that were read from a tensor without values: how many rows go to each expert."""


def counts(
    tolist: Callable[[Tensor], Any], empty: Callable[[Tensor], bool] = attrgetter("is_meta")
) -> Callable[[Tensor], Any]:
    """Let Tensor.tolist return Counts for a row of integers without values. empty: whether it has none."""

    @wraps(tolist)
    def read(tensor: Tensor) -> Any:
        row = tensor.ndim == 1 and not tensor.is_floating_point()
        return Counts([0] * len(tensor)) if row and empty(tensor) else tolist(tensor)

    return read


def by_counts(split: Callable[..., Any]) -> Callable[..., Any]:
    """Let Tensor.split take Counts: on meta all rows are the first part's, so that TOKENS divides its bytes;
    elsewhere, where each part's matmul has a time, parts are equal.
    """

    @wraps(split)
    def parts(tensor: Tensor, split_size: Any, dim: int = 0) -> Any:
        if isinstance(split_size, Counts):
            rows, number = tensor.shape[dim], len(split_size)
            each, more = (0, rows) if tensor.is_meta else divmod(rows, number)
            split_size = [each + more, *[each] * (number - 1)]
        return split(tensor, split_size, dim)

    return parts


@contextmanager
def experts_without_values() -> Iterator[None]:
    """Let experts run on meta: grouped matmuls in any dtype, with equal rows of each expert."""
    places = (
        (_meta_registrations, "_meta_grouped_mm_common", in_any_dtype), (Tensor, "tolist", counts),
        (Tensor, "split", by_counts),
    )  # fmt: skip
    with ExitStack() as stack:
        for owner, name, make in places:
            real = getattr(owner, name)
            stack.callback(setattr, owner, name, real)
            setattr(owner, name, make(real))
        yield
