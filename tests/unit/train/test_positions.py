"""Documents beyond a model's positions, in a run: named, or refused where the model has a table of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from golden import refuses
from transformers import AutoModelForCausalLM

from meshtune import config
from meshtune.api import build
from meshtune.commands.data import data
from meshtune.data.pack import Dataset
from meshtune.data.prepare import Prepared
from meshtune.errors import UserError
from meshtune.model.anatomy import anatomy
from meshtune.train.untrained import has_position_table, position_sentences

TABLES = {"gpt2"}  # of FAMILIES


def run(settings: Callable[..., list[str]], *words: str) -> None:
    build.build(config.load(None, settings("log.to=[console]", *words)))


def long_rows(file: Path) -> Path:
    row = {"prompt": "Say red", "completion": "river stone " * 400}
    file.write_text(f"{json.dumps(row)}\n" * 8)
    return file


@pytest.mark.parametrize("command", ["run", "data"])
def test_a_run_and_data_say_once_that_documents_are_beyond_the_positions(
    settings: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture, command: str
) -> None:
    words = ["data.seq_len=1024", f"data.train={long_rows(tmp_path / 'long.jsonl')}"]
    if command == "run":
        run(settings, *words)
    else:
        data([*settings(*words)], as_json=True)
    out = capsys.readouterr()
    assert (out.out + out.err).count("data.seq_len=1024 goes beyond the 512 positions of") == 1


def test_short_documents_in_long_sequences_are_within_the_positions(
    settings: Callable[..., list[str]], capsys: pytest.CaptureFixture
) -> None:
    run(settings, "data.seq_len=1024")
    out = capsys.readouterr()
    assert "goes beyond" not in out.out + out.err


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_of_positions_are_found(family: str) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    assert has_position_table(model, anatomy(model), 16) == (family in TABLES)


def prepared(train: Any, *, eval_longest: int = 1) -> Any:
    return Prepared(train, dataset(eval_longest), {})


def dataset(longest: int) -> Any:
    class Fake(Dataset):
        def __init__(self) -> None:
            pass

        @property
        def longest_document(self) -> int:
            return longest

    return Fake()


def test_documents_beyond_a_table_of_positions_are_refused() -> None:
    model: Any = AutoModelForCausalLM.from_config(FAMILIES["gpt2"](n_positions=64))
    parts = anatomy(model)
    assert position_sentences("some/gpt2", 128, model, parts, prepared(dataset(64))) == []
    with refuses(UserError):
        position_sentences("some/gpt2", 128, model, parts, prepared(dataset(65)))
    with refuses(UserError):
        position_sentences("some/gpt2", 128, model, parts, prepared(dataset(64), eval_longest=70))
    with refuses(UserError):
        position_sentences("some/gpt2", 128, model, parts, prepared(object()))
    assert position_sentences("some/gpt2", 64, model, parts, prepared(object())) == []
