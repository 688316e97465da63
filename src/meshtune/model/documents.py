"""Documents of packed rows, kept apart in modules that know nothing of documents.

    with documents_of(micro_batch):             around a forward

A *mixer*, recurrent or convolutional (Mamba, gated delta rules, short convolutions), carries a state from
token to token. Each document is given to it as a row of its own, so that it begins with an empty state:

    anatomy(model).mixers                       their paths, from a recorded forward (recorded.py)
    separate_documents(model, paths)            once: their forwards follow `documents_of`

Rows are grouped by length, each group as wide as its longest document, less than twice the shortest beyond
NARROW tokens: a causal mixer gives tokens the same values whatever stands behind them.

*Rotary embeddings* whose frequencies depend on a length (`longrope` and `dynamic`) take it in transformers
from the largest position of a whole micro-batch (`dynamic_rope_update`): one long document would change its
neighbours, and a loss would depend on what a document is packed with. Here each document has those of its
own length, as without packing:

    follow_documents(model)                     once
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from meshtune.data.batch import MicroBatch

Lengths = tuple[tuple[int, ...], ...]
RoPE = tuple[Tensor, Tensor]  # cosines and sines [batch, seq, features]

NARROW = 64  # tokens: documents up to here are in one group; mixers compute in chunks of this size

_micro_batch: ContextVar[MicroBatch | None] = ContextVar("micro_batch", default=None)


@contextmanager
def documents_of(micro_batch: MicroBatch | None) -> Iterator[None]:
    """Keep the documents of a micro-batch apart meanwhile; None: each row is one sequence."""
    token = _micro_batch.set(micro_batch)
    try:
        yield
    finally:
        _micro_batch.reset(token)


def current_documents() -> MicroBatch | None:
    """The micro-batch of the innermost `documents_of`."""
    return _micro_batch.get()


# Recurrent and convolutional mixers #


def separate_documents(model: nn.Module, paths: Sequence[str]) -> None:
    """Make the mixers at `paths` of `model` compute each document of `documents_of` separately, in place."""
    for path in paths:
        mixer = model.get_submodule(path)
        parameters = inspect.signature(type(mixer).forward).parameters.values()
        known = frozenset(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)
        # A partial of the bound method, and no closure: a deep copy of the model then runs its own mixers.
        mixer.forward = partial(_by_document, mixer.forward, known)


def keep_weights(model: nn.Module) -> None:
    """Let `model` keep its weights in evaluation, in place: RWKV halves some of them there, against overflow
    in fp16, until the next forward in training; checkpoints and exports in between would have the halves.
    """
    for module in model.modules():
        if hasattr(module, "_rescale_layers"):
            vars(module)["_rescale_layers"] = _nothing


def _nothing() -> None:
    pass


@torch.compiler.disable  # traced, every new set of document lengths would be compiled anew
def _by_document(forward: Callable[..., Any], known: frozenset[str], *args: Any, **kwargs: Any) -> Any:
    """Call a mixer's forward with each document as a row; as it is where each row is one document.

    known: names of its parameters; other keyword arguments are for attention, and are not handed on.
    """
    kwargs = {name: value for name, value in kwargs.items() if name in known}
    micro_batch = _micro_batch.get()
    if micro_batch is None or all(len(row) == 1 for row in micro_batch.documents):
        return forward(*args, **kwargs)
    hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    rows = _rows(micro_batch.documents, hidden.shape[1], hidden.device)
    outs, rest = [], ()
    for columns in rows.groups:
        taken = partial(_taken, columns, hidden.shape[:2])
        out = forward(*map(taken, args), **{name: taken(value) for name, value in kwargs.items()})
        if isinstance(out, tuple):
            out, *rest = out
        outs.append(out.flatten(0, 1))
    zero = outs[0].new_zeros(1, *outs[0].shape[1:])  # padding's
    whole = torch.cat([*outs, zero]).index_select(0, rows.back).view(*hidden.shape[:2], *zero.shape[1:])
    return (whole, *rest) if rest else whole


def _taken(columns: Tensor, shape: torch.Size, value: Any) -> Any:
    """The rows of a group from an argument [batch, seq, ...]; other arguments as they are."""
    if not isinstance(value, Tensor) or value.shape[1:2] != shape[1:]:
        return value
    value = value.expand(shape[0], *value.shape[1:]).flatten(0, 1)
    return value.index_select(0, columns.flatten()).view(*columns.shape, *value.shape[1:])


class _Rows(NamedTuple):
    """The documents of a micro-batch [batch, seq] as rows of groups, and the way back.

    Tokens are counted row by row: column c of row r is r · seq + c.
    """

    groups: tuple[Tensor, ...]  # [documents, longest]: the token of each place; behind a document, its last
    back: Tensor  # [batch · seq]: each token's place in the groups, one after the other; padding: the last


@lru_cache(maxsize=16)  # every mixer asks, and the backward again
def _rows(lengths: Lengths, seq: int, device: torch.device) -> _Rows:
    documents = defaultdict(list)  # (first token, tokens), by the logarithm of the length
    for row, tokens in enumerate(lengths):
        start = row * seq
        for length in tokens:
            if length:
                documents[(max(length, NARROW) - 1).bit_length()].append((start, length))
            start += length
    groups, places = [], 0
    back = np.full(len(lengths) * seq, -1)
    for _, group in sorted(documents.items()):
        starts, sizes = np.array(group).T
        columns = np.arange(sizes.max())
        tokens = starts[:, None] + np.minimum(columns, sizes[:, None] - 1)
        inside = columns < sizes[:, None]
        at = np.arange(places, places + tokens.size).reshape(tokens.shape)
        back[tokens[inside]] = at[inside]
        places += tokens.size
        groups.append(torch.from_numpy(tokens).to(device))
    back[back < 0] = places
    return _Rows(tuple(groups), torch.from_numpy(back).to(device))


# Rotary embeddings #


def follow_documents(model: nn.Module) -> None:
    """Make the rotary embeddings that depend on a length take each document's own, in place.

    Outside of `documents_of` they stay as they are.
    """
    for module in model.modules():
        if depends_on_length(module):
            module.forward = partial(_rotate_by_document, module)


def depends_on_length(module: nn.Module) -> bool:
    """True for rotary embeddings whose frequencies depend on a length."""
    types = vars(module).get("rope_type")
    kinds = types.values() if isinstance(types, dict) else [types]
    return any(kind == "longrope" or "dynamic" in (kind or "") for kind in kinds)


@torch.no_grad()
def _rotate_by_document(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> RoPE:
    """Return cosines and sines, from the frequencies of each token's document.

    x: for its dtype and device. position_ids [batch, seq]. layer_type: of a family with one kind of
    embedding for each.
    """
    kind = {} if layer_type is None else {"layer_type": layer_type}
    plain = partial(type(module).forward, module, x, **kind)
    micro_batch = _micro_batch.get()
    if micro_batch is None:
        return plain(position_ids)
    tokens = micro_batch.document_tokens()
    own = tokens.clone()
    limit = _limit(module, layer_type)
    own[own <= limit] = 0  # the frequencies of a short document do not depend on its length
    if _type(module, layer_type) == "longrope":
        own[own > 0] = limit + 1  # all long ones have the same
    lengths = own.unique().tolist()
    # Padding, of length 0, stands with the short documents: its positions must not decide their frequencies.
    position_ids = position_ids * (tokens > 0).to(position_ids.device)
    found: RoPE | None = None
    for length in lengths:
        of_length = (own == length).to(position_ids.device)
        # One column more, with the last position of a document of this length: it decides the frequencies.
        last = position_ids.new_full((len(position_ids), 1), max(length, 1) - 1)
        _reset(module, layer_type)
        cos, sin = (part[:, :-1] for part in plain(torch.cat([position_ids * of_length, last], 1)))
        mask = of_length[..., None]
        found = (cos, sin) if found is None else (cos.where(mask, found[0]), sin.where(mask, found[1]))
    assert found is not None
    return found


def _type(module: Any, layer_type: str | None) -> str:
    return module.rope_type if layer_type is None else module.rope_type[layer_type]


def _limit(module: Any, layer_type: str | None) -> int:
    """Tokens of a document beyond which the frequencies change."""
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    if _type(module, layer_type) == "longrope":
        return parameters["original_max_position_embeddings"]
    return module.original_max_seq_len


def _reset(module: Any, layer_type: str | None) -> None:
    """Undo what a longer document before left in a dynamic embedding."""
    if "dynamic" in _type(module, layer_type):
        prefix = "" if layer_type is None else f"{layer_type}_"
        module.register_buffer(
            f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False
        )
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
