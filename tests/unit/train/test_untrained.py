"""Added tokens that rows use, and whose frozen rows of embedding or head were never trained."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from golden import says
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshtune import config
from meshtune.api import dry_train
from meshtune.api.resolve import model_spec
from meshtune.data.pack import LABELLED, Dataset
from meshtune.model import files
from meshtune.train.model import trainable_skeleton
from meshtune.train.untrained import untrained_sentences

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class OneDocument(Dataset):
    """Data of one document."""

    def __init__(self, tokens: list[int]) -> None:
        self.document = np.array(tokens, np.uint32)

    def __len__(self) -> int:
        return 1

    def documents(self, sequence: int) -> list[np.ndarray]:
        return [self.document]


@pytest.fixture(scope="module")
def base(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like the tiny one, whose vocabulary has four more tokens."""
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(tiny / "model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<|t{number}|>" for number in range(4)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    return folder


def sentences(base: Path, folder: Path, change: Any, *words: str, stream: bool = False) -> list[str]:
    """Sentences on a document with the first three of the four tokens, of which the third is labelled."""
    shutil.copytree(base, folder)
    file, tokenizer = folder / "model.safetensors", AutoTokenizer.from_pretrained(folder)
    ids, tensors = tokenizer.convert_tokens_to_ids([f"<|t{number}|>" for number in range(4)]), load_file(file)
    change(tensors, ids)
    save_file(tensors, file, {"format": "pt"})
    settings = config.load(None, [f"model.name={folder}", "data.train=rows.jsonl", *words])
    spec = model_spec(settings, "eager", "cpu")
    whole, _ = trainable_skeleton(spec)
    train: Any = OneDocument([ids[0], 7, ids[1], 9, ids[2] | int(LABELLED)])
    if stream:
        train, tokenizer.chat_template = object(), "{{ '<|t0|>' + messages[0]['content'] }}"
    return untrained_sentences(spec, whole, train, tokenizer, [ids[2]])


def zero(tensors: dict[str, torch.Tensor], ids: list[int]) -> None:
    for table in (EMBED, HEAD):
        tensors[table][ids] = 0


def small(tensors: dict[str, torch.Tensor], ids: list[int]) -> None:
    tensors[EMBED][ids[0]] *= 0.01


def alike(tensors: dict[str, torch.Tensor], ids: list[int]) -> None:
    tensors[HEAD][ids[2]] = tensors[HEAD][ids[3]]


@pytest.mark.parametrize("change", [zero, small, alike])
def test_untrained_tokens_are_named_under_lora(change: Any, base: Path, tmp_path: Path) -> None:
    for sentence in sentences(base, tmp_path / "model", change, "method=lora"):
        says(sentence)


def test_other_ways_to_train_and_to_read_have_their_own_sentence(base: Path, tmp_path: Path) -> None:
    lora = ("method=lora", "lora.modules_to_save=[norm]")
    says(*sentences(base, tmp_path / "stream", zero, *lora, stream=True))
    says(*sentences(base, tmp_path / "frozen", zero, "model.freeze=['*embed_tokens*']"))


def unlabelled(tensors: dict[str, torch.Tensor], ids: list[int]) -> None:
    tensors[HEAD][ids[0]] = 0  # never written
    tensors[EMBED][ids[3]] = 0  # in no row


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (zero, ["method=lora", "lora.modules_to_save=[embed_tokens, lm_head]"]),
        (zero, []),
        (zero, ["method=lora", "model.init=random"]),
        (unlabelled, ["method=lora"]),
    ],
)
def test_trained_rows_and_unused_tokens_are_no_matter(
    change: Any, words: list[str], base: Path, tmp_path: Path
) -> None:
    assert sentences(base, tmp_path / "model", change, *words) == []


def test_a_dry_run_reads_the_weights_that_are_here_and_downloads_none(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(files, "reachable", lambda: False)
    monkeypatch.setattr(dry_train, "position_sentences", lambda *_: [])
    stored = tmp_path / "models--someone--tiny"
    snapshot = stored / "snapshots" / ("0" * 40)
    sentences(base, snapshot, zero)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(snapshot.name)
    settings = config.load(None, ["model.name=someone/tiny", "data.train=rows.jsonl", "method=lora"])
    spec, tokenizer = model_spec(settings, "eager", "cpu"), AutoTokenizer.from_pretrained(snapshot)
    train = OneDocument([len(tokenizer) - 1])
    inputs: Any = SimpleNamespace(
        prepared=SimpleNamespace(train=train), tokenizer=tokenizer, encoder=SimpleNamespace(stop_ids=[])
    )
    assert len([*dry_train.notes_on_model(settings, spec, inputs)]) == 1
    (snapshot / "model.safetensors").write_bytes(b"damaged")
    assert [*dry_train.notes_on_model(settings, spec, inputs)] == []
    (snapshot / "model.safetensors").unlink()
    assert [*dry_train.notes_on_model(settings, spec, inputs)] == []
    assert files.weights_here("someone/other") == []
