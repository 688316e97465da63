"""Stand-ins for what a fake world lacks: kernels of CUDA that a fake of the CPU does not reach, and what a
message holds.

    torch's scaled_dot_product_attention   the kernel that CUDA would choose: flash, memory-efficient or math
    torch's dropout                        saves a mask of one byte an element, as CUDA's does
    flex attention                         saves what the compiled kernel saves; it has no backward on a CPU
    transformers' is_fake_tensor           a fake isn't a trace, for which other masks would be built
    torch.distributed.isend                holds what it sends, as real process groups do
    FSDPParam.reset_sharded_param          pads a shard once; FSDP2 looks at addresses, which fakes lack
    shapes of grouped matmuls              of any dtype, as the real ones; torch has only those of bf16
    Tensor.tolist, Tensor.split            equal rows of each expert, where a router reads their numbers
    sizes of exchanges between experts     those of the job's routing (routing.py), which the host reads

Each has the shapes, strides and saved tensors of the real one; the trace names those that were called
(`RankTrace.substitutes`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, _meta_registrations
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from transformers.utils import import_utils

from meshtune.attention import cuda
from meshtune.dryrun.routing import BALANCED, Routing
from meshtune.experts.exchange import Exchange
from meshtune.meter.trace import module_place
from meshtune.model.fused import Counts, by_counts, counts, cuda_dropout, in_any_dtype
from meshtune.parallel.zero import local

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
FLASH_HEAD = 256  # largest head size of flash attention
MULTIPLE = 8  # of a head size that flash attention takes


class HeldWork:
    """The handle of a message that keeps what it sends alive, as a real process group's does.

    until_waited: NCCL lets go of the tensor when the host has waited for it; False: gloo with the handle.
    """

    def __init__(self, work: Any, tensor: Tensor, *, until_waited: bool) -> None:
        self.work, self.until_waited = work, until_waited
        self.tensor: Tensor | None = tensor

    def wait(self, *args: Any) -> Any:
        if self.until_waited:
            self.tensor = None
        return self.work.wait(*args)


def held_messages(isend: Callable[..., Any], kernels: str, *_: Any) -> Callable[..., HeldWork]:
    def held(tensor: Tensor, *args: Any, **kwargs: Any) -> HeldWork:
        return HeldWork(isend(tensor, *args, **kwargs), tensor, until_waited=kernels == "cuda")

    return held


def padded_once(reset_sharded_param: Callable[[FSDPParam], None], *_: Any) -> Callable[[FSDPParam], None]:
    def reset(parameter: FSDPParam) -> None:
        current = getattr(parameter._module_info.module, parameter._module_info.param_name)
        storages = [each.untyped_storage()._cdata for each in (parameter._sharded_param_data, local(current))]
        if current is not parameter.sharded_param or storages[0] != storages[1]:
            reset_sharded_param(parameter)

    return reset


# Attention #


def cuda_attention(math: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make scaled_dot_product_attention with the kernel that CUDA's would choose (torch's sdp_utils.cpp).

    math: torch's own, which on fakes of the CPU is the one that writes all scores where there is dropout.
    """

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        size, grouped = query.shape[-1], query.shape[-3] != key.shape[-3]
        alike = size == value.shape[-1]
        flash = query.dtype in SIXTEEN_BITS and attn_mask is None and size <= FLASH_HEAD and alike
        if flash and size % MULTIPLE == 0:
            out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )
            return out
        if not grouped and query.dtype in (*SIXTEEN_BITS, torch.float32):
            if attn_mask is not None:
                attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
                if attn_mask.dtype == torch.bool:
                    attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
            out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
            )
            return out
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return attend


class WithLse(NamedTuple):
    """Flex attention's auxiliary outputs."""

    lse: Tensor  # [batch, heads, queries]


@torch.library.custom_op("meshtune_dryrun::flex_attention", mutates_args=())
def flex_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(Output, shaped and in memory as q; log-sum-exp [batch, heads, queries] in fp32). Only on fakes."""
    raise NotImplementedError("a stand-in for fake tensors")


@flex_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    order = sorted(range(q.ndim), key=q.stride, reverse=True)  # of dimensions in memory
    shape = (*q.shape[:-1], v.shape[-1])
    out = q.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(q.ndim)])
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("meshtune_dryrun::flex_attention_backward", mutates_args=())
def flex_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Only on fakes."""
    raise NotImplementedError("a stand-in for fake tensors")


@flex_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    return torch.ops.meshtune_dryrun.flex_attention_backward(grad, *ctx.saved_tensors)


