"""Columns inside objects, by dotted names."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from meshtune.data.example import Source, Tally
from meshtune.data.readers import read
from meshtune.errors import UserError

ROW = {
    "prompt": [{"role": "user", "content": "Add 1 and 2."}],
    "extra_info": {"question": "1 + 2?", "answer": "3", "index": 7, "by": {"name": "Ann"}},
    "answers": {"text": ["3", "three"]},
}


@pytest.fixture(params=["jsonl", "parquet"])
def rows_of(tmp_path, request):
    def rows_of(row, columns, **settings):
        """(example, notes) of a file with one row."""
        file = tmp_path / f"rows.{request.param}"
        if request.param == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
        else:
            file.write_text(json.dumps(row) + "\n")
        tally = Tally()
        source = Source(str(file), columns=tuple(columns.items()), **settings)
        (example,) = read(source, on_bad_row="error", tally=tally)
        return example, tally.notes

    return rows_of


def test_dotted_names_reach_into_objects(rows_of):
    example, notes = rows_of(ROW, {"prompt": "extra_info.question", "completion": "extra_info.answer"})
    assert (example.prompt, example.completion) == ("1 + 2?", "3")
    assert [*notes.unused] == ["prompt", "extra_info.index", "extra_info.by", "answers"]
    example, _ = rows_of(ROW, {"prompt": "extra_info.by.name", "completion": "answers.text.1"})
    assert (example.prompt, example.completion) == ("Ann", "three")


def test_a_column_with_the_dot_in_its_name_comes_first(rows_of):
    row = ROW | {"extra_info.question": "of its own", "a.b": {"c.d": "inside"}}
    columns = {"prompt": "extra_info.question", "completion": "a.b.c.d"}
    example, _ = rows_of(row, columns, where=(("extra_info.index", 7),))
    assert (example.prompt, example.completion) == ("of its own", "inside")


def test_a_text_answers_a_prompt_of_messages(rows_of):
    example, _ = rows_of(ROW, {"completion": "extra_info.answer"})
    assert example.messages == (*ROW["prompt"], {"role": "assistant", "content": "3"})


def test_lists_that_were_stored_by_key_are_lists_of_objects(rows_of):
    messages = {"role": ["user", "assistant"], "content": ["Hi", "Hello"], "name": ["Ann", None]}
    example, _ = rows_of({"messages": messages}, {})
    assert example.messages == (
        {"role": "user", "content": "Hi", "name": "Ann"}, {"role": "assistant", "content": "Hello"}
    )  # fmt: skip
    with pytest.raises(UserError, match="expected a list"):
        rows_of({"messages": messages | {"content": ["Hi"]}}, {})


@pytest.mark.parametrize("columns", [{}, {"prompt": "extra_info.query", "completion": "answers.text.2"}])
def test_inner_columns_are_named_where_nothing_fits(rows_of, columns, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"extra_info\.question, extra_info\.answer") as error:
        rows_of(ROW, columns)
    suggestion = "data.columns={prompt: extra_info.question, completion: extra_info.answer}"
    assert columns or suggestion in str(error.value)


def test_a_filter_knows_null_from_a_missing_column(rows_of):
    row = {"text": "Hi", "lang": None, "m": None, "n": {"lang": None, "of": 1}}
    for column in ("lang", "m.lang", "n.lang"):
        example, _ = rows_of(row, {}, where=((column, None),))
        assert example.text == "Hi"
    with pytest.raises(UserError, match="is missing"):
        rows_of(row, {}, where=(("n.land", None),))


def test_a_first_row_without_a_mapped_column_is_a_bad_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1?"}\n{"question": "1 + 2?", "answer": "3"}\n')
    source = Source(str(file), columns=(("prompt", "question"), ("completion", "answer")))
    with pytest.raises(UserError, match="line 1: column answer is missing"):
        list(read(source, on_bad_row="error"))
    (example,) = read(source, on_bad_row="skip")
    assert example.completion == "3"
