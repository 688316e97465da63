"""Evaluation on held-out data: the loss per label token, and greedy answers beside the expected ones."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from meshtune.data.loader import MicroBatch, evaluation_batches
from meshtune.data.pack import LABELLED, Dataset
from meshtune.model.anatomy import Anatomy
from meshtune.rundir import RunDir
from meshtune.train.generate import answers
from meshtune.train.loss import summed_loss
from meshtune.train.metrics import Metrics


@dataclass(frozen=True)
class Question:
    """A held-out prompt as token ids, and as text with the answer its data set gives."""

    ids: tuple[int, ...]
    prompt: str
    expected: str


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation does; without a data set it does nothing."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    anatomy: Anatomy
    device: torch.device
    dataset: Dataset | None
    micro_batch_size: int
    at_start: bool = False
    samples: int = 0  # answers written to the run folder
    exact_match: int = 0  # answers compared
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    folder: RunDir | None = None

    def run(self, step: int, metrics: Metrics) -> float | None:
        """Log the evaluation after `step` updates; returns its loss, or None when there is nothing to
        evaluate on.
        """
        if self.dataset is None or not len(self.dataset):
            return None
        started = time.perf_counter()
        batches = evaluation_batches(self.dataset, micro_batch_size=self.micro_batch_size)
        loss, label_tokens = held_out_loss(self.model, self.anatomy, batches, self.device)
        extra: dict[str, float | int] = {}
        if wanted := max(self.samples, self.exact_match):
            asked = questions(self.dataset, self.tokenizer, self.stop_ids, wanted)
            given = answers(
                self.model,
                self.tokenizer,
                [q.ids for q in asked],
                max_new_tokens=self.max_new_tokens,
                stop_ids=self.stop_ids,
            )
            if self.folder:
                for question, answer in list(zip(asked, given, strict=True))[: self.samples]:
                    row = {
                        "step": step,
                        "prompt": question.prompt,
                        "expected": question.expected,
                        "answer": answer,
                    }
                    self.folder.append_sample(row)
            if self.exact_match:
                pairs = list(zip(asked, given, strict=True))[: self.exact_match]
                extra = {
                    "exact_match": exact_match([(q.expected, a) for q, a in pairs]),
                    "prompts": len(pairs),
                }
        metrics.evaluate(
            step=step, loss=loss, label_tokens=label_tokens, tokens=self.dataset.token_count,
            seconds=time.perf_counter() - started, **extra,
        )  # fmt: skip
        return loss


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel, anatomy: Anatomy, batches: Iterable[MicroBatch], device: torch.device
) -> tuple[float, int]:
    """(mean loss per label token, label tokens) over `batches`; the model is in evaluation mode meanwhile."""
    training, total, label_tokens = model.training, 0.0, 0
    model.eval()
    try:
        for micro_batch in batches:
            total += float(summed_loss(model, anatomy, micro_batch.to(device)))
            label_tokens += micro_batch.label_tokens
    finally:
        model.train(training)
    return total / max(1, label_tokens), label_tokens


def questions(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], number: int
) -> list[Question]:
    """The first `number` documents that ask something: their last labelled stretch is the answer, what
    precedes it the prompt.

    A document labelled throughout (plain text) is asked to go on after its first quarter.
    """
    found: list[Question] = []
    for document in np.unique(dataset.members).tolist():  # its own documents, in the order they were read
        if len(found) == number:
            break
        stored = np.asarray(dataset.tokens[dataset.offsets[document] : dataset.offsets[document + 1]])
        ids, labelled = (stored & ~LABELLED).tolist(), (stored & LABELLED) != 0
        if not labelled.any():
            continue
        end = int(np.flatnonzero(labelled)[-1]) + 1
        unlabelled = np.flatnonzero(~labelled[:end])
        start = int(unlabelled[-1]) + 1
        if start <= 1:
            start = max(1, end // 4)
        answer = [token for token in ids[start:end] if token not in stop_ids]
        found.append(
            Question(
                ids=tuple(ids[:start]),
                prompt=str(tokenizer.decode(ids[:start], skip_special_tokens=False)),
                expected=str(tokenizer.decode(answer, skip_special_tokens=True)),
            )
        )
    return found


def exact_match(pairs: Sequence[tuple[str, str]]) -> float:
    """The share of (expected, answer) pairs that agree word for word, surrounding white space aside."""
    return sum(expected.strip() == answer.strip() for expected, answer in pairs) / max(1, len(pairs))
