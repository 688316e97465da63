"""Watch one forward on the meta device, above and below autograd: its matmuls, and the storages that live.

    ParameterMatmuls   above: each matmul with a parameter, and whether its input needs a gradient
    DispatchedMatmuls  below: FLOPs of every matmul that a device would run, and those without a parameter
    LivingBytes        below, and in a backward: bytes by what they grow with, and how tp and sp split them

The first two check each other: the FLOPs of both must agree (trace.py).
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import add, sub
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from meshtune.model.anatomy import Anatomy
from meshtune.placement.census import Matrix, adapter_name

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
        LoRA rank by module, or parameter of experts; their matmuls are recorded as if the module had them.
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
        if rank := self.adapters.get(name) or self.adapters.get(name.rpartition(".")[0]):
            lora_a, lora_b = self._adapter(matrix, rank)
            self.matrices += [lora_a, lora_b]
            if lora_b.trainable or lora_b.input_gradient:  # as adding the adapter's output does
                out = out if out.requires_grad else out.detach().requires_grad_()
        return out

    def _adapter(self, matrix: Matrix, rank: int) -> tuple[Matrix, Matrix]:
        """Return (lora_A, lora_B), the matrices of the LoRA pair of this rank on `matrix`."""
        names = [adapter_name(matrix.name, which) for which in "AB"]
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


class Operations(TorchDispatchMode):
    """Give each operation, with the tensors that it read and made, to `note`."""

    def __init__(self, note: Callable[[Any, list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, made = (tree_leaves(each) for each in ((args, kwargs), out))
        tensors = ([each for each in some if isinstance(each, Tensor)] for some in (read, made))
        self.note(func.overloadpacket, *tensors)
        return out


# Storages that live #

#     weight   forward             backward
#     rows     whole -> its kind   its kind -> whole
#     columns  its kind -> whole   whole -> its kind
#
# where rows or columns are what tensor parallelism cuts, and its kind is heads or mlp. All other operations
# make what they read.

KEYS = 2048  # a token, by which the fullest time is chosen: bytes of scores grow with them
OUTSIDE, WHOLE, HEADS, MLP = range(4)  # indices of Size


class Size(NamedTuple):
    """Bytes by what they grow with: the first four with the tokens."""

    outside: float = 0.0  # outside attention and MLP: sp splits it
    whole: float = 0.0  # inputs of their first matrices, outputs of their last ones: partial sums under tp
    heads: float = 0.0  # inside attention
    mlp: float = 0.0
    keys: float = 0.0  # per token and key
    rest: float = 0.0  # gradients of weights

    @property
    def per_token(self) -> float:
        return sum(self[:4])

    def plus(self, other: "Size") -> "Size":
        return Size(*map(add, self, other))

    def minus(self, other: "Size") -> "Size":
        return Size(*map(sub, self, other))

    def covers(self, other: "Size") -> bool:
        return all(mine >= its for mine, its in zip(self, other, strict=True))


class LivingBytes(TorchDispatchMode):
    """Follow the storages that operations allocate while it is active, and the most that live at once.

    Those that the tokens of a row divide grow with them; the others are gradients of weights.
    """

    def __init__(self, tokens: int, rows: int = 1, cuts: Mapping[int, tuple[int | None, int]] | None = None):
        """tokens: of each row. cuts: by the storage of a weight, the dimension that tp cuts and its kind."""
        super().__init__()
        self.rows, self.tokens, self.cuts = rows, tokens, cuts or {}
        self.backward = False
        self.kind: int | None = None  # of all that is made; None: by what it is made of
        self.known: dict[int, int] = {}  # kinds of the storages that live
        self.living = Size()
        self.most = self.living
        self.fullest: list[Size] = []  # those times that no other one exceeds in every size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        given = [t.untyped_storage()._cdata for t in tensors]
        kind = self._kind(func.overloadpacket, given) if self.kind is None else self.kind
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor.untyped_storage(), given, kind)
        self.most = max(self.most, self.living, key=lambda size: size.per_token + KEYS * size.keys)
        if not any(other.covers(self.living) for other in self.fullest):
            self.fullest = [other for other in self.fullest if not self.living.covers(other)]
            self.fullest.append(self.living)
        return out

    def size(self, storage: torch.UntypedStorage, kind: int = OUTSIDE) -> Size:
        """Size of a storage."""
        of_token, rest = divmod(storage.nbytes(), self.tokens)
        if rest:
            return Size(rest=storage.nbytes())
        of_key, rest = divmod(of_token, self.tokens)
        if not rest:
            return Size(keys=of_key / self.rows)
        return Size(*(of_token / self.rows if kind == index else 0.0 for index in range(4)))

    def _kind(self, operation: Any, given: list[int]) -> int:
        """Return the kind of what an operation makes of the storages `given`."""
        kinds = [self.known.get(key, OUTSIDE) for key in given if key not in self.cuts]
        if operands := ATEN_MATMULS.get(operation):
            for cut, kind in filter(None, map(self.cuts.get, given[operands])):
                if cut is not None:
                    return kind if (cut == 1) == self.backward else WHOLE
        return max(kinds, default=OUTSIDE)

    def _follow(self, storage: torch.UntypedStorage, given: list[int], kind: int) -> None:
        """Count a storage until it is freed; those in `given` existed before the operation."""
        key, size = storage._cdata, self.size(storage, kind)
        if key in given or key in self.known:
            return
        self.known[key] = kind
        self.living = self.living.plus(size)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: Size) -> None:
        del self.known[key]
        self.living = self.living.minus(size)


class SavingBytes(LivingBytes):
    """Follow also what autograd saves in one forward, by its hooks, and needs in the backward."""

    def __init__(self, tokens: int, rows: int, cuts: Mapping[int, tuple[int | None, int]]) -> None:
        super().__init__(tokens, rows, cuts)
        self.saved: set[int] = set()  # storages
        self.forward = Size()  # the most in the forward
        self.when_saved = Size()  # the most that had lived when the last tensor was saved
        self.when_needed: Size | None = None  # that lived when the first one was needed; None: none was

    def pack(self, tensor: Tensor) -> Tensor:
        self.saved.add(tensor.untyped_storage()._cdata)
        self.when_saved = self.most
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        self.when_needed = self.when_needed or self.living
        return tensor


class Gathered(torch.autograd.Function):
    """Copy hidden states as sequence parallelism does before attention and MLP, where a rank needs all of
    them, and behind, where it has its own tokens; the reverse of gradients.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, meter: LivingBytes, kinds: tuple[int, int]) -> Tensor:  # type: ignore[override]
        ctx.meter, ctx.kinds = meter, kinds
        return _copied(hidden, meter, kinds[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _copied(gradient, ctx.meter, ctx.kinds[1]), None, None


def _copied(hidden: Tensor, meter: LivingBytes, kind: int) -> Tensor:
    meter.kind = kind
    out = hidden.clone()
    meter.kind = None
    return out
