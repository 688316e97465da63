"""The work of recurrent and convolutional mixers, as matrices of a census: their convolutions, and the scans
over their states, whose sizes are read off the cache that transformers makes for them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from meshtune.model.anatomy import Anatomy
from meshtune.model.matmuls import DispatchedMatmuls
from meshtune.placement.census import Matrix

# FLOPs of a scan, per token and element of the state: Megatron-LM, megatron/training/training.py,
# mamba_layer_flops. A gated delta rule has as many: decay 1, read 2, write 2, output 2.
SCAN_FLOPS = 7


@contextmanager
def mixers_apart(model: PreTrainedModel, parts: Anatomy, dispatched: DispatchedMatmuls) -> Iterator[None]:
    """Leave what mixers compute with activations alone out of `dispatched`; `recurrent_matrices` has it."""
    hooks = []
    for path in parts.mixers:
        mixer = model.get_submodule(path)
        hooks.append(mixer.register_forward_pre_hook(lambda *_: setattr(dispatched, "apart", True)))
        hooks.append(mixer.register_forward_hook(lambda *_: setattr(dispatched, "apart", False)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def recurrent_matrices(model: PreTrainedModel, parts: Anatomy) -> list[Matrix] | str:
    """Return the convolutions and scans of the mixers of a model on meta; a reason where a state is unknown.

    A scan is a matrix of half as many elements as it has FLOPs a token.
    """
    states = _states(model)
    if isinstance(states, str):
        return states
    matrices = []
    for path in parts.mixers:
        for name, module in model.get_submodule(path).named_modules(prefix=path):
            if isinstance(module, nn.Conv1d):
                columns = module.in_channels // module.groups * module.kernel_size[0]
                trained = module.weight.requires_grad
                matrices.append(Matrix(f"{name}.weight", "other", module.out_channels, columns, 1, trained))
    for index, elements in states.items():
        name = f"{parts.blocks}.{index}.state"
        matrices.append(Matrix(name, "other", elements, 1, SCAN_FLOPS / 2))
    return matrices


@torch.no_grad()
def _states(model: Any) -> dict[int, int] | str:
    """Return the elements of each recurrent layer's state, by its number; a reason where they are unknown."""
    try:
        with torch.device("meta"):
            output = model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=True)
        cache: Any = next(value for value in output.values() if hasattr(value, "layers"))
        layers = [vars(layer).get("recurrent_states") for layer in cache.layers]
    except Exception as error:  # each family has its own cache
        return f"its recurrent state can't be read from a cache ({type(error).__name__}: {error})"
    return {
        index: sum(state.numel() for state in states.values() if state is not None)
        for index, states in enumerate(layers)
        if states and any(state is not None for state in states.values())
    }
