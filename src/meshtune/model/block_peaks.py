"""Most bytes that the passes of a block hold at once, traced on meta, where attention writes its scores.

    text_forward ──> arguments of the last block ──> forward, forward and backward of it alone ──> BlockPeaks

Only storages that `TOKENS` divides count: gradients of weights do not.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import PreTrainedModel

from meshtune.model.anatomy import Anatomy
from meshtune.model.body import text_forward
from meshtune.placement.census import BlockPeaks

KEYS = 2048  # a token, by which the fullest time is chosen: bytes of scores grow with them


class LivingBytes(TorchDispatchMode):
    """Follow the storages that operations allocate while it is active, and the most that live at once."""

    def __init__(self, tokens: int, held: int = 0) -> None:
        """held: bytes that live from the start."""
        super().__init__()
        self.tokens = tokens
        self.known: set[int] = set()  # storages that live
        self.living = (held / tokens, 0.0)  # bytes (per token, per token and key)
        self.most = self.living

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage(), given)
        if _at(self.living) > _at(self.most):
            self.most = self.living
        return out

    def _follow(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        """Count a storage until it is freed; those in `given` existed before the operation."""
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self.known or size % self.tokens:
            return
        of_scores = size % self.tokens**2 == 0
        change = (0.0, size / self.tokens**2) if of_scores else (size / self.tokens, 0.0)
        self.known.add(key)
        self._add(change, 1)
        weakref.finalize(storage, self._free, key, change)

    def _free(self, key: int, change: tuple[float, float]) -> None:
        self.known.discard(key)
        self._add(change, -1)

    def _add(self, change: tuple[float, float], sign: int) -> None:
        self.living = (self.living[0] + sign * change[0], self.living[1] + sign * change[1])


def block_peaks(
    model: PreTrainedModel, parts: Anatomy, inputs: Mapping[str, Tensor], tokens: int
) -> BlockPeaks:
    """Trace the passes of the model's last block. inputs: of its forward, with one row of `tokens`."""
    block = list(model.get_submodule(parts.blocks).children())[-1]
    calls: list[Any] = []
    dtype = next(block.parameters()).dtype
    hook = block.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    with torch.device("meta"), torch.no_grad():
        text_forward(model, **{name: _in_dtype(value, dtype) for name, value in inputs.items()})
        hook.remove()
        given, spec = tree_flatten(calls[0])
        args, kwargs = tree_unflatten(given, spec)
        with LivingBytes(tokens, given[0].nbytes) as alone:
            out = block(*args, **kwargs)
    # Beside the hidden states: what all blocks are given (a mask), what the block before returned.
    shared, returned = _scores(given[1:], tokens), _scores(tree_leaves(out)[1:], tokens)
    del out
    given[0] = given[0].detach().requires_grad_()
    args, kwargs = tree_unflatten(given, spec)
    with torch.device("meta"), LivingBytes(tokens, given[0].nbytes) as saving:
        out = tree_leaves(block(*args, **kwargs))[0]
        forward, saving.most = saving.most, saving.living
        edge, gradient = get_gradient_edge(out), torch.empty_like(out)
        del out  # the next block holds it no more
        torch.autograd.backward([edge], [gradient])
    for parameter in block.parameters():
        parameter.grad = None
    return BlockPeaks(
        forward=(forward[0], forward[1] + shared),
        forward_alone=(alone.most[0], alone.most[1] + shared + returned),
        backward=saving.most,
    )


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in the dtype of the block, as a run has it; token ids as they are."""
    return value.to(dtype) if value.is_floating_point() else value


def _scores(values: list[Any], tokens: int) -> float:
    """Bytes per token and key of the tensors among `values` that grow with both."""
    sizes = [value.untyped_storage().nbytes() for value in values if isinstance(value, Tensor)]
    return sum(size / tokens**2 for size in sizes if size % tokens**2 == 0)


def _at(size: tuple[float, float]) -> float:
    return size[0] + KEYS * size[1]
