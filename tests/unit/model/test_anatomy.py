import re

import pytest
import torch
from cases import OPT_WITHOUT_MASK
from families import FAMILIES
from golden import refuses, says
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from meshtune.errors import UserError
from meshtune.model import recorded
from meshtune.model.anatomy import anatomy
from meshtune.model.capabilities import capabilities, traits
from meshtune.model.recorded import mask_only_pattern
from meshtune.model.tensor_plan import tensor_plan

DENSE = [
    "opt",
    "bloom",
    "falcon",
    "gptj",
    "phi",
    "stablelm",
    "granite",
    "smollm3",
    "gemma",
    "glm4",
    "olmo",
    "olmo3",
    "helium",
    "cohere2",
    "arcee",
]
EXPERTS = ["qwen3_moe", "mixtral", "olmoe"]
REFUSED = ["bert", "xlnet"]


def build(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_found_are_those_that_run(family, ids):
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    found = anatomy(model)
    ran = {}
    for part in ("embed", "norm", "body", "head"):
        hook = lambda module, inputs, output, part=part: ran.update({part: output})  # noqa: E731
        model.get_submodule(getattr(found, part)).register_forward_hook(hook)
    model(ids)
    assert torch.equal(ran["norm"], ran["body"].last_hidden_state)
    assert torch.equal(ran["head"], model.get_submodule(found.head)(ran["norm"]))
    assert ran["embed"].shape == (*ids.shape, 64)
    for block in model.get_submodule(found.blocks):
        assert block.get_submodule(found.attention) is not block.get_submodule(found.mlp)


@pytest.mark.parametrize("model_type", DENSE + EXPERTS)
def test_other_families_of_transformers_are_understood(model_type):
    config = AutoConfig.for_model(model_type, num_hidden_layers=2)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    model = build(config)
    assert len(model.get_submodule(anatomy(model).blocks)) == 2


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_that_are_built_otherwise_are_refused_with_the_reason(model_type):
    with refuses(UserError):
        anatomy(build(AutoConfig.for_model(model_type)))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("nanochat", "runs model.norm more than once"),
        ("ctrl", "changes its embeddings in place"),
        ("gpt2", "needs more than hidden states"),
        ("zamba2", "hidden states besides"),
        ("granite", None),
        ("xglm", None),
    ],
)
def test_a_body_that_does_more_than_pass_hidden_states_on_is_refused_for_pipelines(model_type, why):
    changes = {"embedding_multiplier": 12.0} if model_type == "granite" else {}
    if (
        model_type == "zamba2"
    ):  # with one block that is given the embeddings too, so that none share parameters
        changes = {"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2}
    problem = traits(build(AutoConfig.for_model(model_type, **changes))).pipeline
    assert (why in problem) if why else problem is None


def test_capabilities_say_what_works_and_why_not():
    found = capabilities(FAMILIES["llama"]())
    says("\n".join(f"{row.feature}: {'yes' if row.supported else 'no'}, {row.why}" for row in found))
    rows = {row.feature: row for row in found}
    assert rows["packing"].supported
    assert rows["lora"].why.startswith("all-linear adapts 14 ")
    rows = {row.feature: row for row in capabilities(AutoConfig.for_model("bloom"))}
    assert not rows["packing"].supported
    assert "packing=false" in rows["packing"].why
    assert not rows["tensor"].supported


def probe(module, query, key, value, mask, scaling=None, dropout=0.0, *, documents, **others):
    groups = query.shape[1] // key.shape[1]
    CALLS.append(documents)
    value = value.repeat_interleave(groups, dim=1)
    return value.transpose(1, 2).contiguous(), None


CALLS: list = []
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,  # noqa: E501
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "moe_intermediate_size": 8, "num_local_experts": 2,  # noqa: E501
    "num_experts": 2, "num_experts_per_tok": 1, "word_embed_proj_dim": 32, "ffn_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param("opt", marks=OPT_WITHOUT_MASK),
        "phi",
        "granite",
        "smollm3",
        "gemma",
        "glm4",
        "olmo",
        "olmo3",
        "helium",
        "cohere2",
        "arcee",
        "qwen3_moe",
        "mixtral",
        "olmoe",
    ],
)
def test_documents_reach_the_attention_of_every_block_where_packing_is_promised(model_type):
    AttentionInterface.register("probe", probe)
    AttentionMaskInterface.register("probe", lambda *args, **kwargs: None)
    known = AutoConfig.for_model(model_type)
    changes = {name: value for name, value in SMALL.items() if name in known.to_dict()}
    if "layer_types" in known.to_dict():
        changes["layer_types"] = ["full_attention"] * 2
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **changes), attn_implementation="probe"
    )
    assert anatomy(model).attention_problem is None
    CALLS.clear()
    ids = torch.arange(8)[None]
    model(ids, position_ids=ids, documents=((5, 3),), use_cache=False)
    assert CALLS == [((5, 3),)] * 2


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("bloom", "computes its attention inside"),
        ("xglm", "computes its attention inside"),
        ("nemotron", "do not pass keyword arguments on"),
        ("doge", "attention_mask"),
        ("llama4_text", "chunked_attention"),
        ("deepseek_v32", "reads its attention mask"),
        ("gpt_oss", None),
    ],
)
def test_packing_is_promised_where_each_layer_is_given_what_it_needs(model_type, why):
    """Before anything starts: of nemotron and doge a flag says that they take any attention function."""
    heads = {"num_key_value_heads": 16} if model_type == "nemotron" else {}
    config = AutoConfig.for_model(model_type, num_hidden_layers=2, **heads)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    (row,) = [row for row in capabilities(config) if row.feature == "packing"]
    assert row.supported == (why is None)
    assert why is None or why in row.why


