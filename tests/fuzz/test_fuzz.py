"""Seeds of every kind end well, a seed gives the same case each time, and the judge sees what is bad."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import fuzz
import judge
import materials
import pytest
from cases import cases

HANG = 120  # seconds: beside other tests a case takes several times as long as in the table


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with fuzz.made_materials() as made:
        yield made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", cases([range(3), range(3, 25)], ci=1), ids=["3 seeds", "22 further seeds"])
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_broken_input_ends_in_a_sentence(kind: str, seeds: range, folder: Path) -> None:
    bad = [result for seed in seeds if (result := fuzz.run((kind, seed), folder, HANG)).ended.fault]
    assert not bad, "\n".join(map(fuzz.described, bad))


@pytest.mark.all
def test_a_seed_gives_the_same_case(folder: Path) -> None:
    for kind, make in fuzz.KINDS.items():
        cases = []
        for name in ("one", "two"):
            box = folder.parent / f"{kind}-{name}"
            materials.copy(folder, box)
            cases.append(make(Random(f"{kind} 7"), box))
        assert cases[0] == cases[1]


def hog() -> None:
    held = bytearray(2**29)
    held[:: 2**12] = b"x" * (len(held) // 2**12)


def leave_a_process() -> None:
    subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (lambda: {}["x"], "traceback"), (lambda: time.sleep(60), "hang"), (hog, "memory"), (leave_a_process,
        "left a process"), (os.abort, "signal 6"), (lambda: sys.exit(1), "exit 1"), (lambda: sys.exit(2),
        "silent"), (lambda: sys.exit("A sentence."), "exit 1"), (lambda: print("done"), None),
    ],
    ids=["traceback", "hang", "memory", "process", "abort", "exit 1", "silent", "text", "good"],
)  # fmt: skip
def test_the_judge_sees_what_is_bad(command: Callable[[], object], fault: str | None, tmp_path: Path) -> None:
    seconds = 1.0 if fault == "hang" else 30.0
    assert judge.run(command, tmp_path, seconds=seconds, memory=2**28).fault == fault


def test_exit_codes_with_a_sentence_are_good(tmp_path: Path) -> None:
    def refuse() -> None:
        print("meshtune: No model is named.", file=sys.stderr)
        sys.exit(2)

    assert judge.run(refuse, tmp_path).outcome == "exit 2"
