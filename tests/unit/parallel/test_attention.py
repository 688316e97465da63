"""Packed documents through our attention against each document alone through Hugging Face's eager
attention."""

import pytest
import torch
import torch.nn.functional as F
from cases import cases
from families import COMMON, FAMILIES, FAMILY_CASES, WINDOW
from golden import refuses
from tiny import positions_of
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from meshtune.attention import cpu, cuda
from meshtune.attention.arguments import Core
from meshtune.attention.core import attend_rows
from meshtune.attention.register import document_attention, register, use_kernels
from meshtune.data.boundaries import row_boundaries
from meshtune.model.anatomy import anatomy
from meshtune.model.body import ATTENTION_NAMES

register()

SEQ = 40
# Padding, an unlike row, two alike, short ones.
DOCUMENTS = ((13, 5, 20), (38,), (9, 17), (9, 17), (1, 2, 30))
POSITIONS = positions_of(DOCUMENTS, SEQ)


def models(family, implementation="meshtune", dtype=torch.float64, **changes):
    torch.manual_seed(1)
    config = FAMILIES[family](**changes)
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    ours = AutoModelForCausalLM.from_config(FAMILIES[family](**changes), attn_implementation=implementation)
    ours = ours.to(dtype)
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@pytest.mark.ci
@pytest.mark.parametrize("implementation", ATTENTION_NAMES)
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_packed_documents_equal_each_document_alone_through_eager(family, implementation):
    eager, ours = models(family, implementation)
    ids = torch.randint(3, 256, (len(DOCUMENTS), SEQ))
    logits = ours(input_ids=ids, position_ids=POSITIONS, documents=DOCUMENTS, use_cache=False).logits
    weights = torch.randn_like(logits)
    expected, got = 0, 0
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            alone = eager(input_ids=ids[row : row + 1, part], use_cache=False).logits[0]
            # eager's softmax is in fp32, hence no 1e-15
            torch.testing.assert_close(logits[row, part], alone, rtol=0, atol=2e-6 * alone.abs().max().item())
            expected = expected + (alone * weights[row, part]).sum()
            got = got + (logits[row, part] * weights[row, part]).sum()
            start += length
    expected.backward()
    got.backward()
    for (name, theirs), own in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert (own.grad - theirs.grad).norm() <= 3e-6 * theirs.grad.norm(), name


SINKS = {
    "gpt_oss": {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
                "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "granite_swa": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


@pytest.mark.parametrize("model_type", SINKS)
def test_packed_documents_of_families_with_sinks_equal_each_document_alone(model_type):
    """Against eager attention, whose softmax is in fp32."""
    torch.manual_seed(1)
    eager, ours = (
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **COMMON | SINKS[model_type]), attn_implementation=implementation
        ).to(torch.float32 if model_type == "gpt_oss" else torch.float64)  # its experts have no fp64
        for implementation in ("eager", "meshtune")
    )
    for name, parameter in eager.named_parameters():
        if "sinks" in name:
            nn.init.normal_(parameter, std=2.0)
    ours.load_state_dict(eager.state_dict())
    ids = torch.randint(3, 256, (len(DOCUMENTS), SEQ))
    out = ours(input_ids=ids, position_ids=POSITIONS, documents=DOCUMENTS, use_cache=False).logits
    expected = [
        eager(input_ids=part[None], use_cache=False).logits[0]
        for row, lengths in zip(ids, DOCUMENTS, strict=True)
        for part in row[: sum(lengths)].split(list(lengths))
    ]
    found = torch.cat([row[: sum(lengths)] for row, lengths in zip(out, DOCUMENTS, strict=True)])
    expected = torch.cat(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, theirs), own in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert (own.grad - theirs.grad).norm() <= 2e-5 * theirs.grad.norm(), name


def explicit(q, k, v, documents, scale, window=None, softcap=None, sinks=None):
    """The definition, with a full mask: what each token sees, written out."""
    batch, heads, seq, _ = q.shape
    ids = torch.full((batch, seq), -1)
    for row, lengths in enumerate(documents):
        ids[row, : sum(lengths)] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i, j = torch.arange(seq)[:, None], torch.arange(seq)[None]
    seen = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None] & (j <= i)
    if window:
        seen &= j > i - window
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(batch, heads, seq, 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., :seq]
    return (weights @ v).transpose(1, 2)


def tensors(seq, dtype=torch.float64, heads=4, kv_heads=2, documents=DOCUMENTS, v_dim=16):
    torch.manual_seed(3)
    shapes = [(len(documents), seq, n, size) for n, size in ((heads, 16), (kv_heads, 16), (kv_heads, v_dim))]
    return [torch.randn(s, dtype=dtype).transpose(1, 2).requires_grad_() for s in shapes]


