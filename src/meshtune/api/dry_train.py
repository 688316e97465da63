"""Dry-run what `train` would start on this machine: its settings, data and layout. Touches no run folder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshtune import launch
from meshtune.api import output
from meshtune.api.choose import choose
from meshtune.api.plan import Log, silent
from meshtune.api.resolve import inputs_of
from meshtune.api.train import ranks_of
from meshtune.config import Config
from meshtune.data.batch import Batch
from meshtune.data.files import check_there
from meshtune.data.prepare import sentences
from meshtune.dryrun.simulation import Simulation
from meshtune.errors import UserError
from meshtune.length import length_sentences, steps_of
from meshtune.model.anatomy import anatomy
from meshtune.model.files import checked_weight_files, weights_here
from meshtune.model.hub import check_name, local_path
from meshtune.model.load import quiet
from meshtune.plan.cluster import cluster_here, unused_here
from meshtune.report.draw.document import Document, Notes
from meshtune.report.dryrun.document import document
from meshtune.train.checkpoint import Checkpoints
from meshtune.train.inputs import Inputs
from meshtune.train.loop import progress_of
from meshtune.train.model import ModelSpec, trainable_skeleton
from meshtune.train.run_row import device_of, gpus_of
from meshtune.train.trackers import tracker_problems
from meshtune.train.untrained import position_sentences, untrained_sentences
from meshtune.units import counted


@dataclass(frozen=True)
class DryTraining:
    """The run that `train` would start, and the simulation of its first two steps."""

    simulation: Simulation
    output: str  # the run folder that it would write
    start: str  # of output.decide: begin, continue, …
    steps: int  # updates of the whole run
    resumed: int | None  # step of the checkpoint that the run resumes from; None: it begins
    batch: Batch  # of data rank 0 in the first step that would run
    notes: tuple[str, ...]  # on the data, the model and the length of the run

    @property
    def headline(self) -> str:
        """Say what would run: devices, layout, steps, batch."""
        simulation, batch = self.simulation, self.batch
        layout = simulation.layout
        where = "on 1 rank" if layout.world == 1 else f"on {layout.world} ranks"
        steps, first, run = counted(self.steps, "step"), "the first", f"The run begins in {self.output}."
        if self.resumed is not None:
            steps = f"the {counted(max(0, self.steps - self.resumed), 'step')} left of {self.steps}, each"
            first = f"step {self.resumed + 1}"
            run = f"The run resumes from the checkpoint of step {self.resumed} in {self.output}."
        return (
            f"`meshtune train` would train {simulation.model} {where} of {simulation.cluster.gpu.name} with "
            f"{layout}: {steps} of {counted(layout.global_batch_size, 'sequence')}, {first} with "
            f"{counted(batch.tokens, 'token')}, {batch.label_tokens:,} of them labelled. {run}"
        )

    def document(self) -> Document:
        """The answer of `train --dry-run`: that of `dryrun`, below what would run."""
        answer = document(self.simulation)
        run = {
            "output": self.output,
            "start": self.start,
            "steps": self.steps,
            "resumed": self.resumed,
            "first_batch": {"tokens": self.batch.tokens, "label_tokens": self.batch.label_tokens},
            "notes": list(self.notes),
        }
        lines = Notes((self.headline, *self.notes), style="")
        return replace(answer, parts=(lines, *answer.parts), facts={**answer.facts, "run": run})


def dry_train(config: Config, nproc: int | None = None, *, log: Log = silent) -> DryTraining:
    """Check settings, model files and data as `train` does, and dry-run two steps with the first global batch
    that it would train on. Writes nothing but the caches of `data.cache`.

    nproc: as `train_here` takes it. log: gets lines on the progress. Raises as `train` does before its first
    step, and UserError under torchrun or srun.
    """
    from meshtune.api.dryrun import subject_of  # here: the longest chain of imports ends in it

    check_here(config)
    decision = output.decide(config)
    if decision.start == "report":
        raise UserError(f"{decision.line} Nothing is left to simulate.")
    config = output.with_template_date(config, decision)
    ranks, device = ranks_of(config, nproc)
    layout = choose(config, ranks).layout
    gpus = gpus_of(device_of(config.train.device))
    quiet()
    log("reading the data …")
    inputs = inputs_of(config)
    sequences = inputs.prepared.sequences
    steps = steps_of(config, sequences)
    notes = [*sentences(inputs.prepared.stats), *unused_here(config, layout.world, gpus)]
    resumed, after = checkpoint_of(config, steps, notes.append)
    notes += length_sentences(config, sequences, steps, resumed)
    with subject_of(config, log, device) as subject:
        job = subject.job_of_data(layout, inputs, after=after)
        notes += notes_on_model(config, job.spec, inputs)
        simulation = subject.simulate(job, cluster_here(config, layout.world, gpus), log)
    assert job.batch
    return DryTraining(
        simulation, str(decision.run.path), decision.start, steps, resumed, job.batch, tuple(notes)
    )


def checkpoint_of(
    config: Config, steps: int, note: Callable[[str], None]
) -> tuple[int | None, dict[str, Any] | None]:
    """(Step of the checkpoint that the run would resume from, its position in the data); None without one.

    steps: updates of the whole run. note: gets sentences for the user. Raises as `output.choose_folder`.
    """
    decision, resumed = output.choose_folder(config, steps, note, download=False)
    if resumed is None:
        return None, None
    note(
        f"The checkpoint of step {resumed} has optimizer state: what runs is like the second simulated step "
        "from the start."
    )
    return resumed, progress_of(Checkpoints(decision.run.checkpoints).values(resumed), resumed).data


def check_here(config: Config) -> None:
    """Raise UserError for what `train` refuses before it reads any data: trackers, files that are missing or
    damaged; and under torchrun or srun.
    """
    if launch.joined():
        raise UserError(
            "--dry-run simulates all ranks from one process; run it without torchrun or srun, on one machine."
        )
    if problems := tracker_problems(config.log.to):
        raise UserError(problems)
    check_name(config.model.name, config.model.revision)
    check_there(config.data)
    model, folder = config.model, local_path(config.model.name)
    if folder and model.init == "pretrained":
        checked_weight_files(folder)


def notes_on_model(config: Config, spec: ModelSpec, inputs: Inputs) -> Iterator[str]:
    """Sentences on documents beyond the model's positions, and, where its weights are on this machine, on
    tokens that it was never trained on.

    Raises UserError as `position_sentences`.
    """
    whole, _ = trainable_skeleton(spec)
    yield from position_sentences(
        config.model.name, config.data.seq_len, whole, anatomy(whole), inputs.prepared
    )
    files = weights_here(config.model.name, config.model.revision)
    yield from untrained_sentences(
        spec, whole, inputs.prepared.train, inputs.tokenizer, inputs.encoder.stop_ids, files=files
    )
