"""`meshtune data`: its counts are those of a count by hand; bad rows are named by file and line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Command
from tiny import write_rows
from transformers import AutoTokenizer

Settings = Callable[..., list[str]]


def by_hand(model: Path, rows: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """(tokens, labelled tokens) of each document: prompt, line break, completion, end token."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    prompts = [len(tokenizer(row["prompt"] + "\n").input_ids) for row in rows]
    completions = [len(tokenizer(row["completion"]).input_ids) + 1 for row in rows]
    return [p + c for p, c in zip(prompts, completions, strict=True)], completions


def read(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_counts_are_those_of_a_count_by_hand(
    meshtune: Command, settings: Settings, tiny: Path, tmp_path: Path
) -> None:
    lengths, labels = by_hand(tiny / "model", read(tiny / "train.jsonl"))
    ended = meshtune("data", *settings("data.seq_len=512"), "--json")
    train, held_out = ended.json["train"], ended.json["eval"]
    assert train["documents"] == 120
    assert held_out["documents"] == 20
    assert ended.json["rows"] == 140
    assert train["tokens"] == sum(lengths)
    assert train["label_tokens"] == sum(labels)
    assert train["longest"] == max(lengths)
    assert train["mean_length"] == pytest.approx(sum(lengths) / 120)
    assert train["label_share"] == pytest.approx(sum(labels) / sum(lengths))
    assert train["efficiency"] == pytest.approx(sum(lengths) / (512 * train["sequences"]))
    assert train["sequences"] >= -(-sum(lengths) // 512)
    for bar in train["histogram"]:
        assert bar["documents"] == sum(bar["from"] <= length <= bar["to"] for length in lengths)
    assert not (tmp_path / "run").exists(), "nothing is trained"


def test_cut_documents_are_counted(meshtune: Command, settings: Settings, tiny: Path) -> None:
    lengths, _ = by_hand(tiny / "model", read(tiny / "train.jsonl") + read(tiny / "test.jsonl"))
    cut = meshtune("data", *settings("data.seq_len=32"), "--json").json["cut"]
    assert cut["documents"] == sum(length > 32 for length in lengths) > 0
    assert cut["tokens"] == sum(max(0, length - 32) for length in lengths)


def test_samples_show_the_text_and_what_of_it_is_labelled(
    meshtune: Command, settings: Settings, tiny: Path
) -> None:
    rows = read(tiny / "train.jsonl")
    for sample in meshtune("data", *settings(), "--json", "--samples", "5").json["samples"]:
        file, _, line = sample["place"].rpartition(":")
        assert Path(file).name == "train.jsonl"
        row = rows[int(line) - 1]
        assert sample["runs"] == [[row["prompt"] + "\n", False], [row["completion"] + "</s>", True]]


def test_the_terminal_shows_figures_a_histogram_and_samples(
    meshtune: Command, settings: Settings, tmp_path: Path, tiny: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{name: {tiny / 'model'}}}\ndata: {{train: {tiny / 'train.jsonl'}, seq_len: 128}}\n"
    )
    ended = meshtune("data", config, f"data.cache={tmp_path / 'cache'}", "--samples", "2")
    for words in ("120", "labelled", "longest document", "█", "labelled text", "train.jsonl:"):
        assert words in ended.out, words


BROKEN = [
    '{"prompt": "Say red", "completion": "red"',
    '{"prompt": "Say red"}',
    '{"prompt": "Say red", "completion": ""}',
    '{"prompt": 7, "completion": "red"}',
    '["red"]',
]


@pytest.fixture
def bad(tmp_path: Path) -> tuple[Path, list[int]]:
    """(a file, the lines that are bad): thirty good rows with twelve bad ones among them."""
    lines, wrong = [], []
    for number in range(42):
        if number % 7 in (2, 5):
            lines.append(BROKEN[len(wrong) % len(BROKEN)])
            wrong.append(number + 1)
        else:
            lines.append(json.dumps({"prompt": f"Say {number}", "completion": str(number)}))
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "bad.jsonl", wrong


@pytest.mark.ci
@pytest.mark.parametrize("command", ["data", "train"])
def test_bad_rows_are_named_ten_at_once_with_file_and_line(
    command: str, meshtune: Command, settings: Settings, bad: tuple[Path, list[int]], tmp_path: Path
) -> None:
    file, wrong = bad
    ended = meshtune(command, *settings(f"data.train={file}"), code=2)
    assert not ended.out
    for line in wrong[:10]:
        assert f"{file}:{line}:" in ended.err or f"{file}, line {line}" in ended.err, line
    assert not any(f"{file}:{line}:" in ended.err for line in range(1, 43) if line not in wrong)
    assert f":{wrong[10]}:" not in ended.err, "the first ten"
    assert "data.on_bad_row=skip" in ended.err, "the way out"
    assert not (tmp_path / "run").exists()


def test_skipped_rows_are_counted(meshtune: Command, settings: Settings, bad: tuple[Path, list[int]]) -> None:
    file, wrong = bad
    found = meshtune("data", *settings(f"data.train={file}", "data.on_bad_row=skip"), "--json").json
    assert found["train"]["documents"] == 42 - len(wrong)
    assert sum(found["bad_rows"].values()) == len(wrong)
    assert len(found["bad_rows"]) >= 4, "by reason"


def test_columns_that_are_not_there_are_named_with_those_that_are(
    meshtune: Command, settings: Settings, tmp_path: Path
) -> None:
    write_rows(tmp_path / "other.jsonl", [{"question": "Say red", "answer": "red"}])
    ended = meshtune("data", *settings(f"data.train={tmp_path / 'other.jsonl'}"), code=2)
    assert "question" in ended.err
    assert "answer" in ended.err
    assert "columns" in ended.err
