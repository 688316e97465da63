"""The settings tree: strict, said all at once, replayable."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from golden import refuses, says
from pydantic import BaseModel

from meshtune import config
from meshtune.config import Config
from meshtune.errors import UserError, expanded

Load = Callable[..., Config]


def problems(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(UserError) as refused:
        config.load(file, ["model.name=x", *overrides])
    return "\n".join(refused.value.problems)


@pytest.fixture
def loaded(tmp_path: Path) -> Load:
    """Function(text, overrides) that writes a file and reads its settings."""
    file = tmp_path / "run.yaml"

    def load(text: str, overrides: list[str] | None = None) -> Config:
        file.write_text(text)
        return config.load(file, overrides or [])

    return load


@pytest.mark.parametrize(
    "override",
    [
        "train.learning_rte=1", "train.micro_batch_size=1", "hub.zzzzzzzz=1", "data.sequence_len=1",
        "base_model=x", "data.lora_r=1", "trian.seed=1", "checkpoint.save_steps=5", "optimizer=adamw",
    ],
)  # fmt: skip
def test_unknown_setting_suggests_the_nearest_name(override: str) -> None:
    says(problems(override))


def test_every_problem_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("data: {seq_len: 1, packing: perhaps}\ntrain: {precision: fp7}\nlayout: tpp2\nbogus: 1\n")
    says(problems(file=file))


def test_file_is_laid_over_defaults_and_the_command_line_over_the_file(loaded: Load) -> None:
    words = ["train.seed=2", "method=lora", "lora.target_modules=[q_proj, v_proj]"]
    read = loaded("model: {name: a}\ntrain: {seed: 1, max_steps: 5}\n", words)
    assert (read.model.name, read.train.seed, read.train.max_steps) == ("a", 2, 5)
    assert read.lora.target_modules == ("q_proj", "v_proj")
    mapped = "model: {name: a}\ndata: {train: a, columns: {prompt: question}}\n"
    assert loaded(mapped, ["data.columns={}"]).data.columns == {}
    assert len(loaded(mapped, ["data.columns={completion: answer}"]).data.columns) == 2


def test_the_resolved_yaml_reads_back_as_the_same_settings(loaded: Load) -> None:
    first = config.load(None, ["model.name=x", "data.train=[{path: a, weight: 2}, b]", "layout=zero3x2-tp2"])
    assert loaded(first.to_yaml()) == first
    assert [each.path for each in first.data.train] == ["a", "b"]


def test_a_missing_file_and_a_missing_model_are_said() -> None:
    with refuses(UserError):
        config.load("nowhere.yaml")
    with refuses(UserError):
        config.load(None, ["train.seed=1"])


def test_a_split_of_a_single_file_is_refused(tmp_path: Path) -> None:
    """All of its rows would be read: held-out rows that are the training rows."""
    file = "rows/train.jsonl"
    sources = (
        "data.train=org/rows",
        f"data.eval=[{{path: {file}, split: test}}, {{path: org/rows, split: test}}]",
    )
    says(problems(*sources))
    folder = tmp_path / "rows.csv"
    folder.mkdir()
    for path in ("org/rows", f"{folder}", "org/rows-v1.5:en"):
        config.load(None, ["model.name=x", f"data.eval=[{{path: '{path}', split: test}}]"])
    says(problems("data.train=[{path: 'https://h/rows.csv?x=1', split: a}]"))


def test_two_names_for_one_thing_are_refused() -> None:
    says(problems("train.global_batch_size=1", "train.global_batch_tokens=1"))


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_gradients_are_never_summed_in_a_narrower_dtype(precision: str) -> None:
    said = problems(f"train.precision={precision}", "train.reduce_dtype=bf16")
    says(said)
    config.load(None, ["model.name=x", f"train.precision={precision}", "train.reduce_dtype=fp32"])


def test_a_batch_in_tokens_must_be_whole_sequences() -> None:
    read = config.load(None, ["model.name=x", "data.seq_len=128", "train.global_batch_tokens=1024"])
    assert read.global_batch_size == 8
    with refuses(UserError):
        _ = config.load(
            None, ["model.name=x", "data.seq_len=128", "train.global_batch_tokens=1000"]
        ).global_batch_size


@pytest.mark.parametrize("file", sorted(Path("examples").glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_is_valid(file: Path) -> None:
    assert yaml.safe_load(file.read_text())
    read = config.load(file)
    read.partial_layout.complete(devices=1, global_batch_size=read.global_batch_size)


BOMB = "\n".join(
    ["a: &a [x, x, x, x, x, x, x, x, x]"]
    + [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
)


@pytest.mark.parametrize(
    "text",
    [
        "model: {name: x\n",
        "- a\n",
        "train: {seed: 1, seed: 2}\n",
        f"{BOMB}\nmodel: *i\n",
        "model: &m [*m]\n",
        "model: " + "[" * 2000 + "]" * 2000,
        "model: {name: x}\nmethod: 2026-13-45\n",
        "model: {name: x}\ntrain: {seed: !!int abc}\n",
        f"model: {{name: x}}\ntrain: {{seed: {'7' * 5000}}}\n",
        "model: {name: x}\ntrain: {seed: 0x_}\n",
        "model: {name: x}\n[a, b]: 1\n",
        "1: x\n",
        'model: {name: "a\\0b"}\n',
        "model: {name: ~nosuchuser/x}\n",
        "model: {name: x}\noutput: ~nosuchuser/x\n",
        "model: {name: x}\nlayout: dp99999999999999999999\n",
        "model: {name: x}\ncluster: {gpus: 1000000000}\n",
        "model: {name: x}\ntrain: {global_batch_size: 1000000000000000000000}\n",
    ],
)  # fmt: skip
def test_settings_that_a_reader_can_not_take_are_sentences(text: str, loaded: Load) -> None:
    with refuses(UserError) as raised:
        loaded(text)
    assert len(str(raised.value)) < 2000


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_config_without_end_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "run.yaml")
    with refuses(UserError):
        config.load(tmp_path / "run.yaml")


@pytest.mark.parametrize("value", ["2026-13-45", "!!int abc", "[" * 2000, "\0", "\ud800"])
def test_a_value_that_a_reader_can_not_take_is_a_sentence(value: str) -> None:
    with pytest.raises(UserError):
        config.load(None, ["model.name=x", f"method={value}"])


def described(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, description) of each setting of `section` and of the sections in it."""
    for name, info in section.model_fields.items():
        kinds = [info.annotation, *get_args(info.annotation)]
        kinds += [inner for kind in kinds for inner in get_args(kind)]
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if info.description is not None or not sections:
            yield f"{prefix}{name}", info.description or ""
        for inner in sections:
            assert inner.__doc__, inner
            yield from described(inner, f"{prefix}{name}.")


