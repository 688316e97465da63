"""Inputs of recomputed blocks in host memory: the numbers of `full`, less memory, each copy in its place."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import cases
from families import FAMILIES
from golden import refuses
from graphs import Graphs
from tiny import positions_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from meshtune.attention.register import register
from meshtune.data.boundaries import row_boundaries
from meshtune.errors import UserError
from meshtune.model.anatomy import anatomy
from meshtune.optim import optimizer
from meshtune.parallel.offload import Offload
from meshtune.parallel.recompute import recompute_blocks

register()

BLOCKS, HIDDEN, DOCUMENTS = 4, 64, ((13, 5, 20), (40,), (9, 17))
SHORT = {  # names of operations in a log
    "meshtune.to_host.default": "out", "meshtune.to_device.default": "in",
    "meshtune.attention.default": "forward", "meshtune.attention_backward.default": "backward",
    "aten._fused_adamw_.default": "update",
}  # fmt: skip


class Log(TorchDispatchMode):
    """Notes the operations of SHORT in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := str(func)) in SHORT:
            self.names.append(SHORT[name])
        return func(*args, **(kwargs or {}))


def build(family: str, blocks: int | None = None, backend: Any = None, *, offload: bool = True) -> Any:
    """(A model whose first `blocks` blocks recompute, None: all; its Offload). backend: of the compiler."""
    torch.manual_seed(1)
    config = FAMILIES[family](num_hidden_layers=BLOCKS)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="meshtune").train()
    parts, host = anatomy(model), Offload(torch.device("cpu"))
    recompute_blocks(model, parts, "full", None if blocks is None else range(blocks))
    every: list[Any] = list(model.get_submodule(parts.blocks).children())
    for block in every if backend else ():
        block._compiled_call_impl = torch.compile(block._call_impl, backend=backend)
    if offload:
        host.wrap(every[:blocks])
    return model, host


def forward(model: Any, width: int = 40) -> torch.Tensor:
    ids = torch.randint(3, 256, (len(DOCUMENTS), width), generator=torch.Generator().manual_seed(7))
    positions, documents = positions_of(DOCUMENTS, width), row_boundaries(DOCUMENTS, width)
    given = {"input_ids": ids, "position_ids": positions, "documents": documents, "use_cache": False}
    return model.base_model(**given).last_hidden_state


def gradients(model: Any) -> list[torch.Tensor]:
    forward(model).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", cases(["llama", "gpt2"], test=1))
