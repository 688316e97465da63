"""Bases that moved, or hold other weights than those that an adapter or a checkpoint was trained on."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from golden import refuses
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from meshtune import config
from meshtune.api import build
from meshtune.api.export import exported
from meshtune.api.output import check_base, choose_folder
from meshtune.api.target import open_model, target_of
from meshtune.errors import UserError
from meshtune.model import files
from meshtune.model.adapter import digest_of_base
from meshtune.model.files import weight_files
from meshtune.model.stored import digest
from meshtune.train import loop

LORA = ("method=lora", "train.max_steps=2", "checkpoint.every=2", "data.eval=null")


@pytest.fixture
def project(tiny: Path, tmp_path: Path) -> Any:
    """A folder with a base, rows and a finished LoRA run; and a function that makes the run longer."""
    folder = tmp_path / "project"
    shutil.copytree(tiny / "model", folder / "base")
    shutil.copy(tiny / "train.jsonl", folder)

    def train(*words: str, at: Path = folder) -> None:
        paths = (f"model.name={at / 'base'}", f"data.train={at / 'train.jsonl'}", f"output={at / 'run'}")
        short = ("data.seq_len=128", "train.global_batch_size=4", "train.precision=fp32", "log.to=[jsonl]")
        settings = config.load(None, [*paths, *short, f"data.cache={tmp_path / 'cache'}", *LORA, *words])
        loop.train(build.build(settings))

    train()
    return SimpleNamespace(folder=folder, base=folder / "base", run=folder / "run", train=train)


def change_weights(base: Path) -> None:
    file = base / "model.safetensors"
    save_file({name: t + 0.01 for name, t in load_file(file).items()}, file, {"format": "pt"})


def test_other_weights_at_the_path_of_a_base_are_refused(project: Any, tmp_path: Path) -> None:
    adapter = shutil.copytree(project.run / "model", tmp_path / "adapter")
    assert digest_of_base(adapter) == digest(weight_files(project.base), tmp_path / "cache")
    before = shutil.copytree(project.base, tmp_path / "before")
    change_weights(project.base)
    for name, step in ((project.run, None), (project.run, 2), (adapter, None)):
        with refuses(UserError):
            exported(name, tmp_path / "merged", merge=True, step=step, push_to=None)
    with refuses(UserError):
        project.train("train.max_steps=3")
    project.train("train.max_steps=3", f"model.name={before}")  # what the sentence asks for
    project.train("train.max_steps=3", "method=full", "checkpoint.resume=never", "output_exists=replace")


@pytest.mark.ci
def test_a_run_of_before_and_another_base_that_is_named_are_used(
    project: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_weights(shutil.copytree(project.base, tmp_path / "other"))
    target = target_of(str(project.run), [f"model.name={tmp_path / 'other'}", "train.device=cpu"])
    capsys.readouterr()
    open_model(target)
    assert "was trained on other weights" in capsys.readouterr().err
    rows = project.run / "metrics.jsonl"
    rows.write_text(rows.read_text().replace("base_digest", "of_no_meaning"))
    change_weights(project.base)
    project.train("train.max_steps=3")


def test_a_base_that_moved_is_asked_for_and_the_setting_works(project: Any, tmp_path: Path) -> None:
    adapter = shutil.copytree(project.run / "model", tmp_path / "adapter")
    moved = project.base.rename(tmp_path / "moved")
    for name in (project.run, adapter):
        with refuses(UserError):
            target_of(str(name), ["train.device=cpu"])
        to = tmp_path / f"merged-{name.name}"
        exported(name, to, merge=True, step=None, push_to=None, overrides=[f"model.name={moved}"])
        ids = torch.tensor([[1, 7, 9, 30, 4]])
        reference = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moved), adapter)
        merged = AutoModelForCausalLM.from_pretrained(to)
        torch.testing.assert_close(merged(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-4)
    with refuses(UserError):
        exported(
            adapter, tmp_path / "x", merge=True, step=None, push_to=None, overrides=["train.precision=fp32"]
        )
    project.train("train.max_steps=3", f"model.name={moved}")  # the same run


@pytest.mark.ci
def test_a_project_that_moved_as_a_whole_goes_on(project: Any, tmp_path: Path) -> None:
    there = project.folder.rename(tmp_path / "elsewhere")
    exported(there / "run", tmp_path / "merged", merge=True, step=None, push_to=None)
    project.train("train.max_steps=3", at=there)
    steps = [line for line in (there / "run/metrics.jsonl").read_text().splitlines() if '"train"' in line]
    assert len(steps) == 3


def test_the_digest_is_of_all_weights_and_not_of_their_files(tiny: Path, tmp_path: Path) -> None:
    def digest_of(folder: Path) -> str:
        return digest(weight_files(folder), tmp_path / "cache")

    whole = digest_of(tiny / "model")
    AutoModelForCausalLM.from_pretrained(tiny / "model").save_pretrained(
        tmp_path / "m", max_shard_size="99KB"
    )
    assert len(weight_files(tmp_path / "m")) > 1 and digest_of(tmp_path / "m") == whole
    file = shutil.copytree(tiny / "model", tmp_path / "other") / "model.safetensors"
    assert digest_of(tmp_path / "other") == whole
    tensors = load_file(file)
    next(iter(tensors.values())).flatten()[77] += 1  # one element
    save_file(tensors, file, {"format": "pt"})
    assert digest_of(tmp_path / "other") != whole


def test_nothing_is_downloaded_to_compare_another_name(
    project: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(name: str, *, local_files_only: bool = False, **_: Any) -> str:
        assert local_files_only
        raise OSError("not here")

    monkeypatch.setattr(files, "snapshot_download", download)
    settings = config.load(project.run / "config.yaml", ["model.name=org/same"])
    with refuses(UserError):
        choose_folder(settings, 2, print, download=False)
    check_base(settings, digest_of_base(project.run / "model"), "runs/x", named=False, download=False)
    assert "org/same are not on this machine: whether runs/x was" in capsys.readouterr().err
