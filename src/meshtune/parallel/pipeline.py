"""Pipeline parallelism (pp): each rank runs some of the blocks, and micro-batches flow through the ranks.

    Stage       the part of the model that one rank runs for one micro-batch
    Pipeline    the stages of this rank, in the order of a schedule of torch.distributed.pipelining

The Hugging Face model stays: modules of other stages are replaced by stand-ins without parameters, so names
are those of its checkpoint. With one stage nothing is replaced. The loss is computed inside the last stage's
forward, while FSDP2 has its parameters gathered.

All micro-batches of a step have one shape; a step with another shape makes another schedule (0.2 ms).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from transformers import PreTrainedModel

from meshtune import compat
from meshtune.data.batch import MicroBatch
from meshtune.layout import TORCH_SCHEDULES, ZERO_BUBBLE
from meshtune.meter.clock import measured
from meshtune.model.anatomy import Anatomy, StandIn
from meshtune.model.body import body_forward
from meshtune.parallel import noise, zero
from meshtune.parallel.mesh import World
from meshtune.placement.schedules import Pass
from meshtune.placement.share import stage_of_rank

# model, anatomy, last hidden states, micro-batch -> the last stage's output: a loss, or logits
Finish = Callable[[nn.Module, Anatomy, Tensor, MicroBatch], Tensor]


class Stage(nn.Module):
    """The part of `model` that one rank runs: `blocks`, on the first stage the embedding too, on the last one
    norm, head and `finish`.

    model: the whole one, perhaps split by tp already; with several stages its other modules are replaced in
    place by stand-ins. blocks: numbers of the stage's blocks in the whole model. index: of the stage, from 0;
    of: the number of stages. finish: computes the last stage's output (the summed loss) from the last hidden
    states.
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
        self.shares_embedding = False  # an embedding with the stage at the other end
        self.received: Tensor | None = None  # hidden states of the stage before, during a forward
        if of > 1:
            self._cut()

    @property
    def own_blocks(self) -> list[nn.Module]:
        return [self.model.get_submodule(f"{self.anatomy.blocks}.{number}") for number in self.blocks]

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.of - 1

    def _cut(self) -> None:
        model, parts = self.model, self.anatomy
        embed, head = model.get_submodule(parts.embed), model.get_submodule(parts.head)
        self.shares_embedding = head.weight is embed.weight and (self.first or self.last)
        if self.shares_embedding and self.last:
            self.tied = f"{parts.head}.weight", f"{parts.embed}.weight"
        every = [name for name, _ in model.get_submodule(parts.blocks).named_children()]
        others = [f"{parts.blocks}.{name}" for name in every if int(name) not in self.blocks]
        others += [] if self.first else [parts.embed]
        others += [] if self.last else [path for path in (parts.norm, parts.head) if path]
        for path in others:
            model.set_submodule(path, StandIn(model.get_submodule(path)))
        if not self.first:
            block = model.get_submodule(f"{parts.blocks}.{self.blocks[0]}")
            block.register_forward_pre_hook(self._received, with_kwargs=True)

    def _received(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Hook before the first block of a later stage: its input is what the stage before has sent, without
        what the body does to embeddings (a scale, positions), which the first stage has done.
        """
        if args:
            return (self.received, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.received}

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch, finish: Finish | None = None) -> Tensor:
        """Hidden states for the next stage; on the last one the output of `finish`.

        hidden [batch, seq, hidden]: output of the stage before, of this rank's columns (cp, sp); the first
        stage ignores it. micro_batch: this rank's columns (cp). finish: None for the stage's own, the loss.
        """
        self.received = hidden
        with noise.adding(self.model, self.anatomy, micro_batch.noise if self.first else None):
            out = body_forward(
                self.model,
                self.anatomy,
                micro_batch,
                None if self.first or hidden is None else hidden.detach(),
            )
        self.received = None
        if not self.last:
            return out
        return (finish or self.finish)(self.model, self.anatomy, out, micro_batch)


class Held:
    """Passes of a rank's stages whose activations it holds: begun, but for the gradients of weights."""

    def __init__(self) -> None:
        self.now, self.most = 0, 0

    def add(self, passes: int) -> None:
        self.now += passes
        self.most = max(self.most, self.now)


class _ZeroStage(PipelineStage):
    """torch's stage, for every ZeRO stage: torch's own keeps parameters gathered and gradients unsharded
    until the step ends, which is ZeRO-1.

    zero: ZeRO stage; the other arguments are PipelineStage's.
    """

    def __init__(self, zero: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.zero, self.held = zero, Held()
        self.add_up: Callable[[], None] = lambda: None  # of gradients, after a backward that runs no hooks

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self.held.add(1)
        with measured("forward", Pass("F", self.stage_index, fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with measured("backward", Pass("B" if full_backward else "I", self.stage_index, bwd_chunk_id)):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.held.add(-full_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        with measured("backward", Pass("W", self.stage_index, bwd_chunk_id)):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)
            _lay_out(self.submod)
            self.add_up()
            zero.accumulate_gradients(self.submod)
        self.held.add(-1)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False
    ) -> Any:
        """Run one micro-batch's backward. Under ZeRO-2 and -3 each reduce-scatters its gradients, and the
        step's last one (`last_backward`) all-reduces the shards over replicas; below, as torch does.
        """
        root = self.submod
        if "input_values" in bwd_kwargs:
            # The micro-batch is an input too, and torch 2.11 asks each whether it requires a gradient.
            tensors = [value for value in bwd_kwargs["input_values"] if isinstance(value, Tensor)]
            bwd_kwargs = bwd_kwargs | {"input_values": tensors}
        if self.zero < 2 or not isinstance(root, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "zero-bubble schedules are refused with ZeRO-2 and -3"
        compat.finish_each_backward(root)
        root.set_is_last_backward(True)
        root.set_requires_gradient_sync(True)
        root.set_requires_all_reduce(last_backward)
        root.set_reshard_after_backward(self.zero == 3 or last_backward)
        from torch.distributed.pipelining._backward import stage_backward  # private: see compat.INSIDES

        passed = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        return stage_backward(*passed), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.zero < 2 or not isinstance(self.submod, FSDPModule):
            super().perform_reduce_grad(grad_scale_factor)
        else:
            zero.reshard(self.submod)

    def start_gradient_reduction(self) -> None:
        """The same in two parts, which schedules of several stages call since torch 2.15."""
        if self.zero < 2:
            super().start_gradient_reduction()  # pyright: ignore[reportAttributeAccessIssue]

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        if self.zero < 2:
            super().wait_for_gradient_reduction(grad_scale_factor)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            zero.reshard(self.submod)


def _lay_out(stage: nn.Module) -> None:
    """Give gradients the strides of their parameters, as a whole backward does and fused updates expect."""
    for parameter in stage.parameters():
        if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)


class Pipeline:
    """The stages of this rank, run by the schedule of `world.layout`.

    stages: of this rank, by ascending index. dtype: of the hidden states that are sent between stages.
    """

    def __init__(self, stages: Sequence[Stage], world: World, dtype: torch.dtype) -> None:
        layout = world.layout
        compat.check_pipelining(layout.schedule, split=layout.schedule in ZERO_BUBBLE)
        self.stages, self.world, self.dtype = list(stages), world, dtype
        self.rank_of_stage = {
            stage: rank
            for rank in range(layout.pp)
            for stage in stage_of_rank(layout.schedule, layout.pp, layout.virtual_stages, rank)
        }
        self.has_first = any(stage.first for stage in stages)
        self.has_last = any(stage.last for stage in stages)
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._scale, self._held = 1.0, Held()

    # Training #

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], scale: float, add_up: Callable[[], None]
    ) -> Tensor:
        """Leave the gradients of (sum of the losses) · scale on the parameters.

        Returns that number, a scalar: 0 on ranks without the last stage. micro_batches: this rank's columns
        (cp), the same number on every pp rank. add_up: called after each backward for weights only, which
        runs no hooks of their gradients. Raises ValueError if the micro-batches have several shapes.
        """
        shapes = {tuple(micro_batch.input_ids.shape) for micro_batch in micro_batches}
        if len(shapes) > 1:
            raise ValueError(f"Micro-batches of one step have {len(shapes)} shapes: {sorted(shapes)}.")
        (shape,) = shapes
        schedule = self._schedule(len(micro_batches), *shape)
        self._scale, self._held = scale, Held()
        for stage in self._torch_stages(schedule):
            stage.has_backward, stage.add_up, stage.held = True, add_up, self._held
            stage.clear_runtime_states()
        losses: list[Tensor] = []
        schedule._step_microbatches(
            [(micro_batch.input_ids,) for micro_batch in micro_batches] if self.has_first else None,
            [{"micro_batch": micro_batch} for micro_batch in micro_batches],
            [None] * len(micro_batches) if self.has_last else None,
            losses,
            return_outputs=False,
        )
        if not losses:
            return torch.zeros((), device=self.world.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def in_flight(self) -> float:
        """The most micro-batches whose activations this rank held at once in the last step."""
        return self._held.most / len(self.stages)

    def receive_buffers(self) -> list[Tensor]:
        """Buffers that hidden states and their gradients are received in, made in the first step."""
        infos = (
            info
            for schedule in self._schedules.values()
            for stage in self._torch_stages(schedule)
            for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in received
        )
        return [info.buffer for info in infos if isinstance(getattr(info, "buffer", None), Tensor)]

    @staticmethod
    def _torch_stages(schedule: Any) -> list[Any]:
        return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages

    def _schedule(self, number: int, rows: int, width: int) -> Any:
        """torch's schedule for `number` micro-batches of `rows` rows of `width` columns (after cp).

        Kept until another number or shape is asked for.
        """
        key = number, rows, width
        if key not in self._schedules:
            self._schedules.clear()  # each has receive buffers of one shape
            layout = self.world.layout
            hidden = self._hidden_buffer(rows, width, "meta").requires_grad_()
            ids = torch.empty(rows, width, dtype=torch.int64, device="meta")
            loss = torch.empty((), dtype=torch.promote_types(self.dtype, torch.float32), device="meta")
            torch_stages = [
                _ZeroStage(
                    layout.zero, stage, stage.index, stage.of, self.world.device, group=self.world.pp.group,
                    input_args=(ids if stage.first else hidden,),
                    output_args=(loss.requires_grad_() if stage.last else hidden,),
                )
                for stage in self.stages
            ]  # fmt: skip
            schedule = get_schedule_class(TORCH_SCHEDULES[layout.schedule])
            stages: Any = torch_stages if issubclass(schedule, PipelineScheduleMulti) else torch_stages[0]
            self._schedules[key] = schedule(stages, number, loss_fn=self._scaled, scale_grads=False)
        return self._schedules[key]

    def _scaled(self, loss: Tensor, _: Any) -> Tensor:
        return loss * self._scale

    def _hidden_buffer(self, rows: int, width: int, device: torch.device | str) -> Tensor:
        """Allocate an empty [rows, width (/ tp with sp), hidden_size] for what a stage receives or sends.

        width: columns of this rank, after cp.
        """
        layout, first = self.world.layout, self.stages[0]
        size = first.model.config.get_text_config().hidden_size
        return torch.empty(
            rows, width // (layout.tp if layout.sp else 1), size, dtype=self.dtype, device=device
        )

    # Without gradients #

    @torch.no_grad()
    def forward_only(self, micro_batches: Sequence[MicroBatch], finish: Finish) -> list[Tensor] | None:
        """Output of `finish` for each micro-batch on the rank of the last stage; None on the others.

        micro_batches: this rank's columns (cp), the same number on every pp rank; their shapes may differ.
        With pp of them or more, all ranks work at once.

        Stage s runs micro-batch m in tick s + m. One exchange after each tick moves all hidden states, so
        ranks can't wait for each other in a circle.
        """
        outputs, number = [], len(micro_batches)
        inputs: dict[tuple[int, int], Tensor] = {}  # (stage, micro-batch) -> hidden states
        for tick in range(self.stages[0].of + number - 1):
            messages = []
            for stage in self.stages:
                if (at := tick - stage.index) not in range(number):
                    continue
                out = stage(inputs.pop((stage.index, at), None), micro_batches[at], finish)
                following = stage.index + 1
                if stage.last:
                    outputs.append(out)
                elif self.rank_of_stage[following] == self.world.pp.index:
                    inputs[following, at] = out
                else:
                    messages.append(self._message(dist.isend, out.contiguous(), following))
            for stage in self.stages:
                before, at = stage.index - 1, tick + 1 - stage.index
                if stage.first or at not in range(number):
                    continue
                if self.rank_of_stage[before] != self.world.pp.index:
                    rows, width = micro_batches[at].input_ids.shape
                    inputs[stage.index, at] = self._hidden_buffer(rows, width, self.world.device)
                    messages.append(self._message(dist.irecv, inputs[stage.index, at], before))
            if messages:
                _exchange(messages)
        return outputs if self.has_last else None

    def _message(self, operation: Callable[..., Any], hidden: Tensor, stage: int) -> dist.P2POp:
        """dist.isend or dist.irecv of hidden states, to or from the rank of another stage."""
        return dist.P2POp(operation, hidden, self._global_rank(stage), self.world.pp.group)

    def _global_rank(self, stage: int) -> int:
        assert self.world.pp.group is not None
        return dist.get_global_rank(self.world.pp.group, self.rank_of_stage[stage])

    # Tied embeddings #

    def reduce_tied(self, gradients: Callable[[frozenset[str] | None], Mapping[str, Tensor]]) -> None:
        """Give both copies of a tied embedding, on the first and the last stage, the sum of their gradients.

        gradients: names -> this rank's shards of their gradients by name, changed in place. Nothing if no
        embedding is tied, or if it is frozen.
        """
        last = self.stages[-1]
        if last.tied is not None:
            copy, original = last.tied
        elif self.stages[0].shares_embedding:
            copy, original = None, f"{self.stages[0].anatomy.embed}.weight"
        else:
            return
        here = frozenset(name for name in (copy, original) if name)
        copies = list(gradients(here).values())
        if not copies:  # frozen
            return
        if len(copies) == 2:
            copies[0] += copies[1]
            copies[1].copy_(copies[0])
            return
        peer = self._global_rank(0 if copy else last.of - 1)
        received, group = torch.empty_like(copies[0]), self.world.pp.group
        _exchange(
            [dist.P2POp(dist.isend, copies[0], peer, group), dist.P2POp(dist.irecv, received, peer, group)]
        )
        copies[0] += received


def _exchange(messages: list[dist.P2POp]) -> None:
    """Send and receive, and wait. Afterwards nothing holds what was sent: a handle would."""
    for work in dist.batch_isend_irecv(messages):
        work.wait()
