"""Log-probabilities of answers by the reference model, computed once before the first step.

    model before its first step, or the named one -> a forward pass over each answer -> fp64 [documents, 2]
                                                  -> CACHE/reference/<digest>.npy, found when a run resumes

Afterwards nothing of the reference is in memory. The digest has the model's weights and all that decides the
data; the layout may differ, as that of a run may between two starts.
"""

import hashlib
import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshtune.data.batch import MicroBatch, evaluation_batches, members_of
from meshtune.data.pack import Dataset
from meshtune.data.prepare import Prepared
from meshtune.model.lora import initial_adapters
from meshtune.model.stored import base_digest
from meshtune.parallel.apply import Parallel, place
from meshtune.parallel.mesh import World
from meshtune.rundir import write_atomically
from meshtune.train.evaluate import GROUPED
from meshtune.train.generate import evaluating
from meshtune.train.inputs import loader_of
from meshtune.train.loss import head_loss
from meshtune.train.model import ModelSpec, RankModel, fill_values, structure
from meshtune.train.preference import Preference
from meshtune.units import counted, working

VERSION = 1  # raise it when the same digest would name other values


class Recorded(Preference):
    """Keeps the log-probability of each answer instead of a loss."""

    def __init__(self, preference: Preference) -> None:
        super().__init__(preference.spec, preference.cp)
        self.found: list[tuple[Tensor, Tensor]] = []  # places as in Answers; log-probabilities, fp64

    def __call__(self, micro_batch: MicroBatch, losses: Tensor) -> tuple[Tensor, Tensor]:
        if (answers := micro_batch.answers) is not None:
            self.found.append((answers.places, self.values(answers, losses)[:, 1]))
        return losses.new_zeros(()), torch.zeros_like(losses)


def log_probabilities(
    parallel: Parallel,
    preference: Preference,
    dataset: Dataset,
    sequences: np.ndarray,
    micro_batch_size: int,
    show: Callable[[str], object] | None = None,
) -> np.ndarray:
    """Log-probabilities of the answers in some sequences of a data set, fp64 [documents, 2], NaN for others;
    the second of a document with one answer is not used. Every rank calls it and gets all.

    show: gets the share that is done.
    """
    world, recorded, done = parallel.world, Recorded(preference), 0
    batches = evaluation_batches(
        dataset,
        micro_batch_size=micro_batch_size,
        data_rank=world.data_rank,
        data_ranks=world.data_ranks,
        multiple=parallel.width_multiple,
        objective=preference.spec.row,
        sequences=sequences,
    )
    with evaluating(parallel.modules):
        while group := list(islice(batches, GROUPED * world.pp.size)):
            parallel.forward(group, partial(head_loss, objective=recorded))
            done += len(group) * micro_batch_size * world.data_ranks
            if show:
                show(f"{min(done, len(sequences)):,} of {counted(len(sequences), 'sequence')}")
    sums = torch.zeros(len(dataset.labels) * 2, dtype=torch.float64)
    known = torch.zeros_like(sums)
    for places, values in recorded.found if world.tp.index == world.cp.index == 0 else ():
        sums[places], known[places] = values.cpu(), 1.0
    both = torch.stack([sums, known]).to(world.device)
    if world.size > 1:
        dist.all_reduce(both)
    sums, known = both.cpu()
    return torch.where(known > 0, sums, torch.nan).view(-1, 2).numpy()


class Part(NamedTuple):
    """A data set, and the sequences of it that a run reads."""

    dataset: Dataset
    sequences: np.ndarray  # their numbers


