"""Memory, against textbook figures, papers and what was measured to the byte."""

from dataclasses import replace

import numpy as np
import pytest
from families import FAMILIES
from shapes import of_shape

from meshtune.layout import Layout
from meshtune.model.trace import census
from meshtune.parallel.context import spans
from meshtune.parallel.mesh import Axis
from meshtune.placement.columns import Columns
from meshtune.placement.states import Copies, Elements, held_states
from meshtune.plan.accounting import EAGER, Saved, engine_accounting
from meshtune.plan.memory.activations import saved_by_block
from meshtune.plan.memory.stages import Stages, in_flight
from meshtune.plan.memory.states import Step, gpt_parameters
from meshtune.plan.memory.timeline import Liveness, peak
from meshtune.plan.work import Work

GB = 1e9
# Rajbhandari et al. 2020, section 3.1: 2 + 2 + 12; and with a sum of micro-batches in fp32
MIXED, MIXED_BESIDE = Copies(2, 2, 2, 4, 8), Copies(2, 2, 4, 4, 8, beside=1)
# Korthikanti et al. 2022 (arXiv:2205.05198), table 2, 16-bit with dropout: 10 + 24/t + 5as/(ht)
MEGATRON = Saved(outside=6, entering=4, queries=2, keys=2, heads=0, output=2, wide=4, scores=5)
GPT3 = of_shape(layers=96, hidden=12288, ffn=4 * 12288, heads=96, kv_heads=96, vocabulary=51200, gated=0)


def states(copies: Copies, parameters: float, zero: int = 0, shards: int = 1) -> float:
    """Bytes of all model states on a rank; masters beside the weights, as in the papers."""
    layouts = Columns.of([Layout()]).replace(zero=np.array([zero]), dp_shard=np.array([shards]))
    elements = Elements(parameters, parameters, parameters / shards, parameters / shards)
    return float(held_states(copies, elements, layouts, shards_masters=False).total[0])


