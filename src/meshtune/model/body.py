"""Run the body of a Hugging Face model, embeddings, blocks and last norm, on a packed micro-batch, or its
head on hidden states: no cache.

The lengths of the documents go down to meshtune's attention as the keyword argument `documents`. With any
other attention Hugging Face itself keeps documents apart, by the positions that restart (only without a
cache and a mask).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from meshtune.model.anatomy import Anatomy, StandIn, anatomy, aside_of, head_runner
from meshtune.model.documents import documents_of
from meshtune.model.recorded import kinds_of_blocks

if TYPE_CHECKING:
    from meshtune.data.batch import MicroBatch


# Names of meshtune's attention in a model's config: as it is, and recomputed in the backward.
ATTENTION_NAMES = ("meshtune", "meshtune_recompute")


class Documents:
    """Document lengths of a micro-batch, a list for each row (`MicroBatch.documents`), as one opaque value.

    A compiled block hands it on without looking inside; it would be compiled anew for every new tuple of
    numbers.
    """

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.lengths = lengths


def body_forward(
    model: nn.Module, anatomy: Anatomy, micro_batch: MicroBatch, hidden: Tensor | None = None
) -> Tensor:
    """Hidden states [batch, seq, hidden] after the last norm.

    hidden: input [batch, seq, hidden] of the body's first block; None: the embeddings of the micro-batch's
    ids. Documents are kept apart: by `documents`, their lengths, or with other attention by their positions.
    """
    body: Any = model.get_submodule(anatomy.body)
    ours = body.config._attn_implementation in ATTENTION_NAMES
    packed = {"documents": Documents(micro_batch.documents)} if ours else {}
    begin = {"input_ids": micro_batch.input_ids} if hidden is None else {"inputs_embeds": hidden}
    with documents_of(micro_batch):
        positions = micro_batch.position_ids + anatomy.first_position
        return body(**begin, position_ids=positions, use_cache=False, **packed).last_hidden_state


def text_forward(model: PreTrainedModel, **inputs: Tensor) -> None:
    """Run one forward only on text, without a cache: the whole model's, or, where parts of it were set
    aside, that of its body and then of its head.
    """
    if not aside_of(model):
        model(**inputs, use_cache=False)
        return
    parts = anatomy(model)
    hidden = model.get_submodule(parts.body)(**inputs, use_cache=False).last_hidden_state
    with head_only(model, parts) as logits_of:
        logits_of(hidden.flatten(0, 1))


class _BodyOutput(BaseModelOutputWithPast):
    """Hidden states and nothing else: what some bodies return besides (cross attentions, ...) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Stub(nn.Module):
    """Stands for the body while the model's forward runs only its head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        vars(self)["body"] = body  # not a part of this module

    def __getattr__(self, name: str) -> Any:
        """Some heads call a part of the body (OPT its decoder), which is the stub too; some read a factor of
        the logits there (Falcon-H1).
        """
        found = getattr(vars(self)["body"], name)
        return self if isinstance(found, nn.Module) else found

    def forward(self, *_: Any, **__: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=self.hidden)  # type: ignore[arg-type]


@contextmanager
def head_only(model: nn.Module, anatomy: Anatomy) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function: hidden [tokens, hidden] -> logits [tokens, vocabulary], by the model's own forward.

    A head split by tp gives only the logits of its vocabulary entries. While the context is open, the body
    of `model` is replaced by a stub, in a model that also sees or hears with all that lies around it.

    `forward` and not a call: hooks on the model, such as those of a sharded root, have run or will run around
    all of this.
    """
    runner_path, body_path = head_runner(anatomy)
    runner: Any = model.get_submodule(runner_path)
    name = body_path.rpartition(".")[2]
    body = runner.get_submodule(name)
    stub = _Stub(body)

    def logits_of(hidden: Tensor) -> Tensor:
        stub.hidden = hidden[None]
        # Some families read the shape of their inputs before they call the body (Gemma 4).
        logits = runner.forward(inputs_embeds=stub.hidden, use_cache=False, return_dict=True).logits
        return logits.squeeze(0)  # not logits[0], whose backward copies the gradient

    runner._modules[name] = stub
    try:
        yield logits_of
    finally:
        runner._modules[name] = body


# Tables of positions #


