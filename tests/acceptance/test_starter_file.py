"""A file of `meshtune config` goes through the commands that its header names."""

import re
import shutil
from pathlib import Path

import pytest
from cases import cases
from command import Command
from tiny import make_rows, write_rows

from meshtune import config
from meshtune.rundir import RunDir

SMALL = {"data": ["data.cache=cache"], "train": ["data.cache=cache", "train.max_steps=2"]}


@pytest.mark.parametrize("method", cases(["lora", "full"]))
def test_the_commands_of_its_header_run(
    method: str, meshtune: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny / "model", tmp_path / "base")
    meshtune("config", "--method", method, "--model", "base", "--out", "my.yaml")
    write_rows(tmp_path / "train.jsonl", make_rows(200))
    for name, rest in re.findall(r"^# +meshtune (\w+) (.*)$", (tmp_path / "my.yaml").read_text(), re.M):
        meshtune(name, *rest.split(), *SMALL.get(name, []))
    run = RunDir(config.load("my.yaml").output)
    assert run.rows("end")[-1]["status"] == "finished"
    assert (run.model / ("adapter_config.json" if method == "lora" else "config.json")).exists()
