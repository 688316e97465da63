"""Watch the matmuls of one forward on the meta device, above and below autograd.

    ParameterMatmuls   above: each matmul with a parameter, and whether its input needs a gradient
    DispatchedMatmuls  below: FLOPs of every matmul that a device would run, and those without a parameter

Two views of the same forward check each other: the FLOPs of both must agree (trace.py).
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from meshtune.model.anatomy import Anatomy
from meshtune.placement.census import Matrix

TOKENS = 13  # of the traced forward; a prime that isn't a head size, so that shapes with it are recognised

A = torch.ops.aten
FROM_0 = slice(0, 2)  # positions of the two operands among the tensors
FROM_1 = slice(1, 3)  # the same if the first tensor is added
ATEN_MATMULS = {
    **dict.fromkeys((A.mm, A.bmm, A._grouped_mm), FROM_0),
    **dict.fromkeys((A.addmm, A.addmm_, A.baddbmm), FROM_1),
}
MATMULS: dict[Any, slice] = {
    nn.functional.linear: FROM_0,  # its weight is [out, in], all others' [(experts,) in, out]
    torch.addmm: FROM_1,
    torch.baddbmm: FROM_1,
    Tensor.baddbmm: FROM_1,
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm), FROM_0
    ),
    **dict.fromkeys((torch._grouped_mm, nn.functional.grouped_mm), FROM_0),  # pyright: ignore[reportPrivateImportUsage]
}
CASTS = {Tensor.to, Tensor.type, Tensor.float, Tensor.type_as}  # some routers multiply with fp32 weights


@dataclass(frozen=True)
class BareMatmul:
    """A matmul without a parameter: batch · [m, k] @ [k, n]."""

    after: str  # name of the last parameter that was multiplied with before it; "" if there was none
    shape: tuple[int, int, int, int]  # batch, m, k, n
    gradients: tuple[bool, bool]  # whether its two operands need a gradient


class ParameterMatmuls(TorchFunctionMode):
    """Record each matmul with a parameter as a Matrix, in `matrices`.

    Use as a context manager around one forward of TOKENS tokens.
    """

    def __init__(self, model: nn.Module, frozen: Collection[str], adapters: Mapping[str, int]) -> None:
        """model: without adapters. frozen: adapters without gradient, <module>.lora_A or .lora_B. adapters:
        LoRA rank by module; their matmuls are recorded as if the module had them.
        """
        super().__init__()
        self.frozen = frozen
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.casts: list[Tensor] = []  # of parameters; an id is unique only among living objects
        self.adapters = adapters
        self.matrices: list[Matrix] = []
        self.inside = False  # while a recorded matmul runs
        self.gradients = (True, True)  # whether the operands of the running matmul need a gradient

    def _name(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter that this tensor is, or is a view of."""
        name = self.names.get(id(tensor))
        return name if name or tensor._base is None else self.names.get(id(tensor._base))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one torch function; record it if it multiplies with a parameter."""
        kwargs = kwargs or {}
        if func in CASTS and (name := self._name(args[0])):
            out = func(*args, **kwargs)
            self.names[id(out)] = name
            self.casts.append(out)
            return out
        if func not in MATMULS:
            return func(*args, **kwargs)
        x, weight = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)][MATMULS[func]][:2]
        self.gradients = (x.requires_grad, weight.requires_grad)
        name = self._name(weight)
        if name is None:
            return func(*args, **kwargs)
        rows, cols = weight.shape[-2:] if func is nn.functional.linear else reversed(weight.shape[-2:])
        count = x.numel() / cols / TOKENS
        matrix = Matrix(
            name,
            kind="other",
            rows=rows,
            cols=cols,
            count=int(count) if count == int(count) else count,
            trainable=weight.requires_grad,
            input_gradient=x.requires_grad,
        )
        self.matrices.append(matrix)
        self.inside = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.inside = False
        if rank := self.adapters.get(name.rpartition(".")[0]):
            lora_a, lora_b = self._adapter(matrix, rank)
            self.matrices += [lora_a, lora_b]
            if lora_b.trainable or lora_b.input_gradient:  # as adding the adapter's output does
                out = out if out.requires_grad else out.detach().requires_grad_()
        return out

    def _adapter(self, matrix: Matrix, rank: int) -> tuple[Matrix, Matrix]:
        """Return (lora_A, lora_B), the matrices of the LoRA pair of this rank on `matrix`."""
        names = [f"{matrix.name.rpartition('.')[0]}.lora_{which}" for which in "AB"]
        lora_a, lora_b = (
            replace(matrix, name=name, kind="adapter", trainable=name not in self.frozen) for name in names
        )
        lora_a = replace(lora_a, rows=rank)
        return lora_a, replace(lora_b, cols=rank, input_gradient=lora_a.input_gradient or lora_a.trainable)


class DispatchedMatmuls(TorchDispatchMode):
    """Count every matmul below autograd; list those that ParameterMatmuls did not record, in `bare`.

    recorded: the mode that watches the same forward.
    """

    def __init__(self, recorded: ParameterMatmuls) -> None:
        super().__init__()
        self.recorded = recorded
        self.parameter_flops = 0  # of recorded matmuls
        self.bare: list[BareMatmul] = []
        self.unknown: set[str] = set()  # other operations that cost FLOPs
        self.apart = False  # while a recurrent mixer runs, whose work with activations is counted separately

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one ATen operator; count it if it is a matmul."""
        packet = func.overloadpacket
        if packet in ATEN_MATMULS:
            first, second = args[ATEN_MATMULS[packet]][:2]
            m, k, n = first.shape[-2], first.shape[-1], second.shape[-1]
            batch = first.shape[0] if first.ndim == 3 else 1
            if self.recorded.inside:
                self.parameter_flops += 2 * batch * m * k * n
            elif k > 1 and not self.apart:  # else an outer product, as of positions and frequencies
                last = self.recorded.matrices[-1].name if self.recorded.matrices else ""
                self.bare.append(BareMatmul(last, (batch, m, k, n), self.recorded.gradients))
        elif packet in flop_registry and not self.apart:
            self.unknown.add(str(packet))
        return func(*args, **(kwargs or {}))


# Recurrent and convolutional mixers #


# FLOPs of a scan, per token and element of the state: Megatron-LM, megatron/training/training.py,
# mamba_layer_flops. A gated delta rule has the same number: decay 1, read 2, write 2, output 2.
SCAN_FLOPS = 7


@contextmanager
def mixers_apart(model: PreTrainedModel, parts: Anatomy, dispatched: DispatchedMatmuls) -> Iterator[None]:
    """Leave what mixers compute only from activations out of `dispatched`; `recurrent_matrices` has it."""
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

    A scan is a matrix with one element per two FLOPs of a token.
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
