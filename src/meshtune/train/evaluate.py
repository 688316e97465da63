"""Evaluation on held-out data: the loss per label token, and greedy answers next to the expected ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from meshtune.data.batch import MicroBatch, evaluation_batches, held_out_mismatched
from meshtune.data.pack import LABELLED, Dataset, ids_of_stored
from meshtune.launch.signals import EvaluationStopped, StopRequest
from meshtune.meter.rows import matches
from meshtune.rundir import RunDir
from meshtune.train.generate import answer_ids, decoded, evaluating, longest_answers
from meshtune.train.loss import TokenLoss, head_loss
from meshtune.train.preference import Preference, divergence

if TYPE_CHECKING:
    from meshtune.parallel.apply import Parallel
    from meshtune.train.trackers import Metrics


@dataclass(frozen=True)
class Question:
    """A held-out prompt as token ids, and as text with the answer its data set gives."""

    ids: tuple[int, ...]  # of the prompt
    prompt: str  # with special tokens
    text: str  # the prompt without them, for people
    expected: str  # whole, without special tokens


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on held-out data; without a data set it does nothing.

    `run` logs the loss per label token; where asked, held-out prompts are answered greedily too.
    """

    parallel: Parallel
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset | None  # held-out sequences
    micro_batch_size: int  # sequences of one forward pass on each data rank
    max_new_tokens: int = 64  # of an answer
    at_start: bool = False  # True: the training loop evaluates before the first step, too
    samples: int = 0  # answers written to the run folder, at each evaluation
    exact_match: int = 0  # answers compared, at each evaluation
    stop_ids: tuple[int, ...] = ()  # tokens that end an answer
    folder: RunDir | None = None  # for samples; None: they are not written
    objective: TokenLoss | Preference | None = None  # instead of the cross entropy
    stop: StopRequest | None = None  # ends an evaluation early

    def run(self, step: int, metrics: Metrics) -> float | None:
        """Log the evaluation after `step` updates; returns its mean loss per label token, or None, without a
        row, when there is nothing to evaluate on.

        Every rank calls it; the main rank appends the samples to samples.jsonl. Raises
        EvaluationStopped if a rank was asked to stop, without a row unless it was the last batch.
        """
        if self.dataset is None or not len(self.dataset):
            return None
        started = time.perf_counter()
        wanted = max(self.samples, self.exact_match)
        prompts = questions(self.dataset, self.tokenizer, self.stop_ids, wanted) if wanted else []
        at = partial(metrics.evaluating, step=step, prompts=len(prompts))
        loss, label_tokens, measured = self.held_out_loss(partial(at, unit="batches"))
        extra: dict[str, Any] = {"measured": measured} if measured else {}
        if wanted:
            asked = [question.ids for question in prompts]
            limits = longest_answers(self.parallel, asked, self.max_new_tokens)
            new_ids = answer_ids(
                self.parallel, self.tokenizer, asked, max_new_tokens=self.max_new_tokens,
                stop_ids=self.stop_ids, advance=partial(self.advance, partial(at, unit="tokens of answers")),
            )  # fmt: skip
            completions = decoded(self.tokenizer, new_ids)
            if self.folder and self.parallel.world.main:
                for question, answer in list(zip(prompts, completions, strict=True))[: self.samples]:
                    row = {
                        "step": step,
                        "prompt": question.prompt,
                        "question": question.text,
                        "expected": question.expected,
                        "answer": answer,
                    }
                    self.folder.append_sample(row)
            if self.exact_match:
                pairs = list(zip(prompts, completions, strict=True))[: self.exact_match]
                extra |= {
                    "exact_match": sum(matches(q.expected, a) for q, a in pairs) / max(1, len(pairs)),
                    "prompts": len(pairs),
                    "answers_cut": sum(len(new_ids[i]) == limits[i] > 0 for i in range(len(pairs))),
                    "prompts_without_room": limits[: len(pairs)].count(0),
                }
        metrics.evaluate(
            step=step, loss=loss, label_tokens=label_tokens, tokens=self.dataset.token_count,
            seconds=time.perf_counter() - started, **extra,
        )  # fmt: skip
        if step:
            self.advance()
        return loss

    def advance(self, show: Callable[..., object] | None = None, **count: int) -> None:
        """Show the count (done, total) before every batch of every rank. Raises EvaluationStopped if one was
        asked to stop.
        """
        if show:
            show(**count)
        stop, world = self.stop, self.parallel.world
        if stop and stop.enabled and world.sum_over_ranks(stop.requested is not None)[0]:
            raise EvaluationStopped

    def held_out_loss(self, show: Callable[..., object] | None = None) -> tuple[float, int, dict[str, float]]:
        """(mean loss per unit, label tokens, what a loss on whole answers measured, by its name); the model
        is in evaluation mode meanwhile. Units are label tokens, or pairs or answers.

        show: gets the batches done, and all of them.
        """
        dataset = self.dataset
        assert dataset is not None
        total, units, label_tokens, own, world = 0.0, 0, 0, self.objective, self.parallel.world
        batches_of = partial(
            evaluation_batches,
            micro_batch_size=self.micro_batch_size,
            data_rank=world.data_rank,
            data_ranks=world.data_ranks,
            multiple=self.parallel.width_multiple,
        )
        if isinstance(own, Preference) and own.spec.row.mismatched:
            own.kl = divergence(self.parallel, own, batches_of(held_out_mismatched(dataset)))
        batch_count = -(-len(dataset) // (self.micro_batch_size * world.data_ranks))

        def read() -> Iterator[MicroBatch]:
            nonlocal label_tokens, units
            for micro_batch in batches_of(dataset):
                label_tokens += micro_batch.label_tokens
                units += micro_batch.units
                yield micro_batch

        advance = partial(self.advance, show, total=batch_count)
        losses = self.parallel.forward_each(
            read(), partial(head_loss, objective=own), lambda done: advance(done=done)
        )
        with evaluating(self.parallel.modules):
            total += sum(map(float, losses))
        # Tensor ranks have the same loss; ranks of one data rank have read the same labels.
        copies = world.size / world.data_ranks
        taken = [each / world.tp.size for each in own.take()] if own else []
        total, label_tokens, units, *sums = world.sum_over_ranks(
            total / world.tp.size, label_tokens / copies, units / copies, *taken
        )
        count = (sums[0] or math.nan) if isinstance(own, TokenLoss) else max(1, units)
        measured = {}
        if isinstance(own, Preference):
            measured = {f"{own.spec.row.unit}s": round(units), **own.means(sums)}
        return total / count, round(label_tokens), measured


def questions(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], number: int
) -> list[Question]:
    """Questions from the first `number` documents with a label, fewer if there aren't enough: the last run
    of labelled tokens is the answer, without stop_ids, and all before it the prompt. The expected answer has
    the tokens that the cut to seq_len took, too.

    Where every token but the first is labelled (plain text), the prompt is the first quarter.
    """
    asking: list[Question] = []
    for document in np.unique(dataset.members).tolist():  # its own documents, in the order they were read
        if len(asking) == number:
            break
        begin, end = dataset.offsets[document : document + 2].tolist()
        first = int(dataset.sides["first"][document])  # of a pair the chosen answer is expected
        stored = np.asarray(dataset.tokens[begin : begin + first if first else end])
        ids, labelled = ids_of_stored(stored).tolist(), (stored & LABELLED) != 0
        if not labelled.any() or not dataset.sides["good"][document]:  # no answer to expect
            continue
        end = int(np.flatnonzero(labelled)[-1]) + 1
        unlabelled = np.flatnonzero(~labelled[:end])
        start = int(unlabelled[-1]) + 1
        if start <= 1:
            start = max(1, end // 4)
        rest = dataset.answer_rests[dataset.rest_offsets[document] : dataset.rest_offsets[document + 1]]
        answer = [token for token in [*ids[start:end], *rest.tolist()] if token not in stop_ids]
        asking.append(
            Question(
                ids=tuple(ids[:start]),
                prompt=str(tokenizer.decode(ids[:start], skip_special_tokens=False)),
                text=without_control_tokens(ids[:start], tokenizer),
                expected=str(tokenizer.decode(answer, skip_special_tokens=True)),
            )
        )
    return asking


def without_control_tokens(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of token ids without special tokens; these begin a new line, as of a chat's next message."""
    special = {*tokenizer.all_special_ids}
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    pieces = (list(piece) for is_special, piece in groupby(ids, special.__contains__) if not is_special)
    lines = (str(tokenizer.decode(piece)).strip() for piece in pieces)
    return "\n".join(line for line in lines if line)
