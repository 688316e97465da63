"""A ledger that also writes down each operation, storage and collective of a step: a `StepTrace`.

It works on real tensors as on fake ones. An operation belongs to

    a module       the one whose forward runs it; in a backward the one whose forward made its autograd node
    a micro-batch  the number of the stage's forward that it is of, likewise
    a phase        forward, in evaluation mode without gradients; backward inside autograd's engine;
                   recomputation there under checkpoint, whose hooks on saved tensors tell; optimizer for
                   all that is outside of these
"""

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group
from torch._ops import HigherOrderOperator
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from meshtune.dryrun.compiled import FUSED
from meshtune.dryrun.costs import ATTENTION, is_attention
from meshtune.errors import UserError
from meshtune.layout import AXES, Layout
from meshtune.meter.ledger import ACTIVATIONS, COMMUNICATION, FROM_HOST, Entry, Ledger, storages_of
from meshtune.meter.trace import (
    BACKWARD,
    FORWARD,
    HOST_BUFFER,
    RECOMPUTATION,
    UPDATE,
    WITHOUT_GRADIENTS,
    Change,
    Collective,
    Operation,
    StepTrace,
    Storage,
)
from meshtune.optim.optimizer import parts_of
from meshtune.parallel.pipeline import Stage
from meshtune.placement.census import attended_pairs
from meshtune.placement.ranks import coordinates

# Collectives #


# Operator -> (name, position of the argument with the whole tensor, or all that is sent).
OPERATORS = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "recv_": ("receive", 0),
}
# The same of the functional collectives that the compiler writes; their whole tensor is the largest one.
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
NO_MESSAGE = ("barrier", "wait_tensor")  # operators of collectives that send no tensor
PEER = {"send": "dst", "recv_": "src"}  # argument with the other rank's number in the group


def collective_of(layout: Layout, func: Any, args: Any, kwargs: Any, out: Any) -> Collective | None:
    """The collective that an operator of c10d, or a functional one, runs with these arguments; None: it sends
    no tensor.

    layout: of all ranks. out: the operator's result. Raises KeyError for an operator that is not known.
    """
    if func._opname in NO_MESSAGE:
        return None
    given = {argument.name: value for argument, value in arguments(func, args, kwargs)}
    if func.namespace == torch.ops.c10d.name:
        op, position = OPERATORS[func._opname]
        group = dist.ProcessGroup.unbox(given["process_group"])
        size = sum(tensor.nbytes for tensor in tree_leaves(args[position]))
        if op == "all_to_all":  # a rank may receive more rows than it sends
            size = max(size, sum(tensor.nbytes for tensor in tree_leaves(args[0])))
    else:
        name = func._opname.rstrip("_").removesuffix("_out")
        op, group = FUNCTIONAL[name], _resolve_process_group(given["group_name"])
        size = max(leaf.nbytes for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor))
    ranks = dist.get_process_group_ranks(group)
    peer = PEER.get(func._opname)
    return Collective(
        op=op,
        axis="ep" if group.group_desc == "ep" else axis_of(layout, tuple(ranks)),
        ranks=len(ranks),
        bytes=size,
        stride=ranks[1] - ranks[0] if len(ranks) > 1 else 1,
        peer=None if peer is None else ranks[given[peer]],
        waits=not given.get("async_op", peer is not None),
    )


@cache
def axis_of(layout: Layout, ranks: tuple[int, ...]) -> str:
    """The axes along which these ranks of a layout differ, joined by "+"."""
    places = [coordinates(layout, rank) for rank in ranks]
    return "+".join(name for name in AXES if len({place[name] for place in places}) > 1)


def arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each argument of an operator's schema with its value in a call; left out, its default."""
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        yield argument, given


READ = torch.ops.aten._local_scalar_dense.default  # the host waits for one number of a device
DEVICE = torch.ops.prim.device.default  # the device of a fake tensor: no operation
SOURCE = __file__.removesuffix("meshtune/dryrun/recorder.py")  # folder that this package is in
STAND_INS = (
    "dryrun/recorder.py",
    "dryrun/substitutes.py",
    "experts/choices.py",
    "model/fused.py",
)  # files between torch and the step
MASTER = "master"  # name of the optimizer's own copy of a parameter
NO_KERNEL = {  # operators that launch nothing on a GPU, besides views and collectives
    "aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided",
    "aten.lift_fresh", "aten._local_scalar_dense", "aten._unsafe_view", "aten.detach", "aten.set_",
    "aten.lift", "aten.resize_", f"meshtune.{HOST_BUFFER}",
}  # fmt: skip

MATMULS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}


