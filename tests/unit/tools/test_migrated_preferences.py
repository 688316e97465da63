"""Preferences of other trainers: which objective a file is for, its settings and rows, and what is refused.

Expected values are worked out from the tools' documentation and sources: a default that differs from ours,
a length of one side, a loss of another trainer.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import fewest_keys
import pytest
import transformers
import yaml
from fewest_keys import AXOLOTL, FACTORY, TRL
from golden import refuses, says
from trl.trainer.sft_config import SFTConfig

from meshtune import config
from meshtune.errors import UserError
from meshtune.tools.migrate import Migrated, migrate, text_of
from meshtune.tools.table import table

Migrate = Callable[..., Migrated]
PAIRED = {"_component_": "torchtune.datasets.stack_exchange_paired_dataset"}
TORCHTUNE = fewest_keys.TORCHTUNE | {"tokenizer": {"max_seq_len": 128}, "dataset": PAIRED}


def rows_of(kind: Any, **more: Any) -> str:
    return json.dumps({"datasets": [{"path": "org/x", "type": kind, **more}]})[1:-1]


TALKS = rows_of(
    "chat_template.default", field_messages="talk", field_chosen="good", roles={"user": ["human"]}
)


@pytest.mark.parametrize(
    ("tree", "more", "expected"),
    [
        # TRL: rate and length of its trainers, loss and weights; dropout off, also of adapters
        (TRL, "loss_type: sigmoid, beta: 0.05, use_peft: true, bf16: true",
         "objective: dpo, dpo.beta: 0.05, dpo.loss_type: sigmoid, train.learning_rate: 1.0e-06, "
         "data.seq_len: 128, lora.dropout: 0.0, data.packing: false, data.train_on: null"),
        (TRL, "loss_type: [sigmoid, sft], loss_weights: [2.0, 1.0], disable_dropout: false, use_peft: true",
         "objective: dpo, dpo.loss_type: sigmoid, dpo.sft_weight: 0.5, lora.dropout: 0.05"),
        (TRL, "loss_type: robust, label_smoothing: 0.1, rpo_alpha: 1.0, ref_model_name_or_path: org/r",
         "objective: dpo, dpo.label_smoothing: 0.1, dpo.sft_weight: 1.0, dpo.reference: org/r"),
        (TRL, "desirable_weight: 1.33, beta: 0.2, learning_rate: 5.0e-07",
         "objective: kto, kto.beta: 0.2, kto.desirable_weight: 1.33, data.seq_len: 64, "
         "train.learning_rate: 5.0e-07"),
        (TRL, "beta: 0.05, max_prompt_length: 32, output_dir: data/zephyr-orpo-141b",
         "objective: orpo, orpo.beta: 0.05, train.learning_rate: 1.0e-06, data.overlong: cut"),
        (TRL, "loss_type: simpo, simpo_gamma: 1.4, beta: 2.5, cpo_alpha: 0.0, label_smoothing: 0.1",
         "objective: simpo, simpo.gamma: 1.4, simpo.beta: 2.5, simpo.sft_weight: 0.0, "
         "simpo.label_smoothing: 0.1"),
        (TRL, "loss_type: simpo, simpo_gamma: 0.5", "simpo.beta: 0.1, simpo.sft_weight: 1.0"),
        (TRL, "beta: 2.5, gamma_beta_ratio: 0.6, max_prompt_length: 9",
         "objective: simpo, simpo.beta: 2.5, simpo.gamma: 1.5, simpo.sft_weight: null"),
        (TRL, "center_rewards_coefficient: 0.01, lora_task_type: SEQ_CLS",
         "objective: reward, reward.center_coefficient: 0.01, train.learning_rate: 1.0e-04, "
         "data.seq_len: 128, data.overlong: drop"),
        (TRL, "run_name: qwen-rm", "objective: reward"),
        (TRL, "run_name: dpo-sft", "objective: null, train.learning_rate: 2.0e-05, data.seq_len: 64"),
        # axolotl: its default length is that of a side; CPOTrainer's beta and alpha
        (AXOLOTL, "rl: dpo, dpo_label_smoothing: 0.1, rpo_alpha: 0.5, adapter: lora, lora_dropout: 0.1",
         "objective: dpo, dpo.label_smoothing: 0.1, dpo.sft_weight: 0.5, data.seq_len: 1024, "
         "lora.dropout: 0.0, data.train_on: null, data.overlong: drop, train.learning_rate: 1.0e-04"),
        (AXOLOTL, "rl: ipo, rl_beta: 0.2", "objective: dpo, dpo.loss_type: ipo, dpo.beta: 0.2"),
        (AXOLOTL, "rl: kto, rl_beta: 0.5, kto_desirable_weight: 0.2, kto_undesirable_weight: 2",
         "objective: kto, kto.beta: 0.5, kto.desirable_weight: 0.2, kto.undesirable_weight: 2, "
         "data.seq_len: 512"),
        (AXOLOTL, "rl: orpo, orpo_alpha: 0.2, sequence_len: 64", "orpo.beta: 0.2, data.seq_len: 128"),
        (AXOLOTL, "rl: dpo, excess_length_strategy: truncate", "data.overlong: cut"),
        (AXOLOTL, "rl: simpo, simpo_gamma: 0.7",
         "objective: simpo, simpo.gamma: 0.7, simpo.beta: 0.1, simpo.sft_weight: 1.0"),
        (AXOLOTL, "reward_model: true, model_type: AutoModelForSequenceClassification, num_labels: 1, "
         "center_rewards_coefficient: 0.02", "objective: reward, reward.center_coefficient: 0.02"),
        (AXOLOTL, "dpo_beta: 0.3", "objective: null, dpo.beta: null"),
        # axolotl's rows
        (AXOLOTL, f"rl: dpo, {rows_of('chatml.intel')}",
         "data.train: [{path: org/x, columns: {prompt: question}}], data.chat_template: chatml"),
        (AXOLOTL, f"rl: dpo, {rows_of('llama3.argilla')}",
         "data.train: [{path: org/x, columns: {prompt: instruction, chosen: chosen_response, "
         "rejected: rejected_response}}], data.chat_template: llama3"),
        (AXOLOTL, f"rl: dpo, {rows_of('chatml.ultra', split='train_prefs')}",
         "data.train: [{path: org/x, split: train_prefs}]"),
        (AXOLOTL, f"rl: dpo, chat_template: gemma, {TALKS}",
         "data.train: [{path: org/x, format: messages, columns: {messages: talk, chosen: good}, "
         "roles: {human: user}}], "
         "data.chat_template: gemma"),
        (AXOLOTL, f"rl: dpo, {rows_of({'field_prompt': 'q', 'field_chosen': 'c', 'field_rejected': 'r'})}",
         "data.train: [{path: org/x, columns: {prompt: q, chosen: c, rejected: r}}]"),
        (AXOLOTL, f"rl: kto, {rows_of('llama3.intel')}",
         "data.train: [{path: org/x, columns: {prompt: question}}]"),
        (AXOLOTL, f"rl: kto, {rows_of({'field_completion': 'c', 'field_label': 'good'})}",
         "data.train: [{path: org/x, columns: {completion: c, label: good}}]"),
        (AXOLOTL, f"rl: orpo, {rows_of('chat_template.argilla')}", "data.train: [{path: org/x}]"),
        (AXOLOTL, f"rl: orpo, {rows_of('orpo.chat_template')}", "data.train: [{path: org/x}]"),
        (AXOLOTL, f"rl: kto, {rows_of('chatml.argilla_chat')}",
         "data.train: [{path: org/x, format: messages, columns: {messages: completion}}]"),
        (AXOLOTL, rows_of("bradley_terry.chat_template"),
         "objective: reward, data.train: [{path: org/x, columns: {prompt: input}}]"),
        # LLaMA-Factory: one beta of all losses
        (FACTORY, "stage: dpo, pref_beta: 0.2, pref_ftx: 0.3, ref_model: org/r, lora_dropout: 0.1",
         "objective: dpo, dpo.beta: 0.2, dpo.sft_weight: 0.3, dpo.reference: org/r, lora.dropout: 0.0, "
         "data.seq_len: 128, data.overlong: cut, train.learning_rate: 5.0e-05"),
        (FACTORY, "stage: dpo, pref_loss: ipo, dpo_label_smoothing: 0.0",
         "objective: dpo, dpo.loss_type: ipo"),
        (FACTORY, "stage: dpo, pref_loss: orpo", "objective: orpo, dpo.loss_type: null"),
        (FACTORY, "stage: dpo, pref_loss: simpo, simpo_gamma: 1.0, pref_ftx: 0.2",
         "objective: simpo, simpo.gamma: 1.0, simpo.beta: 0.1, simpo.sft_weight: 0.2"),
        (FACTORY, "stage: kto, kto_chosen_weight: 2.0, kto_rejected_weight: 0.5, pref_loss: sigmoid",
         "objective: kto, kto.desirable_weight: 2.0, kto.undesirable_weight: 0.5, data.seq_len: 64"),
        (FACTORY, "stage: rm, lora_dropout: 0.1", "objective: reward, lora.dropout: 0.1"),
        # torchtune
        (TORCHTUNE, "loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.05}, "
         "ref_checkpointer: {checkpoint_dir: m}",
         "objective: dpo, dpo.beta: 0.05, dpo.loss_type: sigmoid, dpo.reference: base, data.seq_len: 256, "
         "data.train: [{path: lvwerra/stack-exchange-paired/data/rl, columns: {prompt: question, "
         "chosen: response_j, rejected: response_k}}]"),
        (TORCHTUNE, "loss: {_component_: torchtune.rlhf.loss.RSOLoss, gamma: 0.3}, "
         "ref_checkpointer: {checkpoint_dir: other}",
         "dpo.loss_type: hinge, dpo.beta: 0.3, dpo.reference: other"),
        (TORCHTUNE, "loss: {_component_: torchtune.rlhf.loss.SimPOLoss, beta: 2.5, gamma: 0.3}, dataset: "
         "{_component_: torchtune.datasets.preference_dataset, source: json, data_files: a.json, "
         "column_map: {chosen: good, rejected: bad}}",
         "objective: simpo, simpo.beta: 2.5, simpo.gamma: 0.3, "
         "data.train: [{path: a.json, columns: {chosen: good, rejected: bad}}]"),
    ],
)  # fmt: skip
def test_preferences_become_their_objective(
    tree: dict[str, Any], more: str, expected: str, migrated: Migrate, tmp_path: Path
) -> None:
    result = migrated(tree | yaml.safe_load(f"{{{more}}}"))
    wanted = yaml.safe_load(f"{{{expected}}}")
    assert {name: result.settings.get(name) for name in wanted} == wanted
    (ours := tmp_path / "ours.yaml").write_text(text_of(result, "theirs.yaml"))
    assert config.load(ours) == result.config()


ENTRIES = {  # of dataset_info.json
    "turns": {
        "file_name": "a.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"chosen": "good"},
    },
    "texts": {"hf_hub_url": "org/b", "ranking": True, "columns": {"prompt": "q", "query": "context"}},
    "judged": {"file_name": "c.json", "columns": {"kto_tag": "ok"}},
    "talks": {"file_name": "d.json", "formatting": "sharegpt", "columns": {"messages": "m", "kto_tag": "ok"}},
    "answers": {"file_name": "e.json"},
}


@pytest.mark.parametrize(
    ("name", "stage", "source"),
    [
        ("turns", "dpo", "path: data/a.json, format: sharegpt, columns: {chosen: good}"),
        ("texts", "rm", "path: org/b, format: alpaca, columns: {instruction: q, input: context}"),
        ("judged", "kto", "path: data/c.json, format: alpaca, columns: {label: ok}"),
        ("talks", "kto", "path: data/d.json, format: sharegpt, columns: {conversations: m, label: ok}"),
        ("answers", "dpo", ""),
        ("turns", "sft", ""),
        ("judged", "rm", ""),
    ],
)
def test_rows_of_llama_factory_fit_the_stage(
    name: str, stage: str, source: str, migrated: Migrate, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(ENTRIES))
    if not source:
        with refuses(UserError):
            migrated(FACTORY, stage=stage, dataset=name)
        return
    result = migrated(FACTORY, stage=stage, dataset=name)
    (made,) = result.settings["data.train"]
    assert made | {"path": made["path"].replace(f"{tmp_path}/", "")} == yaml.safe_load(f"{{{source}}}")
    assert result.unsupported == []


REFUSED: list[dict[str, Any]] = [
    TRL | {"beta": 0.04, "max_completion_length": 512, "output_dir": "qwen-grpo"},
    TRL | {"desirable_weight": 1.5, "rpo_alpha": 1.0},
    TRL | {"loss_type": "apo_zero"},
    TRL | {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    TRL | {"loss_type": "apo_zero_unpaired"},
    TRL | {"cpo_alpha": 1.0},
    TRL | {"beta": 0.1, "tpo_alpha": 1.0},
    TRL | {"beta": 0.1, "loss_type": "sigmoid", "num_generations": 8},
    AXOLOTL | {"rl": "cpo"},
    FACTORY | {"stage": "dpo", "pref_loss": "kto_pair"},
    TORCHTUNE,
]


@pytest.mark.parametrize("tree", REFUSED)
def test_another_loss_or_an_unclear_trainer_is_refused(tree: dict[str, Any], migrated: Migrate) -> None:
    with refuses(UserError):
        migrated(tree)


@pytest.mark.parametrize(
    ("keys", "override", "objective", "lost"),
    [
        ({"beta": 0.3, "max_prompt_length": 32}, "objective=kto", "kto", ["max_prompt_length"]),
        ({"beta": 0.3}, "objective=sft", "sft", []),
        ({"loss_type": "apo_zero"}, "dpo.loss_type=hinge", "dpo", ["loss_type"]),
        ({"num_labels": 1}, "objective=reward", "reward", ["num_labels"]),
    ],
)
def test_the_command_line_decides(
    keys: dict[str, Any], override: str, objective: str, lost: list[str], migrated: Migrate
) -> None:
    result = migrated(TRL | keys, overrides=(override,))
    assert result.config().objective == objective
    assert [note.key for note in result.unsupported] == lost
    assert "beta" not in keys or objective == "sft" or result.config().kto.beta == 0.3


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        (TRL | {"loss_type": "sigmoid", "ld_alpha": 0.5}, "ld_alpha"),
        (TRL | {"loss_type": "sigmoid", "use_weighting": True}, "use_weighting"),
        (TRL | {"loss_type": "sigmoid", "f_divergence_type": "js_divergence"}, "f_divergence_type"),
        (TRL | {"loss_type": "ipo", "reference_free": True}, "reference_free"),
        (TRL | {"loss_type": "ipo", "sync_ref_model": True}, "sync_ref_model"),
        (AXOLOTL | {"rl": "dpo", "dpo_use_weighting": True}, "dpo_use_weighting"),
        (AXOLOTL | {"rl": "dpo", "datasets": [{"path": "x", "type": "zephyr.nectar"}]}, "datasets"),
        (FACTORY | {"stage": "dpo", "pref_loss": "orpo", "pref_ftx": 0.1}, "pref_ftx"),
        (FACTORY | {"stage": "dpo", "pref_bco_weight": 0.1}, "pref_bco_weight"),
    ],
)
def test_what_a_loss_lacks_is_named(tree: dict[str, Any], key: str, migrated: Migrate) -> None:
    result = migrated(tree)
    assert [note.key for note in result.unsupported] == [key]
    says([note.reason for note in result.unsupported])


TRAINERS = {
    "dpo": "trl.trainer.dpo_config.DPOConfig",
    "kto": "trl.trainer.kto_config.KTOConfig",
    "orpo": "trl.experimental.orpo.orpo_config.ORPOConfig",
    "simpo": "trl.experimental.cpo.cpo_config.CPOConfig",
    "reward": "trl.trainer.reward_config.RewardConfig",
}


@pytest.mark.ci
def test_keys_and_defaults_of_the_table_are_those_of_trls_trainers() -> None:
    plain = {row.name for each in (SFTConfig, transformers.TrainingArguments) for row in fields(each)}
    for name, place in TRAINERS.items():
        module, _, kind = place.rpartition(".")
        theirs = {row.name: row.default for row in fields(getattr(import_module(module), kind))}
        told = table("trl").tree["objectives"][name]
        assert theirs.keys() - plain - {"is_encoder_decoder"} <= {*told["keys"].split()}, name
        assert {key: theirs[key] for key in told["defaults"]} == told["defaults"], name


def test_a_folder_or_a_file_may_name_the_trainer(tmp_path: Path) -> None:
    for place in ("kto/config.yaml", "run/orpo-8b.yaml"):
        file = tmp_path / place
        file.parent.mkdir()
        file.write_text(yaml.safe_dump(TRL | {"beta": 0.3}))
        assert migrate(file).settings["objective"] in place
