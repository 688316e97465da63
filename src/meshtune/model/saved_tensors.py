"""Bytes that blocks and head save for the backward, and their passes hold at most: traced on meta.

    pack hook of autograd ──> storage, once each ──> (running block, running part of it) ──> SavedBytes

Bytes are those of whole storages, as the allocator counts them: values that are a view of a fused projection
keep all of it in memory.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import AttentionInterface, PreTrainedModel

from meshtune.model.anatomy import Anatomy
from meshtune.model.body import cast_parameters, head_only, text_forward
from meshtune.model.fused import (
    STAND_IN,
    FusedAttention,
    FusedDropout,
    experts_without_values,
    flash_attention,
)
from meshtune.model.lora import Adapters
from meshtune.model.tensor_plan import LATENT_WORDS, TENSOR_STYLES, cut_parts, is_mixture, tensor_plan
from meshtune.model.watch import (
    ATEN_MATMULS,
    HEADS,
    MLP,
    OUTSIDE,
    WHOLE,
    Gathered,
    LivingBytes,
    Operations,
    SavingBytes,
    Size,
)
from meshtune.placement.census import BackwardBytes, BlockPeaks, EndBytes, SavedBytes

# Of a row of the forward; a prime that divides no size of a model, so that copies of weights are recognised
TOKENS = 251
AFTER = "after"
Inputs = Callable[[int, int], Mapping[str, Tensor]]  # (rows, tokens of each) -> inputs of a forward on meta
# (by the block's path, a (element size, bytes saved per token) for each element size; Census.ends)
Saved = tuple[dict[str, tuple[tuple[int, SavedBytes], ...]], tuple[tuple[int, EndBytes], ...]]
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by element size
# A tensor that several parts save counts in the last one.
PARTS = ("outside", "mlp", "attention", "entering", "whole", "core", "scores")
# Besides matmuls and attention, what a compiled block runs once: random numbers (under selective again, from
# their seed), convolutions
DROPOUT = torch.ops.aten.native_dropout
NOT_AGAIN = (DROPOUT, torch.ops.aten.convolution)
# How blocks run: WIDE as EAGER on a processor, whose dropout masks are as wide as inputs; SELECTIVE compiled
EAGER, WIDE, COMPILED, SELECTIVE = RUNS = "eager", "wide", "compiled", "selective"


def saved_by_block(
    model: PreTrainedModel,
    parts: Anatomy,
    frozen: Collection[str],
    adapters: Adapters,
    inputs: Inputs,
    rows: int = 1,
) -> Saved:
    """Return what the blocks and the ends of a model save.

    The element size is that of the compute dtype, from DTYPES; one that the forward refuses is left out. The
    model is on meta, built with the attention STAND_IN, and is changed: it gets `adapters`, only parameters
    named in `frozen` lose their gradient, and it stays in the last dtype. rows: of `inputs`.
    """
    adapters.add_to(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    sizes_by_block: dict[str, list[tuple[int, SavedBytes]]] = {}
    ends: list[tuple[int, EndBytes]] = []
    for size, dtype in DTYPES.items():
        cast_parameters(model, dtype)
        try:
            per_token, tables, last = _saved_per_token(model, parts, inputs, rows)
            before = sum(per_token["", EAGER, part] for part in PARTS)
            ends.append((size, end_bytes(model, parts, dtype, TOKENS, tables=tables, before=before)))
        except Exception:  # each family has its own ways to refuse a type
            continue
        peaks = None if parts.mixers else _peaks(model, parts, inputs, rows)
        for block, _ in model.get_submodule(parts.blocks).named_children():
            path = f"{parts.blocks}.{block}"
            runs: Any = ({part: per_token[path, run, part] for part in PARTS} for run in RUNS)
            eager, wide, compiled, selective = (SavedBytes(**of_parts) for of_parts in runs)
            saved = replace(
                eager, peaks=peaks, last=last.get(path, ""), compiled=compiled, selective=selective,
                wide_masks=None if wide == eager else wide,
            )  # fmt: skip
            sizes_by_block.setdefault(path, []).append((size, saved))
    return {path: tuple(sizes) for path, sizes in sizes_by_block.items()}, tuple(ends)


def _peaks(model: PreTrainedModel, parts: Anatomy, inputs: Inputs, rows: int) -> BlockPeaks | None:
    """Trace `SavedBytes.peaks`; None where the backward can't run on meta."""
    try:
        return block_peaks(model, parts, inputs(rows, TOKENS), rows, TOKENS)
    except Exception:  # each family has its own
        return None


