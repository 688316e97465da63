"""Tensor and sequence parallelism against the same model on one rank: the loss and every gradient."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import cases
from collectives import Collectives
from families import COMMON, FAMILIES, SPARSE, exact
from forward import summed_loss
from golden import refuses, says
from ranks import run_ranks
from tiny import packed
from transformers import AutoConfig, AutoModelForCausalLM, GraniteSWAConfig

from meshtune.attention.register import register
from meshtune.data.batch import MicroBatch
from meshtune.errors import UserError
from meshtune.model.anatomy import anatomy
from meshtune.model.lora import add_lora
from meshtune.parallel.mesh import Axis
from meshtune.parallel.recompute import recompute_blocks
from meshtune.parallel.tensor import reduce_partial, split_model, vocabulary_of
from meshtune.placement.split import Split, piece

register()

DOCUMENTS, SEQ = ((13, 5, 20), (38,), (9, 17)), 40


def micro_batch():
    """Packed rows with padding, and very unequal labels: all, few, one."""
    return packed(DOCUMENTS, SEQ, [1.0, 0.1, 0.0], vocabulary=250)


def build(config, dtype=torch.float64, lora=None):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="meshtune", experts_implementation="eager"
    ).to(dtype)
    for name, parameter in model.named_parameters():  # norms and biases that show when they are wrong
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0 if "bias" in name else 1, 0.2)
    if lora is not None:
        add_lora(model, lora_rank=4, alpha=8, dtype=dtype, **lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    return model.train()


def tensor_axis():
    return Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def reference(config, lora=None):
    """The loss with all logits at once and torch's cross entropy, and the gradients by name."""
    model, batch = build(config, lora=lora), micro_batch()
    inputs = {"position_ids": batch.position_ids, "documents": DOCUMENTS, "use_cache": False}
    with exact():
        logits = model(batch.input_ids, **inputs).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return loss.detach(), {name: p.grad for name, p in named if p.grad is not None}


def own_piece(whole, split, tp):
    """The part of a whole tensor that this rank has. Fused projections divide evenly."""
    if split.dim is None:
        return whole
    parts = whole.split(list(split.parts or (whole.shape[split.dim],)), split.dim)
    return torch.cat([part.narrow(split.dim, *span(part.shape[split.dim], tp)) for part in parts], split.dim)


def span(size, tp):
    start, stop = piece(size, tp.size, tp.index)
    return start, stop - start


def differences(config, expected, lora, recompute):
    """On one rank, without and with sp: the loss, its relative error and that of each gradient's piece."""
    with exact():
        return [difference(config, expected, lora, recompute, sequence) for sequence in (False, True)]


def difference(config, expected, lora, recompute, sequence):
    loss_expected, gradients = expected
    model, tp = build(config, lora=lora), tensor_axis()
    parts = anatomy(model)
    splits = split_model(model, parts, tp, sequence=sequence)
    recompute_blocks(model, parts, recompute)
    loss = summed_loss(model, parts, micro_batch(), chunk_tokens=25)
    loss.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    reduce_partial([grad for name, grad in trained.items() if splits[name].partial], tp)
    assert {name for name, p in named.items() if p.grad is not None} == set(gradients)
    errors = {
        name: float((named[name].grad - own_piece(whole, splits[name], tp)).norm() / whole.norm())
        for name, whole in gradients.items()
    }
    with torch.no_grad():
        assert torch.equal(summed_loss(model, parts, micro_batch(), chunk_tokens=25), loss)
    return float(loss), float(abs(loss - loss_expected) / loss_expected), errors


def assert_same(ranks, config, lora=None, recompute="none"):
    expected = reference(config, lora)
    for each in zip(*run_ranks(ranks, differences, config, expected, lora, recompute), strict=True):
        assert len({loss for loss, _, _ in each}) == 1, "ranks have other losses"
        assert max(error for _, error, _ in each) <= 1e-12
        wrong = {name: error for *_, errors in each for name, error in errors.items() if not error <= 1e-10}
        assert not wrong


TENSOR_FAMILIES = [family for family in FAMILIES if family != "gpt2"]


