"""Rows of every kind of file become the same examples, and bad rows are named."""

import csv
import gzip
import json
from io import BytesIO
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from golden import refuses, says

from meshtune.data.example import Example, Source, Tally
from meshtune.data.files import files, is_hub
from meshtune.data.formats import detect
from meshtune.data.readers import read
from meshtune.errors import UserError
from meshtune.sections import DataConfig

PAIRS = [{"prompt": f'question {n}, "é"\n', "completion": f"answer {n}"} for n in range(5)]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(folder, name, rows):
    """`rows` under `name`, in the format of its suffix."""
    file = folder / name
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if name.endswith((".jsonl", ".ndjson")):
        file.write_text(lines)
    elif name.endswith(".jsonl.gz"):
        file.write_bytes(gzip.compress(lines.encode()))
    elif name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2)
    elif name.endswith((".csv", ".tsv")):
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0], delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        file.write_text(json.dumps({"version": 1, "data": rows} if name == "wrapped.json" else rows))
    return file


def examples(path, **keywords):
    settings = {name: keywords.pop(name) for name in ("columns", "format", "split") if name in keywords}
    return list(read(Source(str(path), **settings), **{"on_bad_row": "error", **keywords}))


def pairs(rows):
    return [(row.prompt, row.completion) for row in rows]


KINDS = ["a.jsonl", "a.jsonl.gz", "a.json", "wrapped.json", "a.parquet", "a.csv", "a.ndjson", "a.tsv"]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    file = write(tmp_path, name, PAIRS)
    assert pairs(examples(file)) == [(row["prompt"], row["completion"]) for row in PAIRS]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("start", [0, 1, 3, 5, 9])
def test_start_goes_on_at_a_row(tmp_path, name, start):
    file = write(tmp_path, name, PAIRS)
    rows = examples(file, start=start)
    assert pairs(rows) == [(row["prompt"], row["completion"]) for row in PAIRS[start:]]
    assert [row.origin.row for row in rows] == list(range(start, 5))


def test_a_folder_is_read_in_sorted_order_and_numbered_through(tmp_path):
    for number, name in enumerate(["b.parquet", "a.jsonl", "c.csv"]):
        write(tmp_path, name, PAIRS[number : number + 2])
    (tmp_path / "README.md").write_text("not data")
    whole = examples(tmp_path)
    assert [row.completion for row in whole] == [f"answer {n}" for n in (1, 2, 0, 1, 2, 3)]
    assert [row.origin.row for row in whole] == list(range(6))
    for row in whole:
        assert examples(tmp_path, start=row.origin.row + 1) == whole[row.origin.row + 1 :]


def test_each_line_of_a_text_file_is_a_document(tmp_path):
    (tmp_path / "a.txt").write_text("One line.\n\n  Another, with {braces}.\r\nThe last")
    rows = examples(tmp_path / "a.txt")
    assert [row.text for row in rows] == ["One line.", "  Another, with {braces}.", "The last"]
    assert [row.origin.line for row in rows] == [1, 3, 4]
    assert [row.text for row in examples(tmp_path / "a.txt", start=2)] == [
        "  Another, with {braces}.",
        "The last",
    ]
    assert len(examples(tmp_path)) == 3


def test_a_text_file_beside_rows_is_no_data(tmp_path):
    write(tmp_path, "a.jsonl", PAIRS)
    (tmp_path / "README.txt").write_text("About these rows.")
    assert len(examples(tmp_path)) == len(PAIRS)


def test_a_folder_with_named_splits_gives_one_of_them(tmp_path):
    write(tmp_path, "train.jsonl", PAIRS[:2])
    write(tmp_path, "test.jsonl", PAIRS[2:])
    assert [row.completion for row in examples(tmp_path)] == ["answer 0", "answer 1"]
    assert len(examples(tmp_path, split="test")) == 3


@pytest.mark.parametrize("split", ["test", "train[:90%]"])
def test_a_split_that_no_name_of_a_folder_tells_is_refused(tmp_path, split):
    """All its rows would be read: held-out rows that are the training rows."""
    write(tmp_path, "rows.jsonl", PAIRS)
    with refuses(UserError):
        examples(tmp_path, split=split)
    assert len(examples(tmp_path)) == len(PAIRS)


