"""model.overrides: the values that a config.json takes, and cut models: trained, read again, counted."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from golden import refuses, says
from multimodal import MULTIMODAL
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
)

from meshtune import config
from meshtune.api import build
from meshtune.api.export import exported
from meshtune.api.model_file import model_file
from meshtune.api.resolve import override_sentences
from meshtune.api.target import open_model, target_of
from meshtune.errors import UserError
from meshtune.model.census_cache import numbers_of
from meshtune.model.load import load_config
from meshtune.rundir import RunDir
from meshtune.sections import ModelConfig
from meshtune.train import loop

Settings = Callable[..., list[str]]
QWEN = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300,
}  # fmt: skip
CUT = "model.overrides.num_hidden_layers=2"


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    Qwen3Config(**QWEN).save_pretrained(tmp_path / "qwen")
    return str(tmp_path / "qwen")


@pytest.fixture(scope="module")
def deep(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `tiny`'s tokenizer with a Llama of four blocks."""
    folder = shutil.copytree(tiny / "model", tmp_path_factory.mktemp("deep") / "model")
    torch.manual_seed(1)
    sizes = LlamaConfig.from_pretrained(folder).to_dict() | {"num_hidden_layers": 4}
    LlamaForCausalLM(LlamaConfig.from_dict(sizes)).save_pretrained(folder)
    return folder


def test_a_cut_model_has_its_lists_by_layer_cut_and_this_is_said(qwen: str) -> None:
    cut = load_config(qwen, overrides={"num_hidden_layers": 2})
    assert cut.num_hidden_layers == len(cut.layer_types) == 2
    said = override_sentences(ModelConfig(name=qwen, overrides={"num_hidden_layers": 2}))
    says(said)
    assert override_sentences(ModelConfig(name=qwen)) == ()
    given = {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
    assert load_config(qwen, overrides=given).layer_types == given["layer_types"]


def test_a_part_of_a_configuration_has_its_own_keys_with_dots(tmp_path: Path) -> None:
    Gemma3Config(text_config={"num_hidden_layers": 7, "hidden_size": 64}).save_pretrained(tmp_path)
    for overrides in ({"text_config": {"num_hidden_layers": 3}}, {"text_config.num_hidden_layers": 3}):
        text = load_config(str(tmp_path), overrides=overrides).text_config
        assert (text.num_hidden_layers, text.hidden_size, len(text.layer_types)) == (3, 64, 3)
    with refuses(UserError):
        load_config(str(tmp_path), overrides={"num_hidden_layers": 3})
    words = ["model.name=x", "model.overrides.text_config.num_hidden_layers=3", "model.overrides.a=b"]
    assert config.load(None, words).model.overrides == {"text_config": {"num_hidden_layers": 3}, "a": "b"}


def test_the_usual_name_of_a_key_is_the_family_s_own(tmp_path: Path) -> None:
    GPT2Config(n_layer=4, n_embd=64, n_head=4).save_pretrained(tmp_path)
    for key in ("num_hidden_layers", "n_layer"):
        assert load_config(str(tmp_path), overrides={key: 3}).n_layer == 3


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_hidden_layer": 2},
        {"num_hidden_layers": "two"},
        {"use_cache": 1},
        {"num_hidden_layers": 2.5},
        {"num_hidden_layers": None},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 6},
        {"rope_parameters": {"rope_thet": 1.0}},
        {"sliding_window": 8},
        {"dtype": "float32"},
        {"foo": 1, "model_type": "llama"},
    ],
)  # fmt: skip
def test_a_value_that_the_configuration_can_t_have_is_refused(overrides: dict[str, Any], qwen: str) -> None:
    with refuses(UserError) as refused:
        load_config(qwen, overrides=overrides)
    assert str(refused.value).startswith("model.overrides: ")
    assert len(refused.value.problems) == len(overrides)


