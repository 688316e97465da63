"""Recurrent and convolutional mixers (Mamba, gated delta rules, short convolutions) on packed rows: each
document begins with an empty state.

A mixer carries a state from token to token and knows nothing of documents. Those of packed rows are given to
it as rows of their own, so that it computes what it would for each document separately:

    anatomy(model).mixers                their paths, from a recorded forward (recorded.py)
    separate_documents(model, paths)     once: their forwards follow `documents_of`
    with documents_of(lengths):          around a forward

Rows are grouped by length, each group as wide as its longest document, less than twice the shortest beyond
NARROW tokens: a causal mixer gives tokens the same values whatever stands behind them.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Lengths = tuple[tuple[int, ...], ...]

NARROW = 64  # tokens: documents up to here are in one group; mixers compute in chunks of this size

_lengths: ContextVar[Lengths | None] = ContextVar("lengths", default=None)


@contextmanager
def documents_of(lengths: Lengths | None) -> Iterator[None]:
    """Keep these documents apart in the mixers that run meanwhile.

    lengths: of each row's documents from column 0 on; None: each row is one sequence.
    """
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


def current_documents() -> Lengths | None:
    """The document lengths of the innermost `documents_of`."""
    return _lengths.get()


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
    lengths = _lengths.get()
    if lengths is None or all(len(row) == 1 for row in lengths):
        return forward(*args, **kwargs)
    hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    rows = _rows(lengths, hidden.shape[1], hidden.device)
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
