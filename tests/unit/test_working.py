"""The line that shows on a terminal that a command works."""

import os
import sys

import pytest

import meshtune
from meshtune import units
from meshtune.errors import UserError
from meshtune.units import notice, on_screen, working


def test_a_terminal_sees_the_work_and_what_is_said_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with working("ranking layouts") as count:
            notice("a sentence meanwhile")
            count("7 of 36")
        terminal.flush()
        seen = ""
        while "\x1b[?25h" not in seen:  # the cursor comes back at the end
            seen += os.read(ours, 10**5).decode()
    os.close(ours)
    assert "ranking layouts" in seen and "0:00:00" in seen and "7 of 36" in seen
    assert "a sentence meanwhile" in seen
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1


@pytest.mark.parametrize(("silence", "counts"), [(60.0, ""), (0.0, "meshtune: 1 of 2\n")])
def test_a_pipe_sees_a_line_and_counts_of_long_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, silence: float, counts: str
) -> None:
    monkeypatch.setattr(units, "SILENCE", silence)
    with working("ranking layouts") as count:
        count("1 of 2")
    assert capsys.readouterr() == ("", f"meshtune: ranking layouts …\n{counts}")
    with working("ranking layouts", on_screen) as count:  # Python's functions are quiet in a pipe
        count("1 of 2")
    assert capsys.readouterr() == ("", "")


def test_train_in_python_names_what_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(units, "on_screen", said.append)
    with pytest.raises(UserError):
        meshtune.train({})
    assert said == [f"{units.LOADING['train']} …"]
