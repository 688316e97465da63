"""Pipeline parallelism (pp): each rank runs some of the blocks, and micro-batches flow through the ranks.

    Stage       what one rank runs of the model for one micro-batch
    Pipeline    the stages of this rank, in the order of a schedule of torch.distributed.pipelining

The Hugging Face model stays: pieces of other stages are replaced by stand-ins without parameters, so names
are those of its checkpoint. With one stage nothing is replaced. The loss is computed inside the last stage,
where all of its parameters are at hand.

All micro-batches of a step have one shape; another shape in another step gets a schedule of its own
(0.2 ms).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from transformers import PreTrainedModel

from meshtune.data.loader import MicroBatch
from meshtune.layout import TORCH_SCHEDULES
from meshtune.model.anatomy import Anatomy, StandIn
from meshtune.parallel import zero
from meshtune.parallel.attention import body_forward
from meshtune.parallel.mesh import World
from meshtune.placement.share import stage_of_rank

Finish = Callable[[nn.Module, Anatomy, Tensor, MicroBatch], Tensor]


class Stage(nn.Module):
    """What one rank runs of `model` for one micro-batch: `blocks`, on the first stage the embedding too, on
    the last one norm, head and `finish`. In place; `model` is whole, its parameters may be cut by tp already.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        anatomy: Anatomy,
        blocks: range,
        *,
        index: int = 0,
        of: int = 1,
        finish: Finish,
    ) -> None:
        super().__init__()
        self.model, self.anatomy, self.blocks = model, anatomy, blocks
        self.index, self.of, self.finish = index, of, finish
        self.tied: tuple[str, str] | None = None  # a copy's name here, and its original's in the whole model
        self.shares = False  # an embedding with the stage at the other end
        if of > 1:
            self._cut()

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.of - 1

    def _cut(self) -> None:
        model, parts = self.model, self.anatomy
        embed, head = model.get_submodule(parts.embed), model.get_submodule(parts.head)
        self.shares = head.weight is embed.weight and (self.first or self.last)
        if self.shares and self.last:
            self.tied = f"{parts.head}.weight", f"{parts.embed}.weight"
        every = [name for name, _ in model.get_submodule(parts.blocks).named_children()]
        others = [f"{parts.blocks}.{name}" for name in every if int(name) not in self.blocks]
        others += [] if self.first else [parts.embed]
        others += [] if self.last else [path for path in (parts.norm, parts.head) if path]
        for path in others:
            model.set_submodule(path, StandIn())

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch, finish: Finish | None = None) -> Tensor:
        """Hidden states for the next stage; on the last one what `finish` (else the loss) makes of them.

        hidden [batch, seq, hidden]: of the stage before; the first one has no use for it.
        """
        out = body_forward(self.model, self.anatomy, micro_batch, None if self.first else hidden)
        if not self.last:
            return out
        return (finish or self.finish)(self.model, self.anatomy, out, micro_batch)


