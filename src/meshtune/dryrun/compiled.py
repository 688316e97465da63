"""Compiled blocks on fakes: inductor's own partition, fusion and buffers, with nothing compiled.

    torch.compile ─> inductor's wrapper ─┬─ buffers, matmuls, attention, collectives: operations on fakes
                                         └─ fused kernels ─> `fused`, an operation that runs nothing

Fakes are of the CPU, so that inductor schedules as for a processor: each group of operations that it fuses is
one kernel, which reads and writes each of its buffers once. What autograd keeps is the same on every device.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

POINTERS = re.compile(r"\b(in_out|in|out)_ptr\d+\b")  # parameters of a kernel, in its signature


@torch.library.custom_op("meshtune_dryrun::fused", mutates_args=("written",))
def fused(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """One fused kernel, by its name in inductor's code. Only on fakes."""
    raise NotImplementedError("a stand-in for fake tensors")


@fused.register_fake
def _(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    return None


# A matmul in 8-bit floats into a buffer, for which torch has no shapes; its fakes would be multiplied.
SHAPES = torch.library.Library("aten", "IMPL", "Meta")
SHAPES.impl("_scaled_mm.out", lambda *_, out, **__: out, allow_override=True)

FUSED = torch.ops.meshtune_dryrun.fused.default  # as a dispatch mode sees it


class Kernel:
    """Stands for a kernel that inductor would compile; its arguments are those of the kernel."""

    def __init__(self, source: str) -> None:
        signature = source[source.index("kernel(") : source.index("{")]
        self.pointers = POINTERS.findall(signature)  # in, out or in_out, by argument
        self.name = ""

    def __call__(self, *arguments: Any) -> None:
        tensors = list(zip(self.pointers, (a for a in arguments if isinstance(a, Tensor)), strict=True))
        read = [tensor for pointer, tensor in tensors if pointer != "out"]
        fused(self.name, read, [tensor for pointer, tensor in tensors if pointer != "in"])


def named(_: Any, scope: dict[str, Any]) -> None:
    """Give the kernels of a wrapper the names that they have in it: `AsyncCompile.wait`."""
    for name, value in scope.items():
        if isinstance(value, Kernel):
            value.name = re.sub(r"^cpp_fused_+|_\d+$", "", name)


def one_each(codegen_node: Callable[..., Any]) -> Callable[..., Any]:
    """Write each group of operations as a kernel of its own, where those for a processor are one function."""

    def write(scheduling: Any, node: Any) -> None:
        codegen_node(scheduling, node)
        scheduling.flush()

    return write


@contextmanager
def compiled_on_fakes(kernels: str) -> Iterator[None]:
    """Let torch.compile's functions run on fakes, kernels as `fused`.

    kernels: "cuda" where sums with a matmul's result are fused with what reads them, as on GPUs; on
    processors they are part of the matmul.
    """
    import torch._inductor.config as config
    import torch._inductor.fx_passes.post_grad as post_grad
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.cpp import CppScheduling

    # A forked process has what its parent compiled; after a few graphs of a function no more are made, and it
    # would be traced as if it were not compiled.
    torch.compiler.reset()
    guards: Any = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (AsyncCompile, "cpp_pybinding", lambda _, types, source: Kernel(source)),
            (AsyncCompile, "wait", named),
            (post_grad, "is_gpu", lambda device_type: kernels == "cuda"),
            (CppScheduling, "codegen_node", one_each(CppScheduling.codegen_node)),
            # The wrapper's own functions in C++ make tensors that no mode sees
            (
                guards, "_empty_strided_cpu",
                lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
            ),
            (guards, "_reinterpret_tensor", Tensor.as_strided),
            (guards, "assert_size_stride", lambda *_: None),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1))
        yield
