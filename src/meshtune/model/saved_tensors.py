"""Activation bytes that each block saves for its backward: one forward on meta under autograd's pack hook.

    pack hook of autograd ──> storage, once each ──> (running block, running part of it) ──> SavedBytes

Bytes are those of whole storages, as the allocator counts them: values that are a view of a fused projection
keep all of it in memory.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel

from meshtune.model.anatomy import Anatomy, anatomy
from meshtune.model.block_peaks import block_peaks
from meshtune.model.body import text_forward
from meshtune.model.ends import end_bytes
from meshtune.model.fused import (
    STAND_IN,
    FusedAttention,
    FusedDropout,
    experts_without_values,
    flash_attention,
)
from meshtune.model.lora import Adapters
from meshtune.model.positions import cast_position_tables
from meshtune.placement.census import BlockPeaks, EndBytes, SavedBytes

# Of a row of the forward; a prime that divides no size of a model, so that copies of weights are recognised
TOKENS = 251
AFTER = "after"
Inputs = Callable[[int, int], Mapping[str, Tensor]]  # (rows, tokens of each) -> inputs of a forward on meta
# (by the block's path, a (element size, bytes saved per token) for each element size; Census.ends)
Saved = tuple[dict[str, tuple[tuple[int, SavedBytes], ...]], tuple[tuple[int, EndBytes], ...]]
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by element size
# A tensor that several parts save counts in the last one.
PARTS = ("outside", "mlp", "attention", "entering", "whole", "core", "scores")


def saved_by_block(
    model: PreTrainedModel,
    frozen: Collection[str],
    adapters: Adapters,
    inputs: Inputs,
    rows: int = 1,
) -> Saved:
    """Return what the blocks and the ends of a model save.

    The element size is that of the compute dtype, from DTYPES; one that the forward refuses is left out. The
    model is on meta, built with the attention STAND_IN, and is changed: it gets `adapters`, only parameters
    named in `frozen` lose their gradient, and it stays in the last dtype. rows: of `inputs`. Raises as
    `anatomy`.
    """
    parts = anatomy(model)
    adapters.add_to(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    sizes_by_block: dict[str, list[tuple[int, SavedBytes]]] = {}
    ends: list[tuple[int, EndBytes]] = []
    for size, dtype in DTYPES.items():
        cast_parameters(model, dtype)
        try:
            per_token, tables = _saved_per_token(model, parts, inputs, rows)
            before = sum(per_token["", part] for part in PARTS)
            ends.append((size, end_bytes(model, parts, dtype, TOKENS, tables=tables, before=before)))
        except Exception:  # each family has its own ways to refuse a type
            continue
        peaks = None if parts.mixers else _peaks(model, parts, inputs, rows)
        for block, _ in model.get_submodule(parts.blocks).named_children():
            path = f"{parts.blocks}.{block}"
            saved = SavedBytes(**{part: per_token[path, part] for part in PARTS}, peaks=peaks)
            sizes_by_block.setdefault(path, []).append((size, saved))
    return {path: tuple(sizes) for path, sizes in sizes_by_block.items()}, tuple(ends)


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast what training casts: the parameters, and of the buffers tables of positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    cast_position_tables(model, dtype)


def _peaks(model: PreTrainedModel, parts: Anatomy, inputs: Inputs, rows: int) -> BlockPeaks | None:
    """Trace `SavedBytes.peaks`; None where the backward can't run on meta."""
    try:
        return block_peaks(model, parts, inputs(rows, TOKENS), rows, TOKENS)
    except Exception:  # each family has its own
        return None


def _saved_per_token(
    model: PreTrainedModel, parts: Anatomy, inputs: Inputs, rows: int
) -> tuple[defaultdict[tuple[str, str], float], float]:
    """Bytes saved per token, by (path of block, part of PARTS), and of tables that all blocks share.

    Recurrent mixers pad to whole chunks: two forwards of whole chunks then tell what a token adds. Not of one
    chunk: a dimension of size 1 lets transformers' scan keep views where it copies otherwise.
    """
    if not parts.mixers:
        found = _saved_storages(model, parts, inputs(rows, TOKENS))
        per_token = {key: size / (rows * TOKENS) for key, size in found.bytes(TOKENS).items()}
        # Tables are one row's here, where no positions are given
        return defaultdict(float, per_token), found.table_bytes(TOKENS) / TOKENS
    chunk = _chunk(model)
    few, many = (_saved_storages(model, parts, inputs(1, count * chunk)).bytes(1) for count in (2, 4))
    return defaultdict(float, {key: (size - few[key]) / (2 * chunk) for key, size in many.items()}), 0.0


def _chunk(model: PreTrainedModel) -> int:
    """Tokens of the chunks that recurrent mixers compute in, or a multiple; 64 where none is configured."""
    settings = model.config.get_text_config().to_dict()
    sizes = [
        size for name, size in settings.items() if "chunk_size" in name and isinstance(size, int) and size
    ]
    return math.lcm(64, *sizes)


