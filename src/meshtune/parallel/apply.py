"""A Hugging Face model, cut for one rank of a layout. Read this first: the verbs, in their order.

    model on meta ─> split      tp, sp   each matrix: this rank's rows or columns     tensor.py
                  ─> split      ep       this rank's experts                          experts.py
                  ─> quantise   qlora    frozen matrices in 4 bits                  quantised/nf4.py
                  ─> convert    fp8      matmuls in 8-bit floats                    quantised/fp8.py
                  ─> attach     cp       attention over sequences that are cut        context.py
                  ─> tile                MLPs, on some tokens at a time             tiles.py
                  ─> Stage      pp       this rank's blocks                           pipeline.py
                  ─> recompute           activations that the backward recomputes     recompute.py
                  ─> offload             their inputs, to host memory               offload.py
                  ─> shard      ZeRO     this rank's shard of what is left            zero.py
                  ─> materialise         memory for exactly that, and no more         (`place`)
                  ─> Replicas   dp       gradients summed over the replicas           replicas.py

The model comes with its parameters on meta, so no memory is ever allocated for what other ranks hold. Values
are filled in afterwards, slice by slice. Parameters are plain tensors until `shard`, which makes them
DTensors over the ranks that share them; elsewhere they stay plain and cost nothing. Activations are always
plain.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from meshtune import compat
from meshtune.data.batch import MicroBatch, Noise
from meshtune.layout import RECOMPUTATIONS, Layout
from meshtune.model.anatomy import Anatomy, anatomy
from meshtune.model.lora import fp8_linears, frozen_matrices
from meshtune.model.pieces import Piece, materialise
from meshtune.parallel import context, tensor, zero
from meshtune.parallel.experts import split_experts
from meshtune.parallel.mesh import World, expert_mesh, parameter_mesh
from meshtune.parallel.offload import Offload
from meshtune.parallel.pipeline import Finish, Pipeline, Stage
from meshtune.parallel.recompute import recompute_blocks
from meshtune.parallel.replicas import Replicas
from meshtune.parallel.tiles import tile_mlps
from meshtune.parallel.zero import local
from meshtune.placement.split import Split, piece, pieces, within
from meshtune.quantised import fp8, nf4

# Micro-batches a pp rank that run together: of 4·pp + pp - 1 ticks a rank works in 4·pp, and parameters that
# ZeRO-1 and -2 gather for the first are there for all.
GROUPED = 4


@dataclass
class Parallel:
    """This rank's part of a model."""

    world: World
    anatomy: Anatomy
    stages: list[Stage]  # one, or several where the schedule has virtual ones
    shapes: Mapping[str, tuple[int, ...]]  # of all parameters of the whole model, by name
    splits: Mapping[str, Split]  # how tp or ep cuts each parameter of the whole model, by name
    compiled: bool = False  # blocks
    offload: Offload | None = None  # with recompute: offload
    pipeline: Pipeline | None = None  # with pp > 1
    replicas: Replicas | None = None  # with copies of its parameters on other ranks
    partial: frozenset[str] = field(init=False)  # parameters whose gradients are summed over tp

    def __post_init__(self) -> None:
        self.partial = frozenset(name for name, split in self.splits.items() if split.partial)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters; a head that is a copy of the tied embedding has its own name."""
        for stage in self.stages:
            yield from stage.model.named_parameters()

    @property
    def modules(self) -> nn.ModuleList:
        """The stages as one module."""
        return nn.ModuleList(self.stages)

    def receive_buffers(self) -> list[Tensor]:
        """Buffers of a pipeline's messages; none without a pipeline."""
        return self.pipeline.receive_buffers() if self.pipeline else []

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in which inputs of blocks wait for their backward."""
        return self.offload.host_bytes if self.offload else 0

    @cached_property
    def windows(self) -> frozenset[int | None]:
        """Sliding windows of this rank's layers, as `context.windows_of`."""
        return context.windows_of(self.modules)

    @property
    def width_multiple(self) -> int:
        """The width of every micro-batch is a multiple of this many tokens."""
        return width_multiple(self.world.layout)

    @property
    def tied(self) -> dict[str, str]:
        """Name of a tied copy on this rank -> name of its original in the whole model."""
        return dict(stage.tied for stage in self.stages if stage.tied)

    def piece(self, name: str, parameter: nn.Parameter, values: Tensor) -> Piece:
        """Wrap `values` in a Piece with its position in the whole parameter, without a copy.

        name: of the parameter on this rank. parameter: that one; its DTensor placements are read. values: of
        the shape of this rank's shard of it, such as the shard, its gradient or its optimizer state.
        """
        whole = self.tied.get(name, name)
        shape, split = self.shapes[whole], self.splits.get(whole, Split())
        offsets, axis = [0] * len(shape), self.world.axis(split.axis)
        runs: tuple[range, ...] = ()  # of rows, where those of this tp rank are not consecutive
        if split.parts:
            runs = pieces(split.parts, axis.size, axis.index)
        elif split.dim is not None:
            offsets[split.dim], _ = piece(shape[split.dim], axis.size, axis.index)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for dim, placement in enumerate(parameter.placements):
                if isinstance(placement, Shard):
                    cut = placement.dim
                    start, _ = piece(parameter.shape[cut], mesh.size(dim), mesh.get_local_rank(dim))
                    offsets[cut] += start
        if not runs:
            return Piece(shape, tuple(offsets), values)
        rows = within(runs, offsets[0], offsets[0] + len(values))
        return Piece(shape, (rows[0].start, *offsets[1:]), values, rows)

    def named_pieces(self) -> Iterator[tuple[str, Piece]]:
        """This rank's shard of each of its parameters, sharing memory, by name in the whole model."""
        for name, parameter in self.named_parameters():
            yield self.tied.get(name, name), self.piece(name, parameter, local(parameter).detach())

    def own_pieces(self) -> dict[str, Piece]:
        """Pieces that this rank exports, by name: together the ranks export each part of the model once."""
        return {
            name: self.piece(name, parameter, local(parameter))
            for name, parameter in self.named_parameters()
            if name not in self.tied and self._copy(name)[0] == 0
        }

    def _copy(self, name: str) -> tuple[int, int]:
        """(Number of a copy of a parameter's elements, 0 on one rank only, number of copies)."""
        layout, rank = self.world.layout, self.world.rank
        split = self.splits.get(self.tied.get(name, name), Split())
        if split.axis == "ep":
            stage, one = layout.world // layout.pp, layout.expert_shards * layout.ep
            return rank % stage // one, stage // one
        copied = ["dp_replicate", *["cp"] * (layout.zero == 0), *["tp"] * (split.dim is None)]
        axes = [self.world.axis(axis) for axis in copied]
        return max(axis.index for axis in axes), math.prod(axis.size for axis in axes)

    def copies(self) -> dict[str, float]:
        """Parameter -> number of ranks that hold each element of its gradient; infinite for a tied copy, so
        that it counts nothing in a norm.
        """
        names = (name for name, _ in self.named_parameters())
        return {name: math.inf if name in self.tied else self._copy(name)[1] for name in names}

    def localise(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's columns of a micro-batch of its data rank, on its device."""
        return self.to_device(self.columns_of(micro_batch))

    def columns_of(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's columns (cp) of a micro-batch of its data rank, in host memory that the device can copy
        from while it computes; the noise is on the embeddings' columns, which sp splits too.
        """
        layout, tp = self.world.layout, self.world.tp
        if self.world.cp.size > 1:
            micro_batch = context.split(micro_batch, self.world.cp, layout.cp_method, self.windows)
        if micro_batch.noise and layout.sp:
            own = (tensor.chunk(tp.size, 1)[tp.index] for tensor in micro_batch.noise)
            micro_batch = replace(micro_batch, noise=Noise(*own))
        return micro_batch.map(Tensor.pin_memory) if self.world.device.type == "cuda" else micro_batch

    def to_device(self, micro_batch: MicroBatch) -> MicroBatch:
        """A micro-batch of `columns_of` on this rank's device."""
        micro_batch = micro_batch.to(self.world.device)
        if self.compiled:
            # From the start for any number of documents; else the second micro-batch would compile once more.
            micro_batch.boundaries.map(compat.of_any_length)
        return micro_batch

    def begin(self, passes: int) -> None:
        """Prepare a step of `passes` micro-batches."""
        if self.replicas is not None:
            self.replicas.begin(passes)

    def before_backward(self, *, last: bool) -> None:
        """Prepare a micro-batch's passes. last: True for the step's last micro-batch.

        Do not call it with a pipeline, whose stages do it themselves.
        """
        zero.before_backward(self.stages[0], self.world.layout.zero, last=last)

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch], finish: Finish) -> list[Tensor]:
        """Return `finish` of each micro-batch's last hidden states, without gradients, on the ranks of the
        last stage; an empty list on other ranks.

        micro_batches: of this data rank, not yet split by cp. Every rank calls it with equally many.
        Parameters that ZeRO gathered for it are freed.
        """
        local_batches = [self.localise(micro_batch) for micro_batch in micro_batches]
        if self.pipeline is not None:
            results = self.pipeline.forward_only(local_batches, finish) or []
        else:
            results = [self.stages[0](None, micro_batch, finish) for micro_batch in local_batches]
        for stage in self.stages:
            zero.reshard(stage)
        return results

    def forward_each(
        self,
        micro_batches: Iterator[MicroBatch],
        finish: Finish,
        before: Callable[[int], object] = lambda _: None,
    ) -> Iterator[Tensor]:
        """Yield `forward`'s results of any number of micro-batches, some at a time. Every rank calls it with
        equally many. before: called with the number that was taken so far, before each group.
        """
        done = 0
        while group := list(islice(micro_batches, GROUPED * self.world.pp.size)):
            before(done)
            yield from self.forward(group, finish)
            done += len(group)

    def finish_gradients(self, gradients: Callable[[frozenset[str] | None], Mapping[str, Tensor]]) -> None:
        """Sum gradients over replicas, tp and the copies of a tied embedding, after the last micro-batch.

        gradients: names (None: all) -> this rank's shards of their gradients by name, changed in place.
        """
        if self.replicas is not None:
            self.replicas.finish()
        if self.partial:
            tensor.reduce_partial(list(gradients(self.partial).values()), self.world.tp)
        if self.pipeline is not None:
            self.pipeline.reduce_tied(gradients)