def cast_position_tables(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the tables of positions that are added to embeddings (XGLM's) to the passes' dtype, in place.

    transformers computes them in the dtype that a model is built in. In fp32 they would make all hidden
    states fp32, which matrices in bf16 can't be multiplied with.
    """
    columns = model.get_input_embeddings().get_parameter("weight").shape[-1]
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point() and buffer.shape[1:] == (columns,):
                module._buffers[name] = buffer.to(dtype)


# Blocks that compute what another one does #

# A model repeats a block with other weights. To count it, one forward of each kind is enough: hidden states
# pass the others by, as they do in a pipeline on a rank that lacks those blocks.

OF_MODULES = frozenset(vars(nn.Module()))  # attributes of all modules


def repeated_blocks(model: PreTrainedModel, blocks: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the paths of the blocks that differ from an earlier one only in their index and values, and have
    the same kinds before them, each with the path of that one. First and last block are not among them.

    blocks: path of their list. settings: values by names of parameters or modules, which must be the same.
    """
    layers = dict(model.get_submodule(blocks).named_children())
    parameters = [id(parameter) for block in layers.values() for parameter in block.parameters()]
    if len(set(parameters)) < len(parameters):  # they share some
        return {}
    inside: dict[str, dict[str, Any]] = {name: {} for name in layers}
    for path, value in settings.items():
        name, _, rest = path.removeprefix(f"{blocks}.").partition(".")
        inside.get(name, {})[rest] = value
    words = list(zip(kinds_of_blocks(model, blocks), inside.values(), strict=True))
    modules, kinds, firsts = list(layers.values()), list[int](), list[int]()
    for place, block in enumerate(modules):
        like = (
            first for first in firsts
            if words[first] == words[place] and _alike(modules[first], block, first, place)
        )  # fmt: skip
        kinds.append(next(like, place))
        firsts += [place] * (kinds[-1] == place)
    same: dict[str, str] = {}
    traced: dict[tuple[int, frozenset[int]], str] = {}
    for place, name in list(enumerate(layers))[1:-1]:
        like = traced.setdefault((kinds[place], frozenset(kinds[:place])), name)
        if like != name:
            same[f"{blocks}.{name}"] = f"{blocks}.{like}"
    return same


def _alike(first: nn.Module, other: nn.Module, first_index: int, index: int) -> bool:
    """True if two blocks of the same classes differ only in values of parameters, and in their index."""

    def shapes(block: nn.Module) -> list[Any]:
        buffers = [(name, buffer.shape) for name, buffer in block.named_buffers()]
        return [buffers, *((name, p.shape, p.requires_grad) for name, p in block.named_parameters())]

    def same(one: Any, its: Any) -> bool:
        if type(one) is not type(its):
            return False
        if isinstance(one, partial):  # of an activation function
            one, its = ((it.func, it.args, it.keywords) for it in (one, its))
        plain = isinstance(one, int | float | str | tuple)
        return one is its or (plain and (one == its or (one, its) == (first_index, index)))

    attributes = (
        [{name: value for name, value in vars(module).items() if name not in OF_MODULES} for module in pair]
        for pair in zip(first.modules(), other.modules(), strict=True)
    )
    return shapes(first) == shapes(other) and all(
        one.keys() == its.keys() and all(same(one[name], its[name]) for name in one)
        for one, its in attributes
    )


@contextmanager
def passed_by(model: nn.Module, blocks: str, same: Iterable[str]) -> Iterator[None]:
    """Let hidden states pass the blocks `same`, paths in the list `blocks`, as they are."""
    layers = model.get_submodule(blocks)
    whole = dict(layers.named_children())
    for path in same:
        name = path.rpartition(".")[2]
        layers._modules[name] = StandIn(whole[name])
    try:
        yield
    finally:
        layers._modules.update(whole)


@contextmanager
def each_once(model: nn.Module, blocks: str) -> Iterator[None]:
    """Raise RuntimeError unless a forward calls each block of the list once, which returns one tensor."""
    layers, calls = list(model.get_submodule(blocks).children()), Counter[nn.Module]()

    def called(block: nn.Module, _: Any, out: Any) -> None:
        calls[block] += 1 if isinstance(out, Tensor) else 2

    hooks = [block.register_forward_hook(called) for block in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if any(calls[block] != 1 for block in layers):
        raise RuntimeError("its blocks are not called once each, or return more than hidden states")
