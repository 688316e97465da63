"""Dry-run what `train` would start on this machine: its settings, data and layout. Touches no run folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshtune import launch
from meshtune.api.plan import Log, silent
from meshtune.api.train import ranks_of
from meshtune.config import Config
from meshtune.data.batch import Batch
from meshtune.data.files import check_there
from meshtune.data.prepare import sentences
from meshtune.dryrun.ranks import distinct_ranks
from meshtune.dryrun.simulation import Simulation
from meshtune.dryrun.world import Job
from meshtune.errors import UserError
from meshtune.model.anatomy import anatomy
from meshtune.model.files import checked_weight_files
from meshtune.model.hub import check_name, local_path
from meshtune.model.load import load_config, quiet
from meshtune.model.trainable import embeddings_needed
from meshtune.plan.cluster import cluster_here
from meshtune.train import output
from meshtune.train.build import model_spec, optimizer_spec
from meshtune.train.choose import choose, device_of, gpus_of
from meshtune.train.inputs import Inputs, inputs_of, loader_of, steps_of
from meshtune.train.model import ModelSpec, trainable_skeleton
from meshtune.train.positions import position_sentences
from meshtune.train.trackers import tracker_problems
from meshtune.train.updates import length_sentences
from meshtune.units import counted

if TYPE_CHECKING:
    from meshtune.api.dryrun import Subject


@dataclass(frozen=True)
class DryTraining:
    """The run that `train` would start, and the simulation of its first two steps."""

    simulation: Simulation
    output: str  # the run folder that it would write
    start: str  # of output.decide: begin, continue, …
    steps: int  # updates of the whole run
    batch: Batch  # the first one of data rank 0
    notes: tuple[str, ...]  # on the data, the model and the length of the run

    @property
    def headline(self) -> str:
        """Say what would run: devices, layout, steps, batch."""
        simulation, batch = self.simulation, self.batch
        layout = simulation.layout
        where = "on 1 rank" if layout.world == 1 else f"on {layout.world} ranks"
        begins = {"continue": "goes on in", "extend": "goes on in"}.get(self.start, "begins in")
        return (
            f"`meshtune train` would train {simulation.model} {where} of {simulation.cluster.gpu.name} with "
            f"{layout}: {counted(self.steps, 'step')} of {counted(layout.global_batch_size, 'sequence')}, "
            f"the first with {counted(batch.tokens, 'token')}, {batch.label_tokens:,} of them labelled. The "
            f"run {begins} {self.output}."
        )

    def as_dict(self) -> dict[str, Any]:
        """The document of `train --dry-run --json`: `dryrun --json`'s, and `run`."""
        return self.simulation.as_dict() | {
            "run": {
                "output": self.output,
                "start": self.start,
                "steps": self.steps,
                "first_batch": {"tokens": self.batch.tokens, "label_tokens": self.batch.label_tokens},
                "notes": list(self.notes),
            }
        }


def dry_train(config: Config, nproc: int | None = None, *, log: Log = silent) -> DryTraining:
    """Check settings, model files and data as `train` does, and dry-run its first two steps with the first
    global batch of its data. Writes nothing but the caches of `data.cache`.

    nproc: as `train_here` takes it. log: gets lines on the progress. Raises as `train` does before its first
    step, and UserError under torchrun or srun.
    """
    from meshtune.api.dryrun import subject_of  # here: the longest chain of imports ends in it

    check_here(config)
    decision = output.decide(config)
    ranks, device = ranks_of(config, nproc)
    choice = choose(config, ranks)
    layout = choice.layout
    quiet()
    log("reading the data …")
    inputs = inputs_of(config)
    spec = model_spec(config, choice.attention, device, embeddings=embeddings_needed(inputs.tokenizer))
    train, steps = inputs.prepared.train, steps_of(config, inputs.prepared.train)
    batch, _ = next(iter(loader_of(config, train, layout, 0)))
    notes = [*sentences(inputs.prepared.stats), *notes_on_model(config, spec, inputs)]
    notes += length_sentences(config, train, steps, None)
    job = Job(
        spec=spec,
        optimizer=optimizer_spec(config),
        layout=layout,
        seq_len=config.data.seq_len,
        documents=batch.micro_batches[0].documents[0],
        max_grad_norm=config.train.max_grad_norm,
        batch=batch,
    )
    with subject_of(config, log) as subject:
        simulation = simulated(subject, job, log)
    return DryTraining(simulation, str(decision.run.path), decision.start, steps, batch, tuple(notes))


def check_here(config: Config) -> None:
    """Raise UserError for what `train` refuses before it reads any data: trackers, files that are missing or
    damaged; and under torchrun or srun.
    """
    if launch.joined():
        raise UserError(
            "--dry-run simulates all ranks from one process; run it by itself, without torchrun or srun."
        )
    if problems := tracker_problems(config.log.to):
        raise UserError(problems)
    check_name(config.model.name, config.model.revision)
    check_there(config.data)
    folder = local_path(config.model.name)
    if folder and config.model.init == "pretrained":
        model = config.model
        family = load_config(model.name, trust_remote_code=model.trust_remote_code, overrides=model.overrides)
        checked_weight_files(folder, family)


def simulated(subject: "Subject", job: Job, log: Log) -> Simulation:
    """Dry-run the job on the devices of this machine."""
    layout, config = job.layout, subject.config
    stands_for = distinct_ranks(subject.numbers.census, layout, config.data.seq_len)
    cluster = cluster_here(config, layout.world, gpus_of(device_of(config.train.device)))
    return subject.simulate(job, cluster, stands_for, log)


def notes_on_model(config: Config, spec: ModelSpec, inputs: Inputs) -> Iterator[str]:
    """Sentences on documents beyond the model's positions. Raises UserError as `position_sentences`."""
    whole, _ = trainable_skeleton(spec)
    yield from position_sentences(config, whole, anatomy(whole), inputs.prepared)