def tokens_of(documents, seq):
    """Mask [rows, seq] of what is not padding."""
    return torch.tensor([[column < sum(row) for column in range(seq)] for row in documents])


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", cases([None, 1, WINDOW, 100, 700], ci=[None, WINDOW, 700]))
@pytest.mark.parametrize("recompute", [False, True])
def test_windows_and_softcaps_over_several_blocks_equal_the_definition(window, softcap, recompute):
    documents, seq = ((900, 20), (300, 610)), 930  # longer than one block of the windowed and the capped way
    q, k, v = tensors(seq, documents=documents, heads=2, kv_heads=1)
    out, _ = document_attention(
        nn.Module(), q, k, v, None, documents=documents, scaling=0.3, sliding_window=window, softcap=softcap,
        recompute=recompute,
    )  # fmt: skip
    expected = explicit(q, k, v, documents, 0.3, window, softcap)
    real = tokens_of(documents, seq)[..., None, None]
    torch.testing.assert_close(out * real, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(out) * real
    got = torch.autograd.grad((out * weights).sum(), (q, k, v))
    for ours, theirs in zip(got, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("kernel", "v_dim"), [("fused", 16), ("fused", 12), ("fused", 24), ("plain", 16)])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("documents", [((SEQ,),), ((13, SEQ - 13),), ((30,), (SEQ,))])
def test_every_kernel_for_the_cpu_equals_the_definition(documents, window, kernel, v_dim):
    q, k, v = tensors(SEQ, documents=documents, v_dim=v_dim)
    found = row_boundaries(documents, SEQ)
    out = attend_rows(q, k, v, found, 0.3, 0.0, None, window, kernel=kernel)
    expected = explicit(q, k, v, documents, 0.3, window)
    own = tokens_of(documents, SEQ)
    torch.testing.assert_close(out[own], expected[own], rtol=0, atol=1e-12)
    got = torch.autograd.grad(out[own].square().sum(), (q, k, v))
    for ours, theirs in zip(got, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("kernel", "recompute"),
    [("fused", False), ("plain", False), (None, True)],
    ids=["fused", "plain", "again"],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (WINDOW, None), (None, 1.5)])
