"""How evenly a mixture's router spreads tokens over its experts: measured, and improved by a loss or a bias.

    loss    DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, equations 17 to 20) of each packed sequence
            and layer, averaged over the sequences of the global batch and added up over layers
    config  transformers' load_balancing_loss_func, all layers and the whole batch pooled, where config.json
            asks for it: needs the counts of the whole step before its first backward
    bias    no loss: a bias that only chooses experts moves by a fixed rate towards those with fewer tokens
            than the mean of the global batch (arXiv:2408.15664)
    z_loss  squared logarithm of each token's sum of exponentials (ST-MoE, arXiv:2202.08906), averaged over
            the tokens of the global batch and added up over layers

A loss reaches the gradient at the router's logits: an autograd function that is the identity on the routing
weights adds its gradient in their backward. So it needs no path to the last stage of a pipeline, and blocks
that run again in a backward add it once. Both losses are sums over tokens divided by numbers of the global
batch; only counts, which have no gradient, are summed over the ranks of cp and tp. Padding counts nowhere.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from meshtune import compat
from meshtune.data.batch import MicroBatch
from meshtune.errors import UserError
from meshtune.experts.routers import Router, routers_of, routing_of
from meshtune.model.anatomy import anatomy
from meshtune.model.documents import current_documents
from meshtune.placement.experts import BalanceSpec, balance_rules
from meshtune.placement.rules import Rule, sentences
from meshtune.rundir import Row

UNKNOWN_ROUTERS = (
    "The model's config.json sets output_router_logits, with which transformers adds a load-balancing loss "
    "of its experts. meshtune does not know its routers and leaves that out."
)
World = Any  # parallel.mesh.World, which is above this floor
Share = Callable[[Tensor], Tensor]  # logits [tokens, experts] -> this rank's part of a loss


class Tokens:
    """The tokens of a micro-batch that this rank's routers see: its columns, with tp its slice of them."""

    def __init__(self, batch: MicroBatch, world: World) -> None:
        self.batch = batch
        rows, width = batch.input_ids.shape
        columns = torch.arange(width) if batch.columns is None else batch.columns.cpu()
        lengths = torch.tensor([sum(row) for row in batch.documents])  # of whole rows
        self.rows, self.lengths = rows, lengths.to(world.device)
        real = F.pad(columns < lengths[:, None], (0, -width % world.tp.size))  # padded as the tokens are
        self.real = real.chunk(world.tp.size, 1)[world.tp.index].to(world.device)  # [rows, columns]

    def counts(self, index: Tensor, experts: int) -> Tensor:
        """Tokens of each row and expert, fp32 [rows, experts]. index: chosen experts [tokens, k]."""
        index = index.reshape(self.rows, -1).long()
        real = self.real.repeat_interleave(index.shape[1] // self.real.shape[1], 1).float()
        return real.new_zeros(self.rows, experts).scatter_add_(1, index, real)


class Balance:
    """Loads and losses of the routers of this rank's stages; hooks on them measure each training forward.

    `begin` before a step's passes, `pool` between the forward and the backward of its only micro-batch,
    `measured` after the passes, `move` after the update. whole: the model, its buffers with their values.
    stages: the models of this rank's stages.
    """

    def __init__(
        self, spec: BalanceSpec, whole: PreTrainedModel, stages: Sequence[nn.Module], world: World
    ) -> None:
        self.spec, self.world, self.routers = spec, world, _routers(whole)
        self.weight, self.pools = spec.weight(routing_of(whole, self.routers))
        self.frozen = not any(
            parameter.requires_grad
            for router in self.routers
            for parameter in whole.get_submodule(router.path).parameters()
        )
        self.experts = max((router.experts for router in self.routers), default=0)
        self._biased: list[tuple[str, list[nn.Module]]] = []  # buffer of a router -> the models that have it
        for number, router in enumerate(self.routers):
            here = [model for model in stages if _has(model, router.path)]
            for model in here:
                model.get_submodule(router.path).register_forward_hook(partial(self._routed, number))
            if spec.kind == "bias" and router.bias:
                self._biased.append((router.bias, [whole, *here]))
        self._tokens: Tokens | None = None  # of the micro-batch that runs
        self.begin(1)

    @property
    def biases(self) -> list[list[Tensor]]:
        """By router: the bias of the whole model, which is exported, and of a stage. Moves replace them."""
        return [[model.get_buffer(name) for model in models] for name, models in self._biased]

    def begin(self, tokens: int) -> None:
        """Begin a step. tokens: of its global batch, without padding."""
        self.tokens, device = max(1, tokens), self.world.device
        self.loads = torch.zeros(len(self.routers), self.experts, dtype=torch.float64, device=device)
        self._sums = self.loads.new_zeros(2)  # of this rank: load-balancing loss, z-loss
        self._pooled = self.loads.new_zeros(2, self.experts)  # tokens, and sums of probabilities
        self._slopes: Tensor | None = None  # where the loss is pooled: its derivative by each probability

    def pool(self) -> None:
        """Sum the counts of a pooled loss over all ranks; every rank calls it."""
        if not self.pools:
            return
        if self.world.mesh is not None:
            dist.all_reduce(self._pooled)
        counts, probabilities = self._pooled / (len(self.routers) * self.tokens)
        slopes = self.experts * counts
        self._sums[0] = (slopes * probabilities).sum() / self.world.size
        self._slopes = slopes / (len(self.routers) * self.tokens)

    def _routed(self, number: int, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook after a router: count its choices, and add its losses to the backward of its weights."""
        again, batch = compat.in_backward(), current_documents()
        if not torch.is_grad_enabled() or (batch is None and not again):
            return output
        router, share = self.routers[number], None
        logits, weights = output[router.logits], output[router.weights]
        if not again and batch is not None:
            share = self._measure(number, logits.detach(), output[router.index], self._tokens_of(batch))
        if not (self.weight or self.spec.z_loss) or not logits.requires_grad:
            return output
        return tuple(
            _Adding.apply(weights, logits, share) if place == router.weights else each
            for place, each in enumerate(output)
        )

    def _tokens_of(self, batch: MicroBatch) -> Tokens:
        if self._tokens is None or self._tokens.batch is not batch:
            self._tokens = Tokens(batch, self.world)
        return self._tokens

    @torch.no_grad()
    def _measure(self, number: int, logits: Tensor, index: Tensor, tokens: Tokens) -> Share:
        """Add a router's pass over a micro-batch to the loads and losses; returns its weighted losses."""
        router, slopes = self.routers[number], None
        self.loads[number, : router.experts] += tokens.counts(index, router.experts).sum(0)
        if self.weight:
            # By the largest logits, as the papers and transformers count, without bias and groups.
            counts = tokens.counts(logits.topk(router.chosen, -1).indices, router.experts)
            if self.pools:
                probabilities = (_wide(logits).softmax(-1) * tokens.real.flatten()[:, None]).sum(0)
                self._pooled += torch.stack((counts.sum(0).to(probabilities), probabilities))
            else:
                for axis in (self.world.cp, self.world.tp):
                    if axis.size > 1:
                        dist.all_reduce(counts, group=axis.group)
                sequences = self.world.layout.global_batch_size
                per_token = 1 / (tokens.lengths[:, None].double() ** 2 * router.chosen * sequences)
                slopes = (counts * router.experts * per_token)[:, None]
        share = partial(self._losses, router, tokens, slopes)
        self._sums += share(logits)
        weights = self._sums.new_tensor((self.weight, self.spec.z_loss))
        return lambda logits: (share(logits) * weights.to(_wide(logits))).sum()

    def _losses(self, router: Router, tokens: Tokens, slopes: Tensor | None, logits: Tensor) -> Tensor:
        """(Load-balancing loss, z-loss) of this rank's tokens, without their weights.

        slopes: derivative by each probability [rows, 1, experts]; None: the pooled loss's, where it is known.
        """
        wide = _wide(logits).view(*tokens.real.shape, router.experts)
        balance, z_loss = wide.new_zeros(()), wide.new_zeros(())
        slopes = self._slopes if slopes is None else slopes
        if self.weight and slopes is not None:
            probabilities = wide.softmax(-1) if self.pools else router.probabilities(wide)
            balance = ((probabilities * slopes.to(wide)).sum(-1) * tokens.real).sum()
        if self.spec.z_loss:
            z_loss = (wide.logsumexp(-1).square() * tokens.real).sum() / self.tokens
        return torch.stack((balance, z_loss))

    def measured(self) -> tuple[dict[str, float], Row]:
        """(Numbers of the step's train row, its row of loads by layer); every rank calls it."""
        sums = torch.cat((self.loads.flatten(), self._sums))
        if self.world.mesh is not None:
            dist.all_reduce(sums)
        *_, balance, z_loss = sums.tolist()
        self.loads = sums[:-2].view_as(self.loads)
        layers = [load[: router.experts] for load, router in zip(self.loads.cpu(), self.routers, strict=True)]
        means = [float(load.mean()) for load in layers]
        largest = [float(load.max()) for load in layers]
        fullest = [most / mean if mean else 1.0 for most, mean in zip(largest, means, strict=True)]
        numbers = {"expert_load": max(fullest), "expert_load_mean": sum(fullest) / len(fullest)}
        if self.weight:
            numbers["aux_loss"] = balance if self.pools else balance / len(layers)
        if self.spec.z_loss:
            numbers["z_loss"] = z_loss / len(layers)
        return numbers, {
            "kind": "experts", "layers": [router.block for router in self.routers], "fullest": fullest,
            "largest": largest, "mean": means, "entropy": [_evenness(load) for load in layers],
            "unused": [int((load == 0).sum()) for load in layers],
            "fullest_rank": [self._fullest_rank(load) for load in layers],
        }  # fmt: skip

    def _fullest_rank(self, load: Tensor) -> float:
        """Return the tokens of the rank with most, over the mean rank's, where experts are cut over ranks."""
        if len(load) % self.world.layout.ep or not load.any():  # Zaya's has a choice of none
            return 1.0
        ranks = load.view(self.world.layout.ep, -1).sum(1)
        return float(ranks.max() / ranks.mean())

    @torch.no_grad()
    def move(self) -> None:
        """Move the biases by the loads of the step that `measured` has summed."""
        for buffers, load, router in zip(self.biases, self.loads, self.routers, strict=False):
            load = load[: router.experts]
            for buffer in buffers:
                buffer += self.spec.bias_rate * (load.mean() - load).sign().to(buffer)

    def state(self) -> list[list[float]]:
        """The biases, as a checkpoint has them; the same on all ranks."""
        return [buffers[0].tolist() for buffers in self.biases]

    @torch.no_grad()
    def load_state(self, state: Sequence[Sequence[float]]) -> None:
        """Put the biases where a checkpoint has them."""
        for buffers, values in zip(self.biases, state, strict=True):
            for buffer in buffers:
                buffer.copy_(torch.tensor(values))


def balance_of(
    spec: BalanceSpec, whole: PreTrainedModel, stages: Sequence[nn.Module], world: World, *, sums: bool
) -> Balance | None:
    """The balance of a mixture's experts; None for a model without routers that transformers records.

    sums: whether the loss is divided by a count that is known only after the backward. Raises UserError for
    settings that the model, its layout or its loss can't have. The other arguments are those of `Balance`.
    """
    routers, layout = _routers(whole), world.layout
    routing, name = routing_of(whole, routers), whole.name_or_path or type(whole).__name__
    problems = sentences(starmap(Rule, balance_rules(name, routing, spec)), layout)
    if sums and routing and (spec.weight(routing)[0] or spec.z_loss):
        problems.append(
            "A loss of one's own is divided by its count, and so would be the losses of the routers; set "
            "experts.balance=none and leave experts.z_loss out."
        )
    if problems:
        raise UserError(problems)
    return Balance(spec, whole, stages, world) if routers else None


@torch.no_grad()
def load_biases(model: PreTrainedModel, state: Sequence[Sequence[float]]) -> None:
    """Put the biases of a whole model's routers where a checkpoint has them. state: of `Balance.state`."""
    names = [router.bias for router in _routers(model) if router.bias] if state else []
    for name, values in zip(names, state, strict=True):
        model.get_buffer(name).copy_(torch.tensor(values))


def router_sentence(whole: PreTrainedModel, balance: Balance | None) -> str | None:
    """Return a sentence on the routers of a mixture: whether they are trained, and what is added to their
    gradient; None for a dense model.
    """
    if balance is None:
        asked = getattr(whole.config.get_text_config(), "output_router_logits", False)
        return UNKNOWN_ROUTERS if asked else None
    state = "frozen" if balance.frozen else "trained"
    kinds = {"loss": "sequence-wise ", "config": "transformers' "}
    losses = [
        f"{name} of weight {weight:g}"
        for name, weight in (
            (f"the {kinds.get(balance.spec.kind, '')}load-balancing loss", balance.weight),
            ("the z-loss", balance.spec.z_loss),
        )
        if weight
    ]
    added = (
        f"{' and '.join(losses)} is in the gradients, not in `loss`" if losses else "no loss balances them"
    )
    if balance.spec.kind == "bias":
        added += f"; their biases move by {balance.spec.bias_rate:g} a step"
    return f"Routers of experts are {state} (experts.freeze_router); {added} (experts.balance)."


def _routers(whole: PreTrainedModel) -> list[Router]:
    return routers_of(whole, anatomy(whole).blocks)


class _Adding(torch.autograd.Function):
    """The routing weights; in the backward the gradient of `share` at the logits is added."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, share: Share | None) -> Tensor:  # type: ignore[override]
        ctx.share = share
        ctx.save_for_backward(logits)
        return weights.clone()  # no view: some blocks change their weights in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor):  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        with torch.enable_grad():
            own = logits.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(ctx.share(own), own)
        return incoming, gradient, None


def _has(model: nn.Module, path: str) -> bool:
    """Return whether a stage has the module at `path`."""
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _evenness(load: Tensor) -> float:
    """Return the entropy of the shares of a layer's experts, as a share of the largest possible one."""
    shares = load[load > 0] / load.sum()
    return float(-(shares * shares.log()).sum()) / math.log(max(2, len(load)))
