"""Rows that are tokenised already, other names of roles and columns, and files behind a URL."""

import functools
import gzip
import http.server
import json
import threading

import pytest
from data_rows import prepare
from golden import refuses
from small_tokenizer import make_tokenizer

from meshtune.config import load
from meshtune.data.encode import Encoder
from meshtune.data.example import BadRow, Example, Ids, Origin, Source
from meshtune.data.files import files
from meshtune.data.readers import read
from meshtune.errors import UserError
from meshtune.plan.programs import TOOLS
from meshtune.tools.planned import setting_problems


def write(tmp_path, rows, name="rows.jsonl"):
    file = tmp_path / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def examples(tmp_path, *rows, **settings):
    return list(read(Source(str(write(tmp_path, rows)), **settings), on_bad_row="error"))


# Tokenised rows #

IDS = [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("columns", "ids", "labelled"),
    [
        ({}, IDS, [1, 1, 1, 1]),
        ({"labels": [-100, -100, 7, 8]}, IDS, [0, 0, 1, 1]),
        ({"completion_mask": [0, 0, 1, 1]}, IDS, [0, 0, 1, 1]),
        ({"assistant_masks": [0, 1, 0, 1], "completion_mask": [0, 0, 1, 1]}, IDS, [0, 0, 0, 1]),
        ({"labels": [-100, 6, 7, -100], "attention_mask": [0, 1, 1, 0]}, [6, 7], [1, 1]),
        ({"attention_mask": [1, 1, 0, 0], "position_ids": [0, 1, 0, 0]}, [5, 6], [1, 1]),
        ({"labels": [-100, 6, 7, 8], "completion_mask": [0, 1, 1, 1]}, IDS, [0, 1, 1, 1]),
    ],
)
def test_tokenised_rows_are_taken_as_they_are(tmp_path, columns, ids, labelled):
    (example,) = examples(tmp_path, {"input_ids": IDS} | columns)
    assert example.ids == Ids(tuple(ids), tuple(map(bool, labelled)))
    encoder = Encoder(make_tokenizer(), train_on="completion", chat_template="chatml")
    (document,) = encoder.encode([example])
    assert document.ids.tolist() == ids
    assert document.labelled.tolist() == [False, *map(bool, labelled[1:])], "no token precedes the first"


@pytest.mark.parametrize(
    "columns",
    [
        {"labels": [6, 7, 8, -100]},
        {"labels": [7, 8]},
        {"completion_mask": [0, 2, 0, 0]},
        {"attention_mask": [1, 0, 1, 1]},
        {"attention_mask": [0, 0, 0, 0]},
        {"position_ids": [0, 1, 0, 1]},
        {"labels": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]},
        {"input_ids": [1.5]},
        {"input_ids": []},
        {"input_ids": "5 6"},
    ],
)
def test_tokenised_rows_that_contradict_themselves_are_refused(tmp_path, columns):
    with refuses(UserError):
        examples(tmp_path, {"input_ids": IDS} | columns)


def test_ids_that_the_tokenizer_lacks_are_refused():
    encoder = Encoder(make_tokenizer(), train_on="completion", chat_template=None)
    row = Example(Origin("rows.jsonl", 7), ids=Ids((1, 10_000), (False, True)))
    (bad,) = encoder.encode_each([row])
    assert isinstance(bad, BadRow) and f"ids end at {len(encoder.tokenizer) - 1}" in str(bad)


def test_tokenised_rows_are_asked_and_answered_like_others():
    encoder = Encoder(make_tokenizer(), train_on="completion", chat_template=None)
    ids = encoder.tokenizer("Hello there", add_special_tokens=False)["input_ids"]
    row = Example(Origin("rows.jsonl", 7), ids=Ids(tuple(ids), (False, *[True] * (len(ids) - 1))))
    assert encoder.prompt_ids(row) == ids[:1]


# Names #


def test_roles_are_mapped_in_both_formats(tmp_path):
    roles = (("bot", "assistant"), ("customer", "user"))
    messages = [{"role": "customer", "content": "Hi"}, {"role": "bot", "content": "Hello"}]
    (one,) = examples(tmp_path, {"messages": messages}, roles=roles)
    turns = [{"from": "customer", "value": "Hi"}, {"from": "bot", "value": "Hello"}]
    (other,) = examples(tmp_path, {"conversations": turns}, roles=roles)
    assert [message["role"] for message in one.messages] == ["user", "assistant"]
    assert one.messages == other.messages


def test_unknown_roles_name_the_setting(tmp_path):
    turns = {"messages": [{"role": "bot", "content": "Hello"}]}
    with refuses(UserError):
        examples(tmp_path, turns)
    with refuses(UserError):
        examples(tmp_path, turns, roles=(("bot", "helper"),))


