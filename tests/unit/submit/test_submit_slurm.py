"""The batch script, and what sbatch and squeue answer; tests/acceptance/test_slurm.py has a real Slurm."""

import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from golden import refuses, says

from meshtune import config
from meshtune.cli import app
from meshtune.errors import UserError
from meshtune.submit.engines import files_of
from meshtune.submit.job import job_of

RUN = [
    "model.name=Qwen/Qwen3-8B", "train.max_steps=1000", "cluster.gpu=h100-sxm", "cluster.gpus=16",
    "layout=zero2x16-mb4-ga1", "cluster.price_per_gpu_hour={h100-sxm: 2.5, currency: USD}",
]  # fmt: skip
COMMANDS = {
    "sbatch": 'test -z "$FAIL" || { echo "$FAIL" >&2; exit 1; }; echo "$@" > "$CALLED"; echo "7;local"',
    "squeue": 'test -z "$GONE" && echo "RUNNING|1:02|2:00:00|node[1-2]|meshtune: step 4 of 9, 3 s left"',
    "scontrol": 'test -z "$GONE" || { echo "$GONE" >&2; exit 1; }; echo "   StdOut=$CALLED"',
    "sacct": "echo COMPLETED",
    "scancel": 'echo "$*" > "$CALLED"',
}


def script(*words: str) -> str:
    settings = config.load(None, [*RUN, *words])
    return files_of(settings, "slurm", job_of(settings, ["run.yaml"]))["job.sbatch"]


def test_the_script_asks_for_what_the_plan_needs_and_requeues_on_75(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/scratch/hf")
    text = script("cluster.slurm.partition=gpu", "cluster.time_limit=24h", "cluster.storage=/shared")
    says(text)
    assert text in (Path(__file__).parents[3] / "docs" / "clusters.md").read_text("utf-8")
    monkeypatch.setenv("PATH", "/usr/bin")  # the environment isn't active
    assert f" {sys.executable} -m meshtune train" in script()
    assert " python -m meshtune train" in script("cluster.slurm.container=me/image:1")


def test_a_container_belongs_to_srun_and_words_with_spaces_stay_whole() -> None:
    words = ["cluster.slurm.extra=['--comment=a study', --mem=0, --exclusive]", "output=/data/my runs/sft"]
    says(script("cluster.slurm.container=nvcr.io#nvidia/pytorch:25.09-py3", *words))
    of_apptainer = script("cluster.slurm.container=images/meshtune.sif", *words)
    says([line for line in of_apptainer.splitlines() if line.startswith("srun")])


def test_extra_options_replace_those_of_the_plan() -> None:
    text = script("cluster.slurm.extra=[--cpus-per-task=8, --mem-per-cpu=4G]")
    assert "#SBATCH --cpus-per-task=8\n" in text and "--cpus-per-task=4" not in text and "--mem=" not in text


def test_an_elastic_job_starts_with_any_number_of_nodes_between() -> None:
    settings = config.load(None, [*RUN, "layout=auto"])
    text = files_of(settings, "slurm", job_of(settings, ["run.yaml"], least=1, nodes=2))["job.sbatch"]
    assert "#SBATCH --nodes=1-2\n" in text and "meshtune train run.yaml output=runs/run\n" in text


def test_options_that_a_job_sets_itself_and_object_stores_are_refused() -> None:
    with refuses(UserError):
        script("cluster.slurm.extra=[--nodes=3, comment=x, --gpus-per-node=all]")
    with refuses(UserError):
        script("cluster.storage=s3://bucket")
    for words in (["--elastic", "2"], ["--elastic", "3:2"], ["--elastic", "1:2", "--nodes", "2"]):
        with refuses(UserError):
            run(*RUN, "--to", "slurm", *words)
    with refuses(UserError):
        config.load(None, [*RUN, "cluster.slurm.partitions=gpu"])


@pytest.fixture
def slurm(clients: Any) -> Path:
    """Slurm's commands; returns the file with the words of the last call."""
    return clients(COMMANDS)


def run(*words: str) -> None:
    typer.main.get_command(app).main(["submit", *words], standalone_mode=False)


def test_a_job_is_sent_looked_at_and_cancelled(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--write", "logs", *RUN, "--to", "slurm")  # a folder, not the sub-command
    assert Path("logs/job.sbatch").exists() and not slurm.exists()  # nothing is sent
    run(*RUN, "--to", "slurm")
    assert "Submitted as slurm:7;" in capsys.readouterr().out
    assert slurm.read_text().split() == ["--parsable", f"--output={slurm.parent}/jobs/run/%j.out",
                                         "jobs/run/job.sbatch"]  # fmt: skip
    for words in (["status", "slurm:7"], ["logs", "slurm:7"], ["cancel", "slurm:7"]):
        run(*words)
    says(capsys.readouterr().out)
    assert slurm.read_text() == "7\n"
    monkeypatch.setenv("GONE", "slurm_load_jobs error: Invalid job id specified")
    run("status", "slurm:7")
    says(capsys.readouterr().out)
    for words in (["logs", "slurm:7"], ["status", "7"], [*RUN, "--to", "pbs"]):
        with refuses(UserError):
            run(*words)


@pytest.mark.parametrize(
    "refusal",
    [
        "invalid partition specified: gpus",
        "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
        "Batch job submission failed: Invalid account or account/partition combination specified",
        "Batch job submission failed: Requested node configuration is not available",
    ],
)
def test_what_slurm_refuses_is_said_in_its_words_with_the_setting(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    monkeypatch.setenv("FAIL", refusal)
    with refuses(UserError):
        run(*RUN, "--to", "slurm")
