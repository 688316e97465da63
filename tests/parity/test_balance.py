"""Loads, losses and biases of a mixture's routers are in every layout those that formulas give by hand."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import cases
from families import COMMON, exact, skip_without_routers
from layouts import check, make_folder, trained
from ranks import run_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from meshtune.data.batch import Batch, micro_batch
from meshtune.data.pack import LABELLED
from meshtune.layout import Layout
from meshtune.parallel.mesh import join
from meshtune.placement.experts import BalanceSpec
from meshtune.report.run.report import run_panels
from meshtune.rundir import RunDir
from meshtune.train.model import ModelSpec, OptimizerSpec, rank_model, single_model
from meshtune.train.step import Counts

EXPERTS, CHOSEN, WIDTH, SEQUENCES = 8, 2, 32, 4
SIZES: dict[str, Any] = COMMON | {
    "num_hidden_layers": 4,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
}
EAGER: dict[str, Any] = {"experts_implementation": "eager"}  # grouped matmuls refuse fp64
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": EXPERTS, "moe_intermediate_size": 32,
    "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 2, "topk_group": 1,
}  # fmt: skip
# Experts in every block; DeepSeek has sigmoids, groups and a bias.
CONFIGS: dict[str, Callable[..., Any]] = {
    "mixtral": lambda **more: MixtralConfig(**SIZES | EAGER, **more),
    "deepseek": lambda **more: DeepseekV3Config(**SIZES | DEEPSEEK | more),
}  # fmt: skip
MODULES = {"mixtral": "mixtral", "deepseek": "deepseek_v3"}
SPECS = {
    "loss": BalanceSpec(kind="loss", aux_loss=0.3, z_loss=0.02),
    "bias": BalanceSpec(kind="bias", bias_rate=0.01),
    "config": BalanceSpec(),
}
CASES = [  # family, kind, layout
    *(
        (family, "loss", layout)
        for family in CONFIGS
        for layout in (
            "mb4-ga1", "dp2-mb1-ga2", "zero3x2-mb2-ga1", "pp2-1f1b-mb1-ga4-selective", "cp2-mb2-ga2-full",
            "pp2-zbv-mb1-ga4", "zero2x2-cp2-mb1-ga2-full", "zero3x2-ep2-mb1-ga2-full",
            "tp2-mb2-ga2", "cp2-tp2-sp-mb4-ga1-full", "zero3x2-tp2-sp-ep4-mb1-ga2",
        )
    ),
    *(
        ("mixtral", "config", layout)
        for layout in ("mb4-ga1", "dp2-mb2-ga1-full", "cp2-mb4-ga1", "tp2-mb4-ga1")
    ),
    *(
        ("deepseek", "bias", layout)
        for layout in (
            "mb4-ga1", "pp2-1f1b-mb1-ga4-full", "zero3x2-cp2-mb2-ga1", "dp2-ep2-mb2-ga1", "tp2-sp-mb2-ga2",
        )
    ),
]  # fmt: skip
TOLERANCE = {"mixtral": 1e-9, "deepseek": 1e-5}  # fp64; DeepSeek's router casts to fp32


class Found(NamedTuple):
    """Numbers of one step."""

    loss: float
    measured: dict[str, float]
    loads: Tensor  # [layers, experts]
    router: dict[str, Tensor]  # gradients, by name
    norm: float
    biases: list[list[float]]


def sequences() -> list[list[np.ndarray]]:
    """Documents of each sequence in stored tokens; every sequence has another number of padding columns."""
    draw, made = np.random.default_rng(0), []
    for sequence in range(SEQUENCES):
        made.append([])
        for length in (20 - 4 * sequence, 9):
            tokens = draw.integers(3, 256, length).astype(np.uint32)
            tokens[1:] |= np.where(draw.random(length - 1) < 0.6, LABELLED, 0).astype(np.uint32)
            made[-1].append(tokens)
    return made


def spec_of(family: str, kind: str) -> ModelSpec:
    config = CONFIGS[family](output_router_logits=kind == "config", router_aux_loss_coef=0.3)
    precision = "fp64" if family == "mixtral" else "fp32"
    return ModelSpec(source=config, init="random", balance=SPECS[kind], seed=3, precision=precision)


def step(family: str, kind: str, text: str) -> tuple[Found, dict[str, Any]]:
    """One update on this rank, and its pieces of the routers' gradients."""
    torch.set_num_threads(1)
    with exact():
        world = join(Layout.parse(text), torch.device("cpu"))
        model, rows = rank_model(spec_of(family, kind), world, optimizer=OptimizerSpec()), sequences()
        size, share = world.layout.micro_batch_size, SEQUENCES // world.data_ranks
        own = range(world.data_rank * share, (world.data_rank + 1) * share)
        batches = [micro_batch([rows[i] for i in own[at : at + size]], WIDTH) for at in range(0, share, size)]
        every = micro_batch(rows, WIDTH)
        batch = Batch(tuple(batches), every.tokens, every.label_tokens, "")
        pieces: dict[str, Any] = {}

        def clip(norm: float, most: float) -> None:
            named = dict(model.parallel.named_parameters())
            for name, gradient in model.optimizer.named_gradients().items():
                if name.endswith("gate.weight"):
                    pieces[name] = model.parallel.piece(name, named[name], gradient.clone())

        model.optimizer.clip = clip  # type: ignore[method-assign]
        done = model.passes.step(
            model.passes.localise(batch), Counts(batch.units, tokens=batch.tokens), lambda _: nullcontext(),
            learning_rate=1e-3, max_grad_norm=0.0,
        )  # fmt: skip
    balance = model.passes.balance
    assert balance is not None
    found = Found(done.loss, dict(done.measured), balance.loads.cpu(), {}, done.norm, balance.state())
    return found, pieces


