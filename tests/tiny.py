"""Make what tests train with: a small tokenizer, and rows of very unequal lengths."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def make_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer with bos, eos and pad, and no chat template, as base models have.

    texts: it is trained on them. vocabulary: its tokens at most.
    """
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
    """`number` rows {"prompt", "completion"} of very unequal lengths, the same for the same seed."""
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


def make_llama(**changes: Any) -> Any:
    """A tiny Llama with random weights, the same at each making. changes: of its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes | changes))


def make_folder(folder: Path) -> Path:
    """Write a tiny random Llama with its tokenizer (`model/`), train.jsonl, test.jsonl; returns `folder`."""
    train, test = make_rows(120), make_rows(20, seed=1)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "test.jsonl", test)
    tokenizer = make_tokenizer([f"{row['prompt']}\n{row['completion']}" for row in train], 300)
    tokenizer.save_pretrained(folder / "model")
    make_llama().save_pretrained(folder / "model")
    return folder


def short_run(folder: Path, cache: Path, output: Path) -> list[str]:
    """section.key=value of a short fp32 run on what `make_folder` wrote into `folder`."""
    return [
        f"model.name={folder / 'model'}", f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'test.jsonl'}", f"data.cache={cache}", "data.seq_len=128",
        "train.global_batch_size=4", "train.max_steps=4", "train.precision=fp32",
        "train.learning_rate=1e-3", "log.to=[jsonl]", "checkpoint.every=0", f"output={output}",
    ]  # fmt: skip


def documents(*, seed: int, vocabulary: int, rows: int = 2, width: int = 32) -> Any:
    """A MicroBatch of random tokens in packed documents, with about 90 % or 5 % of a row labelled, in turn.

    vocabulary: tokens are from 3 to below it. rows, width: shape of the micro-batch; 4 columns are padding.
    """
    import numpy as np

    from meshtune.data.batch import micro_batch
    from meshtune.data.pack import LABELLED

    draw = np.random.default_rng(seed)
    made = []
    for row in range(rows):
        lengths = [int(n) for n in draw.multinomial(width - 4, [0.5, 0.3, 0.2])]
        share = (0.9, 0.05)[(seed + row) % 2]
        made.append([])
        for length in (n for n in lengths if n):
            tokens = draw.integers(3, vocabulary, length).astype(np.uint32)
            tokens[1:] |= np.where(draw.random(length - 1) < share, LABELLED, 0).astype(np.uint32)
            made[-1].append(tokens)
    return micro_batch(made, width)


def positions_of(documents: Any, seq: int) -> Any:
    """Position of each token in its document, of rows padded to `seq` tokens."""
    import torch

    rows = [[torch.arange(length) for length in (*row, seq - sum(row))] for row in documents]
    return torch.stack(list(map(torch.cat, rows)))


def packed(documents: Any, seq: int, shares: Sequence[float], vocabulary: int = 256) -> Any:
    """A MicroBatch of random tokens in rows of packed documents, each padded to `seq` tokens.

    documents: lengths in each row. shares: of the tokens of each row that are labelled; 0 is one of them.
    """
    import torch

    from meshtune.data.batch import IGNORE, MicroBatch

    torch.manual_seed(3)
    ids = torch.randint(3, vocabulary, (len(documents), seq))
    positions = positions_of(documents, seq)
    drawn = torch.rand(ids.shape) < torch.tensor(shares)[:, None]
    labels = torch.where(drawn, torch.randint(3, vocabulary, ids.shape), IGNORE)
    for row, lengths in enumerate(documents):
        labels[row, 7] = labels[row, 7] if shares[row] else 42
        labels[row, sum(lengths) :] = IGNORE
    tokens = sum(map(sum, documents))
    return MicroBatch(ids, labels, positions, documents, tokens, int((labels != IGNORE).sum()))
