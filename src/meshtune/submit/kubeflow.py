"""Kubeflow Trainer 2.3: a TrainJob and the runtime that it names, sent by kubectl.

kubectl and not Kubeflow's SDK: the SDK's `train` reads no file, has no ConfigMap for the config, and gives
its TrainJob a random name. kubectl also lets the server check everything before anything is made.

A TrainJob can't say what follows an exit code; the runtime can. Exit code 75 and a disruption (a drained or
preempted machine) start all machines again, uncounted; any other failure ends the job.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from meshtune.addresses import has_secret, is_secret
from meshtune.errors import Interrupted, UserError, written
from meshtune.filesystem import texts
from meshtune.launch.client import NoAnswer, client_output, id_in
from meshtune.submit.fields import below, inputs, laid, name_of, text_of
from meshtune.units import duration
from meshtune.yaml_tree import sets

if TYPE_CHECKING:
    from meshtune.submit.job import Job

JOB, RUNTIME = "job.yaml", "runtime.yaml"
SETTING, PATCHES = "cluster.kubeflow", "cluster.kubeflow.spec.runtimePatches"
ENV = f"{SETTING}.spec.trainer.env"
CLAIM = "pvc://"  # cluster.storage: pvc://CLAIM, or pvc://CLAIM/FOLDER
CONFIG = "/etc/meshtune"  # folder of the config file in the pods
CONFIG_MAP = "meshtune-{}"  # its name, with the job's: no other program's
MANAGER = "meshtune/submit"  # of our runtimePatch
OURS = (
    "apiVersion", "kind", "metadata.generateName", "spec.trainer.command", "spec.trainer.args",
    "spec.trainer.numNodes", "spec.trainer.numProcPerNode",
)  # fmt: skip
RESERVED = re.compile("PET_|MESHTUNE_|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)$")
REMEDIES = {  # words in a refusal -> what to do
    "must be created before": f"An administrator of the cluster applies {RUNTIME} of the same folder, once.",
    "AlreadyExists": "`meshtune submit cancel` removes an earlier job of the name; its checkpoints stay. "
    f"Another name: {SETTING}.metadata.name.",
    "no matches for kind|unknown .*terminationGrace": "Kubeflow Trainer 2.3 has to be installed in the "
    "cluster.",
    "quota": "Make the job smaller (--nodes).",
    "namespaces .*not found|is forbidden": f"Change {SETTING}.metadata.namespace.",
    r"spec\.": f"Change {SETTING}.spec.",
    "localhost:8080|current-context": "Choose a cluster: `kubectl config use-context NAME`.",
}
RUNTIME_TEXT = f"""# For an administrator, once for a cluster: kubectl apply --filename {RUNTIME}
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata: {{name: meshtune, labels: {{trainer.kubeflow.org/framework: torch}}}}
spec:
  mlPolicy: {{numNodes: 1, torch: {{}}}}
  template:
    spec:
      failurePolicy:
        maxRestarts: 0
        rules:
        - {{name: saved, action: RestartJobSetAndIgnoreMaxRestarts, onJobFailureReasons: [PodFailurePolicy]}}
      replicatedJobs:
      - name: node
        template:
          metadata: {{labels: {{trainer.kubeflow.org/trainjob-ancestor-step: trainer}}}}
          spec:
            backoffLimit: 0
            podFailurePolicy:
              rules:
              - action: FailJob
                onExitCodes: {{containerName: node, operator: In, values: [{Interrupted.exit_code}]}}
              - {{action: FailJob, onPodConditions: [{{type: DisruptionTarget, status: "True"}}]}}
            template: {{spec: {{restartPolicy: Never, containers: [{{name: node}}]}}}}