def _saved_storages(model: PreTrainedModel, parts: Anatomy, inputs: Mapping[str, Tensor]) -> "SavedTensors":
    """Run one forward and record what it saves.

    Registers the attention function STAND_IN anew.
    """
    recorder = SavedTensors(model)
    AttentionInterface.register(STAND_IN, recorder.attention)
    with (
        recorder.watching(model, parts),
        saved_tensors_hooks(recorder.pack, lambda tensor: tensor),
        torch.device("meta"),
        FusedDropout(recorder.dropped),
        FusedAttention(recorder.attention),
        experts_without_values(),
    ):
        text_forward(model, **inputs)
    return recorder


class SavedTensors:
    """Record the storages that a forward saves, each once: in which block first, and in which part of it."""

    def __init__(self, model: nn.Module) -> None:
        self.block = ""  # path of the running block; "": before the first, AFTER: behind one
        self.part = "outside"  # of PARTS, that runs
        self.part_inputs: set[int] = set()  # storages given to the running attention or MLP
        self.of_dropout: set[int] = set()  # storages that dropout makes of them
        self.saved: dict[int, tuple[str, str, int]] = {}  # by storage: block, part, bytes
        self.alive: dict[int, torch.UntypedStorage] = {}  # an id is only unique among living objects
        self.shared = {self._key(tensor) for tensor in (*model.parameters(), *model.buffers())}  # not counted
        self.given: set[int] = set()  # storages that all blocks are given, beside hidden states
        self.tables: set[int] = set()  # those of them that are saved

    def bytes(self, tokens: int) -> Counter[tuple[str, str]]:
        """Sum the saved bytes of storages that `tokens`, a row's, divides, by (block, part); of scores per
        key.
        """
        total: Counter[tuple[str, str]] = Counter()
        for block, part, size in self.saved.values():
            if part == "attention" and tokens > 1 and size % tokens**2 == 0:
                total[block, "scores"] += size // tokens
            elif size % tokens == 0:
                total[block, part] += size
        return total

    def table_bytes(self, tokens: int) -> int:
        """Sum the saved bytes of rotary tables and the like, which all blocks are given, but not of masks."""
        sizes = [self.alive[key].nbytes() for key in self.tables]
        return sum(size for size in sizes if size % tokens == 0 and size % tokens**2)

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves; its pack hook."""
        part = self.part
        if part in ("attention", "mlp"):
            key = self._key(tensor)
            part = "entering" if key in self.part_inputs else "whole" if key in self.of_dropout else part
        self._record(tensor, part)
        return tensor

    def dropped(self, given: Tensor, out: Tensor, mask: Tensor) -> None:
        """Note what dropout makes of a tensor that enters a part. Its mask has been saved by then, unless the
        tensor needs no gradient, as the first block's input.
        """
        if self._key(given) in self.part_inputs:
            self.of_dropout.add(self._key(out))
            if self._key(mask) in self.saved:
                self._record(mask, "whole")

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Record what a flash kernel would save; a stand-in for an attention function of transformers.

        Arguments and results are those of `flash_attention`.
        """
        part, self.part = self.part, "core"
        out = flash_attention(module, query, key, value)
        self.part = part
        return out

    @contextmanager
    def watching(self, model: nn.Module, parts: Anatomy) -> Iterator[None]:
        """Keep `block` and `part` true while the model runs, by hooks on its blocks, attention and MLPs."""
        with ExitStack() as stack:

            def hook(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> None:
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave).remove)

            for name, block in model.get_submodule(parts.blocks).named_children():
                hook(block, self._enter_block(f"{parts.blocks}.{name}"), self._leave_block)
                for part, path in (("attention", parts.attention), ("mlp", parts.mlp)):
                    if path:
                        hook(block.get_submodule(path), partial(self._enter_part, part), self._leave_part)
            yield

    def _enter_block(self, path: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.block = path
            hidden, *rest = tree_leaves((args, kwargs))
            # All blocks are given the same tensors beside hidden states: rotary tables, a mask.
            given = {self._key(t) for t in rest if isinstance(t, Tensor)} - {self._key(hidden)} - self.shared
            self.given |= given
            self.shared |= given

        return enter

    def _leave_block(self, *_: Any) -> None:
        self.block = AFTER

    def _enter_part(self, part: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.part = part
        self.part_inputs = {self._key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}

    def _leave_part(self, *_: Any) -> None:
        self.part = "outside"

    def _key(self, tensor: Tensor) -> int:
        """Identify a tensor's storage, and keep it alive so that no other gets the same id."""
        storage = tensor.untyped_storage()
        self.alive[storage._cdata] = storage
        return storage._cdata

    def _record(self, tensor: Tensor, part: str) -> None:
        """Record a saved storage; one that several parts save counts in the last of PARTS.

        Parameters, buffers and what all blocks share are not recorded; of the latter `tables` are noted.
        """
        key = self._key(tensor)
        if key in self.given:
            self.tables.add(key)
        block, old, size = self.saved.get(key, (self.block, part, self.alive[key].nbytes()))
        if key not in self.shared or key in self.saved:
            self.saved[key] = (block, max(old, part, key=PARTS.index), size)
