"""The quickstart's data through families that are built unlike Llama: train, evaluate, export, load again."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import cases
from families import COMMON, EXPERTS, RECURRENT
from multimodal import MULTIMODAL
from transformers import AutoConfig, AutoTokenizer, GptOssConfig, PretrainedConfig

from meshtune import config
from meshtune.api import build
from meshtune.data.batch import micro_batch
from meshtune.model.anatomy import auto_class
from meshtune.model.body import body_forward, head_only
from meshtune.train import loop

QUICKSTART = Path(__file__).parents[2] / "quickstart"


def gpt_oss(**changes: int) -> PretrainedConfig:
    return GptOssConfig(**COMMON | EXPERTS | {"head_dim": 16, "sliding_window": 8} | changes)


FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "gpt_oss": gpt_oss,
    "qwen3_next": RECURRENT["qwen3_next"],
    "gemma3": MULTIMODAL["gemma3"],
    "mamba2": RECURRENT["mamba2"],
    "granitemoehybrid": RECURRENT["granitemoehybrid"],
}


@pytest.mark.parametrize("family", cases(FAMILIES, ci=1))
def test_a_family_learns_the_quickstart_and_is_loaded_with_its_logits(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "base")
    known = FAMILIES[family](vocab_size=len(tokenizer), initializer_range=0.02)
    base = auto_class(known).from_config(known)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    words = [
        f"model.name={tmp_path / 'base'}", f"data.train={QUICKSTART / 'train.jsonl'}",
        f"data.eval={QUICKSTART / 'test.jsonl'}", f"data.cache={tmp_path / 'cache'}", "data.seq_len=128",
        "train.max_steps=8", "train.global_batch_size=2", "train.learning_rate=3e-3", "train.precision=fp32",
        "eval.every=8", "eval.samples=1", "eval.exact_match=2", "eval.max_new_tokens=4",
        f"output={tmp_path / 'run'}",
    ]  # fmt: skip
    run = build.build(config.load(None, words))
    loop.train(run)
    losses = [row["loss"] for row in run.folder.rows("train")]
    assert losses[-1] < 0.97 * losses[0]
    assert run.folder.rows("eval")

    loaded = auto_class(AutoConfig.from_pretrained(run.folder.model)).from_pretrained(
        run.folder.model, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.arange(5, 70)
    parallel = run.passes.parallel
    trained, batch = parallel.stages[0].model.eval(), micro_batch([[ids.numpy().astype(np.uint32)]])
    with torch.no_grad():
        hidden = body_forward(trained, parallel.anatomy, batch)[0]
        with head_only(trained, parallel.anatomy) as logits_of:
            ours = logits_of(hidden)
        theirs = loaded.eval()(input_ids=ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    towers = {name: value for name, value in base.state_dict().items() if "vision" in name}
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in towers.items())
    assert bool(towers) == (family == "gemma3")