def test_every_setting_is_described_in_one_sentence() -> None:
    texts = dict(described(Config))
    assert {key for key in config.SETTINGS if key not in texts} == {
        "model", "dpo", "kto", "orpo", "simpo", "reward", "lora", "data", "train", "eval", "checkpoint",
        "log", "hub", "experts", "cluster.slurm",
    }  # fmt: skip
    assert [key for key, text in texts.items() if not re.fullmatch(r"[A-Z][^.]*(\.\S[^.]*)*\.", text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "model.name: a\ntrain.seed: 7\nlayout.tp: 2\ndata.train.path: rows.jsonl\n",
        "model: {name: a}\ntrain.seed: 7\nlayout: {tp: 2}\ndata: {train.path: rows.jsonl}\n",
        "model.name: a\ntrain:\ntrain.seed: 7\nlayout.tp: 2\ndata.train: rows.jsonl\n",
    ],
)
def test_dotted_keys_of_a_file_are_those_of_the_command_line(text: str, loaded: Load) -> None:
    words = ["model.name=a", "train.seed=7", "layout.tp=2", "data.train=rows.jsonl"]
    assert loaded(text) == config.load(None, words)
    assert loaded(text, ["train.seed=8"]).train.seed == 8
    assert config.load(None, ["train.max_steps=3"], yaml.safe_load(text)).layout == {"tp": 2}


@pytest.mark.parametrize(
    "text",
    [
        "train:\n  seed: 1\n\ntrain.seed: 2\n",
        "train.seed: 1\ntrain: {seed: 2}\n",
        "layout: zero3x2\nlayout.tp: 2\n",
        "data.train: a\ndata:\n  train.path: b\n",
    ],
)
def test_a_setting_that_a_file_sets_in_two_ways_is_refused_with_both_lines(text: str, loaded: Load) -> None:
    with refuses(UserError):
        loaded(f"model.name: a\n{text}")


