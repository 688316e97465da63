"""The driver's answers about a GPU's clock, from an nvidia-smi of ours."""

import time
from pathlib import Path

import pytest

from meshtune.meter.host import DriverWatch, device_row


def test_an_answer_names_what_limits_the_clock() -> None:
    row = device_row("GPU-1", "1305, 1980, 0x0000000000000064\n")
    assert row["limits"] == ["heat", "the power limit"]
    assert (row["clock"], row["full_clock"]) == (1305.0, 1980.0)
    assert device_row("GPU-1", "1980, 1980, 0x0000000000000001")["limits"] == []  # idle
    with pytest.raises(ValueError):
        device_row("GPU-1", "[N/A], [N/A], [N/A]")


def test_the_watch_asks_about_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --id=GPU-7 ] && echo "1000, 2000, 0x20"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rows, deadline = [], time.monotonic() + 30
    with DriverWatch("GPU-7") as watch:
        while not rows and time.monotonic() < deadline:
            time.sleep(0.02)
            rows = watch.rows(5)
    assert rows == [
        {
            "kind": "device", "gpu": "GPU-7", "clock": 1000.0, "full_clock": 2000.0, "limits": ["heat"],
            "step": 5,
        }
    ]  # fmt: skip


def test_without_nvidia_smi_there_are_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with DriverWatch("GPU-7") as watch:
        time.sleep(0.05)
        assert watch.rows(1) == []
