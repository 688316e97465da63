"""Muon: torch's update of the blocks' matrices, our AdamW for the rest, and the bytes that both keep."""

from functools import partial

import pytest
import torch
from known import known
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from meshtune.layout import Layout
from meshtune.model.lora import add_lora
from meshtune.model.trace import census_of
from meshtune.optim.optimizer import Optimizer
from meshtune.parallel.mesh import join
from meshtune.placement.columns import Columns
from meshtune.placement.share import share
from meshtune.plan.cluster import cluster_of
from meshtune.plan.machine import machine_of
from meshtune.plan.seconds.collectives import optimizer_update
from meshtune.plan.workload import Workload
from meshtune.sections import ClusterConfig
from meshtune.train.model import LoraSpec, ModelSpec, OptimizerSpec, rank_model

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
BLOCK = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # elements of a block's matrices
OUTSIDE = 2 * 96 * 32 + 32 + 2 * 2 * 32  # embedding, head, last norm, and the blocks' norms
CONSTANTS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG).to(dtype)


def test_twenty_steps_are_torchs_muon_and_adamw() -> None:
    ours, theirs = llama(torch.float64), llama(torch.float64)
    optimizer = Optimizer(ours.named_parameters(), name="muon", blocks="model.layers.", **CONSTANTS)
    matrices = [p for name, p in theirs.named_parameters() if "_proj" in name]
    tables = [theirs.model.embed_tokens.weight, theirs.lm_head.weight]
    norms = [p for name, p in theirs.named_parameters() if "norm" in name]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        lr=1e-2, betas=CONSTANTS["betas"], eps=CONSTANTS["eps"],
    )  # fmt: skip
    for seed in range(20):
        tokens = torch.randint(96, (2, 8), generator=torch.Generator().manual_seed(seed))
        for model in (ours, theirs):
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step(1e-2)
        for each in (muon, adamw):
            each.step()
            each.zero_grad()
    start = dict(llama(torch.float64).named_parameters())
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert float((a - start[name]).detach().square().mean().sqrt()) > 1e-2, f"{name} hardly moved"


def test_the_rms_of_an_update_is_about_a_fifth_of_the_rate() -> None:
    """As AdamW's usually is; with torch's own scaling it would be 1/16 here."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 64, bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(64, 256)
    Optimizer(layer.named_parameters(), name="muon", **CONSTANTS | {"weight_decay": 0.0}).step(1.0)
    assert float((layer.weight - before).detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.25)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_a_rank_keeps_the_bytes_of_its_share(precision: str, method: str) -> None:
    lora = LoraSpec(r=3, target_modules="all-linear", modules_to_save=("lm_head",))
    spec = ModelSpec(
        source=CONFIG, init="random", precision=precision, lora=lora if method == "lora" else None
    )
    model = rank_model(
        spec, join(Layout.parse("mb1-ga1"), torch.device("cpu")), optimizer=OptimizerSpec(name="muon")
    )
    state = model.optimizer.state(materialise=True)
    masters = sum(t.nbytes for key, t in state.items() if key.startswith("model.")) * (precision == "bf16")
    moments = {key: t for key, t in state.items() if key.startswith("optimizer.") and t.ndim}
    found = share(model.census, Layout.parse("mb1-ga1"), 0, precision=precision, optimizer="muon")
    assert masters + sum(t.nbytes for t in moments.values()) == found.bytes.optimizer
    wide = 2 if precision == "bf16-pure" else 4
    adapters = 2 * 3 * (32 + 32 + 2 * (32 + 16) + 32 + 32 + 3 * (32 + 48))
    by_muon, by_adamw = (adapters, 96 * 32) if method == "lora" else (2 * BLOCK, OUTSIDE)
    assert sum(t.nbytes for t in moments.values()) == wide * (by_muon + 2 * by_adamw)
    assert all(
        (".layers." in key and "norm" not in key) == key.endswith("momentum_buffer") for key in moments
    )


def test_the_stages_of_a_pipeline_keep_what_one_rank_keeps() -> None:
    census = census_of(llama())
    one, first, second = (
        share(census, Layout.parse(text), rank, precision="fp32", optimizer="muon").bytes.optimizer
        for text, rank in (("mb1-ga1", 0), ("pp2-1f1b-mb1-ga2", 0), ("pp2-1f1b-mb1-ga2", 1))
    )
    assert one == first + second == 4 * 2 * BLOCK + 8 * OUTSIDE


def test_adapters_are_matrices_of_the_blocks() -> None:
    model = llama()
    add_lora(model, lora_rank=2, alpha=4)
    optimizer = Optimizer(model.named_parameters(), name="muon", blocks="model.layers.", **CONSTANTS)
    assert [bucket.row for bucket in optimizer.buckets] == ["muon"]


def test_the_plan_counts_newton_schulz() -> None:
    model = known("qwen3-0.6b")
    workload = partial(Workload, "m", model.work, model.traits, seq_len=1024, global_batch_size=8)
    cluster, layouts = cluster_of(ClusterConfig(gpu="h200", gpus=2)), ("mb1-ga8", "pp2-1f1b-mb1-ga8")
    columns = Columns.of([Layout.parse(text) for text in layouts])
    machine = machine_of(workload(optimizer="muon"), cluster)
    flops = sum(
        5 * weight.count * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3)
        for weight in model.work.block_weights
        if min(shape := (weight.rows, weight.cols)) > 1
    )
    rate = cluster.gpu.matmul_max * machine.matmul * machine.stack_matmul
    assert machine.block_update == pytest.approx(flops / rate) and machine.block_update > 0
    adamw = machine_of(workload(optimizer="adamw"), cluster)
    assert adamw.block_update == 0 and machine.optimizer_bytes > 2 * adamw.optimizer_bytes
    with_matmuls, traffic = (optimizer_update(model.work, columns, each) for each in (machine, adamw))
    blocks = model.work.blocks * machine.block_update
    assert with_matmuls[0] > blocks + traffic[0] and with_matmuls[1] > blocks / 2 + traffic[1]
