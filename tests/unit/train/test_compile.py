"""Blocks that are to be compiled run compiled: a backend counts graphs and their calls."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cases import cases
from graphs import Graphs
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from meshtune import config
from meshtune.api import build
from meshtune.layout import RECOMPUTATIONS
from meshtune.train import loop

Settings = Callable[..., list[str]]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """The backend of every compiled module."""
    counted = Graphs()

    def compile(module: nn.Module) -> None:
        module._compiled_call_impl = torch.compile(module._call_impl, backend=counted)

    torch._dynamo.reset()
    monkeypatch.setattr(nn.Module, "compile", compile)
    yield counted
    torch._dynamo.reset()


def calls_a_micro_batch(words: list[str], graphs: Graphs) -> float:
    run = build.build(config.load(None, ["train.compile=true", *words]))
    loop.train(run)
    return graphs.calls / (run.steps * run.world.layout.gradient_accumulation_steps)


@pytest.mark.parametrize("mode", cases(list(RECOMPUTATIONS), ci=["selective", "full"]))
def test_a_mode_compiles_its_blocks(mode: str, settings: Settings, graphs: Graphs) -> None:
    blocks = 2
    assert calls_a_micro_batch(settings(f"layout={{recompute: {mode}}}"), graphs) == blocks
    assert graphs.made


@pytest.mark.all
def test_generating_at_an_evaluation_leaves_the_compiler_to_training(
    settings: Settings, graphs: Graphs, tiny: Path, tmp_path: Path
) -> None:
    """Ten blocks: with a KV cache a block's number is a constant to the compiler, which makes at most eight
    forms of one function.
    """
    model = AutoConfig.from_pretrained(tiny / "model", num_hidden_layers=10)
    model.save_pretrained(tmp_path / "deep")
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(tmp_path / "deep")
    deep = [f"model.name={tmp_path / 'deep'}", "model.init=random", "train.max_steps=2"]
    plain = calls_a_micro_batch(settings(*deep, f"output={tmp_path / 'plain'}"), graphs)
    torch._dynamo.reset()
    graphs.calls = 0
    answering = ["eval.at_start=true", "eval.every=1", "eval.samples=3", "eval.max_new_tokens=6"]
    assert calls_a_micro_batch(settings(*deep, *answering), graphs) == plain > 0
