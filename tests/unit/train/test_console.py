"""The rows of a run on a terminal and in a log file, and the time that is left."""

import io
import random
import re

import pytest
from rich.console import Console

from meshtune.meter.rows import eval_row, memory_row, train_row
from meshtune.train.console import ConsoleTracker, Course, TimeLeft, reward_parts
from meshtune.train.loop import due
from meshtune.train.trackers import Metrics
from meshtune.units import MIB, due_from

NUMBERS = {
    "loss": 2.5,
    "grad_norm": 1.25,
    "learning_rate": 1e-4,
    "tokens": 1000,
    "label_tokens": 400,
    "step_seconds": 0.5,
    "data_seconds": 0.01,
}
FULL = NUMBERS | {"epoch": 1.25, "peak_memory_bytes": 463 * MIB, "grad_norm": 1.3125}


def console(*, terminal: bool = False, width: int = 110) -> Console:
    options = {"force_terminal": terminal, "force_interactive": terminal, "color_system": None}
    return Console(file=io.StringIO(), width=width, **options)


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def test_plain_lines_come_at_most_one_a_second_with_the_first_and_the_last():
    out = console()
    tracker = ConsoleTracker(out, course=Course(500))
    for step in range(1, 501):  # takes some milliseconds
        tracker.log(train_row(step=step, **NUMBERS))
    lines = text(out).splitlines()
    assert len(lines) <= 3
    assert lines[0].startswith("step 1/500 · loss 2.5000 · lr 1.00e-04 · grad norm 1.25 · 2,000 tokens/s")
    assert lines[-1].startswith("step 500/500")


def test_a_plain_line_has_every_number_with_its_name():
    out = console()
    tracker = ConsoleTracker(out, course=Course(400))
    tracker.log(train_row(step=1, **FULL))
    assert text(out) == (
        "step 1/400 · epoch 1.25 · loss 2.5000 · lr 1.00e-04 · grad norm 1.31 · 2,000 tokens/s · "
        "memory 463 MiB\n"
    )
    judged = {"rewards/chosen": 1.0, "rewards/rejected": -0.5, "rewards/margins": 1.5, "kl": 0.25}
    pairs = {"rewards/accuracies": 0.75, "rewards/margins": 0.5}
    assert [*reward_parts(judged)] == ["rewards 1 good, -0.5 bad", "kl 0.25"]
    assert [*reward_parts(pairs)] == ["accuracy 75.0%", "margin 0.5"]


def test_plain_lines_hold_no_control_characters_and_stay_on_one_line():
    out = console()
    out.width = 30
    ConsoleTracker(out, course=Course(1)).log(train_row(step=1, **NUMBERS, peak_memory_bytes=2**30))
    assert text(out).count("\n") == 1
    assert text(out).strip().isprintable()


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left_and_lines_above_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = console(terminal=True)
    with Metrics([ConsoleTracker(out, course=Course(4))], console=out) as metrics:
        for step in (1, 2):
            metrics.train(step=step, **NUMBERS)
        metrics.log_line("Saved [checkpoints] step-2.")
        metrics.evaluate(step=2, loss=2.0, label_tokens=10, exact_match=0.25, prompts=4, answers_cut=2)
        rewards = {"rewards/accuracies": 0.75, "rewards/margins": 0.5}
        metrics.evaluate(step=3, loss=0.5, label_tokens=10, measured=rewards)
        metrics.writing("the model")
    shown = text(out)
    assert (
        "eval at step 3: loss 0.5000 · chosen answers preferred in 75.0% of the pairs · margin 0.5" in shown
    )
    assert "2/4" in shown and "writing the model" in shown
    assert "loss 2.5000 · lr 1.00e-04 · grad norm 1.25 · 2,000 tokens/s" in shown
    assert "left" in shown
    assert "Saved [checkpoints] step-2.\n" in shown
    assert "eval at step 2: loss 2.0000 · perplexity 7.389 · exact match 25.0% · 2 of 4 answers" in shown


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("no_color", [False, True])
def test_no_line_of_a_terminal_is_longer_than_it_or_cut_in_a_word(width, no_color, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    notice = "Columns that are not used: " + ", ".join(f"column-{n}" for n in range(40)) + "."
    out = console(terminal=True, width=width)
    course = Course(40_000, evaluate_every=100, save_every=100, held_out_tokens=10)
    with Metrics([ConsoleTracker(out, course=course, speed_unit="tokens/s/GPU")], console=out) as metrics:
        for step in (12_000, 12_001):
            metrics.train(step=step, **FULL, flops=1e12)
        metrics.log_line(notice)
        metrics.evaluate(step=12_001, loss=2.0, label_tokens=10)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text(out)).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert set(notice.split()) <= words
    assert {"epoch", "loss", "lr", "grad", "norm", "tokens/s/GPU", "memory", "12,001/40,000"} <= words


