"""Tensor parallelism (tp): each rank multiplies by its own rows or columns of every matrix; sequence
parallelism (sp): what lies between them is cut along the sequence.

            ╭───────────── attention ─────────────╮      ╭───────── mlp ─────────╮
    lookup ⊕ norm ⊢ q k v │ own heads │ o ⊕ + residual  norm ⊢ gate up │ down ⊕ +  …  norm ⊢ head │ own words

    ⊢  enter   sp: gather the sequence;                    else nothing. Backward: ⊕
    ⊕  leave   sp: sum over ranks, keep own tokens;        else sum.     Backward: ⊢

(Shoeybi et al. 2019, arXiv:1909.08053; sp: Korthikanti et al. 2022, arXiv:2205.05198.) A matrix before `│` is
cut by its rows, one after it by its columns. Which module is which comes from the family's own plan in
transformers (`anatomy.tensor_plan`); embedding and head are cut along the vocabulary.

The model keeps its modules and names. A cut parameter becomes a plain tensor, this rank's piece;
`split_model` says how each was cut. Some gradients are parts of a sum over the ranks (`Split.partial`): of
parameters that every rank holds whole but uses for its own tokens or heads. `reduce_partial` adds those up
once a step.

Where tp ranks see the same activations, dropout must mask the same, and where each sees its own, differently;
and a recomputed block must repeat both. So nothing of it is remembered: a block that drops draws one number
from the CPU generator, which is equal on all tp ranks and put back before a recomputation, and all of its
masks come from that number, mixed with the rank's where activations are its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtune.errors import UserError
from meshtune.model.anatomy import (
    TENSOR_STYLES,
    Anatomy,
    TensorStyle,
    attention_heads,
    cuts_heads,
    draws,
    repeated_heads,
    tensor_plan,
    traits,
)
from meshtune.parallel.exchange import exchange, gather, own, own_of_total, same, total
from meshtune.parallel.mesh import Axis
from meshtune.placement.rules import tensor_problems
from meshtune.placement.share import Split, piece

SEQUENCE, FEATURES = 1, 2  # dimensions of hidden states [batch, seq, hidden]


@dataclass(frozen=True)
class Vocabulary:
    """Which words' logits a rank computes: start … stop - 1; the others of `tp` have the rest."""

    tp: Axis
    start: int
    stop: int


def vocabulary_of(head: nn.Module) -> Vocabulary | None:
    """The words of a head that `split_model` has cut; None for a whole one."""
    return vars(head).get("vocabulary")


# How the modules of a cut model run #


@dataclass
class _Cut:
    """What the modules of one model share: the ranks, and the random numbers of the block that is running."""

    tp: Axis
    sequence: bool
    seed: int | None = None  # of the running block, where it draws; equal on all tp ranks
    switches: int = 0  # between common and own random numbers, in that block
    through: bool = False  # the last block has run: what the final norm gives next leaves the body
    before: list[Tensor] | None = None  # the generators' states where the embedding left the common numbers

    def enter(self, hidden: Tensor) -> Tensor:
        """Hidden states as a part of the model takes them: all tokens. Gradients add up over the ranks."""
        pair = (gather, own_of_total) if self.sequence else (same, total)
        return exchange(hidden, self.tp, SEQUENCE, *pair)

    def leave(self, addend: Tensor) -> Tensor:
        """Hidden states from what each rank adds to them."""
        pair = (own_of_total, gather) if self.sequence else (total, same)
        return exchange(addend, self.tp, SEQUENCE, *pair)

    def draw(self, *, own: bool) -> None:
        """From here on this rank's random numbers are its own, or those of all tp ranks."""
        if self.seed is not None:
            self.switches += 1
            # A tuple's hash mixes all bits, and is not salted as a string's would be.
            _seed(hash((self.seed, self.switches, self.tp.index + 1 if own else 0)))