flex_attention.register_autograd(_backward, setup_context=_save)


def flex_stand_in(
    q: Tensor, k: Tensor, v: Tensor, *, return_aux: Any = None, **_: Any
) -> Tensor | tuple[Tensor, WithLse]:
    """Return what flex attention does, by its stand-in; block mask and function of scores are not read."""
    out, lse = torch.ops.meshtune_dryrun.flex_attention(q, k, v)
    return out if return_aux is None else (out, WithLse(lse))


# Experts #


def sizes_of(routing: Routing) -> Callable[..., tuple[list[int], list[int]]]:
    """Make `Exchange.read_sizes` for tokens that a routing spreads; all ranks send alike."""

    def read_sizes(
        exchange: Exchange, index: Tensor, sent: Tensor, received: Tensor
    ) -> tuple[list[int], list[int]]:
        torch.stack([sent, received]).sum(-1)[0, 0].item()  # the host reads
        (tokens, chosen), (ranks, experts) = index.shape, sent.shape
        to = routing.rows(tokens, chosen, experts, ranks, module_place(exchange.path).block)
        return to, [to[dist.get_rank(exchange.group)]] * ranks

    return read_sizes


# All of them #


class Substitute(NamedTuple):
    """A stand-in for one function."""

    replaces: str  # as a trace names it
    places: tuple[tuple[Any, str], ...]  # (module, name in it) that hold the function
    make: Callable[[Any, str, Routing], Callable[..., Any]]  # the function, kernels, routing -> its stand-in
    cuda: bool = False  # only where CUDA's kernels are traced; else the function itself runs
    counted: Callable[[Any], bool] = lambda _: True  # its result -> whether it stood in for the function


SUBSTITUTES = (
    Substitute("torch.distributed.isend", ((dist, "isend"), (distributed_c10d, "isend")), held_messages),
    Substitute(
        "torch.distributed.fsdp.FSDPParam.reset_sharded_param",
        ((FSDPParam, "reset_sharded_param"),),
        padded_once,
    ),
    Substitute(
        "transformers.utils.import_utils.is_fake_tensor",
        ((import_utils, "is_fake_tensor"),),
        lambda *_: lambda _: False,
    ),
    Substitute(
        "torch.nn.functional.scaled_dot_product_attention",
        ((F, "scaled_dot_product_attention"),),
        lambda math, *_: cuda_attention(math),
        cuda=True,
    ),
    Substitute("torch.nn.functional.dropout", ((F, "dropout"),), lambda *_: cuda_dropout, cuda=True),
    Substitute(
        "torch.nn.attention.flex_attention",
        ((cuda, "compiled_flex"),),
        lambda *_: lambda: flex_stand_in,
        cuda=True,
    ),
    Substitute(
        "torch.nn.functional.grouped_mm",
        ((_meta_registrations, "_meta_grouped_mm_common"),),
        lambda shapes, *_: in_any_dtype(shapes),
    ),
    Substitute(
        "torch.Tensor.tolist",
        ((FakeTensor, "tolist"),),
        lambda tolist, *_: counts(tolist, lambda _: True),
        counted=lambda result: isinstance(result, Counts),  # which Tensor.split then takes
    ),
    Substitute(
        "meshtune.experts.exchange.Exchange.read_sizes",
        ((Exchange, "read_sizes"),),
        lambda *given: sizes_of(given[-1]),
    ),
    Substitute(
        "torch.Tensor.split",
        ((Tensor, "split"),),
        lambda split, *_: by_counts(split),
        counted=lambda _: False,
    ),
)


@contextmanager
def installed(kernels: str, routing: Routing = BALANCED) -> Iterator[set[str]]:
    """Install the stand-ins for a kind of kernels, "cpu" or "cuda", and a routing of tokens to experts;
    yields a set to which each adds what it replaces when it is called.
    """
    called: set[str] = set()

    def noting(substitute: Substitute, stand_in: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stand_in)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = stand_in(*args, **kwargs)
            # Noting it in a block that is compiled and recomputed would interrupt the compiler.
            if not torch.compiler.is_compiling() and substitute.counted(result):
                called.add(substitute.replaces)
            return result

        return noted

    with ExitStack() as stack:
        for substitute in SUBSTITUTES:
            if substitute.cuda and kernels != "cuda":
                continue
            (owner, name), *_ = substitute.places
            stand_in = noting(substitute, substitute.make(getattr(owner, name), kernels, routing))
            for owner, name in substitute.places:
                stack.enter_context(patch.object(owner, name, stand_in))
        yield called
