"""Files for SkyPilot and dstack, what their clients answer, and their command on two machines.

Cases marked `needs` read the files with the tools' own classes: scripts/export_readers.py.
"""

import importlib
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import typer
import yaml
from golden import refuses, says

from meshtune import config
from meshtune.cli import app
from meshtune.errors import UserError
from meshtune.plan.hardware import catalogue
from meshtune.rundir import RunDir
from meshtune.submit import dstack, sky
from meshtune.submit.engines import files_of
from meshtune.submit.fields import GPUS, inputs
from meshtune.submit.job import job_of

RUN = [
    "model.name=Qwen/Qwen3-8B", "train.max_steps=1000", "cluster.gpu=h100-sxm", "cluster.gpus=16",
    "layout=zero2x16-mb4-ga1", "cluster.price_per_gpu_hour={h100-sxm: 2.5, currency: USD}",
]  # fmt: skip
SKY = ["cluster.storage=s3://bucket/me", "cluster.sky.setup=pip install meshtune"]
DSTACK = ["cluster.storage=/shared/me", "cluster.dstack.image=registry/meshtune:1"]
SETTINGS = {
    "sky": [
        *SKY, "cluster.sky.secrets={HF_TOKEN: null}", "cluster.sky.resources.use_spot=true",
        "cluster.sky.resources.job_recovery.strategy=FAILOVER",
    ],
    "dstack": [*DSTACK, "cluster.dstack.env=[HF_TOKEN, NCCL_DEBUG=INFO]", "cluster.dstack.max_duration=1h"],
}  # fmt: skip
WRONG = {
    "sky": [
        "cluster.sky.num_nodes=3", "cluster.sky.run=echo", "cluster.sky.envs={WANDB_API_KEY: abc}",
        "cluster.sky.secrets={HF_TOKEN: hf_abc}", "cluster.sky.resources.accelerators=H100:4",
        "cluster.sky.resources.job_recovery={recover_on_exit: 75, recover_on_exit_codes: [1]}",
        "cluster.sky.file_mounts=/data", "cluster.time_limit=20min", "output=/data/sft",
    ],
    "dstack": [
        "cluster.dstack.nodes=3", "cluster.dstack.commands=[ls]", "cluster.dstack.retry.on_events=[error]",
        "cluster.dstack.resources={gpu: H100}", "cluster.dstack.max_duration=2m",
        "cluster.dstack.env=[HF_TOKEN=hf_abc]", "cluster.dstack.registry_auth={username: me, password: x}",
        "cluster.storage=s3://bucket", "output=/data/sft",
    ],
}  # fmt: skip


