"""Peak rates by device name, and a share that is never above one."""

from dataclasses import replace

import pytest
import torch
from families import FAMILIES

from meshtune.data.batch import Batch, MicroBatch
from meshtune.meter.mfu import flops_of, peak_flops
from meshtune.meter.rows import possible, share_of_peak
from meshtune.model.trace import census
from meshtune.plan.hardware import datasheet_flops


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312), ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16-pure", 989.4), ("NVIDIA H100 PCIe", "bf16", 756), ("NVIDIA H100 NVL",
        "tf32", 417.5), ("NVIDIA H200", "bf16", 989.4), ("NVIDIA GB200", "bf16", 2500), ("NVIDIA B200",
        "bf16", 2250), ("NVIDIA L4", "bf16", 121), ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", 80), ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)  # fmt: skip
def test_a_driver_name_gives_the_datasheets_dense_rate(name, precision, tflops):
    assert datasheet_flops(name, precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "Intel(R) Xeon(R)",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA L40",
    ],
)
def test_an_unknown_device_or_a_slice_of_one_has_no_peak(name):
    assert datasheet_flops(name, "bf16") is None


def test_a_precision_without_a_figure_has_no_peak():
    assert datasheet_flops("NVIDIA H200", "fp64") is None


def test_a_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu"), "fp32", datasheet_flops) is None


def test_mfu_is_flops_over_what_the_devices_could_do():
    assert share_of_peak(6e14, 2.0, 3, 1e15) == pytest.approx(0.1)
    assert possible(0.1) == 0.1


def test_without_a_share_that_can_be_there_is_none():
    assert share_of_peak(None, 1.0, 1, 1e15) is None
    assert share_of_peak(1e15, 1.0, 1, None) is None
    assert possible(share_of_peak(1e15, 0.5, 1, 1e15)) is None
    assert possible(None) is None


def test_a_batchs_flops_are_of_its_documents_and_labels():
    c = census(FAMILIES["llama"]())
    empty = torch.zeros(2, 10, dtype=torch.long)
    rows = MicroBatch(empty, empty, empty, documents=((4, 6), (7,)), tokens=17, label_tokens=5)
    batch = Batch((rows, rows), tokens=34, label_tokens=10, origin="")
    found, found_6n = flops_of(c, 10)(batch)
    pairs = 2 * (4 * 5 // 2 + 6 * 7 // 2 + 7 * 8 // 2)
    matrices = (
        3 * 2 * 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3)
    )  # forward and 2 × backward, 2 FLOPs, 2 layers
    attention = 3 * 2 * 2 * 2 * pairs * 64
    assert found == 34 * matrices + attention + 10 * 3 * 2 * 64 * 256
    assert found_6n == 34 * (6 * (c.total - 256 * 64) + 12 * 2 * 64 * 10)
    # The forward over kto's mismatched answers is a third; a micro-batch that a rank repeats nothing.
    again = replace(rows, tokens=0, label_tokens=0)
    with_kto = flops_of(c, 10)(replace(batch, mismatched=(rows, rows, again)))
    assert with_kto == (pytest.approx(4 / 3 * found), pytest.approx(4 / 3 * found_6n))
