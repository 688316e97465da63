"""Other trainers' configurations as settings: values, layouts, rows, refusals."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import fewest_keys
import pytest
import transformers
import trl
import yaml
from fewest_keys import AXOLOTL, TRL
from golden import refuses, says
from jsonschema import Draft202012Validator

from meshtune import config
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.reference.schema import schema
from meshtune.tools.exporters import CONVERSIONS, MAKERS, conversion_of
from meshtune.tools.job import Conversion
from meshtune.tools.migrate import Migrated, migrate, text_of
from meshtune.tools.table import OTHERS, TOOLS, table

FILES = Path(__file__).parents[2] / "data" / "migrate"
Migrate = Callable[..., Migrated]
FACTORY = fewest_keys.FACTORY | {"template": "llama3"}
END = {"special_tokens": {"eos_token": "<|eot_id|>"}}
OPTIMIZER = {"_component_": "torch.optim.AdamW", "lr": "3e-4"}
TORCHTUNE = fewest_keys.TORCHTUNE | {"tokenizer": {"max_seq_len": 128}, "optimizer": OPTIMIZER}
ENTRIES = {tool: table(tool).own.values() for tool in (*TOOLS, *OTHERS)}


@pytest.mark.parametrize("tool", ENTRIES)
def test_every_conversion_of_a_table_exists(tool: str) -> None:
    for entry in ENTRIES[tool]:
        assert not entry.setting or isinstance(conversion_of(entry), Conversion)


def test_every_conversion_is_of_a_table() -> None:
    used = {entry.conversion for entries in ENTRIES.values() for entry in entries}
    assert (CONVERSIONS | MAKERS).keys() - used == set()


@pytest.mark.parametrize(
    "file", sorted(path for path in FILES.iterdir() if path.is_file()), ids=lambda f: f.name
)
def test_the_written_file_loads_and_is_what_was_converted(file: Path, tmp_path: Path) -> None:
    result = migrate(file, gpus=8)
    written = tmp_path / "ours.yaml"
    written.write_text(text_of(result, file.name))
    assert config.load(written) == result.config()
    Draft202012Validator(schema()).validate(yaml.safe_load(written.read_text()))


@pytest.mark.parametrize(
    "file", sorted(path for path in FILES.iterdir() if path.is_file()), ids=lambda f: f.name
)
def test_every_key_of_a_file_is_a_setting_or_in_a_comment(file: Path) -> None:
    result = migrate(file)
    text = text_of(result, file.name)
    notes = (*result.unsupported, *result.left_out, *result.ignored, *result.without_effect)
    noted = {note.key for note in notes} | {*result.off}
    for key, value in result.job.given.items():
        entry = result.job.table.entry(key)  # fmt: skip
        assert entry is not None
        if not entry.setting and not isinstance(value, dict):
            assert key in noted and key in text


@pytest.mark.parametrize(
    ("tree", "more", "expected"),
    [
        (AXOLOTL, "adapter: lora, lora_r: 4, lora_target_linear: true, lora_alpha: 8",
         "method: lora, lora.r: 4, lora.target_modules: all-linear, lora.alpha: 8"),
        (AXOLOTL, "lora_r: 4", "lora.r: null"),
        (AXOLOTL, "train_on_inputs: true, excess_length_strategy: truncate",
         "data.train_on: all, data.overlong: auto, data.seq_len: 512, data.packing: false"),
        (AXOLOTL, "val_set_size: 0.1, evals_per_epoch: 4, saves_per_epoch: 2",
         "eval.every: 0.25 epoch, checkpoint.every: 0.5 epoch, data.eval_split: 0.1"),
        (AXOLOTL, "bf16: auto", "train.precision: bf16"),
        (AXOLOTL, "bf16: false, float32: true", "train.precision: fp32"),
        (AXOLOTL, "optimizer: paged_adamw_8bit, warmup_ratio: 0.1",
         "train.optimizer: adamw-8bit, train.warmup_ratio: 0.1"),
        (AXOLOTL, "wandb_project: p", "log.to: [console, jsonl, wandb], log.project: p"),
        (AXOLOTL, "", "checkpoint.every: 1 epoch"),
        (AXOLOTL, "optimizer: lion_8bit, adam_beta1: 0.8", "train.optimizer: lion"),
        (AXOLOTL, "optimizer: muon, adam_beta1: 0.8",
         "train.optimizer: muon, train.adam_betas: [0.8, 0.999]"),
        (AXOLOTL, "optimizer: schedule_free_adamw", "train.optimizer: null"),
        (AXOLOTL, "optimizer: adafactor, adam_epsilon: 1.0e-06", "train.adam_eps: null"),
        (AXOLOTL, "learning_rate: 2e-5", "train.learning_rate: 2.0e-05"),
        (AXOLOTL, "max_steps: 10, num_epochs: 3", "train.max_steps: 10, train.num_epochs: null"),
        (TRL, "",
         "train.learning_rate: 2.0e-05, train.num_epochs: 3.0, train.lr_scheduler: linear, "
         "train.warmup_steps: 0, data.packing: false, layout: mb8-ga1-full"),
        (TRL, "learning_rate: 0.001, warmup_steps: 0.1", "train.warmup_ratio: 0.1, train.warmup_steps: null"),
        (TRL, "lr_scheduler_type: constant, warmup_steps: 5", "train.warmup_steps: null"),
        (TRL, 'lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: \'{"min_lr_rate": 0.2}\'',
         "train.lr_scheduler: cosine_with_min_lr, train.min_lr_ratio: 0.2"),
        (TRL, "eval_strategy: epoch, save_strategy: 'no'", "eval.every: 1 epoch, checkpoint.every: 0"),
        (TRL, "eval_strategy: steps, eval_steps: 0.1", "eval.every: 0.3 epoch"),
        (TRL, "dtype: bfloat16", "train.precision: bf16-pure"),
        (TRL, "bf16: false", "train.precision: fp32"),
        (TRL, "assistant_only_loss: true", "data.train_on: assistant"),
        (TRL, "activation_checkpointing: false", "layout: mb8-ga1"),
        (TRL, "activation_offloading: true", "layout: mb8-ga1-offload"),
        (AXOLOTL, "activation_offloading: true, gradient_checkpointing: true", "layout: mb1-ga1-offload"),
        (AXOLOTL, "activation_offloading: false, gradient_checkpointing: true", "layout: mb1-ga1-full"),
        (FACTORY, "use_unsloth_gc: true", "layout: mb8-ga1-offload"),
        (TORCHTUNE, "enable_activation_offloading: true, enable_activation_checkpointing: true",
         "layout: mb2-ga1-offload"),
        (AXOLOTL, "fp8: true, bf16: true", "train.precision: fp8"),
        (FACTORY, "fp8: true, fp8_enable_fsdp_float8_all_gather: true", "train.precision: fp8"),
        (TRL, "push_to_hub: true, hub_model_id: me/x", "hub.push_to: me/x"),
        (TRL, "hub_model_id: me/x", "hub.push_to: null"),
        (TRL, "use_cpu: true, report_to: [wandb]", "train.device: cpu"),
        (TRL, "report_to: none", "log.to: [console, jsonl]"),
        (FACTORY, "lora_rank: 4", "method: lora, lora.r: 4, lora.alpha: 8, data.train_on: assistant"),
        (FACTORY, "mask_history: true", "data.train_on: completion, data.chat_template: llama3"),
        (FACTORY, "use_muon: true, optim: adamw_torch, adam_epsilon: 1.0e-06",
         "train.optimizer: muon, train.adam_eps: 1.0e-06"),
        (FACTORY, "use_muon: false, optim: lion_32bit", "train.optimizer: lion"),
        (FACTORY, "finetuning_type: full, pure_bf16: true", "method: full, train.precision: bf16-pure"),
        (FACTORY, "neat_packing: true", "data.packing: true"),
        (FACTORY, "stage: pt", "data.packing: true, data.train_on: all"),
        (FACTORY, "max_samples: 7, enable_thinking: false",
         "data.max_samples: 7, data.chat_template_kwargs: {enable_thinking: false}"),
        (TORCHTUNE, "",
         "train.learning_rate: 0.0003, train.lr_scheduler: constant, train.max_grad_norm: 0.0, "
         "data.train_on: all, data.seq_len: 128, method: full"),
        (TORCHTUNE, "epochs: 2, max_steps_per_epoch: 5", "train.max_steps: 10"),
        (TORCHTUNE, "model: {_component_: torchtune.models.qwen2.lora_qwen2_0_5b, lora_rank: 8, "
         "lora_attn_modules: [q_proj, output_proj], apply_lora_to_mlp: false}",
         "method: lora, lora.target_modules: [q_proj, o_proj]"),
        # defaults of the tool, also where a key is off
        (TORCHTUNE, "", "train.weight_decay: 0.01"),
        (TORCHTUNE, "optimizer: {_component_: bnb.optim.Lion8bit}", "train.weight_decay: null"),
        (AXOLOTL, "", "checkpoint.keep: 4, eval.at_start: null"),
        (AXOLOTL, "val_set_size: 0.1, evals_per_epoch: 4", "eval.at_start: true"),
        (AXOLOTL, "val_set_size: 0.1, eval_steps: 4", "eval.at_start: true"),
        (AXOLOTL, "val_set_size: 0.1, eval_strategy: 'no'", "eval.at_start: null"),
        (TRL, "eval_strategy: epoch", "eval.at_start: null"),
        (FACTORY, "", "log.every: null"),
        (FACTORY, "eval_strategy: steps, val_size: 0.1", "eval.every: 500"),
        (TRL, "assistant_only_loss: false", "data.train_on: all"),
        (AXOLOTL, "adapter: lora, lora_target_linear: false", "lora.target_modules: [q_proj, v_proj]"),
        (AXOLOTL, "tiled_mlp: true, tiled_mlp_num_shards: 8, sequence_len: 65536", "train.mlp_tile: 8192"),
        (TRL, "warmup_ratio: 0.0", "train.warmup_steps: 0"),
    ],
)  # fmt: skip
def test_a_key_becomes_its_setting(tree: dict[str, Any], more: str, expected: str, migrated: Migrate) -> None:
    """More keys of the file, and settings that they make, as YAML."""
    settings = migrated(tree | yaml.safe_load(f"{{{more}}}")).settings
    wanted = yaml.safe_load(f"{{{expected}}}")
    assert {name: settings.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("tree", "gpus", "layout", "batch"),
    [
        (AXOLOTL | {"micro_batch_size": 2, "gradient_accumulation_steps": 4}, 1, "mb2-ga4", 8),
        (AXOLOTL | {"micro_batch_size": 2}, 4, "dp4-mb2-ga1", 8),
        (AXOLOTL | {"fsdp_config": {"reshard_after_forward": True}}, 8, "zero3x8-mb1-ga1", 8),
        (AXOLOTL | {"fsdp_config": {"reshard_after_forward": False}}, 8, "zero2x8-mb1-ga1", 8),
        (AXOLOTL | {"fsdp_config": {"reshard_after_forward": True}}, 1, "mb1-ga1", 1),
        (AXOLOTL | {"fsdp": ["hybrid_shard", "auto_wrap"]}, 16, "dp2-zero3x8-mb1-ga1", 16),
        (AXOLOTL | {"deepspeed": "deepspeed_configs/zero2.json"}, 4, "zero2x4-mb1-ga1", 4),
        (AXOLOTL | {"deepspeed": {"zero_optimization": {"stage": 1}}}, 2, "zero1x2-mb1-ga1", 2),
        (AXOLOTL | {"dp_shard_size": 2, "tensor_parallel_size": 2}, 8, "dp2-zero3x2-tp2-mb1-ga1", 4),
        (AXOLOTL | {"context_parallel_size": 4}, 8, "dp2-cp4-mb1-ga1", 2),
        (AXOLOTL | {"expert_parallel_size": 2, "dp_shard_size": 2}, 4, "dp2-zero3x2-ep2-mb1-ga1", 4),
        (
            AXOLOTL | {"expert_parallel_size": 8, "fsdp_config": {"reshard_after_forward": True}},
            8,
            "zero3x8-ep8-mb1-ga1",
            8,
        ),
        (TRL | {"parallelism_config": {"tp_size": 2, "dp_shard_size": 2}}, 4, "zero3x2-tp2-mb8-ga1-full", 16),
        (TORCHTUNE | {"tensor_parallel_dim": 2}, 8, "zero3x4-tp2-mb2-ga1", 8),
    ],
)
def test_sharding_becomes_a_layout(
    tree: dict[str, Any], gpus: int, layout: str, batch: int, migrated: Migrate
) -> None:
    settings = migrated(tree, gpus=gpus).settings
    assert (settings["layout"], settings["train.global_batch_size"]) == (layout, batch)
    assert Layout.parse(layout).world == gpus and Layout.parse(layout).global_batch_size == batch


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 4},
        {"dp_replicate_size": 2, "dp_shard_size": 4, "tensor_parallel_size": 2},
        {"dp_replicate_size": 2},
        {"expert_parallel_size": 2},
    ],
)
def test_sizes_that_do_not_make_the_gpus_are_refused(sizes: dict[str, int], migrated: Migrate) -> None:
    with refuses(UserError):
        migrated(AXOLOTL, **sizes)


@pytest.mark.parametrize(
    "sharding",
    [{"fsdp_config": {"reshard_after_forward": True}}, {"deepspeed": {"zero_optimization": {"stage": 3}}}],
)
def test_parameters_are_sharded_over_context_ranks(sharding: dict[str, Any], migrated: Migrate) -> None:
    result = migrated(AXOLOTL, gpus=4, context_parallel_size=4, **sharding)
    assert result.settings["layout"] == "zero3x1-cp4-mb1-ga1"


@pytest.mark.parametrize(
    ("rows", "source"),
    [
        ("path: a, type: alpaca, split: 'train[:10]'", "path: a, format: alpaca, split: 'train[:10]'"),
        ("path: json, data_files: x.jsonl, type: completion, field: body",
         "path: x.jsonl, format: text, columns: {text: body}"),
        ("path: org/x, name: en, type: chat_template, field_messages: turns",
         "path: 'org/x:en', format: messages, columns: {messages: turns}"),
        ("path: x, type: chat_template, message_property_mappings: {role: from, content: value}, "
         "field_messages: conversations, roles: {assistant: [bot]}",
         "path: x, format: sharegpt, roles: {bot: assistant}"),
        ("path: org/x, data_files: [a.parquet]", "path: 'hf://datasets/org/x/a.parquet', format: messages"),
        ("path: org/x, type: chat_template, field_tools: functions",
         "path: org/x, format: messages, columns: {tools: functions}"),
        ("path: x, type: {field_instruction: q, field_output: a}",
         "path: x, format: alpaca, columns: {instruction: q, output: a}"),
    ],
)  # fmt: skip
def test_axolotls_rows(rows: str, source: str, migrated: Migrate) -> None:
    datasets = [yaml.safe_load(f"{{{rows}}}")]
    assert migrated(AXOLOTL, datasets=datasets).settings["data.train"] == [yaml.safe_load(f"{{{source}}}")]


@pytest.mark.parametrize(
    "tree",
    [
        TRL | {"datasets": [{"path": "json", "data_files": "rows.jsonl", "split": "train[:90%]"}]},
        TORCHTUNE
        | {
            "dataset": {
                "_component_": "torchtune.datasets.instruct_dataset",
                "source": "json", "data_files": "rows.jsonl", "split": "train[:90%]",
            }
        },
    ],
)  # fmt: skip
def test_a_split_of_a_file_is_left_out_and_named(tree: dict[str, Any], migrated: Migrate) -> None:
    result = migrated({key: value for key, value in tree.items() if key != "dataset_name"})
    assert "split" not in result.settings["data.train"][0]
    remark = "all rows of the file rows.jsonl, not split train[:90%]"
    assert any(remark in origin for origin in result.origins.values())


def test_llama_factorys_rows_are_those_of_dataset_info() -> None:
    result = migrate(FILES / "llama-factory-full-ds3.yaml")
    (source,) = result.settings["data.train"]
    assert source["path"].endswith("data/chats.json") and source["format"] == "messages"
    assert source["columns"] == {"messages": "turns", "system": "rules"}


def test_torchtunes_rows(migrated: Migrate) -> None:
    chats = {
        "_component_": "torchtune.datasets.chat_dataset", "source": "json", "data_files": "x.json",
        "conversation_column": "turns", "conversation_style": "openai",
    }  # fmt: skip
    settings = migrated(TORCHTUNE, dataset=chats).settings
    assert settings["data.train"] == [
        {"path": "x.json", "format": "messages", "columns": {"messages": "turns"}}
    ]
    assert settings["data.train_on"] == "assistant"


def test_several_components_of_torchtune_are_several_sources(migrated: Migrate) -> None:
    rows = [
        {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "train_on_input": False},
        {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "text",
            "data_files": ["a.txt"],
        },
    ]
    result = migrated(TORCHTUNE, dataset=rows)
    assert result.settings["data.train"] == [
        {"path": "yahma/alpaca-cleaned", "format": "alpaca"},
        {"path": "a.txt", "format": "text"},
    ]
    says([result.origins["data.train"], *(note.reason for note in result.unsupported)])
    assert result.settings["data.train_on"] == "assistant"


def test_torchtunes_references_are_replaced(migrated: Migrate) -> None:
    checkpointer = {"checkpoint_dir": "${output_dir}/base"}
    assert migrated(TORCHTUNE, output_dir="/o", checkpointer=checkpointer).settings["model.name"] == "/o/base"


@pytest.mark.parametrize(
    ("tree", "key", "setting"),
    [
        (AXOLOTL | {"lora_r": 4}, "lora_r", "lora.r"),
        (AXOLOTL | {"early_stopping_patience": 3}, "early_stopping_patience", "eval.early_stopping"),
        (
            AXOLOTL | {"val_set_size": 0.1, "load_best_model_at_end": True},
            "load_best_model_at_end",
            "eval.keep_best",
        ),
        (AXOLOTL | {"val_set_size": 1, "test_datasets": [{"path": "b"}]}, "val_set_size", "data.eval_split"),
        (AXOLOTL | {"streaming": True, "val_set_size": 5, "max_steps": 9}, "val_set_size", "data.eval_split"),
        (AXOLOTL | {"optimizer": "lion", "adam_epsilon": 1e-6}, "adam_epsilon", "train.adam_eps"),
        (FACTORY | {"max_new_tokens": 9}, "max_new_tokens", "eval.max_new_tokens"),
    ],
)
def test_a_setting_that_would_take_no_effect_is_left_out_and_said(
    tree: dict[str, Any], key: str, setting: str, migrated: Migrate
) -> None:
    result = migrated(tree)
    assert setting not in result.settings
    assert [note.key for note in result.without_effect if note.key == key] == [key]


OTHER_JOBS: list[dict[str, Any]] = [
    TRL | {"beta": 0.05, "max_prompt_length": 512},
    TRL | {"reward_funcs": ["accuracy"], "num_generations": 8},
    TRL | {"teacher_model_name_or_path": "org/teacher"},
    TRL | {"num_labels": 3},
    TRL | {"loss_type": "dapo"},
    TRL | {"vllm_mode": "colocate", "use_vllm": True, "teacher_model_name_or_path": "t"},
    TRL | {"vllm_mode": "colocate", "temperature": 0.9, "top_p": 1.0},
    TRL | {"lora_task_type": "SEQ_2_SEQ_LM"},
    TRL | {"dataset_mixture": {"datasets": [{"id": "x", "columns": ["chosen", "rejected"]}]}},
    {key: value for key, value in TRL.items() if key != "model_name_or_path"},
    AXOLOTL | {"rl": "gdpo"},
    AXOLOTL | {"process_reward_model": True},
    AXOLOTL | {"adapter": "ia3"},
    AXOLOTL | {"hatchery": {"backend": "tinker"}},
    AXOLOTL | {"diffusion": {"noise_schedule": "linear"}},
    AXOLOTL | {"model_type": "AutoModelForSequenceClassification", "num_labels": 3},
    AXOLOTL | {"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]},
    AXOLOTL | {"warmup_ratio": "much"},
    FACTORY | {"stage": "ppo"},
    FACTORY | {"do_train": False},
    FACTORY | {"do_train": False, "do_predict": True},
    FACTORY | {"do_train": 0, "do_eval": True},
    FACTORY | {"finetuning_type": "freeze"},
    FACTORY | {"finetuning_type": "oft"},
    TORCHTUNE | {"loss": {"_component_": "torchtune.rlhf.loss.PPOLoss"}},
    TORCHTUNE | {"loss": {"_component_": "torchtune.modules.loss.ForwardKLLoss"}},
    {"model": {"_component_": "torchtune.models.llama2.llama2_7b"}, "tasks": ["truthfulqa_mc2"]},
    {"model_name_or_path": "x", "template": "qwen3", "finetuning_type": "lora"},
    {"model_name_or_path": "x", "template": "qwen3", "export_dir": "out"},
    {"model_name_or_path": "x", "template": "qwen3", "infer_backend": "vllm"},
    {"model_name_or_path": "x", "export_dir": "out", "export_size": 5},
    {"model_name_or_path": "x", "dataset_mixer": {"a": 1.0}, "use_slow_tokenizer": 0, "with_tracking": True},
    {"model": "x", "model_class": "llm", "dist_config": {"name": "fsdp2"}},
    {"a": 1, "b": 2, "learning_rate": 1},
]


@pytest.mark.parametrize("tree", OTHER_JOBS)
def test_another_job_is_refused(tree: dict[str, Any], migrated: Migrate) -> None:
    with refuses(UserError):
        migrated(tree)


@pytest.mark.parametrize("tree", [AXOLOTL, TRL, FACTORY, TORCHTUNE])
def test_keys_that_are_switched_off_tell_no_other_job(tree: dict[str, Any], migrated: Migrate) -> None:
    off = {"rl": None, "beta": None, "reward_model": False, "do_predict": False, "export_dir": None}
    migrated(tree | {key: value for key, value in off.items() if key not in tree})


@pytest.mark.parametrize(
    "tree",
    [
        FACTORY | {"pref_beta": 0.1, "kl_coef": 0.1},  # left in a file whose stage is sft
        TRL | {"loss_type": "nll", "do_eval": True},
        AXOLOTL | {"dpo_beta": 0.1, "orpo_alpha": 0.1, "kd_trainer": False, "kd_alpha": 0.5},  # without rl
        TORCHTUNE | {"log": {"_component_": "my.support.corpora_logger"}},  # no PPO, no ORPO
    ],
)
def test_words_and_defaults_of_other_jobs_do_not_tell_them(tree: dict[str, Any], migrated: Migrate) -> None:
    migrated(tree)


def test_an_axolotl_batch_is_that_of_a_gpu_in_a_step(migrated: Migrate) -> None:
    own = {key: value for key, value in AXOLOTL.items() if key != "gradient_accumulation_steps"}
    result = migrated(own | {"micro_batch_size": 2, "batch_size": 8})
    assert result.settings["layout"].endswith("mb2-ga4") and result.settings["train.global_batch_size"] == 8


def test_an_empty_type_is_rows_of_tokens_and_no_answers_are_off(migrated: Migrate) -> None:
    result = migrated(
        AXOLOTL | {"datasets": [{"path": "rows.jsonl", "type": None}], "eval_max_new_tokens": 0}
    )
    assert result.settings["data.train"] == [{"path": "rows.jsonl", "format": "tokens"}]
    assert "eval.max_new_tokens" not in result.settings


def test_a_layout_of_more_ranks_than_gpus_names_the_number(migrated: Migrate) -> None:
    with pytest.raises(UserError, match="such as --gpus 4"):
        migrated(
            AXOLOTL
            | {"context_parallel_size": 4, "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
        )


def test_ranks_of_experts_that_share_a_batch_are_named(migrated: Migrate) -> None:
    sizes = {"parallelism_config": {"dp_shard_size": 2, "ep_size": 2}}
    notes = {note.key: note.reason for note in migrated(TRL | sizes, gpus=2).unsupported}
    says(notes["parallelism_config"])


def test_all_refusals_are_said_at_once(migrated: Migrate) -> None:
    with pytest.raises(UserError) as refused:
        migrated(AXOLOTL, rl="grpo", adapter="ia3", num_epochs="x")
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        (AXOLOTL | {"load_in_4bit": True}, "load_in_4bit"),
        (AXOLOTL | {"lr_scheduler": "rex"}, "lr_scheduler"),
        (AXOLOTL | {"fp16": True}, "fp16"),
        (AXOLOTL | {"not_a_key": 1}, "not_a_key"),
        (AXOLOTL | {"datasets": [{"path": "x", "roles_to_train": ["user"]}]}, "datasets.roles_to_train"),
        (AXOLOTL | {"datasets": [{"path": "x", "roles_to_train": []}]}, "datasets.roles_to_train"),
        (AXOLOTL | {"datasets": [{"path": "x", "shards": 9}, {"path": "y", "shards": 0}]}, "datasets.shards"),
        (AXOLOTL | {"datasets": [{"path": "x", "train_on_eos": "all"}]}, "datasets.train_on_eos"),
        (AXOLOTL | {"datasets": [{"path": "x", "field_thinking": "hm"}]}, "datasets.field_thinking"),
        (AXOLOTL | {"datasets": [{"path": "x", "type": "input_output"}]}, "datasets"),
        (AXOLOTL | {"datasets": [{"path": "x", "type": "sharegpt", "conversation": "vicuna"}]}, "datasets"),
        (AXOLOTL | {"pretraining_dataset": {"path": "x", "skip": 9}, "max_steps": 9}, "pretraining_dataset"),
        (AXOLOTL | {"chat_template": "tokenizer_default_fallback_phi_4"}, "chat_template"),
        (FACTORY | {"template": "x" * 300}, "template"),
        (AXOLOTL | {"chat_template": "gemma", **END}, "special_tokens.eos_token"),
        (AXOLOTL | {"plugins": ["axolotl.integrations.liger.LigerPlugin", "mine.Plugin"]}, "plugins"),
        (AXOLOTL | {"dense_mixer": True}, "dense_mixer"),
        (AXOLOTL | {"shuffle_merged_datasets": False}, "shuffle_merged_datasets"),
        (TORCHTUNE | {"shuffle": False}, "shuffle"),
        (FACTORY | {"disable_shuffling": True}, "disable_shuffling"),
        (FACTORY | {"freeze_language_model": True}, "freeze_language_model"),
        (TRL | {"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        (TRL | {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy"),
        (TORCHTUNE | {"loss": {"_component_": "mine.FocalLoss"}}, "loss._component_"),
        (TRL | {"loss_type": "dft"}, "loss_type"),
        (TRL | {"resume_from_checkpoint": "out/checkpoint-5"}, "resume_from_checkpoint"),
        (TORCHTUNE | {"dataset": {"_component_": "torchtune.datasets.multimodal.x"}}, "dataset._component_"),
    ],
)
def test_what_has_no_counterpart_is_named_with_the_reason(
    tree: dict[str, Any], key: str, migrated: Migrate
) -> None:
    result = migrated(tree)
    assert [note.key for note in result.unsupported if note.key == key] == [key]
    assert f"{key}: " in text_of(result, "theirs.yaml")


@pytest.mark.parametrize(
    "tree",
    [
        AXOLOTL | {"datasets": [{"path": "x", "roles_to_train": ["assistant"], "train_on_eos": "turn"}]},
        AXOLOTL | {"shuffle_merged_datasets": True},
        AXOLOTL | {"chat_template": "llama3", **END},
        AXOLOTL | {"datasets": [{"path": "x", "field_thinking": "thinking"}]},
        TRL | {"packing": True, "packing_strategy": "bfd", "average_tokens_across_devices": True},
        AXOLOTL | {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
        TORCHTUNE | {"loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}},
        TORCHTUNE | {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}},
    ],
)
def test_what_is_so_anyway_is_not_lost(tree: dict[str, Any], migrated: Migrate) -> None:
    assert migrated(tree).unsupported == []


def test_the_command_line_completes_a_file_without_model_or_rows(tmp_path: Path) -> None:
    file = tmp_path / "arguments.json"
    file.write_text(
        json.dumps({"learning_rate": 1e-4, "output_dir": "o", "eval_strategy": "steps", "eval_steps": 5})
    )
    result = migrate(file, overrides=["model.name=m", "data.train=a.jsonl", "data.eval=b.jsonl"])
    assert result.config().eval.every == 5 and "# the command line" in text_of(result, "arguments.json")


@pytest.mark.ci
def test_defaults_are_those_of_the_installed_classes() -> None:
    """Beside what TRL leaves open and then sets: bf16, which labels it trains on, LoRA's modules."""
    for tool, classes in (
        ("transformers", [transformers.TrainingArguments]),
        ("trl", [trl.ModelConfig, trl.SFTConfig]),
    ):
        theirs = {row.name: row.default for each in classes for row in fields(each)}
        own = {key: value for key, value in table(tool).defaults.items() if key != "output_dir"}
        if tool == "trl":
            left_open = ("bf16", "completion_only_loss", "lora_target_modules")
            assert [theirs[key] for key in left_open] == [None] * 3
            own = {key: value for key, value in own.items() if key not in left_open}
        for key, value in own.items():
            assert theirs[key] == value or (theirs[key] is None and value is False), key


def test_a_pickle_of_arguments_is_named_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04.")
    with refuses(UserError):
        migrate(tmp_path / "training_args.bin")


def test_axolotls_plain_text_is_split_and_not_dropped(migrated: Migrate) -> None:
    result = migrated(AXOLOTL | {"datasets": [{"path": "rows.jsonl", "type": "completion"}]})
    assert result.settings["data.overlong"] == "auto" and result.settings["data.train"][0]["format"] == "text"