def _saved_per_token(
    model: PreTrainedModel, parts: Anatomy, inputs: Inputs, rows: int
) -> tuple[defaultdict[tuple[str, str, str], float], float, dict[str, str]]:
    """Bytes saved per token, by (path of block, how it runs, part of PARTS), and of tables that all blocks
    share; `SavedBytes.last` by path of block.

    Recurrent mixers pad to whole chunks: two forwards of whole chunks then tell what a token adds. Not of one
    chunk: a dimension of size 1 lets transformers' scan keep views where it copies otherwise.
    """
    if not parts.mixers:
        found = _saved_storages(model, parts, inputs(rows, TOKENS))
        per_token = {key: size / (rows * TOKENS) for key, size in found.bytes(TOKENS).items()}
        # Tables are one row's here, where no positions are given
        return defaultdict(float, per_token), found.table_bytes(TOKENS) / TOKENS, found.last
    chunk = _chunk(model)
    found, more = (_saved_storages(model, parts, inputs(1, count * chunk)) for count in (2, 4))
    few, many = found.bytes(1), more.bytes(1)
    per_token = {key: (size - few[key]) / (2 * chunk) for key, size in many.items()}
    return defaultdict(float, per_token), 0.0, found.last


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
        Operations(recorder.ran),
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
        self.masks: dict[int, int] = {}  # storages of its masks, a byte an element: bytes of an input's
        self.saved: dict[int, tuple[str, str, int]] = {}  # by storage: block, part, bytes
        self.alive: dict[int, torch.UntypedStorage] = {}  # an id is only unique among living objects
        self.parameters = {self._key(tensor): name for name, tensor in model.named_parameters()}
        self.shared = {*self.parameters, *map(self._key, model.buffers())}  # not counted
        self.last: dict[str, str] = {}  # by block: the parameter that it multiplies with when all is saved
        # By storage: the part that made it, and those it can be computed from again; None: by matmuls or the
        # core, which no compiled block runs again, or before the block
        self.made: dict[int, tuple[str, tuple[int, ...] | None]] = {}
        # Made by dropout, as the seconds of `made`, if adapters have one: a model's own keeps equal bytes
        self.random: dict[int, tuple[int, ...]] = {}
        self.adapted = any(vars(module).get("lora_dropout") for module in model.modules())
        self.small: set[int] = set()  # storages that reductions made
        self.operands: set[int] = set()  # storages that matmuls or the core read
        self.copies: set[int] = set()  # of others, in another order
        self.undropped: dict[int, str] = {}  # storages given to a dropout of 0, in a block
        self.given: set[int] = set()  # storages that all blocks are given, besides hidden states
        self.tables: set[int] = set()  # those of them that are saved

    def bytes(self, tokens: int) -> Counter[tuple[str, str, str]]:
        """Sum the saved bytes of storages that `tokens`, a row's, divides, by (block, how it runs, part); of
        scores per key.
        """
        total: Counter[tuple[str, str, str]] = Counter()
        wide = {key: (*at, size * self.masks.get(key, 1)) for key, (*at, size) in self.saved.items()}
        compiled, selective = self.kept_compiled(), self.kept_compiled(again=True)
        runs = dict(zip(RUNS, (self.saved, wide, compiled, selective), strict=True))
        for run, saved in runs.items():
            for block, part, size in saved.values():
                if part == "attention" and tokens > 1 and size % tokens**2 == 0:
                    total[block, run, "scores"] += size // tokens
                elif size % tokens == 0:
                    total[block, run, part] += size
        return total

    def kept_compiled(self, *, again: bool = False) -> dict[int, tuple[str, str, int]]:
        """Return what compiled blocks keep, like `saved`: inductor fuses what is neither a matmul nor the
        core into passes that start again from what those read and returned, what reductions returned, and the
        block's input. again: from their results and the block's input only, as selective recomputation does.
        """
        kept: dict[int, tuple[str, str, int]] = {}
        seen: set[tuple[int, str]] = set()
        needed = [(key, block, part) for key, (block, part, _) in reversed(self.saved.items())]
        needed += [(key, block, "outside") for key, block in self.undropped.items()] if again else []
        while needed:
            key, block, part = needed.pop()
            if (key, part) in seen or key in self.shared:
                continue
            seen.add((key, part))
            made_in, sources = self.made.get(key, (part, None))
            sources = self.random.get(key) if again and sources is None else sources
            whole = key in self.operands and key in self.saved and key not in self.copies
            held = not again and (key in self.small or whole)
            if sources is None or held:
                block, old, size = kept.get(key, (block, part, self.alive[key].nbytes()))
                kept[key] = (block, max(old, part, key=PARTS.index), size)
            else:
                needed += [(source, block, made_in) for source in sources]
        return kept

    def table_bytes(self, tokens: int) -> int:
        """Sum the saved bytes of rotary tables and the like, which all blocks are given, but not of masks."""
        sizes = [self.alive[key].nbytes() for key in self.tables]
        return sum(size for size in sizes if size % tokens == 0 and size % tokens**2)

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves; its pack hook."""
        part, key = self.part, self._key(tensor)
        self.last[self.block] = ""
        if part == "attention" and self.made.get(key, ("", None))[0] == "whole":  # a latent projection
            part = "whole"
        if part in ("attention", "mlp", "whole"):
            part = "entering" if key in self.part_inputs else "whole" if key in self.of_dropout else part
        self._record(tensor, part)
        return tensor

    def dropped(self, given: Tensor, out: Tensor, mask: Tensor) -> None:
        """Note what dropout makes of a tensor that enters a part. Its mask has been saved by then, unless the
        tensor needs no gradient, as the first block's input. A dropout of 0 keeps the compiler from dropping
        a matmul's output that no backward needs.
        """
        if out is given:
            self.undropped[self._key(given)] = self.block
            return
        self.masks[self._key(mask)] = given.element_size()
        if self._key(given) in self.part_inputs:
            self.of_dropout.add(self._key(out))
            if self._key(mask) in self.saved:
                self._record(mask, "whole")

    def ran(self, operation: Any, read: list[Tensor], made: list[Tensor]) -> None:
        """Note what an operation makes of what, and what a matmul multiplies with, which autograd has saved
        by then.
        """
        operands, sources = ATEN_MATMULS.get(operation), tuple(self._key(tensor) for tensor in read)
        if operands and (name := self.parameters.get(sources[operands][1])):
            self.last[self.block] = name.removeprefix(f"{self.block}.")
        whole = operands or self.part == "core" or operation in NOT_AGAIN
        if whole:
            self.operands.update(sources)
        for tensor in made:
            if (key := self._key(tensor)) not in sources:
                self.made[key] = (self.part, None if whole else sources)
                if operation is DROPOUT and self.adapted:
                    self.random[key] = sources
                if operation is torch.ops.aten.clone:  # the operator of attention writes in this order
                    self.copies.add(key)
                if sources and 2 * tensor.numel() <= max(each.numel() for each in read):
                    self.small.add(key)

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

        Arguments and results are those of `flash_attention`.
        """
        part, self.part = self.part, "core"
        self.operands |= {self._key(tensor) for tensor in (query, key, value)}
        out = flash_attention(module, query, key, value, **kwargs)
        self.part = part
        return out

    @contextmanager
    def watching(self, model: PreTrainedModel, parts: Anatomy) -> Iterator[None]:
        """Keep `block` and `part` true while the model runs, by hooks on its blocks, attention and MLPs."""
        plan = tensor_plan(model)
        plan = {} if isinstance(plan, str) else plan
        with ExitStack() as stack:

            def hook(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> None:
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave).remove)

            for name, block in model.get_submodule(parts.blocks).named_children():
                hook(block, self._enter_block(f"{parts.blocks}.{name}"), self._leave_block)
                apart = is_mixture(block, parts) and not cut_parts(block, parts, plan)[1:]
                for part, path in (("attention", parts.attention), ("mlp", parts.mlp)):
                    if path:
                        # What enters a mixture of experts is own tokens under tp, as all inside
                        enter = partial(self._enter_part, part, own=apart and part == "mlp")
                        hook(block.get_submodule(path), enter, self._leave_part)
                for path in (path for path, _ in block.named_modules() if path in plan):
                    if path.rpartition(".")[2] in LATENT_WORDS:  # whole on each rank of tp
                        hook(
                            block.get_submodule(path),
                            partial(self._in, "whole"),
                            partial(self._in, "attention"),
                        )
            yield

    def _enter_block(self, path: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.block = path
            hidden, *rest = tree_leaves((args, kwargs))
            self._whole(hidden)
            # All blocks are given the same tensors besides hidden states: rotary tables, a mask.
            given = {self._key(t) for t in rest if isinstance(t, Tensor)} - {self._key(hidden)} - self.shared
            self.given |= given
            self.shared |= given

        return enter

    def _leave_block(self, _: nn.Module, __: Any, out: Any) -> None:
        self.block = AFTER
        self._whole(tree_leaves(out)[0])

    def _whole(self, hidden: Tensor) -> None:
        """Note hidden states between two blocks, which each are compiled."""
        self.made[self._key(hidden)] = ("outside", None)

    def _enter_part(
        self, part: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, own: bool = False
    ) -> None:
        self.part = part
        tensors = [] if own else tree_leaves((args, kwargs))
        self.part_inputs = {self._key(t) for t in tensors if isinstance(t, Tensor)}

    def _in(self, part: str, *_: Any) -> None:
        self.part = part

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


# Most bytes that the passes of a block hold at once #

#     text_forward ──> arguments of the last block ──> forward, and with backward, of it ──> BlockPeaks
#
# Storages that `TOKENS` divides grow with the tokens; the others are gradients of weights.


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
        hook.remove()
        plan = tensor_plan(model)
        cuts = {} if isinstance(plan, str) else _cuts(plan, parts, block)
        passes = partial(_passes, block, *tree_unflatten(given, spec), hidden)
        saving = SavingBytes(tokens, rows, cuts)
        started, backward = passes(saving)
        gathered: tuple[BackwardBytes, ...] = ()
        if cuts and parts.attention and parts.mlp:
            sharded = SavingBytes(tokens, rows, cuts)
            with _gathering([block.get_submodule(path) for path in cut_parts(block, parts, plan)], sharded):
                _, gathered = passes(sharded)
    kept = started.minus(hidden)  # without the gradient
    # A second forward runs when the first saved tensor is needed, and ends once the last one has been saved.
    again = saving.when_saved.plus((saving.when_needed or started).minus(started))
    alone_most = alone.most.plus(hidden)
    return BlockPeaks(
        forward=_sizes(saving.forward.minus(kept)),
        forward_again=_sizes(again.minus(kept)),
        forward_alone=(alone_most.per_token, alone_most.keys + returned),
        backward=backward,
        gathered=gathered,
        masks=masks,
        saves_input=given[0].untyped_storage()._cdata in saving.saved,
    )


def _passes(
    block: nn.Module, args: Any, kwargs: Any, hidden: Size, meter: SavingBytes
) -> tuple[Size, tuple[BackwardBytes, ...]]:
    """Run a block's forward and backward under `meter`.

    Returns what lives between them, with the gradient of the output, and the times of `BlockPeaks.backward`.
    hidden: size of hidden states.
    """
    with meter:
        with saved_tensors_hooks(meter.pack, meter.unpack):
            out = tree_leaves(block(*args, **kwargs))[0]
        meter.forward = meter.most
        edge, gradient = get_gradient_edge(out), torch.empty_like(out)
        del out  # the next block holds it no more
        started = meter.living
        meter.fullest, meter.backward = [started], True
        torch.autograd.backward([edge], [gradient])
    trained = [parameter for parameter in block.parameters() if parameter.grad is not None]
    gradients = sum(parameter.nbytes for parameter in trained)
    for parameter in trained:
        parameter.grad = None
    kept = started.minus(hidden)
    beside = [size.minus(kept) for size in meter.fullest]
    # What is left below zero isn't a gradient: the forward saved it, whatever the number of tokens.
    return started, tuple(
        BackwardBytes(*size[:5], made=max(size.rest, 0.0) / gradients if gradients else 0.0)
        for size in beside
    )


def _cuts(plan: Mapping[str, str], parts: Anatomy, block: nn.Module) -> dict[int, tuple[int | None, int]]:
    """Return `LivingBytes.cuts` of the block's matrices. plan: of `tensor_plan`."""
    cuts = {}
    for path, word in plan.items():
        kind = HEADS if parts.attention and path.startswith(f"{parts.attention}.") else MLP
        dim = TENSOR_STYLES[word].dim
        for name, parameter in block.named_parameters():
            module, _, leaf = name.rpartition(".")
            if module == path and parameter.dim() == 2:
                # An adapter's other matrix is whole on each rank.
                whole = leaf == ("lora_A", "lora_B")[dim] if dim is not None else False
                cuts[parameter.untyped_storage()._cdata] = (None if whole else dim, kind)
    return cuts


@contextmanager
def _gathering(modules: Iterable[nn.Module], meter: LivingBytes) -> Iterator[None]:
    """Gather what enters these modules, and scatter what leaves them, as sequence parallelism does."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        hidden, *others = args or (kwargs["hidden_states"],)
        hidden = Gathered.apply(hidden, meter, (WHOLE, OUTSIDE))
        return ((hidden, *others), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    def leave(_: nn.Module, __: Any, out: Any) -> Any:
        hidden, spec = tree_flatten(out)
        hidden[0] = Gathered.apply(hidden[0], meter, (OUTSIDE, WHOLE))
        return tree_unflatten(hidden, spec)

    with ExitStack() as stack:
        for part in modules:
            stack.callback(part.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(part.register_forward_hook(leave).remove)
        yield


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in the dtype of the block, as a run has it; token ids as they are."""
    return value.to(dtype) if value.is_floating_point() else value


def _scores(values: list[Any], meter: LivingBytes) -> float:
    """Bytes per token and key of the tensors among `values` that grow with both."""
    return sum(meter.size(value.untyped_storage()).keys for value in values if isinstance(value, Tensor))


def _sizes(size: Size) -> tuple[float, float]:
    """Bytes per token, and per token and key."""
    return size.per_token, size.keys


# The last norm and the head #

# hidden ──> norm ──> head ──> logits


def end_bytes(
    model: PreTrainedModel, parts: Anatomy, dtype: torch.dtype, tokens: int, *, tables: float, before: float
) -> EndBytes:
    """Trace both on `tokens` hidden states. dtype: of the weights, which lie on meta. tables, before: as in
    EndBytes.

    tokens: a number that divides no size of the model, so that gradients of weights are recognised.
    """
    features = model.get_input_embeddings().get_parameter("weight").shape[-1]
    hidden = torch.empty(1, tokens, features, dtype=dtype, device="meta").requires_grad_()
    saved, backward = _of_norm(model.get_submodule(parts.norm), hidden) if parts.norm else (0.0, 0.0)
    per_logit, changes = _per_logit(model, parts, hidden[0])
    return EndBytes(per_logit, saved, backward, tables, changes, before)


def _per_logit(model: PreTrainedModel, parts: Anatomy, hidden: Tensor) -> tuple[float, bool]:
    """(Bytes per logit that the head keeps besides its output: a softcap its tanh, a cast to fp32 2 more than
    an output in bf16; whether the logits are another tensor than its matrix's output).
    """
    outputs: list[Tensor] = []  # of the matrix
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # an address is only unique among living storages

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[:-1].numel() == len(hidden) and tensor.shape[-1] > hidden.shape[-1]:
            sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    head: Any = model.get_submodule(parts.head)
    hook = head.register_forward_hook(lambda _, __, out: outputs.append(out))
    with head_only(model, parts) as logits_of, saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = logits_of(hidden)
    hook.remove()
    storage = logits.untyped_storage()._cdata
    sizes.pop(storage, None)
    kept = sum(sizes.values()) / logits.numel() + logits.element_size() - hidden.dtype.itemsize
    return kept, all(out.untyped_storage()._cdata != storage for out in outputs)


class _Gradient(torch.autograd.Function):
    """Hand out a gradient that nothing else holds."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.like = hidden.shape, hidden.dtype
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:  # type: ignore[override]
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device="meta")


def _of_norm(norm: nn.Module, hidden: Tensor) -> tuple[float, float]:
    """Bytes per token that a norm keeps and the most in its backward."""
    with LivingBytes(hidden.shape[1]) as living:
        given = hidden.clone()  # which lives as long as something holds it
        out = norm(given)
        del given
        edge = get_gradient_edge(_Gradient.apply(out))
        del out
        saved, living.most = living.living.per_token, living.living
        torch.autograd.backward([edge], [torch.empty((), dtype=hidden.dtype, device="meta")])
    for parameter in norm.parameters():
        parameter.grad = None
    return saved, living.most.per_token
