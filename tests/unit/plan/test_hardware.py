"""The catalogue of GPUs, and the stacks."""

from dataclasses import fields

import pytest

from meshtune.plan.hardware import catalogue, named, stacks
from meshtune.plan.machine import Machine

FACTS = {
    "matmul_max", "core_matmul_max", "attention_64", "attention_128", "attention_256", "attention_keys",
    "attention_backward", "bandwidth", "link", "network", "host_bandwidth", "node", "multiprocessors",
    "flash", "network_share", "weight_bytes", "element", "block_update", "update_memory", "loss_memory",
    "host_states", "host_master", "fp8_matmul_max", "fp8_rowwise", "mlp_tile",
}  # fmt: skip


def test_what_a_user_rents_is_there() -> None:
    wanted = "a100-40 a100-80 h100-sxm h100-pcie h100-nvl h200 b200 gb200 mi250x mi300x l40s l4 a10g rtx-3090"
    wanted += " rtx-4090 rtx-5090 cpu"
    assert set(wanted.split()) <= catalogue().keys()


@pytest.mark.parametrize("name", catalogue())
def test_every_entry_is_whole_and_in_the_usual_order(name: str) -> None:
    gpu = catalogue()[name]
    assert gpu.source
    rates = [rate for rate in (gpu.fp32, gpu.tf32, gpu.bf16, gpu.fp8) if rate]
    assert rates == sorted(rates)
    assert gpu.memory > 8 * 2**30 or name == "cpu"
    assert gpu.bandwidth > gpu.link >= gpu.network / gpu.node
    assert gpu.measured or gpu.as_of is not None


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"),
        ("NVIDIA RTX A6000", "a6000"),
    ],
)
def test_a_drivers_name_finds_its_gpu(driver: str, name: str) -> None:
    found = named(driver)
    assert found is not None and found.name == name


def test_a_slice_of_a_gpu_is_none() -> None:
    assert named("NVIDIA H200 MIG 1g.18gb") is None


@pytest.mark.parametrize("name", stacks())
def test_a_stack_and_a_gpu_make_a_machine(name: str) -> None:
    """Every constant of a machine comes from exactly one place."""
    wanted = {field.name for field in fields(Machine)} - FACTS
    gpu = catalogue()["h100-sxm"].efficiency
    assert not stacks()[name].keys() & gpu.keys()
    assert stacks()[name].keys() | gpu.keys() == wanted


def test_kinds_without_a_matmul_rate_of_their_own_are_not_measured():
    kinds = catalogue()
    assert kinds["h100-sxm"].measured and kinds["a100-80"].measured
    assert not kinds["rtx-4090"].measured and kinds["rtx-4090"].as_of == "h100-sxm"
