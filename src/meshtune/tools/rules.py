"""Layouts that a tool can't run, or would run as another layout, which is planned itself.

    [[layout]] of differences.toml ──> Rule(title, mask of layouts, "title; advice.")

The planner refuses by these rules before it ranks, an export before it writes.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshtune.config import Config
from meshtune.layout import AXES, V_SCHEDULES, VIRTUAL_SCHEDULES, Layout
from meshtune.placement.columns import ENCODINGS, Columns, Number
from meshtune.placement.rules import Rule
from meshtune.plan.programs import TOOLS
from meshtune.tools.planned import Planned
from meshtune.tools.table import toml

# The export to every tool writes these or refuses them itself. Anything else is refused for all, so that none
# can leave out what it doesn't know.
EXPORTED_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPORTED_RECOMPUTATIONS = ("none", "attention", "selective", "full")
LOOPED = (*VIRTUAL_SCHEDULES, *V_SCHEDULES)  # that torchtitan runs with several stages a rank
ENDS = 2  # layers that embedding and head count as, one each, when torchtitan cuts stages


class Model(NamedTuple):
    """Sizes that a layout cuts."""

    blocks: int
    seq_len: int  # tokens


def rules_of(name: str, config: Config, blocks: int, seq_len: int) -> Iterator[Rule]:
    """Every rule on the layouts that a tool runs. blocks: of the model. seq_len: in tokens."""
    model, plan = Model(blocks, seq_len), Planned(config, Layout(), blocks, 1)
    for row in toml("differences")["layout"]:
        if name in row["tools"].split() and plan.holds(row.get("config", "")):
            yield rule_of(row, TOOLS[name].title, model)
    yield from unknown_fields(TOOLS[name].title)


def rule_of(row: Mapping[str, str], tool: str, model: Model) -> Rule:
    """The rule of one row. tool: its title."""
    title = row["title"].format(tool=tool, model=model)

    def sentence(layout: Layout) -> str:
        numbers = {name: NUMBERS[name](layout, model) for name in re.findall(r"{(\w+)}", row["advice"])}
        return f"{title}; {row['advice'].format(layout=layout, **numbers)}."

    def refuses(layouts: Columns) -> Number:
        return np.all([holds(word, layouts, model) for word in row["when"].split()], axis=0)

    return Rule(title, refuses, sentence)


def holds(word: str, layouts: Columns, model: Model) -> Number:
    """Mask of the layouts for which a word of a condition holds, as differences.toml describes them."""
    name, sign, value = re.split("([=>]|$)", word.removeprefix("!"), maxsplit=1)
    if name in CONDITIONS:
        found = CONDITIONS[name](layouts, model)
    elif sign == "=":
        found = np.isin(getattr(layouts, name), [ENCODINGS[name].number(each) for each in value.split("|")])
    else:
        found = getattr(layouts, name) > float(value or 0)
    return ~np.asarray(found) if word.startswith("!") else found


def unknown_fields(tool: str) -> Iterator[Rule]:
    """Rules on axes and recomputation modes that no export writes."""
    for axis in (*AXES, "ep"):
        if axis not in EXPORTED_AXES:
            row = {"title": f"{axis} can't be exported to {{tool}}", "when": f"{axis}>1"}
            yield rule_of(
                row | {"advice": f"choose a layout without {axis}={{layout.{axis}}}"}, tool, Model(1, 1)
            )
    *others, last = EXPORTED_RECOMPUTATIONS
    row = {"title": "recomputation that only meshtune runs"}
    row |= {"when": f"!recompute={'|'.join(EXPORTED_RECOMPUTATIONS)}"}
    row |= {"advice": f"instead of recompute={{layout.recompute}} use {', '.join(others)} or {last}"}
    yield rule_of(row, tool, Model(1, 1))


def nearest_multiple(length: int, pieces: int) -> int:
    return max(1, round(length / pieces)) * pieces


def cuts(blocks: int, pp: Number, stages_per_rank: Number) -> Number:
    """True if such a number of stages per rank has whole layers, without more of them on the fullest rank."""
    fullest = stages_per_rank * np.ceil(blocks / (pp * stages_per_rank))
    whole = (blocks % stages_per_rank == 0) & (blocks >= pp * stages_per_rank)
    return whole & (fullest == np.ceil(blocks / pp))


def nearest_stages(layout: Layout, model: Model) -> str:
    """Return a number of stages per rank that cuts the layers, as a token, or the plain schedule."""
    most = model.blocks // layout.pp
    fitting = [count for count in range(2, most + 1) if cuts(model.blocks, layout.pp, count)]
    nearest = min(fitting, key=lambda count: abs(count - layout.stages_per_rank), default=None)
    return f"v{nearest}" if nearest else "1f1b"


def default_stages(schedule: str) -> int:
    """Stages per rank of torchtitan unless layers per stage are set."""
    return 2 if schedule in LOOPED else 1


def other_stages(layouts: Columns, model: Model) -> Number:
    """True for numbers of stages that no number of layers per stage gives."""
    stages = layouts.pp * layouts.virtual_stages
    per_stage = np.ceil((model.blocks + ENDS) / stages)
    default = np.where(layouts.runs(*LOOPED), 2, 1)
    counted = np.ceil((model.blocks + ENDS) / per_stage) != stages
    return (layouts.pp > 1) & (layouts.virtual_stages != default) & counted


def pieces(layouts: Columns | Layout) -> Number:
    """Pieces into which torchtitan cuts a sequence for tp and cp."""
    return layouts.tp * np.where(np.asarray(layouts.cp) > 1, 2 * layouts.cp, 1)


# Words of conditions that are not fields of a layout.
CONDITIONS: Mapping[str, Callable[[Columns, Model], Number]] = {
    "engine": lambda layouts, _: (layouts.zero > 0) | (layouts.tp > 1),
    "tp_or_cp": lambda layouts, _: layouts.tp * layouts.cp > 1,
    "some_blocks": lambda layouts, _: np.isfinite(layouts.recompute_blocks),
    "uneven_cp": lambda layouts, model: model.seq_len % (2 * layouts.cp) != 0,
    "uneven_pieces": lambda layouts, model: model.seq_len % pieces(layouts) != 0,
    "whole_layers": lambda layouts, model: cuts(model.blocks, layouts.pp, layouts.virtual_stages),
    "broken_rounds": lambda layouts, _: np.fmod(layouts.gradient_accumulation_steps, layouts.pp) != 0,
    "other_stages": other_stages,
}
# Numbers and layouts in advice that are not fields of a layout.
NUMBERS: Mapping[str, Callable[[Layout, Model], Any]] = {
    "all_shards": lambda layout, _: layout.dp_shard * layout.pp,
    "sequences": lambda layout, _: layout.micro_batch_size * layout.gradient_accumulation_steps,
    "context": lambda layout, _: f"{'ulysses' if layout.cp_method == 'ulysses' else 'cp'}{layout.cp}",
    "and_regather": lambda layout, _: " and regather" if layout.sp_regather else "",
    "kept": lambda layout, _: replace(layout, recompute="none"),
    "every_block": lambda layout, _: replace(layout, recompute_blocks=None),
    "cp_length": lambda layout, model: nearest_multiple(model.seq_len, 2 * layout.cp),
    "pieces": lambda layout, _: int(pieces(layout)),
    "length": lambda layout, model: nearest_multiple(model.seq_len, int(pieces(layout))),
    "stages": nearest_stages,
    "interleaved": lambda layout, _: max(2, layout.stages_per_rank),
    "rounds": lambda layout, _: -(-layout.gradient_accumulation_steps // layout.pp) * layout.pp,
    "default_stages": lambda layout, _: default_stages(layout.schedule),
}
