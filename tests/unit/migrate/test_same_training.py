"""Migrated files train as the other trainer would have: on its rows, with its prompts and its defaults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fewest_keys
import pytest
from fewest_keys import AXOLOTL, FACTORY, TRL
from golden import says
from typer.testing import CliRunner

from meshtune.cli import app
from meshtune.tools.migrate import Migrated

FILES = Path(__file__).parents[2] / "data" / "migrate"
Migrate = Callable[..., Migrated]
TORCHTUNE = fewest_keys.TORCHTUNE | {"optimizer": {"_component_": "torch.optim.AdamW", "lr": "3e-4"}}
ALPACA = {"path": "org/a", "type": "alpaca"}


def test_a_file_has_no_split_to_evaluate_on(migrated: Migrate) -> None:
    evaluating = TRL | {"dataset_name": "rows.jsonl", "eval_strategy": "steps", "eval_steps": 5}
    result = migrated(evaluating)
    assert result.settings["data.train"] == [{"path": "rows.jsonl"}]
    assert "data.eval" not in result.settings and "data.eval_split" in result.origins["data.train"]
    held_out = migrated(evaluating, test_split_size=0.1)
    assert held_out.settings["data.eval_split"] == 0.1 and held_out.settings["eval.every"] == 5
    assert migrated(TRL, eval_strategy="epoch").settings["data.eval"] == [
        {"path": "org/rows", "split": "test"}
    ]


def test_a_part_of_the_training_file_is_not_held_out_rows(migrated: Migrate) -> None:
    result = migrated(
        AXOLOTL,
        datasets=[{"path": "rows.jsonl", "split": "train[:90%]"}],
        test_datasets=[{"path": "rows.jsonl", "split": "train[90%:]"}],
    )
    says(result.origins["data.train"])
    assert "data.eval" not in result.settings
    assert [note.key for note in result.unsupported] == ["test_datasets"]


@pytest.mark.parametrize(
    ("tree", "template"),
    [
        (AXOLOTL | {"datasets": [ALPACA]}, "alpaca"),
        (AXOLOTL | {"datasets": [ALPACA, {"path": "b"}]}, None),
        (AXOLOTL | {"datasets": [ALPACA | {"type": "alpaca_chat.load_qa"}]}, None),
        (AXOLOTL | {"datasets": [ALPACA], "chat_template": "chatml"}, "alpaca"),
        (TORCHTUNE, "alpaca"),
        (TORCHTUNE | {"dataset": {"_component_": "torchtune.datasets.samsum_dataset"}}, None),
    ],
)
def test_alpaca_rows_are_asked_by_their_prompt(
    tree: dict[str, Any], template: str | None, migrated: Migrate
) -> None:
    result = migrated(tree)
    assert result.settings.get("data.chat_template") == template
    says([result.origins["data.train"], *(note.reason for note in result.unsupported)])


def test_llama_factorys_alpaca_lacks_its_first_line(migrated: Migrate) -> None:
    says(migrated(FACTORY, template="alpaca").origins["data.chat_template"])


def test_lora_targets_that_a_file_leaves_out_are_pefts(migrated: Migrate) -> None:
    for lora in (TRL | {"use_peft": True}, AXOLOTL | {"adapter": "lora"}):
        result = migrated(lora)
        assert result.settings["lora.target_modules"] == ["q_proj", "v_proj"]
        says(result.origins["lora.target_modules"])
    assert "lora.target_modules" not in migrated(TRL).settings
    linear = migrated(AXOLOTL, adapter="lora", lora_target_linear=True)
    assert linear.settings["lora.target_modules"] == "all-linear"


def test_trl_labels_all_tokens_of_messages(migrated: Migrate) -> None:
    result = migrated(TRL)
    says(result.origins["data.train_on"])
    assert result.settings["data.train_on"] == "all"
    columns = {"prompt": "question", "completion": "answer"}
    mixture = migrated(TRL, dataset_name=None, datasets=[{"path": "org/a", "columns": columns}])
    assert mixture.settings["data.train_on"] == "completion"


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (TORCHTUNE, {"train.weight_decay": 0.01}),
        (TORCHTUNE | {"optimizer": {"_component_": "bnb.optim.Lion8bit"}}, {"train.weight_decay": None}),
        (AXOLOTL, {"checkpoint.keep": 4, "eval.at_start": None}),
        (AXOLOTL | {"val_set_size": 0.1, "evals_per_epoch": 4}, {"eval.at_start": True}),
        (AXOLOTL | {"val_set_size": 0.1, "eval_steps": 4}, {"eval.at_start": True}),
        (AXOLOTL | {"val_set_size": 0.1, "eval_strategy": "no"}, {"eval.at_start": None}),
        (TRL | {"eval_strategy": "epoch"}, {"eval.at_start": None}),
        (FACTORY, {"log.every": None}),
        (FACTORY | {"eval_strategy": "steps", "val_size": 0.1}, {"eval.every": 500}),
        # beside keys that are off
        (TRL | {"assistant_only_loss": False}, {"data.train_on": "all"}),
        (
            AXOLOTL | {"adapter": "lora", "lora_target_linear": False},
            {"lora.target_modules": ["q_proj", "v_proj"]},
        ),
        (TRL | {"warmup_ratio": 0.0}, {"train.warmup_steps": 0}),
    ],
)
def test_defaults_of_the_tool_are_kept(
    tree: dict[str, Any], expected: dict[str, Any], migrated: Migrate
) -> None:
    settings = migrated(tree).settings
    assert {name: settings.get(name) for name in expected} == expected


def test_axolotl_has_master_weights_only_where_it_shards(migrated: Migrate) -> None:
    said = {
        name: "axolotl has none" in migrated(AXOLOTL | more).origins["train.precision"]
        for name, more in {
            "full": {"bf16": True},
            "default": {},
            "lora": {"adapter": "lora"},
            "fsdp": {"fsdp_config": {"reshard_after_forward": True}},
        }.items()
    }
    assert said == {"full": True, "default": True, "lora": False, "fsdp": False}


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("axolotl-fft-fsdp.yaml", (), True),
        ("llama-factory-full-ds3.yaml", (), True),
        ("torchtune-full-distributed.yaml", (), True),
        ("torchtune-full-distributed.yaml", ("--gpus", "1"), False),
        ("torchtune-lora-single.yaml", (), False),
        ("axolotl-lora.yaml", (), False),
    ],
)
def test_a_sharding_file_asks_for_the_number_of_gpus(name: str, gpus: tuple[str, ...], said: bool) -> None:
    ended = CliRunner().invoke(app, ["migrate", str(FILES / name), *gpus])
    assert ended.exit_code == 0 and ("name how many with --gpus" in ended.stderr) == said


def test_torchtunes_validation_rows_are_held_out_rows(migrated: Migrate) -> None:
    rows = {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "split": "train[95%:]"}
    result = migrated(TORCHTUNE, dataset_val=rows, run_val_every_n_steps=9, batch_size_val="${batch_size}")
    assert result.settings["data.eval"] == [
        {"path": "yahma/alpaca-cleaned", "split": "train[95%:]", "format": "alpaca"}
    ]
    assert result.settings["eval.every"] == 9
    assert [(note.key, note.value) for note in result.ignored if "val" in note.key] == [("batch_size_val", 2)]
    file = {"_component_": "torchtune.datasets.chat_dataset", "source": "json", "data_files": "a.jsonl"}
    result = migrated(TORCHTUNE, dataset_val=file | {"split": "train[95%:]"})
    assert "data.eval" not in result.settings
    assert [note.key for note in result.unsupported if "all rows of the file a.jsonl" in note.reason] == [
        "dataset_val"
    ]
