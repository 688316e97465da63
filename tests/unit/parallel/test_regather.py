"""`regather`: the same gradients bit for bit, one all-gather more per part, and only shards saved."""

import time
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import cases
from families import FAMILIES
from forward import summed_loss
from ranks import run_ranks
from transformers import AutoModelForCausalLM

from meshtune.attention.register import register
from meshtune.data.batch import MicroBatch
from meshtune.meter.ledger import Ledger
from meshtune.meter.trace import ACTIVATIONS
from meshtune.model.anatomy import anatomy
from meshtune.model.lora import add_lora
from meshtune.parallel import exchange, regather
from meshtune.parallel.mesh import Axis
from meshtune.parallel.recompute import recompute_blocks
from meshtune.parallel.tensor import split_model

register()
SEQ, ROWS = 512, 2


def build(family, *, again, recompute="none", lora=None):
    """(this rank's part of a model, its anatomy, a micro-batch)."""
    torch.manual_seed(1)
    config = FAMILIES[family](max_position_embeddings=SEQ)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="meshtune").train()
    if lora:
        add_lora(model, lora_rank=4, alpha=8, dtype=torch.float32, target_modules=lora)
    tp = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    parts = anatomy(model)
    split_model(model, parts, tp, sequence=True, regather=again)
    recompute_blocks(model, parts, recompute)
    ids = torch.randint(0, 256, (ROWS, SEQ))
    positions = torch.arange(SEQ).expand(ROWS, SEQ)
    return model, parts, MicroBatch(ids, ids, positions, ((SEQ,),) * ROWS, ids.numel(), ids.numel())


def gradients(family, again, recompute, lora):
    """Gradients by name after two micro-batches of which both forwards come first, as in a pipeline, and the
    gathers of the backwards.
    """
    model, parts, batch = build(family, again=again, recompute=recompute, lora=lora)
    gathers = []

    def counted(*args):
        assert not any(ref() is not None for ref in gathers), "two gathered inputs at once"
        whole = exchange.all_gather(*args)
        gathers.append(weakref.ref(whole))
        return whole

    with patch.object(regather, "all_gather", counted):
        losses = [summed_loss(model, parts, batch) for _ in range(2)]
        assert not gathers
        for loss in losses:
            loss.backward()
        assert not any(ref() is not None for ref in gathers), "a gathered input is left"
        with torch.no_grad():
            before = len(gathers)
            summed_loss(model, parts, batch)
            assert len(gathers) == before
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, len(gathers)


# family, recompute, adapters -> parts of the model that save their input
CASES = {
    "llama": ("llama", "none", None, 4),
    "attention recomputed": ("qwen2", "attention", None, 4),
    "fused projections": ("phi3", "none", None, 4),
    "norms after each part": ("olmo2", "none", None, 4),
    "adapters only in attention": ("llama", "none", ["q_proj", "v_proj", "o_proj"], 2),
    "an adapter without a gathered input": ("llama", "none", ["o_proj"], 0),
}


@pytest.mark.parametrize("case", cases(CASES, ci=["attention recomputed", "adapters only in attention"]))
def test_gradients_are_those_of_saved_inputs_with_one_gather_a_part(case):
    family, recompute, lora, parts = CASES[case]
    plain, regathered = (run_ranks(2, gradients, family, again, recompute, lora) for again in (False, True))
    for (expected, none), (found, count) in zip(plain, regathered, strict=True):
        assert none == 0
        assert count == 2 * parts
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def saved_bytes(again):
    """Bytes of activations after a forward."""
    model, parts, batch = build("llama", again=again)
    ledger = Ledger(torch.device("cpu"))
    with ledger:
        ledger.tag(model.parameters(), "weights")
        loss = summed_loss(model, parts, batch)
        settled(ledger)
        assert loss.requires_grad
        return ledger.live[ACTIVATIONS]


def settled(ledger):
    """Return once no bytes went for half a second: gloo's threads free their last workspaces late."""
    quiet = 0
    while quiet < 10:
        before = ledger.total
        time.sleep(0.05)
        quiet = quiet + 1 if ledger.total == before else 0


@pytest.mark.ci
def test_only_own_tokens_are_saved():
    """Two blocks of two parts save [rows, seq, 64] in fp32, or half of it; tp is 2."""
    whole, shards = (run_ranks(2, saved_bytes, again)[0] for again in (False, True))
    assert whole - shards == 4 * ROWS * SEQ * 64 * 4 // 2
