"""Configurations of other trainers: `meshtune migrate`, then `meshtune train` on a tiny model and rows."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import cases
from command import Command, end
from transformers import AutoTokenizer

FILES = Path(__file__).parents[1] / "data" / "migrate"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and one?"},
    {"role": "assistant", "content": "five"},
]
ALPACA = {"instruction": "Add them.", "input": "2 and 2", "output": "4"}
ROWS: dict[str, dict[str, Any]] = {  # file -> a row as its data sets have them
    "axolotl-lora.yaml": {"messages": TURNS},
    "axolotl-fft-fsdp.yaml": ALPACA,
    "axolotl-qlora.yaml": ALPACA,
    "llama-factory-lora-sft.yaml": ALPACA,
    "llama-factory-full-ds3.yaml": {"turns": TURNS},
    "llama-factory-pt.yaml": {"text": "Two and two is four, and one is five."},
    "trl-sft.json": {"messages": TURNS},
    "trl-sft-lora.yaml": {"prompt": "two and two?", "completion": "four"},
    "torchtune-lora-single.yaml": ALPACA,
    "torchtune-full-distributed.yaml": {"turns": TURNS},
}


def test_there_are_ten() -> None:
    assert sorted(ROWS) == sorted(path.name for path in FILES.iterdir() if path.is_file())


@pytest.fixture(scope="module")
def instructed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template, as models that follow instructions have one."""
    model = tmp_path_factory.mktemp("instructed") / "model"
    shutil.copytree(tiny / "model", model)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(model)
    return model


def stand_in(source: str | dict[str, Any], rows: Path) -> dict[str, Any]:
    """The source with a file in place of its data set, of which a file has no split."""
    settings = source if isinstance(source, dict) else {}
    return {key: value for key, value in settings.items() if key != "split"} | {"path": str(rows)}


@pytest.mark.parametrize("name", cases(ROWS, ci=["trl-sft.json"]))
def test_a_configuration_of_another_trainer_trains_after_one_command(
    name: str, instructed: Path, tmp_path: Path, begin_fork: Any
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(ROWS[name] | {"n": n}) + "\n" for n in range(40)))
    run = tmp_path / "run.yaml"
    migrated = end(begin_fork("migrate", FILES / name, "--out", run, "--json"))

    # In place of hub ids with splits, a large model and a tracker with an account; nothing else changes.
    data = migrated.json["config"]["data"]
    sources = {key: [stand_in(each, rows) for each in data[key]] for key in ("train", "eval") if key in data}
    small = [f"model.name={instructed}", f"data.cache={tmp_path / 'cache'}", "data.seq_len=64"]
    small += [f"data.{key}={json.dumps(value)}" for key, value in sources.items()]
    small += [f"output={tmp_path / 'run'}", "train.max_steps=2", "train.num_epochs=null", "train.device=cpu"]
    small += ["log.to=[console]", "log.project=null"]
    end(begin_fork("train", run, *small))
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if row["kind"] == "train"] == [1, 2]


def test_the_command_prints_a_config_and_names_what_has_no_counterpart(meshtune: Command) -> None:
    printed = meshtune("migrate", FILES / "axolotl-qlora.yaml", "--gpus", "4")
    assert yaml.safe_load(printed.out)["layout"] == "zero3x4-mb2-ga4-full"
    assert "\nmethod: qlora  # load_in_4bit, adapter\n" in printed.out
    assert "without a counterpart: fsdp_config.fsdp_offload_params;" in printed.err
    assert printed.err.endswith("; without effect: evals_per_epoch.\n")
    assert "# eval:" in printed.out and "#   every: 0.25 epoch  # evals_per_epoch" in printed.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.yaml"], "cannot be read"),
        ([FILES / "trl-sft.json", "--from", "trl2"], "--from trl2 is not a tool; it is one of axolotl"),
        ([FILES / "trl-sft.json", "--out", FILES / "trl-sft.json"], "exists; name another file with --out"),
        (["train.seed=1"], "Name the file to migrate"),
    ],
)
def test_what_the_command_can_not_do_is_said(words: list[object], said: str, meshtune: Command) -> None:
    ended = meshtune("migrate", *words, code=2)
    assert said in ended.err and ended.out == ""
