"""The command and its address: what is refused, and a server that is asked over a socket."""

import http.client
import signal
import socket
import subprocess
import sys

import pytest
from golden import refuses
from live_runs import write_run

from meshtune.commands.ui import ui
from meshtune.errors import UserError

TOKEN = "0123456789abcdef"


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "runs" / "one", 3)
    return tmp_path / "runs"


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"host": "::"}, {"token": "short"}])
def test_what_is_refused(runs, options):
    with refuses(UserError):
        ui([runs], **({"host": "127.0.0.1", "port": 0, "token": None} | options))


def test_a_host_that_is_not_there_and_a_port_that_is_taken_are_refused_with_the_remedy(runs):
    with pytest.raises(UserError, match="can't be listened on"):
        ui([runs], host="no-such-host.invalid", port=0, token=TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="another --port"):
        ui([runs], host="127.0.0.1", port=taken.getsockname()[1], token=None)


def test_without_the_extra_the_remedy_is_said(runs, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("meshtune.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with refuses(UserError):
        ui([runs], host="127.0.0.1", port=0, token=None)


@pytest.mark.ci
def test_a_server_answers_ends_on_a_signal_and_prints_no_token(runs):
    command = [sys.executable, "-m", "meshtune", "ui", str(runs), "--port", "0", "--token", TOKEN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    port = int(process.stdout.readline().strip("/\n").rpartition(":")[2])
    answers = []
    for path in ("/", f"/?token={TOKEN}", "/x" + "y" * 100_000):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", path)
        answers.append(connection.getresponse().status)
    assert answers == [401, 303, 401]
    stream = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    stream.request("GET", "/events", headers={"authorization": f"Bearer {TOKEN}"})
    answer = stream.getresponse()
    assert answer.status == 200 and answer.readline() == b"event: again\n"
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert TOKEN not in rest + errors and "Traceback" not in errors
