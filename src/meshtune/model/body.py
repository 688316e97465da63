"""Run a Hugging Face model's body, embeddings, blocks and last norm, on a packed micro-batch: no head, no
cache.

The lengths of the documents go down to meshtune's attention as the keyword argument `documents`. With any
other attention Hugging Face itself keeps documents apart, by the positions that restart (only without a
cache and a mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from meshtune.data.batch import MicroBatch
    from meshtune.model.anatomy import Anatomy


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
    return body(**begin, position_ids=micro_batch.position_ids, use_cache=False, **packed).last_hidden_state
