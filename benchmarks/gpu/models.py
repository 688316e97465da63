"""The models of the check, the tokens of a step, and rows for `meshtune train`."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LLAMA = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
ONE_B = _LLAMA | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
EIGHT_B = _LLAMA | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
MIXTURE = {  # four blocks of Qwen3-30B-A3B, with fewer tokens: 2.4 B parameters of experts
    "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 32768, "tie_word_embeddings": True,
}  # fmt: skip
TINY_MIXTURE = TINY | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "head_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """Sizes of everything that the check runs."""

    one: dict[str, Any]  # arguments of a configuration, LlamaConfig without model_type: the 1B model
    eight: dict[str, Any]  # of the 8B model
    mixture: dict[str, Any]  # of a mixture of experts
    seq_len: int
    steps: int  # that are timed
    tiny: bool


FULL = Scale(ONE_B, EIGHT_B, MIXTURE, 4096, 10, tiny=False)
SMALL = Scale(TINY, TINY, TINY_MIXTURE, 64, 3, tiny=True)


def write_folder(folder: Path, shape: dict[str, Any], seq_len: int) -> Path:
    """Write config.json and a tokenizer of words to `folder` and return it; no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, words_of(shape))}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    shape = {"model_type": "llama", **shape}
    AutoConfig.for_model(**shape, max_position_embeddings=seq_len).save_pretrained(folder)
    return folder


def words_of(shape: dict[str, Any]) -> int:
    """Words of the tokenizer: as many as a quick file of them has."""
    return min(20000, shape["vocab_size"])


def write_rows(file: Path, tokens: int, words: int, longest: int) -> Path:
    """Write prompts and completions of unequal lengths (log-normal), `tokens` in all or a few more."""
    draw, total = random.Random(0), 0
    with file.open("w") as out:
        while total < tokens:
            asked, answered = (min(longest, int(draw.lognormvariate(5, 1)) + 1) for _ in range(2))
            prompt, completion = (
                " ".join(f"w{draw.randrange(3, words)}" for _ in range(n)) for n in (asked, answered)
            )
            out.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
            total += asked + answered
    return file


def write_weights(folder: Path) -> None:
    """Write random bf16 weights of the model in `folder`, drawn on the GPU where there is one, unless they
    are there.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if list(folder.glob("*.safetensors")):
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
