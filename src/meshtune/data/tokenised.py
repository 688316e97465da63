"""Rows that are tokenised already: `input_ids`, with `labels` or masks, checked against each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.data.example import BadRow, Ids

IGNORED = -100  # a label that is not trained on, as in transformers
MASKS = ("completion_mask", "assistant_masks")  # 1: trained on; TRL's names


def ids_of(columns: Mapping[str, list | None]) -> Ids:
    """The token ids of a row and which are labelled. Raises BadRow if its columns contradict each other.

    columns: input_ids, and the others or None. Labels are aligned with the ids, as transformers has them: the
    id itself where it is trained on, else -100. Without labels and masks everything is labelled. Positions
    that attention_mask leaves out at either end are padding and removed.
    """
    ids = _whole_numbers("input_ids", columns["input_ids"] or [])
    if not ids:
        raise BadRow("no tokens", "input_ids is empty")
    given = {name: value for name, value in columns.items() if name != "input_ids" and value is not None}
    for name, value in given.items():
        if len(value) != len(ids):
            raise BadRow(
                f"{name} of another length", f"{name} has {len(value):,} values, input_ids {len(ids):,}"
            )
    start, stop = _unpadded(_zeros_and_ones("attention_mask", given.get("attention_mask", [1] * len(ids))))
    ids = ids[start:stop]
    if "position_ids" in given and given["position_ids"][start:stop] != list(range(len(ids))):
        raise BadRow(
            "positions that are not 0, 1, 2, …",
            "position_ids does not count from 0 without a gap, as in rows that pack several documents; give "
            "each document a row of its own, data.packing packs them",
        )
    labelled = [True] * len(ids)
    for name in MASKS:
        if name in given:
            mask = _zeros_and_ones(name, given[name])[start:stop]
            labelled = [one and other == 1 for one, other in zip(labelled, mask, strict=True)]
    if "labels" in given:
        from_labels = _labelled(_whole_numbers("labels", given["labels"])[start:stop], ids)
        if from_labels != labelled and any(name in given for name in MASKS):
            raise BadRow("labels and masks differ", "labels and the mask label other tokens; keep one")
        labelled = from_labels
    return Ids(tuple(ids), tuple(labelled))


def _labelled(labels: Sequence[int], ids: Sequence[int]) -> list[bool]:
    for at, (label, id) in enumerate(zip(labels, ids, strict=True)):
        if label not in (id, IGNORED):
            raise BadRow(
                "a label that is not its token",
                f"labels has {label} at position {at}, where input_ids has {id}; a label is the token "
                f"itself, or {IGNORED} where it is not trained on",
            )
    return [label != IGNORED for label in labels]


def _whole_numbers(name: str, values: Sequence[Any]) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRow("wrong type", f"{name} has {str(value)[:20]} in it, expected whole numbers")
    return list(values)


def _zeros_and_ones(name: str, values: Sequence[Any]) -> list[int]:
    for value in values:
        if not isinstance(value, int) or value not in (0, 1):
            raise BadRow("wrong type", f"{name} has {str(value)[:20]} in it, expected 0 and 1")
    return [int(value) for value in values]


def _unpadded(mask: Sequence[int]) -> tuple[int, int]:
    """(First, behind the last) of the ones in an attention mask. Raises BadRow for zeros between them."""
    if 1 not in mask:
        raise BadRow("no tokens", "attention_mask is 0 everywhere")
    start, stop = mask.index(1), len(mask) - list(reversed(mask)).index(1)
    if 0 in mask[start:stop]:
        raise BadRow("a gap in attention_mask", "attention_mask has a 0 between ones, expected padding only")
    return start, stop
