"""The jobs that memory_dryrun.py compares: small ones, drawn with a fixed seed, and large models."""

import random
from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig, Gemma2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from meshtune.dryrun.world import Job
from meshtune.layout import Layout
from meshtune.plan.models import known_config
from meshtune.train.model import LoraSpec, ModelSpec, OptimizerSpec

SEED = 17
FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma2": Gemma2Config}
TECHNIQUES = (  # each is drawn twice
    "", "dp2", "zero1x2", "zero2x2", "zero3x2", "zero3x8", "dp2-zero2x2", "dp2-zero3x2",
    "tp2", "tp2-sp", "tp2-sp-regather", "tp4-sp", "zero3x2-tp2-sp", "zero1x2-tp2-sp",
    "cp2", "ulysses2", "zero3x2-cp2",
    "pp2-1f1b", "pp4-1f1b", "pp2-gpipe", "pp2-interleaved1f1b-v2", "pp2-zb", "pp2-zbv", "pp2-dualpipev",
    "dp2-pp2-1f1b", "zero1x2-pp2-1f1b", "zero3x2-pp2-1f1b", "tp2-sp-pp2-1f1b",
)  # fmt: skip
RECOMPUTATIONS = ("", "", "-attention", "-selective", "-full", "-selective2", "-full2")


def small_cases() -> Iterator[tuple[str, Job]]:
    """(Name, job) of each small case."""
    draw = random.Random(SEED)
    for number, technique in enumerate(2 * TECHNIQUES):
        family = draw.choice([*FAMILIES])
        pipeline = "pp" in technique
        deep = "pp4" in technique or "v2" in technique
        # No more of a pipeline than are simulated, and held as in a longer step.
        micro_batches = (8 if "pp4" in technique else 4) if pipeline else draw.choice((1, 2, 4))
        batch = f"mb{draw.choice((1, 2, 3))}-ga{micro_batches}"
        few = any(word in technique for word in ("regather", "zb", "dualpipev"))  # which refuse the others
        modes = RECOMPUTATIONS[:3] if few else RECOMPUTATIONS
        layout = f"{technique}-{batch}".lstrip("-") + draw.choice(modes)
        precision = draw.choice(("bf16", "bf16", "fp32", "bf16-pure"))
        lora, packed = draw.random() < 0.25, draw.random() < 0.4
        kernels = "cpu" if precision == "fp32" else draw.choice(("cpu", "cuda"))
        seq_len = draw.choice((512, 1024, 2048))
        words = [f"{number:02}", family, precision, kernels, layout, *(["lora"] if lora else [])]
        yield (
            " ".join([*words, *(["packed"] if packed else [])]),
            Job(
                spec=ModelSpec(
                    source=small_model(draw, family, blocks=8 if deep else 4), init="random",
                    kernels=kernels, precision=precision,
                    lora=LoraSpec(r=8) if lora else None,
                ),
                optimizer=OptimizerSpec(),
                layout=Layout.parse(layout),
                seq_len=seq_len,
                documents=(seq_len * 5 // 8, seq_len * 3 // 8) if packed else (seq_len,),
            ),
        )  # fmt: skip


def small_model(draw: random.Random, family: str, *, blocks: int) -> PretrainedConfig:
    """A shape that 4 tensor ranks and 4 pipeline stages divide."""
    heads, head_dim = draw.choice((8, 16)), draw.choice((32, 64))
    hidden = heads * head_dim
    shape: dict[str, Any] = {
        "vocab_size": draw.choice((2048, 8192, 32000)), "hidden_size": hidden,
        "intermediate_size": draw.choice((2, 3, 4)) * hidden, "num_hidden_layers": blocks,
        "num_attention_heads": heads, "num_key_value_heads": draw.choice((4, 8)), "head_dim": head_dim,
        "max_position_embeddings": 4096, "tie_word_embeddings": draw.random() < 0.3,
    }  # fmt: skip
    return FAMILIES[family](**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)


LARGE_LAYOUTS = {
    "llama-3.1-8b": (
        "zero3x8-mb1-ga2", "zero3x8-mb2-ga1-selective", "zero3x8-mb2-ga2-full", "zero3x4-cp2-mb2-ga1",
        "zero3x4-tp2-sp-mb2-ga2",
    ),
    "llama-3.1-70b": ("tp8-sp-zero3x4-mb4-ga1-full", "zero3x64-mb1-ga1-full"),
    "llama-3.1-405b": ("tp8-sp-zero3x8-pp8-1f1b-mb1-ga8", "tp8-sp-zero3x64-mb1-ga1-full"),
    "qwen3-32b": ("zero3x16-mb1-ga1-full", "tp8-sp-zero3x2-mb2-ga2-selective"),
    "gemma-2-27b": ("zero3x16-mb1-ga1-full", "tp8-sp-zero3x2-mb2-ga2-selective"),
    "olmo-2-32b": ("zero3x16-mb1-ga1-full", "tp8-sp-zero3x2-mb2-ga2-selective"),
}  # fmt: skip


def large_cases() -> Iterator[tuple[str, Job]]:
    """(Name, job) of each large case."""
    for model, layouts in LARGE_LAYOUTS.items():
        fields = dict(known_config(model) or {})
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        seq_len = min(8192, config.max_position_embeddings)
        for layout in layouts:
            spec = ModelSpec(source=config, init="random", kernels="cuda")
            yield f"{model} {layout}", Job(
                spec=spec, optimizer=OptimizerSpec(), layout=Layout.parse(layout), seq_len=seq_len,
                documents=(seq_len,),
            )  # fmt: skip


SMALL, LARGE = dict(small_cases()), dict(large_cases())
# Small cases whose peak is right and one of its categories is more than 2 % of it off.
CATEGORIES_BEYOND = {
    # two events within 0.04 % of each other: the loss, which the dry run finds, and the backward of a block
    "17 gemma2 bf16 cuda pp2-1f1b-mb1-ga4-selective2 lora",
    # the update finds the first weight's gradient freed already, and two moments' temporaries
    "24 qwen3 bf16-pure cpu dp2-pp2-1f1b-mb2-ga4 packed",
    # one copy of a chunk's logits less than planned, beside activations that sp gathered
    "41 llama fp32 cpu zero1x2-tp2-sp-mb2-ga1-full2 lora",
}
