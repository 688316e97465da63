"""Train a tiny model under a layout, on several ranks and through the front door; compare with one rank."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import make_rows, make_tokenizer, write_rows

from meshtune import config
from meshtune.api import build
from meshtune.layout import Layout
from meshtune.meter import phases
from meshtune.rundir import RunDir
from meshtune.train import loop
from meshtune.train.callbacks import Hooks
from meshtune.train.loss import LossFunction

GLOBAL_BATCH = 16

# precision -> largest relative difference of (loss, gradient norm, parameters) from one rank's. How much fp32
# loses to rounding is known from one rank in fp64: Adam amplifies it where gradients are nearly zero.
TOLERANCES = {"fp32": (1e-6, 5e-5, 1e-3), "fp64": (1e-7, 1e-7, 1e-7)}


@dataclass(frozen=True)
class Trained:
    """The result of a run: losses and gradient norms by step, losses of evaluations, the exported tensors."""

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    tensors: dict[str, torch.Tensor]
    folder: Path

    @classmethod
    def read(cls, folder: Path | str) -> "Trained":
        run = RunDir(folder)
        rows = run.rows("train")
        tensors = {}
        for file in run.model.glob("*.safetensors"):
            tensors |= load_file(file)
        return cls(
            [row["loss"] for row in rows],
            [row["grad_norm"] for row in rows],
            [row["loss"] for row in run.rows("eval")],
            tensors,
            run.path,
        )


def make_folder(
    folder: Path, model: Any, *, rows: int = 150, tokens: int | None = None, experts: str | None = None
) -> Path:
    """A folder with `model` and a tokenizer (model/), train.jsonl and test.jsonl of very unequal rows.

    tokens: of the tokenizer; None: the model's number. experts: transformers' implementation of them.
    """
    train, test = make_rows(rows), make_rows(20, seed=1)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "test.jsonl", test)
    texts = [f"{row['prompt']}\n{row['completion']}" for row in train]
    make_tokenizer(texts, tokens or model.config.get_text_config().vocab_size).save_pretrained(
        folder / "model"
    )
    model.save_pretrained(folder / "model")
    if experts:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"experts_implementation": experts}))
    return folder


def settings(
    data: Path, output: Path, layout: str, precision: str, overrides: Sequence[str] = ()
) -> list[str]:
    """A short run: 3 steps of 16 packed sequences, in the micro-batches of `whole`."""
    return [
        f"model.name={data / 'model'}", f"data.train={data / 'train.jsonl'}",
        f"data.eval={data / 'test.jsonl'}", f"data.cache={data / 'cache'}", "data.seq_len=64",
        f"train.global_batch_size={GLOBAL_BATCH}", "train.max_steps=3", f"train.precision={precision}",
        "train.learning_rate=1e-2", "train.weight_decay=0.1", "train.adam_eps=1e-6",
        "train.lr_scheduler=constant", "train.warmup_ratio=0", "log.to=[jsonl]", "checkpoint.every=0",
        f"layout={whole(layout)}", f"output={output}", *overrides,
    ]  # fmt: skip


def whole(layout: str) -> Layout:
    """The layout with what it leaves open filled in: micro-batches of 4 sequences, which are accumulated.

    A run would choose one micro-batch as large as the global batch, in which schedules have nothing to order.
    """
    open_fields = config.PartialLayout.parse(layout)
    return open_fields.complete(devices=1, global_batch_size=GLOBAL_BATCH)


def train(words: list[str], loss: LossFunction | None = None, watched: int = 0) -> str:
    """Train on this rank; returns the run's folder. loss: instead of the cross entropy.

    watched: steps whose memory is counted, which takes as long as all else.
    """
    with patch.object(phases, "WATCHED_STEPS", watched):
        run = build.build(config.load(None, words), hooks=Hooks(loss))
        loop.train(run)
    return str(run.folder.path)


def trained(
    data: Path,
    output: Path,
    layout: str,
    precision: str,
    *overrides: str,
    forked: bool = False,
    loss: LossFunction | None = None,
    watched: int = 0,
) -> Trained:
    """Train under `layout`, on as many ranks as it needs; if `forked`, with what is patched here.

    loss, watched: as in `train`.
    """
    words = settings(data, output, layout, precision, overrides)
    clean = partial(shutil.rmtree, output, ignore_errors=True) if not output.exists() else lambda: None
    ended = run_ranks(
        whole(layout).world, train, words, loss, watched, forked=forked, seconds=240, clean=clean
    )  # fmt: skip
    return Trained.read(ended[0])


def differences(ours: Trained, theirs: Trained) -> tuple[float, float, float, str]:
    """Largest relative differences of loss (also of the last evaluation), gradient norm and parameters, and
    the name of the parameter that differs most.
    """

    def most(a: list[float], b: list[float]) -> float:
        assert len(a) == len(b) > 0
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    assert ours.tensors.keys() == theirs.tensors.keys()
    moved = {
        name: float((tensor - theirs.tensors[name]).double().norm() / theirs.tensors[name].double().norm())
        for name, tensor in ours.tensors.items()
    }
    worst = max(moved, key=lambda name: moved[name])
    losses = [*ours.losses, *ours.evaluated[-1:]], [*theirs.losses, *theirs.evaluated[-1:]]
    return most(*losses), most(ours.norms, theirs.norms), moved[worst], worst


def check(ours: Trained, theirs: Trained, precision: str) -> None:
    """Assert that both runs came to the same."""
    loss, norm, parameters, worst = differences(ours, theirs)
    allowed = TOLERANCES[precision]
    assert loss <= allowed[0] and norm <= allowed[1] and parameters <= allowed[2], (
        f"loss {loss:.1e} (≤ {allowed[0]:.0e}), gradient norm {norm:.1e} (≤ {allowed[1]:.0e}), "
        f"parameters {parameters:.1e} (≤ {allowed[2]:.0e}; worst: {worst})"
    )
