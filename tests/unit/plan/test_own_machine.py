"""`cluster: my-cluster.toml`: settings and kind of a machine that `meshtune probe` measured, in a plan."""

from pathlib import Path

import pytest
from golden import refuses
from own_machine import OWN_MACHINE

from meshtune import config
from meshtune.errors import UserError
from meshtune.plan.cluster import Cluster, cluster_for, cluster_here, unused_here
from meshtune.plan.hardware import attention_kernel, catalogue, kernel_on
from meshtune.plan.machine import Machine


@pytest.fixture
def machine_file(tmp_path: Path) -> Path:
    """The made-up file."""
    file = tmp_path / "my-cluster.toml"
    file.write_text(OWN_MACHINE)
    return file


def cluster(file: Path, *overrides: str) -> Cluster:
    """The cluster of a config that names the file."""
    return cluster_for(config.load(None, ["model.name=a", f"cluster={file}", *overrides]))


def test_a_machines_file_is_a_cluster_with_its_kind(machine_file: Path) -> None:
    """Times mean something on this processor; keys are laid over the file's."""
    own = cluster(machine_file, "cluster.gpus=4")
    assert (own.gpu.name, own.gpus, own.node, own.title) == ("this-cpu", 4, 4, "4 x this-cpu")
    assert own.timed
    assert own.gpu.processor
    assert own.speed_unit == "tokens/s/rank"
    assert not cluster_for(config.load(None, ["model.name=a", "cluster.gpu=cpu"])).timed


def test_ranks_share_memory_and_cores(machine_file: Path) -> None:
    """Each rank has its part of the host's memory, and the rates that were measured with as many ranks."""
    one, two, four = (cluster(machine_file, f"cluster.gpus={ranks}") for ranks in (1, 2, 4))
    assert [each.memory / 2**30 for each in (one, two, four)] == [8, 4, 2]
    assert one.of_size(4).memory == four.memory
    assert cluster(machine_file, "cluster.gpus=4", "cluster.memory_gib=3").memory == 3 * 2**30
    rates = [Machine.of(each.gpu, "meshtune", ranks=each.ranks_in_node).matmul for each in (one, two, four)]
    assert rates == pytest.approx([0.8, 0.4, 0.2])


def test_rates_between_and_beyond_the_measured_ranks(machine_file: Path) -> None:
    """The rate of all ranks together lies on a line between two measurements, and stays after them."""
    gpu = cluster(machine_file, "cluster.gpus=1").gpu
    assert gpu.efficiency_among(3)["memory"] == pytest.approx((2 * 0.45 + 4 * 0.2) / 2 / 3)
    assert gpu.efficiency_among(8)["matmul"] == pytest.approx(0.1)
    assert gpu.efficiency_among(3)["link_latency"] == pytest.approx(1e-4 + 2e-4 * 2 / 3)
    assert gpu.efficiency_among(8)["link_latency"] == pytest.approx(3e-4)
    assert gpu.efficiency_among(2)["depth"] == 20


def test_measured_launches_and_attention_go_before_the_stacks_own(machine_file: Path) -> None:
    """Launches of the file replace those of stacks.toml; a GPU of the catalogue keeps them."""
    own = Machine.of(cluster(machine_file, "cluster.gpus=1").gpu, "meshtune")
    assert (own.launch, own.launch_blocking, own.link_latency) == (5e-6, 1, 1e-4)
    assert (own.attention_64, own.attention_128) == pytest.approx((0.05e12, 0.1e12))
    assert (own.attention_keys, own.attention_backward) == (64, 1.5)
    gpu = catalogue()["h100-sxm"]
    assert Machine.of(gpu, "meshtune").launch == 1.5e-5
    assert Machine.of(gpu, "meshtune", kernel="flash-2").attention_keys == 150


