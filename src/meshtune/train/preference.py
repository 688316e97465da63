"""Losses on whole answers: of pairs, of judged answers, and of a reward model.

    losses of labelled tokens -> log-probability of each answer (cp: summed over its ranks)
                              -> loss of the pairs, and its derivative by each token

A reward model's value of an answer is the output at its last token instead. All is summed in fp64 over some
hundred answers. What is divided by the number of pairs, or of judged answers, of the global batch are sums,
so that no layout changes a loss; a cross entropy in it is a mean over the global batch's chosen tokens.

Names of what is measured are those of TRL's trainers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from meshtune.data.batch import Answers, MicroBatch
from meshtune.objectives import OBJECTIVES, Objective
from meshtune.parallel.mesh import Axis

if TYPE_CHECKING:
    from meshtune.parallel.apply import Parallel

SUMS = (
    "rewards/chosen",
    "rewards/rejected",
    "logps/chosen",
    "logps/rejected",
    "rewards/accuracies",
    "nll_loss",
)


@dataclass(frozen=True)
class PreferenceSpec:
    """A preference objective and its constants, as plain values; those of others are not read."""

    objective: str  # a row of OBJECTIVES
    beta: float = 0.1
    loss_type: str = "sigmoid"  # of dpo
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    gamma: float = 0.0  # of simpo
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    center_coefficient: float = 0.0
    reference: str = "base"  # or the name of another model

    @property
    def row(self) -> Objective:
        return OBJECTIVES[self.objective]


class Preference:
    """The loss of a micro-batch's answers, called by `loss.head_loss`; adds up what is measured on this rank.

    kl: of the step, which kto's loss compares with, a scalar in fp64.
    """

    def __init__(self, spec: PreferenceSpec, cp: Axis = Axis("cp")) -> None:  # noqa: B008 - a frozen value
        self.spec, self.cp = spec, cp
        self.kl: Tensor | float = 0.0
        self._sums: Tensor | None = None

    def __call__(self, micro_batch: MicroBatch, losses: Tensor) -> tuple[Tensor, Tensor]:
        """(The loss summed over the pairs or answers, fp64, this context rank's share of it; its derivative
        by the loss of each token [tokens]).

        losses: of this rank's labelled tokens, their negated log-probabilities or outputs [tokens].
        """
        answers = micro_batch.answers
        if answers is None:  # of a rank that has no sequences left
            return losses.sum().double(), torch.zeros_like(losses)
        values = self.values(answers, losses)
        with torch.enable_grad():
            loss_of = getattr(self, self.spec.objective)  # the method of that name
            total, measured = loss_of(values.requires_grad_(), answers)
            (slopes,) = torch.autograd.grad(total, values)
        self._sums = measured / self.cp.size if self._sums is None else self._sums + measured / self.cp.size
        lengths = answers.lengths.flatten()
        weights = -slopes.flatten().repeat_interleave(lengths, output_size=len(losses))
        return total.detach() / self.cp.size, weights.to(losses.dtype)

    def values(self, answers: Answers, losses: Tensor) -> Tensor:
        """Sums of the negated losses of each answer's prompt and of itself, fp64 [answers, 2], the same on
        all context ranks.
        """
        upto = torch.cat([losses.new_zeros(1, dtype=torch.float64), losses.double().cumsum(0)])
        ends = answers.lengths.flatten().cumsum(0)
        sums = (upto[ends - answers.lengths.flatten()] - upto[ends]).view(-1, 2)
        if self.cp.size > 1:
            dist.all_reduce(sums, group=self.cp.group)
        return sums

    def take(self) -> list[Tensor | float]:
        """Sums of what was measured since the last call over this rank's micro-batches (see `means`)."""
        taken, self._sums = self._sums, None
        return [0.0] * (len(SUMS) + 2) if taken is None else list(taken)

    def means(self, sums: list[float]) -> dict[str, float]:
        """Means of what is measured, by its name, from the sums over all ranks of `take`."""
        *totals, chosen, rejected = sums
        counts = [chosen, rejected, chosen, rejected, chosen, chosen]
        means = {
            name: total / max(1.0, count) for name, total, count in zip(SUMS, totals, counts, strict=True)
        }
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        if not self.spec.row.prompts and not self.spec.sft_weight:
            del means["nll_loss"]
        if self.spec.row.scores:
            del means["logps/chosen"], means["logps/rejected"]
        if self.spec.row.rows == "judged":
            del means["rewards/accuracies"]
            means["kl"] = float(self.kl)
        return means

    # Sums over a micro-batch: (loss, what is measured). values: [answers, 2], of prompts and of answers #

    def dpo(self, values: Tensor, answers: Answers) -> tuple[Tensor, Tensor]:
        """Rafailov et al. 2023; ipo: Azar et al. 2023, by means per token; robust: Chowdhury et al. 2024."""
        spec, ratios = self.spec, values[:, 1] - answers.reference
        difference = _difference(ratios)
        if spec.loss_type == "ipo":
            means = ratios / answers.counts.clamp(min=1)
            losses = (_difference(means) - 1 / (2 * spec.beta)) ** 2
        elif spec.loss_type == "hinge":
            losses = (1 - spec.beta * difference).relu()
        else:
            losses = _smoothed(spec.beta * difference, spec.label_smoothing, spec.loss_type == "robust")
        entropy = self._cross_entropy(values, answers)
        total = losses.sum() + spec.sft_weight * entropy
        return total, _measured(spec.beta * ratios, values[:, 1], entropy)

    def simpo(self, values: Tensor, answers: Answers) -> tuple[Tensor, Tensor]:
        spec, means = self.spec, values[:, 1] / answers.counts.clamp(min=1)
        margins = spec.beta * _difference(means) - spec.gamma
        entropy = self._cross_entropy(values, answers)
        total = _smoothed(margins, spec.label_smoothing).sum() + spec.sft_weight * entropy
        return total, _measured(spec.beta * means, means, entropy)

    def orpo(self, values: Tensor, answers: Answers) -> tuple[Tensor, Tensor]:
        means = values[:, 1] / answers.counts.clamp(min=1)
        log_odds = means - _log1mexp(means)
        entropy = self._cross_entropy(values, answers)
        total = entropy - self.spec.beta * logsigmoid(_difference(log_odds)).sum()
        return total, _measured(self.spec.beta * means, means, entropy)

    def kto(self, values: Tensor, answers: Answers) -> tuple[Tensor, Tensor]:
        spec, ratios, good = self.spec, values[:, 1] - answers.reference, answers.good
        over = spec.beta * (ratios - self.kl)
        gain = torch.where(good, over, -over).sigmoid()
        weights = torch.where(good, spec.desirable_weight, spec.undesirable_weight)
        each = torch.stack([good, ~good]).double()
        rewards, logs = each @ (spec.beta * ratios), each @ values[:, 1]
        counts = each.sum(1)
        zeros = torch.zeros_like(counts)
        return (weights * (1 - gain)).sum(), torch.cat([rewards, logs, zeros, counts]).detach()

    def reward(self, values: Tensor, answers: Answers) -> tuple[Tensor, Tensor]:
        """Bradley and Terry 1952, with the margins of Touvron et al. 2023 (Llama 2); the squares are those of
        Eisenstein et al. 2023.
        """
        scores = values[:, 1]
        losses = -logsigmoid(_difference(scores) - answers.margins[::2])
        losses = losses + self.spec.center_coefficient * (scores[::2] + scores[1::2]) ** 2
        return losses.sum(), _measured(scores, scores, scores.new_zeros(()))

    def _cross_entropy(self, values: Tensor, answers: Answers) -> Tensor:
        """Cross entropy of the chosen answers' trained tokens, in units of the loss."""
        return -values[::2].sum() * answers.units_per_token