@dataclass(frozen=True)
class Cut:
    """This rank's stages, their parameters still on meta."""

    stages: list[Stage]
    anatomy: Anatomy
    mesh: DeviceMesh | None  # of the ranks that share this rank's parameters; None: no other does
    expert_mesh: DeviceMesh | None  # of those that share its experts, where others have other ones
    shapes: Mapping[str, tuple[int, ...]]  # as in Parallel
    splits: Mapping[str, Split]
    compute_dtype: torch.dtype  # of hidden states that are sent between stages
    reduce_dtype: torch.dtype | None  # that replicas sum gradients in; None: their own
    compiled: bool  # blocks
    offload: Offload | None  # as in Parallel


def cut(
    make: Callable[[], PreTrainedModel],
    world: World,
    blocks: Mapping[int, range],
    *,
    finish: Finish,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    compile: bool = False,
    mlp_tile: int | None = None,
    quantise: bool = False,
    fp8_recipe: str = "",
    emulate: bool = True,
) -> Cut:
    """Cut and shard the parts of `make()` that this rank of `world` runs, without memory.

    A collective call. make: returns a fresh whole model with its parameters on meta; called once for each of
    this rank's stages. blocks: index of a stage -> numbers of its blocks, for this rank's stages in their
    order. finish: computes the summed loss from the last hidden states. compute_dtype: of the passes, set
    here only under ZeRO, and of hidden states sent between stages. reduce_dtype: in which gradients are
    summed over data ranks; None: their own. compile: True to torch.compile each block separately. mlp_tile:
    tokens that an MLP runs on at a time; None: all. quantise: True to hold frozen matrices in 4 bits.
    fp8_recipe: scales with which linear layers multiply in 8-bit floats, "tensorwise" or "rowwise"; "": they
    do not. emulate: in fp32, as processors do.
    Raises UserError if tp can't split the model.
    """
    layout, mesh, of_experts = world.layout, parameter_mesh(world), expert_mesh(world)
    if compile and layout.tp > 1:
        compat.check_compiled_tensor()
    stages, offload = [], Offload(world.device) if RECOMPUTATIONS[layout.recompute].host else None
    for index, numbers in blocks.items():
        model = make()
        parts = anatomy(model)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        splits = tensor.split_model(model, parts, world.tp, sequence=layout.sp, regather=layout.sp_regather)
        apart = split_experts(model, world.ep)
        tensor.cut_parameters(model, apart, world.ep)
        splits |= apart
        if quantise:
            tp = world.tp.size, world.tp.index
            shapes, splits = nf4.quantise_weights(model, frozen_matrices(model), shapes, splits, tp)
        if fp8_recipe:
            fp8.convert(model, fp8_linears(model, shapes), fp8_recipe, emulate=emulate)
        if world.cp.size > 1:
            context.attach(model, parts, world.cp, layout.cp_method)
        if mlp_tile:
            tile_mlps(model, parts, mlp_tile)
        stage = Stage(model, parts, numbers, index=index, of=layout.stages, finish=finish)
        recompute_blocks(model, parts, layout.recompute, numbers[: layout.recompute_blocks])
        inside = stage.own_blocks
        if compile:
            for block in inside:
                block.compile()
        if offload:
            offload.wrap(inside[: layout.recompute_blocks])
        if mesh is not None and layout.zero:
            zero.shard(
                stage, inside, mesh, layout.zero,
                embedding=model.get_submodule(parts.embed) if stage.first else None,
                norm=model.get_submodule(parts.norm) if stage.last and parts.norm else None,
                head=model.get_submodule(parts.head) if stage.last else None,
                expert_mesh=of_experts, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype,
            )  # fmt: skip
            if fp8_recipe == "tensorwise":
                fp8.gather_in_8_bits(zero.groups(stage), mesh.get_group(mesh.ndim - 1), compute_dtype)
        stages.append(stage)
    return Cut(stages, parts, mesh, of_experts, shapes, splits, compute_dtype, reduce_dtype, compile, offload)