def test_gradients_are_those_of_full_and_all_inputs_but_the_last_come_back(
    family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[int] = []
    monkeypatch.setattr(Offload, "_bring", noting(Offload._bring, brought))
    model, host = build(family, backend=Graphs() if compiled else None)
    found, expected = gradients(model), gradients(build(family, offload=False)[0])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert host.host_bytes == (BLOCKS - 1) * 32768  # of 30,720 each: torch's pinned buffers are powers of two
    assert len(brought) == BLOCKS - 1


def noting(bring: Any, brought: list[int]) -> Any:
    def noted(self: Offload, block_input: Any) -> None:
        if block_input.device is None:
            brought.append(id(block_input))
        bring(self, block_input)

    return noted


@pytest.mark.parametrize("blocks", [None, 3])
def test_each_input_comes_back_one_block_ahead(blocks: int | None) -> None:
    model, _ = build("llama", blocks)
    with Log() as log:
        loss = forward(model).square().sum()
    number, kept = blocks or BLOCKS, BLOCKS - (blocks or BLOCKS)
    assert log.names == ["out", "forward"] * (number - 1) + ["forward"] * (kept + 1)
    with Log() as log:
        loss.backward()
    again = ["forward", "backward"]
    assert log.names == ["backward"] * kept + ["in", *again] * (number - 1) + again
    with torch.no_grad(), Log() as log:
        forward(model)
    assert log.names == ["forward"] * BLOCKS


def test_the_device_keeps_one_input_of_a_forward() -> None:
    """Without the host's buffers less is alive after it, by the inputs that have left."""
    kept = []
    for offload in (False, True):
        model, host = build("llama", offload=offload)
        with Alive() as alive:
            loss = forward(model).square().sum()
        kept.append(alive.bytes - host.host_bytes)
        del loss
    assert kept[0] - kept[1] == (BLOCKS - 1) * len(DOCUMENTS) * 40 * HIDDEN * 4


class Alive(TorchDispatchMode):
    """Holds weak references to what operations made."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: Any = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tensors((args, kwargs))}
        for tensor in tensors(out):
            if (storage := tensor.untyped_storage())._cdata not in given:
                self.storages[storage] = storage.nbytes()
        return out

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())


def tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def test_buffers_are_used_again_and_grow_with_the_sequence() -> None:
    model, host = build("llama")
    for width, size in ((40, 32768), (40, 32768), (100, 131072), (40, 131072)):
        forward(model, width).square().sum().backward()
        assert host.host_bytes == (BLOCKS - 1) * size
    one, other = forward(model), forward(model)  # two micro-batches in flight
    assert host.host_bytes == (BLOCKS - 1) * (131072 + 32768)
    del other  # its backward never comes
    one.sum().backward()
    gradients(model)
    assert host.host_bytes == (BLOCKS - 1) * (131072 + 32768) and len(host._free) == 2 * (BLOCKS - 1)


class Stream:
    """A stream of CUDA that writes down what waits for what."""

    device = torch.device("cpu")

    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: "Stream") -> None:
        self.log.names.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> int:
        self.events += 1
        return self.events

    def wait_event(self, event: int) -> None:
        self.log.names.append(f"{self.name} waits for copy {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """The log of a device that computes on the stream "compute"."""
    log = Log()
    compute = Stream("compute", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream.name != "compute"))
    return log


def test_copies_and_computation_wait_for_each_other(log: Log) -> None:
    """A copy waits for what was computed before it, and the next block for the copy, to free its source."""
    model, host = build("llama", 3)
    host.stream = Stream("copies", log)
    with log:
        forward(model).square().sum().backward()
    again = ["forward", "backward"]
    out, back = (["copies waits for compute", name] for name in ("out", "in"))
    done = [[f"compute waits for copy {number}"] for number in range(1, 5)]
    leave = [*out, "forward", *done[0], *out, "forward", *done[1], "forward"]
    come = [*back, *again, *done[2], *back, *again, *done[3], *again]
    assert log.names == [*leave, *again, *come]  # the fourth block keeps all that it needs


def test_states_come_while_the_bucket_before_is_updated(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two buckets are on the device: a third comes once the first's are on the host."""
    monkeypatch.setattr(optimizer, "BUCKET_ELEMENTS", 1)
    named = [(str(number), nn.Parameter(torch.ones(2, 2))) for number in range(3)]
    for _, parameter in named:
        parameter.grad = torch.ones(2, 2)
    chosen = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "offload": torch.device("cpu")}
    updates = optimizer.Optimizer(named, **chosen)
    assert updates.host is not None
    streams: list[Any] = [Stream("there", log), Stream("back", log)]
    updates.host.streams = streams
    with log:
        updates.step(1e-3)
    bring, give = ["there waits for compute", *2 * ["in"]], ["back waits for compute", *2 * ["out"]]
    done = [[f"compute waits for copy {number}"] for number in range(1, 4)]
    first = [*bring, *done[0], *bring, "update", *give]
    second = [*done[1], *done[0], *bring, "update", *give]  # the first one's memory is free for the third's
    assert log.names == [*first, *second, *done[2], "update", *give, *done[1], *done[2]]


def test_what_would_be_wrong_or_killed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that changes its input, which autograd refuses under `full`; more memory than is left."""
    model, _ = build("llama")
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_pre_hook(lambda _, given: given[0].add_(1))
    with refuses(RuntimeError):
        forward(model)
    model, host = build("llama")
    host.stream = Stream("copies", Log())
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=30_000))
    with refuses(UserError):
        forward(model)
