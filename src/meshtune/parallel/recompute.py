"""Recompute activations in the backward instead of keeping them: `Layout.recompute`, block by block, in the
first `Layout.recompute_blocks` of each stage.

    none       keep everything
    attention  keep query, key and value; run the attention core again
    selective  keep the outputs of matmuls and of attention; run the cheap rest of each block again
    linear     keep each block's input and the outputs of attention; run the rest again, matmuls included
    full       keep each block's input; run the whole block again
    offload    the same; offload.py moves the inputs to host memory

Gradients are the same in every mode: the generators' states are restored before a block runs again, so
dropout repeats exactly, and experts are not chosen again (experts/choices.py). Names of modules and
parameters stay what they are.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from meshtune.data.batch import MicroBatch
from meshtune.experts.choices import keep_choices, with_choices
from meshtune.experts.products import experts_of
from meshtune.layout import RECOMPUTATIONS, Recomputation
from meshtune.meter.clock import recomputing
from meshtune.model.anatomy import Anatomy
from meshtune.model.body import ATTENTION_NAMES
from meshtune.model.documents import current_documents, documents_of
from meshtune.model.lora import lora_layers

# FSDP2's hooks on experts, inside a block, mark their time more often where it runs again: selective
# checkpointing would miss those operations of the forward.
SAC_IGNORED_OPS.update({
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
})  # fmt: skip


def recompute_blocks(
    model: PreTrainedModel, anatomy: Anatomy, mode: str, numbers: Collection[int] | None = None
) -> None:
    """Make blocks of `model` recompute activations in their backward by `mode`. In place; call it once.

    mode: one of RECOMPUTATIONS, as above. numbers: of the blocks that do; None: all.
    `attention` is always of all.
    Call it before blocks are sharded, so that the hooks of sharding are outside the recomputed part.
    Raises ValueError for an unknown mode, or for `attention` with a model that does not run meshtune's
    attention.
    """
    match mode:
        case "none":
            pass
        case "attention":
            _recompute_attention(model)
        case "selective" | "linear" | "full" | "offload":
            _recompute_each_block(model, anatomy, numbers, RECOMPUTATIONS[mode])
        case _:
            raise ValueError(f"recompute={mode!r} is none of {', '.join(RECOMPUTATIONS)}.")


_inside = ContextVar("_inside", default=False)


def inside_tile() -> bool:
    """True where a tile of an MLP runs forward (tiles.py): nothing of it is kept for a backward."""
    return _inside.get()


@contextmanager
def in_tile() -> Iterator[None]:
    """Run a tile's forward in it."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def _policy(saved: Collection[str], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = str(op) in saved and not inside_tile()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute_attention(model: PreTrainedModel) -> None:
    if model.config._attn_implementation not in ATTENTION_NAMES:
        raise ValueError(
            f"recompute=attention needs model.attention=meshtune, not {model.config._attn_implementation}; "
            "recompute=selective and full work with any."
        )
    model.set_attn_implementation(ATTENTION_NAMES[1])


def _recompute_each_block(
    model: nn.Module,
    anatomy: Anatomy,
    numbers: Collection[int] | None,
    mode: Recomputation,
) -> None:
    """Make the forward of the blocks `numbers` (None: all) run under torch's checkpoint, in place."""
    options: dict[str, Any] = {}
    if mode.keeps:  # else only the block's inputs
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, mode.keeps))
    for number, block in enumerate(model.get_submodule(anatomy.blocks).children()):
        if numbers is None or number in numbers:
            # A partial of the bound method, no closure: a deep copy of the model then runs its own blocks.
            checkpointed = _with_its_documents if anatomy.mixers else _checkpointed
            if any(experts_of(block)):
                keep_choices(block)
                checkpointed = partial(_with_its_experts, checkpointed)
            block.forward = partial(checkpointed, block.forward, options)  # type: ignore[method-assign]
            for layer in lora_layers(block).values():
                layer.lora_fuses = False  # a product and what it is added to would both be kept, or live
                # Outputs of matmuls that are kept may not change.
                layer.lora_in_place &= not mode.keeps_matmuls


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` under torch's checkpoint with its `options`; without gradients, call it plainly."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    again = partial(_measured, forward)
    return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=True, **options, **kwargs)


def _measured(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`; its time is recomputation's where a backward calls it."""
    with recomputing():
        return forward(*args, **kwargs)


def _with_its_experts(
    checkpointed: Callable[..., Any], forward: Callable[..., Any], options: Any, *args: Any, **kwargs: Any
) -> Any:
    """`checkpointed` for blocks with experts, which each token keeps in the backward."""
    return checkpointed(partial(with_choices, [], forward), options, *args, **kwargs)


def _with_its_documents(
    forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """`_checkpointed` for blocks with mixers, which know their documents by `documents_of`, also later, in a
    backward. The compiler can't go through it.
    """
    again = partial(_of_documents, current_documents(), forward)
    return _checkpointed(again, options, *args, **kwargs)


def _of_documents(batch: MicroBatch | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with documents_of(batch):
        return forward(*args, **kwargs)
