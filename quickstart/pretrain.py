"""Pretrains the quickstart's base model: a tokenizer and a small Llama, on `make_data.documents`.

    python quickstart/pretrain.py             writes base/ beside this file

The result continues such text and follows no instruction; fine-tuning teaches that.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from make_data import SEED, arguments_of_tasks, documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORD_TOKENS = 141  # most frequent words of the text, one token each; all other words are spelled
SPECIAL = ["<pad>", "<bos>", "<eos>"]  # ids 0, 1, 2
PAD, BOS, EOS = range(3)
HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 128, 4, 4, 2, 256
BLOCK, BATCH, STEPS = 256, 8, 2800  # tokens per row, rows per step, steps: 5.7 M tokens
LEARNING_RATE, WARMUP, WEIGHT_DECAY, BETAS, CLIP = 3e-3, 100, 0.1, (0.9, 0.95), 1.0


def is_frame(word: str, spelled: set[str]) -> bool:
    """True for a word of the sentences around the tasks' arguments, which are `spelled`."""
    return word.isalpha() and len(word) > 1 and not {word, word.lower()} & spelled


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer without merges, with the most frequent words as whole tokens.

    A word is one token if the vocabulary has it, else one token per byte. So the frame of a sentence is
    short, and its argument, which is never in the vocabulary, is spelled letter by letter.
    """
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "".join(islice(documents(SEED), 20_000))
    spelled = arguments_of_tasks()
    counts = Counter(piece for piece, _ in split.pre_tokenize_str(text))  # "Ġ": a space before it
    words = [piece for piece, _ in counts.most_common() if is_frame(piece.lstrip("Ġ"), spelled)]
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + words[:WORD_TOKENS]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        model_max_length=BLOCK,
    )


def make_model(vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=FFN,
        max_position_embeddings=BLOCK,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[torch.Tensor]:
    """Yield the text's tokens, an <eos> after each document, as ids [BATCH, BLOCK]."""
    stream = documents(SEED)
    ids: list[int] = []
    while True:
        while len(ids) < BATCH * BLOCK:
            for document in tokenizer(list(islice(stream, 200)))["input_ids"]:
                ids += [*document, EOS]
        yield torch.tensor(ids[: BATCH * BLOCK]).view(BATCH, BLOCK)
        ids = ids[BATCH * BLOCK :]


def learning_rate(step: int) -> float:
    """Learning rate at a step: linear warm-up, then cosine decay to a tenth."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    progress = (step - WARMUP) / (STEPS - WARMUP)
    return LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def pretrain(folder: Path) -> float:
    """Train from random weights, write the Hugging Face folder, return the mean loss of the last 50 steps."""
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    losses: list[float] = []
    started = time.monotonic()
    for step, ids in enumerate(islice(batches(tokenizer), STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            recent = sum(losses[-50:]) / 50
            print(f"step {step + 1:5d}  loss {recent:.4f}  {time.monotonic() - started:6.0f} s", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(losses[-50:]) / 50


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "base"
    print(f"final loss {pretrain(target):.4f}, written to {target}")
