"""Bytes against hand counts, and that watching changes nothing."""

from threading import Timer

import pytest
import torch
from forward import summed_loss
from ranks import run_ranks
from tiny import documents
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from meshtune.attention.register import register
from meshtune.layout import Layout
from meshtune.meter.phases import PhaseMemory, _call_and_wait, peak_resident_bytes
from meshtune.model.anatomy import anatomy
from meshtune.optim.optimizer import Optimizer
from meshtune.parallel import zero
from meshtune.parallel.mesh import join, parameter_mesh
from meshtune.units import MIB

CPU = torch.device("cpu")

register()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@torch.library.custom_op("meshtune_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_autograd(lambda ctx, grad: 2 * grad)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(30, 50), nn.Linear(50, 7, bias=False)

    def forward(self, x):
        h = checkpoint(lambda y: Square.apply(self.first(y)).relu(), x, use_reentrant=False)
        return self.second(double(nn.functional.dropout(h, 0.5)))


def optimizer(model, **kwargs) -> Optimizer:
    return Optimizer(model.named_parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **kwargs)


def steps(
    model, memory, opt, number: int = 2, forward=lambda model: model(torch.ones(16, 30)).square().sum()
):
    for step in range(1, number + 1):
        with memory.watching(step):
            with memory.phase("forward"):
                loss = forward(model)
            with memory.phase("backward"):
                loss.backward()
            with memory.phase("optimizer"):
                opt.step(1e-3)
        del loss
        if number == 2 and step == 1:
            first = dict(memory.peaks)
    return first if number == 2 else None


def watched(model, **kwargs):
    opt = optimizer(model, **kwargs)
    memory = PhaseMemory(model, opt, CPU)
    return memory, opt


PARAMETERS = 30 * 50 + 50 + 50 * 7


def test_states_are_those_of_a_hand_count():
    model = Model()
    memory, opt = watched(model)
    first = steps(model, memory, opt)
    state = 2 * 4 * PARAMETERS + 3 * 4  # two moments, and each parameter's step counter
    start = first["forward"].parts
    assert (start["weights"], start.get("gradients", 0), start["optimizer"]) == (4 * PARAMETERS, 0, 0)
    assert first["optimizer"].parts["gradients"] == 4 * PARAMETERS
    assert first["optimizer"].parts["optimizer"] == state
    assert memory.peaks["forward"].parts["optimizer"] == state  # there from the second step on


def test_masters_are_optimizer_state():
    model = Model()
    memory, opt = watched(model, compute_dtype=torch.bfloat16, sum_dtype=torch.float32)
    first = steps(model, memory, opt, forward=lambda m: m(torch.ones(16, 30, dtype=torch.bfloat16)).sum())
    assert first["forward"].parts["weights"] == 2 * PARAMETERS
    assert first["forward"].parts["optimizer"] == 4 * PARAMETERS
    assert memory.peaks["forward"].parts["optimizer"] == 12 * PARAMETERS + 3 * 4


def test_frozen_weights_have_no_gradients():
    model = Model()
    model.first.requires_grad_(False)
    memory, opt = watched(model)
    first = steps(model, memory, opt)
    assert first["optimizer"].parts["gradients"] == 4 * 50 * 7


def test_activations_are_those_of_a_hand_count():
    model = nn.Linear(30, 50, bias=False)
    memory, opt = watched(model)
    first = steps(model, memory, opt, forward=lambda m: m(torch.ones(16, 30)).sigmoid().sum())
    x, h, loss, weight = 16 * 30 * 4, 16 * 50 * 4, 4, 30 * 50 * 4
    assert first["forward"].parts["activations"] == x + 2 * h  # the product is freed after the sigmoid
    # the weight's gradient is made from x and the sigmoid's gradient, when the sigmoid's output is gone
    assert first["backward"].parts["gradients"] == weight
    assert first["backward"].parts["activations"] == x + h + 2 * loss  # and its gradient, 1


def test_watching_changes_no_number():
    found = []
    for watch in (True, False):
        torch.manual_seed(3)
        model = Model()
        memory, opt = watched(model)
        memory.steps_left = 2 if watch else 0
        steps(model, memory, opt, number=3)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


def test_only_the_first_three_steps_are_watched_and_have_a_row():
    model = Model()
    memory, _ = watched(model)
    rows = []
    for step in (5, 6, 7, 8):  # as after a resume
        with memory.watching(step), memory.phase("forward"):
            model(torch.ones(16, 30))
        rows.append(memory.row(step))
    assert [(row["kind"], row["step"], [*row["phases"]]) for row in rows[:3]] == [
        ("memory", step, ["forward"]) for step in (5, 6, 7)
    ]
    assert rows[3] is None


def test_a_phase_keeps_its_highest_micro_batch():
    model = Model()
    memory, _ = watched(model)
    with memory.watching(1):
        for rows in (1, 64, 1):
            with memory.phase("forward"):
                model(torch.ones(rows, 30))
    once, _ = watched(model)
    with once.watching(1), once.phase("forward"):
        model(torch.ones(64, 30))
    assert memory.peaks["forward"].bytes == once.peaks["forward"].bytes


def test_recomputation_shows_as_less_memory():
    def peak(recompute: bool) -> int:
        blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
        )
        memory, _ = watched(blocks)
        with memory.watching(1), memory.phase("forward"):
            x = torch.ones(128, 64, requires_grad=True)
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return memory.peaks["forward"].parts["activations"]

    assert peak(True) < 0.5 * peak(False)


