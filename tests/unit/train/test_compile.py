"""Blocks that are to be compiled run compiled: a backend counts graphs and their calls."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cases import cases
from graphs import Graphs
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from meshtune import compat, config
from meshtune.api import build, choose
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


@pytest.mark.ci
def test_what_runs_uncompiled_in_compiled_blocks_is_printed(
    settings: Settings, graphs: Graphs, capsys: pytest.CaptureFixture[str]
) -> None:
    for dropout, interrupted in ((0.0, False), (0.1, True)):  # with dropout it runs document by document
        words = settings(f"model.overrides={{attention_dropout: {dropout}}}", "output_exists=replace")
        calls_a_micro_batch(words, graphs)
        printed = " ".join(capsys.readouterr().err.split())
        assert ("parts of the blocks run uncompiled: Skip calling function" in printed) is interrupted


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


@pytest.mark.parametrize(
    ("layout", "torch_version", "found", "why"),
    [
        ("dp2-full-mb1-ga2", "2.13.0", "/usr/bin/cc", ""),
        (
            "dp2-full-mb1-ga2",
            "2.13.0",
            None,
            "triton needs a C compiler, and none of cc, gcc and clang is installed",
        ),
        ("pp2-zb-mb1-ga4", "2.13.0", "/usr/bin/cc", "zero-bubble schedules can't run compiled blocks"),
        ("tp2-mb1-ga4", "2.11.0", None, "torch 2.11.0 gives wrong gradients of compiled blocks under tp"),
    ],
)
def test_auto_compiles_on_cuda_or_says_why_not(
    layout: str, torch_version: str, found: str | None, why: str, settings: Settings,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(compat, "version", lambda _: torch_version)
    monkeypatch.setattr(compat, "find_spec", lambda _: "triton")
    monkeypatch.setattr(compat.shutil, "which", lambda _: found)
    given = config.load(None, settings(f"layout={layout}"))
    assert choose.choose(given, 2).compile is False, "on a processor"
    monkeypatch.setattr(choose, "device_of", lambda _: torch.device("cuda"))
    assert choose.choose(given, 2).compile is (why == "")
    said = " ".join(capsys.readouterr().err.split())
    assert (f"meshtune: The blocks run uncompiled: {why}." in said) is (why != "")
