"""torch's own ways to train on several ranks, which benchmarks/parallel.py compares meshtune's layouts with.

Each takes a model and the world, and gives the module that holds the parameters of this rank, and what leaves
a batch's gradients on them.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from meshtune.data.batch import Batch, MicroBatch
from meshtune.model.anatomy import anatomy
from meshtune.model.body import body_forward
from meshtune.parallel.mesh import World
from meshtune.parallel.zero import local
from meshtune.train.loss import head_loss

# A batch -> this rank's share of its loss; the batch's gradients are then in the parameters' .grad.
Gradients = Callable[[Batch], Tensor]


class Whole(nn.Module):
    """A model and meshtune's loss in one forward, as DDP and FSDP2 want their root.

    Its forward returns the sum of a micro-batch's token losses.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.anatomy = anatomy(model)  # pyright: ignore[reportArgumentType]

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.anatomy.blocks).children())

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        hidden = body_forward(self.model, self.anatomy, micro_batch)
        return head_loss(self.model, self.anatomy, hidden, micro_batch)


def accumulated(
    loss_of: Callable[[MicroBatch], Tensor],
    batch: Batch,
    *,
    times: float = 1,
    around: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext(),
) -> Tensor:
    """Run forward and backward of every micro-batch; return this rank's share of the batch's loss.

    loss_of: sum of a micro-batch's token losses, which is divided by the batch's label tokens. times: factor
    of gradients, not of the loss returned. around(last): context of each micro-batch; last: is it the last?
    """
    total = torch.zeros(())
    for number, micro_batch in enumerate(batch.micro_batches, 1):
        with around(number == len(batch.micro_batches)):
            loss = loss_of(micro_batch) / batch.label_tokens
            (loss * times).backward()
        total += local(loss.detach())
    return total


def ddp(model: nn.Module, world: World) -> tuple[nn.Module, Gradients]:
    wrapped = DistributedDataParallel(Whole(model), gradient_as_bucket_view=True)

    def around(last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else wrapped.no_sync()

    return wrapped, partial(accumulated, wrapped, times=world.size, around=around)  # it averages


def fsdp(model: nn.Module, world: World) -> tuple[nn.Module, Gradients]:
    whole = Whole(model)
    for block in whole.blocks:
        fully_shard(block)
    fully_shard(whole)
    return whole, partial(accumulated, whole, times=world.size)  # it averages


def styles(model: nn.Module, world: World) -> tuple[nn.Module, Gradients]:
    """Tensor and sequence parallel by torch's parallelize_module, in place, for a Llama.

    Returns the model and its function from a batch to this rank's share of the loss.
    """
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # one warning per clipping
    outside = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    gathered = {"desired_input_layouts": (Replicate(),), "input_layouts": (Shard(1),)}
    inside = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(**gathered),
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    llama: Any = model
    mesh: Any = world.mesh
    parallelize_module(model, mesh["tp"], outside)
    for block in llama.model.layers:
        parallelize_module(block, mesh["tp"], inside)
    if llama.config.tie_word_embeddings:  # which parallelize_module has untied
        llama.lm_head.weight = llama.model.embed_tokens.weight

    def loss_of(micro_batch: MicroBatch) -> Tensor:
        logits = llama(
            input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids, use_cache=False
        ).logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), micro_batch.labels.flatten(), reduction="sum"
        )

    def gradients(batch: Batch) -> Tensor:
        total = accumulated(loss_of, batch, around=lambda last: loss_parallel())
        return total / world.size  # every rank has the whole loss

    return model, gradients


def by_hand(
    model: nn.Module, world: World, *, flat: bool = True, overlap: bool = True, once: bool = True
) -> tuple[nn.Module, Gradients]:
    """Data parallel in a few lines, with three savings that can be switched off.

    flat: True: one all_reduce for each block and one for the rest; False: one for each parameter. overlap:
    True: an all_reduce starts as soon as the backward pass has its gradients; False: after the pass. once:
    True: only the last micro-batch's gradients, with the sums of the earlier ones, are reduced; False: those
    of each micro-batch. Returns the module that holds the parameters, and its `Gradients`.
    """
    whole = Whole(model)
    blocks = [list(block.parameters()) for block in whole.blocks]
    inside = set(itertools.chain(*blocks))
    groups = [*blocks, [p for p in whole.parameters() if p not in inside]]
    if not flat:
        groups = [[parameter] for group in groups for parameter in group]
    missing: Counter[int] = Counter()  # gradients by group, of the pass at hand
    sent: list[tuple[list[nn.Parameter], Tensor, Any]] = []
    sums: dict[nn.Parameter, Tensor] = {}

    def send(group: list[nn.Parameter]) -> None:
        gradients = [p.grad for p in group if p.grad is not None]
        message = torch.cat([g.flatten() for g in gradients]) if len(group) > 1 else gradients[0].flatten()
        sent.append((group, message, dist.all_reduce(message, async_op=True)))

    def arrived(index: int, _: nn.Parameter) -> None:
        missing[index] -= 1
        if missing[index] == 0 and overlap:
            send(groups[index])

    def finish() -> None:
        for group in [] if overlap else groups:
            send(group)
        for group, message, work in sent:
            work.wait()
            for parameter, piece in zip(group, message.split([p.numel() for p in group]), strict=True):
                shaped = piece.view_as(parameter)
                sums[parameter] = sums[parameter].add_(shaped) if parameter in sums else shaped
                parameter.grad = None
        sent.clear()

    for index, group in enumerate(groups):
        for parameter in group:
            parameter.register_post_accumulate_grad_hook(partial(arrived, index))

    def gradients(batch: Batch) -> Tensor:
        total = torch.zeros(())
        for number, micro_batch in enumerate(batch.micro_batches, 1):
            sends = number == len(batch.micro_batches) or not once
            for index, group in enumerate(groups):
                missing[index] = len(group) if sends else -1  # -1: never comes to 0
            loss = whole(micro_batch) / batch.label_tokens
            loss.backward()
            total += loss.detach()
            if sends:
                finish()
        for parameter, gradient in sums.items():
            parameter.grad = gradient
        sums.clear()
        return total

    return whole, gradients
