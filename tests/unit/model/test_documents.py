"""Rotary embeddings that depend on a document's length: packed documents have those that they have alone."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, exact
from ranks import run_ranks
from tiny import documents
from transformers import AutoModelForCausalLM, PretrainedConfig

from meshtune.attention.register import register
from meshtune.data.batch import MicroBatch, micro_batch
from meshtune.model.anatomy import anatomy
from meshtune.model.body import body_forward
from meshtune.model.documents import follow_documents
from meshtune.parallel import context
from meshtune.parallel.mesh import Axis

SHORT = 12  # tokens up to which the frequencies are the plain ones

ROPES = {
    "longrope": lambda: FAMILIES["phi3"](
        original_max_position_embeddings=SHORT,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.5 * i for i in range(8)],
            "original_max_position_embeddings": SHORT,
        },
    ),
    "dynamic": lambda: FAMILIES["llama"](
        max_position_embeddings=SHORT,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
}


def build(config: PretrainedConfig, attention: str = "meshtune") -> torch.nn.Module:
    register()
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()


def packed() -> MicroBatch:
    """Rows of short and long documents, the long ones of several lengths, with padding."""
    return documents(seed=2, vocabulary=256, rows=3, width=40)


def padded() -> MicroBatch:
    """Short documents, each with more padding behind it than a short document has tokens: without packing
    beside a long one, and in a packed sequence that is half empty.
    """
    draw = np.random.default_rng(3)
    rows = [
        [draw.integers(1, 256, length, dtype=np.uint32) for length in row] for row in ((8,), (35,), (5, 4))
    ]
    return micro_batch(rows, width=40)


def alone(config: PretrainedConfig, batch: MicroBatch) -> torch.Tensor:
    """The last hidden states where the plain model reads one document at a time; padding has zeros."""
    rows = []
    for ids, lengths in zip(batch.input_ids, batch.documents, strict=True):
        parts = ids[: sum(lengths)].split(list(lengths))
        fresh = (build(config, "sdpa").model(part[None]).last_hidden_state[0] for part in parts)
        row = torch.cat([*fresh])
        rows.append(torch.nn.functional.pad(row, (0, 0, 0, len(ids) - len(row))))
    return torch.stack(rows)


def ours(config: PretrainedConfig, batch: MicroBatch, cp: Axis) -> torch.Tensor:
    model = build(config)
    follow_documents(model)
    parts = anatomy(model)
    context.attach(model, parts, cp, "allgather")
    batch = context.split(batch, cp, "allgather")
    with exact(), torch.no_grad():
        out = body_forward(model, parts, batch)
    return out * (batch.document_tokens() > 0)[..., None]


@pytest.mark.parametrize("make", [packed, padded])
@pytest.mark.parametrize("rope", ROPES)
def test_packed_and_padded_documents_are_embedded_as_alone(rope: str, make: Callable[[], MicroBatch]) -> None:
    config, batch = ROPES[rope](), make()
    lengths = [length for row in batch.documents for length in row]
    assert min(lengths) <= SHORT < max(lengths)
    assert make is padded or len({length for length in lengths if length > SHORT}) > 1
    with exact(), torch.no_grad():
        expected = alone(config, batch)
    found = ours(config, batch, Axis("cp"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def columns(config: PretrainedConfig) -> tuple[torch.Tensor, torch.Tensor]:
    cp = Axis("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    return ours(config, packed(), cp), context.columns(40, cp, "allgather")


@pytest.mark.parametrize("rope", ROPES)
def test_a_rank_with_a_part_of_a_document_knows_its_length(rope: str) -> None:
    config, batch = ROPES[rope](), packed()
    with exact(), torch.no_grad():
        expected = alone(config, batch)
    for found, index in run_ranks(2, columns, config):
        torch.testing.assert_close(found, expected[:, index], rtol=1e-9, atol=1e-9)


def test_other_embeddings_are_left_alone() -> None:
    model = build(FAMILIES["llama"]())
    follow_documents(model)
    assert not any("forward" in vars(module) for module in model.modules())
