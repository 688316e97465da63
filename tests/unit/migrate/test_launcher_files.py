"""Files of accelerate and DeepSpeed that a trainer is started with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fewest_keys import AXOLOTL, FACTORY, TORCHTUNE, TRL
from golden import refuses

from meshtune.errors import UserError
from meshtune.tools.migrate import Migrated, migrate

Migrate = Callable[..., Migrated]
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


def test_precision_of_a_launcher_counts_where_the_trainer_has_none(migrated: Migrate) -> None:
    assert migrated(FACTORY, launcher=ACCELERATE).settings["train.precision"] == "bf16"
    assert migrated(FACTORY, pure_bf16=True, launcher=ACCELERATE).settings["train.precision"] == "bf16-pure"


def test_what_a_launcher_changes_and_is_not_here_is_named(migrated: Migrate) -> None:
    offload = {"zero_stage": 2, "offload_optimizer_device": "cpu"}
    result = migrated(
        TRL, launcher=ACCELERATE | ZERO3 | {"deepspeed_config": offload, "fp8_config": {"backend": "TE"}}
    )
    assert {"deepspeed", "launcher.yaml: fp8_config"} <= {note.key for note in result.unsupported}


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
