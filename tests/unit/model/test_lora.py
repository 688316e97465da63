import copy

import peft
import pytest
import torch
from families import FAMILY_CASES
from golden import refuses
from model_folders import plain
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshtune.errors import UserError
from meshtune.model.lora import adapt, add_lora, lora_layers, merge_lora


def theirs(folder, **settings):
    return peft.get_peft_model(plain(folder), peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **settings}))


def lora_parameters(model):
    pairs = {}
    for name, layer in lora_layers(model).items():
        pairs |= {f"{name}.lora_A": layer.lora_A, f"{name}.lora_B": layer.lora_B}
    return pairs


def fill(model, generator=None):
    generator = torch.Generator().manual_seed(3)
    for parameter in lora_parameters(model).values():
        with torch.no_grad():
            parameter.normal_(std=0.1, generator=generator)


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_all_linear_adapts_what_peft_adapts(family, save):
    folder = save(family)
    model = plain(folder)
    names = add_lora(model, lora_rank=4, alpha=8, target_modules="all-linear")
    reference = theirs(folder, target_modules="all-linear").base_model.model
    assert set(names) == {name for name, module in reference.named_modules() if hasattr(module, "lora_A")}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == set(lora_parameters(model))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_gradients_and_dropout_equal_peft(family, dtype, save, ids):
    folder = save(family)
    ours, reference = plain(folder, dtype), theirs(folder, target_modules="all-linear", lora_dropout=0.3)
    if dtype != torch.float32:
        reference = peft.get_peft_model(
            plain(folder, dtype),
            peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.3),
        )
    add_lora(ours, lora_rank=4, alpha=8, dropout=0.3)
    fill(ours)
    mirror = dict(reference.base_model.model.named_parameters())
    for name, parameter in lora_parameters(ours).items():
        assert mirror[f"{name}.default.weight"].dtype == parameter.dtype
        mirror[f"{name}.default.weight"].data.copy_(parameter)
    losses = []
    for model in (ours.train(), reference.train()):
        torch.manual_seed(5)
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
    close = 2e-6 if dtype == torch.float32 else 1.5e-2
    torch.testing.assert_close(*losses, rtol=close, atol=0)
    for name, parameter in lora_parameters(ours).items():
        theirs_grad = mirror[f"{name}.default.weight"].grad
        assert (parameter.grad - theirs_grad).norm() <= close * theirs_grad.norm(), name


class Moved(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(
                each.nbytes for each in tree_leaves((args, kwargs, out)) if torch.is_tensor(each)
            )
        return out


def test_an_adapter_moves_170_kb_a_token_around_a_large_matrix():
    moved, tokens = [], 4096
    for adapted in (False, True):
        layer = torch.nn.Linear(4096, 14336, bias=False, device="meta", dtype=torch.bfloat16)
        layer.weight.requires_grad_(False)
        if adapted:
            adapt(layer, 16, 32, dtype=torch.bfloat16)
        x = torch.empty(1, tokens, 4096, device="meta", dtype=torch.bfloat16, requires_grad=True)
        with Moved() as counted:
            layer(x).backward(torch.empty(1, tokens, 14336, device="meta", dtype=torch.bfloat16))
        moved.append(counted.total)
    assert (moved[1] - moved[0]) / tokens < 170e3, "337 kB where the product is scaled and added apart"


def test_a_new_adapter_changes_nothing_and_base_names_stay(save, ids):
    model = plain(save("llama"))
    before, names = model(ids).logits, [name for name, _ in model.named_parameters()]
    add_lora(model, lora_rank=4, alpha=8)
    assert torch.equal(model(ids).logits, before)
    assert [name for name, _ in model.named_parameters() if ".lora_" not in name] == names


def test_a_deep_copy_uses_its_own_adapters(save, ids):
    model = plain(save("llama"))
    add_lora(model, lora_rank=4, alpha=8)
    twin = copy.deepcopy(model)
    before = twin(ids).logits
    fill(model)
    assert torch.equal(twin(ids).logits, before)
    assert not torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_merging_gives_a_plain_model_with_equal_logits(family, save, ids):
    model = plain(save(family)).double()
    add_lora(model, lora_rank=4, alpha=8)
    fill(model)
    before = model(ids).logits
    merge_lora(model)
    assert not lora_parameters(model)
    assert not any("Lora" in type(module).__name__ for module in model.modules())
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-6, atol=1e-6)  # norms compute in fp32


def test_targets_by_ending_and_their_mistakes(save):
    model = plain(save("qwen2"))
    with refuses(UserError) as caught:
        add_lora(model, lora_rank=0, alpha=8, target_modules=["q_prj", "lm_head"])
    assert len(caught.value.problems) == 3
    names = add_lora(model, lora_rank=4, alpha=8, target_modules=["layers.1.self_attn.q_proj", "v_proj"])
    assert names == [
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ]
