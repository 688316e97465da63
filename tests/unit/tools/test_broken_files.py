"""Migrated files with wrong values, or texts that YAML could mistake: refused, or read back as converted."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import cases

from meshtune import config
from meshtune.errors import UserError
from meshtune.tools.migrate import migrate, text_of
from meshtune.tools.table import TOOLS, table

FILES = sorted(path for path in (Path(__file__).parents[2] / "data" / "migrate").iterdir() if path.is_file())
VALUES: list[Any] = [
    None, "", 0, -1, 1.5, 1e300, 10**30, float("nan"), float("inf"), True, False, [], {}, [1], ["x", None],
    {"a": {"b": []}}, "x", "a b", "no", "auto", "all", "steps", "epoch", "${output_dir}", "{}", "{bad",
    "\n\n", "x\ny", "\x1b[31m", "é", "'", '"', ": #", "- a",
]  # fmt: skip


def broken(tree: dict[str, Any], draw: random.Random) -> None:
    """Change up to four values at any depth, remove keys, and add keys of any trainer."""
    for _ in range(draw.randint(1, 4)):
        node: Any = tree
        while True:
            key = draw.choice(list(node))
            inner = node[key][0] if isinstance(node[key], list) and node[key] else node[key]
            if not isinstance(inner, dict) or not inner or draw.random() < 0.4:
                break
            node = inner
        match draw.choice(("change", "change", "change", "remove", "add")):
            case "change":
                node[key] = draw.choice(VALUES)
            case "remove" if len(node) > 1:
                del node[key]
            case "add":
                name = draw.choice(list(table(draw.choice(TOOLS)).own))
                tree[name.partition(".")[0]] = draw.choice(VALUES)


@pytest.mark.parametrize("seeds", cases([range(25), range(25, 800)], ci=[range(25)]), ids=str)
def test_a_broken_file_is_refused_in_sentences_or_its_settings_read_back(
    seeds: range, tmp_path: Path
) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        tree = yaml.safe_load(draw.choice(FILES).read_text())
        broken(tree, draw)
        theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
        theirs.write_text(yaml.safe_dump(tree, allow_unicode=True))
        try:
            result = migrate(theirs, gpus=draw.choice((1, 2, 8)))
        except UserError:
            continue
        ours.write_text(text_of(result, "theirs.yaml"))
        assert config.load(ours) == result.config(), seed


@pytest.mark.parametrize("text", ["\n\n", "a: b # c", "'\"", "é\n\ttab", "- x"])
def test_texts_that_yaml_could_mistake_are_written_on_one_line(text: str, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    row = {"path": text, "type": "completion", "field": text}
    tree = {"base_model": "m", "datasets": [row], "learning_rate": 1e-4, "chat_template_jinja": text * 20}
    theirs.write_text(yaml.safe_dump(tree, allow_unicode=True))
    result = migrate(theirs)
    ours.write_text(text_of(result, text))
    read = config.load(ours)
    assert read.data.train[0].path == text and read.data.train[0].columns == {"text": text}


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_of_a_key_written_twice_the_last_value_counts(suffix: str, tmp_path: Path) -> None:
    lines = ['"base_model": "m"', '"learning_rate": 0.1', '"sequence_len": 8', '"learning_rate": 0.2']
    text = f"{{{', '.join(lines)}}}" if suffix == "json" else "\n".join(lines)
    (file := tmp_path / f"theirs.{suffix}").write_text(text)
    result = migrate(file, tool="axolotl")
    assert result.settings["train.learning_rate"] == 0.2
    assert [(note.key, note.value) for note in result.ignored] == [("learning_rate", "0.1")]


def test_a_description_of_data_sets_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"identity": {"file_name": "identity.json"},}')
    (file := tmp_path / "sft.yaml").write_text(
        "{model_name_or_path: m, stage: sft, dataset: identity, template: llama3, cutoff_len: 8}"
    )
    with pytest.raises(UserError, match=r"dataset_info\.json, which describes the data sets, is not JSON"):
        migrate(file)


def test_keys_that_yaml_reads_as_no_text_are_keys(tmp_path: Path) -> None:
    (file := tmp_path / "workflow.yml").write_text("on: push\n2: two\njobs: {test: {steps: []}}\n")
    with pytest.raises(UserError, match="has 3 keys"):
        migrate(file)
