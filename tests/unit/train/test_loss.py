"""The chunked loss against plain transformers: full logits and torch's cross entropy."""

import pytest
import torch
import torch.nn.functional as F
from families import COMMON, FAMILIES
from forward import summed_loss
from graphs import Graphs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GraniteConfig, OPTConfig
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from meshtune.attention.register import register
from meshtune.data.batch import MicroBatch
from meshtune.meter.ledger import Ledger
from meshtune.model.anatomy import anatomy
from meshtune.model.body import head_only
from meshtune.train import loss
from meshtune.train.loss import _cross_entropy, fused_cross_entropy, head_loss

register()

FAMILIES_AND_GRANITE = FAMILIES | {"granite": lambda: GraniteConfig(**COMMON, logits_scaling=3.0)}
DOCUMENTS, SEQ, VOCABULARY = ((13, 5, 20), (38,), (9, 17), (1, 2, 30)), 40, 256


def micro_batch(share=0.6):
    ids = torch.randint(3, VOCABULARY, (len(DOCUMENTS), SEQ))
    positions = torch.stack([torch.cat([torch.arange(n) for n in (*d, SEQ - sum(d))]) for d in DOCUMENTS])
    labels = torch.where(torch.rand(ids.shape) < share, torch.randint(0, VOCABULARY, ids.shape), -100)
    for row, lengths in enumerate(DOCUMENTS):
        labels[row, sum(lengths) :] = -100
    tokens = sum(map(sum, DOCUMENTS))
    return MicroBatch(ids, labels, positions, DOCUMENTS, tokens, int((labels != -100).sum()))


def models(family, dtype=torch.float32, implementation="meshtune"):
    torch.manual_seed(1)
    config = FAMILIES_AND_GRANITE[family]
    plain = AutoModelForCausalLM.from_config(config(), attn_implementation="eager").to(dtype)
    ours = AutoModelForCausalLM.from_config(config(), attn_implementation=implementation).to(dtype)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def reference(model, batch, smoothing=0.0):
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), reduction="sum", label_smoothing=smoothing
    )


def assert_same_gradients(plain, ours, tolerance):
    for (name, theirs), own in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert (own.grad - theirs.grad).norm() <= tolerance * theirs.grad.norm(), name


# In fp64 what is left is the fp32 inside Hugging Face (softmax, norms, rotary angles), except in GPT-2.
@pytest.mark.parametrize(
    ("dtype", "loss_tolerance", "tolerance"), [(torch.float32, 1e-6, 1e-5), (torch.float64, 2e-8, 2e-6)]
)
@pytest.mark.parametrize("family", FAMILIES_AND_GRANITE)
def test_loss_and_gradients_equal_plain_transformers(family, dtype, loss_tolerance, tolerance):
    plain, ours = models(family, dtype)
    batch = micro_batch()
    if family == "gpt2" and dtype == torch.float64:
        loss_tolerance, tolerance = 1e-14, 1e-13
    expected = reference(plain, batch)
    (expected / 50).backward()
    loss = summed_loss(ours, anatomy(ours), batch, chunk_tokens=25)  # does not divide the labels
    (loss / 50).backward()
    assert loss.dtype == dtype
    assert abs(loss - expected) <= loss_tolerance * expected
    assert_same_gradients(plain, ours, tolerance)
    with torch.no_grad():
        assert torch.equal(summed_loss(ours, anatomy(ours), batch, chunk_tokens=25), loss)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "gpt2"])