def test_json_lines_under_the_name_json_are_read_as_lines(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    assert len(examples(file)) == 5


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "completion": "c"},
        {"messages": TURNS, "tools": []},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
    ],
)
def test_one_row_by_itself_under_the_name_json_is_a_row(tmp_path, row):
    (tmp_path / "row.json").write_text(json.dumps(row))
    (tmp_path / "row.jsonl").write_text(json.dumps(row))
    (tmp_path / "wrapped.json").write_text(json.dumps({"rows": [row]}))
    (one,), *others = (examples(tmp_path / name) for name in ("row.jsonl", "row.json", "wrapped.json"))
    for (other,) in others:
        assert (other.prompt, other.completion, other.messages) == (one.prompt, one.completion, one.messages)


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_columns_may_be_parted_by_another_character_than_the_suffix_says(tmp_path, name, delimiter):
    with (tmp_path / name).open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerows([["prompt", "completion"], ["a, b; c", "d\te\nf"], ["g", "h"]])
    assert pairs(examples(tmp_path / name)) == [("a, b; c", "d\te\nf"), ("g", "h")]


def test_a_single_column_has_no_delimiter(tmp_path):
    (tmp_path / "rows.csv").write_text('text\n"one; two"\n"three, four"\n')
    assert [row.text for row in examples(tmp_path / "rows.csv")] == ["one; two", "three, four"]


def test_reading_is_lazy(tmp_path):
    file = write(tmp_path, "a.jsonl", PAIRS)
    rows = read(Source(str(file)), on_bad_row="error")
    next(rows)
    file.write_text("gone")  # what was buffered is still there; nothing was parsed ahead
    assert next(rows).completion == "answer 1"


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"text": "words"}, {"text": "words"}),
        ({"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": "c"}),
        ({"instruction": "i", "input": "", "output": "o"}, {"prompt": "i", "completion": "o"}),
        ({"instruction": "i", "input": "x", "output": "o"}, {"prompt": "i\n\nx", "completion": "o"}),
        ({"instruction": "i", "output": "o"}, {"prompt": "i", "completion": "o"}),
        ({"messages": TURNS, "id": 3}, {"messages": tuple(TURNS)}),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
            {"messages": tuple(TURNS)},
        ),
        ({"conversations": TURNS}, {"messages": tuple(TURNS)}),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, {"messages": tuple(TURNS)}),
        (
            {"system": "Be kind.", "conversations": TURNS},
            {"messages": ({"role": "system", "content": "Be kind."}, *TURNS)},
        ),
    ],
)
def test_formats_are_detected_from_the_columns(rows_file, row, shape):
    example = examples(rows_file([row]))[0]
    plain = vars(Example(example.origin))
    got = {name: value for name, value in vars(example).items() if value != plain[name]}
    assert got == shape


def test_tool_calls_and_tools_are_kept(rows_file):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    turns = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "1", "content": "3"})
    tools = [{"type": "function", "function": {"name": "add"}}]
    for column in (tools, json.dumps(tools)):
        example = examples(rows_file([{"messages": turns, "tools": column}]))[0]
        assert example.tools == tools
        assert example.messages[1] == {"role": "assistant", "tool_calls": [call]}
        assert example.messages[2] == turns[2]


def test_sharegpt_function_calls_become_tool_calls(rows_file):
    value = json.dumps({"name": "add", "arguments": {"a": 1}})
    turns = [{"from": "human", "value": "1?"}, {"from": "function_call", "value": value}]
    message = examples(rows_file([{"conversations": turns}]))[0].messages[1]
    assert message["role"] == "assistant"
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_columns_map_our_names_to_theirs(rows_file):
    file = rows_file([{"question": "q", "answer": "a", "text": "t"}])
    columns = (("prompt", "question"), ("completion", "answer"))
    assert pairs(examples(file, columns=columns)) == [("q", "a")]


@pytest.mark.parametrize(
    ("columns", "settings"),
    [
        (["question", "answer"], {}),
        (["text", "messages"], {}),
        (["question"], {"format": "text"}),
        (["text"], {"format": "chat"}),
        (["text"], {"columns": (("prompt", "question"),)}),
        (["text"], {"columns": (("promt", "text"),)}),
        (["question"], {"columns": (("question", "prompt"),)}),
        (["prompt", "chosen"], {"columns": (("prompt", "question"), ("completion", "chosen"))}),
    ],
)
def test_columns_that_fit_no_single_format_are_an_error_that_lists_them(columns, settings):
    with refuses(UserError):
        detect(Source("rows.jsonl", **settings), columns)


@pytest.mark.parametrize("name", ["prompt-completion", "prompt_completion", "prompt/completion"])
def test_a_named_format_wins(name):
    assert detect(Source("x", format=name), ["text", "prompt", "completion"]) == "prompt-completion"


