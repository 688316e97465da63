"""Configurations of the alignment handbook and of Open R1, whose scripts are TRL's."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from fewest_keys import AXOLOTL, TORCHTUNE, TRL

from meshtune.tools.migrate import Migrated
from meshtune.tools.training import patterns

Migrate = Callable[..., Migrated]
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
HANDBOOK = {key: value for key, value in TRL.items() if key != "dataset_name"}
MIXTURE = {
    "datasets": [
        {"id": "org/a", "config": "en", "split": "train", "columns": ["messages"], "weight": 0.5},
        {"id": "org/b", "columns": ["prompt", "completion"], "weight": 1.0},
        {"id": "rows.jsonl", "split": "test"},
    ],
    "test_split_size": 100,
}


@pytest.mark.parametrize(
    ("keys", "train", "held_out"),
    [
        (
            {"dataset_mixer": {"org/a": 1.0, "org/b": 0.5}, "dataset_splits": ["train_sft", "test_sft"],
             "dataset_configs": ["en", "de"], "eval_strategy": "epoch"},
            [{"path": "org/a:en", "split": "train_sft"},
             {"path": "org/b:de", "split": "train_sft", "weight": 0.5}],
            [{"path": "org/a:en", "split": "test_sft"}, {"path": "org/b:de", "split": "test_sft"}],
        ),
        ({"dataset_mixer": {"org/a": 1, "org/none": 0}}, [{"path": "org/a", "split": "train"}], None),
        (
            {"dataset_mixture": MIXTURE},
            [{"path": "org/a:en", "split": "train", "format": "messages", "weight": 0.5},
             {"path": "org/b", "format": "prompt-completion"}, {"path": "rows.jsonl"}],
            100,
        ),
    ],
    ids=["mixer", "defaults", "mixture"],
)  # fmt: skip
def test_sources_have_their_shares_splits_and_columns(
    keys: dict[str, Any], train: list[Any], held_out: Any, migrated: Migrate
) -> None:
    result = migrated(HANDBOOK | keys)
    assert result.settings["data.train"] == train
    assert result.settings.get("data.eval_split" if held_out == 100 else "data.eval") == held_out
    assert result.unsupported == []
    result.config()


@pytest.mark.parametrize(
    "keys",
    [
        HANDBOOK | {"chat_template": TEMPLATE},
        AXOLOTL | {"chat_template": "jinja", "chat_template_jinja": TEMPLATE},
    ],
)
def test_a_template_in_the_file_is_the_template(keys: dict[str, Any], migrated: Migrate) -> None:
    result = migrated(keys)
    assert result.settings["data.chat_template"] == TEMPLATE
    assert result.unsupported == []


def test_exported_patterns_mean_the_same_layers() -> None:
    names = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.k_proj",
    ]
    pattern = patterns(("q_proj", r".*mlp\.(up|down)_proj"))
    assert isinstance(pattern, str)
    assert [bool(re.fullmatch(pattern, name)) for name in names] == [True, True, False]
    assert patterns(("q_proj", "v_proj")) == ["q_proj", "v_proj"]


def test_a_regular_expression_of_layers_stays_one(migrated: Migrate) -> None:
    pattern = r"model\.layers\.\d{1,2}\.(mlp|self_attn)\.(up|q)_proj"
    lora = {"adapter": "lora", "lora_target_modules": pattern}
    assert migrated(AXOLOTL, **lora).settings["lora.target_modules"] == [pattern]


def test_fused_matrices_have_hugging_face_s_names(migrated: Migrate) -> None:
    model = {
        "_component_": "torchtune.models.phi4.lora_phi4_14b",
        "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
    }
    targets = migrated(TORCHTUNE, model=model).settings["lora.target_modules"]
    assert targets == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (AXOLOTL | {"adapter": "qlora"}, "adapter"),
        (
            TORCHTUNE | {"model": {"_component_": "torchtune.models.mistral.qlora_mistral_7b"}},
            "model._component_",
        ),
        (AXOLOTL | {"optimizer": "adamw_bnb_8bit"}, "optimizer"),
    ],
)
def test_bits_that_are_lost_have_no_counterpart(keys: dict[str, Any], key: str, migrated: Migrate) -> None:
    assert [note.key for note in migrated(keys).unsupported] == [key]


def test_a_rate_that_never_falls_is_valid(migrated: Migrate) -> None:
    assert migrated(AXOLOTL, cosine_min_lr_ratio=1.0).config().train.min_lr_ratio == 1
