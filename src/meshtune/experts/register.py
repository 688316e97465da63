"""Experts of a mixture, for any Hugging Face model whose experts are called through transformers'
`ALL_EXPERTS_FUNCTIONS`.

    hidden [tokens, hidden], index [tokens, k], weights [tokens, k]     from the model's own router
        │
        ▼  dispatcher.dispatch     rows [rows, hidden] sorted by expert, counts [experts], receipt
        ▼  compute                 rows [rows, hidden]: the experts' own matmuls  (products.py)
        ▼  dispatcher.back         rows [tokens, k, hidden]
        ▼  × weights, summed over k
    hidden [tokens, hidden]

The two seams are the dispatcher and the products. The dispatcher is a sort (dispatch.py), for experts that
are all on this rank, or exchanges rows with other ranks (exchange.py). Which matmul runs is chosen once,
where a model is built: `use_products`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from meshtune.experts.dispatch import LOCAL, Dispatcher
from meshtune.experts.products import MATMULS, compute, experts_of, matmul_for

NAME = "meshtune"  # of the experts' function in a model's config


def use_products(model: nn.Module, kernels: str | None = None, dtype: torch.dtype | None = None) -> None:
    """Make the experts of a model run meshtune's function, in place; a model without any stays as it is.

    kernels, dtype: the kind of device, "cpu" or "cuda", and dtype that the matmul is chosen for. None: those
    of the tensors of each call.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    for module in experts_of(model):
        config: Any = module.config
        config._experts_implementation = NAME
        if kernels and dtype:
            vars(module)["matmul"] = matmul_for(module, kernels, dtype)


def products_of(model: nn.Module) -> str | None:
    """Name the matmuls that a model's experts run, for a reader; None for a model without such experts."""
    return ", ".join(dict.fromkeys(vars(module)["matmul"] for module in experts_of(model))) or None


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Sum of the outputs of each token's experts, as transformers' modules call it.

    hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, k] -> [tokens, hidden].
    """
    chosen: Any = vars(module)
    dispatcher: Dispatcher = chosen.get("dispatcher", LOCAL)
    matmul = chosen.get("matmul") or matmul_for(module, hidden_states.device.type, hidden_states.dtype)
    rows, counts, receipt = dispatcher.dispatch(hidden_states, top_k_index, int(module.num_experts))  # type: ignore[arg-type]
    rows = dispatcher.back(compute(module, rows, counts, MATMULS[matmul]), receipt)
    # The weights multiply here, where the router is, and not on the way: its gradient needs no exchange.
    return (rows * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)
