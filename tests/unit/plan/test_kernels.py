"""Attention kernels by length and head size, launches, and what LoRA and contention add: against sources."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from shapes import adapted, of_shape
from torch.utils._python_dispatch import TorchDispatchMode

from meshtune.layout import Layout
from meshtune.model.lora import add_lora
from meshtune.placement.columns import Columns
from meshtune.plan.hardware import catalogue, kernel_on, stacks
from meshtune.plan.machine import Machine
from meshtune.plan.seconds.collectives import exposed
from meshtune.plan.seconds.gpu import adapter_sums, attention_passes, elementwise, launch_seconds
from meshtune.plan.seconds.step import step
from meshtune.plan.work import Core

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MEASURED = {  # kernel, GPU kind, head size -> causal TFLOP/s of the forward, by LENGTHS
    ("flash-2", "h100-sxm", 128): (191, 260, 298, 319, 333, 335),
    ("flash-2", "h100-sxm", 64): (180, 229, 262, 284, 295, 299),
    ("flash-3", "h100-sxm", 128): (292, 423, 521, 579, 602, 616),
    ("cudnn", "h100-sxm", 128): (315, 410, 484, 518, 529, 539),
    ("cudnn", "h100-sxm", 64): (225, 288, 334, 363, 379, 388),
    ("cudnn", "h100-sxm", 256): (308, 391, 450, 483, 497, 509),
    ("cudnn", "b200", 64): (None, 627, 826, 977, 1071, 1115),
    ("flash-2", "a100-80", 128): (None, 143.7, None, 156.3, None, None),
    ("flash-2", "rtx-4090", 128): (None, None, 151, None, None, None),
}
LLAMA_8B = of_shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocabulary=128256)


def alone(gpu: str, kernel: str) -> Machine:
    """The machine whose attention is as fast in a step as the kernel alone."""
    of_gpu = catalogue()[gpu]
    return replace(Machine.of(of_gpu, "meshtune"), attention=1.0, **kernel_on(kernel, of_gpu))


@pytest.mark.parametrize(("kernel", "gpu", "head_size"), MEASURED)
def test_kernels_are_as_fast_as_they_were_measured(kernel: str, gpu: str, head_size: int) -> None:
    """Within 4 % from 2k on, and within 13 % below."""
    layout, machine = Columns.of([Layout.parse("mb1-ga1")]), alone(gpu, kernel)
    core = Core(query_heads=16, key_heads=16, qk_dim=head_size, v_dim=head_size)
    for length, tflops in zip(LENGTHS, MEASURED[kernel, gpu, head_size], strict=True):
        if tflops is not None:
            forward, backward = attention_passes(machine, length, length, length, core, layout)
            flops = 2 * length * (length + 1) / 2 * 16 * 2 * head_size
            assert flops / forward[0] / 1e12 == pytest.approx(tflops, rel=0.04 if length >= 2048 else 0.13)
            assert backward[0] == pytest.approx(2.5 * machine.attention_backward * forward[0])


def test_a_ring_runs_a_kernel_for_each_part_of_the_keys() -> None:
    core = Core(query_heads=32, key_heads=8, qk_dim=128, v_dim=128)
    layout = Columns.of([Layout.parse("cp4-mb1-ga1")])
    machine = alone("h100-sxm", "cudnn")
    gathered, ring = (
        attention_passes(replace(machine, ring_attention=r), 1024, 4096, 4096, core, layout)[0][0]
        for r in (0.0, 1.0)
    )
    keys = machine.attention_keys
    assert ring / gathered == pytest.approx((2048.5 + 4 * keys) / (2048.5 + keys))


def test_heads_between_two_measured_sizes_lie_between_their_rates() -> None:
    machine, layout = alone("h100-sxm", "cudnn"), Columns.of([Layout.parse("mb1-ga1")])

    def rate(size: int) -> float:
        core = Core(query_heads=8, key_heads=8, qk_dim=size, v_dim=size)
        return size / attention_passes(machine, 8192, 8192, 8192, core, layout)[0][0]

    assert rate(96) == pytest.approx((rate(64) + rate(128)) / 2)
    assert rate(32) == pytest.approx(rate(64) / 2)
    assert rate(512) == pytest.approx(rate(256))


def speed(gpu: str, seq_len: int = 8192) -> float:
    """Tokens/s/GPU of Llama 3.1 8B on eight of them, with this engine."""
    layout = Columns.of([Layout.parse("zero2x8-mb1-ga1")])
    seconds = step(LLAMA_8B, layout, Machine.of(catalogue()[gpu], "meshtune"), seq_len).total
    return seq_len / float(seconds[0])


def test_kinds_are_ranked_by_the_rates_that_were_measured_on_them() -> None:
    """MI300X has a third more TFLOP/s than H100 on its datasheet, and 668 of 1307 in the best matmul."""
    assert speed("a100-80") < speed("mi300x") < speed("h100-sxm") < speed("h200") < speed("b200")
    kinds = catalogue()
    measured = {
        "a100-80": 271.2,
        "h100-sxm": 794.5,
        "h200": 794.5,
        "b200": 1745,
        "gb200": 1822,
        "mi300x": 668.4,
    }
    assert {name: kinds[name].matmul_max / 1e12 for name in measured} == pytest.approx(measured)
    assert all(kinds[name].measured for name in measured) and kinds["h100-96"].measured
    assert not any(kinds[name].measured for name in ("h100-pcie", "l40s", "rtx-4090", "b300", "cpu"))
    shares = {kinds[name].matmul_max / kinds[name].bf16 for name in ("h100-sxm", "l40s", "rtx-4090")}
    assert len({round(share, 6) for share in shares}) == 1, "not measured: as large a share as the H100's"
    assert kinds["b300"].matmul_max / kinds["b300"].bf16 == pytest.approx(1745 / 2250)
    assert kinds["a100-80"].matmul_max_fp8 == kinds["a100-80"].matmul_max


def test_collectives_beside_computation_slow_it_down() -> None:
    machine = replace(Machine.of(catalogue()["h100-sxm"], "meshtune"), contention=0.2)
    assert exposed(machine, 10.0, 4.0, 1.0) == pytest.approx(4 - 4 / 1.2)
    assert exposed(machine, 10.0, 15.0, 1.0) == pytest.approx(15 - 10)  # 12 of the 15 seconds are slower
    assert exposed(machine, 10.0, 11.0, 1.0) == pytest.approx(11 - 11 / 1.2)
    assert exposed(machine, 10.0, 4.0, 0.5) == pytest.approx(4 - 2 / 1.2)
    assert exposed(machine, 10.0, 4.0, 0.0) == pytest.approx(4)
    assert stacks()["torchtitan"]["contention"] == stacks()["megatron-core"]["contention"] == 0.189


def test_adapters_add_the_traffic_of_their_sums_and_their_launches() -> None:
    tuned, layout = adapted(LLAMA_8B, 16), Columns.of([Layout.parse("mb1-ga1")])
    machine = replace(Machine.of(catalogue()["h100-sxm"], "trainer-fsdp2"), memory=1.0, adapter_passes=5.0)
    outputs, inputs = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096, 4096 * 2 + 2 * 4096 + 14336
    forward, backward = adapter_sums(machine, 1000, tuned, layout)
    moved = 2 * 1000 / machine.bandwidth
    assert forward == pytest.approx(5 * outputs * moved)
    assert backward == pytest.approx((2 * outputs + 3 * inputs) * moved)
    dropped = replace(machine, dropout_passes=2.5, dropout_backward=0.5)
    more = np.subtract(adapter_sums(dropped, 1000, replace(tuned, dropped=True), layout), (forward, backward))
    assert more.ravel() == pytest.approx(np.multiply((2.5, 0.5), inputs * moved))
    assert adapter_sums(machine, 1000, LLAMA_8B, layout) == (0, 0)
    added = launch_seconds(machine, tuned) - launch_seconds(machine, LLAMA_8B)
    assert added == pytest.approx(4 * 5 * machine.launch), "queries, keys and values are one matrix here"
    frozen = adapted(tuned, 16, 0.0)
    assert frozen.parameters == tuned.parameters and adapted(LLAMA_8B, 16, 0.0).trainable == 1.0


class Kernels(TorchDispatchMode):
    """Count operations that launch a kernel: views and allocations do not."""

    FREE = ("view", "t", "transpose", "expand", "unsqueeze", "slice", "select", "detach", "alias", "empty")

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].strip("_").removeprefix("unsafe_")
        if not name.startswith("empty") and name not in self.FREE:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def block_kernels(adapters: bool) -> tuple[float, float]:
    """(forward, backward) kernels of one block of a small Llama."""
    from transformers import AutoModelForCausalLM

    counts = []
    for layers in (1, 3):
        config = FAMILIES["llama"]()
        config.num_hidden_layers = layers
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        if adapters:
            add_lora(model, lora_rank=4, alpha=8)
            model.to(torch.bfloat16)
        tokens = torch.zeros(2, 8, dtype=torch.long)
        with Kernels() as forward:
            loss = model(tokens, labels=tokens, use_cache=False).loss
        with Kernels() as backward:
            loss.backward()
        counts.append((forward.calls.total(), backward.calls.total()))
    return tuple((three - one) / 2 for one, three in zip(*counts, strict=True))  # type: ignore[return-value]


def test_launches_of_a_block_are_those_of_the_engines_own_step() -> None:
    forward, backward = block_kernels(adapters=False)
    with_adapters, _ = block_kernels(adapters=True)
    counted = stacks()["meshtune"]["block_launches"]
    assert forward == pytest.approx(counted, abs=2)
    assert backward == pytest.approx(2 * counted, abs=8)
    assert with_adapters - forward == pytest.approx(7 * stacks()["meshtune"]["adapter_launches"], abs=1)


def test_links_of_cards_without_nvlink_keep_what_is_assumed_of_them() -> None:
    """A fit of an H100's links is not one of a PCIe card's."""
    kinds = catalogue()
    assert kinds["l40s"].efficiency["link_share"] == kinds["a6000"].efficiency["link_share"] == 0.5
    assert kinds["rtx-4090"].efficiency["link_share"] == kinds["rtx-3090"].efficiency["link_share"] == 0.25


def test_further_norms_of_a_block_are_counted() -> None:
    """Gemma 2 has four of hidden states, where `elementwise_hidden` has two."""
    machine, layouts = Machine.of(catalogue()["h100-sxm"], "meshtune"), Columns.of([Layout()])
    two, four = (elementwise(machine, 1.0, replace(LLAMA_8B, norms=n), layouts)[0] for n in (2.0, 4.0))
    moved = float(np.ravel(four - two)[0]) * machine.bandwidth * machine.memory
    assert moved == pytest.approx(2 * machine.element * machine.elementwise_norm * 4096)