def place(made: Cut, world: World, device: torch.device | None = None) -> Parallel:
    """Allocate memory for the stages of `cut` on `device` (None: `world.device`), without values, and connect
    them.
    """
    layout, stages = world.layout, made.stages
    groups = []
    for stage in stages:
        materialise(stage, device or world.device)
        named = stage.model.named_parameters()
        experts = {p for name, p in named if made.splits.get(name, Split()).axis == "ep"}
        for group in groups_of(stage, stage.own_blocks):
            groups.append(([p for p in group if p not in experts], made.mesh))
            groups.append(([p for p in group if p in experts], made.expert_mesh))
    pipeline = Pipeline(stages, world, made.compute_dtype) if world.pp.size > 1 else None
    copied = not layout.zero and (made.mesh or made.expert_mesh)
    replicas = Replicas(groups[::-1], made.reduce_dtype) if copied else None
    return Parallel(
        world, made.anatomy, stages, made.shapes, made.splits, made.compiled, made.offload, pipeline, replicas
    )


def width_multiple(layout: Layout) -> int:
    """The width of every micro-batch is a multiple of this many tokens: context parallelism cuts the sequence
    (all-gather's zigzag into two parts a rank), and so does sequence parallelism.
    """
    parts = 2 * layout.cp if layout.cp > 1 and layout.cp_method == "allgather" else layout.cp
    return parts * (layout.tp if layout.sp else 1)


def groups_of(stage: Stage, inside: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Lists of a stage's parameters in the order of a forward pass: one for each block of `inside`, and one
    of all others, which comes first on the first stage and last on other stages.
    """
    grouped: set[nn.Parameter] = set()
    blocks = []
    for block in inside:  # a parameter that two blocks share is in the group of the first one
        blocks.append([parameter for parameter in block.parameters() if parameter not in grouped])
        grouped.update(blocks[-1])
    outside = [parameter for parameter in stage.parameters() if parameter not in grouped]
    return [outside, *blocks] if stage.first else [*blocks, outside]
