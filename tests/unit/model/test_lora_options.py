"""rsLoRA, chosen layers and modules trained whole: peft's forward, gradients, files and names."""

import json

import peft
import pytest
import torch
from families import FAMILY_CASES
from golden import refuses
from model_folders import plain
from safetensors.torch import load_file
from test_lora import fill

from meshtune.errors import UserError
from meshtune.model.adapter import load_adapter, save_adapter
from meshtune.model.lora import add_lora, lora_layers, merge_lora, shortest_endings

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS = {
    "rslora": {"use_rslora": True},
    "layers": {"layers_to_transform": [1]},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head", "model.norm"]},
    "a layer and its block": {"modules_to_save": ["mlp"], "layers_to_transform": [0], "use_rslora": True},
}


def peft_model(folder, **settings):
    return peft.get_peft_model(plain(folder), peft.LoraConfig(r=4, lora_alpha=8, **settings))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]], ids=["all-linear", "some"])
def test_forward_gradients_and_files_equal_peft(options, targets, save, ids, tmp_path):
    folder = save("llama")
    named = LINEAR if targets == "all-linear" else targets  # peft takes no all-linear with chosen layers
    ours, theirs = plain(folder), peft_model(folder, target_modules=named, **options)
    add_lora(ours, lora_rank=4, alpha=8, target_modules=targets, **options)
    fill(ours)
    mirror = dict(theirs.base_model.model.named_parameters())

    def of_peft(name):
        if name.endswith((".lora_A", ".lora_B")):
            return mirror[f"{name}.default.weight"]
        return next(
            p
            for other, p in mirror.items()
            if other.replace(".modules_to_save.default", "") == name and p.requires_grad
        )

    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert len(trained) == sum(p.requires_grad for p in theirs.parameters())
    with torch.no_grad():
        for name, parameter in trained.items():
            if ".lora_" not in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
            of_peft(name).copy_(parameter)
    losses = [model.eval()(ids, labels=ids).loss for model in (ours, theirs)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for name, parameter in trained.items():
        theirs_grad = of_peft(name).grad
        assert (parameter.grad - theirs_grad).norm() <= 2e-6 * theirs_grad.norm(), name

    save_adapter(tmp_path / "ours", ours, None, base_name=str(folder), lora_rank=4, alpha=8, **options)
    theirs.save_pretrained(tmp_path / "theirs")
    files = [load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], tensor) for name, tensor in files[1].items())
    written = [
        json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("ours", "theirs")
    ]
    adapted = {name.split(".lora_")[0].split(".")[-1] for name in files[0] if ".lora_" in name}
    assert set(written[0]["target_modules"]) == set(written[1]["target_modules"]) & adapted == adapted
    for key in ("use_rslora", "layers_to_transform", "r", "lora_alpha"):
        assert written[0][key] == written[1][key]

    logits = ours(ids).logits
    loaded = peft.PeftModel.from_pretrained(plain(folder), tmp_path / "ours").eval()
    assert torch.equal(loaded(ids).logits, logits)
    for side in ("ours", "theirs"):
        again = plain(folder)
        load_adapter(again, tmp_path / side)
        assert torch.equal(again(ids).logits, logits)
        exact = again.double()(ids).logits  # merging rounds each weight, so it is compared in fp64
        merge_lora(again)
        torch.testing.assert_close(again(ids).logits, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("named", ["embed_tokens", "lm_head"])
def test_a_tied_embedding_and_head_are_trained_as_one_as_by_peft(named, save, ids, tmp_path):
    folder = save("qwen2")
    tied = {"target_modules": LINEAR, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    ours, theirs = plain(folder), peft_model(folder, **tied).eval()
    options = {"lora_rank": 4, "alpha": 8, "modules_to_save": [named]}
    add_lora(ours, **options)
    copy = theirs.base_model.model.model.embed_tokens.modules_to_save["default"].weight
    with torch.no_grad():
        ours.lm_head.weight.add_(0.05 * torch.randn_like(ours.lm_head.weight))
        copy.copy_(ours.lm_head.weight)
    for model in (ours, theirs):
        model(ids, labels=ids).loss.backward()
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    torch.testing.assert_close(ours.lm_head.weight.grad, copy.grad)

    fill(ours)
    expected = ours(ids).logits
    save_adapter(tmp_path / "ours", ours, None, base_name=str(folder), **options)
    loaded = peft.PeftModel.from_pretrained(plain(folder), tmp_path / "ours").eval()
    assert torch.equal(loaded(ids).logits, expected)
    again = plain(folder)
    load_adapter(again, tmp_path / "ours")
    assert torch.equal(again(ids).logits, expected) and again.config.tie_word_embeddings


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_target_modules_are_as_short_as_peft_writes_them(family, save, tmp_path):
    folder = save(family)
    model = plain(folder)
    add_lora(model, lora_rank=4, alpha=8)
    save_adapter(tmp_path / "ours", model, None, base_name=str(folder), lora_rank=4, alpha=8)
    peft_model(folder, target_modules="all-linear").save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        json.loads((tmp_path / side / "adapter_config.json").read_text())["target_modules"]
        for side in ("ours", "theirs")
    )
    assert len(ours) <= len(theirs) and max(map(len, ours)) <= max(map(len, theirs))


def test_an_ending_means_no_other_module(save, tmp_path):
    names = ["m.layers.1.attn.q", "m.layers.11.attn.q", "m.head"]
    every = [*names, "m.layers.2.attn.q", "tower.layers.1.attn.q"]
    assert shortest_endings(names[:1], every) == ["m.layers.1.attn.q"]
    assert shortest_endings(names[1:], every) == ["11.attn.q", "head"]
    model = plain(save("llama"))
    chosen = add_lora(model, lora_rank=2, alpha=4, target_modules=["layers.1.self_attn.q_proj", "v_proj"])
    save_adapter(tmp_path / "a", model, None, base_name="b", lora_rank=2, alpha=4)
    written = json.loads((tmp_path / "a/adapter_config.json").read_text())["target_modules"]
    assert written == ["1.self_attn.q_proj", "v_proj"]
    again = plain(save("llama"))
    assert add_lora(again, lora_rank=2, alpha=4, target_modules=written) == chosen


@pytest.mark.parametrize(
    "pattern", [r"model.layers.[\d]+.(mlp|self_attn).(up|down|q|v)_proj", r"model\.layers\.1\..*k_proj"]
)
def test_a_regular_expression_means_the_layers_that_peft_finds(pattern, save):
    names = add_lora(plain(save("llama")), lora_rank=2, alpha=4, target_modules=[pattern])
    theirs = peft_model(save("llama"), target_modules=pattern)
    assert names == [
        name.removeprefix("base_model.model.")
        for name, module in theirs.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    ]


def test_rslora_does_not_fall_with_the_rank(save):
    model = plain(save("llama"))
    add_lora(model, lora_rank=16, alpha=8, use_rslora=True)
    assert {layer.lora_scale for layer in lora_layers(model).values()} == {2.0}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"layers_to_transform": [0, 7]}),
        ("llama", {"layers_to_transform": [0], "target_modules": ["lm_head"]}),
        ("llama", {"target_modules": ["mlp.(up|down)_proj"]}),
        ("llama", {"modules_to_save": ["embed_token"]}),
        ("llama", {"modules_to_save": ["rotary_emb"]}),
        ("qwen2", {"target_modules": ["lm_head"]}),
    ],
)  # fmt: skip
def test_what_can_not_be_done_is_refused(family, options, save):
    with refuses(UserError):
        add_lora(plain(save(family)), lora_rank=4, alpha=8, **options)
