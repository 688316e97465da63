"""Routers of a mixture of experts, found by the contract of transformers.

    _can_record_outputs["router_logits"]   -> class of the router, place of the logits in its output
    a forward of it on meta                -> places of weights and of chosen experts, function of its scores

A router returns one row a token: logits [tokens, experts], weights and numbers of the chosen experts [tokens,
k]. Families differ in the function that makes scores of logits; Gemma 4 returns the scores themselves.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from meshtune.model.anatomy import anatomy

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


def router_paths(model: PreTrainedModel) -> dict[str, int]:
    """Path of each router in the blocks -> place of the logits in its output; {} for a dense model."""
    recorders = [
        recorder
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for recorder in [(type(module)._can_record_outputs or {}).get("router_logits")]
        if recorder is not None
    ]
    blocks = f"{anatomy(model).blocks}." if recorders else ""
    return {
        path: recorder.index
        for path, module in model.named_modules()
        for recorder in recorders
        if path.startswith(blocks) and type(module) is recorder.target_class and _only_routes(module)
    }


def _only_routes(module: nn.Module) -> bool:
    """False for a recorded module that is a whole mixture or block (Doge, ERNIE 4.5 VL)."""
    return not any(
        isinstance(inner, nn.Embedding) or name.rpartition(".")[2] == "down_proj"
        for name, inner in module.named_modules()
    )


def routers_of(model: PreTrainedModel) -> list[Router]:
    """Routers of a whole model, in the order of its blocks; [] for a dense model, and for one whose experts
    are not called by transformers' contract.
    """
    found = (_router(model, path, place) for path, place in router_paths(model).items())
    return [router for router in found if router is not None]


def _router(model: PreTrainedModel, path: str, place: int) -> Router | None:
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
        path=path, block=int(path.removeprefix(f"{anatomy(model).blocks}.").split(".")[0]),
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
