"""Rows of data sets that the library `datasets` reads: of the hub, and in folders that it wrote."""

from collections.abc import Iterator
from typing import Any

from meshtune.data.columns import ArrowRow
from meshtune.data.example import Origin, Source
from meshtune.data.files import DataFile, data_like
from meshtune.data.rows import RawRow
from meshtune.errors import UserError, reason_of


def hub_rows(source: Source, file: DataFile, streaming: bool, start: int) -> Iterator[RawRow]:
    """Read a data set of the hub from row `start` on; no code from it is run (`datasets` reads data files).

    file: of the data set, whose size and share are kept. streaming: see `readers.raw_rows`. Raises UserError
    if it, or `source.split`, can't be read.
    """
    dataset = _load_hub(source, streaming)
    if streaming:
        rows = dataset.skip(start) if start else dataset
    else:
        rows = dataset.select(range(min(start, len(dataset)), len(dataset)))
        file.size = dataset.data.nbytes
    for number, value in enumerate(rows, start):
        if not streaming:
            file.share = number / len(dataset)
        yield Origin(source.path, number + 1, number), ArrowRow(value)


def _load_hub(source: Source, streaming: bool) -> Any:
    import datasets  # takes a second to import, and local files don't need it

    name, _, configuration = source.path.partition(":")
    try:
        return datasets.load_dataset(name, configuration or None, split=source.split, streaming=streaming)
    except Exception as error:
        raise UserError(
            f"{source.path} is not a file or folder here{data_like(source.path) or '.'} The hub data set of "
            f"that name can't be read (split {source.split}): {reason_of(error)}"
        ) from error


def saved_rows(source: Source, file: DataFile, start: int) -> Iterator[RawRow]:
    """Read a folder written by `Dataset.save_to_disk`, or the split `source.split` of one written by
    `DatasetDict.save_to_disk`, from row `start` on. Raises UserError if that split is missing.
    """
    import datasets

    try:
        saved = datasets.load_from_disk(file.path)
    except Exception as error:
        raise UserError(f"{file} is no folder that datasets can load: {reason_of(error)}") from error
    if isinstance(saved, datasets.DatasetDict):
        if source.split not in saved:
            raise UserError(f"{file} has no split {source.split}; it has {', '.join(map(str, saved))}.")
        saved = saved[source.split]
    elif source.split != "train":
        raise UserError(
            f"{file} has no splits, so split={source.split} would read all its rows; leave it out."
        )
    for number in range(start, len(saved)):
        file.share = number / len(saved)
        yield Origin(file.path, number + 1, number), ArrowRow(saved[number])


def hub_revision(source: Source) -> str:
    """The data set's commit on the hub; where the hub can't be reached, the fingerprint of the local copy."""
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(source.path.partition(":")[0]).sha)
    except Exception:
        return str(_load_hub(source, streaming=False)._fingerprint)
