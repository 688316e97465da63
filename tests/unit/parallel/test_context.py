"""Context parallelism against one rank: attention alone, and whole models' loss and gradients."""

import pytest
import torch
import torch.distributed as dist
from cases import cases
from collectives import Collectives
from families import COMMON, FAMILIES, exact
from forward import summed_loss
from ranks import run_ranks
from tiny import packed
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoModelForCausalLM, GraniteSWAConfig

from meshtune.attention import cuda
from meshtune.attention.core import attend, attend_rows, flat
from meshtune.attention.register import document_attention, register
from meshtune.data.batch import MicroBatch
from meshtune.data.boundaries import row_boundaries
from meshtune.model.anatomy import anatomy
from meshtune.parallel import context
from meshtune.parallel.mesh import Axis
from meshtune.parallel.recompute import recompute_blocks

register()

SEQ = 48  # parts of 12 columns for two ranks, of 6 for four
# Over the borders of parts, at them, within one; padding; two rows alike; a row with hardly anything.
DOCUMENTS = ((13, 5, 20), (48,), (12, 12, 6, 18), (9, 17), (9, 17), (1,))
METHODS = {"allgather": context.AllGather, "ulysses": context.Ulysses}

BOTH = pytest.mark.parametrize("method", METHODS)
TWO_AND_FOUR = pytest.mark.parametrize("ranks", [2, 4])


