"""Matmuls of linear layers in 8-bit floats, by torchao: `train.precision: fp8`.

    y = x Wᵀ    x, W in e4m3    gradient of x: dy W, of W: dyᵀ x    dy in e5m2

Each operand is divided by one scale, so that its largest magnitude is the format's, and cast as it is
multiplied (dynamic scaling of whole tensors); sums and results are wider. Parameters keep names, shapes and
dtypes: ZeRO gathers weights in 16 bits, so that a scale is the whole matrix'; tp's is that of a rank's part.
A processor has no such units: there the rounded operands are multiplied in fp32.
"""

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from meshtune.errors import UserError

INSTALL = 'train.precision=fp8 multiplies by torchao, which is not installed: pip install "meshtune[fp8]".'


class Fp8Linear(nn.Linear):
    """nn.Linear that multiplies in 8-bit floats."""

    fp8_function: Any  # torchao's autograd function
    fp8_settings: tuple[Any, Any]  # its settings: for matmuls, for casts

    def forward(self, input: Tensor) -> Tensor:
        out = self.matmul(input)
        return out if self.bias is None else out + self.bias

    def matmul(self, x: Tensor) -> Tensor:
        """The matmul with the weight."""
        return self.fp8_function.apply(x, self.weight.t(), *self.fp8_settings)


@cache
def _class_of(kind: Any) -> Any:
    return Fp8Linear if kind is nn.Linear else type(kind.__name__, (kind, Fp8Linear), {})


def convert(model: nn.Module, names: Iterable[str], *, emulate: bool) -> None:
    """Let linear layers of a model multiply in 8-bit floats, in place.

    names: of the layers. emulate: True on a processor. Raises UserError without torchao.
    """
    if find_spec("torchao") is None:
        raise UserError(INSTALL)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as function

    # Where a micro-batch's tokens are not a multiple of 16, they are padded for the weights' gradients.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    theirs: Any = convert_to_float8_training(nn.Linear(16, 16, device="meta"), config=config)
    for name in names:
        layer: Any = model.get_submodule(name)
        layer.fp8_function, layer.fp8_settings = function, (theirs.linear_mm_config, config)
        if hasattr(layer, "lora_in_place"):
            layer.lora_in_place = False  # torch refuses to change what a function of Python returned
        layer.__class__ = _class_of(type(layer))
