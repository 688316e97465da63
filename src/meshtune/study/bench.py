"""Timed training steps of one layout on its real ranks: the trainer's own model, step and meter.

    watched steps (memory) ─> a warm-up step ─> timed steps ─> Measured

Nothing is saved, evaluated or exported. Without data each sequence is random tokens, all of them labelled.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from meshtune.data.batch import Batch, micro_batch
from meshtune.data.pack import Document
from meshtune.data.tokens import id_bound
from meshtune.launch import Rank
from meshtune.layout import Layout
from meshtune.meter.causes import imbalance_of
from meshtune.meter.mfu import flops_of, peak_flops
from meshtune.meter.phases import WATCHED_STEPS
from meshtune.meter.rows import fullest_memory, possible, share_of_peak, time_now
from meshtune.meter.trace import CATEGORIES
from meshtune.model.load import quiet
from meshtune.parallel.mesh import World, join
from meshtune.plan.hardware import datasheet_flops
from meshtune.plan.step_parts import median_parts
from meshtune.rundir import Row
from meshtune.train.inputs import Inputs, loader_of
from meshtune.train.loop import seed_dropout
from meshtune.train.measure import Meter
from meshtune.train.model import ModelSpec, OptimizerSpec, RankModel, rank_model
from meshtune.train.run_row import device_name, device_of, facts_of, hosts_of
from meshtune.train.step import Counts
from meshtune.units import notice, spread

WARM_UP = WATCHED_STEPS + 1  # steps before those that are timed: memory is watched, kernels are chosen
LEARNING_RATE = 1e-6  # the values do not matter; they must stay finite


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A layout to time."""

    layout: Layout
    spec: ModelSpec  # without the tokenizer's rows of the embedding
    optimizer: OptimizerSpec
    device: str  # torch's kind
    seq_len: int
    max_grad_norm: float
    inputs: Callable[[], Inputs] | None  # reads the data; None: sequences are random tokens
    documents: Sequence[int]  # lengths of those in a sequence of random tokens
    settings: Row  # that the run's row has
    steps: int  # to be timed
    profile: Path | None = None  # folder for traces of one more step; None: none are written
    compared: int | None = None  # rank whose memory is compared with a dry run's; None: the fullest