def here():
    return Axis("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


# Which columns a rank has


@BOTH
@TWO_AND_FOUR
def test_each_column_is_on_one_rank(method, ranks):
    own = [context.columns(SEQ, Axis("cp", ranks, rank), method) for rank in range(ranks)]
    assert sorted(torch.cat(own).tolist()) == list(range(SEQ))
    assert {len(each) for each in own} == {SEQ // ranks}


@TWO_AND_FOUR
def test_zigzag_columns_see_as_many_keys_on_every_rank(ranks):
    seen = {int((context.columns(SEQ, Axis("cp", ranks, r), "allgather") + 1).sum()) for r in range(ranks)}
    assert len(seen) == 1


@pytest.mark.parametrize(("method", "width"), [("allgather", 42), ("ulysses", 42)])
def test_a_row_that_cannot_be_cut_evenly_is_refused_with_the_numbers(method, width):
    with pytest.raises(ValueError, match=f"{width} columns"):
        context.columns(width, Axis("cp", 4, 0), method)


def micro_batch():
    """Packed rows with padding, and very unequal labels: all, few, one."""
    return packed(DOCUMENTS, SEQ, [1.0, 0.1, 0.5, 0.0, 0.9, 1.0])


@BOTH
@TWO_AND_FOUR
def test_the_parts_of_a_micro_batch_are_the_micro_batch(method, ranks):
    whole = micro_batch()
    axes = [Axis("cp", ranks, rank) for rank in range(ranks)]
    parts = [context.split(whole, axis, method) for axis in axes]
    order = torch.cat([context.columns(SEQ, axis, method) for axis in axes]).argsort()
    for name in ("input_ids", "labels", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in parts], 1)[:, order]
        assert torch.equal(joined, getattr(whole, name)), name
    assert sum(part.tokens for part in parts) == whole.tokens
    assert sum(part.label_tokens for part in parts) == whole.label_tokens
    assert all(part.documents == DOCUMENTS for part in parts)


def test_one_rank_keeps_its_micro_batch_and_its_attention():
    whole, model = micro_batch(), AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    context.attach(model, anatomy(model), Axis("cp"), "allgather")
    assert context.split(whole, Axis("cp"), "allgather") is whole
    assert not any("context" in vars(module) for module in model.modules())


# Attention alone


def tensors(dtype, kv_heads=4, value_dim=16, heads=8, documents=DOCUMENTS, seq=SEQ):
    """Queries, keys, values, and weights that make a scalar of the output."""
    torch.manual_seed(5)
    shapes = [(heads, 16), (kv_heads, 16), (kv_heads, value_dim), (heads, value_dim)]
    return [
        torch.randn(len(documents), seq, n, dim, dtype=torch.float64).to(dtype).transpose(1, 2)
        for n, dim in shapes
    ]


def attended(module, inputs, documents, options):
    """The output [batch, seq, heads, head_dim] of attention, padding's as zeros, and the gradients of q, k
    and v."""
    *inputs, weights = inputs
    q, k, v = (t.detach().requires_grad_() for t in inputs)
    attend, own = vars(module).get("context"), torch.arange(q.shape[2])
    whole = documents
    if attend is not None:
        seq, method = q.shape[2] * attend.axis.size, type(attend).__name__.lower()
        ids = torch.zeros(len(documents), seq, dtype=torch.long)
        micro_batch = MicroBatch(ids, ids, ids, documents, 0, 0)
        whole, own = (
            context.split(micro_batch, attend.axis, method).boundaries,
            context.columns(seq, attend.axis, method),
        )
    real = own < torch.tensor([sum(row) for row in documents])[:, None]
    out, _ = document_attention(module, q, k, v, None, documents=whole, scaling=0.3, **options)
    out = out * real[..., None, None]
    return out.detach(), *torch.autograd.grad((out * weights.transpose(1, 2)).sum(), (q, k, v))


def errors_by_case(cases):
    return {name: context_error(*case) for name, case in cases.items()}


def context_error(method, inputs, expected, documents, options):
    """The largest difference of this rank's part of the output and gradients from `expected`: relative to the
    largest there, or to 1 where that is smaller (with a window of one, q and k have no gradient)."""
    axis, module = here(), nn.Module()
    module.context = METHODS[method](axis)  # type: ignore[assignment]
    own = context.columns(inputs[0].shape[2], axis, method)
    found = attended(module, [t[:, :, own] for t in inputs], documents, options)
    parts = [expected[0][:, own], *(t[:, :, own] for t in expected[1:])]
    return max(
        float((ours - part).abs().max() / max(whole.abs().max(), 1))
        for ours, part, whole in zip(found, parts, expected, strict=True)
    )


def case(method, *, dtype=torch.float64, documents=DOCUMENTS, seq=SEQ, kv_heads=4, value_dim=16, **options):
    inputs = tensors(dtype, kv_heads, value_dim, documents=documents, seq=seq)
    return method, inputs, attended(nn.Module(), inputs, documents, options), documents, options


def assert_same_attention(ranks, cases, tolerance=1e-12):
    for rank, errors in enumerate(run_ranks(ranks, errors_by_case, cases)):
        wrong = {name: error for name, error in errors.items() if not error <= tolerance}
        assert not wrong, f"rank {rank}: {wrong}"


ASKED = {
    "plain": {},
    "window": {"sliding_window": 8},
    "window of one": {"sliding_window": 1},
    "softcap": {"softcap": 1.5},
    "window and softcap": {"sliding_window": 8, "softcap": 1.5},
    "fewer key heads than ranks": {"kv_heads": 1},
    "narrower values": {"value_dim": 8},
    "narrower values and softcap": {"value_dim": 8, "softcap": 1.5, "sliding_window": 8},
    "recomputed": {"recompute": True},
}
# Ranks that have nothing but padding must still take part in the collectives.
LITTLE = {"documents": ((1,), (3,))}


@pytest.mark.ci
@BOTH
@TWO_AND_FOUR
def test_attention_over_ranks_is_that_of_one(method, ranks):
    assert_same_attention(ranks, {name: case(method, **asked) for name, asked in ASKED.items()})


@pytest.mark.ci
@BOTH
def test_ranks_with_padding_alone_take_part(method):
    cases = {name: case(method, **LITTLE, **asked) for name, asked in ASKED.items()}
    again = {"narrower values, recomputed": case(method, **LITTLE, value_dim=8, recompute=True)}
    assert_same_attention(4, cases | again)


@pytest.mark.ci
@BOTH
def test_attention_in_fp32_is_that_of_one_rank(method):
    cases = {name: case(method, dtype=torch.float32, **asked) for name, asked in ASKED.items()}
    assert_same_attention(4, cases, tolerance=2e-6)


@pytest.mark.ci
def test_documents_of_several_blocks_of_queries():
    # Parts of 600 columns, blocks of 512: a rank's queries of a document are several kernel calls.
    long = {"documents": ((2150, 200),), "seq": 2400, "kv_heads": 1}
    cases = {(m, w): case(m, **long, sliding_window=w) for m in METHODS for w in (None, 700)}
    assert_same_attention(2, cases)


def dropped(documents, method):
    """Whether recomputation gives the same bits when half of the weights are dropped."""
    module, seen = nn.Module(), []
    module.context = METHODS[method](here())  # type: ignore[assignment]
    inputs = [
        t[:, :, context.columns(SEQ, here(), method)] for t in tensors(torch.float64, documents=documents)
    ]
    for recompute in (False, True):
        torch.manual_seed(here().index)
        seen.append(attended(module, inputs, documents, {"dropout": 0.5, "recompute": recompute}))
    return all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@BOTH
@pytest.mark.parametrize("documents", [DOCUMENTS, LITTLE["documents"]])
def test_dropout_is_repeated_by_recomputation(documents, method):
    assert all(run_ranks(4, dropped, documents, method))


# Attention on CUDA, with stand-ins for its kernels: which tokens they are given


def flash_forward(q, k, v, ends_q, ends_k, longest_q, longest_k, dropout, **options):
    """Attention as flash-attention documents it: a document's last query stands at its last key."""
    outs, start_q, start_k = [], 0, 0
    left = options.get("window_size_left", -1)
    assert options["is_causal"] == (left < 0) and options.get("window_size_right", 0) == 0
    for stop_q, stop_k in zip(ends_q[1:].tolist(), ends_k[1:].tolist(), strict=True):
        queries, keys = stop_q - start_q, stop_k - start_k
        assert 0 < queries <= longest_q and queries <= keys <= longest_k
        place = torch.arange(keys - queries, keys)[:, None]
        hidden = torch.arange(keys) > place
        if left >= 0:
            hidden |= torch.arange(keys) < place - left
        own_k, own_v = (t[start_k:stop_k].repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start_q:stop_q], own_k) * options["scale"]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, own_v))
        start_q, start_k = stop_q, stop_k
    assert (start_q, start_k) == (len(q), len(k))
    return torch.cat(outs), q.new_zeros(q.shape[1], len(q))


