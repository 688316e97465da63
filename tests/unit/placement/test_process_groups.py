"""Process groups by the layout, beside those that real ranks issue collectives on."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from meshtune.api.dryrun import outside_of
from meshtune.dryrun.world import Job, batch_of
from meshtune.layout import Layout
from meshtune.parallel.mesh import join
from meshtune.placement.columns import Columns
from meshtune.placement.ranks import process_groups
from meshtune.plan.accounting import stack_accounting
from meshtune.train.model import rank_model
from meshtune.train.step import Counts

sys.path.append(str(Path(__file__).parents[3] / "validation"))

from dryrun_cases import Case

GROUPS = {
    "mb1-ga1": 0, "tp2-sp-mb1-ga1": 1, "pp2-1f1b-mb1-ga2": 1, "dp2-mb1-ga1": 1, "zero3x2-mb1-ga1": 1,
    "cp2-mb1-ga1": 1, "ulysses2-mb1-ga1": 1,
    "dp2-cp2-mb1-ga1": 2, "zero2x2-cp2-mb1-ga1": 2,  # all ranks are those of the data group
    "dp2-zero2x2-mb1-ga1": 3, "tp2-pp2-1f1b-mb1-ga2": 3, "zero1x2-tp2-mb1-ga1": 3,
    "dp2-zero3x2-cp2-mb1-ga1": 4, "zero1x2-cp2-tp2-mb1-ga1": 4, "dp2-zero1x2-pp2-1f1b-mb1-ga2": 4,
}  # fmt: skip
QUICK = "dp2-mb1-ga1"


class Groups(TorchDispatchMode):
    """Names of the process groups of all collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            position = [argument.name for argument in func._schema.arguments].index("process_group")
            self.names.add(dist.ProcessGroup.unbox(args[position]).group_name)
        return func(*args, **(kwargs or {}))


def groups_of_a_step(job: Job) -> int:
    """Number of process groups that this rank issues collectives on in a step with real tensors."""
    world = join(job.layout, torch.device("cpu"))
    model = rank_model(job.spec, world, optimizer=job.optimizer, tokens_per_sequence=job.seq_len)
    batch = batch_of(job, world)
    micro_batches, counts = model.passes.localise(batch), Counts(batch.label_tokens)
    with Groups() as groups:
        model.passes.step(
            micro_batches, counts, lambda _: nullcontext(), learning_rate=1e-4, max_grad_norm=1.0
        )
    return len(groups.names)


@pytest.mark.ci
@pytest.mark.parametrize(
    "layout", [pytest.param(text, marks=() if text == QUICK else pytest.mark.all) for text in GROUPS]
)
def test_ranks_issue_collectives_on_these_process_groups(layout: str) -> None:
    job = Case(layout=layout).job()
    counted = run_ranks(job.layout.world, groups_of_a_step, job)
    assert counted == [GROUPS[layout]] * job.layout.world


def test_planner_and_dry_run_count_the_same_groups() -> None:
    layouts = [Layout.parse(text) for text in GROUPS]
    assert [process_groups(layout) for layout in layouts] == [*GROUPS.values()]
    assert np.array_equal(process_groups(Columns.of(layouts)), [*GROUPS.values()])
    how = stack_accounting("meshtune", "bf16")
    for layout, groups in zip(layouts, GROUPS.values(), strict=True):
        assert outside_of(layout, "bf16") == int(how.context + groups * how.communicator)
