"""Expert parallelism (ep): each rank holds some of the experts of a mixture, and tokens travel to them.

    router │ dispatch ⇄ own experts ⇄ back │ weights, sum        ⇄  all-to-all (experts/exchange.py)

All else of a block stays on every rank, which has its own tokens. After the exchange the gradient of an
expert is the sum over all tokens of its ep group; what is left is the sum over the ranks that hold the same
experts (mesh.expert_mesh), by the same means as for all parameters.
"""

from torch import nn

from meshtune.experts.exchange import Exchange
from meshtune.experts.register import experts_of
from meshtune.parallel.mesh import Axis
from meshtune.placement.split import Split


def split_experts(model: nn.Module, ep: Axis) -> dict[str, Split]:
    """Have a model's experts exchange rows over the ranks of `ep`; returns how to cut their parameters, by
    name. With one rank nothing is changed.
    """
    if ep.size == 1:
        return {}
    splits: dict[str, Split] = {}
    exchange, names = Exchange(ep.group, ep.size), {module: path for path, module in model.named_modules()}
    for module in experts_of(model):
        vars(module)["dispatcher"] = exchange
        for name, parameter in module.named_parameters(prefix=names[module], recurse=False):
            assert len(parameter) == module.num_experts, f"{name} is not stacked by expert"
            splits[name] = Split(0, axis=ep.name)
    return splits
