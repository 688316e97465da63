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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel

from meshtune.model.anatomy import Anatomy, anatomy
from meshtune.model.block_peaks import block_peaks
from meshtune.model.body import text_forward
from meshtune.model.ends import end_bytes
from meshtune.model.lora import adapt
from meshtune.placement.census import EndBytes, SavedBytes

STAND_IN = "meshtune_census"  # name of the attention function that a traced model is built with
TOKENS = 251  # of the forward; a prime that divides no size of a model: copies of weights are recognised
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by element size
# A tensor that several parts save counts in the last one.
PARTS = ("outside", "mlp", "attention", "entering", "core", "scores")


def saved_by_block(
    model: PreTrainedModel,
    frozen: Collection[str],
    adapters: Mapping[str, int],
    dora: bool,
    inputs: Callable[[int], Mapping[str, Tensor]],
    *,
    with_peaks: bool = False,
) -> tuple[dict[str, tuple[tuple[int, SavedBytes], ...]], tuple[tuple[int, EndBytes], ...]]:
    """Return, by the block's path, a (element size, bytes saved per token) for each element size, and
    Census.ends.

    The element size is that of the compute dtype, from DTYPES; one that the forward refuses is left out. The
    model is on meta, built with the attention STAND_IN, and is changed: it gets `adapters` (LoRA rank by
    module; with `dora` those of DoRA), only parameters named in `frozen` lose their gradient, and it stays in
    the last dtype. inputs: of its forward, with as many tokens as are asked for. with_peaks: trace the last
    block's `SavedBytes.peaks`, for all. Raises as `anatomy`.
    """
    parts = anatomy(model)
    for module, rank in adapters.items():
        adapt(model.get_submodule(module), rank, alpha=rank, use_dora=dora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    sizes_by_block: dict[str, list[tuple[int, SavedBytes]]] = {}
    ends: list[tuple[int, EndBytes]] = []
    for size, dtype in DTYPES.items():
        cast_parameters(model, dtype)
        try:
            per_token, tables = _saved_per_token(model, parts, inputs)
            ends.append((size, end_bytes(model, parts, dtype, TOKENS, tables=tables)))
            peaks = block_peaks(model, parts, inputs(TOKENS), TOKENS) if with_peaks else None
        except Exception:  # each family has its own ways to refuse a type
            continue
        for block, _ in model.get_submodule(parts.blocks).named_children():
            path = f"{parts.blocks}.{block}"
            saved = SavedBytes(**{part: per_token[path, part] for part in PARTS}, peaks=peaks)
            sizes_by_block.setdefault(path, []).append((size, saved))
    return {path: tuple(sizes) for path, sizes in sizes_by_block.items()}, tuple(ends)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters and leave the buffers as they are, as training does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _saved_per_token(
    model: PreTrainedModel, parts: Anatomy, inputs: Callable[[int], Mapping[str, Tensor]]
) -> tuple[defaultdict[tuple[str, str], float], float]:
    """Bytes saved per token, by (path of block, part of PARTS), and of tables that all blocks share.

    Recurrent mixers pad to whole chunks: two forwards of whole chunks then tell what a token adds. Not of one
    chunk: a dimension of size 1 lets transformers' scan keep views where it copies otherwise.
    """
    if not parts.mixers:
        found = _saved_storages(model, parts, inputs(TOKENS))
        per_token = {key: size / TOKENS for key, size in found.bytes(TOKENS).items()}
        return defaultdict(float, per_token), found.table_bytes(TOKENS) / TOKENS
    chunk = _chunk(model)
    few, many = (_saved_storages(model, parts, inputs(count * chunk)).bytes(1) for count in (2, 4))
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
        FusedDropout(),
        FusedAttention(recorder),
    ):
        text_forward(model, **inputs)
    return recorder


class SavedTensors:
    """Record the storages that a forward saves, each once: in which block first, and in which part of it."""

    def __init__(self, model: nn.Module) -> None:
        self.block = ""  # path of the running block
        self.part = "outside"  # of PARTS, that runs
        self.part_inputs: set[int] = set()  # storages given to the running attention or MLP
        self.saved: dict[int, tuple[str, str, int]] = {}  # by storage: block, part, bytes
        self.log_sum_bytes: Counter[str] = Counter()  # of attention's softmax, by block
        self.alive: dict[int, torch.UntypedStorage] = {}  # an id is only unique among living objects
        self.shared = {self._key(tensor) for tensor in (*model.parameters(), *model.buffers())}  # not counted
        self.given: set[int] = set()  # storages that all blocks are given, beside hidden states
        self.tables: set[int] = set()  # those of them that are saved

    def bytes(self, tokens: int) -> Counter[tuple[str, str]]:
        """Sum the saved bytes of storages that `tokens` divides, by (block, part); of scores per key."""
        total = Counter({(block, "core"): size for block, size in self.log_sum_bytes.items()})
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
        entering = self.part != "outside" and self._key(tensor) in self.part_inputs
        self._record(tensor, "entering" if entering else self.part)
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
        """Record what a flash kernel would save; a stand-in for an attention function of transformers.

        query, key, value: [batch, heads, tokens, size]. Returns (uninitialised [batch, tokens, heads, size],
        None: no attention weights).
        """
        batch, heads, tokens, _ = query.shape
        # Kernels write in the memory order of the queries; with heads before tokens, o_proj takes a copy.
        first, second = (1, 2) if query.stride(1) > query.stride(2) else (2, 1)
        shape = (batch, query.shape[first], query.shape[second], value.shape[-1])
        out = query.new_empty(shape).transpose(1, first)
        if any(tensor.requires_grad for tensor in (query, key, value)):
            out.requires_grad_()
            for tensor in (query, key, value, out):
                self._record(tensor, "core")
            self.log_sum_bytes[self.block] += 4 * batch * heads * tokens
        return out.transpose(1, 2), None

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
        self.block = ""

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


class FusedAttention(TorchFunctionMode):
    """Record a call of torch's attention function as a flash kernel's, where it runs one."""

    def __init__(self, recorder: SavedTensors) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
        if given["query"].shape[1] != given["key"].shape[1] and not given.get("enable_gqa"):
            if isinstance(mask := given.get("attn_mask"), Tensor):
                given["attn_mask"] = mask.to(given["query"].dtype)
            return func(**given)  # no fused kernel broadcasts heads: scores are written
        out, _ = self.recorder.attention(nn.Identity(), given["query"], given["key"], given["value"])
        return out.transpose(1, 2)


class FusedDropout(TorchFunctionMode):
    """Run dropout as on a GPU, where the mask that it saves has one byte per element."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | (kwargs or {})
        x, probability = given["input"], given.get("p", 0.5)
        if not probability or not given.get("training", True):
            return x
        return torch.native_dropout(x, probability, True)[0]
