"""Stand-ins of the dry run against the real operations' shapes, strides and saved tensors."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made_traces import job_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from meshtune.attention.op import attention
from meshtune.dryrun.ranks import trace_ranks
from meshtune.dryrun.substitutes import SUBSTITUTES, cuda_attention, flex_attention, installed
from meshtune.dryrun.world import trace_rank
from meshtune.model.fused import experts_without_values

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
BF16, FP32 = torch.bfloat16, torch.float32


def test_there_are_few_and_all_are_taken_away_again() -> None:
    before = F.scaled_dot_product_attention
    assert len({each.replaces for each in SUBSTITUTES}) == len(SUBSTITUTES) <= 10
    with installed("cuda") as called:
        assert F.scaled_dot_product_attention is not before
        assert called == set()
        F.scaled_dot_product_attention(
            *(torch.empty(1, 2, 4, 8, dtype=BF16, device="meta") for _ in range(3))
        )
        assert called == {"torch.nn.functional.scaled_dot_product_attention"}
    assert F.scaled_dot_product_attention is before
    with installed("cpu"):
        assert F.scaled_dot_product_attention is before


@pytest.mark.parametrize(
    ("dtype", "heads", "size", "masked", "kernel"),
    [
        (BF16, 2, 64, False, "flash"),
        (BF16, 4, 64, False, "flash"),  # as many key-value heads as query heads
        (FP32, 4, 64, False, "efficient"),
        (BF16, 4, 64, True, "efficient"),
        (FP32, 2, 64, False, "math"),  # the memory-efficient kernel knows no grouped heads
        (BF16, 4, 512, False, "efficient"),  # flash attention's largest head size is 256
    ],
)
def test_attention_takes_the_kernel_that_cuda_would(
    dtype: torch.dtype, heads: int, size: int, masked: bool, kernel: str
) -> None:
    q = torch.empty(2, 4, 16, size, dtype=dtype, device="meta", requires_grad=True)
    k = torch.empty(2, heads, 16, size, dtype=dtype, device="meta")
    mask = torch.empty(1, 1, 16, 16, dtype=torch.bool, device="meta") if masked else None
    options = {"attn_mask": mask, "is_causal": not masked, "enable_gqa": heads != 4}
    out = cuda_attention(F.scaled_dot_product_attention)(q, k, k, **options)
    node = out.grad_fn.name() if out.grad_fn is not None else ""
    found = next((name for name in ("Flash", "Efficient") if name in node), "math").lower()
    assert found == kernel
    real = F.scaled_dot_product_attention(*(x.detach().cpu() if not x.is_meta else
                                            torch.zeros(x.shape, dtype=dtype) for x in (q, k, k)),
                                          is_causal=True, enable_gqa=heads != 4)  # fmt: skip
    assert out.shape == real.shape
    if kernel == "flash":  # tokens before heads in memory, as the kernel of the CPU
        assert out.stride() == real.stride()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_grouped_matmuls_have_the_shapes_of_real_ones(dtype: torch.dtype) -> None:
    def results(device: str) -> list[Any]:
        tokens = torch.zeros(30, 16, dtype=dtype, device=device, requires_grad=True)
        experts = torch.zeros(3, 24, 16, dtype=dtype, device=device, requires_grad=True)
        ends = torch.tensor([10, 10, 30], dtype=torch.int32, device=device)
        out = F.grouped_mm(tokens, experts.transpose(1, 2), offs=ends)
        out.backward(torch.zeros_like(out))
        return [(x.shape, x.stride(), x.dtype) for x in (out, tokens.grad, experts.grad) if x is not None]

    with installed("cpu") as called:
        assert results("meta") == results("cpu")
    assert called == {"torch.nn.functional.grouped_mm"}


def test_experts_whose_rows_a_router_counts_have_rows_without_values() -> None:
    rows = torch.empty(7, 3, device="meta")
    with installed("cpu"), experts_without_values():
        parts = rows.split(torch.empty(2, dtype=torch.long, device="meta").tolist(), dim=0)
        assert torch.tensor([4, 5]).tolist() == [4, 5]
        assert [len(part) for part in torch.zeros(5).split([2, 3])] == [2, 3]
    assert [len(part) for part in parts] == [7, 0]


@pytest.mark.parametrize(("heads", "size"), [(2, 64), (4, 128), (4, 96)])
def test_fake_varlen_attention_has_the_results_of_flash_attention(heads: int, size: int) -> None:
    """The fake of the operation that is traced, compared with its kernel's own meta implementation."""
    q = torch.empty(48, 4, size, dtype=BF16, device="meta", requires_grad=True)
    k, v = (torch.empty(48, heads, size, dtype=BF16, device="meta", requires_grad=True) for _ in range(2))
    inputs = (k, v)
    ends = torch.tensor([0, 20, 48], dtype=torch.int32, device="meta")
    called: list[tuple[torch.Tensor, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "meshtune.attention" in str(func):
                called.append(out)
            return out

    longest = torch.tensor(28)
    with Watch():
        attention(q, k, v, ends, ends, longest, longest, 0.1, None, None, None, "varlen")[0].sum().backward()
    forward, backward = called
    real = torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, 28, 28, 0.0, True, False, scale=0.1)

    def layouts(tensors: Iterable[torch.Tensor]) -> list[Any]:
        return [(each.shape, each.stride(), each.dtype) for each in tensors]

    assert layouts(forward) == layouts(real[:2])  # output, log-sum-exp
    assert forward[1].shape == (4, 48)
    assert layouts(backward) == layouts((q, k, v))
    assert layouts((q.grad, *(each.grad for each in inputs))) == layouts((q, *inputs))


@pytest.mark.ci
@pytest.mark.parametrize("tokens_first", [False, True])
def test_flex_attention_has_the_shapes_and_strides_of_the_real_one(tokens_first: bool) -> None:
    from torch.nn.attention.flex_attention import AuxRequest
    from torch.nn.attention.flex_attention import flex_attention as real

    q, k = torch.randn(2, 4, 16, 32), torch.randn(2, 2, 16, 32)
    if tokens_first:  # in memory, as projections make them
        q, k = (torch.randn(2, 16, heads, 32).transpose(1, 2) for heads in (4, 2))
    expected, more = real(q, k, k, enable_gqa=True, return_aux=AuxRequest(lse=True))
    meta = (x.to("meta") for x in (q, k, k))
    out, lse = flex_attention(*meta)
    assert out.shape == expected.shape and lse.shape == more.lse.shape and lse.dtype == more.lse.dtype
    assert out.stride() == expected.stride()


@pytest.mark.ci
def test_a_softcap_traces_flex_attention_on_cuda_and_no_read_by_the_host(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, max_position_embeddings=64,
    )  # fmt: skip
    job = job_of(config, "mb1-ga1", (20, 12), kernels="cuda")
    (trace,) = trace_ranks(partial(trace_rank, job), [0], 1)
    assert trace.substitutes == ("torch.nn.attention.flex_attention",)
    step = trace.steps[1]
    names = {operation.name for operation in step.operations}
    assert "meshtune_dryrun.flex_attention_backward.default" in names
    assert [line.split(" ")[1] for line in step.host_reads] == ["sum_over_ranks"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "layout", ["mb1-ga2", "zero3x2-tp2-sp-mb1-ga2-full", "pp2-1f1b-mb1-ga2", "cp2-mb1-ga2-selective"]
)
def test_copies_and_reads_of_the_host_are_counted(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, norm = job_of(CONFIG, layout, (20, 12), kernels="cuda"), LlamaRMSNorm.forward
    (trace,) = trace_ranks(partial(trace_rank, job), [0], job.layout.world)
    assert not trace.steps[1].host_copies and [*trace.steps[1].host_reads.values()] == [1]
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: norm(self, x) * torch.tensor(1.0))
    (trace,) = trace_ranks(partial(trace_rank, job), [0], job.layout.world)
    assert sum(trace.steps[1].host_copies.values()) >= 4 and [*trace.steps[1].host_reads.values()] == [1]
