"""MLPs in tiles: how often their forward runs, the precision of their gradients, dropout, and memory."""

import copy
from typing import Any

import pytest
import torch
from cases import cases
from families import FAMILIES
from golden import says
from tiny import make_llama
from transformers import AutoConfig, AutoModelForCausalLM

from meshtune.api.dryrun import dryrun
from meshtune.attention.register import register
from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.model.anatomy import anatomy
from meshtune.model.capabilities import traits
from meshtune.model.load import on_meta
from meshtune.model.lora import add_lora
from meshtune.parallel.recompute import recompute_blocks
from meshtune.parallel.tiles import tile_mlps
from meshtune.placement.rules import refusals

register()

TOKENS, TILE, BLOCKS = 48, 10, 2


def tiled(model: Any, mode: str = "none") -> Any:
    other = copy.deepcopy(model)
    tile_mlps(other, parts := anatomy(other), TILE)
    recompute_blocks(other, parts, mode)
    return other


def loss(model: Any) -> torch.Tensor:
    ids = torch.arange(TOKENS)[None] % 50
    return model(ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize(
    ("family", "mode", "again"),
    [("llama", "none", 0), ("llama", "selective", 0), ("llama", "full", 0), ("gemma2", "full", 1)],
)
def test_a_forward_runs_once_more_where_no_norm_reads_what_it_returns(
    family: str, mode: str, again: int
) -> None:
    model = tiled(AutoModelForCausalLM.from_config(FAMILIES[family](num_hidden_layers=BLOCKS)), mode)
    widths: list[int] = []
    for block in model.model.layers:
        block.mlp.register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    of_forward = [10, 10, 10, 10, 8] * BLOCKS
    of_loss = loss(model)
    assert widths == of_forward
    of_loss.backward()
    assert sorted(widths) == sorted(of_forward * (2 + again))


def test_sums_over_tiles_do_not_round_in_16_bits() -> None:
    model = make_llama(vocab_size=50, num_hidden_layers=1, max_position_embeddings=4096)
    name = "model.layers.0.mlp.down_proj.weight"
    exact, plain, ours = (
        model.double(),
        copy.deepcopy(model).bfloat16(),
        tiled(copy.deepcopy(model).bfloat16()),
    )
    ours.model.layers[0].mlp.mlp_tile = 1
    found = []
    for each in (exact, plain, ours):
        loss(each).backward()
        found.append(each.get_parameter(name).grad.double())
    wrong = [(gradient - found[0]).norm() / found[0].norm() for gradient in found[1:]]
    assert wrong[1] < 1.1 * wrong[0]


def test_dropout_repeats_in_the_backward() -> None:
    model = make_llama(vocab_size=50, num_hidden_layers=1).double()
    add_lora(model, lora_rank=4, alpha=8, dropout=0.5, target_modules=["down_proj"])
    mlp = tiled(model).train().model.layers[0].mlp
    hidden, sums = torch.randn(1, TOKENS, 64, dtype=torch.float64), []
    for change in (0.0, 1.0):  # the output is linear in B
        torch.manual_seed(1)
        with torch.no_grad():
            mlp.down_proj.lora_B[3, 1] += change
        sums.append(mlp(hidden).sum())
        torch.rand(7)  # as what follows draws
        sums[-1].backward()
    slope = (sums[1] - sums[0]).item()
    assert mlp.down_proj.lora_B.grad[3, 1].item() == pytest.approx(2 * slope)


@pytest.mark.parametrize("layout", cases(["mb1-ga2", "tp2-sp-mb1-ga2-full", "cp2-mb1-ga1-selective"], ci=2))
def test_a_simulated_peak_is_lower_and_as_predicted(layout: str, tmp_path: Any) -> None:
    FAMILIES["llama"](
        hidden_size=256, intermediate_size=1024, num_hidden_layers=3, vocab_size=1024
    ).save_pretrained(tmp_path)
    settings = {
        "model": {"name": str(tmp_path), "init": "random"},
        "data": {"seq_len": 8192},
        "cluster": {"gpu": "h100-sxm", "gpus": 2},
    }
    peaks = []
    for tile in (None, 512):
        simulation = dryrun(settings | {"train": {"compile": False, "mlp_tile": tile}}, layout=layout)
        peaks.append(simulation.traces[0].steps[1].peak()[0])
        assert simulation.predicted is not None
        memory = simulation.predicted.memory
        assert peaks[-1] == pytest.approx(memory.peak - memory.overhead, rel=0.02)
    assert peaks[1] < 0.8 * peaks[0]


def test_rows_of_a_tile_may_be_viewed() -> None:  # as GPT-2's layers do
    model = AutoModelForCausalLM.from_config(FAMILIES["gpt2"](n_layer=1)).double().eval()
    ids, gradients = torch.arange(2 * TOKENS).view(2, TOKENS) % 50, []
    for each in (model, tiled(model)):
        each(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    torch.testing.assert_close(*gradients)


def test_dropout_of_adapters_is_refused_with_tp(tmp_path: Any) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    settings = {
        "model": {"name": str(tmp_path), "init": "random"},
        "method": "lora",
        "lora": {"dropout": 0.5},
        "cluster": {"gpu": "cpu", "gpus": 2},
        "train": {"mlp_tile": 10},
    }
    with pytest.raises(UserError, match="dropout in its blocks"):
        dryrun(settings, layout="tp2")


@pytest.mark.parametrize("family", ["opt", "bloom", "mixtral"])
def test_models_whose_mlps_are_not_functions_of_one_token_are_refused(family: str) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=2)
    with torch.device("meta"):
        says(refusals(traits(on_meta(config)), Layout(), attention="eager", packing=False, tiled=True)[0])
