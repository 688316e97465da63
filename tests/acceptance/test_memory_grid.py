"""Compare the memory of real steps with what the planner says: a part of validation/memory_grid.py."""

import sys
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from families import COMMON, RECURRENT, SPARSE
from multimodal import MULTIMODAL
from transformers import GraniteSWAConfig

sys.path.append(str(Path(__file__).parents[2] / "validation"))
import memory_grid
from memory_rows import compare, held

SHAPE: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
FOUR: dict[str, Any] = SHAPE | {"num_hidden_layers": 4}
TWICE = 2 * ["linear_attention", "full_attention"]
# Families whose layers are not all attention, or whose attention has sinks.
UNLIKE_LLAMA = {
    "granite_swa": GraniteSWAConfig(
        **COMMON | FOUR | {"sliding_window": 128, "layer_types": 2 * ["sliding_attention", "full_attention"]}
    ),
    "lfm2": RECURRENT["lfm2"](**FOUR, layer_types=2 * ["conv", "full_attention"]),
    "qwen3_5": MULTIMODAL["qwen3_5"](
        **FOUR, layer_types=TWICE, linear_key_head_dim=32, linear_value_head_dim=32, linear_num_value_heads=8,
        linear_num_key_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    ),
    "falcon_h1": RECURRENT["falcon_h1"](
        **FOUR, mamba_n_heads=16, mamba_d_head=32, mamba_d_state=64, mamba_chunk_size=128, mamba_d_ssm=512
    ),
    "mamba2": RECURRENT["mamba2"](
        **FOUR | {"num_heads": 16, "head_dim": 32, "state_size": 64, "chunk_size": 256}
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 is emulated by most processors: half of the grid's sequence length takes half of its time."""
    monkeypatch.setattr(memory_grid, "SEQ_LEN", 256)


@pytest.mark.parametrize("layout", cases(["zero3x2-mb2-ga2", "mb2-ga2-full4"]))
def test_the_planner_knows_what_a_step_holds(layout: str, tmp_path: Path) -> None:
    check(layout, None, 0.02, tmp_path)


@pytest.mark.parametrize(
    ("family", "layout"), cases([("gemma3", "mb2-ga2"), ("qwen2_vl", "zero3x2-mb2-ga2")])
)
def test_the_planner_counts_the_language_part_of_a_model_that_sees(
    family: str, layout: str, tmp_path: Path
) -> None:
    shape = SHAPE | {"num_hidden_layers": 8}
    if family == "gemma3":
        kinds = 2 * [*3 * ["sliding_attention"], "full_attention"]
        shape |= {"sliding_window": 128, "layer_types": kinds, "query_pre_attn_scalar": 32}
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
        shape |= {"rope_parameters": rope}
    file = tmp_path / "config.json"
    MULTIMODAL[family](**shape).to_json_file(file)
    check(layout, file, 0.03, tmp_path)


@pytest.mark.parametrize("family", cases(UNLIKE_LLAMA))
def test_the_planner_counts_recurrent_layers_and_sinks(family: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    UNLIKE_LLAMA[family].to_json_file(file)
    check("mb2-ga2", file, 0.03, tmp_path)


IN_BACKWARD = ("train.step_in_backward=true", "train.max_grad_norm=0")
HOST, EIGHT_BITS, QLORA = (
    "train.offload=optimizer",
    "train.optimizer=adamw-8bit",
    ("method=qlora", "lora.r=64"),
)


@pytest.mark.parametrize(
    ("layout", "settings"),
    cases(
        [
            ("mb2-ga1", (*IN_BACKWARD, HOST)),
            ("zero3x2-mb2-ga2-offload", (*QLORA, HOST)),
            ("mb2-ga2", QLORA),
            ("dp2-mb2-ga2", QLORA),
            ("zero3x2-mb2-ga2", (EIGHT_BITS,)),
            ("pp2-1f1b-mb1-ga4", (EIGHT_BITS,)),
            ("zero3x2-mb2-ga2", (HOST,)),
            ("pp2-1f1b-mb1-ga4", (HOST, EIGHT_BITS)),
            ("mb2-ga2-offload", ()),
            ("tp2-sp-mb2-ga2-offload", ()),
            ("cp2-mb2-ga1-offload", (HOST,)),
            ("dp2-mb2-ga1", IN_BACKWARD),
            ("zero1x2-mb2-ga1", IN_BACKWARD),
            ("zero3x2-mb2-ga1", (*IN_BACKWARD, HOST, EIGHT_BITS)),
        ],
        ci=2,
    ),
)
def test_what_fits_more_on_less_holds_what_is_planned(
    layout: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    check(layout, None, 0.02, tmp_path, settings=settings, of_states=0.02)


@pytest.mark.parametrize("layout", cases(["mb2-ga2", "zero3x2-mb2-ga2"], ci=1))
def test_experts_in_4_bits_hold_what_is_planned(layout: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    SPARSE["qwen3_moe"](**FOUR, moe_intermediate_size=256, num_experts=8).to_json_file(file)
    check(layout, file, 0.02, tmp_path, settings=QLORA, of_states=0.02)


def check(
    layout: str, config: Path | None, most: float, folder: Path, *,
    settings: tuple[str, ...] = (), of_states: float = 0,
) -> None:  # fmt: skip
    """Assert that the planner's bytes are right within `most` for a phase, and within `of_states` for states,
    those in host memory too; where those are exact, within `most` for the rest too.

    config: a configuration file; None: the small Llama.
    """
    memory_grid.make_data(folder, config)
    found = memory_grid.measure(folder, layout, settings)
    job = memory_grid.job_of(layout, found, config)
    rows, states = compare(layout, job, found["ranks"]), held(layout, job, found["ranks"])

    assert rows and states
    for each in states:
        assert each.measured == pytest.approx(each.predicted, rel=of_states, abs=0)
    for row in rows:
        assert abs(row.error) < most, row
        if row.phase != "optimizer" and not of_states:  # an update has nothing but states
            assert abs(row.rest_error) < most, row
