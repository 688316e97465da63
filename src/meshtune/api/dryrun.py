"""Dry run: the real training step of a layout on fake tensors. Needs no GPU, no network, no weights, no data.

config ─> numbers, configuration ─> layouts (given, or the planner's) ─> refused, or
                                    a Job for each ─> its distinct ranks, traced ─> Simulation
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

from transformers import PretrainedConfig

from meshtune.api.choose import LESS_MEMORY, compiles_blocks
from meshtune.api.model_file import model_file
from meshtune.api.plan import Log, other_reference, silent
from meshtune.api.resolve import model_spec, optimizer_spec
from meshtune.api.settings import Settings, config_of
from meshtune.config import Config
from meshtune.data.tokens import id_bound
from meshtune.dryrun.ranks import distinct_ranks, pipeline_copies, ranks_to_trace, trace_ranks
from meshtune.dryrun.routing import BALANCED, FULLEST, Routing, routing_for
from meshtune.dryrun.simulation import Simulation
from meshtune.dryrun.world import Job, trace_rank
from meshtune.errors import UserError
from meshtune.launch import allocator
from meshtune.layout import AUTO, Layout, PartialLayout
from meshtune.model.census_cache import numbers_of
from meshtune.model.load import read_config
from meshtune.objectives import OBJECTIVES
from meshtune.placement.experts import BalanceSpec
from meshtune.placement.numbers import READS_VALUES, ModelNumbers
from meshtune.placement.ranks import process_groups
from meshtune.placement.rules import refusals
from meshtune.plan import answer
from meshtune.plan.accounting import stack_accounting
from meshtune.plan.changes import Lighter, out_of_memory
from meshtune.plan.cluster import Cluster, cluster_for, other_units
from meshtune.plan.explanation import explain
from meshtune.plan.phrases import predicted_with, unmeasured
from meshtune.plan.search import explained
from meshtune.plan.workload import Uncounted, Workload, lighter_workloads, workload_of
from meshtune.precision import PRECISIONS
from meshtune.train.inputs import Inputs, loader_of
from meshtune.units import counted, on_screen

COMPILED = (
    "The blocks are compiled: operations of a block are fused as inductor fuses them for a processor, and "
    "those that full and selective recompute are counted in its backward."
)

LARGE_REFERENCE = (
    "The reference's pass before the first step needs most: divide its weights further (zero3, tp, pp), or "
    "name a smaller model."
)


def dryrun(
    config: Settings,
    overrides: Sequence[str] = (),
    *,
    layout: Layout | str | None = None,
    ranks: Sequence[int] = (),
    documents: Sequence[int] = (),
    routing: str = BALANCED.kind,
    log: Log | None = None,
) -> Simulation:
    """Run two training steps of a layout on fake tensors, for each kind of rank in a process of its own.

    config: a Config, a mapping of its sections, or a YAML file. overrides: section.key=value each. layout:
    instead of the config's; without either, the planner's choice. ranks: traced besides the first, a middle
    and the last pipeline rank. documents: lengths of those in each sequence; (): as
    data.mean_document_tokens says, else one. routing: of tokens to experts that several ranks split:
    balanced, worst, or measured in the run of the config's output. log: as of `plan`. `Simulation.traces`
    has every operation, storage and collective of both steps. Raises UserError for bad settings and layouts,
    NothingFits if the planner finds no layout that fits, RankFailed if a trace fails.
    """
    layouts = [] if layout is None else [str(layout)]
    (simulation,) = simulations(
        config_of(config, overrides), layouts, ranks=ranks, documents=documents, routing=routing,
        log=log or on_screen,
    )  # fmt: skip
    return simulation


def simulations(
    config: Config,
    layouts: Sequence[str],
    *,
    ranks: Sequence[int] = (),
    documents: Sequence[int] = (),
    routing: str = BALANCED.kind,
    log: Log = silent,
) -> list[Simulation]:
    """Dry-run each of `layouts`, in their order; none: the config's, else the planner's choice.

    The other arguments are those of `dryrun`. Raises as that; every layout is checked before one is traced.
    """
    documents = documents_of(config, documents)
    with subject_of(config, log) as subject:
        problems, checked = [], []
        for text in layouts or [None]:
            try:
                layout = subject.layout(text)
                if refused := subject.refusals(layout):
                    raise UserError(refused)
                subject.ranks(layout, ranks)
                spread = subject.routing(layout, routing)
                checked.append((layout, cluster_for(config).of_size(layout.world), spread))
            except UserError as error:
                problems += [f"{text}: {problem}" for problem in error.problems]
                if len(layouts) < 2:  # NothingFits has another exit code
                    raise
        if problems:
            raise UserError(problems)
        return [
            subject.simulate(
                replace(subject.job(layout, documents), routing=spread),
                cluster,
                log,
                ranks=ranks,
                notes=notes_on_layout(config, layout),
            )
            for layout, cluster, spread in checked
        ]


@dataclass(frozen=True)
class Subject:
    """The model and the settings of a dry run, without a layout."""

    config: Config
    numbers: ModelNumbers
    source: PretrainedConfig
    workload: Workload | None  # None: the planner can't count the model
    lighter: Lighter
    notes: tuple[str, ...]
    device: str  # torch's kind, whose kernels are traced
    has_weights: bool = True  # False: the shape is a known or typical one, and no model's files are there
    reference: PretrainedConfig | None = None  # of another model that is the reference

    @property
    def attention(self) -> str:
        """Name of the attention that the model is built with."""
        name = self.config.model.attention
        return self.numbers.attention if name == AUTO else name

    def layout(self, text: str | None) -> Layout:
        """The layout to trace. text: as the user wrote it; None: the config's. What it leaves open, the
        planner chooses.
        """
        given = PartialLayout.parse(text) if text else self.config.partial_layout
        if given.whole and {"micro_batch_size", "gradient_accumulation_steps"} <= given.fixed.keys():
            return given.known  # its global batch may be another than the config's: `notes_on_layout`
        if self.workload is None:
            devices = given.world or cluster_for(self.config).gpus
            return given.complete(devices=devices, global_batch_size=self.config.global_batch_size)
        if text or given.whole:
            return explain(self.config, self.workload, text or self.config.layout).choice.layout
        return answer.ask(self.config, self.workload, lighter=self.lighter).choice.layout

    def refusals(self, layout: Layout) -> list[str]:
        """Every reason why the model can't be trained under a layout; none: it can."""
        return refusals(
            self.numbers.traits,
            layout,
            attention=self.attention,
            packing=self.config.data.packing,
            shared_prompts=self.config.data.shared_prompts,
            compile=self.config.train.compile,
            optimizer=self.config.train.optimizer,
            step_in_backward=self.config.train.step_in_backward,
            tiled=self.config.train.mlp_tile is not None,
            quantised=bool(self.config.quantise),
            fp8=bool(PRECISIONS[self.config.train.precision].fp8),
            balance=BalanceSpec(**self.config.experts.balancing),
        )

    def routing(self, layout: Layout, kind: str) -> Routing:
        """The routing `kind` of tokens to experts. Raises UserError as `routing_for`."""
        model, experts = self.config.model.name, self.numbers.traits.experts
        return routing_for(kind, layout, experts=experts, model=model, output=self.config.output)

    def compiles(self, layout: Layout, device: str, *, simulated: bool) -> bool:
        """Whether blocks are compiled under a layout. device, simulated: as in `compiles_blocks`."""
        train, traits = self.config.train, self.numbers.traits
        return compiles_blocks(train, traits, layout, device, simulated=simulated)[0]

    def config_of(self, layout: Layout) -> Config:
        """The settings with a layout and the global batch that it makes."""
        config = self.config
        batch = {"global_batch_size": layout.global_batch_size, "global_batch_tokens": None}
        train = config.train.model_copy(update=batch)
        return config.model_copy(update={"train": train, "layout": str(layout)})

    def ranks(self, layout: Layout, asked: Iterable[int] = ()) -> dict[int, str]:
        """Ranks to trace under a layout, those asked for among them -> the ranks that each stands for.

        Raises UserError for a rank that the layout lacks.
        """
        distinct = distinct_ranks(self.numbers.census, layout, self.config.data.seq_len)
        return ranks_to_trace(distinct, layout, asked)

    def job(self, layout: Layout, documents: tuple[int, ...]) -> Job:
        """The steps to trace under a layout, with random weights. documents: lengths in each sequence.

        Raises UserError for a model that can't be traced.
        """
        config = self.config
        if self.numbers.census.unsupported == READS_VALUES:
            raise UserError(f"{config.model.name} can't be simulated: {READS_VALUES}.")
        compiled = self.compiles(layout, self.device, simulated=True)
        spec = model_spec(config, self.attention, self.device, compile=compiled)
        return Job(
            spec=replace(spec, source=self.source, overrides={}, init="random"),
            optimizer=optimizer_spec(config),
            layout=layout,
            seq_len=config.data.seq_len,
            documents=documents,
            max_grad_norm=config.train.max_grad_norm,
            census=self.numbers.census,
            reference=self.reference,
        )

    def job_of_data(
        self, layout: Layout, inputs: Inputs, *, number: int = 1, timed: range = range(0),
        after: Mapping[str, Any] | None = None,
    ) -> Job:  # fmt: skip
        """The steps to trace with a global batch of the training data.

        number: of the batch, from 1. timed: numbers of later ones, whose mean tokens speeds count; none: the
        batch's. after: a checkpoint's position in the data, from which on batches count; None: the
        beginning. Raises UserError as `loader_of`.
        """
        state = dict(after) if after is not None else None
        train = inputs.prepared.train
        batches = (batch for batch, _ in loader_of(train, layout, 0, self.config.train.seed, state))
        batch = next(islice(batches, number - 1, None))
        later = enumerate(islice(batches, max(0, timed.stop - number - 1)), number + 1)
        tokens = [each.tokens for place, each in later if place in timed]
        job = self.job(layout, batch.micro_batches[0].documents[0])
        labels = batch.label_tokens / (layout.global_batch_size * job.seq_len)
        return replace(
            job, batch=batch, label_share=labels if train.packed else train.label_share, longest=train.width,
            tokens=fmean(tokens or [batch.tokens]),
            spec=replace(job.spec, embeddings=id_bound(inputs.tokenizer)),
        )  # fmt: skip

    def simulate(
        self, job: Job, cluster: Cluster, log: Log, *, ranks: Iterable[int] = (), notes: Iterable[str] = ()
    ) -> Simulation:
        """Trace each kind of rank of the job's layout and put them next to the planner's prediction.

        cluster: with a device for each of the layout's ranks. ranks: to be traced too. notes: more sentences
        that the answer says.
        """
        layout, on_gpu = job.layout, job.spec.kernels == "cuda"
        job = replace(job, spec=replace(job.spec, memory=cluster.memory * on_gpu))
        stands_for, borrowed = self.ranks(layout, ranks), cluster.timed and unmeasured(cluster)
        if layout.pp == 1 and job.routing.kind != BALANCED.kind:
            stands_for[0] = FULLEST
        names = ", ".join(f"{rank:,}" for rank in stands_for)
        log(f"tracing two steps of {layout}: rank{'s' * (len(stands_for) > 1)} {names} of {layout.world:,} …")
        traces = trace_ranks(partial(trace_rank, job), [*stands_for], layout.world, tell=log)
        workload = self.workload and self.workload.of_batch(layout.global_batch_size)
        workload = workload and workload.of_labels(job.label_share, job.longest, job.tokens)
        workload = workload and workload.under(cluster.gpu, layout)
        labelled = job.label_share and workload and float(workload.work.labelled)
        choice = workload and explained(workload, cluster, layout)
        simulation = Simulation(
            model=self.config.model.name,
            layout=layout,
            cluster=cluster,
            kernels=job.spec.kernels,
            documents=job.documents,
            traces=tuple(traces),
            stands_for=stands_for,
            copies=pipeline_copies(self.numbers.census, layout, self.config.data.seq_len),
            outside=0 if cluster.gpu.processor else outside_of(layout, self.config.train.precision),
            workload=workload,
            predicted=choice,
            expandable=allocator.expands(os.environ),
            routing=job.routing.kind,
            notes=(
                *self.notes,
                *([COMPILED] if job.spec.compile else []),
                *([job.routing.note] if job.routing.note else []),
                *([borrowed] if self.workload and borrowed else []),
                *([f"{predicted_with(labelled)}."] if workload else []),
                *(() if cluster.gpu.processor else allocator.conflicts(os.environ)),
                *notes,
            ),
        )
        log(f"fitting {counted(len(traces), 'trace')} into the memory of {cluster.title} …")
        if simulation.fits:
            return simulation
        instead = out_of_memory(choice, workload, self.lighter) if choice and workload else [LESS_MEMORY]
        instead = [LARGE_REFERENCE] if simulation.reference_is_largest else instead
        return replace(simulation, instead=tuple(instead))