@dataclass
class Reference:
    """Log-probabilities by the reference model of the data that a run reads."""

    spec: ModelSpec  # of the reference
    named: bool  # it is another model than the run's own before the first step
    file: Path
    world: World
    parts: dict[str, Part]
    found: dict[str, np.ndarray]  # as `log_probabilities`, by the name of the part

    def _unknown(self, name: str) -> np.ndarray:
        """The sequences of a part that the run reads and that have an answer without a value."""
        part, wanted = self.parts[name]
        if name not in self.found:
            return wanted
        unknown = np.isnan(self.found[name][:, 0])
        return wanted[[bool(unknown[members_of(part, int(number))].any()) for number in wanted]]

    @property
    def missing(self) -> bool:
        """Whether a value that the run reads is not known."""
        return any(self._unknown(name).size for name in self.parts)

    def compute_named(self, tokens_per_sequence: int) -> None:
        """Load another model under the run's layout, compute what is missing, and free it. Every rank calls
        it, before the model to train is made; it does nothing for the run's own model.
        """
        if not self.named or not self.missing:
            return
        made = structure(self.spec, self.world, tokens_per_sequence=tokens_per_sequence)
        parallel = place(made.cut, self.world)
        models = [made.whole, *(stage.model for stage in parallel.stages)]
        fill_values(self.spec, parallel.named_pieces(), models, initial_adapters(made.whole), export=False)
        parallel.modules.requires_grad_(False)
        self._compute(parallel, made.objective)

    def given(self, prepared: Prepared, model: RankModel) -> Prepared:
        """The data with the values. Every rank calls it. model: of the run, before its first step, which
        computes what is missing.
        """
        if self.missing:
            self._compute(model.parallel, model.passes.objective)
        parts = {name: replace(part.dataset, reference=self.found[name]) for name, part in self.parts.items()}
        return replace(prepared, **parts)

    def _compute(self, parallel: Parallel, objective: Any) -> None:
        """Compute the values that are missing, and write all."""
        size = self.world.layout.micro_batch_size
        with working("log-probabilities of the reference") if self.world.main else nullcontext() as show:
            for name, (part, _) in self.parts.items():
                new = log_probabilities(parallel, objective, part, self._unknown(name), size, show)
                old = self.found.get(name, new)
                self.found[name] = np.where(np.isnan(new), old, new)
        if self.world.main:
            content = io.BytesIO()
            np.savez(content, **self.found)  # pyright: ignore[reportArgumentType]
            write_atomically(self.file, content.getvalue())


def reference_of(
    spec: ModelSpec, prepared: Prepared, world: World, *, cache: Path, reads: int
) -> Reference | None:
    """What is known of the reference's log-probabilities; None of an objective without one. Every rank calls
    it.

    spec: of the model to train. cache: folder of the data. reads: sequences of training that the run reads.
    """
    wanted, train = spec.preference, prepared.train
    if not wanted or not wanted.row.reference:
        return None
    assert isinstance(train, Dataset), "an objective with a reference is refused with data.streaming"
    named = wanted.reference != "base"
    if named:
        spec = replace(
            spec, source=wanted.reference, init="pretrained", revision=None, overrides={}, lora=None,
            quantise="", freeze=(),
        )  # fmt: skip
    loader = loader_of(train, world.layout, 0, spec.seed, objective=wanted.row)
    parts = {"train": Part(train, loader.first(reads))}
    if prepared.eval is not None:
        parts["eval"] = Part(prepared.eval, np.arange(len(prepared.eval)))
    return _read(spec, named, cache, world, parts, prepared.digest)


def _read(
    spec: ModelSpec, named: bool, cache: Path, world: World, parts: dict[str, Part], data: str
) -> Reference:
    """The values of a file that an earlier start wrote, if there is one. data: digest of the data."""
    found = None
    if world.main:
        weights = f"{spec.source} {spec.seed}"
        if spec.init == "pretrained":
            access = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
            weights = base_digest(str(spec.source), cache, **access)
        facts = [
            VERSION, weights, spec.precision, spec.quantise, spec.attention, sorted(spec.overrides.items()),
            spec.embeddings, data,
        ]  # fmt: skip
        digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
        file = cache / "reference" / f"{digest}.npz"
        stored = {}
        if file.exists():
            with np.load(file) as values:
                stored = dict(values)
        found = file, stored
    file, stored = world.broadcast_object(found)
    return Reference(spec, named, file, world, parts, stored)
