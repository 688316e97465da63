"""Answers from a model: greedy by default, several prompts at a time.

Generation keeps keys and values of earlier tokens, which training's attention does not; so the model answers
with its own scaled-dot-product attention and is handed back as it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

PROMPTS_AT_ONCE = 64


@contextmanager
def answering(model: PreTrainedModel) -> Iterator[None]:
    """The model in evaluation mode with an attention that can cache; afterwards as it was."""
    attention, training = str(model.config._attn_implementation), model.training
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # a family without it
        model.set_attn_implementation("eager")
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.train(training)


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    keep_special: bool = False,
) -> list[str]:
    """The text that follows each prompt (token ids), up to a stop token or `max_new_tokens`.

    temperature 0 is greedy. Prompts of similar length share a batch; the order of the answers is the
    prompts'.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stop_ids[0] if stop_ids else 0)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    # What is left out would be taken from the model's own generation settings.
    sampling |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, pad_token_id=pad, eos_token_id=list(stop_ids) or None, **sampling
    )
    found = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with answering(model):
        for start in range(0, len(order), PROMPTS_AT_ONCE):
            chosen = order[start : start + PROMPTS_AT_ONCE]
            width = max(len(prompts[i]) for i in chosen)
            rows = [[pad] * (width - len(prompts[i])) + list(prompts[i]) for i in chosen]
            mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen]
            generate: Any = model.generate  # declared in a way that types can't follow
            output = generate(
                torch.tensor(rows, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                generation_config=settings,
            )
            for i, row in zip(chosen, output[:, width:].tolist(), strict=True):
                end = next((n for n, token in enumerate(row) if token in stop_ids), len(row))
                found[i] = str(tokenizer.decode(row[:end], skip_special_tokens=not keep_special))
    return found
