"""Every recompute mode against `none`: equal results, and evidence of what each keeps and recomputes."""

import copy
import weakref
from collections import Counter

import pytest
import torch
from cases import cases
from families import FAMILIES, RECURRENT
from golden import refuses
from tiny import positions_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from meshtune.attention.register import register
from meshtune.data.boundaries import row_boundaries
from meshtune.experts.products import experts_of
from meshtune.experts.register import use_products
from meshtune.layout import Layout
from meshtune.model.anatomy import anatomy
from meshtune.model.body import ATTENTION_NAMES
from meshtune.model.trace import census
from meshtune.parallel.recompute import recompute_blocks
from meshtune.placement.columns import Columns
from meshtune.plan.memory.activations import saved_by_block
from meshtune.plan.memory.stages import Stages
from meshtune.plan.work import Work

register()

MODES = ("none", "attention", "selective", "linear", "full")
DROPOUT = {
    "llama": {"attention_dropout": 0.1},
    "gemma2": {"attention_dropout": 0.1},
    "phi3": {"resid_pdrop": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1},
}
DOCUMENTS, SEQ, LAYERS = ((13, 5, 20), (40,), (9, 17)), 40, 2


class Watch(TorchDispatchMode):
    """Counts operations, and the bytes of what they made that is still there (views of weights left out)."""

    def __init__(self, model=None):
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()} if model else set()
        self.calls = Counter()
        self.storages = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.weights:
                    self.storages[storage] = storage.nbytes()
        return out

    @property
    def live_bytes(self):
        return sum(self.storages.values())

    @property
    def matmuls(self):
        return self.calls["mm"] + self.calls["addmm"]

    @property
    def cores(self):
        return self.calls["meshtune.attention"]


def build(family, mode, numbers=None, **changes):
    torch.manual_seed(1)
    config = FAMILIES[family](**{"num_hidden_layers": LAYERS} | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="meshtune").train()
    recompute_blocks(model, anatomy(model), mode, numbers)
    return model


def run(model):
    torch.manual_seed(7)
    ids = torch.randint(3, 256, (len(DOCUMENTS), SEQ))
    positions = positions_of(DOCUMENTS, SEQ)
    documents = row_boundaries(DOCUMENTS, SEQ)
    with Watch(model) as forward:
        hidden = model.base_model(
            input_ids=ids, position_ids=positions, documents=documents, use_cache=False
        ).last_hidden_state
    kept = forward.live_bytes
    with Watch() as backward:
        hidden.square().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), grads, kept, backward


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("family", cases(DROPOUT, test=1, ci=1))
def test_every_mode_gives_exactly_the_gradients_of_none(family, mode, dropout):
    changes = DROPOUT[family] if dropout else {}
    hidden, grads, _, _ = run(build(family, "none", **changes))
    own_hidden, own_grads, _, _ = run(build(family, mode, **changes))
    assert torch.equal(hidden, own_hidden)
    assert own_grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.equal(own_grads[name], grad), name


@pytest.mark.parametrize("mode", cases(["selective", "linear", "full"], test=["full"], ci=["selective"]))
def test_experts_of_the_forward_are_those_of_the_backward(mode):
    results = []
    for own in ("none", mode):
        torch.manual_seed(1)
        config = RECURRENT["qwen3_next"](layer_types=["full_attention"] * 2)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="meshtune").train()
        use_products(model)
        recompute_blocks(model, anatomy(model), own)
        results.append(run(model))
    (hidden, grads, _, _), (own_hidden, own_grads, _, _) = results
    assert torch.equal(hidden, own_hidden)
    assert all(torch.equal(own_grads[name], grad) for name, grad in grads.items())

    chosen = []  # of both blocks, then of their recomputation, whose routers see other hidden states
    for module in experts_of(model):
        module.register_forward_pre_hook(lambda _, args: chosen.append(args[1].clone()))
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(lambda _, args: (args[0] * (1 if len(chosen) < LAYERS else -1),))
    run(model)
    assert len(chosen) == 2 * LAYERS
    assert torch.equal(chosen[0], chosen[3]) and torch.equal(chosen[1], chosen[2])


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_mode_repeats_what_it_says_and_no_more(family):
    backward = {mode: run(build(family, mode))[3] for mode in MODES}
    cores = {mode: watch.cores for mode, watch in backward.items()}
    assert cores == {"none": 0, "attention": LAYERS, "selective": 0, "linear": 0, "full": LAYERS}
    none = backward["none"].matmuls
    assert backward["attention"].matmuls == backward["selective"].matmuls == none
    # q, k, v, o, gate, up again; `down` only where a norm after it needs its output (Gemma 2)
    again = LAYERS * (7 if family == "gemma2" else 6)
    assert backward["linear"].matmuls == backward["full"].matmuls == none + again


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["selective", "linear", "full"])
def test_some_blocks_recompute_and_the_others_save_all(mode):
    """The bytes of one block of each kind, from models with all of one kind; the gradients stay."""
    kept = {
        (number, recomputed): run(build("llama", mode, range(recomputed), num_hidden_layers=number))[2]
        for number, recomputed in ((3, 0), (3, 3), (2, 0), (2, 2))
    }
    saving, recomputing = kept[3, 0] - kept[2, 0], kept[3, 3] - kept[2, 2]
    _, grads, all_saved, _ = run(build("llama", "none", num_hidden_layers=3))
    assert kept[3, 0] == all_saved and recomputing < saving
    for recomputed in (1, 2):
        _, own, saved, backward = run(build("llama", mode, range(recomputed), num_hidden_layers=3))
        assert saved == all_saved - recomputed * (saving - recomputing)
        assert backward.cores == (recomputed if mode == "full" else 0)
        assert all(torch.equal(own[name], grad) for name, grad in grads.items())


