"""A Hugging Face model, cut for one rank of a layout. Read this first: the verbs, in their order.

    model on meta ─> split      tp, sp   each matrix: this rank's rows or columns     tensor.py
                  ─> attach     cp       attention over sequences that are cut        context.py
                  ─> Stage      pp       this rank's blocks                           pipeline.py
                  ─> recompute           what the backward computes again             recompute.py
                  ─> shard      ZeRO     this rank's shard of what is left            zero.py
                  ─> materialise         memory for exactly that, and no more
                  ─> Replicas   dp       gradients summed over the ranks with copies  replicas.py

The model comes with its parameters on meta: nothing is ever held that this rank doesn't keep. Values are
filled in afterwards, slice by slice. Parameters are plain tensors until `shard`, which makes them DTensors
over the ranks that share them; elsewhere they stay plain and cost nothing. Activations are always plain.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from meshtune.data.loader import MicroBatch
from meshtune.model.anatomy import Anatomy, anatomy
from meshtune.model.pieces import Piece
from meshtune.parallel import context, tensor, zero
from meshtune.parallel.mesh import World
from meshtune.parallel.pipeline import Finish, Pipeline, Stage
from meshtune.parallel.recompute import recompute_blocks
from meshtune.parallel.replicas import Replicas
from meshtune.parallel.zero import local
from meshtune.placement.share import Split, piece, stage_count


@dataclass
class Parallel:
    """This rank's part of a model: one stage, or several where the schedule has virtual ones.

    shapes and splits are of all parameters of the whole model, by name: their sizes, and how tp cuts them.
    """

    world: World
    anatomy: Anatomy
    stages: list[Stage]
    shapes: Mapping[str, tuple[int, ...]]
    splits: Mapping[str, Split]
    pipeline: Pipeline | None = None  # with pp > 1
    replicas: Replicas | None = None  # with copies of its parameters on other ranks
    partial: frozenset[str] = field(init=False)  # parameters whose gradients add up over tp

    def __post_init__(self) -> None:
        self.partial = frozenset(name for name, split in self.splits.items() if split.partial)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters; a head that is a copy of the tied embedding has its own name."""
        for stage in self.stages:
            yield from stage.model.named_parameters()

    @property
    def tied(self) -> dict[str, str]:
        """Name of a copy here -> name of what it is a copy of, in the whole model."""
        return dict(stage.tied for stage in self.stages if stage.tied)

    def piece(self, name: str, parameter: nn.Parameter, held: Tensor) -> Piece:
        """`held`, which lies as this rank's own part of `parameter` does, as a part of the whole."""
        whole = self.tied.get(name, name)
        shape, split = self.shapes[whole], self.splits.get(whole, Split())
        offsets = [0] * len(shape)
        if split.dim is not None:
            offsets[split.dim], _ = piece(shape[split.dim], self.world.tp.size, self.world.tp.index)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for dim, placement in enumerate(parameter.placements):
                if placement.is_shard():
                    start, _ = piece(parameter.shape[0], mesh.size(dim), mesh.get_local_rank(dim))
                    offsets[0] += start
        return Piece(shape, tuple(offsets), held)

    def named_pieces(self) -> Iterator[tuple[str, Piece]]:
        """This rank's own part of each of its parameters, live, by name in the whole model."""
        for name, parameter in self.named_parameters():
            yield self.tied.get(name, name), self.piece(name, parameter, local(parameter).detach())

    def own_pieces(self) -> dict[str, Piece]:
        """The pieces that this rank writes, so that together the ranks write each part of the model once."""
        layout = self.world.layout
        copied = ("dp_replicate", "cp") if layout.zero == 0 else ("dp_replicate",)
        if any(self.world.axis(name).index for name in copied):
            return {}
        found = {}
        for name, parameter in self.named_parameters():
            split = self.splits.get(name, Split())
            if name not in self.tied and (split.dim is not None or self.world.tp.index == 0):
                found[name] = self.piece(name, parameter, local(parameter))
        return found

    def copies(self) -> dict[str, float]:
        """Parameter -> on how many ranks its gradient lies; a tied copy does not count."""
        layout, found = self.world.layout, {}
        data = self.world.parameter_ranks if layout.zero == 0 else layout.dp_replicate
        for name, _ in self.named_parameters():
            split = self.splits.get(self.tied.get(name, name), Split())
            tensor_ranks = layout.tp if split.dim is None else 1
            found[name] = math.inf if name in self.tied else data * tensor_ranks
        return found

    def localise(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's columns of a micro-batch of its data rank, on its device."""
        if self.world.cp.size > 1:
            micro_batch = context.split(micro_batch, self.world.cp, self.world.layout.cp_method)
        return micro_batch.to(self.world.device)

    def begin(self, passes: int) -> None:
        """Before the passes of a step with so many micro-batches."""
        if self.replicas is not None:
            self.replicas.begin(passes)

    def before_backward(self, *, last: bool) -> None:
        """Before a micro-batch's passes, without a pipeline (which does it itself)."""
        zero.before_backward(self.stages[0], self.world.layout.zero, last=last)

    def forward(self, micro_batches: Sequence[MicroBatch], finish: Finish) -> list[Tensor]:
        """`finish` of each (local) micro-batch's last hidden states, on the ranks of the last stage."""
        if self.pipeline is not None:
            found = self.pipeline.forward_only(micro_batches, finish) or []
        else:
            found = [self.stages[0](None, each, finish) for each in micro_batches]
        for stage in self.stages:
            zero.let_go(stage)
        return found

    def finish_gradients(self, gradients: Callable[[frozenset[str] | None], Mapping[str, Tensor]]) -> None:
        """After the last micro-batch: add up what is still spread over replicas, over tp, and over the copies
        of a tied embedding.

        gradients: names (None: all) -> this rank's own pieces of their gradients.
        """
        if self.replicas is not None:
            self.replicas.finish()
        if self.partial:
            tensor.reduce_partial(list(gradients(self.partial).values()), self.world.tp)
        if self.pipeline is not None:
            self.pipeline.reduce_tied(gradients)


def apply(
    make: Callable[[], PreTrainedModel],
    world: World,
    blocks: Mapping[int, range],
    *,
    finish: Finish,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    compile: bool = False,
) -> Parallel:
    """The parts of `make()` that this rank of `world` runs, with memory but without values.

    make: a fresh whole model with its parameters on meta. blocks: stage -> its blocks, for this rank's
    stages. finish: last hidden states -> summed loss. The dtypes are those of zero.shard. compile: block by
    block.
    """
    layout, mesh = world.layout, zero.parameter_mesh(world)
    stages, groups = [], []
    for index, own in blocks.items():
        model = make()
        parts = anatomy(model)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        splits = tensor.split_model(model, parts, world.tp, sequence=layout.sp)
        if world.cp.size > 1:
            context.attach(model, parts, world.cp, layout.cp_method)
        stage = Stage(model, parts, own, index=index, of=stage_count(layout), finish=finish)
        recompute_blocks(model, parts, layout.recompute)
        inside = [model.get_submodule(f"{parts.blocks}.{number}") for number in own]
        if compile:
            for block in inside:
                block.compile()
        if mesh is not None and layout.zero:
            zero.shard(
                stage, inside, mesh, layout.zero, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype
            )
        materialise(stage, world.device)
        stages.append(stage)
        groups += groups_of(stage, inside)
    pipeline = Pipeline(stages, world, compute_dtype) if world.pp.size > 1 else None
    replicas = Replicas(groups[::-1], mesh, reduce_dtype) if mesh is not None and not layout.zero else None
    return Parallel(world, parts, stages, shapes, splits, pipeline, replicas)


def groups_of(stage: Stage, inside: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """A stage's parameters, by block and those outside, in the order in which a forward pass needs them."""
    taken: set[nn.Parameter] = set()
    blocks = []
    for block in inside:  # a parameter that two blocks share is needed by the first one
        blocks.append([parameter for parameter in block.parameters() if parameter not in taken])
        taken.update(blocks[-1])
    outside = [parameter for parameter in stage.parameters() if parameter not in taken]
    return [outside, *blocks] if stage.first else [*blocks, outside]


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give every tensor on meta memory on `device`; bring the others (buffers, with their values) there."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                places.setdefault(parameter, []).append((each, name))
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for (owner, own_name), *others in places.values():  # `_apply` makes two parameters of a tied one
        for each, name in others:
            each._parameters[name] = owner._parameters[own_name]