def test_what_an_update_makes_is_temporary():
    memory, _ = watched(Model())
    with memory.watching(1):
        for name in ("forward", "optimizer"):
            with memory.phase(name):
                torch.ones(1000)
    assert memory.peaks["forward"].parts["activations"] == 4000
    assert memory.peaks["optimizer"].parts["temporary"] == 4000
    assert memory.peaks["optimizer"].parts["activations"] == 0


def test_without_masters_no_weight_counts_as_optimizer_state_too():
    model = Model()
    memory, opt = watched(model)
    steps(model, memory, opt, number=1)
    assert memory.known_bytes() == {"weights": 4 * PARAMETERS, "optimizer": 2 * 4 * PARAMETERS + 3 * 4}


def test_the_loss_has_two_copies_of_a_chunks_logits():
    config = LlamaConfig(
        vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, attn_implementation="meshtune",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    memory, _ = watched(model)
    batch = documents(seed=0, vocabulary=128)
    with memory.watching(1), memory.phase("forward"):
        summed_loss(model, anatomy(model), batch)
    # logits, and their softmax, which becomes their gradient
    assert memory.peaks["forward"].parts["logits"] == 2 * 4 * batch.label_tokens * 4096


class Blocks(nn.Module):
    """Two equal matrices, each a group of FSDP2's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


BLOCK = 64 * 64 * 4


def sharded_parts(stage: int, replicas: int = 1) -> list[dict[str, int]]:
    """Parts of the peaks of the second step's two micro-batches: forward and backward."""
    world = join(Layout(dp_shard=2, zero=stage, dp_replicate=replicas), CPU)
    model, mesh = Blocks(), parameter_mesh(world)
    assert mesh is not None
    zero.shard(model, model.blocks, mesh, stage)
    memory, opt = watched(model)
    for step in (1, 2):
        with memory.watching(step):
            for last in (False, True):
                zero.before_backward(model, stage, last=last)
                with memory.phase("forward"):
                    loss = model(torch.ones(1, 64)).sum()
                with memory.phase("backward"):
                    loss.backward()
            with memory.phase("optimizer"):
                opt.step(1e-3)
    return [dict(memory.peaks[name].parts) for name in ("forward", "backward", "optimizer")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_whole_weights_and_buffers_of_collectives_are_told_apart(stage):
    for forward, backward, update in run_ranks(2, sharded_parts, stage):
        assert forward["weights"] == backward["weights"] == update["weights"] == BLOCK  # half of two
        assert forward["gathered_weights"] == (BLOCK if stage == 3 else 2 * BLOCK)
        assert update["optimizer"] == 2 * BLOCK + 2 * 4  # moments of a shard, two counters of steps
        assert update["gradients"] == BLOCK
        if stage == 1:  # its peak is before the first reduce-scatter, beside a copy of a gradient
            assert backward["communication"] == 0 and backward["gradients"] == 2 * BLOCK
        else:
            assert backward["communication"] >= BLOCK
        assert update.get("gathered_weights", 0) == update.get("communication", 0) == 0
        # Not gloo's workspaces, which one of its threads frees at any later time.
        assert forward["activations"] < 0.1 * BLOCK
        copied = BLOCK if stage == 1 else 0  # a gradient that autograd copies, transposed
        assert backward["activations"] < copied + 0.1 * BLOCK


@pytest.mark.ci
def test_sums_that_wait_for_replicas_are_gradients():
    """The first micro-batch's, reduce-scattered, which FSDP2 all-reduces with those of the second."""
    for forward, _, update in run_ranks(4, sharded_parts, 3, 2):
        assert forward["gradients"] == update["gradients"] == BLOCK


def test_a_collective_returns_when_no_thread_holds_its_tensors() -> None:
    tensor, weight = torch.zeros(4), torch.ones(4, requires_grad=True)

    def collective(output: torch.Tensor) -> None:
        held = [(weight * output).grad_fn]  # in C++, as gloo's threads do
        Timer(0.05, held.clear).start()

    _call_and_wait(collective, output=tensor)
    assert tensor._use_count() == 1


@pytest.mark.ci
def test_the_resident_peak_grows_with_what_is_touched():
    before = peak_resident_bytes()
    filled = torch.ones(before // 4 + 64 * MIB // 4)
    assert peak_resident_bytes() >= before + 32 * MIB
    assert filled.numel()


def test_an_error_carries_where_it_happened_and_exit_code_3():
    model = Model()
    opt = optimizer(model)
    memory = PhaseMemory(model, opt, CPU, advice=lambda: ["Take less."])
    with memory.watching(1), memory.phase("backward"):
        pass
    error = memory.out_of_memory_error("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert error.exit_code == 3
    assert "Out of memory in backward on cpu" in error.problems[0]
    assert "Tried to allocate 2.00 GiB." in error.problems[0]
    assert "weights" in error.problems[1]
    assert error.problems[-1] == "Take less."


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_peaks_contain_the_states():
    model = nn.Linear(1024, 1024, bias=False, device="cuda")
    opt = optimizer(model)
    memory = PhaseMemory(model, opt, torch.device("cuda", 0))
    first = steps(model, memory, opt, forward=lambda m: m(torch.ones(8, 1024, device="cuda")).sum())
    assert first["optimizer"].parts["gradients"] == 4 * MIB
    assert first["optimizer"].parts["weights"] == 4 * MIB
    assert first["optimizer"].bytes >= 16 * MIB
