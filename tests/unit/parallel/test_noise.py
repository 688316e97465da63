"""NEFTune's noise: its size, that it is a function of the place alone, and that it is in training alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from tiny import documents
from torch import nn
from transformers import AutoModelForCausalLM

from meshtune.data.batch import MicroBatch
from meshtune.model.anatomy import anatomy
from meshtune.parallel.context import split
from meshtune.parallel.mesh import Axis
from meshtune.parallel.noise import Neftune, add_noise, adding

NEFTUNE = Neftune(alpha=5.0, seed=42)


def made(micro_batch: MicroBatch, width: int = 64, like: torch.dtype = torch.float32) -> torch.Tensor:
    """The noise on a micro-batch's embeddings, all of them 0."""
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
    embedding = model.get_input_embeddings()
    nn.init.zeros_(embedding.weight)
    with adding(model, anatomy(model), micro_batch.noise):
        return embedding(micro_batch.input_ids).detach()


def noisy(batch: str = "epoch 1", neftune: Neftune = NEFTUNE, **options: Any) -> MicroBatch:
    return add_noise(documents(seed=1, vocabulary=200, **options), neftune, batch)


def test_the_noise_is_uniform_up_to_alpha_by_the_length_of_its_document() -> None:
    micro_batch = noisy(rows=4, width=512)
    noise, lengths = made(micro_batch), micro_batch.document_tokens()
    for length in lengths.unique().tolist():
        values = noise[lengths == length]
        if length == 0:
            assert not values.any()  # padding
            continue
        most = 5.0 / (length * 64) ** 0.5
        assert 0.95 * most < values.abs().max() <= most
        assert abs(values.mean()) < 0.03 * most
        assert values.std() == pytest.approx(most / 3**0.5, rel=0.05)
    flat = noise[lengths > 0].flatten()
    assert len(flat.unique()) > 0.95 * len(flat)


def test_the_noise_is_that_of_a_row_whatever_stands_beside_it() -> None:
    micro_batch = documents(seed=1, vocabulary=200, rows=3, width=32)
    whole = made(add_noise(micro_batch, NEFTUNE, "epoch 1"))
    for row in range(3):
        alone = replace(
            micro_batch,
            input_ids=nn.functional.pad(micro_batch.input_ids[row : row + 1], (0, 8)),
            documents=micro_batch.documents[row : row + 1],
        )
        noise = made(add_noise(alone, NEFTUNE, "epoch 1"))
        assert torch.equal(noise[:, :32], whole[row : row + 1]) and not noise[:, 32:].any()


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_a_rank_of_cp_has_the_noise_of_its_columns(method: str) -> None:
    micro_batch = noisy(width=32)
    whole = made(micro_batch)
    for index in range(2):
        part = split(micro_batch, Axis("cp", 2, index), method)
        assert part.columns is not None
        assert torch.equal(made(part), whole[:, part.columns])


def test_another_batch_seed_or_alpha_gives_other_noise() -> None:
    first = made(noisy())
    assert torch.equal(made(noisy()), first)
    assert not torch.equal(made(noisy("epoch 2")), first)
    assert not torch.equal(made(noisy(neftune=Neftune(5.0, 43))), first)
    torch.testing.assert_close(made(noisy(neftune=Neftune(10.0, 42))), 2 * first)


def losses(run: Any, kind: str = "train") -> list[float]:
    return [row["loss"] for row in run.folder.rows(kind)]


@pytest.mark.ci
def test_noise_is_in_training_alone(train: Callable[..., Any], tmp_path: Path) -> None:
    still = ("train.learning_rate=1e-30", "train.max_steps=1")
    plain, with_noise = (
        train(*still, f"train.neftune_alpha={alpha}", f"output={tmp_path / str(alpha)}") for alpha in (0, 20)
    )
    assert losses(plain) != losses(with_noise) and losses(plain, "eval") == losses(with_noise, "eval")


@pytest.mark.ci
def test_a_resumed_run_has_the_noise_of_an_unbroken_one(train: Callable[..., Any], tmp_path: Path) -> None:
    lasting = ("train.neftune_alpha=20", "train.lr_scheduler=constant", "checkpoint.every=2")
    whole = train(*lasting, "train.max_steps=4", f"output={tmp_path / 'whole'}")
    train(*lasting, "train.max_steps=2", f"output={tmp_path / 'parts'}")
    resumed = train(*lasting, "train.max_steps=4", f"output={tmp_path / 'parts'}")
    assert losses(resumed) == losses(whole)
