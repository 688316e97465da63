"""Embedding, head and loss: this engine's move the bytes that dry runs count, other tools' are in thirds."""

from dataclasses import replace

import numpy as np
import pytest
from shapes import adapted, of_shape

from meshtune.layout import Layout
from meshtune.placement.columns import Columns
from meshtune.placement.states import LOSS_CHUNK_TOKENS, loss_chunk_tokens
from meshtune.plan.hardware import catalogue
from meshtune.plan.machine import Machine
from meshtune.plan.seconds.ends import end_seconds, head_matmuls
from meshtune.plan.work import Work

SEQ_LEN = 4096
LLAMA_1B = of_shape(layers=4, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocabulary=128256)
COUNTED = {  # bytes of one micro-batch, but for matmuls: `kernel_table` of traced steps, in bf16
    "dp8-mb1-ga2": 34.89e9,  # with the sums in fp32, and the flat buffer of replicas
    "tp4-sp-mb1-ga1": 9.465e9,  # a split vocabulary
}


@pytest.mark.parametrize("text", COUNTED)
def test_bytes_outside_the_blocks_are_those_that_dry_runs_count(text: str) -> None:
    layouts, machine = Columns.of([Layout.parse(text)]), Machine.of(catalogue()["h100-sxm"], "meshtune")
    chunks = SEQ_LEN / LOSS_CHUNK_TOKENS
    matmuls = chunks * head_matmuls(LLAMA_1B, layouts, machine, LOSS_CHUNK_TOKENS)
    seconds = end_seconds(LLAMA_1B, layouts, machine, SEQ_LEN).compute - matmuls
    found = float(np.ravel(seconds * machine.bandwidth * machine.memory)[0])
    assert found == pytest.approx(COUNTED[text], rel=0.02)


@pytest.mark.parametrize(
    ("memory", "vocabulary", "tokens"),
    [
        (0, 128256, 1024),
        (24e9, 128256, 1024),
        (85e9, 128256, 2048),
        (150e9, 128256, 4096),
        (85e9, 32000, 4096),
    ],
)
def test_chunks_of_the_compiled_loss_grow_with_memory(memory: float, vocabulary: int, tokens: int) -> None:
    assert loss_chunk_tokens(memory, vocabulary, 2) == tokens
    assert 4 * vocabulary * tokens <= max(memory / 64, 4 * vocabulary * 1024)


def test_the_loss_is_of_the_labelled_tokens_alone() -> None:
    """Half of the tokens labelled cost as half the tokens do, and what the norm takes of all of them."""
    layouts, machine = Columns.of([Layout.parse("mb1-ga1")]), Machine.of(catalogue()["h100-sxm"], "meshtune")

    def loss(work: Work, tokens: int) -> float:
        return float(np.ravel(end_seconds(work, layouts, machine, tokens).loss)[0])

    hidden = 2 * SEQ_LEN / 2 * LLAMA_1B.hidden / (machine.bandwidth * machine.memory)
    of_all = (float(machine.elementwise_norm) + 1) * hidden  # the norm, and the gradient's zeros
    half = loss(replace(LLAMA_1B, labelled=0.5), SEQ_LEN)
    assert half == pytest.approx(loss(LLAMA_1B, SEQ_LEN // 2) + of_all)
    assert half < 0.55 * loss(LLAMA_1B, SEQ_LEN)


def test_the_loss_of_this_engine_is_in_the_forward() -> None:
    layouts = Columns.of([Layout.parse("zero3x8-mb1-ga1")])
    for stack, least, most in (("meshtune", 0.9, 1.0), ("torchtitan", 1 / 3, 1 / 3)):
        ends = end_seconds(LLAMA_1B, layouts, Machine.of(catalogue()["h100-sxm"], stack), SEQ_LEN)
        share = float(np.ravel(ends.last_forward / ends.last)[0])
        assert least - 1e-9 <= share <= most + 1e-9


def test_collectives_of_a_split_embedding_and_head() -> None:
    """One of each kind in each pass, of hidden states, and small ones of the loss, as dry runs count them."""
    fitted = Machine.of(catalogue()["h100-sxm"], "meshtune")
    machine = replace(fitted, link_share=0.8858, link_latency=1.515e-5)  # as when the dry run was timed
    whole, split, summed = (
        end_seconds(LLAMA_1B, Columns.of([Layout.parse(text)]), machine, SEQ_LEN)
        for text in ("mb1-ga1", "tp4-sp-mb1-ga1", "tp4-mb1-ga1")
    )
    assert float(np.ravel(whole.tensor)[0]) == 0
    ring = 4096 * 2048 * 2 * 3 / 4 / (machine.link * machine.link_share) + 3 * machine.link_latency
    assert float(np.ravel(split.exchange)[0]) == pytest.approx(ring)
    # 0.693 ms for nine of each kind in each pass, of which eight are the blocks'; the loss 0.364 ms
    assert float(np.ravel(split.exchange)[0]) == pytest.approx(0.693e-3 / 9, rel=0.01)
    assert float(np.ravel(split.sums)[0]) == pytest.approx(0.364e-3, rel=0.05)
    assert float(np.ravel(summed.sums)[0]) == float(np.ravel(split.sums)[0])


def test_a_frozen_head_has_no_gradient() -> None:
    layouts, machine = (
        Columns.of([Layout.parse("dp8-mb1-ga2")]),
        Machine.of(catalogue()["h100-sxm"], "meshtune"),
    )
    frozen = end_seconds(adapted(LLAMA_1B, 16), layouts, machine, SEQ_LEN)
    assert float(np.ravel(frozen.embedding)[0]) == float(np.ravel(frozen.weights)[0]) == 0
    trained = end_seconds(LLAMA_1B, layouts, machine, SEQ_LEN)
    assert np.all(frozen.loss < 0.8 * trained.loss)


def test_a_tied_heads_gradient_is_added_to_the_embeddings() -> None:
    machine, tied = (
        Machine.of(catalogue()["h100-sxm"], "meshtune"),
        of_shape(layers=4, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocabulary=128256, tied=1.0),
    )
    alone, staged = (Columns.of([Layout.parse(text)]) for text in ("mb1-ga1", "pp2-1f1b-mb1-ga2"))
    sums = (
        end_seconds(tied, alone, machine, SEQ_LEN).embedding
        - end_seconds(LLAMA_1B, alone, machine, SEQ_LEN).embedding
    )
    moved = float(np.ravel(sums * machine.bandwidth * machine.memory)[0])
    assert moved == pytest.approx(3 * 2 * 128256 * 2048)
    for part in ("embedding", "loss", "weights"):  # each end of a pipeline has a weight of its own
        both = [getattr(end_seconds(work, staged, machine, SEQ_LEN), part) for work in (tied, LLAMA_1B)]
        assert np.allclose(*both)
