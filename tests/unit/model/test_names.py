"""Names that stand for nothing: answered at once, with what is near and what a hub id looks like."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from golden import refuses

from meshtune import cli
from meshtune.errors import UserError
from meshtune.model import hub


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Model folders models/base and models/chat below the current one, and a folder that is none."""
    for name in ("models/base", "models/chat"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "bse-data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    hub.reachable.cache_clear()
    yield tmp_path
    hub.reachable.cache_clear()


@pytest.mark.parametrize(
    "name",
    ["bse", "models/caht", "./models/bas", "nothing-near"],
)
def test_a_mistyped_name_is_answered_with_the_nearest_folders(folders, name) -> None:
    with refuses(UserError):
        hub.check_name(name)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["train", "exmaples/quikstart.yaml"], "examples/quickstart.yaml"),
        (["eval", "exmaples/quikstart.yaml"], "examples/quickstart.yaml"),
        (["chat", "runs/quikstart"], "runs/quickstart"),
        (["generate", "./runs/quikstart", "-p", "x"], "runs/quickstart"),
        (["export", "runs/quikstart", "out"], "runs/quickstart"),
        (["report", "runs/quikstart"], "runs/quickstart"),
    ],
)
def test_a_mistyped_config_file_or_run_folder_is_answered_with_the_nearest(
    words: list[str], near: str, folders: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for file in ("examples/quickstart.yaml", "runs/quickstart/config.yaml"):
        (folders / file).parent.mkdir(parents=True)
        (folders / file).touch()
    monkeypatch.setattr("sys.argv", ["meshtune", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert f"did you mean {near}?" in capsys.readouterr().err


def test_folders_and_stored_models_pass(folders) -> None:
    hub.check_name("models/base")
    (folders / "hub-home" / "hub" / "models--someone--small").mkdir(parents=True)
    hub.check_name("someone/small")
    with pytest.raises(UserError):
        hub.check_name("someone/large")


def test_a_hub_that_does_not_answer_is_given_up_soon(folders, monkeypatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    monkeypatch.setattr(hub.socket, "create_connection", lambda *_: time.sleep(600))
    assert not hub.reachable()


def test_behind_a_proxy_the_hub_is_left_to_its_own_client(folders, monkeypatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert hub.reachable()


@pytest.mark.ci
@pytest.mark.parametrize(
    "words",
    [
        ["train", "model.name=bse"],
        ["data", "model.name=bse"],
        ["generate", "bse", "-p", "x"],
        ["eval", "bse"],
    ],
)
def test_a_command_answers_without_importing_what_takes_seconds(folders, words) -> None:
    code = (
        "import sys, json\n"
        "from meshtune import cli\n"
        f"sys.argv = ['meshtune', *{json.dumps(words)}]\n"
        "try:\n    cli.main()\n"
        "finally:\n    print(json.dumps(list(sys.modules)))"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "There is no folder bse here; did you mean models/base?" in ended.stderr
    assert not {"torch", "transformers", "datasets"} & set(json.loads(ended.stdout))
