"""Compare how other software keeps memory (stacks.toml) with what was published of it."""

from typing import Any

import numpy as np
import pytest
from golden import refuses
from shapes import of_shape

from meshtune.errors import UserError
from meshtune.layout import Layout
from meshtune.placement.columns import Columns
from meshtune.placement.states import Elements, copies_of, held_states
from meshtune.plan.accounting import engine_accounting, stack_accounting
from meshtune.plan.hardware import stacks
from meshtune.plan.memory.activations import saved_by_block
from meshtune.plan.memory.stages import Stages, in_flight
from meshtune.plan.memory.timeline import EVENTS, peak
from meshtune.plan.work import Work
from meshtune.precision import PRECISIONS
from meshtune.units import GIB

SEEN = {
    "context": 0.0,
    "communicator": 0.0,
    "reserved": 0.0,
}  # what torch's max_memory_allocated doesn't count


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200) -> Work:
    return of_shape(
        layers=layers, hidden=hidden, ffn=4 * hidden, heads=heads, kv_heads=heads, vocabulary=vocabulary,
        gated=0, tied=1.0,
    )  # fmt: skip


def columns(text: str) -> Columns:
    return Columns.of([Layout.parse(text)])


def with_fields(stack: str, precision: str, **fields: Any) -> Any:
    how = stack_accounting(stack, precision)
    return type(how)(**{name: getattr(how, name) for name in how.__dataclass_fields__} | fields)


@pytest.mark.parametrize("stack", stacks())
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_every_stack_has_an_accounting(stack: str, precision: str) -> None:
    how = stack_accounting(stack, precision)
    assert how.precision.weight == 2 and 0 <= how.reserved < 0.5 and how.context > 0
    found = peak(gpt(8, 1024, 16), columns("zero1x4-tp2-sp-pp2-1f1b-mb2-ga8-full"), how, 2048)
    assert np.isfinite(found.peak).all() and found.peak[0] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_this_engine_is_ours_with_what_the_gpu_adds(precision: str) -> None:
    how = stack_accounting("meshtune", precision)
    assert (
        how.precision == copies_of(precision, "fp32", "adamw")
        and how.loss_chunk == engine_accounting(precision).loss_chunk
    )
    assert how.context + how.communicator < 1.5 * GIB
    assert stack_accounting("meshtune-compiled", precision).reserved == how.reserved
    assert (
        stack_accounting("meshtune", "bf16", "bf16").precision == engine_accounting("bf16", "bf16").precision
    )


@pytest.mark.parametrize(
    ("layout", "groups"),
    [("mb1-ga2", 0), ("zero3x2-mb1-ga2", 1), ("zero2x2-cp2-mb1-ga2", 2), ("dp2-zero2x2-mb1-ga2", 3)],
)
def test_a_communicator_for_each_group_and_for_all(layout: str, groups: int) -> None:
    how = stack_accounting("meshtune", "bf16")
    bare = with_fields("meshtune", "bf16", communicator=0.0)
    more = [peak(gpt(4, 512, 8), columns(layout), each, 512).peak[0] for each in (how, bare)]
    assert more[0] - more[1] == pytest.approx(groups * how.communicator)


@pytest.mark.parametrize(
    ("precision", "ranks", "bytes_each"),
    [("fp16", 1, 20), ("fp16", 8, 4 + 16 / 8), ("bf16", 1, 18), ("bf16", 8, 6 + 12 / 8)],
)
def test_states_of_megatron(precision: str, ranks: int, bytes_each: float) -> None:
    """Megatron-LM's README, distributed optimizer, bytes per parameter."""
    how = stack_accounting("megatron", precision)
    n = Elements(1.0, 1.0, 1.0 / ranks, 1.0 / ranks)
    c = columns(f"zero1x{ranks}-mb1-ga4" if ranks > 1 else "mb1-ga4")
    found = (
        float(held_states(how.precision, n, c, shards_masters=how.shards_masters).total[0])
        + how.flat_shard_buffers / ranks
        + how.flat_buffers
    )
    assert found == pytest.approx(bytes_each)


