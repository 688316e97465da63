"""Bytes of storages against hand counts."""

import torch
import torch.distributed as dist
from ranks import run_ranks

from meshtune.meter.ledger import Ledger
from meshtune.meter.trace import CATEGORIES

CPU = torch.device("cpu")


def test_the_ledger_follows_views_in_place_operations_and_resizing():
    with Ledger(CPU) as ledger:
        a = torch.ones(1000)
        b = a * 2
        assert (ledger.total, ledger.peak) == (8000, 8000)
        view = b[:10]
        b.add_(1)
        del b
        assert ledger.total == 8000
        del view
        assert ledger.total == 4000
        a.resize_(3000)
        assert ledger.total == 12000
        a.untyped_storage().resize_(0)
        assert (ledger.total, ledger.peak) == (0, 12000)
        a.untyped_storage().resize_(400)
        assert ledger.total == 400
        del a
        assert ledger.total == 0


def test_memory_that_a_storage_of_before_gets_back_is_counted():
    weights = torch.ones(1000)  # as FSDP2's whole parameters: emptied by the step before
    weights.untyped_storage().resize_(0)
    with Ledger(CPU) as ledger:
        weights.untyped_storage().resize_(4000)
        assert ledger.total == 4000
        weights.untyped_storage().resize_(0)
        assert ledger.total == 0


def test_a_tensor_of_pythons_numbers_is_counted_once():
    kept = torch.ones(4)
    with Ledger(CPU) as ledger:
        made = kept.new_tensor([1.0, 2.0, 3.0])  # its memory is no operation's result
        assert ledger.total == 12
        more = made.view(-1)
        assert ledger.total == 12
        del made, more
        assert ledger.total == 0


def test_what_gets_its_category_later_had_it_at_the_peak_already():
    with Ledger(CPU) as ledger:
        kept = torch.ones(1000)
        gone = torch.ones(500)
        assert ledger.parts == {"activations": 6000}
        del gone
        later = torch.ones(100)
        ledger.tag([kept, later], "gradients")
        assert {k: v for k, v in ledger.parts.items() if v} == {"activations": 2000, "gradients": 4000}
        assert ledger.live["gradients"] == 4400


def test_a_cast_of_a_gradient_is_one_in_a_pass_alone():
    with Ledger(CPU) as ledger:
        gradient = torch.ones(100, dtype=torch.bfloat16)
        ledger.tag([gradient], "gradients")
        total = gradient.float()
        del total  # it is gone before its owner is asked
        assert {k: v for k, v in ledger.parts.items() if v} == {"gradients": 600}
        ledger.default = "temporary"
        updated = gradient.float()
        assert ledger.live["temporary"] == updated.untyped_storage().nbytes() == 400


def test_logits_are_the_heads_output_and_what_has_its_columns():
    with Ledger(CPU) as ledger:
        hidden, weight = torch.ones(3, 7), torch.ones(50, 7)
        logits = hidden @ weight.T
        ledger.tag_logits(logits, weight.shape)
        slope = logits.log_softmax(-1).exp_()
        gradient = slope.T @ hidden  # of the weight: other columns
        of_hidden = slope @ weight
        assert ledger.live["logits"] == 2 * 3 * 50 * 4
        total = gradient.double()
        assert ledger.live["gradients"] == 50 * 7 * (4 + 8)
        del logits, slope, gradient, total
        assert ledger.live["logits"] == ledger.live["gradients"] == 0
        assert ledger.live["activations"] == (2 * 3 * 7 + 50 * 7) * 4
        assert of_hidden.shape == hidden.shape


def test_every_category_has_its_place_in_the_list():
    assert CATEGORIES == (
        "weights", "gathered_weights", "gradients", "optimizer", "activations", "logits", "communication",
        "temporary",
    )  # fmt: skip


def received() -> tuple[int, int, int]:
    """Bytes of communication and activations while a rank has a received buffer, and one made of it."""
    with Ledger(CPU) as ledger:
        buffer = torch.zeros(100)
        if dist.get_rank() == 0:
            dist.send(buffer, 1)
        else:
            dist.recv(buffer, 0)
        doubled = buffer * 2
        return ledger.live["communication"], ledger.live["activations"], doubled.numel()


def test_what_a_rank_receives_into_is_communication():
    sent, got = run_ranks(2, received)
    assert sent == (0, 800, 100)
    assert got == (400, 400, 100)


def reduced() -> tuple[int, int]:
    with Ledger(CPU) as ledger:
        hidden = torch.zeros(100)
        dist.all_reduce(hidden)
        return ledger.live["communication"], ledger.live["activations"]


def cast_gradients() -> list[str]:
    """Categories of a flat buffer of gradients and of its cast, summed as by FSDP2; of a received one's."""
    gradients = [torch.ones(4, 2) for _ in range(2)]
    with Ledger(CPU) as ledger:
        buffer, shard = torch.empty(2, 8), torch.empty(8)
        torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=2, out=buffer)
        dist.reduce_scatter_tensor(shard, buffer.view(-1))
        dist.all_reduce(shard)
        cast = shard.to(torch.bfloat16)
        other = torch.zeros(8)
        dist.broadcast(other, 0)
        made = [cast, shard, other.to(torch.bfloat16)]
        return [ledger.entries[each.untyped_storage()._cdata].category for each in made]


def test_a_cast_of_reduced_gradients_is_gradients():
    assert run_ranks(2, cast_gradients) == [["gradients", "communication", "activations"]] * 2


def test_activations_that_ranks_add_up_stay_activations():
    assert run_ranks(2, reduced) == [(0, 400)] * 2
