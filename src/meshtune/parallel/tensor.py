"""Tensor parallelism (tp): each rank multiplies by its own rows or columns of every matrix. Sequence
parallelism (sp): the activations between them are cut along the sequence.

            ╭───────────── attention ─────────────╮      ╭───────── mlp ─────────╮
    lookup ⊕ norm ⊢ q k v │ own heads │ o ⊕ + residual  norm ⊢ gate up │ down ⊕ +  …  norm ⊢ head │ logits

    ⊢  enter   sp: all-gather along the sequence        else identity       backward: ⊕
    ⊕  leave   sp: reduce-scatter along the sequence    else all-reduce     backward: ⊢

`enter` is saved whole for the backward, or gathered again in it (regather.py).

(Shoeybi et al. 2019, arXiv:1909.08053; sp: Korthikanti et al. 2022, arXiv:2205.05198.) A matrix before `│` is
cut by its rows, one after it by its columns. Which module is which comes from the family's own plan in
transformers (`anatomy.tensor_plan`); embedding and head are cut along the vocabulary. A mixture of experts
runs on each rank's own tokens, without sp on a slice of them: every rank has all routed experts and their
router, and shared experts are cut as an mlp is.

The model keeps its modules and names. A cut parameter becomes a plain tensor, this rank's shard;
`split_model` returns how each was cut. Some gradients are parts of a sum over the ranks (`Split.partial`): of
parameters that every rank holds whole but uses for its own tokens or heads. `reduce_partial` adds those up
once a step.

Where tp ranks see the same activations, dropout must mask the same, and where each sees its own, differently;
and a recomputed block must repeat both. So no mask is stored: a block with dropout draws one number from the
CPU generator, whose state is equal on all tp ranks and is restored before a recomputation, and all of its
masks come from that number, mixed with the rank's index where activations are the rank's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtune.errors import UserError
from meshtune.model.anatomy import Anatomy, attention_heads, draws_random_numbers, is_scored
from meshtune.model.capabilities import traits
from meshtune.model.lora import without_bias
from meshtune.model.tensor_plan import (
    TensorStyle,
    cut_parts,
    cuts_heads,
    head_parameters,
    is_mixture,
    repeated_heads,
    take_heads,
    tensor_plan,
    tensor_styles,
)
from meshtune.parallel.exchange import (
    all_gather,
    all_reduce,
    exchange,
    identity,
    reduce_scatter,
    take_shard,
)
from meshtune.parallel.mesh import Axis
from meshtune.parallel.regather import saving_shards
from meshtune.placement.rules import tensor_problems
from meshtune.placement.split import Split, piece, pieces

SEQUENCE, FEATURES = 1, 2  # dimensions of hidden states [batch, seq, hidden]
LARGE = 2**22  # elements of a gradient that is summed over tp apart from others


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary whose logits a rank computes; the other ranks of `tp` have the rest."""

    tp: Axis
    start: int  # token id
    stop: int  # token id, exclusive
    total: int  # tokens of all ranks


def vocabulary_of(head: nn.Module) -> Vocabulary | None:
    """The part of the vocabulary of a head that `split_model` has cut; None for a whole head."""
    return vars(head).get("vocabulary")


# How the modules of a cut model run #


@dataclass
class _TensorState:
    """Tensor-parallel state of one model: the ranks, sp, and the random numbers of the running block.

    `enter` all-gathers (sp) or copies; `leave` reduce-scatters (sp) or all-reduces (Megatron's f and g).
    """

    tp: Axis
    sequence: bool  # sequence parallelism
    regather: bool = False  # save own tokens of what `enter` gathers for attention and mlp
    seed: int | None = None  # of the running block, where it draws; equal on all tp ranks
    reseeds: int = 0  # calls of `reseed` in that block so far
    blocks_done: bool = False  # the last block has run: the next output of the final norm leaves the body
    saved_states: list[Tensor] | None = None  # the generators', before the embedding seeded them per rank

    def enter(self, hidden: Tensor) -> Tensor:
        """Hidden states of all tokens, for attention, mlp and head; gradients are summed over ranks."""
        pair = (all_gather, reduce_scatter) if self.sequence else (identity, all_reduce)
        return exchange(hidden, self.tp, _tokens(hidden), *pair)

    def leave(self, addend: Tensor) -> Tensor:
        """Sum of the ranks' addends to the hidden states; with sp this rank's tokens of it."""
        pair = (reduce_scatter, all_gather) if self.sequence else (all_reduce, identity)
        return exchange(addend, self.tp, _tokens(addend), *pair)

    def reseed(self, *, per_rank: bool) -> None:
        """Seed the generators for what follows in the block: differently on each tp rank, or equally."""
        if self.seed is not None:
            self.reseeds += 1
            # A tuple's hash mixes all bits, and is not salted as a string's would be.
            _seed(hash((self.seed, self.reseeds, self.tp.index + 1 if per_rank else 0)))


