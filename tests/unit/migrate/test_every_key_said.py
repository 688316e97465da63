"""Each key that a file sets is a setting or named in the comments; keys that nobody set are not."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fewest_keys import AXOLOTL, FACTORY, TORCHTUNE
from golden import refuses, says
from typer.testing import CliRunner

from meshtune import config
from meshtune.cli import app
from meshtune.errors import UserError
from meshtune.tools.migrate import Migrated, migrate
from meshtune.tools.write import text_of

Migrate = Callable[..., Migrated]


def test_a_setting_of_two_keys_names_both(migrated: Migrate) -> None:
    origins = migrated(AXOLOTL, adam_beta1=0.8, adam_beta2=0.9, bf16=True, fp16=False).origins
    assert origins["train.adam_betas"] == "adam_beta1, adam_beta2"
    assert origins["train.precision"].partition(":")[0] == "bf16"


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (FACTORY | {"flash_attn": "fa2"}, "# - flash_attn: fa2"),
        (TORCHTUNE | {"device": "cuda"}, "# - device: cuda"),
        (TORCHTUNE | {"epochs": 3, "max_steps_per_epoch": 50}, "50 steps in each of 3 epochs"),
        (AXOLOTL, "1 accumulated, 1 data rank\n"),
    ],
)
def test_no_key_vanishes(tree: dict[str, Any], said: str, migrated: Migrate) -> None:
    assert said in text_of(migrated(tree), "theirs.yaml")


def test_a_default_is_named_once_beside_a_setting(migrated: Migrate) -> None:
    origins = migrated(FACTORY, deepspeed="ds_z3.json").origins
    assert origins["layout"] == (
        "deepspeed: by the name of ds_z3.json, which is not here; LLaMA-Factory's default"
    )
    assert origins["checkpoint.every"] == "LLaMA-Factory's default"


def test_fsdps_earlier_spelling_is_known(migrated: Migrate) -> None:
    earlier = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True, "fsdp_version": 1}
    result = migrated(AXOLOTL, gpus=8, fsdp_config=earlier)
    assert result.settings["layout"] == "zero2x8-mb1-ga1"
    assert [note.key for note in result.unsupported] == ["fsdp_config.fsdp_offload_params"]


def test_a_default_beside_a_null_and_a_remark_are_said_once(migrated: Migrate) -> None:
    result = migrated(TORCHTUNE, clip_grad_norm=None, tokenizer={"max_seq_len": None})
    assert {"clip_grad_norm", "tokenizer.max_seq_len"}.isdisjoint(result.off)
    assert text_of(result, "theirs.yaml").count("without the first line") == 1
    roles = [{"path": "a", "roles": {"user": ["user", "human"], "assistant": ["assistant"]}}]
    assert migrated(AXOLOTL, datasets=roles).settings["data.train"][0]["roles"] == {"human": "user"}


def test_a_full_run_has_no_section_of_lora(migrated: Migrate) -> None:
    result = migrated(AXOLOTL, lora_r=16, lora_alpha=32)  # our defaults
    assert "lora" not in yaml.safe_load(text_of(result, "theirs.yaml"))
    assert {note.key for note in result.without_effect} == {"lora_r", "lora_alpha"}
    result = migrated(FACTORY, finetuning_type="full", lora_rank=4)  # that makes lora.alpha too
    assert [(note.key, note.value) for note in result.without_effect] == [("lora_rank", 4)]


def test_the_command_names_what_takes_no_effect(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(AXOLOTL | {"early_stopping_patience": 3}))
    ended = CliRunner().invoke(app, ["migrate", str(file)])
    says(ended.stderr)
    assert "#   early_stopping: 3" in ended.stdout


def test_evaluation_without_held_out_rows_is_commented_out_and_takes_effect_with_them(
    tmp_path: Path,
) -> None:
    file, ours = tmp_path / "trl.json", tmp_path / "ours.yaml"
    evaluating = {"eval_strategy": "steps", "eval_steps": 100, "load_best_model_at_end": True}
    theirs = {"model_name_or_path": "m", "dataset_name": "rows.jsonl", "output_dir": "out", **evaluating}
    file.write_text(json.dumps(theirs))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    result = migrate(file)
    text = text_of(result, "trl.json")
    assert {note.key for note in result.without_effect} == {*evaluating}
    assert "# eval:" in text and "#   every: 100" in text and "#   keep_best: true" in text
    assert text.count("No effect: there are no held-out rows; set data.eval or data.eval_split") == 1
    ours.write_text(text)
    assert config.load(ours).eval == config.EvalConfig()
    ours.write_text(re.sub("^# (?=eval:|  )", "", text, flags=re.MULTILINE))
    evaluation = config.load(ours, ["data.eval=held.jsonl"]).eval
    assert (evaluation.every, evaluation.keep_best) == (100, True)


def test_settings_without_effect_are_comments_of_their_section(migrated: Migrate) -> None:
    result = migrated(AXOLOTL, val_set_size=1, test_datasets=[{"path": "b"}])
    text = text_of(result, "theirs.yaml")
    section = text[text.index("\ndata:") : text.index("\ntrain:")]
    says(section)


def test_only_a_file_that_is_written_names_the_schema_of_this_installation(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(yaml.safe_dump(AXOLOTL))
    assert "$schema" not in CliRunner().invoke(app, ["migrate", str(theirs)]).stdout
    CliRunner().invoke(app, ["migrate", str(theirs), "--out", str(ours)])
    assert ours.read_text().startswith("# yaml-language-server: $schema=/")


def test_our_own_file_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("model: {name: m}\ndata: {train: a.jsonl}\noutput: o\n")
    with refuses(UserError):
        migrate(file)
    file.write_text("{}")
    with refuses(UserError):
        migrate(file)
