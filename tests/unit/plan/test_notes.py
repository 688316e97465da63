"""Sentences on a model that every answer says: mixtures of experts, and sequences beyond its positions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from families import FAMILIES
from golden import says
from tiny_families import tiny_config
from transformers import AutoConfig, Gemma3Config, Gemma3TextConfig, MptConfig, PreTrainedConfig

from meshtune import config
from meshtune.api import plan as api
from meshtune.commands.plan import plan as command
from meshtune.errors import UserError
from meshtune.model.files import context_of
from meshtune.model.trace import census
from meshtune.plan.workload import method_notes, positions_note, untraced_note
from meshtune.report.plan.screen import reliability

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
}


def made(kind: str, **fields: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **SIZES | fields)


@pytest.mark.ci
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_is_recognised_by_its_census(kind: str) -> None:
    counted = census(made(kind, **MIXTURES[kind]))
    assert counted.unsupported is None and counted.sparse
    blocks = sum(p.count for block in counted.blocks for p in block.parameters)
    assert 0.3 * blocks < counted.idle < blocks


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_dense_model_is_none(family: str) -> None:
    counted = census(FAMILIES[family]())
    assert counted.idle == 0 and not counted.sparse


def settings(folder: Path, *words: str) -> list[str]:
    return [f"model.name={folder}", f"data.cache={folder / 'cache'}", "cluster.gpu=h100-sxm", *words]


@pytest.mark.ci
def test_the_answer_says_what_is_left_out_of_a_mixture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made("mixtral", **MIXTURES["mixtral"]).save_pretrained(tmp_path)
    words = settings(tmp_path, "data.seq_len=256")
    command(words, top=1, as_json=True)
    note, uncompiled, attention = json.loads(capsys.readouterr().out)["notes"]
    says(note)
    assert uncompiled == "The blocks run uncompiled: mixtures of experts can't be compiled."
    command(words, top=1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "mixture of experts" in printed
    assert uncompiled in printed and attention in printed
    logged: list[str] = []
    (one,) = api.explained(config.load(None, words), ["mb1-ga64"], log=logged.append)
    assert logged == [note] and attention in reliability(one.choice)
    with pytest.raises(UserError):  # where nothing fits, too
        api.plan(config.load(None, [*words, "cluster.memory_gib=0.001"]), log=logged.append)
    assert logged == [note, note]
    uneven = [*words, "experts.imbalance=1.5"]
    for layout, others in (("zero3x2-ep2-mb1-ga32", 0), ("mb1-ga64", 1)):
        logged.clear()
        api.explained(config.load(None, uneven), [layout], log=logged.append)
        assert len(logged) == 1 + others
    says(logged[1])
    with api.workloads(config.load(None, [*uneven, "layout=zero3x8-mb1"])) as (workload, _):
        assert workload.notes[1] == logged[1]


def test_a_plan_says_that_experts_have_no_adapters(tmp_path: Path) -> None:
    chosen = config.load(None, settings(tmp_path, "method=lora"))
    q_proj, down = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.down_proj"
    without, some = (
        census(made("mixtral", **MIXTURES["mixtral"]), adapters=dict.fromkeys(names, 4))
        for names in ([q_proj], [q_proj, down])
    )
    for counted, ours in (without, True), (census(tiny_config("llama4_text"), adapters={q_proj: 4}), False):
        says(filter(None, method_notes(chosen, counted, ours)))
    assert not any(method_notes(chosen, some, True))


def test_activations_that_were_not_traced_are_named(tmp_path: Path) -> None:
    made("mixtral", **MIXTURES["mixtral"]).save_pretrained(tmp_path)
    words = settings(tmp_path, "data.seq_len=256", "train.precision=fp32")
    with api.workloads(config.load(None, words)) as (workload, _):
        assert untraced_note(workload) is None
        note = untraced_note(replace(workload, work=replace(workload.work, traced={})))
        says(note)


@pytest.mark.ci
def test_the_text_part_of_a_model_that_also_sees_is_named(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    Gemma3Config(text_config=SIZES | {"head_dim": 16}, vision_config=vision).save_pretrained(tmp_path)
    with api.workloads(config.load(None, settings(tmp_path))) as (workload, _):
        says(workload.notes[0])
        assert workload.work.blocks == SIZES["num_hidden_layers"]


# positions #


@pytest.mark.parametrize(
    ("positions", "fields"),
    [
        (512, {}),
        (2048, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        (1024, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        (
            1024,
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
        ),
        (
            512,
            {
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
)  # fmt: skip
def test_positions_reach_as_far_as_their_scaling(positions: int, fields: dict[str, Any]) -> None:
    assert context_of(made("llama", **fields)) == positions


def test_positions_of_other_kinds() -> None:
    assert context_of(FAMILIES["gpt2"]()) == FAMILIES["gpt2"]().n_positions
    assert context_of(MptConfig()) is None
    assert context_of(Gemma3TextConfig(max_position_embeddings=4096)) == 4096


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.seq_len=512"], False),
        (["data.seq_len=513"], True),
        (["data.seq_len=4096", "data.mean_document_tokens=300"], False),
        (["data.seq_len=4096", "data.mean_document_tokens=600"], True),
    ],
)
def test_sequences_beyond_the_positions_are_said(words: list[str], said: bool) -> None:
    loaded = config.load(None, ["model.name=some/model", *words])
    note = positions_note("some/model", loaded.data.seq_len, 512, loaded.data.mean_document_tokens)
    assert (note is not None) == said
    assert note is None or "goes beyond the 512 positions of some/model (max_position_embeddings)" in note
    assert positions_note("some/model", 64, None, None) is None


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "said"),
    [(["method=lora", "lora.use_dora=true"], True), (["method=lora"], False), (["method=full"], False)],
)
def test_a_plan_says_that_its_times_leave_out_doras_norms(
    tmp_path: Path, words: list[str], said: bool
) -> None:
    made("llama").save_pretrained(tmp_path)
    notes = api.plan(config.load(None, settings(tmp_path, "data.seq_len=256", *words))).as_dict()["notes"]
    assert [note.startswith("lora.use_dora: ") for note in notes] == [True] * said + [False]


@pytest.mark.ci
def test_a_plan_says_that_a_sequence_is_beyond_the_positions(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    words = settings(tmp_path, "data.seq_len=1024")
    note, _ = api.plan(config.load(None, words)).as_dict()["notes"]
    says(note)


@pytest.mark.ci
def test_the_longest_sequence_that_fits_is_compared_with_the_positions(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    words = settings(tmp_path, "data.seq_len=256", "cluster.memory_gib=4")
    logged: list[str] = []
    value, _ = api.largest(config.load(None, words), "seq_len", log=logged.append)
    assert isinstance(value, int) and value > 512
    assert f"data.seq_len={value} goes beyond the 512 positions" in logged[-1]
    assert logged[-2].startswith("Predicted with FlashAttention 4 (")
    assert sum("positions" in line for line in logged) == 1


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    cases(
        [
            ("llama", {"attention_dropout": 0.1}, True),
            ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.0}, True),
            ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0}, False),
        ],
        test=1,
        ci=2,
    ),
)
def test_dropout_of_attention_is_said_not_to_be_counted(
    tmp_path: Path, family: str, fields: dict[str, Any], said: bool
) -> None:
    AutoConfig.for_model(family, **SIZES | fields).save_pretrained(tmp_path)
    for method in ("full", "lora"):  # an adapter's dropout, which is counted, is no dropout of the attention
        words = settings(tmp_path, "data.seq_len=256", f"method={method}")
        if method == "lora":
            words.append("lora.dropout=0.1")
        notes = api.plan(config.load(None, words)).as_dict()["notes"]
        assert any("dropout" in note for note in notes) == said
        assert any("FlashAttention" in note for note in notes) != said


@pytest.mark.ci
@pytest.mark.parametrize(("size", "said"), [(96, True), (100, False), (264, False)])
def test_flash_attention_is_predicted_only_for_heads_that_it_runs(
    tmp_path: Path, size: int, said: bool
) -> None:
    made("llama", head_dim=size).save_pretrained(tmp_path)
    notes = api.plan(config.load(None, settings(tmp_path, "data.seq_len=256"))).as_dict()["notes"]
    assert any("FlashAttention" in note for note in notes) == said