@pytest.mark.parametrize("family", cases(TENSOR_FAMILIES, test=["gemma3", "phi3"], ci=["llama", "gpt_neox"]))
def test_two_ranks_give_the_loss_and_gradients_of_one(family):
    assert_same(2, FAMILIES[family]())


OTHERS = {
    "fewer_heads_than_ranks": lambda: FAMILIES["llama"](vocab_size=250, attention_bias=True),
    "fewer_normed_heads_than_ranks": lambda: FAMILIES["qwen3"](vocab_size=250),
    "whole_heads": lambda: FAMILIES["phi3"](vocab_size=250, tie_word_embeddings=True),
    "sinks": lambda: GraniteSWAConfig(
        **COMMON | {"vocab_size": 250, "num_key_value_heads": 4},
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "padding_on_the_last_rank": lambda: FAMILIES["gemma3"](vocab_size=250, pad_token_id=249),
}


@pytest.mark.parametrize("family", cases(SPARSE, test=["deepseek_v3"], ci=["gpt_oss", "youtu"]))
def test_latents_and_experts_have_the_loss_and_gradients_of_one_rank(family):
    assert_same(2, SPARSE[family](vocab_size=250))


@pytest.mark.ci
def test_adapters_next_to_experts_have_the_gradients_of_one_rank():
    assert_same(2, SPARSE["deepseek_v2"](vocab_size=250), lora={}, recompute="selective")


def of_odd_rows(config):
    """Relative errors of a mixture's gradients on rows of 39 tokens, without sp."""
    odd, gradients = packed(DOCUMENTS, 39, [1.0, 0.1, 0.0], vocabulary=250), []
    for tp in (Axis("tp", 1), tensor_axis()):
        model = build(config)
        splits = split_model(model, anatomy(model), tp, sequence=False)
        with exact():
            summed_loss(model, anatomy(model), odd).backward()
        named = {name: p.grad for name, p in model.named_parameters() if ".mlp." in name}
        reduce_partial([grad for name, grad in named.items() if splits[name].partial], tp)
        gradients.append(named)
    one, two = gradients
    return {name: float((one[name] - two[name]).norm() / one[name].norm()) for name in one}


@pytest.mark.ci
def test_rows_that_tp_does_not_divide_are_shared_out_to_experts():
    for errors in run_ranks(2, of_odd_rows, SPARSE["mixtral"](vocab_size=250)):
        assert len(errors) == 2 * 3 and max(errors.values()) < 1e-10


@pytest.mark.parametrize("case", cases(OTHERS, ci=["fewer_heads_than_ranks", "sinks"]))
def test_four_ranks_give_the_loss_and_gradients_of_one(case):
    assert_same(4, OTHERS[case]())


@pytest.mark.parametrize("family", cases(["starcoder2", "olmo2", "llama"], ci=["starcoder2"]))
def test_adapters_have_the_gradients_of_one_rank(family):
    targets = ["q_proj", "k_proj", "o_proj", "lm_head", "c_proj" if family == "starcoder2" else "down_proj"]
    if family == "starcoder2":
        targets.remove("lm_head")  # tied
    assert_same(4, FAMILIES[family](), lora={"target_modules": targets})


@pytest.mark.ci
@pytest.mark.parametrize("recompute", ["attention", "selective", "linear", "full"])
def test_recomputed_blocks_give_the_gradients_of_one_rank(recompute):
    assert_same(2, FAMILIES["qwen2"](), recompute=recompute)


SMALL = COMMON | {
    "residual_dropout": 0.0,
    "head_dim": 16,
    "partial_rotary_factor": 1.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}

DENSE_PLANS = [
    "arcee", "cohere2", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "granite", "helium", "hyperclovax",
    "jais2", "nanochat", "olmo", "olmo3", "phi", "seed_oss", "smollm3", "vaultgemma", "cwm", "ministral",
]  # fmt: skip


@pytest.mark.parametrize("model_type", cases(DENSE_PLANS, ci=["glm4", "olmo"]))
def test_other_families_whose_plan_is_dense(model_type):
    known = AutoConfig.for_model(model_type).to_dict()
    changes = {name: value for name, value in SMALL.items() if name in known}
    if "layer_types" in known:
        changes["layer_types"] = ["full_attention"] * 2
    assert_same(4, AutoConfig.for_model(model_type, **changes))


def collectives(config, sequence):
    model, tp = build(config), tensor_axis()
    parts = anatomy(model)
    splits = split_model(model, parts, tp, sequence=sequence)
    with Collectives() as micro:
        summed_loss(model, parts, micro_batch()).backward()
    with Collectives() as step:
        reduce_partial([p.grad for name, p in model.named_parameters() if splits[name].partial], tp)
    return micro.count, step.count


def test_each_part_of_a_block_talks_once_on_entry_and_once_on_exit():
    config = FAMILIES["llama"]()  # 2 blocks of 2 parts, the embedding and the norm: 5 each way, and back
    micro, step = run_ranks(2, collectives, config, True)[0]
    assert micro == {"allgather_base": 10, "reduce_scatter_base": 10, "allreduce": 2}
    assert step == {"allreduce": 1}
    micro, step = run_ranks(2, collectives, config, False)[0]
    assert micro == {"allreduce": 10 + 2}
    assert step == {}


def query_heads(config):
    """Query heads that this rank's attention computes, in the first block."""
    model, tp = build(config), tensor_axis()
    parts = anatomy(model)
    split_model(model, parts, tp, sequence=False)
    attention = model.get_submodule(f"{parts.blocks}.0.{parts.attention}")
    seen = []
    attention.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-1]))
    with torch.no_grad():
        summed_loss(model, parts, micro_batch())
    return seen[0] // attention.head_dim


