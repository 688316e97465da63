"""Most bytes that the passes of a block hold at once, traced on meta.

    text_forward ──> arguments of the last block ──> forward, forward and backward of it alone ──> BlockPeaks

Storages that `TOKENS` divides grow with the tokens; the others are gradients of weights.
"""

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import AttentionInterface, PreTrainedModel

from meshtune.model.anatomy import Anatomy
from meshtune.model.body import text_forward
from meshtune.model.fused import (
    STAND_IN,
    FusedAttention,
    FusedDropout,
    experts_without_values,
    flash_attention,
)
from meshtune.placement.census import BlockPeaks

KEYS = 2048  # a token, by which the fullest time is chosen: bytes of scores grow with them
Size = tuple[float, float, float]  # bytes per token, per token and key, and of what does not grow with them
NOTHING: Size = (0.0, 0.0, 0.0)


class LivingBytes(TorchDispatchMode):
    """Follow the storages that operations allocate while it is active, and the most that live at once."""

    def __init__(self, tokens: int, rows: int = 1) -> None:
        """tokens: of each row."""
        super().__init__()
        self.rows, self.tokens = rows, tokens
        self.known: set[int] = set()  # storages that live
        self.living = NOTHING
        self.most = self.living
        self.fullest: list[Size] = []  # those times that no other one exceeds in every size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage(), given)
        self.most = max(self.most, self.living, key=_at)
        if not any(_covers(other, self.living) for other in self.fullest):
            self.fullest = [other for other in self.fullest if not _covers(self.living, other)]
            self.fullest.append(self.living)
        return out

    def size(self, storage: torch.UntypedStorage) -> Size:
        """Size of a storage."""
        of_token, rest = divmod(storage.nbytes(), self.tokens)
        if rest:
            return (0.0, 0.0, storage.nbytes())
        of_key, rest = divmod(of_token, self.tokens)
        return (of_token / self.rows, 0.0, 0.0) if rest else (0.0, of_key / self.rows, 0.0)

    def _follow(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        """Count a storage until it is freed; those in `given` existed before the operation."""
        key, size = storage._cdata, self.size(storage)
        if key in given or key in self.known:
            return
        self.known.add(key)
        self.living = _sum(self.living, size)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: Size) -> None:
        self.known.discard(key)
        self.living = _sum(self.living, size, -1)


class SavingBytes(LivingBytes):
    """Follow also what autograd saves in one forward, by its hooks, and needs in the backward."""

    def __init__(self, tokens: int, rows: int) -> None:
        super().__init__(tokens, rows)
        self.saved: set[int] = set()  # storages
        self.when_saved = NOTHING  # the most that had lived when the last tensor was saved
        self.when_needed: Size | None = None  # that lived when the first one was needed; None: none was

    def pack(self, tensor: Tensor) -> Tensor:
        self.saved.add(tensor.untyped_storage()._cdata)
        self.when_saved = self.most
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        self.when_needed = self.when_needed or self.living
        return tensor


def block_peaks(
    model: PreTrainedModel, parts: Anatomy, inputs: Mapping[str, Tensor], rows: int, tokens: int
) -> BlockPeaks:
    """Trace the passes of the model's last block. inputs: of its forward, `rows` of `tokens`.

    Registers the attention function STAND_IN anew.
    """
    block = list(model.get_submodule(parts.blocks).children())[-1]
    calls: list[Any] = []
    dtype = next(block.parameters()).dtype
    hook = block.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    AttentionInterface.register(STAND_IN, flash_attention)
    with ExitStack() as stack:
        stack.callback(hook.remove)
        modes = (
            torch.device("meta"),
            FusedDropout(),
            FusedAttention(flash_attention),
            experts_without_values(),
        )
        for mode in modes:
            stack.enter_context(mode)
        with torch.no_grad():
            text_forward(model, **{name: _in_dtype(value, dtype) for name, value in inputs.items()})
            given, spec = tree_flatten(calls.pop())
            args, kwargs = tree_unflatten(given, spec)
            with LivingBytes(tokens, rows) as alone:
                out = block(*args, **kwargs)
        hidden = alone.size(given[0].untyped_storage())
        # Beside hidden states: what all blocks are given (a mask), what the block before returned.
        masks, returned = (_scores(values[1:], alone) for values in (given, tree_leaves(out)))
        del out
        given[0] = given[0].detach().requires_grad_()
        args, kwargs = tree_unflatten(given, spec)
        stack.enter_context(saving := SavingBytes(tokens, rows))
        with saved_tensors_hooks(saving.pack, saving.unpack):
            out = tree_leaves(block(*args, **kwargs))[0]
        forward = saving.most
        edge, gradient = get_gradient_edge(out), torch.empty_like(out)
        del out  # the next block holds it no more
        started = saving.living
        kept = _sum(started, hidden, -1)  # without the gradient
        saving.fullest = [started]
        torch.autograd.backward([edge], [gradient])
    trained = [parameter for parameter in block.parameters() if parameter.grad is not None]
    gradients = sum(parameter.nbytes for parameter in trained)
    for parameter in trained:
        parameter.grad = None
    beside = [_sum(size, kept, -1) for size in saving.fullest]
    # A second forward runs when the first saved tensor is needed, and ends once the last one has been saved.
    again = _sum(saving.when_saved, _sum(saving.when_needed or started, started, -1))
    return BlockPeaks(
        forward=_sum(forward, kept, -1)[:2],
        forward_again=_sum(again, kept, -1)[:2],
        forward_alone=_sum(_sum(alone.most, hidden), (0.0, returned, 0.0))[:2],
        # What is left below zero is no gradient: the forward saved it, whatever the number of tokens.
        backward=tuple(
            (token, key, max(made, 0.0) / gradients if gradients else 0.0) for token, key, made in beside
        ),
        masks=masks,
        saves_input=given[0].untyped_storage()._cdata in saving.saved,
    )


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in the dtype of the block, as a run has it; token ids as they are."""
    return value.to(dtype) if value.is_floating_point() else value


def _scores(values: list[Any], meter: LivingBytes) -> float:
    """Bytes per token and key of the tensors among `values` that grow with both."""
    return sum(meter.size(value.untyped_storage())[1] for value in values if isinstance(value, Tensor))


def _sum(size: Size, other: Size, sign: int = 1) -> Size:
    per_token, per_key, fixed = (mine + sign * its for mine, its in zip(size, other, strict=True))
    return (per_token, per_key, fixed)


def _covers(size: Size, other: Size) -> bool:
    return all(mine >= its for mine, its in zip(size, other, strict=True))


def _at(size: Size) -> float:
    return size[0] + KEYS * size[1]
