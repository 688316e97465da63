"""Deriving Kept: one forward on the meta device, where autograd says what it would keep for its backward.

    pack hook of autograd ──> storage, once each ──> (block that runs, part of it that runs) ──> Kept

Bytes are those of whole storages, as memory is: values that are a view of a fused projection keep all of
it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel

from meshtune.model.anatomy import Anatomy, anatomy
from meshtune.model.lora import adapt
from meshtune.placement.census import Kept

STAND_IN = "meshtune_census"  # the attention that a model to be traced is built with
TOKENS = 251  # of the forward; a prime that divides no size of a model: copies of weights are recognised
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by element size
PARTS = ("outside", "inside", "entering", "core")  # what several parts save counts with the last of them


def kept_by_blocks(
    model: PreTrainedModel,
    frozen: Collection[str],
    adapters: Mapping[str, int],
    inputs: Mapping[str, Tensor],
) -> dict[str, tuple[tuple[int, Kept], ...]]:
    """(element size, what it keeps) of each block, by the block's path; a size that its forward refuses is
    left out.

    The model is on meta, built with the attention STAND_IN, and changed: it gets its adapters (LoRA rank by
    module), and parameters named in `frozen` no gradient. inputs: of its forward, TOKENS long. Raises as
    `anatomy`.
    """
    parts = anatomy(model)
    for module, rank in adapters.items():
        adapt(model.get_submodule(module), rank, alpha=rank)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    found: dict[str, list[tuple[int, Kept]]] = {}
    for size, dtype in DTYPES.items():
        model.to(dtype)  # pyright: ignore[reportArgumentType]
        try:
            saved = _saved(model, parts, inputs)
        except Exception:  # each family has its own ways to refuse a type
            continue
        for block, _ in model.get_submodule(parts.blocks).named_children():
            path = f"{parts.blocks}.{block}"
            kept = Kept(**{part: saved[path, part] / TOKENS for part in PARTS})
            found.setdefault(path, []).append((size, kept))
    return {path: tuple(sizes) for path, sizes in found.items()}


def _saved(model: PreTrainedModel, parts: Anatomy, inputs: Mapping[str, Tensor]) -> Counter[tuple[str, str]]:
    """Bytes by (path of block, part) that one forward saves."""
    keeper = Keeper(model)
    AttentionInterface.register(STAND_IN, keeper.attention)
    with (
        keeper.watching(model, parts),
        saved_tensors_hooks(keeper.save, lambda tensor: tensor),
        torch.device("meta"),
        FusedDropout(),
    ):
        model(**inputs, use_cache=False)
    return keeper.bytes()


class Keeper:
    """Notes storages that are saved; of each, the block that saved it first and its part."""

    def __init__(self, model: nn.Module) -> None:
        self.block = ""  # that runs
        self.part = "outside"
        self.entered: set[int] = set()  # what attention and MLP of this block were given
        self.saved: dict[int, tuple[str, str, int]] = {}  # by storage: block, part, bytes
        self.log_sums: Counter[str] = Counter()  # bytes by block
        self.alive: dict[int, torch.UntypedStorage] = {}  # an id is only unique among the living
        self.shared = {self._key(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def bytes(self) -> Counter[tuple[str, str]]:
        found = Counter({(block, "core"): size for block, size in self.log_sums.items()})
        for block, part, size in self.saved.values():
            if size % TOKENS == 0:
                found[block, part] += size
        return found

    def save(self, tensor: Tensor) -> Tensor:
        entering = self.part == "inside" and self._key(tensor) in self.entered
        self._note(tensor, "entering" if entering else self.part)
        return tensor

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Saves what flash kernels do; [batch, heads, tokens, size] in, [batch, tokens, heads, size] out."""
        batch, heads, tokens, _ = query.shape
        # Kernels write in the queries' order; with heads before tokens, the last matrix takes a copy.
        first, second = (1, 2) if query.stride(1) > query.stride(2) else (2, 1)
        shape = (batch, query.shape[first], query.shape[second], value.shape[-1])
        out = query.new_empty(shape).transpose(1, first)
        if any(tensor.requires_grad for tensor in (query, key, value)):
            out.requires_grad_()
            for tensor in (query, key, value, out):
                self._note(tensor, "core")
            self.log_sums[self.block] += 4 * batch * heads * tokens
        return out.transpose(1, 2), None

    @contextmanager
    def watching(self, model: nn.Module, parts: Anatomy) -> Iterator[None]:
        """Meanwhile `block` and `part` say what runs."""
        with ExitStack() as stack:

            def on(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> None:
                before = module.register_forward_pre_hook(enter, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(leave).remove)

            for name, block in model.get_submodule(parts.blocks).named_children():
                on(block, self._enter_block(f"{parts.blocks}.{name}"), self._leave_block)
                for path in filter(None, (parts.attention, parts.mlp)):
                    on(block.get_submodule(path), self._enter_part, self._leave_part)
            yield

    def _enter_block(self, path: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.block = path
            hidden, *rest = tree_leaves((args, kwargs))
            # What blocks are given beside hidden states (rotary tables, a mask) is made once for all of them.
            self.shared |= {self._key(x) for x in rest if isinstance(x, Tensor)} - {self._key(hidden)}

        return enter

    def _leave_block(self, *_: Any) -> None:
        self.block = ""

    def _enter_part(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.part = "inside"
        self.entered = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}

    def _leave_part(self, *_: Any) -> None:
        self.part = "outside"

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.alive[storage._cdata] = storage
        return storage._cdata

    def _note(self, tensor: Tensor, part: str) -> None:
        key = self._key(tensor)
        block, old, size = self.saved.get(key, (self.block, part, self.alive[key].nbytes()))
        if key not in self.shared or key in self.saved:
            self.saved[key] = (block, max(old, part, key=PARTS.index), size)


class FusedDropout(TorchFunctionMode):
    """Dropout as on a GPU, where the mask that it saves has one byte an element."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        return self._dropout(*args, **(kwargs or {}))

    @staticmethod
    def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x