@pytest.mark.ci
@TWO_AND_FOUR
@pytest.mark.parametrize("window", [None, 1, 8])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kernels_of_cuda_are_given_the_keys_that_queries_see(window, ranks, monkeypatch):
    q, k, v, _ = tensors(torch.float64)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(cuda, "compiled_flex", lambda: flex_attention)
    for kernel, softcap in (("varlen", None), ("flex", 1.5)):
        expected = attend_rows(q, k, v, row_boundaries(DOCUMENTS, SEQ), 0.3, 0.0, softcap, window)
        for rank in range(ranks):
            axis = Axis("cp", ranks, rank)
            own = context.columns(SEQ, axis, "allgather")
            run = context.RankDocuments(DOCUMENTS, SEQ // ranks, ranks, rank, {}).run(window)
            found = attend(
                flat(q[:, :, own]).index_select(0, run.queries), *(flat(x)[run.keys] for x in (k, v)),
                run.boundaries, 0.3, 0.0, softcap, window, kernel=kernel,
            )  # fmt: skip
            theirs = expected[:, own].flatten(0, 1)[run.queries]
            torch.testing.assert_close(found, theirs, rtol=0, atol=1e-12, msg=kernel)


# Whole models


def build(family):
    torch.manual_seed(1)
    if family == "granite_swa":  # with attention sinks
        config = GraniteSWAConfig(
            **COMMON, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
        )
    else:
        config = FAMILIES[family]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="meshtune").double().train()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            nn.init.normal_(parameter)
    return model