def settings_of(to: str, *words: str, job: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """(Text, fields) of the file of an engine. job: numbers of the job in place of the plan's."""
    settings = config.load(None, [*RUN, *words])
    changed = replace(job_of(settings, [*RUN, *words]), **(job or {}))
    (text,) = files_of(settings, to, changed).values()
    return text, yaml.safe_load(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with rows below it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("to", SETTINGS)
def test_the_file_asks_for_what_the_plan_needs_with_the_users_fields(to: str, folder: Path) -> None:
    says(settings_of(to, *SETTINGS[to], "data.train=data/*.jsonl", "output=runs/my run")[0])


@pytest.mark.parametrize("to", WRONG)
def test_fields_that_break_the_job_are_refused_all_at_once(to: str, folder: Path) -> None:
    with refuses(UserError):
        settings_of(to, *WRONG[to])


def test_names_that_mean_another_file_there_and_secrets_of_addresses_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    for words in (["data.train=~/data/rows.jsonl"], ["data.train=https://me:word@host/rows.jsonl"]):
        with refuses(UserError):
            settings_of("sky", *SKY, *words)
    with refuses(UserError):
        settings_of("dstack", *DSTACK, "cluster.storage=shared/me")
    written = "export HF_TOKEN=$TOKEN WANDB_API_KEY='abc12345'; pip install git+https://me:word@host/meshtune"
    with refuses(UserError):
        settings_of("sky", *SKY, f"cluster.sky.setup={written}")
    of_type = settings_of("sky", *SKY, "cluster.sky.resources={instance_type: p5.48xlarge}")[1]
    assert "accelerators" not in of_type["resources"]


def test_kinds_that_an_engine_does_not_know_ask_for_the_users_field() -> None:
    assert GPUS.keys() <= catalogue().keys()
    for to, words in (("sky", SKY), ("dstack", DSTACK)):
        with refuses(UserError):
            settings_of(to, *words, job={"gpu": "h100-96"})
    fields = settings_of(
        "sky", *SKY, "cluster.sky.resources.accelerators={H100-MEGA: 8, H200: 8}", job={"gpu": "h100-96"}
    )[1]
    assert fields["resources"]["accelerators"] == {"H100-MEGA": 8, "H200": 8}


def test_processors_ask_for_no_gpu_and_names_begin_with_a_letter() -> None:
    cpu = {"processor": True, "gpus": 2, "cpus": 8, "name": "8b"}
    assert settings_of("sky", *SKY, job=cpu)[1]["name"] == "run-8b"
    assert "accelerators" not in settings_of("sky", *SKY, job=cpu)[1]["resources"]
    assert settings_of("dstack", *DSTACK, job=cpu)[1]["resources"]["gpu"] == 0


CLIENTS = {
    "sky": """test "$2" = launch && echo "Managed Job ID: 7"
test "$2" = queue && echo '[{"job_id": 7, "status": "RUNNING", "job_duration": 65, "recovery_count": 1}]'
test "$2" = logs && echo "step 1" && exit 100""",
    "dstack": """test "$1" = run && { test -f active || { echo "Run $3 not found"; exit 1; }; cat active; }
test "$1" = apply && echo "Run run submitted, detaching..."
test "$1" = logs && echo "step 1" """,
}
ACTIVE = '{"status": "running", "status_message": "", "cost": 1.5, "latest_job_submission": null}'
REFUSALS = {
    "sky": "sky.exceptions.InvalidSkyPilotConfigError: Invalid task YAML: Found unsupported field 'spot'.",
    "dstack": "No default project, specify project name",
}


def run(*words: str) -> None:
    typer.main.get_command(app).main(["submit", *words], standalone_mode=False)


@pytest.mark.parametrize("to", CLIENTS)
def test_a_job_is_sent_looked_at_cancelled_and_refused(
    to: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RUN, *SETTINGS[to], "--to", to]
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    with refuses(UserError):
        run(*words)  # without the client
    client = folder / to
    client.write_text(f'#!/bin/sh\necho "$@" >> called\n{CLIENTS[to]}\nexit 0\n')
    client.chmod(0o755)
    run(*words)
    (folder / "active").write_text(ACTIVE)
    name = capsys.readouterr().out.partition("Submitted as ")[2].partition(";")[0]
    for command in ("status", "logs", "cancel"):
        run(command, name)
    says([name, capsys.readouterr().out, (folder / "called").read_text()])
    assert "hf_abc" not in "".join(file.read_text() for file in (folder / "jobs" / "run").iterdir())
    for named in ([], [f"cluster.{to}.{'secrets' if to == 'sky' else 'env'}={{WANDB_API_KEY: null}}"]):
        run(*words, "log.to=[wandb]", *named, "--write", "files")
        assert ("The machines need WANDB_API_KEY" in capsys.readouterr().out) == (not named)
    if to == "dstack":
        with refuses(UserError):  # the name is in use
            run(*words)
    client.write_text(f'#!/bin/sh\necho "{REFUSALS[to]}" >&{2 if to == "sky" else 1}\nexit 1\n')
    with refuses(UserError):
        run(*words)


MACHINES = {  # what each sets on a machine
    "sky": ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"),
    "dstack": ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", "DSTACK_GPUS_PER_NODE"),
}


def started(
    to: str, fields: dict[str, Any], number: int, folder: Path, port: int = 1
) -> subprocess.Popen[str]:
    """A process that is started as on a machine, in a folder with the files that were copied to it."""
    folder.mkdir()
    copied = {
        path.removeprefix("~/sky_workdir/"): source for path, source in fields.get("file_mounts", {}).items()
    }
    copied |= {one["path"]: one["local_path"] for one in fields.get("files", [])}
    for path, source in copied.items():
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copy(source, folder / path)
    variables = dict(zip(MACHINES[to], ("2", str(number), "127.0.0.1", "0"), strict=True))
    variables["MASTER_PORT"] = str(port)  # this machine has other tests
    variables |= fields["envs"] if to == "sky" else dict(text.split("=", 1) for text in fields["env"])
    line = fields["run"] if to == "sky" else " && ".join(fields["commands"])
    return subprocess.Popen(["sh", "-c", line], cwd=folder, env={**os.environ, **variables}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("to", MACHINES)
def test_the_command_trains_on_two_machines(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tiny.make_folder(Path())
    output = tmp_path / "volume" / "my sft"
    words = tiny.short_run(Path(), tmp_path / "cache", output)
    Path("run.yaml").write_text("\n".join(word.replace("=", ": ", 1) for word in words))
    volume = {
        "sky": f"cluster.sky.volumes={{{tmp_path}/volume: claim}}",
        "dstack": f"cluster.dstack.volumes=[claim:{tmp_path}/volume]",
    }
    command = (sys.executable, "-m", "meshtune", "train", "run.yaml", "layout=zero2x2", f"output={output}")
    job = {
        "processor": True,
        "gpus": 1,
        "command": command,
        "output": str(output),
        "storage": "",
        "mount": "",
    }
    fields = settings_of(to, (SKY if to == "sky" else DSTACK)[1], volume[to], job=job)[1]
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    machines = [started(to, fields, number, tmp_path / f"{number}", port) for number in range(2)]
    said = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert RunDir(output).rows("train")[-1]["step"] == 4


def test_files_that_the_command_line_replaces_are_not_copied(folder: Path) -> None:
    (folder / "mine.toml").write_text("gpu = 'h100-sxm'\n")
    for name in ("other", "held"):
        (folder / f"{name}.jsonl").write_text("{}\n")
    Path("run.yaml").write_text("data: {train: data/rows.jsonl, eval: held.jsonl}\ncluster: mine.toml\n")
    words = ("run.yaml", "data.train=other.jsonl", "cluster.gpus=8")
    job = replace(job_of(config.load(None, RUN), RUN), command=("meshtune", "train", *words))
    assert {*inputs(job, [], [])} == {"run.yaml", "mine.toml", "other.jsonl", "held.jsonl"}
    words = ("data.train=other.jsonl", "cluster=mine.toml", "cluster.gpus=8")
    job = replace(job, command=("meshtune", "train", *words))
    assert {*inputs(job, [], [])} == {"mine.toml", "other.jsonl"}


def test_dstacks_limit_is_signalled_ahead_and_the_exit_code_kept(folder: Path) -> None:
    waits = 'trap "exit 75" USR1; while :; do sleep 0.05; done'
    job = {"command": ("sh", "-c", waits, "train"), "limit": 1001, "margin": 1000}
    fields = settings_of("dstack", *DSTACK, job=job)[1]
    assert started("dstack", fields, 0, folder / "0").wait(60) == 75


# What the tools' own classes read #


@pytest.mark.needs("sky")
def test_the_tool_reads_back_a_task_of_sky(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    names = importlib.import_module("sky.utils.gpu_names").CANONICAL_GPU_NAMES
    names = {*names, *importlib.import_module("sky.provision.runpod.utils").GPU_NAME_MAP}
    assert {name for name, _ in GPUS.values() if name} <= names
    schemas = importlib.import_module("sky.utils.schemas").get_resources_schema()["properties"]
    assert schemas["job_recovery"]["anyOf"][1]["properties"].keys() == sky.RECOVERY
    text, fields = settings_of("sky", *SETTINGS["sky"], "data.train=data/*.jsonl")
    Path("job.yaml").write_text(text)
    task = importlib.import_module("sky").Task.from_yaml("job.yaml")
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators, resources.use_spot) == (2, {"H100": 8}, True)
    assert (resources.cpus, resources.memory) == ("32+", "110+")
    assert resources.job_recovery == fields["resources"]["job_recovery"]
    assert (task.run, task.envs) == (fields["run"], fields["envs"])
    assert task.storage_mounts["/storage"].source == "s3://bucket/me"
    Path("job.yaml").write_text(text + "use_spot: true\n")
    with pytest.raises(Exception, match="use_spot"):
        importlib.import_module("sky").Task.from_yaml("job.yaml")


@pytest.mark.needs("dstack")
def test_the_tool_reads_back_a_task_of_dstack(folder: Path) -> None:
    gpus = importlib.import_module("gpuhunt").KNOWN_ACCELERATORS
    assert {name for _, name in GPUS.values()} <= {f"{gpu.name}:{gpu.memory}GB" for gpu in gpus}
    models = importlib.import_module("dstack._internal.core.models.configurations")
    fields = settings_of("dstack", *SETTINGS["dstack"], "data.train=data/*.jsonl")[1]
    task = models.parse_run_configuration(fields)
    gpu, retry = task.resources.gpu, task.retry
    assert (task.nodes, gpu.name, gpu.count.min, gpu.count.max) == (2, ["H100"], 8, 8)
    assert (gpu.memory.min, task.resources.cpu.count.min, task.resources.memory.min) == (80, 32, 110)
    assert [event.value for event in retry.on_events] == ["no-capacity", "interruption"]
    assert (task.max_duration, dstack.seconds_of(fields["max_duration"])) == (3600, 3600)
    assert task.env["NCCL_DEBUG"] == "INFO" and "hf_" not in str(task.env["HF_TOKEN"])
    with pytest.raises(Exception, match="use_spot"):
        models.parse_run_configuration(fields | {"use_spot": True})
