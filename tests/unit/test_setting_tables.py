"""Tables of precisions, optimizers and recomputations: what the engine has, and no default for a name."""

import pytest
import torch
from golden import refuses
from known import known
from torch import nn

from meshtune import config
from meshtune.errors import Table, UserError
from meshtune.layout import RECOMPUTATIONS, Layout
from meshtune.optim.optimizer import Optimizer
from meshtune.optimizers import OPTIMIZERS
from meshtune.parallel.recompute import recompute_blocks
from meshtune.placement.states import copies_of
from meshtune.plan.accounting import engine_accounting, stack_accounting
from meshtune.plan.cluster import cluster_of
from meshtune.plan.hardware import datasheet_flops
from meshtune.plan.machine import peak_flops
from meshtune.plan.search import explained
from meshtune.plan.workload import Workload
from meshtune.precision import DTYPE_BYTES, PRECISIONS, REDUCE_DTYPES, narrower
from meshtune.sections import ClusterConfig
from meshtune.train.model import ModelSpec

TABLES: list[Table] = [PRECISIONS, REDUCE_DTYPES, OPTIMIZERS]  # settings of train


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_dtypes_are_torchs(dtype: str) -> None:
    assert getattr(torch, dtype).itemsize == DTYPE_BYTES[dtype]


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_engine_and_the_planner_take_a_precisions_dtypes_from_the_table(name: str) -> None:
    spec = ModelSpec(source="", precision=name)
    compute, trained = spec.compute_dtype, spec.trained_dtype
    copies = copies_of(name, "fp32", "adamw")
    assert copies.weight == compute.itemsize and copies.trained == trained.itemsize


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_of_an_optimizer_are_those_that_it_keeps(name: str) -> None:
    layer = nn.Linear(64, 5)
    optimizer = Optimizer(layer.named_parameters(), name=name, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    layer(torch.ones(2, 64)).sum().backward()
    optimizer.step(1e-3)
    states = {
        key.rpartition(".")[2]: tensor
        for key, tensor in optimizer.state().items()
        if key.startswith("optimizer.weight.")
    }

    held = [state for state in OPTIMIZERS[name].states if state.shape_for((5, 64)) is not None]
    assert states.keys() == {state.name for state in held}
    for state in held:
        assert states[state.name].dtype == getattr(torch, state.dtype or "float32")
        assert tuple(states[state.name].shape) == state.shape_for((5, 64))
    counted = sum(tensor.nbytes for tensor in states.values() if tensor.ndim == 2)
    assert OPTIMIZERS[name].bytes_per_parameter("float32") * 320 == counted


@pytest.mark.parametrize("table", TABLES, ids=[table.setting for table in TABLES])
def test_a_name_that_is_in_no_table_is_refused_with_the_nearest(table: Table) -> None:
    nearly = f"{next(iter(table))}x"
    with refuses(UserError):
        table[nearly]
    with refuses(UserError):
        config.load(overrides=["model.name=x", f"{table.setting}={nearly}"])


def test_an_unknown_precision_or_optimizer_gets_nothing_by_default() -> None:
    cluster = cluster_of(ClusterConfig(gpu="h100-sxm", gpus=8))
    for ask in (
        lambda: copies_of("fp7", "fp32", "adamw"),
        lambda: copies_of("bf16", "fp7", "adamw"),
        lambda: copies_of("bf16", "fp32", "adamv"),
        lambda: engine_accounting("fp7"),
        lambda: engine_accounting("bf16", optimizer="adamv"),
        lambda: stack_accounting("meshtune", "fp7"),
        lambda: peak_flops(cluster.gpu, "fp7"),
        lambda: datasheet_flops("NVIDIA H100 80GB HBM3", "fp7"),
    ):
        with refuses(UserError):
            ask()


@pytest.mark.parametrize("mode", RECOMPUTATIONS)
def test_the_planner_and_the_engine_know_every_recomputation(mode: str) -> None:
    """A mode that the table has and a formula has not is an error there, too."""
    layout = Layout(recompute=mode, gradient_accumulation_steps=64)
    shape = known("qwen3-0.6b")
    workload = Workload("qwen3-0.6b", shape.work, shape.traits, seq_len=1024, global_batch_size=64)
    choice = explained(workload, cluster_of(ClusterConfig(gpu="h100-sxm", gpus=1)), layout)
    assert choice.memory.peak > 0 and Layout.parse(str(layout)) == layout


def test_an_unknown_recomputation_is_refused_by_everyone() -> None:
    with refuses(UserError):
        Layout(recompute="some")
    with refuses(UserError):
        RECOMPUTATIONS["some"]
    with refuses(ValueError):
        recompute_blocks(nn.Linear(1, 1), None, "some")  # type: ignore[arg-type]


def test_narrower_precisions_are_offered_from_wide_to_narrow() -> None:
    assert [narrower(name) for name in ("fp32", "bf16", "bf16-pure", "fp64")] == [
        ["bf16", "bf16-pure"], ["bf16-pure"], [], []
    ]  # fmt: skip
    for name in PRECISIONS:
        weights = [copies_of(each, "fp32", "adamw").weight for each in (name, *narrower(name))]
        assert weights == sorted(weights, reverse=True)
