"""Attention on CUDA: every way against the definition with a full mask, in fp64 on the CPU."""

import pytest
import torch
from torch import nn

from meshtune.attention import flash
from meshtune.attention.core import attend_rows
from meshtune.attention.register import document_attention
from meshtune.data.boundaries import row_boundaries
from meshtune.placement.census import Attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DOCUMENTS, SEQ, SCALE = ((130, 50, 76), (256,), (90, 17), (1, 2, 240)), 256, 0.2
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # fp32 may run in TF32


OWN = torch.tensor([[column < sum(row) for column in range(SEQ)] for row in DOCUMENTS])  # not padding


def on_device(documents, seq):
    return row_boundaries(documents, seq).map(lambda tensor: tensor.cuda())


def definition(q, k, v, window=None, softcap=None):
    batch, heads, seq, _ = q.shape
    ids = torch.full((batch, seq), -1)
    for row, lengths in enumerate(DOCUMENTS):
        ids[row, : sum(lengths)] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i, j = torch.arange(seq)[:, None], torch.arange(seq)[None]
    seen = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None] & (j <= i)
    if window:
        seen &= j > i - window
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * SCALE
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num(0) @ v).transpose(1, 2)


def tensors(dtype, head_dim=64, kv_heads=2):
    torch.manual_seed(3)
    shapes = [(len(DOCUMENTS), SEQ, n, head_dim) for n in (4, kv_heads, kv_heads)]
    return [torch.randn(s).to("cuda", dtype).transpose(1, 2).requires_grad_() for s in shapes]


def assert_is_the_definition(out, inputs, dtype, **options):
    exact = [t.detach().cpu().double().requires_grad_() for t in inputs]
    expected = definition(*exact, **options)
    scale = {"rtol": 0, "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.detach().cpu().double()[OWN], expected.detach()[OWN], **scale)
    weights = torch.randn(expected.shape, dtype=torch.float64) * OWN[:, :, None, None]
    grads = torch.autograd.grad((out * weights.to("cuda", dtype)).sum(), inputs)
    for own, theirs in zip(grads, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        # Queries that see one key have a gradient of zero.
        assert (own.cpu().double() - theirs).norm() <= TOLERANCE[dtype] * theirs.norm().clamp(min=1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 20, 1000])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_on_cuda_equals_the_definition(dtype, window, softcap, kv_heads, recompute):
    inputs = tensors(dtype, kv_heads=kv_heads)
    out, _ = document_attention(
        nn.Module(), *inputs, None, documents=DOCUMENTS, scaling=SCALE, sliding_window=window,
        softcap=softcap, recompute=recompute,
    )  # fmt: skip
    assert_is_the_definition(out, inputs, dtype, window=window, softcap=softcap)


@pytest.mark.parametrize("version", [4, 3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 20])
def test_newer_flash_attention_equals_the_definition(version, head_dim, window):
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    if version not in flash.versions_here(device):
        pytest.skip(f"FlashAttention {version} is not installed, or has no kernels for this GPU")
    chosen, refused = flash.choose([version], [Attention(4, 2, head_dim, head_dim, window)], dtype, device)
    try:
        assert (chosen, refused) == (version, [])
        inputs = tensors(dtype, head_dim)
        out, _ = document_attention(
            nn.Module(), *inputs, None, documents=DOCUMENTS, scaling=SCALE, sliding_window=window
        )
        assert_is_the_definition(out, inputs, dtype, window=window)
    finally:
        flash.restore()


@pytest.mark.parametrize("head_dim", [32, 72, 100, 128, 256])
def test_head_sizes_that_the_kernel_refuses_take_another_way(head_dim):
    inputs = tensors(torch.bfloat16, head_dim)
    out, _ = document_attention(nn.Module(), *inputs, None, documents=DOCUMENTS, scaling=SCALE)
    assert_is_the_definition(out, inputs, torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_softcap_with_rows_below_128_tokens(kv_heads, dtype):
    """torch's own choice there is a kernel for decoding."""
    documents = ((40, 47), (80,))
    q, k, v = (t[:2, :, :87] for t in tensors(dtype, kv_heads=kv_heads))
    by_flex, plain = (
        attend_rows(q, k, v, on_device(documents, 87), SCALE, 0.0, 1.5, None, kernel=kernel)
        for kernel in ("flex", "plain")
    )
    torch.testing.assert_close(by_flex, plain, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_in_the_variable_length_kernel_equal_those_by_plain_autograd(window):
    inputs = tensors(torch.bfloat16)
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(len(DOCUMENTS), SEQ, 4, 64, device="cuda", dtype=torch.bfloat16)
    found = []
    for kernel in ("varlen", "plain"):
        settings = (on_device(DOCUMENTS, SEQ), SCALE, 0.0, None, window)
        out = attend_rows(*inputs, *settings, kernel=kernel, sinks=sinks)
        found.append([out, *torch.autograd.grad((out * weights).sum(), (*inputs, sinks))])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= TOLERANCE[torch.bfloat16] * other.norm()


def test_dropout_works_on_cuda_and_is_repeated_by_the_seed():
    inputs = tensors(torch.bfloat16)

    def run(recompute):
        torch.manual_seed(5)
        out, _ = document_attention(
            nn.Module(), *inputs, None, documents=DOCUMENTS, dropout=0.3, recompute=recompute
        )
        return torch.autograd.grad(out.square().sum(), inputs)

    torch.testing.assert_close(run(False), run(True), rtol=0, atol=0)