def _difference(values: Tensor) -> Tensor:
    """The value of each chosen answer less that of the rejected one, [pairs]."""
    return values[::2] - values[1::2]


def _smoothed(margins: Tensor, smoothing: float, robust: bool = False) -> Tensor:
    """Losses of differences of rewards; a share of the pairs is assumed to be swapped (Mitchell 2023).

    robust: without the bias that this has (Chowdhury et al. 2024).
    """
    if not smoothing:
        return -logsigmoid(margins)
    clean, swapped = (1 - smoothing) * -logsigmoid(margins), smoothing * -logsigmoid(-margins)
    return (clean - swapped) / (1 - 2 * smoothing) if robust else clean + swapped


def _log1mexp(values: Tensor) -> Tensor:
    """log(1 - exp(values)) of values below 0, without cancellation (Mächler 2012)."""
    near = values > -0.6931
    safe = values.clamp(max=-1e-15)
    return torch.where(near, (-torch.expm1(safe)).log(), torch.log1p(-safe.exp()))


def _measured(rewards: Tensor, logs: Tensor, entropy: Tensor) -> Tensor:
    """The sums of `SUMS` over pairs, and the numbers of chosen and of rejected answers."""
    count = rewards.new_full((), len(rewards) // 2)
    right = (_difference(rewards) > 0).sum().double()
    sums = [values[side::2].sum() for values in (rewards, logs) for side in (0, 1)]
    return torch.stack([*sums, right, entropy, count, count]).detach()


# Passes over answers without gradients #


class Recorded(Preference):
    """Keeps answers with their log-probabilities, instead of a loss."""

    def __init__(self, spec: PreferenceSpec, cp: Axis) -> None:
        super().__init__(spec, cp)
        self.found: list[tuple[Answers, Tensor]] = []

    def __call__(self, micro_batch: MicroBatch, losses: Tensor) -> tuple[Tensor, Tensor]:
        if (answers := micro_batch.answers) is not None:
            self.found.append((answers, self.values(answers, losses)[:, 1]))
        return losses.new_zeros(()), torch.zeros_like(losses)


def log_probabilities(
    parallel: "Parallel",
    preference: Preference,
    micro_batches: Iterator[MicroBatch],
    show: Callable[[int], object] = lambda _: None,
) -> list[tuple[Answers, Tensor]]:
    """(Answers, their log-probabilities by the model in evaluation mode) of this data rank's micro-batches.
    Every rank calls it.

    micro_batches: in host memory. show: gets the micro-batches that are done.
    """
    from meshtune.train.loss import head_loss  # imports this module

    modules, recorded = parallel.modules, Recorded(preference.spec, preference.cp)
    training = modules.training
    modules.eval()
    for _ in parallel.forward_each(micro_batches, partial(head_loss, objective=recorded), show):
        pass
    modules.train(training)
    return recorded.found


def divergence(parallel: "Parallel", preference: Preference, mismatched: Iterator[MicroBatch]) -> float:
    """Mean log-ratio of mismatched answers to the reference, at least 0: kto's estimate of the divergence.

    Every rank calls it. mismatched: of this data rank, in host memory.
    """
    world, found = parallel.world, log_probabilities(parallel, preference, mismatched)
    ratios = [(values - answers.reference).sum() for answers, values in found]
    number = sum(len(answers.places) for answers, _ in found)
    copies = world.tp.size * world.cp.size
    total, count = world.sum_over_ranks(sum(ratios, torch.zeros(())) / copies, number / copies)
    return max(0.0, total / max(1.0, count))
