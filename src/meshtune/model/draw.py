"""Random weights (model.init=random), module by module: transformers' own values, never all at once.

    rehearsal on meta  ─> which parameters each call of `_init_weights` writes; None: not drawn only by these
    the same build     ─> a parameter has memory while its module's constructor draws, and from its module's
                          `_init_weights` to the last call that writes it; it is handed over, and freed

A constructor of torch draws values that `_init_weights` overwrites. Both move the generator as in a build of
the whole model, so the values are those of `from_config` after the same seed, whatever part of them is kept.
On a GPU constructors draw nothing and the GPU's generator draws: other values of the same distributions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

Build = Callable[[], PreTrainedModel]
Receive = Callable[[Sequence[str], Tensor], None]  # a parameter's names, its whole value: freed afterwards


def draw(
    build: Build, on_meta: Callable[[], Any], receive: Receive, device: torch.device
) -> PreTrainedModel | None:
    """Build a model with random weights and hand each parameter to `receive`.

    build: makes the model, as transformers' from_config does. on_meta: returns a context in which modules
    keep only the shapes of their parameters. device: where the values are drawn. Returns the model, its
    parameters without memory and its buffers right. None, with nothing drawn, if a parameter keeps what a
    constructor drew or is written before its own module is initialised: it can't be drawn module by module.
    """
    with torch.random.fork_rng(devices=[]), on_meta(), _Rehearsal() as rehearsal:
        plan = rehearsal.plan(build())
    if plan is None:
        return None
    calls, held = iter(plan), []  # held: (owner, name there, parameter on meta), of those with memory

    def initialised(module: nn.Module, initialise: Callable[[], None]) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                held.append((module, name, parameter))
                # NaN: whatever is not drawn shows when the pieces are filled
                memory = torch.full_like(parameter, float("nan"), device=device)
                module._parameters[name] = nn.Parameter(memory, parameter.requires_grad)
        initialise()
        for number, names in next(calls):
            owner, name, parameter = held[number]
            value, owner._parameters[name] = owner._parameters[name], parameter
            assert value is not None
            if names:
                receive(names, value.detach())

    ours = device.type == "cpu"  # so that the generator moves as in a build of the whole model
    with nullcontext() if ours else on_meta(), _freed_when_attached(), _initialising(initialised):
        return build()


class _Rehearsal(TorchDispatchMode):
    """Records a build on meta: which parameters get memory, in order, and which call is the last to write
    each of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[nn.Parameter] = []  # in the order in which their modules are initialised
        self.number: dict[int, int] = {}  # by storage: index in `parameters`
        self.last_call: list[int] = []  # that wrote each of `parameters`; -1: none
        self.calls = 0
        self.too_early: set[int] = set()  # storages written before their module's own call, or no parameter's
        self.written: set[int] | None = None  # storages that the running call wrote

    def plan(self, model: PreTrainedModel) -> list[list[tuple[int, tuple[str, ...]]]] | None:
        """(Index of a parameter, its names in the model) of those that are complete after each call; no names
        for one that tying has replaced. None if they can't be drawn so.
        """
        names: dict[nn.Parameter, tuple[str, ...]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[parameter] = (*names.get(parameter, ()), name)
        if not names.keys() <= set(self.parameters) or self.too_early & self.number.keys():
            return None
        complete: list[list[tuple[int, tuple[str, ...]]]] = [[] for _ in range(self.calls)]
        for number, (parameter, call) in enumerate(zip(self.parameters, self.last_call, strict=True)):
            if call < 0:
                return None
            complete[call].append((number, names.get(parameter, ())))
        return complete

    def __enter__(self) -> "_Rehearsal":
        self._patched = _initialising(self._initialised)
        self._patched.__enter__()
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._patched.__exit__(*details)

    def _initialised(self, module: nn.Module, initialise: Callable[[], None]) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                self.number[parameter.untyped_storage()._cdata] = len(self.parameters)
                self.parameters.append(parameter)
                self.last_call.append(-1)
        self.written = set()
        initialise()
        for storage in self.written:
            if storage in self.number:
                self.last_call[self.number[storage]] = self.calls
            else:
                self.too_early.add(storage)
        self.written = None
        self.calls += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.written is not None and func._schema.is_mutable:
            self.written |= {
                leaf.untyped_storage()._cdata
                for leaf in tree_leaves(args[:1])
                if isinstance(leaf, Tensor) and leaf.is_meta
            }
        return out


@contextmanager
def _initialising(run: Callable[[nn.Module, Callable[[], None]], None]) -> Iterator[None]:
    """Let `run` call transformers' initialisation of each module that is not initialised yet."""
    original = PreTrainedModel._initialize_weights

    def initialise(model: PreTrainedModel, module: nn.Module, *args: Any, **options: Any) -> None:
        if not getattr(module, "_is_hf_initialized", False):
            run(module, lambda: original(model, module, *args, **options))

    PreTrainedModel._initialize_weights = initialise  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = original  # type: ignore[method-assign]


@contextmanager
def _freed_when_attached() -> Iterator[None]:
    """Modules lose the memory of their parameters once their constructor is done and a parent takes them."""

    def free(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        for child in module.modules() if module is not None else ():
            for own, parameter in child._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    child._parameters[own] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_module_registration_hook(free)
    try:
        yield
    finally:
        handle.remove()
