"""Log-probabilities of answers by the reference model, computed once before the first step.

    model before its first step, or the named one -> a forward pass over each answer -> KNOWN [answers]
                                                  -> CACHE/reference/<digest>.npz, found when a run resumes

Afterwards nothing of the reference is in memory. The digest has the model's weights and all that decides the
data; the layout may differ, as that of a run may between two starts.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PretrainedConfig

from meshtune.data.batch import MicroBatch, evaluation_batches, held_out_mismatched
from meshtune.data.pack import Dataset
from meshtune.data.prepare import Prepared
from meshtune.model.lora import initial_adapters
from meshtune.model.stored import base_digest
from meshtune.objectives import Objective
from meshtune.parallel.apply import Parallel, place
from meshtune.parallel.mesh import World
from meshtune.precision import PRECISIONS, UNMIXED
from meshtune.rundir import write_atomically
from meshtune.train.inputs import loader_of
from meshtune.train.model import ModelSpec, RankModel, Structure, fill_values, structure
from meshtune.train.preference import Preference, log_probabilities
from meshtune.units import working

VERSION = 2  # raise it when the same digest would name other values
KNOWN = np.dtype([("place", np.int64), ("value", np.float64)])  # as in Answers, the log-probability


def recorded(
    parallel: Parallel,
    preference: Preference,
    batches: Iterator[MicroBatch],
    show: Callable[[int], object],
) -> np.ndarray:
    """KNOWN of the answers in this data rank's micro-batches and in those of the others. Every rank calls it
    and gets all. show: as of `log_probabilities`.
    """
    world, own = parallel.world, []
    for answers, values in log_probabilities(parallel, preference, batches, show):
        if world.tp.index == world.cp.index == 0:
            own += zip(answers.places.tolist(), values.tolist(), strict=True)
    return np.concatenate(world.all_gather_object(np.array(own, KNOWN)))


class Part(NamedTuple):
    """A data set, and the sequences of it that a run reads."""

    dataset: Dataset
    sequences: np.ndarray  # their numbers


@dataclass
class Reference:
    """Log-probabilities by the reference model of the data that a run reads."""

    spec: ModelSpec  # of the reference
    apart: bool  # it is loaded and freed before the model to train or to evaluate is made
    file: Path
    world: World
    objective: Objective
    steps: int  # of the run
    seed: int  # of the order of samples
    parts: dict[str, Part]
    # By the name of the part: KNOWN, sorted by place; "steps": those whose mismatched answers are in "train"
    found: dict[str, np.ndarray]

    def _unknown(self, name: str) -> np.ndarray:
        """The sequences of a part that the run reads and that have an answer without a value."""
        part, wanted = self.parts[name]
        unknown, documents = np.ones(len(part.labels), bool), self.found[name]["place"] // 2
        unknown[documents[documents < len(unknown)]] = False
        return wanted[[bool(unknown[part.members_of(number)].any()) for number in wanted]]

    @property
    def missing(self) -> bool:
        """Whether a value that the run reads is not known."""
        few = self.objective.mismatched and self.steps > self.found["steps"]
        return bool(few) or any(self._unknown(name).size for name in self.parts)

    def compute_apart(self, tokens_per_sequence: int) -> None:
        """Load the reference under the world's layout, compute what is missing, and free it. Every rank calls
        it, before the model to train or to evaluate is made; it does nothing if the run's own model computes.
        """
        if not self.apart or not self.missing:
            return
        spec, made = untrained(self.spec, self.world, tokens_per_sequence)
        parallel = place(made.cut, self.world)
        models = [made.whole, *(stage.model for stage in parallel.stages)]
        fill_values(spec, parallel.named_pieces(), models, initial_adapters(made.whole), export=False)
        self._compute(parallel, made.objective)

    def given(self, prepared: Prepared, model: RankModel | None = None) -> Prepared:
        """The data with the values. Every rank calls it. model: of the run, before its first step, which
        computes what is missing; None: nothing is, after `compute_apart`.
        """
        if model and self.missing:
            self._compute(model.parallel, model.passes.objective)
        parts = {}
        for name, (part, _) in self.parts.items():
            places, values = (self.found[name][field].copy() for field in ("place", "value"))
            parts[name] = replace(part, reference=(places, values))
        return replace(prepared, **parts)

    def _compute(self, parallel: Parallel, preference: Any) -> None:
        """Compute the values that are missing, and write all."""
        what = "log-probabilities of the reference"
        with working(what) if self.world.main else nullcontext(lambda _: None) as show:
            for name, (part, _) in self.parts.items():
                unknown = self._unknown(name)
                todo = {"": evaluation_batches(part, **self._dealt(parallel), sequences=unknown)}
                if self.objective.mismatched:
                    todo[", mismatched answers"] = self._mismatched(name, parallel)
                for words, batches in todo.items():
                    count = partial(_count, show, f"{what}, {name}{words}")
                    known = [self.found[name], recorded(parallel, preference, batches, count)]
                    _, first = np.unique(np.concatenate(known)["place"], return_index=True)
                    self.found[name] = np.concatenate(known)[first]
        self.found["steps"] = np.array(self.steps)
        if self.world.main:
            content = io.BytesIO()
            np.savez(content, **self.found)  # pyright: ignore[reportArgumentType]
            write_atomically(self.file, content.getvalue())

    def _dealt(self, parallel: Parallel) -> dict[str, Any]:
        """Arguments of evaluation_batches, for this data rank."""
        return {
            "micro_batch_size": self.world.layout.micro_batch_size,
            "data_rank": self.world.data_rank,
            "data_ranks": self.world.data_ranks,
            "multiple": parallel.width_multiple,
        }

    def _mismatched(self, name: str, parallel: Parallel) -> Iterator[MicroBatch]:
        """Micro-batches of this data rank with the mismatched answers that the run reads of a part."""
        part = self.parts[name].dataset
        if name == "eval":
            yield from evaluation_batches(held_out_mismatched(part), **self._dealt(parallel))
        else:
            world = self.world
            loader = loader_of(part, world.layout, world.data_rank, self.seed)
            for batch, _ in islice(loader, self.steps):
                yield from batch.mismatched


def _count(show: Callable[[str], object], what: str, done: int) -> None:
    show(f"{what}: {done:,} micro-batches of this rank")


def untrained(spec: ModelSpec, world: World, tokens_per_sequence: int) -> tuple[ModelSpec, Structure]:
    """(The spec in the dtype of the passes, since no optimizer casts weights; the structure of its model,
    which only computes). Every rank calls it.
    """
    spec = replace(spec, precision=UNMIXED[PRECISIONS[spec.precision].compute])
    made = structure(spec, world, tokens_per_sequence=tokens_per_sequence)
    for stage in made.cut.stages:
        stage.requires_grad_(False)
    return spec, made


def named(spec: ModelSpec, source: str | PretrainedConfig) -> ModelSpec:
    """`spec` with another model as its files have it."""
    return replace(
        spec, source=source, init="pretrained", revision=None, overrides={}, lora=None, quantise="",
        freeze=(), freeze_router=None,
    )  # fmt: skip


def reference_of(
    spec: ModelSpec, prepared: Prepared, world: World, *, cache: Path, steps: int | None
) -> Reference | None:
    """The values that are known already; None of an objective without one. Every rank calls
    it.

    spec: of the model to train. cache: folder of the data. steps: of the run; None: only its held-out data
    are read, and the run's own model is loaded as another one is.
    """
    wanted, train, layout = spec.preference, prepared.train, world.layout
    if not wanted or not wanted.row.reference:
        return None
    assert isinstance(train, Dataset), "an objective with a reference is refused with data.streaming"
    seed, apart = spec.seed, steps is None or wanted.reference != "base"
    if wanted.reference != "base":
        spec = named(spec, wanted.reference)
    parts = {}
    if steps is not None:
        loader = loader_of(train, layout, 0, seed)
        parts["train"] = Part(train, loader.first(steps * layout.global_batch_size))
    if prepared.eval is not None:
        parts["eval"] = Part(prepared.eval, np.arange(len(prepared.eval)))
    order = [seed, layout.global_batch_size] if wanted.row.mismatched else []
    stored = None
    if world.main:
        file = cache / "reference" / f"{_digest(spec, cache, [prepared.digest, *order])}.npz"
        stored = file, _read(file)
    file, found = world.broadcast_object(stored)
    found = {name: np.zeros(0, KNOWN) for name in parts} | {"steps": np.array(0)} | found
    return Reference(spec, apart, file, world, wanted.row, steps or 0, seed, parts, found)


def _digest(spec: ModelSpec, cache: Path, data: list[Any]) -> str:
    """Digest of all that decides a value. data: facts of the data, JSON-able."""
    weights = f"{spec.source} {spec.seed}"
    if spec.init == "pretrained":
        access = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
        weights = base_digest(str(spec.source), cache, **access)
    facts = [
        VERSION, weights, spec.precision, spec.quantise, spec.attention, sorted(spec.overrides.items()),
        spec.embeddings, *data,
    ]  # fmt: skip
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _read(file: Path) -> dict[str, np.ndarray]:
    if not file.exists():
        return {}
    with np.load(file) as values:
        return dict(values)
