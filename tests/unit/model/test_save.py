import json
import os

import peft
import pytest
import torch
from families import FAMILIES, FAMILY_CASES, SPARSE
from golden import refuses
from loading import load, resize_embeddings
from model_folders import plain
from test_lora import fill
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

from meshtune.errors import UserError
from meshtune.model.adapter import adapter_base, load_adapter, save_adapter
from meshtune.model.lora import add_lora, merge_lora
from meshtune.model.save import in_pieces, save_model


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_a_saved_model_gives_the_trained_models_logits_in_transformers(family, save, tmp_path, ids):
    model = load(str(save(family)), dtype=torch.float32, attention="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    save_model(tmp_path / "out", model, None)
    assert torch.equal(plain(tmp_path / "out")(ids).logits, model(ids).logits)


def test_a_saved_folder_is_complete_and_names_no_attention_of_ours(save, tokenizer, tmp_path):
    AttentionInterface.register("ours", lambda *args, **kwargs: None)
    model = load(str(save("llama")), dtype=torch.bfloat16, attention="ours")
    resize_embeddings(model, tokenizer)
    save_model(tmp_path / "out", model, tokenizer, card="# A card", max_shard_size="100KB")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "README.md",
    } <= files
    assert "model.safetensors.index.json" in files
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["vocab_size"] == 258
    assert "ours" not in (tmp_path / "out/config.json").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config._attn_implementation == "sdpa"


def test_a_generation_config_that_transformers_refuses_to_save_is_mended(save, tmp_path):
    model = plain(save("llama"))
    model.generation_config.temperature = 0.6  # with do_sample unset, as in Llama 2's
    save_model(tmp_path / "out", model, None)
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["do_sample"] is True


def test_a_saved_model_stops_in_transformers_at_the_token_it_was_taught(save, tmp_path, ids):
    model = plain(save("llama"))
    assert model.generation_config.eos_token_id == 2
    first, second = model.generate(ids[:1], max_new_tokens=2, do_sample=False)[0, -2:].tolist()
    assert first != second
    save_model(tmp_path / "out", model, None, stop_ids=[second, first])
    saved = plain(tmp_path / "out")
    assert saved.config.eos_token_id == second
    assert saved.generation_config.eos_token_id == [second, first, 2]
    assert saved.generate(ids[:1], max_new_tokens=9, do_sample=False)[0, ids.shape[1] :].tolist() == [first]
    save_model(tmp_path / "one", model, None, stop_ids=[2])
    assert plain(tmp_path / "one").generation_config.eos_token_id == 2
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (2, 2)


def test_the_tokens_that_end_an_answer_lie_beside_the_adapter(save, tmp_path):
    model = load(str(save("llama")), dtype=torch.float32, attention="eager")
    add_lora(model, lora_rank=4, alpha=8)
    save_adapter(tmp_path / "out", model, None, base_name="base", lora_rank=4, alpha=8, stop_ids=[7])
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [7, 2]


def test_a_failed_save_leaves_the_old_folder_whole_and_nothing_beside_it(save, tmp_path, monkeypatch):
    model = plain(save("llama"))
    save_model(tmp_path / "all/out", model, None, card="old")
    monkeypatch.setattr(
        type(model), "save_pretrained", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(OSError, match="full"):
        save_model(tmp_path / "all/out", model, None, card="new")
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["out"]
    assert (tmp_path / "all/out/README.md").read_text() == "old"
    plain(tmp_path / "all/out")


def test_a_folder_that_holds_no_model_is_never_replaced(save, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.txt").write_text("x")
    with refuses(UserError):
        save_model(tmp_path / "home", plain(save("llama")), None)
    assert (tmp_path / "home/thesis.txt").exists()


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_peft_we_and_the_merged_folder_give_the_adapted_models_logits(family, save, tmp_path, ids):
    base = save(family)
    model = load(str(base), dtype=torch.float32, attention="eager").eval()
    add_lora(model, lora_rank=4, alpha=8)
    fill(model)
    expected = model(ids).logits
    save_adapter(tmp_path / "adapter", model, None, base_name=str(base), lora_rank=4, alpha=8)
    assert adapter_base(tmp_path / "adapter")["name"] == str(base)
    assert torch.equal(
        peft.PeftModel.from_pretrained(plain(base), tmp_path / "adapter").eval()(ids).logits, expected
    )
    ours = plain(base)
    load_adapter(ours, tmp_path / "adapter")
    assert torch.equal(ours(ids).logits, expected)
    merge_lora(model)
    save_model(tmp_path / "merged", model, None)
    torch.testing.assert_close(plain(tmp_path / "merged")(ids).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_resized_embeddings_travel_with_the_adapter(family, save, tokenizer, tmp_path):
    base, longer = save(family), torch.arange(240, 258)[None]
    model = load(str(base), dtype=torch.float32, attention="eager").eval()
    resize_embeddings(model, tokenizer)
    add_lora(model, lora_rank=4, alpha=8, target_modules=["q_proj"])
    fill(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[256:].normal_()
    expected = model(longer).logits
    save_adapter(
        tmp_path / "adapter", model, tokenizer, base_name=str(base), lora_rank=4, alpha=8, embeddings=True
    )
    ours, reference = plain(base), plain(base)
    load_adapter(ours, tmp_path / "adapter")
    assert torch.equal(ours(longer).logits, expected)
    reference.resize_token_embeddings(len(AutoTokenizer.from_pretrained(tmp_path / "adapter")))
    assert torch.equal(
        peft.PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()(longer).logits, expected
    )


def test_an_adapter_made_by_peft_loads(save, tmp_path, ids):
    base = save("llama")
    reference = peft.get_peft_model(
        plain(base), peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    )
    for name, parameter in reference.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    reference.save_pretrained(tmp_path / "theirs")
    model = plain(base)
    load_adapter(model, tmp_path / "theirs")
    assert torch.equal(model(ids).logits, reference.eval()(ids).logits)


def test_adapters_that_are_more_than_plain_lora_or_a_pickle_are_refused(save, tmp_path):
    base = save("llama")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], alpha_pattern={"q_proj": 3})
    peft.get_peft_model(plain(base), settings).save_pretrained(tmp_path / "pattern")
    with refuses(UserError):
        load_adapter(plain(base), tmp_path / "pattern")
    (tmp_path / "pattern/adapter_model.safetensors").rename(tmp_path / "pattern/adapter_model.bin")
    with refuses(UserError):
        load_adapter(plain(base), tmp_path / "pattern")
    with refuses(UserError):
        load(str(tmp_path / "pattern"), dtype=torch.float32, attention="eager")


def test_files_of_a_model_have_the_mode_that_the_umask_gives(save, tmp_path):
    model = plain(save("llama"))
    old = os.umask(0o027)
    try:
        save_model(tmp_path / "model", model, None)
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert modes and set(modes.values()) == {0o640}, modes


def test_families_whose_files_join_parameters_are_written_by_one_rank():
    def made(config):
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    assert all(in_pieces(made((FAMILIES | SPARSE)[name]())) for name in ("llama", "gpt2", "mixtral"))
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if "sarvam_moe" in CONFIG_MAPPING:  # newer than transformers 5.17
        assert not in_pieces(made(AutoConfig.for_model("sarvam_moe", **small)))
