"""Layouts as columns of numbers, and back.

    Columns.of(layouts) ──> one array for each field of Layout, by its name ──> layout_at(columns, place)

A field that names one of several choices is the index of its choice (`layout.CHOICES`); None, which stands
for all, is infinite. What is computed from columns takes floats as well as arrays, so that one formula
explains a layout and ranks tens of thousands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from meshtune.layout import (
    AXES,
    CHOICES,
    CP_METHODS,
    DATA_AXES,
    PARAMETER_AXES,
    RECOMPUTATIONS,
    RECOMPUTE,
    SCHEDULES,
    V_SCHEDULES,
    Layout,
    ep_fits,
)
from meshtune.units import Number

Table = TypeVar("Table")  # any class whose attributes are columns of one length


class Encoding(NamedTuple):
    """Conversions of one field of Layout to a number and back."""

    number: Callable[[Any], float]  # of the field's value
    value: Callable[[float], Any]  # of a number in a column


def _encoding(field: Field[Any]) -> Encoding:
    if names := CHOICES.get(field.name):
        return Encoding(names.index, lambda number: names[int(number)])
    if field.default is None:
        return Encoding(
            lambda value: math.inf if value is None else float(value),
            lambda number: None if math.isinf(number) else int(number),
        )
    return Encoding(float, type(field.default))


ENCODINGS: Mapping[str, Encoding] = {field.name: _encoding(field) for field in fields(Layout)}


class Columns:
    """Layouts, as one column for each field of Layout: an array with one element per layout, or a float.

    Columns are not changed in place. `virtual_stages` is `Layout.stages_per_rank`: 2 under the V schedules.
    Raises TypeError unless every field of Layout, and nothing else, is given.
    """

    def __init__(self, **columns: Number) -> None:
        if columns.keys() != ENCODINGS.keys():
            raise TypeError(f"Columns are {', '.join(ENCODINGS)}; not {', '.join(columns)}.")
        vars(self).update(columns)

    if TYPE_CHECKING:

        def __getattr__(self, field: str) -> Number: ...

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Columns:
        columns = {
            name: np.array([encoding.number(getattr(layout, name)) for layout in layouts], dtype=float)
            for name, encoding in ENCODINGS.items()
        }
        stages_per_rank = np.array([layout.stages_per_rank for layout in layouts], dtype=float)
        return cls(**columns | {"virtual_stages": stages_per_rank})

    def replace(self, **columns: Number) -> Columns:
        """New Columns: the same layouts with other values in these columns."""
        return Columns(**vars(self) | columns)

    @property
    def data_ranks(self) -> Number:
        return math.prod(getattr(self, axis) for axis in DATA_AXES)

    @property
    def world(self) -> Number:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def parameter_ranks(self) -> Number:
        return math.prod(getattr(self, axis) for axis in PARAMETER_AXES)

    @property
    def shard_ranks(self) -> Number:
        return self.parameter_ranks / self.dp_replicate

    @property
    def token_ranks(self) -> Number:
        return self.parameter_ranks * np.where(self.sp > 0, self.tp, 1.0)

    @property
    def expert_shards(self) -> Number:
        ranks = self.token_ranks / self.dp_replicate / self.ep
        return np.where(self.zero > 0, np.maximum(ranks, 1.0), 1.0)

    @property
    def expert_replicas(self) -> Number:
        """Replicas of each expert, or of its shards."""
        return self.token_ranks / self.ep / self.expert_shards

    @property
    def splits_experts(self) -> Number:
        """True where `ep` is 1, or can be taken out of the other ranks."""
        inside = np.where(self.zero > 0, self.token_ranks / self.dp_replicate, self.token_ranks)
        fits = ep_fits(self.ep, self.token_ranks, inside)
        return (self.ep == 1) | (fits & ((self.tp == 1) | (self.sp > 0)))

    @property
    def global_batch_size(self) -> Number:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.data_ranks

    @property
    def ulysses(self) -> Number:
        """True where context parallelism exchanges heads."""
        return self.cp_method == CP_METHODS.index("ulysses")

    def rank_tokens(self, seq_len: Number) -> Number:
        """Tokens per rank in one micro-batch (after cp)."""
        return self.micro_batch_size * seq_len / self.cp

    def mlp_tiles(self, tokens: Number, tile: float) -> Number:
        """Tiles of an MLP, of at most `tile` tokens of a rank each. tokens: of a micro-batch, before sp."""
        own = tokens / np.where(self.sp > 0, self.tp, 1.0)
        return np.maximum(np.ceil(own / tile), 1.0)

    def recomputes(self, mode: str) -> Number:
        return self.recompute == RECOMPUTE.index(mode)

    def recomputation(self, fact: str) -> Number:
        """Value of `fact`, a field or property of Recomputation, for each layout's mode."""
        of_modes = np.array([getattr(mode, fact) for mode in RECOMPUTATIONS.values()])
        return of_modes[np.asarray(self.recompute).astype(int)]

    def runs(self, *schedules: str) -> Number:
        """True where the pipeline's schedule is one of these; never without a pipeline."""
        return (self.pp > 1) & np.isin(self.schedule, [SCHEDULES.index(name) for name in schedules])


def layout_at(layouts: Columns, place: int) -> Layout:
    """The layout in row `place`; every column must be an array."""
    values = {name: encoding.value(getattr(layouts, name)[place]) for name, encoding in ENCODINGS.items()}
    if values["schedule"] in V_SCHEDULES:
        values["virtual_stages"] = Layout.virtual_stages  # implied, and so never given
    return Layout(**values)


# any table of columns #


def rows(table: Table, which: Any) -> Table:
    """A table of the rows `which`: a mask, indices or a slice of the first axis of each column."""
    return type(table)(**{name: column[which] for name, column in vars(table).items()})


def at(table: Table, place: int) -> Table:
    """Row `place` of a table, as a table whose columns are floats."""
    return type(table)(**{name: float(column[place]) for name, column in vars(table).items()})


def joined(tables: Sequence[Table]) -> Table:
    """One table with the rows of all, one table after the other; at least one."""
    columns = {name: np.concatenate([vars(table)[name] for table in tables]) for name in vars(tables[0])}
    return type(tables[0])(**columns)
