"""Keys of other trainers: each is in a table, each counterpart is a setting, and no answer is a guess."""

import json
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
import transformers
import trl
from cases import cases
from golden import refuses, says

from meshtune import config
from meshtune.config import unknown_key
from meshtune.errors import UserError
from meshtune.layout import Layout, PartialLayout
from meshtune.tools.table import OTHERS, TOOLS, table

ROOT = Path(__file__).parents[3]
LISTED = json.loads((ROOT / "tests" / "data" / "trainer_keys.json").read_text())
SETTINGS = {*config.SETTINGS, *(f"layout.{row.name}" for row in fields(Layout))}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_key_of_the_newest_wheel_is_in_the_table(tool: str) -> None:
    listed = LISTED[tool]
    assert len(listed["keys"]) > 60
    missing = [key for key in listed["keys"] if table(tool).entry(key) is None]
    assert missing == [], f"{tool}.toml lacks these of {listed['distribution']} {listed['version']}"


@pytest.mark.parametrize("tool", TOOLS)
def test_every_key_of_a_table_is_one_of_the_tool_or_named_as_an_earlier_one(tool: str) -> None:
    listed = LISTED[tool]["keys"]
    wild = [key for key in table(tool).own if key.endswith(".*")]
    named = {key for key in table(tool).own if key not in wild}
    assert named - {*listed} == table(tool).beyond
    sections = [key.removesuffix(".*") for key in wild]
    known = (*listed, *table(tool).beyond)
    assert [name for name in sections if not any(f"{key}.".startswith(f"{name}.") for key in known)] == []


@pytest.mark.parametrize("tool", [*TOOLS, *OTHERS])
def test_every_counterpart_is_a_setting(tool: str) -> None:
    entries = table(tool).own
    assert {entry.setting for entry in entries.values() if entry.setting} - SETTINGS == set()
    assert [key for key, entry in entries.items() if not entry.setting and len(entry.why.split()) < 4] == []


@pytest.mark.parametrize("tool", TOOLS)
def test_every_default_is_one_of_the_tools_keys(tool: str) -> None:
    assert [key for key in table(tool).defaults if table(tool).entry(key) is None] == []


def test_the_page_is_written_from_the_tables() -> None:
    assert not runpy.run_path(str(ROOT / "scripts" / "coming_from_page.py"))["stale"](), (
        "run python scripts/coming_from_page.py"
    )


SCRIPT = runpy.run_path(str(ROOT / "scripts" / "trainer_keys.py"))
CLASSES = {
    "transformers": (transformers, ["Seq2SeqTrainingArguments"]),
    "trl": (trl, ["SFTConfig", "ModelConfig", "ScriptArguments"]),
}


@pytest.mark.parametrize("tool", cases(CLASSES, ci=["transformers"]))
def test_the_script_reads_the_fields_that_the_classes_have(tool: str) -> None:
    """The list is parsed from wheels; the installed transformers and TRL say themselves what they take."""
    package, names = CLASSES[tool]
    read = {*SCRIPT["keys_of"](tool, SCRIPT["Folder"](Path(package.__file__).parents[1]))}
    read |= {*LISTED["transformers"]["keys"]} if tool == "trl" else set()
    assert {row.name for name in names for row in fields(getattr(package, name))} <= read


def test_a_new_key_of_a_wheel_is_noticed_and_so_is_a_class_that_has_moved(tmp_path: Path) -> None:
    """Also in a base class, in a section, and under another name of a field."""
    schemas = tmp_path / "axolotl" / "utils" / "schemas"
    schemas.mkdir(parents=True)
    (tmp_path / "axolotl" / "integrations").mkdir()
    (schemas / "more.py").write_text(
        "class Inner(BaseModel):\n    depth: int = 1\n"
        "class Base(BaseModel):\n    brand_new: 'Inner | None' = Field(default=None, alias='newest')\n"
    )
    (schemas / "config.py").write_text(
        "from .more import Base as Above\n"
        "class AxolotlInputConfig(Above):\n    seed: int\n    LIMIT: ClassVar[int] = 1\n"
    )
    source = SCRIPT["Folder"](tmp_path)
    assert SCRIPT["keys_of"]("axolotl", source) == ["brand_new", "brand_new.depth", "newest", "seed"]
    assert table("axolotl").entry("brand_new") is None and table("axolotl").entry("seed")
    (schemas / "config.py").write_text("")
    with pytest.raises(SystemExit, match="has no fields; did its module move"):
        SCRIPT["keys_of"]("axolotl", SCRIPT["Folder"](tmp_path))


def test_without_a_network_the_wheels_are_skipped_with_the_reason_but_required_in_ci(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SCRIPT["main"].__globals__, "download", lambda *_: "no route to host")
    monkeypatch.setattr("sys.argv", ["trainer_keys.py"])
    monkeypatch.delenv("CI", raising=False)
    SCRIPT["main"]()
    says(capsys.readouterr().out)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(SystemExit, match="no route to host"):
        SCRIPT["main"]()


@pytest.mark.parametrize(
    "key",
    [
        "load_in_4bit", "train.hub_model_id", "train.use_cpu", "model.load_in_8bit", "use_liger_kernel",
        "vllm.host", "train.per_device_train_batch_size", "data.train.0.ds_type", "data.train.0.pth", "trian",
        "every", "hub.zzzzzzzz", "lora.q", "model.path", "eval.steps", "wandb_project", "zzzzzzzz",
        "lora.rslora", "lora.dora", "model_max_length", "train.batch_size", "checkpoint.limit",
        "group_by_length", "loraplus_lr_ratio", "train.min_lr", "train.warmup", "train.grad_clip",
        "train.gradient_accumulation", "data.block_size", "model.use_gradient_checkpointing",
        "recompute_num_layers", "data.test_size", "train.muon_lr", "train.momentum", "train.nproc",
        "zero_optimization.stage", "parallelism.tensor_parallel_degree", "parallelism.expert_parallel_degree",
        "expert_model_parallel_size", "train.moe_z_loss_coeff", "expert_parallel_size",
        "activation_offloading",
    ],
)  # fmt: skip
def test_a_pasted_key_gets_its_counterpart_or_the_reason_and_never_a_guess(key: str) -> None:
    says(unknown_key(key.split(".")))


def test_what_is_more_than_two_edits_away_is_not_suggested() -> None:
    assert "did you mean" not in unknown_key(["train", "learning_speed"])
    says(unknown_key(["train", "lerning_rte"]))


def test_the_layouts_fields_are_answered_alike() -> None:
    with refuses(UserError):
        PartialLayout.parse({"gradient_checkpointing": True})
    with refuses(UserError):
        config.load(None, ["model.name=x", "layout={load_in_8bit: true}"])