@dataclass(slots=True, eq=False)
class Place:
    """Module, micro-batch and stage of an operation."""

    module: str
    micro_batch: int
    stage: int


NOWHERE = Place("", -1, -1)


class Recorder(Ledger):
    """Writes `trace`, the trace of one step, while it is entered.

    model: this rank's stages. layout: of all ranks. pairs: see flops_of. read: makes up the number that the
    host reads from a tensor; None: it is read.
    """

    def __init__(
        self,
        device: torch.device,
        trace: StepTrace,
        model: nn.Module,
        layout: Layout,
        *,
        pairs: Callable[[str, Any], float],
        read: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self.trace, self.model, self.layout, self.pairs, self.read = trace, model, layout, pairs, read
        self.names = module_names(model)
        self.parameter_names = {id(p): name for name, p in named_parameters(model)}
        self.numbers: dict[int, int] = {}  # address of a living storage -> its number in the trace
        self.stack: list[Place] = []  # of the modules whose forward runs
        self.passes = Counter[tuple[str, int]]()  # forwards so far by phase and stage
        self.forward = FORWARD  # phase of the forward at hand, or of the last one
        self.nodes: list[int] = []  # sequence numbers of autograd nodes, ascending
        self.places: list[Place] = []  # parallel: where each was made
        self.making: Operation | None = None
        self.latest = FORWARD, NOWHERE  # phase and place of the last operation of a pass
        self.closed = False
        super().__init__(device)

    # Storages #

    def grow(self, entry: Entry, change: int) -> None:
        before = entry.bytes
        super().grow(entry, change)
        key = entry.key
        if before and key in self.numbers:
            self._log(self.numbers.pop(key), allocated=False)
        if entry.bytes:
            self.numbers[key] = len(self.trace.storages)
            self.trace.storages.append(self._storage(entry))
            self._log(self.numbers[key], allocated=True)

    def move(self, entry: Entry, category: str) -> None:
        super().move(entry, category)
        if (number := self.numbers.get(entry.key)) is not None:
            self.trace.storages[number].category = category

    def _log(self, storage: int, *, allocated: bool) -> None:
        if self.closed:  # a storage outlived the step, and the ledger still hears of its end
            return
        self.trace.changes.append(Change(len(self.trace.operations) - 1, storage, allocated))

    def _storage(self, entry: Entry) -> Storage:
        by = self.making
        if by is None:  # it existed before the step, or FSDP2 gives it memory: in a hook, by no operation
            phase, place = self._where() if self.trace.operations else ("", NOWHERE)
            phase = phase if place is not NOWHERE else ""
            return Storage(entry.bytes, entry.category, place.module, "", phase, place.micro_batch)
        return Storage(entry.bytes, entry.category, by.module, by.name, by.phase, by.micro_batch)

    def describe(self, state: Mapping[str, Tensor]) -> None:
        """Name the living storages of parameters, gradients and the optimizer, with shape and dtype.

        state: Optimizer.state.
        """
        for key, tensor in state.items():
            _, name, part = parts_of(key)
            self._name(tensor, name, part or MASTER)
        for name, parameter in named_parameters(self.model):
            self._name(parameter, name)  # without masters the optimizer's state has it too
            if parameter.grad is not None:
                self._name(parameter.grad, name)

    def _name(self, tensor: Tensor, name: str, state: str = "") -> None:
        for storage in storages_of(tensor):
            if (number := self.numbers.get(storage._cdata)) is not None:
                found = self.trace.storages[number]
                shard = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                found.name, found.state, found.shape = name, state, tuple(shard.shape)
                found.dtype = str(tensor.dtype).removeprefix("torch.")

    # Operations #

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return func(*args)
        if isinstance(func, HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if func is READ and self.read is not None:
            self._host_read()
            return self.read(args[0])
        phase, place = self._where()
        operation = Operation(f"{func.namespace}.{func._opname}.{func._overloadname}", phase, place.module,
                              place.micro_batch, place.stage, (), "")  # fmt: skip
        number = len(self.trace.operations)
        self.trace.operations.append(operation)
        outside, self.making = self.making, operation
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.making = outside
        if out is NotImplemented:  # it comes back as operations on the local tensors
            self.trace.operations.pop()
            return out
        if func is FUSED:
            operation.name = f"fused.{args[0]}"
        self._complete(operation, func, args, kwargs, out)
        last = self.trace.changes[-1] if self.trace.changes else None
        if not operation.kernels and not operation.collective and (last is None or last.at < number):
            self.trace.operations.pop()  # a view: nothing ran, nothing was allocated
        return out

    def _complete(self, operation: Operation, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Fill in what is known of an operation once it has run."""
        given, made = self.tensors(args[1] if func is FUSED else [args, kwargs]), self.tensors(out)
        name = f"{func.namespace}.{func._opname}"
        if name in MATMULS:
            refuse_unlike(operation.module, given)
        nothing = func.is_view or name in NO_KERNEL
        changed = [value for each, value in arguments(func, args, kwargs) if _is_written(each)]
        written = [] if nothing else [*made, *self.tensors(changed)]
        operation.shapes = tuple(tuple(tensor.shape) for tensor in given)
        result = (made or given)[:1]
        operation.dtype = str(result[0].dtype).removeprefix("torch.") if result else ""
        operation.reads, operation.writes = self._numbers(given), self._numbers(written)
        operation.written, operation.read = distinct_bytes(written), distinct_bytes(given)
        for number in operation.writes:
            storage = self.trace.storages[number]
            if not storage.shape and made:
                storage.shape, storage.dtype = tuple(made[0].shape), operation.dtype
        if func.namespace in (torch.ops.c10d.name, torch.ops._c10d_functional.name):
            operation.kernels = 0
            self._message(operation, func, args, kwargs, out)
            return
        operation.kernels = int(bool(written))
        if is_attention(operation):
            operation.pairs = self.pairs(name, args)
        operation.flops = flops_of(func, args, kwargs, out, self.pairs)
        if func is READ:
            self._host_read()
        if func is FROM_HOST and operation.phase != UPDATE:
            self.trace.host_copies[line_outside_torch()] += 1

    def _message(self, operation: Operation, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        collective = collective_of(self.layout, func, args, kwargs, out)
        if collective is None:
            return
        buffers = {self.trace.storages[number].category for number in operation.reads}
        if collective.waits and COMMUNICATION in buffers:  # FSDP2's, which have streams of their own
            collective = replace(collective, waits=False)
        operation.collective = collective

    def _numbers(self, tensors: list[Tensor]) -> tuple[int, ...]:
        keys = dict.fromkeys(storage._cdata for tensor in tensors for storage in storages_of(tensor))
        return tuple(self.numbers[key] for key in keys if key in self.numbers)

    def _host_read(self) -> None:
        """Count a read by its line of source; numbers of one list are one read."""
        line = line_outside_torch()
        operations = self.trace.operations
        new = [operation for operation in operations[self.read_until :] if operation.kernels]
        if new or line != self.read_line:
            self.trace.host_reads[line] += 1
            self.trace.host_waits.append(len(operations) - 1)
        self.read_until, self.read_line = len(operations), line

    read_until, read_line = 0, ""

    # Places #

    def _where(self) -> tuple[str, Place]:
        if self.default != ACTIVATIONS:
            return UPDATE, NOWHERE
        self.latest = self._in_passes()
        return self.latest

    def _in_passes(self) -> tuple[str, Place]:
        node = torch._C._current_autograd_node()
        if node is None and self.stack:
            self._made(sequence_number() - 1, self.stack[-1])
            return self.forward, self.stack[-1]
        if node is None:  # between two passes, or behind one: FSDP2's last reduce-scatter
            phase, place = self.latest
            if phase == WITHOUT_GRADIENTS:  # what the ranks add up: behind all of its passes
                return phase, NOWHERE
            return phase, Place("", place.micro_batch, place.stage)
        if recomputing():
            place = self.stack[-1] if self.stack else self._maker(node)
            self._made(sequence_number() - 1, place)
            return RECOMPUTATION, place
        place = self._maker(node)
        if node.name() == "_ReduceBehindBackward":  # of parallel/zero.py, behind the norm that it hooks
            place = Place("", place.micro_batch, place.stage)
        return BACKWARD, place

    def _made(self, sequence: int, place: Place) -> None:
        if not self.nodes or sequence > self.nodes[-1]:
            self.nodes.append(sequence)
            self.places.append(place)

    def _maker(self, node: Any) -> Place:
        """Place in which a node of autograd's graph was made."""
        if (variable := getattr(node, "variable", None)) is not None:
            name = self.parameter_names.get(id(variable), "")
            _, before = self.latest
            return Place(name.rpartition(".")[0], before.micro_batch, before.stage)
        at = bisect_right(self.nodes, node._sequence_nr()) - 1
        return self.places[at] if at >= 0 else NOWHERE

    def _enter(self, module: nn.Module, args: Any) -> None:
        above = self.stack[-1] if self.stack else NOWHERE
        if isinstance(module, Stage):
            self.forward = FORWARD if module.training else WITHOUT_GRADIENTS
            run = self.forward, module.index
            self.stack.append(Place("", self.passes[run], module.index))
            self.passes[run] += 1
        else:
            self.stack.append(Place(self.names.get(id(module), above.module), above.micro_batch, above.stage))
        if torch._C._current_autograd_node() is not None:  # recomputed: of the micro-batch of the backward
            node = self._maker(torch._C._current_autograd_node())
            self.stack[-1].micro_batch, self.stack[-1].stage = node.micro_batch, node.stage

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self.stack.pop()

    def _of_compiled(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled call of a module so that the compiler sees none of the hooks on every module."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter(module, args)
            self._unhook()
            try:
                return call(*args, **kwargs)
            finally:
                self._hook()
                self._leave(module, args, None)

        return run

    def _hook(self) -> None:
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> "Recorder":
        self._compiled_calls = {
            module: call for module in self.model.modules() if (call := module._compiled_call_impl)
        }
        for module, call in self._compiled_calls.items():
            module._compiled_call_impl = self._of_compiled(module, call)
        self._hook()
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self.closed = True
        super().__exit__(*details)
        self._unhook()
        for module, call in self._compiled_calls.items():
            module._compiled_call_impl = call


def sequence_number() -> int:
    """Number of autograd's next node."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def recomputing() -> bool:
    """True in a forward that checkpoint runs again: it replaces what is saved, by hooks of its own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
    return hooks(True) is not None


def module_names(model: nn.Module) -> dict[int, str]:
    """Path of each module in the whole model, by id. model: a list of stages."""
    return {id(module): name for stage in _stages(model) for name, module in stage.model.named_modules()}


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(Name in the whole model, parameter) of all stages."""
    return [pair for stage in _stages(model) for pair in stage.model.named_parameters()]


def _stages(model: nn.Module) -> list[Stage]:
    return [module for module in model.modules() if isinstance(module, Stage)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def refuse_unlike(module: str, factors: list[Tensor]) -> None:
    """Raise UserError for a matmul of unlike dtypes: fakes take it, real kernels do not."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(x.dtype for x in factors)]
    if len(dtypes) > 1:
        raise UserError(
            f"{module or 'The step'} multiplies tensors of {' and '.join(dtypes)}, which no kernel does: set "
            "train.precision=fp32, in which all are of one dtype."
        )


def distinct_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the tensors' elements; repeated tensors and expanded dimensions count once."""
    total = 0
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        total += math.prod(size for size, stride in dims if stride or not size) * tensor.element_size()
    return total


def line_outside_torch() -> str:
    """Return "file:line function" of the innermost frame that is neither torch's nor of STAND_INS."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and "<" not in file and not file.endswith(STAND_INS):
            file = file.rpartition("site-packages/")[2].removeprefix(SOURCE)
            return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


# FLOPs #

# torch counts attention as if every query saw every key. Here a query counts the keys that it sees: 4 FLOPs a
# pair and element of a head in the forward (two matmuls), 10 in the backward of a flash kernel, which
# computes the scores again (Dao 2023, arXiv:2307.08691).


def visible_pairs(
    documents: Sequence[int],
    window: int | None,
    columns: Iterable[int] | None = None,
    shared: Sequence[int] = (),
) -> int:
    """(Query, key) pairs of causal attention inside the documents of one row.

    window: keys that a query sees at most, its own included; None: all earlier ones of its document.
    columns: of the queries that count; None: all. shared: as in `MicroBatch`. Padding beyond the documents
    sees nothing.
    """
    both = [*zip_longest(documents, shared, fillvalue=0)]
    if columns is None:
        return attended_pairs(map(sum, both), window) - attended_pairs(shared, window)
    starts, position = [], 0
    for length, first in both:
        starts += [position - first] * length
        position += length
    seen = (column - starts[column] + 1 for column in columns if column < position)
    return sum(seen if window is None else (min(keys, window) for keys in seen))


def flops_of(func: Any, args: Any, kwargs: Any, out: Any, pairs: Callable[[Any, Any], float]) -> int:
    """FLOPs of one call of an operator.

    pairs: (name of an attention operator, its arguments) -> (query, key) pairs of the call, over its rows.
    """
    name = f"{func.namespace}.{func._opname}"
    if name in ATTENTION:
        query, key, matmuls = ATTENTION[name]
        q, v = args[query], args[key + 1]
        heads = q.shape[1]  # of [rows, heads, seq, head_dim] as of [tokens, heads, head_dim]
        width = (q.shape[-1] + v.shape[-1]) / 2  # of the matmuls with keys and of those with values
        return round(matmuls * 2 * pairs(name, args) * heads * width)
    if name == "aten._grouped_mm":  # [tokens, inner] @ [groups, inner, cols], each token in one group
        return 2 * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
