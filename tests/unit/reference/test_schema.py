"""The schema for editors against what `Config` accepts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from meshtune.config import SETTINGS, Config, load
from meshtune.errors import UserError
from meshtune.reference.schema import SCHEMA_FILE, Setting, as_json, schema, settings
from meshtune.setting_errors import sentences
from meshtune.yaml_tree import merge, nested

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))
SCHEMA = schema()
CHECK = Draft202012Validator(SCHEMA)
PLAIN = [setting for setting in settings(SCHEMA) if "$ref" not in setting.schema]
MODEL = {"model": {"name": "x"}}
VALUES: list[Any] = [
    None, True, -1, 0, 1, 1.5, 10**20, "", "no-such-value", "zero3x2", [], [1], ["a", "b"], [None], [[]], {},
    {"path": "a"}, {"no_such_key": 1}, [{"path": ""}],
]  # fmt: skip

# Valid values of fields that need another one; the schema judges each alone.
CONTRADICTIONS = [
    ("layout.zero", 1),
    ("layout.sp", True),
    ("layout.sp_regather", True),
    ("layout.recompute_blocks", 1),
    ("train.step_in_backward", True),
    ("train.lr_scheduler_kwargs", {"path": "a"}),
    ("train.lr_scheduler_kwargs", {"no_such_key": 1}),
]


def tree_of(key: str, value: Any) -> dict[str, Any]:
    if key.startswith(("data.train.", "data.eval.")):
        section, _, name = key.rpartition(".")
        return merge(MODEL, nested(section.split("."), {"path": "owner/rows", name: value}))
    return merge(MODEL, nested(key.split("."), value))


def config_accepts(tree: Mapping[str, Any]) -> bool:
    """True also for a valid value that needs another setting: the schema judges each alone."""
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        return all(" has no effect: " in text for text in sentences(error, lambda path: ""))
    except UserError:
        return False
    return True


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_it_has_every_setting_with_a_sentence() -> None:
    found = {setting.key: setting for setting in settings(SCHEMA)}
    assert {*SETTINGS} <= {*found}
    for key, setting in found.items():
        sentence = SCHEMA["$defs"][setting.section] if "$ref" in setting.schema else setting.schema
        assert sentence["description"].strip().endswith("."), key


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_are_valid_and_name_the_schema(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    path = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (file.parent / path).resolve() == SCHEMA_FILE.resolve()
    CHECK.validate(yaml.safe_load(text))


def test_what_a_run_writes_is_valid() -> None:
    CHECK.validate(yaml.safe_load(Config.model_validate(MODEL).to_yaml()))


@pytest.mark.parametrize("setting", PLAIN, ids=lambda setting: setting.key)
def test_config_and_schema_refuse_the_same_values(setting: Setting) -> None:
    """Config reads a number also from a text or from true; a schema has no such conversion."""
    refused = 0
    for value in VALUES:
        tree = tree_of(setting.key, value)
        if not config_accepts(tree):
            assert not CHECK.is_valid(tree) or (setting.key, value) in CONTRADICTIONS, value
            refused += 1
        elif not (value is True or (value in (0, 1) and setting.schema.get("type") == "boolean")):
            assert CHECK.is_valid(tree), value
    assert refused > 4


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"model": {}},
        {"model": "x"},
        MODEL | {"trian": {}},
        MODEL | {"train": {"lr": 1}},
        MODEL | {"train.lr": 1},
    ],
)
def test_unknown_and_missing_keys_are_refused(tree: dict[str, Any]) -> None:
    assert not CHECK.is_valid(tree) and not config_accepts(tree)


@pytest.mark.parametrize(
    "layout",
    ["auto", "zero3x8", "dp2-zero3x4-tp2-sp-pp2-1f1b-mb2-ga8-full", {"tp": "auto"}, {"recompute": "full"}],
)
def test_layouts_are_accepted(layout: Any) -> None:
    tree = MODEL | {"layout": layout}
    assert CHECK.is_valid(tree) and config_accepts(tree)


@pytest.mark.parametrize(
    "layout", ["tpp2", "zero4x2", "tp2_sp", {"tpp": 2}, {"zero": 4}, {"recompute": "ful"}]
)
def test_layouts_are_refused(layout: Any) -> None:
    tree = MODEL | {"layout": layout}
    assert not CHECK.is_valid(tree) and not config_accepts(tree)


def test_the_text_is_the_same_each_time() -> None:
    assert as_json() == as_json() and json.loads(as_json()) == SCHEMA


def test_dotted_keys_are_accepted_by_both(tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    for setting in PLAIN:  # of data.eval as of data.train
        if "." in setting.key and not setting.key.startswith("data.eval."):
            given[setting.key] = setting.schema.get("default", "x")
    given = {key: value for key, value in given.items() if key not in ("data.train", "data.eval")}
    file = tmp_path / "dotted.yaml"
    file.write_text(yaml.safe_dump(given))
    assert len(given) > 80 and CHECK.is_valid(given)
    assert load(file).data.train[0].path == "x"
    assert not CHECK.is_valid(given | {"train.max_stepz": 1})