@pytest.mark.parametrize(
    ("billions", "fp32", "mixed"), [(1, 16, 20), (7, 112, 140), (70, 1120, 1400), (405, 6480, 8100)]
)
def test_states_of_the_textbooks(billions: float, fp32: float, mixed: float) -> None:
    """The Ultra-Scale Playbook's table: fp32, and bf16 with gradients that add up in fp32; in GB."""
    n = billions * 1e9
    assert states(engine_accounting("fp32").precision, n) == pytest.approx(fp32 * GB)
    assert states(MIXED_BESIDE, n) == pytest.approx(mixed * GB)
    assert states(MIXED, n) == pytest.approx(16 * n)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_states_of_the_zero_paper(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 B parameters over 64 ranks."""
    found = states(MIXED, 7.5e9, zero, 64 if zero else 1)
    assert found / GB == pytest.approx(gigabytes, rel=3e-3)


@pytest.mark.parametrize("degree", [1, 4, 16, 64, 256, 1024])
def test_states_of_the_zero_paper_by_degree(degree: int) -> None:
    n = 7.5e9
    every = [states(MIXED, n, z, degree) / n for z in (1, 2, 3)]
    assert every == pytest.approx([4 + 12 / degree, 2 + 14 / degree, 16 / degree])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "whole", "shards"),
    [("llama", None, [1, 2, 4]), ("olmo2", (), [1, 1, 1]), ("phi3", (4, 2, 2), [1, 2, 1])],
)
def test_heads_of_gathered_projections_are_on_every_rank(
    family: str, whole: tuple[int, ...] | None, shards: list[int]
) -> None:
    work = Work.of(census(FAMILIES[family]()))
    assert work.whole_heads == whole
    assert list(np.broadcast_to(work.head_shards(np.array([1, 2, 4])), 3)) == shards

    layouts, per_token, tokens = Columns.of([Layout.parse("tp4-mb1-ga1")]), work.traced[2].kept, 64
    divided = per_token.mlp / 4 + (per_token.attention + per_token.core + per_token.statistics) / shards[2]
    last_input = 0 if shards[2] > 1 else 2 * 64 / 4  # a rank's shard of the core's output
    kept = saved_by_block(per_token, work, layouts, tokens).everything
    assert kept == pytest.approx(tokens * (per_token.outside + per_token.entering + divided + last_input))


def test_parameters_of_gpt() -> None:
    """GPT-3 (Brown et al. 2020: 175.0 B) and GPT-2 XL (1.558 B, with 1024 positions)."""
    assert gpt_parameters(96, 12288, 50257, 2048) / 1e9 == pytest.approx(174.6, rel=1e-3)
    assert gpt_parameters(48, 1600, 50257, 1024) == 1_557_611_200


def kept(text: str, s=MEGATRON, work: Work = GPT3, seq_len: int = 2048) -> float:
    """Per token, in bytes."""
    layout = Layout.parse(text)
    tokens = layout.micro_batch_size * seq_len / layout.cp
    columns = Columns.of([layout])
    found = saved_by_block(
        s.per_token(work, seq_len),
        work,
        columns,
        tokens,
        regathers_inputs=(s is MEGATRON) | (columns.sp_regather > 0),
    )
    return float(found.saved[0]) / (layout.micro_batch_size * seq_len)


def test_activations_of_korthikanti_table_2() -> None:
    h, a, s, t = 12288, 96, 2048, 8
    assert kept("mb1-ga1") == pytest.approx(h * (34 + 5 * a * s / h))
    assert kept("tp8-mb1-ga1") == pytest.approx(h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert kept("tp8-sp-mb1-ga1") == pytest.approx(h / t * (34 + 5 * a * s / h))
    assert kept("tp8-mb1-ga1-attention") == pytest.approx(h * (10 + 24 / t))
    assert kept("tp8-sp-mb1-ga1-attention") == pytest.approx(34 * h / t)
    assert kept("mb1-ga1-full") == pytest.approx(2 * h)


def test_recomputing_attention_of_gpt_3_saves_70_percent() -> None:
    """Korthikanti et al. 2022, section 5: 5as/h = 80 against 34."""
    saving = 1 - kept("tp8-sp-mb1-ga1-attention") / kept("tp8-sp-mb1-ga1")
    assert saving == pytest.approx(80 / 114)


@pytest.mark.parametrize(
    ("h", "kv", "f", "a"), [(4096, 1024, 14336, 32), (512, 256, 1408, 8), (2048, 2048, 8192, 16)]
)
def test_activations_of_a_llama_block_to_the_byte(h: int, kv: int, f: int, a: int) -> None:
    work = of_shape(layers=4, hidden=h, ffn=f, heads=a, kv_heads=kv * a // h, vocabulary=1000)
    assert kept("mb2-ga1", EAGER, work) == 20 * h + 4 * kv + 8 * f + 4 * a + 8
    assert kept("mb2-ga1-attention", EAGER, work) == 20 * h + 4 * kv + 8 * f + 8
    assert kept("mb2-ga1-selective", EAGER, work) == 2 * (5 * h + 2 * kv + 2 * f) + 4 * a
    assert kept("mb2-ga1-linear", EAGER, work) == 4 * h + 4 * a
    assert kept("mb2-ga1-full", EAGER, work) == 2 * h
    assert kept("cp2-mb2-ga1", EAGER, work) == (kept("mb2-ga1", EAGER, work) + 4 * kv) / 2  # all keys


@pytest.mark.parametrize(
    ("text", "stages", "micro_batches"),
    [("mb2-ga4", 1, 1), ("pp4-1f1b-mb1-ga8", 1, 4), ("pp2-interleaved1f1b-v4-mb1-ga8", 4, 2.25)],
)
def test_some_recomputed_blocks_hold_their_share_of_the_activations(
    text: str, stages: int, micro_batches: float
) -> None:
    """On the first rank; the last blocks of a stage, which save everything, have freed it when the first ones
    run again. The first block of a stage, but of the whole first one, keeps its input in a receive buffer.
    """
    work = of_shape(layers=32, hidden=512, ffn=1408, heads=8, kv_heads=4, vocabulary=1000)
    tokens = 2048 * Layout.parse(text).micro_batch_size
    blocks = 32 // Layout.parse(text).pp
    each = 20 * 512 + 4 * 256 + 8 * 1408 + 4 * 8 + 8
    rest = {mode: kept(f"mb1-ga1-{mode}", EAGER, work) for mode in ("selective", "linear", "full")}

    def activations(mode: str) -> dict[str, float]:
        columns = Columns.of([Layout.parse(text + mode)])
        found = Liveness(
            Step(work, columns, engine_accounting("bf16"), 2048, Stages.even(32, columns))
        ).timeline()
        return {event: float(parts["activations"][0, 0]) for event, parts in found.items()}

    none = activations("")
    for mode, saved in rest.items():
        every = activations(f"-{mode}")
        for number in range(1, blocks // stages):
            freed = micro_batches * stages * number * tokens * (each - saved)
            freed += micro_batches * (stages - 1) * tokens * 2 * 512
            some = activations(f"-{mode}{number}")
            assert some["loss"] == none["loss"] - freed
            saving = (blocks // stages - number) * each
            run_again = {"full": each, "linear": each - saved + 2 * 512, "selective": each - saved + 4 * 512}
            again = run_again[mode] - saving
            assert some["backward of a block"] == none["backward of a block"] - freed + max(0, tokens * again)
            assert some["end of backward"] == every["end of backward"]


def test_sequence_parallel_here_keeps_gathered_inputs() -> None:
    work = of_shape(layers=4, hidden=512, ffn=1408, heads=8, kv_heads=4, vocabulary=1000)
    rest = 20 * 512 - 4 * 512 + 4 * 256 + 8 * 1408 + 4 * 8
    assert kept("tp2-sp-mb1-ga1", EAGER, work) == 4 * 512 + (rest + 8) / 2
    assert kept("tp2-sp-regather-mb1-ga1", EAGER, work) == (4 * 512 + rest + 8) / 2


def test_a_stack_regathers_by_itself_or_as_the_layout_says() -> None:
    layouts = Columns.of(
        [Layout.parse(text) for text in ("tp2-mb1-ga1", "tp2-sp-mb1-ga1", "tp2-sp-regather")]
    )
    ours, megatron = engine_accounting("bf16"), engine_accounting("bf16", regathers_inputs=True)
    assert ours.regathers(layouts).tolist() == [False, False, True]
    assert megatron.regathers(layouts).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("mb1-ga8", 1),
        ("pp4-gpipe-mb1-ga8", 8),
        ("pp4-1f1b-mb1-ga8", 4),
        ("pp4-1f1b-mb1-ga2", 2),
        ("pp4-interleaved1f1b-v2-mb1-ga8", 4 * (1 + 3 / 8)),
        ("pp4-loopedbfs-v2-mb1-ga8", 8),
        ("pp4-zbv-mb1-ga8", 4),
    ],
)
def test_micro_batches_in_flight(text: str, held: float) -> None:
    assert in_flight(Columns.of([Layout.parse(text)]))[0] == pytest.approx(held)


def test_columns_are_rows() -> None:
    texts = ["mb1-ga4", "tp2-sp-mb2-ga2-full", "cp2-tp2-pp2-1f1b-mb1-ga4-selective", "pp2-gpipe-mb1-ga8"]
    every = [Layout.parse(text) for text in texts]
    together = peak(GPT3, Columns.of(every), engine_accounting("bf16"), 2048).peak
    alone = [peak(GPT3, Columns.of([layout]), engine_accounting("bf16"), 2048).peak[0] for layout in every]
    assert np.allclose(together, alone)


@pytest.mark.parametrize("window", [10, 100, 10**6])
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_on_cuda_copies_the_keys_that_a_rank_sees(ranks: int, window: int) -> None:
    """Keys of both parts of a sequence on the fullest rank, and the output in the order of the kernel."""
    seq_len, seen = 512, []
    for rank in range(ranks):
        parts = spans(seq_len, Axis("cp", ranks, rank), "allgather")
        seen.append(sum(part.stop - max(0, part.start - window + 1) for part in parts))
    layouts, tokens = Columns.of([Layout.parse(f"cp{ranks}-mb3")]), 3 * seq_len / ranks
    work = replace(GPT3, cores=(replace(GPT3.cores[0], window=window),))
    held = {
        context: float(
            saved_by_block(EAGER.per_token(work, seq_len), work, layouts, tokens, context=context).saved[0]
        )
        for context in ("sent on", "copied", "gathered")
    }
    per_key, own = 2 * 2 * 12288, seq_len / ranks
    assert held["gathered"] - held["sent on"] == 3 * (seq_len - own) * per_key
    assert held["copied"] - held["sent on"] == 3 * ((max(seen) - own) * per_key + own * 2 * 12288)
    flex = replace(work, cores=(replace(work.cores[0], flash=False),))
    kept = saved_by_block(EAGER.per_token(flex, seq_len), flex, layouts, tokens, context="copied").saved
    assert float(kept[0]) == held["gathered"]
