"""What tests train with: a small tokenizer, and rows of very unequal lengths."""

import json
import random
from pathlib import Path
from typing import Any


def make_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer with bos, eos and pad, and no chat template, as base models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special, alphabet = ["<pad>", "<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def make_rows(number: int, seed: int = 0) -> list[dict[str, str]]:
    """Questions and answers of very unequal lengths."""
    draw = random.Random(seed)
    words = ["red", "green", "blue", "apple", "stone", "river", "seven", "eight", "window", "paper"]
    return [
        {
            "prompt": f"Say {draw.choice(words)} {draw.randint(0, 99)}"
            + " please" * draw.choice((0, 0, 1, 9)),
            "completion": " ".join(draw.choice(words) for _ in range(draw.choice((1, 2, 3, 25)))),
        }
        for _ in range(number)
    ]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
