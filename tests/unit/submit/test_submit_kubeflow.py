"""The TrainJob, its runtime, and what kubectl answers. Kubeflow's own models read the files where they are
installed: `make test-exports`.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from golden import refuses, says

from meshtune import config
from meshtune.cli import app
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.submit import kubeflow
from meshtune.submit.engines import files_of
from meshtune.submit.job import job_of

IMAGE = "cluster.kubeflow.spec.trainer.image=registry/meshtune:1"
RUN = [
    "model.name=Qwen/Qwen3-8B", "train.max_steps=1000", "cluster.gpu=h100-sxm", "cluster.gpus=16",
    "layout=zero2x16-mb4-ga1",
]  # fmt: skip
FILE = """\
# a user's file
cluster:
  storage: pvc://team/me
  kubeflow:
    metadata: {namespace: research, labels: {kueue.x-k8s.io/queue-name: gpus}}
    spec:
      trainer:
        image: registry/meshtune:1
        env:
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
        - {name: HF_HOME, value: /storage/hub}
        - {name: SCALE, value: "1e5"}
      runtimePatches:
      - manager: research/nodes
        trainingRuntimeSpec: {template: {spec: {replicatedJobs: [
          {name: node, template: {spec: {template: {spec: {nodeSelector: {gpu: h100}}}}}}]}}}
"""
STATUS = {
    "conditions": [{"type": "Suspended", "status": "False"}],
    "jobsStatus": [{"name": "node", "active": 1}],
    "trainerStatus": {
        "progressPercentage": 42, "estimatedRemainingSeconds": 11000,
        "metrics": [{"name": "loss", "value": "2.5"}],
    },
}  # fmt: skip
KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >> "$CALLED"
case "$*" in
  *"$ONLY"*) test -z "$HANG" || exec sleep 9; test -z "$FAIL" || { echo "$FAIL" >&2; exit 1; };;
esac
case "$1" in
  create) test -n "$GONE" || printf 'ConfigMap research/run\\nTrainJob research/run\\n';;
  get) cat status.json;;
  logs) test -n "$GONE" || echo "step 1/1000";;
  delete) test -n "$GONE" || echo trainjob.trainer.kubeflow.org/run;;
esac
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(*words: str, file: str | None = None) -> dict[str, str]:
    settings = config.load(file, [*RUN, *words])
    return files_of(settings, "kubeflow", job_of(settings, [*([file] if file else []), *RUN, *words]))


def test_the_job_has_its_config_storage_and_secrets_and_the_runtime_repeats_75(folder: Path) -> None:
    (folder / "my run.yaml").write_text(FILE)
    made = files("output=runs/1st run", "data.columns={text: $(t)}", file="my run.yaml")
    says(made["job.yaml"])
    says(made["runtime.yaml"])
    config_map, job = yaml.safe_load_all(made["job.yaml"])
    assert config_map["data"] == {"run.yaml": FILE}
    assert "data.columns={text: $$(t)}" in job["spec"]["trainer"]["command"]
    (folder / "my run.yaml").write_text(f"{FILE}  sky: {{envs: {{HF_TOKEN: hf_abc}}}}\n")
    with refuses(UserError):
        files(file="my run.yaml")


def test_a_runtime_of_ones_own_may_mount_the_storage() -> None:
    made = files(IMAGE, "cluster.storage=/shared", "cluster.kubeflow.spec.runtimeRef.name=ours")
    (job,) = yaml.safe_load_all(made.pop("job.yaml"))
    assert made == {} and job["spec"]["runtimeRef"] == {"name": "ours"}
    assert "output=/shared/runs/run" in job["spec"]["trainer"]["command"]


NODE = "{name: node, volumeMounts: [{name: data, mountPath: /shared}]}"
PATCH = (
    "cluster.kubeflow.spec.runtimePatches=[{manager: me, trainingRuntimeSpec: {template: {spec: "
    f"{{replicatedJobs: [{{name: node, template: {{spec: {{containers: [{NODE}]}}}}}}]}}}}}}}}]"
)


@pytest.mark.parametrize(
    "words",
    [
        (),
        (IMAGE, "cluster.storage=s3://bucket/me"),
        (IMAGE, "cluster.storage=/shared"),
        (IMAGE, "cluster.storage=pvc://"),
        (IMAGE, PATCH, "output=/sharedruns"),
        (IMAGE, PATCH, "output=/shared/run", "data.train=here.jsonl", "data.eval=[./h*.jsonl]"),
        (IMAGE, PATCH, "output=/shared/run", "data.train=https://me:word@host/rows.jsonl"),
        ("cluster.storage=pvc://team", "cluster.kubeflow={image: a, metadata: {generateName: a}, "
         "spec: {trainer: {numNodes: 3, command: [a], resourcesPerNode: {limits: {nvidia.com/gpu: 1}}, "
         "env: [{name: PET_NNODES, value: a}, {name: HF_TOKEN, value: a}, a]}, "
         "runtimePatches: [{manager: meshtune/submit}]}}"),
        ("cluster.storage=pvc://team", "cluster.kubeflow={metadata: run, spec: {trainer: {env: {A: b}}}}"),
    ],
)  # fmt: skip
def test_what_the_pods_lack_lose_or_show_is_refused(words: tuple[str, ...], folder: Path) -> None:
    (folder / "here.jsonl").write_text("")
    with refuses(UserError):
        files(*words)


@pytest.fixture
def kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shell script in kubectl's place; returns the file with the words of its calls."""
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    (folder / "status.json").write_text(json.dumps({"status": STATUS}))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLED", str(folder / "called"))
    monkeypatch.setenv("ONLY", "create")
    return folder / "called"


