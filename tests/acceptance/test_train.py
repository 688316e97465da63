"""`meshtune train` as a user runs it: from a config and rows to a model that transformers and peft load."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import Command
from peft import PeftModel
from tiny import write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshtune import config
from meshtune.api import build
from meshtune.rundir import RunDir
from meshtune.train import loop

Settings = Callable[..., list[str]]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in RunDir(run).rows("train")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of GSM8K's tokens, kept between the tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def gsm8k_config(gsm8k: Path, gsm8k_model: Path, cache: Path, tmp_path: Path) -> Path:
    """The YAML of a user who fine-tunes on GSM8K."""
    tree = {
        "model": {"name": str(gsm8k_model)},
        "data": {
            "train": str(gsm8k / "train.jsonl"),
            "eval_split": 20,
            "columns": {"prompt": "question", "completion": "answer"},
            "seq_len": 1024,
            "cache": str(cache),
        },
        "train": {"global_batch_size": 4, "max_steps": 4, "learning_rate": 1.0e-2, "precision": "fp32"},
        "eval": {"samples": 2, "max_new_tokens": 8},
        "layout": "mb2",
        "output": str(tmp_path / "runs" / "x"),
    }
    (tmp_path / "gsm8k.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "gsm8k.yaml"


@pytest.mark.ci
def test_a_config_on_gsm8k_trains_a_model_that_transformers_loads_and_the_run_can_be_repeated(
    process: Command, meshtune: Command, gsm8k_config: Path, tmp_path: Path
) -> None:
    process("train", gsm8k_config)
    run = RunDir(tmp_path / "runs" / "x")
    rows = run.rows("train")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["loss"] == pytest.approx(math.log(4096), rel=0.02), "an untrained model knows nothing"
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    for row in rows:
        assert row.keys() >= {
            "kind", "step", "loss", "grad_norm", "learning_rate", "tokens", "label_tokens", "step_seconds",
            "data_seconds", "tokens_per_second_per_gpu", "mfu", "peak_memory_bytes",
        }  # fmt: skip
        assert 4 * 1024 * 0.9 < row["tokens"] <= 4 * 1024
        assert 0 < row["label_tokens"] < row["tokens"]
        assert row["tokens_per_second_per_gpu"] == pytest.approx(row["tokens"] / row["step_seconds"])
    assert [row["step"] for row in run.rows("eval")] == [4]
    for name in (
        "plan.yaml",
        "report.html",
        "checkpoints/step-4",
        "model/README.md",
        "samples.jsonl",
        "logs",
    ):
        assert (run.path / name).exists(), name  # fmt: skip

    model = AutoModelForCausalLM.from_pretrained(run.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(run.model)
    ids = tokenizer("How many apples?\n", return_tensors="pt").input_ids
    assert model.generate(input_ids=ids, max_new_tokens=5, do_sample=False).shape[1] > ids.shape[1]

    assert "holds a finished run of 4 steps" in meshtune("train", run.config_file, code=2).err
    meshtune("train", run.config_file, f"output={tmp_path / 'runs' / 'y'}")
    assert losses(tmp_path / "runs" / "y") == losses(run.path)
    assert (tmp_path / "runs" / "y" / "model" / "model.safetensors").read_bytes() == (
        run.model / "model.safetensors"
    ).read_bytes()


@pytest.mark.ci
def test_packed_gsm8k_is_97_percent_tokens(meshtune: Command, gsm8k_config: Path) -> None:
    train = meshtune("data", gsm8k_config, "--json").json["train"]
    assert train["documents"] == 7473 - 20
    assert train["efficiency"] >= 0.97
    assert train["tokens"] == pytest.approx(train["efficiency"] * train["sequences"] * 1024)


@pytest.mark.ci
def test_json_is_the_only_thing_on_stdout(meshtune: Command, settings: Settings) -> None:
    ended = meshtune("train", *settings("log.to=[console,jsonl,tensorboard]", "eval.samples=1"), "--json")
    found = ended.json
    assert found["steps"] == 4
    assert found["status"] == "finished"
    assert found["last_loss"] < found["first_loss"]
    assert Path(found["model_folder"]).exists()
    assert Path(found["report"]).exists()
    assert "loss" in ended.err, "progress goes to stderr"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.name=/nowhere/at-all", "/nowhere/at-all"),
        ("data.train=/nowhere/rows.jsonl", "/nowhere/rows.jsonl"),
        ("train.device=cuda", "no CUDA device"),
        ("layout=tp3", "tp=3 does not divide 4 attention heads"),
        ("data.streaming=true train.max_steps=null train.num_epochs=1", "train.max_steps"),
        ("layout=mb3", "3"),
        ("data.eval_split=0.5", "eval_split"),
        ("model.freeze=[nothing.like.this]", "nothing.like.this"),
        ("data.chat_template=chatlm", "chatml"),
        ("log.project=mine", "log.project=mine has no effect: only W&B, MLflow and Trackio show it"),
    ],
)
def test_what_cannot_work_ends_with_exit_code_2_before_anything_is_written(
    change: str, said: str, meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    if change.endswith("cuda") and torch.cuda.is_available():
        pytest.skip("CUDA is there")
    ended = meshtune("train", *settings(*change.split()), code=2)
    lines = ended.err.splitlines()
    assert said in ended.err and not ended.out and "Traceback" not in ended.err
    assert len({*lines}) == len(lines), "each sentence is printed once"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# New tokens #


@pytest.fixture
def chat(tmp_path: Path) -> str:
    """Conversations, and ChatML for a tokenizer that has no template."""
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"red {n}"}]}
        for n in range(60)
    ]
    return f"data.train={write_rows(tmp_path / 'chat.jsonl', rows)}"


CHAT = ("data.chat_template=chatml", "data.eval=[]", "train.max_steps=3", "train.learning_rate=0.01")


def check_tokenizer(folder: Path) -> Any:
    """The saved tokenizer knows ChatML by itself; returns it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 302
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") >= 300
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say 1"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nSay 1<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    return tokenizer


