"""Documents that are longer than a model's positions: refused where it has a table of them, else named."""

from torch import nn
from transformers import PreTrainedModel

from meshtune.config import Config
from meshtune.data.pack import Dataset
from meshtune.data.prepare import Prepared
from meshtune.errors import UserError
from meshtune.model.anatomy import Anatomy
from meshtune.model.generation import context_of
from meshtune.plan.workload import positions_note


def position_sentences(
    config: Config, model: PreTrainedModel, parts: Anatomy, prepared: Prepared
) -> list[str]:
    """Sentences on documents beyond the model's positions; they depend neither on the rank nor on the layout.

    parts: of the whole model. Raises UserError for documents beyond a table of learned positions, and for a
    stream that allows them, whose documents are not known.
    """
    positions = context_of(model.config)
    if positions is not None:
        positions -= parts.first_position
    datasets = [data for data in (prepared.train, prepared.eval) if isinstance(data, Dataset)]
    lengths = [data.longest_document for data in datasets]
    longest = max(lengths) if isinstance(prepared.train, Dataset) else None
    note = positions_note(config, positions, longest)
    if note is None or positions is None:
        return []
    if has_position_table(model, parts, positions):
        tokens = config.data.seq_len if longest is None else longest
        raise UserError(
            f"{config.model.name} has a table of {positions:,} positions, so that no document can be longer: "
            f"{'a stream may have' if longest is None else 'one has'} {tokens:,} tokens. Set "
            f"data.seq_len={positions}."
        )
    return [note]


def has_position_table(model: PreTrainedModel, parts: Anatomy, positions: int) -> bool:
    """True if the model adds a learned embedding of each position to its tokens', as GPT-2 and OPT do."""
    return any(
        isinstance(module, nn.Embedding) and module.num_embeddings >= positions
        for path, module in model.get_submodule(parts.body).named_modules(prefix=parts.body)
        if path != parts.embed and not path.startswith(f"{parts.blocks}.")
    )