def test_fused_projections_are_cut_by_head_and_nothing_is_gathered():
    config = FAMILIES["phi3"]()
    micro, _ = run_ranks(2, collectives, config, False)[0]
    assert micro == {"allreduce": 10 + 2}
    assert run_ranks(2, query_heads, config) == [2, 2]  # of 4
    assert run_ranks(4, query_heads, config) == [4] * 4  # 2 key-value heads: every rank has all


def placed(config):
    """On one rank: shapes on meta and of real parameters, and how they are cut."""
    found = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
        parts = anatomy(model)
        splits = split_model(model, parts, tensor_axis(), sequence=True)
        named = dict(model.named_parameters(remove_duplicate=False))
        assert set(named) == set(splits)
        assert all(p.device.type == device and p.is_contiguous() for p in named.values())
        found.append({name: tuple(p.shape) for name, p in named.items()})
        head, embed = (model.get_submodule(path) for path in (parts.head, parts.embed))
        assert head.weight is embed.weight
        vocabulary = vocabulary_of(head)
        assert vocabulary.stop - vocabulary.start == len(head.weight)
    assert found[0] == found[1]
    return found[0], splits


def test_parameters_on_meta_are_cut_like_real_ones_and_tied_ones_stay_one():
    config = FAMILIES["starcoder2"](vocab_size=250)
    ranks = run_ranks(4, placed, config)
    shapes, splits = zip(*ranks, strict=True)
    assert splits[0]["lm_head.weight"] == Split(0)
    assert [each["lm_head.weight"] for each in shapes] == [(63, 64), (63, 64), (63, 64), (61, 64)]
    block = {name.removeprefix("model.layers.0."): split for name, split in splits[0].items()}
    assert block["self_attn.q_proj.weight"] == block["self_attn.q_proj.bias"] == Split(0)
    assert block["self_attn.k_proj.weight"] == block["self_attn.k_proj.bias"] == Split(partial=True)
    assert block["self_attn.o_proj.weight"] == Split(1)
    assert block["self_attn.o_proj.bias"] == block["input_layernorm.weight"] == Split(partial=True)
    assert shapes[0]["model.layers.0.mlp.c_proj.weight"] == (64, 24)


# Dropout: what ranks see alike is masked alike, what each sees alone is not, and recomputation repeats. #


@contextmanager
def recorded():
    """The masks of zeros of each dropout, in the order of the calls."""
    seen, plain = [], F.dropout

    def dropout(x, *args, **kwargs):
        out = plain(x, *args, **kwargs)
        seen.append(((out == 0) & (x != 0)).detach())
        return out

    with patch.object(F, "dropout", dropout):
        yield seen


