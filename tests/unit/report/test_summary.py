import json

import pytest
from golden import says

from meshtune.report.run.report import report_page
from meshtune.report.run.summary import grown, samples_of, summarise
from meshtune.report.run.tables import headline
from meshtune.train.folder import Claim


def test_headline_numbers_are_those_of_the_rows(run):
    summary = summarise(run)
    assert (summary.first_loss, summary.last_loss) == (4.0, 1.0)
    assert (summary.first_eval_loss, summary.last_eval_loss) == (5.0, 2.0)
    assert (summary.best_eval_loss, summary.best_eval_step) == (1.5, 2)
    assert (summary.first_exact_match, summary.last_exact_match, summary.prompts) == (0.0, 0.75, 8)
    assert (summary.steps, summary.seconds, summary.tokens) == (4, 2.0, 400)
    assert summary.peak_memory_bytes == 4 * 2**20


def test_the_first_step_does_not_count_for_speed(run):
    assert summarise(run).tokens_per_second_per_gpu == 200.0


def test_an_empty_folder_has_a_summary(empty):
    summary = summarise(empty)
    assert (summary.status, summary.steps) == ("stopped without an end", 0)
    assert summary.last_loss is None and summary.model_folder is None
    json.dumps(summary.as_dict(), allow_nan=False)


def test_a_step_that_was_not_finite_is_counted_and_its_null_loss_passed_over(empty, train, evaluation):
    empty.append(train(1))
    empty.append(train(2, loss=None, grad_norm=None, skipped=True))
    empty.append(evaluation(2, float("nan")))
    summary = summarise(empty)
    assert (summary.steps, summary.skipped, summary.last_loss, summary.best_eval_loss) == (2, 1, 4.0, None)


def test_sums_are_not_made_of_every_tenth_row(empty, train):
    for step in (1, 10, 20):
        empty.append(train(step))
    assert summarise(empty).tokens is None
    assert summarise(empty).seconds is None


def test_a_summary_grows_to_that_of_all_rows(empty, train, evaluation):
    """Medians aside, which need all rows."""
    rows = [train(1, loss=None), *(train(step, loss=3 - step / 10) for step in (2, 3)), evaluation(3, 0.5)]
    rows += [train(4), evaluation(4, 0.25), train(5, peak_memory_bytes=9), evaluation(5, 0.75)]
    medians = dict.fromkeys(("tokens_per_second_per_gpu", "mfu"))
    whole = summarise(empty, rows).as_dict() | medians
    for seen in range(len(rows) + 1):
        some = summarise(empty, rows[:seen])
        assert grown(some, rows[seen:]).as_dict() | medians == whole
    assert grown(summarise(empty, rows), [train(7)]).tokens is None, "step 6 has no row"


def test_a_resumed_run_is_running_again_until_its_process_ends(run):
    assert summarise(run).status == "finished"
    with Claim(run):
        run.append({"kind": "run", "resumed_from": 4})
        assert summarise(run).status == "running"
    assert summarise(run).status == "stopped without an end"
    with Claim(run):  # looking at the lock has not kept it
        run.append({"kind": "end", "step": 4, "status": "stopped by SIGTERM"})
        assert summarise(run).status == "stopped by SIGTERM"


def test_a_run_that_resumed_under_another_layout_names_both_with_their_steps(empty, train):
    empty.append({"kind": "run", "layout": "zero3x2"})
    for layout, resumed in (("tp2", 6), ("zero3x2", 4), ("tp2-sp", 4), ("tp2-sp", 5)):  # 4 is before 6
        empty.append({"kind": "run", "layout": layout, "resumed_from": resumed})
    for step, speed in ((1, 90.0), (2, 90.0), (3, 90.0), (5, 1.0), (6, 3.0), (8, 5.0)):
        empty.append(train(step, tokens_per_second_per_gpu=speed))
    assert summarise(empty).tokens_per_second_per_gpu == 4.0, "the last layout's, without its first step"
    words = "steps 1–4 under zero3x2, 5–8 under tp2-sp"
    assert summarise(empty).layouts_in_words == words
    assert ("layouts", words) in headline(summarise(empty)) and words in report_page(empty)
    assert summarise(empty).as_dict()["layouts"][1] == {"layout": "tp2-sp", "from_step": 5}


@pytest.mark.parametrize(
    ("world", "device", "unit"),
    [
        (1, "cuda", "tokens/s"),
        (8, "cuda", "tokens/s/GPU"),
        (1, "cpu", "tokens/s"),
        (2, "cpu", "tokens/s/rank"),
    ],
)
def test_speed_is_per_gpu_or_per_rank_once_there_are_several(empty, world, device, unit):
    empty.append({"kind": "run", "world": world, "device_type": device})
    assert summarise(empty).speed_unit == unit


def test_a_sample_has_the_first_and_the_last_answer(run):
    first, second = samples_of(run)
    assert (first.prompt, first.expected, first.before, first.after) == ("2+2=", "4", "?", "4")
    assert (second.before, second.after) == ("!", "7")


def test_before_is_before_the_first_step_or_missing(empty):
    for step, answer in ((2, "early"), (4, "late")):
        empty.append_sample({"step": step, "prompt": "x", "expected": "y", "answer": answer})
    assert [(one.before, one.after) for one in samples_of(empty)] == [(None, "late")]


def test_a_sample_without_its_texts_is_left_out(empty):
    empty.append_sample({"step": 1, "prompt": "2+2=", "answer": 4})
    assert samples_of(empty) == []
    says(summarise(empty).left_out)
