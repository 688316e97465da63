"""Migrated files train as the other trainer would have: on its rows, with its prompts and its defaults."""

from collections.abc import Callable
from typing import Any

import pytest

from meshtune.migrate.convert import Migrated

Migrate = Callable[..., Migrated]
AXOLOTL = {"base_model": "m", "datasets": [{"path": "rows.jsonl"}], "learning_rate": 1e-4}
TRL = {"model_name_or_path": "m", "dataset_name": "org/rows", "max_length": 64, "output_dir": "out"}
FACTORY = {"model_name_or_path": "m", "stage": "sft", "dataset": "a", "cutoff_len": 64}
TORCHTUNE = {
    "model": {"_component_": "torchtune.models.qwen2.qwen2_0_5b"},
    "checkpointer": {"checkpoint_dir": "m"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "batch_size": 2,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": "3e-4"},
}
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
    assert "data.eval" not in result.settings and "all rows of the file" in result.origins["data.train"]
    assert [note.key for note in result.unsupported] == ["test_datasets"]


@pytest.mark.parametrize(
    ("tree", "template", "said"),
    [
        (AXOLOTL | {"datasets": [ALPACA]}, "alpaca", "without the first line"),
        (AXOLOTL | {"datasets": [ALPACA, {"path": "b"}]}, None, "without the prompt of alpaca rows"),
        (AXOLOTL | {"datasets": [ALPACA | {"type": "alpaca_chat.load_qa"}]}, None, "of alpaca_chat.load_qa"),
        (AXOLOTL | {"datasets": [ALPACA], "chat_template": "chatml"}, "alpaca", "without the first line"),
        (TORCHTUNE, "alpaca", "without the first line"),
        (
            TORCHTUNE | {"dataset": {"_component_": "torchtune.datasets.samsum_dataset"}},
            None,
            "prompts of samsum",
        ),
    ],
)
def test_alpaca_rows_are_asked_by_their_prompt(
    tree: dict[str, Any], template: str | None, said: str, migrated: Migrate
) -> None:
    result = migrated(tree)
    assert result.settings.get("data.chat_template") == template
    assert said in result.origins["data.train"]


def test_llama_factorys_alpaca_lacks_its_first_line(migrated: Migrate) -> None:
    assert "without the first line" in migrated(FACTORY, template="alpaca").origins["data.chat_template"]