def in_layout(family: str, kind: str, text: str) -> Found:
    ranks = run_ranks(Layout.parse(text).world, step, family, kind, text, seconds=240)
    router: dict[str, Tensor] = {}
    for _, pieces in ranks:
        for name, piece in pieces.items():
            whole = router.setdefault(name, torch.zeros(piece.shape, dtype=torch.float64))
            start = piece.offsets[0]
            whole[start : start + len(piece.tensor)] = piece.tensor.double()
    assert all(found.loss == ranks[0][0].loss for found, _ in ranks)
    return ranks[0][0]._replace(router=router)


@cache
def by_hand(family: str, kind: str) -> Found:
    """The step on the unsharded model of transformers, each document by itself."""
    weights, spec = SPECS[kind], spec_of(family, kind)
    with exact():
        model = single_model(replace(spec, attention="sdpa"), torch.device("cpu"))
        gates = {name: module for name, module in model.named_modules() if name.endswith(".gate")}
        seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, gate in gates.items():
            gate.register_forward_hook(
                lambda _, __, out, name=name: seen.setdefault(name, []).append((out[0], out[2]))
            )
        total, labels, rows = torch.zeros(()), 0, list[dict[str, Any]]()
        for documents in sequences():
            seen.clear()
            for tokens in documents:
                ids = torch.from_numpy((tokens & 0xFFFF).astype(np.int64))
                trained = torch.from_numpy((tokens & LABELLED) != 0)[1:]
                log = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
                total = total - log.gather(1, ids[1:, None])[trained].sum()
                labels += int(trained.sum())
            rows.append({
                name: tuple(torch.cat(part) for part in zip(*pairs, strict=True))
                for name, pairs in seen.items()
            })  # fmt: skip
        loss, layers = total / labels, len(gates)
        tokens = sum(len(next(iter(row.values()))[0]) for row in rows)
        balance, z_loss = torch.zeros(()), torch.zeros(())
        if kind == "config":
            logits = tuple(torch.cat([row[name][0] for row in rows]) for name in gates)
            every = torch.cat(logits).softmax(-1)
            hits = torch.zeros_like(every).scatter(1, every.topk(CHOSEN, -1).indices, 1.0)
            balance = EXPERTS * (hits.mean(0) * every.mean(0)).sum()
            theirs: Any = load_balancing_loss_func(logits, EXPERTS, CHOSEN)  # type: ignore[arg-type]
            assert balance.item() == pytest.approx(theirs.item(), rel=1e-7)  # it rounds fractions to fp32
            total = loss + 0.3 * balance
        elif kind == "loss":
            for row in rows:
                for logits, _ in row.values():
                    scores = logits.softmax(-1) if family == "mixtral" else logits.sigmoid()
                    probabilities = (scores / scores.sum(-1, keepdim=True)).mean(0)
                    hits = torch.zeros_like(scores).scatter(1, scores.topk(CHOSEN, -1).indices, 1.0)
                    fractions = hits.mean(0) * EXPERTS / CHOSEN
                    balance = balance + (fractions * probabilities).sum() / SEQUENCES
                    z_loss = z_loss + logits.logsumexp(-1).square().sum() / tokens
            total = loss + (weights.aux_loss or 0.0) * balance + weights.z_loss * z_loss
            balance, z_loss = balance / layers, z_loss / layers
        else:
            total = loss
        total.backward()
    loads = torch.stack([
        torch.cat([row[name][1].flatten() for row in rows]).bincount(minlength=EXPERTS) for name in gates
    ]).double()  # fmt: skip
    measured = {"aux_loss": balance.item(), "z_loss": z_loss.item()}
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    router = {f"{name}.weight": gradients[f"{name}.weight"].double() for name in gates}
    norm = torch.stack([each.norm() for each in gradients.values()]).norm()
    moved = weights.bias_rate * (loads.mean(1, keepdim=True) - loads).sign()
    return Found(loss.item(), measured, loads, router, norm.item(), moved.tolist() if kind == "bias" else [])


