"""Routers of a mixture of experts, found by the contract of transformers.

    _can_record_outputs["router_logits"]   -> class of the router, place of the logits in its output
    a forward of it on meta                -> places of weights and of chosen experts, function of its scores

A router returns one row a token: logits [tokens, experts], weights and numbers of the chosen experts [tokens,
k]. Families differ in the function that makes scores of logits; Gemma 4 returns the scores themselves.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from meshtune.errors import UserError
from meshtune.placement.experts import RouterTraits

# What a router calls -> scores of its logits, as DeepSeek's auxiliary loss takes them.
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "softplus": lambda logits: nn.functional.softplus(logits).sqrt(),
}
BIASES = ("e_score_correction_bias", "expert_bias")  # added to the scores only to choose experts


@dataclass(frozen=True)
class Router:
    """One layer's router."""

    path: str  # of the module in the whole model
    block: int  # number of its block
    experts: int
    chosen: int  # experts of a token
    logits: int  # places in what it returns
    weights: int
    index: int
    scores: str  # a row of SCORES; "": its logits are scores already
    bias: str | None  # name of the buffer that is added to choose experts; None: it has none

    def probabilities(self, logits: Tensor) -> Tensor:
        """Scores of each token, which sum to 1."""
        scores = SCORES[self.scores](logits) if self.scores else logits
        return scores / scores.sum(-1, keepdim=True)


def router_paths(model: PreTrainedModel, blocks: str) -> dict[str, int]:
    """Path of each router in the blocks -> place of the logits in its output; {} for a dense model.

    blocks: path of the blocks.
    """
    recorders = [
        recorder
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for recorder in [(type(module)._can_record_outputs or {}).get("router_logits")]
        if recorder is not None
    ]
    return {
        path: recorder.index
        for path, module in model.named_modules()
        for recorder in recorders
        if path.startswith(f"{blocks}.") and type(module) is recorder.target_class and _only_routes(module)
    }


def _only_routes(module: nn.Module) -> bool:
    """False for a recorded module that is a whole mixture or block (Doge, ERNIE 4.5 VL)."""
    return not any(
        isinstance(inner, nn.Embedding) or name.rpartition(".")[2] == "down_proj"
        for name, inner in module.named_modules()
    )


def routers_of(model: PreTrainedModel, blocks: str) -> list[Router]:
    """Routers of a whole model, in the order of its blocks; [] for a dense model, and for one whose experts
    are not called by transformers' contract. blocks: path of the blocks.
    """
    found = (_router(model, blocks, path, place) for path, place in router_paths(model, blocks).items())
    return [router for router in found if router is not None]


def routing_of(model: PreTrainedModel, routers: list[Router]) -> RouterTraits | None:
    """Return what decides how the loads of a model's experts can be balanced; None without routers."""
    config: Any = model.config.get_text_config()
    has_loss = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    return RouterTraits(
        unbiased=next((router.path for router in routers if router.bias is None), None),
        scored=all(router.scores for router in routers),
        coefficient=getattr(config, "router_aux_loss_coef", None) or 0.0,
        pools=bool(has_loss and getattr(config, "output_router_logits", False)),
    ) if routers else None  # fmt: skip


def freeze_routers(model: PreTrainedModel, blocks: str, freeze: bool | None, *, adapts: bool) -> None:
    """Freeze the routers of experts, in place, where `freeze` says so; next to adapters they are already.

    blocks: path of the blocks. Raises UserError for a model without routers, and for a router that is to be
    trained and gets no adapter.
    """
    if freeze is None:
        return
    routers, name = router_paths(model, blocks), model.name_or_path or type(model).__name__
    given = f"experts.freeze_router={str(freeze).lower()}"
    if not routers:
        raise UserError(f"{given}: transformers names no routers of experts in {name}; leave it out.")
    for path in routers:
        router = model.get_submodule(path)
        if freeze and not adapts:
            router.requires_grad_(False)
        elif freeze and any(each.requires_grad for each in router.parameters()):
            raise UserError(
                f"{given}: lora.target_modules or lora.modules_to_save trains {path} of {name}; drop one."
            )
        elif not freeze and not any(each.requires_grad for each in router.parameters()):
            raise UserError(
                f"{given}: {path} of {name} is not a linear layer, so it gets no adapter; train it whole by "
                f"lora.modules_to_save=[{path.rpartition('.')[2]}], and leave experts.freeze_router out."
            )


def _router(model: PreTrainedModel, blocks: str, path: str, place: int) -> Router | None:
    """Return a router by its forward on meta; None where it returns no numbers of experts."""
    module, functions = model.get_submodule(path), _Functions()
    named = [*module.named_parameters(), *module.named_buffers()]
    on_meta = {name: tensor.detach().to("meta") for name, tensor in named}
    width = model.config.get_text_config().hidden_size
    sizes = [size for tensor in on_meta.values() for size in tensor.shape if size != width]
    experts = max(sizes, default=width)
    rows = torch.empty(2, width, dtype=next(module.parameters()).dtype, device="meta")
    # Some are given their block's bias.
    others = [torch.empty(experts, device="meta") for _ in range(_needed(module) - 1)]
    returned = None
    for inputs in (rows, rows[None]):  # AFMoE's reads the shape of a batch
        with suppress(Exception), torch.no_grad(), functions:  # then loads are not measured
            returned = returned or torch.func.functional_call(module, on_meta, (inputs, *others))
    if not isinstance(returned, tuple):
        return None
    matrices = [number for number, each in enumerate(returned) if isinstance(each, Tensor) and each.ndim == 2]
    index = [number for number in matrices if not returned[number].is_floating_point()]
    if not index or place not in matrices:
        return None
    chosen = returned[index[0]].shape
    weights = [number for number in matrices if number not in (place, index[0])]
    weights = [number for number in weights if returned[number].shape == chosen]
    if not weights:
        return None
    called = [name for name, result in functions.calls if name in SCORES]
    are_scores = any(result is returned[place] for name, result in functions.calls if name in SCORES)
    return Router(
        path=path, block=int(path.removeprefix(f"{blocks}.").split(".")[0]),
        experts=returned[place].shape[-1], chosen=chosen[-1], logits=place, weights=weights[0],
        index=index[0], scores="" if are_scores else called[0] if called else "softmax",
        bias=_bias(model, path),
    )  # fmt: skip


def _bias(model: PreTrainedModel, path: str) -> str | None:
    """Return the name of the buffer by which a router, or its block, corrects the choice of experts."""
    for owner in (path, path.rpartition(".")[0]):
        for name in BIASES:
            if name in model.get_submodule(owner)._buffers:
                return f"{owner}.{name}"
    return None


def _needed(module: nn.Module) -> int:
    """Return the number of arguments that a module's forward needs."""
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)


class _Functions(TorchFunctionMode):
    """Record the names and results of torch's functions that are called meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.__name__, result))
        return result
