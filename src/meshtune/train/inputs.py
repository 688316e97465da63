"""Inputs of a run: tokenizer, encoder and prepared data; the loader of a data rank."""

from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from meshtune.data.encode import Encoder
from meshtune.data.loader import Loader
from meshtune.data.pack import Dataset, ids_of_stored
from meshtune.data.prepare import Prepared, sentences
from meshtune.data.recipe import Stream
from meshtune.errors import explained
from meshtune.layout import Layout
from meshtune.parallel.apply import width_multiple


class Inputs(NamedTuple):
    """The text side of a run."""

    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder
    prepared: Prepared


def first_texts(inputs: Inputs, most: int = 20) -> list[str]:
    """The texts of the first documents of the training data; none of a stream."""
    train = inputs.prepared.train
    if not isinstance(train, Dataset):
        return []
    documents = (document for place in range(len(train)) for document in train.documents(place))
    return [str(inputs.tokenizer.decode(ids_of_stored(document))) for document in islice(documents, most)]


def loader_of(
    train: Dataset | Stream,
    layout: Layout,
    data_rank: int,
    seed: int,
    state: dict[str, Any] | None = None,
) -> Loader:
    """Loader of a data rank's batches under a layout.

    state: a checkpoint's, to continue after it; None: from the beginning.

    Raises UserError if the state belongs to other data or another seed.
    """
    made = partial(
        Loader,
        train,
        global_batch_size=layout.global_batch_size,
        micro_batch_size=layout.micro_batch_size,
        seed=seed,
        data_rank=data_rank,
        data_ranks=layout.data_ranks,
        multiple=width_multiple(layout),
        uniform=layout.pp > 1,
    )
    if state is None:
        return made()
    with explained("The checkpoint has no usable position in the data", "Use one that a run wrote."):
        return made(state=state)


def stream_sentences(prepared: Prepared) -> list[str]:
    """Sentences about the rows that were cut, dropped or skipped of a stream so far; none for data on the
    disk, which were reported at the start.
    """
    if not isinstance(prepared.train, Stream):
        return []
    return sentences(prepared.stats | prepared.train.tally.values())