@pytest.mark.parametrize(
    ("work", "layout", "whole", "split"),
    [
        (gpt(48, 6144, 64), "tp8{}-mb4-ga1", 59.25, 9.5625),
        (gpt(96, 12288, 96), "tp8{}-pp8-interleaved1f1b-v3-mb1-ga64", 66.84375, 12.3515625),
        (gpt(105, 20480, 128), "tp8{}-pp35-interleaved1f1b-v3-mb1-ga280", 114.0234375, 23.076171875),
        (gpt(128, 25600, 160), "tp8{}-pp64-1f1b-mb1-ga512", 131.25, 26.5625),
    ],
    ids=["22B", "175B", "530B", "1T"],
)
def test_activations_of_korthikanti_figure_1(work: Work, layout: str, whole: float, split: float) -> None:
    """In GiB on the first rank, of tensor parallelism, and with sequences split and attention recomputed."""
    how = stack_accounting("megatron", "fp16")
    assert how.saved is not None
    for text, published in ((layout.format(""), whole), (layout.format("-sp") + "-attention", split)):
        c = columns(text)
        tokens = c.micro_batch_size * 2048
        kept = saved_by_block(
            how.saved.per_token(work, 2048), work, c, tokens, regathers_inputs=how.regathers_inputs
        )
        assert float((kept.saved * in_flight(c) * work.blocks / c.pp)[0]) / GIB == pytest.approx(
            published, rel=2e-3
        )


@pytest.mark.parametrize(
    ("work", "splits", "percent"),
    [
        (gpt(48, 6144, 64), "-sp", 66.84),
        (gpt(96, 12288, 96), "-sp", 62.04),
        (gpt(96, 12288, 96), "-attention", 56.53),
        (gpt(105, 20480, 128), "-sp-attention", 20.27),
        (gpt(48, 6144, 64), "-full", 7.64),
        (gpt(128, 25600, 160), "-full", 9.42),
    ],
)
def test_activations_of_korthikanti_figure_7(work: Work, splits: str, percent: float) -> None:
    how = stack_accounting("megatron", "fp16")
    assert how.saved is not None
    cut, recompute = splits.startswith("-sp"), splits.removeprefix("-sp")
    found = []
    for text in ("tp8-mb1-ga1", f"tp8{'-sp' if cut else ''}-mb1-ga1{recompute}"):
        kept = saved_by_block(
            how.saved.per_token(work, 2048), work, columns(text), 2048, regathers_inputs=True
        )
        found.append(float(kept.saved[0]))
    assert 100 * found[1] / found[0] == pytest.approx(percent, abs=0.5)


def test_blocks_are_dealt_out_as_the_stack_does() -> None:
    bloom = Stages.cut(gpt(70, 14336, 112, 250880), columns("tp4-pp12-1f1b-mb2-ga128"), "slots")
    assert bloom.blocks[:, 0].tolist() == [5, 6, 5]
    llama = of_shape(layers=24, hidden=2048, ffn=4096, heads=32, kv_heads=32, vocabulary=50272, tied=1.0)
    eight = Stages.cut(llama, columns("pp8-1f1b-mb4-ga256"), "matmuls")
    assert eight.blocks[[0, 2], 0].tolist() == [4, 0]
    # 4717 MiB between steps on the first rank (huggingface.co nanotron/old_bench), of 18 bytes a parameter
    parameters = 4 * llama.block_parameters + 50272 * 2048
    assert 18 * parameters / 2**20 == pytest.approx(4717, rel=0.02)
    assert Stages.cut(llama, columns("mb4-ga4"), "matmuls").blocks[:, 0].tolist() == [24, 24, 24]


@pytest.mark.parametrize(
    ("layout", "gigabytes"),
    [
        ("zero1x16-mb4-ga16", 41.89),
        ("zero1x2-pp8-1f1b-mb2-ga256", 22.30),
        ("pp8-1f1b-mb4-ga256", 43.00),
        ("tp4-sp-pp4-1f1b-mb16-ga64", 45.99),
        ("tp8-sp-pp2-1f1b-mb32-ga32", 60.04),
    ],
)
def test_peaks_of_nanotron(layout: str, gigabytes: float) -> None:
    """huggingface.co nanotron/old_bench, llama-1B, log_metrics.csv: GiB allocated on the first rank."""
    work = of_shape(layers=24, hidden=2048, ffn=4096, heads=32, kv_heads=32, vocabulary=50272, tied=1.0)
    found = peak(work, columns(layout), with_fields("nanotron", "bf16", **SEEN), 4096)
    assert float(found.peak[0]) / GIB == pytest.approx(gigabytes, rel=0.02)


def llama_70b(layers: int) -> Work:
    return of_shape(
        layers=layers, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocabulary=128256, gated=1.0, tied=0.0
    )


@pytest.mark.parametrize(
    ("layout", "seq_len", "gibibytes"),
    [
        ("zero1x4-pp2-1f1b-mb1-ga8", 4096, 66.55),
        ("zero1x4-tp2-sp-mb1-ga4", 4096, 60.68),
        ("zero1x2-tp4-sp-mb1-ga4", 4096, 39.07),
        ("tp8-sp-mb1-ga4", 4096, 28.29),
        ("ulysses8-mb1-ga4", 32768, 104.51),
        ("ulysses4-tp2-sp-mb1-ga4", 131072, 112.67),
    ],
)
def test_peaks_of_megatron_core(layout: str, seq_len: int, gibibytes: float) -> None:
    """MooreThreads/SimuMax docs/b200: allocated by Megatron-LM 0.14 for 12 blocks of a Llama-3 70B."""
    sharded = columns(layout).replace(zero=np.ones(1))  # over context ranks too
    found = peak(llama_70b(12), sharded, with_fields("megatron-core", "bf16", **SEEN), seq_len)
    assert float(found.peak[0]) / GIB == pytest.approx(gibibytes, rel=0.005)


