"""Small byte-level tokenizers, made on the spot."""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = [
    "Hello there, how are you today? I am fine, thank you.\n\nThe answer is 42.\n",
    "You are a kind helper. assistant user system What is two plus two? It is four.\n",
]


def make_tokenizer(*special: str, lines: bool = False, **keywords: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with <s>, </s> and the special tokens given; it adds none by itself.

    lines: whether line breaks in a row are one token, as in Qwen's and Llama 3's.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if lines:
        split = pre_tokenizers.Split(Regex(r"[\r\n]+| ?[^\s]+|\s+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS * 4, trainer)
    keywords = {"bos_token": "<s>", "eos_token": "</s>", **keywords}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=list(special), **keywords
    )