@pytest.mark.parametrize(
    ("columns", "suggested"),
    [
        (["instruction", "context", "response", "category"], "{input: context, output: response}"),
        (["instruction", "response"], "{output: response}"),
        (["input", "output"], "{prompt: input, completion: output}"),
        (["Question", "Answer"], "{prompt: Question, completion: Answer}"),
        (["prompt", "response"], "{completion: response}"),
        (["conversation"], "{messages: conversation}"),
        (["a", "b"], "for example 'data.columns={prompt: question, completion: answer}'"),
    ],
)
def test_well_known_columns_are_suggested(tmp_path, columns, suggested):
    row = dict.fromkeys(columns, "x")
    with pytest.raises(UserError) as error:
        examples(tmp_path, row)
    assert suggested in str(error.value)


def test_the_suggestion_for_dolly_works(tmp_path):
    row = {"instruction": "Add", "context": "two and two", "response": "four", "category": "maths"}
    (example,) = examples(tmp_path, row, columns=(("input", "context"), ("output", "response")))
    assert (example.prompt, example.completion) == ("Add\n\ntwo and two", "four")


# URLs #


@pytest.fixture
def served(tmp_path):
    """(URL, folder) of a server of files; it says when a file was changed."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", tmp_path
        server.shutdown()


ROWS = [{"prompt": f"{n}?", "completion": f"{n}"} for n in range(300)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.csv"])
def test_files_behind_a_url_are_read(served, name):
    import datasets

    url, folder = served
    data = datasets.Dataset.from_list(ROWS)
    if name.endswith("parquet"):
        data.to_parquet(folder / name)
    elif name.endswith("csv"):
        data.to_csv(folder / name)
    else:
        text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    found = list(read(Source(f"{url}/{name}?download=true"), on_bad_row="error"))
    assert [(row.prompt, row.completion) for row in found] == [(r["prompt"], r["completion"]) for r in ROWS]
    assert str(found[0].origin).startswith(url)


def test_a_folder_behind_a_url_is_read_as_one_here():
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("train-1.jsonl", "train-2.jsonl", "test.jsonl", "README.txt"):
        memory.pipe(f"/rows/{name}", json.dumps({"text": name}).encode())
    found = read(Source("memory://rows"), on_bad_row="error")
    assert [row.text for row in found] == ["train-1.jsonl", "train-2.jsonl"]


def test_the_cache_of_a_url_is_found_until_the_file_changes(served, tmp_path):
    url, folder = served
    write(folder, ROWS)
    encoder = Encoder(make_tokenizer(), train_on="completion", chat_template=None)

    def state():
        cache = tmp_path / "cache"
        prepared = prepare([Source(f"{url}/rows.jsonl")], encoder, seq_len=64, cache_dir=cache)
        return prepared.stats["cache"], prepared.stats["train"]["documents"]

    assert [state(), state()] == [("made", 300), ("found", 300)]
    write(folder, ROWS[:7])
    assert state() == ("made", 7)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("s3://bucket/rows.jsonl", "pip install s3fs"),
        ("gs://bucket/rows.jsonl", "pip install gcsfs"),
        ("nosuch://bucket/rows.jsonl", "can't be read: Protocol not known"),
        ("memory://nowhere/rows.jsonl", "can't be read: the file does not exist"),
    ],
)
def test_a_url_that_cannot_be_read_says_why(path, sentence):
    if "pip install" in sentence:
        pytest.importorskip("fsspec")
        package = sentence.split()[-1]
        try:
            __import__(package)
        except ImportError:
            pass
        else:
            pytest.skip(f"{package} is installed")
    with refuses(UserError):
        files(Source(path))


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.format=tokens", "input_ids"),
        ("data.roles={bot: assistant}", "data.roles"),
        ("data.split_turns=true", "data.split_turns"),
        ("data.chat_template_kwargs={enable_thinking: false}", "data.chat_template_kwargs"),
        ("data.chat_template=training", "data.chat_template=training"),
        ("data.train=s3://bucket/rows.jsonl", "s3://bucket/rows.jsonl"),
    ],
)
def test_what_other_tools_cannot_do_is_not_exported(setting, sentence):
    config = load(None, ["model.name=org/name", "data.train=rows.jsonl", "layout=dp2", setting])
    tool = "llamafactory" if "roles" in setting or "kwargs" in setting else "axolotl"  # which carries these
    problems = [*setting_problems(TOOLS[tool], config)]
    assert any(sentence in problem for problem in problems)