def _tokens(hidden: Tensor) -> int:
    """Dimension along which tokens are cut: of [batch, seq, hidden], or of [tokens, hidden] in a mixture."""
    return hidden.dim() - 2


def _enter_part(
    state: _TensorState, part: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict]:
    """Hook before attention and mlp: their arguments, with `enter` of the hidden states, which are the first
    argument or have the name hidden_states.
    """
    if args:
        return (state.enter(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": state.enter(kwargs["hidden_states"])}


def _regathering_forward(state: _TensorState, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of attention or mlp that enters separately, and saves its input as only this rank's tokens."""
    shard = args[0] if args else kwargs["hidden_states"]
    args, kwargs = _enter_part(state, part, args, kwargs)
    whole = args[0] if args else kwargs["hidden_states"]
    with saving_shards(whole, shard, state.tp, _tokens(shard)):
        return type(part).forward(part, *args, **kwargs)


def _mixture_forward(state: _TensorState, mlp: nn.Module, hidden_states: Tensor) -> Any:
    """Forward of a mixture of experts without sp: on this rank's slice of the tokens, as under sp. The slices
    of the output are gathered; a sequence that tp does not divide is padded.
    """
    tokens = hidden_states.shape[SEQUENCE]
    padded = F.pad(hidden_states, (0, 0, 0, -tokens % state.tp.size))
    own = exchange(padded, state.tp, SEQUENCE, take_shard, all_gather)
    state.reseed(per_rank=True)
    state.sequence = True
    try:
        out = type(mlp).forward(mlp, own)
    finally:
        state.sequence = False
    state.reseed(per_rank=False)
    first, *more = out if isinstance(out, tuple) else (out,)
    whole = exchange(first.view_as(own), state.tp, SEQUENCE, all_gather, take_shard)[:, :tokens]
    return (whole, *more) if more else whole


def _after_blocks(state: _TensorState, block: nn.Module, args: tuple, out: Any) -> None:
    """Hook after the last block, for `_leave_body`: some families use their final norm before the first one,
    too.
    """
    state.blocks_done = True


def _leave_body(state: _TensorState, norm: nn.Module, args: tuple, hidden: Tensor) -> Tensor:
    """Hook after the final norm: its output through `enter`, as the head takes all tokens and gives a partial
    gradient of each; unchanged where the blocks have not run yet.
    """
    if not state.blocks_done:
        return hidden
    state.blocks_done = False
    return state.enter(hidden)


class _Cut(nn.Module):
    """Base of a linear layer's class once it is cut: (this class, the layer's own), made by `_cut_class`.

    A class and not a patched `forward`: the compiler makes one graph for all blocks only where their modules
    differ in nothing but values.
    """

    tensor_state: _TensorState
    tensor_style: TensorStyle


class _Rows(_Cut):
    """A linear layer with some rows on this rank: their output features [batch, seq, …].

    x: hidden states of all tokens. `style.whole`: all-gather the output features. Reseeds dropout for what
    follows.
    """

    def forward(self, x: Tensor) -> Tensor:
        state, style = self.tensor_state, self.tensor_style
        state.reseed(per_rank=False)
        out = super().forward(x)
        if style.whole:
            out = exchange(out, state.tp, FEATURES, all_gather, take_shard)
        state.reseed(per_rank=not style.whole)
        return out


class _Repeated(_Cut):
    """A key or value projection that is whole on every rank: only the one key-value head that the rank's
    query heads use, [batch, seq, head_dim].
    """

    kv_heads: int  # of the whole model, fewer than tp ranks

    def forward(self, x: Tensor) -> Tensor:
        state, kv_heads = self.tensor_state, self.kv_heads
        state.reseed(per_rank=False)
        out = super().forward(x)
        state.reseed(per_rank=True)
        return out.chunk(kv_heads, dim=-1)[state.tp.index * kv_heads // state.tp.size]


class _Latent(_Cut):
    """A linear layer that is whole on every rank: the latents of all tokens, for each rank's heads."""

    def forward(self, x: Tensor) -> Tensor:
        self.tensor_state.reseed(per_rank=False)
        return super().forward(x)


class _Columns(_Cut):
    """A linear layer with some columns on this rank: all output features, summed over the ranks (`leave`),
    so with sp only those of this rank's tokens. The bias is added after the sum.

    x: the input features of the rank's columns; with `style.whole` all of them; it takes its shard.
    """

    def forward(self, x: Tensor) -> Tensor:
        state = self.tensor_state
        if self.tensor_style.whole:
            x = exchange(x, state.tp, FEATURES, take_shard, all_gather)
        state.reseed(per_rank=True)
        out = state.leave(without_bias(self, x))  # the sum has it once, not once a rank
        state.reseed(per_rank=state.sequence)
        bias: Any = self.bias
        return out if bias is None else out + bias


@cache
def _cut_class(how: type[_Cut], kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (how, kind), {})


def _cut_linear(module: nn.Module, how: type[_Cut], state: _TensorState, style: TensorStyle) -> None:
    """Make a linear layer run as `how` says, in place."""
    module.tensor_state, module.tensor_style = state, style  # type: ignore[assignment]
    module.__class__ = _cut_class(how, type(module))


def _embedding_forward(
    state: _TensorState, vocabulary: Vocabulary, draws_after: bool, module: nn.Module, ids: Tensor
) -> Tensor:
    """Forward of an embedding with this rank's rows of `vocabulary`: [batch, seq, hidden], summed
    over the ranks (`leave`), so with sp only this rank's tokens.

    ids: of all tokens. draws_after: dropout follows before the first block. Under sp it must mask each rank's
    tokens differently: the generators are seeded per rank until `_restore_states`. Raises ValueError if sp
    can't divide the columns.
    """
    if state.sequence and ids.shape[1] % state.tp.size:
        raise ValueError(
            f"Sequence parallelism gives each of {state.tp.size} ranks the same number of tokens, but rows "
            f"are {ids.shape[1]} tokens wide; pad them to a multiple of {state.tp.size}."
        )
    state.blocks_done = False
    elsewhere = (ids < vocabulary.start) | (ids >= vocabulary.stop)
    rows = type(module).forward(module, (ids - vocabulary.start).masked_fill(elsewhere, 0))
    hidden = state.leave(rows.masked_fill(elsewhere[..., None], 0))
    if draws_after and state.sequence and module.training:
        seed = _drawn()
        state.saved_states = generator_states()
        _seed(hash((seed, state.tp.index + 1)))
    return hidden


def _restore_states(state: _TensorState, block: nn.Module, args: tuple) -> None:
    """Hook before the first block, outside of what is recomputed: restore `_embedding_forward`'s states."""
    if state.saved_states is not None:
        restore_generators(state.saved_states)
        state.saved_states = None


def _seeded_forward(state: _TensorState, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a block that draws random numbers, in training from one number of the CPU generator (see the
    module's docstring); the generators continue afterwards as if the block had drawn only that.
    """
    if not block.training:
        return type(block).forward(block, *args, **kwargs)
    seed = _drawn()
    saved_states = generator_states()
    state.seed, state.reseeds = seed, 0
    try:
        state.reseed(per_rank=state.sequence)
        return type(block).forward(block, *args, **kwargs)
    finally:
        state.seed = None
        restore_generators(saved_states)


def _drawn() -> int:
    return int(torch.randint(2**62, (), device="cpu"))


def _seed(number: int) -> None:
    torch.default_generator.manual_seed(number % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number % 2**63)


def generator_states() -> list[Tensor]:
    """State of the CPU's generator, then of the GPU's where there is one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def restore_generators(states: Sequence[Tensor]) -> None:
    """Restore what `generator_states` returned; nothing for an empty list."""
    for restore, state in zip((torch.set_rng_state, torch.cuda.set_rng_state), states, strict=False):
        restore(state)


# Cutting a model #


def split_model(
    model: PreTrainedModel, anatomy: Anatomy, tp: Axis, *, sequence: bool, regather: bool = False
) -> dict[str, Split]:
    """Cut `model` for this rank of `tp`, in place; returns how each parameter is cut, by name (a tied one by
    each of its names). sequence: with sequence parallelism. regather: as `Layout.sp_regather`.

    Parameters may lie on meta or have values. Afterwards the body returns the hidden states of all tokens,
    while those between blocks are this rank's own tokens if `sequence`; position_ids and documents are always
    those of the whole row, and the head gives the logits of the rank's part of the vocabulary
    (`vocabulary_of`). Call it after adapters are added and before the model is cut into stages, recomputed or
    sharded. With one tp rank nothing is changed.

    Raises UserError where the family has no plan, or `tp` does not divide it.
    """
    named = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if tp.size == 1:
        return dict.fromkeys(named, Split())
    if problems := list(tensor_problems(traits(model), tp.size)):
        raise UserError(problems)
    plan = tensor_plan(model)
    assert not isinstance(plan, str)
    state, of_heads = _TensorState(tp, sequence, regather), head_parameters(model)
    styles, repeated = tensor_styles(model, plan, tp.size), repeated_heads(model, plan, tp.size)
    splits = dict.fromkeys(named, Split(partial=sequence))  # outside attention and mlp: whole, own tokens
    for path, block in model.get_submodule(anatomy.blocks).named_children():
        inside = _block_splits(block, anatomy, styles, repeated, sequence)
        inside |= dict.fromkeys(of_heads & inside.keys(), Split(0))
        splits |= {f"{anatomy.blocks}.{path}.{name}": split for name, split in inside.items()}
    for path in (anatomy.embed, anatomy.head):
        style = TensorStyle(1 if path == anatomy.head and is_scored(model.config) else 0)
        splits |= _named_splits(path, model.get_submodule(path), _linear_splits(style, sequence))

    _cut_vocabulary(model, anatomy, state)
    for block in model.get_submodule(anatomy.blocks).children():
        _cut_block(block, anatomy, styles, repeated, state, attention_heads(model))
    cut_parameters(model, splits, tp)
    return splits


def _linear_splits(style: TensorStyle, sequence: bool) -> dict[str, Split]:
    """Splits of a linear layer's parameters by name, adapters (B · A added to the weight) included.

    style: split by output features (dim 0) or by input features (dim 1). sequence: with sequence parallelism.
    """
    if style.dim == 0:
        own, addend = Split(0, parts=style.parts), Split(partial=True)
        return {"weight": own, "bias": own, "lora_A": addend, "lora_B": own, "lora_magnitude_vector": own}
    bias = Split(partial=sequence)  # added after the sum: to own tokens, or to all on every rank
    addends = dict.fromkeys(("lora_B", "lora_magnitude_vector"), Split(partial=True))
    return {"weight": Split(1), "bias": bias, "lora_A": Split(1), **addends}


def _named_splits(path: str, module: nn.Module, splits: Mapping[str, Split]) -> dict[str, Split]:
    """Splits of the module's direct parameters by `path.name`. splits: by name inside the module."""
    return {f"{path}.{name}": splits[name] for name, _ in module.named_parameters(recurse=False)}


def _block_splits(
    block: nn.Module,
    anatomy: Anatomy,
    styles: Mapping[str, TensorStyle],
    repeated: frozenset[str],
    sequence: bool,
) -> dict[str, Split]:
    """Splits of the parameters of a block's attention and mlp, by name inside the block.

    styles: of modules, by path; repeated: paths of modules that stay whole because tp is larger than the
    number of key-value heads; sequence: with sequence parallelism.
    """
    parts = (f"{anatomy.attention}.", f"{anatomy.mlp}.")
    # Modules that the plan does not name run where all ranks have the same whole activations; in a mixture of
    # experts on own tokens.
    own = parts[1:] if is_mixture(block, anatomy) else ()
    splits = {
        name: Split(partial=name.startswith(own))
        for name, _ in block.named_parameters()
        if name.startswith(parts)
    }
    for path, module in block.named_modules():
        if path in styles:
            style = styles[path]
            if style.dim is None or path in repeated:
                splits |= {f"{path}.{name}": Split(partial=True) for name, _ in module.named_parameters()}
            else:
                splits |= _named_splits(path, module, _linear_splits(style, sequence or path.startswith(own)))
    return splits


def _cut_vocabulary(model: PreTrainedModel, anatomy: Anatomy, state: _TensorState) -> None:
    """Make the embedding and the head work only with this rank's rows, in place, by hooks and attributes.

    Their parameters are cut later, by `cut_parameters`.
    """
    embed: Any = model.get_submodule(anatomy.embed)
    head: Any = model.get_submodule(anatomy.head)
    for module in (embed, head):
        rows = module.weight.shape[0]
        module.vocabulary = Vocabulary(state.tp, *piece(rows, state.tp.size, state.tp.index), rows)
    if is_scored(model.config):  # one row: cut by columns, so that each rank has an addend of the score
        columns = piece(head.in_features, state.tp.size, state.tp.index)
        head.forward = lambda hidden: type(head).forward(head, hidden[..., slice(*columns)])
    part, padding = embed.vocabulary, embed.padding_idx
    if padding is not None:  # the row without a gradient
        embed.padding_idx = padding - part.start if part.start <= padding < part.stop else None
    trunk = model.get_submodule(anatomy.blocks.rpartition(".")[0])
    blocks = model.get_submodule(anatomy.blocks)
    draws_after = draws_random_numbers([trunk, *(child for child in trunk.children() if child is not blocks)])
    embed.forward = partial(_embedding_forward, state, part, draws_after, embed)
    first, *_, last = [*blocks.children()] * 2
    first.register_forward_pre_hook(partial(_restore_states, state))
    last.register_forward_hook(partial(_after_blocks, state))
    model.get_submodule(anatomy.norm).register_forward_hook(partial(_leave_body, state))


def _cut_block(
    block: nn.Module,
    anatomy: Anatomy,
    styles: Mapping[str, TensorStyle],
    repeated: frozenset[str],
    state: _TensorState,
    heads: tuple[int, int],
) -> None:
    """Make a block's modules work with this rank's shards, in place, by new forwards and hooks.

    styles, repeated: as in `_block_splits`. heads: (query heads, key-value heads) of the whole model. The
    parameters are cut later, by `cut_parameters`.
    """
    query_heads, kv_heads = heads
    for path, module in block.named_modules():
        if path in repeated:
            vars(module)["kv_heads"] = kv_heads
            _cut_linear(module, _Repeated, state, styles[path])
        elif path in styles and isinstance(module, nn.Linear):
            style = styles[path]
            _cut_linear(module, {0: _Rows, 1: _Columns, None: _Latent}[style.dim], state, style)
            if style.dim == 1 and "lora_all_reduce" in vars(module):
                vars(module)["lora_all_reduce"] = partial(all_reduce, axis=state.tp, dim=0)
    attention: Any = block.get_submodule(anatomy.attention)
    for part in map(block.get_submodule, cut_parts(block, anatomy, styles)):
        if state.regather:
            part.forward = partial(_regathering_forward, state, part)
        else:
            part.register_forward_pre_hook(partial(_enter_part, state), with_kwargs=True)
    if is_mixture(block, anatomy) and not state.sequence:
        mlp = block.get_submodule(anatomy.mlp)
        mlp.forward = partial(_mixture_forward, state, mlp)
    if cuts_heads(styles, anatomy) and "num_key_value_groups" in vars(attention):
        attention.num_key_value_groups = query_heads // state.tp.size // max(1, kv_heads // state.tp.size)
    if any(style.parts for path, style in styles.items() if path.startswith(f"{anatomy.attention}.")):
        take_heads(attention, state.tp.size)
    if draws_random_numbers(block.modules()):
        block.forward = partial(_seeded_forward, state, block)


def cut_parameters(model: nn.Module, splits: Mapping[str, Split], axis: Axis) -> None:
    """Replace each parameter whose split has a dim by a copy of this rank's shard, in place; tied ones stay
    one.

    splits: by name (a tied parameter by each of its names); those left out stay whole.
    """
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False, remove_duplicate=False):
            dim = splits.get(name, Split()).dim
            if dim is None:
                continue
            if parameter not in shards:
                runs = pieces(splits[name].parts or (parameter.shape[dim],), axis.size, axis.index)
                values = [parameter.detach().narrow(dim, run.start, len(run)) for run in runs]
                shard = torch.cat(values, dim) if len(values) > 1 else values[0]
                shard = shard.clone(memory_format=torch.contiguous_format)
                shards[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            module._parameters[name.rpartition(".")[2]] = shards[parameter]


# After the backward #


@torch.no_grad()
def reduce_partial(gradients: Sequence[Tensor], tp: Axis) -> None:
    """Sum gradients of `Split.partial` parameters over the ranks, in place: one all-reduce for each dtype and
    for each large one (of experts), bf16 in fp32.

    gradients: plain tensors, in the same order on every rank. Call it once an optimizer step.
    """
    if tp.size == 1:
        return
    large = [gradient for gradient in gradients if gradient.numel() >= LARGE]
    small: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel() < LARGE:
            small.setdefault(gradient.dtype, []).append(gradient)
    for alike in (*([gradient] for gradient in large), *small.values()):
        wide = torch.promote_types(alike[0].dtype, torch.float32)
        if len(alike) == 1 and alike[0].dtype == wide and alike[0].is_contiguous():
            dist.all_reduce(alike[0], group=tp.group)  # without a copy
            continue
        flat = torch.cat([gradient.flatten() for gradient in alike]).to(wide)
        dist.all_reduce(flat, group=tp.group)
        for gradient, summed in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
            gradient.copy_(summed.view_as(gradient))
