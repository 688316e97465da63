"""Adapters that peft saved: its settings are plain LoRA or refused, and the logits are peft's."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import peft
import pytest
import torch
from golden import refuses
from model_folders import plain
from safetensors.torch import load_file, save_file

from meshtune.errors import UserError
from meshtune.model.adapter import PLAIN_LORA, READ, WITHOUT_EFFECT, adapter_base, extensions_of, load_adapter
from meshtune.model.lora import merge_lora
from meshtune.model.save import save_model

FIELDS = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
# Fields that are refused with any value but null, false, or an empty one.
REFUSED = {
    "rank_pattern", "alpha_pattern", "megatron_config", "trainable_token_indices", "velora_config",
    "alora_invocation_tokens", "use_qalora", "monteclora_config", "layer_replication", "lora_bias",
    "use_bdlora", "arrow_config", "kasa_config",
}  # fmt: skip


def test_every_field_of_the_installed_peft_is_classified():
    classified = READ | WITHOUT_EFFECT | PLAIN_LORA.keys() | REFUSED
    assert FIELDS.keys() <= classified, "decide what a new field of peft does to a loaded adapter"
    assert not REFUSED & (READ | WITHOUT_EFFECT | PLAIN_LORA.keys())
    assert not extensions_of(peft.LoraConfig(base_model_name_or_path="base").to_dict())
    for key in REFUSED:
        assert extensions_of({key: [1]}) == [f"{key}=[1]"]


@pytest.mark.parametrize(("base", "revision"), [("", None), ("org/base", "main")])
def test_a_revision_is_of_a_hub_model(base, revision, tmp_path):
    settings = {"base_model_name_or_path": base or str(tmp_path), "revision": "main"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert adapter_base(tmp_path)["revision"] == revision


HINTS = get_args(get_type_hints(peft.LoraConfig)["init_lora_weights"])
INITIALISATIONS = [value for kind in HINTS for value in get_args(kind)]  # of peft's Literal


def test_initialisations_that_change_the_base_are_refused():
    assert {"gaussian", "pissa", "olora"} <= {*INITIALISATIONS}
    plain_ones = {value for value in INITIALISATIONS if not extensions_of({"init_lora_weights": value})}
    assert plain_ones == {"gaussian", "eva", "orthogonal", "mica"}
    assert not extensions_of({"init_lora_weights": True}) and not extensions_of({"init_lora_weights": False})
    for value in ("lora_ga", "pissa_niter_4", "PiSSA", "of a later peft"):
        assert extensions_of({"init_lora_weights": value})


def made(folder: Path, base: Path, ids: torch.Tensor, rows: int = 0, **settings: Any) -> torch.Tensor:
    """Save a peft adapter with random values; return the logits of what peft loads from it."""
    model = plain(base)
    if rows:
        model.resize_token_embeddings(rows)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(**({"r": 4, "target_modules": ["q_proj"]} | settings))
    )
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    again = plain(base)
    if rows:
        again.resize_token_embeddings(rows, mean_resizing=False)
    return peft.PeftModel.from_pretrained(again, folder).eval()(ids).logits


LIKE_PEFT = {
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "one saved": {"modules_to_save": ["embed_tokens"]},
    "the head saved": {"modules_to_save": ["lm_head"]},
    "both saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "both saved, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "the head adapted": {"target_modules": ["q_proj", "lm_head"]},
    "resized": {"rows": 260},
    "resized and saved": {"rows": 260, "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", LIKE_PEFT.values(), ids=LIKE_PEFT)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_adapter_gives_pefts_logits_and_so_does_its_merged_model(family, settings, save, ids, tmp_path):
    base = save(family)  # qwen2 ties its embeddings
    expected = made(tmp_path / "adapter", base, ids, **settings)
    model = plain(base)
    load_adapter(model, tmp_path / "adapter")
    torch.testing.assert_close(model(ids).logits, expected)
    merge_lora(model)
    save_model(tmp_path / "merged", model, None)
    torch.testing.assert_close(plain(tmp_path / "merged")(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapper", ["modules_to_save.", "modules_to_save.default."])
def test_a_trained_copy_is_read_under_its_wrappers_name(wrapper, save, ids, tmp_path):
    expected = made(tmp_path, base := save("llama"), ids, modules_to_save=["lm_head"])
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("base_model.model.lm_head.weight")
    save_file(tensors | {f"base_model.model.lm_head.{wrapper}weight": head}, file)
    model = plain(base)
    load_adapter(model, tmp_path)
    torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.filterwarnings("ignore")
def test_the_names_of_a_wrapped_models_state_dict_are_read(save, ids, tmp_path):
    expected = made(tmp_path, base := save("llama"), ids, use_dora=True)
    file = tmp_path / "adapter_model.safetensors"

    def wrapped(name):
        name = re.sub(r"(lora_[AB])\.", r"\1.default.", name)
        name = name.replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight")
        return "_orig_mod." + name.replace("layers.0.", "layers.0._fsdp_wrapped_module.")

    save_file({wrapped(name): tensor for name, tensor in load_file(file).items()}, file)
    model = plain(base)
    load_adapter(model, tmp_path)
    torch.testing.assert_close(model(ids).logits, expected)


def with_tensors(change):
    def changed(folder):
        file = folder / "adapter_model.safetensors"
        save_file({name: change(tensor) for name, tensor in load_file(file).items()}, file)

    return changed


def unlike_tables(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    rows = torch.zeros(256, 64)
    tensors |= {
        "base_model.model.lm_head.weight": rows,
        "base_model.model.model.embed_tokens.weight": rows + 1,
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def with_settings(**settings):
    def change(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return change


CHANGES = {
    "unlike tables": unlike_tables,
    "eight bits": with_tensors(lambda tensor: tensor.to(torch.float8_e4m3fn)),
    "not finite": with_tensors(lambda tensor: tensor / 0),
    "ZeRO-3": with_tensors(lambda tensor: tensor.new_empty(0)),
    "no number": with_settings(r="4", lora_alpha=None),
    "pissa": with_settings(init_lora_weights="pissa_niter_16"),
    "replicated layers": with_settings(layer_replication=[[0, 2], [1, 2]]),
    "of a later peft": with_settings(use_newlora={"k": 3}),
    "no saved module": with_settings(modules_to_save=["norm"]),
    "no such module": with_settings(modules_to_save=["lm_hed"]),
    "a pointer": lambda folder: (folder / "adapter_model.safetensors").write_text("version https://git-lfs…"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_adapter_that_is_not_plain_lora_on_its_base_is_refused(change, save, ids, tmp_path):
    base = save("qwen2")
    made(tmp_path / "adapter", base, ids)
    change(tmp_path / "adapter")
    with refuses(UserError):
        load_adapter(plain(base), tmp_path / "adapter")
