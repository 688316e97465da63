"""Bytes of model states on a rank: weights, gradients and optimizer state.

    elements of parameters x bytes of each copy of one  ->  held_states

One formula for a single rank and for tens of thousands of layouts: elements and layouts are floats or arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshtune.optimizers import OPTIMIZERS
from meshtune.precision import DTYPE_BYTES, PRECISIONS

if TYPE_CHECKING:
    from meshtune.placement.columns import Columns, Number

LOSS_CHUNK_TOKENS = 1024  # whose logits exist at a time on a rank: the one large tensor next to the states
# A compiled loss takes up to four times these tokens while their logits fit in 1/64 of the GPU's memory: the
# head's gradient is added up once a chunk.
LONGER_CHUNKS, LOSS_SHARE = 4, 1 / 64


def loss_chunk_tokens(memory: float, vocabulary: Number, element: Number) -> Number:
    """Tokens whose logits exist at a time, LOSS_CHUNK_TOKENS times a power of two.

    memory: bytes of the GPU where the loss is compiled, which holds logits and their gradient; 0 elsewhere.
    vocabulary: logits of a token on a rank. element: bytes of one.
    """
    fitting = LOSS_SHARE * memory / (2 * element * np.maximum(vocabulary, 1) * LOSS_CHUNK_TOKENS)
    return LOSS_CHUNK_TOKENS * 2 ** np.floor(np.log2(np.clip(fitting, 1, LONGER_CHUNKS)))


class Copies(NamedTuple):
    """Bytes per parameter of each copy that training holds of it."""

    weight: float  # that forward and backward compute with
    gradient: float  # that a backward writes
    accumulated: float  # of the gradients' sum over micro-batches and ranks
    master: float  # of the wider copy that the optimizer updates; 0: it updates the weight itself
    optimizer: float  # state of the optimizer, masters aside
    beside: float = 0.0  # 1: the sum is a buffer next to the gradient, from the start; 0: it replaces it
    matrix_saving: float = 0.0  # by which `optimizer` is less in the blocks' matrices (census.is_matrix)

    @property
    def trained(self) -> float:
        """Bytes per parameter of the copy that the optimizer updates."""
        return self.master or self.weight

    @property
    def flattened(self) -> float:
        """Bytes per parameter of a gradient, and of its flat copy if the all-reduce's buffer is wider."""
        return self.gradient * (2 if self.gradient < self.accumulated else 1)

    @property
    def sharded_gradient(self) -> float:
        """Bytes per parameter of a gradient that FSDP has reduced, added up over micro-batches."""
        return max(self.trained, self.accumulated)


def copies_of(precision: str, reduce_dtype: str, optimizer: str) -> Copies:
    """Bytes of the copies that this engine holds of a trained parameter.

    The arguments are the settings train.precision, train.reduce_dtype and train.optimizer; raises UserError
    for a value that is unknown.
    """
    dtypes, row = PRECISIONS[precision], OPTIMIZERS[optimizer]
    state = row.bytes_per_parameter(dtypes.trained)
    rest = OPTIMIZERS[row.but_matrices].bytes_per_parameter(dtypes.trained) if row.but_matrices else state
    return Copies(
        weight=DTYPE_BYTES[dtypes.compute],
        gradient=DTYPE_BYTES[dtypes.gradient],
        accumulated=DTYPE_BYTES[dtypes.summed(reduce_dtype)],
        master=DTYPE_BYTES[dtypes.trained] if dtypes.trained != dtypes.compute else 0,
        optimizer=rest,
        matrix_saving=rest - state,
    )


class Elements(NamedTuple):
    """Numbers of elements of a rank's parameters, after tp and pp."""

    whole: Number  # trained and frozen, before ZeRO shards them
    trained: Number  # trained, before ZeRO shards them
    shard: Number  # in the rank's ZeRO shard; equal to `whole` without ZeRO
    trained_shard: Number  # in the shard and trained
    matrices: Number = 0.0  # trained, in the blocks' matrices, before ZeRO shards them


class States(NamedTuple):
    """Bytes of model states on a rank."""

    weights: Number  # that stay on the rank: all of them, or its ZeRO shard, which in FSDP is the masters
    gradients: Number
    optimizer: Number  # the optimizer's state, and masters that lie next to the weights
    gathered: Number = 0.0  # whole compute weights that ZeRO-1 and -2 of FSDP hold next to the shard
    host: Number = 0.0  # in host memory: what `optimizer` says of others

    @property
    def total(self) -> Number:
        """Bytes on the device."""
        return sum(self[:-1])

    def offloaded(self) -> States:
        """The same with the optimizer's bytes in host memory."""
        return self._replace(optimizer=0.0 * self.optimizer, host=self.optimizer)


def held_states(
    copies: Copies, elements: Elements, layouts: Columns, *, shards_masters: bool = True
) -> States:
    """Bytes of model states on a rank at the end of a step's last backward.

    elements: of the rank. shards_masters: ZeRO's shards are the masters, from which weights are gathered, as
    in FSDP and this engine: they count as `weights`, not as `optimizer`. False: weights stay next to sharded
    masters, which count as `optimizer`. Without ZeRO both are the same.
    """
    zero = layouts.zero
    sharded, accumulates = zero > 0, layouts.gradient_accumulation_steps > 1
    replicas = np.where(sharded, layouts.dp_replicate, layouts.parameter_ranks)
    is_sum = accumulates | (replicas > 1) | (copies.beside > 0)
    gradient = np.where(is_sum, copies.accumulated, copies.gradient)
    gradient = gradient + copies.beside * copies.gradient
    master_and_state = copies.master + copies.optimizer
    if not shards_masters:
        return States(
            weights=np.where(zero == 3, elements.shard, elements.whole) * copies.weight,
            gradients=np.where(zero >= 2, elements.trained_shard, elements.trained) * gradient,
            optimizer=np.where(sharded, elements.trained_shard, elements.trained) * master_and_state,
        )
    # forward and backward compute with what is gathered from the shards
    frozen_shard = elements.shard - elements.trained_shard
    whole_sums = (zero < 2) & accumulates  # ZeRO-1 sums whole gradients, and shards the sum at the end
    return States(
        weights=np.where(
            sharded,
            elements.trained_shard * copies.trained + frozen_shard * copies.weight,
            elements.whole * copies.weight,
        ),
        gathered=np.where(sharded & (zero < 3), elements.whole * copies.weight, 0.0),
        gradients=np.where(
            sharded,
            np.where(
                whole_sums,
                elements.trained * copies.accumulated,
                elements.trained_shard * copies.sharded_gradient,
            ),
            elements.trained * gradient,
        ),
        optimizer=np.where(
            sharded,  # optimizers with a matrix_saving need whole matrices: they are refused here
            elements.trained_shard * copies.optimizer,
            elements.trained * master_and_state - elements.matrices * copies.matrix_saving,
        ),
    )


def pinned_bytes(size: Number) -> Number:
    """Bytes of a buffer of pinned host memory for `size` bytes: torch's allocator takes powers of two."""
    return np.exp2(np.ceil(np.log2(np.maximum(size, 1.0))))
