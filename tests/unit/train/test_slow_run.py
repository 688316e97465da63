"""A run that waits for its data says so: in its rows, its summary and its report."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from terminal import printed

from meshtune.data.loader import Loader
from meshtune.report.run.report import report_page
from meshtune.report.run.summary import summarise
from meshtune.report.run.tables import run_summary
from meshtune.train import loop, measure


@pytest.mark.all
def test_a_run_that_waits_for_data_names_it(
    train: Callable[..., loop.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = Loader.__iter__

    def late(loader: Loader) -> Iterator[Any]:
        for batch in batches(loader):
            time.sleep(0.1)
            yield batch

    monkeypatch.setattr(Loader, "__iter__", late)
    run = train("train.max_steps=11")
    *_, cause, end = run.folder.rows()
    assert (cause["kind"], cause["cause"], end["kind"]) == ("cause", "waiting for data", "end")
    assert cause["share"] > 0.1 and "waits 0.1" in cause["evidence"]
    (summarised,) = summarise(run.folder).causes
    assert summarised.row() | {"step": 11} == cause
    assert "Why it is slow" in report_page(run.folder)
    text = printed(run_summary(run.folder), 100)
    assert "why it is slow" in text and "1. waiting for data" in text


@pytest.mark.ci
def test_steps_have_what_their_causes_are_found_by(
    train: Callable[..., loop.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "LAUNCHES", 4)
    rows = train("train.max_steps=5").folder.rows("time")
    assert [row.get("warm_up") for row in rows] == [True, True, True, None, None]
    assert all(0 <= row["padding"] < 1 and row["host_seconds"] > 0 for row in rows)
    assert 0 < rows[3]["launching"] < rows[3]["seconds"] and "launching" not in rows[4]
    assert "backlog" not in rows[-1] and "recompilations" not in rows[-1]