@pytest.mark.ci
def test_new_tokens_of_a_chat_template_are_learnt_and_saved_with_the_model(
    train: Callable[..., loop.Run], chat: str, tiny: Path, meshtune: Command
) -> None:
    run = train(chat, *CHAT)
    check_tokenizer(run.folder.model)
    before, after = weights(tiny / "model"), weights(run.folder.model)
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        assert before[table].shape == (300, 64)
        assert after[table].shape[0] >= 302
        assert not torch.equal(after[table][300], after[table][301]), "two new tokens, told apart"
    ended = meshtune("generate", run.folder.path, "--prompt", "Say 1", "--max-new-tokens", 4, "--json")
    assert "<|im_" not in ended.json[0]["answer"]


@pytest.mark.ci
def test_under_lora_the_new_tokens_are_trained_and_peft_gives_equal_logits(
    train: Callable[..., loop.Run], chat: str, tiny: Path, meshtune: Command, tmp_path: Path
) -> None:
    run = train(chat, *CHAT, "method=lora", "lora.r=4")
    tokenizer = check_tokenizer(run.folder.model)
    base = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    base.resize_token_embeddings(len(tokenizer))
    theirs = PeftModel.from_pretrained(base, str(run.folder.model)).eval()
    ids = torch.tensor([[300, 40, 50, 301, 60, 300]])
    run.passes.parallel.stages[0].model.set_attn_implementation("sdpa")
    with torch.no_grad():
        ours = run.passes.parallel.stages[0].model.eval()(ids).logits
        torch.testing.assert_close(theirs(ids).logits, ours, rtol=1e-5, atol=1e-5)
        meshtune("export", run.folder.path, tmp_path / "merged", "--merge")
        check_tokenizer(tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        torch.testing.assert_close(merged(ids).logits, ours, rtol=1e-5, atol=1e-5)
    table = theirs.get_input_embeddings().weight
    assert not torch.equal(table[300], table[301]), "two new tokens, told apart"


# Ways to train #


@pytest.mark.ci
def test_bf16_leaves_a_bf16_model(meshtune: Command, settings: Settings, tmp_path: Path) -> None:
    exact, rounded = tmp_path / "exact", tmp_path / "rounded"
    meshtune("train", *settings(f"output={exact}"))
    meshtune("train", *settings(f"output={rounded}", "train.precision=bf16"))
    assert json.loads((rounded / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert losses(rounded) == pytest.approx(losses(exact), rel=0.01)
    assert losses(rounded) != losses(exact)
    assert RunDir(rounded).rows("run")[-1]["precision"] == "bf16"
    meshtune("generate", rounded, "--prompt", "Say red", "--max-new-tokens", 3)


@pytest.mark.ci
def test_a_stream_is_trained_on_and_resumed(meshtune: Command, settings: Settings, tmp_path: Path) -> None:
    lasting = ("data.streaming=true", "train.lr_scheduler=constant")
    tokens = 4 * 128  # of a step
    lengths = ("train.max_steps=6", "train.max_steps=3", f"train.total_tokens={6 * tokens - 1}")
    for length, name in zip(lengths, ("whole", "parts", "parts"), strict=True):
        meshtune("train", *settings("train.max_steps=null", *lasting, length, f"output={tmp_path / name}"))
    assert len(losses(tmp_path / "whole")) == 6
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.ci
def test_frozen_parameters_stay_as_they_are(
    meshtune: Command, settings: Settings, tiny: Path, tmp_path: Path
) -> None:
    meshtune("train", *settings("model.freeze=['model.embed_tokens.*', 'model.layers.0.*']"))
    before, after = weights(tiny / "model"), weights(tmp_path / "run" / "model")
    frozen = {name for name in before if name.startswith(("model.embed_tokens.", "model.layers.0."))}
    assert len(frozen) == 10
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    row = RunDir(tmp_path / "run").rows("run")[-1]
    assert row["trainable_parameters"] == sum(t.numel() for name, t in before.items() if name not in frozen)


@pytest.mark.all
def test_random_weights_come_from_the_seed_not_from_the_folder(
    meshtune: Command, settings: Settings, tiny: Path, tmp_path: Path
) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2), ("folder", None)):
        random = ("model.init=random", f"train.seed={seed}") if seed else ()
        meshtune("train", *settings(*random, f"output={tmp_path / name}", "train.learning_rate=1e-9"))
    one, other, folder = (
        weights(tmp_path / name / "model")["lm_head.weight"] for name in ("one", "other", "folder")
    )
    assert losses(tmp_path / "one") == losses(tmp_path / "same")
    assert (one - other).norm() > one.norm()
    assert (one - folder).norm() > one.norm()
    assert one.std() == pytest.approx(0.02, rel=0.05), "the configuration's initializer_range"


@pytest.mark.ci
def test_epochs_and_tokens_set_the_steps_and_the_batch(
    meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    meshtune(
        "train",
        *settings(
            "train.max_steps=null",
            "train.num_epochs=2",
            "train.global_batch_size=null",
            "train.global_batch_tokens=512",
            "data.packing=false",
        ),
    )
    assert len(losses(tmp_path / "run")) == 2 * 120 / 4


@pytest.mark.all
@pytest.mark.timeout(900)
def test_compiled_blocks_train_the_same(settings: Settings, tmp_path: Path) -> None:
    found = {}
    for compiled in ("false", "true"):
        words = settings("train.max_steps=3", f"train.compile={compiled}", f"output={tmp_path / compiled}")
        run = build.build(config.load(None, words))
        loop.train(run)
        found[compiled] = losses(run.folder.path)
    assert found["true"] == pytest.approx(found["false"], rel=1e-6)
