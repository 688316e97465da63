"""The table of docs/memory.md that shows the memory of a step's events is what `step_timeline` computes."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from meshtune.layout import Layout
from meshtune.placement.columns import Columns, Number
from meshtune.plan.accounting import accounting_of
from meshtune.plan.cluster import cluster_of
from meshtune.plan.memory.timeline import EVENTS, step_timeline
from meshtune.plan.models import models
from meshtune.plan.search import stages_of
from meshtune.plan.workload import Workload
from meshtune.sections import ClusterConfig

GIB = 2**30
PAGE = Path(__file__).parents[3] / "docs" / "memory.md"
ROW = re.compile(r"^\| `([\w-]+)` \|((?: \**[\d.]+\** \|){5})$", re.M)


def tensors(parts: Mapping[str, Number]) -> list[Number]:
    """Bytes by category, without overhead."""
    return [size for name, size in parts.items() if name != "overhead"]


def test_the_page_has_the_numbers_of_the_formula() -> None:
    rows = dict(ROW.findall(PAGE.read_text(encoding="utf-8")))
    assert len(rows) == 4
    layouts = Columns.of([Layout.parse(text) for text in rows])
    known = models()["llama-3.1-8b"]
    workload = Workload(
        model="llama-3.1-8b", work=known.work, traits=known.traits, seq_len=8192, global_batch_size=256
    )
    accounting = accounting_of(workload, cluster_of(ClusterConfig(gpu="h100-sxm"), gpus=64))
    timeline = step_timeline(
        workload.work, layouts, accounting, workload.seq_len, stages_of(workload, layouts)
    )
    computed = [
        np.broadcast_to(sum(tensors(timeline[event])), (3, len(rows))).max(0) / GIB for event in EVENTS
    ]
    for number, (text, cells) in enumerate(rows.items()):
        printed = [float(cell) for cell in re.findall(r"[\d.]+", cells)]
        assert printed == pytest.approx([event[number] for event in computed], abs=0.051), text
        assert "**" in cells.split("|")[int(np.argmax([event[number] for event in computed]))]
