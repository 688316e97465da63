"""Constants of GPUs from made-up figures: data sheets stay the peaks, and links alone are shared."""

from collections.abc import Iterator

import pytest

from meshtune.plan.hardware import catalogue, gpu_of, table_problems
from meshtune.plan.work import attended
from meshtune.study.probe import CUDA, tasks_of
from meshtune.study.probe_kind import Device, Figure, kind_of, like_of

H100 = catalogue()["h100-sxm"]
RATES = {"bf16": 700e12, "fp32": 50e12}  # FLOP/s of every matmul
COPIES, RING, LAUNCH = 3.0e12, 300e9, 6e-6


def made_up() -> Iterator[Figure]:
    """Yield figures of 2 GPUs with constant rates."""
    for task in tasks_of(CUDA, [1, 2], "cuda"):
        what, size = task.what, float(task.what.get("bytes", 0))
        match task.kind:
            case "matmul":
                seconds = 2 * what["tokens"] * what["rows"] * what["cols"] / RATES[what["dtype"]]
            case "attention":
                pairs = what["tokens"] * float(attended(what["length"], float("inf")))
                seconds = 2 * pairs * what["width"] / 400e12 * (3 if what["form"] == "backward" else 1)
            case "memory":
                seconds = {"copy": 2, "add": 3}[what["form"]] * size / COPIES
            case "collective":
                seconds = 2e-5 + size / 2 / RING * (2 if what["form"] == "all_reduce" else 1)
            case _:
                seconds = LAUNCH
        yield Figure(task.kind, what, task.ranks, (seconds,) * 3)


def device(name: str, like: str) -> Device:
    """A GPU of this driver's name."""
    return Device(name, False, 79.1 * 2**30, 132, 2, "bf16", catalogue()[like])


def test_gpus_compute_alone_and_exchange_together() -> None:
    """Two ranks have tasks of collectives only."""
    kinds = {task.kind for task in tasks_of(CUDA, [1, 2], "cuda") if task.ranks == 2}
    assert kinds == {"collective"}


def test_a_gpu_of_the_catalogue_keeps_its_data_sheet() -> None:
    """Measured: the fastest matmul and shares of bandwidth and link; peaks are those of the data sheet."""
    fitted = kind_of(list(made_up()), device("NVIDIA H100 80GB HBM3", "h100-sxm"))
    assert [*table_problems(fitted.table | {"source": ""})] == []
    gpu = gpu_of("this-h100-sxm", fitted.table | {"source": ""})
    assert (gpu.bf16, gpu.fp8, gpu.bandwidth, gpu.link) == (H100.bf16, H100.fp8, H100.bandwidth, H100.link)
    assert gpu.matmul_max == pytest.approx(700e12)
    assert gpu.efficiency["memory"] == pytest.approx(COPIES / H100.bandwidth, rel=1e-3)
    assert gpu.efficiency["launch"] == pytest.approx(LAUNCH)
    assert "launch_blocking" not in gpu.efficiency
    two = gpu.efficiency_among(2)
    assert two["link_share"] == pytest.approx(RING / H100.link, rel=0.05)
    assert gpu.shared.keys() == {2}
    assert gpu.shared[2].keys() == {"link_share", "link_latency"}
    assert two["matmul"] == gpu.efficiency["matmul"]


def test_an_unknown_gpu_has_its_own_peaks() -> None:
    """Without a data sheet the fastest figures are the peaks."""
    gpu = gpu_of("this-gpu", kind_of(list(made_up()), device("New GPU", "a100-80")).table | {"source": ""})
    assert (gpu.bf16, gpu.fp32, gpu.bandwidth) == pytest.approx((700e12, 50e12, COPIES), rel=1e-3)
    assert gpu.fp8 is None
    assert gpu.words == ("New", "GPU")


def test_the_kind_that_stands_for_what_is_not_measured() -> None:
    """The device's own, a processor for a processor, an A100 for a GPU that nobody knows."""
    assert [like_of("cpu", None).name, like_of("NVIDIA H100", H100).name, like_of("New", None).name] == [
        "cpu", "h100-sxm", "a100-80",
    ]  # fmt: skip
