import io

from rich.console import Console

from meshtune.report.facts import capability_table, facts_table
from meshtune.report.run.summary import samples_of
from meshtune.report.run.tables import run_summary, samples_table


def shown(renderable, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_summary_says_what_changed_and_where_the_model_is(run):
    text = shown(run_summary(run), width=200)
    assert "0.0% → 75.0% of 8 held-out prompts" in text
    assert "4.0000 → 1.0000 in 4 steps" in text
    assert "5.0000 → 2.0000 (best 1.5000 at step 2)" in text
    assert "200 tokens/s (median)" in text
    assert "2.0 s · 400 tokens" in text
    assert str(run.model) in text


def test_the_summary_of_a_run_without_evaluations_or_rows_is_no_error(empty, train):
    shown(run_summary(empty))
    empty.append(train(1, loss=None))
    assert "held-out" not in shown(run_summary(empty))


def test_samples_stand_side_by_side_and_are_not_read_as_markup(run):
    run.append_sample({"step": 0, "prompt": "[bold]x[/nope]", "expected": "y", "answer": "[red]z"})
    text = shown(samples_table(run))
    assert text.split()[:4] == ["prompt", "expected", "before", "after"]
    assert ["2+2=", "4", "?", "4"] in [line.split() for line in text.splitlines()]
    assert "[bold]x[/nope]" in text


def test_only_an_expected_answer_is_right(empty):
    empty.append_sample({"step": 1, "prompt": "x", "expected": None, "answer": ""})
    empty.append_sample({"step": 1, "prompt": "y", "expected": "7", "answer": " 7 "})
    first, second = samples_of(empty)
    assert (first.matches(""), second.matches(" 7 "), second.matches("8")) == (False, True, False)


def test_tables_show_what_they_are_given():
    assert "no  plan" in " ".join(
        shown(capability_table([("tensor", False, "plan is missing")])).split(" ")
    ).replace("    ", "  ")
    assert shown(facts_table({"versions": {"torch": "2.13"}, "gpus": 0})).split() == [
        "versions.torch",
        "2.13",
        "gpus",
        "0",
    ]


def test_escapes_of_rows_do_not_reach_the_terminal(empty):
    evil = "a\x1b]0;title\x07b\x9b31m\tc\r\n"
    empty.append_sample({"step": 1, "prompt": evil, "expected": evil, "answer": evil})
    shown_text = shown(samples_table(empty))
    assert not set("\x1b\x07\x9b") & set(shown_text)
    assert "a␛]0;title␇b" in shown_text
