import io
import re

import pytest
from rich.console import Console
from terminal import printed

from meshtune.meter.rows import matches
from meshtune.report.draw.table import facts
from meshtune.report.run.summary import samples_of, summarise
from meshtune.report.run.tables import headline, places, run_summary, samples_table


def test_the_summary_says_what_changed_and_where_the_model_is(run):
    text = printed(run_summary(run), width=200)
    assert "0.0% → 75.0% of 8 held-out prompts" in text
    assert "4.0000 → 1.0000 in 4 steps" in text
    assert "5.0000 → 2.0000 (best 1.5000 at step 2)" in text
    assert "200 tokens/s (median)" in text
    assert "2.0 s · 400 tokens" in text
    assert "means of" not in text and "loss, means of 2 steps" in printed(run_summary(run, curve_width=2))


def test_long_paths_are_printed_whole(run):
    console = Console(file=io.StringIO(), width=20)
    for line in places(run):
        console.print(line, soft_wrap=True)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        f"  model           {run.model}",
        f"  chat with it    meshtune chat {run.path}",
        f"  evaluate it     meshtune eval {run.path}",
        f"  serve it        meshtune export {run.path} FOLDER   (then docs/serve.md)",
    ]


def test_the_summary_of_a_run_without_evaluations_or_rows_is_no_error(empty, train):
    printed(run_summary(empty))
    empty.append(train(1, loss=None))
    assert "held-out" not in printed(run_summary(empty))


def test_one_step_and_one_prompt_are_singular(empty, train, evaluation):
    empty.append(train(1, skipped=True))
    empty.append(evaluation(1, 2.0, exact_match=1.0, prompts=1))
    lines = dict(headline(summarise(empty)))
    assert lines["loss"] == "4.0000 → 4.0000 in 1 step"
    assert lines["exact match"] == "100.0% of 1 held-out prompt"
    assert lines["not applied"] == "1 step, whose loss or gradients were not finite"


def test_samples_stand_below_each_other_and_are_not_read_as_markup(run):
    run.append_sample({"step": 0, "prompt": "[bold]x[/nope]", "expected": "y", "answer": "[red]z"})
    text = printed(samples_table(run))
    lines = [line.split() for line in text.splitlines()]
    assert lines[:4] == [["prompt", "2+2="], ["expected", "4"], ["before", "?"], ["at", "step", "4", "4"]]
    assert "[bold]x[/nope]" in text


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("no_color", [False, True])
def test_words_are_whole_at_any_width(run, width, no_color):
    words = " ".join(f"{'alphabetical' * 4}-{number}" for number in range(30))
    for step, answer in ((0, "before " + words), (4, "after " + words)):
        run.append_sample({"step": step, "prompt": "what? " + words, "expected": words, "answer": answer})
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=no_color)
    console.print(run_summary(run))
    console.print(samples_table(run))
    text = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert sorted(set(words.split())) == sorted({word for word in text.split() if "alpha" in word})


def test_only_an_expected_answer_is_right(empty):
    empty.append_sample({"step": 1, "prompt": "x", "expected": None, "answer": ""})
    empty.append_sample({"step": 1, "prompt": "y", "expected": "7", "answer": " 7 "})
    first, second = (one.expected for one in samples_of(empty))
    assert (matches(first, ""), matches(second, " 7 "), matches(second, "8")) == (False, True, False)


def test_tables_show_what_they_are_given():
    words = printed(facts({"versions": {"torch": "2.13"}, "gpus": 0})).split()
    assert words == ["versions.torch", "2.13", "gpus", "0"]


def test_escapes_of_rows_do_not_reach_the_terminal(empty):
    evil = "a\x1b]0;title\x07b\x9b31m\tc\r\n"
    empty.append_sample({"step": 1, "prompt": evil, "expected": evil, "answer": evil})
    shown_text = printed(samples_table(empty))
    assert not set("\x1b\x07\x9b") & set(shown_text)
    assert "a␛]0;title␇b" in shown_text