def test_two_conflicts_are_refused_at_once_and_without_a_file_have_no_lines() -> None:
    tree = {"train": {"seed": 1, "max_steps": 2}, "train.seed": 2, "train.max_steps": 3}
    with refuses(UserError):
        config.load(None, ["model.name=a"], tree)


def test_a_dotted_key_lays_over_the_clusters_file(tmp_path: Path, loaded: Load) -> None:
    (tmp_path / "cluster.yaml").write_text("gpu: h100-sxm\ngpus: 8\n")
    read = loaded(f"model.name: a\ncluster.gpus: 16\ncluster: {tmp_path / 'cluster.yaml'}\n")
    assert read.cluster_config == config.ClusterConfig(gpu="h100-sxm", gpus=16)


def test_a_column_with_a_dot_in_its_name_is_no_path(loaded: Load) -> None:
    read = loaded("model.name: a\ndata.where: {meta.lang: en}\ndata: {columns: {text: body.text}}\n")
    assert read.data.where == {"meta.lang": "en"}


def test_an_unknown_dotted_key_is_answered_as_on_the_command_line(loaded: Load) -> None:
    with refuses(UserError) as refused:
        loaded("model.name: a\ntrain.learning_rte: 1\noptim.lr: 2\n")
    assert "optim.lr" in str(refused.value)


# Variables in paths #

WITH_VARIABLES = """
model: {name: $BASE/model}
data:
  train: [$BASE/a.jsonl, {path: "${BASE}/*.jsonl", where: {price: "$BASE"}}]
  eval: {path: $BASE/b$5.jsonl}
  cache: ${BASE}/cache
  chat_template: $BASE/x.jinja
  roles: {$BASE: user}
cluster: $BASE/probe.toml
log: {to: [prometheus], textfile_directory: $BASE/metrics}
output: ~/a$BASE
"""


def test_variables_are_replaced_in_paths_and_nowhere_else(monkeypatch, loaded):
    monkeypatch.setenv("BASE", "/scratch/ann")
    read = loaded(WITH_VARIABLES)
    names = [read.model.name, read.cluster, read.log.textfile_directory, read.output, read.data.cache]
    assert names == [
        *(f"/scratch/ann/{name}" for name in ("model", "probe.toml", "metrics")),
        "~/a/scratch/ann",
        "/scratch/ann/cache",
    ]
    first, second = read.data.train
    assert (first.path, second.path) == ("/scratch/ann/a.jsonl", "/scratch/ann/*.jsonl")
    assert (second.where, read.data.roles) == ({"price": "$BASE"}, {"$BASE": "user"})
    assert (read.data.eval[0].path, read.data.chat_template) == (
        "/scratch/ann/b$5.jsonl",
        "/scratch/ann/x.jinja",
    )


def test_addresses_and_names_of_what_exists_have_no_variables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNS", raising=False)
    Path("$RUNS/one").mkdir(parents=True)
    address = "https://data.example.org/rows.csv?$limit=500"
    read = config.load(None, ["model.name=x", f"data.train={address}", "output=$RUNS/one"])
    assert (read.data.train[0].path, read.output) == (address, "$RUNS/one")
    assert expanded("$RUNS/one") == Path("$RUNS/one")


@pytest.mark.parametrize("path", ["${BASE:-/tmp}/run", "${oc.env:BASE}/run", "runs/$(date +%F)"])
def test_more_of_a_shells_language_is_refused(path, monkeypatch):
    monkeypatch.setenv("BASE", "/scratch/ann")
    with refuses(UserError):
        expanded(path)


@pytest.mark.parametrize("value", ["", None])
def test_variables_that_are_not_set_are_refused_by_name(value, monkeypatch, loaded):
    monkeypatch.delenv("BASE", raising=False)
    if value is not None:
        monkeypatch.setenv("BASE", value)
    with refuses(UserError):
        loaded(WITH_VARIABLES)
    with pytest.raises(UserError, match="BASE"):
        expanded("$BASE/run")


def test_a_regular_expression_of_layers_needs_no_list() -> None:
    words = ["model.name=m", "method=lora"]
    pattern = r"model\.layers\.\d+\.mlp\.(up|down)_proj"
    assert config.load(None, [*words, f"lora.target_modules={pattern}"]).lora.target_modules == (pattern,)
    with pytest.raises(UserError, match="write all-linear or a list"):
        config.load(None, [*words, "lora.target_modules=q_proj"])