GOOD_LINE = b'{"prompt": "a", "completion": "b"}'
BAD_LINES = (
    b'{"prompt": "a", "completion"',
    b'{"prompt": "a"}',
    b'{"prompt": "a", "completion": "  "}',
    b'{"prompt": "a", "completion": null}',
    b'{"prompt": [{}], "completion": null}',
    b'{"prompt": 7, "completion": "b"}',
    b'["a", "b"]',
    b'{"prompt": "\xff", "completion": "b"}',
    b'{"prompt": "\\ud800", "completion": "b"}',
)


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named_with_its_file_and_what_is_wrong(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(GOOD_LINE + b"\n\n" + line + b"\n" + GOOD_LINE)
    with refuses(UserError):
        examples(file)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "robot", "content": "x"}],
        [{"content": "x"}],
        [TURNS[0], {"role": "assistant"}],
        [{"role": "user", "content": 3}],
        ["Hi"],
        "Hi",
        [],
        TURNS[:1],
        [{"from": "alien", "value": "x"}],
        [TURNS[0], {"role": "assistant", "content": " "}],
    ],
)
def test_a_bad_conversation_says_which_message_is_wrong(rows_file, messages):
    with refuses(UserError):
        examples(rows_file([{"messages": messages}]))


def test_a_conversation_without_an_answer_is_fine_where_everything_is_labelled(rows_file):
    assert len(examples(rows_file([{"messages": TURNS[:1]}]), needs_answer=False)) == 1


def test_the_first_ten_bad_rows_are_named_at_once_and_all_are_counted(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join([GOOD_LINE, *[b"{"] * 14, GOOD_LINE]))
    seen = []
    with refuses(UserError) as caught:
        seen.extend(read(Source(str(file)), on_bad_row="error"))
    assert len(seen) == 1
    lines = [problem.split(":")[0].rsplit(" ", 1)[1] for problem in caught.value.problems[:10]]
    assert lines == [str(n) for n in range(2, 12)]
    assert len(caught.value.problems) == 11
    assert "on_bad_row=skip" in caught.value.problems[-1]


def test_skipping_drops_bad_rows_and_counts_them_by_reason(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join([b"{", GOOD_LINE, *BAD_LINES, GOOD_LINE]))
    tally = Tally()
    assert len(examples(file, on_bad_row="skip", tally=tally)) == 2
    assert tally.bad_rows == {
        "broken JSON": 2, "null in column completion": 2, "wrong type": 2, "not UTF-8": 2,
        "no column completion": 1, "empty answer": 1,
    }  # fmt: skip


def test_bad_rows_of_csv_are_named_by_their_line(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes(b'prompt,completion\n"two\nlines",b\nonly one\na,\xff\n')
    with pytest.raises(UserError) as caught:
        examples(file)
    first, second, _ = caught.value.problems
    says(first)
    says(second)


def test_keys_that_arrow_filled_with_null_are_taken_out(tmp_path):
    turns = [TURNS[0], {"role": "assistant", "content": "x", "name": "bob"}]
    file = write(tmp_path, "a.parquet", [{"messages": turns}])
    assert examples(file)[0].messages == tuple(turns)


def test_a_mistyped_path_is_answered_with_the_nearest_files(tmp_path, monkeypatch):
    for name in ("data/train.jsonl", "data/test.jsonl", "data/chats/rows.parquet", "data/notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    for path in (
        "data/trian.jsonl",
        "train.jsonl",
        "data/train.json",
        "dta/",
        str(tmp_path / "data" / "chats" / "row.parquet"),
    ):
        with refuses(UserError):
            examples(path)
    with refuses(UserError):
        examples("nothing-like-it.jsonl")


def test_a_path_that_is_not_there_is_said(tmp_path):
    with refuses(UserError):
        examples(tmp_path / "nowhere.jsonl")
    with refuses(UserError):
        files(Source(str(tmp_path)))


def test_only_an_id_that_is_no_path_means_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub("openai/gsm8k")
    assert is_hub("openai/gsm8k:main")
    assert not is_hub("data/train.jsonl")
    assert not is_hub("/data/train")
    assert not is_hub("train")
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert not is_hub("openai/gsm8k")


def test_a_folder_saved_by_datasets_is_read(tmp_path):
    import datasets

    datasets.Dataset.from_list(PAIRS).save_to_disk(str(tmp_path / "saved"))
    assert [row.completion for row in examples(tmp_path / "saved", start=3)] == ["answer 3", "answer 4"]
    with refuses(UserError):
        examples(tmp_path / "saved", split="test")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_hub_is_read_from_any_row(streaming, tmp_path, monkeypatch):
    import datasets

    asked, rows = [], datasets.Dataset.from_list(PAIRS)

    def load(*words, **keywords):
        asked.append((words, keywords))
        return rows.to_iterable_dataset() if keywords["streaming"] else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    chosen = {"streaming": True} if streaming else {}  # stored on the disk unless a stream is asked for
    found = examples("me/pairs:main", split="train[:5]", start=2, **chosen)
    assert [row.completion for row in found] == ["answer 2", "answer 3", "answer 4"]
    assert [row.origin.row for row in found] == [2, 3, 4]
    assert asked == [(("me/pairs", "main"), {"split": "train[:5]", "streaming": streaming})]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [][0])
    with refuses(UserError):
        examples("me/pairs")