@contextmanager
def subject_of(config: Config, log: Log, device: str | None = None) -> Iterator[Subject]:
    """Read what the config names: its model's configuration, which need not be on this machine (see
    `model_file`), and the numbers of the model.

    device: torch's kind, whose kernels are traced; None: that of the cluster's devices.
    """
    units = other_units(config.cluster_config)  # a wrong cluster is refused before a model is built
    device = device or ("cpu" if cluster_for(config).gpu.processor else "cuda")
    model, reference, of_reference = config.model, None, ()
    if name := other_reference(config):
        with model_file(name) as (file, of_reference):
            reference = read_config(file, name, model.trust_remote_code)
    with model_file(config.model.name, config.model.revision) as (file, notes):
        numbers = numbers_of(config, file=file, log=log)
        try:
            workload = workload_of(config, numbers)
        except Uncounted:
            workload = None
        yield Subject(
            config,
            numbers,
            read_config(file, model.name, model.trust_remote_code, model.overrides),
            workload,
            partial(lighter_workloads, config, partial(numbers_of, file=file)),
            (*notes, *of_reference, *(workload.notes if workload else numbers.changes), *units),
            device,
            has_weights=not notes,
            reference=reference,
        )


def documents_of(config: Config, given: Sequence[int]) -> tuple[int, ...]:
    """Lengths of the documents in each sequence.

    given: as the user wrote them; (): equal ones, by data.mean_document_tokens, which fill the
    sequence, else one, or both sides of a pair. Raises UserError for lengths that no sequence has.
    """
    seq_len = config.data.seq_len
    if given:
        problems = [
            f"--documents {length}: a document has 1 token or more." for length in given if length < 1
        ]
        if sum(given) > seq_len:
            problems.append(
                f"--documents: {counted(len(given), 'document')} of {sum(given):,} tokens in all do not fit "
                f"a sequence of data.seq_len={seq_len}."
            )
        if len(given) > 1 and not config.data.packing:
            problems.append("--documents: without data.packing a sequence has one; name one length.")
        if problems:
            raise UserError(problems)
        return tuple(given)
    mean = config.data.mean_document_tokens or seq_len / OBJECTIVES[config.objective].documents
    mean = mean if config.data.packing else None
    number = max(1, round(seq_len / mean)) if mean else 1
    return tuple(seq_len * (index + 1) // number - seq_len * index // number for index in range(number))


def notes_on_layout(config: Config, layout: Layout) -> Iterator[str]:
    """Sentences on numbers that the settings have otherwise than what is simulated."""
    if config.experts.imbalance != 1:
        imbalance = f"experts.imbalance={config.experts.imbalance:g}"
        yield f"{imbalance} counts in plans only; --routing spreads the tokens of a dry run over experts."
    if (gpus := config.cluster_config.gpus) not in (None, layout.world):
        yield (
            f"{layout} has {counted(layout.world, 'rank')}, but cluster.gpus is {gpus}; the layout's "
            "number is simulated."
        )
    if layout.global_batch_size != config.global_batch_size:
        yield (
            f"{layout} makes {counted(layout.global_batch_size, 'sequence')} a step, but "
            f"train.global_batch_size is {config.global_batch_size}; the layout's number is simulated."
        )


def outside_of(layout: Layout, precision: str) -> int:
    """Bytes of a GPU that its allocator does not give: CUDA's context, and a communicator for each group."""
    accounting = stack_accounting("meshtune", precision)
    return int(accounting.context + accounting.communicator * process_groups(layout))
