"""Recurrent families and attention sinks on a GPU: packed rows as on the processor."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

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
from meshtune.model.documents import separate_documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KERNELS = ("mamba_ssm", "causal_conv1d", "fla")


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


def hide_kernels() -> None:
    """Let transformers find none of the packages of kernels, which take no tensors of a processor."""
    for name in KERNELS:
        sys.modules[name] = None  # type: ignore[assignment]


@pytest.fixture(scope="module")
def without_kernels() -> Iterator[ProcessPoolExecutor]:
    """A process with transformers' own formulas: it chooses kernels when a model's module is imported."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=hide_kernels) as process:
        yield process


def loss_and_gradients(family: str, device: str) -> tuple[float, dict[str, np.ndarray]]:
    """Summed loss of the packed rows, and the gradient of each parameter by name."""
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="meshtune")
    separate_documents(model, anatomy(model).mixers)
    model.train().to(device)
    loss = summed_loss(model, anatomy(model), packed_rows().to(device))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {name: gradient.cpu().numpy() for name, gradient in gradients.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_loss_and_gradients_equal_the_processors(
    family: str, without_kernels: ProcessPoolExecutor
) -> None:
    expected_loss, expected = without_kernels.submit(loss_and_gradients, family, "cpu").result()
    loss, gradients = loss_and_gradients(family, "cuda")
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        error = np.linalg.norm(gradients[name] - gradient) / (np.linalg.norm(gradient) + 1e-6)
        assert error < 1e-3, (name, float(error))