def test_models_that_differ_in_sizes_are_recorded_once_and_another_setting_again(monkeypatch):
    tried = []
    run = recorded._record
    monkeypatch.setattr(recorded, "_record", lambda *given: (tried.append(1), run(*given))[1])
    monkeypatch.setattr(recorded, "_recorded", {})
    for size, window in ((32, None), (64, None), (32, 4)):
        config = AutoConfig.for_model("mistral", **SMALL | {"intermediate_size": size}, sliding_window=window)
        assert anatomy(AutoModelForCausalLM.from_config(config)).attention_problem is None
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("kinds", "window", "windows", "hidden"),
    [
        (["sliding_attention", "full_attention"], 8, [8, None], None),
        (["sliding_attention", "full_attention"], 8, [None, None], "full_attention, sliding_attention"),
        (["chunked_attention", "full_attention"], None, [None, None], "chunked_attention"),
        (None, 8, [8, 8], None),
        (None, 8, [None, None], "a sliding window of 8"),
        (None, None, [None, None], None),
    ],
)
def test_a_pattern_that_only_the_configuration_knows_is_found(kinds, window, windows, hidden) -> None:
    config = PretrainedConfig()
    config.layer_types, config.sliding_window = kinds, window
    found = mask_only_pattern(config, windows)
    assert found is None if hidden is None else hidden in str(found)


def test_the_plan_names_what_is_there_inside_a_block():
    plan = tensor_plan(build(FAMILIES["qwen3"]()))
    assert plan == {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.q_norm": "replicated_with_grad_allreduce",
        "self_attn.k_norm": "replicated_with_grad_allreduce",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    }
    whole_norms = tensor_plan(build(FAMILIES["olmo2"]()))  # on queries and keys that are made whole
    assert "self_attn.q_norm" not in whole_norms and whole_norms["self_attn.o_proj"] == "rowwise_split_input"


NO_PLAN = {
    "opt": "no plan for this family",
    "falcon": "no plan for this family",
    "granitemoe": "its experts lie outside its mlp|no plan for this family",  # of transformers 5.17
    "apertus": "its plan leaves out mlp.act_fn",  # an activation with parameters, on cut features
    "phi": "its plan leaves out self_attn.q_layernorm",
}


@pytest.mark.parametrize("model_type", NO_PLAN)
def test_a_family_whose_gradients_nobody_vouches_for_has_no_plan(model_type):
    options = {"qk_layernorm": True} if model_type == "phi" else {}
    config = AutoConfig.for_model(model_type, num_hidden_layers=2, **options)
    reason = tensor_plan(build(config))
    assert isinstance(reason, str)
    assert re.search(NO_PLAN[model_type], reason)
    assert "What works for it: data parallel (dp) and ZeRO (zero)" in reason


@pytest.mark.parametrize(
    ("family", "apart"),
    [("llama", True), ("gemma2", True), ("cohere", True), ("gpt_neox", True), ("gpt2", False)],
)
def test_blocks_run_apart_where_the_body_adds_nothing_to_them(family: str, apart: bool) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    reason = traits(model).pipeline
    assert (reason is None) == apart
    assert reason is None or "data parallel (dp) and ZeRO (zero)" in reason