@pytest.mark.parametrize("documents", [((SEQ,),), DOCUMENTS])
def test_a_sink_takes_its_share_of_every_query(documents, window, softcap, kernel, recompute):
    q, k, v = tensors(SEQ, documents=documents)
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=q.dtype, requires_grad=True)
    if recompute:
        out, _ = document_attention(
            nn.Module(), q, k, v, None, documents=documents, scaling=0.3, sliding_window=window,
            softcap=softcap, s_aux=sinks, recompute=True,
        )  # fmt: skip
    else:
        settings = (row_boundaries(documents, SEQ), 0.3, 0.0, softcap, window)
        out = attend_rows(q, k, v, *settings, kernel=kernel, sinks=sinks)
    expected = explicit(q, k, v, documents, 0.3, window, softcap, sinks)
    own = tokens_of(documents, SEQ)
    torch.testing.assert_close(out[own], expected[own], rtol=0, atol=1e-12)
    inputs = (q, k, v, sinks)
    got = torch.autograd.grad(out[own].square().sum(), inputs)
    for ours, theirs in zip(got, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.ci
@pytest.mark.parametrize("window", [None, 1, 200])
def test_flex_attention_has_a_mask_of_blocks(window, monkeypatch):
    """Only the forward, uncompiled: on a CPU flex attention has no backward."""
    monkeypatch.setattr(cuda, "compiled_flex", lambda: flex_attention)
    documents, seq = ((400, 3, 250), (20, 640)), 700
    q, k, v = (x.detach().float() for x in tensors(seq, documents=documents))
    bounds, tokens = row_boundaries(documents, seq), seq * len(documents)
    with Largest() as largest:
        cuda.block_mask(bounds, tokens, tokens, window)
    assert largest.elements < 2 * tokens, "and not queries x keys"
    out = attend_rows(q, k, v, bounds, 0.3, 0.0, 1.5, window, kernel="flex")
    own = tokens_of(documents, seq)
    expected = explicit(q, k, v, documents, 0.3, window, 1.5)
    torch.testing.assert_close(out[own], expected[own], rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_lower_precisions_keep_their_dtype_and_stay_close(dtype, softcap):
    q, k, v = tensors(SEQ, dtype)
    out, _ = document_attention(nn.Module(), q, k, v, None, documents=DOCUMENTS, softcap=softcap)
    expected = explicit(*(t.double() for t in (q, k, v)), DOCUMENTS, 16**-0.5, softcap=softcap)
    assert out.dtype == dtype
    out, expected = (each[tokens_of(DOCUMENTS, SEQ)] for each in (out, expected))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-6)


def test_padding_is_finite_and_no_document_sees_it():
    q, k, v = tensors(SEQ)
    out, _ = document_attention(nn.Module(), q, k, v, None, documents=DOCUMENTS)
    assert out.isfinite().all()
    for grad in torch.autograd.grad(out[tokens_of(DOCUMENTS, SEQ)].square().sum(), (q, k, v)):
        assert grad[0, :, 38:].eq(0).all()
        assert grad[0, :, :38].ne(0).any()


def test_dropout_of_zero_probability_mass_equals_the_way_without_and_is_repeated_by_the_seed():
    q, k, v = tensors(SEQ)

    def run(dropout, recompute=False):
        torch.manual_seed(5)
        out, _ = document_attention(
            nn.Module(), q, k, v, None, documents=DOCUMENTS, dropout=dropout, softcap=2.0, sliding_window=6,
            recompute=recompute,
        )  # fmt: skip
        return out, torch.autograd.grad(out[tokens_of(DOCUMENTS, SEQ)].square().sum(), (q, k, v))

    plain, almost, half, again = run(0.0), run(1e-12), run(0.5), run(0.5, recompute=True)
    torch.testing.assert_close(plain, almost, rtol=0, atol=1e-9)
    assert not torch.equal(plain[0], half[0])
    torch.testing.assert_close(half, again, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The most elements that any operation gave."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


def test_no_mask_no_scores_and_no_expanded_keys_exist():
    documents, seq = ((256,), (256,)), 256
    q, k, v = tensors(seq, torch.float32, documents=documents)
    with Largest() as largest:
        out, _ = document_attention(nn.Module(), q, k, v, None, documents=documents)
        out.sum().backward()
    assert largest.elements <= q.numel()
    assert k.grad.shape == k.shape


def test_neighbouring_documents_of_equal_lengths_share_one_kernel_call(monkeypatch):
    q, k, v = tensors(SEQ)
    outs, kernel = [], cpu._kernel
    monkeypatch.setattr(cpu, "_kernel", lambda *args: outs.append(kernel(*args)) or outs[-1])
    out, _ = document_attention(nn.Module(), q, k, v, None, documents=((SEQ // 2,) * 2,) * len(DOCUMENTS))
    assert len(outs) == 1
    assert out.data_ptr() == outs[0][0].data_ptr()  # not a copy


def test_no_kernel_call_has_more_queries_than_a_block():
    ends = torch.tensor([0, 3000, 3400]), torch.tensor([0, 4300, 4700])
    every = cpu.calls(Core(*ends, 3000, 4300, 0.3, None, None))
    assert max(each.queries.stop - each.queries.start for each in every) == cpu.WINDOW_BLOCK
    assert sum(each.queries.stop - each.queries.start for each in every) == 3400


def test_the_kernel_under_a_private_name_still_equals_scaled_dot_product_attention():
    q, k, v = tensors(SEQ)
    out, _ = document_attention(nn.Module(), q, k, v, None, documents=((SEQ,),) * len(DOCUMENTS))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "bad",
    [
        {"attention_mask": torch.zeros(1)}, {"is_causal": False}, {"head_mask": torch.ones(4)},
        {"output_attentions": True}, {"use_cache": True}, {"something_new": 3},
    ],
)  # fmt: skip
def test_an_argument_that_would_change_the_result_is_refused_by_name(bad):
    q, k, v = tensors(SEQ)
    with pytest.raises(NotImplementedError, match=next(iter(bad))):
        document_attention(nn.Module(), q, k, v, bad.pop("attention_mask", None), documents=DOCUMENTS, **bad)


def test_what_changes_nothing_is_accepted():
    q, k, v = tensors(SEQ)
    harmless = {"use_cache": False, "output_attentions": False, "position_ids": POSITIONS, "s_aux": None}
    document_attention(nn.Module(), q, k, v, None, documents=DOCUMENTS, **harmless)


def test_a_model_called_without_documents_raises():
    _, ours = models("llama")
    with refuses(ValueError):
        ours(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False)


def test_a_padding_mask_is_refused_and_never_ignored():
    _, ours = models("llama")
    use_kernels(ours, anatomy(ours), "cpu")
    ids = torch.ones(1, 5, dtype=torch.long)
    ours(input_ids=ids, documents=((5,),), use_cache=False)
    with refuses(NotImplementedError):
        ours(input_ids=ids, attention_mask=torch.ones_like(ids), documents=((5,),), use_cache=False)


@pytest.mark.parametrize("documents", [((SEQ + 1,),) * 5, ((SEQ,),) * 4, ((0, 3),) * 5])
def test_documents_that_do_not_fit_are_refused(documents):
    q, k, v = tensors(SEQ)
    with refuses(ValueError):
        document_attention(nn.Module(), q, k, v, None, documents=documents)


def test_registering_again_changes_nothing():
    functions = [AttentionInterface()[name] for name in ATTENTION_NAMES]
    register()
    assert [AttentionInterface()[name] for name in ATTENTION_NAMES] == functions


def test_a_named_kernel_refuses_what_it_can_not_do() -> None:
    q, documents = torch.randn(1, 2, 8, 16), row_boundaries(((8,),), 8)
    with refuses(ValueError):
        attend_rows(q, q, q, documents, 0.3, 0.1, 20.0, None, kernel="varlen")
    with refuses(ValueError):
        attend_rows(q, q, q, documents, 0.3, 0.1, None, None, kernel="fused")
