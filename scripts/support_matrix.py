"""The support tables of docs/parallelism.md, from the code that refuses.

python scripts/support_matrix.py [FILE]       writes them between the file's markers
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.capabilities import traits
from meshtune.placement.rules import Traits, refusals
from meshtune.rundir import write_text_atomically

YES, NO, NEVER = "✓", "✗", "·"
LAYOUT = Layout.__dataclass_fields__  # names that are not fields of the layout are settings

TECHNIQUES: dict[str, dict[str, Any]] = {
    "dp": {"dp_replicate": 2},
    "ZeRO-1": {"dp_shard": 2, "zero": 1},
    "ZeRO-2": {"dp_shard": 2, "zero": 2},
    "ZeRO-3": {"dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sp": True},
    "sp, regather": {"tp": 2, "sp": True, "sp_regather": True},
    "cp": {"cp": 2, "cp_method": "allgather"},
    "ulysses": {"cp": 2, "cp_method": "ulysses"},
    "gpipe": {"pp": 2, "schedule": "gpipe", "virtual_stages": 1},
    "1f1b": {"pp": 2, "schedule": "1f1b", "virtual_stages": 1},
    "interleaved1f1b": {"pp": 2, "schedule": "interleaved1f1b", "virtual_stages": 2},
    "loopedbfs": {"pp": 2, "schedule": "loopedbfs", "virtual_stages": 2},
    "zb": {"pp": 2, "schedule": "zb", "virtual_stages": 2},
    "zbv": {"pp": 2, "schedule": "zbv", "virtual_stages": 1},
    "dualpipev": {"pp": 2, "schedule": "dualpipev", "virtual_stages": 1},
    "recompute: attention": {"recompute": "attention"},
    "recompute: selective, full": {"recompute": "full"},
    "LoRA": {},
    "packing": {"packing": True},
    "compile": {"compile": True},
}
FAMILY_COLUMNS: dict[str, dict[str, Any]] = {
    "dp, ZeRO": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp + sp": {"tp": 2, "sp": True},
    "pp": {"pp": 2},
    "cp": {"cp": 2},
    "ulysses": {"cp": 2, "cp_method": "ulysses"},
    "packing": {"packing": True},
}
FAMILIES = [
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2",
    "starcoder2", "cohere", "cohere2", "granite", "glm4", "smollm3", "gpt_neox", "gpt2", "opt", "stablelm",
    "bloom", "falcon", "gptj", "mixtral", "qwen3_moe", "olmoe", "mamba", "mamba2", "qwen3_next",
    "granitemoehybrid",
]  # fmt: skip
LLAMA = Traits("LlamaForCausalLM", blocks=32, heads=32, kv_heads=8, vocabulary=128256)


def main(file: str = "docs/parallelism.md") -> None:
    page = Path(file).read_text(encoding="utf-8")
    write_text_atomically(Path(file), with_tables(page))


def with_tables(page: str) -> str:
    """The text of a page with both tables between their markers replaced."""
    for name, text in (("techniques", technique_table()), ("families", family_table())):
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page


class Notes(list[str]):
    """Reasons under a table, each once; a reason's number is its place in the list, from 1."""

    def mark(self, refusals: Sequence[str]) -> str:
        """A cell: a tick without refusals, else a cross with the numbers of their reasons, which are added.

        refusals: "feature: reason"; the feature is left out.
        """
        reasons = [refusal.partition(": ")[2] or refusal for refusal in refusals]
        self.extend(reason for reason in dict.fromkeys(reasons) if reason not in self)
        numbers = ", ".join(str(self.index(reason) + 1) for reason in reasons)
        return f"{NO} <sup>{numbers}</sup>" if reasons else YES

    def __str__(self) -> str:
        return "".join(f"{number}. {note[0].upper()}{note[1:]}\n" for number, note in enumerate(self, 1))


def technique_table() -> str:
    """Markdown of every pair of techniques, for a model that supports each of them, with notes."""
    notes, rows = Notes(), []
    for number, (name, one) in enumerate(TECHNIQUES.items(), 1):
        others = list(TECHNIQUES.values())[:number]
        cells = [
            notes.mark(refused(LLAMA, one | other)) if together(one, other) else NEVER for other in others
        ]
        rows.append([name, *cells, *[""] * (len(TECHNIQUES) - number)])
    return table(["", *TECHNIQUES], rows) + f"\n{NEVER}: two choices of one thing.\n\n{notes}"


def family_table() -> str:
    """Markdown of the layouts that the model families of transformers support, with notes."""
    notes, rows = Notes(), []
    for family in FAMILIES:
        try:
            model = traits(on_meta(family))
        except UserError as error:
            rows.append([family, *[notes.mark([str(error)])] * len(FAMILY_COLUMNS)])
            continue
        cells = []
        for settings in FAMILY_COLUMNS.values():
            tried = [refused(model, {**settings, **size}) for size in sizes(settings)]
            reasons = [] if [] in tried else tried[0]
            cells.append(notes.mark([reason.replace(model.name, "the model") for reason in reasons]))
        rows.append([family, *cells])
    return table(["model_type", *FAMILY_COLUMNS], rows) + f"\n{notes}"


def refused(model: Traits, settings: Mapping[str, Any]) -> list[str]:
    """Reasons against training a model with these settings; [] if it works.

    settings: fields of Layout, and other arguments of `refusals`, by name.
    """
    fields = {name: value for name, value in settings.items() if name in LAYOUT}
    others = {name: value for name, value in settings.items() if name not in LAYOUT}
    try:
        layout = Layout(**{"gradient_accumulation_steps": 4, **fields})
    except UserError as error:
        return error.problems
    attention = "eager" if model.attention else "meshtune"
    return refusals(model, layout, **{"attention": attention, "packing": False, **others})


def together(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True unless the two set a setting to different values. one, other: values of TECHNIQUES."""
    return all(one[name] == other[name] for name in one.keys() & other.keys())


def sizes(settings: Mapping[str, Any]) -> list[dict[str, int]]:
    """Axis sizes to try instead of a column's own, because some families have odd numbers of heads.

    One of them that works is enough.
    """
    axes = [axis for axis in ("tp", "cp") if axis in settings]
    return [dict.fromkeys(axes, size) for size in (2, 3, 5, 7)]


def on_meta(family: str) -> PreTrainedModel:
    """A model of this family with two blocks, on the meta device."""
    config = AutoConfig.for_model(family, num_hidden_layers=2)
    if vars(config).get("layer_types"):
        config.layer_types = config.layer_types[:2]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown table; every row has as many cells as `head`."""
    lines = [head, ["---", *[":-:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
