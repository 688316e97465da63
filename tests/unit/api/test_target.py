"""Settings beside a target: those that its weights decide are refused, others are used."""

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
from transformers import AutoModelForCausalLM

from meshtune import config
from meshtune.api.target import open_model, target_of
from meshtune.errors import UserError
from meshtune.model.load import load_tokenizer

Run = Callable[..., Path]


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Run:
    """Function(*overrides, adapter=False) -> a run folder whose model/ is the tiny model, or "an adapter"."""

    def make(*overrides: str, adapter: bool = False) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        if adapter:
            (folder / "model").mkdir()
            (folder / "model" / "adapter_config.json").write_text("{}")
        else:
            (folder / "model").symlink_to(tiny / "model")
        words = [f"model.name={tiny / 'model'}", "train.precision=fp32", *overrides]
        (folder / "config.yaml").write_text(config.load(None, words).to_yaml())
        return folder

    return make


def refused(name: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        target_of(str(name), overrides)
    ending = f" has no effect on {name}: its weights are there already; leave it out."
    assert all(problem.endswith(ending) for problem in error.value.problems)
    return [problem.removesuffix(ending) for problem in error.value.problems]


def test_what_an_adapter_decides_is_refused_at_once(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run("method=lora", "lora.r=8", adapter=True)
    words = ("method=full", "lora.use_dora=false", "lora={r: 4}", "model.init=random", "train.seed=1")
    assert refused(folder, *words) == ["method", "lora.use_dora", "lora.r", "model.init"]
    assert not capsys.readouterr().err
    target = target_of(str(folder), ["model.name=moved/base", "train.device=cpu"])  # its base has moved
    assert target.config.model.name == "moved/base" and target.adapted


def test_what_whole_weights_decide_is_refused_too(run: Run, tiny: Path) -> None:
    words = ("model.name=other", "model.freeze=[embeddings]", "method=lora")
    folder = run()
    for name in (folder, tiny / "model"):
        assert refused(name, *words) == ["model.name", "model.freeze", "method"]
    assert refused(folder, "model.init=random", "model.revision=v2") == ["model.init", "model.revision"]
    untrained = target_of(str(tiny / "model"), ["model.init=random"])
    assert untrained.config.model.init == "random"


def test_a_run_of_whole_weights_needs_no_model_that_it_was_trained_from(run: Run, tmp_path: Path) -> None:
    folder = run(f"model.name={tmp_path / 'gone'}")
    opened = open_model(target_of(str(folder), ["model.attention=eager"]), "cpu")
    assert opened.model.config._attn_implementation == "eager"


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(tiny: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"])
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny / "model"), config)
    adapted.save_pretrained(tmp_path)  # writes none
    opened = open_model(target_of(str(tmp_path), ()), "cpu")
    assert opened.tokenizer.get_vocab() == load_tokenizer(str(tiny / "model")).get_vocab()


def test_a_base_that_a_relative_path_names_is_asked_for(tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "base_model_name_or_path": "../models/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        UserError, match=r"was trained on \.\./models/base, where nothing is now .*model\.name="
    ):
        target_of(str(tmp_path), ())
