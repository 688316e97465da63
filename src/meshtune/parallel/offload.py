"""Keep the inputs of recomputed blocks in host memory until their backward: `recompute: offload`.

    forward of block n      its input is copied to a host buffer while the block computes
    forward of block n + 1  waits for that copy; the device's memory is free
    backward of block n+1   the input of block n is copied back while the block computes
    backward of block n     waits for that copy, and runs the block again

Both copies run in order on a stream of their own, so that a buffer is used again as soon as its block's
backward is issued. Kernels and copies wait for each other by events: a tensor is let go of only once the
stream that computes has waited for its copy, and needs no record_stream. On a CPU it copies at once.

The input of a stage's last offloaded block stays on the device: its backward comes first. So does what a
stage received, which lies in a buffer of the pipeline anyway.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshtune.errors import UserError
from meshtune.placement.states import pinned_bytes
from meshtune.units import human


@torch.library.custom_op("meshtune::host_buffer", mutates_args=())
def host_buffer(like: Tensor, size: int) -> Tensor:
    """Return `size` bytes of host memory, pinned if `like` is on a GPU."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=like.is_cuda)


@host_buffer.register_fake
def _(like: Tensor, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)


# Both copy on the current stream; a trace knows them by name.
to_host = torch.library.custom_op("meshtune::to_host", _copy, mutates_args=("target",))
to_device = torch.library.custom_op("meshtune::to_device", _copy, mutates_args=("target",))
for operator in (to_host, to_device):
    operator.register_fake(lambda *_: None)


class Input:
    """The hidden states that a block got: on the device, in host memory, or on their way."""

    def __init__(self, hidden: Tensor, before: "Input | None") -> None:
        self.device: Tensor | None = hidden.detach()
        self.before = before  # of the block before, whose backward comes next; None: none
        self.host: Tensor | None = None  # a part of a buffer, shaped as the hidden states
        self.strides = hidden.stride()
        self.copied: Any = None  # event at the end of the last copy; None: on a CPU


class Saved(NamedTuple):
    """A saved tensor that is a view of a block's input, or all of it."""

    input: Input
    size: torch.Size
    strides: tuple[int, ...]


class Offload:
    """Host buffers, and the stream of their copies, of all stages of a rank. device: the rank's."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.host_bytes = 0  # of all host buffers, free ones included
        self._free: list[Tensor] = []  # buffers, the last one freed last
        self._leaving: Input | None = None  # being copied to the host
        self._latest: Input | None = None  # of the block that was called last

    def wrap(self, blocks: Sequence[nn.Module]) -> None:
        """Offload the inputs of these blocks of a stage, but the last one's. In place: call it when they
        recompute, and are compiled if they are to be.
        """
        for block in blocks:
            # A compiled call is what runs in place of the module's, and these hooks are to be outside of it.
            ends = block is blocks[0], block is blocks[-1]
            if (compiled := block._compiled_call_impl) is not None:
                block._compiled_call_impl = partial(self._call, compiled, *ends)  # type: ignore[assignment]
            else:
                block.forward = partial(self._call, block.forward, *ends)  # type: ignore[method-assign]

    def _call(self, forward: Callable[..., Any], first: bool, last: bool, *args: Any, **kwargs: Any) -> Any:
        """Call a block and offload its input, if there are gradients to come. first, last: of its stage."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Checkpoint saves tensors among positional arguments by autograd, others by reference.
        hidden, *others = args or (kwargs.pop("hidden_states"),)
        self._settle()
        block_input = Input(hidden, None if first else self._latest)
        received = hidden.is_leaf and hidden.requires_grad
        if not last and not received:
            self._send(block_input)
        self._latest = None if last else block_input
        place = _place(hidden)

        def pack(tensor: Tensor) -> Tensor | Saved:
            if _place(tensor) != place:
                return tensor
            return Saved(block_input, tensor.size(), tensor.stride())

        version = hidden._version
        with saved_tensors_hooks(pack, self._unpack):
            out = forward(hidden, *others, **kwargs)
        if hidden._version != version:  # autograd finds this for `full`, but not where hooks save
            raise RuntimeError("A block changes its input in place and can't run again; use recompute=none.")
        return out

    def _settle(self) -> None:
        """Free the memory of the input that was being copied: what the device computes next waits for it."""
        if self._leaving is not None:
            _wait(self._leaving)
            self._leaving.device = self._leaving = None

    def _send(self, block_input: Input) -> None:
        """Begin to copy an input to the host."""
        hidden = block_input.device
        assert hidden is not None
        buffer = self._buffer(hidden)
        weakref.finalize(block_input, self._free.append, buffer)  # also where no backward comes
        block_input.host = buffer[: hidden.nbytes].view(hidden.dtype).view(hidden.shape)
        with self._aside(block_input):
            to_host(hidden, block_input.host)
        self._leaving = block_input

    def _bring(self, block_input: Input) -> None:
        """Begin to copy an input back, unless the device has it, or it is on its way."""
        host = block_input.host
        if block_input.device is not None or host is None:
            return
        device = self.stream.device if self.stream else host.device
        hidden = torch.empty_strided(host.shape, block_input.strides, dtype=host.dtype, device=device)
        with self._aside(block_input):
            to_device(host, hidden)
        block_input.device, block_input.host = hidden, None

    def _unpack(self, saved: Tensor | Saved) -> Tensor:
        """Return a saved tensor to the backward; with a block's input, begin to bring the one before."""
        if isinstance(saved, Tensor):
            return saved
        block_input = saved.input
        self._bring(block_input)
        _wait(block_input)
        if block_input.before is not None:
            self._bring(block_input.before)
        hidden = block_input.device
        assert hidden is not None
        if (hidden.size(), hidden.stride()) == saved[1:]:
            return hidden
        return hidden.as_strided(saved.size, saved.strides)

    @contextmanager
    def _aside(self, block_input: Input) -> Iterator[None]:
        """Copy on the stream of copies, behind all that the device computes so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), torch.no_grad():
            yield
        block_input.copied = self.stream.record_event()

    def _buffer(self, hidden: Tensor) -> Tensor:
        """A free host buffer for hidden states, or a new one in place of a free one that is too small."""
        size = int(pinned_bytes(hidden.nbytes))
        for number, buffer in reversed(list(enumerate(self._free))):
            if buffer.nbytes >= size:
                return self._free.pop(number)
        if self._free:
            self.host_bytes -= self._free.pop().nbytes
        if self.stream and size > (left := psutil.virtual_memory().available):
            raise UserError(
                f"recompute=offload needs {human(size)} more pinned host memory than the "
                f"{human(self.host_bytes)} that this rank has, and the machine has {human(left)} left; use "
                "recompute=full, shorter sequences, or more machines."
            )
        self.host_bytes += size
        return host_buffer(hidden, size)


def _wait(block_input: Input) -> None:
    """Let what the device computes next wait for the last copy of an input."""
    if block_input.copied is not None:
        torch.cuda.current_stream().wait_event(block_input.copied)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Address, offset and number of elements of a tensor's memory."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()