def _enter_part(cut: _Cut, part: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """A hook before attention and mlp, which take hidden states first or by name."""
    if args:
        return (cut.enter(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": cut.enter(kwargs["hidden_states"])}


def _after_blocks(cut: _Cut, block: nn.Module, args: tuple, out: Any) -> None:
    """A hook after the last block: some families use their final norm before the first one, too."""
    cut.through = True


def _leave_body(cut: _Cut, norm: nn.Module, args: tuple, hidden: Tensor) -> Tensor:
    """A hook after the final norm: the head takes all tokens, and has a part of their gradient."""
    if not cut.through:
        return hidden
    cut.through = False
    return cut.enter(hidden)


def _rows(cut: _Cut, style: TensorStyle, module: nn.Module, x: Tensor) -> Tensor:
    """A linear layer of which this rank has some rows: some of the output features of every token."""
    cut.draw(own=False)
    out = type(module).forward(module, x)
    if style.whole:
        out = exchange(out, cut.tp, FEATURES, gather, own)
    cut.draw(own=not style.whole)
    return out


def _repeated(cut: _Cut, kv_heads: int, module: nn.Module, x: Tensor) -> Tensor:
    """A key or value projection that every rank has whole: each uses the head that its query heads need."""
    cut.draw(own=False)
    out = type(module).forward(module, x)
    cut.draw(own=True)
    return out.chunk(kv_heads, dim=-1)[cut.tp.index * kv_heads // cut.tp.size]


def _columns(cut: _Cut, style: TensorStyle, module: Any, x: Tensor) -> Tensor:
    """A linear layer of which this rank has some columns: an addend of all output features."""
    if style.whole:
        x = exchange(x, cut.tp, FEATURES, own, gather)
    cut.draw(own=True)
    bias, module._parameters["bias"] = module.bias, None  # the sum has it once, not once a rank
    try:
        out = type(module).forward(module, x)
    finally:
        module._parameters["bias"] = bias
    out = cut.leave(out)
    cut.draw(own=cut.sequence)
    return out if bias is None else out + bias


def _lookup(cut: _Cut, vocabulary: Vocabulary, draws_after: bool, module: nn.Module, ids: Tensor) -> Tensor:
    """An embedding of which this rank has the rows of some words."""
    if cut.sequence and ids.shape[1] % cut.tp.size:
        raise ValueError(
            f"Sequence parallelism gives each of {cut.tp.size} ranks as many tokens, but rows are "
            f"{ids.shape[1]} tokens wide; pad them to a multiple of {cut.tp.size}."
        )
    cut.through = False
    elsewhere = (ids < vocabulary.start) | (ids >= vocabulary.stop)
    found = type(module).forward(module, (ids - vocabulary.start).masked_fill(elsewhere, 0))
    hidden = cut.leave(found.masked_fill(elsewhere[..., None], 0))
    if draws_after and cut.sequence and module.training:
        seed = _drawn()
        cut.before = _states()
        _seed(hash((seed, cut.tp.index + 1)))
    return hidden


def _common_again(cut: _Cut, block: nn.Module, args: tuple) -> None:
    """A hook before the first block (and so outside of what is recomputed): undoes what `_lookup` did."""
    if cut.before is not None:
        _restore(cut.before)
        cut.before = None


def _seeded(cut: _Cut, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A block that draws random numbers: see above."""
    if not block.training:
        return type(block).forward(block, *args, **kwargs)
    seed = _drawn()
    before = _states()
    cut.seed, cut.switches = seed, 0
    try:
        cut.draw(own=cut.sequence)
        return type(block).forward(block, *args, **kwargs)
    finally:
        cut.seed = None
        _restore(before)


def _drawn() -> int:
    return int(torch.randint(2**62, (), device="cpu"))


def _seed(number: int) -> None:
    torch.default_generator.manual_seed(number % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number % 2**63)


def _states() -> list[Tensor]:
    """Of the CPU's generator, and of the GPU's where there is one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _restore(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


# Cutting a model #


def split_model(model: PreTrainedModel, anatomy: Anatomy, tp: Axis, *, sequence: bool) -> dict[str, Split]:
    """Cut `model` for this rank of `tp`, in place; how each parameter is cut, by name (tied ones by each).

    Parameters may lie on meta or have values. Afterwards the body returns the hidden states of all tokens,
    while those between blocks are this rank's own tokens if `sequence`; position_ids and documents are always
    those of the whole row, and the head gives the logits of the rank's own words (`vocabulary_of`). Call it
    after adapters are added and before the model is cut into stages, recomputed or sharded.

    Raises UserError where the family has no plan, or `tp` does not divide it.
    """
    named = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if tp.size == 1:
        return dict.fromkeys(named, Split())
    if problems := list(tensor_problems(traits(model), tp.size)):
        raise UserError(problems)
    plan = tensor_plan(model)
    assert not isinstance(plan, str)
    cut = _Cut(tp, sequence)
    repeated = repeated_heads(model, plan, tp.size)
    splits = dict.fromkeys(named, Split(partial=sequence))  # outside attention and mlp: whole, own tokens
    for path, block in model.get_submodule(anatomy.blocks).named_children():
        inside = _block_splits(block, anatomy, plan, repeated, sequence)
        splits |= {f"{anatomy.blocks}.{path}.{name}": split for name, split in inside.items()}
    for path in (anatomy.embed, anatomy.head):
        splits |= _named(path, model.get_submodule(path), _linear_splits(TensorStyle(0), sequence))

    _cut_vocabulary(model, anatomy, cut)
    for block in model.get_submodule(anatomy.blocks).children():
        _cut_block(block, anatomy, plan, repeated, cut, attention_heads(model))
    _cut_parameters(model, splits, tp)
    return splits


def _linear_splits(style: TensorStyle, sequence: bool) -> dict[str, Split]:
    """How the parameters of a linear layer are cut, adapters (B · A beside the weight) included."""
    if style.dim == 0:
        return {"weight": Split(0), "bias": Split(0), "lora_A": Split(partial=True), "lora_B": Split(0)}
    bias = Split(partial=sequence)  # added after the sum: to own tokens, or to all on every rank
    return {"weight": Split(1), "bias": bias, "lora_A": Split(1), "lora_B": Split(partial=True)}


def _named(path: str, module: nn.Module, splits: Mapping[str, Split]) -> dict[str, Split]:
    return {f"{path}.{name}": splits[name] for name, _ in module.named_parameters(recurse=False)}


def _block_splits(
    block: nn.Module, anatomy: Anatomy, plan: Mapping[str, str], repeated: frozenset[str], sequence: bool
) -> dict[str, Split]:
    """How the parameters of a block's attention and mlp are cut, by name inside the block."""
    parts = (f"{anatomy.attention}.", f"{anatomy.mlp}.")
    # What the plan does not name comes where all ranks have the same whole activations.
    splits = {name: Split() for name, _ in block.named_parameters() if name.startswith(parts)}
    for path, module in block.named_modules():
        if path in plan:
            style = TENSOR_STYLES[plan[path]]
            if style.dim is None or path in repeated:
                splits |= {f"{path}.{name}": Split(partial=True) for name, _ in module.named_parameters()}
            else:
                splits |= _named(path, module, _linear_splits(style, sequence))
    return splits


def _cut_vocabulary(model: PreTrainedModel, anatomy: Anatomy, cut: _Cut) -> None:
    embed: Any = model.get_submodule(anatomy.embed)
    head: Any = model.get_submodule(anatomy.head)
    for module in (embed, head):
        module.vocabulary = Vocabulary(cut.tp, *piece(module.weight.shape[0], cut.tp.size, cut.tp.index))
    words, padding = embed.vocabulary, embed.padding_idx
    if padding is not None:  # the row that learns nothing
        embed.padding_idx = padding - words.start if words.start <= padding < words.stop else None
    trunk = model.get_submodule(anatomy.blocks.rpartition(".")[0])
    blocks = model.get_submodule(anatomy.blocks)
    draws_after = draws([trunk, *(child for child in trunk.children() if child is not blocks)])
    embed.forward = partial(_lookup, cut, words, draws_after, embed)
    first, *_, last = [*blocks.children()] * 2
    first.register_forward_pre_hook(partial(_common_again, cut))
    last.register_forward_hook(partial(_after_blocks, cut))
    model.get_submodule(anatomy.norm).register_forward_hook(partial(_leave_body, cut))


def _cut_block(
    block: nn.Module,
    anatomy: Anatomy,
    plan: Mapping[str, str],
    repeated: frozenset[str],
    cut: _Cut,
    heads: tuple[int, int],
) -> None:
    query_heads, kv_heads = heads
    for path, module in block.named_modules():
        if path in repeated:
            module.forward = partial(_repeated, cut, kv_heads, module)
        elif path in plan:
            style = TENSOR_STYLES[plan[path]]
            if style.dim is not None:
                module.forward = partial((_rows, _columns)[style.dim], cut, style, module)
    attention: Any = block.get_submodule(anatomy.attention)
    for part in (attention, block.get_submodule(anatomy.mlp)):
        part.register_forward_pre_hook(partial(_enter_part, cut), with_kwargs=True)
    if cuts_heads(plan, anatomy) and "num_key_value_groups" in vars(attention):
        attention.num_key_value_groups = query_heads // cut.tp.size // max(1, kv_heads // cut.tp.size)
    if draws(block.modules()):
        block.forward = partial(_seeded, cut, block)


def _cut_parameters(model: nn.Module, splits: Mapping[str, Split], tp: Axis) -> None:
    """Put this rank's pieces in the place of what is cut; tied parameters stay one."""
    pieces: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False, remove_duplicate=False):
            dim = splits[name].dim
            if dim is None:
                continue
            if parameter not in pieces:
                start, stop = piece(parameter.shape[dim], tp.size, tp.index)
                mine = parameter.detach().narrow(dim, start, stop - start)
                mine = mine.clone(memory_format=torch.contiguous_format)
                pieces[parameter] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
            module._parameters[name.rpartition(".")[2]] = pieces[parameter]


# After the backward #


@torch.no_grad()
def reduce_partial(gradients: Sequence[Tensor], tp: Axis) -> None:
    """Sum gradients of `Split.partial` parameters over the ranks, in place: one message for each dtype, bf16
    ones in fp32.

    Plain tensors, in the same order on every rank; once an optimizer step.
    """
    if tp.size == 1:
        return
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in alike])
        flat = flat.to(torch.promote_types(dtype, torch.float32))
        dist.all_reduce(flat, group=tp.group)
        for gradient, summed in zip(alike, flat.split([g.numel() for g in alike]), strict=True):
            gradient.copy_(summed.view_as(gradient))
