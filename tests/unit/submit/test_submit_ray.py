"""The job of Ray, and what its client answers; tests/acceptance/test_ray.py has a real cluster."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from golden import refuses, says

from meshtune import config
from meshtune.cli import app
from meshtune.errors import NoProgress, UserError
from meshtune.submit.engines import files_of
from meshtune.submit.job import job_of
from meshtune.submit.ray_driver import Driver, Starter, combined

RUN = [
    "model.name=Qwen/Qwen3-8B", "train.max_steps=1000", "cluster.gpu=h100-sxm", "cluster.gpus=16",
    "layout=zero2x16-mb4-ga1", "cluster.price_per_gpu_hour={h100-sxm: 2.5, currency: USD}",
]  # fmt: skip
RAY = """
test -z "$FAIL" || { printf 'Traceback (most recent call last):\\n  File "a"\\n%s\\n' "$FAIL" >&2; exit 1; }
echo "$@" > "$CALLED"
case "$2" in
submit) echo "Job 'raysubmit_7' submitted successfully" ;;
status) echo "Status for job 'raysubmit_7': RUNNING" ;;
logs) echo "step 1/4" ;;
esac
"""


def job_file(*words: str) -> str:
    settings = config.load(None, [*RUN, *words])
    return files_of(settings, "ray", job_of(settings, ["run.yaml"]))["job.yaml"]


def test_the_job_asks_for_what_the_plan_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = "{bundle: {CPU: 16}, runtime_env: {pip: [meshtune], env_vars: {OMP_NUM_THREADS: '2'}}}"
    says(job_file(f"cluster.ray={fields}", "output=/data/my runs/sft"))
    monkeypatch.chdir(tmp_path)
    below = job_file(f"cluster.storage={tmp_path}", "cluster.ray.address=http://head:8265")
    assert f"--folder={tmp_path}" in below and "working_dir" not in below and "address: http://head" in below


def test_an_elastic_job_names_its_fewest_machines_and_leaves_the_layout_open() -> None:
    settings = config.load(None, [*RUN, "layout=auto", "output=/data/sft"])
    text = files_of(settings, "ray", job_of(settings, ["run.yaml"], least=1, nodes=2))["job.yaml"]
    assert "--machines=2 " in text and " --least=1 " in text and "layout=" not in text


def test_what_a_job_sets_itself_and_folders_that_nodes_do_not_share_are_refused() -> None:
    with refuses(UserError):
        job_file("cluster.ray={entrypoint: x, adress: y, runtime_env: z}", "cluster.time_limit=20min")
    with refuses(UserError):
        job_file("cluster.storage=s3://bucket")
    with refuses(UserError):
        fields = "{bundle: {GPU: 4}, runtime_env: {env_vars: {HF_TOKEN: hf_1}}}"
        job_file(f"cluster.ray={fields}", "output=/data/sft")


@pytest.fixture
def ray(clients: Any) -> Path:
    """Ray's program; returns the file with the words of the last call."""
    return clients({"ray": RAY})


def run(*words: str) -> None:
    typer.main.get_command(app).main(["submit", *words], standalone_mode=False)


def test_a_job_is_sent_looked_at_and_stopped(
    ray: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RUN, "output=/data/sft", "--to", "ray"]
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with refuses(UserError):
        run(*words)
    job = "ray:raysubmit_7@http://head:8265"
    run(*words, "cluster.ray={address: 'http://head:8265', entrypoint_num_cpus: 1}")
    assert f"Submitted as {job};" in capsys.readouterr().out
    sent = ray.read_text()
    assert sent.startswith("job submit --address=http://head:8265 --no-wait --runtime-env-json={")
    assert "--entrypoint-num-cpus=1 -- python -m meshtune.submit.ray_driver" in sent
    for command in ("status", "logs", "cancel"):
        run(command, job)
    says(capsys.readouterr().out)
    assert ray.read_text() == "job stop --address=http://head:8265 --no-wait raysubmit_7\n"
    monkeypatch.setenv("FAIL", "ConnectionError: Failed to connect to Ray at address: http://head:8265.")
    with refuses(UserError):
        run("status", job)


def test_starts_without_a_new_checkpoint_end(tmp_path: Path) -> None:
    driver = Driver(None, SimpleNamespace(), SimpleNamespace(requested=None))  # type: ignore
    for _ in range(3):
        driver.check(Starter().newest(str(tmp_path)))
    with refuses(NoProgress):
        driver.check(Starter().newest(str(tmp_path)))
    (tmp_path / "checkpoints" / "step-5").mkdir(parents=True)
    driver.check(Starter().newest(str(tmp_path)))
    assert driver.fruitless == 0


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, 75], 75),
        ([1, 2], 2),
        ([-9, 1], 1),
        ([-9, 0], 137),
        ([1, None], None),
    ],
)
def test_the_code_of_the_machine_that_failed_is_the_jobs(codes: list[int | None], code: int | None) -> None:
    assert combined(dict(enumerate(codes))) == code