"""


class Block(yaml.SafeDumper):
    """YAML as Kubernetes reads it: texts that its reader takes for numbers (1e5) are quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else '"' if re.match(r"[-+.\d]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


Block.add_representer(str, _text)


def files(job: "Job", options: Mapping[str, Any]) -> dict[str, str]:
    """The TrainJob, with the config file as a ConfigMap, and the runtime. options: cluster.kubeflow.

    Raises UserError for fields that the job sets itself, for files that the pods don't see, an object store,
    a run folder that is lost with the pods, and secrets in plain text.
    """
    file = next((word for word in job.command[job.command.index("train") + 1 :] if "=" not in word), None)
    if file and not Path(file).is_file():
        raise UserError(f"{file} can't be copied to the pods: it is not a file. Write it into one.")
    text = Path(file).read_text("utf-8") if file else ""
    given = dict(texts(options))
    name, problems = given.get("metadata.name", name_of(job)), list[str]()
    ours, gpus = train_job(job, file, name), f"spec.trainer.resourcesPerNode.limits.{gpu_of(job)}"
    whole = laid(ours, options, [f"{SETTING}.{field}" for field in (*OURS, gpus)], SETTING, problems)
    spec, trainer = whole["spec"], whole["spec"]["trainer"]
    env = trainer["env"] if trainer["env"] is not ours["spec"]["trainer"]["env"] else []
    patches = spec["runtimePatches"] if spec["runtimePatches"] is not ours["spec"]["runtimePatches"] else []
    # A runtime that the user names may mount the storage.
    mounted = job.storage.startswith(CLAIM) or (job.mount and sets(options, ("spec", "runtimeRef")))
    mounts = [path for key, path in given.items() if key.endswith("mountPath")]
    mounts += [job.mount] if mounted else []
    problems += [*refused(whole, env, patches), *lost(job, mounts)]
    problems += [
        f"{path} is on this machine, and the pods don't see it: copy it below "
        f"{' or '.join(mounts) or 'a volume'}, and name it there."
        for path in inputs(job, mounts, [])
        if path != file
    ]
    if has_secret(text):
        problems.append(
            f"{file}: everyone in the cluster could read the secret of an address in it; leave that out, and "
            f"give credentials as variables ({ENV} with valueFrom: secretKeyRef)."
        )
    if problems:
        raise UserError(problems)
    variables = {item["name"]: item for item in (*ours["spec"]["trainer"]["env"], *env)}
    trainer["env"], spec["runtimePatches"] = (
        [*variables.values()], [*ours["spec"]["runtimePatches"], *patches],
    )  # fmt: skip
    metadata = {"name": CONFIG_MAP.format(name)}
    metadata |= {key: value for key, value in whole["metadata"].items() if key == "namespace"}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"run.yaml": text}}
    comments = [
        *job.comments,
        f"SIGTERM after {duration(job.limit - job.margin)} in all, waits for machines (unless Kueue queues "
        "the job) and further starts included; submit what is left again.",
    ]
    made = {JOB: text_of("kubeflow", comments, *[config] * bool(file), whole, dumper=Block)}
    return made if sets(options, ("spec", "runtimeRef")) else made | {RUNTIME: RUNTIME_TEXT}


def train_job(job: "Job", file: str | None, name: str) -> dict[str, Any]:
    """The TrainJob, without cluster.kubeflow."""
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if job.storage.startswith(CLAIM):
        claim, _, folder = job.storage.removeprefix(CLAIM).partition("/")
        volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "storage", "mountPath": job.mount} | ({"subPath": folder} if folder else {}))
    if file:
        volumes.append({"name": "config", "configMap": {"name": CONFIG_MAP.format(name)}})
        mounts.append({"name": "config", "mountPath": CONFIG})
    pod = {
        "terminationGracePeriodSeconds": job.margin, "volumes": volumes,
        "containers": [{"name": "node", "volumeMounts": mounts}],
    }  # fmt: skip
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
    limits = {} if job.processor else {"limits": {gpu_of(job): str(job.gpus)}}
    command = [f"{CONFIG}/run.yaml" if word == file else word for word in job.command]
    trainer = {
        "command": [word.replace("$", "$$") for word in command],  # Kubernetes replaces $(NAME)
        "env": [{"name": key, "value": text.replace("$", "$$")} for key, text in job.environment.items()],
        "numNodes": job.machines, "numProcPerNode": job.gpus,
        "resourcesPerNode": {"requests": {"cpu": str(job.cpus), "memory": f"{job.memory}Gi"}, **limits},
    }  # fmt: skip
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": "meshtune"}, "activeDeadlineSeconds": job.limit - job.margin,
            "trainer": trainer, "runtimePatches": [patch],
        },
    }  # fmt: skip


def gpu_of(job: "Job") -> str:
    """Name of the GPUs as a resource."""
    return "amd.com/gpu" if re.match(r"mi\d", job.gpu) else "nvidia.com/gpu"


