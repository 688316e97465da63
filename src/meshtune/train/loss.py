"""The sum of the token losses of a micro-batch, with logits only where there is a label, a chunk at a time.

    body (all tokens) -> hidden -> labelled rows -> chunks -> the model's own head -> cross entropy -> sum

Logits are by far the largest tensor of a step (128 k entries × 4 bytes × 3 copies a token), so they never
exist as a whole. Each chunk's loss AND its gradients are computed in the forward, while its logits are there;
the backward only multiplies by the incoming gradient. Nothing is recomputed and no logits are kept.

The head is the model's own `forward`, its body replaced for the call by a stub that returns the chunk: bias,
logit scale (Cohere, Granite), soft-capping (Gemma 2) and adapters on the head are right for every family,
without a table.

Gradients of 16-bit weights are summed over the chunks in fp32 and cast once: a sum of many small terms in
bf16 would lose those below 1/256 of it. One chunk needs no such buffer.

Under tensor parallelism a rank's head gives the logits of its part of the vocabulary. Ranks then exchange
three numbers a token (four with label smoothing), never logits (`_shared_cross_entropy`), and each has the
whole loss.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshtune import compat
from meshtune.data.batch import IGNORE, MicroBatch
from meshtune.errors import UserError
from meshtune.model.anatomy import Anatomy
from meshtune.model.body import head_only
from meshtune.parallel.tensor import Vocabulary, vocabulary_of
from meshtune.placement.states import loss_chunk_tokens
from meshtune.rundir import RunDir
from meshtune.train.preference import Preference

# A loss function of the caller's #

#     def focal(logits, labels):                 # float [tokens, vocabulary], int64 [tokens]
#         likelihood = logits.softmax(-1).gather(1, labels[:, None])[:, 0]
#         losses = -((1 - likelihood) ** 2) * likelihood.log()
#         return losses.sum(), len(labels)       # sum of the token losses, their count
#
# The loss of a step is the sum over the global batch divided by the count over the global batch. The function
# gets only labelled tokens, some thousand at a time, in no particular grouping into rows or micro-batches: a
# sum over tokens is the same in every layout, however these are cut. Under tensor parallelism it gets the
# logits of the whole vocabulary.


# (logits, labels) -> (sum of the token losses, a scalar tensor with a gradient; their count or weight)
LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]


class TokenLoss:
    """The caller's function as `loss.head_loss` calls it, which adds up the counts on this rank."""

    def __init__(self, function: LossFunction) -> None:
        self.function = function
        # Of the class where the function is an object: it tells runs apart.
        named = function if hasattr(function, "__qualname__") else type(function)
        self.name = f"{named.__module__}.{named.__qualname__}"
        self._count: Tensor | float = 0.0

    def __call__(
        self, logits: Tensor, targets: Tensor, *, vocabulary: Vocabulary | None, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(Sum of the token losses, its gradient by the logits of this rank, None unless `gradient`)."""
        whole = whole_logits(logits, vocabulary).detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            total, count = self._checked(self.function(whole, targets))
        self._count = self._count + (count.detach().double() if isinstance(count, Tensor) else count)
        if not gradient:
            return total.detach(), None
        if not total.requires_grad:
            raise UserError(f"loss={self.name} returned a sum that does not depend on the logits.")
        (logits_grad,) = torch.autograd.grad(total, whole)
        if vocabulary is not None:
            logits_grad = logits_grad[:, vocabulary.start : vocabulary.stop]
        return total.detach(), logits_grad.to(logits.dtype)

    def _checked(self, result: Any) -> tuple[Tensor, Tensor | float]:
        """The function's result. Raises UserError if it is not (scalar tensor, number)."""
        total, count = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
        scalars = all(not isinstance(part, Tensor) or part.ndim == 0 for part in (total, count))
        if not isinstance(total, Tensor) or not isinstance(count, Tensor | int | float) or not scalars:
            raise UserError(
                f"loss={self.name} must return (sum of the token losses, their count): a scalar tensor and a "
                "number; take the sum of the losses, not their mean."
            )
        return total, count

    def take(self) -> list[Tensor | float]:
        """[Sum of the counts since the last call, on this rank]."""
        count, self._count = self._count, 0.0
        return [count]


def whole_logits(logits: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Logits [tokens, whole vocabulary] in fp32 (fp64 for an fp64 model), equal on all tp ranks."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if vocabulary is None:
        return wide
    whole = wide.new_zeros(len(wide), vocabulary.total)
    whole[:, vocabulary.start : vocabulary.stop] = wide
    dist.all_reduce(whole, group=vocabulary.tp.group)  # a sum with zeros: parts may differ in size
    return whole


def check_same(objective: TokenLoss | Preference | None, run: RunDir) -> None:
    """Raise UserError if the run, which is to continue, was trained with another loss function."""
    before = (run.rows("run") or [{}])[-1].get("loss_function")
    now = objective.name if isinstance(objective, TokenLoss) else None
    if before != now:
        was, is_now = (f"loss={name}" if name else "the cross entropy" for name in (before, now))
        raise UserError(
            f"{run.path} was trained with {was}, and would resume with {is_now}; give the same loss, or "
            "another `output`."
        )


# Head and loss #


def head_loss(
    model: nn.Module,
    anatomy: Anatomy,
    hidden: Tensor,
    micro_batch: MicroBatch,
    *,
    chunk_tokens: int = 0,
    memory: float = 0.0,
    single_backward: bool = True,
    smoothing: float = 0.0,
    fused: bool = False,
    objective: TokenLoss | Preference | None = None,
) -> Tensor:
    """Sum of the token losses of a micro-batch from its last hidden states [batch, seq, hidden]: a scalar in
    fp32 (fp64 for an fp64 model).

    hidden, micro_batch: of this rank's columns (cp); all tp ranks pass the same and get the same loss. At
    most `chunk_tokens` rows of logits exist at a time; 0: as `loss_chunk_tokens` has it for a GPU of `memory`
    bytes. Its backward can run once, a second one raises
    RuntimeError; with single_backward=False again, as zero-bubble schedules want (first for the hidden
    states' gradient, then for the head's), at the price of a second copy of the head's gradient. Without any
    label the loss is 0 and the gradients are zeros, so that ranks that share parameters still agree on which
    of them have one. smoothing, fused: see `_cross_entropy`. objective: instead of the cross entropy; a
    Preference makes the sum one over pairs or answers.
    """
    label_tokens = micro_batch.label_tokens  # given with the batch, so that a GPU need not be waited for
    flat = micro_batch.labels.flatten()
    labelled = flat != IGNORE
    torch.ops.aten._assert_async.msg(
        labelled.sum() == label_tokens, "MicroBatch.label_tokens is not the number of its labels"
    )
    rows = torch.nonzero_static(labelled, size=label_tokens).flatten()
    targets = flat[rows]
    vocabulary = vocabulary_of(model.get_submodule(anatomy.head))
    if not chunk_tokens:
        rows_of_head = model.get_submodule(anatomy.head).get_parameter("weight").shape[0]
        compiled = fused and vocabulary is None and not isinstance(objective, TokenLoss)
        chunk_tokens = int(
            loss_chunk_tokens(memory if compiled else 0.0, rows_of_head, hidden.dtype.itemsize)
        )
    chunks = -(-label_tokens // chunk_tokens)
    size = -(-label_tokens // chunks) if chunks else 1  # equal chunks: the smallest peak for their number
    parameters = _head_parameters(model, anatomy)
    of_tokens = partial(_cross_entropy, smoothing=smoothing, fused=fused)
    of_answers = None
    if isinstance(objective, TokenLoss):
        of_tokens = objective
    elif objective is not None:
        of_tokens = score if objective.spec.row.scores else of_tokens
        of_answers = partial(objective, micro_batch)
    of_tokens = partial(of_tokens, vocabulary=vocabulary)
    with head_only(model, anatomy) as logits_of:
        if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
            return _ChunkedLoss.apply(
                hidden, logits_of, rows, targets, size, of_tokens, of_answers, single_backward, *parameters
            )
        losses, total = _losses(hidden, logits_of, rows, targets, size, of_tokens), _zero(hidden)
        if of_answers:
            return total + of_answers(torch.cat(losses))[0].to(total)
        for of_chunk in losses:  # as the forward with gradients adds them up
            total += of_chunk.sum()
        return total


def _losses(
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    rows: Tensor,
    targets: Tensor,
    size: int,
    of_tokens: Callable[..., tuple[Tensor, Tensor | None]],
) -> list[Tensor]:
    """Losses of each chunk's labelled tokens, without gradients: [tokens], or [1] of a function that adds up.

    The arguments are those of `_ChunkedLoss`.
    """
    source, losses = hidden.detach().flatten(0, 1), [_zero(hidden)[None][:0]]
    with torch.no_grad():
        for chunk_rows, chunk_targets in zip(rows.split(size), targets.split(size), strict=True):
            found, _ = of_tokens(logits_of(source[chunk_rows]), chunk_targets, gradient=False)
            losses.append(found.flatten())
    return losses


class _ChunkedLoss(torch.autograd.Function):
    """Loss and, already in the forward, the gradients of the hidden states and of the head's parameters.

    rows: indices of labelled tokens in hidden.flatten(0, 1); targets: their token ids, parallel; size: rows
    of a chunk; of_tokens: as `_cross_entropy`; of_answers: the losses of all tokens -> (the loss, its
    derivative by each of them), which takes the head's forward once more; None: their sum. parameters: the
    trained ones that logits_of uses. The others are those of `head_loss`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        rows: Tensor,
        targets: Tensor,
        size: int,
        of_tokens: Callable[..., tuple[Tensor, Tensor]],
        of_answers: Callable[[Tensor], tuple[Tensor, Tensor]] | None,
        single_backward: bool,
        *parameters: Tensor,
    ) -> Tensor:
        total, weights = _zero(hidden), None
        if of_answers:
            found, weights = of_answers(torch.cat(_losses(hidden, logits_of, rows, targets, size, of_tokens)))
            total += found
        source = hidden.flatten(0, 1)
        hidden_grad = torch.zeros_like(source) if ctx.needs_input_grad[0] else None
        several = len(rows) > size
        sums: list[Tensor | None] = [None] * len(parameters)
        for first in range(0, len(rows), size):
            chunk_rows, chunk_targets = rows[first : first + size], targets[first : first + size]
            with torch.enable_grad():
                chunk = source[chunk_rows].detach().requires_grad_(hidden_grad is not None)
                logits = logits_of(chunk)
            losses, logits_grad = of_tokens(logits.detach(), chunk_targets, gradient=True)
            if weights is None:
                total += losses.sum()
            else:
                logits_grad *= weights[first : first + size, None]
            inputs = [*parameters] if hidden_grad is None else [*parameters, chunk]
            grads = list(torch.autograd.grad(logits, inputs, logits_grad, allow_unused=True))
            del chunk, logits, logits_grad, inputs  # else they last until those of the next chunk are made
            if hidden_grad is not None:
                hidden_grad.index_copy_(0, chunk_rows, grads.pop())
            _add_to(sums, grads, several)
            del grads  # else the head's gradient lasts until that of the next chunk is made
        ctx.grads = [
            None if hidden_grad is None else hidden_grad.view_as(hidden),
            *(
                torch.zeros_like(parameter) if grad is None else grad.to(parameter.dtype)
                for parameter, grad in zip(parameters, sums, strict=True)
            ),
        ]
        ctx.single_backward = single_backward
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor):  # type: ignore[override]
        if ctx.grads is None:
            raise RuntimeError("The backward of head_loss ran twice; it hands its gradients out once.")
        if ctx.single_backward:
            # In place: a second copy of the head's gradient would be the largest tensor of the backward.
            scaled = [None if grad is None else grad.mul_(incoming) for grad in ctx.grads]
            ctx.grads = None
        else:
            scaled = [None if grad is None else grad * incoming for grad in ctx.grads]
        hidden_grad, *grads = scaled
        return hidden_grad, None, None, None, None, None, None, None, *grads


def _add_to(sums: list[Tensor | None], grads: Sequence[Tensor | None], several: bool) -> None:
    """Add a chunk's gradients to their sums, in fp32 or wider if there are several chunks. In place."""
    for index, grad in enumerate(grads):
        before = sums[index]
        if before is not None and grad is not None:
            before += grad
        elif grad is not None:
            sums[index] = grad.to(torch.promote_types(grad.dtype, torch.float32)) if several else grad


def _cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocabulary: Vocabulary | None,
    smoothing: float,
    gradient: bool,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(cross entropy of each token [tokens] in fp32 or fp64; its gradient, softmax − target distribution,
    shaped as the logits and in their dtype, or None unless `gradient`).

    logits [tokens, vocabulary entries of this rank]; targets [tokens]: token ids. vocabulary: the part of the
    vocabulary that this tp rank has; None: all of it. smoothing: share of the target distribution that is
    uniform over the vocabulary, the rest is on the target (torch's label_smoothing). fused: compiled, where
    this rank has the whole vocabulary.
    """
    if vocabulary is not None:
        return _shared_cross_entropy(logits, targets, vocabulary, smoothing=smoothing, gradient=gradient)
    if fused:
        given = map(compat.of_any_length, (logits, targets))
        return _compiled_cross_entropy()(*given, smoothing=smoothing, gradient=gradient)
    log_probabilities = torch.log_softmax(
        logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)
    )
    loss = -log_probabilities.gather(1, targets[:, None])[:, 0]
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * log_probabilities.mean(1)
    if not gradient:
        return loss, None
    logits_grad = log_probabilities.exp_()
    logits_grad.scatter_add_(1, targets[:, None], logits_grad.new_full((len(targets), 1), smoothing - 1.0))
    if smoothing:
        logits_grad -= smoothing / logits.shape[1]
    return loss, logits_grad.to(logits.dtype)


@cache
def _compiled_cross_entropy() -> Callable[..., tuple[Tensor, Tensor | None]]:
    return torch.compile(fused_cross_entropy)


def fused_cross_entropy(
    logits: Tensor, targets: Tensor, *, smoothing: float, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """`_cross_entropy` as the compiler fuses it: each logit is read twice and its gradient written once, and
    nothing as large as the logits is kept in fp32.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sums = wide.logsumexp(1)
    target = wide.gather(1, targets[:, None])[:, 0]
    loss = sums - (1 - smoothing) * target
    if smoothing:
        loss = loss - smoothing * wide.mean(1)
    if not gradient:
        return loss, None
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    wanted = (1 - smoothing) * is_target.to(wide.dtype) + smoothing / logits.shape[1]
    return loss, ((wide - sums[:, None]).exp() - wanted).to(logits.dtype)


def _shared_cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary, *, smoothing: float, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return `_cross_entropy` where logits are [tokens, vocabulary entries of this tp rank].

    The losses are those of the whole vocabulary, equal on all tp ranks; the gradient is that of this rank's
    logits. Two all-reduces: the MAX of [tokens], each token's largest logit; the SUM of [2, tokens], the sum
    of its exponentials and its target's logit, which is 0 on all ranks but one; with smoothing of [3,
    tokens], its mean logit too.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = wide.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=vocabulary.tp.group)
    shifted = wide - largest[:, None]
    here = (targets >= vocabulary.start) & (targets < vocabulary.stop)
    columns = torch.where(here, targets - vocabulary.start, 0)[:, None]
    target = torch.where(here, shifted.gather(1, columns)[:, 0], 0)
    mean = [shifted.sum(1) / vocabulary.total] if smoothing else []
    weights = shifted.exp_()
    sums = torch.stack([weights.sum(1), target, *mean])
    dist.all_reduce(sums, group=vocabulary.tp.group)
    loss = sums[0].log() - (1 - smoothing) * sums[1] - (smoothing * sums[2] if smoothing else 0)
    if not gradient:
        return loss, None
    logits_grad = weights.div_(sums[0][:, None])
    logits_grad.scatter_add_(1, columns, (smoothing - 1) * here[:, None].to(logits_grad.dtype))
    if smoothing:
        logits_grad -= smoothing / vocabulary.total
    return loss, logits_grad.to(logits.dtype)


def score(
    logits: Tensor, targets: Tensor, *, vocabulary: Vocabulary | None, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """`_cross_entropy` of a head with one output [tokens, 1], on tp ranks an addend: the output, negated."""
    wide = -logits[:, 0].to(torch.promote_types(logits.dtype, torch.float32))
    if vocabulary is not None:
        dist.all_reduce(wide, group=vocabulary.tp.group)
    return wide, torch.full_like(logits, -1.0) if gradient else None


def _zero(hidden: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)


def _head_parameters(model: nn.Module, anatomy: Anatomy) -> list[Tensor]:
    """Trained parameters outside the body, each once. Tied weights are among them: they have the head's name
    too.
    """
    inside = f"{anatomy.body}."
    named = model.named_parameters(remove_duplicate=False)
    return list({p: None for name, p in named if p.requires_grad and not name.startswith(inside)})