def test_the_head_in_fp64_is_exact_for_every_chunk_size(family):
    plain, ours = models(family, torch.float64)
    batch = micro_batch()
    hidden = torch.randn(len(DOCUMENTS), SEQ, 64, dtype=torch.float64, requires_grad=True)
    base, own_anatomy = anatomy(plain).body, anatomy(ours)
    output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)
    plain._modules[base].forward = lambda *_, **__: output
    expected = reference(plain, batch)
    weights = [plain.get_submodule(own_anatomy.head).weight, hidden]
    theirs = torch.autograd.grad(expected * 0.7, weights)
    for chunk_tokens in (1, 7, batch.label_tokens, 4096):
        ours.zero_grad()
        own = hidden.detach().requires_grad_()
        loss = head_loss(ours, own_anatomy, own, batch, chunk_tokens=chunk_tokens)
        (loss * 0.7).backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            ours.get_submodule(own_anatomy.head).weight.grad, theirs[0], rtol=1e-9, atol=1e-12
        )
        torch.testing.assert_close(own.grad, theirs[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk_tokens", [1, 25, 4096])
def test_label_smoothing_is_torchs(chunk_tokens):
    plain, ours = models("llama", torch.float64)
    batch = micro_batch()
    expected = reference(plain, batch, 0.1)
    expected.backward()
    loss = summed_loss(ours, anatomy(ours), batch, chunk_tokens=chunk_tokens, smoothing=0.1)
    loss.backward()
    assert abs(loss - expected) <= 2e-8 * expected and loss != summed_loss(ours, anatomy(ours), batch)
    assert_same_gradients(plain, ours, 2e-6)
    with torch.no_grad():
        again = summed_loss(ours, anatomy(ours), batch, chunk_tokens=chunk_tokens, smoothing=0.1)
    assert torch.equal(again, loss)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_that_is_compiled_equals_the_one_that_is_not(smoothing: float) -> None:
    logits, targets = torch.randn(9, 50, dtype=torch.float64), torch.randint(50, (9,))
    plain = _cross_entropy(logits, targets, vocabulary=None, smoothing=smoothing, gradient=True)
    fused = fused_cross_entropy(logits, targets, smoothing=smoothing, gradient=True)
    torch.testing.assert_close(plain, fused, rtol=1e-13, atol=1e-14)
    assert fused_cross_entropy(logits, targets, smoothing=smoothing, gradient=False)[1] is None


@pytest.mark.ci
def test_the_compiled_loss_is_one_graph_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(fused_cross_entropy, backend=(graphs := Graphs()))
    monkeypatch.setattr(loss, "_compiled_cross_entropy", lambda: compiled)
    for tokens in (30, 1024, 17, 2):
        given = torch.randn(tokens, 50), torch.randint(50, (tokens,))
        _cross_entropy(*given, vocabulary=None, smoothing=0.0, gradient=True, fused=True)
    assert graphs.made == 1


def test_without_our_attention_the_documents_are_kept_apart_as_well():
    plain, ours = models("llama", implementation="sdpa")
    batch = micro_batch()
    torch.testing.assert_close(summed_loss(ours, anatomy(ours), batch), reference(plain, batch))


def test_a_single_label_counts():
    plain, ours = models("llama")
    batch = micro_batch(0.0)
    batch.labels[2, 11] = 42
    batch = MicroBatch(batch.input_ids, batch.labels, batch.position_ids, DOCUMENTS, batch.tokens, 1)
    loss = summed_loss(ours, anatomy(ours), batch)
    loss.backward()
    expected = reference(plain, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(plain, ours, 1e-5)


def test_no_label_at_all_gives_zero_and_zero_gradients_everywhere():
    _, ours = models("llama")
    loss = summed_loss(ours, anatomy(ours), micro_batch(0.0))
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and p.grad.eq(0).all() for p in ours.parameters())


def test_a_frozen_head_gets_no_gradient_and_the_body_gets_the_same():
    plain, ours = models("llama")
    batch = micro_batch()
    ours.lm_head.weight.requires_grad_(False)
    reference(plain, batch).backward()
    with Watch() as watch:
        summed_loss(ours, anatomy(ours), batch).backward()
    assert ours.lm_head.weight.grad is None
    assert (VOCABULARY, 64) not in watch.products
    plain.lm_head.weight.grad = ours.lm_head.weight.grad = None
    for (name, theirs), own in zip(plain.model.named_parameters(), ours.model.parameters(), strict=True):
        assert (own.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm(), name


def test_a_head_with_bias_and_adapter_goes_through_its_own_forward():
    plain, ours = models("llama")
    for model in (plain, ours):
        torch.manual_seed(5)
        head = model.lm_head
        head.bias = nn.Parameter(torch.randn(VOCABULARY))
        head.lora = nn.Parameter(torch.randn(VOCABULARY, 64))
        head.forward = lambda x, head=head: F.linear(x, head.weight + 0.1 * head.lora, head.bias)
    batch = micro_batch()
    reference(plain, batch).backward()
    summed_loss(ours, anatomy(ours), batch, chunk_tokens=30).backward()
    assert_same_gradients(plain, ours, 1e-5)


def test_bf16_gradients_are_summed_over_chunks_in_fp32():
    _, ours = models("llama", torch.bfloat16)
    batch, found = micro_batch(), anatomy(ours)
    hidden = torch.randn(len(DOCUMENTS), SEQ, 64, dtype=torch.bfloat16, requires_grad=True)

    def gradient(chunk_tokens, n=1):
        ours.zero_grad()
        loss = head_loss(ours, found, hidden, batch, chunk_tokens=chunk_tokens)
        (loss / n).backward()
        return ours.lm_head.weight.grad.float()

    whole, chunked = gradient(4096), gradient(2)
    assert (whole - chunked).norm() <= 0.004 * whole.norm()  # summed in bf16: 0.02
    third = gradient(4096, 3.0)  # the incoming gradient is not rounded to bf16 first
    assert ((third * 3 - whole).abs() <= whole.abs() / 256).all()
    assert abs((third * 3 / whole)[whole != 0].mean() - 1) < 5e-4


class Watch(TorchDispatchMode):
    """Bytes of the largest tensor with a vocabulary dimension, and the shapes that matrix products gave."""

    def __init__(self):
        super().__init__()
        self.logits_bytes, self.products = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                if tensor.shape[-1] == VOCABULARY and tensor.shape[:-1].numel() != 64:
                    self.logits_bytes = max(self.logits_bytes, tensor.numel() * tensor.itemsize)
                if func is torch.ops.aten.mm.default:
                    self.products.append(tuple(tensor.shape))
        return out


def test_only_one_chunk_of_logits_exists_and_only_at_labels():
    _, ours = models("llama")
    batch = micro_batch()
    with Watch() as watch:
        summed_loss(ours, anatomy(ours), batch, chunk_tokens=16).backward()
    assert 0 < watch.logits_bytes <= 16 * VOCABULARY * 4
    forward_rows = [rows for rows, columns in watch.products if columns == VOCABULARY]
    assert sum(forward_rows) == batch.label_tokens  # each labelled row once: none skipped, none recomputed


def test_a_chunks_gradient_of_the_head_is_gone_before_the_next_one_is_made():
    _, model = models("llama", torch.bfloat16)
    batch, head = micro_batch(), model.lm_head.weight
    hidden = torch.randn(*batch.input_ids.shape, head.shape[1], dtype=torch.bfloat16, requires_grad=True)
    with Ledger(torch.device("cpu")) as ledger:
        loss = head_loss(model, anatomy(model), hidden, batch, chunk_tokens=8)
    of_head, of_hidden, of_logits = 2 * head.numel(), 2 * hidden.numel(), 8 * VOCABULARY * (2 + 2 + 4)
    chunk = 8 * head.shape[1] * 2
    # fp32 sum, the gradient of one chunk, and less than another one for all else
    assert ledger.peak < 2 * of_head + of_head + of_hidden + of_logits + 4 * chunk + 4096 < 4.5 * of_head
    assert loss.isfinite()


def test_the_backward_hands_out_its_gradients_once():
    _, ours = models("llama")
    loss = summed_loss(ours, anatomy(ours), micro_batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()


def test_a_backward_in_two_halves_gives_each_its_gradients():
    _, ours = models("llama")
    batch, found = micro_batch(), anatomy(ours)
    hidden = torch.randn(len(DOCUMENTS), SEQ, 64, requires_grad=True)
    weight = ours.lm_head.weight

    def loss(once):
        return 0.3 * head_loss(ours, found, hidden, batch, chunk_tokens=25, single_backward=once)

    expected = torch.autograd.grad(loss(True), [hidden, weight])
    again = loss(False)
    halves = [torch.autograd.grad(again, each, retain_graph=True)[0] for each in (hidden, weight)]
    assert all(map(torch.equal, halves, expected))


def test_the_model_is_whole_again_even_after_an_error():
    _, ours = models("llama")
    body = ours.model
    summed_loss(ours, anatomy(ours), micro_batch())
    assert ours.model is body
    ours.lm_head.forward = lambda hidden: 1 / 0
    with pytest.raises(ZeroDivisionError):
        summed_loss(ours, anatomy(ours), micro_batch())
    assert ours.model is body


def test_a_wrong_label_count_is_noticed():
    _, ours = models("llama")
    batch = micro_batch()
    wrong = MicroBatch(
        batch.input_ids, batch.labels, batch.position_ids, DOCUMENTS, 0, batch.label_tokens - 1
    )
    with pytest.raises(RuntimeError, match="label_tokens"):
        summed_loss(ours, anatomy(ours), wrong)


def test_a_head_that_calls_a_part_of_the_body_goes_through_its_own_forward():
    """OPT's calls `self.model.decoder`."""
    model = AutoModelForCausalLM.from_config(
        OPTConfig(
            vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=32, word_embed_proj_dim=32,
        )
    ).eval()  # fmt: skip
    ids = torch.randint(0, 64, (1, 8))
    with torch.no_grad():
        expected = model(ids).logits[0]
        hidden = model.model.decoder(ids).last_hidden_state[0]
        with head_only(model, anatomy(model)) as logits_of:
            torch.testing.assert_close(logits_of(hidden), expected)
