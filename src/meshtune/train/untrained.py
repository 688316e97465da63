"""Added tokens that the rows use, while their rows of a frozen embedding or head were never trained.

Pretraining leaves the rows of reserved tokens as they were drawn, or weight decay takes them to zero.
Adapters can't make up for it: the model can't tell such tokens apart, and never learns to write them.
"""

import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meshtune.data.pack import LABELLED, PROMPT, Dataset
from meshtune.data.prepare import Prepared
from meshtune.data.recipe import Stream
from meshtune.errors import UserError
from meshtune.model.anatomy import Anatomy
from meshtune.model.files import context_of, few, resolve, weight_files
from meshtune.model.load import tables
from meshtune.model.lora import lora_layers
from meshtune.model.stored import StoredTable
from meshtune.plan.workload import positions_note
from meshtune.train.model import ModelSpec
from meshtune.units import on_first_rank

SEQUENCES = 1_000  # of the training data, in which tokens are looked for
SAMPLE = 1_000  # rows of a table whose median norm is a trained row's
SMALL = 0.05  # of the median norm: a row below it was never trained


def untrained_sentences(
    spec: ModelSpec,
    whole: PreTrainedModel,
    train: Dataset | Stream,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
    *,
    files: Sequence[Path] | None = None,
) -> list[str]:
    """A sentence that names such tokens and the remedy, if there are any; only on the first rank.

    whole: the model to train, with what is frozen; a few rows of its files are read. stop_ids: tokens that
    end an answer. files: the model's safetensors; None: they are resolved, which may download them.
    """
    embed, head = tables(whole)
    adapted = lora_layers(whole)
    frozen = {
        path: module
        for path, module in whole.named_modules()
        if module in (embed, head) and path not in adapted and not module.weight.requires_grad
    }
    if spec.init == "random" or not frozen or not on_first_rank():
        return []
    used, labelled = used_tokens(tokenizer, train, stop_ids)
    if files is None:
        name, revision, trust = str(spec.source), spec.revision, spec.trust_remote_code
        files = weight_files(resolve(name, revision=revision, weights=True, trust_remote_code=trust))
    ids = added_tokens(tokenizer)
    found: dict[int, None] = {}
    to_train = []
    for path, module in frozen.items():
        table = StoredTable.find(files, f"{path}.weight")  # none of a head that is tied to the embedding
        if table and (rows := untrained(table, ids, used if module is embed else labelled)):
            found |= dict.fromkeys(rows)
            to_train.append(path)
    if not found:
        return []
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(found))]
    if spec.lora:
        leaves = [path.rpartition(".")[2] for path in to_train]
        names = dict.fromkeys([*spec.lora.modules_to_save, *leaves])
        setting = f"lora.modules_to_save=[{', '.join(names)}]"
        remedy = f"Train them: {shlex.quote(setting)}."
    else:
        remedy = f"Take {' and '.join(f'{path}.weight' for path in to_train)} out of model.freeze."
    return [
        f"The rows use {few(tokens)}, which the model was never trained on (rows of {' and '.join(to_train)} "
        "that are zero, alike or far smaller than others), and which stay frozen: it can't tell them apart, "
        f"or learn to write them. {remedy}"
    ]


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of special and added tokens."""
    return sorted({*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids})


def used_tokens(
    tokenizer: PreTrainedTokenizerBase, train: Dataset | Stream, stop_ids: Sequence[int]
) -> tuple[set[int], set[int]]:
    """(Ids in the training data; those that are labelled), from its first sequences.

    Of a stream, whose rows are not known, the added tokens in the chat template and those that end an answer.
    """
    if not isinstance(train, Dataset):
        template, ids = str(tokenizer.chat_template or ""), added_tokens(tokenizer)
        texts, stops = tokenizer.convert_ids_to_tokens(ids), {*stop_ids}
        return stops | {id for id, text in zip(ids, texts, strict=True) if str(text) in template}, stops
    used, labelled = set[int](), set[int]()
    documents = (document for place in range(len(train)) for document in train.documents(place))
    for document in islice(documents, SEQUENCES):
        for stored in np.unique(document).tolist():
            used.add(stored & ~int(LABELLED | PROMPT))
            if stored >= LABELLED:
                labelled.add(stored & ~int(LABELLED | PROMPT))
    return used, labelled


def untrained(table: StoredTable, added: list[int], used: set[int]) -> list[int]:
    """The ids among `added` and `used` whose rows of a table were never trained.

    Their rows are zero, far smaller than others, or equal to the row of another added token.
    """
    added = [id for id in added if id < len(table)]
    if not used.intersection(added):
        return []
    typical = float(norms(table.rows(range(0, len(table), max(1, len(table) // SAMPLE)))).median())
    rows = table.rows(added)
    small = (norms(rows) <= SMALL * typical).tolist()
    _, group, sizes = rows.float().unique(dim=0, return_inverse=True, return_counts=True)
    alike = (sizes[group] > 1).tolist()
    return [id for id, one, other in zip(added, small, alike, strict=True) if id in used and (one or other)]


def norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows.float(), dim=1)


# Documents longer than the model's positions #


def position_sentences(
    name: str, seq_len: int, model: PreTrainedModel, parts: Anatomy, prepared: Prepared
) -> list[str]:
    """Sentences on documents beyond the model's positions; they depend neither on the rank nor on the layout.

    name: of the model. parts: of the whole one. Raises UserError for documents beyond a table of learned
    positions, and for a stream that allows them, whose documents are not known.
    """
    positions = context_of(model.config, parts.first_position)
    longest = prepared.longest_document
    note = positions_note(name, seq_len, positions, longest)
    if note is None or positions is None:
        return []
    if has_position_table(model, parts, positions):
        tokens = seq_len if longest is None else longest
        raise UserError(
            f"{name} has a table of {positions:,} positions, so that no document can be longer: "
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
