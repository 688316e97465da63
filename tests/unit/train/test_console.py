"""The rows of a run on a terminal and in a log file."""

import io

from rich.console import Console

from meshtune.meter.rows import train_row
from meshtune.train.console import ConsoleTracker
from meshtune.train.trackers import Metrics

NUMBERS = {
    "loss": 2.5,
    "grad_norm": 1.25,
    "learning_rate": 1e-4,
    "tokens": 1000,
    "label_tokens": 400,
    "step_seconds": 0.5,
    "data_seconds": 0.01,
}


def console(*, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), width=110, force_terminal=terminal, force_interactive=terminal, color_system=None
    )


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def test_plain_lines_come_at_most_one_a_second_with_the_first_and_the_last():
    out = console()
    tracker = ConsoleTracker(out, total_steps=500)
    for step in range(1, 501):  # takes some milliseconds
        tracker.log(train_row(step=step, **NUMBERS))
    lines = text(out).splitlines()
    assert len(lines) <= 3
    assert lines[0].startswith("step 1/500  loss 2.5000 · 2,000 tokens/s")
    assert lines[-1].startswith("step 500/500")


def test_plain_lines_hold_no_control_characters_and_stay_on_one_line():
    out = console()
    out.width = 30
    ConsoleTracker(out, total_steps=1).log(train_row(step=1, **NUMBERS, peak_memory_bytes=2**30))
    assert text(out).count("\n") == 1
    assert text(out).strip().isprintable()


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left_and_lines_above_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = console(terminal=True)
    with Metrics([ConsoleTracker(out, total_steps=4)], console=out) as metrics:
        for step in (1, 2):
            metrics.train(step=step, **NUMBERS)
        metrics.log_line("Saved [checkpoints] step-2.")
        metrics.evaluate(step=2, loss=2.0, label_tokens=10, exact_match=0.25)
    shown = text(out)
    assert "2/4" in shown
    assert "loss 2.5000 · 2,000 tokens/s" in shown
    assert "left" in shown
    assert "Saved [checkpoints] step-2.\n" in shown
    assert "eval at step 2: loss 2.0000 · perplexity 7.389 · exact match 25.0%\n" in shown


def test_speed_is_per_gpu_once_there_are_several():
    out = console()
    ConsoleTracker(out, total_steps=1, world=8).log(train_row(step=1, **NUMBERS, world=8))
    assert "250 tokens/s/GPU" in text(out)


def test_time_left_does_not_count_the_steps_before_a_resume(monkeypatch):
    clock = iter([100.0, 102.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    out = console()
    tracker = ConsoleTracker(out, total_steps=112, start_step=100)
    tracker.log(train_row(step=101, **NUMBERS))
    tracker.log(train_row(step=102, **NUMBERS))
    assert text(out).splitlines()[-1].endswith("20 s left")  # ten steps of 2 s
