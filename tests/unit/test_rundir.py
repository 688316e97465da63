import json
import math
import os
from pathlib import Path

import pytest
from golden import refuses, says

from meshtune.errors import UserError
from meshtune.rundir import RunDir, write_text_atomically


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "runs" / "one").create()


def test_file_names_are_those_of_the_contract(run):
    names = [run.config_file, run.plan_file, run.metrics_file, run.checkpoints, run.model, run.report_file]
    assert [file.name for file in names] == [
        "config.yaml", "plan.yaml", "metrics.jsonl", "checkpoints", "model", "report.html"
    ]  # fmt: skip
    assert all(file.parent == run.path for file in names)


def test_rows_come_back_in_order_and_by_kind(run):
    rows = [
        {"kind": "train", "step": 1, "loss": 2.5},
        {"kind": "eval", "step": 1},
        {"kind": "train", "step": 2},
    ]
    for row in rows:
        run.append(row)
    assert run.rows() == rows
    assert run.rows("train") == [rows[0], rows[2]]


def test_a_folder_without_rows_has_none(run):
    assert run.rows() == []
    assert run.samples() == []


def test_floats_keep_every_bit(run):
    loss = 0.1 + 0.2
    run.append({"loss": loss})
    assert run.rows()[0]["loss"].hex() == loss.hex()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_written_as_null_in_strict_json(run, value):
    run.append({"loss": value, "inner": {"norms": [1.0, value]}})
    line = run.metrics_file.read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"loss": None, "inner": {"norms": [1.0, None]}}


def test_a_row_is_one_line_whatever_it_holds(run):
    sample = {"step": 0, "prompt": "", "answer": "two\nlines, ünï\u2028code \udcff"}
    run.append_sample(sample)
    assert run.samples_file.read_bytes().count(b"\n") == 1
    assert run.samples() == [sample]


def test_a_torn_last_line_is_no_row_and_the_next_append_cuts_it_off(run):
    run.append({"step": 1})
    with open(run.metrics_file, "a") as stream:
        stream.write('{"step": 2, "lo')
    assert run.rows() == [{"step": 1}]
    run.append({"step": 3})
    assert run.metrics_file.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_file_of_one_torn_line_starts_anew(run):
    run.metrics_file.write_text('{"st')
    run.append({"step": 1})
    assert run.metrics_file.read_text() == '{"step": 1}\n'


def test_a_broken_line_inside_is_left_out(run):
    run.metrics_file.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    assert run.rows() == [{"step": 1}, {"step": 3}]
    says(run.left_out(run.rows().left_out))


@pytest.mark.parametrize(
    "line", ['{"step": 1} {"step": 2}', '{"step": 1}}', '{"step":', '1}, {"step": 1', '{"text": "\udcff"}']
)
def test_every_line_is_read_alone(run, line):
    """A line that is no JSON is left out, although its neighbours would make it JSON, or it is no UTF-8."""
    content = "{}\n" * 3 + line + '\n"step": 1}\n'
    run.metrics_file.write_bytes(content.encode("utf-8", "surrogateescape"))
    rows = run.rows()
    assert rows == [{}, {}, {}] and len(rows.left_out) == 2
    says(rows.left_out[0])


def test_white_space_a_mark_of_the_encoding_and_large_numbers_are_no_fault(run):
    row = {"kind": "train", "step": 1, "loss": 1.7e308, "mfu": 1.7e308, "tokens": None, "skipped": True}
    lines = ["\ufeff{}", "  {} ", "\ufeff{}", "", "\t", json.dumps(row) + "\r", '{"text": "é\u2028"}']
    run.metrics_file.write_bytes("\n".join([*lines, '{"torn": "é'])[:-1].encode() + b"\xc3")
    assert run.rows() == [{}, {}, {}, row, {"text": "é\u2028"}]


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "train", "step": "x"}', '{"kind": "train"}', '{"kind": "end", "step": -5}',
        '{"kind": "eval", "step": 1, "loss": [5.7]}', '{"kind": "train", "step": 1, "mfu": "high"}',
        '{"kind": "memory", "step": 1, "phases": {"forward": {"peak": ".."}}}',
        '{"kind": "memory", "step": 1, "phases": {"forward": {"weights": 1}}}',
        '{"kind": "train", "step": 1, "tokens": 1e999}',
        '{"kind": "train", "step": 1, "loss": NaN, "mfu": 0.5}',
        '{"kind": "train", "step": 1, "loss": Infinity, "mfu": -Infinity}',
        f'{{"kind": "train", "step": 1, "a": 1{"0" * 400}, "b": -1{"0" * 400}}}',
        '{"kind": "train", "step": 1, "loss": ""}', '{"kind": "end", "step": 1, "seconds": "long"}',
        '{"kind": ["train"], "step": 1}',
    ],
)  # fmt: skip
def test_a_line_that_no_run_writes_is_left_out_and_named(run, line):
    run.metrics_file.write_text('{"kind": "run"}\n' + line + '\n{"kind": "save", "step": 1, "seconds": 1}\n')
    rows = run.rows()
    assert [row["kind"] for row in rows] == ["run", "save"]
    says(rows.left_out)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_rows_are_read_from_files_alone(run, make):
    make(run.metrics_file)
    with refuses(UserError):
        run.rows()


def test_drop_after_removes_later_steps_from_rows_and_samples_and_keeps_what_has_no_step(run):
    for row in [{"kind": "run"}, {"step": 1}, {"step": 2}, {"step": 3}]:
        run.append(row)
        run.append_sample({"prompt": "", "answer": ""} | row)
    with open(run.metrics_file, "a") as stream:
        stream.write('[3]\n{"step": 4')
    run.drop_after(2)
    assert run.rows() == [{"kind": "run"}, {"step": 1}, {"step": 2}]
    assert [row.get("step") for row in run.samples()] == [None, 1, 2]
    assert run.metrics_file.read_text().endswith("\n[3]\n")  # it may be more than a page understands
    assert run.metrics_file.read_bytes().endswith(b"\n")
    assert sorted(os.listdir(run.path)) == ["metrics.jsonl", "samples.jsonl"]


def test_a_failed_write_leaves_the_old_text_and_nothing_beside_it(run):
    write_text_atomically(run.config_file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(run.config_file, "new \ud800")
    assert run.config_file.read_text() == "old"
    assert os.listdir(run.path) == ["config.yaml"]


def test_an_output_under_a_file_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with refuses(UserError):
        RunDir(tmp_path / "file" / "run").create()
