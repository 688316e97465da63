"""Expert parallelism (ep): each rank holds some of the experts of a mixture, and tokens travel to them.

    router │ dispatch ⇄ own experts ⇄ back │ weights, sum        ⇄  all-to-all (experts/exchange.py)

All else of a block stays on every rank, which has its own tokens. After the exchange the gradient of an
expert is the sum over all tokens of its ep group; what is left is the sum over the ranks that hold the same
experts (mesh.expert_mesh), by the same means as for all parameters.
"""

from typing import Any

from transformers import PreTrainedModel

from meshtune.errors import UserError
from meshtune.experts.exchange import Exchange
from meshtune.experts.products import experts_of
from meshtune.parallel.mesh import Axis
from meshtune.placement.split import Split


def split_experts(model: PreTrainedModel, ep: Axis) -> dict[str, Split]:
    """Have a model's experts exchange rows over the ranks of `ep`; returns how to cut their parameters, by
    name. With one rank nothing is changed. Raises UserError for experts that `ep` does not divide.
    """
    if ep.size == 1:
        return {}
    splits: dict[str, Split] = {}
    names = {module: path for path, module in model.named_modules()}
    for module in experts_of(model):
        experts: Any = module.num_experts
        if experts % ep.size:  # of another model that is the reference
            raise UserError(f"ep={ep.size} does not divide the {experts} experts of {model.name_or_path}.")
        vars(module)["dispatcher"] = Exchange(ep.group, ep.size, names[module])
        for name, parameter in module.named_parameters(prefix=names[module], recurse=False):
            assert len(parameter) == module.num_experts, f"{name} is not stacked by expert"
            splits[name] = Split(0, axis=ep.name)
    return splits
