"""Merged exports: the base's own dtype, and a card that names the base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from meshtune.api.export import exported
from meshtune.api.resolve import recipe
from meshtune.config import load
from meshtune.train.export import hub_id


@pytest.mark.ci
@pytest.mark.parametrize(
    ("stored", "trained"), [("float16", "fp32"), ("bfloat16", "fp32"), ("float32", "bf16")]
)
def test_a_merge_has_the_dtype_of_the_base(
    stored: str, trained: str, train: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    base, dtype = tmp_path / "base", getattr(torch, stored)
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=dtype)
    model.save_pretrained(base)
    for file in (tiny / "model").glob("*token*"):
        (base / file.name).write_bytes(file.read_bytes())
    run = train(f"model.name={base}", f"train.precision={trained}", "method=lora", "train.learning_rate=1e-2",
                "train.max_steps=2", "lora.modules_to_save=[norm]", "lora.use_rslora=true")  # fmt: skip
    merged = exported(str(run.folder.path), tmp_path / "merged", merge=True, step=None, push_to=None)
    tensors = load_file(merged / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    wide = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(wide, str(run.folder.model)).merge_and_unload()
    for name, tensor in theirs.state_dict().items():
        if name in tensors:  # one rounding, to the nearest
            torch.testing.assert_close(tensors[name], tensor.to(dtype), rtol=0, atol=0)
    assert "base_model: base\n" in (run.folder.model / "README.md").read_text()


def test_a_card_names_the_base_by_its_hub_id() -> None:
    snapshot = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2"
    assert hub_id(snapshot) == "Qwen/Qwen3-0.6B"
    assert hub_id("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("adamw", "adamw, betas (0.9, 0.999), weight decay 0"),
        ("muon", "muon, adamw with betas (0.9, 0.999) for the rest, weight decay 0"),
        ("adafactor", "adafactor, weight decay 0"),
    ],
)
def test_a_card_gives_betas_to_the_optimizer_that_has_them(optimizer: str, said: str) -> None:
    words = ["model.name=x", "data.train=y", f"train.optimizer={optimizer}", "train.weight_decay=0"]
    assert recipe(load(None, words))["optimizer"] == said


@pytest.mark.ci
def test_a_trained_dora_is_merged_as_by_peft(train: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    run = train(f"model.name={tiny / 'model'}", "train.precision=fp32", "method=lora", "lora.use_dora=true",
                "train.learning_rate=1e-2", "train.max_steps=2")  # fmt: skip
    merged = exported(str(run.folder.path), tmp_path / "merged", merge=True, step=None, push_to=None)
    tensors = load_file(merged / "model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    adapter = load_file(run.folder.model / "adapter_model.safetensors")
    assert any(name.endswith(".lora_magnitude_vector") for name in adapter)
    assert "# model, adapted (DoRA)\n" in (run.folder.model / "README.md").read_text()
    theirs = PeftModel.from_pretrained(base, str(run.folder.model)).merge_and_unload()
    for name, tensor in theirs.state_dict().items():
        if name in tensors:
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-5, atol=1e-6)
