"""One layout explained: its prediction, the reasons against it, and what would change it most."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshtune.config import Config
from meshtune.layout import Layout, PartialLayout
from meshtune.placement.columns import Columns
from meshtune.plan.advice import compute_parts
from meshtune.plan.changes import Outcome, Refused, levers, refusals
from meshtune.plan.cluster import Cluster, cluster_for
from meshtune.plan.cost import UNPLANNED, RunCost, RunLength, run_length
from meshtune.plan.phrases import documents, memory_limit
from meshtune.plan.search import OUTDONE_BY, Choice, explained, outdone, peaks_of_ranks, search
from meshtune.plan.workload import Workload
from meshtune.units import counted, human


@dataclass(frozen=True)
class Explanation:
    """The prediction for one layout, whether it can run or not."""

    workload: Workload  # with the layout's global batch
    choice: Choice
    against: tuple[str, ...]  # it does not fit; the search leaves it out; settings that it has otherwise
    refused: tuple[str, ...] = ()  # reasons why it can't be trained, with the remedies
    length: RunLength = UNPLANNED  # of the run; UNPLANNED for another global batch than the config's

    @cached_property
    def levers(self) -> list[Outcome]:
        """The three single changes that gain most time or memory."""
        return levers(self.workload, self.choice)

    @cached_property
    def compute(self) -> dict[str, float] | None:
        """Seconds that a step computes by kind of work, the longest first; None where times are not known."""
        if not self.choice.cluster.timed:
            return None
        parts = compute_parts(self.workload, self.choice)
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    @cached_property
    def tensors(self) -> list[dict[str, Any]]:
        """Kinds of tensors at the memory peak, as `Liveness.at_peak`."""
        ranks = peaks_of_ranks(self.workload, self.choice.cluster, self.choice.layout)
        return max(ranks.values(), key=lambda rank: float(rank.memory().peak[0])).at_peak()

    @property
    def run(self) -> RunCost:
        """The whole run under the layout."""
        return RunCost.of(self.choice, self.length)

    def as_dict(self) -> dict[str, Any]:
        """An entry of `layouts` in the JSON document: the choice's, and what is explained of it."""
        return {
            "refused": list(self.refused),
            **self.choice.as_dict(),
            "compute": self.compute,
            "run": vars(self.run),
            "against": [*self.refused, *self.against],
            "levers": [lever.as_dict() for lever in self.levers],
            "tensors": self.tensors,
        }


def explain(config: Config, workload: Workload, text: str) -> Explanation:
    """Predict one layout, and say why it can't run if it can't.

    text: a layout. With neither micro-batch nor accumulation it gets the best ones that fit, else those that
    need least; with one of them the other follows from the global batch; with both, their global batch is
    predicted. Raises UserError for a bad layout, Refused if no micro-batch can run.
    """
    partial = PartialLayout.parse(text)
    cluster = cluster_for(config)
    if partial.world:
        cluster = cluster.of_size(partial.world)
    if not partial.whole:
        plan = search(workload, cluster, fixed=partial.given)
        if not (best := plan.best(1) or plan.nearest(1)):
            raise Refused(
                f"{text} can't run on {cluster.gpus} x {cluster.gpu.name}: {sentence}"
                for sentence in refusals(plan)
            )
        layout = best[0].layout
    elif {"micro_batch_size", "gradient_accumulation_steps"} - partial.fixed.keys():
        layout = partial.complete(devices=partial.known.world, global_batch_size=workload.global_batch_size)
    else:
        layout = partial.known
    explanation = _explained(workload, cluster, layout)
    if (gpus := config.cluster_config.gpus) not in (None, layout.world):
        other = (
            f"{layout} has {counted(layout.world, 'rank')}, but cluster.gpus is {gpus}; the prediction is "
            f"for {layout.world}."
        )
        explanation = replace(explanation, against=(*explanation.against, other))
    if layout.global_batch_size != workload.global_batch_size:
        return explanation
    return replace(explanation, length=run_length(config))


def _explained(workload: Workload, cluster: Cluster, layout: Layout) -> Explanation:
    """The prediction for a whole layout, and reasons why the layout can't run (none: it can).

    With another global batch than the workload's, the layout's is predicted, and a sentence reports it;
    another one says that the search leaves it out.
    """
    refused, against = workload.refusals(layout), list[str]()
    if workload.mean_document_tokens and workload.mean_document_tokens > workload.seq_len:
        against.append(documents(workload))
    batch = layout.global_batch_size
    if batch != workload.global_batch_size:
        against.append(
            f"{layout} makes {counted(batch, 'sequence')} a step, but train.global_batch_size is "
            f"{workload.global_batch_size}; the prediction is for {batch}."
        )
        workload = workload.of_batch(batch)
    if outdone(Columns.of([layout])).all():
        against.append(
            f"A search leaves it out: {OUTDONE_BY[layout.schedule]} has the bubble of {layout.schedule} and "
            "stores fewer activations."
        )
    choice = explained(workload, cluster, layout)
    if not choice.fits:
        peak = choice.memory.peak
        too_much = human(peak - cluster.usable_memory)
        against.append(f"It needs {human(peak)}, {too_much} too much: {memory_limit(cluster)}.")
    return Explanation(workload, choice, tuple(against), tuple(refused))