@pytest.mark.parametrize(
    ("family", "kind", "layout"),
    cases(CASES, test=[("mixtral", "loss", "zero3x2-mb2-ga1")], ci=[
        ("mixtral", "loss", "pp2-1f1b-mb1-ga4-selective"), ("mixtral", "config", "dp2-mb2-ga1-full"),
        ("deepseek", "bias", "mb4-ga1"), ("deepseek", "loss", "cp2-mb2-ga2-full"),
        ("mixtral", "loss", "zero3x2-ep2-mb1-ga2-full"), ("mixtral", "loss", "cp2-tp2-sp-mb4-ga1-full"),
    ]),
)  # fmt: skip
def test_a_layout_balances_experts_as_by_hand(family: str, kind: str, layout: str) -> None:
    skip_without_routers(MODULES[family])
    ours, theirs, most = in_layout(family, kind, layout), by_hand(family, kind), TOLERANCE[family]
    assert ours.loss == pytest.approx(theirs.loss, rel=most)
    assert ours.norm == pytest.approx(theirs.norm, rel=most)
    assert torch.equal(ours.loads, theirs.loads)
    for name in ours.measured.keys() & theirs.measured.keys():
        assert ours.measured[name] == pytest.approx(theirs.measured[name], rel=most), name
    assert ("aux_loss" in ours.measured) == (kind != "bias") and ("z_loss" in ours.measured) == (
        kind == "loss"
    )
    assert ours.router.keys() == theirs.router.keys()
    for name, gradient in theirs.router.items():
        assert (ours.router[name] - gradient).norm() <= most * gradient.norm(), name
    assert torch.tensor(ours.biases).numpy() == pytest.approx(torch.tensor(theirs.biases).numpy())


@pytest.mark.ci
def test_a_bias_is_saved_resumed_and_exported_and_rows_have_the_loads(tmp_path: Path) -> None:
    skip_without_routers(MODULES["deepseek"])
    torch.manual_seed(0)
    config = CONFIGS["deepseek"](vocab_size=301)
    make_folder(tmp_path, AutoModelForCausalLM.from_config(config))
    words = "experts.balance=bias", "experts.bias_rate=0.01", "checkpoint.every=1"
    whole = trained(tmp_path, tmp_path / "whole", "mb4-ga4", "fp32", *words)
    trained(tmp_path, tmp_path / "ours", "mb4-ga4", "fp32", *words, "train.max_steps=2")
    ours = trained(tmp_path, tmp_path / "ours", "pp2-1f1b", "fp32", *words)
    check(ours, whole, "fp32")
    biases = [tensor for name, tensor in ours.tensors.items() if name.endswith("e_score_correction_bias")]
    steps = torch.stack(biases) / 0.01
    assert torch.allclose(steps, steps.round(), atol=1e-3) and steps.abs().max() == pytest.approx(3, abs=1e-3)
    rows = RunDir(ours.folder).rows("experts")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0]["layers"] == [0, 1, 2, 3]
    assert rows == RunDir(whole.folder).rows("experts")
    assert RunDir(ours.folder).rows("run")[-1]["router"] == "trained"
    drawn = {panel.key for panel in run_panels(RunDir(ours.folder).rows())}
    assert {"experts", "experts_by_layer"} <= drawn
