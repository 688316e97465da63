"""An exported config.json has the rotary settings under transformers 4's names, with the base's values."""

import json
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from transformers import AutoConfig

from meshtune.model.save import OLD_NAMES, add_old_rope_names

LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LONG = {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8, "type": "longrope"}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 8.0}
DEFAULT = {"rope_theta": 1e4, "rope_scaling": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # family, names as bases of transformers 4 have them
    "llama": ("llama", {"rope_theta": 500000.0, "rope_scaling": None}),
    "llama3": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "linear": ("llama", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "dynamic": ("llama", {"rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "yarn": ("qwen2", {"rope_theta": 1e6, "rope_scaling": YARN | {"type": "yarn"}}),
    "longrope": ("phi3", DEFAULT | {"rope_scaling": LONG}),
    "a part of a head": ("phi", {"rope_theta": 2e4, "rope_scaling": None, "partial_rotary_factor": 0.75}),
    "gpt_neox": ("gpt_neox", {"rotary_emb_base": 2e4, "rotary_pct": 0.5, "rope_scaling": None}),
    "olmo2": ("olmo2", DEFAULT | {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "gemma3": ("gemma3_text", {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}),
    "modernbert": ("modernbert-decoder", {"global_rope_theta": 8e4, "local_rope_theta": 2e4}),
}  # fmt: skip


def written(folder: Path, config: Any) -> dict[str, Any]:
    """The config.json of an export; transformers reads it as the configuration that was exported."""
    config.save_pretrained(folder)
    add_old_rope_names(folder / "config.json", config)
    read, exported = AutoConfig.from_pretrained(folder).to_dict(), config.to_dict()
    assert read | {"_name_or_path": ""} == exported | {"_name_or_path": ""}
    return json.loads((folder / "config.json").read_text("utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_the_rotary_settings_of_a_base_are_written_under_its_names_too(case: str, tmp_path: Path) -> None:
    kind, names = CASES[case]
    shape = {"model_type": kind, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({**shape, **names}))
    tree = written(tmp_path / "out", AutoConfig.from_pretrained(base))
    scaling = names.get("rope_scaling") or {}
    if "type" in scaling and kind in ("llama", "qwen2"):  # where transformers 4 takes both names of the kind
        names = names | {"rope_scaling": scaling | {"rope_type": scaling["type"]}}
    assert {name: tree[name] for name in names} == names


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_of_transformers_5_gets_the_older_names(family: str, tmp_path: Path) -> None:
    tree = written(tmp_path, FAMILIES[family]())
    assert bool(tree.get("rope_parameters")) == bool({"rope_theta", "rotary_emb_base"} & {*tree})


def test_the_names_are_left_out_where_transformers_reads_something_else_from_them(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    layers = {"full_attention": rope, "sliding_attention": rope | {"partial_rotary_factor": 0.5}}
    config = FAMILIES["gemma3"](rope_parameters=layers)
    assert not {*OLD_NAMES} & {*written(tmp_path, config)}