def test_the_newest_attention_kernel_is_planned_where_it_is_installed_and_runs() -> None:
    """FlashAttention 4 has kernels for Hopper and Blackwell with tensor memory; others run torch's."""
    newer, dense = {}, catalogue()["b200"].matmul_max / catalogue()["h100-sxm"].matmul_max
    for name in ("a100-80", "rtx-4090", "rtx-5090", "h100-sxm", "b200"):
        gpu = catalogue()[name]
        names = [attention_kernel("meshtune", gpu, flash) for flash in (4, 3, 2, None)]
        assert names[1:] == ["flash-3" if name == "h100-sxm" else "flash-2", "flash-2", "flash-2"]
        newest, older = (kernel_on(kernel, gpu)["attention_128"] for kernel in (names[0], "flash-2"))
        newer[name] = newest / older
        lacking = "flash-2" if name == "b200" else names[0]  # heads of 192 on Blackwell
        assert [attention_kernel("meshtune", gpu, 4, [128, n]) for n in (192, 256)] == [lacking, names[0]]
        assert attention_kernel("torchtitan", gpu) == "flash-2"
        assert attention_kernel("megatron-core", gpu, 2) == "cudnn"
    assert newer == {
        "a100-80": 1, "rtx-4090": 1, "rtx-5090": 1, "h100-sxm": pytest.approx(625 / 341),
        "b200": pytest.approx(1560 / (341 * dense)),
    }  # fmt: skip


def test_efficiencies_of_the_settings_hold_for_any_number_of_ranks(machine_file: Path) -> None:
    """A measured share that a user replaces is not taken from the tables of several ranks."""
    own = cluster(machine_file, "cluster.gpus=4", "cluster.efficiency={matmul: 0.3}")
    assert own.gpu.efficiency_among(4)["matmul"] == 0.3


def test_runs_on_the_processor_use_the_file(machine_file: Path) -> None:
    """The devices of a run on CPU ranks are those of the file; of another kind they are untimed."""
    own = config.load(None, ["model.name=a", f"cluster={machine_file}"])
    assert cluster_here(own, 2, []).gpu.name == "this-cpu"
    assert cluster_here(own, 2, []).timed
    other = config.load(None, ["model.name=a", "cluster.gpu=h100-sxm"])
    assert cluster_here(other, 2, []).gpu.name == "cpu"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[cluster]\n", "[clusters]\n"),
        ("[kind]\n", "[kind\n"),
        ("bandwidth = 20", "bandwidth = 0"),
        ("ranks = 2", "ranks = 0"),
        ("matmul = 0.4", "matmul = 1.4"),
        ("keys = 64", "keys = -1"),
        ("[0.25, 0.5, 0.5]", "[0.25]"),
        ("launch = 5e-6", "launch = 0"),
        ('gpu = "this-cpu"', 'gpu = "that-cpu"\ngpuz = 1'),
    ],
)
def test_what_is_wrong_with_a_machines_file(machine_file: Path, old: str, new: str) -> None:
    """Each problem is a sentence that names the file's table."""
    machine_file.write_text(OWN_MACHINE.replace(old, new, 1))
    with refuses(UserError):
        cluster(machine_file)


def test_a_machines_file_that_is_not_there(tmp_path: Path) -> None:
    """The sentence names the setting and the file."""
    with refuses(UserError):
        cluster(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("words", "gpus", "names"),
    [
        ("{gpu: h100-sxm, gpus: 8, network: 50}", 0, "cluster.gpu, cluster.gpus, cluster.network have"),
        ("{gpu: cpu, gpus: 2, memory_margin: 0.1, memory_budget_gib: 8}", 0, ""),
        ("{gpu: cpu, gpus: 8}", 0, "cluster.gpus has"),
        ("{gpu: h100-sxm, gpus: 8, network: 50}", 2, "cluster.gpus has"),
        ("{gpus: 2}", 2, ""),
        ("auto", 0, ""),
    ],
)
def test_settings_of_other_devices_than_those_here_are_named(words: str, gpus: int, names: str) -> None:
    """A run on 2 ranks. gpus: seen here."""
    own = config.load(None, ["model.name=a", f"cluster={words}"])
    sentences = unused_here(own, 2, [("NVIDIA H100 80GB HBM3", 79e9)] * gpus)
    where = "the GPUs here" if gpus else "this machine's processor"
    assert sentences == ([f"{names} no effect: the run has 2 ranks on {where}."] if names else [])
