"""The numbers of a model, derived once and then read: the same, without torch, and never from a bad file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, FAMILY_CASES
from golden import refuses, says
from huggingface_hub.errors import RemoteEntryNotFoundError
from tiny import make_tokenizer
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig

import meshtune.model.trace
from meshtune import config
from meshtune.errors import UserError
from meshtune.model.capabilities import traits
from meshtune.model.census_cache import LoraShape, Variant, model_numbers, numbers_of
from meshtune.model.hub import hub_errors
from meshtune.model.load import freeze
from meshtune.model.lora import add_lora
from meshtune.model.trace import census, census_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return config_folder(tmp_path / "model", FAMILIES["llama"]())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def config_folder(folder: Path, config) -> Path:
    folder.mkdir(parents=True)
    config.to_json_file(folder / "config.json", use_diff=False)
    return folder


def change(folder: Path, **settings) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def no_trace(monkeypatch) -> None:
    """From here on nothing can be derived."""
    monkeypatch.delattr(meshtune.model.trace, "census_of")


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_what_is_read_is_what_was_derived(family, tmp_path, cache, monkeypatch):
    config = FAMILIES[family]()
    folder = config_folder(tmp_path / family, config)
    first = model_numbers(str(folder), cache_dir=cache)
    no_trace(monkeypatch)
    again = model_numbers(str(folder), cache_dir=cache)
    assert again == first
    assert hash(again) == hash(first)
    assert first.census == census(config)
    assert first.attention == "meshtune"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert first.traits == traits(model)


@pytest.mark.ci
def test_a_family_with_its_own_attention_keeps_it(tmp_path, cache):
    folder = config_folder(
        tmp_path / "bloom", BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=99)
    )
    found = model_numbers(str(folder), cache_dir=cache)
    assert found.attention == "eager"
    assert found.traits.attention == "it computes its attention inside the model"


def test_adapters_and_frozen_parameters_are_the_engines(folder, cache, monkeypatch):
    shape, globs = LoraShape(r=3, target_modules=("q_proj", "mlp.down_proj")), ("*.layers.0.*",)
    first = model_numbers(str(folder), Variant(lora=shape, freeze=globs), cache_dir=cache)
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    add_lora(model, lora_rank=3, alpha=8, target_modules=["q_proj", "mlp.down_proj"])
    freeze(model, globs)
    assert first.census == census_of(model)
    assert first.census.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    no_trace(monkeypatch)
    assert model_numbers(str(folder), Variant(lora=shape, freeze=globs), cache_dir=cache) == first


def test_tokens_of_a_chat_template_make_adapters_train_the_embedding(tmp_path, cache):
    folder = tmp_path / "model"
    tokenizer = make_tokenizer(["plain words"], 280)
    config_folder(folder, LlamaConfig(**FAMILIES["llama"]().to_dict() | {"vocab_size": len(tokenizer)}))

    def numbers(template, *more):
        words = [f"model.name={folder}", f"data.chat_template={template}", f"data.cache={cache}"]
        return numbers_of(config.load(None, [*words, "method=lora", "data.train=rows.jsonl", *more]))

    (note,) = numbers("chatml").changes  # the folder has no tokenizer
    says(note)
    assert numbers("chatml", "lora.modules_to_save=[embed_tokens, lm_head]").changes == ()
    tokenizer.save_pretrained(folder)
    plain, grown = numbers("null"), numbers("chatml")
    assert not grown.changes and grown.census.vocabulary == len(tokenizer) + 2
    ends = 2 * grown.census.vocabulary * grown.census.hidden
    assert grown.census.trainable == plain.census.trainable + ends


@pytest.mark.ci
def test_all_that_decides_the_numbers_is_in_the_key(folder, cache):
    plain = model_numbers(str(folder), cache_dir=cache).census
    assert (
        model_numbers(str(folder), Variant(freeze=("*norm*",)), cache_dir=cache).census.trainable
        < plain.trainable
    )
    shapes = (LoraShape(r=2), LoraShape(r=4))
    adapted = [
        model_numbers(str(folder), Variant(lora=lora), cache_dir=cache).census.trainable for lora in shapes
    ]
    assert adapted[1] == 2 * adapted[0]
    change(folder, num_hidden_layers=3)
    assert len(model_numbers(str(folder), cache_dir=cache).census.blocks) == 3
    assert len(list(cache.iterdir())) == 5


def test_the_order_of_settings_is_not_in_the_key(folder, cache, monkeypatch):
    first = model_numbers(str(folder), cache_dir=cache)
    file = folder / "config.json"
    file.write_text(json.dumps(dict(reversed(json.loads(file.read_text()).items()))))
    no_trace(monkeypatch)
    assert model_numbers(str(folder), cache_dir=cache) == first


def test_a_configuration_file_may_have_any_name_and_place(folder, cache, monkeypatch):
    first = model_numbers(str(folder), cache_dir=cache)
    (folder / "config.json").rename(folder.parent / "eight.json")
    file = str(folder.parent / "eight.json")
    assert model_numbers(file, cache_dir=cache / "other") == first
    no_trace(monkeypatch)
    assert model_numbers(file, cache_dir=cache) == first


@pytest.mark.ci
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1]",
        lambda text: text.replace('"hidden":64', '"hidden":"64"'),
        lambda text: text.replace('"hidden":', '"width":'),
        lambda text: text.replace('"attention":"meshtune"', '"attention":"meshtune","newer":1'),
        lambda text: text.replace('"shape":[64]', '"shape":64'),
        lambda text: text.replace("[2,", "[2,3,"),
        lambda text: "\udcff",
    ],
    ids=range(9),
)
def test_a_damaged_file_is_made_anew(damage, folder, cache):
    first = model_numbers(str(folder), cache_dir=cache)
    (file,) = cache.iterdir()
    text = file.read_text()
    assert damage(text) != text
    file.write_text(damage(text), errors="surrogateescape")
    assert model_numbers(str(folder), cache_dir=cache) == first
    assert file.read_text() == text


def test_a_cache_that_cant_be_written_is_no_error(folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert model_numbers(str(folder), cache_dir=tmp_path / "file").census.hidden == 64


@pytest.mark.ci
def test_the_numbers_of_a_config_are_those_of_its_settings(folder, cache, tmp_path):
    words = [f"model.name={folder}", "model.freeze=['*norm*']", f"data.cache={cache}", "data.train=[missing]"]
    logged: list[str] = []
    plain = numbers_of(config.load(None, words), log=logged.append)
    assert plain == model_numbers(str(folder), Variant(freeze=("*norm*",)), cache_dir=cache)
    says(logged[0])
    assert len(logged) == 1
    lora = numbers_of(config.load(None, [*words, "method=lora", "lora.r=3", "lora.target_modules=[q_proj]"]))
    shape = LoraShape(r=3, target_modules=("q_proj",))
    assert lora == model_numbers(str(folder), Variant(freeze=("*norm*",), lora=shape), cache_dir=cache)


def test_other_versions_derive_anew(folder, cache, monkeypatch):
    model_numbers(str(folder), cache_dir=cache)
    monkeypatch.setattr("meshtune.model.census_cache.version", lambda package: "0")
    model_numbers(str(folder), cache_dir=cache)
    assert len(list(cache.iterdir())) == 2


ASK = """
import sys
from pathlib import Path
from meshtune.model.hub import hub_errors
from meshtune.model.census_cache import LoraShape, Variant, model_numbers
found = model_numbers(sys.argv[1], Variant(lora=LoraShape(r=2)), cache_dir=Path(sys.argv[2]))
assert found.census.blocks and found.traits.heads == 4
print("torch" in sys.modules or "transformers" in sys.modules)
"""


def ask(name: str, cache: Path, **environment: str) -> str:
    command = [sys.executable, "-c", ASK, name, str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return done.stdout.strip()


@pytest.mark.all  # by default, the next test shows it of a model on the hub
def test_a_hit_imports_neither_torch_nor_transformers(folder, cache):
    assert ask(str(folder), cache) == "True"
    assert ask(str(folder), cache) == "False"


@pytest.mark.all
def test_a_hub_id_is_read_from_the_hubs_cache(tmp_path, cache):
    hub, commit = tmp_path / "hub", "0123456789abcdef0123456789abcdef01234567"
    stored = hub / "models--someone--tiny"
    config_folder(stored / "snapshots" / commit, FAMILIES["llama"]())
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    offline = {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    assert ask("someone/tiny", cache, **offline) == "True"
    assert ask("someone/tiny", cache, **offline) == "False"


def test_a_model_with_code_of_its_own_is_derived_each_time(folder, cache):
    first = model_numbers(str(folder), cache_dir=cache)
    change(
        folder,
        model_type="own",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'own'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    found = model_numbers(str(folder), trust_remote_code=True, cache_dir=cache)
    assert found.census.blocks == first.census.blocks
    assert found.census.family == "own"
    assert len(list(cache.iterdir())) == 1


BAD = {
    "has no config.json.*name the folder": None,
    "names no `model_type`.*take the config.json": {"hidden_size": 64},
    "knows no model_type llamma; did you mean llama": {"model_type": "llamma"},
    "is an encoder-decoder": {"model_type": "t5"},
    "not a causal language model": {"model_type": "clip"},
    "can't be trained": {"model_type": "xlnet", "n_layer": 2},
    "Mend its config.json": {"model_type": "llama", "num_hidden_layers": 2, "hidden_act": "zork"},
    "can't read .*config.json": {"model_type": "llama", "num_hidden_layers": "many"},
    "set model.trust_remote_code=true": {"model_type": "zork", "auto_map": {"AutoConfig": "code.Config"}},
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_model_is_explained(message, tmp_path, cache):
    if BAD[message]:
        (tmp_path / "config.json").write_text(json.dumps(BAD[message]))
    with refuses(UserError):
        model_numbers(str(tmp_path), cache_dir=cache)
    assert not cache.exists()


def test_names_of_nothing_and_files_of_something_else_are_explained(tmp_path, cache):
    (tmp_path / "rows.json").write_text("[1, 2]")
    (tmp_path / "torn.json").write_text('{"model_type": ')
    for name in ("./nothing", "nobody/nothing", str(tmp_path / "rows.json"), str(tmp_path / "torn.json")):
        with refuses(UserError):
            model_numbers(name, cache_dir=cache)


def test_a_repository_without_a_configuration_is_explained():
    with (
        refuses(UserError),
        hub_errors("someone/notes"),
    ):
        raise RemoteEntryNotFoundError.__new__(RemoteEntryNotFoundError)


def test_targets_and_globs_that_match_nothing_are_explained(folder, cache):
    with refuses(UserError):
        model_numbers(str(folder), Variant(lora=LoraShape(target_modules=("q_prj",))), cache_dir=cache)
    with refuses(UserError):
        model_numbers(str(folder), Variant(freeze=("*.nrom.*",)), cache_dir=cache)