def test_the_memory_of_the_first_steps_is_one_table_where_asked():
    phases = {
        "forward": (412 * MIB, {"weights": 107 * MIB, "gradients": 0, "activations": 305 * MIB}),
        "optimizer": (431 * MIB, {"weights": 107 * MIB, "gradients": 107 * MIB, "temporary": 3 * MIB}),
    }
    rows = [memory_row(step, phases) for step in (7, 8)]
    for memory in (False, True):
        out = console(width=80)
        tracker = ConsoleTracker(out, course=Course(100, 6), memory=memory)
        for row in rows:
            tracker.log(row)
        lines = [line.split() for line in text(out).splitlines()]
        assert lines == ([
            ["Peak", "memory", "of", "each", "phase,", "MiB"],
            ["step", "7", "step", "7", "step", "8", "step", "8"],
            ["forward", "optimizer"] * 2,
            ["weights", *["107"] * 4],
            ["gradients", *["0", "107"] * 2],
            ["activations", *["305", "0"] * 2],
            ["temporary", *["0", "3"] * 2],
            ["peak", *["412", "431"] * 2],
        ] if memory else [])  # fmt: skip


# The time left #


@pytest.mark.parametrize("every", [0, 1, 7, 10, 30, 50])
@pytest.mark.parametrize("last", [1, 29, 30])
def test_what_is_still_to_come_is_counted_as_the_loop_counts_it(every, last):
    for step in range(1, last + 1):
        assert due_from(step, last, every) == sum(due(n, every, last) for n in range(step, last + 1))
        either = [due(n, every, last) or due(n, 4, last) for n in range(step, last + 1)]
        assert due_from(step, last, every, 4) == sum(either)


def simulated(course: Course, *, seconds, evaluation, save, tokens: int = 1000) -> dict[int, float]:
    """Step -> time left as predicted over the true one, in a run whose steps, evaluations and saves take what
    the three functions return for a step.
    """
    now, predicted, left = 0.0, {}, TimeLeft(course)
    for step in range(course.start + 1, course.steps + 1):
        now += seconds(step)
        predicted[step] = now, left.train(step, tokens, now)
        if course.held_out_tokens and due(step, course.evaluate_every, course.steps):
            took = evaluation(step)
            now, _ = now + took, left.evaluated(took)
        if due(step, course.save_every, course.steps):
            took = save(step)
            now, _ = now + took, left.saved(took)
    return {step: time / (now - at) for step, (at, time) in predicted.items() if time and now > at}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("steps", "evaluate_every", "save_every"), [(400, 10, 20), (1000, 50, 100), (60, 3, 6), (2000, 200, 50)]
)
def test_after_a_tenth_of_a_run_the_time_left_is_right_to_a_fifth(seed, steps, evaluate_every, save_every):
    """Evaluations and saves of differing length take about half of the run; the first two steps are slow."""
    chance = random.Random(seed)
    ratios = simulated(
        Course(steps, 0, evaluate_every, save_every, held_out_tokens=1000 * evaluate_every),
        seconds=lambda step: (5.0 if step <= 2 else 1.0) * chance.uniform(0.8, 1.2),
        evaluation=lambda step: evaluate_every / 3 * chance.uniform(0.6, 1.4),
        save=lambda step: save_every / 3 * chance.uniform(0.6, 1.4),
    )
    late = {step: ratio for step, ratio in ratios.items() if steps / 10 < step <= 0.9 * steps}
    assert all(0.8 < ratio < 1.2 for ratio in late.values()), late


def test_an_evaluation_that_did_not_happen_yet_counts_as_a_forward_pass():
    ratios = simulated(
        Course(100, evaluate_every=50, held_out_tokens=60_000),
        seconds=lambda step: 1.0, evaluation=lambda step: 20.0, save=lambda step: 0.0,
    )  # fmt: skip
    assert ratios[10] == pytest.approx(1)


def test_a_slow_first_evaluation_counts_only_until_the_second():
    ratios = simulated(
        Course(100, evaluate_every=10, held_out_tokens=60_000),
        seconds=lambda _: 1.0, evaluation=lambda step: 200.0 if step == 10 else 20.0, save=lambda _: 0.0,
    )  # fmt: skip
    assert ratios[19] > 2 and ratios[21] == pytest.approx(1)


