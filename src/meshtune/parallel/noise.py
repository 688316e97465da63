"""NEFTune: uniform noise on the embeddings in training (Jain et al. 2023, arXiv:2310.05914).

Each element of a token's embedding gets a number in ±alpha / √(tokens of its document · hidden). It is a hash
of the run's seed, the global batch, the row's tokens, the column and the feature, and no draw from a
generator: so it is the same in every layout, and after a checkpoint is resumed.

    add_noise   whole rows of a micro-batch        -> a key and a size for each column; cp and sp take theirs
    adding      output of the embedding's forward  -> with the noise of its columns
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshtune.data.batch import MicroBatch, Noise
from meshtune.model.anatomy import Anatomy

# Steele et al. 2014 (SplitMix64), as signed numbers: torch has no unsigned arithmetic.
GAMMA, FIRST, SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
SLICE_COLUMNS = 256  # whose noise is made at a time: 64-bit numbers are larger than the embeddings


@dataclass(frozen=True)
class Neftune:
    """NEFTune (Jain et al. 2023): alpha and seed of the uniform noise added to embeddings in training."""

    alpha: float
    seed: int


def add_noise(micro_batch: MicroBatch, neftune: Neftune, batch: str) -> MicroBatch:
    """Give a micro-batch of whole rows the keys and sizes of its noise.

    batch: a text that no other global batch of the run has, the same on all ranks.
    """
    digest = hashlib.blake2b(f"{neftune.seed} {batch}".encode(), digest_size=8).digest()
    ids = micro_batch.input_ids
    columns = mixed(torch.arange(ids.shape[1]) * GAMMA)
    rows = (ids * columns).sum(1) + int.from_bytes(digest, "big", signed=True)
    lengths = micro_batch.document_tokens()
    sizes = torch.where(lengths > 0, neftune.alpha / lengths.clamp(min=1).double().sqrt(), 0.0)
    return replace(micro_batch, noise=Noise(mixed(mixed(rows)[:, None] + columns), sizes))


@contextmanager
def adding(model: nn.Module, anatomy: Anatomy, noise: Noise | None) -> Iterator[None]:
    """While open, the embedding's output has the noise added; None: it is left as it is."""
    if noise is None:
        yield
        return
    embedding = model.get_submodule(anatomy.embed)

    def hook(module: nn.Module, args: tuple, hidden: Tensor) -> Tensor:
        return hidden + _uniform(*noise, hidden)

    handle = embedding.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _uniform(keys: Tensor, sizes: Tensor, like: Tensor) -> Tensor:
    """Numbers in ± size / √hidden, shaped as `like` [batch, seq, hidden]. keys, sizes: [batch, seq]."""
    made, hidden = torch.empty_like(like), like.shape[-1]
    features = torch.arange(hidden, device=like.device) * GAMMA
    for start in range(0, like.shape[1], SLICE_COLUMNS):
        part = slice(start, start + SLICE_COLUMNS)
        bits = (mixed(keys[:, part, None] + features) >> 40) & (2**24 - 1)
        unit = bits.double() / 2**23 - 1
        made[:, part] = (unit * (sizes[:, part, None] / math.sqrt(hidden))).to(made.dtype)
    return made


def mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser of each int64."""
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x shifted right, zeros coming in; torch's >> brings the sign in."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
