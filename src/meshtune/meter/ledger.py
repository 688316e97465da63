"""Bytes of living storages by category.

On CPU, `Ledger` is a dispatch mode: it sees every operation and counts each storage that one makes as it
comes and goes, exact to the byte; only workspaces inside a kernel or a collective escape it. A storage gets
its category

    weights           from its owner: the model's parameters and buffers; shards, where ZeRO shards them
    gathered_weights  from FSDP2's operator that copies a finished all-gather into whole parameters, and from
                      its owner: a whole parameter of a model whose parameters are sharded
    gradients         from its owner, when a gradient reaches its parameter, from FSDP2's operator that
                      copies gradients into the input of a reduce-scatter, by being cast from its reduced
                      output, and in a pass by being cast from a gradient, or from an operation on logits or
                      gradients whose result has the head's shape: the gradient of the head that the chunked
                      loss makes in the forward, and its sum over chunks
    optimizer         from its owner: masters and AdamW's state
    logits            from the head, whose output it is, or from an operation on logits that has their
                      columns: their logarithms, their softmax, their gradient
    communication     from the operators of FSDP2 that fill the flat input of a collective; as output of a
                      collective with such an input; or as the buffer of a receive
    activations       from a forward or backward pass in which it is made, if it is nothing of the above
    temporary         from being made outside of the passes (the optimizer's update), likewise

So activations contain what a pass frees again at once: no operation shows what autograd will keep. They also
contain results of collectives on activations (tensor and context parallelism), which later layers read, and,
between the loss and its backward, the hidden states' gradient that the chunked loss has made already. A flat
buffer of summed gradients (plain data parallelism) is their storage: gradients.

On CUDA no operation is watched: `storage_bytes` of the categories that have an owner is known, the rest is
one number.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshtune.meter.trace import (
    ACTIVATIONS,
    COMMUNICATION,
    GATHERED,
    GRADIENT_COPIES,
    GRADIENTS,
    HOST_BUFFER,
    LOGITS,
    TEMPORARY,
    WEIGHTS,
)

FROM_HOST = torch.ops.aten.lift_fresh.default  # takes a tensor of Python's numbers, which no operation made
RANDOM = ("run_and_save_rng_state", "run_with_rng_state")  # seeds of compiled dropout, a few bytes
UNCLAIMED = (ACTIVATIONS, TEMPORARY)  # what a storage is until something shows more


@dataclass
class Entry:
    """A storage that still exists."""

    bytes: int
    category: str  # one of CATEGORIES
    key: int = 0  # address of its C++ object
    born: int = 0  # the ledger's clock when it was first seen
    of_gradients: bool = False  # a flat buffer of gradients that FSDP2 reduces, or their sum
    ref: Any = None  # weak reference to the storage; its callback removes the entry


class Ledger(TorchDispatchMode):
    """Counts the bytes of all living storages by category, and keeps the composition of their peak.

    It counts inside `with ledger:`, where it also replaces UntypedStorage.resize_. `total` and `live` are
    bytes now, `peak` and `parts` those at the highest total since `restart`.

    A tensor often gets its category after it was made (a gradient when it reaches its parameter, optimizer
    state after the step). It then moves in the composition of the peak too, if it was alive at the peak.

    device: storages that operations make on another type of device are not counted.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.default = ACTIVATIONS  # category of new storages that nothing more is known of
        self.logit_columns: int | None = None  # of the head's output
        self.head_shape: torch.Size | None = None  # of the head's weight on this rank, unsharded
        self.entries: dict[int, Entry] = {}  # by the address of the storage's C++ object
        self.expected: dict[int, Entry] = {}  # claimed, but not seen yet: not counted
        self.live: Counter[str] = Counter()  # bytes by category
        self.total = self.clock = 0  # bytes; storages seen so far
        self.operations = 0  # dispatched so far
        self.restart()

    def restart(self) -> None:
        """Begin a phase: its peak so far is what is alive now."""
        self.peak, self.parts, self.peak_clock = self.total, Counter(self.live), self.clock

    def tag(self, tensors: Iterable[Tensor], category: str) -> None:
        """Move the storages of these tensors to `category`, whatever theirs was; count those not seen yet."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                entry = self._entry_of(storage, category)
                if entry.category != category:
                    self.move(entry, category)

    def tag_logits(self, logits: Tensor, head_shape: torch.Size | None = None) -> None:
        """Move the head's output, [..., vocabulary of this rank], to logits.

        Results of later operations on it that have equally many columns become logits too, those of
        `head_shape`, the shape of the head's weight, gradients.
        """
        self.logit_columns, self.head_shape = logits.shape[-1], head_shape
        self.tag([logits], LOGITS)

    def _claim(self, values: Any, category: str) -> None:
        """Move the tensors in `values`, any nest of them, to `category` if theirs is one of UNCLAIMED.

        Storages that were made before the ledger was entered get it when they are first seen.
        """
        for tensor in self.tensors(values):
            for storage in storages_of(tensor):
                entry = self.entries.get(key := storage._cdata)
                if entry is None:
                    self.expected[key] = Entry(0, category, key, ref=weakref.ref(storage, self._expiry(key)))
                elif entry.category in UNCLAIMED:
                    self.move(entry, category)

    def move(self, entry: Entry, category: str) -> None:
        """Change the category of a living storage."""
        self.live[entry.category] -= entry.bytes
        self.live[category] += entry.bytes
        if entry.born <= self.peak_clock:
            self.parts[entry.category] -= entry.bytes
            self.parts[category] += entry.bytes
        entry.category = category

    def _entry_of(self, storage: torch.UntypedStorage, category: str) -> Entry:
        """The storage's entry, made if it is new and resized to the storage's bytes.

        category: of a new entry, unless `_claim` gave it one; others keep theirs.
        """
        entry = self.entries.get(key := storage._cdata)
        if entry is None:
            self.clock += 1
            claimed = self.expected.pop(key, None)
            made_as = claimed.category if claimed else category
            entry = self.entries[key] = Entry(0, made_as, key, self.clock)
            entry.ref = weakref.ref(storage, self._removal(key))
        if storage.nbytes() != entry.bytes:
            self.grow(entry, storage.nbytes() - entry.bytes)
        return entry

    def _removal(self, key: int) -> Callable[[object], None]:
        def remove(_: object) -> None:
            entry = self.entries.pop(key)
            self.grow(entry, -entry.bytes)

        return remove

    def _expiry(self, key: int) -> Callable[[object], None]:
        def remove(_: object) -> None:
            self.expected.pop(key, None)

        return remove

    def grow(self, entry: Entry, change: int) -> None:
        """Count a storage that is allocated, freed or resized. change: of its bytes."""
        entry.bytes += change
        self.total += change
        self.live[entry.category] += change
        if self.total > self.peak:
            self.restart()

    def tensors(self, values: Any) -> list[Tensor]:
        """Tensors in `values`, any nest of them, on the device that is watched."""
        return [
            leaf
            for leaf in tree_leaves(values)
            if isinstance(leaf, Tensor) and leaf.device.type == self.device.type
        ]

    def _known(self, values: Any) -> Iterator[Entry]:
        """Entries of the storages of tensors in `values`, any nest of them."""
        for storage in chain.from_iterable(storages_of(tensor) for tensor in self.tensors(values)):
            if (entry := self.entries.get(storage._cdata)) is not None:
                yield entry

    def _has(self, values: Any, category: str) -> bool:
        """True if a tensor in `values`, any nest of them, has a storage of this category."""
        return bool(self.live[category]) and any(entry.category == category for entry in self._known(values))

    def _mark(self, values: Any) -> None:
        """Note of the tensors in `values` that they are flat buffers of gradients, or their sums."""
        for entry in self._known(values):
            entry.of_gradients = True

    def _foreign(self, made: list[Tensor], values: Any) -> set[int]:
        """Addresses of the storages of `made` that are new to the ledger, and that `values`, the operation's
        arguments, have.

        The operation did not make them then, but only views them: so gloo's reduce-scatter views its
        workspace, which one of its threads frees at any later time.
        """
        new = {storage._cdata for tensor in made for storage in storages_of(tensor)}
        new = new - self.entries.keys() - self.expected.keys()
        given = chain.from_iterable(storages_of(tensor) for tensor in self.tensors(values)) if new else ()
        return new.intersection(storage._cdata for storage in given)

    def _claim_of_collective(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Move what a collective, or FSDP2's operator around one, reads and writes to its category.

        func, args, kwargs, out: the operation that was dispatched, its arguments and its result. Other
        operations change nothing.
        """
        match func.namespace, func._opname:
            case "fsdp", "all_gather_copy_in":  # shards in the compute dtype -> flat buffer
                self._claim([args, out], COMMUNICATION)
            case "fsdp", "split_with_sizes_copy":  # flat buffer -> whole parameters
                self._claim(kwargs["out"], GATHERED)
            case "fsdp", name if name in GRADIENT_COPIES:  # gradients -> flat buffer
                self._claim(args[0], GRADIENTS)
                self._claim(kwargs["out"], COMMUNICATION)
                self._mark(kwargs["out"])
            case "c10d", "recv_":
                self._claim(args, COMMUNICATION)
            case "c10d", _ if self._has(args, COMMUNICATION):
                self._claim(args, COMMUNICATION)
                if any(entry.of_gradients for entry in self._known(args)):
                    self._mark(args)
            case "aten", "_to_copy" if any(self._is_gradient(entry) for entry in self._known(args)):
                self._claim(out, GRADIENTS)  # reduced shards in the parameters' dtype, sums of gradients

    def _is_gradient(self, entry: Entry) -> bool:
        """True for a buffer or sum of gradients that FSDP2 reduces, and in a pass for any gradient."""
        return entry.of_gradients or (self.default == ACTIVATIONS and entry.category == GRADIENTS)

    def _category_of(self, made: Tensor, values: Any, of_logits: bool) -> str:
        """Category of a new storage of `made`. values: arguments of the operation. of_logits: logits are
        among them.
        """
        in_pass = self.default == ACTIVATIONS
        cast = (WEIGHTS, GATHERED)  # of the head's own weight
        if in_pass and made.shape == self.head_shape and not any(self._has(values, of) for of in cast):
            return GRADIENTS
        # A compiled loss allocates the gradient of logits from no tensor, and its kernel fills it.
        as_wide = made.ndim > 0 and made.shape[-1] == self.logit_columns
        of_logits = as_wide and (of_logits or (in_pass and not self.tensors(values)))
        return LOGITS if of_logits else self.default

    supports_higher_order_operators = True  # RANDOM of torch 2.15

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            assert func.name() in RANDOM, f"no rule for {func.name()}, whose operations would not be counted"
            return func(*args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on the local tensors
        kwargs = kwargs or {}
        self.operations += 1
        of_logits = self._has([args, kwargs], LOGITS)
        out = func(*args, **kwargs)
        made = self.tensors(out) if func._opname != HOST_BUFFER else []
        foreign = set() if func is FROM_HOST else self._foreign(made, [args, kwargs])
        for tensor in made:
            category = self._category_of(tensor, [args, kwargs], of_logits)
            for storage in storages_of(tensor):
                if storage._cdata not in foreign:
                    self._entry_of(storage, category)
        self._claim_of_collective(func, args, kwargs, out)
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile what runs under the ledger, and see only what the result runs."""
        return True

    def __enter__(self) -> "Ledger":
        self._resize = torch.UntypedStorage.resize_  # not an operation, so that no dispatch mode sees it

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = self._resize(storage, size)
            if size or storage._cdata in self.entries:
                self._entry_of(storage, self.default)
            return out

        torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*details)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    storages = {storage.data_ptr(): storage.nbytes() for t in tensors for storage in storages_of(t)}
    return sum(storages.values())


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Storages that hold a tensor's bytes: none on meta, a DTensor's local shard, all parts of a wrapper."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        return list(chain.from_iterable(storages_of(getattr(tensor, name)) for name in names))
    return [tensor.untyped_storage()]
