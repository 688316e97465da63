"""A model on each rank from plain values: no settings, tokenizer or run folder."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny import documents
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, XGLMConfig

from meshtune.data.batch import Batch
from meshtune.layout import Layout
from meshtune.parallel.mesh import join
from meshtune.train.model import ModelSpec, OptimizerSpec, rank_model

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def step(folder: str, layout: str) -> tuple[float, float, int]:
    """(loss, gradient norm, parameters on this rank) of a step from a config.json alone."""
    source = AutoConfig.from_pretrained(folder)
    spec = ModelSpec(source=source, init="random", precision="fp64", seed=3)
    world = join(Layout.parse(layout), torch.device("cpu"))
    model = rank_model(spec, world, optimizer=OptimizerSpec())
    micro_batches = [documents(seed=seed, vocabulary=96) for seed in range(4)]
    mine = micro_batches[world.data_rank :: world.data_ranks]
    label_tokens = sum(micro_batch.label_tokens for micro_batch in micro_batches)
    tokens = sum(len(row) for micro_batch in micro_batches for row in micro_batch.documents)
    batch = Batch(tuple(mine), label_tokens=label_tokens, tokens=tokens, origin="")
    passes = model.passes
    share = passes.forward_backward(passes.localise(batch), batch.label_tokens, lambda _: nullcontext())
    loss, squares = world.sum_over_ranks(share, model.optimizer.local_squared_norm())
    model.optimizer.step(1e-3)
    return loss, squares**0.5, sum(p.numel() for _, p in model.parallel.named_parameters())


def gradient_dtypes(folder: str, layout: str, precision: str, reduce_dtype: str) -> set[torch.dtype]:
    """Dtypes of this rank's gradients after a step's backward passes."""
    source = AutoConfig.from_pretrained(folder)
    spec = ModelSpec(source=source, init="random", precision=precision, reduce_dtype=reduce_dtype)
    world = join(Layout.parse(layout), torch.device("cpu"))
    model = rank_model(spec, world, optimizer=OptimizerSpec())
    mine = tuple(documents(seed=seed, vocabulary=96) for seed in range(2))
    batch = Batch(mine, label_tokens=sum(m.label_tokens for m in mine), tokens=1, origin="")
    passes = model.passes
    passes.forward_backward(passes.localise(batch), batch.label_tokens, lambda _: nullcontext())
    return {gradient.dtype for gradient in model.optimizer.gradients()}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "precision", "reduce_dtype", "expected"),
    [
        ("zero3x2-mb2-ga2", "bf16", "bf16", torch.float32),  # of the fp32 shards, after FSDP's sum in bf16
        ("zero3x2-mb2-ga2", "bf16", "fp32", torch.float32),
        ("dp2-mb2-ga2", "bf16", "bf16", torch.bfloat16),
        ("dp2-mb2-ga2", "bf16-pure", "fp32", torch.float32),
    ],
)
def test_gradients_add_up_in_no_narrower_dtype_than_their_own(
    layout: str, precision: str, reduce_dtype: str, expected: torch.dtype, tmp_path: Path
) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    for dtypes in run_ranks(2, gradient_dtypes, str(tmp_path), layout, precision, reduce_dtype):
        assert dtypes == {expected}


@pytest.mark.ci
@pytest.mark.parametrize("layout", ["dp2-mb2-ga2", "tp2-sp-mb2-ga4"])
def test_two_ranks_make_a_model_and_step_from_a_config_alone(layout: str, tmp_path: Path) -> None:
    LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    one = step(str(tmp_path), "mb2-ga4")
    for loss, norm, parameters in run_ranks(2, step, str(tmp_path), layout):
        assert loss == pytest.approx(one[0], rel=1e-10)
        assert norm == pytest.approx(one[1], rel=1e-8)
        assert parameters == one[2] if "dp2" in layout else parameters < one[2]


@pytest.mark.ci
def test_tables_of_positions_have_the_dtype_of_the_passes() -> None:
    """XGLM adds one to the embeddings: in fp32 it would make hidden states that bf16 matrices refuse."""
    config = XGLMConfig(vocab_size=96, d_model=32, num_layers=1, attention_heads=4, ffn_dim=48)
    spec = ModelSpec(source=config, init="random", attention="eager", precision="bf16")
    model = rank_model(spec, join(Layout.parse("mb2-ga1"), torch.device("cpu")), optimizer=OptimizerSpec())
    rows = documents(seed=0, vocabulary=96)
    batch = Batch((rows,), label_tokens=rows.label_tokens, tokens=1, origin="")
    passes = model.passes
    passes.forward_backward(passes.localise(batch), batch.label_tokens, lambda _: nullcontext())
    assert all(gradient.isfinite().all() for gradient in model.optimizer.gradients())


def random_pieces(folder: str, layout: str) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    """(Name, offsets, values) of this rank's pieces of a model with random weights."""
    spec = ModelSpec(source=AutoConfig.from_pretrained(folder), init="random", precision="fp32", seed=3)
    model = rank_model(spec, join(Layout.parse(layout), torch.device("cpu")), optimizer=OptimizerSpec())
    return [(name, piece.offsets, piece.tensor.clone()) for name, piece in model.parallel.named_pieces()]


@pytest.mark.ci
@pytest.mark.parametrize("layout", ["tp2-sp", "zero3x2", "pp2-1f1b-ga2"])
def test_random_weights_are_one_devices_under_any_layout(layout: str, tmp_path: Path) -> None:
    LlamaConfig(**SHAPE, tie_word_embeddings=True).save_pretrained(tmp_path)
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(tmp_path)
    whole = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())
    found = set()
    for pieces in run_ranks(2, random_pieces, str(tmp_path), layout):
        for name, offsets, values in pieces:
            block = tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))
            assert torch.equal(values, whole[name][block]), name
            found.add(name)
    assert found == whole.keys()
