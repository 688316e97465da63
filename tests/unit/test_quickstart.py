"""The embedded default: the data are what the script makes, answers are right, splits share nothing."""

import json
import re
import sys
from itertools import islice
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "quickstart"
sys.path.insert(0, str(FOLDER))

import make_data  # noqa: E402  (a script's folder, not a package)


def rows(split: str) -> list[tuple[str, str]]:
    lines = (FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["prompt"], row["completion"]) for row in map(json.loads, lines)]


def answers(pattern: str, splits: tuple[str, ...] = ("train", "test")) -> list[tuple[tuple[str, ...], str]]:
    """(what the prompt asks about, the answer) of all rows whose prompt matches."""
    found = [(re.fullmatch(pattern, prompt), answer) for split in splits for prompt, answer in rows(split)]
    matches = [(match.groups(), answer) for match, answer in found if match]
    assert len(matches) >= 5, f"only {len(matches)} prompts match {pattern}"
    return matches


@pytest.fixture(scope="module")
def almanac() -> str:
    return "".join(islice(make_data.documents(seed=1), 30_000))


def test_making_the_data_again_gives_the_same_bytes(tmp_path):
    make_data.write(tmp_path)

    for name in ("train.jsonl", "test.jsonl", "pairs-train.jsonl", "pairs-test.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_no_test_prompt_is_in_train():
    train, test = ({prompt for prompt, _ in rows(split)} for split in ("train", "test"))

    assert len(test) == len(rows("test")) > 200
    assert not train & test


@pytest.mark.parametrize(
    "patterns",
    [
        [
            r"What is ([a-z]+) backwards\?",
            r"Sort the letters of the word (\w+)\.",
            r"Count the letters of (\w+)\.",
        ],
        [r"What is the capital of (\w+)\?", r"Name the capital city of (\w+)\."],
        [r"What is the plural of (\w+)\?", r"One (\w+), many what\?"],
    ],
    ids=["words", "countries", "plurals"],
)
def test_what_test_asks_about_is_never_asked_about_in_train(patterns):
    train, test = (
        {frozenset(asked) for pattern in patterns for asked, _ in answers(pattern, splits=(split,))}
        for split in ("train", "test")
    )

    assert len(test) >= 8
    assert not train & test


def test_rows_of_numbers_and_letters_go_on_evenly():
    numbers = answers(r"Which number comes next: (\d+), (\d+), (\d+), (\d+)\?")
    letters = answers(r"Which letter comes next: (\w), (\w), (\w), (\w)\?")

    assert all(int(answer) - int(d) == int(d) - int(c) == int(b) - int(a) for (a, b, c, d), answer in numbers)
    assert all(ord(answer) - ord(d) == ord(d) - ord(c) == ord(b) - ord(a) for (a, b, c, d), answer in letters)


def test_words_are_turned_sorted_counted_and_compared_right():
    turned = answers(r"Reverse the word (\w+)\.")
    ordered = answers(r"Sort the letters of the word (\w+)\.")
    counted = answers(r"Count the letters of (\w+)\.")
    compared = answers(r"Name the first in the alphabet of (\w+), (\w+) and (\w+)\.")

    assert all(list(reversed(word)) == list(answer) for (word,), answer in turned)
    assert all(sorted(word) == list(answer) for (word,), answer in ordered)
    assert all(str(len(word)) == answer for (word,), answer in counted)
    assert all(sorted(trio)[0] == answer for trio, answer in compared)


@pytest.mark.parametrize(
    ("question", "statement"),
    [
        (r"What is the capital of (\w+)\?", "The capital of {} is {}."),
        (r"What is the plural of (\w+)\?", "The plural of {} is {}."),
    ],
)
def test_what_is_asked_is_told_in_the_pretraining_text(question, statement, almanac):
    assert all(statement.format(*asked, answer) in almanac for asked, answer in answers(question))


def test_the_pretraining_text_holds_no_instruction(almanac):
    sentences = set(re.split(r"(?<=[.?]) |\n", almanac))
    prompts = {prompt for split in ("train", "test") for prompt, _ in rows(split)}

    assert len(sentences) > 10_000
    assert not sentences & prompts


def test_the_base_model_is_a_small_safetensors_folder_without_a_chat_template():
    files = {path.name: path.stat().st_size for path in (FOLDER / "base").iterdir()}

    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert sum(files.values()) < 4 * 2**20
    assert "chat_template" not in (FOLDER / "base" / "tokenizer_config.json").read_text()
    assert "chat_template.jinja" not in files
