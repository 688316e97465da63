"""FlashAttention behind CUDA's variable-length calls: the newest version here that is right for a model.

torch has version 2 built in. Version 4 (of the package flash-attn-4) and version 3 take its place in torch's
dispatcher for the whole process, and raise for what they can't do. So `choose` tries a version with the
model's head sizes and windows and the heads of a rank, against torch's attention in fp32, before it stays.
"""

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.nn.attention as torch_attention
from torch import Tensor
from torch.nn.attention._fa4 import register_flash_attention_fa4

from meshtune.attention import cuda
from meshtune.attention.arguments import Core
from meshtune.attention.core import attend
from meshtune.data.boundaries import Boundaries, boundaries_of
from meshtune.launch.installed import flash_versions
from meshtune.placement.census import Attention, takes_flash

BUILT_IN = 2  # the version in torch
CAPABILITIES = {4: (9, 10), 3: (9,)}  # major ones of NVIDIA's GPUs that newer versions have kernels for
LENGTHS = ((333, 333), (128, 128))  # queries and keys of a trial's documents: several tiles of 128, and one
APART = (70, 200)  # the same where other ranks, or another document, have the other queries
TRIED_WINDOW = 96  # longest window of a trial: the kernels take it as a number
ALLOWED = 0.02  # error over the norm: rounding to 16 bits gives some 0.005, a window off by one 0.05


@cache
def register() -> None:
    """Have torch call version 4 by our adapter."""
    adapted = partial(register_flash_attention_fa4, f"{__package__}.flash_4")
    torch_attention.register_flash_attention_impl("FA4", register_fn=adapted)


def versions_here(device: torch.device) -> list[int]:
    """Versions newer than torch's that are installed and have kernels for a GPU, the newest first."""
    register()
    return [version for version in versions_for(device) if version in flash_versions()]


def versions_for(device: torch.device) -> list[int]:
    """Versions newer than torch's that have kernels for a GPU, the newest first."""
    if device.type != "cuda" or torch.version.hip:  # AMD's GPUs have capabilities of the same numbers
        return []
    major = torch.cuda.get_device_capability(device)[0]
    return [version for version, majors in CAPABILITIES.items() if major in majors]


def choose(
    versions: Collection[int], shapes: Collection[Attention], dtype: torch.dtype, device: torch.device,
    *, apart: bool = False,
) -> tuple[int, list[str]]:  # fmt: skip
    """Put the first of `versions` behind CUDA's calls that is right for a model.

    shapes: of the model's layers, with a rank's heads. dtype: of the passes. apart: whether
    documents may have more keys than queries. Returns the version, BUILT_IN where none is right, and a
    sentence on each that was tried and not taken.
    """
    restore()
    refused = []
    for version in versions:
        problem = tried(version, shapes, dtype, device, apart)
        if not problem:
            return version, refused
        restore()
        refused.append(f"FlashAttention {version} is installed and not used: {problem}.")
    return BUILT_IN, refused


def runs(shape: Attention, dtype: torch.dtype) -> bool:
    """True if attention of a shape takes the variable-length calls on CUDA."""
    return shape.flash and bool(takes_flash(shape.qk_dim, shape.v_dim, dtype.itemsize))


def activate(name: str) -> None:
    """Put an implementation that torch knows behind its calls, without its warning that they were others'."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_attention.activate_flash_attention_impl(name)


def restore() -> None:
    """Put torch's own version back."""
    if torch_attention.current_flash_attention_impl():
        torch_attention.restore_flash_attention_impl()


@contextmanager
def built_in() -> Iterator[None]:
    """Begin the block with torch's own version, and put back after it the one that was active before."""
    active = torch_attention.current_flash_attention_impl()
    restore()
    try:
        yield
    finally:
        restore()
        if active:
            activate(active)


def tried(
    version: int, shapes: Collection[Attention], dtype: torch.dtype, device: torch.device, apart: bool
) -> str:
    """Why a version can't run a model's attention, in a clause; "": it can, and is active."""
    documents = boundaries_of([*LENGTHS, APART] if apart else LENGTHS)
    documents = documents.map(lambda tensor: tensor.to(device))
    try:
        activate(f"FA{version}")
        for shape in shapes:
            errors = errors_of(shape, documents, dtype, device)
            if wrong := [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= ALLOWED]:
                window = f", window {shape.window}" if shape.window else ""
                heads = f"{shape.query_heads} heads of {shape.qk_dim}{window}"
                return f"with {heads} it differs from attention in fp32 in {', '.join(wrong)} of the norm"
    except torch.AcceleratorError:  # of a kernel, such as an illegal access: CUDA's context is lost
        raise
    except Exception as error:  # of a compiler, an import, a kernel: whatever it is, version 2 runs
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}"
    return ""


def errors_of(
    shape: Attention, documents: Boundaries, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Errors of the active version's output and gradients for one layer's shape, as shares of the norms."""
    generator = torch.Generator(device).manual_seed(0)  # the global one stays as it was

    def drawn(tokens: Tensor, heads: int, size: int) -> Tensor:
        sizes = int(tokens[-1]), heads, size
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    size = max(shape.qk_dim, shape.v_dim)  # the other is padded
    q, grad = (drawn(documents.queries, shape.query_heads, size) for _ in range(2))
    k, v = (drawn(documents.keys, shape.key_heads, size) for _ in range(2))
    window, scale = shape.window and min(shape.window, TRIED_WINDOW), shape.qk_dim**-0.5
    longest = int(documents.longest_query), int(documents.longest_key)
    core = Core(documents.queries, documents.keys, *longest, scale, window, None)
    outputs = cuda.forward(q, k, v, core)
    found = outputs[0], *cuda.backward(grad, (q, k, v), outputs, core)
    exact = [tensor.float().requires_grad_() for tensor in (q, k, v)]
    out = attend(*exact, documents, scale, 0.0, None, window, kernel="plain")  # type: ignore[misc]
    right = out, *torch.autograd.grad(out, exact, grad.float())
    names = "output", "gradients of queries", "gradients of keys", "gradients of values"
    return {
        name: float((one.float() - other.detach()).norm() / other.detach().norm().clamp(min=1))  # 0: window 1
        for name, one, other in zip(names, found, right, strict=True)
    }