def test_rope_takes_keys_that_its_other_types_have(qwen: str) -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    changed = load_config(qwen, overrides={"rope_parameters": rope}).rope_parameters
    assert changed == {"rope_theta": 10000.0, **rope}


def trained(words: list[str]) -> loop.Run:
    run = build.build(config.load(None, words))
    loop.train(run)
    return run


def cut_by_hand(folder: Path, blocks: int) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.layers = model.model.layers[:blocks]
    return model.eval()


@pytest.mark.ci
def test_a_pretrained_model_is_cut_as_by_hand(
    deep: Path, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.tensor([[1, 7, 9, 30, 4]])
    words = [f"model.name={deep}", CUT, "train.max_steps=1", "train.learning_rate=1e-30", "log.to=[console]"]
    run = trained(settings(*words))
    assert "model.overrides changes config.json: num_hidden_layers 4 → 2." in capsys.readouterr().err
    loaded = AutoModelForCausalLM.from_pretrained(run.folder.model, dtype=torch.float32)
    assert loaded.config.num_hidden_layers == len(loaded.model.layers) == 2
    by_hand = cut_by_hand(deep, 2)
    torch.testing.assert_close(loaded(ids).logits, by_hand(ids).logits, rtol=0, atol=1e-6)
    assert loaded(ids).logits.sub(cut_by_hand(deep, 4)(ids).logits).abs().max() > 1e-3
    for step in (None, 1):  # model/ is cut already; the base of a checkpoint is cut again
        opened = open_model(target_of(str(run.folder.path), [], step=step)).model
        opened.set_attn_implementation("sdpa")
        torch.testing.assert_close(opened(ids).logits, by_hand(ids).logits, rtol=0, atol=1e-5)
    with refuses(UserError):
        target_of(str(run.folder.path), ["model.overrides.num_hidden_layers=1"])
    with refuses(UserError):
        build.build(
            config.load(None, settings(*words, "model.overrides.num_hidden_layers=3", "train.max_steps=2"))
        )
    longer = trained(settings(*words, "train.max_steps=2", "output_exists=extend"))
    assert [row["resumed_from"] for row in longer.folder.rows("run")] == [None, 1]


@pytest.mark.ci
def test_a_cut_random_model_trains_and_loads(settings: Settings, deep: Path) -> None:
    run = trained(settings(f"model.name={deep}", CUT, "model.init=random", "train.max_steps=2"))
    loaded = AutoModelForCausalLM.from_pretrained(run.folder.model)
    assert len(loaded.model.layers) == 2 and len(run.folder.rows("train")) == 2
    assert run.folder.rows("run")[0]["parameters"] == loaded.num_parameters()
    written = yaml.safe_load(run.folder.config_file.read_text())
    assert written["model"]["overrides"] == {"num_hidden_layers": 2}
    assert "num_hidden_layers" in (run.folder.model / "README.md").read_text()


@pytest.mark.ci
def test_shapes_that_the_files_do_not_have_are_refused(settings: Settings, deep: Path) -> None:
    words = settings(f"model.name={deep}", "model.overrides.intermediate_size=96")
    with refuses(UserError):
        build.build(config.load(None, words))
    words = settings(f"model.name={deep}", "model.overrides.num_hidden_layers=5")
    with refuses(UserError):
        build.build(config.load(None, words))


@pytest.mark.ci
def test_numbers_of_other_overrides_are_other_ones(settings: Settings, deep: Path) -> None:
    def blocks(*more: str) -> int:
        return numbers_of(config.load(None, settings(f"model.name={deep}", *more))).traits.blocks

    assert [blocks(), blocks(CUT), blocks(), blocks("model.overrides.num_hidden_layers=3"), blocks(CUT)] == [
        4, 2, 4, 3, 2
    ]  # fmt: skip
    known = config.load(None, settings("model.name=llama-3.1-8b", "model.overrides.num_hidden_layers=1"))
    with model_file(known.model.name) as (file, _):
        numbers = numbers_of(known, file=file)
    says(numbers.changes[0])
    assert numbers.traits.blocks == 1


@pytest.mark.ci
def test_the_text_part_of_a_model_that_also_sees_is_cut_as_by_hand(
    settings: Settings, tiny: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny / "model", tmp_path / "gemma3", ignore=shutil.ignore_patterns("*model*"))
    AutoModelForMultimodalLM.from_config(MULTIMODAL["gemma3"](vocab_size=300)).save_pretrained(folder)
    cut = "model.overrides.text_config.num_hidden_layers=1"
    run = trained(settings(f"model.name={folder}", cut, "train.max_steps=1", "train.learning_rate=1e-30"))
    loaded = AutoModelForMultimodalLM.from_pretrained(run.folder.model, dtype=torch.float32)
    by_hand = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)
    by_hand.model.language_model.layers = by_hand.model.language_model.layers[:1]
    ids = torch.tensor([[1, 7, 9, 30, 4]])
    torch.testing.assert_close(loaded(ids).logits, by_hand(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.ci
def test_an_adapter_remembers_that_its_base_was_cut(
    settings: Settings, deep: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    run = trained(settings(f"model.name={deep}", CUT, "method=lora", "train.max_steps=2"))
    alone = exported(run.folder.path, tmp_path / "adapter", merge=False, step=None, push_to=None)
    assert json.loads((alone / "adapter_config.json").read_text())["base_overrides"] == {
        "num_hidden_layers": 2
    }
    assert len(open_model(target_of(str(alone), [])).model.model.layers) == 2  # pyright: ignore
    merged = exported(run.folder.path, tmp_path / "merged", merge=True, step=None, push_to=None)
    assert len(AutoModelForCausalLM.from_pretrained(merged).model.layers) == 2
    peft = pytest.importorskip("peft")
    adapted = peft.PeftModel.from_pretrained(cut_by_hand(deep, 2), alone)
    ids = torch.tensor([[1, 7, 9, 30, 4]])
    expected = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(adapted(ids).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.all
def test_every_command_sees_the_cut(settings: Settings, deep: Path, tmp_path: Path) -> None:
    def answer(command: str, *words: str) -> Any:
        base = settings(
            f"model.name={deep}", CUT, "model.init=random", "train.max_steps=2", "cluster.gpu=h100-sxm"
        )
        ended = subprocess.run(
            [sys.executable, "-m", "meshtune", command, *base, *words], capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        assert "num_hidden_layers 4 → 2" in ended.stdout + ended.stderr
        return json.loads(ended.stdout) if "--json" in words else None

    parameters = LlamaForCausalLM(LlamaConfig.from_pretrained(deep, num_hidden_layers=2)).num_parameters()
    assert answer("plan", "--gpus", "2", "--json")["model"]["parameters"] == parameters
    (rank,) = answer("dryrun", "--layout", "mb4", "--json")["ranks"]
    assert 0 <= rank["steps"][1]["by_category"]["weights"] - 4 * parameters < 1024, "buffers beside them"
    (benched,) = answer("bench", "cluster.gpu=cpu", "--layouts", "mb4", "--steps", "2", "--json")["layouts"]
    assert 0 <= benched["measured"]["memory"]["weights"] - 4 * parameters < 1024
    dry = answer("train", "--dry-run", "--nproc", "1", "layout=mb4", f"output={tmp_path / 'run'}", "--json")
    assert dry["ranks"][0]["steps"][1]["by_category"]["weights"] == rank["steps"][1]["by_category"]["weights"]
    answer("train", "--nproc", "2", "layout=zero3x2-mb2", f"output={tmp_path / 'run'}", "log.to=[console]")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert loaded.num_parameters() == parameters
    (row,) = RunDir(tmp_path / "run").rows("run")
    assert (row["world"], row["nodes"], row["start"], row["parameters"]) == (2, 1, 1, parameters)