# Folders and patterns #


def read_of(source):
    """(rows' completions, sentences on files that are not read) of a source."""
    not_read = []
    data_files = files(source, not_read)
    return [row.completion for row in read(source, on_bad_row="error", data_files=data_files)], not_read


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """rows/ with two rows in each of three files, one of which says train, in the current folder."""
    (tmp_path / "rows" / "inner").mkdir(parents=True)
    for number, name in enumerate(("train_math.jsonl", "code.jsonl", "inner/chat.jsonl")):
        write(tmp_path / "rows", name, [{"prompt": "?", "completion": f"{number} {i}"} for i in (0, 1)])
    (tmp_path / "rows" / "README.md").write_text("About these rows.")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
def test_files_of_a_folder_that_are_not_read_are_named_with_their_number():
    rows, not_read = read_of(Source("rows"))
    assert rows == ["0 0", "0 1"]
    says("\n".join(not_read))
    assert read_of(Source("rows/inner")) == (["2 0", "2 1"], [])


@pytest.mark.usefixtures("folder")
def test_a_folder_that_may_not_be_what_it_seems_is_said():
    inner = Path("rows/inner")
    for name in ("test.jsonl", "part-00000-of-00002.jsonl"):
        (inner / name).write_text('{"prompt": "?", "completion": "!"}\n')
    for name in ("more.jsonl.zst", "old.arrow", "dataset_infos.json"):
        (inner / name).write_text("{}")
    rows, not_read = read_of(Source("rows/inner"))
    assert rows == ["2 0", "2 1", "!", "!"]
    says("\n".join(not_read))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("pattern", "numbers", "left_out"),
    [
        ("rows/*.jsonl", "10", ""),
        ("rows/**", "120", "README.md"),
        ("rows/[a-d]*.json?", "1", ""),
        ("memory://patterns/*.jsonl", "10", ""),
    ],
)
def test_a_pattern_reads_the_files_that_match(pattern, numbers, left_out):
    if pattern.startswith("memory:"):
        import fsspec

        fsspec.filesystem("memory").put("rows/", "/patterns/", recursive=True)
    rows, not_read = read_of(Source(pattern, split="test"))
    assert rows == [f"{number} {i}" for number in numbers for i in (0, 1)]
    assert left_out in "".join(not_read)
    assert bool(not_read) == bool(left_out)


@pytest.mark.usefixtures("folder")
def test_a_pattern_of_an_organisation_that_is_no_folder_here_is_of_the_hub(monkeypatch):
    from huggingface_hub import HfFileSystem, hf_api

    there = {"data/1.jsonl": b'{"text": "a"}\n', "data/2.jsonl": b'{"text": "b"}\n', "data/README.md": b""}

    def listed(api, repo, path_in_repo="", **_):
        assert repo == "org/name"
        if not path_in_repo:
            yield hf_api.RepoFolder(path="data", oid="0")
        for name, content in there.items() if path_in_repo else ():
            yield hf_api.RepoFile(path=name, size=len(content), oid=f"{name} 1")

    monkeypatch.setattr(hf_api.HfApi, "repo_info", lambda *_, **__: None)
    monkeypatch.setattr(hf_api.HfApi, "list_repo_tree", listed)
    monkeypatch.setattr(
        HfFileSystem, "open", lambda self, path, mode: BytesIO(there[path.removeprefix("datasets/org/name/")])
    )
    HfFileSystem.clear_instance_cache()
    (chosen,) = DataConfig(train="org/name/data/*.jsonl").train
    assert chosen.path == "hf://datasets/org/name/data/*.jsonl"
    assert DataConfig(train="rows/inner/*.jsonl").train[0].path == "rows/inner/*.jsonl"
    assert [row.text for row in read(Source(chosen.path), on_bad_row="error")] == ["a", "b"]
    first, _ = files(Source(chosen.path))
    assert first.content(Path("none"), print) == first.content(Path("none"), print)  # without reading it
    there.clear()
    HfFileSystem.clear_instance_cache()
    with refuses(UserError):
        files(Source(chosen.path))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("pattern", ["rows/*.parquet", "else/*.jsonl", "rows/*.md", "rows/inn*"])
def test_a_pattern_without_data_says_what_is_there(pattern):
    with refuses(UserError):
        files(Source(pattern))