def masks(config, sequence, lora):
    model, tp = build(config, torch.float32, lora=lora), tensor_axis()
    parts = anatomy(model)
    split_model(model, parts, tp, sequence=sequence)
    recompute_blocks(model, parts, "full")
    torch.manual_seed(11)
    with recorded() as seen:
        loss = summed_loss(model, parts, micro_batch())
        forward = list(seen)
        state = torch.get_rng_state()
        loss.backward()
    assert not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(11).get_state())
    return forward, seen[len(forward) :], state


def alike(forwards):
    """For each dropout: '=' where all ranks drew the same mask, 'x' where none did."""
    kinds = ""
    for calls in zip(*forwards, strict=True):
        same = [torch.equal(calls[0], other) for other in calls[1:]]
        assert all(same) or not any(same)
        kinds += "=" if all(same) else "x"
    return kinds


DROPOUT = {
    # embedding, then by block: LoRA of q, k, v, o; after attention; LoRA of c_fc, c_proj; after mlp
    "starcoder2": (
        {"residual_dropout": 0.3, "embedding_dropout": 0.3},
        "=" + "===x==x=" * 2,
        "x" + "===xx=xx" * 2,
    ),
    # embedding, then by block: LoRA of query_key_value, dense; after attention; LoRA of two of mlp; after mlp
    "gpt_neox": ({"hidden_dropout": 0.3}, "=" + "=x==x=" * 2, "x" + "=xx=xx" * 2),
    # by block: LoRA of q, k, v; the scores of 6 documents and of 3 rows' padding (capped: seen); LoRA of o,
    # gate, up, down
    "gemma2": ({"attention_dropout": 0.3}, ("===" + "x" * 9 + "x==x") * 2, ("===" + "x" * 9 + "x==x") * 2),
    # by block: LoRA of qkv and o; LoRA of gate_up; down; after each
    "phi3": ({"resid_pdrop": 0.3}, "=x==x=" * 2, "=xx=xx" * 2),
}


@pytest.mark.parametrize("family", cases(DROPOUT, ci=["phi3", "starcoder2", "gpt_neox"]))
def test_masks_are_equal_where_activations_are_and_differ_elsewhere(family):
    changes, whole, cut = DROPOUT[family]
    config = FAMILIES[family](**changes)
    for sequence, expected in ((False, whole), (True, cut)):
        forwards, again, states = zip(*run_ranks(2, masks, config, sequence, {"dropout": 0.3}), strict=True)
        assert alike(forwards) == expected
        assert torch.equal(states[0], states[1])
        for forward, repeated in zip(forwards, again, strict=True):
            each = len(expected) // 2
            blocks = forward[-2 * each : -each], forward[-each:]
            again = len(repeated) // 2  # the last block first; what nobody needs at a block's end is left out
            assert again >= each - 1
            assert all(map(torch.equal, blocks[1], repeated[:again]))
            assert all(map(torch.equal, blocks[0], repeated[again:]))
            assert not any(map(torch.equal, *blocks))


# Refusals #


def on_one_of(tp, config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    split_model(model, anatomy(model), Axis("tp", tp), sequence=False)


@pytest.mark.parametrize(
    ("family", "tp", "changes"),
    [
        ("llama", 3, {}),
        ("llama", 4, {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}),
        ("llama", 4, {"intermediate_size": 98}),
        ("llama", 4, {"vocab_size": 6}),
        ("cohere", 2, {"use_qk_norm": True}),
        ("gpt2", 2, {}),
    ],
)
def test_what_can_not_be_cut_is_refused_with_the_remedy(family, tp, changes):
    with refuses(UserError):
        on_one_of(tp, FAMILIES[family](**changes))


def narrow(config):
    model = build(config)
    parts = anatomy(model)
    split_model(model, parts, tensor_axis(), sequence=True)
    batch = micro_batch()
    odd = MicroBatch(
        batch.input_ids[:, :39], batch.labels[:, :39], batch.position_ids[:, :39], DOCUMENTS, 0, 0
    )
    with pytest.raises(ValueError) as refused:
        summed_loss(model, parts, odd)
    return str(refused.value)


def test_rows_that_do_not_divide_are_refused_under_sequence_parallelism():
    for refusal in run_ranks(2, narrow, FAMILIES["llama"]()):
        says(refusal)