@dataclass(frozen=True)
class Measured:
    """Timed steps of a layout; plain values."""

    layout: str
    device: str  # its name
    device_type: str  # torch's: cuda or cpu
    world: int
    tokens: float  # of a step, without padding
    seconds: Sequence[float]  # of each timed step
    time: Sequence[Row]  # of kind "time", one for each timed step
    memory: Sequence[Row]  # of kind "memory", of the watched steps, every rank
    flops: float | None  # that the model needs for a step
    peak_flops_per_second: float | None  # of one device; None: unknown
    run: Row  # of kind "run", without a prediction
    end: Row  # of kind "end"
    peak_bytes: int | None  # the highest of any rank in any step; None: not known
    compared: int | None = None  # as in Trial
    experts: Sequence[Row] = ()  # of kind "experts", one for each timed step of a mixture

    @property
    def step_seconds(self) -> float:
        """Median of the timed steps."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Spread of the timed steps."""
        return spread(self.seconds)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the median step by part: means over timed steps, scaled to it, so that they add up."""
        return median_parts(self.time)[1]

    @property
    def fullest(self) -> Mapping[str, int]:
        """Bytes by category, and their sum as "peak", on the compared rank in its fullest phase of the last
        watched step; empty where memory was not watched.
        """
        rows = (row for row in self.memory if row["step"] == WATCHED_STEPS)
        return fullest_memory([row for row in rows if self.compared in (None, row["rank"])])

    def as_dict(self) -> dict[str, Any]:
        """The entry `measured` of `bench --json`; bytes and seconds."""
        step, memory = self.step_seconds, self.fullest
        return {
            "device": self.device,
            "device_type": self.device_type,
            "steps": len(self.seconds),
            "step_seconds": step,
            "spread": self.spread,
            "tokens": self.tokens,
            "tokens_per_second_per_gpu": self.tokens / step / self.world,
            "mfu": possible(share_of_peak(self.flops, step, self.world, self.peak_flops_per_second)),
            "parts": self.parts,
            "imbalance": imbalance_of(self.experts),
            "peak_memory_bytes": self.peak_bytes,
            "memory": {name: memory[name] for name in (*CATEGORIES, "peak") if memory.get(name)},
            "data": "data.train" if self.run["data"] else "random tokens",
            "run_row": dict(self.run),
            "memory_rows": list(self.memory),
            "time_rows": list(self.time),
            "experts_rows": list(self.experts),
            "end_row": dict(self.end),
        }


def bench_rank(rank: Rank, trial: Trial) -> Measured | None:
    """Run a trial's steps on one rank; the main rank returns what was measured, the others None.

    Raises as `rank_model`, and for data that can't be read.
    """
    seq_len = trial.seq_len
    quiet()
    device = device_of(trial.device)
    world = join(trial.layout, device)
    inputs = trial.inputs and trial.inputs()
    spec = replace(trial.spec, embeddings=id_bound(inputs.tokenizer) if inputs else 0)
    if not isinstance(spec.source, str):
        spec = replace(spec, draw_on=str(device))
    model = rank_model(spec, world, optimizer=trial.optimizer, tokens_per_sequence=seq_len)
    for note in model.flash_notes if rank.main else ():
        notice(f"meshtune: {note}")
    seed_dropout(world, spec.seed)
    batches: Iterator[Batch]
    if inputs:
        loader = loader_of(inputs.prepared.train, world.layout, world.data_rank, spec.seed)
        batches = (batch for batch, _ in loader)
    else:
        batches = random_batches(model, world, seq_len, trial.documents)
    hosts = hosts_of(world)
    facts = facts_of(trial.settings, model, inputs and inputs.prepared) | hosts if rank.main else {}
    meter = Meter(world, model.memory())
    flops = flops_of(model.census, seq_len, ranks=world.size // world.data_ranks)
    seconds, rows, memory, counts, loads, peaks = [], [], [], [], [], []
    with meter.running():
        for step in range(1, WARM_UP + trial.steps + 1):
            world.synchronize()
            meter.begin()
            began = time.perf_counter()
            batch = next(batches)
            loading = time.perf_counter() - began
            micro_batches = model.passes.localise(batch)
            with meter.watching(step):
                done = model.passes.step(
                    micro_batches, Counts(batch.units, *flops(batch), batch.tokens), meter.phase,
                    learning_rate=LEARNING_RATE, max_grad_norm=trial.max_grad_norm,
                    mismatched=batch.mismatched,
                )  # fmt: skip
            world.synchronize()
            found = meter.end(
                step, micro_batches=batch.micro_batches, loading=loading,
                in_flight=model.passes.in_flight(), stop=False,
            )  # fmt: skip
            memory += found.memory
            peaks.append(found.peak_bytes or 0)
            if step > WARM_UP:
                seconds.append(found.time["seconds"])
                rows.append(found.time)
                loads += [done.experts | {"step": step}] if done.experts else []
                counts.append((batch.tokens, batch.label_tokens, done.flops))
    if trial.profile:
        from meshtune.study.profile import write_profile  # here: the longest chain of imports ends in it

        write_profile(trial.profile, model, next(batches), trial.max_grad_norm)
    tokens, labels, needed = (float(np.mean(column)) for column in zip(*counts, strict=True))
    run = {"kind": "run", "id": uuid.uuid4().hex, "start": 1, "bench": True, **facts}
    if inputs:  # of the steps that were timed
        run["label_share"] = labels / (seq_len * world.layout.global_batch_size)
    end = {"kind": "end", "ended": time_now(), "step": WARM_UP + trial.steps, "status": "finished"}
    peak = peak_flops(device, spec.precision, datasheet_flops)
    measured = Measured(
        str(world.layout), device_name(device), device.type, world.size, tokens, seconds, rows, memory,
        None if np.isnan(needed) else needed, peak, run, end, max(peaks) or None, trial.compared, loads,
    )  # fmt: skip
    return measured if rank.main else None


def random_batches(model: RankModel, world: World, seq_len: int, documents: Sequence[int]) -> Iterator[Batch]:
    """Yield batches of random tokens without end: the same on ranks that read the same sequences.

    documents: lengths of those in each sequence.
    """
    embedding: Any = model.whole.get_input_embeddings()
    layout, vocabulary = world.layout, embedding.weight.shape[0]
    draw = np.random.default_rng((model.spec.seed, world.data_rank))
    sequences = layout.global_batch_size

    def row() -> list[np.ndarray]:
        """Return documents of random tokens; all but the first of each are labelled."""
        ids = (draw.integers(0, vocabulary, length, dtype=np.uint32) for length in documents)
        return [Document(each, np.arange(len(each)) > 0).stored for each in ids]

    while True:
        micro_batches = tuple(
            micro_batch(
                [row() for _ in range(layout.micro_batch_size)], seq_len, model.parallel.width_multiple
            )
            for _ in range(layout.gradient_accumulation_steps)
        )
        labels = sequences * (sum(documents) - len(documents))
        yield Batch(micro_batches, sequences * sum(documents), labels, "random tokens")
