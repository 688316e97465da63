"""Generate answers to prompts: greedy by default, several prompts at a time, or one as its tokens come.

One rank uses Hugging Face's generation, with a KV cache. Training's attention keeps no cache, so the model
generates with scaled-dot-product attention and gets its own back. Several ranks, in any layout, run the
forward pass of training once for each new token, without a cache: slower, and meant for the few prompts of an
evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from meshtune.attention import flash
from meshtune.compat import is_compiled
from meshtune.data.batch import MicroBatch, micro_batch
from meshtune.errors import UserError
from meshtune.model.anatomy import anatomy
from meshtune.model.body import head_only
from meshtune.model.files import context_of
from meshtune.objectives import PROMPTS_AT_ONCE
from meshtune.parallel import context
from meshtune.parallel.tensor import vocabulary_of

if TYPE_CHECKING:
    from meshtune.model.anatomy import Anatomy
    from meshtune.parallel.apply import Parallel
    from meshtune.parallel.mesh import World


LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token. Raises UserError for values that choose none or would have no effect."""

    temperature: float = 0.0  # 0: the likeliest token
    top_p: float = 1.0  # draw from the fewest tokens that have this probability together
    seed: int | None = None  # of the drawing; None: another one each time

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise UserError(problems)

    def _problems(self) -> Iterator[str]:
        if not 0 <= self.temperature < math.inf:
            yield f"temperature {self.temperature:g} is not a temperature; use 0 or more."
        elif 0 < self.temperature < LOWEST_TEMPERATURE:
            yield (
                f"temperature {self.temperature:g} is below {LOWEST_TEMPERATURE:g}, and logits divided by it "
                "would be infinite; use 0 for the likeliest token."
            )
        if not 0 < self.top_p <= 1:
            yield f"top-p {self.top_p:g} is not a probability; use more than 0, at most 1."
        elif self.top_p < 1 and not self.temperature:
            yield f"top-p {self.top_p:g} has no effect at temperature 0; set a temperature, or leave it out."
        if self.seed is not None and not 0 <= self.seed < 2**63:
            yield f"seed {self.seed} is not a seed; use a whole number from 0 to 2^63 - 1."
        elif self.seed is not None and not self.temperature:
            yield f"seed {self.seed} has no effect at temperature 0; set a temperature, or leave it out."

    @contextmanager
    def seeded(self, device: torch.device) -> Iterator[None]:
        """Draw from `seed` in the block, and leave the random numbers of others as they were."""
        if self.seed is None:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield


GREEDY = Sampling()


