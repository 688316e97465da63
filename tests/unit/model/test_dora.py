"""DoRA: peft's forward, gradients, dropout, files and merges."""

import json

import peft
import pytest
import torch
from golden import refuses
from model_folders import plain
from safetensors.torch import load_file, save_file

from meshtune.errors import UserError
from meshtune.model.adapter import load_adapter, save_adapter
from meshtune.model.lora import add_lora, initial_magnitude, lora_layers, merge_lora
from meshtune.model.trace import census_of

OPTIONS = {
    "plain": ("llama", {}),
    "of GPT-2, rslora": ("gpt2", {"use_rslora": True}),
    "with biases, chosen layers": ("qwen2", {"layers_to_transform": [1]}),
}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"]}


def pair(family, folder, dtype=torch.float64, dropout=0.0, **options):
    """Return (our model, peft's), with equal adapters that are not at their start."""
    ours, targets = plain(folder, dtype), TARGETS.get(family, LINEAR)
    add_lora(ours, lora_rank=4, alpha=8, dropout=dropout, target_modules=targets, use_dora=True, **options)
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets, use_dora=True, **options
    )
    theirs = peft.get_peft_model(plain(folder, dtype), settings)
    mirror, generator = dict(theirs.named_parameters()), torch.Generator().manual_seed(3)
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    pairs = {name: (p, mirror[f"base_model.model.{name}.default.weight"]) for name, p in trained.items()}
    assert len(pairs) == sum(p.requires_grad for p in theirs.parameters())
    with torch.no_grad():
        for name, (own, other) in pairs.items():
            assert own.shape == other.shape and own.dtype == other.dtype
            if name.endswith("magnitude_vector"):  # the norms of W at first
                torch.testing.assert_close(own, other)
            own.add_(0.1 * torch.randn(own.shape, generator=generator, dtype=dtype))
            other.copy_(own)
    return ours, theirs, pairs


@pytest.mark.parametrize(("family", "options"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_loss_and_gradients_equal_peft(family, options, dropout, save, ids):
    ours, theirs, pairs = pair(family, save(family), dropout=dropout, **options)
    losses = []
    for model in (ours.train(), theirs.train()):
        torch.manual_seed(5)
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for name, (own, other) in pairs.items():
        assert own.grad.abs().max() > 0, name
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.ci
@pytest.mark.parametrize(("family", "options"), OPTIONS.values(), ids=OPTIONS)
def test_files_and_merges_equal_peft(family, options, save, ids, tmp_path):
    folder = save(family)
    ours, theirs, _ = pair(family, folder, torch.float32, **options)
    save_adapter(
        tmp_path / "ours", ours, None, base_name=str(folder), lora_rank=4, alpha=8, use_dora=True, **options
    )
    theirs.save_pretrained(tmp_path / "theirs")
    files = [load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], tensor) for name, tensor in files[1].items())
    assert any(name.endswith(".lora_magnitude_vector") for name in files[0])
    assert json.loads((tmp_path / "ours/adapter_config.json").read_text())["use_dora"] is True

    logits = ours.eval()(ids).logits
    loaded = peft.PeftModel.from_pretrained(plain(folder), tmp_path / "ours").eval()
    torch.testing.assert_close(loaded(ids).logits, logits, rtol=1e-5, atol=1e-5)
    merged = loaded.merge_and_unload()
    for side in ("ours", "theirs"):
        again = plain(folder)
        load_adapter(again, tmp_path / side)
        assert torch.equal(again(ids).logits, logits)
    merge_lora(again)
    weights = again.state_dict()
    assert weights.keys() == merged.state_dict().keys()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-7)


def test_magnitudes_that_are_missing_or_would_not_be_used_are_refused(save, tmp_path):
    ours, folder = plain(save("llama")), tmp_path / "adapter"
    add_lora(ours, lora_rank=4, alpha=8, target_modules=["q_proj"], use_dora=True)
    save_adapter(folder, ours, None, base_name="base", lora_rank=4, alpha=8, use_dora=True)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    one, *others = (name for name in tensors if name.endswith("magnitude_vector"))

    save_file({name: tensor for name, tensor in tensors.items() if name != one}, weights)
    with refuses(UserError) as error:
        load_adapter(plain(save("llama")), folder)
    assert error.value.problems == (f"{folder} lacks {one.removeprefix('base_model.model.')}.",)

    save_file(tensors, weights)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": False}))
    with refuses(UserError) as error:
        load_adapter(plain(save("llama")), folder)
    assert len(error.value.problems) == 1 + len(others)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_magnitude_changes_nothing(family, dtype, save, ids):
    model = plain(save(family), dtype)
    before = model(ids).logits
    add_lora(model, lora_rank=4, alpha=8, use_dora=True, dtype=dtype)
    assert torch.equal(model(ids).logits, before)


def test_rows_of_added_tokens_have_the_norm_of_the_mean_row(save):
    model = plain(save("llama"))
    add_lora(model, lora_rank=4, alpha=8, target_modules=["lm_head"], use_dora=True)
    (layer,) = lora_layers(model).values()
    rows = layer.weight.detach()[:-3]
    magnitude = initial_magnitude(layer, rows)
    torch.testing.assert_close(magnitude[-3:], rows.mean(0).norm().expand(3))
    torch.testing.assert_close(magnitude[:-3], rows.norm(dim=1))


@pytest.mark.ci
def test_a_census_counts_the_magnitudes(save):
    plain_lora, dora = plain(save("llama")), plain(save("llama"))
    add_lora(plain_lora, lora_rank=4, alpha=8)
    add_lora(dora, lora_rank=4, alpha=8, use_dora=True)
    rows = sum(len(layer.lora_B) for layer in lora_layers(dora).values())
    counts = [census_of(model).parameters["adapter"].count for model in (plain_lora, dora)]
    assert counts[1] == counts[0] + rows
