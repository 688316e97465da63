"""Answers from a model: greedy by default, several prompts at a time.

answers         one device: Hugging Face's generation, which keeps keys and values of earlier tokens.
                Training's attention does not; so the model answers with its own scaled-dot-product
                attention and is handed back as it was.
answers_of_all  many ranks, in any layout: the very passes of training, one for each new token. Nothing is
                kept between them: slower, and meant for the few prompts of an evaluation.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from meshtune.data.loader import MicroBatch, micro_batch
from meshtune.model.anatomy import Anatomy
from meshtune.parallel import context
from meshtune.parallel.mesh import World
from meshtune.parallel.tensor import vocabulary_of
from meshtune.train.loss import headed
from meshtune.train.step import Passes

PROMPTS_AT_ONCE = 64


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def answering(model: PreTrainedModel) -> Iterator[None]:
    """The model in evaluation mode with an attention that can cache; afterwards as it was."""
    attention = str(model.config._attn_implementation)
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # a family without it
        model.set_attn_implementation("eager")
    try:
        with evaluating(model):
            yield
    finally:
        model.set_attn_implementation(attention)


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


def answers_of_all(
    passes: Passes,
    model: nn.Module,
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    multiple: int,
    rows: int,
) -> list[str]:
    """`answers`, greedy, by all ranks of any layout together; each rank gets all of them.

    multiple: of what a pass's width is a multiple. rows: prompts of a pass, as a micro-batch of training has.
    Data ranks take turns of prompts. All ranks make the same number of passes, since those that share
    parameters gather them together: one that has nothing left to ask asks again and forgets the answer.
    """
    own = list(range(world.data_rank, len(prompts), world.data_ranks))
    turns = -(-len(prompts) // (world.data_ranks * rows))
    found: dict[int, list[int]] = {}
    with evaluating(model):
        for turn in range(turns):
            chosen = own[turn * rows : (turn + 1) * rows]
            texts = [list(prompts[i]) for i in chosen] or [[0]]
            going = [bool(chosen)] * len(texts)
            for _ in range(max_new_tokens):
                (left,) = world.total(sum(going))
                if not left:
                    break
                for i, token in enumerate(_next_tokens(passes, world, texts, multiple)):
                    if going[i]:
                        texts[i].append(token)
                        going[i] = token not in stop_ids
            found |= {i: row[len(prompts[i]) :] for i, row in zip(chosen, texts, strict=False)}
    together = {i: ids for part in world.gather(found) for i, ids in part.items()}
    ended = [[token for token in together[i] if token not in stop_ids] for i in range(len(prompts))]
    return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in ended]


def _next_tokens(passes: Passes, world: World, rows: list[list[int]], multiple: int) -> list[int]:
    """The likeliest next token of each row, on every rank of this data rank."""
    asked = micro_batch([[np.array(row, np.uint32)] for row in rows], multiple=multiple)
    lasts = torch.tensor([len(row) - 1 for row in rows], device=world.device)
    found = passes.forward(
        [asked], partial(likeliest, world=world, lasts=lasts, width=asked.input_ids.shape[1])
    )
    tokens = found[0] if found else torch.zeros_like(lasts)
    if world.pp.size > 1:  # only the last stage's rank knows
        dist.all_reduce(tokens, group=world.pp.group)
    return tokens.tolist()


def likeliest(
    model: nn.Module,
    anatomy: Anatomy,
    hidden: Tensor,
    _: MicroBatch,
    *,
    world: World,
    lasts: Tensor,
    width: int,
) -> Tensor:
    """[rows]: the likeliest token after column lasts[row] of `width`, on every tp and cp rank."""
    here, rows = lasts, torch.arange(len(lasts), device=hidden.device)
    if world.cp.size > 1:
        columns = context.columns(width, world.cp, world.layout.cp_method).to(hidden.device)
        matches = columns[None, :] == lasts[:, None]
        here = matches.int().argmax(1)
        states = hidden[rows, here] * matches.any(1, keepdim=True)
        dist.all_reduce(states, group=world.cp.group)
    else:
        states = hidden[rows, here]
    with headed(model, anatomy) as logits_of:
        # Of a model that diverged some token all the same, and the same on all ranks.
        values, tokens = logits_of(states).float().nan_to_num(nan=-math.inf).max(-1)
    vocabulary = vocabulary_of(model.get_submodule(anatomy.head))
    if vocabulary is None:
        return tokens
    best = values.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group=world.tp.group)
    tokens = torch.where(values == best, tokens + vocabulary.start, torch.iinfo(tokens.dtype).max)
    dist.all_reduce(tokens, dist.ReduceOp.MIN, group=world.tp.group)
    return tokens