@pytest.mark.ci
def test_the_planner_counts_what_some_blocks_save_to_the_byte():
    work = Work.of(census(FAMILIES["llama"](num_hidden_layers=3)))
    all_saved = run(build("llama", "none", num_hidden_layers=3))[2]
    for recomputed in (1, 2):
        layouts = Columns.of([Layout.parse(f"full{recomputed}")])
        block = saved_by_block(work.traced[4].kept, work, layouts, len(DOCUMENTS) * SEQ, element=4)
        stages = Stages.cut(work, layouts, "blocks")
        saved = stages.recomputing(layouts) * (block.everything - block.saved)
        own = run(build("llama", "full", range(recomputed), num_hidden_layers=3))[2]
        assert saved[0].tolist() == [all_saved - own]


@pytest.mark.parametrize("family", cases(["llama", "gemma2", "gpt2"], test=1, ci=2))
def test_each_mode_keeps_less_than_the_one_before(family):
    kept = [run(build(family, mode))[2] for mode in MODES]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(MODES)


def test_full_keeps_little_more_than_the_input_of_each_block():
    fewer = run(build("llama", "full"))[2]
    torch.manual_seed(1)
    config = FAMILIES["llama"](num_hidden_layers=LAYERS + 3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="meshtune").train()
    recompute_blocks(model, anatomy(model), "full")
    more = run(model)[2]
    block_input = len(DOCUMENTS) * SEQ * 64 * 4
    assert 3 * block_input <= more - fewer <= 3.1 * block_input


def test_attention_with_dropout_no_longer_keeps_the_scores():
    changes = DROPOUT["llama"]
    none, attention = (run(build("llama", mode, **changes))[2] for mode in ("none", "attention"))
    scores = LAYERS * 4 * 4 * sum(n * n for row in DOCUMENTS for n in row)  # fp32, 4 heads
    assert none - attention > scores


@pytest.mark.ci
@pytest.mark.parametrize("mode", MODES)
def test_names_stay_and_a_deep_copy_runs_its_own_blocks(mode):
    model = build("llama", mode)
    assert list(model.state_dict()) == list(build("llama", "none").state_dict())
    twin = copy.deepcopy(model)
    for parameter in twin.model.layers.parameters():
        torch.nn.init.zeros_(parameter)
    run(twin)
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(run(twin)[0], run(model)[0])


def test_nothing_is_kept_or_repeated_without_gradients():
    model = build("llama", "full")
    with torch.no_grad(), Watch() as watch:
        model.base_model(
            torch.ones(1, 6, dtype=torch.long), documents=((6,),), use_cache=False
        ).last_hidden_state.sum()
    assert watch.matmuls == LAYERS * 7


def test_an_unknown_mode_and_a_foreign_attention_are_refused():
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"](), attn_implementation="sdpa")
    with refuses(ValueError):
        recompute_blocks(model, anatomy(model), "some")  # type: ignore[arg-type]
    with refuses(ValueError):
        recompute_blocks(model, anatomy(model), "attention")


def test_attention_is_a_switch_of_the_implementation_and_can_be_seen():
    assert build("llama", "attention").config._attn_implementation == ATTENTION_NAMES[1]