def test_the_embedding_s_gradient_is_whole_in_16_bits_before_it_is_added() -> None:
    """Also where all other gradients go to fp32 as they are made."""
    work = gpt(1, 1024, 16, vocabulary=262144)
    found = peak(work, columns("mb1-ga4"), with_fields("megatron-core", "bf16", **SEEN), 128)
    assert float(found.activations[0]) == 2 * 262144 * 1024
    assert EVENTS[int(found.event[0])] == "end of backward"


def test_transformer_engine_keeps_no_scores_and_no_others_keys() -> None:
    """Twice as many tokens save twice as much, 12h + 4·h_kv + 6f + 4a each; so do twice as many cp ranks."""
    work, how = llama_70b(1), stack_accounting("megatron-core", "bf16")
    assert how.saved is not None
    each = 12 * 8192 + 4 * 1024 + 6 * 28672 + 4 * 64
    for layout, seq_len, tokens in (("mb1", 4096, 4096), ("mb1", 65536, 65536), ("cp4-mb1", 65536, 16384)):
        kept = saved_by_block(
            how.saved.per_token(work, seq_len), work, columns(layout), tokens, context=how.context_keys
        )
        assert float(kept.saved[0]) == tokens * each, layout
    eight = stack_accounting("megatron-core", "mxfp8").saved
    assert eight is not None and sum(eight.per_token(work, 4096)) == each - 8192 - 28672 + 2 * 2 * 1024
    plain = how.saved.per_token(gpt(1, 1024, 16), 4096)  # two matrices: both 4f features of the MLP are kept
    assert plain.mlp == 2 * 4096 + 2 * 4096


@pytest.mark.parametrize(
    ("stack", "precision", "layers", "layout", "gigabytes"),
    [
        ("bigscience", "fp16", 72, "zero1x4-tp8-pp12-1f1b-mb1-ga512-full", 29),
        ("bigscience", "fp16", 72, "zero1x8-tp8-pp6-1f1b-mb4-ga64-full", 55),
        ("bigscience-balanced", "bf16", 70, "zero1x8-tp4-pp12-1f1b-mb2-ga128-full", 59),
        ("bigscience-balanced", "bf16", 70, "zero1x8-tp4-pp12-1f1b-mb4-ga64-full", 73),
    ],
)
def test_peaks_of_bloom(stack: str, precision: str, layers: int, layout: str, gigabytes: float) -> None:
    """bigscience train/tr11-176B-ml/chronicles-prequel.md: what nvidia-smi showed."""
    found = peak(gpt(layers, 14336, 64, 250880), columns(layout), stack_accounting(stack, precision), 2048)
    assert float(found.peak[0]) / GIB == pytest.approx(gigabytes, rel=0.08)


@pytest.mark.parametrize("stack", stacks())
def test_a_precision_that_a_stack_has_no_table_of_is_refused(stack: str) -> None:
    with refuses(UserError):
        stack_accounting(stack, "bf17")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_this_engine_has_a_table_of_each_precision(precision: str) -> None:
    assert stack_accounting("meshtune", precision).precision.weight in (2, 4, 8)


@pytest.mark.parametrize(
    ("stack", "held"), [("megatron", False), ("megatron-core", False), ("torchtitan", True)]
)
def test_only_torchs_stages_hold_what_they_sent_until_the_step_ends(stack: str, held: bool) -> None:
    """Compare twice the micro-batches of an interleaved pipeline, of which as many are in flight."""
    how = stack_accounting(stack, "bf16")
    layouts = (f"tp8-pp4-interleaved1f1b-v3-mb1-ga{steps}-full" for steps in (32, 64))
    fewer, more = (float(peak(gpt(24, 4096, 32), columns(text), how, 2048).peak[0]) for text in layouts)
    assert (more > 1.1 * fewer) if held else (more == fewer)


@pytest.mark.parametrize("ending", ["", "-compiled"])
def test_tools_that_run_the_same_blocks_have_the_same_elementwise_passes(ending: str) -> None:
    passes = {
        tuple(value for key, value in stacks()[f"{name}{ending}"].items() if key.startswith("elementwise_"))
        for name in ("meshtune", "trainer-fsdp2", "deepspeed")
    }
    assert len(passes) == 1
