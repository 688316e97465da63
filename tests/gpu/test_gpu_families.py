"""Recurrent families and attention sinks on a GPU: packed rows as on the processor."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from families import COMMON, EXPERTS, RECURRENT
from forward import summed_loss
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig

from meshtune.attention.register import register
from meshtune.data.batch import MicroBatch, micro_batch
from meshtune.data.pack import LABELLED
from meshtune.model.anatomy import anatomy
from meshtune.model.mixers import separate_documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpt_oss() -> PretrainedConfig:
    return GptOssConfig(**COMMON | EXPERTS | {"head_dim": 16, "sliding_window": 8})


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {"gpt_oss": gpt_oss, **RECURRENT}


def packed_rows() -> MicroBatch:
    random = np.random.default_rng(0)
    rows = [
        [random.integers(3, 250, length).astype(np.uint32) | LABELLED for length in row]
        for row in ([5, 70, 12], [2, 33, 3, 40])
    ]
    for document in (document for row in rows for document in row):
        document[0] &= ~LABELLED  # a document's first token is never labelled
    return micro_batch(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_loss_and_gradients_equal_the_processors(family: str) -> None:
    register()
    found = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="meshtune")
        separate_documents(model, anatomy(model).mixers)
        model.train().to(device)
        loss = summed_loss(model, anatomy(model), packed_rows().to(device))
        loss.backward()
        found[device] = (
            loss.detach().cpu(),
            {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None},
        )
    torch.testing.assert_close(found["cuda"][0], found["cpu"][0], rtol=1e-4, atol=0)
    for name, gradient in found["cpu"][1].items():
        error = (found["cuda"][1][name] - gradient).norm() / (gradient.norm() + 1e-6)
        assert error < 1e-3, (name, float(error))