def test_time_left_does_not_count_the_steps_before_a_resume(monkeypatch):
    clock = iter([100.0, 102.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    out = console()
    tracker = ConsoleTracker(out, course=Course(112, 100))
    tracker.log(train_row(step=101, **NUMBERS))
    tracker.log(train_row(step=102, **NUMBERS))
    assert text(out).splitlines()[-1].endswith("20 s left")  # ten steps of 2 s


def test_time_left_of_a_terminal_counts_down_and_is_whole_seconds(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    clock = [100.0]
    monkeypatch.setattr("meshtune.train.console.time.monotonic", lambda: clock[0])
    out = console(terminal=True)
    tracker = ConsoleTracker(out, course=Course(112))
    clock[0] = 10.0
    tracker.log({"kind": "training"})
    clock[0] = 100.0
    (first := console()).print(tracker._renderable())
    assert "0/112 · 1 min 30 s so far" in text(first)
    for step, clock[0] in ((1, 100.0), (2, 101.5)):
        tracker.log(train_row(step=step, **NUMBERS))
    for clock[0], left in ((101.5, "2 min 45 s left"), (141.5, "2 min 5 s left"), (900.0, "1 s left")):
        shown = console()
        shown.print(tracker._renderable())
        assert left in text(shown)
    tracker.close()


def test_evaluations_of_unknown_time_are_named_in_the_time_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    clock = [100.0]
    monkeypatch.setattr("meshtune.train.console.time.monotonic", lambda: clock[0])
    out = console(terminal=True)
    course = Course(20, evaluate_every=10, held_out_tokens=1000, answers=True)
    tracker = ConsoleTracker(out, course=course)
    for step, clock[0] in ((9, 100.0), (10, 102.0)):
        tracker.log(train_row(step=step, **NUMBERS))
    tracker.log({"kind": "evaluating", "step": 10, "done": 0, "total": 4, "unit": "batches"})
    clock[0] = 150.0  # the evaluation takes none of the 20 s
    (shown := console()).print(tracker._renderable())
    assert "20 s + 2 evaluations left" in text(shown)
    tracker.log(eval_row(step=10, loss=1.0, label_tokens=1, seconds=48.0))
    tracker.log(train_row(step=11, **NUMBERS))
    (after := console()).print(tracker._renderable())
    assert "evaluation" not in text(after).partition("left")[0]
    tracker.close()


def test_evaluations_and_saves_reach_the_time_left():
    out = console()
    tracker = ConsoleTracker(out, course=Course(11, evaluate_every=1, held_out_tokens=1))
    untrained = {
        "exact_match": 0.0,
        "prompts": 9,
        "answers_cut": 9,
        "seconds": 500.0,
    }  # none ends: not counted
    tracker.log(eval_row(step=0, loss=9.0, label_tokens=1, **untrained))
    tracker.log(train_row(step=9, **NUMBERS))
    tracker.log(eval_row(step=9, loss=1.0, label_tokens=1, seconds=50.0))
    tracker.log({"kind": "save", "step": 9, "seconds": 7.0})
    tracker._left._last = (9, tracker._left._last[1] - 60)  # a minute has passed: 3 s are the step's
    tracker._last_line = 0.0
    tracker.log(train_row(step=10, **NUMBERS))
    assert text(out).splitlines()[-1].endswith("1 min 50 s left")  # 3 + 2 x 50 + 7


@pytest.mark.parametrize(("terminal", "step"), [(True, 0), (True, 20), (False, 20)])
def test_a_long_evaluation_is_counted_in_the_bar_or_in_lines(terminal, step, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    clock, out = [100.0], console(terminal=terminal)
    monkeypatch.setattr("meshtune.train.console.time.monotonic", lambda: clock[0])
    tracker = ConsoleTracker(out, course=Course(40))
    if step:
        tracker.log(train_row(step=step, **NUMBERS))
    for done in range(40):
        row = {"step": step, "done": done, "total": 40, "unit": "batches", "prompts": 9}
        tracker.log({"kind": "evaluating", **row})
        clock[0] += 2.5
    lines = [line for line in text(out).splitlines() if line.startswith("evaluating")]
    shown = ["evaluating at step 20: 40 batches, then answers to 9 prompts …"]
    shown += [f"evaluating at step 20: {done} of 40 batches" for done in (2, 6, 14, 30)]
    assert lines == ([] if terminal else shown)
    if terminal:
        (bar := console()).print(tracker._renderable())
        assert "evaluating 39 of 40 batches" in text(bar)
    tracker.close()


BEGINS = {
    "kind": "run", "model": "tiny", "parameters": 8_030_000_000, "trainable_parameters": 83_890_000,
    "precision": "bf16", "optimizer": "adamw", "global_batch_size": 64, "seq_len": 4096, "total_steps": 100,
    "learning_rate": "2e-4, cosine", "layout": "zero3x8-mb2-ga4", "world": 8, "device": "H100",
    "flash_attention": 4,
    "predicted": {"memory": {"peak": 2**34, "capacity": 2**36}, "step_seconds": 3.0}, "label_share": 0.34,
    "longest_sequence": 4096,
}  # fmt: skip


@pytest.mark.parametrize("timed", [True, False])
def test_a_run_begins_with_what_is_trained_how_and_what_was_predicted(timed: bool) -> None:
    out = console(width=200)
    memory = BEGINS["predicted"] if timed else {"memory": BEGINS["predicted"]["memory"]}
    ConsoleTracker(out, course=Course(100)).log(BEGINS | {"predicted": memory})
    time = ", 3.0 s a step, 5 min 0 s in all" if timed else ""
    assert text(out).splitlines() == [
        "tiny: 83.89 M of 8.03 B parameters are trained (1.04%), in bf16.",
        "100 steps of 64 sequences of 4,096 tokens: 262,144 tokens a step. Learning rate 2e-4, cosine.",
        "Layout zero3x8-mb2-ga4: ZeRO-3 in 8 shards · micro-batch 2 · 4 accumulated; 8 x H100, "
        "FlashAttention 4.",
        # master weights and two states, in fp32
        f"Predicted with labels on 34% of the positions in sequences: 16.0 GiB of 64.0 GiB a rank{time}. "
        "A checkpoint has 960 MiB of weights and optimizer states.",
    ]