def run(*words: str) -> None:
    typer.main.get_command(app).main(["submit", *words], standalone_mode=False)


SEND = (*RUN, IMAGE, "cluster.storage=pvc://team", "--to", "kubeflow")


def test_a_job_is_checked_sent_looked_at_and_cancelled(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*SEND)
    assert "Submitted as kubeflow:research/run;" in capsys.readouterr().out
    for words in (["status"], ["logs"], ["cancel"]):
        run(*words, "kubeflow:research/run")
    says([capsys.readouterr().out, kubectl.read_text()])
    failed = {
        "type": "Failed",
        "status": "True",
        "reason": "DeadlineExceeded",
        "message": "it was 1842 s old",
    }
    Path("status.json").write_text(json.dumps({"status": {"conditions": [failed]}}))
    run("status", "kubeflow:research/run")
    says(capsys.readouterr().out)
    monkeypatch.setenv("GONE", "1")
    for words in (["logs", "kubeflow:research/run"], ["cancel", "kubeflow:research/run"], SEND):
        with refuses(UserError):
            run(*words)
    kubectl.unlink()
    monkeypatch.setenv("HANG", "1")
    monkeypatch.setenv("ONLY", "create --output=jsonpath")  # it passed the check, and may be there
    monkeypatch.setattr(kubeflow, "kubectl", partial(kubeflow.kubectl, seconds=2))
    with refuses(UserError):
        run(*SEND)
    assert "delete" not in kubectl.read_text()


@pytest.mark.parametrize(
    "refusal",
    [
        "spec.runtimeRef: Invalid value: specified clusterTrainingRuntime must be created before the job",
        'Error from server (AlreadyExists): trainjobs.trainer.kubeflow.org "run" already exists',
        'no matches for kind "TrainJob" in version "trainer.kubeflow.org/v1alpha1"',
        'Error from server (NotFound): namespaces "research" not found',
        'strict decoding error: unknown field "spec.trainer.images"',
        "The connection to the server localhost:8080 was refused",
    ],
)
def test_what_kubernetes_refuses_is_said_in_its_words_and_nothing_is_left(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    monkeypatch.setenv("FAIL", refusal)
    with refuses(UserError):
        run(*SEND)
    assert [line.split()[:2] for line in kubectl.read_text().splitlines()] == [["create", "--dry-run=server"]]
    monkeypatch.setenv("ONLY", "create --output=jsonpath")  # it passed the check
    kubectl.unlink()
    with pytest.raises(UserError):
        run(*SEND)
    called = [line.split()[0] for line in kubectl.read_text().splitlines()]
    ours = "AlreadyExists" not in refusal  # else it is the job of another call
    assert called == ["create", "create", *["delete"] * ours]


@pytest.mark.needs("kubeflow_trainer_api")
@pytest.mark.parametrize("layout", ["zero2x16-mb4-ga1", "zero3x8-mb1-ga8", "dp4-zero3x8-mb1-ga2", "zero3x4"])
def test_the_tool_reads_back_the_layout(layout: str, folder: Path) -> None:
    """Models drop unknown keys in silence: what they give back is what went in."""
    from kubeflow_trainer_api import models  # pyright: ignore[reportMissingImports]

    (folder / "run.yaml").write_text(FILE)
    made = files(f"layout={layout}", f"cluster.gpus={Layout.parse(f'{layout}').world}", file="run.yaml")
    config_map, job, runtime = yaml.safe_load_all("---\n".join(made.values()))
    jobs: Any = runtime["spec"]["template"]["spec"]
    job_set = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "spec": jobs}
    node = {"apiVersion": "batch/v1", "kind": "Job", **jobs["replicatedJobs"][0]["template"]}
    for model, document in (
        (models.IoK8sApiCoreV1ConfigMap, config_map), (models.TrainerV1alpha1TrainJob, job),
        (models.TrainerV1alpha1ClusterTrainingRuntime, runtime),
        (models.JobsetV1alpha2JobSet, job_set), (models.IoK8sApiBatchV1Job, node),
    ):  # fmt: skip
        assert model.from_dict(document).to_dict() == document
    trainer = models.TrainerV1alpha1TrainJob.from_dict(job).spec.trainer
    assert trainer.num_nodes * trainer.num_proc_per_node == Layout.parse(layout).world