class TextStream(BaseStreamer):
    """Pass an answer's text to `write` while its tokens are generated.

    A character is passed on once all its tokens are there. The text is that of all tokens decoded together,
    since a token's text may depend on those before it. stopped: asked after each token; true ends the answer
    by a KeyboardInterrupt.
    """

    def __init__(self, write: Callable[[str], object], stopped: Callable[[], object] = lambda: False) -> None:
        self.write, self.stopped = write, stopped
        self.ids: list[int] = []  # of the answer so far, without a stop token
        self.text = ""  # passed on so far
        self._prompt_passed = False

    def begin(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        """Take an answer's tokens from here on."""
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self.ids, self.text, self._prompt_passed = [], "", False

    def put(self, value: Tensor) -> None:
        """Take the prompt, which transformers passes first, or the next token."""
        if not self._prompt_passed:
            self._prompt_passed = True
        elif (token := int(value)) not in self._stop_ids:
            self.ids.append(token)
            self._pass_on(whole=False)
        if self.stopped():
            raise KeyboardInterrupt

    def end(self) -> None:
        """Pass on what is left: half a character, where the answer was cut in it."""
        self._pass_on(whole=True)

    def _pass_on(self, *, whole: bool) -> None:
        text = str(self._tokenizer.decode(self.ids, skip_special_tokens=True))
        if whole or not text.endswith("\ufffd"):
            new, self.text = text[len(self.text) :], text
            if new:
                self.write(new)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run compiled blocks of a model without the compiler; a model without any isn't changed.

    Every width that generation passes through would be compiled anew, until torch reaches its limit of
    recompilations and never compiles these blocks again, in training neither.
    """
    if not is_compiled(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """Put a model in evaluation mode with an attention that has a KV cache, by torch's own kernels; restore
    all afterwards.
    """
    attention = str(model.config._attn_implementation)
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # a family without it
        model.set_attn_implementation("eager")
    try:
        with evaluating(model), flash.built_in():
            yield
    finally:
        model.set_attn_implementation(attention)


def decoded(tokenizer: PreTrainedTokenizerBase, new_ids: Sequence[Sequence[int]]) -> list[str]:
    """The text of each answer, without special tokens."""
    return [str(tokenizer.decode([*ids], skip_special_tokens=True)) for ids in new_ids]


def longest_answers(parallel: Parallel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[int]:
    """Tokens that the answer to each prompt may have: fewer than `max_new_tokens` where positions end."""
    context = context_of(parallel.stages[0].model.config, parallel.anatomy.first_position) or math.inf
    return [int(max(0, min(max_new_tokens, context - len(prompt)))) for prompt in prompts]


def answer_ids(
    parallel: Parallel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling = GREEDY,
    stream: TextStream | None = None,
    advance: Callable[..., object] = lambda **_: None,
) -> list[list[int]]:
    """The tokens that follow each prompt (token ids), in their order, up to a stop token, which is left out,
    or `max_new_tokens` tokens, or fewer where the model's positions end. All ranks call it with the same
    prompts, and each gets all answers.

    sampling: beyond greedy with one rank only. stream: gets the text of the only prompt's answer as it is
    generated. advance: called by every rank at each new token, with the tokens `done`, those of answers that
    ended counted up to their limit, and the `total` of all limits.
    """
    limits = longest_answers(parallel, prompts, max_new_tokens)
    if stream:
        stream.begin(tokenizer, stop_ids)
    with uncompiled(parallel.modules):
        # transformers' generate counts positions from 0, which is not where every family begins.
        cached = parallel.world.size == 1 and not parallel.anatomy.first_position
        if sampling.temperature and not cached:
            raise UserError("Tokens are sampled only by one rank with a KV cache; set the temperature to 0.")
        if cached:
            with sampling.seeded(parallel.world.device):
                return cached_answers(
                    parallel.stages[0].model, tokenizer, prompts, limits,
                    stop_ids=stop_ids, sampling=sampling, stream=stream, advance=advance,
                )  # fmt: skip
        return forward_answers(parallel, prompts, limits, stop_ids=stop_ids, stream=stream, advance=advance)


@torch.no_grad()
def cached_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    stop_ids: Sequence[int],
    sampling: Sampling = GREEDY,
    stream: TextStream | None = None,
    advance: Callable[..., object] = lambda **_: None,
) -> list[list[int]]:
    """The new tokens after each prompt up to its first stop token, which is left out, by a whole model with a
    KV cache; of each prompt at most its limit.

    Prompts of one limit and similar length share a batch, of at most PROMPTS_AT_ONCE; the order of the
    answers is the prompts'. The tokenizer only gives the padding token. stream: see `answers`.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stop_ids[0] if stop_ids else 0)
    choice: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        choice = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": sampling.top_p}
    # What is left out would be taken from the model's own generation settings.
    choice |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    new_ids: list[list[int]] = [[] for _ in prompts]
    done = width = 0

    def unfinished(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # a stopping criterion: none is met
        advance(done=done + ids[:, width:].numel(), total=sum(limits))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    wanted = [number for number, limit in enumerate(limits) if limit]
    order = sorted(wanted, key=lambda number: (limits[number], len(prompts[number])))
    with generating(model):
        for chosen in _batches(order, prompts, limits, padded=not anatomy(model).mixers):
            width = max(len(prompts[i]) for i in chosen)
            rows = [[pad] * (width - len(prompts[i])) + list(prompts[i]) for i in chosen]
            mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen]
            generate: Any = model.generate  # declared in a way that types can't follow
            output = generate(
                torch.tensor(rows, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                generation_config=GenerationConfig(
                    max_new_tokens=limits[chosen[0]], pad_token_id=pad, eos_token_id=list(stop_ids) or None,
                    **choice,
                ),
                stopping_criteria=StoppingCriteriaList([unfinished]),  # pyright: ignore[reportArgumentType]
                streamer=stream,
            )  # fmt: skip
            for i, row in zip(chosen, output[:, width:].tolist(), strict=True):
                end = next((n for n, token in enumerate(row) if token in stop_ids), len(row))
                new_ids[i] = row[:end]
            done += sum(limits[i] for i in chosen)
    return new_ids


def _batches(
    order: Sequence[int], prompts: Sequence[Sequence[int]], limits: Sequence[int], *, padded: bool
) -> Iterator[Sequence[int]]:
    """Yield the numbers of prompts of one limit and similar length, at most PROMPTS_AT_ONCE; unless `padded`,
    of equal length: a recurrent layer's state would begin with the padding.
    """
    for _, run in groupby(order, lambda number: (limits[number], padded or len(prompts[number]))):
        numbers = list(run)
        for start in range(0, len(numbers), PROMPTS_AT_ONCE):
            yield numbers[start : start + PROMPTS_AT_ONCE]


def forward_answers(
    parallel: Parallel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    stop_ids: Sequence[int],
    stream: TextStream | None = None,
    advance: Callable[..., object] = lambda **_: None,
) -> list[list[int]]:
    """The new tokens after each prompt up to its first stop token, which is left out, and at most its limit,
    greedily by all ranks of any layout together; every rank passes all prompts and gets all answers, in their
    order.

    Data ranks take turns of a prompt for each of a micro-batch's rows. All ranks run the same number of
    forward passes, since those that share parameters gather them together: a rank without a prompt left runs
    a dummy prompt and drops the answer. stream: see `answers`.
    """
    world, rows = parallel.world, parallel.world.layout.micro_batch_size
    rank_prompts = list(range(world.data_rank, len(prompts), world.data_ranks))
    turns = -(-len(prompts) // (world.data_ranks * rows))
    rank_ids: dict[int, list[int]] = {}
    if stream:
        stream.put(torch.tensor(prompts[0]))
    with evaluating(parallel.modules):
        for turn in range(turns):
            chosen = rank_prompts[turn * rows : (turn + 1) * rows]
            texts = [list(prompts[i]) for i in chosen] or [[0]]
            left = [limits[i] for i in chosen] or [0]  # tokens that each answer may still have
            first = turn * rows * world.data_ranks
            turn_limits = limits[first : first + rows * world.data_ranks]
            passes = 0
            while world.sum_over_ranks(sum(map(bool, left)))[0]:
                done = sum(limits[:first]) + sum(min(passes, limit) for limit in turn_limits)
                advance(done=done, total=sum(limits))
                passes += 1
                for i, token in enumerate(_next_tokens(parallel, texts)):
                    if left[i]:
                        texts[i].append(token)
                        left[i] = left[i] - 1 if token not in stop_ids else 0
                        if stream:
                            stream.put(torch.tensor(token))
            rank_ids |= {i: row[len(prompts[i]) :] for i, row in zip(chosen, texts, strict=False)}
    if stream:
        stream.end()
    all_ids = {i: ids for part in world.all_gather_object(rank_ids) for i, ids in part.items()}
    return [[token for token in all_ids[i] if token not in stop_ids] for i in range(len(prompts))]


def _next_tokens(parallel: Parallel, rows: list[list[int]]) -> list[int]:
    """The likeliest next token of each row, on every rank of this data rank.

    rows: token ids so far, of any lengths. A collective of all ranks that share parameters.
    """
    world = parallel.world
    batch = micro_batch([[np.array(row, np.uint32)] for row in rows], multiple=parallel.width_multiple)
    lasts = torch.tensor([len(row) - 1 for row in rows], device=world.device)
    next_token = partial(likeliest, world=world, lasts=lasts, width=batch.input_ids.shape[1])
    outputs = parallel.forward([batch], next_token)
    tokens = outputs[0] if outputs else torch.zeros_like(lasts)
    if world.pp.size > 1:  # only the last stage's rank has them
        dist.all_reduce(tokens, group=world.pp.group)
    return tokens.tolist()


def likeliest(
    model: nn.Module,
    anatomy: Anatomy,
    hidden: Tensor,
    micro_batch: MicroBatch,
    *,
    world: World,
    lasts: Tensor,
    width: int,
) -> Tensor:
    """The likeliest token after column lasts[row] of each row, int64 [rows], on every tp and cp rank.

    A Finish once its keyword arguments are bound. hidden [rows, columns of this rank, hidden]: a
    micro-batch's last hidden states. lasts [rows]: columns counted in whole rows, which are `width` wide.
    """
    del micro_batch  # a Finish has it; the prompts' ends are in `lasts`
    here, rows = lasts, torch.arange(len(lasts), device=hidden.device)
    if world.cp.size > 1:
        columns = context.columns(width, world.cp, world.layout.cp_method).to(hidden.device)
        matches = columns[None, :] == lasts[:, None]
        here = matches.int().argmax(1)
        states = hidden[rows, here] * matches.any(1, keepdim=True)
        dist.all_reduce(states, group=world.cp.group)
    else:
        states = hidden[rows, here]
    with head_only(model, anatomy) as logits_of:
        # A model that diverged gives NaN; all ranks must still choose the same token.
        values, tokens = logits_of(states).float().nan_to_num(nan=-math.inf).max(-1)
    vocabulary = vocabulary_of(model.get_submodule(anatomy.head))
    if vocabulary is None:
        return tokens
    best = values.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group=world.tp.group)
    tokens = torch.where(values == best, tokens + vocabulary.start, torch.iinfo(tokens.dtype).max)
    dist.all_reduce(tokens, dist.ReduceOp.MIN, group=world.tp.group)
    return tokens