def refused(whole: Mapping[str, Any], env: Sequence[Any], patches: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for each field that is missing or unknown, or is not the user's to set.

    whole: the TrainJob. env, patches: the user's variables and runtimePatches.
    """
    for name in whole.keys() - {"metadata", "spec", "apiVersion", "kind"}:
        yield f"{SETTING}.{name}: a TrainJob has metadata and spec, such as {SETTING}.spec.trainer.image."
    if "image" not in whole["spec"]["trainer"]:
        yield f"{SETTING}.spec.trainer.image is not set: it names an image that has meshtune."
    if any(isinstance(one, Mapping) and one.get("manager") == MANAGER for one in patches):
        yield f"{PATCHES}: the manager {MANAGER} is ours; give yours another name."
    for item in env:
        name = str(item.get("name", "")) if isinstance(item, Mapping) else ""
        if not name:
            yield f"{ENV} = {written(item)}: write {{name: …, value: …}}."
        elif RESERVED.match(name):
            yield f"{ENV}: {name} is set by the trainer or meshtune; leave it out."
        elif is_secret(name, item.get("value")):
            yield f"{ENV}: everyone in the cluster could read {name}; write valueFrom: {{secretKeyRef: …}}."


def lost(job: "Job", mounts: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for a storage that can't be mounted, or a run folder that is lost with the pods.

    mounts: folders of volumes, and of the storage where it is mounted.
    """
    if "://" in job.storage and not re.match(f"{CLAIM}[a-z0-9]", job.storage):
        yield f"cluster.storage = {job.storage}: pods mount no object store; write {CLAIM}NAME of a claim."
        return
    if not below(job.output, mounts):
        yield (
            f"output = {job.output} is lost with the pods, which keep only what is on a volume: set "
            f"cluster.storage={CLAIM}NAME of a claim, or mount a volume there by {PATCHES}."
        )


kubectl = partial(client_output, "Kubernetes", "kubectl", remedies=REMEDIES, look="kubectl get trainjobs")


def send(folder: Path) -> str:
    """Submit the TrainJob; returns NAMESPACE/NAME. The server checks all of it before anything is made."""
    file = f"--filename={folder / JOB}"
    kubectl("create", "--dry-run=server", "--output=name", file)
    names = 'jsonpath={.kind} {.metadata.namespace}/{.metadata.name}{"\\n"}'
    try:
        answer = kubectl("create", f"--output={names}", file)
    except NoAnswer:
        raise
    except UserError as error:
        if "AlreadyExists" not in str(error):  # else the job of another call
            with suppress(UserError):  # a part may be there
                kubectl("delete", "--ignore-not-found", "--wait=false", file)
        raise
    return id_in(answer, r"TrainJob (\S+)", "kubectl get trainjobs")


def at(job: str) -> tuple[str, str]:
    """(The namespace as an option, the name) of NAMESPACE/NAME."""
    namespace, _, name = job.rpartition("/")
    return f"--namespace={namespace}", name


def status(job: str) -> str:
    """Sentence on the state of a job, with its progress where the trainer collects it."""
    namespace, name = at(job)
    state = json.loads(kubectl("get", "trainjob", name, namespace, "--output=json")).get("status", {})
    true = {one["type"]: one for one in state.get("conditions", []) if one["status"] == "True"}
    active = any(part.get("active") for part in state.get("jobsStatus", []))
    word = next((kind for kind in ("Complete", "Failed", "Suspended") if kind in true), None)
    parts = [word or ("Running" if active else "Pending")]
    parts += [f"{true[word].get('reason')}, {true[word].get('message')}"] if word == "Failed" else []
    progress = state.get("trainerStatus", {})
    parts += [f"{progress['progressPercentage']} %"] if "progressPercentage" in progress else []
    left = progress.get("estimatedRemainingSeconds")
    parts += [f"{duration(left)} left"] if left else []
    parts += [f"{one['name']} {one['value']}" for one in progress.get("metrics", []) if one["name"] == "loss"]
    return f"Kubeflow's TrainJob {job} is {', '.join(parts)}."


def logs(job: str) -> str:
    """Log of the first machine."""
    namespace, name = at(job)
    labels = f"jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0"
    return kubectl("logs", namespace, f"--selector={labels}", "--container=node", "--tail=-1")


def cancel(job: str) -> str:
    """Delete a job and its ConfigMap: the pods get SIGTERM, and their grace period to save."""
    namespace, name = at(job)
    both = (f"trainjob/{name}", f"configmap/{CONFIG_MAP.format(name)}")
    if not kubectl("delete", namespace, "--ignore-not-found", "--wait=false", "--output=name", *both):
        raise UserError(f"Kubernetes has no TrainJob {job}: it was never submitted here, or is deleted.")
    return (
        f"Kubeflow's TrainJob {job} is deleted, with its log: a run that has begun saves a checkpoint first."
    )
