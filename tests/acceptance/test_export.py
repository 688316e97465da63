"""Exports, evaluations, answers and reports of a run, checked against transformers and peft."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command import Command
from golden import says
from peft import PeftModel
from tiny import short_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshtune import config
from meshtune.api import build
from meshtune.api.target import open_model, target_of
from meshtune.rundir import RunDir
from meshtune.train import loop

STEPS = 4
LASTING = ("train.learning_rate=1e-2", "train.lr_scheduler=constant")


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`finished("full")`, `finished("lora")`: run folders of four steps with two checkpoints, made once."""
    made: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("runs")

    def of(method: str) -> Path:
        if method not in made:
            words = [
                *short_run(tiny, folder / "cache", folder / method), *LASTING, f"train.max_steps={STEPS}",
                "checkpoint.every=2", f"method={method}", *(["lora.r=4"] if method != "full" else []),
            ]  # fmt: skip
            loop.train(build.build(config.load(None, words)))
            made[method] = folder / method
        return made[method]

    return of


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(torch.arange(3, 60)[None]).logits


def with_peft(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter)
    )


def test_an_export_holds_the_trained_weights(
    meshtune: Command, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    assert meshtune("export", finished("full"), tmp_path / "out").out.strip() == str(tmp_path / "out")
    trained, exported = weights(finished("full") / "model"), weights(tmp_path / "out")
    assert trained.keys() == exported.keys()
    assert all(torch.equal(trained[name], exported[name]) for name in trained)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "</s>"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"with transformers {transformers.__version__} and torch {torch.__version__}" in card


@pytest.mark.ci
def test_a_merged_export_has_the_logits_of_the_adapter_in_peft(
    meshtune: Command, finished: Callable[[str], Path], tiny: Path, tmp_path: Path
) -> None:
    meshtune("export", finished("lora"), tmp_path / "merged", "--merge")
    theirs = logits(with_peft(tiny / "model", finished("lora") / "model"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), theirs, rtol=1e-5, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    assert (logits(base) - theirs).abs().max() > 0.01, "training must show"


@pytest.mark.ci
def test_an_adapter_folder_is_merged_like_its_run(
    meshtune: Command, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    meshtune("export", finished("lora"), tmp_path / "run", "--merge")
    meshtune("export", finished("lora") / "model", tmp_path / "folder", "--merge")
    one, other = weights(tmp_path / "run"), weights(tmp_path / "folder")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.ci
def test_an_adapter_folder_of_qlora_has_its_base_in_4_bits(
    meshtune: Command, finished: Callable[[str], Path], tiny: Path, tmp_path: Path
) -> None:
    run, adapter, merged = finished("qlora"), tmp_path / "adapter", tmp_path / "merged"
    meshtune("export", run, adapter)
    assert "rounding to float32 changes them by 0.00%" in meshtune("export", run, merged, "--merge").err
    words = (f"data.eval={tiny / 'test.jsonl'}", "data.seq_len=128", f"data.cache={tmp_path / 'cache'}")
    ours, *others = (meshtune("eval", path, *words, "--json").json["loss"] for path in (run, adapter, merged))
    assert others == pytest.approx([ours, ours], rel=1e-6)
    models = (open_model(target_of(str(run), each)).model for each in ([], ["train.precision=bf16"]))
    codes = [[tensor for tensor in model.parameters() if tensor.dtype == torch.uint8] for model in models]
    assert codes[0] and all(map(torch.equal, *codes)), "the precision of a command changes no base"
    theirs = logits(with_peft(tiny / "model", adapter))  # on the base in 16 bits
    ours = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    assert 1e-3 < (ours - theirs).norm() / theirs.norm() < 0.3


def test_an_adapter_is_exported_as_it_is(
    meshtune: Command, finished: Callable[[str], Path], tiny: Path, tmp_path: Path
) -> None:
    meshtune("export", finished("lora"), tmp_path / "out")
    ours, exported = finished("lora") / "model", tmp_path / "out"
    assert torch.equal(logits(with_peft(tiny / "model", ours)), logits(with_peft(tiny / "model", exported)))


@pytest.mark.ci
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_step_is_exported_as_a_run_that_ended_there_would_be(
    method: str,
    meshtune: Command,
    finished: Callable[[str], Path],
    train: Callable[..., Any],
    tiny: Path,
    tmp_path: Path,
) -> None:
    meshtune("export", finished(method), tmp_path / "out", "--step", 2)
    lora = ["lora.r=4"] if method == "lora" else []
    short = train("train.max_steps=2", *LASTING, f"method={method}", *lora)
    if method == "full":
        wanted, found = weights(short.folder.model), weights(tmp_path / "out")
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    else:
        one, other = (
            logits(with_peft(tiny / "model", folder)) for folder in (short.folder.model, tmp_path / "out")
        )
        assert torch.equal(one, other)


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    meshtune: Command, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("all of it")
    for words in (
        [finished("full"), taken],
        [finished("full"), tmp_path / "out", "--merge"],
        [finished("full"), tmp_path / "out", "--step", 3],
        [finished("full") / "config.yaml", tmp_path / "out", "--step", 3],
        [tmp_path / "nowhere", tmp_path / "out"],
    ):
        says(meshtune("export", *words, code=2).err)
        assert not (tmp_path / "out").exists()
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_is_evaluated_to_the_loss_it_ended_with(
    method: str, meshtune: Command, finished: Callable[[str], Path]
) -> None:
    ended = meshtune("eval", finished(method), "eval.exact_match=5", "eval.max_new_tokens=4", "--json")
    last = RunDir(finished(method)).rows("eval")[-1]
    assert ended.json["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert ended.json["label_tokens"] == last["label_tokens"]
    assert ended.json["prompts"] == 5
    assert 0 <= ended.json["exact_match"] <= 1


def plain_loss(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Token losses of completions and their end, by transformers alone."""
    total, labels = 0.0, 0
    for row in rows:
        prompt = tokenizer(row["prompt"] + "\n").input_ids
        answer = [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id]
        ids = torch.tensor([prompt + answer])
        marked = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            total += float(model(ids, labels=marked).loss) * len(answer)
        labels += len(answer)
    return total / labels


def test_a_model_and_an_adapter_folder_are_evaluated_like_transformers_does(
    meshtune: Command, finished: Callable[[str], Path], tiny: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (tiny / "test.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    base = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32).eval()
    adapter = finished("lora") / "model"
    for target, model in ((tiny / "model", base), (adapter, with_peft(tiny / "model", adapter).eval())):
        words = [f"data.eval={tiny / 'test.jsonl'}", f"data.cache={tmp_path / 'cache'}", "data.seq_len=512"]
        ended = meshtune("eval", target, *words, "--json")
        assert ended.json["loss"] == pytest.approx(plain_loss(model, tokenizer, rows), rel=1e-5)


def test_nothing_to_evaluate_on_is_said(meshtune: Command, tiny: Path) -> None:
    assert "data.eval=" in meshtune("eval", tiny / "model", code=2).err


@pytest.mark.ci
@pytest.mark.parametrize("method", ["full", "lora", "adapter"])
def test_a_run_and_an_adapter_answer_as_transformers_generates(
    method: str, meshtune: Command, finished: Callable[[str], Path], tiny: Path
) -> None:
    run = finished("full" if method == "full" else "lora")
    prompts = ["Say red 7", "Say window 12 please please"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    ended = meshtune(
        "generate", run / "model" if method == "adapter" else run, *words, "--max-new-tokens", 8, "--json"
    )
    assert [row["prompt"] for row in ended.json] == prompts
    model = (
        AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
        if method == "full"
        else with_peft(tiny / "model", run / "model")
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny / "model")
    for row in ended.json:
        ids = tokenizer(row["prompt"] + "\n", return_tensors="pt").input_ids
        made = model.eval().generate(
            input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert row["answer"] == tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_environment_says_what_a_family_supports(meshtune: Command, tiny: Path) -> None:
    ended = meshtune("env", "--json", "--model", tiny / "model")
    assert ended.json["type"] == "llama"
    assert ended.json["versions"]["torch"] == torch.__version__
    supported = {row["feature"]: row["supported"] for row in ended.json["features"]}
    assert supported["training"]
    assert supported["packing"]
    assert supported["lora"]
    meshtune("env")


@pytest.mark.ci
def test_a_report_is_written_again(meshtune: Command, finished: Callable[[str], Path]) -> None:
    page = finished("full") / "report.html"
    page.unlink(missing_ok=True)
    assert meshtune("report", finished("full")).out.strip() == str(page)
    assert "<html" in page.read_text()[:500].lower()


def test_a_report_of_nothing_is_refused(meshtune: Command, tmp_path: Path) -> None:
    assert "nowhere" in meshtune("report", tmp_path / "nowhere", code=2).err
    assert not os.path.exists(tmp_path / "nowhere")
