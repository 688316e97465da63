"""The language part of a model that also sees or hears, as training and planning see it."""

import pytest
import torch
from golden import refuses, says
from multimodal import MULTIMODAL
from transformers import AutoModelForMultimodalLM

from meshtune.errors import UserError
from meshtune.model.anatomy import anatomy, aside_names, aside_of, put_back
from meshtune.model.capabilities import capabilities
from meshtune.model.load import freeze, on_meta
from meshtune.model.trace import census

SEEING = ["model.vision_tower", "model.multi_modal_projector"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "body", "kept"),
    [
        ("gemma3", "model.language_model", SEEING),
        ("llama4", "language_model.model", ["vision_model", "multi_modal_projector"]),
        ("llava_next", "model.language_model", [*SEEING, "model.image_newline"]),
    ],
)
def test_all_but_the_language_part_is_set_aside_and_comes_back(family, body, kept):
    model = on_meta(MULTIMODAL[family]())
    assert anatomy(model).body == body
    assert [*aside_of(model)] == kept
    with torch.device("meta"):
        whole = AutoModelForMultimodalLM.from_config(MULTIMODAL[family]())
    assert model.state_dict().keys() < whole.state_dict().keys()
    with put_back(model):
        assert model.state_dict().keys() == whole.state_dict().keys()
    language = [p.numel() for name, p in whole.named_parameters() if name in dict(model.named_parameters())]
    assert census(MULTIMODAL[family]()).total == sum(language) < whole.num_parameters()


def test_parts_that_are_set_aside_can_be_named_as_frozen_and_never_run():
    model = on_meta(MULTIMODAL["gemma3"]())
    embedding = "model.language_model.embed_tokens.weight"
    assert freeze(model, ["*vision_tower*", "*embed_tokens*"]) == [embedding]
    with refuses(UserError):
        freeze(model, ["*audio_tower*"])
    assert any("vision_tower" in name for name in aside_names(model))
    with refuses(NotImplementedError):
        model.get_submodule("model.vision_tower")(torch.zeros(1))


def test_what_works_is_said_of_the_language_part():
    rows = {each.feature: each for each in capabilities(MULTIMODAL["gemma3"]())}
    says(rows["text part"].why)
    assert rows["packing"].supported and rows["tensor"].supported and rows["pipeline"].supported
    (refused,) = capabilities(MULTIMODAL["paligemma"]())
    says(refused.why)
    assert not refused.supported