class _ZeroStage(PipelineStage):
    """torch's stage, which by itself keeps whole parameters and gradients for the step: that is ZeRO-1."""

    def __init__(self, zero: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.zero = zero
        self.add_up: Callable[[], None] = lambda: None  # of gradients, after a backward that runs no hooks

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> None:
        super().backward_weight_one_chunk(*args, **options)
        self.add_up()
        zero.add_up(self.submod)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False
    ) -> Any:
        root = self.submod
        if self.zero < 2 or not isinstance(root, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "zero-bubble schedules are refused with ZeRO-2 and -3"
        root.set_is_last_backward(True)
        root.set_requires_gradient_sync(True)
        root.set_requires_all_reduce(last_backward)
        root.set_reshard_after_backward(self.zero == 3 or last_backward)
        passed = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        return stage_backward(*passed), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.zero < 2 or not isinstance(self.submod, FSDPModule):
            super().perform_reduce_grad(grad_scale_factor)
        else:
            zero.let_go(self.submod)


class Pipeline:
    """The stages of this rank, run by a schedule.

    dtype: of the hidden states that travel between stages.
    """

    def __init__(self, stages: Sequence[Stage], world: World, dtype: torch.dtype) -> None:
        self.stages, self.world, self.dtype = list(stages), world, dtype
        layout = world.layout
        self.owners = {
            stage: rank
            for rank in range(layout.pp)
            for stage in stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, rank)
        }
        self.has_last = any(stage.last for stage in stages)
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._scale = 1.0

    # Training #

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], scale: float, add_up: Callable[[], None]
    ) -> Tensor:
        """Leave the gradients of (sum of the losses) · scale; returns that, a scalar: 0 on ranks without the
        last stage.

        add_up: called after each backward of weights alone, which runs no hooks of their gradients.
        """
        shapes = {tuple(each.input_ids.shape) for each in micro_batches}
        if len(shapes) > 1:
            raise ValueError(f"Micro-batches of one step have {len(shapes)} shapes: {sorted(shapes)}.")
        (shape,) = shapes
        schedule = self._schedule(len(micro_batches), *shape)
        self._scale = scale
        for stage in self._torch_stages(schedule):
            stage.has_backward, stage.add_up = True, add_up
            stage.clear_runtime_states()
        losses: list[Tensor] = []
        schedule._step_microbatches(
            [(each.input_ids,) for each in micro_batches] if 0 in self._indices else None,
            [{"micro_batch": each} for each in micro_batches],
            [None] * len(micro_batches) if self.has_last else None,
            losses,
            return_outputs=False,
        )
        if not losses:
            return torch.zeros((), device=self.world.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    @property
    def _indices(self) -> list[int]:
        return [stage.index for stage in self.stages]

    @staticmethod
    def _torch_stages(schedule: Any) -> list[Any]:
        return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages

    def _schedule(self, number: int, rows: int, width: int) -> Any:
        key = number, rows, width
        if key not in self._schedules:
            self._schedules.clear()  # each holds buffers for what it receives; the next shape needs others
            layout = self.world.layout
            hidden = self._hidden(rows, width, "meta").requires_grad_()
            ids = torch.empty(rows, width, dtype=torch.int64, device="meta")
            loss = torch.empty((), dtype=torch.promote_types(self.dtype, torch.float32), device="meta")
            made = [
                _ZeroStage(
                    layout.zero, stage, stage.index, stage.of, self.world.device, group=self.world.pp.group,
                    input_args=(ids if stage.first else hidden,),
                    output_args=(loss.requires_grad_() if stage.last else hidden,),
                )
                for stage in self.stages
            ]  # fmt: skip
            kind = get_schedule_class(TORCH_SCHEDULES[layout.schedule])
            several = issubclass(kind, PipelineScheduleMulti)
            self._schedules[key] = kind(
                made if several else made[0], number, loss_fn=self._scaled, scale_grads=False
            )
        return self._schedules[key]

    def _scaled(self, loss: Tensor, _: Any) -> Tensor:
        return loss * self._scale

    def _hidden(self, rows: int, width: int, device: torch.device | str) -> Tensor:
        """What travels between stages: this rank's columns, of which sp has cut its own."""
        layout, first = self.world.layout, self.stages[0]
        size = first.model.config.get_text_config().hidden_size
        return torch.empty(
            rows, width // (layout.tp if layout.sp else 1), size, dtype=self.dtype, device=device
        )

    # Without gradients #

    @torch.no_grad()
    def forward_only(self, micro_batches: Sequence[MicroBatch], finish: Finish) -> list[Tensor] | None:
        """What `finish` makes of each micro-batch on the rank of the last stage; None on the others.

        Every rank goes through its stages in ascending order, micro-batch by micro-batch: whatever it waits
        for comes before what it does next, so nobody waits in a circle.
        """
        found = []
        for each in micro_batches:
            rows, width = each.input_ids.shape
            out = each.input_ids  # of which the first stage has no use
            for stage in self.stages:
                if not stage.first and self.owners[stage.index - 1] != self.world.pp.index:
                    out = self._hidden(rows, width, self.world.device)
                    dist.recv(out, self._global_rank(stage.index - 1), group=self.world.pp.group)
                out = stage(out, each, finish)
                if stage.last:
                    found.append(out)
                elif self.owners[stage.index + 1] != self.world.pp.index:
                    dist.send(out.contiguous(), self._global_rank(stage.index + 1), group=self.world.pp.group)
        return found if self.has_last else None

    def _global_rank(self, stage: int) -> int:
        assert self.world.pp.group is not None
        return dist.get_global_rank(self.world.pp.group, self.owners[stage])

    # Tied embeddings #

    def reduce_tied(self, gradients: Callable[[frozenset[str] | None], Mapping[str, Tensor]]) -> None:
        """Give both copies of a tied embedding, on the first and the last stage, the sum of their gradients.

        gradients: names -> this rank's own pieces of their gradients.
        """
        last = self.stages[-1]
        if last.tied is not None:
            copy, original = last.tied
        elif self.stages[0].shares:
            copy, original = None, f"{self.stages[0].anatomy.embed}.weight"
        else:
            return
        here = frozenset(name for name in (copy, original) if name)
        mine = list(gradients(here).values())
        if not mine:  # frozen
            return
        if len(mine) == 2:
            mine[0] += mine[1]
            mine[1].copy_(mine[0])
            return
        peer = self._global_rank(0 if copy else last.of - 1)
        theirs, group = torch.empty_like(mine[0]), self.world.pp.group
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine[0], peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
        ):
            work.wait()
        mine[0] += theirs
