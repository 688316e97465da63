"""`meshtune config`: a file that loads, is valid for editors, and says what comes next."""

import re
from pathlib import Path

import pytest
import yaml
from golden import refuses
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from meshtune.cli import app
from meshtune.config import Config, load
from meshtune.errors import UserError
from meshtune.objectives import LEARNING_RATES
from meshtune.reference.schema import SCHEMA_FILE, schema, settings
from meshtune.reference.starter import SHOWN, SIZES, VALUES, starter

SENTENCES = {setting.key: setting.schema.get("description", "") for setting in settings(schema())}


def run(*words: str):
    return CliRunner().invoke(app, ["config", *words])


@pytest.mark.ci
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("size", SIZES)
def test_each_starter_loads_as_it_says(method: str, size: str, tmp_path: Path) -> None:
    file = tmp_path / "my run.yaml"
    assert run("--method", method, "--size", size, "--out", str(file)).exit_code == 0
    read = load(file)
    assert (read.model.name, read.method) == (SIZES[size], method)
    assert read.learning_rate == read.train.learning_rate == LEARNING_RATES[method]
    assert read.layout == "auto"
    assert ("lora" in yaml.safe_load(file.read_text())) == (method == "lora")
    Draft202012Validator(schema()).validate(yaml.safe_load(file.read_text()))


def test_a_size_may_be_a_model_of_the_table() -> None:
    for words in (["--size", "Llama-3.1-8B"], ["--model", "llama-3.1-8b"]):
        assert "  name: meta-llama/Llama-3.1-8B " in run(*words).stdout
    assert "  name: Qwen/Qwen3-14B " in run("--size", "Qwen/Qwen3-14B").stdout


def test_its_comments_are_the_sentences_of_its_settings() -> None:
    text = starter("lora", "some/model", "run.yaml")
    comments = " ".join(re.findall(r"# (.*)", text))
    tree = yaml.safe_load(text)
    written = [
        f"{section}.{key}" if isinstance(inner, dict) else section
        for section, inner in tree.items()
        for key in (inner if isinstance(inner, dict) else [""])
    ]
    assert len(written) > 20
    for key in written:
        assert SENTENCES[key] in comments, key
    assert max(map(len, text.splitlines()[1:])) <= 120


def test_settings_that_it_does_not_change_have_their_defaults() -> None:
    read = load(None, ["model.name=a"])
    tree = Config.model_validate(yaml.safe_load(starter("full", "a", "run.yaml"))).model_dump()
    for key in SHOWN.replace("{lora} ", "").split():
        section, _, name = key.rpartition(".")
        default = getattr(getattr(read, section), name) if section else getattr(read, name)
        if key not in VALUES and key not in ("output", "train.learning_rate"):
            assert (tree[section] if section else tree)[name] == default, key


def test_the_header_names_the_schema_and_the_next_commands() -> None:
    text = starter("full", "a", "my run.yaml")
    assert text.startswith(f"# yaml-language-server: $schema={SCHEMA_FILE}\n")
    assert re.findall(r"meshtune (\w+) 'my run.yaml'", text) == ["data", "plan", "train"]


def test_it_writes_over_no_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("kept")
    with refuses(UserError):
        CliRunner().invoke(app, ["config", "--out", str(file)], catch_exceptions=False)
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    "words",
    [["--size", "9b"], ["--size", "llama-3.2-8b"], ["--size", "8b", "--model", "x"]],
)
def test_bad_options_are_refused(words: list[str]) -> None:
    with refuses(UserError):
        CliRunner().invoke(app, ["config", *words], catch_exceptions=False)
