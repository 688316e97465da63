"""Migrated files train as the other trainer would have; each key that a file sets is a setting or named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fewest_keys import AXOLOTL, FACTORY, TORCHTUNE, TRL
from golden import refuses, says
from typer.testing import CliRunner

from meshtune import config
from meshtune.cli import app
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.tools.migrate import Migrated, migrate, text_of
from meshtune.tools.planned import patterns

FILES = Path(__file__).parents[2] / "data" / "migrate"
Migrate = Callable[..., Migrated]
TUNED = TORCHTUNE | {"optimizer": {"_component_": "torch.optim.AdamW", "lr": "3e-4"}}
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


@pytest.mark.parametrize("file", sorted(FILES.glob("*.[jy]*")), ids=lambda file: file.name)
def test_a_file_of_another_trainer_is_answered_by_one_sentence(file: Path) -> None:
    with pytest.raises(UserError, match=f"configuration of (?i:{file.name[:3]})") as caught:
        config.load(file)
    assert len(caught.value.problems) == 1 and f"`meshtune migrate {file}`" in caught.value.problems[0]


def test_a_few_keys_of_another_trainer_are_answered_each(tmp_path: Path) -> None:
    keys = {"learning_rate": 1, "max_steps": 3, "num_train_epochs": 2, "seed": 1}
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump({"model": {"name": "x"}} | keys))
    with pytest.raises(UserError) as caught:
        config.load(tmp_path / "ours.yaml")
    assert len(caught.value.problems) == len(keys)


@pytest.mark.parametrize(
    ("tree", "template"),
    [
        (AXOLOTL | {"datasets": [ALPACA]}, "alpaca"),
        (AXOLOTL | {"datasets": [ALPACA, {"path": "b"}]}, None),
        (AXOLOTL | {"datasets": [ALPACA | {"type": "alpaca_chat.load_qa"}]}, None),
        (AXOLOTL | {"datasets": [ALPACA], "chat_template": "chatml"}, "alpaca"),
        (TUNED, "alpaca"),
        (TUNED | {"dataset": {"_component_": "torchtune.datasets.samsum_dataset"}}, None),
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
    result = migrated(TUNED, dataset_val=rows, run_val_every_n_steps=9, batch_size_val="${batch_size}")
    assert result.settings["data.eval"] == [
        {"path": "yahma/alpaca-cleaned", "split": "train[95%:]", "format": "alpaca"}
    ]
    assert result.settings["eval.every"] == 9
    assert [(note.key, note.value) for note in result.ignored if "val" in note.key] == [("batch_size_val", 2)]
    file = {"_component_": "torchtune.datasets.chat_dataset", "source": "json", "data_files": "a.jsonl"}
    result = migrated(TUNED, dataset_val=file | {"split": "train[95%:]"})
    assert "data.eval" not in result.settings
    assert [note.key for note in result.unsupported if "all rows of the file a.jsonl" in note.reason] == [
        "dataset_val"
    ]


# Each key that a file sets is a setting, or named in the comments #


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
        "deepspeed: by the name of ds_z3.json, a missing file; LLaMA-Factory's default"
    )
    assert origins["checkpoint.every"] == "LLaMA-Factory's default"


def test_fsdps_earlier_spelling_is_known(migrated: Migrate) -> None:
    earlier = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True, "fsdp_version": 1}
    result = migrated(AXOLOTL, gpus=8, fsdp_config=earlier)
    assert result.settings["layout"] == "zero2x8-mb1-ga1"
    assert [note.key for note in result.unsupported] == ["fsdp_config.fsdp_offload_params"]


@pytest.mark.parametrize("value", ["offload", True, False])
def test_activations_that_are_offloaded_stay_so(value: Any, migrated: Migrate) -> None:
    layout = Layout.parse(migrated(AXOLOTL, gradient_checkpointing=value).settings["layout"])
    assert layout.recompute == {"offload": "offload", True: "full", False: "none"}[value]


@pytest.mark.parametrize(
    "keys",
    [
        TRL | {"activation_offloading": True, "gradient_checkpointing": False},
        AXOLOTL | {"activation_offloading": "disk", "gradient_checkpointing": True},
        AXOLOTL | {"activation_offloading": True, "selective_checkpointing": {"save": ["attention"]}},
    ],
)
def test_activations_that_are_offloaded_otherwise_are_named(keys: dict[str, Any], migrated: Migrate) -> None:
    (note,) = migrated(keys).unsupported
    says(f"{note.key}: {note.reason}")


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
    assert ended.stderr.splitlines()[0].endswith(f", reading {file} …")
    says(ended.stderr)
    assert "#   early_stopping: 3" in ended.stdout


def test_the_command_says_that_training_refuses_the_layout(tmp_path: Path) -> None:
    file, sizes = tmp_path / "theirs.yaml", {"tensor_parallel_size": 3}
    for model in ("Qwen/Qwen3-8B", "of/nobody"):
        file.write_text(yaml.safe_dump(AXOLOTL | sizes | {"base_model": model}))
        says(CliRunner().invoke(app, ["migrate", str(file), "--gpus", "3"]).stderr)


def test_evaluation_without_held_out_rows_is_commented_out_and_takes_effect_with_them(tmp_path: Path) -> None:
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


# Configurations of the alignment handbook and of Open R1, whose scripts are TRL's #

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


def test_adapters_of_experts_parameters_are_of_experts(migrated: Migrate) -> None:
    named = {"lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    trl, axolotl = TRL | {"use_peft": True} | named, AXOLOTL | {"adapter": "lora"} | named
    for tree, expected in (
        (trl, ["experts"]),
        (trl | {"lora_target_modules": ["q_proj"]}, ["q_proj", "experts"]),
        (axolotl | {"lora_target_linear": True}, ["all-linear", "experts"]),
        ({"lora_target_linear": True} | axolotl, ["all-linear", "experts"]),
    ):
        assert migrated(tree).settings["lora.target_modules"] == expected
    result = migrated(trl | {"lora_target_parameters": ["mlp.gate.weight"]})
    assert result.settings["lora.target_modules"] == ["q_proj", "v_proj"]
    says(note.reason for note in result.unsupported)


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


BNB = {"bnb_4bit_use_double_quant": True, "llm_int8_has_fp16_weight": False}


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (AXOLOTL | {"load_in_8bit": True, "adapter": "lora"}, "load_in_8bit"),
        (TRL | {"use_peft": True, "load_in_4bit": True}, "load_in_4bit"),
        (FACTORY | {"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method"),
        (AXOLOTL | {"optimizer": "lion_8bit"}, "optimizer"),
        (AXOLOTL | {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": False}, ""),
        (AXOLOTL | {"adapter": "qlora", "gptq": True, "bnb_config_kwargs": BNB}, ""),
        (
            AXOLOTL | {"adapter": "qlora", "bnb_config_kwargs": BNB | {"bnb_4bit_quant_type": "fp4"}},
            "bnb_config_kwargs.bnb_4bit_quant_type",
        ),
        (AXOLOTL | {"adapter": "qlora", "quantize_moe_experts": True}, ""),
        (AXOLOTL | {"adapter": "qlora", "quantize_moe_experts": False}, "quantize_moe_experts"),
        (FACTORY | {"quantization_bit": 4, "quantization_type": "nf4"}, ""),
        (TORCHTUNE | {"model": {"_component_": "torchtune.models.mistral.qlora_mistral_7b"}}, ""),
        (
            TORCHTUNE
            | {"model": {"_component_": "torchtune.models.llama3.lora_llama3_8b", "quantize_base": True}},
            "",
        ),
    ],
)
def test_bits_that_are_lost_have_no_counterpart(keys: dict[str, Any], key: str, migrated: Migrate) -> None:
    result = migrated(keys)
    assert [note.key for note in result.unsupported] == [key] * bool(key)
    assert result.settings.get("method", "full") == ("full" if key == "optimizer" else "qlora")


def test_switches_that_are_off_leave_weights_in_16_bits(migrated: Migrate) -> None:
    keys = {"use_peft": True, "load_in_4bit": False, "bnb_4bit_quant_type": "nf4"}
    result = migrated(TRL | keys)
    assert result.settings["method"] == "lora" and not result.unsupported


def test_a_rate_that_never_falls_is_valid(migrated: Migrate) -> None:
    assert migrated(AXOLOTL, cosine_min_lr_ratio=1.0).config().train.min_lr_ratio == 1


# Files of accelerate and DeepSpeed that a trainer is started with #

ACCELERATE = {  # as `accelerate config` writes one
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no", "machine_rank": 0, "main_training_function": "main", "mixed_precision": "bf16",
    "num_machines": 1, "num_processes": 8, "rdzv_backend": "static", "same_network": True, "use_cpu": False,
}  # fmt: skip
ZERO3 = {
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "none", "zero3_init_flag": True},
}
FSDP1 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}
FSDP2 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}}
CONTEXT = {"parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_cp_size": 4}}


@pytest.mark.parametrize(
    ("trainer", "launcher", "layout"),
    [
        (TRL, ACCELERATE, "dp8-mb8-ga1-full"),
        (TRL, ACCELERATE | ZERO3, "zero3x8-mb8-ga1-full"),
        (TRL, ACCELERATE | FSDP1, "zero2x8-mb8-ga1-full"),
        (TRL, ACCELERATE | FSDP2 | CONTEXT, "zero3x2-cp4-mb8-ga1-full"),
        (FACTORY, ACCELERATE | FSDP2 | {"num_processes": 2}, "zero3x2-mb8-ga1-full"),
        (AXOLOTL, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, "mb1-ga1"),
    ],
)
def test_a_launcher_s_file_gives_the_layout(
    trainer: dict[str, Any], launcher: dict[str, Any], layout: str, migrated: Migrate
) -> None:
    result = migrated(trainer, launcher=launcher)
    assert result.settings["layout"] == layout
    assert not [note for note in result.unsupported if note.key.startswith("launcher.yaml")]


def test_the_trainer_s_own_keys_and_gpus_come_first(migrated: Migrate) -> None:
    result = migrated(TRL, gpus=4, deepspeed={"zero_optimization": {"stage": 1}}, launcher=ACCELERATE | ZERO3)
    assert result.settings["layout"] == "zero1x4-mb8-ga1-full"
    assert "launcher.yaml: deepspeed" in {note.key for note in result.ignored}


@pytest.mark.parametrize(
    ("kind", "stored", "precision"),
    [
        ("lora", None, "bf16"),
        ("lora", "bfloat16", "bf16"),
        ("lora", "float32", "fp32"),
        ("full", None, "fp32"),
    ],
)
def test_llama_factory_upcasts_only_what_it_trains(
    kind: str, stored: str | None, precision: str, migrated: Migrate, tmp_path: Path
) -> None:
    if stored:
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "config.json").write_text(json.dumps({"dtype": stored}))
    result = migrated(FACTORY, finetuning_type=kind, model_name_or_path="base")
    assert result.settings["train.precision"] == precision
    says(result.origins["train.precision"])


def test_precision_of_a_launcher_counts_where_the_trainer_has_none(migrated: Migrate) -> None:
    assert migrated(FACTORY, launcher=ACCELERATE).settings["train.precision"] == "bf16"
    assert migrated(FACTORY, pure_bf16=True, launcher=ACCELERATE).settings["train.precision"] == "bf16-pure"


def test_what_a_launcher_changes_and_is_not_here_is_named(migrated: Migrate) -> None:
    offload = {"zero_stage": 2, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    result = migrated(
        TRL, launcher=ACCELERATE | ZERO3 | {"deepspeed_config": offload, "fp8_config": {"backend": "TE"}}
    )
    assert {"deepspeed", "launcher.yaml: fp8_config"} <= {note.key for note in result.unsupported}
    assert result.settings["train.offload"] == "optimizer"


def test_updates_in_the_backward_and_paged_states_have_counterparts(migrated: Migrate) -> None:
    settings = migrated(TORCHTUNE, optimizer_in_bwd=True).settings
    assert settings["train.step_in_backward"] is True and settings["train.max_grad_norm"] == 0
    assert migrated(TRL, optim="paged_adamw_8bit").settings["train.offload"] == "optimizer"
    assert "train.offload" not in migrated(TRL, optim="adamw_torch").settings


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "WarmupLR"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "AdamW"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "fp16": {"enabled": "auto"}}, ""),
    ],
)
def test_parts_of_deepspeed_s_file_that_are_not_read_are_named(
    more: dict[str, Any], lost: str, migrated: Migrate
) -> None:
    result = migrated(TRL, launcher={"zero_optimization": {"stage": 2}} | more)
    assert [lost in note.reason for note in result.unsupported] == [True] * bool(lost)


@pytest.mark.parametrize(
    ("trainer", "launcher"), [(TRL, {"lr": 1}), (TORCHTUNE, ACCELERATE)], ids=["neither", "torchtune"]
)
def test_other_files_beside_are_refused(
    trainer: dict[str, Any], launcher: dict[str, Any], migrated: Migrate
) -> None:
    with refuses(UserError):
        migrated(trainer, launcher=launcher)


def test_a_launcher_s_file_in_the_trainer_s_place_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(ACCELERATE))
    with refuses(UserError):
        migrate(file)