def one_rank(family):
    """Loss and gradients of the unsharded model with our attention."""
    model = build(family)
    with exact():
        loss = summed_loss(model, anatomy(model), micro_batch(), chunk_tokens=25)
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def each_document_alone(family):
    """The same by Hugging Face's eager attention, without packing or padding."""
    model, batch = build(family), micro_batch()
    model.set_attn_implementation("eager")
    total = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(DOCUMENTS):
        columns = torch.arange(SEQ).split([*lengths, SEQ - sum(lengths)])
        for own in columns[: len(lengths)]:
            logits = model(batch.input_ids[row : row + 1, own], use_cache=False).logits[0]
            total = total + nn.functional.cross_entropy(logits, batch.labels[row, own], reduction="sum")
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters()}


def model_errors(family, runs, expected):
    """(method, recompute) -> relative errors of the loss and of the worst gradient, summed over the ranks."""
    with exact():
        return {run: model_error(family, *run, expected) for run in runs}


def model_error(family, method, recompute, expected):
    model, batch = build(family), context.split(micro_batch(), here(), method)
    parts = anatomy(model)
    context.attach(model, parts, here(), method)
    recompute_blocks(model, parts, recompute)
    loss = summed_loss(model, parts, batch, chunk_tokens=25)
    loss.backward()
    with torch.no_grad():
        assert torch.equal(summed_loss(model, parts, batch, chunk_tokens=25), loss)
    found, loss = {name: p.grad for name, p in model.named_parameters()}, loss.detach()
    for each in (loss, *found.values()):
        dist.all_reduce(each)
    worst = max(float((found[name] - grad).norm() / grad.norm()) for name, grad in expected[1].items())
    return float(abs(loss - expected[0]) / expected[0]), worst


def assert_same_model(ranks, family, expected, loss, gradients, recompute=("none",)):
    runs = [(method, mode) for method in METHODS for mode in recompute]
    for found in run_ranks(ranks, model_errors, family, runs, expected):
        wrong = {run: e for run, e in found.items() if not (e[0] <= loss and e[1] <= gradients)}
        assert not wrong


@TWO_AND_FOUR
@pytest.mark.parametrize(
    "family", cases(["llama", "mistral", "gemma2", "granite_swa"], ci=["gemma2", "granite_swa"])
)
def test_models_have_the_loss_and_gradients_of_one_rank(family, ranks):
    assert_same_model(ranks, family, one_rank(family), 1e-12, 1e-10)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows_and_softcaps_are_those_of_hugging_face(family):
    # eager's softmax is in fp32
    assert_same_model(2, family, each_document_alone(family), 2e-6, 3e-6)


@pytest.mark.ci
def test_recomputation_changes_nothing():
    modes = ("attention", "selective", "linear", "full")
    assert_same_model(2, "gemma2", one_rank("gemma2"), 1e-12, 1e-10, modes)


# Collectives


def collectives(method):
    module = nn.Module()
    module.context = METHODS[method](here())  # type: ignore[assignment]
    inputs = [t[:, :, context.columns(SEQ, here(), method)] for t in tensors(torch.float64)]
    with Collectives() as called:
        attended(module, inputs, DOCUMENTS, {})
    return called.names


def test_keys_and_values_travel_in_one_message_and_their_gradients_in_another():
    for names in run_ranks(2, collectives, "allgather"):
        assert names == ["allgather_base", "reduce_scatter_base"]


def test_ulysses_exchanges_queries_keys_values_and_outputs():
    for names in run_ranks(2, collectives, "ulysses"):
        assert len(names) == 8 and all("alltoall" in name for name in names)
