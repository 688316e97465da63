"""Rows that no run writes are left out and counted; every page shows the others."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from golden import says
from rich.console import Console

from meshtune.meter.causes import Cause
from meshtune.meter.parts import PARTS, StepTime, time_row
from meshtune.meter.rows import matches, memory_row
from meshtune.report.compare import compare, comparison_page
from meshtune.report.run.panels import Points
from meshtune.report.run.report import run_page
from meshtune.report.run.summary import samples_of
from meshtune.report.run.tables import run_summary, samples_table
from meshtune.rundir import RunDir, fault_of
from meshtune.web.folders import Folders
from meshtune.web.pages import RunLines, list_page, page_of_run

NUMBERS, TEXTS, LISTS = (True, 0, -1, 3, 2.5, 1e300), ("", "x", "3"), ([], [1.0], ["x"])
VALUES = (None, *NUMBERS, *TEXTS, *LISTS, {}, {"x": 1.0}, {"x": "x"}, {"x": {}})
MEMORY = {"weights": 10, "peak": 12}


def step_row() -> dict[str, Any]:
    time = StepTime(1.0, dict.fromkeys(PARTS, 0.1), {"data": 0.1}, [0.9, 0.8], [0.0, 0.1], [0.0, 0.0])
    facts = {"traffic": {"data": [2, 100.0]}, "padding": 0.1, "backlog": 0.1, "head_start": 0.1}
    return time_row(3, time, **facts, launching=0.1, host_seconds=0.5, recompilations=1, allocator_retries=1)


@pytest.fixture
def rows(train: Callable[..., Any], evaluation: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """A whole row of each kind."""
    memory = MEMORY | {"event": "loss", "safe": True, "capacity": None}
    parts = {"memory": memory, "time": {"compute": 0.5}, "parts": {"forward": 0.5}, "step_seconds": 1.0}
    run = {"kind": "run", "model": "tiny", "method": "full", "world": 2, "nodes": 1, "layout": "dp2-mb1-ga1"}
    run |= {
        "expert_share": 0.5,
        "total_steps": 9,
        "global_batch_size": 2,
        "seq_len": 8,
        "device_type": "cpu",
        "host": "a",
    }
    device = {"kind": "device", "step": 3, "gpu": "0", "clock": 1.0, "full_clock": 2.0, "limits": ["heat"]}
    return {
        "run": run | {"predicted": parts, "device": "cpu", "data": ["a.jsonl"], "started": "2026-11-27"},
        "train": train(3, epoch=0.5, gradient_noise_scale=2.0, peak_resident_bytes=5, mfu=0.1, mfu_6n=0.1),
        "eval": evaluation(3, 1.0, exact_match=0.5, prompts=4, seconds=1.0),
        "time": step_row(),
        "experts": {"kind": "experts", "step": 3, "layers": [0, 1], "fullest": [1.5, 2.0],
                    "largest": [3.0, 4.0], "mean": [2.0, 2.0], "entropy": [0.9, 0.8], "unused": [0, 1],
                    "fullest_rank": [1.2, 1.5]},
        "memory": memory_row(3, {"forward": (12, {"weights": 10})}),
        "cause": Cause("padding", 0.5, "It is.", "Pack.").row(),
        "save": {"kind": "save", "step": 3, "seconds": 1.0},
        "device": device,
        "end": {"kind": "end", "step": 4, "status": "finished", "tokens": 400, "seconds": 1.0, "ended": "x"},
    }  # fmt: skip


def odd(row: dict[str, Any], values: Sequence[Any] = VALUES) -> Iterator[Any]:
    """The row without each of its columns, and with each value in each of them; and what is no row at all."""
    yield from ([], [row], "x", 3, None, {"kind": row.get("kind")})
    for name in row:
        if name != "kind":
            yield {key: value for key, value in row.items() if key != name}
            yield from (row | {name: value} for value in values)


def shown(run: RunDir, other: RunDir) -> str:
    """Every page that has the run, as text; its pictures are made and not drawn."""
    page = page_of_run(next(iter(Folders([run.path]).entries.values())))
    live = run_page(other)  # it was drawn before the odd rows came
    later = json.dumps([Points(live.panels).of(run.rows()), live.later and live.later(run.rows())])
    compared = compare([run.path, other.path])
    console = Console(width=100, record=True, quiet=True)
    console.print(run_summary(run), samples_table(run), comparison_page(compared))
    lines = RunLines(Folders([run.path])).all()
    pages = (page, comparison_page(compared), list_page(lines, ()))
    html = [part for page in pages for part in (page.before, page.after, page.subtitle, page.footer)]
    return "".join((*html, later, console.export_text()))


def copied(run: RunDir, folder: Path) -> RunDir:
    copy = RunDir(folder).create()
    for file in (run.metrics_file, run.samples_file):
        (copy.path / file.name).write_bytes(file.read_bytes())
    return copy


LEAST = (None, True, -1, 2.5, "x", ["x"], {"x": "x"}, {"memory": None, "time": {"x": 1.0}})


@pytest.mark.parametrize("kind", ["train", "eval", "time", "memory", "cause", "save", "device", "end"])
def test_every_page_shows_the_rows_around_odd_ones(
    kind: str, run: RunDir, rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    assert [fault_of(row) for row in rows.values()] == [None] * len(rows)
    other, before = copied(run, tmp_path / "other"), len(run.rows())
    run.append(rows["run"])
    with open(run.metrics_file, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in odd(rows[kind]))
    for row in rows.values():
        if row["kind"] != "run":
            run.append(row)
    assert "Left out, since no run writes them: " in shown(run, other)
    assert run.rows()[:before] == other.rows()
    assert run.rows()[-len(rows) + 1 :] == [row for row in rows.values() if row["kind"] != "run"]


@pytest.mark.ci
def test_every_page_shows_a_run_with_an_odd_start(
    run: RunDir, rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    other, metrics = copied(run, tmp_path / "other"), run.metrics_file.read_bytes()
    rest = "".join(json.dumps(rows[kind]) + "\n" for kind in ("time", "memory", "train"))
    for row in odd(rows["run"], LEAST):
        run.metrics_file.write_bytes(metrics + f"{json.dumps(row)}\n{rest}".encode())
        shown(run, other)


def test_samples_have_numbers_as_answers_and_odd_ones_are_left_out(run: RunDir, tmp_path: Path) -> None:
    other = copied(run, tmp_path / "other")
    sample = {"step": 4, "prompt": "n", "question": "q", "answer": "42"}
    with open(run.samples_file, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in odd(sample | {"expected": "42"}))
    shown(run, other)
    run.append_sample(sample | {"expected": 42})
    (number,) = (one for one in samples_of(run) if one.prompt == "n")
    assert number.expected == "42" and matches(number.expected, number.after)


def test_what_is_left_out_is_counted_in_one_line(run: RunDir) -> None:
    run.append({"kind": "time", "seconds": 1.0})
    run.append({"kind": "cause", "share": 1.0})
    run.append_sample({"step": 4, "prompt": "n", "answer": "a", "expected": ["a"]})
    says(run.left_out(run.rows().left_out, run.samples().left_out))
